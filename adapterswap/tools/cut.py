"""ΔW = W_full - W_base of the weights that PEFT can adapt, and the low-rank factors cut out of it.

One weight at a time: memory holds a few copies of the largest one.

PEFT refuses some modules (Mamba's `out_proj`), mistakes others (in a mixture of experts it takes every target that ends
in `gate_proj`, `up_proj` or `down_proj` for the fused experts' parameters, even in dense layers and shared experts),
and wraps some that then compute something else. These are left out.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import Factors
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.trial import try_in_peft
from adapterswap.core.model.base import Weight, empty_model
from adapterswap.core.writing.outputs import Spool
from adapterswap.core.writing.peft_config import Shape, adapter_config
from adapterswap.core.writing.reduction import approximate
from adapterswap.kit.errors import ArgumentError, Problems, UnsupportedError, check_type
from adapterswap.kit.files.numbers import Dtype
from adapterswap.tools.pairs import LeftOutWeight, WeightMatrix, WeightPair

_BLOCK = 2**22  # elements of a weight that is left out, read at a time
_MAX_RANK = 2**16  # what `open_adapter` reads

_Array = TypeVar("_Array", npt.NDArray[np.floating], Any)  # numpy's, or torch's


@dataclass(frozen=True)
class CutForm:
    """How the factors are cut.

    Attributes:
        rank: the rank of every module; with `max_error`, the highest allowed.
        max_error: the smallest rank with at most this relative error of ΔW.
        dtype: the dtype of the factors, by its name in files; None for the dtype of the fine-tune's weight.
        device: the torch device that computes.
    """

    rank: int | None = None
    max_error: float | None = None
    dtype: str | None = None
    device: Any = "cpu"

    def __post_init__(self) -> None:
        check_type(self.rank, (Integral, type(None)), "rank", "Pass a whole number such as `rank=64`")
        check_type(self.max_error, (Real, type(None)), "max_error", "Pass a number such as `max_error=0.1`")

        problems = Problems(ArgumentError)
        if self.rank is None and self.max_error is None:
            problems.add("Neither `rank` nor `max_error` was passed", "Pass one of them, or both", parameter="rank")
        if self.rank is not None and not 1 <= self.rank <= _MAX_RANK:
            problems.add(
                f"`rank` is {self.rank}, but must be between 1 and {_MAX_RANK}", "Pass `rank=64`", parameter="rank"
            )
        if self.max_error is not None and not 0 < self.max_error < 1:
            problems.add(
                f"`max_error` is {self.max_error:g}, but must be between 0 and 1",
                "Pass `max_error=0.1`",
                parameter="max_error",
            )
        problems.raise_if_any()


@dataclass(frozen=True)
class Cut:
    """The factors of one weight's ΔW ≈ B·A, as they are written.

    Attributes:
        matrix: the weight.
        rank: of the factors.
        norm: ‖ΔW‖, the Frobenius norm.
        error: ‖ΔW - B·A‖ / ‖ΔW‖ with the factors as they are written, rounding included.
        dtype: of both factors, by its name in files.
        factors: A (rank×in) and B (out×rank), with numbers that `dtype` holds.
    """

    matrix: WeightMatrix
    rank: int
    norm: float
    error: float
    dtype: str
    factors: Factors

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.floating]]]:
        """See `name_tensors`."""
        return name_tensors(self.matrix.weight, *self.factors)

    def keep(self, spool: Spool) -> None:
        """Keep the tensors in `spool` until it writes them."""
        for key, values in self.tensors():
            spool.keep(key, self.dtype, np.asarray(values, np.float32))


def name_tensors(weight: Weight, a: _Array, b: _Array) -> Iterator[tuple[str, _Array]]:
    """A (rank×in) and B (out×rank) under PEFT's names; a tied head has the embedding's, transposed."""
    yield from zip(ModuleKeys(weight.name).factors(embedding=weight.embedding), (a, b), strict=True)
    for head in weight.tied:
        yield from zip(ModuleKeys(head).factors(), (b.T, a.T), strict=True)


def cut(matrix: WeightMatrix, form: CutForm, files: Mapping[Path, int], names: tuple[str, str]) -> Cut | None:
    """Cut a weight's ΔW; None if the fine-tune did not change it.

    Args:
        matrix: the weight.
        form: how to cut.
        files: the open shards.
        names: the names of the fine-tune and the base in messages.
    """
    delta = _change(matrix, files, names)
    norm = math.sqrt(_sum_of_squares(delta))
    if norm == 0:
        return None

    result = approximate(delta, rank=form.rank, error=form.max_error, device=form.device)
    dtype = form.dtype or matrix.full.tensor.dtype
    a = as_written(result.factors.a, dtype, matrix.weight.name)
    b = as_written(result.factors.b, dtype, matrix.weight.name)
    written = Factors(a, b)
    error = _distance(delta, written, form.device) / norm
    return Cut(matrix, len(result.singular_values), norm, error, dtype, written)


def as_written(values: npt.NDArray[np.float32], dtype: str, module: str) -> npt.NDArray[np.float32]:
    """The numbers of a factor as a file in `dtype` will hold them.

    Raises:
        UnsupportedError: one of them is too large for `dtype`; the message names `module`.
    """
    return Dtype(dtype).unpack(Dtype(dtype).finite_bytes(values, module), values.shape)


def norm_and_error(
    matrix: WeightMatrix, factors: Factors | None, files: Mapping[Path, int], names: tuple[str, str]
) -> tuple[float, float]:
    """‖ΔW‖ of a weight, and ‖ΔW - B·A‖ of the factors that approximate it; None counts as B·A = 0.

    Raises:
        ExpertError: the weight holds NaN or infinity.
    """
    delta = _change(matrix, files, names)
    norm = math.sqrt(_sum_of_squares(delta))
    if factors is None:
        return norm, norm
    return norm, _distance(delta, factors, "cpu")


def norm_of_change(left_out: LeftOutWeight, files: Mapping[Path, int], names: tuple[str, str]) -> float:
    """‖W_full - W_base‖ of a parameter that is left out; a part that only one of the two has counts in full."""
    versions = [(names[0], left_out.full)]
    if left_out.base:
        versions.append((names[1], left_out.base))
    sizes = [math.prod(stored.tensor.shape) for _, stored in versions]

    total = 0.0
    for start in range(0, max(sizes), _BLOCK):
        blocks = []
        for (name, stored), size in zip(versions, sizes, strict=True):
            if start < size:
                stop = min(start + _BLOCK, size)
                blocks.append(stored.tensor.read_elements(name, files[stored.path], start, stop))
        total += sum(_sum_of_squares(part) for part in _subtract(blocks))
    return math.sqrt(total)


def _subtract(blocks: list[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
    """The difference of one or two vectors: of their common part, and the rest of the longer one."""
    if len(blocks) == 1:
        return blocks
    common = min(len(block) for block in blocks)
    longer = max(blocks, key=len)
    return [blocks[0][:common] - blocks[1][:common], longer[common:]]


def _change(matrix: WeightMatrix, files: Mapping[Path, int], names: tuple[str, str]) -> npt.NDArray[np.float32]:
    """ΔW, out×in."""
    delta = matrix.full.difference(names[0], matrix.base.read_rows(names[1], files), files)
    if matrix.weight.transposed:
        return np.ascontiguousarray(delta.T)
    return delta


def _sum_of_squares(values: npt.NDArray[np.float32]) -> float:
    flat = values.reshape(-1)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))  # cast in small blocks, without a copy


def _distance(delta: npt.NDArray[np.float32], factors: Factors, device: Any) -> float:
    """‖ΔW - B·A‖."""
    import torch

    a = torch.from_numpy(factors.a).to(device)
    b = torch.from_numpy(factors.b).to(device)
    rest = torch.addmm(torch.from_numpy(delta).to(device), b, a, alpha=-1)
    return float(torch.linalg.vector_norm(rest, dtype=torch.float64))


def leave_out_unloadable(pair: WeightPair) -> WeightPair:
    """The pair without the matrices that PEFT cannot adapt; these move to `left_out`."""
    folder, name, model_class = pair.base.source.folder, pair.base.name, pair.model.class_name
    weights = [matrix.weight for matrix in pair.matrices]
    names = loadable(lambda: empty_model(folder, name, model_class=model_class), weights)

    matrices: list[WeightMatrix] = []
    left_out = list(pair.left_out)
    for matrix in pair.matrices:
        if matrix.weight.name in names:
            matrices.append(matrix)
        else:
            parameter = f"{matrix.weight.name}.weight"
            left_out.append(LeftOutWeight(parameter, "modules that PEFT cannot adapt", matrix.full, matrix.base))
    if not matrices:
        raise UnsupportedError(
            f"PEFT cannot adapt any of the selected modules of {pair.base.name}, such as {weights[0].name}",
            "Select other modules, or keep the full checkpoint",
            parameter="modules",
        )
    left_out.sort(key=lambda weight: weight.name)
    return replace(pair, matrices=tuple(matrices), left_out=tuple(left_out))


def loadable(build: Callable[[], Any], weights: Sequence[Weight]) -> frozenset[str]:
    """The names of the modules for which PEFT loads LoRA factors as they are and then computes with W + ΔW.

    Args:
        build: builds the base's model on torch's meta device.
        weights: the weights to adapt.
    """
    model = build()
    linear_classes: dict[type, bool] = {}
    usable: list[Weight] = []
    for weight in weights:
        if _called(model, weight.name) and _is_linear_in_peft(model, weight.name, linear_classes):
            usable.append(weight)
    if not usable or _loads(build(), usable):
        return frozenset(weight.name for weight in usable)

    # Kind by kind: modules whose names differ only by numbers
    groups: dict[str, list[Weight]] = {}
    for weight in usable:
        groups.setdefault(re.sub(r"\.\d+(?=\.)", "", weight.name), []).append(weight)
    usable = []
    for group in groups.values():
        if _loads(build(), group):
            usable += group
    if usable and not _loads(build(), usable):
        raise UnsupportedError(
            f"PEFT can load LoRA for each kind of module of {type(model).__name__} on its own, but not for all at once",
            "Select some modules with `modules`",
            parameter="modules",
        )
    return frozenset(weight.name for weight in usable)


def _loads(model: Any, weights: Sequence[Weight]) -> bool:
    """Whether PEFT adapts these modules and no others, and puts every factor where it belongs."""
    import torch
    from peft import PeftConfig

    names: set[str] = set()
    for weight in weights:
        names.update((weight.name, *weight.tied))
    config = adapter_config(
        dict.fromkeys(names, Shape(1, 1.0, 1.0)),
        rslora=True,
        base_model=None,
        revision=None,
        task_type=None,  # that of a classifier would ask for its head, too
        fan_in_fan_out=any(weight.transposed and not weight.embedding for weight in weights),
        tied=any(weight.tied for weight in weights),
    )

    tensors: dict[str, Any] = {}
    for weight in weights:
        a = torch.empty(1, weight.in_features, device="meta")
        b = torch.empty(weight.out_features, 1, device="meta")
        tensors.update(name_tensors(weight, a, b))
    trial = try_in_peft(model, PeftConfig.from_peft_type(**config), tensors)
    return trial is not None and trial.adapted == names and not trial.missing and not trial.dropped


def _called(model: Any, name: str) -> bool:
    """Whether a module's own forward is called: if its parent reads the weight instead, PEFT's factors are ignored.

    transformers notes such children for accelerate, which also depends on that call (`force_accelerate_hooks`).
    """
    parent, _, child = name.rpartition(".")
    forward: Any = type(model.get_submodule(parent)).forward
    while forward is not None:
        if child in inspect.getclosurevars(forward).nonlocals.get("child_module_names", ()):
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def _is_linear_in_peft(model: Any, name: str, linear_classes: dict[type, bool]) -> bool:
    """Whether PEFT's layer around a module computes the same as the module with W + ΔW.

    True for Linear, Conv1D and Embedding. A class derived from them with a forward of its own (OPT's positions, a
    router) is tried on a narrow copy; `linear_classes` keeps the answers.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    module = model.get_submodule(name)
    kind = type(module)
    if kind.forward in (torch.nn.Linear.forward, torch.nn.Embedding.forward, Conv1D.forward):
        return True
    if kind not in linear_classes:
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                linear_classes[kind] = _try(module)
        except Exception:  # the forward of an unknown class
            linear_classes[kind] = False
    return linear_classes[kind]


