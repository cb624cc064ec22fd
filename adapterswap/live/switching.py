"""Which experts every LoRA layer uses with which coefficient, set through PEFT's own calls; and the way back.

No tensor is copied or changed: each layer's list of active adapters and its scalings are all that is touched. Knows
layers and plans that are made; knows nothing of names of compositions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterswap.arithmetic.resolving import resolve
from adapterswap.errors import CompositionError, Problems, UnsupportedError
from adapterswap.experts.layers import format_depth
from adapterswap.live.inventory import Inventory, scale_of
from adapterswap.planning.names import fits_peft
from adapterswap.planning.plan import Plan

__all__ = ["InitialState", "Switch", "apply_switch", "check_loaded", "make_switch", "unmerge", "why_not_live"]

_RESIDENT = "Write it with write_adapter (adapterswap compose), and load that"


@dataclass(frozen=True)
class Switch:
    """A plan as settings of LoRA layers.

    Attributes:
        plan: the plan, its coefficients final; None for the base.
        terms: by the name of a LoRA layer, each active expert's coefficient c: the layer then computes
            W·x + Σ c·s·B·A·x. Layers that are not named compute the base.
    """

    plan: Plan | None = None
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def why_not_live(plan: Plan) -> str | None:
    """Why a plan cannot be computed by switching adapters on and off; None if it can."""
    nonlinear = next((module for module in plan.modules.values() if module.terms and not module.is_linear), None)
    if nonlinear is not None:
        return f"{nonlinear.method} is not linear in the experts' ΔW, and needs tensors of its own"
    if plan.composition.row_threshold is not None:
        return "a row threshold needs tensors of its own"
    for slot in plan:
        for term in slot.opaque:
            return f"{slot.name} is {term.method} in {term.expert}, which the live composer cannot switch"
    if plan.saved:
        return f"{next(iter(plan.saved))} is trained in full (modules_to_save), which PEFT cannot blend"
    if (unfit := next((name for name in plan.experts if not fits_peft(name)), None)) is not None:
        return f"PEFT cannot hold an adapter under the name {unfit!r}"
    return None


def make_switch(plan: Plan, inventory: Inventory) -> Switch:
    """The settings that compute `plan` with the adapters in the model.

    Raises:
        UnsupportedError: the plan cannot be computed live.
        CompositionError: the plan is for another number of layers, or its experts are not those in the model.
        ExpertError: magnitude weights or SLERP, and an expert's file cannot be read.
    """
    if (reason := why_not_live(plan)) is not None:
        raise UnsupportedError(reason, _RESIDENT, parameter="composition")
    problems = Problems(CompositionError)
    if inventory.num_layers not in (plan.num_layers, None):
        problems.add(
            f"the plan is for {format_depth(plan.num_layers)} layers, and the model has "
            f"{format_depth(inventory.num_layers or 0)}",
            "Make the plan for this model",
            parameter="composition",
        )
    for module in plan:
        layer = inventory.layers.get(module.name)
        for term in module.terms:
            if (what := _mismatch(layer, term.expert, term.lora.rank, term.lora.scale)) is not None:
                problems.add(
                    f"the adapter {term.expert!r} {what} at {module.name}",
                    f"Load the plan's expert under that name: composer.load_expert(folder, {term.expert!r})",
                    parameter="composition",
                )
        if problems:  # the first such module is enough
            break
    problems.raise_if_any()
    plan = resolve(plan).plan
    return Switch(plan, {m.name: {term.expert: term.coefficient for term in m.terms} for m in plan if m.terms})


def _mismatch(layer: Any, expert: str, rank: int, scale: float) -> str | None:
    """How the adapter at a layer differs from the plan's expert, as far as PEFT's settings tell."""
    if layer is None or expert not in layer.r:
        return "is not loaded"
    if layer.r[expert] != rank:
        return f"has rank {layer.r[expert]} in the model, and {rank} in the plan"
    if not math.isclose(scale_of(layer, expert), scale, rel_tol=1e-9):
        return f"has the scale {scale_of(layer, expert):g} in the model, and {scale:g} in the plan"
    return None


def apply_switch(switch: Switch, inventory: Inventory) -> None:
    """Set every layer's active adapters and scalings; layers that are right already are left alone.

    Raises:
        CompositionError: an expert was deleted since the switch was made; nothing is set then.
    """
    check_loaded(switch, inventory)
    for module, layer in inventory.layers.items():
        terms = switch.terms.get(module, {})
        active = list(terms)
        if layer.active_adapters != active:
            layer.set_adapter(active, inference_mode=True)
        for name, coefficient in terms.items():
            layer.set_scale(name, coefficient)  # absolute, and aware of rsLoRA; `scale_layer` would multiply
    for wrapper in inventory.wrappers:
        if wrapper.active_adapters:
            wrapper.set_adapter([], inference_mode=True)


def check_loaded(switch: Switch, inventory: Inventory) -> None:
    """Raise `CompositionError` where a switch uses an expert that is not in the model any more."""
    for module, terms in switch.terms.items():
        layer = inventory.layers.get(module)
        for name in terms:
            if layer is None or name not in layer.r:
                raise CompositionError(
                    f"the adapter {name!r} was deleted from the model", "Load it again", parameter="composition"
                )


def unmerge(layers: Iterable[Any]) -> None:
    """Unmerge the adapters of those layers that have merged ones."""
    for layer in layers:
        if layer.merged:
            layer.unmerge()


class InitialState:
    """The adapters' state before any composition: active lists, scalings, which parameters are trainable.

    Recording it freezes the adapters, so that no composition makes anything trainable.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._active: dict[Any, Any] = {}
        self._scaling: dict[Any, dict[str, Any]] = {}
        self._trainable: dict[tuple[Any, str], bool] = {}
        self.extend(inventory)
        for (module, name), trainable in self._trainable.items():
            if trainable:
                getattr(module, name).requires_grad_(False)

    def extend(self, inventory: Inventory) -> None:
        """Record what came with adapters that were loaded since; what is known stays as it was recorded."""
        for layer in inventory.layers.values():
            self._active.setdefault(layer, layer.active_adapter)
            known = self._scaling.setdefault(layer, {})
            for name, scaling in layer.scaling.items():
                known.setdefault(name, scaling)
        for wrapper in inventory.wrappers:
            self._active.setdefault(wrapper, wrapper.active_adapter)
        for module, name in inventory.parameters:
            if (module, name) not in self._trainable:
                self._trainable[module, name] = getattr(module, name).requires_grad

    def freeze(self) -> None:
        """Freeze what PEFT made trainable since."""
        for module, name in self._trainable:
            if (parameter := getattr(module, name)).requires_grad:
                parameter.requires_grad_(False)

    def restore(self) -> None:
        """Set everything back. Adapters that were merged since are unmerged first, as PEFT does when it switches."""
        unmerge(self._scaling)
        for module, active in self._active.items():
            if module.active_adapter != active:
                module.set_adapter(active, inference_mode=True)
        for layer, scaling in self._scaling.items():
            layer.scaling.update({name: value for name, value in scaling.items() if name in layer.scaling})
        for (module, name), trainable in self._trainable.items():
            if (parameter := getattr(module, name)).requires_grad != trainable:
                parameter.requires_grad_(trainable)
