"""Families of compositions in a sweep's recipe: grids over fields, rules, pairs, and baselines.

Checks the values of single fields. `Composition` checks whether they are valid together.

A name in a rule is that of an expert or of a role (`task`, `language`, or one of the recipe's `roles`). A role stands
for each of its experts in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal, TypeVar

from adapterswap.core import BASE, ExpertName, Parameter, Partition, Rule
from adapterswap.core.methods.registry import check_name
from adapterswap.core.planning.parameters import MethodFields
from adapterswap.kit.errors import FieldError
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import FieldMistake, field

Baseline = Literal["base", "task", "language", "roles", "soup", "magnitude_soup", "task_arithmetic", "slerp"]
BASELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "soup": ("soup", {"method": "soup"}),
    "magnitude_soup": ("magnitude soup", {"method": "soup", "weights": "magnitude"}),
    "task_arithmetic": ("task_arithmetic", {"method": "task_arithmetic"}),
    "slerp": ("slerp", {"method": "slerp"}),
}
"""The baselines that are compositions → the name of their row, and the composition."""

_Value = TypeVar("_Value")

EXTRA = "extra-"
"""The prefix of the names under which the adapters of `extra` are loaded."""


def _expert_name(name: str) -> str:
    """The name, if rules and short names can use it and PEFT can load an adapter under it."""
    expert = ExpertName(name)
    if not expert.fits_short_names or not expert.fits_peft or name.startswith(EXTRA):
        raise ValueError(
            f"{name!r} cannot name an expert: use letters, digits, - and _, but not {BASE!r}, 'lora' or a name that "
            f"begins with {EXTRA!r}"
        )
    return name


def as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _named(value: Any) -> Any:
    """A mapping from names to families, as a list of families; null removes a family of a fragment."""
    if not isinstance(value, dict):
        return value

    families = []
    for name, item in value.items():
        if isinstance(item, dict):
            families.append({"name": name, **item})
        elif item is not None:
            families.append(item)
    return families


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A grid's values without duplicates."""
    if not values:
        raise ValueError("give at least one value")
    return tuple(dict.fromkeys(values))


Name = Annotated[str, field(after=_expert_name)]
Values = Annotated[tuple[_Value, ...], field(before=as_list, after=_distinct)]
"""A value, or a list of values that are tried in turn; empty if the recipe does not have the field."""
Count = Annotated[int, field(ge=0)]
Method = Annotated[str, field(after=partial(check_name, in_rules=False))]
"""The name of a method for a whole composition."""


