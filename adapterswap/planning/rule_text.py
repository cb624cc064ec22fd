"""Rules as one line of text: `swahili: 0-4,30-31`, `math*0.5 + swahili*0.5: 5`, `mlp of code: 6-9`, `math`.

    [MODULES of] EXPERTS [: LAYERS] [with KEY=VALUE, …]

The only reader and writer of this form; the command line, recipes and Python all use it. A text is read into the keys
of a `Rule` (`allocation`), which checks their values. Does not know which experts exist.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from adapterswap.errors import did_you_mean
from adapterswap.experts.layers import parse_layers
from adapterswap.files.yamlfiles import FieldMistake

__all__ = ["FORM", "from_pair", "mean_label", "place_of", "read_rule", "write_rule"]

FORM = "[MODULES of] EXPERT[*WEIGHT] [+ EXPERT[*WEIGHT] …] [: LAYERS] [with KEY=VALUE, …]"
"""The form of a rule, for messages and help texts."""

_NAME = re.compile(r"[\w.-]+")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'')
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_LAYERS = re.compile(r"none(?![\w.-])|\d(?:[\d\s,-]*\d)?")
_KEY = re.compile(r"[A-Za-z_]\w*")
_VALUE = re.compile(r"[^\s,\"']+")
_SPACE = re.compile(r"\s*")
_MEAN = re.compile(r"mean\s*\(")
_WORDS = ("of", "with")  # keywords: an expert or module with such a name is quoted
_ELSEWHERE = ("layers", "modules", "expert", "blend", "averages", "parameters")  # keys set before `with`


def read_rule(text: str) -> dict[str, Any]:
    """Read the keys of a rule from its text.

    Raises:
        FieldMistake: the text does not have this form; the message names the character.
    """
    return _Reader(text).rule()


def write_rule(rule: Mapping[str, Any]) -> str:
    """The text that `read_rule` reads as these keys, which `Rule.as_data` returns."""
    modules = rule.get("modules") or ()
    averages = rule.get("averages") or {}
    text = f"{', '.join(map(_quoted, modules))} of " if modules else ""
    if "expert" in rule:
        text += _side(rule["expert"], averages)
    else:
        plain = len(rule["blend"]) > 1  # a single expert with a weight is a blend, without one it is an owner
        text += " + ".join(
            _side(name, averages) + ("" if plain and weight == 1 else f"*{_number(weight)}")
            for name, weight in rule["blend"].items()
        )
    text += f": {rule['layers']}" if rule.get("layers") is not None else ""
    settings = [f"{key}={_setting(value)}" for key, value in rule.items() if key not in _ELSEWHERE]
    return text + (f" with {', '.join(settings)}" if settings else "")


def from_pair(content: Any, keys: Collection[str]) -> Any:
    """Restore a rule's text that YAML read as a mapping: `- swahili: 0-4` without quotes is {swahili: 0-4}.

    Args:
        content: a rule as YAML read it; anything else is returned unchanged.
        keys: the keys of a rule, which are not taken for experts.
    """
    if not isinstance(content, Mapping) or len(content) != 1:
        return content
    ((key, value),) = content.items()
    is_layers = type(value) is int or (isinstance(value, str) and re.match(r"\s*(\d|none\b)", value))
    return f"{key}: {value}" if isinstance(key, str) and key not in keys and is_layers else content


def place_of(name: str, text: str) -> int | None:
    """The character, counted from 1, at which a rule's text names an expert; None if it does not."""
    reader = _Reader(text)
    reader.rule()
    return reader.named.get(name)


def _quoted(name: str) -> str:
    if _NAME.fullmatch(name) and name not in _WORDS and not _NUMBER.fullmatch(name):
        return name
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def mean_label(members: Iterable[str]) -> str:
    """The default name of the average of these experts; their order does not matter."""
    return f"mean({', '.join(sorted(members))})"


def _side(name: str, averages: Mapping[str, Sequence[str]]) -> str:
    """An expert, or an average with its name."""
    if name not in averages:
        return _quoted(name)
    mean = f"mean({', '.join(map(_quoted, averages[name]))})"
    return mean if name == mean_label(averages[name]) else f"{_quoted(name)} = {mean}"


def _number(value: float) -> str:
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else repr(value)
    return text if _VALUE.fullmatch(text) else _quoted(text)


