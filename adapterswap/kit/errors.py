"""The errors of adapterswap: a small tree of classes under `AdapterswapError`.

Every message names the offending value and the rule that it breaks; its remedy says what to do. Several mistakes are
reported in one error where possible. Messages may quote untrusted files, so control characters in them are escaped
before they reach a terminal.

A message refers to a parameter as you type it in Python, in backticks: "Pass `overwrite=True`", "Pass `num_layers`",
"Pass `max_rank=64`". The command line replaces it with the flag of the same name (`--overwrite`, `--num-layers`,
`--max-rank 64`) if the command has one: see `adapterswap.cli.output`. So no message in the library names a flag.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import NamedTuple

_MOST = 20  # problems in one error
_ALIKE = 3  # problems of one expert with one remedy
_LENGTH = 1000  # characters of one problem
_REASON = 200  # characters of a library's error


def printable(text: str) -> str:
    """`text` on one line: unprintable characters, such as newlines and escapes, are written as their codes."""
    if text.isprintable():
        return text

    characters = []
    for character in text:
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(characters)


# What moves the cursor, changes colours or the direction of writing, or ends a line or a file; not a tab, a newline or
# a joiner, which Telugu and Bengali need.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def visible(text: str) -> str:
    """`text` with control characters written as `\\u202e`, so that nothing looks like what it is not.

    In a JSON document these are the escapes of the same characters, so that its content stays the same.
    """
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def reason_of(error: BaseException, most: int = _REASON) -> str:
    """A library's error in one line of at most this many characters."""
    reason = (" ".join(str(error).split()) or type(error).__name__).removesuffix(".")
    if len(reason) <= most:
        return reason
    return f"{reason[: most - 1]}…"


