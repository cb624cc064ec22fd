"""Serve with llama.cpp: plan, start and stop the two servers, llama.cpp's and the proxy in front of it.

llama.cpp listens on a separate local port, and clients reach only the proxy. If llama.cpp ends, it is started again, a
few times; then the proxy ends too.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from adapterswap.core.model.sources import Source
from adapterswap.engines.gguf.header import read_gguf
from adapterswap.engines.serving.llama_engine import (
    KEY,
    Engine,
    engine_command,
    find_program,
    free_cores,
    free_port,
    running,
)
from adapterswap.engines.serving.pieces import PieceComposer
from adapterswap.engines.serving.reserved import Reserved, check_reserved, option_of
from adapterswap.kit.errors import ArgumentError, BaseModelError, NotFoundError, OutputError, RunError, reason_of
from adapterswap.kit.files.text import expand, read_small

_RESERVED = (
    Reserved("-m", "`gguf` names the base"),
    Reserved("--model", "`gguf` names the base"),
    Reserved("-a", "the base is served under its own name"),
    Reserved("--alias", "the base is served under its own name"),
    Reserved("--lora", "`experts` names the adapters"),
    Reserved("--lora-scaled", "`experts` names the adapters"),
    Reserved("--lora-init-without-apply", "a request without scales would use every adapter"),
    Reserved(
        "--api-key",
        "other users of this machine could read it",
        f"Set {KEY} in the environment instead, or pass --api-key-file",
    ),
    Reserved("--api-prefix", "clients reach it only through adapterswap"),
    Reserved("--ssl-key-file", "adapterswap speaks plain HTTP"),
    Reserved("--ssl-cert-file", "adapterswap speaks plain HTTP"),
)
_PROXYS = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
_PROXYS.add_argument("--host", default="127.0.0.1")
_PROXYS.add_argument("--port", default=8080, type=int)
_PROXYS.add_argument("--api-key-file")
_END_S = 5  # for answers to end after SIGTERM
_MOST_RESTARTS, _WITHIN_S = 3, 600.0  # of llama.cpp in this time: a request that ends it may be sent again and again


@dataclass(frozen=True)
class LlamaLaunch:
    """What to run.

    Attributes:
        command: the command line of llama.cpp's server.
        engine_port: the local port on which it listens.
        host, port: where the proxy listens.
        base_name: the name of the base itself in requests.
        keys: clients must send one of them; none if everybody is answered.
        max_bytes: of a request.
        remark: what to know about the answers of this base; see `rounding_of`.
    """

    command: tuple[str, ...]
    engine_port: int
    host: str
    port: int
    base_name: str
    keys: tuple[str, ...] = field(repr=False)
    max_bytes: int
    remark: str | None = None

    @property
    def url(self) -> str:
        host = self.host
        if ":" in host:  # an address of IPv6
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    @property
    def key_header(self) -> str:
        """curl's option that sends a key; empty if everybody is answered."""
        if not self.keys:
            return ""
        return f' -H "Authorization: Bearer ${KEY}"'

    def serve(self, composer: PieceComposer) -> None:
        """Run both servers until this process receives SIGTERM or SIGINT, or llama.cpp ends too often."""
        before = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, signal.default_int_handler)
        try:
            # Take the port before the base is loaded, and accept clients only afterwards.
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            with socket.socket(family) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with _reported(self):
                    listener.bind((self.host, self.port))
                composer.write()
                with running(self.command, self.engine_port) as engine:
                    with _reported(self):
                        listener.listen()
                    print(f"adapterswap: ready at {self.url} (two tokens were decoded)", file=sys.stderr, flush=True)
                    _answer(self, composer, engine, listener)
        except KeyboardInterrupt:
            pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    def find_base(gguf: str | Path) -> Path:
        """The base's file; an error if there is none, which costs nothing to find out."""
        path = expand(gguf)
        if not path.is_file():
            raise NotFoundError(
                f"{path} is not a file",
                "Pass the base as llama.cpp's convert_hf_to_gguf.py writes it",
                parameter="gguf",
            )
        return path

    @staticmethod
    def check_reserved(arguments: Sequence[str]) -> None:
        """Raise an `ArgumentError` for an argument that adapterswap decides."""
        check_reserved(arguments, _RESERVED, engine="llama.cpp", parameter="arguments")

    @staticmethod
    def plan(
        composer: PieceComposer,
        gguf: str | Path,
        arguments: Sequence[str],
        llama_server: str | None = None,
        max_request_mb: int = 1,
    ) -> LlamaLaunch:
        """The launch of llama.cpp for a composer's base and experts.

        Args:
            gguf: the base as llama.cpp's own converter writes it, in any number format.
            arguments: the user's own arguments for llama-server. `--host`, `--port` and `--api-key-file` are those of
                the proxy. The variable LLAMA_API_KEY has more keys, with commas between them.
            llama_server: the program; by default the one on the PATH, or the one in the package xllamacpp.
            max_request_mb: the size of the largest request that is read.
        """
        LlamaLaunch.check_reserved(arguments)
        try:
            own, rest = _PROXYS.parse_known_args([_with_dashes(argument) for argument in arguments])
        except argparse.ArgumentError as error:
            raise ArgumentError(str(error), "Correct it", parameter="arguments") from None
        if not 0 < own.port < 2**16:
            raise ArgumentError(f"--port {own.port} is not valid", "Pass a port from 1 to 65535", parameter="arguments")

        # The base
        path = LlamaLaunch.find_base(gguf)
        check_base_file(path, composer.architecture, composer.num_layers)
        base_name = Source.of_base(composer.base_model).name
        if base_name in composer.manifest.experts:
            raise ArgumentError(
                f"{base_name!r} is the name of both an expert and the base", "Rename the expert", parameter="experts"
            )

        # Its server, behind this process
        inner = free_port()
        if not {"-t", "--threads"} & set(map(option_of, rest)):
            rest = [*_threads(), *rest]
        command = engine_command(
            find_program(llama_server),
            str(path),
            [str(piece.path) for piece in composer.pieces],
            base_name,
            inner,
            rest,
        )
        keys = _keys(own.api_key_file)
        return LlamaLaunch(
            tuple(command), inner, own.host, own.port, base_name, keys, max_request_mb * 10**6, rounding_of(path)
        )


