"""The difference of two adapters: distance and cosine of ΔW per module, distance of weights trained in full.

ΔW is compared in low rank and never formed; whole weights are read in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.joint import Joint, cosine
from adapterswap.core.companions.companions import Companions
from adapterswap.core.companions.config import ConfigDifferences
from adapterswap.core.experts.adapter import Adapter, open_expert
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import STACKS, Kind, ModuleName
from adapterswap.core.model.sources import Reference, same_base
from adapterswap.core.planning.alignment import aligned
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.outputs import map_in_threads
from adapterswap.kit.errors import AdapterswapError, ExpertError, UnsupportedError, check_type
from adapterswap.kit.files.numbers import row_ranges
from adapterswap.kit.files.tensorfile import Tensor, open_files

_PLACES = ("no", *STACKS)  # the order of the first words of layers' names


_BLOCK = 2**20  # elements or bytes read at a time

_Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Two ΔW of one module, X of the first adapter and Y of the second (zero if one lacks the module).

    Attributes:
        name, layer, kind: the module.
        norms: ‖X‖ and ‖Y‖ (Frobenius).
        product: ⟨X, Y⟩.
        apart: ‖X - Y‖.
        distance: ‖X - Y‖ / ‖X‖; infinite for X = 0 ≠ Y.
        cosine: ⟨X, Y⟩ / (‖X‖·‖Y‖); None if one is zero.
    """

    name: str
    layer: int | None
    kind: Kind
    norms: tuple[float, float]
    product: float
    apart: float

    @property
    def distance(self) -> float:
        return _relative(self.apart, *self.norms)

    @property
    def cosine(self) -> float | None:
        return cosine(self.product, self.norms)

    def as_json(self) -> dict[str, Any]:
        """As plain data; an infinite distance, which JSON cannot hold, is null."""
        return {"norms": list(self.norms), "distance": _finite(self.distance), "cosine": self.cosine}


@dataclass(frozen=True)
class SavedDifference:
    """A module that one or both adapters hold in full (`modules_to_save`): W₁ of the first, W₂ of the second.

    Whole weights do not determine ΔW without the base, so a module that only one adapter holds in full has no distance.

    Attributes:
        name, layer, kind: the module.
        shape: of its parameters, in words.
        norms: ‖W₁‖ and ‖W₂‖ (Frobenius, over all its parameters); None for an adapter that does not hold it in full.
        apart: ‖W₁ - W₂‖; None if one does not hold it in full.
        lora: whether the adapter that does not hold it in full has LoRA on it.
    """

    name: str
    layer: int | None
    kind: Kind
    shape: str
    norms: tuple[float | None, float | None]
    apart: float | None
    lora: bool = False

    @property
    def distance(self) -> float | None:
        """‖W₁ - W₂‖ / ‖W₁‖; infinite for W₁ = 0 ≠ W₂; None if it is unknown."""
        if self.apart is None or self.norms[0] is None:
            return None
        return _relative(self.apart, self.norms[0], self.apart)

    @property
    def remark(self) -> str:
        """Why there is no distance; empty if there is one."""
        if self.apart is not None:
            return ""
        holder, lacking = "first", "second"
        if self.norms[0] is None:
            holder, lacking = lacking, holder
        lora_note = ""
        if self.lora:
            lora_note = f"; the {lacking} has LoRA on it"
        return f"trained in full in the {holder} only{lora_note}: the change is unknown without the base"

    def as_json(self) -> dict[str, Any]:
        """As plain data; an infinite distance, which JSON cannot hold, is null."""
        content = {
            "shape": self.shape,
            "norms": list(self.norms),
            "apart": self.apart,
            "distance": _finite(self.distance),
        }
        if self.remark:
            content["remark"] = self.remark
        return content


