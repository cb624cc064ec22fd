"""The tensors of a plan's LoRA in GGUF: llama.cpp's names, order of rows, the one alpha, and the pieces.

`writing.layout` decides how each module is written to an adapter's folder; this module translates that for llama.cpp or
says why it cannot. Reads configs, names, and the tensors that `resolve` and `reduce` need.

A zone is a run of consecutive layers of one expert or one blend, so that a request can change the strength of each part
of the composition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import multimode
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.experts.config import scale
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.checkpoints import open_checkpoint
from adapterswap.core.model.layers import Kind, ModelConfig
from adapterswap.core.model.sources import Reference
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.adapter import Prepared
from adapterswap.core.writing.copies import check_copies, check_one_base
from adapterswap.core.writing.outputs import Form, OutputTensor
from adapterswap.engines.gguf.architectures import (
    GgufArchitecture,
    ModelSizes,
    Projection,
    RowOrder,
    find_architecture,
    load_gguf,
)
from adapterswap.kit.errors import AdapterswapError, BaseModelError, ExpertError, Problems, UnsupportedError
from adapterswap.kit.files.numbers import Bytes, Dtype


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write.

    Attributes:
        name: llama.cpp's name, ending in `.lora_a` or `.lora_b`.
        shape: numpy's shape; GGUF lists the dimensions in reverse.
        layer: the layer that it changes; None outside the layers.
        module: the module that it changes, by transformers' name.
        kind: that module's kind.
        source: the tensor of the adapter's layout that it is computed from.
        factor: a factor of its numbers, if the pieces of the source do not have it already.
        rows: the order of its rows; None for the source's order.
        transposed: whether it is the source's transpose.
        expert_rows: for a mixture's parameter, the number of experts, and the rows of each expert's B that it holds, or
            None for A.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    module: str
    kind: Kind
    source: OutputTensor
    factor: float = 1.0
    rows: RowOrder | None = None
    transposed: bool = False
    expert_rows: tuple[int, slice | None] | None = None

    def values(self, files: Mapping[Path, int]) -> npt.NDArray[np.float32]:
        """Its numbers, read from the experts' open files."""
        source, alone = self.source, self.source.alone
        if alone is not None:
            values = alone.tensor.read_numbers(alone.expert, files[alone.path])
        else:
            values = Dtype(source.dtype).unpack(source.assemble(files), source.shape)
        if self.factor != 1:
            with np.errstate(over="ignore"):  # overflow is checked when the numbers are encoded
                values = values * np.float32(self.factor)
        return self._ordered(values)

    def copied(self, files: Mapping[Path, int], dtype: str) -> Bytes | None:
        """Its bytes, if they are an expert's own except for the order of rows; else None."""
        alone = self.source.alone
        if alone is None or alone.tensor.dtype != dtype or self.factor != 1:
            return None
        raw = alone.tensor.read_bytes(files[alone.path], 0, alone.tensor.nbytes)
        if not Dtype(dtype).is_finite(raw):
            raise alone.tensor.not_finite(alone.expert)
        return self._ordered(raw.view(f"V{Dtype.BYTES[dtype]}").reshape(self.source.shape)).reshape(-1).view(np.uint8)

    def _ordered(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values in the order in which llama.cpp has the rows and columns."""
        if self.expert_rows is not None:
            count, rows = self.expert_rows
            if rows is None:  # the rows of A of one expert are contiguous
                return values.reshape(count, -1, values.shape[1])
            by_expert = values.reshape(values.shape[0], -1, count)  # the columns of B of one expert are `count` apart
            return np.ascontiguousarray(by_expert.transpose(2, 0, 1)[:, rows])
        if self.rows is not None:
            values = values[self.rows]
        return np.ascontiguousarray(values.T if self.transposed else values)


@dataclass(frozen=True)
class PreparedGguf:
    """An export that is ready to be written.

    Attributes:
        adapter: the same as an adapter in the exact layout, from which the tensors are computed.
        architecture: llama.cpp's name of the base's architecture.
        alpha: the alpha of all files; llama.cpp's scale of a module is alpha / rank.
        tensors: A and B of each module in turn; modules outside the layers come first.
    """

    adapter: Prepared
    architecture: str
    alpha: float
    tensors: tuple[GgufTensor, ...]

    @property
    def plan(self) -> Plan:
        return self.adapter.plan

    @property
    def base_name(self) -> str | None:
        """The base's public name."""
        return self.plan.base.public_name

    @property
    def output(self) -> dict[str, Any]:
        """How it is written, for the record."""
        return {key: value for key, value in self.adapter.output.items() if key != "layout"}

    @staticmethod
    def of(plan: Plan, form: Form, progress: Callable[[str], None] = lambda name: None) -> PreparedGguf:
        """Compute the plan's open coefficients, truncate modules, and lay the tensors out. Writes nothing."""
        plan.check_adapter()
        reference = Reference.to_base(plan.base.reference)
        config = reference.config()[1]
        architecture = find_architecture(config, reference.public_name or "the base")
        places = _places(plan, architecture, ModelConfig(config).language, form)
        check_one_base(plan.adapters)
        _check_copies(plan, reference)
        adapter = Prepared.of(plan, form, progress)
        alpha, tensors = _tensors(adapter, places)
        gguf = load_gguf()
        name = str(gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[architecture.name]])
        return PreparedGguf(adapter, name, alpha, tensors)


