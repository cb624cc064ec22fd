"""The comparison of engines: differences of scores that are means of documents, and of others."""

from __future__ import annotations

import pytest

from adapterswap.experiments.evaluation.engine_differences import _difference
from adapterswap.experiments.evaluation.results import Sample, Score


@pytest.mark.parametrize(("value", "difference", "stderr"), [(-2.0, 0.5, 0.5), (7.4, 3.1, None)])
def test_a_perplexity_is_not_the_mean_of_its_documents(value: float, difference: float, stderr: float | None) -> None:
    documents = [[-1.0, -3.0], [-1.0, -2.0]]
    samples = [
        [Sample("task", i, {}, "", "", score, {}, {"none": {"metric": score}}) for i, score in enumerate(scores)]
        for scores in documents
    ]
    ours, theirs = (Score("metric", "none", value + plus, None, True) for plus in (0, difference))
    result = _difference("task", ours, theirs, list(zip(*samples, strict=True)))
    assert (result.difference, result.stderr) == (pytest.approx(difference), stderr)