class Family(MethodFields):
    """Compositions that belong together: fields of a composition, each with a value or a list of values.

    The parameters of methods are fields too: {method: ties, density: [0.2, 0.5]}.

    All combinations are evaluated, with every pair, except zones that need more layers than the base has: these are
    counted.
    """

    name: str | None = field(
        default=None,
        min_length=1,
        description="The name of its row in tables. Default: the method; `partition A`; `magnitude soup`; `reset`.",
    )
    language: Literal["base"] | None = field(
        default=None, description="base: no language expert; the layers that it would have are reset to the base."
    )
    rules: tuple[Rule, ...] | None = field(
        default=None,
        min_length=1,
        description="Instead of zones and methods: rules over any experts, such as `swahili: 0-4`, or mappings. "
        "`task`, `language` and other roles stand for each of their experts in turn.",
    )
    method: Values[Method] = ()
    bottom: Values[Count] = ()
    top: Values[Count] = ()
    bottom_transition: Values[Count] = ()
    top_transition: Values[Count] = ()
    partition: Values[Partition] = ()
    outside: Values[Literal["average", "task", "language"]] = ()
    norms: Values[Literal["average", "layer"]] = ()
    task_weight: Values[float] = ()
    language_weight: Values[float] = ()
    weights: Values[Literal["equal", "magnitude"]] = ()
    parameters: dict[str, Any] = field(default={}, description="The methods' parameters, each with its values.")
    seed: Values[Count] = ()
    row_threshold: Values[float] = ()
    allow_negative: bool = field(default=False, description="Weights may be negative (unlearning).")
    max_rank: int | None = field(default=None, ge=1, description="Reduce each composition to an adapter of this rank.")
    max_error: float | None = field(
        default=None, gt=0, lt=1, description="Reduce each composition as far as this relative error of ΔW allows."
    )
    full_rank: bool = field(
        default=False,
        description="Evaluate each composition exactly, as merged weights; each is written and loaded as a model.",
    )

    @property
    def output(self) -> dict[str, Any]:
        """The bound on the rank, or `full_rank`; empty if the family has neither."""
        output: dict[str, Any] = {}
        if self.max_rank is not None:
            output["max_rank"] = self.max_rank
        if self.max_error is not None:
            output["max_error"] = self.max_error
        if self.full_rank:
            output["full_rank"] = True
        return output

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one configuration."""
        return any(len(values) > 1 for values in self.grid.values())

    @property
    def grid(self) -> dict[str, tuple[Any, ...]]:
        """Field or parameter → its values, in the order of `GRID_FIELDS`; without those that have no value."""
        grid: dict[str, tuple[Any, ...]] = {}
        for name in GRID_FIELDS:
            if name == "parameters":
                grid |= self.parameters
            else:
                grid[name] = getattr(self, name)
        return {name: values for name, values in grid.items() if values}

    @classmethod
    def parameter_type(cls, parameter: Parameter) -> Any:
        return Values[super().parameter_type(parameter)]  # type: ignore[misc]

    @classmethod
    def _methods_of(cls, chosen: Any) -> list[str]:
        """Any method: each composition checks whether its values go together."""
        return [*super()._methods_of(None), *(chosen or ())]

    @classmethod
    def _completed(cls, values: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
        """The values of the parameters that are set, in the order of the methods; the others have no default."""
        return {name: values[name] for name in parameters if name in values}

    def _dumped_rest(self, values: dict[str, Any], *, without_defaults: bool) -> dict[str, Any]:
        return values

    def check(self) -> None:
        if self.rules is not None:
            extra = sorted(self.grid.keys() - {"seed", "row_threshold"})
            if extra:
                raise FieldMistake(f"{', '.join(extra)} cannot be combined with `rules`: leave it out", extra[0])
            if self.language is not None:
                raise FieldMistake(
                    "language cannot be combined with `rules`: reset layers with a rule, such as `base: 30-31`",
                    "language",
                )
        if len(self.output) > 1:
            raise ValueError(f"{' and '.join(self.output)} exclude each other: set only one of them")


GRID_FIELDS = (
    "method", "bottom", "top", "bottom_transition", "top_transition", "partition", "outside", "norms", "task_weight",
    "language_weight",
    "weights", "parameters", "seed", "row_threshold",
)  # fmt: skip
"""The fields of a `Family` that take lists, in a grid's order: the last one varies fastest."""


class ExpertPair(Declared):
    """A task expert and a language expert; several names on a side are averaged first."""

    task: Values[str]
    language: Values[str]


Families = Annotated[list[Family], field(before=_named)]
"""A list of families, or a mapping from their names."""


TASK, LANGUAGE = "task", "language"

Sides = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Cast:
    """The experts that the names in a family's rules stand for in one composition.

    Attributes:
        sides: role → its experts in the composition; several are averaged first.
        experts: name in the rules → the experts that it stands for.
    """

    sides: Sides
    experts: Mapping[str, tuple[str, ...]]

    def of(self, role: str) -> tuple[str, ...]:
        return self.sides.get(role, ())

    @property
    def others(self) -> tuple[str, ...]:
        """The experts of all roles but task and language."""
        others: list[str] = []
        for role, names in self.sides.items():
            if role not in (TASK, LANGUAGE):
                others += names
        return tuple(others)


def expert_row(role: str) -> str:
    """The name of the row of a role's experts alone."""
    return f"{role} expert"


