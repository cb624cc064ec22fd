"""Turn modules trained in full (`modules_to_save`) into LoRA: ΔW = W - W_base, truncated to a rank.

Engines that serve only LoRA can then load the adapter. Weights of linear layers and embeddings can become LoRA;
vectors, such as norms, cannot. Knows checkpoints and adapter folders; knows nothing of compositions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.approximation import approximate
from adapterswap.arithmetic.peft_config import Shape, adapter_config, written_scale
from adapterswap.changes.deltas import Factors
from adapterswap.changes.kinds import Whole
from adapterswap.changes.locating import find_tied_head, locate_all, with_head
from adapterswap.changes.reading import read_difference
from adapterswap.converting.result import ConvertedModule
from adapterswap.errors import Problems, UnsupportedError
from adapterswap.experts.adapter_keys import factor_key
from adapterswap.experts.adapters import CONFIG, WEIGHTS, Adapter
from adapterswap.experts.anatomy import AdaptableWeight, adaptable_weights, build_empty, rename_keys
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.files.numbers import decode, finite_bytes, open_files
from adapterswap.files.smallfiles import write_json

__all__ = ["write_lowered"]

_KEEP = "Leave out `saved_rank` to keep it in full, or write full weights with `adapterswap merge`"


def write_lowered(
    adapter: Adapter, base: Checkpoint, out: Path, *, rank: int, error: float | None, dtype: str | None
) -> dict[str, ConvertedModule]:
    """Write the adapter into `out` with every module trained in full as LoRA; return those modules.

    Args:
        adapter: a LoRA.
        base: the checkpoint that it adapts.
        out: a folder.
        rank: the highest rank of such a module.
        error: the relative error of ΔW at which a smaller rank is enough; None for the full `rank`.
        dtype: of the new factors; by default the dtype of the adapter's own factors.

    Raises:
        BaseModelError: the base has no such module, or in another shape (tokens were added, for instance).
        UnsupportedError: a changed module is a vector or a bias, or not a linear layer or embedding; it is tied to
            another module (`ensure_weight_tying`); the adapter has LoRA on parameters.
        ExpertError: NaN or infinity.
    """
    dtype = dtype or next((module.dtype for module in adapter.modules.values()), "F32")
    tensors: dict[str, Any] = _own_tensors(adapter)
    lowered: dict[str, ConvertedModule] = {}
    shapes = {module.name: Shape(module.rank, module.alpha, module.scale) for module in adapter.modules.values()}
    config = adapter.config
    for weight, delta in _changes(adapter, base):
        norm = float(np.linalg.norm(delta.astype(np.float64)))
        cut = approximate(delta, rank=rank, error=error)
        alpha, scale = written_scale(cut.factors.a.shape[0], config.rslora, 1.0)
        a, b = (
            decode(finite_bytes(values, dtype, weight.name), dtype, values.shape)
            for values in (np.ascontiguousarray(cut.factors.a), np.ascontiguousarray(cut.factors.b))
        )
        written = float(np.linalg.norm((delta - Factors.scaled(a, b, scale, weight.name).rows()).astype(np.float64)))
        lowered[weight.name] = ConvertedModule(weight.name, a.shape[0], norm, written / norm)
        shapes[weight.name] = Shape(a.shape[0], alpha, scale)
        tensors[factor_key(weight.name, "A", embedding=weight.embedding)] = _torch(a, dtype)
        tensors[factor_key(weight.name, "B", embedding=weight.embedding)] = _torch(b, dtype)
    _write(tensors, out / WEIGHTS)
    content = adapter_config(
        shapes, config.rank, config.alpha, rslora=config.rslora, base_model=config.base_model,
        revision=config.revision, task_type=config.task_type, fan_in_fan_out=config.fan_in_fan_out, tied=config.tied,
        auto_mapping=config.auto_mapping,
    )  # fmt: skip
    write_json(out / CONFIG, content)
    return lowered


def _changes(adapter: Adapter, base: Checkpoint) -> Iterator[tuple[AdaptableWeight, npt.NDArray[np.float32]]]:
    """ΔW (out×in) of every module trained in full that differs from the base.

    Raises:
        AdapterswapError: see `write_lowered`; all problems are reported at once, before the first weight is read.
    """
    names = ("the adapter", base.name)
    problems = Problems(UnsupportedError)
    if adapter.opaque or any(module.parameter for module in adapter.modules.values()):
        problems.add("The adapter is more than plain LoRA on modules", _KEEP, parameter="saved_rank")
        problems.raise_if_any()
    stored = with_head(base.parameters, find_tied_head(base, {names[0]: adapter}))
    located = locate_all({names[0]: adapter}, stored, "the base", base, problems).get(names[0], {})
    problems.raise_if_any()
    model = build_empty(base)
    weights, name_of = adaptable_weights(model), rename_keys(model)
    full = {
        key: (location.module, location.change)
        for key, location in located.items()
        if isinstance(location.change, Whole)
    }
    with open_files([adapter.file, *base.shards]) as files:

        def read(key: str, change: Whole) -> npt.NDArray[np.float32]:
            return read_difference(names, change, Whole.of(stored[key].path, stored[key].tensor), files)

        matrices = {}
        for key, (module, change) in full.items():
            weight = weights.get(module) or weights.get((name_of(key) or "").removesuffix(".weight"))
            if weight is None or len(change.tensor.shape) != 2:
                if read(key, change).any():
                    problems.add(
                        f"{key} was trained in full, but is not a matrix of a linear layer or an embedding, so LoRA "
                        "cannot hold its change",
                        _KEEP,
                        parameter="saved_rank",
                    )
            elif adapter.config.tied and weight.tied:
                problems.add(
                    f"{module} was trained together with the module that is tied to it (ensure_weight_tying)",
                    _KEEP,
                    parameter="saved_rank",
                )
            else:
                matrices[key] = weight, change
        problems.raise_if_any()
        for key, (weight, change) in matrices.items():
            delta = read(key, change)
            if delta.any():
                yield weight, np.ascontiguousarray(delta.T if weight.transposed else delta)


def _own_tensors(adapter: Adapter) -> dict[str, Any]:
    """All tensors except those of modules trained in full, by PEFT's keys."""
    from safetensors import safe_open

    left_out = {tensor.name for module in adapter.saved.values() for tensor in module.tensors.values()}
    with safe_open(adapter.file.path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys() if key not in left_out}  # noqa: SIM118


def _torch(values: npt.NDArray[np.float32], dtype: str) -> Any:
    import torch

    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return torch.from_numpy(values).to(names[dtype])


def _write(tensors: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
