"""Arithmetic on dense ΔW: keeping the largest entries, dropping at random, electing signs; SLERP's weights.

What `methods` is made of. Knows arrays, nothing of adapters.

TIES: Yadav et al. 2023, arXiv:2306.01708. DARE: Yu et al. 2024, arXiv:2311.03099. SLERP: Shoemake 1985.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from adapterswap.methods.method import Settings

__all__ = ["drop", "drop_mask", "keep_largest", "slerp_share", "slerp_weights", "sum_agreeing", "weighted_sum"]

_ALIKE = 0.9995  # |cosine| from which two directions count as one

Delta = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def weighted_sum(deltas: Mapping[str, Delta], weights: Mapping[str, float], settings: Settings) -> Delta:
    """λ·Σ w_i·ΔW_i, divided by Σ w_i where weights are normalised."""
    total = _add([np.float32(weights[name]) * delta for name, delta in deltas.items()])
    return _scaled(total, np.asarray(sum(weights[name] for name in deltas), np.float32), settings)


def sum_agreeing(deltas: Mapping[str, Delta], weights: Mapping[str, float], settings: Settings) -> Delta:
    """TIES' election: entry by entry, λ times the sum of what agrees with the sign of Σ w_i·ΔW_i.

    Divided by the sum of the agreeing weights where weights are normalised.
    """
    weighted = {name: np.float32(weights[name]) * delta for name, delta in deltas.items()}
    total = _add(list(weighted.values()))
    positive = total >= 0
    merged, divisor = np.zeros_like(total), np.zeros_like(total)
    for name, delta in weighted.items():
        agrees = np.where(positive, delta > 0, delta < 0)
        merged += np.where(agrees, delta, 0)
        divisor += np.where(agrees, np.float32(weights[name]), 0)
    return _scaled(merged, divisor, settings)


def _scaled(merged: Delta, divisor: Delta, settings: Settings) -> Delta:
    if settings.normalize:
        merged = np.divide(merged, np.where(np.abs(divisor) < 1e-8, np.float32(1), divisor), dtype=np.float32)
    scale: float = settings["scale"]
    return np.multiply(merged, scale, dtype=np.float32)


def _add(deltas: Sequence[Delta]) -> Delta:
    total = np.zeros_like(deltas[0])
    for delta in deltas:
        total += delta
    return total


def drop(deltas: Mapping[str, Delta], settings: Settings) -> dict[str, Delta]:
    """DARE's drop and rescale: each entry is kept with the probability `density`, and then divided by it."""
    return {
        name: np.where(
            drop_mask(delta.shape, settings["density"], seed=settings["seed"], expert=name, module=settings.module),
            delta / np.float32(settings["density"]),
            0,
        )
        for name, delta in deltas.items()
    }


def keep_largest(delta: Delta, density: float) -> Delta:
    """ΔW with its `density` share of entries of largest absolute value (at least one), and zeros for the others."""
    if density >= 1:
        return delta
    count = max(1, int(density * delta.size))
    places = np.argpartition(np.abs(delta), delta.size - count, axis=None)[delta.size - count :]
    kept = np.zeros(delta.size, delta.dtype)
    kept[places] = delta.reshape(-1)[places]
    return kept.reshape(delta.shape)


def drop_mask(shape: tuple[int, ...], density: float, *, seed: int, expert: str, module: str) -> Mask:
    """DARE's random choice of what is kept: independent for each entry, with probability `density`.

    Drawn from the seed, the expert's name (that of an average of several is one name) and the module's, so that it
    depends on no order of computation.
    """
    digest = hashlib.sha256(f"{seed}\0{expert}\0{module}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).random(shape, np.float32) < density


def slerp_share(weights: Sequence[float]) -> float:
    """t, the second side's share of the weights of a SLERP."""
    first, second = weights
    return second / (first + second)


def slerp_weights(t: float, product: float, square: float, other_square: float) -> tuple[float, float]:
    """SLERP's weights sin((1-t)Ω)/sin Ω and sin(tΩ)/sin Ω of two ΔW, X and Y, with Ω the angle between them.

    Where they point (almost) the same or opposite ways, or one is zero, the straight line's: 1-t and t.

    Args:
        t: the share of the way from X to Y.
        product, square, other_square: ⟨X, Y⟩, ‖X‖² and ‖Y‖².
    """
    norms = math.sqrt(square * other_square)
    cosine = product / norms if norms else 1.0
    if abs(cosine) > _ALIKE:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
