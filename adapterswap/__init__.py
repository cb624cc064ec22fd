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
    from adapterswap.analysis.suggesting import Suggestion as Suggestion
    from adapterswap.analysis.suggesting import suggest as suggest
    from adapterswap.errors import AdapterswapError as AdapterswapError
    from adapterswap.evaluation.results import EvaluationResult as EvaluationResult
    from adapterswap.evaluation.subjects import evaluate as evaluate
    from adapterswap.experts.adapter import Adapter as Adapter
    from adapterswap.experts.adapter import open_adapter as open_adapter
    from adapterswap.experts.adapter import open_expert as open_expert
    from adapterswap.gguf.export import Exported as Exported
    from adapterswap.gguf.export import export as export
    from adapterswap.live import LiveComposer as LiveComposer
    from adapterswap.model.checkpoints import Checkpoint as Checkpoint
    from adapterswap.model.checkpoints import open_checkpoint as open_checkpoint
    from adapterswap.planning.composing import compose as compose
    from adapterswap.planning.composing import dare as dare
    from adapterswap.planning.composing import layer_swap as layer_swap
    from adapterswap.planning.composing import read_composition as read_composition
    from adapterswap.planning.composing import slerp as slerp
    from adapterswap.planning.composing import slice_layers as slice_layers
    from adapterswap.planning.composing import soup as soup
    from adapterswap.planning.composing import task_arithmetic as task_arithmetic
    from adapterswap.planning.composing import ties as ties
    from adapterswap.planning.composition import Composition as Composition
    from adapterswap.planning.composition import parse_composition as parse_composition
    from adapterswap.planning.making import make_plan as make_plan
    from adapterswap.planning.mergekit import MergekitMerge as MergekitMerge
    from adapterswap.planning.mergekit import read_mergekit as read_mergekit
    from adapterswap.planning.plan import Plan as Plan
    from adapterswap.planning.rules import Rule as Rule
    from adapterswap.reporting.report import Report as Report
    from adapterswap.reporting.writing import report as report
    from adapterswap.sweeps.recipe import SweepRecipe as SweepRecipe
    from adapterswap.sweeps.results import Run as Run
    from adapterswap.sweeps.running import sweep as sweep
    from adapterswap.tools.attributing import Attribution as Attribution
    from adapterswap.tools.comparing import Comparison as Comparison
    from adapterswap.tools.comparing import diff as diff
    from adapterswap.tools.conversion import convert as convert
    from adapterswap.tools.deltas import Conversion as Conversion
    from adapterswap.tools.extracted import Verification as Verification
    from adapterswap.tools.extraction import Extraction as Extraction
    from adapterswap.tools.extraction import extract as extract
    from adapterswap.tools.inspecting import Inspection as Inspection
    from adapterswap.tools.inspecting import inspect as inspect
    from adapterswap.tools.verification import verify as verify
    from adapterswap.training.recipe import TrainRecipe as TrainRecipe
    from adapterswap.training.report import TrainReport as TrainReport
    from adapterswap.training.run import train as train
    from adapterswap.writing.adapter import write_adapter as write_adapter
    from adapterswap.writing.weights import merge as merge

__version__ = "0.2.0"

_HOME = {
    "Adapter": "experts.adapter",
    "AdapterswapError": "errors",
    "Analysis": "analysis.analyzing",
    "Attribution": "tools.attributing",
    "Checkpoint": "model.checkpoints",
    "Comparison": "tools.comparing",
    "Composition": "planning.composition",
    "Conversion": "tools.conversion",
    "Dominance": "analysis.dominance",
    "EvaluationResult": "evaluation.results",
    "Exported": "gguf.export",
    "Extraction": "tools.extraction",
    "Inspection": "tools.inspecting",
    "LiveComposer": "live",
    "MergekitMerge": "planning.mergekit",
    "Plan": "planning.plan",
    "Report": "reporting.report",
    "Rule": "planning.rules",
    "Run": "sweeps.results",
    "Suggestion": "analysis.suggesting",
    "SweepRecipe": "sweeps.recipe",
    "TrainRecipe": "training.recipe",
    "TrainReport": "training.report",
    "Verification": "tools.extracted",
    "analyze": "analysis.analyzing",
    "compose": "planning.composing",
    "convert": "tools.conversion",
    "dare": "planning.composing",
    "diff": "tools.comparing",
    "evaluate": "evaluation.subjects",
    "export": "gguf.export",
    "extract": "tools.extraction",
    "inspect": "tools.inspecting",
    "layer_swap": "planning.composing",
    "make_plan": "planning.making",
    "merge": "writing.weights",
    "open_adapter": "experts.adapter",
    "open_checkpoint": "model.checkpoints",
    "open_expert": "experts.adapter",
    "parse_composition": "planning.composition",
    "read_composition": "planning.composing",
    "read_mergekit": "planning.mergekit",
    "report": "reporting.writing",
    "slerp": "planning.composing",
    "slice_layers": "planning.composing",
    "soup": "planning.composing",
    "suggest": "analysis.suggesting",
    "suggest_owners": "analysis.dominance",
    "sweep": "sweeps.running",
    "task_arithmetic": "planning.composing",
    "ties": "planning.composing",
    "train": "training.run",
    "verify": "tools.verification",
    "write_adapter": "writing.adapter",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
