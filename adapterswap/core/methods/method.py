"""What a method is: its name, its parameters, its reference, and how it combines ΔW.

Listing methods does not import numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[np.float32]]
    Pair = tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]  # B (out×r) and A (r×in)
    Pairs = Mapping[str, Pair]


LARGEST = 1e9  # bound of weights and factors, so that no sum of them overflows


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method. Its option, its keys in recipes and short names, and sweeps' grids follow from it.

    Attributes:
        name: as users type it: lower-case letters, digits and _.
        description: one line.
        default: the default, whose type (float, int, bool or str) is the parameter's type. Write 1.0 for a float.
        gt, ge, lt, le: bounds: above, at least, below, at most. Floats must always be finite.
        choices: the allowed strings.
        required: a whole composition must set it; rules use `default`.
        rule_name: its name in rules, if it differs from `name`.
        shared: all rules of a composition share one value, so it is a field of compositions and not of rules.
        has_option: whether it has an option of its own on the command line; `--parameter NAME=VALUE` sets all of them.
    """

    name: str
    description: str
    default: float | bool | str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    required: bool = False
    rule_name: str = ""
    shared: bool = False
    has_option: bool = False

    @property
    def kind(self) -> type[float | bool | str]:
        return type(self.default)

    def called(self, *, in_rules: bool) -> str:
        """The name in rules or in compositions."""
        return (in_rules and self.rule_name) or self.name

    @property
    def allowed(self) -> str:
        """The allowed values in words: `above 0, at most 1`."""
        if self.choices:
            return ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"

        named = []
        bounds = {"above": self.gt, "at least": self.ge, "below": self.lt, "at most": self.le}
        for word, bound in bounds.items():
            if bound is not None and abs(bound) < LARGEST:
                named.append(f"{word} {bound:g}")
        if named:
            return ", ".join(named)
        return "a whole number" if self.kind is int else "a number"


SCALE = Parameter(
    "scale", "factor λ of the combined ΔW", 1.0, ge=-LARGEST, le=LARGEST, rule_name="lambda", has_option=True
)
DENSITY = Parameter(
    "density",
    "share of ΔW to keep: of n entries ⌊density · n⌋, or each with this chance where they are drawn",
    1.0,
    gt=0,
    le=1,
    required=True,
    has_option=True,
)
SEED = Parameter("seed", "seed of the random choices", 0, ge=0, shared=True, has_option=True)