@dataclass(frozen=True)
class Comparison:
    """Two adapters compared.

    Attributes:
        modules: every LoRA module that either has, in the order of layers.
        saved: every module that either holds in full, in the same order.
        remarks: which adapter is a slice whose other layers were counted as unchanged; other bases, or other files
            beside the weights, which ΔW does not show.
    """

    modules: tuple[Difference, ...]
    saved: tuple[SavedDifference, ...] = ()
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        overall = self.total
        parts = f"{len(self.modules)} modules"
        if self.saved:
            parts += f", {len(self.saved)} trained in full"
        return f"<Comparison distance={overall.distance:.4g}, cosine={overall.cosine}, {parts}>"

    @property
    def total(self) -> Difference:
        """All LoRA modules as one, called `all`."""
        return total(self.modules)

    @property
    def layers(self) -> tuple[Difference, ...]:
        """The LoRA modules of each layer as one, named by the layer's number, or `no layer`.

        If both an encoder and a decoder are adapted, by the stack and the number: `decoder 3`.
        """
        stacks = set()
        for module in self.modules:
            if module.layer is not None:
                stacks.add(ModuleName(module.name).stack)

        layers: dict[str, list[Difference]] = {}
        for module in self.modules:
            name = f"{module.layer}"
            if module.layer is None:
                name = "no layer"
            elif len(stacks) > 1:
                name = f"{ModuleName(module.name).stack} {name}"
            layers.setdefault(name, []).append(module)

        names = list(layers)
        if len(stacks) != 1:
            names.sort(key=lambda name: _PLACES.index(name.split()[0]))
        return tuple(total(layers[name], name) for name in names)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data: what `adapterswap diff --json` prints."""
        return {
            "total": self.total.as_json(),
            "layers": {row.name: row.as_json() for row in self.layers},
            "modules": {module.name: module.as_json() for module in self.modules},
            "saved": {module.name: module.as_json() for module in self.saved},
            "remarks": list(self.remarks),
        }


def diff(one: Adapter | str | Path, other: Adapter | str | Path) -> Comparison:
    """Compare two adapters: the distance and the cosine of their ΔW, exact up to about 1e-10.

    Args:
        one, other: opened adapters, folders or Hub ids. A module that one of them lacks counts as ΔW = 0. Modules
            with different names are matched by the base that the adapters name.

    Returns:
        Each module, each layer, and all of them together.

    Raises:
        ArgumentError: `one` or `other` has the wrong type.
        NotFoundError: an adapter does not exist, or could not be downloaded.
        ExpertError: an adapter is damaged; a module has another shape, or other parameters, in the other adapter; a
            tensor holds NaN or infinity.
        UnsupportedError: a full checkpoint, or an adapter of a kind that cannot be read.
    """
    both = aligned({"one": _opened(one, "one"), "other": _opened(other, "other")})
    pair = both["one"], both["other"]
    remarks: list[str] = []
    for place, adapter in zip(("first", "second"), pair, strict=True):
        if adapter.kept_layers is not None and pair[0].kept_layers != pair[1].kept_layers:
            remarks.append(
                f"the {place} adapter, {adapter.name}, is a slice with the {adapter.kept_layers}; "
                "others count as ΔW = 0"
            )
    remarks += _beside(*pair)
    return Comparison(tuple(compare(*pair)), tuple(compare_saved(*pair)), tuple(remarks))


def _beside(one: Adapter, other: Adapter) -> Iterator[str]:
    """What ΔW does not show: other bases, and other tokenizers and the like."""
    first, second = one.config.base_model, other.config.base_model
    if first is not None and second is not None and not same_base(first, second):
        yield f"the adapters name different bases, {first} and {second}"
        ours, theirs = Reference(first).cached_config, Reference(second).cached_config
        if ours is not None and theirs is not None and (found := ConfigDifferences.between(ours, theirs)):
            yield f"the configs of their bases compute differently: {found.text(first, second)}"
    for line in Companions(one.source.folder).remarks(Companions(other.source.folder)):
        yield f"the adapters' {line}"


def _opened(reference: Adapter | str | Path, parameter: str) -> Adapter:
    check_type(reference, (Adapter, str, Path), parameter, "Pass a local folder, a Hub id or an opened adapter")
    opened: Adapter | Checkpoint
    if isinstance(reference, Adapter):
        opened = reference
    else:
        try:
            opened = open_expert(reference)
        except AdapterswapError as error:
            raise error.recast(parameter=parameter) from None

    if isinstance(opened, Adapter):
        Target.DIFF.check_expert(opened, opened.name)
        return opened
    raise UnsupportedError(
        f"{reference} is a full checkpoint, but `diff` compares adapters",
        "Cut an adapter out of it with `adapterswap extract`, or measure its change with `adapterswap analyze`",
        parameter=parameter,
    )


def _finite(value: float | None) -> float | None:
    if value is None or math.isinf(value):
        return None
    return value


def _relative(apart: float, norm: float, other: float) -> float:
    """‖X - Y‖ / ‖X‖; infinite for X = 0 if `other`, ‖Y‖ or the distance, is not zero, and else 0."""
    if norm:
        return apart / norm
    if other:
        return math.inf
    return 0.0


def compare(one: Adapter, other: Adapter) -> list[Difference]:
    """The difference of every LoRA module that either adapter has, in the order of layers."""
    names = dict.fromkeys([*one.modules, *other.modules])
    with open_files([one.file, other.file]) as files:

        def difference(name: str) -> Difference:
            holders = [adapter for adapter in (one, other) if name in adapter.modules]
            _check_shapes(name, [adapter.modules[name].shape for adapter in holders])
            factors = []
            for adapter in holders:
                file = files[adapter.file.path]
                factors.append(Factors.read_matrices(adapter.name, file, adapter.modules[name]))

            # A mixture of experts has several matrices in a module.
            module = holders[0].modules[name]
            matrices = []
            for both in zip(*factors, strict=True):
                joint = Joint(both)
                if len(holders) == 2:
                    norms = joint.norm([1, 0]), joint.norm([0, 1])
                    inner, apart = joint.inner(0, 1), joint.norm([1, -1])
                else:
                    inner, apart = 0.0, joint.norm([1])
                    norms = (apart, 0.0)
                    if name not in one.modules:
                        norms = (0.0, apart)
                matrices.append(Difference(name, module.layer, module.kind, norms, inner, apart))
            if len(matrices) == 1:
                return matrices[0]
            return total(matrices, name)

        differences = list(map_in_threads(difference, names))
    return sorted(differences, key=_place)


def compare_saved(one: Adapter, other: Adapter) -> list[SavedDifference]:
    """The difference of every module that either adapter holds in full, in the order of layers."""
    differences = []
    with open_files([one.file, other.file]) as files:
        for name in dict.fromkeys([*one.saved, *other.saved]):
            holders = [adapter for adapter in (one, other) if name in adapter.saved]
            modules = [adapter.saved[name] for adapter in holders]
            if len({module.rows for module in modules}) > 1:
                raise UnsupportedError(
                    f"The adapters hold different rows of {name} (trainable_token_indices), which cannot be compared",
                    "Merge both into full weights with `merge`, and compare these",
                    parameter="other",
                )
            _check_shapes(name, [module.shape for module in modules])

            # ‖W₁‖², ‖W₂‖² and ‖W₁ - W₂‖², block by block
            squares = [0.0] * len(holders)
            apart = 0.0
            for parameter, tensor in modules[0].tensors.items():
                for start, stop in row_ranges(math.prod(tensor.shape), _BLOCK):
                    blocks: list[_Vector] = []
                    for index, adapter in enumerate(holders):
                        stored = adapter.saved[name].tensors[parameter]
                        block = stored.read_elements(adapter.name, files[adapter.file.path], start, stop)
                        blocks.append(block.astype(np.float64))
                        squares[index] += _squared(blocks[index])
                    apart += _squared(blocks[0] - blocks[-1])

            # Whole weights that only one of the two has are not compared, not even with LoRA of the other.
            roots = [math.sqrt(square) for square in squares]
            norms: tuple[float | None, float | None]
            distance: float | None = None
            lora = False
            if len(holders) == 2:
                norms, distance = (roots[0], roots[1]), math.sqrt(apart)
            else:
                norms = (roots[0], None)
                if name not in one.saved:
                    norms = (None, roots[0])
                lora = name in one.modules or name in other.modules
            module = modules[0]
            differences.append(SavedDifference(name, module.layer, module.kind, module.shape, norms, distance, lora))
    return sorted(differences, key=_place)


def equal_bytes(one: Tensor, one_file: int, other: Tensor, other_file: int) -> bool:
    """Whether two tensors of any dtype are the same; their files are open."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for start, stop in row_ranges(one.nbytes, _BLOCK):
        if not np.array_equal(one.read_bytes(one_file, start, stop), other.read_bytes(other_file, start, stop)):
            return False
    return True


