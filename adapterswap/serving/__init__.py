"""Compositions served by name: a request for the model `math+swahili` is answered by that composition.

The composition is made on first use, as an adapter folder in a cache, and handed to vLLM, which knows adapters by name
and path. Everything is checked before vLLM loads anything. Only `resolver` and `plugin` know vLLM; the rest runs
without it.
"""

from __future__ import annotations

from adapterswap.serving.cache import Cache
from adapterswap.serving.composer import NamedComposer
from adapterswap.serving.manifest import Manifest, read_manifest
from adapterswap.serving.names import UnknownNameError

__all__ = ["Cache", "Manifest", "NamedComposer", "UnknownNameError", "read_manifest"]