def and_more(names: Sequence[str], at_most: int = 1) -> str:
    """The first names, and how many more there are."""
    first = ", ".join(names[:at_most])
    if len(names) <= at_most:
        return first
    return f"{first} and {len(names) - at_most} more"


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, at_most: int = 1) -> str:
    """The remedy for an unknown name: "Did you mean 'math'?" if a known name is similar, else `otherwise`.

    A name that begins a single known one is its short form: `data` means `datasets`, though `date` looks more alike.
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=at_most)

    longer = [one for one in known if one.startswith(name)]
    if len(name) > 2 and len(longer) == 1:
        near = longer

    if not near:
        return otherwise
    return f"Did you mean {' or '.join(map(repr, near))}?"


def check_type(value: object, expected: type | tuple[type, ...], parameter: str, remedy: str) -> None:
    """Raise an `ArgumentError` that names the parameter and its type, unless `value` has an expected type.

    A boolean counts as a number only where booleans are expected.
    """
    types = expected if isinstance(expected, tuple) else (expected,)
    is_stray_boolean = isinstance(value, bool) and bool not in types
    if is_stray_boolean or not isinstance(value, types):
        raise ArgumentError(f"`{parameter}` is of type {type(value).__name__}", remedy, parameter=parameter)


class AdapterswapError(Exception):
    """The base class of all errors below: bad input, with a message that says what to do about it.

    An error with several problems has the closest class that they have in common.

    Attributes:
        problems: one or more `Problem`s, in the order in which they were found.
        omitted: how many more problems there were; the last item of `problems` says so.
        signal: the number of the signal that ended the work; None if none did. The exit code then says so.
    """

    signal: int | None = None

    def __init__(
        self,
        message: str | Iterable[Problem],
        remedy: str = "",
        *,
        parameter: str | None = None,
        omitted: int = 0,
    ) -> None:
        self.problems: tuple[Problem, ...]
        if isinstance(message, str):
            self.problems = (Problem(message, remedy, parameter, type(self)),)
        else:
            self.problems = tuple(message)

        self.omitted = omitted
        if omitted:
            counted = "problem was" if omitted == 1 else "problems were"
            self.problems += (Problem(f"{omitted} more {counted} found", "Correct these first"),)

        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[partial[AdapterswapError], tuple[tuple[Problem, ...]]]:
        """Keep the problems when a worker process passes an error back; by default only the text would survive."""
        return partial(type(self), omitted=self.omitted), (self.found,)

    @property
    def parameter(self) -> str | None:
        """The first offending parameter, as Python users type it; None where no single parameter is at fault."""
        for problem in self.problems:
            if problem.parameter:
                return problem.parameter
        return None

    @property
    def found(self) -> tuple[Problem, ...]:
        """The problems, without the last item if that only counts those omitted."""
        if self.omitted:
            return self.problems[:-1]
        return self.problems

    def recast(self, kind: type[AdapterswapError] | None = None, *, parameter: str | None = None) -> AdapterswapError:
        """The same problems with another class or `parameter`, where only the caller knows the right one."""
        problems = []
        for problem in self.found:
            problems.append(problem._replace(kind=kind or problem.kind, parameter=parameter or problem.parameter))
        return (kind or type(self))(problems, omitted=self.omitted)

    def with_names(self, names: Mapping[str, str]) -> AdapterswapError:
        """The same error, with each text that `names` has, such as a path, replaced by its name; longer ones first."""

        def named(text: str) -> str:
            for path in sorted(names, key=len, reverse=True):
                text = text.replace(path, names[path])
            return text

        problems = []
        for problem in self.found:
            problems.append(problem._replace(message=named(problem.message), remedy=named(problem.remedy)))
        return type(self)(problems, omitted=self.omitted)

    def within(self, where: str) -> AdapterswapError:
        """The same error, with `where` (a file or a cell of a table) before each message."""
        problems = [problem._replace(message=f"{where}: {problem.message}") for problem in self.found]
        return type(self)(problems, omitted=self.omitted)


class ArgumentError(AdapterswapError, ValueError):
    """An argument has the wrong type or value, or contradicts another one."""


class FieldError(AdapterswapError, ValueError):
    """Fields of a recipe, a rule or a composition are unknown, missing or have unsuitable values."""


class CompositionError(AdapterswapError, ValueError):
    """A composition cannot be applied to these experts: zones overlap, a name is unknown, a rule matches nothing."""


class ExpertError(AdapterswapError):
    """An adapter or full checkpoint is damaged or inconsistent, or does not fit the other experts or the base."""


class BaseModelError(AdapterswapError):
    """The base model is unknown, damaged, or not the one that the experts were made for."""


class DataError(AdapterswapError):
    """Training data, an evaluation task or a table of results is malformed or lacks what is needed."""


class NotFoundError(AdapterswapError):
    """A path does not exist, or a repository could not be downloaded from the Hub."""


class OutputError(AdapterswapError):
    """The output path is taken, would destroy an input, or cannot be written."""


class UnsupportedError(AdapterswapError):
    """The input is sound, but this operation or engine cannot carry it out exactly."""


class DependencyError(AdapterswapError):
    """A package or program is missing, or its version is too old."""


class RunError(AdapterswapError):
    """A training run, a sweep or a server could not start, resume or continue."""


class Problem(NamedTuple):
    """One mistake.

    Attributes:
        message: names the value and the rule that it breaks.
        remedy: what to do; empty where the rule already says it.
        parameter: the offending parameter, as Python users type it.
        kind: the class of error that this problem alone would raise.
    """

    message: str
    remedy: str
    parameter: str | None = None
    kind: type[AdapterswapError] = AdapterswapError

    def __str__(self) -> str:
        message = self.message
        if len(message) > _LENGTH:
            message = f"{message[: _LENGTH // 2]}…{message[-_LENGTH // 2 :]}"
        parts = [f"{message.rstrip('.')}."]
        if self.remedy:
            parts.append(self.remedy if self.remedy.endswith("?") else f"{self.remedy.rstrip('.')}.")
        return printable(" ".join(parts))


class Problems:
    """Collect mistakes and raise them together; many that are alike, and those beyond the first 20, are only counted.

    >>> problems = Problems(ExpertError)
    >>> problems.add("rank 0 is not positive", "Choose a rank of 1 or more", parameter="rank")
    >>> problems.raise_if_any()
    Traceback (most recent call last):
    adapterswap.kit.errors.ExpertError: rank 0 is not positive. Choose a rank of 1 or more.
    """

    def __init__(self, kind: type[AdapterswapError] = AdapterswapError, where: str = "") -> None:
        """Start without mistakes.

        Args:
            kind: the class of the problems, unless `add` passes another.
            where: a file or folder, put before each message that `add` gets or `collect` catches.
        """
        self._kind = kind
        self.where = where
        self._problems: dict[Problem, None] = {}  # a dict: no problem is reported twice, and the order is kept
        self._omitted = 0

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._problems)

    def __bool__(self) -> bool:
        return bool(self._problems)

    def add(
        self, message: str, remedy: str, *, parameter: str | None = None, kind: type[AdapterswapError] | None = None
    ) -> None:
        if self.where:
            message = f"{self.where}: {message}"
        self._keep(Problem(message, remedy, parameter, kind or self._kind))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the problems of an `AdapterswapError` raised inside the block, and continue after it."""
        try:
            yield
        except AdapterswapError as error:
            self.keep(error.within(self.where) if self.where else error)

    def keep(self, error: AdapterswapError) -> None:
        """Keep the problems of an error as they are."""
        for problem in error.found:
            self._keep(problem)
        self._omitted += error.omitted

    def as_error(self, kind: type[AdapterswapError] | None = None) -> AdapterswapError:
        """One error with all problems, of class `kind`; by default of the closest class that they have in common."""
        if kind is None:
            kind = reduce(_closest, [problem.kind for problem in self._problems])
        return kind(self._problems, omitted=self._omitted)

    def raise_if_any(self) -> None:
        if self._problems:
            raise self.as_error()

    def _keep(self, problem: Problem) -> None:
        if problem in self._problems:
            return

        # A wrong config has the same problem in every module. Fields of a recipe differ, so all of them are shown.
        is_repeated = False
        if issubclass(problem.kind, ExpertError | UnsupportedError):
            alike = sum(_group(other) == _group(problem) for other in self._problems)
            is_repeated = alike >= _ALIKE

        if len(self._problems) < _MOST and not is_repeated:
            self._problems[problem] = None
        else:
            self._omitted += 1


def _group(problem: Problem) -> tuple[type, str, str]:
    """What problems have in common that are alike: the class, the remedy, and the subject before the colon."""
    return problem.kind, problem.remedy, problem.message.partition(": ")[0]


def _closest(one: type[AdapterswapError], other: type[AdapterswapError]) -> type[AdapterswapError]:
    """The closest class that two errors share."""
    return next(base for base in one.__mro__ if issubclass(base, AdapterswapError) and issubclass(other, base))
