"""The one kind of error that a user of adapterswap meets.

Every message names the offending value, the rule that it breaks, and the mend. Mistakes that can be found together are
reported together. Messages quote files that come from strangers, so nothing in them can steer a terminal. This module
knows nothing of adapters, files or the command line.

A message that refers to a parameter names it as Python users type it, in backticks: "Pass `overwrite=True`", "Pass
`num_layers`", "Pass `max_rank=64`". The command line prints the flag of the same name instead (`--overwrite`,
`--num-layers`, `--max-rank 64`) where the command has one: see `adapterswap.cli.flags`. So no message of the library
names a flag.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = [
    "AdapterswapError",
    "FieldError",
    "Problem",
    "Problems",
    "check_type",
    "did_you_mean",
    "printable",
    "reason_of",
]

_TOLD = 20  # mistakes told at once; a wrong config would otherwise repeat itself for every module
_LENGTH = 1000  # characters of one mistake
_REASON = 200  # characters of a library's error


def printable(text: str) -> str:
    """`text` on one line: a character that is not printable, such as a newline or an escape, is written as its code."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def reason_of(error: BaseException) -> str:
    """A library's error in one short line."""
    told = (" ".join(str(error).split()) or type(error).__name__).removesuffix(".")
    return told if len(told) <= _REASON else f"{told[: _REASON - 1]}…"


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, at_most: int = 1) -> str:
    """The remedy for an unknown name: "Did you mean 'math'?" where a known one is near, else `otherwise`."""
    near = difflib.get_close_matches(name, known, n=at_most)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def check_type(value: object, expected: type | tuple[type, ...], parameter: str, remedy: str) -> None:
    """Raise an `AdapterswapError` that names the parameter and the type if `value` is not of an expected type."""
    if not isinstance(value, expected):
        raise AdapterswapError(f"`{parameter}` is of type {type(value).__name__}", remedy)


@dataclass(frozen=True)
class Problem:
    """One mistake: `what` names the value and the rule that it breaks, `mend` says what to do."""

    what: str
    mend: str

    def __str__(self) -> str:
        what = self.what if len(self.what) <= _LENGTH else f"{self.what[: _LENGTH // 2]}…{self.what[-_LENGTH // 2 :]}"
        mend = self.mend if self.mend.endswith("?") else f"{self.mend.rstrip('.')}."
        return printable(f"{what.rstrip('.')}. {mend}")


class AdapterswapError(Exception):
    """Bad input, told in a form that a user can act on.

    Attributes:
        problems: one or more `Problem`s, in the order in which they were found.
        untold: how many more there were; the last problem says so.
    """

    def __init__(self, what: str | Iterable[Problem], mend: str = "", *, untold: int = 0) -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, mend),) if isinstance(what, str) else tuple(what)
        self.untold = untold
        if untold:
            self.problems += (Problem(f"{untold} more problems were found", "Mend these first"),)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def within(self, where: str) -> AdapterswapError:
        """The same error, each problem of which begins with `where`: a file or a cell of a table."""
        found = self.problems[: -1 if self.untold else None]
        return AdapterswapError(
            (Problem(f"{where}: {problem.what}", problem.mend) for problem in found), untold=self.untold
        )


class FieldError(AdapterswapError, ValueError):
    """Fields of a recipe, a rule or a composition that are not sound."""


class Problems:
    """Collects mistakes, to raise them all at once; beyond the first 20 they are counted.

    >>> problems = Problems()
    >>> problems.add("rank 0 is not positive", "Give a rank of 1 or more")
    >>> problems.raise_if_any()
    Traceback (most recent call last):
    adapterswap.errors.AdapterswapError: rank 0 is not positive. Give a rank of 1 or more.
    """

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}  # a dict: no problem is told twice, and the order is kept
        self._untold = 0

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, what: str, mend: str) -> None:
        self._keep(Problem(what, mend))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the mistakes of an `AdapterswapError` raised inside, and go on."""
        try:
            yield
        except AdapterswapError as error:
            for problem in error.problems[: -1 if error.untold else None]:
                self._keep(problem)
            self._untold += error.untold

    def as_error(self, kind: type[AdapterswapError] = AdapterswapError) -> AdapterswapError:
        """One error with all of them."""
        return kind(self._found, untold=self._untold)

    def raise_if_any(self) -> None:
        if self._found:
            raise self.as_error()

    def _keep(self, problem: Problem) -> None:
        if problem in self._found:
            return
        if len(self._found) < _TOLD:
            self._found[problem] = None
        else:
            self._untold += 1
