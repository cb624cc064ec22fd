"""Which tensors a plan's adapter holds, with which ranks and scales, so that PEFT computes the plan's ΔW from them.

* `exact`: a copied module keeps its tensors, rank and alpha; a blend Σ c_i s_i B_i A_i is the rank concatenation
  A' = [A_1; A_2], B' = [c_1 s_1 B_1, c_2 s_2 B_2] / s'. The scale s' of blends is the adapter's most frequent one, so
  that where the experts' scales agree even a reader that ignores the patterns computes the right sum.
* `portable`: every module has the same rank (zeros fill it up), plain LoRA with alpha = r, so s' = 1, and no patterns.

No tensor is read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from adapterswap.arithmetic.outputs import Form, Layout, OutputTensor, Piece, Reduced
from adapterswap.arithmetic.peft_config import Shape, adapter_config, is_fused, most_common, written_scale
from adapterswap.arithmetic.resolving import Resolved
from adapterswap.experts.adapter_keys import base_copy_key, parameter_key
from adapterswap.experts.adapters import LoraModule
from adapterswap.experts.checkpoints import find_base_tensor
from adapterswap.files.numbers import decode, finite_bytes
from adapterswap.planning.allocation import BASE
from adapterswap.planning.plan import Plan
from adapterswap.planning.slots import Slot

__all__ = ["blend_scale", "lay_out", "total_rank", "uses_rslora"]


def lay_out(resolved: Resolved, form: Form, reduced: Mapping[str, Reduced]) -> Layout:
    """The layout of a plan's adapter.

    Args:
        resolved: the plan.
        form: how it is written.
        reduced: the modules that were truncated, by name.
    """
    plan = resolved.plan
    modules = [module for module in plan.modules.values() if module.terms]
    if form.layout == "portable" and any(is_fused(module.name) for module in modules):
        modules = [
            module for module in plan.modules.values() if module.terms or is_fused(module.name)
        ]  # zeros where nothing changes
    common = blend_scale(plan, form)
    ranks = {
        module.name: reduced[module.name].rank if module.name in reduced else total_rank(module) for module in modules
    }
    if form.layout == "portable":
        rank = max(ranks.values(), default=1)
        rslora, alpha = False, float(rank)
        shapes = {name: Shape(rank, rank, 1.0) for name in ranks}
    else:
        rslora = uses_rslora(plan)
        shapes = {m.name: _shape(m, ranks[m.name], m.name in reduced, rslora, common) for m in modules}
        agreeing = [(s.rank, s.alpha) for s in shapes.values() if math.isclose(s.scale, common)]
        rank, alpha = most_common(agreeing or [(s.rank, s.alpha) for s in shapes.values()], default=(1, 1.0))
    tensors = [
        tensor
        for module in modules
        for tensor in (
            _padded(reduced[module.name].tensors, rank if form.layout == "portable" else None)
            if module.name in reduced
            else _tensors(module, shapes[module.name], resolved)
        )
    ]
    tensors += _base_copies(modules)
    tensors += [tensor for module in plan.saved.values() for tensor in _saved_tensors(module, plan)]
    if form.dtype is not None:
        tensors = [_in_dtype(tensor, form.dtype) for tensor in tensors]
    return Layout(_config(plan, shapes, rank, alpha, rslora), tuple(tensors))


def _in_dtype(tensor: OutputTensor, dtype: str) -> OutputTensor:
    """The tensor in another dtype; numbers that are known already are rounded once more."""
    if tensor.data is None or tensor.dtype == dtype:
        return replace(tensor, dtype=dtype)
    values = decode(tensor.data.reshape(-1), tensor.dtype, tensor.shape)
    return replace(tensor, dtype=dtype, data=finite_bytes(values, dtype, tensor.key))


def blend_scale(plan: Plan, form: Form) -> float:
    """s' of blends: 1 in the portable layout, else the scale of most copied modules (of most terms without copies)."""
    if form.layout == "portable":
        return 1.0
    modules = plan.modules.values()
    copied = [module.terms[0].lora.scale for module in modules if module.owner and module.terms]
    scales = copied or [term.lora.scale for module in modules for term in module.terms]
    return float(most_common(scales, default=1.0))


def total_rank(module: Slot) -> int:
    """The rank of a module's exact form: the sum of its terms' ranks."""
    return sum(term.lora.rank for term in module.terms)


def uses_rslora(plan: Plan) -> bool:
    """Rank-stabilized, unless every expert is plain: then the numbers of the experts' own configs are kept."""
    return any(adapter.config.rslora for adapter in plan.adapters.values())


def _config(plan: Plan, shapes: Mapping[str, Shape], rank: int, alpha: float, rslora: bool) -> dict[str, Any]:
    first = next(iter(plan.adapters.values())).config
    return adapter_config(
        shapes,
        rank,
        alpha,
        rslora=rslora,
        base_model=plan.base_model,
        revision=plan.base_revision,
        task_type=plan.task_type,
        auto_mapping=plan.auto_mapping,
        fan_in_fan_out=_fan_in_fan_out(plan),
        tied=first.tied,
        saved=[name for name, module in plan.saved.items() if module.terms],
    )


