"""Read values as their annotated types, and say all mistakes at once.

An annotation becomes a reader once. A reader takes a value and where it was written, and returns the value with the
annotated type, or raises `Mistakes`. Recipes are written by hand, so "5" and 5.0 are whole numbers, but `true` is never
a number. Records are written by programs, so every value must have its type (`strict`).

Each mistake names the key, its value and the rule that it breaks; an unknown key is named with the most similar known
one. Classes with declared fields are in `kit.files.declared`. Composing starts with this, so it imports little.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from adapterswap.kit.errors import AdapterswapError, FieldError, Problem, Problems, did_you_mean
from adapterswap.kit.files.text import shown

if TYPE_CHECKING:
    from adapterswap.kit.files.yaml import RecipeFile

REQUIRED: Any = object()
"""The default of a field that must be set."""

_T = TypeVar("_T")


class FieldMistake(ValueError):
    """Raised by a check, to name the field at fault and what to do about it."""

    def __init__(self, message: str, parameter: str | None = None, *, remedy: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter
        self.remedy = remedy


@dataclass(frozen=True)
class Source:
    """Where content was written, for the checks that depend on it.

    Attributes:
        folder: the recipe's folder; the current one if Python made the content.
        overridden: what `overrides` set, nested as a file would have it; None if the content is not from a file.
    """

    folder: Path = Path()
    overridden: Mapping[str, Any] | None = None

    def from_files(self, value: Mapping[str, Any], location: Sequence[str]) -> dict[str, Any]:
        """The part of a mapping that the files of a recipe set, and not its `overrides`.

        Args:
            value: the mapping.
            location: the keys that lead to it.
        """
        nested: Any = self.overridden
        for step in location:
            if not isinstance(nested, dict):  # not from a file, or replaced as a whole
                return {}
            nested = nested.get(step, {})
        if nested is None:
            return {}
        return {key: item for key, item in value.items() if key not in nested}


IN_PYTHON = Source()


@dataclass(frozen=True)
class Field:
    """A declared field; also, in `Annotated`, what more there is to a type.

    Attributes:
        default: what it is if it is not set.
        description: what it means.
        ge, gt, le, lt: bounds of a number.
        min_length, max_length: bounds of a list's, a mapping's or a text's length.
        alias: another key under which it is read.
        before, after: change the value before, or after, it is read as the field's type; or raise a `ValueError`.
        sited: like `before`, and is also passed the `Source`.
    """

    default: Any = REQUIRED
    description: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    alias: str | None = None
    before: Callable[[Any], Any] | None = None
    after: Callable[[Any], Any] | None = None
    sited: Callable[[Any, Source], Any] | None = None

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def bounds(self) -> list[tuple[Callable[[Any], bool], str]]:
        """The conditions that a value must meet, each with the rule in words."""
        numbers = (
            (operator.le, self.le, "at most {:g}"),
            (operator.lt, self.lt, "less than {:g}"),
            (operator.ge, self.ge, "{:g} or more"),
            (operator.gt, self.gt, "more than {:g}"),
        )
        lengths = (
            (operator.ge, self.min_length, "{} or longer"),
            (operator.le, self.max_length, "at most {} long"),
        )

        conditions: list[tuple[Callable[[Any], bool], str]] = []
        for compare, bound, rule in numbers:
            if bound is not None:
                conditions.append((partial(_compares, compare, bound), rule.format(bound)))
        for compare, length, rule in lengths:
            if length is not None:
                conditions.append((partial(_has_length, compare, length), rule.format(length)))
        return conditions


field: Any = Field
"""Declares a field of a `Declared` class."""


_UNKNOWN = "is not a known key"
_MISSING = "is missing"


@dataclass(frozen=True)
class Mistake:
    """One mistake, at a place within what was read. One of `rule`, `predicate` and `reason` says it.

    Attributes:
        location: the keys and list positions that lead to the value.
        value: what was written there.
        rule: what the value must be, in words: `a whole number`.
        predicate: what is wrong with the key: `is missing`.
        reason: what a check said; about the whole, it is a sentence of its own.
        remedy: what to do; empty where the rule says it.
        parameter: the key below the location that is at fault.
    """

    location: tuple[Any, ...] = ()
    value: Any = None
    rule: str = ""
    predicate: str = ""
    reason: str = ""
    remedy: str = ""
    parameter: str | None = None

    @staticmethod
    def of(error: ValueError, value: Any) -> Mistake:
        """The mistake that a check found in a value."""
        if isinstance(error, FieldMistake):
            return Mistake(value=value, reason=str(error), remedy=error.remedy, parameter=error.parameter)
        return Mistake(value=value, reason=str(error))

    @staticmethod
    def of_unknown_key(key: Any, known: Iterable[str]) -> Mistake:
        """The mistake of a key that is none of the known ones."""
        listed = sorted(known)
        otherwise = f"Known keys: {', '.join(listed)}" if listed else "Remove it"
        return Mistake((key,), predicate=_UNKNOWN, remedy=did_you_mean(str(key), listed, otherwise))

    @staticmethod
    def of_missing_key(name: str) -> Mistake:
        return Mistake((name,), predicate=_MISSING, remedy=f"Add `{name}:`")

    def problem(self, location: Sequence[Any]) -> Problem:
        """The problem in words; `location` is as the user wrote it."""
        path = ".".join(map(str, location))
        key = f"`{path}`" if path else "the recipe"
        parameter = path or None
        if self.parameter is not None:
            parameter = f"{path}.{self.parameter}" if path else self.parameter

        # About the key, or about the whole
        if self.predicate:
            return Problem(f"{key} {self.predicate}", self.remedy, parameter)
        if self.reason and not path:
            return Problem(self.reason, self.remedy, parameter)

        # About the value
        value = f"{self.value:g}" if isinstance(self.value, float) else shown(self.value)
        if self.reason:
            said = self.reason[:1].lower() + self.reason[1:]
            return Problem(f"{key} is {value}: {said}", self.remedy, parameter)
        remedy = self.remedy
        if isinstance(self.value, bool):
            remedy = "If it is text, quote it: YAML reads no, yes, on and off as false and true"
        return Problem(f"{key} is {value}, but must be {self.rule}", remedy, parameter)


class Mistakes(Exception):
    """All mistakes in a value."""

    def __init__(self, *mistakes: Mistake) -> None:
        super().__init__(*mistakes)
        self.mistakes = mistakes

    def at(self, step: Any) -> list[Mistake]:
        """The mistakes, as seen from the mapping or list that holds the value under this key or position."""
        return [dataclasses.replace(mistake, location=(step, *mistake.location)) for mistake in self.mistakes]


def must_be(value: Any, rule: str) -> NoReturn:
    raise Mistakes(Mistake(value=value, rule=rule))


def _compares(compare: Callable[[Any, Any], bool], bound: float, value: Any) -> bool:
    return compare(value, bound)


def _has_length(compare: Callable[[Any, Any], bool], bound: int, value: Any) -> bool:
    return compare(len(value), bound)


# Readers of types

Read = Callable[[Any, Source], Any]


class Reader(NamedTuple):
    """How a type is read.

    Attributes:
        read: returns a value with this type, or raises `Mistakes`.
        rule: what a value must be, in words.
        form: how such a value is written. Of a union, the value's form chooses the member.
        exact: the classes whose instances are taken as they are before other members of a union are tried.
    """

    read: Read
    rule: str
    form: Literal["value", "list", "mapping", "any", "null"] = "value"
    exact: tuple[type, ...] = ()


_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?")
_LARGEST = 2**63  # floats from here on do not tell neighbours apart
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}


def _anything(value: Any, source: Source) -> Any:
    return value


def _nothing(value: Any, source: Source) -> None:
    if value is not None:
        must_be(value, "null")


def _text(value: Any, source: Source) -> Any:
    if type(value) is str:
        return value

    # What extends text, such as the names in a page's address, is written to files as plain text.
    if isinstance(value, str):
        return str.__str__(value)
    must_be(value, "text")


def _whole(value: Any, source: Source) -> int:
    if type(value) is int:
        return value
    if isinstance(value, str):
        digits = value.strip()
        if _WHOLE.fullmatch(digits) and len(digits) < 4300:  # Python reads no longer ones
            return int(digits.partition(".")[0])
        must_be(value, "a whole number")

    is_number = isinstance(value, Real) and not isinstance(value, bool)  # NumPy's numbers are `Real` too
    if is_number and abs(value) < _LARGEST and value == int(value):  # NaN is not less either
        return int(value)
    must_be(value, "a whole number")


def _number(value: Any, source: Source) -> float:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        must_be(value, "a number")
    if isinstance(value, str) and not value.isascii():
        must_be(value, "a number")
    try:
        return float(value)
    except ValueError:
        must_be(value, "a number")
    except OverflowError:
        must_be(value, "a finite number")


def _finite(read: Read) -> Read:
    def finite(value: Any, source: Source) -> float:
        number: float = read(value, source)
        if not math.isfinite(number):
            must_be(value, "a finite number")
        return number

    return finite


def _truth(value: Any, source: Source) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUTHS:
        return _TRUTHS[value.lower()]
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    must_be(value, "true or false")


def _exactly(kinds: tuple[type, ...], rule: str) -> Read:
    """Of records: the value itself, if it has one of these types and not one that extends it, as bool does int."""

    def read(value: Any, source: Source) -> Any:
        if type(value) in kinds:
            return value
        must_be(value, rule)

    return read


def _strict_number(value: Any, source: Source) -> float:
    if type(value) in (int, float):
        return _number(value, source)
    must_be(value, "a number")


_RULES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_LAX: dict[Any, Read] = {str: _text, int: _whole, float: _number, bool: _truth}
_STRICT: dict[Any, Read] = {kind: _exactly((kind,), rule) for kind, rule in _RULES.items()} | {float: _strict_number}


def _choice(choices: tuple[Any, ...]) -> Reader:
    *others, rule = map(repr, choices)
    if others:
        rule = f"{', '.join(others)} or {rule}"
    by_value = {choice: choice for choice in choices}

    def read(value: Any, source: Source) -> Any:
        if isinstance(value, str | int | float) and not isinstance(value, bool) and value in by_value:
            return by_value[value]  # 4 for 4.0
        must_be(value, rule)

    return Reader(read, rule, "value", ())


def _list(make: Callable[[Iterable[Any]], Any], item: Reader, *, strict: bool) -> Reader:
    rule = "a list"

    def read(value: Any, source: Source) -> Any:
        if not _is_list(value) or (strict and type(value) is not make):
            must_be(value, rule)

        items: list[Any] = []
        mistakes: list[Mistake] = []
        for position, one in enumerate(value):
            try:
                items.append(item.read(one, source))
            except Mistakes as error:
                mistakes += error.at(position)
        if mistakes:
            raise Mistakes(*mistakes)
        return make(items)

    return Reader(read, rule, "list")


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping)


def _row(members: list[Reader]) -> Reader:
    """A tuple of so many values, each with its own type."""
    rule = f"a list of {len(members)}"

    def read(value: Any, source: Source) -> tuple[Any, ...]:
        items = [*value] if _is_list(value) else []
        if len(items) != len(members):
            must_be(value, rule)

        mistakes: list[Mistake] = []
        for position, (member, one) in enumerate(zip(members, items, strict=True)):
            try:
                items[position] = member.read(one, source)
            except Mistakes as error:
                mistakes += error.at(position)
        if mistakes:
            raise Mistakes(*mistakes)
        return tuple(items)

    return Reader(read, rule, "list")


def _mapping(key: Reader, item: Reader, *, strict: bool) -> Reader:
    rule = "a mapping"

    def read(value: Any, source: Source) -> dict[Any, Any]:
        if not isinstance(value, Mapping) or (strict and type(value) is not dict):
            must_be(value, rule)

        items: dict[Any, Any] = {}
        mistakes: list[Mistake] = []
        for name, one in value.items():
            read_name = name
            try:
                read_name = key.read(name, source)
            except Mistakes as error:
                mistakes += error.at(name)
            try:
                items[read_name] = item.read(one, source)
            except Mistakes as error:
                mistakes += error.at(name)
        if mistakes:
            raise Mistakes(*mistakes)
        return items

    return Reader(read, rule, "mapping")


def _union(members: list[Reader]) -> Reader:
    """The first member that takes the value as it is; else the one whose values are written in this form."""
    others = [member for member in members if member.form != "null"]
    optional = len(others) < len(members)
    if len(others) == 1:
        (only,) = others

        def read_optional(value: Any, source: Source) -> Any:
            if value is None and optional:
                return None
            return only.read(value, source)

        return only._replace(read=read_optional)

    rules = dict.fromkeys(member.rule for member in others)
    if "a number" in rules:
        rules.pop("a whole number", None)
    rule = " or ".join(rules)

    def read(value: Any, source: Source) -> Any:
        if value is None and optional:
            return None
        for member in others:
            if type(value) in member.exact:
                return member.read(value, source)

        form = "value"
        if isinstance(value, Mapping):
            form = "mapping"
        elif _is_list(value):
            form = "list"

        fitting = [member for member in others if member.form in (form, "any")]
        mistakes: list[Mistakes] = []
        for member in fitting:
            try:
                return member.read(value, source)
            except Mistakes as error:
                mistakes.append(error)

        # The only candidate knows best what is wrong, unless the value is of another type altogether.
        if len(mistakes) == 1 and mistakes[0].mistakes[0].rule != fitting[0].rule:
            raise mistakes[0]
        if mistakes and form == "mapping":
            raise min(mistakes, key=_unknown_keys)
        must_be(value, rule)

    exact: list[type] = []
    for member in others:
        exact += member.exact
    return Reader(read, rule, "any", tuple(exact))


def _unknown_keys(error: Mistakes) -> int:
    """How many keys a class does not know, of those in a mapping."""
    return sum(mistake.predicate == _UNKNOWN for mistake in error.mistakes)


def reader_of(kind: Any, *, strict: bool = False, finite: bool = False) -> Reader:
    """How values of an annotated type are read.

    Args:
        kind: str, int, float, bool, None, Any, a `Literal`, a list, a tuple, a mapping or a union of such types, a
            class with declared fields, a dataclass; `Annotated` with `field(…)` adds bounds and more.
        strict: take values of exactly the type, as records have them.
        finite: refuse NaN and infinities.
    """

    def inner(part: Any) -> Reader:
        return reader_of(part, strict=strict, finite=finite)

    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        reader = inner(parts[0])
        for mark in parts[1:]:
            if isinstance(mark, Field):
                reader = reader._replace(read=with_field(reader.read, mark))
        return reader

    # A single value
    if kind is Any:
        return Reader(_anything, "anything", "any")
    if kind is NoneType or kind is None:
        return Reader(_nothing, "null", "null")
    if kind in _RULES:
        read = _STRICT[kind] if strict else _LAX[kind]
        if finite and kind is float:
            read = _finite(read)
        return Reader(read, _RULES[kind], "value", (kind,))
    if origin is Literal:
        return _choice(parts)

    # Several, or one of several types
    if origin in (Union, UnionType):
        return _union([inner(part) for part in parts])
    if origin is tuple and parts[-1] is not Ellipsis:
        return _row([inner(part) for part in parts])
    if origin in (tuple, list):
        return _list(origin, inner(parts[0]), strict=strict)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(inner(parts[0]), inner(parts[1]), strict=strict)

    # Fields with names
    if hasattr(kind, "read_part"):  # of `Declared`
        return Reader(kind.read_part, "a mapping", "mapping", (kind,))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return Reader(_dataclass_reader(kind), "a mapping", "mapping", (kind,))
    raise TypeError(f"no reader for {kind!r}")


def with_field(read: Read, mark: Field) -> Read:
    """A reader with the bounds and the changes that a field adds to its type."""
    bounds = mark.bounds
    if not (bounds or mark.before or mark.after or mark.sited):
        return read

    def marked(value: Any, source: Source) -> Any:
        written = value
        try:
            if mark.before:
                value = mark.before(value)
            if mark.sited:
                value = mark.sited(value, source)
            value = read(value, source)
            if value is not None:
                for holds, rule in bounds:
                    if not holds(value):
                        must_be(written, rule)
            if mark.after:
                value = mark.after(value)
            return value
        except ValueError as error:
            raise Mistakes(Mistake.of(error, written)) from None

    return marked


def _dataclass_reader(kind: Any) -> Read:
    """Reads a dataclass from a mapping with its fields' names."""

    def read(value: Any, source: Source) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            must_be(value, "a mapping")

        readers = _readers_of(kind)
        values: dict[str, Any] = {}
        mistakes: list[Mistake] = []
        for one in dataclasses.fields(kind):
            if one.name in value:
                try:
                    values[one.name] = readers[one.name].read(value[one.name], source)
                except Mistakes as error:
                    mistakes += error.at(one.name)
            elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
                mistakes.append(Mistake.of_missing_key(one.name))
        if mistakes:
            raise Mistakes(*mistakes)
        return kind(**values)

    return read


