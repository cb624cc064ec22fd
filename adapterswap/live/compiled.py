"""Switch without recompiling: all pinned experts are active in every layer, and their coefficients are tensors.

torch.compile bakes PEFT's lists of active adapters and its scalings, which are Python numbers, into the graph, and
recompiles when they change. Here both stay the same for the compiler: a scaling is a view of one vector per device, and
switching fills that vector. Every pinned expert is computed in every layer where it is loaded, so pin few. Knows LoRA
layers and switches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterswap.errors import CompositionError, UnsupportedError
from adapterswap.live.inventory import Inventory, factors, parameter_of, scale_of
from adapterswap.live.switching import Switch, apply_in_full

if TYPE_CHECKING:
    import torch

__all__ = ["Pin"]


class Pin:
    """Experts that stay active, with their scalings in tensors.

    Args:
        experts: their names.
    """

    def __init__(self, experts: Sequence[str]) -> None:
        self.experts = tuple(experts)
        self._slots: dict[tuple[str, str], tuple[torch.device, int, float]] = {}
        self._vectors: dict[torch.device, torch.Tensor] = {}
        self._layers: dict[str, Any] = {}

    def check(self, switch: Switch) -> None:
        """Raise `CompositionError` if a switch needs an expert that is not pinned."""
        for terms in (*switch.terms.values(), *switch.in_full.values()):
            for name in terms:
                if name not in self.experts:
                    raise CompositionError(
                        f"the expert {name!r} is not pinned (pinned: {', '.join(self.experts)})",
                        "Add it to composer.pinned(…), which compiles the model again",
                        parameter="composition",
                    )

    def apply(self, switch: Switch, inventory: Inventory) -> None:
        """Fill the scalings: c·s with the switch's coefficients c, and 0 where an expert is not used.

        Raises:
            UnsupportedError: a pinned expert is DoRA, which changes the base even with scaling 0; an adapted parameter
                holds the experts of a mixture; see also `use_in_full`.
        """
        import torch

        if inventory.layers != self._layers:
            self._prepare(inventory.layers)
        for layer in inventory.layers.values():
            active = [name for name in self.experts if name in layer.scaling]
            if layer.active_adapters != active:
                layer.set_adapter(active, inference_mode=True)
        values = {device: [0.0] * len(vector) for device, vector in self._vectors.items()}
        for (module, name), (device, slot, scale) in self._slots.items():
            values[device][slot] = scale * switch.terms.get(module, {}).get(name, 0.0)
        for device, vector in self._vectors.items():
            vector.copy_(torch.tensor(values[device]))
        apply_in_full(switch, inventory)

    def _prepare(self, layers: Mapping[str, Any]) -> None:
        import torch

        if (fused := next((name for name, layer in layers.items() if parameter_of(layer)), None)) is not None:
            raise UnsupportedError(
                f"{fused} is a parameter with a matrix for each expert of a mixture, which PEFT computes anew in "
                "every forward pass, so a compiled graph cannot hold it",
                "Switch without `pinned`",
            )
        self._layers, self._slots = dict(layers), {}
        counts: dict[torch.device, int] = {}
        for module, layer in layers.items():
            for name in self.experts:
                if name in layer.lora_variant:
                    raise UnsupportedError(
                        f"the expert {name!r} is DoRA ({module}), which changes the base even with scaling 0",
                        "Pin only the other experts, or switch without `pinned`",
                        parameter="experts",
                    )
                if (tensors := factors(layer, name)) is not None:
                    device = tensors.b.device
                    slot = counts.get(device, 0)
                    self._slots[module, name] = (device, slot, scale_of(layer, name))
                    counts[device] = slot + 1
        self._vectors = {device: torch.zeros(count, device=device) for device, count in counts.items()}
        for (module, name), (device, slot, _) in self._slots.items():
            layers[module].scaling[name] = self._vectors[device][slot]
