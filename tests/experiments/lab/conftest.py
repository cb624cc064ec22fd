"""One real lab run, small enough for a test: a shipped base, short training, all compositions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from adapterswap.experiments.lab import SCENES, LabPlan, Sizes, Study


@dataclass(frozen=True)
class Run:
    study: Study
    folder: Path
    told: list[tuple[int, str, float]]


@pytest.fixture(scope="session", autouse=True)
def _offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    scene = replace(SCENES["gap"], math_rows=1500, language_rows=1500)
    folder = tmp_path_factory.mktemp("lab") / "run"
    reports: list[tuple[int, str, float]] = []
    plan = LabPlan.of(scene, 1, folder, sizes=Sizes(development=60, test=120))
    study = plan.run(tell=lambda *news: reports.append(news))
    return Run(study, folder, reports)
