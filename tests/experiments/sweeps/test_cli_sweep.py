"""`adapterswap sweep` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from adapterswap.experiments.sweeps.recording import Recording
from adapterswap.experiments.sweeps.results import CellResult

Call = Callable[..., Result]


@pytest.fixture
def file(content: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    families = [{"bottom": [1, 2, 6], "top": 1}, {"method": "ties", "density": 0.2, "max_rank": 4}]
    path.write_text(yaml.safe_dump(content(compositions=families)))
    return path


def test_a_dry_run_counts_and_does_nothing(run: Call, file: Path, tmp_path: Path) -> None:
    result = run("sweep", file, "-o", tmp_path / "run", "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    counted = json.loads(result.stdout)
    assert counted == {
        "dry_run": True,
        "cells": 6,
        "finished": 0,
        "given_up": 0,
        "families": {"base": 1, "task expert": 1, "language expert": 1, "layer_swap": 2, "ties": 1},
        "left_out": 1,
        "repeated": 0,
        "documents": {"mgsm_direct_sw": 3},
        "requests": 18,
        "tokens": 18 * 6,
        "switched": 5,
        "reduced": 1,
        "merged": 0,
        "copied": 0,
        "seconds": None,
        "strips": {},
    }
    assert not (tmp_path / "run").exists()
    shown = run("sweep", file, "-o", tmp_path / "run", "--dry-run", "--limit", 2)
    assert "requests    12" in shown.stdout
    assert "not estimated" in shown.stdout
    assert "1 whose zones overlap" in shown.stdout
    paced = run("sweep", file, "-o", tmp_path / "run", "--dry-run", "--limit", 2, "--tokens-per-second", 0.1)
    assert "up to 12 min for the answers" in paced.stdout
    assert run("sweep", file, "-o", tmp_path / "run", "--tokens-per-second", 5).exit_code == 2
    odd = run("sweep", file, "-o", tmp_path / "run", "--dry-run", "--limit", 2, "--tokens-per-second", "nan")
    assert (odd.exit_code, odd.stdout) == (2, "")


def test_cells_shared_by_rows_are_judged_once(
    run: Call, content: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path, out = tmp_path / "twice.yaml", tmp_path / "run"
    families = [{"bottom": [1, 2], "top": 1}, {"name": "again", "bottom": 1, "top": 1}]
    path.write_text(yaml.safe_dump(content(compositions=families, baselines=[])))
    counted = json.loads(run("sweep", path, "-o", out, "--dry-run", "--json").stdout)
    assert (counted["cells"], counted["copied"], counted["switched"], counted["requests"]) == (3, 1, 2, 6)
    assert "1 shared with another row" in run("sweep", path, "-o", out, "--dry-run").stdout
    assert run("sweep", path, "-o", out, "--device", "cpu").exit_code == 0
    finished = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    assert sum(cell["seconds"]["evaluate"] > 0 for cell in finished) == 2
    lines = (out / "cells.jsonl").read_text().splitlines(keepends=True)
    (out / "cells.jsonl").write_text("".join(lines[:2]))  # what is left equals what is finished
    counted = json.loads(run("sweep", path, "-o", out, "--dry-run", "--json").stdout)
    assert (counted["finished"], counted["copied"], counted["requests"], counted["seconds"]) == (2, 1, 0, 0)


def test_a_sweep_prints_a_table_and_resumes(
    run: Call, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Recording.add

    def keep_and_end(self: Recording, result: CellResult, samples: Iterable[Mapping[str, Any]]) -> None:
        keep(self, result, samples)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "add", keep_and_end)
        ended = run("sweep", file, "-o", tmp_path / "run", "--device", "cpu", "--overwrite")
    assert ended.exit_code == 130
    assert "What was finished is kept. Run the command again, without --overwrite, to resume." in ended.stderr
    assert len((tmp_path / "run" / "cells.jsonl").read_text().splitlines()) == 1

    whole = run("sweep", file, "-o", tmp_path / "run", "--device", "cpu")
    assert whole.exit_code == 0, whole.stderr
    assert [line.split()[0] for line in whole.stdout.splitlines()[1:6]] == [
        "base", "task", "language", "layer_swap", "ties",
    ]  # fmt: skip
    assert "Means over mgsm_direct_sw (exact_match, normalized)" in whole.stdout
    assert "6 of 6 cells, best" in whole.stderr
    assert "mgsm_direct_sw: 18 of 18 outputs were cut at the token limit, in 6 of 6 cells" in whole.stderr
    assert "mgsm_direct_sw: all 6 cells scored 0" in whole.stderr
    assert "ΔW error" in whole.stdout.splitlines()[0]
    lines = (tmp_path / "run" / "cells.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / "cells.jsonl").write_bytes(b"".join(lines[:-1]))
    dry = run("sweep", file, "-o", tmp_path / "run", "--dry-run")
    assert "5; 1 to evaluate" in dry.stdout
    assert "about" in dry.stdout
    again = run("sweep", file, "-o", tmp_path / "run", "--device", "cpu", "--json")
    output = json.loads(again.stdout)
    assert (output["cells"], output["dry_run"]) == (6, False)
    assert [row["n"] for row in output["families"]] == [1, 1, 1, 2, 1]
    assert [row["relative_error"] is None for row in output["families"]] == [True, True, True, True, False]
    assert len(output["remarks"]) == 2
    refused = run("sweep", file, "-o", tmp_path / "run", "--batch-size", 2)
    assert refused.exit_code == 3
    assert "begun with other settings.batch_size" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument"),
        (["nowhere.yaml", "-o", "x"], 3, "neither a file nor a shipped recipe"),
        (["RECIPE", "-o", "x", "--set", "tasks=[]"], 2, "tasks"),
        (["RECIPE", "-o", "x", "--base-model", "./nowhere"], 3, "./nowhere does not exist"),
        (["RECIPE", "-o", "x", "--device", "abacus", "--dry-run"], 2, "'abacus' cannot be used"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(
    arguments: list[str], code: int, message: str, run: Call, file: Path
) -> None:
    result = run("sweep", *(str(file) if argument == "RECIPE" else argument for argument in arguments))
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
