"""How an error reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result

import adapterswap
from adapterswap.cli.flags import with_flags
from adapterswap.errors import AdapterswapError, reason_of


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no such\n  file.", "no such file"),
        ("", "ValueError"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
    ],
)
def test_a_librarys_error_is_one_short_line(message: str, told: str) -> None:
    assert reason_of(ValueError(message)) == told


@pytest.mark.parametrize(
    ("mend", "told"), [("Correct it", "Correct it."), ("Correct it.", "Correct it."), ("Is it 'a'?", "Is it 'a'?")]
)
def test_a_mend_ends_once(mend: str, told: str) -> None:
    assert str(AdapterswapError("it is wrong.", mend)) == f"it is wrong. {told}"


@click.command()
@click.option("-o", "--out-path")
@click.option("--overwrite/--keep", is_flag=True)
@click.option("--max-rank", type=int)
@click.option("--set", "overrides", multiple=True)
@click.argument("recipe")
def command() -> None:
    """As commands declare their options."""


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("Pass `overwrite=True`.", "Pass --overwrite."),
        ("Pass `out_path`, or `out_path:` in the recipe", "Pass --out-path, or `out_path:` in the recipe"),
        ("Pass `max_rank=64` or `overrides`", "Pass --max-rank 64 or --set"),
        ("Correct `recipe`, `alpha=1` or `max_rank`", "Correct `recipe`, `alpha=1` or --max-rank"),
    ],
)
def test_parameters_are_printed_as_flags(text: str, printed: str) -> None:
    assert with_flags(text, command) == printed
    assert with_flags(text, click.Group(commands=[command])) == printed


def test_python_reads_a_parameter_where_the_terminal_reads_a_flag(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AdapterswapError, match=r"pass `overwrite=True`") as caught:
        adapterswap.extract("full", "base", tmp_path / "file", rank=1)
    assert "--" not in str(caught.value)
    told = run("extract", "full", "--base-model", "base", "-o", tmp_path / "file", "--rank", "1").stderr
    assert "pass --overwrite." in told
    assert "`" not in told