@cache
def _readers_of(kind: Any) -> dict[str, Reader]:
    """The reader of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: reader_of(hints[one.name], finite=True) for one in dataclasses.fields(kind)}


def read_fields(made: Any) -> None:
    """Read the fields of a frozen dataclass as they are annotated; for its `__post_init__`.

    Raises:
        FieldError: lists every mistake.
    """
    content = dict(made.__dict__)
    mistakes: list[Mistake] = []
    kind: Any = type(made)
    for name, reader in _readers_of(kind).items():
        try:
            object.__setattr__(made, name, reader.read(content[name], IN_PYTHON))
        except Mistakes as error:
            mistakes += error.at(name)
    if mistakes:
        raise explained(mistakes, content, type(made).__name__, called=True)


def read_as(kind: type[_T], content: Any) -> _T:
    """Read content as a type, such as a dataclass.

    Raises:
        FieldError: lists every mistake.
    """
    try:
        read: _T = reader_of(kind, finite=True).read(content, IN_PYTHON)
    except Mistakes as error:
        raise explained(error.mistakes, content) from None
    return read


# Messages


def explained(
    mistakes: Iterable[Mistake], content: Any, where: str = "", file: RecipeFile | None = None, *, called: bool = False
) -> AdapterswapError:
    """The error with all mistakes in words.

    Args:
        mistakes: with their places within the content.
        content: what was read.
        where: see `Declared.read_content`.
        file: likewise.
        called: Python made the content, so messages name parameters and not keys.
    """
    problems = Problems(FieldError)
    for mistake in mistakes:
        location = _as_written(mistake.location, content)
        problem = mistake.problem(location)

        # A missing key is a mistake of the file that wrote the mapping around it.
        setting = location[:-1] if mistake.predicate == _MISSING else location
        place = str((file and file.source_of(setting)) or where)
        if file and file.is_overridden(setting):
            place = "`overrides`"  # --set on the command line

        message = problem.message
        if place and not called:
            message = _PARAMETER.sub(_as_key, message)
        if place:
            message = f"{place}: {message}"
        problems.add(message, problem.remedy, parameter=problem.parameter)
    return problems.as_error(FieldError)


def _as_written(location: Sequence[Any], content: Any) -> tuple[Any, ...]:
    """A location as the recipe has it: with the keys of mappings that were read as lists."""
    steps: list[Any] = []
    for step in location:
        if isinstance(content, dict) and isinstance(step, int) and step not in content:  # else YAML's key is a number
            step = [key for key, value in content.items() if value is not None][step]
        steps.append(step)
        try:
            content = content[step]
        except (KeyError, IndexError, TypeError):  # a missing key
            content = None
    return tuple(steps)


_PARAMETER = re.compile(r"`(?P<name>[a-z][\w.]*)(=(?P<value>[^`]*))?`")


def _as_key(match: re.Match[str]) -> str:
    """A parameter in a message about a file: `method=ties` is written method: ties there; `x=True` is advice."""
    if match["value"] is None:
        return match["name"]
    if match["value"] == "True":
        return match[0]
    return f"{match['name']}: {match['value']}"