class _Reader:
    """Reads one rule from left to right.

    Attributes:
        named: expert → the first character, from 1, at which it is named.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.named: dict[str, int] = {}

    def rule(self) -> dict[str, Any]:
        rule: dict[str, Any] = {}
        self._space()
        if self._ended():
            self._fail("the rule is empty", f"Write {FORM}")
        if modules := self._modules():
            rule["modules"] = modules
        rule |= self._sides()
        if self._take(":"):
            rule["layers"] = self._layers()
        if self._word("with"):
            rule |= self._settings(rule)
        if not self._ended():
            self._unexpected("layers" in rule)
        return rule

    def _modules(self) -> list[str]:
        """The modules before `of`; if there is no `of`, an empty list, and nothing is consumed."""
        start, names = self._at, []
        while (name := self._name()) is not None:
            names.append(name)
            if not self._take(","):
                break
        if names and self._word("of"):
            return names
        self._at = start
        return []

    def _sides(self) -> dict[str, Any]:
        """An owner, or a blend."""
        weights: dict[str, float] = {}
        averages: dict[str, list[str]] = {}
        weighted = False
        while True:
            start = self._at
            name, members = self._one_side()
            if name in weights:
                self._fail(f"{name!r} is named twice", "Name it once, with the sum of its weights", start)
            if members:
                averages[name] = members
            weights[name] = 1.0
            if self._take("*"):
                weighted = True
                number = self._match(_NUMBER)
                if number is None:
                    self._fail(
                        "'*' is not followed by a weight", "Write a number with a decimal point: math*0.5", self._at
                    )
                weights[name] = float(number[0])
            if not self._take("+"):
                break
        named: dict[str, Any] = {"averages": averages} if averages else {}
        if len(weights) == 1 and not weighted:
            return {"expert": next(iter(weights)), **named}
        return {"blend": weights, **named}

    def _one_side(self) -> tuple[str, list[str]]:
        """An expert's name and an empty list; or an average's name and its members."""
        start = self._at
        if self._match(_MEAN):
            members = self._members()
            return mean_label(members), members
        name = self._expert()
        if not self._take("="):
            self.named.setdefault(name, start + 1)
            return name, []
        if not self._match(_MEAN):
            self._fail("'=' is not followed by an average", "Write name = mean(one, other)", self._at)
        return name, self._members()

    def _members(self) -> list[str]:
        members: list[str] = []
        while True:
            start = self._at
            member = self._expert()
            self.named.setdefault(member, start + 1)
            if member in members:
                self._fail(f"{member!r} is named twice", "Name each member of an average once", start)
            members.append(member)
            if self._take(")"):
                return members
            if not self._take(","):
                self._fail("mean( is not closed", "Write mean(one, other)", self._at)

    def _expert(self) -> str:
        start = self._at
        name = self._name()
        if name is None:
            self._fail("the name of an expert is missing", self._name_remedy(), start)
        if name in _WORDS and self._text[start] not in "\"'":
            self._fail(f"{name!r} is a keyword", f'If an expert has this name, quote it: "{name}"', start)
        if self._text[start] not in "\"'" and _NUMBER.fullmatch(name) and self._peek("*"):
            self._fail("the weight comes before its expert", f"Write it after the name: math*{name}", start)
        return name

    def _name_remedy(self) -> str:
        if self._at < len(self._text) and self._text[self._at] in "\"'":
            return 'Close the quote, and write a quote within it as \\"'
        return f"Write {FORM}. Quote names with characters other than letters, digits, '_', '-' and '.'"

    def _layers(self) -> str:
        start = self._at
        match = self._match(_LAYERS)
        if match is None:
            remedy = "Write layers such as 0-4,30-31, or none for modules outside the layers"
            self._fail("':' is not followed by a list of layers", remedy, start)
        try:
            parse_layers(match[0])
        except ValueError as error:
            self._fail(
                str(error), "Write ranges from the lower layer to the higher, joined by commas: 0-4,30-31", start
            )
        return match[0]

    def _settings(self, rule: Mapping[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        while True:
            start = self._at
            key = self._match(_KEY)
            if key is None or not self._take("="):
                remedy = "Write with KEY=VALUE, such as: with method=ties, density=0.5"
                self._fail("a setting is not KEY=VALUE", remedy, start)
            value = self._match(_QUOTED)
            text = _unquoted(value) if value else (plain := self._match(_VALUE)) and plain[0]
            if not text:
                self._fail(f"{key[0]} has no value", f"Write {key[0]}=VALUE", self._at)
            if key[0] in settings:
                self._fail(f"{key[0]} is set twice", "Set it once", start)
            if key[0] in _ELSEWHERE:
                self._fail(f"{key[0]} cannot be set after `with`", f"Write it before `with`: {FORM}", start)
            settings[key[0]] = text
            if not self._take(","):
                return settings

    def _unexpected(self, has_layers: bool) -> NoReturn:
        rest = self._text[self._at :]
        if rest.startswith(",") and not has_layers:
            remedy = "Join experts with '+', modules with ',' before `of`, and write decimals with a point"
        elif rest.startswith(("-", "−")):
            remedy = "Subtract with a negative weight: math + swahili*-1"
        else:
            expected = "`with`" if has_layers else "'*', '+', ':' or `with`"
            remedy = did_you_mean(rest.split()[0], _WORDS, f"Expected {expected} or the end. Write {FORM}")
        self._fail(f"{rest.split()[0]!r} is unexpected", remedy, self._at)

    def _name(self) -> str | None:
        if match := self._match(_QUOTED):
            return _unquoted(match)
        match = self._match(_NAME)
        return match[0] if match else None

    def _word(self, word: str) -> bool:
        match = _NAME.match(self._text, self._at)
        if match is None or match[0] != word:
            return False
        self._at = match.end()
        self._space()
        return True

    def _peek(self, character: str) -> bool:
        return self._text.startswith(character, self._at)

    def _take(self, character: str) -> bool:
        if not self._peek(character):
            return False
        self._at += 1
        self._space()
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            self._space()
        return match

    def _space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _ended(self) -> bool:
        return self._at == len(self._text)

    def _fail(self, reason: str, remedy: str, at: int | None = None) -> NoReturn:
        place = self._at if at is None else at
        raise FieldMistake(f"at character {place + 1}: {reason}", remedy=remedy)


def _unquoted(match: re.Match[str]) -> str:
    return re.sub(r"\\(.)", r"\1", match[1] if match[1] is not None else match[2])
