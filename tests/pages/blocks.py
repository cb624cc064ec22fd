"""The blocks of a page as steps, and a folder in which they run in the page's order. Knows no page by name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from adapterswap.cli import main

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One command line, or one whole block of another language."""

    page: str
    line: int
    language: str  # bash, console, python or yaml
    text: str
    shown: str | None = None  # what the page says that it prints

    @property
    def fails(self) -> bool:
        """The page shows an error."""
        return bool(re.search(r"^Error:", self.shown or "", flags=re.MULTILINE))

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.strip()}"


def steps_of(page: str) -> list[Step]:
    """Everything on a page that a reader may run or copy, in order."""
    content = (ROOT / page).read_text(encoding="utf-8")
    steps: list[Step] = []
    for match in _BLOCK.finditer(content):
        language, text = match.groups()
        line = content[: match.start()].count("\n") + 2
        if language == "console":
            command, _, shown = text.removeprefix("$ ").partition("\n")
            steps.append(Step(page, line, language, command, shown))
        elif language in ("bash", "sh"):
            steps += [Step(page, line + at, "bash", command) for at, command in _commands(text)]
        elif language in ("python", "yaml"):
            steps.append(Step(page, line, language, text))
    return steps


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """The commands of a block: continued lines joined, and a script or a loop as one."""
    if text.startswith("#!") or re.search(r"^done\b", text, flags=re.MULTILINE):
        yield 0, text
        return
    command, start = "", 0
    for at, line in enumerate(text.splitlines()):
        start = start if command else at
        command += line
        if command.endswith("\\"):
            command = command[:-1]
        else:
            if command.strip() and not command.lstrip().startswith("#"):
                yield start, command
            command = ""


class Reader:
    """Follows a page in the current folder, which `cd` changes; Python blocks share their names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def follow(self, step: Step) -> str:
        """Run a step exactly as written and return what it printed; AssertionError if it fails."""
        if step.language == "python":
            exec(compile(step.text, f"{step.page}:{step.line}", "exec"), self.names)
            return ""
        words = shlex.split(step.text, comments=True)
        if words[0] == "cd" and len(words) == 2:
            os.chdir(words[1])
            return ""
        if words[0] != "adapterswap" or {"|", "&&", ";"} & set(words):
            return self._shell(step)
        *words, target = [*words, None] if ">" not in words else [*words[: words.index(">")], words[-1]]
        result = CliRunner().invoke(main, words[1:], prog_name="adapterswap")  # type: ignore[arg-type]
        assert (result.exit_code != 0) == step.fails, f"{step}\n{result.output}\n{result.exception!r}"
        if target:
            Path(target).write_text(result.stdout, encoding="utf-8")
        return result.output

    def _shell(self, step: Step) -> str:
        """Run a shell line; if it changes folders, this process does too."""
        shims = f'python() {{ "{sys.executable}" "$@"; }}; adapterswap() {{ python -m adapterswap "$@"; }}'
        script = f"set -e; {shims}\n{step.text}\npwd"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
        assert result.returncode == 0, f"{step}\n{result.stdout}{result.stderr}"
        *printed, folder = result.stdout.splitlines()
        os.chdir(folder)
        return "\n".join(printed)


def check_shown(step: Step, printed: str) -> None:
    """Check that the page shows what was printed; "…" stands for any lines, or within a line for any characters.

    Standard output and standard error may come in either order.
    """
    assert step.shown is not None
    expected, actual = ([line.rstrip() for line in text.splitlines()] for text in (step.shown, printed))
    if "…" in step.shown:
        patterns = [".*".join(map(re.escape, line.split("…"))) for line in expected]
        assert [p for p in patterns if not any(re.fullmatch(p, line) for line in ["", *actual])] == [], printed
    else:
        assert sorted(expected) == sorted(actual), step


def changed(step: Step, changes: list[tuple[str, str, str]]) -> tuple[Step, set[int]]:
    """Apply all changes for the page to the step's text; also returns the numbers of those that matched."""
    used = set()
    for number, (page, old, new) in enumerate(changes):
        if page == step.page and old in step.text:
            step = replace(step, text=step.text.replace(old, new))
            used.add(number)
    return step, used
