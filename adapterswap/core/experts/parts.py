"""What an adapter's file holds of one module: LoRA's factors, whole weights, or the tensors of another kind.

Pure data, which say where the tensors are. Experts of two bases differ in the shapes of nearly every module, which is
reported once: as a difference of the hidden size if possible, else as the first module and the number of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from adapterswap.core.experts.keys import KINDS, LORA_PARTS, ModuleKeys, misnamed
from adapterswap.core.model.layers import Kind, ModuleName
from adapterswap.kit.errors import AdapterswapError, Problems
from adapterswap.kit.files.tensorfile import Tensor


@dataclass(frozen=True)
class _Part:
    """What an adapter's file holds of one module of the base.

    Attributes:
        name: the module's full name in the base model.
        layer: the index of its transformer layer, or None.
    """

    name: str
    layer: int | None

    @cached_property
    def kind(self) -> Kind:
        """Attention, mlp or other, by the name."""
        return ModuleName(self.name).kind

    @property
    def misnamed(self) -> str | None:
        """What to do if the base has no module of this name; None if that is not known."""
        return misnamed(self.name)

    def at(self, name: str, layer: int | None) -> Self:
        """The same under another name, or in another layer."""
        return replace(self, name=name, layer=layer)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    """Tensors' names and shapes as text, such as `bias 64, weight 64×32`."""
    return ", ".join(f"{name} {'×'.join(map(str, tensor.shape))}" for name, tensor in sorted(tensors.items()))


@dataclass(frozen=True)
class LoraModule(_Part):
    """An adapted weight W (out×in) and its factors: ΔW = s·B·A with A (rank×in) and B (out×rank).

    For an embedding, A is (rank×vocabulary) and B (width×rank): PEFT's `lora_embedding_A` and `lora_embedding_B`.

    Attributes:
        rank, alpha, rslora: as PEFT resolves them for this module.
        scale: s, which is α/√r (rsLoRA) or α/r.
        a, b: the places of the factors in the file.
        embedding: whether it is an embedding's LoRA.
        base: a copy of the base's own weight, which PEFT may save with the LoRA of an embedding or head; else None.
        parameter: whether it is a parameter (`target_parameters`), not a module; `name` is the parameter's.
        experts: the number of matrices in a fused parameter, each with factors of this rank. A is (experts·rank×in),
            with the rows of one expert together; B is (out×rank·experts), with the columns of one expert `experts`
            apart.
    """

    rank: int
    alpha: float
    rslora: bool
    scale: float
    a: Tensor
    b: Tensor
    embedding: bool
    base: Tensor | None = None
    parameter: bool = False
    experts: int = 1
    in_features: int = field(init=False, repr=False, compare=False)
    out_features: int = field(init=False, repr=False, compare=False)
    on_bias = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_features", self.a.shape[1])
        object.__setattr__(self, "out_features", self.b.shape[0])

    @property
    def lora(self) -> LoraModule:
        """The factors."""
        return self

    @property
    def height(self) -> int:
        """The rows of the weight as torch stores it: an embedding's tokens, else the outputs."""
        return self.in_features if self.embedding else self.out_features

    @property
    def keys(self) -> tuple[str, str]:
        """The keys under which PEFT stores A and B."""
        return ModuleKeys(self.name).factors(embedding=self.embedding)

    @property
    def dtype(self) -> str:
        """The dtype of A and B; float32 if they differ."""
        if self.a.dtype != self.b.dtype:
            return "F32"
        return self.a.dtype

    @property
    def shape(self) -> str:
        """The shape that must agree between experts of one base, as text."""
        text = f"{self.out_features}×{self.in_features}"
        if self.experts > 1:
            text = f"{self.experts}×{text}"
        if self.embedding:
            text += " (an embedding)"
        return text


