"""Serve compositions by name: a request for the model `math+swahili` is answered by that composition.

A composition is written on first use, as an adapter folder in a cache, and passed to vLLM, which loads adapters by name
and path. Everything is checked before vLLM loads anything. Most modules run without vLLM installed. The names below are
imported when they are first used, because vLLM imports `plugin` in each of its processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterswap.engines.serving.cache import Cache as Cache
    from adapterswap.engines.serving.composer import NamedComposer as NamedComposer
    from adapterswap.engines.serving.names import Manifest as Manifest
    from adapterswap.engines.serving.names import UnknownNameError as UnknownNameError

_HOME = {
    "Cache": "cache",
    "Manifest": "names",
    "NamedComposer": "composer",
    "UnknownNameError": "names",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