def named_in(rules: Sequence[Rule]) -> tuple[str, ...]:
    """The names in rules, each once, without `base`."""
    names: dict[str, None] = {}
    for rule in rules:
        names |= dict.fromkeys(rule.experts)
    return tuple(names)


def check_roles(names: Sequence[str], roles: Mapping[str, Sequence[str]]) -> str | None:
    """An error message if a name in rules is both a role and an expert, otherwise None."""
    homes = _role_of(roles)
    for name in names:
        if name in homes and name in roles and list(roles[name]) != [name]:
            return f"{name!r} in a rule is both a role and a {homes[name]} expert: rename the expert"
    return None


def _role_of(roles: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Expert → its role."""
    homes: dict[str, str] = {}
    for role, members in roles.items():
        homes |= dict.fromkeys(members, role)
    return homes


def casts(
    names: Sequence[str],
    roles: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[tuple[str, ...], tuple[str, ...]]],
) -> Iterator[Cast]:
    """Every choice of experts for the names in a family's rules.

    Args:
        names: the names of experts or roles; see `named_in`.
        roles: role → the names of its experts.
        pairs: (task side, language side). If the rules name only one of the two roles, pairs that share that side count
            once; if they name neither, the pairs are ignored.
    """
    homes = _role_of(roles)
    free = [name for name in names if name not in homes]

    # The sides that the rules name, of each pair once
    sided = [role for role in (TASK, LANGUAGE) if role in free]
    sides: dict[tuple[tuple[str, ...], ...], None] = {}
    for task, language in pairs:
        pair = {TASK: task, LANGUAGE: language}
        sides[tuple(pair[role] for role in sided)] = None
    if not sided:
        sides = {(): None}

    # With each of them, every choice of one expert for each other role
    others = [role for role in free if role not in sided]
    members_of_others = [roles[role] for role in others]
    for side, members in product(sides, product(*members_of_others)):
        # What each name stands for: a role for its experts, an expert for itself
        experts = dict(zip(sided, side, strict=True))
        for role, member in zip(others, members, strict=True):
            experts[role] = (member,)
        for name in names:
            if name in homes:
                experts[name] = (name,)

        # The experts of each role, each once, though rules may name one by its name and by its role
        by_role: dict[str, tuple[str, ...]] = {}
        for name in names:
            role = homes.get(name, name)
            by_role[role] = tuple(dict.fromkeys((*by_role.get(role, ()), *experts[name])))
        yield Cast(by_role, experts)


def bound(rules: Sequence[Rule], cast: Cast) -> list[Rule]:
    """The rules with roles replaced by experts; a side of several experts is replaced by their average."""
    return [_bound(rule, cast) for rule in rules]


def _bound(rule: Rule, cast: Cast) -> Rule:
    """A rule with the names of experts in place of roles; several experts of a role become their average."""
    averages: dict[str, list[str]] = {}

    def renamed(name: str) -> str:
        """The expert that a name stands for, or the label of their average, which is noted in `averages`."""
        if name in rule.averages:
            # It keeps its label unless one of its members is a role of other experts
            members: list[str] = []
            for member in rule.averages[name]:
                members += cast.experts.get(member, (member,))
            label = name
            if members != list(rule.averages[name]):
                label = Rule.mean_label(members)
            averages[label] = members
            return label

        if name == BASE:
            return name
        members = list(cast.experts[name])
        if len(members) == 1:
            return members[0]
        label = Rule.mean_label(members)
        averages[label] = members
        return label

    content = rule.as_data()
    content.pop("averages", None)
    if rule.expert is not None:
        content["expert"] = renamed(rule.expert)
    else:
        weights = {name: renamed(name) for name in rule.blend or {}}
        if len(set(weights.values())) < len(weights):
            raise FieldError(
                f"The rule {rule.text!r} blends {', '.join(weights)}, which are the same expert here",
                "Name each expert once: by its own name or by its role",
                parameter="compositions",
            )
        content["blend"] = {weights[name]: weight for name, weight in (rule.blend or {}).items()}
    if averages:
        content["averages"] = averages
    return Rule.model_validate(content)
