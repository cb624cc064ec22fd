"""The modules that a checkpoint stores, found under the names that experts have for them, from headers alone.

An expert names modules as they are in memory. Files may leave out the outermost prefix, and text-only and multimodal
classes call one decoder by different prefixes. Other differences only transformers can tell: see `model.base`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial

from adapterswap.core.model.base import Base
from adapterswap.core.model.layers import ModuleName, layer_container
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import Tensor

_PLAIN = frozenset({"weight", "bias"})  # the tensors of a layer that is not quantized


class StoredModules:
    """The stored tensors by module."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Args: tensors: all stored tensors, by name."""
        self._tensors = tensors
        self._keys = sorted(tensors)

    def __contains__(self, name: str) -> bool:
        """Whether there is a module, or a parameter, of this stored name."""
        return name in self._tensors or self._next(f"{name}.").startswith(f"{name}.")

    def of(self, name: str) -> dict[str, Tensor]:
        """The tensors of a module and of the modules in it, by the rest of their names; for a parameter, itself and
        what a quantized one has in its place (`gate_up_proj_blocks`), by the end of their names."""
        inside = self._from(f"{name}.")
        if inside and name not in self._tensors:
            return {key.removeprefix(f"{name}."): self._tensors[key] for key in inside}

        tensors = {}
        for key in self._from(name):
            belongs = key == name or key.startswith(f"{name}_")
            if belongs and not key.endswith("_bias"):
                tensors[key.removeprefix(name)] = self._tensors[key]
        return tensors

    def is_plain(self, name: str) -> bool:
        """Whether a parameter, a module or each module in it is stored as floating-point weights and nothing else."""
        tensors = self.of(name)
        if name not in self._tensors and not all(end.rpartition(".")[2] in _PLAIN for end in tensors):
            return False
        return all(tensor.dtype in Dtype.FLOATS for tensor in tensors.values())

    def naming(self, names: Iterable[str], container: str | None) -> Callable[[str], str]:
        """How an expert's names become stored names: the first way that explains all of them, else most of them.

        Args:
            names: the expert's modules.
            container: its list of layers.
        """
        # The same name, one without its first part, one with a first part, and one in another list of layers
        ways: list[Callable[[str], str]] = [lambda name: name, lambda name: name.partition(".")[2]]
        ways += [partial("{}.{}".format, prefix) for prefix in self._prefixes]
        if container is not None and self._container is not None:
            ways.append(lambda name: Base.exchange(name, container, self._container) or name)

        layered = [name for name in names if ModuleName(name).layer(container) is not None] or list(names)
        best, most = ways[0], -1
        for way in ways:
            count = sum(way(name) in self for name in layered)
            if count > most:
                best, most = way, count
            if count == len(layered):
                break

        def stored_name(name: str) -> str:
            stored = best(name)
            return stored if stored in self else name

        return stored_name

    @cached_property
    def _container(self) -> str | None:
        return layer_container(self._tensors)

    @cached_property
    def _prefixes(self) -> list[str]:
        """The first parts of the names of tensors in layers."""
        prefixes = set()
        for name in self._tensors:
            if ModuleName(name).layer(self._container) is not None:
                prefixes.add(name.partition(".")[0])
        return sorted(prefixes)

    def _next(self, start: str) -> str:
        """The first name that is `start` or follows it."""
        place = bisect_left(self._keys, start)
        if place == len(self._keys):
            return ""
        return self._keys[place]

    def _from(self, start: str) -> list[str]:
        """The names that begin with `start`."""
        place = bisect_left(self._keys, start)
        stop = place
        while stop < len(self._keys) and self._keys[stop].startswith(start):
            stop += 1
        return self._keys[place:stop]
