"""Turn what a user asks for into settings of a model's layers: parse names and plan with the loaded experts.

Knows compositions and inventories; sets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adapterswap.errors import BaseModelError, CompositionError, Problems, check_type
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.layers import format_depth
from adapterswap.live.inventory import Inventory, LoadedFrom, is_unloaded
from adapterswap.live.saving import plan_on_disk
from adapterswap.live.switching import Switch, make_switch
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.checks import check_names
from adapterswap.planning.compositions import Composition
from adapterswap.planning.depth import least_depth
from adapterswap.planning.making import make_plan
from adapterswap.planning.plan import Plan
from adapterswap.planning.short_names import parse_composition

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["Catalogue", "Composable"]

Composable = str | Composition | Plan | None

_REMEMBERED = 256  # compositions whose settings are kept: clients of a server may ask for any number


class Catalogue:
    """What is loaded in a model, and the settings of the compositions used so far.

    Attributes:
        inventory: what is loaded, as of the last `refresh`.

    Raises:
        ArgumentError: see `Inventory`.
    """

    def __init__(self, model: PeftModel) -> None:
        self.inventory = Inventory(model, {})
        self._model = model
        self._origins: dict[str, LoadedFrom] = {}
        self._switches: dict[str, Switch] = {}

    def add(self, name: str, adapter: Adapter) -> None:
        """Note that the adapter `name` in the model was loaded from `adapter`."""
        self._origins[name] = LoadedFrom(adapter, self._model.peft_config[name])
        self._look()

    def refresh(self) -> None:
        """Update the inventory if adapters were loaded, deleted or unloaded since; raises the errors of `Inventory`."""
        if is_unloaded(self._model) or self.inventory.is_stale:
            self._look()

    def switch(self, composition: Composable) -> Switch:
        """The settings for a composition, remembered for names and `Composition`s.

        Raises:
            ArgumentError: it is not of a type that can stand for a composition.
            FieldError: it is a name that cannot be parsed.
            CompositionError: it is not a composition of the loaded experts.
            UnsupportedError: it cannot be computed live.
            BaseModelError: the model's number of layers is not known.
        """
        check_type(
            composition, (str, Composition, Plan, type(None)), "composition",
            "Pass a name such as 'math+swahili', a Composition, a plan, or None for the base",
        )  # fmt: skip
        self.refresh()
        if isinstance(composition, Plan):
            composition.check_adapter()
            return make_switch(composition, self.inventory)
        key = composition.model_dump_json() if isinstance(composition, Composition) else composition or BASE
        if key not in self._switches:
            while len(self._switches) >= _REMEMBERED:
                self._switches.pop(next(iter(self._switches)))
            self._switches[key] = self._make(self._parse(composition))
        return self._switches[key]

    def _look(self) -> None:
        self.inventory = Inventory(self._model, self._origins)
        self._switches.clear()

    def _parse(self, composition: str | Composition | None) -> Composition | None:
        if isinstance(composition, Composition):
            return composition
        if composition is None or composition == BASE:
            return None
        if composition in self.inventory.names:
            origin = self.inventory.origin(composition)
            if origin is not None and origin.kept_layers is not None:
                raise CompositionError(
                    f"only the {origin.kept_layers} of the expert {composition!r} are loaded",
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

    def _make(self, composition: Composition | None) -> Switch:
        if composition is None:
            return Switch()
        num_layers = self.inventory.num_layers
        self._check_names(composition.expert_names, composition.allocation)
        experts = self.inventory.experts(composition.expert_names)
        slices = any(expert.kept_layers is not None for expert in experts.values())
        if num_layers is None and (slices or composition.names_layers):
            raise BaseModelError(
                f"the config of {type(self._model.get_base_model()).__name__} does not say how many layers it has",
                "Pass a plan that was made with `num_layers`",
                parameter="model",
            )
        if num_layers and composition.num_layers not in (None, num_layers):
            raise CompositionError(
                f"the composition is for {format_depth(composition.num_layers or 0)} layers, and the model has "
                f"{format_depth(num_layers)}",
                "Leave `num_layers` out",
                parameter="num_layers",
            )
        depth = num_layers or composition.num_layers or least_depth(experts)
        plan = make_plan(composition, experts, num_layers=depth, base_at_hand=True)
        rules = [slot.rule for slot in plan if slot.rule is not None]
        if any(rule.weights or rule.spans for rule in rules):
            with plan_on_disk(plan, self.inventory) as resident:  # the coefficients depend on the tensors
                return make_switch(resident, self.inventory)
        return make_switch(plan, self.inventory)
