"""The page of the example: its commands run on the real model; what is long is checked dry."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pages.blocks import steps_of

from adapterswap.cli import main

from .conftest import EXAMPLE

PAGE = "examples/smollm2/README.md"
ELSEWHERE = ("pip ", "python ", "adapterswap lab ", "adapterswap merge ")  # tests/real/test_scene.py, test_composing.py
LONG = {"adapterswap train": ["--dry-run"], "adapterswap serve": ["--dry-run"]}


@pytest.mark.slow
def test_the_commands_run_in_order(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "smollm2").symlink_to(base)
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "smollm2", ignore=shutil.ignore_patterns("study", "model"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ran = 0
    for step in steps_of(PAGE):
        if step.language == "python":
            exec(compile(step.text, PAGE, "exec"), {})
            names = ["base", "math", "french", "math+french@bottom=8,top=0"]  # an answer may have several lines
            printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
            assert [word for word in printed if word in names] == names
            continue
        if step.text.startswith(ELSEWHERE):
            continue
        if "--gguf smollm2-f16.gguf" in step.text:
            write_f16()
        words = shlex.split(step.text, comments=True)[1:]
        extra = next((more for start, more in LONG.items() if step.text.startswith(start)), [])
        result = CliRunner().invoke(main, [*words, *(word for word in extra if word not in words)])
        assert result.exit_code == 0, (step.text, result.output)
        ran += 1
    assert ran == 8


def write_f16() -> None:
    """The GGUF file that the page's script writes."""
    import runpy

    runpy.run_path(str(EXAMPLE / "base.py"))["write_gguf"](Path("smollm2-f16.gguf"))
