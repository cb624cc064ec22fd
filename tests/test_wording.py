"""The checks of wording and spelling in `make lint`: what they report, what they allow, and that all files pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from importing import loaded

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wording() -> ModuleType:
    return loaded(ROOT / "scripts" / "wording.py")


def test_tracked_files_pass(wording: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(wording.tracked()) > 300
    assert wording.main(wording.tracked()) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("A mistake is told with its file.", ["is told"]),
        ("All of them are told together.", ["are told", "told together"]),
        ("x is no folder here", ["is no folder"]),
        ("There is no folder of that name.", []),
        ("It Goes on with the last checkpoint.", ["Goes on with"]),
        ("Whoever reads it can mend it.", ["Whoever", "mend"]),
        ("The word `mend` itself.  # wording: ok", []),
        ("Recommended amendments; a toldo.", []),
        ("Its record stands beside the weights.", ["stands beside"]),
    ],
)
def test_what_is_reported(wording: ModuleType, line: str, words: list[str]) -> None:
    result = list(wording.mistakes(f"first\n{line}\n"))
    assert [text for _, text, _ in result] == words
    assert {number for number, _, _ in result} <= {2}
    assert all(instead for _, _, instead in result)


def test_it_names_the_place_and_fails(wording: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("Fine.\nIt is told here.\n", encoding="utf-8")
    assert wording.main([tmp_path / "page.md"]) == 1
    assert f"{tmp_path / 'page.md'}:2: 'is told'. Better: " in capsys.readouterr().out


def test_the_spelling() -> None:
    pytest.importorskip("codespell_lib")
    process = subprocess.run([sys.executable, "-m", "codespell_lib"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_lint_runs_both() -> None:
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    assert "codespell" in lint
    assert "scripts/wording.py" in lint