@dataclass(frozen=True)
class FullModule(_Part):
    """A module trained in full (PEFT's `modules_to_save`): its whole weights W, not ΔW; or only the trained rows of W.

    Attributes:
        tensors: the places of its parameters in the file, by their name within the module (`weight`, `bias`).
        rows: the rows of the weight that the only tensor holds, in order (`trainable_token_indices`); empty for all.
        tied: for TRAINABLE_TOKENS, modules tied to this one, under whose names PEFT stores the same rows again.
    """

    tensors: Mapping[str, Tensor]
    rows: tuple[int, ...] = ()
    tied: Mapping[str, Tensor] = field(default_factory=dict)
    lora = None
    parameter = False

    @property
    def first(self) -> Tensor:
        """The first tensor, or the only one if it holds rows."""
        return next(iter(self.tensors.values()))

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of a row of the first tensor."""
        return self.first.shape[1:]

    @property
    def words(self) -> str:
        """How it was trained."""
        return "trained tokens" if self.rows else "trained in full"

    @property
    def shape(self) -> str:
        """The shapes that must agree between experts of one base, as text."""
        return _shapes(self.tensors)


@dataclass(frozen=True)
class OpaqueModule(_Part):
    """A module whose change is not just a product of two factors.

    It can be copied. It can be averaged if the base's weights are available, or if it `is_linear`.

    Attributes:
        method: the usual name of its kind: DoRA, OFT, …
        peft_type: PEFT's name of its kind.
        tensors: the places of its tensors in the file, by the end of their keys.
        settings: the settings that PEFT reads for it. They must be the same in an adapter that it is copied to.
        values: settings that may differ between modules; see `AdapterConfig.values_of`.
        shared: tensors that all modules of the adapter use, by name.
        lora: the factors, for a variant of LoRA.
    """

    method: str
    peft_type: str
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    lora: LoraModule | None = None
    parameter = False

    def at(self, name: str, layer: int | None) -> Self:
        return replace(self, name=name, layer=layer, lora=self.lora and self.lora.at(name, layer))

    @property
    def is_linear(self) -> bool:
        """Whether it adds s·(B·A·x + bias) to the module's output (`lora_bias`): sums of these have the same form."""
        return self.lora is not None and "lora_B.bias" in self.tensors and not self.settings.get("use_dora")

    @property
    def beside(self) -> dict[str, Tensor]:
        """What a variant of LoRA stores beside A and B, such as DoRA's magnitudes."""
        return {name: tensor for name, tensor in self.tensors.items() if name in LORA_PARTS}

    @property
    def shares_tensors(self) -> bool:
        """Whether all modules of its kind use the same tensors, as VeRA's use their projections."""
        return self.peft_type in KINDS and bool(KINDS[self.peft_type].shared)

    @property
    def on_bias(self) -> bool:
        """Whether it also changes the module's bias."""
        if "ia3_l" in self.tensors:
            return self.tensors["ia3_l"].shape[0] != 1  # otherwise it scales the module's input
        return "lora_B.bias" in self.tensors or (self.peft_type in KINDS and KINDS[self.peft_type].on_biases)

    @property
    def shape(self) -> str:
        """The shapes that must agree between experts of one base and with the same settings, as text."""
        if self.lora is not None:
            return self.lora.shape
        settings = {**self.settings, **self.values}
        listed = ", ".join(f"{key} {settings[key]}" for key in sorted(settings))
        return f"{_shapes(self.tensors)} ({self.method}, {listed})"


Part = LoraModule | OpaqueModule | FullModule


def compare_shapes(
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    *,
    one: str,
    other: str,
    remedy: str,
    problems: Problems,
    parameter: str | None = None,
    kind: type[AdapterswapError] | None = None,
) -> None:
    """Add a problem if modules that both hold differ in shape.

    Args:
        ours, theirs: module → its shape as text, such as `64×32`.
        one, other: the names of their owners.
        remedy: the problem's remedy.
        problems: collects the problem.
        parameter, kind: see `Problems.add`.
    """
    common = [name for name in ours if name in theirs]
    differing = [name for name in common if ours[name] != theirs[name]]
    if not differing:
        return

    # Bases of two widths differ in nearly every module.
    width, other_width = _width(ours[name] for name in common), _width(theirs[name] for name in common)
    if len(differing) > 1 and width is not None and other_width is not None and width != other_width:
        problems.add(
            f"The hidden size is {width} in {one}, but {other_width} in {other}", remedy, parameter=parameter, kind=kind
        )
        return

    first = differing[0]
    message = f"{first} is {ours[first]} in {one}, but {theirs[first]} in {other}"
    if len(differing) > 1:
        message += f"; {len(differing) - 1} more modules differ"
    problems.add(message, remedy, parameter=parameter, kind=kind)


_MATRIX = re.compile(r"(\d+)×(\d+)")


def _width(shapes: Iterable[str]) -> int | None:
    """The hidden size: the one number that all matrices share; None if there are several, or none."""
    shared: set[int] | None = None
    for shape in shapes:
        matrix = _MATRIX.fullmatch(shape)
        if matrix is not None:
            sides = {int(matrix[1]), int(matrix[2])}
            shared = sides if shared is None else shared & sides
    if shared is None or len(shared) != 1:
        return None
    return shared.pop()
