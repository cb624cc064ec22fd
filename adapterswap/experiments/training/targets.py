"""Find what to train in a model: the modules that get an adapter, or parameters of the model itself.

Reads names, shapes and the config of a model without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from adapterswap.core import Adapter, Base, Composition, Depth, ModelConfig, Partition, check_one_list, parse_layers
from adapterswap.core.model.layers import ModuleName, layer_container
from adapterswap.core.writing.peft_config import Shape
from adapterswap.experiments.training.recipe import SIDES, AdapterOptions, Side, TrainRecipe
from adapterswap.kit.errors import FieldError, Problems, UnsupportedError

if TYPE_CHECKING:
    from adapterswap.experiments.training.start import Start

MERGE_INSTEAD = "Merge it into the base with `merge`, and pass the result as `base_model` instead"


@dataclass(frozen=True)
class TrainingTargets:
    """The modules to train.

    Attributes:
        names: PEFT's target_modules, sorted: ends of module names, or full names if the modules differ between layers.
            Empty without an adapter.
        ends: the last parts of the module names, sorted, for reports.
        modules: the full names of the modules that are adapted, or whose own weights are trained.
        parameters: how many numbers are trained: r·(in + out) for each module, and the modules saved in full; without
            an adapter, the parameters of the modules.
        layers: PEFT's layers_to_transform; None for all layers, or if `names` are full names.
        conv1d: whether the modules store their weights transposed (GPT-2).
        sides: the side of each module with `simultaneous`; otherwise empty.
        shapes: with `start`, the rank, α and scale of each module, trained or not; otherwise empty.
        rslora: whether the scale is α/√r, not α/r.
    """

    names: list[str]
    ends: list[str]
    modules: frozenset[str]
    parameters: int
    layers: list[int] | None
    conv1d: bool
    sides: Mapping[str, Side]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    rslora: bool = True

    def side_of(self, parameter: str) -> Side | None:
        """The side of a parameter of the model or of its adapter; None if it is frozen."""
        name = parameter.removeprefix("base_model.model.")
        while name and name not in self.sides:
            name = name.rpartition(".")[0]
        return self.sides.get(name)

    def trains(self, parameter: str) -> bool:
        """Whether a parameter of the model is trained. For training without an adapter."""
        return parameter.rpartition(".")[0] in self.modules


def find_targets(model: Any, recipe: TrainRecipe, config: Any, start: Start | None = None) -> TrainingTargets:
    """Find the modules of `model` that the recipe trains, and those of the start that it takes over."""
    choice = _Targeted(model, recipe, config)
    taken_over = start.adapter if start and not start.on_top else None
    if start and start.on_top and not recipe.quantization:
        choice.check_below(start.adapter)
    return choice.weights() if recipe.adapter.method == "none" else choice.adapters(taken_over)


class _Targeted:
    """The modules of a model, and a recipe's choice among them."""

    def __init__(self, model: Any, recipe: TrainRecipe, config: Any) -> None:
        self.model, self.config, self.options = model, config, recipe.adapter
        self.adaptable = Base(model)
        self.matrices = [name for name, weight in self.adaptable.items() if not weight.embedding]
        check_one_list("the model", self.matrices)
        self.container = layer_container(self.matrices)
        self.simultaneous = recipe.simultaneous

    def adapters(self, start: Adapter | None) -> TrainingTargets:
        options, started = self.options, sorted(start.modules) if start else []
        layers = sorted(parse_layers(options.layers)) if options.layers is not None else None
        self._check_start(started)
        if options.target_modules:
            ends = sorted(set(options.target_modules))
            self._check(ends, layers)
            named = {name: weight for name, weight in self.adaptable.items() if self._is_meant(name, ends)}
        else:
            self._check([], layers)
            wanted = started or self._projections()
            named = {name: self.adaptable[name] for name in wanted}
            ends = started or self._shortest_ends(named)
        chosen, sides = self._owned({name: weight for name, weight in named.items() if self._in(layers, name)})
        if not chosen:
            raise FieldError(
                "The start adapts no module in the layers that the recipe trains",
                "Name modules in adapter.target_modules; they start at zero",
                parameter="adapter.layers",
            )
        adapted = {name: self.adaptable[name] for name in (*chosen, *started)}
        ends = sorted({_last_part(name) for name in chosen}) if start else ends
        ends = [end for end in ends if any(_named(name, [end]) for name in chosen)]
        names, layers = self._targets_for_peft(adapted, sorted({*ends, *map(_last_part, started)}))
        saved = [module for name, module in self.model.named_modules() if _named(name, options.modules_to_save)]
        shapes = _shapes(start, adapted, options) if start else {}
        ranks = {name: shapes[name].rank if start else options.r for name in chosen}
        return TrainingTargets(
            names=names,
            ends=ends,
            modules=frozenset(chosen),
            parameters=sum(ranks[name] * (part.in_features + part.out_features) for name, part in chosen.items())
            + sum(parameter.numel() for module in saved for parameter in module.parameters()),
            layers=layers,
            conv1d=all(weight.transposed and not weight.embedding for weight in adapted.values()),
            sides=sides,
            shapes=shapes,
            rslora=start.config.rslora if start else options.rslora,
        )

    def weights(self) -> TrainingTargets:
        options = self.options
        layers = sorted(parse_layers(options.layers)) if options.layers is not None else None
        self._check([], layers)
        holders = {
            name: module
            for name, module in self.model.named_modules()
            if list(module.parameters(recurse=False)) and self._reads_text(name)
        }
        chosen, sides = self._owned({name: module for name, module in holders.items() if self._in(layers, name)})
        numbers = {id(p): p.numel() for module in chosen.values() for p in module.parameters(recurse=False)}
        return TrainingTargets(
            names=[],
            ends=sorted({name.rpartition(".")[2] for name in chosen}),
            modules=frozenset(chosen),
            parameters=sum(numbers.values()),  # a weight shared by two modules counts once
            layers=layers,
            conv1d=False,
            sides=sides,
        )

    def _targets_for_peft(self, chosen: Iterable[str], ends: list[str]) -> tuple[list[str], list[int] | None]:
        """target_modules and layers_to_transform: ends and layers if they select exactly `chosen`, else full names.

        PEFT ignores layers_to_transform if target_modules contains full names.
        """
        everything = (name for name, _ in self.model.named_modules())
        named = {name: ModuleName(name).layer(self.container) for name in everything if _named(name, ends)}
        layers = {named[name] for name in chosen}
        if named.keys() == set(chosen):
            return ends, None
        in_layers = {name for name, layer in named.items() if layer in layers}
        # PEFT counts the layers of a tower like those of the language model.
        in_towers = any(layer_container([name]) != self.container for name in named.keys() - in_layers)
        if None not in layers and in_layers == set(chosen) and not in_towers:
            return ends, sorted(layer for layer in layers if layer is not None)
        return sorted(chosen), None

    def _in(self, layers: Sequence[int] | None, name: str) -> bool:
        return layers is None or ModuleName(name).layer(self.container) in layers

    def _owned(self, modules: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Side]]:
        """The modules that the partition gives to the recipe's side, or to both sides; and the side of each."""
        partition = self.simultaneous.partition if self.simultaneous else self.options.partition
        if partition is None:
            return modules, {}
        side_of = self._sides(partition)
        sides = {name: side for name in modules if (side := side_of(name)) is not None}
        trained_sides = SIDES if self.simultaneous else [self.options.side]
        for side in trained_sides:
            if side not in sides.values():
                raise FieldError(
                    f"Partition {partition} has no module of {type(self.model).__name__} on the {side} side",
                    "Choose another partition, or name more modules in adapter.target_modules",
                    parameter="simultaneous.partition" if self.simultaneous else "adapter.partition",
                )
        owned = {name: module for name, module in modules.items() if sides.get(name) in trained_sides}
        return owned, sides if self.simultaneous else {}

    def _sides(self, partition: Partition) -> Callable[[str], Side | None]:
        """A function from a module's name to its side in the partition; None for modules outside the layers."""
        in_config, name = ModelConfig(self.config.to_dict()).num_layers, type(self.model).__name__
        depth = Depth.known(in_config, name, "Use adapter.layers instead of a partition")
        rules = Composition(partition=partition).rules(depth)

        def side_of(module: str) -> Side | None:  # norms follow their layer, like everything in it except attention
            layer, kind = ModuleName(module).layer(self.container), ModuleName(module).kind
            owner = next(rule.expert for rule in rules if rule.matches(module, layer, kind))
            return next((side for side in SIDES if side == owner), None)

        return side_of

    def _is_meant(self, name: str, ends: Sequence[str]) -> bool:
        """Whether `ends` name a module to adapt. One of a vision or audio tower is meant only by its full name: rows of
        text never reach it, so its adapter would stay at zero.
        """
        return name in ends or (_named(name, ends) and self._reads_text(name))

    @cached_property
    def _language_model(self) -> str:
        """The name of the part that reads text; empty if that is the whole model."""
        decoder = self.model.get_decoder()
        return next((name for name, module in self.model.named_modules() if module is decoder), "")

    def _reads_text(self, name: str) -> bool:
        """Whether a module is in the language model, or is its head, and not in a tower or a projector beside it."""
        if self.config.get_text_config() is self.config or not self._language_model:
            return True
        in_language_model = name.startswith(f"{self._language_model}.")
        return in_language_model or self.model.get_submodule(name) is self.model.get_output_embeddings()

    def _shortest_ends(self, projections: Iterable[str]) -> list[str]:
        """The shortest ends of names that select these modules and, where one is enough for that, no others."""
        chosen = set(projections)
        everything = [name for name, _ in self.model.named_modules()]
        return sorted({_shortest_end(name, chosen, everything, self.container) for name in chosen})

    def _projections(self) -> list[str]:
        """The names of all attention and MLP projections in the language model's layers."""
        projections = {
            name
            for name in self.matrices
            if ModuleName(name).layer(self.container) is not None
            and ModuleName(name).kind in ("attention", "mlp")
            and self._is_a_product(name)
        }
        if not projections:
            raise FieldError(
                f"No attention or MLP projections were recognised in {type(self.model).__name__}",
                f"Name them in adapter.target_modules; its modules end in {_ends(self.matrices)}",
                parameter="adapter.target_modules",
            )
        return sorted(projections)

    def _is_a_product(self, name: str) -> bool:
        """Whether a linear module returns its product with the input, to which LoRA adds its own.

        Routers of some mixtures are linear modules that return scores and choices, or read their input in another form.
        """
        import torch
        from transformers.pytorch_utils import Conv1D

        module, sizes = self.model.get_submodule(name), self.adaptable[name]
        if type(module).forward in (torch.nn.Linear.forward, Conv1D.forward):
            return True
        row = torch.empty(1, 2, sizes.in_features, dtype=module.weight.dtype, device=module.weight.device)
        try:
            output = module(row)
        except Exception:  # of any kind: the input has another form
            return False
        return isinstance(output, torch.Tensor) and output.shape == (1, 2, sizes.out_features)

    @property
    def _ties_its_head(self) -> bool:
        """Whether the head has the input embeddings' weight."""
        head, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        tied = {name for weight in self.adaptable.values() for name in weight.tied}
        return (
            head is not None
            and any(self.model.get_submodule(name) is head for name in tied)
            and any(self.model.get_submodule(name) is embeddings for name in tied)
        )

    def _check_start(self, names: Sequence[str]) -> None:
        """Raise if TRL would not apply the start's LoRA to a module, or not train it."""
        head, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        tied = self._ties_its_head
        for name in names:
            module, saved = self.model.get_submodule(name), _named(name, self.options.modules_to_save)
            if module is head or (tied and module is embeddings) or saved:
                reason = "adapter.modules_to_save trains in full" if saved else "is tied to the head or is the head"
                raise UnsupportedError(
                    f"The start adapts {name}, which {reason}, so training cannot start from it",
                    MERGE_INSTEAD,
                    parameter="start",
                )

    def check_below(self, start: Adapter) -> None:
        """Raise if another module has a weight that the start adapts: merged in memory, it would change both."""
        for name in start.modules:
            if tied := self.adaptable[name].tied:
                raise UnsupportedError(
                    f"The start adapts {name}, whose weight {tied[0]} uses too, so training cannot lie on top of it",
                    MERGE_INSTEAD,
                    parameter="start",
                )

    def _check(self, names: Sequence[str], layers: Sequence[int] | None) -> None:
        problems, options = Problems(FieldError), self.options
        head, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        tied = self._ties_its_head
        for name in names:
            modules = {full: self.model.get_submodule(full) for full in self.adaptable if self._is_meant(full, [name])}
            field = "adapter.target_modules"
            where = f"{field}: {name!r}"
            if not modules:
                problems.add(f"{where} does not name a module", f"Choose from {_ends(self.adaptable)}", parameter=field)
            elif any(module is head for module in modules.values()):
                problems.add(
                    f"{where} is the output head, which TRL does not train as LoRA",
                    "Remove it, or put it into adapter.modules_to_save",
                    parameter=field,
                )
            elif tied and any(module is embeddings for module in modules.values()):
                problems.add(
                    f"{where} is tied to the output head, which would not change with it", "Remove it", parameter=field
                )
            elif layers is not None and any(ModuleName(full).layer(self.container) is None for full in modules):
                problems.add(
                    f"{where} is outside the layers, but adapter.layers selects layers",
                    "Remove one of the two",
                    parameter=field,
                )
        everything = dict(self.model.named_modules())
        for name in options.modules_to_save:
            saved = [module for full, module in everything.items() if _named(full, [name])]
            field = "adapter.modules_to_save"
            where = f"{field}: {name!r}"
            if not saved:
                problems.add(f"{where} does not name a module", f"Choose from {_ends(self.adaptable)}", parameter=field)
            elif tied and any(module is embeddings or module is head for module in saved):
                problems.add(
                    f"{where} is one weight for input and output in this model, and would be saved as two",
                    "Remove it",
                    parameter=field,
                )
        depth = ModelConfig(self.config.to_dict()).num_layers
        if layers and depth is not None and layers[-1] >= depth:
            problems.add(
                f"adapter.layers: {options.layers} reaches beyond layer {depth - 1}",
                f"Layers are 0 to {depth - 1}",
                parameter="adapter.layers",
            )
        problems.raise_if_any()


def _shapes(start: Adapter, adapted: Iterable[str], options: AdapterOptions) -> dict[str, Shape]:
    """The rank, α and scale of each module: the start's own, and the recipe's for modules that it does not adapt."""
    shapes, rslora = {}, start.config.rslora
    for name in adapted:
        if (module := start.modules.get(name)) is not None:
            shapes[name] = Shape(module.rank, module.alpha, module.scale)
        else:
            wanted = Shape.of_alpha(options.r, options.alpha, options.rslora)
            shapes[name] = Shape.of_scale(options.r, rslora, wanted.scale)
    return shapes


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _named(name: str, ends: Sequence[str]) -> bool:
    """Whether target_modules `ends` match, by PEFT's rule: the full name, or its end after a dot."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _shortest_end(name: str, projections: set[str], adaptable: Iterable[str], container: str | None) -> str:
    """`q_proj` for `model.layers.0.self_attn.q_proj`; `self_attn.q_proj` if an unwanted module ends in q_proj too."""
    last_part = name.rpartition(".")[2]
    if all(module in projections for module in adaptable if _named(module, [last_part])):
        return last_part
    return name[len(container or "") + 1 :].partition(".")[2]


def _ends(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
