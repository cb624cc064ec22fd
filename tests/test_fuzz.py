"""Randomly damaged inputs give a result or an `AdapterswapError`: no traceback, no leftover files, no long wait.

fuzz/campaign.py does the same for hours. The bugs it found have tests of their own elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import KINDS, Subject

OUTCOMES: dict[str, list[str]] = {kind: [] for kind in KINDS}
"""What came of each damaged input."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(tmp_path_factory.mktemp("subject"))
    yield made
    assert made.slowest < 5


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "80")),
    deadline=None,
    derandomize=True,  # the same inputs every time; fuzz/campaign.py tries new ones
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(random=st.randoms(use_true_random=False))
def test_random_damage(kind: str, random: Random, subject: Subject) -> None:
    OUTCOMES[kind].append(subject.check(random, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_damage_is_neither_too_small_nor_too_large(kind: str, subject: Subject) -> None:
    """Some inputs are refused and some accepted; otherwise the test above would prove nothing."""
    if not OUTCOMES[kind]:  # run without the test above
        random = Random(1)
        OUTCOMES[kind] += [subject.check(random, kind) for _ in range(40)]
    assert {"accepted", "refused"} == set(OUTCOMES[kind])
