"""The command: what it prints and writes, dry runs, refusals, light help; and a lab run as its input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import refused

from adapterswap.cli import main
from adapterswap.experiments.lab.seed import METHODS
from adapterswap.experiments.reporting import make_report, open_source
from adapterswap.experiments.reporting.output import report
from adapterswap.kit.errors import ArgumentError, DataError

from .conftest import Written
from .crafting import craft
from .reading import row, strict


def call(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_reporting_needs_no_torch() -> None:
    code = (
        "import sys\nimport adapterswap.experiments.reporting\n"
        "assert not {'torch', 'scipy', 'jinja2', 'lm_eval'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lone_surrogates_are_written_as_escapes(written: Written, tmp_path: Path) -> None:
    run = shutil.copytree(written.run, tmp_path / "sw")
    described = json.loads((run / "sweep.json").read_text(encoding="utf-8"))
    next(iter(described["experts"].values()))["source"] = "half-\ud800"
    (run / "sweep.json").write_text(json.dumps(described), encoding="utf-8")
    result = call(run, "-o", tmp_path / "report")
    assert result.exit_code == 0, result.stderr
    assert r"half-\ud800" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def test_it_writes_next_to_the_run(written: Written, tmp_path: Path) -> None:
    run = shutil.copytree(written.run, tmp_path / "sw")
    result = call(run)
    assert result.exit_code == 0, result.stderr
    assert "layer_swap, selected" in result.stdout
    assert "Friedman over 9 settings" in result.stdout
    assert "sw-report" in result.stderr
    assert (tmp_path / "sw-report" / "report.html").exists()
    again = call(run)
    assert again.exit_code == 3
    assert "exists" in again.stderr
    record = tmp_path / "sw-report" / "summary.json"
    assert json.loads(record.read_text())["files"] == ["report.html", "summary.json", "tables.csv", "tables.tex"]
    (tmp_path / "sw-report" / "figure.png").touch()
    refused = call(run, "--overwrite")
    assert (refused.exit_code, "did not write: figure.png" in refused.stderr) == (3, True)
    (tmp_path / "sw-report" / "figure.png").unlink()
    assert call(run, "--overwrite").exit_code == 0


def test_dry_run_and_json(written: Written, tmp_path: Path) -> None:
    result = call(written.run, "-o", tmp_path / "out", "--dry-run", "--json", "--reference", "base")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert (content["dry_run"], content["reference"]) == (True, "base")
    assert list(tmp_path.iterdir()) == []


def test_refusals(written: Written, tmp_path: Path) -> None:
    for arguments, said in (
        ([written.run, "-o", written.run / "inside"], "overlaps"),
        ([written.run, "-o", tmp_path / "out", "--reference", "x"], "no method 'x'"),
        ([tmp_path / "nothing"], "neither a sweep's folder nor a lab run's"),
    ):
        result = call(*arguments)
        assert result.exit_code in (2, 3)
        assert said in result.stderr
        assert "Traceback" not in result.stderr
    assert call().exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A lab run's two files, with known answers."""
    folder = tmp_path / "lab-run"
    folder.mkdir()
    seeds = range(4)
    grid = [{"bottom": b, "top": u, "xx": 0.1 * b + 0.01 * u} for b in (0, 1, 2) for u in (0, 1)]
    content = {
        "format": "adapterswap-lab/1", "caveat": "A demonstration.", "scene": {"name": "gap", "question": "Why?"},
        "methods": METHODS, "problems": 20, "versions": {"torch": "2"},
        "seeds": [
            {"seed": seed, "bottom": 2, "top": seed % 2, "scale": 0.8, "development": {"grid": grid}} for seed in seeds
        ],
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(content))
    rows = [
        {"seed": seed, "method": method, "language": language, "right": ("1" * (place + seed)).ljust(20, "0")}
        for seed in seeds for place, method in enumerate(METHODS) for language in ("en", "xx")
    ]  # fmt: skip
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", ["results.json", "answers.jsonl"])
def test_a_damaged_lab_run_is_refused(lab: Path, name: str) -> None:
    (lab / name).write_text("{")
    with refused(DataError, "run"):
        open_source(lab)
    (lab / name).unlink()
    (lab / name).mkdir()
    with refused(DataError, "run"):
        open_source(lab)


