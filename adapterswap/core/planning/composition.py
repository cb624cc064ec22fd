"""Compositions: the user's request as pure data, and their short names.

Every method becomes allocation rules once the number of layers is known. Experts are only names; nothing is opened.
Layer swap: Bandarkar et al., ICLR 2025, Algorithm 1 (its line 5 read as "and"). Partitions: Bandarkar & Peng 2025; they
have two uses: composing takes each module from its side's expert, and partial training changes only one side's modules.
Both use the same rules, so they cannot disagree.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.methods.method import SCALE, SEED
from adapterswap.core.methods.registry import check_name, find_method, having, names_of
from adapterswap.core.model.layers import MAX_LAYERS, NO_LAYER, STACKS, Depth, NumLayers, Stack, format_layers
from adapterswap.core.planning.names import SHORT_NAME, ExpertName
from adapterswap.core.planning.parameters import MethodFields, parameter_keys
from adapterswap.core.planning.rules import BASE, Rule, check_weights, one_or_many
from adapterswap.core.planning.slices import rules_of_slice
from adapterswap.kit.errors import ArgumentError, CompositionError, FieldError, check_type, did_you_mean
from adapterswap.kit.files.readers import FieldMistake, field

Partition = Literal["A", "B", "C", "Z"]
Outside = Literal["average", "task", "language"]
Stacks = Literal["both", "encoder", "decoder"]


_Depth = Annotated[int, field(ge=1, le=MAX_LAYERS)]

TaskType = Literal["CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"]

# The first paper's defaults, for its 32 layers.
_PAPER_LAYERS, _PAPER_BOTTOM, _PAPER_TOP = 32, 5, 2
# The second paper's counts of outer layers (first, last) per partition; absolute from 28 layers up.
_PARTITION_LAYERS = 28
_PARTITION_COUNTS: dict[str, tuple[int, int]] = {"A": (6, 2), "B": (8, 4), "C": (6, 2), "Z": (8, 4)}

ZONES = ("bottom", "top", "bottom_transition", "top_transition")
_SIDED = {
    *ZONES, "task", "language", "task_weight", "language_weight", "weights", "parameters", "partition", "norms",
    "outside", "stack",
}  # fmt: skip

# Settings of layer swaps → what other methods do not distinguish.
_OF_SWAPS = {"norms": "tensors", "outside": "modules", "stack": "layers"}

# What messages call a weight → its field.
_WEIGHTS = {"the task": "task_weight", "the language": "language_weight", "scale": "scale"}


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _scaled(count: int, num_layers: int, reference: int = _PAPER_LAYERS) -> int:
    """A count of layers for a model of `reference` layers, in proportion for `num_layers`, rounded half up."""
    return math.floor(count * num_layers / reference + 0.5)


def _paths_as_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: str(place) if isinstance(place, Path) else place for name, place in value.items()}
    return str(value) if isinstance(value, Path) else value


def _at_home(value: str | None) -> str | None:
    """A path with `~` expanded, since PEFT and other readers of the output's config do not."""
    return value and os.path.expanduser(value)


def _check_depths(value: NumLayers | None) -> NumLayers | None:
    if isinstance(value, Mapping) and set(value) != set(STACKS):
        raise FieldMistake("`num_layers` has the depth of only one stack: write {encoder: N, decoder: M}")
    return value


