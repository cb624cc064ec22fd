"""adapterswap: compose LoRA adapters by layer. Each command has a function here that does the same.

Names are imported on first use, so `import adapterswap` is fast and composing never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterswap.analysis.analyzing import Analysis as Analysis
    from adapterswap.analysis.analyzing import analyze as analyze
    from adapterswap.analysis.dominance import Dominance as Dominance
    from adapterswap.analysis.dominance import suggest_owners as suggest_owners
    from adapterswap.analysis.measuring import suggest as suggest
    from adapterswap.analysis.suggesting import Suggestion as Suggestion
    from adapterswap.checking.comparing import Comparison as Comparison
    from adapterswap.checking.comparing import diff as diff
    from adapterswap.checking.inspecting import Inspection as Inspection
    from adapterswap.checking.inspecting import inspect as inspect
    from adapterswap.checking.result import Verification as Verification
    from adapterswap.checking.verifying import verify as verify
    from adapterswap.converting import Conversion as Conversion
    from adapterswap.converting import convert as convert
    from adapterswap.errors import AdapterswapError as AdapterswapError
    from adapterswap.evaluation.results import EvaluationResult as EvaluationResult
    from adapterswap.evaluation.subject_evaluation import evaluate as evaluate
    from adapterswap.experts.adapters import Adapter as Adapter
    from adapterswap.experts.adapters import open_adapter as open_adapter
    from adapterswap.experts.checkpoints import Checkpoint as Checkpoint
    from adapterswap.experts.checkpoints import open_checkpoint as open_checkpoint
    from adapterswap.experts.opening import open_expert as open_expert
    from adapterswap.extracting import extract as extract
    from adapterswap.extracting.result import Extraction as Extraction
    from adapterswap.live import LiveComposer as LiveComposer
    from adapterswap.merging import merge as merge
    from adapterswap.planning.allocation import Rule as Rule
    from adapterswap.planning.composing import compose as compose
    from adapterswap.planning.composing import dare as dare
    from adapterswap.planning.composing import layer_swap as layer_swap
    from adapterswap.planning.composing import read_composition as read_composition
    from adapterswap.planning.composing import slerp as slerp
    from adapterswap.planning.composing import soup as soup
    from adapterswap.planning.composing import task_arithmetic as task_arithmetic
    from adapterswap.planning.composing import ties as ties
    from adapterswap.planning.compositions import Composition as Composition
    from adapterswap.planning.making import make_plan as make_plan
    from adapterswap.planning.mergekit import MergekitMerge as MergekitMerge
    from adapterswap.planning.mergekit import read_mergekit as read_mergekit
    from adapterswap.planning.plan import Plan as Plan
    from adapterswap.planning.short_names import parse_composition as parse_composition
    from adapterswap.planning.slicing import slice_layers as slice_layers
    from adapterswap.reporting.report import Report as Report
    from adapterswap.reporting.writing import report as report
    from adapterswap.sweeps.recipe import SweepRecipe as SweepRecipe
    from adapterswap.sweeps.results import Run as Run
    from adapterswap.sweeps.running import sweep as sweep
    from adapterswap.training.recipe import TrainRecipe as TrainRecipe
    from adapterswap.training.report import TrainReport as TrainReport
    from adapterswap.training.run import train as train
    from adapterswap.writing import write_adapter as write_adapter
    from adapterswap.writing.gguf import Exported as Exported
    from adapterswap.writing.gguf import export as export

__version__ = "0.2.0"

_HOME = {
    "Adapter": "experts.adapters",
    "AdapterswapError": "errors",
    "Analysis": "analysis.analyzing",
    "Checkpoint": "experts.checkpoints",
    "Comparison": "checking.comparing",
    "Composition": "planning.compositions",
    "Conversion": "converting",
    "Dominance": "analysis.dominance",
    "EvaluationResult": "evaluation.results",
    "Exported": "writing.gguf",
    "Extraction": "extracting.result",
    "Inspection": "checking.inspecting",
    "LiveComposer": "live",
    "MergekitMerge": "planning.mergekit",
    "Plan": "planning.plan",
    "Report": "reporting.report",
    "Rule": "planning.allocation",
    "Run": "sweeps.results",
    "Suggestion": "analysis.suggesting",
    "SweepRecipe": "sweeps.recipe",
    "TrainRecipe": "training.recipe",
    "TrainReport": "training.report",
    "Verification": "checking.result",
    "analyze": "analysis.analyzing",
    "compose": "planning.composing",
    "convert": "converting",
    "dare": "planning.composing",
    "diff": "checking.comparing",
    "evaluate": "evaluation.subject_evaluation",
    "export": "writing.gguf",
    "extract": "extracting",
    "inspect": "checking.inspecting",
    "layer_swap": "planning.composing",
    "make_plan": "planning.making",
    "merge": "merging",
    "open_adapter": "experts.adapters",
    "open_checkpoint": "experts.checkpoints",
    "open_expert": "experts.opening",
    "parse_composition": "planning.short_names",
    "read_composition": "planning.composing",
    "read_mergekit": "planning.mergekit",
    "report": "reporting.writing",
    "slerp": "planning.composing",
    "slice_layers": "planning.slicing",
    "soup": "planning.composing",
    "suggest": "analysis.measuring",
    "suggest_owners": "analysis.dominance",
    "sweep": "sweeps.running",
    "task_arithmetic": "planning.composing",
    "ties": "planning.composing",
    "train": "training.run",
    "verify": "checking.verifying",
    "write_adapter": "writing",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
