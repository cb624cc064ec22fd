"""Turn a user's request into settings of a model's layers; plan the active composition from experts on disk.

An expert is read from its own file if the file still holds the numbers in the model. A composition saved live then has
the same bytes as one composed from files. Otherwise PEFT saves the expert first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.core.experts.adapter import Adapter, open_adapter
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.parts import OpaqueModule, Part
from adapterswap.core.model.layers import Depth
from adapterswap.core.model.sources import CONFIG, WEIGHTS
from adapterswap.core.planning.checks import check_names
from adapterswap.core.planning.composition import Composition, parse_composition
from adapterswap.core.planning.depth import least_depth
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.writing.peft_config import Shape, adapter_config
from adapterswap.engines.live.inventory import (
    Inventory,
    LoadedFactors,
    LoadedFrom,
    check_in_memory,
    check_model,
    factors,
    is_unloaded,
    other_tensors,
    own_factors,
)
from adapterswap.engines.live.scales import SAME, Scales
from adapterswap.engines.live.switch import Switch, make_switch
from adapterswap.kit.errors import AdapterswapError, CompositionError, Problems, check_type
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.files.tensorfile import Tensor, open_files
from adapterswap.kit.files.text import read_json, write_json

if TYPE_CHECKING:
    import torch
    from peft import PeftModel


@contextmanager
def plan_on_disk(plan: Plan, inventory: Inventory) -> Iterator[Plan]:
    """The same plan, made with experts that are on disk until the block ends.

    Args:
        plan: a plan of loaded experts.
        inventory: what is loaded.

    Raises:
        UnsupportedError: the model was offloaded after its adapters were loaded.
    """
    check_in_memory(inventory.model.get_base_model())
    with ExitStack() as stack:
        experts = {}
        for name, file in plan.adapters.items():
            if _holds(file, name, inventory):
                experts[name] = file
            else:
                saved = stack.enter_context(_saved(name, inventory))
                experts[name] = replace(saved, kept_layers=file.kept_layers)

        composition = plan.composition
        bases = {(adapter.config.base_model, adapter.config.revision): None for adapter in experts.values()}
        if len(bases) > 1 and composition.base_model is None:  # they are loaded in one model, so they have one base
            declared = next(name for name, _ in bases if name)
            composition = composition.model_copy(update={"base_model": declared})
        yield make_plan(composition, experts, num_layers=plan.num_layers)


def _holds(file: Adapter, name: str, inventory: Inventory) -> bool:
    """Whether a file holds exactly the numbers of a loaded expert."""
    # The same modules, of the same ranks and scales
    loaded = {module: layer for module, layer in inventory.layers.items() if name in layer.r}
    saved = {module: wrapper for module, wrapper in inventory.in_full.items() if name in wrapper.modules_to_save}
    if loaded.keys() != file.factors.keys() or saved.keys() != file.saved.keys():
        return False
    for module in loaded:
        part, shape = file.factors[module], inventory.shape(module, name)
        if shape is None or part.rank != shape.rank or not math.isclose(part.scale, shape.scale, rel_tol=SAME):
            return False

    # Each tensor on disk, with the loaded one
    pairs: list[tuple[Tensor, Any]] = []
    for module, layer in loaded.items():
        pairs += _tensors(file.parts[module], layer, name)
    for module, wrapper in saved.items():
        state = wrapper.modules_to_save[name].state_dict()
        for key, place in file.saved[module].tensors.items():
            pairs.append((place, state.get(key)))

    try:
        with open_files([file.file]) as files:
            handle = files[file.file.path]
            return all(_equal(name, handle, place, tensor) for place, tensor in pairs)
    except AdapterswapError:  # the file is gone or was replaced
        return False


def _tensors(part: Part, layer: Any, name: str) -> list[tuple[Tensor, Any]]:
    """The tensors of an adapted module in the file, each with its tensor in the model; None if there is none."""
    loaded = own_factors(layer, name)
    pairs: list[tuple[Tensor, Any]] = []
    if part.lora is not None:
        pairs = [(part.lora.a, loaded and loaded.a), (part.lora.b, loaded and loaded.b)]
    if isinstance(part, OpaqueModule):
        extra = other_tensors(layer, name)
        pairs += [(place, extra.get(key)) for key, place in part.beside.items()]
    return pairs


def _equal(name: str, handle: int, place: Tensor, tensor: torch.Tensor | None) -> bool:
    """Whether a loaded tensor holds the numbers of the one on disk."""
    import torch

    if tensor is None:
        return False
    on_disk = torch.from_numpy(place.read_numbers(name, handle)).reshape(tensor.shape)
    return torch.equal(on_disk, tensor.detach().float().cpu())


@contextmanager
def _saved(name: str, inventory: Inventory) -> Iterator[Adapter]:
    """A loaded expert as PEFT saves it, in a temporary folder."""
    with scratch_folder("live") as place:
        with warnings.catch_warnings():
            # PEFT mistakes the biases of `lora_bias` for factors that ZeRO-3 left empty.
            warnings.filterwarnings("ignore", r"Adapter .* LoRA tensor\(s\) have invalid shape")
            inventory.model.save_pretrained(place, selected_adapters=[name], save_embedding_layers=False)
        folder = place
        if (place / name).is_dir():
            folder = place / name
        _correct_ranks(folder, name, inventory)
        yield open_adapter(folder)


def _correct_ranks(folder: Path, name: str, inventory: Inventory) -> None:
    """Give a saved adapter the ranks and scales that the model computes with.

    PEFT writes those of the config that it loaded first. Hot swaps and `set_scale` do not change that config, and
    `prepare_model_for_compiled_hotswap` pads the factors beyond its ranks.
    """
    from safetensors.torch import load_file, save_file

    shapes: dict[str, Shape] = {}
    padded: dict[str, LoadedFactors] = {}
    is_kept = True
    rslora = False
    for module, layer in inventory.layers.items():
        shape = inventory.shape(module, name)
        if shape is None:
            continue
        shapes[module] = shape
        rslora = layer.use_rslora[name]
        is_kept = is_kept and shape == Shape.of_alpha(layer.r[name], layer.lora_alpha[name], rslora)

        loaded, own = factors(layer, name), own_factors(layer, name)
        if loaded is not None and own is not None and loaded.rank != own.rank:
            padded[module] = own
    if is_kept and not padded:
        return

    config = read_json(folder / CONFIG)
    corrected = adapter_config(
        shapes, rslora=rslora, base_model=None, revision=None, task_type=None, fan_in_fan_out=False, tied=False
    )
    config |= {key: corrected[key] for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
    write_json(folder / CONFIG, config)

    tensors = load_file(folder / WEIGHTS)
    for module, own in padded.items():
        a, b = ModuleKeys(module).factors(embedding=False)
        tensors |= {a: own.a.detach().contiguous(), b: own.b.detach().contiguous()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


Composable = str | Composition | Plan | None

_REMEMBERED = 256  # compositions whose settings are kept: clients of a server may ask for any number


class Catalogue:
    """What is loaded in a model, and the settings of the compositions used so far.

    Attributes:
        inventory: what is loaded, as of the last `refresh`.
        scales: the adapters' own scales, likewise.
    """

    def __init__(self, model: PeftModel) -> None:
        check_model(model)
        self.scales = Scales.in_model(model)
        self.inventory = Inventory(model, {}, self.scales)
        self.scales.read(self.inventory.layers, model.peft_config)
        self._changes = self.scales.changes
        self._model = model
        self._origins: dict[str, LoadedFrom] = {}
        self._switches: dict[str, tuple[Switch, bytes | None]] = {}  # None if no tensor decides a coefficient

    def add(self, name: str, adapter: Adapter) -> None:
        """Note that the adapter `name` in the model was loaded from `adapter`."""
        self._origins[name] = LoadedFrom(adapter, self._model.peft_config[name])
        self._look()
        self.refresh()

    def refresh(self) -> None:
        """Take over what has happened since: adapters that were loaded, deleted, unloaded or swapped, other scales.

        Raises the errors of `Inventory`.
        """
        if is_unloaded(self._model) or self.inventory.is_stale:
            self._look()
        self.scales.read(self.inventory.layers, self._model.peft_config)
        if self.scales.changes != self._changes:
            self._changes = self.scales.changes
            self.inventory.forget()
            self._switches.clear()

    def switch(self, composition: Composable) -> Switch:
        """The settings for a composition, remembered for names and `Composition`s."""
        check_type(
            composition,
            (str, Composition, Plan, type(None)),
            "composition",
            "Pass a name such as 'math+swahili', a Composition, a plan, or None for the base",
        )
        self.refresh()
        if isinstance(composition, Plan):
            composition.check_adapter()
            return make_switch(composition, self.inventory)

        key = composition or BASE
        if isinstance(key, Composition):
            key = key.model_dump_json()
        remembered = self._switches.get(key)
        if remembered is not None:
            switch, content = remembered
            if content is None or content == self.inventory.content(switch.experts):
                return switch

        while len(self._switches) >= _REMEMBERED:
            self._switches.pop(next(iter(self._switches)))
        switch, by_tensors = self._make(self._parse(composition))
        content = None
        if by_tensors:
            content = self.inventory.content(switch.experts)
        self._switches[key] = switch, content
        return switch

    def _look(self) -> None:
        self.inventory = Inventory(self._model, self._origins, self.scales)
        self._switches.clear()

    def _parse(self, composition: str | Composition | None) -> Composition | None:
        """The composition of a name; None for the base."""
        if isinstance(composition, Composition):
            return composition
        if composition is None or composition == BASE:
            return None
        if composition in self.inventory.names:
            origin = self.inventory.origin(composition)
            if origin is not None and origin.kept_layers is not None:
                raise CompositionError(
                    f"Only the {origin.kept_layers} of the expert {composition!r} are loaded",
                    "To use it alone, load all of its layers",
                    parameter="composition",
                )
            return Composition(allocation=(Rule(expert=composition),))
        if not set("+@ ") & set(composition):  # the name of one expert
            self._check_names([composition])
        return parse_composition(composition)

    def _check_names(self, names: Sequence[str], rules: Sequence[Rule] | None = None) -> None:
        problems = Problems(CompositionError)
        check_names(names, self.inventory.names, problems, rules)
        problems.raise_if_any()

    def _make(self, composition: Composition | None) -> tuple[Switch, bool]:
        """A composition's settings, and whether its coefficients depend on the experts' tensors."""
        if composition is None:
            return Switch(), False
        num_layers = self.inventory.num_layers
        self._check_names(composition.expert_names, composition.allocation)
        experts = self.inventory.experts(composition.expert_names)
        slices = any(expert.kept_layers is not None for expert in experts.values())
        if slices or composition.names_layers:
            Depth.known(num_layers, "the model", "Pass a plan that was made with `num_layers`", parameter="model")
        Depth.check("the model", num_layers, composition.num_layers, "Leave `num_layers` out")

        depth = num_layers or composition.num_layers or least_depth(experts)
        plan = make_plan(composition, experts, num_layers=depth, base_at_hand=True)
        rules = [slot.rule for slot in plan if slot.rule is not None]
        if any(rule.weights or rule.spans for rule in rules):
            with plan_on_disk(plan, self.inventory) as resident:
                return make_switch(resident, self.inventory), True
        return make_switch(plan, self.inventory), False
