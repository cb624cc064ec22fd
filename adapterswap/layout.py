"""Which tensors a plan's adapter holds, and the adapter_config.json that makes PEFT compute the plan's ΔW from them.

Layout `exact`: a copied module keeps its tensors, rank and alpha; a blend Σ c_i s_i B_i A_i is the rank concatenation
A' = [A_1; A_2], B' = [c_1 s_1 B_1, c_2 s_2 B_2] / s'. The scale s' of blends is the adapter's most frequent one, so
that where the experts' scales agree even a reader that ignores the patterns computes the right sum. No tensor is read
here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from adapterswap.adapter_config import scale
from adapterswap.plan import ModulePlan, Plan
from adapterswap.tensorfile import Tensor

__all__ = ["Layout", "OutputTensor", "Piece", "exact_layout"]


@dataclass(frozen=True)
class Piece:
    """A source tensor, multiplied by `factor`, at `offset` along the output's rank axis."""

    expert: str
    tensor: Tensor
    factor: float
    offset: int


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: its pieces side by side along `axis`, 0 for A (rank×in) and 1 for B (out×rank)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Piece, ...]

    @property
    def is_copied(self) -> bool:
        """Whether the bytes of all pieces can be copied as they are."""
        contiguous = self.axis == 0 or len(self.pieces) == 1
        return contiguous and all(p.factor == 1 and p.tensor.dtype == self.dtype for p in self.pieces)


@dataclass(frozen=True)
class Layout:
    """The content of an adapter folder: adapter_config.json as a mapping, and the tensors."""

    config: dict[str, Any]
    tensors: tuple[OutputTensor, ...]


@dataclass(frozen=True)
class _Shape:
    """An output module's rank, alpha and scale."""

    rank: int
    alpha: float
    scale: float


def exact_layout(plan: Plan) -> Layout:
    """The layout in which copies stay byte for byte and blends are exact."""
    modules = [module for module in plan if module.terms]
    rslora = _rslora(plan)
    common = _common_scale(modules)
    shapes = {module.name: _shape(module, rslora, common) for module in modules}
    rank, alpha = _most_common(
        ((shape.rank, shape.alpha) for shape in shapes.values() if math.isclose(shape.scale, common)),
        default=(next(iter(shapes.values())).rank, next(iter(shapes.values())).alpha) if shapes else (1, 1),
    )
    # PEFT matches a pattern from any dot on, and the first match wins: longer names first, so that none hides another.
    names = sorted(shapes, key=lambda name: (-name.count("."), name))
    config = {
        "peft_type": "LORA",
        "task_type": next(iter(plan.experts.values())).config.task_type,
        "base_model_name_or_path": plan.base_model,
        "revision": _agreed(adapter.config.revision for adapter in plan.experts.values()),
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "rank_pattern": {name: shapes[name].rank for name in names if shapes[name].rank != rank},
        "alpha_pattern": {name: shapes[name].alpha for name in names if shapes[name].alpha != alpha},
        "target_modules": sorted(shapes),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": next(iter(plan.experts.values())).config.fan_in_fan_out,
        "init_lora_weights": True,
        "inference_mode": True,
        "layers_to_transform": None,
        "modules_to_save": None,
    }
    return Layout(config, tuple(tensor for module in modules for tensor in _tensors(module, shapes[module.name])))


def _rslora(plan: Plan) -> bool:
    """Rank-stabilized, unless every expert is plain: then the numbers of the experts' own configs are kept."""
    return any(adapter.config.rslora for adapter in plan.experts.values())


def _common_scale(modules: list[ModulePlan]) -> float:
    """The scale of most copied modules, or of most terms where nothing is copied."""
    copied = [module.terms[0].module.scale for module in modules if module.owner]
    scales = copied or [term.module.scale for module in modules for term in module.terms]
    return float(_most_common(scales, default=1.0))


def _most_common(values: Iterable[Any], *, default: Any) -> Any:
    counted = Counter(values)
    return min(counted, key=lambda value: (-counted[value], value)) if counted else default


def _agreed(values: Iterable[str | None]) -> str | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _shape(module: ModulePlan, rslora: bool, common: float) -> _Shape:
    part = module.terms[0].module
    rank = sum(term.module.rank for term in module.terms)
    if module.owner and part.rslora == rslora:
        return _Shape(rank, part.alpha, part.scale)
    wanted = part.scale if module.owner else common
    alpha = _tidy(wanted * (math.sqrt(rank) if rslora else rank))
    return _Shape(rank, alpha, scale(rank, alpha, rslora))


def _tidy(alpha: float) -> float:
    """A whole number where alpha is one up to the rounding of its computation: PEFT's own configs hold integers."""
    return round(alpha) if round(alpha) and math.isclose(alpha, round(alpha), rel_tol=1e-15) else alpha


def _tensors(module: ModulePlan, shape: _Shape) -> Iterable[OutputTensor]:
    parts = [term.module for term in module.terms]
    dtypes = {part.dtype for part in parts}
    common_dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    a_pieces, b_pieces = [], []
    offset = 0
    for term in module.terms:
        part = term.module
        a_pieces.append(Piece(term.expert, part.a, 1.0, offset))
        factor = 1.0 if module.owner else term.coefficient * part.scale / shape.scale
        b_pieces.append(Piece(term.expert, part.b, factor, offset))
        offset += part.rank
    first = parts[0]
    for axis, pieces in ((0, a_pieces), (1, b_pieces)):
        source = pieces[0].tensor
        dims = (shape.rank, first.in_features) if axis == 0 else (first.out_features, shape.rank)
        yield OutputTensor(source.name, source.dtype if module.owner else common_dtype, dims, axis, tuple(pieces))
