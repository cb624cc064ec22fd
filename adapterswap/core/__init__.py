"""The core's door: what experiments and the command line use of it. What is not listed here may change at any time.

Names are imported on first use, so that this module costs nothing and composing never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterswap.core.experts.adapter import Adapter as Adapter
    from adapterswap.core.experts.adapter import open_adapter as open_adapter
    from adapterswap.core.experts.adapter import open_expert as open_expert
    from adapterswap.core.methods.method import Method as Method
    from adapterswap.core.methods.method import Parameter as Parameter
    from adapterswap.core.methods.registry import find_method as find_method
    from adapterswap.core.methods.registry import words_of as words_of
    from adapterswap.core.model.base import Base as Base
    from adapterswap.core.model.checkpoints import Checkpoint as Checkpoint
    from adapterswap.core.model.checkpoints import StoredTensor as StoredTensor
    from adapterswap.core.model.checkpoints import open_checkpoint as open_checkpoint
    from adapterswap.core.model.layers import Depth as Depth
    from adapterswap.core.model.layers import Kind as Kind
    from adapterswap.core.model.layers import ModelConfig as ModelConfig
    from adapterswap.core.model.layers import check_one_list as check_one_list
    from adapterswap.core.model.layers import format_layers as format_layers
    from adapterswap.core.model.layers import parse_layers as parse_layers
    from adapterswap.core.model.opened_base import OpenedBase as OpenedBase
    from adapterswap.core.model.opened_base import choose_device as choose_device
    from adapterswap.core.planning.alignment import aligned as aligned
    from adapterswap.core.planning.base import check_base_weights as check_base_weights
    from adapterswap.core.planning.checks import check_names as check_names
    from adapterswap.core.planning.composition import ZONES as ZONES
    from adapterswap.core.planning.composition import Composition as Composition
    from adapterswap.core.planning.composition import Partition as Partition
    from adapterswap.core.planning.describe import error_text as error_text
    from adapterswap.core.planning.functions import compose as compose
    from adapterswap.core.planning.functions import layer_swap as layer_swap
    from adapterswap.core.planning.functions import slice_layers as slice_layers
    from adapterswap.core.planning.functions import soup as soup
    from adapterswap.core.planning.functions import task_arithmetic as task_arithmetic
    from adapterswap.core.planning.names import ExpertName as ExpertName
    from adapterswap.core.planning.plan import Plan as Plan
    from adapterswap.core.planning.planner import make_plan as make_plan
    from adapterswap.core.planning.rules import BASE as BASE
    from adapterswap.core.planning.rules import Rule as Rule
    from adapterswap.core.planning.targets import Target as Target
    from adapterswap.core.writing.adapter import COMPOSED as COMPOSED
    from adapterswap.core.writing.adapter import prepare as prepare
    from adapterswap.core.writing.adapter import write_adapter as write_adapter
    from adapterswap.core.writing.outputs import Form as Form
    from adapterswap.core.writing.records import SourceRecord as SourceRecord
    from adapterswap.core.writing.stream import ModelForm as ModelForm
    from adapterswap.core.writing.weights import prepare_model as prepare_model

_HOME = {
    # Experts and bases
    "Adapter": "experts.adapter",
    "open_adapter": "experts.adapter",
    "open_expert": "experts.adapter",
    "Checkpoint": "model.checkpoints",
    "StoredTensor": "model.checkpoints",
    "open_checkpoint": "model.checkpoints",
    "Base": "model.base",
    "OpenedBase": "model.opened_base",
    "choose_device": "model.opened_base",
    "aligned": "planning.alignment",
    # Layers
    "Kind": "model.layers",
    "ModelConfig": "model.layers",
    "check_one_list": "model.layers",
    "format_layers": "model.layers",
    "Depth": "model.layers",
    "parse_layers": "model.layers",
    # Requests
    "Composition": "planning.composition",
    "ExpertName": "planning.names",
    "Partition": "planning.composition",
    "ZONES": "planning.composition",
    "BASE": "planning.rules",
    "Rule": "planning.rules",
    "Method": "methods.method",
    "Parameter": "methods.method",
    "find_method": "methods.registry",
    "words_of": "methods.registry",
    # Plans
    "Plan": "planning.plan",
    "compose": "planning.functions",
    "layer_swap": "planning.functions",
    "slice_layers": "planning.functions",
    "soup": "planning.functions",
    "task_arithmetic": "planning.functions",
    "make_plan": "planning.planner",
    "Target": "planning.targets",
    "check_names": "planning.checks",
    "check_base_weights": "planning.base",
    "error_text": "planning.describe",
    # Results
    "COMPOSED": "writing.adapter",
    "prepare": "writing.adapter",
    "write_adapter": "writing.adapter",
    "Form": "writing.outputs",
    "SourceRecord": "writing.records",
    "ModelForm": "writing.stream",
    "prepare_model": "writing.weights",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
