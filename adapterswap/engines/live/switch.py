"""Set which experts every LoRA layer uses and with which coefficients, also in a compiled model.

No tensor is copied or changed: only each layer's list of active adapters and its scalings are.

torch.compile bakes PEFT's lists of active adapters and its scalings, which are Python numbers, into the graph, and
recompiles when they change. Here both stay the same for the compiler: a scaling is a view of one vector per device, and
switching fills that vector. Every pinned expert is computed in every layer where it is loaded, so pin few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.layers import Depth
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.resolution import Resolved
from adapterswap.engines.live.inventory import (
    Inventory,
    factors,
    forget_average,
    own_factors,
    parameter_of,
    use_in_full,
)
from adapterswap.engines.live.scales import SAME, Scales
from adapterswap.kit.errors import CompositionError, Problems, UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Switch:
    """A plan as settings of LoRA layers.

    Attributes:
        plan: the plan with its final coefficients; None for the base.
        terms: each active expert's coefficient c, by the name of the LoRA layer, which then computes
            W·x + Σ c·s·B·A·x. Layers that are not listed compute the base.
        in_full: the same for modules that experts trained in full; see `use_in_full`.
    """

    plan: Plan | None = None
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    in_full: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.plan.experts) if self.plan else ()


def why_not_live(plan: Plan) -> str | None:
    """Why a plan cannot be computed by switching adapters on and off; None if it can."""
    problems = Problems()
    Target.LIVE.report(plan, problems)
    return next((problem.message for problem in problems), None)


def make_switch(plan: Plan, inventory: Inventory) -> Switch:
    """The settings that compute `plan` with the adapters in the model."""
    problems = Problems(CompositionError)
    Target.LIVE.report(plan, problems)
    if problems:
        raise problems.as_error().recast(parameter="composition")
    if inventory.num_layers not in (plan.num_layers, None):
        problems.add(
            f"The plan is for {plan.depth} layers, and the model has {Depth(inventory.num_layers or 0)}",
            "Make the plan for this model",
            parameter="composition",
        )
    for slot in plan:
        for term in slot.terms:
            if slot.name in plan.saved:
                wrapper = inventory.in_full.get(slot.name)
                is_loaded = wrapper is not None and term.expert in wrapper.modules_to_save
                mismatch = None if is_loaded else "is not loaded"
            else:
                mismatch = _mismatch(inventory, slot.name, term.expert, term.lora)
            if mismatch is not None:
                problems.add(
                    f"The adapter {term.expert!r} {mismatch} at {slot.name}",
                    f"Load the plan's expert under that name: composer.load_expert(folder, {term.expert!r})",
                    parameter="composition",
                )
        if problems:  # one such module is enough
            break
    problems.raise_if_any()
    plan = Resolved.of(plan).plan
    return Switch(plan, _coefficients(plan.modules), _coefficients(plan.saved))


def _coefficients(slots: Mapping[str, Slot]) -> dict[str, dict[str, float]]:
    """The experts' coefficients in each module that changes."""
    coefficients = {}
    for name, slot in slots.items():
        if slot.terms:
            coefficients[name] = {term.expert: term.coefficient for term in slot.terms}
    return coefficients


def _mismatch(inventory: Inventory, module: str, expert: str, planned: LoraModule) -> str | None:
    """How the adapter at a layer differs from the plan's expert, as far as ranks and scales show."""
    layer = inventory.layers.get(module)
    loaded = None if layer is None else own_factors(layer, expert)
    if loaded is None:
        return "is not loaded"

    rank = loaded.rank
    if rank != planned.rank:
        return f"has rank {rank} in the model, and {planned.rank} in the plan"

    scale = inventory.scales.of(layer, expert)
    if not math.isclose(scale, planned.scale, rel_tol=SAME):
        return f"has the scale {scale:g} in the model, and {planned.scale:g} in the plan"
    return None


def apply_switch(switch: Switch, inventory: Inventory) -> None:
    """Set every layer's active adapters and scalings. Layers that are already right are not changed."""
    check_loaded(switch, inventory)
    for module, layer in inventory.layers.items():
        active = list(switch.terms.get(module, ()))
        if layer.active_adapters != active:
            layer.set_adapter(active, inference_mode=True)
    inventory.scales.apply((inventory.layers[module], terms) for module, terms in switch.terms.items())
    apply_in_full(switch, inventory)


def apply_in_full(switch: Switch, inventory: Inventory) -> None:
    """Set the weights of the modules that experts trained in full, and switch trainable tokens off."""
    for module, wrapper in inventory.in_full.items():
        use_in_full(module, wrapper, switch.in_full.get(module, {}))
    for wrapper in inventory.wrappers:
        if wrapper.active_adapters and wrapper not in inventory.in_full.values():
            wrapper.set_adapter([], inference_mode=True)


def check_loaded(switch: Switch, inventory: Inventory) -> None:
    """Raise `CompositionError` if a switch uses an expert that is no longer in the model."""
    loaded = {module: layer.r for module, layer in inventory.layers.items()}
    loaded |= {module: wrapper.modules_to_save for module, wrapper in inventory.in_full.items()}
    for module, terms in (*switch.terms.items(), *switch.in_full.items()):
        for name in terms:
            if name not in loaded.get(module, ()):
                raise CompositionError(
                    f"The adapter {name!r} was deleted from the model", "Load it again", parameter="composition"
                )


def unmerge(layers: Iterable[Any]) -> None:
    """Unmerge all merged adapters of these layers."""
    for layer in layers:
        if layer.merged:
            layer.unmerge()


