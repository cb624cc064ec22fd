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
    pairs: dict[str, list[tuple[Sample, Sample]]] = {}
    for own_sample, other_sample in zip(ours.samples, theirs.samples, strict=True):
        pairs.setdefault(own_sample.task, []).append((own_sample, other_sample))

    compared = []
    for name, task in ours.tasks.items():
        for own, other in zip(task.scores, theirs.tasks[name].scores, strict=True):
            compared.append(_difference(task.name, own, other, pairs.get(task.name, [])))
    return compared


def _difference(task: str, ours: Score, theirs: Score, pairs: Sequence[tuple[Sample, Sample]]) -> EngineDifference:
    """One score in both engines, over the documents that both have answered."""
    count = len(pairs)
    mean, stderr = theirs.value - ours.value, None

    # The paired difference, where the score is the mean of the documents' scores, as a perplexity is not.
    if count > 1 and all(ours.metric in own.scores.get(ours.filter, {}) for own, _ in pairs):
        own_values = [own.scores[ours.filter][ours.metric] for own, _ in pairs]
        other_values = [other.scores[ours.filter][ours.metric] for _, other in pairs]
        if math.isclose(math.fsum(own_values) / count, ours.value):
            gains = [other - own for own, other in zip(own_values, other_values, strict=True)]
            mean = math.fsum(gains) / count
            variance = math.fsum((gain - mean) ** 2 for gain in gains) / (count - 1)
            stderr = math.sqrt(variance / count)

    return EngineDifference(
        task=task,
        metric=ours.metric,
        filter=ours.filter,
        documents=count,
        equal=sum(_shape(own.output) == _shape(other.output) for own, other in pairs),
        transformers=ours.value,
        vllm=theirs.value,
        difference=mean,
        stderr=stderr,
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