@dataclass(frozen=True)
class _Place:
    """llama.cpp's names of the weights that are stacked in a module's LoRA, and the order of its rows."""

    names: tuple[str, ...]
    rows: RowOrder | None


def _places(plan: Plan, architecture: GgufArchitecture, config: Mapping[str, Any], form: Form) -> dict[str, _Place]:
    """The place of each module; modules that cannot be exported are reported in one error."""
    gguf = load_gguf()
    problems = Problems(UnsupportedError)
    sizes = architecture.sizes(config)
    tied = architecture.always_tied or config.get("tie_word_embeddings", architecture.tied)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.name], plan.one_depth("`export`"))

    Target.GGUF.check(
        plan,
        max_rank=form.max_rank,
        max_error=form.max_error,
        tied=tied,
        exports=lambda slot: _projection(slot, architecture)[1] is not None,
    )

    places: dict[str, _Place] = {}
    orders: dict[Projection, RowOrder | None] = {}
    for slot in plan.modules.values():
        canonical, projection = _projection(slot, architecture)
        if not slot.terms or projection is None:
            continue

        # Its sizes are those that the base's config states.
        lora, misfit = slot.terms[0].lora, ""
        if not _fits(lora, projection, sizes):
            expected = f"{sizes.of(projection.out) or 'any'}×{sizes.of(projection.into) or 'any'}"
            misfit = f"{slot.name} is {lora.out_features}×{lora.in_features}, but the base's config says {expected}"
        elif projection.experts and (not lora.parameter or lora.experts != sizes.experts):
            misfit = f"{slot.name} has LoRA for {lora.experts} experts, but the base's config says {sizes.experts}"
        if misfit:
            remedy = "Pass the base that the experts adapt as `base_model`"
            problems.add(misfit, remedy, parameter="base_model", kind=ExpertError)
            continue

        # Its name in llama.cpp; a fused module has one for each part
        layers = f"{architecture.container}.{slot.layer}"
        canonical_names = [f"{layers}.{part}" for part in projection.experts] or [canonical]
        gguf_names = tuple(name for name in map(names.get_name, canonical_names) if name is not None)
        if len(gguf_names) != len(canonical_names):
            problems.add(f"gguf has no name for {canonical} in this architecture", "Install a newer gguf")
            continue
        if projection not in orders:
            orders[projection] = projection.rows and projection.rows(sizes)
        weights = tuple(f"{name}.weight" for name in gguf_names)
        places[slot.name] = _Place(weights, orders[projection])
    problems.raise_if_any()
    return places


def _projection(slot: Slot, architecture: GgufArchitecture) -> tuple[str, Projection | None]:
    """A module's name in the text model, and its projection; None if it cannot be exported."""
    if slot.layer is None:
        # A multimodal model puts a prefix before these names: `model.language_model.embed_tokens`.
        for name, outside in architecture.outside.items():
            if slot.name.rpartition(".")[2] == name.rpartition(".")[2] and _is_text(slot.name):
                return name, outside
        return slot.name, None
    container, _, within = slot.name.partition(f".{slot.layer}.")
    projection = None
    if container.rpartition(".")[2] == architecture.container.rpartition(".")[2] and _is_text(container):
        projection = architecture.layer.get(within)
    return f"{architecture.container}.{slot.layer}.{within}", projection


