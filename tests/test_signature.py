"""Commands from signatures: what a function's parameters and `Args:` become, and how their mistakes are worded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner, Result

from adapterswap.cli import COMMANDS, find_command
from adapterswap.cli.options import Count, Json
from adapterswap.cli.signature import GROUPS, Options, declare
from adapterswap.core.methods.registry import PARAMETERS

Run = Callable[..., Result]
_COMPOSING = ("compose", "merge", "export", "evaluate")


def _pair(*, first: int = 1, second: Annotated[float, "Y"] | None = None) -> tuple[int, float | None]:
    """Two numbers.

    Args:
        second: The other number,
            on two lines.
    """
    return first, second


@declare("example")
def example(
    names: Annotated[tuple[str, ...], "NAME…"],
    *,
    pair: Annotated[tuple[int, float | None], Options(_pair)],
    count: Count = 3,
    kind: Literal["a", "b"] | None = None,
    words: Annotated[tuple[str, ...], "-w", "--word", "WORD"] = (),
    loud: bool = False,
    as_json: Json = False,
) -> None:
    """Print what it received.

    Args:
        count: How many.
    """
    click.echo(repr((names, pair, count, kind, words, loud, as_json)))


def test_parameters_become_arguments_and_options() -> None:
    shown = CliRunner().invoke(example, ["x", "y", "--count", "5", "-w", "a", "--word", "b", "--second", "2", "--loud"])
    assert shown.output == "(('x', 'y'), (1, 2.0), 5, None, ('a', 'b'), True, False)\n"
    text = CliRunner().invoke(example, ["-h"]).output
    assert text.splitlines()[2:5] == ["  Print what it received.", "", "Options:"]
    assert re.search(r"--second Y +The other number, on two lines\.\n", text)
    assert re.search(r"--count N +How many\. +\[default: 3; x>=1\]", text)
    assert "Args" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compose", "--bottom", "x"], "--bottom is x, but must be a whole number."),
        (["compose", "--max-rank", "0"], "--max-rank is 0, but must be 1 or more."),
        (["compose", "--density", "x"], "--density is x, but must be above 0, at most 1."),
        (["compose", "--layout", "x"], "--layout is x, but must be one of exact, portable."),
        (["compose", "--method", "tis"], "There is no method 'tis'. Did you mean 'ties'?"),
        (["extract", "x", "--base-model", "x", "--rank", "0"], "--rank is 0, but must be 1 to 65536."),
        (["studio", "--port", "0"], "--port is 0, but must be 1 to 65535."),
        (["recipes", "ls", "--all"], "No such option '--all'. See `main recipes ls -h`."),
        (["slice", "x", "--layers", "0"], "Missing option '-o' / '--out-path'. See `main slice -h`."),
        (["slice", "--layers", "0"], "Missing argument 'EXPERT'. See `main slice -h`."),
        (["slice", "x", "-o", "y"], "Missing option '--layers'. See `main slice -h`."),
        (["report"], "Missing argument 'RUN…'. See `main report -h`."),
        (["compose", "x", "y"], "Got unexpected extra argument (y). See `main compose -h`."),
        (["evaluate", "--seed", "1"], "No such option '--seed'. Did you mean --method-seed or --sampling-seed?"),
        (["compose", "--bottem", "1"], "No such option '--bottem'. Did you mean --bottom?"),
        (["recipes", "show"], "No such command 'show'. See `main recipes -h`."),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(arguments: list[str], message: str, run: Run) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {message}\n"


def test_a_group_without_a_command_prints_its_help(run: Run) -> None:
    shown = run("recipes")
    assert shown.exit_code == 2
    assert shown.output.splitlines()[0] == "Usage: main recipes [OPTIONS] COMMAND [ARGS]..."


@pytest.mark.parametrize("name", _COMPOSING)
def test_help_of_composing_commands_has_groups(name: str, run: Run) -> None:
    """In the same order everywhere; parameters of methods are accepted, and shown by `adapterswap methods NAME`."""
    text = run(name, "-h").output
    titles = re.findall(r"^(\w+):", text, flags=re.MULTILINE)[1:]
    assert titles == [*(title for title in GROUPS if title in titles), "Examples"]
    assert {"Experts", "Layers", "Method", "Output", "General"} <= {*titles}
    options = {param.name for param in find_command(name).params}
    assert {name for name, parameter in PARAMETERS.items() if parameter.has_option} <= options
    assert not {name for name, parameter in PARAMETERS.items() if not parameter.has_option} & options
    assert "--density X" not in text


def test_methods_shows_one_method(run: Run) -> None:
    text = run("methods", "ties").output
    (line,) = [line for line in text.splitlines() if line.startswith("--density ")]
    assert line.startswith("--density                Share of ΔW to keep")
    assert line.endswith("  [required]  (above 0, at most 1)")
    wrong = run("methods", "tis")
    assert (wrong.exit_code, wrong.stderr) == (2, "Error: There is no method 'tis'. Did you mean 'ties'?\n")


def test_a_dry_run_needs_no_output(
    run: Run, math: Path, swahili: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    experts: list[Any] = ["-t", math, "-l", swahili]
    for arguments in (
        ["compose", *experts],
        ["slice", math, "--layers", "0-1"],
        ["merge", *experts],
        ["convert", math],
    ):
        result = run(*arguments, "--dry-run")
        assert result.exit_code == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not any((tmp_path / "out").iterdir())


def test_only_training_has_an_option_called_seed() -> None:
    flags = {name: {o for p in find_command(name).params for o in p.opts} for name in COMMANDS}
    assert [name for name, own in flags.items() if "--seed" in own] == ["train"]