def _try(module: Any) -> bool:
    """Whether a narrow copy of a module computes the same with a LoRA beside it as with the LoRA merged into it."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    rows, columns = 5, 3

    # The copy, with random weights
    narrow = copy.deepcopy(module)
    narrow.weight = torch.nn.Parameter(torch.rand(rows, columns))
    if getattr(narrow, "bias", None) is not None:
        narrow.bias = torch.nn.Parameter(torch.rand(rows))
    for name, buffer in list(narrow.named_buffers(recurse=False)):  # such as an embedding's scale
        narrow.register_buffer(name, torch.full(buffer.shape, 2.0))
    if isinstance(narrow, torch.nn.Embedding):
        narrow.num_embeddings, narrow.embedding_dim, narrow.padding_idx = rows, columns, None
        inputs = torch.tensor([[0, 3, 1, 1]])
    else:
        narrow.out_features, narrow.in_features = rows, columns
        inputs = torch.rand(1, 4, columns)

    # LoRA with random factors
    holder: Any = torch.nn.Module()
    holder.add_module("narrow", narrow)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["narrow"], init_lora_weights=False), holder)
    with torch.no_grad():
        unmerged = holder.narrow(inputs)
        holder.narrow.merge()
        merged = holder.narrow(inputs)
    return bool(torch.allclose(unmerged, merged, rtol=1e-4, atol=1e-4))
