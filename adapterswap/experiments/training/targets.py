"""Find what to train in a model: the modules that get an adapter, or parameters of the model itself.

Reads names, shapes and the config of a model without weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from adapterswap.core import Adapter, Base, Composition, Depth, ModelConfig, check_one_list, parse_layers
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
    if start and start.on_top and not recipe.quantization:
        choice.check_below(start.adapter)

    if recipe.adapter.method == "none":
        return choice.weights()
    if start and not start.on_top:
        return choice.adapters(start.adapter)
    return choice.adapters(None)


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
        """The modules that get an adapter: those that the recipe names, the start's, or all projections."""
        options = self.options
        started: list[str] = []
        if start:
            started = sorted(start.modules)
        layers = self._layers()
        self._check_start(started)

        # Which modules are meant, and by which ends of their names.
        if options.target_modules:
            ends = sorted(set(options.target_modules))
            self._check(ends, layers)
            wanted = [name for name in self.adaptable if self._is_meant(name, ends)]
        else:
            self._check([], layers)
            wanted = started or self._projections()
            ends = started or self._shortest_ends(wanted)

        # Of these, the ones in the recipe's layers and on its side.
        in_layers = {name: self.adaptable[name] for name in wanted if self._in(layers, name)}
        chosen, sides = self._owned(in_layers)
        if not chosen:
            raise FieldError(
                "The start adapts no module in the layers that the recipe trains",
                "Name modules in adapter.target_modules; they start at zero",
                parameter="adapter.layers",
            )

        # The adapter also keeps the start's modules that are not trained.
        adapted = {name: self.adaptable[name] for name in (*chosen, *started)}
        if start:
            ends = sorted({_last_part(name) for name in chosen})
        used_ends = []
        for end in ends:
            if any(_is_named(name, [end]) for name in chosen):
                used_ends.append(end)
        names, layers = self._targets_for_peft(adapted, sorted({*used_ends, *map(_last_part, started)}))

        shapes: dict[str, Shape] = {}
        rslora = options.rslora
        if start:
            rslora = start.config.rslora
            shapes = _shapes(start, adapted, options)

        # LoRA's A is r×in and its B out×r; modules saved in full have all of their parameters.
        parameters = 0
        for name, weight in chosen.items():
            rank = options.r
            if start:
                rank = shapes[name].rank
            parameters += rank * (weight.in_features + weight.out_features)
        for name, module in self.model.named_modules():
            if _is_named(name, options.modules_to_save):
                parameters += sum(parameter.numel() for parameter in module.parameters())

        return TrainingTargets(
            names=names,
            ends=used_ends,
            modules=frozenset(chosen),
            parameters=parameters,
            layers=layers,
            conv1d=all(weight.transposed and not weight.embedding for weight in adapted.values()),
            sides=sides,
            shapes=shapes,
            rslora=rslora,
        )

    def weights(self) -> TrainingTargets:
        """The modules whose own weights are trained, without an adapter."""
        layers = self._layers()
        self._check([], layers)

        holders = {}
        for name, module in self.model.named_modules():
            has_weights = next(module.parameters(recurse=False), None) is not None
            if has_weights and self._reads_text(name) and self._in(layers, name):
                holders[name] = module
        chosen, sides = self._owned(holders)

        # By their identity, because a weight that two modules share counts once.
        numbers = {}
        for module in chosen.values():
            for parameter in module.parameters(recurse=False):
                numbers[id(parameter)] = parameter.numel()

        return TrainingTargets(
            names=[],
            ends=sorted({_last_part(name) for name in chosen}),
            modules=frozenset(chosen),
            parameters=sum(numbers.values()),
            layers=layers,
            conv1d=False,
            sides=sides,
        )

    def _layers(self) -> list[int] | None:
        """The layers that the recipe trains, sorted; None for all."""
        if self.options.layers is None:
            return None
        return sorted(parse_layers(self.options.layers))

    def _targets_for_peft(self, chosen: Iterable[str], ends: list[str]) -> tuple[list[str], list[int] | None]:
        """target_modules and layers_to_transform: ends and layers if they select exactly `chosen`, else full names.

        PEFT ignores layers_to_transform if target_modules contains full names.
        """
        layer_of = {}
        for name, _ in self.model.named_modules():
            if _is_named(name, ends):
                layer_of[name] = ModuleName(name).layer(self.container)
        if layer_of.keys() == set(chosen):
            return ends, None

        layers = {layer_of[name] for name in chosen}
        in_layers = {name for name, layer in layer_of.items() if layer in layers}
        # PEFT counts the layers of a tower like those of the language model.
        in_towers = any(layer_container([name]) != self.container for name in layer_of.keys() - in_layers)
        if None not in layers and in_layers == set(chosen) and not in_towers:
            return ends, sorted(layer for layer in layers if layer is not None)
        return sorted(chosen), None

    def _in(self, layers: Sequence[int] | None, name: str) -> bool:
        return layers is None or ModuleName(name).layer(self.container) in layers

    def _owned(self, modules: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Side]]:
        """The modules that the partition gives to the recipe's side, or to both sides; and the side of each."""
        trained_sides: list[Side | None]
        if self.simultaneous:
            partition, parameter = self.simultaneous.partition, "simultaneous.partition"
            trained_sides = [*SIDES]
        elif self.options.partition is None:
            return modules, {}
        else:
            partition, parameter = self.options.partition, "adapter.partition"
            trained_sides = [self.options.side]

        # The partition's rules give every layer's attention and MLP an owner, and "task" and "language" are the sides.
        in_config = ModelConfig(self.config.to_dict()).num_layers
        depth = Depth.known(in_config, type(self.model).__name__, "Use adapter.layers instead of a partition")
        rules = Composition(partition=partition).rules(depth)
        sides: dict[str, Side] = {}
        for name in modules:
            # Norms follow their layer, like everything in it except attention.
            module = ModuleName(name)
            layer, kind = module.layer(self.container), module.kind
            owner = next(rule.expert for rule in rules if rule.matches(name, layer, kind))
            for side in SIDES:
                if side == owner:
                    sides[name] = side

        for trained in trained_sides:
            if trained not in sides.values():
                raise FieldError(
                    f"Partition {partition} has no module of {type(self.model).__name__} on the {trained} side",
                    "Choose another partition, or name more modules in adapter.target_modules",
                    parameter=parameter,
                )
        owned = {name: module for name, module in modules.items() if sides.get(name) in trained_sides}
        if not self.simultaneous:
            return owned, {}
        return owned, sides

    def _is_meant(self, name: str, ends: Sequence[str]) -> bool:
        """Whether `ends` name a module to adapt. One of a vision or audio tower is meant only by its full name: rows of
        text never reach it, so its adapter would stay at zero.
        """
        return name in ends or (_is_named(name, ends) and self._reads_text(name))

    @cached_property
    def _language_model(self) -> str:
        """The name of the part that reads text; empty if that is the whole model."""
        decoder = self.model.get_decoder()
        for name, module in self.model.named_modules():
            if module is decoder:
                return str(name)
        return ""

    def _reads_text(self, name: str) -> bool:
        """Whether a module is in the language model, or is its head, and not in a tower or a projector beside it."""
        if self.config.get_text_config() is self.config or not self._language_model:
            return True
        in_language_model = name.startswith(f"{self._language_model}.")
        return in_language_model or self.model.get_submodule(name) is self.model.get_output_embeddings()

    def _shortest_ends(self, projections: Iterable[str]) -> list[str]:
        """The shortest ends of names that select these modules and, where one is enough for that, no others.

        `q_proj` for `model.layers.0.self_attn.q_proj`; `self_attn.q_proj` if an unwanted module ends in q_proj too.
        """
        chosen = set(projections)
        unwanted = [name for name, _ in self.model.named_modules() if name not in chosen]
        ends = set()
        for name in chosen:
            end = _last_part(name)
            if any(_is_named(module, [end]) for module in unwanted):
                # What follows the layer's number.
                end = name[len(self.container or "") + 1 :].partition(".")[2]
            ends.add(end)
        return sorted(ends)

    def _projections(self) -> list[str]:
        """The names of all attention and MLP projections in the language model's layers."""
        projections = set()
        for name in self.matrices:
            module = ModuleName(name)
            in_a_layer = module.layer(self.container) is not None
            if in_a_layer and module.kind in ("attention", "mlp") and self._is_a_product(name):
                projections.add(name)

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

        module = self.model.get_submodule(name)
        if type(module).forward in (torch.nn.Linear.forward, Conv1D.forward):
            return True

        # Try it with a row of two tokens. On the meta device that computes shapes alone.
        sizes = self.adaptable[name]
        row = torch.empty(1, 2, sizes.in_features, dtype=module.weight.dtype, device=module.weight.device)
        try:
            output = module(row)
        except Exception:  # of any kind: the input has another form
            return False
        return isinstance(output, torch.Tensor) and output.shape == (1, 2, sizes.out_features)

    @cached_property
    def _head(self) -> Any:
        """The output head, or None."""
        return self.model.get_output_embeddings()

    @cached_property
    def _tied_embeddings(self) -> Any:
        """The input embeddings if the head has their weight, else None."""
        if self._head is None:
            return None
        embeddings = self.model.get_input_embeddings()
        tied: list[Any] = []
        for weight in self.adaptable.values():
            tied += map(self.model.get_submodule, weight.tied)
        has_both = any(module is self._head for module in tied) and any(module is embeddings for module in tied)
        if not has_both:
            return None
        return embeddings

    def _check_start(self, names: Sequence[str]) -> None:
        """Raise if TRL would not apply the start's LoRA to a module, or not train it."""
        for name in names:
            module = self.model.get_submodule(name)
            if _is_named(name, self.options.modules_to_save):
                reason = "adapter.modules_to_save trains in full"
            elif module is self._head or module is self._tied_embeddings:
                reason = "is tied to the head or is the head"
            else:
                continue
            raise UnsupportedError(
                f"The start adapts {name}, which {reason}, so training cannot start from it",
                MERGE_INSTEAD,
                parameter="start",
            )

    def check_below(self, start: Adapter) -> None:
        """Raise if another module has a weight that the start adapts: merged in memory, it would change both."""
        for name in start.modules:
            tied = self.adaptable[name].tied
            if tied:
                raise UnsupportedError(
                    f"The start adapts {name}, whose weight {tied[0]} uses too, so training cannot lie on top of it",
                    MERGE_INSTEAD,
                    parameter="start",
                )

    def _check(self, names: Sequence[str], layers: Sequence[int] | None) -> None:
        """Raise all that is wrong with the recipe's `target_modules` (`names`), `modules_to_save` and `layers`."""
        problems = Problems(FieldError)
        head, tied_embeddings = self._head, self._tied_embeddings

        for name in names:
            meant = [full_name for full_name in self.adaptable if self._is_meant(full_name, [name])]
            modules = [self.model.get_submodule(full_name) for full_name in meant]
            field = "adapter.target_modules"
            where = f"{field}: {name!r}"
            if not modules:
                problems.add(f"{where} does not name a module", f"Choose from {_ends(self.adaptable)}", parameter=field)
            elif any(module is head for module in modules):
                problems.add(
                    f"{where} is the output head, which TRL does not train as LoRA",
                    "Remove it, or put it into adapter.modules_to_save",
                    parameter=field,
                )
            elif any(module is tied_embeddings for module in modules):
                problems.add(
                    f"{where} is tied to the output head, which would not change with it", "Remove it", parameter=field
                )
            elif layers is not None and any(ModuleName(each).layer(self.container) is None for each in meant):
                problems.add(
                    f"{where} is outside the layers, but adapter.layers selects layers",
                    "Remove one of the two",
                    parameter=field,
                )

        everything = dict(self.model.named_modules())
        for name in self.options.modules_to_save:
            saved = [module for full_name, module in everything.items() if _is_named(full_name, [name])]
            field = "adapter.modules_to_save"
            where = f"{field}: {name!r}"
            if not saved:
                problems.add(f"{where} does not name a module", f"Choose from {_ends(self.adaptable)}", parameter=field)
            elif tied_embeddings is not None and any(module in (tied_embeddings, head) for module in saved):
                problems.add(
                    f"{where} is one weight for input and output in this model, and would be saved as two",
                    "Remove it",
                    parameter=field,
                )

        depth = ModelConfig(self.config.to_dict()).num_layers
        if layers and depth is not None and layers[-1] >= depth:
            problems.add(
                f"adapter.layers: {self.options.layers} reaches beyond layer {depth - 1}",
                f"Layers are 0 to {depth - 1}",
                parameter="adapter.layers",
            )

        problems.raise_if_any()


def _shapes(start: Adapter, adapted: Iterable[str], options: AdapterOptions) -> dict[str, Shape]:
    """The rank, α and scale of each module: the start's own, and the recipe's for modules that it does not adapt."""
    wanted = Shape.of_alpha(options.r, options.alpha, options.rslora)
    new = Shape.of_scale(options.r, start.config.rslora, wanted.scale)
    shapes = dict.fromkeys(adapted, new)
    for name in shapes.keys() & start.modules.keys():
        module = start.modules[name]
        shapes[name] = Shape(module.rank, module.alpha, module.scale)
    return shapes


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _is_named(name: str, ends: Sequence[str]) -> bool:
    """Whether target_modules `ends` match, by PEFT's rule: the full name, or its end after a dot."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _ends(names: Iterable[str]) -> str:
    return ", ".join(sorted({_last_part(name) for name in names}))
