"""Progress: rates, time left, lines in a log, bars at a terminal; --quiet, --verbose; colours only on terminals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import Result

from adapterswap.cli import COMMANDS
from adapterswap.cli.output import count_bar, progress_bar
from adapterswap.kit import progress
from adapterswap.kit.progress import Progress, duration, rate_text

Run = Callable[..., Result]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(progress, "time", moved)
    return moved


def test_durations_and_rates() -> None:
    assert [duration(s) for s in (0, 40.4, 119, 720, 12240)] == ["0 s", "40 s", "1 min 59 s", "12 min", "3.4 h"]
    assert [rate_text(r) for r in (1234.5, 3.21, 0.25, 0.001)] == ["1,234/s", "3.2/s", "15/min", "3.6/h"]


def test_a_row_without_a_steady_rate_guesses_the_time_left(clock: Clock) -> None:
    told: list[tuple[int, int]] = []
    row = Progress(shown=False, tell=lambda done, total: told.append((done, total))).row("seed 0", 100, steady=False)
    clock.now += 30
    row.update(5)
    assert str(row) == "seed 0: 5%, 30 s so far"
    clock.now += 60
    row.update(60)
    assert str(row) == "seed 0: 60%, 1 min 30 s so far, about 1 min left"
    assert told == [(0, 100), (5, 100), (60, 100)]


def test_a_row_that_is_removed_leaves_the_line_and_lines_can_be_rarer(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(line_every=60) as bars:
        one, other = (bars.row(f"seed {number}", 100, steady=False) for number in (0, 1))
        for _ in range(13):
            clock.now += 10
            one.update(50)
            other.update(20)
            if clock.now >= 1070 and one.name == "seed 0" and bars._rows[0] is one:
                bars.remove(one)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert (lines[0].count("seed 0"), lines[0].count("seed 1")) == (1, 1)
    assert (lines[1].count("seed 0"), lines[1].count("seed 1")) == (0, 1)


def test_a_log_has_a_line_after_five_seconds_and_then_every_ten(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress() as shown:
        row = shown.row("rows")
        row.begin("rows", 100, done=20)
        for _ in range(25):
            clock.now += 1
            row.update(row.done + 2, note="loss 1.5")
        lines = capsys.readouterr().err.splitlines()
        assert lines == [
            "rows: 30 of 100, 2.0/s, 35 s left, loss 1.5",
            "rows: 50 of 100, 2.0/s, 25 s left, loss 1.5",
            "rows: 70 of 100, 2.0/s, 15 s left, loss 1.5",
        ]


def test_the_time_left_falls_while_one_of_a_count_is_running(clock: Clock) -> None:
    """20 equal cells of 100 requests, one request a second: what is left is what there is to do."""
    row = Progress(shown=False).row("cells", 20)
    for cell in range(3):
        for request in range(0, 100, 25):
            row.update(cell, part=request / 100)
            left = 20 * 100 - cell * 100 - request
            if cell or request:
                assert str(row).endswith(f", {duration(left)} left")
            clock.now += 25


def test_a_count_of_parts_has_no_rate_and_at_first_no_time_left(clock: Clock) -> None:
    with Progress() as shown:
        row = shown.row("seed 0", 100, steady=False)
        clock.now += 40
        row.update(15, name="seed 0: language expert")
        assert str(row) == "seed 0: language expert: 15%, 40 s so far"
        row.update(100, name="seed 0: done")
        assert str(row) == "seed 0: done: 100%"


def test_a_step_without_reports_still_logs(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as shown:
        shown.row("loading the base")
        shown.row("requests", 4)
        clock.now += 7
        for _ in range(100):
            if err := capsys.readouterr().err:
                break
            shown._stop.wait(0.1)
        assert err == "loading the base: 7 s so far; requests: 0 of 4\n"


def test_nothing_is_written_if_disabled_or_quick(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(shown=False) as hidden:
        row = hidden.row("rows", 3)
        clock.now += 100
        row.update(1)
    with progress_bar("modules", 2) as advance, count_bar("requests") as report:
        advance()
        report(0, 5)
        report(5, 5)
    assert capsys.readouterr().err == ""


def test_a_closed_stream_is_not_an_error(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        shown = Progress().__enter__()
    row = shown.row("rows", 3)
    clock.now += 100
    row.update(1)
    shown.__exit__()


def test_quiet_prints_results_and_warnings_only(run: Run, math: Path, tmp_path: Path) -> None:
    shutil.copytree(math, tmp_path / "copy")
    options = ["-t", math, "-l", math, "--bottom", 1, "--top", 1]
    loud = run("compose", *options, "-o", tmp_path / "one")
    quiet = run("compose", *options, "-o", tmp_path / "two", "--quiet")
    assert quiet.exit_code == 0
    assert quiet.stdout == loud.stdout
    warnings = [line for line in loud.stderr.splitlines() if line.startswith("Warning: ")]
    assert warnings
    assert quiet.stderr.splitlines() == warnings
    assert len(loud.stderr.splitlines()) > len(warnings)


def test_verbose_shows_the_traceback_of_an_error(run: Run, tmp_path: Path) -> None:
    plain, verbose = run("inspect", tmp_path / "none"), run("inspect", tmp_path / "none", "-v")
    assert (plain.exit_code, verbose.exit_code) == (3, 3)
    assert "Traceback" not in plain.stderr
    assert verbose.stderr.startswith("Traceback (most recent call last):")
    assert verbose.stderr.endswith(plain.stderr)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "recipes"])
def test_every_command_has_both(name: str, run: Run) -> None:
    shown = run(name, "-h").stdout
    assert all(shown.count(flag) == 1 for flag in ("-q, --quiet", "-v, --verbose"))


def at_a_terminal(command: list[str], env: Mapping[str, str]) -> str:
    """What a command writes to a pseudo-terminal."""
    pty = pytest.importorskip("pty")
    main, terminal = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")}
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env={**kept, "TERM": "xterm-256color", **env})
    os.close(terminal)
    written = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(main)
    assert process.wait() == 0
    return written.decode()


SHOWS = (
    "import click, time\n"
    "from adapterswap.cli.output import print_table, progress_bar\n"
    "from rich.table import Table\n"
    "with progress_bar('modules', 4) as advance:\n    for _ in range(4): advance(); time.sleep(0.15)\n"
    "table = Table('[green]layer[/]', header_style='bold red'); table.add_row('1'); print_table(table)\n"
)
COLOUR = re.compile(r"\x1b\[[\d;]*(3[0-7]|9[0-7]|38;)[\d;]*m")


def test_colours_are_for_terminals(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHOWS]
    coloured = at_a_terminal(command, {})
    assert COLOUR.search(coloured)
    assert "modules" in coloured
    assert not COLOUR.search(at_a_terminal(command, {"NO_COLOR": "1"}))
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    piped = subprocess.run(command, capture_output=True, text=True, check=True, env=kept)
    assert "\x1b" not in piped.stdout + piped.stderr
    assert "layer" in piped.stdout
    assert piped.stderr == ""
