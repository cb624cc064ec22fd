"""What is recorded of an evaluation whose scores are not all numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from adapterswap.experiments.sweeps.judge import _values
from adapterswap.experiments.sweeps.results import TaskInfo

NAME = "perplexing"


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("mean", [0.5, None])
def test_a_document_without_a_score_leaves_its_cell_without_one(odd: float, mean: float | None) -> None:
    info = TaskInfo(NAME, "target", "sw", ("acc", "none"), True, 3, (0,), (1, 2))
    scores = [{"metric": "acc", "filter": "none", "value": mean, "stderr": None}]
    samples = [SimpleNamespace(task=NAME, doc_id=doc, scores={"none": {"acc": score}})
               for doc, score in enumerate([1.0, odd, 0.0])]  # fmt: skip
    result: Any = SimpleNamespace(
        as_json=lambda: {"tasks": [{"name": NAME, "scores": scores}]},
        tasks={NAME: SimpleNamespace(name=NAME, cut=None)},
        samples=samples,
    )
    prepared: Any = SimpleNamespace(tasks={NAME: info})
    (value,) = _values(result, prepared).values()
    assert (value.value, value.stderr, dict(value.docs), value.scores) == (None, None, {}, {"acc,none": None})
    samples[1].scores["none"]["acc"] = 1.0
    (value,) = _values(result, prepared).values()
    assert value.docs == {0: 1.0, 1: 1.0, 2: 0.0}


def test_a_score_whose_powers_overflow_counts_as_none() -> None:
    """A broken model's perplexity, which statistics could not square."""
    info = TaskInfo(NAME, "target", "sw", ("word_perplexity", "none"), False, 1, (), (0,), averaged=False)
    scores = [{"metric": "word_perplexity", "filter": "none", "value": 1e300, "stderr": 1e299}]
    result: Any = SimpleNamespace(
        as_json=lambda: {"tasks": [{"name": NAME, "scores": scores}]},
        tasks={NAME: SimpleNamespace(name=NAME, cut=None)},
        samples=[],
    )
    (value,) = _values(result, SimpleNamespace(tasks={NAME: info})).values()  # type: ignore[arg-type]
    assert (value.value, value.stderr, value.scores) == (None, None, {"word_perplexity,none": None})
