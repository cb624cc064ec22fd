"""The entry point `vllm.general_plugins`: registers the resolver if the environment asks for it.

vLLM calls `register` in each of its processes, even if adapterswap is merely installed, so nothing is imported before
the environment is checked. `adapterswap serve` sets these variables; you can set them yourself to start vLLM another
way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapterswap.engines.serving.composer import NamedComposer
    from adapterswap.engines.serving.names import Manifest


NAME = "adapterswap"  # the plugin's, as VLLM_PLUGINS names it, and the resolver's
BASE_MODEL = "ADAPTERSWAP_BASE_MODEL"  # with a revision, as in adapterswap; vLLM's --model if unset
EXPERTS = "ADAPTERSWAP_EXPERTS"  # a folder of adapter folders, or experts.yaml
CACHE = "ADAPTERSWAP_CACHE"  # the folder for compositions; default_cache() if unset
MAX_LORA_RANK = "ADAPTERSWAP_MAX_LORA_RANK"  # the value of vLLM's --max-lora-rank
_VLLM_DEFAULT_RANK = 16

_composer: NamedComposer | None = None  # of this process
_manifest: Manifest | None = None  # of this process


def register() -> None:
    """Register the resolver, once per process, if ADAPTERSWAP_EXPERTS is set."""
    if not os.environ.get(EXPERTS):
        return
    from vllm.lora.resolver import LoRAResolverRegistry

    from adapterswap.engines.serving.readiness import record_failures

    record_failures()
    if NAME in LoRAResolverRegistry.get_supported_resolvers():
        return
    from adapterswap.engines.serving.resolver import CompositionResolver

    LoRAResolverRegistry.register_resolver(NAME, CompositionResolver(_start))


def _start(base_model: str) -> NamedComposer:
    """The composer that the environment describes."""
    from adapterswap.engines.serving import Cache, NamedComposer

    cache = Cache(os.environ.get(CACHE) or Cache.default())
    cache.hold()
    rank = int(os.environ.get(MAX_LORA_RANK) or _VLLM_DEFAULT_RANK)
    global _composer
    _composer = NamedComposer(_read_manifest(), os.environ.get(BASE_MODEL) or base_model, cache, rank)
    return _composer


def offered() -> tuple[str, ...]:
    """The names to list: those in `allow` or, without it, the experts; none if EXPERTS is not set."""
    return _read_manifest().names if os.environ.get(EXPERTS) else ()


def gauges() -> dict[str, float]:
    """What the cache holds, for `/metrics`."""
    from adapterswap.engines.serving import Cache
    from adapterswap.engines.serving.metrics import folder_sizes

    count, size = folder_sizes(Cache(os.environ.get(CACHE) or Cache.default()).entries)
    return {"adapterswap_compositions_cached": count, "adapterswap_cache_bytes": size}


def _read_manifest() -> Manifest:
    """The manifest that the environment names, as it was when this process first read it."""
    from adapterswap.engines.serving import Manifest

    global _manifest
    if _manifest is None:
        _manifest = Manifest.read(Path(os.environ[EXPERTS]))
    return _manifest


def unloaded(name: str) -> None:
    """Notify the composer that a name was unloaded, because vLLM does not notify resolvers."""
    if _composer is not None:
        _composer.release(name)
