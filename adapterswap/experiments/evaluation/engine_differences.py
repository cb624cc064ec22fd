"""One evaluation in both engines, document by document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adapterswap.experiments.evaluation.results import EvaluationResult, Sample, Score


@dataclass(frozen=True)
class EngineDifference:
    """A score of one task in both engines.

    Attributes:
        task, metric, filter: the score.
        documents: how many were evaluated.
        equal: documents with the same answer; of likelihoods, with the same order and greediness of the choices.
        transformers, vllm: the scores.
        difference: vllm - transformers.
        stderr: its standard error over the documents; None for a single one, and for scores of a whole corpus.
    """

    task: str
    metric: str
    filter: str
    documents: int
    equal: int
    transformers: float
    vllm: float
    difference: float
    stderr: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def differences(ours: EvaluationResult, theirs: EvaluationResult) -> list[EngineDifference]:
    """Compare each score of each task over the documents: first transformers' result, then vLLM's."""
    pairs = list(zip(ours.samples, theirs.samples, strict=True))
    return [
        _difference(task.name, own, other, [pair for pair in pairs if pair[0].task == task.name])
        for task in ours.tasks.values()
        for own, other in zip(task.scores, theirs.tasks[task.name].scores, strict=True)
    ]


def _difference(task: str, ours: Score, theirs: Score, pairs: Sequence[tuple[Sample, Sample]]) -> EngineDifference:
    count, spread, mean = len(pairs), None, theirs.value - ours.value
    if count > 1 and all(ours.metric in one.scores.get(ours.filter, {}) for one, _ in pairs):
        values = [tuple(sample.scores[ours.filter][ours.metric] for sample in pair) for pair in pairs]
        if math.isclose(math.fsum(one for one, _ in values) / count, ours.value):  # a perplexity is not their mean
            mean = math.fsum(two - one for one, two in values) / count
            spread = math.fsum((two - one - mean) ** 2 for one, two in values) / (count - 1)
    return EngineDifference(
        task=task,
        metric=ours.metric,
        filter=ours.filter,
        documents=count,
        equal=sum(_shape(one.output) == _shape(two.output) for one, two in pairs),
        transformers=ours.value,
        vllm=theirs.value,
        difference=mean,
        stderr=None if spread is None else math.sqrt(spread / count),
    )


def _shape(output: Any) -> Any:
    """What must be equal in two engines: a text; of likelihoods their order and whether they are greedy."""
    if isinstance(output, str):
        return output
    if not isinstance(output, list):  # a perplexity, which rounding alone makes different
        return None
    choices = output if isinstance(output[0], list | tuple) else [output]
    order = sorted(range(len(choices)), key=lambda place: choices[place][0])
    return order, [greedy for _, greedy in choices]