def _with_dashes(argument: str) -> str:
    """An argument with its option's name as the proxy's parser knows it: llama.cpp reads underscores there as dashes.

    Otherwise `--api_key_file` would reach llama.cpp alone, and the proxy in front of it would answer everybody.
    """
    option = option_of(argument)
    return option + argument[len(option) :]


def _threads() -> tuple[str, ...]:
    """llama.cpp's option for as many threads as cores are free; () where the system does not say.

    Its threads wait for each other actively, so one that shares its core with another program delays all of them.
    """
    cores = free_cores()
    if cores is None:
        return ()
    return "--threads", str(cores)


def _keys(file: str | None) -> tuple[str, ...]:
    """The keys in the environment, and those in a file, one per line, as llama-server reads them."""
    keys = [key for key in os.environ.get(KEY, "").split(",") if key]
    if file is not None:
        content = read_small(expand(file), "Write one key per line", kind=ArgumentError)
        in_file = [line for line in content.decode(errors="replace").splitlines() if line]
        if not in_file:
            raise ArgumentError(f"{file} contains no key", "Write one key per line", parameter="arguments")
        keys += in_file
    return tuple(keys)


def check_base_file(path: Path, architecture: str, num_layers: int) -> None:
    """Raise unless a GGUF file is complete and has this architecture and depth."""
    remedy = "Convert the base again with llama.cpp's convert_hf_to_gguf.py"
    try:
        fields = read_gguf(path).fields
        actual = str(fields["general.architecture"].contents())
        layers = int(fields[f"{actual}.block_count"].contents())
    except (ValueError, KeyError, IndexError, OSError, TypeError, OverflowError) as error:
        raise BaseModelError(
            f"{path} is not a complete GGUF file of a model: {reason_of(error)}", remedy, parameter="gguf"
        ) from None

    if (actual, layers) != (architecture, num_layers):
        raise BaseModelError(
            f"{path} is a {actual} model of {layers} layers, and the experts are for a {architecture} of {num_layers}",
            "Pass the experts' base, or experts of this base",
            parameter="gguf",
        )