class Composition(MethodFields):
    """A method with its settings, applied to named experts. Everything but the experts has a default.

    The parameters of the method are keys of the composition: {method: ties, density: 0.5}, and in Python
    `Composition(method="ties", density=0.5)`. `adapterswap methods` lists them; `parameters` holds their values.
    """

    experts: dict[str, str] = field(
        default={},
        before=_paths_as_text,
        description="Name → folder or Hub id. The name `base` is reserved: no change.",
    )
    chains: dict[str, tuple[str, ...]] = field(
        default={},
        description="Names for adapters that were trained one on top of another, the first one on the base: {math: "
        "[sft, dpo]}. Each chain counts as one expert, with the sum of its adapters' ΔW.",
    )
    base_model: str | None = field(
        default=None,
        before=_paths_as_text,
        after=_at_home,
        description="The experts' base: a folder or Hub id, such as a local copy of their Hub base.",
    )
    task_type: TaskType | None = field(
        default=None, description="PEFT's task type of the result, if the experts' task types are wrong or differ."
    )
    tokenizer: str | None = field(
        default=None,
        description="Whose tokenizer and chat templates the result takes: an expert's name, or `base`. Default: the "
        "experts' where they agree, else the task expert's.",
    )
    config_from: str | None = field(
        default=None,
        description="Full weights: whose config the result takes, if the configs of full experts and the base compute "
        "differently: the name of a full expert, or `base`. By default they must agree.",
    )
    num_layers: _Depth | dict[Stack, _Depth] | None = field(
        default=None,
        after=_check_depths,
        description="The base's layers, or those of each stack: {encoder: 12, decoder: 6}. By default from its config.",
    )
    method: str = field(
        default="layer_swap",
        after=partial(check_name, in_rules=False),
        description=f"How the experts are combined: {', '.join(names_of())}.",
    )
    task: tuple[str, ...] = field(
        default=("task",), before=one_or_many, description="The task expert, or several that are averaged first."
    )
    language: tuple[str, ...] = field(
        default=("language",),
        before=one_or_many,
        description="The language expert, or several that are averaged first.",
    )
    bottom: int | None = field(default=None, ge=0, description="Bottom layers from the language; 5 of 32, scaled.")
    top: int | None = field(default=None, ge=0, description="Top layers from the language; 2 of 32, scaled.")
    bottom_transition: int = field(default=0, ge=0, description="Layers above the bottom ones that are blended.")
    top_transition: int = field(default=0, ge=0, description="Layers below the top ones that are blended.")
    task_weight: float = field(default=1.0, description="The task expert's weight wherever experts are blended.")
    language_weight: float = field(default=1.0, description="The language expert's weight in blends.")
    weights: Literal["equal", "magnitude"] = field(
        default="equal",
        description="magnitude: weights are divided by each side's mean absolute ΔW, one number over the rows of all "
        "its modules.",
    )
    parameters: dict[str, Any] = field(
        default={},
        description="The method's parameters, such as density, which keeps ⌊density · n⌋ of n entries. Absent: its "
        "defaults.",
    )
    seed: int = field(default=0, ge=0, description="Seed of random methods such as dare_linear.")
    row_threshold: float | None = field(
        default=None, gt=0, description="Rows of an expert's ΔW with a mean absolute value below this become zero."
    )
    partition: Partition | None = field(
        default=None, description="A division of layers and modules of the second paper: A, B, C or Z."
    )
    norms: Literal["average", "layer"] = field(
        default="average",
        description="Full checkpoints: norms, and everything else in a layer that is neither attention nor MLP, are "
        "averaged as in the first paper's Algorithm 1, or go with their layer.",
    )
    outside: Outside = field(
        default="average",
        description="Layer swaps: modules outside the language model's layers (embeddings, heads, vision and audio "
        "towers) are averaged, or come from one side. With `language: base`, average takes them from the task.",
    )
    stack: Stacks = field(
        default="both",
        description="Layer swaps of a model with an encoder and a decoder: the stacks to which zones and partitions "
        "apply. The layers of the other stack are the task's.",
    )
    allocation: tuple[Rule, ...] | None = field(
        default=None,
        alias="rules",
        description="Rules; the first match wins. Also called `rules`. Each is a mapping or a line such as "
        "`swahili: 0-4,30-31`.",
    )
    allow_negative: bool = field(default=False, description="Allow negative weights (unlearning).")

    @classmethod
    def of_one(cls, name: str, adapter: Adapter, **fields: Any) -> Composition:
        """The composition that takes every module from one adapter; of a slice, those that it has.

        Args:
            name: what the composition calls the adapter.
            adapter: the adapter.
            fields: other fields of the composition.
        """
        kept = adapter.kept_layers
        rules = (Rule(expert=name),) if kept is None else rules_of_slice(name, kept, optional=True)
        return cls(allocation=rules, **fields)

    def check(self) -> None:
        set_fields = self.model_fields_set

        # Who takes part
        for name in self.experts:
            reason = ExpertName(name).fault
            if reason:
                raise FieldMistake(reason, "experts")
        self._check_chains()
        for side, names in (("task", self.task), ("language", self.language)):
            if not names:
                raise FieldMistake(f"`{side}` is empty: name at least one expert", side)
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise FieldMistake(f"`{side}` names {twice[0]!r} twice: list each expert once", side)

        # Fields that belong to rules, to layer swaps or to other methods
        if self.allocation is not None:
            extra = sorted(set_fields & _SIDED)
            if extra:
                raise FieldMistake(f"rules decide every module, so {_listed(extra)} cannot be set with them", extra[0])
            if not self.is_swap:
                raise FieldMistake(
                    f"`allocation` cannot be used with method {self.method}: set the method in its rules", "method"
                )
            if not self.allocation:
                raise FieldMistake("`allocation` is empty: add a rule", "allocation")
        elif not self.is_swap or self.partition:
            extra = sorted(set_fields & set(ZONES))
            if extra:
                chosen: str = self.method
                if self.partition:
                    chosen = f"partition {self.partition}"
                listed = _listed(extra)
                verb = "applies" if len(extra) == 1 else "apply"
                raise FieldMistake(f"{listed} only {verb} to a layer swap, not to {chosen}", extra[0])
        if self.partition and not self.is_swap:
            raise FieldMistake(f"`partition` only applies to a layer swap, not to {self.method}", "partition")
        for name, alike in _OF_SWAPS.items():
            if name in set_fields and not self.is_swap:
                why = f"{self.method} treats all {alike} in the same way"
                raise FieldMistake(f"`{name}` only applies to a layer swap: {why}", name)
        if self.seed != SEED.default and not self.is_random:
            raise FieldMistake(f"`seed` only applies to {', '.join(having(SEED.name))}", "seed")

        # The method's parameters, and the weights
        for parameter in find_method(self.method).own_parameters:
            if parameter.name not in self.parameters:
                meaning = f"{parameter.description}, {parameter.allowed}"
                raise FieldMistake(f"`method={self.method}` needs `{parameter.name}` ({meaning})", parameter.name)
        if self.weights == "magnitude" and self.method not in ("layer_swap", "soup"):
            raise FieldMistake(
                f"magnitude weights work with averages (layer_swap, soup), not with {self.method}", "weights"
            )
        if self.row_threshold is not None and not math.isfinite(self.row_threshold):
            raise FieldMistake("`row_threshold` must be a finite number", "row_threshold")
        self._check_weights()
        self._check_rules()

    def _check_chains(self) -> None:
        for chain, parts in self.chains.items():  # first, since nothing else uses a chain that only another one names
            inner = next((part for part in parts if part in self.chains), None)
            if inner is not None:
                raise FieldMistake(
                    f"the chain {chain!r} names the chain {inner!r}, but a chain lists adapters only: list those of "
                    f"{inner!r} in its place",
                    "chains",
                )

        named = set(self._names)
        for chain, parts in self.chains.items():
            reason = ExpertName(chain).fault
            if reason:
                raise FieldMistake(reason, "chains")
            if chain in self.experts:
                raise FieldMistake(f"a chain and an expert are both called {chain!r}: rename one of them", "chains")
            if chain not in named:
                raise FieldMistake(f"nothing uses the chain {chain!r}: name it as an expert, or remove it", "chains")
            if len(parts) < 2 or len(set(parts)) < len(parts) or BASE in parts:
                raise FieldMistake(
                    f"the chain {chain!r} must list two adapters or more, none twice, and not `base`", "chains"
                )
            alone = sorted(named & {*parts[1:]})
            if alone:
                raise FieldMistake(
                    f"{alone[0]} was trained on top of {parts[parts.index(alone[0]) - 1]}, so it cannot be used alone: "
                    f"use the chain {chain!r}",
                    "chains",
                )

    def _check_rules(self) -> None:
        """Check that rules can be made, as far as that does not depend on the number of layers."""
        # An average of several experts gets a name, which must not be one of theirs.
        averages: set[str] = set()
        if self.allocation is None:
            for side in (self.task, self.language):
                if len(side) > 1:
                    averages.add(_label(side))
        else:
            for rule in self.allocation:
                averages.update(rule.averages)
        clash = sorted(averages & {*self.experts, *self.expert_names, *self.chains})
        if clash:
            raise FieldMistake(f"an average and an expert are both called {clash[0]!r}: rename one of them", "experts")
        if self.allocation is not None:
            return

        # What two sides can be combined by
        reset = (BASE,) in (self.task, self.language)
        blends = self.method == "soup" or self.bottom_transition or self.top_transition or self.task == (BASE,)
        if self.weights == "magnitude" and reset and blends:
            raise FieldMistake(
                "magnitude weights are divided by a mean |ΔW|, but the base has no ΔW: use equal weights", "weights"
            )
        if find_method(self.method).sides == (2, 2) and len(self._combined()) != 2:
            raise ValueError(
                f"{self.method} interpolates between two experts: name different task and language experts (several on "
                "a side are averaged first), or two experts on one side and `base` on the other"
            )
        if self.method == "adamergex":
            self._check_adamergex()

        # Rules of a swap depend on the number of layers; those of other methods do not, and can be made here.
        if not self.is_swap:
            try:
                self.rules(1)
            except FieldError as error:  # reported with the composition's other mistakes
                messages = [problem.message.removeprefix("Rule: ") for problem in error.problems]
                raise ValueError("; ".join(messages)) from None

    def _check_adamergex(self) -> None:
        if len(self.language) != 2 or BASE in (*self.task, *self.language) or {*self.task} & {*self.language}:
            raise FieldMistake(
                "adamergex adds the difference between two languages: name a task expert, and as `language` two other "
                "experts, trained on the reference task in the target language and in the source language, in this "
                "order",
                "language",
            )
        if self.language_weight != 1:
            raise FieldMistake(
                "adamergex multiplies the languages' difference by `scale`, so `language_weight` must be 1",
                "language_weight",
            )

    def _check_weights(self) -> None:
        weights = {"the task": self.task_weight, "the language": self.language_weight}
        method = find_method(self.method)
        check_weights(weights, normalize=method.normalizes and not method.has(SCALE), fields=_WEIGHTS)
        scale = self.parameters.get(SCALE.name, 1.0)
        if scale == 0:
            raise FieldMistake("`scale` must not be 0", "scale")
        if self.allow_negative:
            return

        for rule in self.allocation or ():
            weights |= rule.blend or {}
        weights |= {"scale": scale}
        for name, weight in weights.items():
            if weight < 0:
                raise FieldMistake(
                    f"the weight of {name} is {weight:g}, and a negative weight subtracts an expert: "
                    "pass `allow_negative=True` if you mean that",
                    _WEIGHTS.get(name, "allocation"),
                )

    @property
    def expert_names(self) -> tuple[str, ...]:
        """The experts that the rules name, in order, without `base`; for a chain, its adapters."""
        names: dict[str, None] = {}
        for name in self._names:
            names |= dict.fromkeys(self.chains.get(name, (name,)))
        names.pop(BASE, None)
        return tuple(names)

    @property
    def _names(self) -> list[str]:
        """The experts and chains that the rules name, in order; one may be named twice."""
        if self.allocation is None:
            return [*self.task, *self.language]
        names: list[str] = []
        for rule in self.allocation:
            names += rule.experts
        return names

    @property
    def is_swap(self) -> bool:
        """Whether it says what each layer is made of, by zones, a partition or rules; other methods combine all."""
        return self.method == "layer_swap"

    @property
    def has_zones(self) -> bool:
        """Whether zones say what each layer is made of, rather than a partition or rules."""
        return self.is_swap and not self.partition and self.allocation is None

    @property
    def names_layers(self) -> bool:
        """Whether its rules distinguish layers; if not, it does not matter how the model numbers them."""
        if self.allocation is None:
            return self.is_swap
        return any(rule.layers is not None or rule.stack is not None for rule in self.allocation)

    def stacks(self, num_layers: NumLayers) -> tuple[Stack | None, ...]:
        """The stacks to which zones and partitions apply: `(None,)` for a model with one list of layers."""
        if isinstance(num_layers, int):
            return (None,)
        return STACKS if self.stack == "both" else (self.stack,)

    def requested_zones(self, count: int) -> tuple[int, int, int, int]:
        """(b, u, t_b, t_u) for `count` layers, with defaults filled in; they may need more layers than there are."""
        bottom = _scaled(_PAPER_BOTTOM, count) if self.bottom is None else self.bottom
        top = _scaled(_PAPER_TOP, count) if self.top is None else self.top
        return bottom, top, self.bottom_transition, self.top_transition

    def zones(self, num_layers: NumLayers, stack: Stack | None = None) -> tuple[int, int, int, int]:
        """(b, u, t_b, t_u) for a model of `num_layers` layers, or for one of its stacks, with defaults filled in.

        Raises:
            CompositionError: the zones need more layers than the model has.
        """
        count = Depth(num_layers).of(stack)
        model = f"the {stack}" if stack else "the model"
        zones = self.requested_zones(count)

        if sum(zones) > count:
            sizes = {name: size for name, size in zip(ZONES, zones, strict=True) if size}
            if len(sizes) == 1:
                [(name, size)] = sizes.items()
                taken = f"{name} has {size}"
            else:
                terms = " + ".join(f"{name} {size}" for name, size in sizes.items())
                taken = f"{terms} = {sum(zones)}"
            raise CompositionError(
                f"The zones overlap: {taken} layers, but {model} has {count}",
                "Make the zones smaller",
                parameter=next((name for name in ZONES if getattr(self, name)), None),
            )
        if self.language != (BASE,) and zones[:2] == (0, 0) and self.bottom is None and self.top is None:
            raise CompositionError(
                f"Scaled to {count} layers, the paper's defaults leave no layer to the language expert",
                "Pass `bottom` and `top`",
                parameter="bottom",
            )
        return zones

    def rules(self, num_layers: NumLayers, *, full: bool = False) -> tuple[Rule, ...]:
        """The allocation rules of this composition for a model of `num_layers` layers.

        Args:
            num_layers: L, or the number of each stack.
            full: whether an expert is a full checkpoint, so that `norms` applies.

        Raises:
            CompositionError: see `zones`; or `stack` is set, but the model does not have an encoder and a decoder.
            FieldError: the weights cannot be blended.
        """
        if isinstance(num_layers, int) and self.stack != "both":
            raise CompositionError(
                f"`stack` is {self.stack!r}, but the base does not have both an encoder and a decoder",
                "Remove `stack`",
                parameter="stack",
            )

        made: list[Rule] = []
        if self.allocation is not None:
            made += self.allocation
        elif self.is_swap:
            if full and self.norms == "average":
                # As in the first paper: norms and the like are averaged in all layers.
                average = self._average_rule()
                for stack in self.stacks(num_layers):
                    layers = format_layers(range(Depth(num_layers).of(stack)))
                    only = {"stack": stack} if stack else {}
                    made.append(average.model_copy(update={"layers": layers, **only, "modules": ("other",)}))
            if self.partition:
                made += self._partition_rules(num_layers)
            else:
                made += self._swap_rules(num_layers)
        else:
            made.append(self._rule_everywhere())

        if not self.chains:
            return tuple(made)
        return tuple(rule.chained(self.chains) for rule in made)

    def _rule_everywhere(self) -> Rule:
        """The rule of a method that treats all modules alike."""
        if self.method == "soup":
            return self._blend()
        if self.method == "task_arithmetic":
            scale = self.parameters[SCALE.name]
            return _blended({side: weight * scale for side, weight in self._combined().items()}, normalize=False)
        if self.method == "adamergex":
            scale = self.parameters[SCALE.name]
            target, source = ((name,) for name in self.language)
            return _blended({self.task: self.task_weight, target: scale, source: -scale}, normalize=False)

        # Methods that compute more than weighted sums have parameters of their own, which are keys of the rule.
        own = {p.called(in_rules=True): self.parameters[p.name] for p in find_method(self.method).own_parameters}
        return _blended(self._combined(), method=self.method, **own)

    def _swap_rules(self, num_layers: NumLayers) -> list[Rule]:
        """The language expert's layers, those that are blended, what is outside the layers, and the task's rest."""
        rules = []
        for stack in self.stacks(num_layers):
            count = Depth(num_layers).of(stack)
            bottom, top, bottom_transition, top_transition = self.zones(num_layers, stack)

            outer = [*range(bottom), *range(count - top, count)]
            if outer:
                rules.append(_owned(self.language, **_within(stack, outer)))

            blended = [*range(bottom, bottom + bottom_transition)]
            blended += range(count - top - top_transition, count - top)
            if blended:
                rules.append(self._blend(**_within(stack, blended)))
        return [*rules, self._non_layer_rule(), _owned(self.task, optional=True)]

    def settled(self, num_layers: NumLayers, *, full: bool = False) -> dict[str, Any]:
        """All settings that decide the result for a model of `num_layers` layers, with defaults filled in, as data.

        It reads back as a composition with the same rules. It leaves out the experts' places, the base, the depth, and
        default zones that differ between stacks.

        Args:
            num_layers: L, or the number of each stack.
            full: whether an expert is a full checkpoint, so that `norms` applies.

        Raises:
            CompositionError: see `zones`.
        """
        fields = {"method", "row_threshold"}
        if self.allocation is not None:
            fields.add("allocation")
        else:
            fields |= {"task", "language", "task_weight", "language_weight", "weights", "parameters", "partition"}
            if self.is_swap and full:
                fields.add("norms")
            if self.is_swap and self.outside != "average":
                fields.add("outside")
            if self.is_swap and not isinstance(num_layers, int):
                fields.add("stack")

        # What is set at all
        if self.is_random:
            fields.add("seed")
        for name in ("task_type", "tokenizer", "config_from", "chains", "allow_negative"):
            if getattr(self, name):
                fields.add(name)

        content = self.model_dump(mode="json", include=fields, exclude_none=True)
        if self.allocation is not None:  # without defaults, which may belong to the rule's other form (expert or blend)
            content["allocation"] = [rule.as_data() for rule in self.allocation]

        # Zones that are the same in all stacks
        if self.has_zones:
            by_stack = [self.zones(num_layers, stack) for stack in self.stacks(num_layers)]
            for name, counts in zip(ZONES, zip(*by_stack, strict=True), strict=True):
                if len(set(counts)) == 1:
                    content[name] = counts[0]
        return content

    @property
    def is_random(self) -> bool:
        """Whether the result depends on the seed."""
        methods = {self.method, *(rule.method for rule in self.allocation or ())}
        return any(find_method(method).has(SEED) for method in methods)

    def _partition_rules(self, num_layers: NumLayers) -> list[Rule]:
        inside, outside = self.task, self.language
        if self.partition == "Z":
            inside, outside = self.language, self.task

        rules = [self._non_layer_rule()]
        for stack in self.stacks(num_layers):
            count = Depth(num_layers).of(stack)
            first, last = _PARTITION_COUNTS[self.partition or ""]
            if count < _PARTITION_LAYERS:
                first = _scaled(first, count, _PARTITION_LAYERS)
                last = _scaled(last, count, _PARTITION_LAYERS)

            # Optional: experts may adapt attention only, or some layers only, so that a rule matches nothing.
            if self.partition == "A":
                only = {"stack": stack} if stack else {}
                rules.append(_owned(self.language, modules=("attention",), **only, optional=True))
            outer = [*range(first), *range(count - last, count)]
            if outer:
                rules.append(_owned(outside, **_within(stack, outer), optional=True))

        if isinstance(num_layers, int) or self.stack == "both" or inside == self.task:
            return [*rules, _owned(inside, optional=True)]
        return [*rules, _owned(inside, stack=self.stack, optional=True), _owned(self.task, optional=True)]

    def _non_layer_rule(self) -> Rule:
        """The rule for embeddings, heads and towers."""
        if self.outside == "average":
            return self._average_rule()
        side = self.language
        if self.outside == "task":
            side = self.task
        return _owned(side, layers=NO_LAYER, optional=True)

    def _average_rule(self) -> Rule:
        """Embeddings and heads are averaged, which the first paper found best; in a reset they come from the expert."""
        if self.language == (BASE,):
            return _owned(self.task, layers=NO_LAYER, optional=True)
        return self._blend(layers=NO_LAYER, optional=True)

    def _blend(self, **fields: Any) -> Rule:
        """The rule that blends the two sides; `fields` are its other ones."""
        weights = "magnitude" if self.weights == "magnitude" else None
        return _blended(self._sides(), weights=weights, **fields)

    def _sides(self) -> dict[_Side, float]:
        """The weight of each side; the experts of a side are averaged first."""
        if _label(self.task) == _label(self.language):
            if not find_method(self.method).weighted and self.task_weight == self.language_weight == 1:
                return {self.task: 1.0}
            return {self.task: self.task_weight + self.language_weight}
        return {self.task: self.task_weight, self.language: self.language_weight}

    def _combined(self) -> dict[_Side, float]:
        """What a method combines: the two sides or, if one of them is the base, the other's experts one by one."""
        if self.language == (BASE,):
            return {(name,): self.task_weight for name in self.task}
        if self.task == (BASE,):
            return {(name,): self.language_weight for name in self.language}
        return self._sides()


