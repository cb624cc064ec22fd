"""Every adapter's own scale at every LoRA layer, whatever the active composition sets there.

PEFT computes with `layer.scaling`, so that is what counts: `hotswap_adapter`, `set_scale`, `scale_layer` and
`rescale_adapter_scale` change it and leave `r` and `lora_alpha` as they were. While a composition is active,
`layer.scaling` holds c·s, the composition's coefficient times the adapter's own scale. A value that is not the one that
was set comes from somebody else. Where c is 1 it is the adapter's new scale; elsewhere nobody can know whether it
contains c, so it is reported as a disturbance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from adapterswap.kit.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

SAME = 1e-6  # relative: after `prepare_model_for_compiled_hotswap`, scales are float32 tensors

_of_models: WeakKeyDictionary[Any, Scales] = WeakKeyDictionary()


class Scales:
    """The scales of the adapters in one model; see the module.

    Attributes:
        scaled: the composition's coefficients c that are not 1, by layer and adapter.
        changes: how often a change by others was found.
    """

    @staticmethod
    def in_model(model: Any) -> Scales:
        """The scales of a PeftModel, which all composers of this model share."""
        return _of_models.setdefault(model, Scales())

    def __init__(self) -> None:
        self.scaled: dict[tuple[Any, str], float] = {}
        self.changes = 0
        self._configs: dict[str, object] = {}
        self._own: dict[Any, dict[str, float]] = {}  # by layer and adapter
        self._set: dict[Any, dict[str, float]] = {}  # the values in `layer.scaling`, as last read or set
        self._objects: dict[Any, dict[str, Any]] = {}  # the numbers or tensors that hold these values
        self._tensors: list[torch.Tensor] = []  # those of `_objects`, or the vectors that they are views of
        self._numbers: list[float] = []  # what these held
        self._disturbance: str | None = None

    def of(self, layer: Any, name: str) -> float:
        """An adapter's own scale s at a layer."""
        return self._own[layer][name]

    def read(self, layers: Mapping[str, Any], configs: Mapping[str, object]) -> None:
        """Take over what others have changed since the last call.

        Args:
            layers: the model's LoRA layers, by name.
            configs: PEFT's config of each adapter. One that was loaded again under its name has a new config, and its
                former scales mean nothing.
        """
        renewed = [name for name, config in self._configs.items() if configs.get(name) is not config]
        self._configs = dict(configs)
        for layer in self._own if renewed else ():
            for name in renewed:
                self._forget(layer, name)

        is_same = all(layer.scaling == self._objects.get(layer) for layer in layers.values())
        if is_same and self._numbers == _numbers_in(self._tensors):
            return

        self.changes += 1
        for module, layer in layers.items():
            own = self._own.setdefault(layer, {})
            expected = self._set.setdefault(layer, {})
            for name in own.keys() - layer.scaling.keys():
                self._forget(layer, name)
            for name, scaling in layer.scaling.items():
                value = float(scaling)
                if name in expected and math.isclose(value, expected[name], rel_tol=SAME):
                    continue
                coefficient = self.scaled.pop((layer, name), 1)
                if coefficient != 1:
                    self._disturbance = (
                        f"The scale of {name!r} at {module} was changed from {expected[name]:g} to {value:g} while a "
                        f"composition used {coefficient:g} of this adapter"
                    )
                own[name] = expected[name] = value
            self._objects[layer] = dict(layer.scaling)
        self._note_tensors()

    def check(self) -> None:
        """Raise `UnsupportedError`, once, if a change was found that is not known to be the adapter's own scale."""
        disturbance, self._disturbance = self._disturbance, None
        if disturbance is not None:
            raise UnsupportedError(
                f"{disturbance}, so what the model has computed since is not that composition",
                "Leave the composition before you call hotswap_adapter, set_scale, scale_layer or the like",
            )

    def apply(self, coefficients: Iterable[tuple[Any, Mapping[str, float]]]) -> None:
        """Set c·s at layers, and s everywhere else. Tensors are filled, so a compiled graph sees the new numbers.

        Args:
            coefficients: layers, each with c by adapter.
        """
        former, self.scaled = self.scaled, {}
        for layer, terms in coefficients:
            for name, coefficient in terms.items():
                self._put(layer, name, coefficient * self._own[layer][name])
                if coefficient != 1:
                    self.scaled[layer, name] = coefficient
        for layer, name in former.keys() - self.scaled.keys():
            self._put(layer, name, self._own[layer][name])
        self._numbers = _numbers_in(self._tensors)

    def restore(self, scaled: Mapping[tuple[Any, str], float]) -> None:
        """Set c·s for these c, by layer and adapter, and s everywhere else. Adapters that were deleted are skipped."""
        there = []
        for (layer, name), coefficient in scaled.items():
            if name in self._own.get(layer, ()):
                there.append((layer, {name: coefficient}))
        self.apply(there)

    def hold(self, scalings: Iterable[tuple[Any, str, Any]]) -> None:
        """Keep scalings in other objects from now on, at the same values.

        Args:
            scalings: a layer, an adapter, and a number or a tensor without axes for its scaling there.
        """
        for layer, name, scaling in scalings:
            layer.scaling[name] = self._objects[layer][name] = scaling
            self._put(layer, name, self._set[layer][name])
        self._note_tensors()

    def note_filled(self, coefficients: Iterable[tuple[Any, str, float]]) -> None:
        """Note that tensors were filled with c·s for these layers and adapters."""
        for layer, name, coefficient in coefficients:
            self._set[layer][name] = coefficient * self._own[layer][name]
            self.scaled[layer, name] = coefficient
        self._numbers = _numbers_in(self._tensors)

    def _put(self, layer: Any, name: str, value: float) -> None:
        """Set the scale of an expert in a layer."""
        scaling = layer.scaling[name]
        if isinstance(scaling, float | int):
            layer.scaling[name] = self._objects[layer][name] = value
        else:
            scaling.fill_(value)
        self._set[layer][name] = value

    def _forget(self, layer: Any, name: str) -> None:
        for values in (self._own, self._set, self._objects):
            values[layer].pop(name, None)
        self.scaled.pop((layer, name), None)

    def _note_tensors(self) -> None:
        """Note the tensors that hold scales, and their numbers, to see whether someone else changes them."""
        tensors: dict[int, torch.Tensor] = {}
        for scalings in self._objects.values():
            for scaling in scalings.values():
                if not isinstance(scaling, float | int):
                    whole = scaling if scaling._base is None else scaling._base
                    tensors[id(whole)] = whole
        self._tensors = list(tensors.values())
        self._numbers = _numbers_in(self._tensors)


def _numbers_in(tensors: Collection[torch.Tensor]) -> list[float]:
    """The numbers in tensors, read from each device at once."""
    by_device: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach().reshape(-1))
    numbers: list[float] = []
    for parts in by_device.values():
        import torch

        numbers += torch.cat(parts).tolist()
    return numbers
