"""PEFT's rank_pattern and alpha_pattern: a module's value, where the keys are regexes.

PEFT takes the first key for which the regex `(.*\\.)?(key)$` matches the module's name. Such regexes may come from a
stranger, and Python's `re` can be made to run for years, so a bound on the time is computed before any of them is run.
Knows names and values only.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from re import _parser as regex_parser  # type: ignore[attr-defined]  # nothing public tells a regex's structure
from typing import Any, Generic, TypeVar

from adapterswap.files.smallfiles import shown

__all__ = ["Patterns"]

_MAX_LENGTH = 1000  # characters of a key
_MAX_REGEXES = 2000  # keys that are more than a name; compiling one takes about a millisecond
_MAX_NANOSECONDS = 10e9  # for all modules together; real adapters take a few milliseconds
_PAIR, _STEP = 500, 20  # nanoseconds to try one key on one name, and for each way to match that `re` may try

_PLAIN = re.compile(r"[\w.-]*")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Patterns(Generic[_Value]):
    """Values by regex, resolved as PEFT does.

    Attributes:
        values: as they stand in adapter_config.json.
    """

    values: Mapping[str, _Value] = field(default_factory=dict)
    _keys: tuple[_Key, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a key that is no regex, or one that PEFT would read otherwise than it looks."""
        regexes = sum(_PLAIN.fullmatch(text) is None for text in self.values)
        if regexes > _MAX_REGEXES:
            raise ValueError(f"it holds {regexes} regexes, and {_MAX_REGEXES} are the most that are read")
        object.__setattr__(self, "_keys", tuple(map(_Key.parse, self.values)))

    def get(self, name: str, default: _Value) -> _Value:
        """The value of the first key that matches the module `name`, else `default`.

        Bounded in time only for names that `check` has seen.
        """
        return next((self.values[key.text] for key in self._keys if key.matches(name)), default)

    def check(self, names: Collection[str]) -> None:
        """Raise ValueError where resolving all these names could take longer than ten seconds."""
        longest = max(map(len, names), default=0)
        parts = max((name.count(".") + 1 for name in names), default=0)
        costs = {key.text: len(names) * (_PAIR + parts * _STEP * key.ways(longest)) for key in self._keys}
        if sum(costs.values()) > _MAX_NANOSECONDS:
            worst = max(costs, key=lambda text: costs[text])
            raise ValueError(f"its regexes could take hours, {shown(worst)} above all")


@dataclass(frozen=True)
class _Key:
    """A key: compiled, or plain text, in which only the dots are special.

    `choices` and `stars` bound the ways in which it can match a name of n characters: choices · C(n + stars, stars).
    """

    text: str
    regex: re.Pattern[str] | None
    choices: float = 0
    stars: int = 0

    @classmethod
    def parse(cls, text: str) -> _Key:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"the key {shown(text)} is longer than {_MAX_LENGTH} characters")
        if _PLAIN.fullmatch(text):
            return cls(text, None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # `re` warns of what a later Python will read otherwise
                choices, stars = _ways(regex_parser.parse(text))
                re.compile(rf"(.*\.)?({text})$")  # what PEFT compiles: it must be one regex alone and there
                return cls(text, re.compile(rf"({text})$"), choices, stars)
        except (re.error, RecursionError, OverflowError, Warning) as error:
            raise ValueError(f"the key {shown(text)} is no regex: {error}") from None

    def ways(self, length: int) -> float:
        return self.choices * math.comb(length + self.stars, self.stars) if self.stars <= 50 else math.inf

    def matches(self, name: str) -> bool:
        """Whether `(.*\\.)?(key)$` matches: the key, from the start or from after any dot on."""
        if self.regex is not None:
            return any(self.regex.match(name, start) for start in _starts(name))
        start = len(name) - len(self.text)
        if start < 0 or (start and name[start - 1] != "."):
            return False
        return all(own in (char, ".") for own, char in zip(self.text, name[start:], strict=True))


def _starts(name: str) -> Iterator[int]:
    yield 0
    for found in re.finditer(r"\.", name):
        yield found.end()


def _ways(nodes: Any) -> tuple[float, int]:
    """(choices, stars) of a parsed regex; see `_Key`.

    A repeat of what can itself match in several ways is what takes exponential time, so it counts as infinite, unless
    it repeats a few times only.
    """
    choices, stars = 1.0, 0
    for operation, argument in nodes:
        name = str(operation)
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            continue
        if name == "SUBPATTERN":
            inner = _ways(argument[3])
        elif name in ("ASSERT", "ASSERT_NOT"):
            inner = _ways(argument[1])
        elif name == "ATOMIC_GROUP":
            inner = _ways(argument)
        elif name == "BRANCH":
            branches = [_ways(branch) for branch in argument[1]]
            inner = sum(ways for ways, _ in branches), max(count for _, count in branches)
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            inner = _repeat(*argument)
        else:
            raise re.error(f"{name.lower()} refers to another part of it, which PEFT numbers otherwise")
        choices, stars = choices * inner[0], stars + inner[1]
    return choices, stars


def _repeat(least: int, most: int, nodes: Any) -> tuple[float, int]:
    choices, stars = _ways(nodes)
    if most > 8:
        return (1.0, 1) if choices == 1 and not stars else (math.inf, 0)
    return sum(choices**times for times in range(least, most + 1)), stars * most