_PREFIXES = {"model", "language_model", "text_model", "transformer", "gpt_neox"}


def _is_text(name: str) -> bool:
    """Whether the segments before the last one only lead to a language model."""
    return set(name.split(".")[:-1]) <= _PREFIXES


def _fits(lora: LoraModule, projection: Projection, sizes: ModelSizes) -> bool:
    """Whether a module has the sizes that the base's config states."""
    pairs = ((lora.out_features, projection.out), (lora.in_features, projection.into))
    return all(sizes.of(size) in (None, actual) for actual, size in pairs)


def _check_copies(plan: Plan, reference: str) -> None:
    """Check that copies of the base's weights beside LoRA of an embedding or head, which are left out, are equal."""
    carrying = {}
    for name, adapter in plan.adapters.items():
        if any(module.base is not None for module in adapter.modules.values()):
            carrying[name] = adapter
    if not carrying:
        return

    try:
        base = open_checkpoint(reference)
    except AdapterswapError as error:
        raise BaseModelError(
            f"{next(iter(carrying))} carries a copy of the base's embedding, which a GGUF file leaves out, but the "
            f"base's weights are not available to compare it with: {error.found[0].message}",
            "Pass a base with its weights as `base_model`",
            parameter="base_model",
        ) from None

    for name, adapter in carrying.items():
        remedy = "Pass the base that it was trained on as `base_model`"
        check_copies(name, adapter, base, effect="which a GGUF file leaves out", remedy=remedy)


def _tensors(adapter: Prepared, places: Mapping[str, _Place]) -> tuple[float, tuple[GgufTensor, ...]]:
    """The common alpha, and the tensors in the order of the plan's modules."""
    plan, config = adapter.plan, adapter.layout.config
    scales: dict[str, float] = {}  # s·r of each module; llama.cpp divides it by r
    pairs: dict[str, tuple[OutputTensor, OutputTensor]] = {}
    for name in places:
        lora = plan.slots[name].terms[0].lora
        pairs[name] = adapter.factors(lora)
        rank = pairs[name][0].shape[0] // lora.experts
        alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
        scales[name] = rank * scale(rank, alpha, config["use_rslora"])
    common = float(np.float32(min(multimode(scales.values()), default=1.0)))

    tensors: list[GgufTensor] = []
    for name, place in places.items():
        slot, (a, b) = plan.slots[name], pairs[name]
        lora = slot.terms[0].lora
        module = slot.layer, name, slot.kind
        factor = scales[name] / common
        if abs(factor - 1) <= np.finfo(np.float32).eps:
            factor = 1.0

        # In float32. The factor goes into the pieces of B, or to B itself if that is computed already.
        exact_a, exact_b, b_factor = a, b, factor
        if a.data is None:
            exact_a = replace(a, dtype="F32")
        if b.data is None:
            pieces = tuple(piece._replace(factor=piece.factor * factor) for piece in b.pieces)
            exact_b, b_factor = replace(b, dtype="F32", pieces=pieces), 1.0

        # Of a mixture's fused parameter, a weight for each half that llama.cpp stores apart
        if lora.parameter:
            count, rank, half = lora.experts, a.shape[0] // lora.experts, b.shape[0] // len(place.names)
            for part, weight in enumerate(place.names):
                rows = slice(part * half, (part + 1) * half)
                tensors += [
                    GgufTensor(
                        f"{weight}.lora_a", (count, rank, a.shape[1]), *module, exact_a, expert_rows=(count, None),
                    ),
                    GgufTensor(
                        f"{weight}.lora_b", (count, half, rank), *module, exact_b, b_factor, expert_rows=(count, rows),
                    ),
                ]  # fmt: skip
            continue

        (weight,), (rank, width), (out, _) = place.names, a.shape, b.shape
        shape_a = (rank, width)
        if lora.embedding:
            shape_a = (width, rank)
        tensors += [
            GgufTensor(f"{weight}.lora_a", shape_a, *module, exact_a, transposed=lora.embedding),
            GgufTensor(f"{weight}.lora_b", (out, rank), *module, exact_b, b_factor, place.rows),
        ]
    return common, tuple(tensors)


Division = Literal["layer", "kind", "zone"]

DIVISIONS: tuple[Division, ...] = ("layer", "kind", "zone")
"""What each file holds: a layer; the attention, the MLP or the other modules of a layer; a zone."""