def test_a_style_that_is_none_is_refused(lab: Path) -> None:
    with refused(ArgumentError, "table"):
        report(lab, table="wide")  # type: ignore[arg-type]


def test_a_lab_run(lab: Path) -> None:
    report = make_report(open_source(lab))
    assert (report.kind, report.units, report.reference, report.lead) == ("lab", "seeds", "math expert", "layer swap")
    swap, expert = row(report, "layer swap"), row(report, "math expert")
    place = list(METHODS).index("layer swap")
    assert swap.spread is not None
    assert expert.spread is not None
    assert swap.spread.mean == pytest.approx((place + 1.5) / 20)
    assert swap.difference is not None
    assert swap.difference.mean == pytest.approx(swap.spread.mean - expert.spread.mean)
    assert swap.english == pytest.approx(swap.spread.mean)
    assert [chosen.unit[2] for chosen in swap.chosen] == [f"seed {seed}" for seed in range(4)]
    (grid,) = report.grids
    assert {(cell.bottom, cell.top): cell.selected for cell in grid.cells}[2, 1] == 2
    assert report.remarks == ("The question: Why?", "A demonstration.")
    strict(report)


def test_a_lab_run_has_figures(lab: Path, tmp_path: Path) -> None:
    seeds = ["--units", "seed 0", "--units", "seed 1"]
    result = call(lab, "-o", tmp_path / "report", "--figures", tmp_path / "figures", *seeds)
    assert result.exit_code == 0, result.stderr
    whole = call(lab, "-o", tmp_path / "whole", "--figures", tmp_path / "all")
    assert whole.exit_code == 0, whole.stderr
    content = json.loads((tmp_path / "all" / "figures.json").read_text())
    assert {"scores", "differences", "landscape"} <= content["figures"].keys()
    assert "4 settings are fewer than 5" in content["lacking"]["critical-difference"]
    assert len(content["figures"]["landscape"]["data"]["cells"]) == 6
    restricted = json.loads((tmp_path / "figures" / "figures.json").read_text())
    assert "landscape" not in restricted["figures"]  # a mean over all seeds


def test_lab_runs_are_reported_one_by_one(lab: Path, tmp_path: Path) -> None:
    """Two lab runs, a lab run and a sweep in either order; and the same lab run twice."""
    other, sweep = tmp_path / "other-lab", craft(tmp_path / "sweep", documents=6)
    shutil.copytree(lab, other)
    for runs in ((lab, other), (lab, sweep), (sweep, lab)):
        with refused(ArgumentError, "run"):
            open_source(*runs)
        result = call(*runs, "-o", tmp_path / "report")
        assert result.exit_code == 2
        assert "lab run" in result.stderr
        assert not (tmp_path / "report").exists()
    with refused(ArgumentError, "run"):
        open_source(lab, lab)


def test_a_damaged_lab_run(lab: Path) -> None:
    (lab / "answers.jsonl").write_text('{"seed": 0}\n')
    result = call(lab)
    assert result.exit_code == 3
    assert "damaged" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_narrow_terminal_gets_fewer_columns(written: Written) -> None:
    from rich.console import Console

    from adapterswap.cli.report import _table

    for width, gone in ((140, []), (80, ["papers' mean", "all", "English"])):
        table, left_out = _table(written.report, written.report.targets[0], width)
        assert left_out[: len(gone)] == gone
        assert bool(left_out) == bool(gone)
        with (console := Console(width=width, file=None)).capture() as captured:
            console.print(table)
        lines = [line for line in captured.get().splitlines() if line.strip()]
        assert len(lines) == 2 + len(written.report.targets[0].rows)  # nothing wraps
        assert max(map(len, lines)) <= width