_Side = tuple[str, ...]
"""The experts of one side."""


def _label(side: _Side) -> str:
    """A side's name in rules."""
    return side[0] if len(side) == 1 else Rule.mean_label(side)


def _owned(side: _Side, **fields: Any) -> Rule:
    """The rule that gives modules to a side."""
    if len(side) > 1:
        fields = {"averages": {_label(side): side}, **fields}
    return Rule(expert=_label(side), **fields)


def _within(stack: Stack | None, layers: Iterable[int]) -> dict[str, Any]:
    """The fields of a rule for these layers, in this stack if the model has two."""
    fields: dict[str, Any] = {"layers": frozenset(layers)}
    if stack:
        fields["stack"] = stack
    return fields


def _blended(sides: Mapping[_Side, float], **options: Any) -> Rule:
    """The rule that blends sides."""
    blend, averages = {}, {}
    for side, weight in sides.items():
        label = _label(side)
        blend[label] = weight
        if len(side) > 1:
            averages[label] = side

    content = {"blend": blend, **options}
    if averages:
        content["averages"] = averages
    return Rule.model_validate(content)


_SHORT_KEYS = (
    *ZONES, "task_weight", "language_weight", "weights", *parameter_keys(), "seed", "method", "partition", "outside",
    "stack",
)  # fmt: skip


