"""The entry point `vllm.general_plugins`: registers the resolver where the environment asks for it.

vLLM calls `register` in each of its processes, also for users who only happen to have adapterswap installed: so it
imports nothing before it knows that it is wanted. `adapterswap serve` sets the environment; anyone else who starts vLLM
may do the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapterswap.serving.composer import NamedComposer

__all__ = ["BASE_MODEL", "CACHE", "EXPERTS", "MAX_LORA_RANK", "NAME", "register", "unloaded"]

NAME = "adapterswap"  # the plugin's, as VLLM_PLUGINS names it, and the resolver's
BASE_MODEL = "ADAPTERSWAP_BASE_MODEL"  # as adapterswap names it, with a revision; what vLLM has as --model if unset
EXPERTS = "ADAPTERSWAP_EXPERTS"  # a folder of adapter folders, or experts.yaml
CACHE = "ADAPTERSWAP_CACHE"  # the folder for compositions; default_cache() if unset
MAX_LORA_RANK = "ADAPTERSWAP_MAX_LORA_RANK"  # what vLLM was given as --max-lora-rank
_VLLM_DEFAULT_RANK = 16

_composer: NamedComposer | None = None  # of this process


def register() -> None:
    """Register the resolver, once per process, if ADAPTERSWAP_EXPERTS is set."""
    if not os.environ.get(EXPERTS):
        return
    from vllm.lora.resolver import LoRAResolverRegistry

    from adapterswap.serving.readiness import record_failures

    record_failures()
    if NAME in LoRAResolverRegistry.get_supported_resolvers():
        return
    from adapterswap.serving.resolver import CompositionResolver

    LoRAResolverRegistry.register_resolver(NAME, CompositionResolver(_start))


def _start(base_model: str) -> NamedComposer:
    """The composer that the environment describes."""
    from adapterswap.serving import Cache, NamedComposer, read_manifest
    from adapterswap.serving.cache import default_cache

    manifest = read_manifest(Path(os.environ[EXPERTS]))
    cache = Cache(os.environ.get(CACHE) or default_cache())
    cache.hold()
    rank = int(os.environ.get(MAX_LORA_RANK) or _VLLM_DEFAULT_RANK)
    global _composer
    _composer = NamedComposer(manifest, os.environ.get(BASE_MODEL) or base_model, cache, rank)
    return _composer


def unloaded(name: str) -> None:
    """Tell the composer that a name was unloaded: vLLM does not tell resolvers."""
    if _composer is not None:
        _composer.release(name)
