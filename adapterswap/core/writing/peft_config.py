"""PEFT's config of a LoRA adapter: ranks, alphas and scales, module by module, and what the adapter is for."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from adapterswap.core.experts.config import scale
from adapterswap.core.experts.keys import LORA
from adapterswap.kit.errors import BaseModelError


class Shape(NamedTuple):
    """An output module's rank, alpha and scale."""

    rank: int
    alpha: float
    scale: float

    @staticmethod
    def of_alpha(rank: int, alpha: float, rslora: bool) -> Shape:
        return Shape(rank, alpha, scale(rank, alpha, rslora))

    @staticmethod
    def of_scale(rank: int, rslora: bool, wanted: float) -> Shape:
        """The shape with the alpha that gives the scale `wanted`, and the exact scale that PEFT computes from it."""
        alpha = wanted * rank
        if rslora:
            alpha = wanted * math.sqrt(rank)

        # PEFT's own configs hold whole numbers, so round alpha if it differs from one only by rounding.
        if round(alpha) and math.isclose(alpha, round(alpha), rel_tol=1e-15):
            alpha = round(alpha)
        return Shape.of_alpha(rank, alpha, rslora)


def check_base_name(base_model: str | None) -> None:
    """Refuse a base whose path cannot be written to an adapter's config, such as one with bytes that are not UTF-8."""
    if base_model is not None and not base_model.isprintable():
        raise BaseModelError(
            f"The path of the base, {base_model}, has characters that adapter_config.json cannot hold",
            "Rename the folder, or pass another path to it (`base_model`), such as a symlink",
            parameter="base_model",
        )


def purpose(
    peft_type: str,
    task_type: str | None,
    auto_mapping: Mapping[str, Any] | None,
    base_model: str | None,
    revision: str | None,
) -> dict[str, Any]:
    """The keys of a config that say what an adapter is for; for the arguments see `AdapterConfig`."""
    check_base_name(base_model)
    content: dict[str, Any] = {"peft_type": peft_type, "task_type": task_type}
    if auto_mapping and task_type is None:
        content["auto_mapping"] = dict(auto_mapping)
    return {**content, "base_model_name_or_path": base_model, "revision": revision}


def adapter_config(
    shapes: Mapping[str, Shape],
    common: tuple[int, float] | None = None,
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
        common: the global rank and alpha, by default the most common; modules with others go into the patterns.
        saved: modules trained in full. For the other arguments see `AdapterConfig`.
        variant: settings for a variant of LoRA in all modules, such as `use_dora`.
    """
    if common is None:
        common = most_common(((shape.rank, shape.alpha) for shape in shapes.values()), default=(1, 1.0))
    rank, alpha = common

    # PEFT matches a pattern after any dot, and the first match wins, so longer names go first.
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name in sorted(shapes, key=lambda name: (-name.count("."), name)):
        if shapes[name].rank != rank:
            ranks[name] = shapes[name].rank
        if shapes[name].alpha != alpha:
            alphas[name] = _as_whole_number(shapes[name].alpha)

    return {
        **purpose(LORA, task_type, auto_mapping, base_model, revision),
        "r": rank,
        "lora_alpha": _as_whole_number(alpha),
        "use_rslora": rslora,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
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


def _as_whole_number(alpha: float) -> float:
    return int(alpha) if float(alpha).is_integer() else alpha


def earliest(versions: Iterable[str]) -> str:
    """The earliest of some versions of PEFT. They are compared as numbers: as text, 0.100 would come before 0.19."""

    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:3]]

    return min(versions, key=numbers)


def most_common(values: Iterable[Any], *, default: Any) -> Any:
    """The most frequent value, or the smallest of them in a tie; `default` if there are no values."""
    counted = Counter(values)
    return min(counted, key=lambda value: (-counted[value], value), default=default)