def _fan_in_fan_out(plan: Plan) -> bool:
    """PEFT's one flag for all modules; it corrects it for each module that it adapts, with a warning where it is wrong.

    A saved adapter has the value of the last module that PEFT adapted. If the experts' values differ, their base has
    Conv1D modules in its layers and a Linear, such as the head, outside them.
    """
    flags = {adapter.config.fan_in_fan_out for adapter in plan.adapters.values()}
    if len(flags) == 1:
        return flags.pop()
    return any(module.layer is not None and module.terms for module in plan.modules.values())


def _shape(module: Slot, rank: int, is_reduced: bool, rslora: bool, common: float) -> Shape:
    part = module.terms[0].lora
    copied = bool(module.owner) and not is_reduced
    if copied and part.rslora == rslora:
        return Shape(rank, part.alpha, part.scale)
    return Shape(rank, *written_scale(rank, rslora, part.scale if copied else common))


def _tensors(module: Slot, shape: Shape, resolved: Resolved) -> Iterator[OutputTensor]:
    """A and B of a module that is copied or concatenated."""
    first = _like(module, resolved.plan)
    dtypes = {term.lora.dtype for term in module.terms} or {first.dtype}
    common_dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    a_pieces, b_pieces = [], []
    offset = 0
    for term in module.terms:
        part, path = term.lora, term.change.path
        factor = term.coefficient * part.scale / shape.scale
        if module.owner and math.isclose(factor, 1, rel_tol=1e-12):
            factor = 1.0  # the same scale, reached through another formula (rsLoRA or plain)
        rows = resolved.kept_rows.get((term.side, module.name))
        a_pieces.append(Piece(term.expert, path, part.a, 1.0, offset))
        b_pieces.append(Piece(term.expert, path, part.b, factor, offset, rows))
        offset += part.rank
    for axis, key, pieces in ((0, first.a_key, a_pieces), (1, first.b_key, b_pieces)):
        dims = (shape.rank, first.in_features) if axis == 0 else (first.out_features, shape.rank)
        dtype = pieces[0].tensor.dtype if module.owner and pieces else common_dtype
        yield OutputTensor(key, dtype, dims, axis, tuple(pieces))


def _like(module: Slot, plan: Plan) -> LoraModule:
    """A module of the same name and shape: an expert's that enters, or any expert's where none does."""
    entering = (term.lora for term in module.terms)
    held = (adapter.modules[module.module] for adapter in plan.adapters.values() if module.module in adapter.modules)
    return next(entering, None) or replace(next(held), name=module.name)


def _padded(tensors: tuple[OutputTensor, ...], rank: int | None) -> Iterator[OutputTensor]:
    """Truncated factors as they are, or filled up with zeros to `rank`."""
    for tensor in tensors:
        assert tensor.data is not None
        assert tensor.axis is not None
        missing = (rank or tensor.shape[tensor.axis]) - tensor.shape[tensor.axis]
        if missing == 0:
            yield tensor
            continue
        import numpy as np

        width = tensor.data.size // math.prod(tensor.shape)
        grown = [(0, 0), (0, 0), (0, 0)]
        grown[tensor.axis] = (0, missing)
        data = np.pad(tensor.data.reshape(*tensor.shape, width), grown)
        yield replace(tensor, shape=data.shape[:2], data=data.reshape(-1))


def _base_copies(modules: Iterable[Slot]) -> Iterator[OutputTensor]:
    """The base's own weight beside the LoRA of an embedding, where an expert carries it; LoRA never changes it.

    All that carry it carry the same one; see `copies.check_one_base`.
    """
    for module in modules:
        for term in module.terms:
            base = term.lora.base
            if base is not None:
                piece = Piece(term.expert, term.change.path, base)
                yield OutputTensor(base_copy_key(module.name), base.dtype, base.shape, 0, (piece,))
                break


def _saved_tensors(module: Slot, plan: Plan) -> Iterator[OutputTensor]:
    """A module trained in full: Σ c_i W_i + (1 - Σ c_i) W_base."""
    if not module.terms:
        return
    for parameter, tensor in module.terms[0].whole.tensors.items():
        pieces = [
            Piece(term.expert, term.change.path, term.whole.tensors[parameter], term.coefficient)
            for term in module.terms
        ]
        if module.needs_base:
            assert plan.composition.base_model is not None
            path, original = find_base_tensor(plan.composition.base_model, f"{module.name}.{parameter}", tensor)
            pieces.append(Piece(BASE, path, original, module.rest))
        dtypes = {piece.tensor.dtype for piece in pieces}
        dtype = tensor.dtype if len(dtypes) == 1 else "F32"
        yield OutputTensor(parameter_key(module.name, parameter), dtype, tensor.shape, None, tuple(pieces))
