"""Compose on a loaded PeftModel: each LoRA layer gets its own list of active adapters and scalings, no tensor changes.

An executor of plans beside `writing`. Knows PEFT's LoRA layers; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from adapterswap.errors import AdapterswapError, Problems
from adapterswap.plan import Plan
from adapterswap.resolving import resolve

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["LiveComposer", "load_experts", "why_not_live"]


def load_experts(model: PreTrainedModel, plan: Plan) -> PeftModel:
    """`model` as a PeftModel with the plan's experts loaded under their names, frozen.

    Raises:
        AdapterswapError: an expert does not fit the model.
    """
    from peft import PeftModel

    peft_model: Any = None
    for name, adapter in plan.experts.items():
        try:
            if peft_model is None:
                peft_model = PeftModel.from_pretrained(model, str(adapter.source.folder), adapter_name=name)
            else:
                peft_model.load_adapter(str(adapter.source.folder), adapter_name=name)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise AdapterswapError(f"the expert {name!r} does not fit the base model: {reason}", "Check both") from None
    return peft_model


def why_not_live(plan: Plan) -> str | None:
    """Why a plan cannot be computed by switching adapters on and off; None if it can."""
    nonlinear = next((module for module in plan if module.terms and not module.is_linear), None)
    if nonlinear is not None:
        return f"{nonlinear.rule.method} is not linear in the experts' ΔW, and needs tensors of its own"
    if plan.composition.row_threshold is not None:
        return "a row threshold needs tensors of its own"
    if plan.saved:
        return f"{next(iter(plan.saved))} is trained in full (modules_to_save), which PEFT cannot blend"
    return None


class LiveComposer:
    """Switches a PeftModel between compositions of the adapters loaded in it.

    A module's active adapters become the plan's terms, each with its scale multiplied by the term's coefficient, so
    that the forward pass computes W·x + Σ c_i s_i B_i A_i x. Adapters stay frozen.

    PEFT's own `peft_model.active_adapter` does not follow (it is one name, and a composition has many), and
    `peft_model.set_adapter` undoes a composition: leave the composition first.

    Args:
        peft_model: with the experts loaded under the names that the plans use.

    Raises:
        AdapterswapError: the model has no LoRA layers.
    """

    def __init__(self, peft_model: PeftModel) -> None:
        from peft.tuners.lora import LoraLayer

        found = peft_model.get_base_model().named_modules()
        self._layers: dict[str, Any] = {name: module for name, module in found if isinstance(module, LoraLayer)}
        if not self._layers:
            raise AdapterswapError("the model has no LoRA layers", "Load the experts first (PeftModel.from_pretrained)")

    @contextmanager
    def use(self, plan: Plan) -> Iterator[None]:
        """Compute with the plan inside the block; afterwards, also after an exception, everything is as it was.

        Raises:
            AdapterswapError: the plan's experts are not loaded, lack its modules, or adapters are merged.
        """
        plan = resolve(plan).plan
        self._check(plan)
        before = {name: _state(layer) for name, layer in self._layers.items()}
        try:
            for name, layer in self._layers.items():
                module = plan.modules.get(name)
                _activate(layer, {term.expert: term.coefficient for term in module.terms} if module else {})
            yield
        finally:
            for name, layer in self._layers.items():
                _restore(layer, before[name])

    def _check(self, plan: Plan) -> None:
        problems = Problems()
        if any(layer.merged for layer in self._layers.values()):
            problems.add("adapters are merged into the model's weights", "Call unmerge_adapter() first")
        if (reason := why_not_live(plan)) is not None:
            problems.add(reason, "Write it with write_adapter (adapterswap compose), and load that")
        for module in plan:
            loaded = getattr(self._layers.get(module.name), "scaling", {})
            for name in sorted({term.expert for term in module.terms} - set(loaded)):
                problems.add(
                    f"the adapter {name!r} is not loaded at {module.name}",
                    f"Load it under that name: peft_model.load_adapter(folder, adapter_name={name!r})",
                )
            if problems:  # the first module tells enough
                break
        problems.raise_if_any()


def _state(layer: Any) -> tuple[Any, dict[str, float], list[tuple[Any, bool]]]:
    parameters = [(p, p.requires_grad) for name in layer.adapter_layer_names for p in getattr(layer, name).parameters()]
    return layer.active_adapter, dict(layer.scaling), parameters


def _activate(layer: Any, coefficients: Mapping[str, float]) -> None:
    layer.set_adapter(list(coefficients), inference_mode=True)
    for name, coefficient in coefficients.items():
        layer.set_scale(name, coefficient)  # absolute, and aware of rsLoRA; `scale_layer` would multiply


def _restore(layer: Any, state: tuple[Any, dict[str, float], list[tuple[Any, bool]]]) -> None:
    active, scaling, parameters = state
    layer.set_adapter(active, inference_mode=True)
    layer.scaling.update({name: value for name, value in scaling.items() if name in layer.scaling})
    for parameter, requires_grad in parameters:
        parameter.requires_grad_(requires_grad)
