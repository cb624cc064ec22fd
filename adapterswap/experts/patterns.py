"""The regexes of adapter_config.json, matched as PEFT matches them: a module's value, or whether it is targeted.

They come with a downloaded file, and a malicious one could run for years, which `re` cannot interrupt. So `regex` runs
them with a time limit, after a check that `re` and `regex` read them in the same way. Knows only names and values.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from adapterswap.files.smallfiles import shown

__all__ = ["Matcher", "Patterns", "is_plain"]

_SECONDS = 10.0  # for all regexes of a config key on all modules of an adapter; real ones take milliseconds
_MAX_LENGTH = 1000  # characters of a key
_MAX_REGEXES = 2000  # keys that are not plain names
_MAX_CHARACTERS = 100_000  # of all regexes together; compiling takes up to 20 microseconds per character
_MAX_PAIRS = 20_000_000  # pairs of a key and a module; a pair takes half a microsecond

_PLAIN = re.compile(r"[\w.-]*")
_NO_REPEAT = re.compile(r"\{(?!(\d+(,\d*)?|,\d*)\})")  # text for `re`, but `a{e<=1}` is a fuzzy match for `regex`

_Value = TypeVar("_Value")


def is_plain(pattern: str) -> bool:
    """Whether a regex is a name, in which only the dots are special."""
    return _PLAIN.fullmatch(pattern) is not None


class Matcher:
    """Matches regexes against names as `re` does, with a time limit for all calls together."""

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = time.monotonic() + (_SECONDS if seconds is None else seconds)
        self._compiled: dict[str, Any] = {}

    def __call__(self, pattern: str, name: str, *, whole: bool = True) -> Any:
        """The match of `pattern` with all of `name` (`re.fullmatch`) or with its start (`re.match`), or None.

        Raises:
            ValueError: `re`, which PEFT uses, refuses the regex or reads it differently; or the time is up.
        """
        import regex  # here, because most adapters name their modules plainly

        try:
            if pattern not in self._compiled:
                _check(pattern)
                self._compiled[pattern] = regex.compile(pattern)
            seconds_left = self._deadline - time.monotonic()
            if seconds_left > 0:
                compiled = self._compiled[pattern]
                return (compiled.fullmatch if whole else compiled.match)(name, timeout=seconds_left)
        except regex.error as error:
            raise ValueError(f"{shown(pattern)} is not a valid regex: {error}") from None
        except TimeoutError:
            pass
        raise ValueError(f"the regex {shown(pattern)} takes too long to match")


def _check(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `re` warns about regexes that a later Python will read differently
            re.compile(pattern)
        if _NO_REPEAT.search(pattern):
            raise re.error("a brace that does not begin a repeat")
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise ValueError(f"{shown(pattern)} is not a valid regex: {error}") from None


@dataclass(frozen=True)
class Patterns(Generic[_Value]):
    """Values by regex (`rank_pattern`, `alpha_pattern`): PEFT takes the first key for which `(.*\\.)?(key)$` matches.

    Attributes:
        values: regex → value, as in adapter_config.json.
    """

    values: Mapping[str, _Value] = field(default_factory=dict)
    _resolved: dict[str, str | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise a ValueError for a key that is not a valid regex, alone or where PEFT inserts it."""
        regexes = [key for key in self.values if not is_plain(key)]
        size = sum(map(len, regexes))
        if len(regexes) > _MAX_REGEXES or size > _MAX_CHARACTERS:
            bounds = f"{_MAX_REGEXES} of {_MAX_CHARACTERS} characters"
            raise ValueError(f"it holds {len(regexes)} regexes of {size} characters; at most {bounds} are allowed")
        for key in self.values:
            if len(key) > _MAX_LENGTH:
                raise ValueError(f"the key {shown(key)} is longer than {_MAX_LENGTH} characters")
        for key in regexes:
            _check(key)  # alone, and then where PEFT inserts it
            _check(_in_peft(key))

    def get(self, name: str, default: _Value) -> _Value:
        """The value of the first key that matches the module `name`, else `default`; raises as `check` does."""
        if name not in self._resolved:
            self.check([name])
        key = self._resolved[name]
        return default if key is None else self.values[key]

    def check(self, names: Collection[str]) -> None:
        """Resolve all these names, or raise a ValueError if that takes longer than ten seconds."""
        if len(self.values) * len(names) > _MAX_PAIRS:
            raise ValueError(f"its {len(self.values)} keys take too long to match with {len(names)} modules")
        match = Matcher()
        for name in names:
            if name not in self._resolved:
                self._resolved[name] = next((key for key in self.values if _matches(key, name, match)), None)


def _in_peft(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _matches(key: str, name: str, match: Matcher) -> bool:
    if not is_plain(key):
        return match(_in_peft(key), name) is not None
    start = len(name) - len(key)
    if start < 0 or (start and name[start - 1] != "."):
        return False
    return all(expected in (char, ".") for expected, char in zip(key, name[start:], strict=True))