_EXACT_TYPES = {"F32", "F16", "BF16"}


def rounding_of(gguf: str | Path) -> str | None:
    """What to know about the answers of a base whose weights are quantized; None if they are not."""
    sizes: dict[str, int] = {}
    for tensor in read_gguf(expand(gguf)).tensors:
        kind = tensor.tensor_type.name
        sizes[kind] = sizes.get(kind, 0) + int(tensor.n_elements)
    largest = max(sizes, key=sizes.__getitem__, default="F32")
    if largest in _EXACT_TYPES:
        return None
    return (
        f"{Path(gguf).name} has weights of the type {largest}, for which llama.cpp rounds activations to 8 bits: "
        "answers differ from those of the same weights in transformers. To compare, use a file in F16 or F32"
    )


def _answer(launch: LlamaLaunch, composer: PieceComposer, engine: Engine, listener: socket.socket) -> None:
    """Answer clients until a signal or the last end of llama.cpp, and then those that wait, for a few seconds."""
    import uvicorn
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from adapterswap.engines.serving.llama_proxy import Connection, Proxy, most_at_once
    from adapterswap.engines.serving.metrics import Measured, folder_sizes

    # If it answers this machine alone, then under its names alone, so that no web page reaches it by one of its own
    hosts = ["*"]
    if ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        hosts = ["localhost", "127.0.0.1", "[::1]", launch.host]
    proxy = Proxy(composer, engine, launch.base_name, launch.keys, hosts, launch.max_bytes)

    def gauges() -> dict[str, float]:
        _, size = folder_sizes(composer.cache.entries)
        return {"adapterswap_compositions_cached": composer.remembered, "adapterswap_cache_bytes": size}

    measured = Measured(proxy, gauges, engine=lambda: engine.process, keys=launch.keys)
    guarded = TrustedHostMiddleware(measured, allowed_hosts=list(hosts), www_redirect=False)  # also of the metrics
    keeper = _Keeper(engine)

    async def watch() -> None:
        if not server.should_exit:
            server.should_exit = not keeper.keep_running()

    server = uvicorn.Server(
        uvicorn.Config(
            guarded, http=Connection, ws="none", lifespan="off", log_config=None, log_level="error",
            access_log=False, proxy_headers=False, server_header=False, timeout_graceful_shutdown=_END_S,
            callback_notify=watch, timeout_notify=0, backlog=most_at_once(),
        )
    )  # fmt: skip
    server.run(sockets=[listener])
    if keeper.gave_up:
        raise RunError(
            f"llama.cpp ended with status {engine.process.returncode}, for the {len(keeper.ends)}. time",
            "See its messages above for the reason, and start again",
        )


class _Keeper:
    """Starts llama.cpp again if it has ended, until it has ended too often.

    Attributes:
        ends: when it ended, in seconds of a clock; only the latest.
        gave_up: whether it ended once too often.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ends: list[float] = []
        self.gave_up = False

    def keep_running(self) -> bool:
        """Start llama.cpp again if it has ended, and return whether it runs."""
        if self._engine.process.poll() is None:
            return True

        now = time.monotonic()
        self.ends = [end for end in self.ends if now - end < _WITHIN_S]
        self.ends.append(now)
        self.gave_up = self._engine.stopped or len(self.ends) > _MOST_RESTARTS
        if self.gave_up:
            return False

        status = self._engine.process.returncode
        print(f"adapterswap: llama.cpp ended with status {status}, and is started again", file=sys.stderr, flush=True)
        self._engine.launch()
        return True


@contextmanager
def _reported(launch: LlamaLaunch) -> Iterator[None]:
    """Report an address that cannot be listened on as an error of the arguments."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"Cannot listen on {launch.host}:{launch.port}: {reason_of(error)}",
            "Choose another --port",
            parameter="arguments",
        ) from None