@dataclass(frozen=True)
class MethodSettings:
    """The settings for one module. `settings["density"]` is the value of a parameter.

    Attributes:
        values: the values of the method's parameters, by name.
        normalize: divide weights by their sum.
        module: the module's name. It seeds random choices together with the seed, so that they do not depend on the
            order of computation.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    normalize: bool = False
    module: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Method:
    """One way to combine the ΔW of several experts.

    Attributes:
        name: as users type it.
        title: its name in model cards.
        reference: the paper.
        formula: what it computes, in one line.
        notes: other facts for the reader, such as differences from mergekit.
        parameters: its parameters beside weights.
        published: parameter values that the paper uses without tuning. A sweep marks a configuration with these values
            and the defaults of all others as the paper's.
        linear: the result is a weighted sum of the experts' ΔW, so an adapter holds it exactly.
        normalizes: weights are divided by their sum by default.
        acts_on: `delta` combines ΔW; `weights` combines whole weights W, so only full weights can hold the result.
        weighted: experts may have weights; otherwise all count the same.
        sides: the minimum and maximum number of experts (an average counts as one); None means no maximum.
        needs_factors: it needs LoRA's factors, so full checkpoints are refused.
        on_cores: its result lies in the joint space of the experts' factors, so that it needs no dense ΔW.
        counts_absent: an expert that does not change a module takes part with ΔW = 0; otherwise it is left out.
        in_rules: a rule's blend may use it. In rules, soups and task arithmetic are called `linear`.
        as_composition: a whole composition may use it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]
    formula: ClassVar[str]
    notes: ClassVar[str] = ""
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    published: ClassVar[Mapping[str, Any]] = {}
    linear: ClassVar[bool] = True
    normalizes: ClassVar[bool] = False
    acts_on: ClassVar[Literal["delta", "weights"]] = "delta"
    weighted: ClassVar[bool] = True
    sides: ClassVar[tuple[int, int | None]] = (1, None)
    needs_factors: ClassVar[bool] = False
    on_cores: ClassVar[bool] = False
    counts_absent: ClassVar[bool] = False
    in_rules: ClassVar[bool] = True
    as_composition: ClassVar[bool] = True

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of adapterswap's own, and not of another package."""
        return type(self).__module__.startswith(f"{__package__}.")

    @property
    def is_sum(self) -> bool:
        """Whether its result is a weighted sum of ΔW, whatever the values of its parameters."""
        return self.linear

    def has(self, parameter: Parameter) -> bool:
        """Whether the method has a parameter of this name."""
        return any(p.name == parameter.name for p in self.parameters)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError if the parameters' values are not compatible."""

    def spans(self, values: Mapping[str, Any]) -> bool:
        """Whether the result is a weighted sum with coefficients that follow from the experts' inner products."""
        return False

    def exact_in_adapters(self, values: Mapping[str, Any]) -> bool:
        """Whether an adapter can hold the result exactly, with these parameter values."""
        return self.linear

    @property
    def in_adapters(self) -> Literal["exact", "reduced", "no"]:
        """How an adapter holds the result with default parameters."""
        if self.acts_on == "weights":
            return "no"
        defaults = {parameter.name: parameter.default for parameter in self.parameters}
        return "exact" if self.exact_in_adapters(defaults) else "reduced"

    def combine(
        self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings
    ) -> npt.NDArray[np.float32]:
        """The merged ΔW of one module; see `NonlinearMethod.combine`. Weighted sums are computed without it."""
        raise NotImplementedError(self.name)

    def combine_factors(self, pairs: Pairs, weights: Mapping[str, float], settings: MethodSettings) -> Pair:
        """The factors of the merged ΔW, for methods `on_cores`; see `CoreMethod.combine_factors`."""
        raise NotImplementedError(self.name)

    def coefficients(
        self, gram: npt.NDArray[np.float64], weights: Sequence[float], settings: MethodSettings
    ) -> Sequence[float]:
        """The coefficients of the sides' ΔW, for methods that span; see `SpanMethod.coefficients`."""
        raise NotImplementedError(self.name)

    @property
    def own_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that each rule sets itself, without those that all rules share."""
        return tuple(parameter for parameter in self.parameters if not parameter.shared)


class NonlinearMethod(Method, ABC):
    """A method that needs the dense ΔW of a module: an adapter holds its result up to a chosen rank.

    If `acts_on` is `weights`, read W for ΔW below.
    """

    linear: ClassVar[bool] = False

    @abstractmethod
    def combine(
        self,
        deltas: Arrays,
        weights: Mapping[str, float],
        settings: MethodSettings,
    ) -> npt.NDArray[np.float32]:
        """The merged ΔW of one module.

        Args:
            deltas: the ΔW of each side (an expert, or the average of several), by name, in float32. All have the same
                shape: out×in, or that of a stored tensor with any number of axes. Do not change them in place.
            weights: w_i, by the same names.
            settings: see `MethodSettings`.

        Returns:
            A float32 array of the same shape.
        """


class SpanMethod(Method, ABC):
    """A method whose result is a weighted sum of the ΔW, with coefficients from their inner products.

    An adapter therefore holds the result exactly, and no dense ΔW is formed.
    """

    counts_absent: ClassVar[bool] = True

    @property
    def is_sum(self) -> bool:
        return True

    def spans(self, values: Mapping[str, Any]) -> bool:
        return True

    def exact_in_adapters(self, values: Mapping[str, Any]) -> bool:
        return self.spans(values)

    @abstractmethod
    def coefficients(
        self, gram: npt.NDArray[np.float64], weights: Sequence[float], settings: MethodSettings
    ) -> Sequence[float]:
        """The coefficients of the sides' ΔW.

        Args:
            gram: ⟨ΔW_i, ΔW_j⟩ of all n sides, n×n.
            weights: w_i, in the same order.
            settings: see `MethodSettings`.
        """

    def combine(
        self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings
    ) -> npt.NDArray[np.float32]:
        """The weighted sum of dense ΔW; see `NonlinearMethod.combine`."""
        from adapterswap.core.methods.dense import gram_of, summed

        listed = list(deltas.values())
        coefficients = self.coefficients(gram_of(listed), [weights[name] for name in deltas], settings)
        return summed(listed, coefficients)
