"""One handmade sweep, its report and its page, for all tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from adapterswap.experiments.reporting import Report, make_report, open_source, write_report

from .crafting import HOSTILE, craft, recipe
from .reading import EN, SW, TE, reported


@dataclass(frozen=True)
class Written:
    run: Path
    report: Report
    folder: Path

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Nine pairs, a grid with transition zones, a corpus score, and outputs with hostile markup."""
    place = tmp_path_factory.mktemp("reporting")
    requested = recipe(
        compositions=[
            {"bottom": [3, 4, 5], "top": [0, 1, 2], "bottom_transition": [0, 1]}, {"partition": "B"},
        ],
        retention=["mgsm_native_cot_en", "mgsm_native_cot_te", "belebele_swh_Latn"],
        extra={"joint SFT": ["experts/joint1", "experts/joint2"]},
    )  # fmt: skip
    run = craft(place / "run", requested, corpus=("belebele_swh_Latn",), text=HOSTILE)
    report = make_report(open_source(run))
    write_report(report, place / "report", runs=[run])
    return Written(run, report, place / "report")


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A report of two target languages."""
    requested = recipe(
        language_experts={name: name for name in ("sw1", "sw2", "sw3", "te1", "te2", "te3")},
        tasks={"sw*": [SW], "te*": [TE]}, retention=[EN],
    )  # fmt: skip
    return reported(craft(tmp_path_factory.mktemp("latex") / "run", requested, documents=30))