@dataclass(frozen=True)
class Part:
    """The content of one file.

    Attributes:
        name: the file's name, without its suffix.
        layers: the layers that it changes; empty for modules outside the layers.
        kind: the kind of modules that it changes, if files are divided by kind.
        tensors: its tensors.
    """

    name: str
    layers: tuple[int, ...]
    kind: Kind | None
    tensors: tuple[GgufTensor, ...]


def divide(prepared: PreparedGguf, by: Division) -> list[Part]:
    """The parts of an export, in the order of their first layer; modules outside the layers come last."""
    width = max(2, len(str(prepared.plan.one_depth("`export`") - 1)))
    if by == "zone":
        return _zones(prepared, width)
    groups: dict[tuple[int | None, Kind | None], list[GgufTensor]] = {}
    for tensor in sorted(prepared.tensors, key=lambda t: (t.layer is None, t.layer or 0, t.kind)):
        kind = None
        if by == "kind" and tensor.layer is not None:
            kind = tensor.kind
        groups.setdefault((tensor.layer, kind), []).append(tensor)

    parts: list[Part] = []
    for (layer, kind), tensors in groups.items():
        if layer is None:
            parts.append(Part("outside", (), None, tuple(tensors)))
            continue
        name = f"layer-{layer:0{width}}"
        if kind is not None:
            name += f"-{kind}"
        parts.append(Part(name, (layer,), kind, tuple(tensors)))
    return parts


class _Share(NamedTuple):
    """What makes a module's result: its owner, or its method and each expert's coefficient."""

    owner: str | None
    coefficients: frozenset[tuple[str, float]]
    method: str

    @property
    def experts(self) -> set[str]:
        if self.owner is not None:
            return {self.owner}
        return {expert for expert, _ in self.coefficients}

    @staticmethod
    def of(slot: Slot) -> _Share:
        if isinstance(slot.coefficients, str):
            return _Share(slot.coefficients, frozenset(), slot.method)
        return _Share(None, frozenset(slot.coefficients.items()), slot.method)


class _Zone(NamedTuple):
    """Layers that follow each other, and the tensors of their modules of one share; without layers, those outside."""

    layers: list[int]
    share: _Share
    tensors: list[GgufTensor]


def _zones(prepared: PreparedGguf, width: int) -> list[Part]:
    """Runs of layers that share an owner or a blend; if modules of a layer differ, each share is a zone."""
    plan = prepared.plan
    layers: dict[int | None, dict[_Share, list[GgufTensor]]] = {}
    for tensor in sorted(prepared.tensors, key=lambda t: (t.layer is None, t.layer or 0)):
        share = _Share.of(plan.slots[tensor.module])
        layers.setdefault(tensor.layer, {}).setdefault(share, []).append(tensor)

    zones: list[_Zone] = []
    running: dict[_Share, _Zone] = {}
    for layer, by_share in layers.items():
        # Zones continue if the layer before was divided in the same way among the same owners.
        continues = layer is not None and running.keys() == by_share.keys()
        for zone in running.values():
            if layer is None or zone.layers[-1:] != [layer - 1]:
                continues = False
        if not continues:
            running = {share: _Zone([], share, []) for share in by_share}
            zones += running.values()

        for share, tensors in by_share.items():
            if layer is not None:
                running[share].layers.append(layer)
            running[share].tensors.extend(tensors)

    parts: list[Part] = []
    for zone in zones:
        ends = dict.fromkeys([*zone.layers[:1], *zone.layers[-1:]])
        span = "-".join(f"{end:0{width}}" for end in ends) or "outside"
        experts = [name for name in plan.experts if name in zone.share.experts]
        owner = "+".join(re.sub(r"[^\w.-]", "_", name) for name in experts)
        parts.append(Part(f"zone-{span}-{owner}", tuple(zone.layers), None, tuple(zone.tensors)))
    return _distinct(parts)


def _distinct(parts: Sequence[Part]) -> list[Part]:
    """The parts, with numbers after names that occur twice: blends of the same experts with other weights."""
    taken: set[str] = set()
    renamed = []
    for part in parts:
        name, number = part.name, 1
        while name.casefold() in taken:  # disks may ignore case
            number += 1
            name = f"{part.name}-{number}"
        taken.add(name.casefold())
        renamed.append(replace(part, name=name))
    return renamed