def _place(row: Difference | SavedDifference) -> tuple[int, str]:
    """The place of a module among others: those without a layer come first."""
    layer = -1
    if row.layer is not None:
        layer = row.layer
    return layer, row.name


def _check_shapes(module: str, shapes: Sequence[str]) -> None:
    if len(set(shapes)) > 1:
        raise ExpertError(
            f"{module} is {shapes[0]} in the first adapter and {shapes[1]} in the second",
            "Compare adapters of the same base",
            parameter="other",
        )


def _squared(values: _Vector) -> float:
    return float(values @ values)


def norm_together(norms: Iterable[float]) -> float:
    """The norm of several matrices side by side, √Σ‖X‖², from the norm of each."""
    return math.sqrt(math.fsum(norm**2 for norm in norms))


def total(differences: Sequence[Difference], name: str = "all") -> Difference:
    """Several modules as one, with their ΔW side by side; without modules, ΔW is zero."""
    if not differences:
        return Difference(name, None, "other", (0.0, 0.0), 0.0, 0.0)
    one = norm_together(row.norms[0] for row in differences)
    other = norm_together(row.norms[1] for row in differences)
    product = math.fsum(row.product for row in differences)
    apart = norm_together(row.apart for row in differences)
    first = differences[0]
    return Difference(name, first.layer, first.kind, (one, other), product, apart)