class InitialState:
    """The adapters' state before any composition: active lists, coefficients, which parameters are trainable.

    Recording it freezes the adapters, so no composition makes anything trainable.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._active: dict[Any, Any] = {}
        self._layers: set[Any] = set()
        self._trainable: dict[tuple[Any, str], bool] = {}
        self._in_full: set[Any] = set()
        self._scaled = dict(inventory.scales.scaled)  # another composer's composition may be active
        self.extend(inventory)
        for (module, name), trainable in self._trainable.items():
            if trainable:
                getattr(module, name).requires_grad_(False)

    def extend(self, inventory: Inventory) -> None:
        """Record the state of adapters that were loaded since. Earlier records stay."""
        for layer in inventory.layers.values():
            self._active.setdefault(layer, layer.active_adapter)
            self._layers.add(layer)
        for wrapper in inventory.wrappers:
            self._active.setdefault(wrapper, wrapper.active_adapter)
        self._in_full.update(inventory.in_full.values())
        for module, name in inventory.parameters:
            if (module, name) not in self._trainable:
                self._trainable[module, name] = getattr(module, name).requires_grad

    def freeze(self) -> None:
        """Freeze everything that PEFT made trainable since."""
        for module, name in self._trainable:
            if (parameter := getattr(module, name)).requires_grad:
                parameter.requires_grad_(False)
        for wrapper in self._in_full:
            wrapper.requires_grad_(False)

    def restore(self, scales: Scales) -> None:
        """Restore everything. Adapters merged since are unmerged first, as PEFT does when it switches."""
        unmerge(self._layers)
        for wrapper in self._in_full:
            forget_average(wrapper)
        for module, active in self._active.items():
            if module.active_adapter != active:
                module.set_adapter(active, inference_mode=True)
        scales.restore(self._scaled)
        for (module, name), trainable in self._trainable.items():
            if (parameter := getattr(module, name)).requires_grad != trainable:
                parameter.requires_grad_(trainable)


class Pin:
    """Experts that stay active, with their scalings in tensors.

    Args:
        experts: their names.
    """

    def __init__(self, experts: Sequence[str]) -> None:
        self.experts = tuple(experts)
        self._slots: dict[tuple[str, str], tuple[torch.device, int]] = {}
        self._vectors: dict[torch.device, torch.Tensor] = {}
        self._layers: dict[str, Any] = {}
        self._former: dict[tuple[Any, str], Any] = {}  # by layer and expert: what held the scaling before

    def check(self, switch: Switch) -> None:
        """Raise `CompositionError` if a switch needs an expert that is not pinned."""
        for terms in (*switch.terms.values(), *switch.in_full.values()):
            for name in terms:
                if name not in self.experts:
                    raise CompositionError(
                        f"The expert {name!r} is not pinned (pinned: {', '.join(self.experts)})",
                        "Add it to composer.pinned(…), which compiles the model again",
                        parameter="composition",
                    )

    def apply(self, switch: Switch, inventory: Inventory) -> None:
        """Fill the scalings: c·s with the switch's coefficients c, and 0 where an expert is not used."""
        import torch

        scales = inventory.scales
        if inventory.layers != self._layers:
            self._prepare(inventory.layers, scales)
        for layer in inventory.layers.values():
            active = [name for name in self.experts if name in layer.scaling]
            if layer.active_adapters != active:
                layer.set_adapter(active, inference_mode=True)
        values = {device: [0.0] * len(vector) for device, vector in self._vectors.items()}
        coefficients = []
        for (module, name), (device, slot) in self._slots.items():
            layer, coefficient = inventory.layers[module], switch.terms.get(module, {}).get(name, 0.0)
            values[device][slot] = coefficient * scales.of(layer, name)
            coefficients.append((layer, name, coefficient))
        for device, vector in self._vectors.items():
            vector.copy_(torch.tensor(values[device]))
        scales.note_filled(coefficients)
        apply_in_full(switch, inventory)

    def release(self, scales: Scales) -> None:
        """Put the scalings back into what held them before."""
        held = []
        for (layer, name), scaling in self._former.items():
            if name in layer.scaling:
                held.append((layer, name, scaling))
        scales.hold(held)
        self._layers, self._former = {}, {}

    def _prepare(self, layers: Mapping[str, Any], scales: Scales) -> None:
        import torch

        for module, layer in layers.items():
            if parameter_of(layer):
                raise UnsupportedError(
                    f"{module} is a parameter with a matrix for each expert of a mixture, which PEFT computes anew in "
                    "every forward pass, so a compiled graph cannot hold it",
                    "Switch without `pinned`",
                )

        self._layers, self._slots = dict(layers), {}
        counts: dict[torch.device, int] = {}
        for module, layer in layers.items():
            for name in self.experts:
                if name in layer.lora_variant:
                    raise UnsupportedError(
                        f"The expert {name!r} is DoRA ({module}), which changes the base even with scaling 0",
                        "Pin only the other experts, or switch without `pinned`",
                        parameter="experts",
                    )
                if (tensors := factors(layer, name)) is not None:
                    device = tensors.b.device
                    slot = counts.get(device, 0)
                    self._slots[module, name] = (device, slot)
                    self._former.setdefault((layer, name), layer.scaling[name])
                    counts[device] = slot + 1

        # Each scaling is a view of one number in the vector of its device.
        self._vectors = {device: torch.zeros(count, device=device) for device, count in counts.items()}
        views = []
        for (module, name), (device, slot) in self._slots.items():
            views.append((layers[module], name, self._vectors[device][slot]))
        scales.hold(views)