def as_composition(composition: Composition | str) -> Composition:
    """Return a `Composition` unchanged, and parse a short name."""
    check_type(composition, (Composition, str), "composition", "Pass a Composition or a name such as 'math+swahili'")
    return composition if isinstance(composition, Composition) else parse_composition(composition)


def parse_composition(name: str) -> Composition:
    """The composition with the short name `name`: `math+swahili` or `math+swahili@bottom=4,top=1`.

    Raises:
        ArgumentError: the name does not have that form.
        FieldError: a setting is unknown, repeated or without a value, or its value is not allowed.
    """
    check_type(name, str, "name", "Pass a name such as 'math+swahili'")
    match = re.fullmatch(rf"({SHORT_NAME})\+({SHORT_NAME})(?:@([\w=.,+-]+))?", name)
    form = f"Write TASK+LANGUAGE, or TASK+LANGUAGE@key=value,… with the keys {', '.join(_SHORT_KEYS)}"
    if match is None:
        raise ArgumentError(f"{name!r} is not the short name of a composition", form, parameter="name")

    # The keys, to which a method of another package adds its parameters
    content: dict[str, Any] = {"task": match[1], "language": match[2]}
    items = [item for item in (match[3] or "").split(",") if item]
    method = ""
    for item in items:
        if item.startswith("method="):
            method = item.removeprefix("method=")
            break
    keys = {*_SHORT_KEYS}
    if method not in names_of() and method in names_of(packages=True):
        keys |= {parameter.name for parameter in find_method(method).own_parameters}

    for item in items:
        key, _, value = item.partition("=")
        if key not in keys:
            remedy = did_you_mean(key, keys, form)
            raise FieldError(f"{name!r}: unknown setting {key!r}", remedy, parameter=key or None)
        if not value:
            raise FieldError(f"{name!r}: {key} has no value", f"Write {key}=VALUE", parameter=key)
        if key in content:
            raise FieldError(f"{name!r}: {key} is set twice", "Set it once", parameter=key)
        content[key] = value
    return Composition.read_content(content, where=name)
