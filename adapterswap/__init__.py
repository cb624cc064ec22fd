"""adapterswap: compose LoRA adapters by layer.

The public names are imported when they are first used, so that `import adapterswap` costs nothing and composing never
imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterswap.errors import AdapterswapError as AdapterswapError
    from adapterswap.experts.adapters import Adapter as Adapter
    from adapterswap.experts.adapters import open_adapter as open_adapter
    from adapterswap.experts.checkpoints import Checkpoint as Checkpoint
    from adapterswap.experts.checkpoints import open_checkpoint as open_checkpoint
    from adapterswap.experts.opening import open_expert as open_expert
    from adapterswap.extracting import extract as extract
    from adapterswap.live import LiveComposer as LiveComposer
    from adapterswap.merging import merge as merge
    from adapterswap.planning.allocation import Rule as Rule
    from adapterswap.planning.composing import compose as compose
    from adapterswap.planning.composing import layer_swap as layer_swap
    from adapterswap.planning.composing import soup as soup
    from adapterswap.planning.composing import task_arithmetic as task_arithmetic
    from adapterswap.planning.compositions import Composition as Composition
    from adapterswap.planning.making import make_plan as make_plan
    from adapterswap.planning.plan import Plan as Plan
    from adapterswap.planning.short_names import parse_composition as parse_composition
    from adapterswap.writing import write_adapter as write_adapter

__version__ = "0.1.0"

_HOME = {
    "Adapter": "experts.adapters",
    "AdapterswapError": "errors",
    "Checkpoint": "experts.checkpoints",
    "Composition": "planning.compositions",
    "LiveComposer": "live",
    "Plan": "planning.plan",
    "Rule": "planning.allocation",
    "compose": "planning.composing",
    "extract": "extracting",
    "layer_swap": "planning.composing",
    "make_plan": "planning.making",
    "merge": "merging",
    "open_adapter": "experts.adapters",
    "open_checkpoint": "experts.checkpoints",
    "open_expert": "experts.opening",
    "parse_composition": "planning.short_names",
    "soup": "planning.composing",
    "task_arithmetic": "planning.composing",
    "write_adapter": "writing",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
