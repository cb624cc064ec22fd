"""Serve with llama.cpp: plan, start and stop the two servers, llama.cpp's and the proxy in front of it.

llama.cpp listens on a separate local port, and clients reach only the proxy. If llama.cpp ends, the proxy ends too.
Knows options and processes, but not names and scales.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from adapterswap.errors import ArgumentError, BaseModelError, NotFoundError, OutputError, RunError, reason_of
from adapterswap.experts.sources import find_source
from adapterswap.files.smallfiles import expand
from adapterswap.serving.launch import value_of
from adapterswap.serving.llama_engine import engine_command, find_program, free_port, running
from adapterswap.serving.llama_proxy import Proxy
from adapterswap.serving.pieces import PieceComposer
from adapterswap.writing.gguf_architectures import load_gguf

__all__ = ["LlamaLaunch", "check_base_file", "plan_llama", "serve_llama"]

_OURS = {
    "-m": "`gguf` names the base", "--model": "`gguf` names the base", "-a": "the base is served under its own name",
    "--alias": "the base is served under its own name", "--lora": "`experts` names the adapters",
    "--lora-scaled": "`experts` names the adapters",
    "--lora-init-without-apply": "a request without scales would use every adapter",
}  # fmt: skip


@dataclass(frozen=True)
class LlamaLaunch:
    """What to run.

    Attributes:
        command: the command line of llama.cpp's server.
        engine_port: the local port on which it listens.
        host, port: where the proxy listens.
        base_name: the name of the base itself in requests.
        api_key: the key that llama.cpp requires of clients; None for none.
    """

    command: tuple[str, ...]
    engine_port: int
    host: str
    port: int
    base_name: str
    api_key: str | None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def plan_llama(
    composer: PieceComposer, gguf: str | Path, arguments: Sequence[str], llama_server: str | None = None
) -> LlamaLaunch:
    """The launch of llama.cpp for a composer's base and experts.

    Args:
        composer: with the base, the manifest and the pieces.
        gguf: the base as llama.cpp's own converter writes it, in any number format.
        arguments: the user's own arguments for llama-server. `--host` and `--port` are those of the proxy.
        llama_server: the program; by default the one on the PATH, or the one in the package xllamacpp.

    Raises:
        NotFoundError, BaseModelError: see `check_base_file`.
        ArgumentError: an argument conflicts with the set-up, or the port is not valid.
        DependencyError: the program is not installed.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in _OURS:
            raise ArgumentError(
                f"{argument} cannot be passed to llama.cpp here: {_OURS[name]}", "Leave it out", parameter="arguments"
            )
    port = value_of("--port", arguments) or "8080"
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ArgumentError(f"--port {port} is not valid", "Pass a port from 1 to 65535", parameter="arguments")
    host = value_of("--host", arguments) or "127.0.0.1"
    path = expand(gguf)
    check_base_file(path, composer.architecture, composer.num_layers)
    base_name = find_source(composer.base_model, ["config.json"], what="base model").name
    if base_name in composer.manifest.experts:
        raise ArgumentError(
            f"{base_name!r} is the name of both an expert and the base", "Rename the expert", parameter="experts"
        )
    inner = free_port()
    command = engine_command(
        find_program(llama_server), str(path), [str(piece.path) for piece in composer.pieces], base_name, inner,
        _without(("--host", "--port"), arguments),
    )  # fmt: skip
    return LlamaLaunch(tuple(command), inner, host, int(port), base_name, value_of("--api-key", arguments))


def check_base_file(path: Path, architecture: str, num_layers: int) -> None:
    """Raise unless a GGUF file is complete and has this architecture and depth.

    Raises:
        NotFoundError: the file does not exist.
        BaseModelError: it is not a GGUF file, is truncated, or is another model.
    """
    if not path.is_file():
        raise NotFoundError(
            f"{path} is not a file", "Pass the base as llama.cpp's convert_hf_to_gguf.py writes it", parameter="gguf"
        )
    remedy = "Convert the base again with llama.cpp's convert_hf_to_gguf.py"
    try:
        fields = load_gguf().GGUFReader(path).fields
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


def serve_llama(launch: LlamaLaunch, composer: PieceComposer) -> None:
    """Run both servers until this process receives SIGTERM or SIGINT, or llama.cpp ends.

    Raises:
        RunError: llama.cpp cannot load or run the base with the experts, or has ended.
        OutputError: the cache cannot be written, or another program listens on the port.
    """
    composer.write()
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    before: dict[int, Any] = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    headers = {"Authorization": f"Bearer {launch.api_key}"} if launch.api_key else {}
    try:
        with running(launch.command, launch.engine_port, headers, stop) as engine:
            if stop.is_set():
                return
            try:
                proxy = Proxy((launch.host, launch.port), composer, engine, launch.base_name)
            except OSError as error:
                raise OutputError(
                    f"cannot listen on {launch.host}:{launch.port}: {reason_of(error)}",
                    "Choose another --port",
                    parameter="arguments",
                ) from None
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            print(f"adapterswap: ready at {launch.url} (two tokens were decoded)", file=sys.stderr, flush=True)
            while not stop.wait(0.2):
                if (status := engine.process.poll()) is not None:
                    raise RunError(
                        f"llama.cpp ended with status {status}",
                        "See its messages above for the reason, and start again",
                    )
            proxy.shutdown()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _without(options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The arguments without these options and their values."""
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in options:
            skip = True
        elif argument.partition("=")[0] not in options:
            remaining.append(argument)
    return remaining
