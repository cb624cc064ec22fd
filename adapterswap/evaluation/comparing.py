"""One evaluation in both engines, document by document."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from adapterswap.evaluation.settings import ENGINES

if TYPE_CHECKING:
    from adapterswap.evaluation.results import Sample
    from adapterswap.evaluation.subjects import Evaluation


@dataclass(frozen=True)
class EngineDifference:
    """A score of one task in both engines.

    Attributes:
        task, metric, filter: the score.
        documents: how many were evaluated.
        equal: documents with the same answer; of likelihoods, with the same order and greediness of the choices.
        transformers, vllm: the means.
        difference: the mean of vllm - transformers over the documents.
        stderr: its standard error; None for a single document.
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


def compare_engines(
    evaluation: Evaluation,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tell: Callable[[str], None] = lambda engine: None,
) -> list[EngineDifference]:
    """Evaluate in transformers, then in vLLM, and compare each score of each task over the documents.

    Args:
        evaluation: from `prepare_evaluation`; its own engine does not matter.
        device, dtype: as for `evaluate`.
        tell: called with the name of each engine before it is used.
    """
    samples: dict[str, tuple[Sample, ...]] = {}
    for engine in ENGINES:
        tell(engine)
        arguments = evaluation.settings.engine_args if engine != ENGINES[0] else {}
        settings = replace(evaluation.settings, engine=engine, engine_args=arguments)
        samples[engine] = replace(evaluation, settings=settings).run(device=device, dtype=dtype).samples
    pairs = list(zip(*(samples[engine] for engine in ENGINES), strict=True))
    scores = {
        (one.task, name, metric): None for one, _ in pairs for name, kinds in one.scores.items() for metric in kinds
    }
    return [
        _difference(task, metric, name, [pair for pair in pairs if pair[0].task == task])
        for task, name, metric in scores
    ]


def _difference(task: str, metric: str, name: str, pairs: Sequence[tuple[Sample, Sample]]) -> EngineDifference:
    values = [tuple(sample.scores[name][metric] for sample in pair) for pair in pairs]
    count = len(values)
    ours, theirs = (math.fsum(column) / count for column in zip(*values, strict=True))
    mean = theirs - ours
    spread = math.fsum((two - one - mean) ** 2 for one, two in values) / (count - 1) if count > 1 else None
    return EngineDifference(
        task=task,
        metric=metric,
        filter=name,
        documents=count,
        equal=sum(_shape(one.output) == _shape(two.output) for one, two in pairs),
        transformers=ours,
        vllm=theirs,
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
