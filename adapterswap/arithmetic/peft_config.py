"""The adapter_config.json that makes PEFT compute the intended ΔW: ranks, alphas and their patterns.

Knows how PEFT computes scales and matches patterns; knows nothing of where modules come from.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterswap.errors import BaseModelError
from adapterswap.experts.adapter_config import scale

__all__ = ["Shape", "adapter_config", "check_base_name", "is_fused", "most_common", "written_scale"]

_PER_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Shape:
    """An output module's rank, alpha and scale."""

    rank: int
    alpha: float
    scale: float


def written_scale(rank: int, rslora: bool, wanted: float) -> tuple[float, float]:
    """The alpha that gives a module of this rank the scale `wanted`, and the exact scale that PEFT computes from it."""
    alpha = wanted * (math.sqrt(rank) if rslora else rank)
    # PEFT's own configs hold whole numbers, so round alpha if it differs from one only by rounding.
    alpha = round(alpha) if round(alpha) and math.isclose(alpha, round(alpha), rel_tol=1e-15) else alpha
    return alpha, scale(rank, alpha, rslora)


def check_base_name(base_model: str | None) -> None:
    """Refuse a base whose path cannot be written to an adapter's config, such as one with bytes that are not UTF-8.

    Raises:
        BaseModelError: the path has characters that are not printable.
    """
    if base_model is not None and not base_model.isprintable():
        raise BaseModelError(
            f"the path of the base, {base_model}, has characters that adapter_config.json cannot hold",
            "Rename the folder, or pass another path to it (`base_model`), such as a symlink",
            parameter="base_model",
        )


def adapter_config(
    shapes: Mapping[str, Shape],
    rank: int,
    alpha: float,
    *,
    rslora: bool,
    base_model: str | None,
    revision: str | None,
    task_type: str | None,
    fan_in_fan_out: bool,
    tied: bool,
    saved: Iterable[str] = (),
    auto_mapping: Mapping[str, Any] | None = None,
    variant: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """PEFT's adapter_config.json for LoRA modules of these shapes, by full name.

    Args:
        shapes: each module's rank and alpha.
        rank, alpha: the global values; modules with other values go into the patterns.
        saved: modules trained in full. For the other arguments see `AdapterConfig`.
        variant: settings for a variant of LoRA in all modules, such as `use_dora`.

    Raises:
        BaseModelError: see `check_base_name`.
    """
    check_base_name(base_model)
    # PEFT matches a pattern after any dot, and the first match wins, so longer names go first.
    names = sorted(shapes, key=lambda name: (-name.count("."), name))
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        **({"auto_mapping": dict(auto_mapping)} if auto_mapping and task_type is None else {}),
        "base_model_name_or_path": base_model,
        "revision": revision,
        "r": rank,
        "lora_alpha": _as_whole_number(alpha),
        "use_rslora": rslora,
        "rank_pattern": {name: shapes[name].rank for name in names if shapes[name].rank != rank},
        "alpha_pattern": {name: _as_whole_number(shapes[name].alpha) for name in names if shapes[name].alpha != alpha},
        "target_modules": sorted(shapes),
        "lora_dropout": 0.0,
        "bias": "none",
        **(variant or {}),
        "fan_in_fan_out": fan_in_fan_out,
        "ensure_weight_tying": tied,
        "init_lora_weights": True,
        "inference_mode": True,
        "layers_to_transform": None,
        "modules_to_save": sorted(saved) or None,
    }


def is_fused(module: str) -> bool:
    """Whether a module is one expert's projection in a mixture, which PEFT fuses with the others on transformers 5."""
    return _PER_EXPERT.search(module) is not None


def _as_whole_number(alpha: float) -> float:
    return int(alpha) if float(alpha).is_integer() else alpha


def most_common(values: Iterable[Any], *, default: Any) -> Any:
    """The most frequent value, or the smallest of them in a tie; `default` if there are no values."""
    counted = Counter(values)
    return min(counted, key=lambda value: (-counted[value], value)) if counted else default
