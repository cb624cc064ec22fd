"""Allocation rules, as data and as one line of text: `swahili: 0-4,30-31`, `math*0.5 + swahili*0.5: 5`, `math`.

    [MODULES of] EXPERTS [: LAYERS] [with KEY=VALUE, …]

This is the only reader and writer of that form; the command line, recipes and Python all use it. A text is read into
the keys of a `Rule` (`allocation`), which checks their values. Rules are tried in order and the first match wins. Which
experts exist is checked later, when a plan is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from adapterswap.core.methods.method import LARGEST, SEED, MethodSettings
from adapterswap.core.methods.registry import check_name, find_method, names_of
from adapterswap.core.model.layers import NO_LAYER, Kind, ModuleName, Stack, format_layers, parse_layers
from adapterswap.core.planning.parameters import MethodFields, parameter_keys
from adapterswap.kit.errors import check_type, did_you_mean
from adapterswap.kit.files.readers import FieldMistake, field

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
    """Read the keys of a rule from its text."""
    return _Reader(text).rule()


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
    if isinstance(key, str) and key not in keys and is_layers:
        return f"{key}: {value}"
    return content


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


def _side(name: str, averages: Mapping[str, Sequence[str]]) -> str:
    """An expert, or an average with its name."""
    if name not in averages:
        return _quoted(name)
    members = averages[name]
    mean = f"mean({', '.join(map(_quoted, members))})"
    if name == Rule.mean_label(members):
        return mean
    return f"{_quoted(name)} = {mean}"


def _number(value: float) -> str:
    if float(value).is_integer() and abs(value) < 1e15:  # repr writes larger floats with an exponent
        return repr(int(value))
    return repr(float(value))


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else repr(value)
    if _VALUE.fullmatch(text):
        return text
    return _quoted(text)


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

        modules = self._modules()
        if modules:
            rule["modules"] = modules
        rule |= self._sides()
        if self._take(":"):
            rule["layers"] = self._layers()
        if self._word("with"):
            rule |= self._settings()

        if not self._ended():
            self._unexpected("layers" in rule)
        return rule

    def _modules(self) -> list[str]:
        """The modules before `of`; if there is no `of`, an empty list, and nothing is consumed."""
        start = self._at
        names = []
        while True:
            name = self._name()
            if name is None:
                break
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

        # One expert is an owner; with a weight, it is a blend of one.
        sides: dict[str, Any] = {"blend": weights}
        if len(weights) == 1 and not weighted:
            sides = {"expert": next(iter(weights))}
        if averages:
            sides["averages"] = averages
        return sides

    def _one_side(self) -> tuple[str, list[str]]:
        """An expert's name and an empty list; or an average's name and its members."""
        start = self._at
        if self._match(_MEAN):
            members = self._members()
            return Rule.mean_label(members), members

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
            remedy = f"Write {FORM}. Quote names with characters other than letters, digits, '_', '-' and '.'"
            if not self._ended() and self._text[self._at] in "\"'":
                remedy = 'Close the quote, and write a quote within it as \\"'
            self._fail("the name of an expert is missing", remedy, start)
        if self._text[start] in "\"'":
            return name

        if name in _WORDS:
            self._fail(f"{name!r} is a keyword", f'If an expert has this name, quote it: "{name}"', start)
        if _NUMBER.fullmatch(name) and self._peek("*"):
            self._fail("the weight comes before its expert", f"Write it after the name: math*{name}", start)
        return name

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

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        while True:
            start = self._at
            key = self._match(_KEY)
            if key is None or not self._take("="):
                remedy = "Write with KEY=VALUE, such as: with method=ties, density=0.5"
                self._fail("a setting is not KEY=VALUE", remedy, start)

            value = ""
            quoted = self._match(_QUOTED)
            plain = None if quoted else self._match(_VALUE)
            if quoted:
                value = _unquoted(quoted)
            elif plain:
                value = plain[0]
            if not value:
                self._fail(f"{key[0]} has no value", f"Write {key[0]}=VALUE", self._at)

            if key[0] in settings:
                self._fail(f"{key[0]} is set twice", "Set it once", start)
            if key[0] in _ELSEWHERE:
                self._fail(f"{key[0]} cannot be set after `with`", f"Write it before `with`: {FORM}", start)
            settings[key[0]] = value
            if not self._take(","):
                return settings

    def _unexpected(self, has_layers: bool) -> NoReturn:
        rest = self._text[self._at :]
        word = rest.split()[0]
        if rest.startswith(",") and not has_layers:
            remedy = "Join experts with '+', modules with ',' before `of`, and write decimals with a point"
        elif rest.startswith(("-", "−")):
            remedy = "Subtract with a negative weight: math + swahili*-1"
        else:
            expected = "`with`" if has_layers else "'*', '+', ':' or `with`"
            remedy = did_you_mean(word, _WORDS, f"Expected {expected} or the end. Write {FORM}")
        self._fail(f"{word!r} is unexpected", remedy, self._at)

    def _name(self) -> str | None:
        quoted = self._match(_QUOTED)
        if quoted:
            return _unquoted(quoted)
        plain = self._match(_NAME)
        return plain[0] if plain else None

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
    text = match[1] if match[1] is not None else match[2]
    return re.sub(r"\\(.)", r"\1", text)


BASE = "base"  # the reserved name of the unchanged base model

_KINDS = ("attention", "mlp", "other")

_BLENDS = names_of(in_rules=True)


def one_or_many(value: Any) -> Any:
    """A list, for a field that may also be written as one name."""
    return [value] if isinstance(value, str) else value


def _canonical_layers(value: Any) -> Any:
    """Layers in the form in which rules hold them: `0-4,30`. The package itself passes sets; recipes, all the rest."""
    if isinstance(value, frozenset):
        return format_layers(value)
    if isinstance(value, bool):
        return value

    if isinstance(value, int):
        value = str(value)
    if isinstance(value, list | tuple):
        value = ",".join(str(item) for item in value)
    if not isinstance(value, str):
        return value

    value = value.strip()
    if value == NO_LAYER:
        return NO_LAYER
    return format_layers(parse_layers(value))


class Rule(MethodFields):
    """Gives the modules that it matches to one expert, to the base, or to a blend.

    Recipes may write it as one line of text too: `math*0.5 + swahili*0.5: 5`; see `from_text`.

    The parameters of a blend's method are keys of the rule: {blend: {math: 1, code: 1}, method: ties, density: 0.5}.
    λ is called `lambda` (in Python `lambda_`).
    """

    in_rules: ClassVar[bool] = True

    layers: str | None = field(
        default=None,
        before=_canonical_layers,
        description="Layers: 5, 0-4, 0-4,30-31, [0, 1], or `none` for modules outside the layers. Absent: all modules.",
    )
    stack: Stack | None = field(
        default=None,
        description="Of a model with an encoder and a decoder: the stack that the rule applies to; each stack counts "
        "its layers from 0. Absent: both.",
    )
    modules: tuple[str, ...] | None = field(
        default=None,
        before=one_or_many,
        description="Kinds (attention, mlp, other) or parts of names (self_attn, q_proj, mlp.down_proj). Absent: all.",
    )
    expert: str | None = field(default=None, description="The expert that owns them; `base` leaves them unchanged.")
    blend: dict[str, float] | None = field(default=None, description="Experts and their weights.")
    averages: dict[str, tuple[str, ...]] = field(
        default={},
        description="Names in `expert` or `blend` that stand for the average of several experts: {reasoning: [math, "
        "code]}. A method treats each average as one expert.",
    )
    weights: Literal["magnitude"] | None = field(
        default=None,
        description="magnitude: divide each expert's weight by its mean absolute ΔW, one number over the rows of all "
        "its modules. Absent: unchanged.",
    )
    method: str = field(
        default="linear",
        after=partial(check_name, in_rules=True),
        description=f"How a blend is computed: {', '.join(_BLENDS)}.",
    )
    parameters: dict[str, Any] = field(
        default={},
        description="The method's parameters, such as density, which keeps ⌊density · n⌋ of n entries. Absent: its "
        "defaults.",
    )
    normalize: bool | None = field(
        default=None, description="Divide a blend's weights by their sum. Default: yes for linear and ties, else no."
    )
    optional: bool = field(default=False, description="The rule may match nothing; otherwise that is an error.")

    _chains: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # the composition's

    @classmethod
    def from_text(cls, text: str) -> Rule:
        """Read a rule from one line: `[MODULES of] EXPERTS [: LAYERS] [with KEY=VALUE, …]`.

        Examples: `swahili: 0-4,30-31` · `math*0.5 + swahili*0.5: 5` · `mlp of code: 6-9` · `math`. Weights are divided
        by their sum, as in `blend`. Quote names that hold anything but letters, digits, `_`, `-` and `.`.

        Raises:
            ArgumentError: `text` is not a string.
            FieldError: `text` does not have this form (the message says at which character), or is not a valid rule.
        """
        check_type(text, str, "text", "Pass a rule such as 'swahili: 0-4,30-31'")
        return cls.read_content(text, where=f"the rule {text!r}")

    @property
    def text(self) -> str:
        """The line that `from_text` reads as this rule."""
        return Rule.text_of(self.as_data())

    @classmethod
    def prepared(cls, content: Any) -> Any:
        if isinstance(content, Mapping) and len(content) == 1:
            content = from_pair(content, [*cls.model_fields, *parameter_keys(in_rules=True)])
        if isinstance(content, str):
            return read_rule(content)
        return content

    def check(self) -> None:
        if (self.expert is None) == (self.blend is None):
            raise ValueError("a rule gives its modules to one `expert` or to a `blend`: set exactly one of them")
        if self.modules is not None and not all(self.modules):
            raise FieldMistake("`modules` contains an empty name", "modules")
        if self.modules == ():
            raise FieldMistake("`modules` is empty: leave it out to match all modules", "modules")
        self._check_averages()

        if self.blend is None:
            extra = self.model_fields_set & {"weights", "method", "parameters", "normalize"}
            if extra:
                names = sorted(extra)
                message = f"the rule names one `expert`, so it cannot set {', '.join(names)}, which belong to a `blend`"
                raise FieldMistake(message, names[0])
            return

        if self.weights and self.method != "linear":
            raise FieldMistake(f"magnitude weights work with averages, not with {self.method}", "weights")
        if self.weights and self.blend.get(BASE):
            raise FieldMistake(
                "magnitude weights are divided by a mean |ΔW|, but the base has no ΔW: use equal weights", "weights"
            )
        self._check_method(self.blend)
        check_weights(self.blend, normalize=self.normalizes)

    def _check_method(self, blend: Mapping[str, float]) -> None:
        method = find_method(self.method)
        method.check(self.parameters)

        least, most = method.sides
        if least == most == 2 and (len(blend) != 2 or BASE in blend):
            raise FieldMistake(f"{self.method} interpolates between two experts: name exactly two", "blend")
        if blend and len(blend) < least:
            message = f"{self.method} needs at least {least} experts, and the blend names {len(blend)}"
            raise FieldMistake(message, "blend")
        if method.counts_absent and BASE in blend:
            raise FieldMistake(f"{self.method} combines experts, but the blend names the base: remove it", "blend")

        odd = [name for name, weight in blend.items() if weight != 1]
        if odd and not method.weighted:
            message = f"{self.method} takes no weights, but {odd[0]} has {blend[odd[0]]:g}: set every weight to 1"
            raise FieldMistake(message, "blend")
        if self.method == "slerp" and (min(blend.values()) < 0 or self.normalize is False):
            raise FieldMistake("slerp's weights must not be negative, and are always divided by their sum", "blend")
        if self.method == "nuslerp" and self.normalize is False:
            raise FieldMistake("nuslerp's weights are always divided by their sum: leave `normalize` out", "normalize")

    def _check_averages(self) -> None:
        named = {self.expert} if self.blend is None else self.blend.keys()
        for name, members in self.averages.items():
            if name == BASE or name not in named:
                raise FieldMistake(f"`averages` defines {name!r}, which neither `expert` nor `blend` uses", "averages")
            if not members or len(set(members)) < len(members):
                raise FieldMistake(f"the average {name!r} must list at least one expert, and none twice", "averages")
            if not self.averages.keys().isdisjoint(members):
                raise FieldMistake(f"the average {name!r} contains an average: list the experts themselves", "averages")

    @property
    def normalizes(self) -> bool:
        if self.normalize is not None:
            return self.normalize
        return find_method(self.method).normalizes

    def as_data(self) -> dict[str, Any]:
        """The rule as plain data for YAML or JSON, without defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def matches(self, name: str, layer: int | None, kind: Kind) -> bool:
        """Whether the rule matches the module with this name, layer and kind."""
        if self.stack is not None and ModuleName(name).stack != self.stack:
            return False
        if self.layers == NO_LAYER and layer is not None:
            return False
        if self.layers not in (None, NO_LAYER) and layer not in parse_layers(self.layers):
            return False
        return self.modules is None or any(Rule.selects(module, name, kind) for module in self.modules)

    @property
    def sides(self) -> dict[str, dict[str, float]]:
        """The sides that the rule combines: the name of an expert, average or chain → its experts and their shares.

        The base is left out but counts in an average: the average of an expert and the base is half the expert. Each
        adapter of a chain has the share of the chain.
        """
        names = list(self.blend or {})
        if self.expert is not None:
            names = [self.expert]

        sides: dict[str, dict[str, float]] = {}
        for side in names:
            if side == BASE:
                continue
            shares = sides[side] = {}
            members = self.averages.get(side, (side,))
            for member in members:
                for expert in self._chains.get(member, (member,)):
                    if expert != BASE:
                        shares[expert] = shares.get(expert, 0.0) + 1 / len(members)
        return sides

    def chained(self, chains: Mapping[str, tuple[str, ...]]) -> Rule:
        """The rule with the chains among its experts, each as the adapters that it consists of."""
        if not chains.keys() & set(self.experts):
            return self
        copy = self.model_copy()
        copy._chains = chains
        return copy

    @property
    def experts(self) -> tuple[str, ...]:
        """The experts that the rule names, including those inside averages, without the base."""
        return tuple(dict.fromkeys(expert for shares in self.sides.values() for expert in shares))

    @property
    def joint_owner(self) -> str | None:
        """The average or chain of several experts that owns the modules, if one does."""
        return self.expert if self.expert in {*self.averages, *self._chains} else None

    def side_weights(self) -> dict[str, float]:
        """The factor of each side's ΔW: 1 for an owner, w_i/Σw or w_i for a blend. The base and zeros are left out.

        For nonlinear methods, and for weights that depend on the tensors, these are the weights w_i themselves.
        """
        if self.expert == BASE:
            return {}
        if self.expert is not None:
            return {self.expert: 1.0}

        assert self.blend is not None
        total = 1.0
        if self.method == "linear" and self.weights is None and self.normalizes:
            total = math.fsum(self.blend.values())
        return {name: weight / total for name, weight in self.blend.items() if name != BASE and weight != 0}

    def split(self, weights: Mapping[str, float], *, apart: bool = False) -> dict[tuple[str, str], float]:
        """The coefficient of each expert's ΔW, by (side, expert): the side's weight times the expert's share.

        Args:
            weights: by side, for example `side_weights`.
            apart: keep one entry per side for an expert that is on several sides, as nonlinear methods need.
                Otherwise its coefficients are summed, and it becomes a side of its own.
        """
        sides = self.sides
        parts: dict[tuple[str, str], float] = {}
        summed: dict[tuple[str, str], float] = {}
        for side, weight in weights.items():
            for expert, share in sides[side].items():
                parts[side, expert] = weight * share
                summed[expert, expert] = summed.get((expert, expert), 0.0) + weight * share
        if apart:
            return parts
        return {key: coefficient for key, coefficient in summed.items() if coefficient != 0}

    def coefficients(self) -> dict[str, float]:
        """`side_weights` by expert."""
        return {expert: coefficient for (_, expert), coefficient in self.split(self.side_weights()).items()}

    def combine(
        self, deltas: Mapping[str, npt.NDArray[np.float32]], weights: Mapping[str, float], *, seed: int, module: str
    ) -> npt.NDArray[np.float32]:
        """Combine the sides' dense ΔW of one module by the rule's method, if that is not a weighted sum.

        Args:
            deltas: by side, out×in; whole weights if the method acts on those.
            weights: by side.
            seed: the composition's seed.
            module: the module's name.
        """
        method = find_method(self.method)

        # Such a method counts experts that do not change this module: their ΔW is 0.
        if method.counts_absent:
            zeros = 0 * next(iter(deltas.values()))
            weights = self.blend or {}
            deltas = {side: deltas.get(side, zeros) for side in weights}

        values = {**self.parameters, SEED.name: seed}
        return method.combine(deltas, weights, MethodSettings(values, self.normalizes, module))

    def combine_factors(
        self,
        factors: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]],
        *,
        seed: int,
        module: str,
    ) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
        """Like `combine`, but takes the factors (B, A) of each side's ΔW and returns the result's; see `on_cores`."""
        method = find_method(self.method)
        values = {**self.parameters, SEED.name: seed}
        return method.combine_factors(factors, self.blend or {}, MethodSettings(values, self.normalizes, module))

    @property
    def on_cores(self) -> bool:
        """Whether the method works in the joint space of the sides' low-rank factors, so that it needs no dense ΔW."""
        return self.blend is not None and find_method(self.method).on_cores

    @property
    def needs_factors(self) -> bool:
        """Whether the method works on low-rank factors only."""
        return self.blend is not None and find_method(self.method).needs_factors

    def coefficients_of(self, gram: npt.NDArray[np.float64]) -> dict[str, float]:
        """The coefficient of each side, by a method that computes them from inner products.

        Args:
            gram: the inner products of the sides' ΔW, in the order of the blend.
        """
        method, blend = find_method(self.method), self.blend or {}
        values = method.coefficients(gram, list(blend.values()), MethodSettings(self.parameters, self.normalizes))
        return dict(zip(blend, values, strict=True))

    @property
    def spans(self) -> bool:
        """Whether the result is a weighted sum whose coefficients follow from the sides' inner products."""
        return self.blend is not None and find_method(self.method).spans(self.parameters)

    @property
    def acts_on_weights(self) -> bool:
        """Whether the method combines whole weights, not ΔW."""
        return self.blend is not None and find_method(self.method).acts_on == "weights"

    @property
    def combines_sides(self) -> bool:
        """Whether each side's ΔW is needed as a whole: the method is nonlinear, or weights depend on magnitudes."""
        return self.method != "linear" or self.weights is not None

    def __str__(self) -> str:
        where = []
        if self.layers is not None:
            where.append(f"layers {self.layers}")
        if self.stack is not None:
            where.append(f"the {self.stack}")
        if self.modules is not None:
            where.append(f"modules {', '.join(self.modules)}")

        source = self.expert
        if source is None:
            source = " + ".join(f"{weight:g}·{name}" for name, weight in (self.blend or {}).items())
            if self.method != "linear":
                source = f"{self.method}({source})"
        return f"{' and '.join(where) or 'everything'} → {source}"

    @staticmethod
    def mean_label(members: Iterable[str]) -> str:
        """The default name of the average of these experts; their order does not matter."""
        return f"mean({', '.join(sorted(members))})"

    @staticmethod
    def text_of(rule: Mapping[str, Any]) -> str:
        """The text that `read_rule` reads as these keys, which `Rule.as_data` returns."""
        modules = rule.get("modules") or ()
        averages = rule.get("averages") or {}

        text = ""
        if modules:
            text = f"{', '.join(map(_quoted, modules))} of "
        if "expert" in rule:
            text += _side(rule["expert"], averages)
        else:
            sides = []
            for name, weight in rule["blend"].items():
                # A single expert with a weight is a blend, without one it is an owner.
                has_weight = weight != 1 or len(rule["blend"]) == 1
                factor = f"*{_number(weight)}" if has_weight else ""
                sides.append(f"{_side(name, averages)}{factor}")
            text += " + ".join(sides)

        if rule.get("layers") is not None:
            text += f": {rule['layers']}"

        settings = []
        for key, value in rule.items():
            if key not in _ELSEWHERE:
                settings.append(f"{key}={_setting(value)}")
        if settings:
            text += f" with {', '.join(settings)}"
        return text

    @staticmethod
    def selects(selector: str, name: str, kind: Kind) -> bool:
        """Whether a `modules` entry names this module: its kind, or consecutive parts of its name."""
        if selector in _KINDS:
            return selector == kind
        return f".{selector}." in f".{name}."


def check_weights(weights: Mapping[str, float], *, normalize: bool, fields: Mapping[str, str] | None = None) -> None:
    """Raise a `FieldMistake` if no weight is set, one is not finite, all are 0, or they sum to 0 and are normalized.

    `fields` maps the weights' names to the fields that hold them; by default that is the rule's `blend`.
    """
    fields = fields or {}
    field = next(iter(fields.values()), "blend")
    if not weights:
        raise FieldMistake("a blend names no expert", field)

    for name, weight in weights.items():
        if not abs(weight) <= LARGEST:  # also NaN
            raise FieldMistake(
                f"the weight of {name} is {weight:g}, which is not a finite number up to 1e9 in size",
                fields.get(name, field),
            )

    if not any(weights.values()):
        raise FieldMistake("all weights are 0: give at least one expert a weight", field)
    if normalize and abs(math.fsum(weights.values())) < 1e-12 * max(map(abs, weights.values())):
        raise FieldMistake(
            "the weights sum to 0, so they cannot be divided by their sum: change them, or set normalize: false", field
        )
