"""How errors are worded and classified."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result

import adapterswap
from adapterswap.cli import EXIT_CODES
from adapterswap.cli.output import with_flags
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    FieldError,
    OutputError,
    Problems,
    and_more,
    did_you_mean,
    reason_of,
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no such\n  file.", "no such file"),
        ("", "ValueError"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
    ],
)
def test_a_librarys_error_is_one_short_line(message: str, expected: str) -> None:
    assert reason_of(ValueError(message)) == expected


@pytest.mark.parametrize(
    ("names", "at_most", "expected"),
    [
        (["a"], 1, "a"),
        (["a", "b"], 1, "a and 1 more"),
        (["a", "b"], 2, "a, b"),
        (["a", "b", "c", "d"], 2, "a, b and 2 more"),
    ],
)
def test_the_rest_of_many_names_is_counted(names: list[str], at_most: int, expected: str) -> None:
    assert and_more(names, at_most) == expected


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [("Correct it", "Correct it."), ("Correct it.", "Correct it."), ("Is it 'a'?", "Is it 'a'?")],
)
def test_a_remedy_has_one_full_stop(remedy: str, expected: str) -> None:
    assert str(AdapterswapError("it is wrong.", remedy)) == f"it is wrong. {expected}"


@click.command()
@click.option("-o", "--out-path")
@click.option("--overwrite/--keep", is_flag=True)
@click.option("--max-rank", type=int)
@click.option("--set", "overrides", multiple=True)
@click.argument("recipe")
def command() -> None:
    """A command with options declared as in the real ones."""


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("Pass `overwrite=True`.", "Pass --overwrite."),
        ("Pass `out_path`, or `out_path:` in the recipe", "Pass --out-path, or `out_path:` in the recipe"),
        ("Pass `max_rank=64` or `overrides`", "Pass --max-rank 64 or --set"),
        ("Pass `overrides={'swahili': PATH}`", "Pass --set swahili=PATH"),
        ("Correct `recipe`, `alpha=1` or `max_rank`", "Correct `recipe`, `alpha=1` or --max-rank"),
    ],
)
def test_parameters_are_printed_as_flags(text: str, printed: str) -> None:
    assert with_flags(text, command) == printed
    assert with_flags(text, click.Group(commands=[command])) == printed


def test_python_shows_a_parameter_where_the_terminal_shows_a_flag(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AdapterswapError, match=r"pass `overwrite=True`") as caught:
        adapterswap.extract("full", "base", tmp_path / "file", rank=1)
    assert "--" not in str(caught.value)
    expected = run("extract", "full", "--base-model", "base", "-o", tmp_path / "file", "--rank", "1").stderr
    assert "pass --overwrite." in expected
    assert "`" not in expected


@pytest.mark.parametrize(
    ("kinds", "common"),
    [
        ((ExpertError,), ExpertError),
        ((ExpertError, ExpertError), ExpertError),
        ((FieldError, ArgumentError), AdapterswapError),
        ((ExpertError, OutputError), AdapterswapError),
    ],
)
def test_an_error_has_the_common_class_of_its_problems(
    kinds: tuple[type[AdapterswapError], ...], common: type[AdapterswapError]
) -> None:
    problems = Problems(ExpertError)
    for number, kind in enumerate(kinds):
        with problems.collect():
            raise kind(f"problem {number}", "Correct it", parameter=f"p{number}")
    error = problems.as_error()
    assert type(error) is common
    assert [problem.kind for problem in error.problems] == list(kinds)
    assert error.parameter == "p0"
    assert type(error.within("here")) is common
    assert [problem.kind for problem in error.within("here").problems] == list(kinds)


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(OutputError("out exists", "Choose another", parameter="out_path")))
    assert (type(error), error.parameter, str(error)) == (OutputError, "out_path", "out exists. Choose another.")


def test_a_caller_can_name_another_parameter() -> None:
    problems = Problems(ExpertError)
    for number in range(25):
        problems.add(f"tensor {number} is missing", "Save it again")
    error = problems.as_error().recast(BaseModelError, parameter="base_model")
    assert (type(error), error.parameter, error.omitted) == (BaseModelError, "base_model", 5)
    assert {problem.kind for problem in error.found} == {BaseModelError}
    assert str(error) == str(problems.as_error())
    assert type(problems.as_error().recast(parameter="task")) is ExpertError


def test_every_class_of_errors_has_its_exit_code() -> None:
    assert set(EXIT_CODES) == set(AdapterswapError.__subclasses__())
    assert set(EXIT_CODES.values()) == {2, 3}


@pytest.mark.parametrize(
    ("kinds", "code"),
    [([kind], code) for kind, code in EXIT_CODES.items()]
    + [([ArgumentError, FieldError], 2), ([ArgumentError, OutputError], 3)],
)
def test_a_command_ends_with_the_code_of_its_errors(
    kinds: list[type[AdapterswapError]], code: int, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = Problems()
    for kind in kinds:
        problems.add("x is wrong", "Correct it", kind=kind)

    def fail(*_: object, **__: object) -> None:
        problems.raise_if_any()

    monkeypatch.setattr("adapterswap.tools.inspection.inspect", fail)
    assert run("inspect", "anything").exit_code == code


@pytest.mark.parametrize("option", [["--bottom", "-1"], ["--max-rank", "0"]])
def test_the_same_kind_of_mistake_has_the_same_code(option: list[str], run: Callable[..., Result], math: Path) -> None:
    assert run("compose", "-t", math, "-l", math, "-o", "out", *option).exit_code == 2


def test_an_interrupted_command_ends_with_130(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("adapterswap.tools.inspection.inspect", interrupt)
    result = run("inspect", "anything")
    assert (result.exit_code, result.stdout) == (130, "")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("data", "Did you mean 'datasets'?"),  # the only known name that it begins
        ("dat", "Did you mean 'date'?"),  # it begins two, and one looks more alike
        ("seeds", "Did you mean 'seed'?"),
        ("other", "Remove it"),
    ],
)
def test_an_unknown_name_gets_the_one_that_was_meant(name: str, remedy: str) -> None:
    assert did_you_mean(name, ["datasets", "date", "seed"], "Remove it") == remedy
