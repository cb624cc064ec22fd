"""The spelling of all files, as `make lint` checks it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_spelling() -> None:
    pytest.importorskip("codespell_lib")
    process = subprocess.run([sys.executable, "-m", "codespell_lib"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_no_page_speaks_of_how_the_code_was_rebuilt() -> None:
    """Words that only its developers know."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/README.md")]
    private = ("the house", "hunt", " rooms")
    assert [(page.name, word) for page in pages for word in private if word in page.read_text(encoding="utf-8")] == []
