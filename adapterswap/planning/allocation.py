"""Allocation rules: which layers and modules go to an expert, a blend of experts, or the base.

A rule is pure data that can be written in YAML. Rules are tried in order and the first match wins; `plan` applies them.
Knows modules by name, layer and kind only, and experts by name only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from adapterswap.errors import FieldError, check_type
from adapterswap.experts.layers import NO_LAYER, Kind, Stack, format_layers, parse_layers, stack_of
from adapterswap.files.yamlfiles import FieldMistake
from adapterswap.methods.method import LARGEST, SEED, MethodSettings, NonlinearMethod, SpanMethod
from adapterswap.methods.registry import check_name, find_method, names_of
from adapterswap.methods.spectral import CoreMethod
from adapterswap.planning.parameters import MethodFields, parameter_keys
from adapterswap.planning.rule_text import from_pair, read_rule, write_rule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["BASE", "LARGEST", "BlendMethod", "Rule", "check_weights"]

BASE = "base"  # the reserved name of the unchanged base model

_KINDS = ("attention", "mlp", "other")

_BLENDS = names_of(in_rules=True)
BlendMethod = Annotated[str, AfterValidator(partial(check_name, in_rules=True))]
"""The name of a method that combines a blend."""


def _canonical_layers(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = str(value)
    if isinstance(value, list | tuple):
        value = ",".join(str(item) for item in value)
    if isinstance(value, str):
        value = value.strip()
        return NO_LAYER if value == NO_LAYER else format_layers(parse_layers(value))
    return value


class Rule(MethodFields):
    """Gives the modules that it matches to one expert, to the base, or to a blend.

    Recipes may write it as one line of text too: `math*0.5 + swahili*0.5: 5`; see `from_text`.

    The parameters of a blend's method are keys of the rule: {blend: {math: 1, code: 1}, method: ties, density: 0.5}.
    λ is called `lambda` (in Python `lambda_`).
    """

    in_rules: ClassVar[bool] = True

    layers: Annotated[str, BeforeValidator(_canonical_layers)] | None = Field(
        default=None,
        description="Layers: 5, 0-4, 0-4,30-31, [0, 1], or `none` for modules outside the layers. Absent: all modules.",
    )
    stack: Stack | None = Field(
        default=None,
        description="Of a model with an encoder and a decoder: the stack that the rule applies to; each stack counts "
        "its layers from 0. Absent: both.",
    )
    modules: tuple[str, ...] | None = Field(
        default=None,
        description="Kinds (attention, mlp, other) or parts of names (self_attn, q_proj, mlp.down_proj). Absent: all.",
    )
    expert: str | None = Field(default=None, description="The expert that owns them; `base` leaves them unchanged.")
    blend: dict[str, float] | None = Field(default=None, description="Experts and their weights.")
    averages: dict[str, tuple[str, ...]] = Field(
        default={},
        description="Names in `expert` or `blend` that stand for the average of several experts: {reasoning: [math, "
        "code]}. A method treats each average as one expert.",
    )
    weights: Literal["magnitude"] | None = Field(
        default=None, description="magnitude: divide each expert's weight by its mean absolute ΔW. Absent: unchanged."
    )
    method: BlendMethod = Field(default="linear", description=f"How a blend is computed: {', '.join(_BLENDS)}.")
    parameters: dict[str, Any] = Field(
        default={}, validate_default=True, description="The method's parameters, such as density. Absent: its defaults."
    )
    normalize: bool | None = Field(
        default=None, description="Divide a blend's weights by their sum. Default: yes for linear and ties, else no."
    )
    optional: bool = Field(default=False, description="The rule may match nothing; otherwise that is an error.")

    if TYPE_CHECKING:  # the registry says which parameters there are

        def __init__(self, **fields: Any) -> None: ...

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
        try:
            return cls.model_validate(text)
        except FieldError as error:
            raise error.within(f"the rule {text!r}") from None

    @property
    def text(self) -> str:
        """The line that `from_text` reads as this rule."""
        return write_rule(self.as_data())

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, content: Any) -> Any:
        content = from_pair(content, [*cls.model_fields, *parameter_keys(in_rules=True)])
        return read_rule(content) if isinstance(content, str) else content

    @field_validator("modules", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Rule:
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
            return self
        if self.weights and self.method != "linear":
            raise FieldMistake(f"magnitude weights work with averages, not with {self.method}", "weights")
        if self.weights and self.blend.get(BASE):
            raise FieldMistake(
                "magnitude weights are divided by a mean |ΔW|, but the base has no ΔW: use equal weights", "weights"
            )
        self._check_method(self.blend)
        check_weights(self.blend, normalize=self.normalizes)
        return self

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
        if not method.weighted and (odd := [name for name, weight in blend.items() if weight != 1]):
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
        return find_method(self.method).normalizes if self.normalize is None else self.normalize

    def as_data(self) -> dict[str, Any]:
        """The rule as plain data for YAML or JSON, without defaults."""
        return self.model_dump(mode="json", exclude_defaults=True, by_alias=True)

    def matches(self, name: str, layer: int | None, kind: Kind) -> bool:
        """Whether the rule matches the module with this name, layer and kind."""
        if self.stack is not None and stack_of(name) != self.stack:
            return False
        if self.layers is not None:
            in_layers = layer is None if self.layers == NO_LAYER else layer in parse_layers(self.layers)
            if not in_layers:
                return False
        return self.modules is None or any(selects(module, name, kind) for module in self.modules)

    @property
    def sides(self) -> dict[str, dict[str, float]]:
        """The sides that the rule combines: the name of an expert or an average → its experts and their shares.

        The base is left out but counts in an average: the average of an expert and the base is half the expert.
        """
        names = [self.expert] if self.expert is not None else list(self.blend or {})
        members = {name: self.averages.get(name, (name,)) for name in names if name != BASE}
        return {
            side: {expert: 1 / len(experts) for expert in experts if expert != BASE}
            for side, experts in members.items()
        }

    @property
    def experts(self) -> tuple[str, ...]:
        """The experts that the rule names, including those inside averages, without the base."""
        return tuple(dict.fromkeys(expert for shares in self.sides.values() for expert in shares))

    @property
    def average_owner(self) -> str | None:
        """The average of several experts that owns the modules, if one does."""
        return self.expert if self.expert in self.averages else None

    def side_weights(self) -> dict[str, float]:
        """The factor of each side's ΔW: 1 for an owner, w_i/Σw or w_i for a blend. The base and zeros are left out.

        For nonlinear methods, and for weights that depend on the tensors, these are the weights w_i themselves.
        """
        if self.expert is not None:
            return {} if self.expert == BASE else {self.expert: 1.0}
        assert self.blend is not None
        linear = self.method == "linear" and self.weights is None
        total = math.fsum(self.blend.values()) if linear and self.normalizes else 1.0
        return {name: weight / total for name, weight in self.blend.items() if name != BASE and weight != 0}

    def split(self, weights: Mapping[str, float], *, apart: bool = False) -> dict[tuple[str, str], float]:
        """The coefficient of each expert's ΔW, by (side, expert): the side's weight times the expert's share.

        Args:
            weights: by side, for example `side_weights`.
            apart: keep one entry per side for an expert that is on several sides, as nonlinear methods need.
                Otherwise its coefficients are summed, and it becomes a side of its own.
        """
        sides = self.sides
        parts = {
            (side, expert): weight * share for side, weight in weights.items() for expert, share in sides[side].items()
        }
        if apart:
            return parts
        summed: dict[tuple[str, str], float] = {}
        for (_, expert), coefficient in parts.items():
            summed[expert, expert] = summed.get((expert, expert), 0.0) + coefficient
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
        assert isinstance(method, NonlinearMethod | SpanMethod | CoreMethod)
        if method.counts_absent:
            weights, zeros = self.blend or {}, 0 * next(iter(deltas.values()))
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
        assert isinstance(method, CoreMethod)
        values = {**self.parameters, SEED.name: seed}
        return method.combine_factors(factors, self.blend or {}, MethodSettings(values, self.normalizes, module))

    @property
    def on_cores(self) -> bool:
        """Whether the method works in the joint space of the sides' low-rank factors, so that it needs no dense ΔW."""
        return self.blend is not None and isinstance(find_method(self.method), CoreMethod)

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
        assert isinstance(method, SpanMethod)
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
        where = [] if self.layers is None else [f"layers {self.layers}"]
        where += [] if self.stack is None else [f"the {self.stack}"]
        where += [] if self.modules is None else [f"modules {', '.join(self.modules)}"]
        if self.expert is not None:
            source = self.expert
        else:
            assert self.blend is not None
            source = " + ".join(f"{weight:g}·{name}" for name, weight in self.blend.items())
            source = source if self.method == "linear" else f"{self.method}({source})"
        return f"{' and '.join(where) or 'everything'} → {source}"


def selects(selector: str, name: str, kind: Kind) -> bool:
    """Whether a `modules` entry names this module: its kind, or consecutive parts of its name."""
    return selector == kind if selector in _KINDS else f".{selector}." in f".{name}."


def check_weights(weights: Mapping[str, float], *, normalize: bool, fields: Mapping[str, str] | None = None) -> None:
    """Raise a `FieldMistake` if no weight is set, one is not finite, all are 0, or they sum to 0 and are normalized.

    `fields` maps the weights' names to the fields that hold them; by default that is the rule's `blend`.
    """
    field = next(iter((fields or {}).values()), "blend")
    if not weights:
        raise FieldMistake("a blend names no expert", field)
    for name, weight in weights.items():
        if not abs(weight) <= LARGEST:
            raise FieldMistake(
                f"the weight of {name} is {weight:g}, which is not a finite number up to 1e9 in size",
                (fields or {}).get(name, field),
            )
    if not any(weights.values()):
        raise FieldMistake("all weights are 0: give at least one expert a weight", field)
    if normalize and abs(math.fsum(weights.values())) < 1e-12 * max(map(abs, weights.values())):
        raise FieldMistake(
            "the weights sum to 0, so they cannot be divided by their sum: change them, or set normalize: false", field
        )
