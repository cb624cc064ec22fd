"""adapterswap: compose LoRA adapters by layer. Each command has a function here that does the same.

Names are imported on first use, so `import adapterswap` is fast and composing never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapterswap.core.experts.adapter import Adapter as Adapter
    from adapterswap.core.experts.adapter import open_adapter as open_adapter
    from adapterswap.core.experts.adapter import open_expert as open_expert
    from adapterswap.core.model.checkpoints import Checkpoint as Checkpoint
    from adapterswap.core.model.checkpoints import open_checkpoint as open_checkpoint
    from adapterswap.core.planning.composition import Composition as Composition
    from adapterswap.core.planning.composition import parse_composition as parse_composition
    from adapterswap.core.planning.functions import compose as compose
    from adapterswap.core.planning.functions import dare as dare
    from adapterswap.core.planning.functions import layer_swap as layer_swap
    from adapterswap.core.planning.functions import slerp as slerp
    from adapterswap.core.planning.functions import slice_layers as slice_layers
    from adapterswap.core.planning.functions import soup as soup
    from adapterswap.core.planning.functions import task_arithmetic as task_arithmetic
    from adapterswap.core.planning.functions import ties as ties
    from adapterswap.core.planning.plan import Plan as Plan
    from adapterswap.core.planning.planner import make_plan as make_plan
    from adapterswap.core.planning.rules import Rule as Rule
    from adapterswap.core.writing.adapter import write_adapter as write_adapter
    from adapterswap.core.writing.weights import merge as merge
    from adapterswap.engines.gguf.export import Exported as Exported
    from adapterswap.engines.gguf.export import export as export
    from adapterswap.engines.live import LiveComposer as LiveComposer
    from adapterswap.experiments.analysis.analysis import Analysis as Analysis
    from adapterswap.experiments.analysis.analysis import analyze as analyze
    from adapterswap.experiments.analysis.suggestion import Suggestion as Suggestion
    from adapterswap.experiments.analysis.suggestion import suggest as suggest
    from adapterswap.experiments.evaluation import EvaluationResult as EvaluationResult
    from adapterswap.experiments.evaluation.asking import Answer as Answer
    from adapterswap.experiments.evaluation.asking import Reply as Reply
    from adapterswap.experiments.evaluation.asking import ask as ask
    from adapterswap.experiments.evaluation.subjects import evaluate as evaluate
    from adapterswap.experiments.reporting import Report as Report
    from adapterswap.experiments.reporting.output import report as report
    from adapterswap.experiments.sweeps import Run as Run
    from adapterswap.experiments.sweeps import SweepRecipe as SweepRecipe
    from adapterswap.experiments.sweeps import sweep as sweep
    from adapterswap.experiments.training import TrainRecipe as TrainRecipe
    from adapterswap.experiments.training import TrainReport as TrainReport
    from adapterswap.experiments.training import train as train
    from adapterswap.kit.errors import AdapterswapError as AdapterswapError
    from adapterswap.tools.attribution import Attribution as Attribution
    from adapterswap.tools.comparison import Comparison as Comparison
    from adapterswap.tools.comparison import diff as diff
    from adapterswap.tools.conversion import convert as convert
    from adapterswap.tools.deltas import Conversion as Conversion
    from adapterswap.tools.extraction import Extraction as Extraction
    from adapterswap.tools.extraction import extract as extract
    from adapterswap.tools.inspection import Inspection as Inspection
    from adapterswap.tools.inspection import inspect as inspect
    from adapterswap.tools.mergekit import MergekitMerge as MergekitMerge
    from adapterswap.tools.mergekit import read_mergekit as read_mergekit
    from adapterswap.tools.recipes import read_composition as read_composition
    from adapterswap.tools.recorded import Verification as Verification
    from adapterswap.tools.verification import verify as verify

__version__ = "0.1.0"

_HOME = {
    "Adapter": "core.experts.adapter",
    "AdapterswapError": "kit.errors",
    "Analysis": "experiments.analysis.analysis",
    "Answer": "experiments.evaluation.asking",
    "Attribution": "tools.attribution",
    "Checkpoint": "core.model.checkpoints",
    "Comparison": "tools.comparison",
    "Composition": "core.planning.composition",
    "Conversion": "tools.conversion",
    "EvaluationResult": "experiments.evaluation",
    "Exported": "engines.gguf.export",
    "Extraction": "tools.extraction",
    "Inspection": "tools.inspection",
    "LiveComposer": "engines.live",
    "MergekitMerge": "tools.mergekit",
    "Plan": "core.planning.plan",
    "Reply": "experiments.evaluation.asking",
    "Report": "experiments.reporting",
    "Rule": "core.planning.rules",
    "Run": "experiments.sweeps",
    "Suggestion": "experiments.analysis.suggestion",
    "SweepRecipe": "experiments.sweeps",
    "TrainRecipe": "experiments.training",
    "TrainReport": "experiments.training",
    "Verification": "tools.recorded",
    "analyze": "experiments.analysis.analysis",
    "ask": "experiments.evaluation.asking",
    "compose": "core.planning.functions",
    "convert": "tools.conversion",
    "dare": "core.planning.functions",
    "diff": "tools.comparison",
    "evaluate": "experiments.evaluation.subjects",
    "export": "engines.gguf.export",
    "extract": "tools.extraction",
    "inspect": "tools.inspection",
    "layer_swap": "core.planning.functions",
    "make_plan": "core.planning.planner",
    "merge": "core.writing.weights",
    "open_adapter": "core.experts.adapter",
    "open_checkpoint": "core.model.checkpoints",
    "open_expert": "core.experts.adapter",
    "parse_composition": "core.planning.composition",
    "read_composition": "tools.recipes",
    "read_mergekit": "tools.mergekit",
    "report": "experiments.reporting.output",
    "slerp": "core.planning.functions",
    "slice_layers": "core.planning.functions",
    "soup": "core.planning.functions",
    "suggest": "experiments.analysis.suggestion",
    "sweep": "experiments.sweeps",
    "task_arithmetic": "core.planning.functions",
    "ties": "core.planning.functions",
    "train": "experiments.training",
    "verify": "tools.verification",
    "write_adapter": "core.writing.adapter",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
