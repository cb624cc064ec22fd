"""Evaluation with lm-evaluation-harness: any loaded model, all of its tasks, and MGSM offline with a better score.

`evaluate_model` runs tasks on a model in memory; `subjects` loads a base, an adapter or a composition. The harness and
torch are imported when something is evaluated.
"""

from __future__ import annotations

from adapterswap.experiments.evaluation.downloaded import score_labels
from adapterswap.experiments.evaluation.evaluator import evaluate_model
from adapterswap.experiments.evaluation.results import EvaluationResult, Sample, Score, TaskResult, write_result
from adapterswap.experiments.evaluation.settings import Settings

__all__ = [
    "EvaluationResult",
    "Sample",
    "Score",
    "Settings",
    "TaskResult",
    "evaluate_model",
    "score_labels",
    "write_result",
]
