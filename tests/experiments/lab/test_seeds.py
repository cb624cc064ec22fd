"""Seeds run in processes: each is reported when it ends, and nothing is said of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from adapterswap.experiments.lab.seeds import run_seeds

pytestmark = pytest.mark.slow
_LONGEST_S = 60


class Waiting:
    """Seed 0 ends soon after seed 1 has begun, and seed 1 when the test has seen that seed 0 has ended."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, seed: int, tell: Callable[[str, float], None]) -> int:
        tell("first step", 0.0)
        end = time.monotonic() + _LONGEST_S
        begun = self.mark.with_name("begun")
        if seed == 1:
            begun.touch()
        while not (self.mark if seed == 1 else begun).exists() and time.monotonic() < end:
            tell("second step", 0.5)
            time.sleep(0.05)
        time.sleep(0.5)
        return 10 * seed


def test_a_seed_is_reported_while_another_one_runs(tmp_path: Path) -> None:
    mark, news = tmp_path / "seen", list[tuple[object, ...]]()

    def finished(seed: int, result: int) -> None:
        news.append((seed, "finished", result))
        mark.touch()

    results = run_seeds(
        Waiting(mark), [0, 1], jobs=2, tell=lambda seed, step, share: news.append((seed, step, share)),
        finished=finished,
    )  # fmt: skip
    assert results == [0, 10]
    ends = [place for place, (_, step, _) in enumerate(news) if step == "finished"]
    assert [news[place] for place in ends] == [(0, "finished", 0), (1, "finished", 10)]
    assert (1, "first step", 0.0) in news
    assert all(seed == 1 for seed, *_ in news[ends[0] + 1 :])
    assert ends[1] == len(news) - 1
