"""Arithmetic on dense ΔW: keeping the largest entries, dropping at random, electing signs, inner products."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from adapterswap.core.methods.method import MethodSettings

_BLOCK = 2**20  # entries per block

Delta = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def weighted_sum(deltas: Mapping[str, Delta], weights: Mapping[str, float], settings: MethodSettings) -> Delta:
    """λ·Σ w_i·ΔW_i, divided by Σ w_i if weights are normalised."""
    total = _add([np.float32(weights[name]) * delta for name, delta in deltas.items()])
    divisor = np.asarray(sum(weights[name] for name in deltas), np.float32)
    return _scaled(total, divisor, settings)


def sum_agreeing(deltas: Mapping[str, Delta], weights: Mapping[str, float], settings: MethodSettings) -> Delta:
    """TIES' election of signs: λ times the sum, entry by entry, of those w_i·ΔW_i with the sign of Σ w_i·ΔW_i.

    Divided by the sum of their weights if weights are normalised.
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


def _scaled(merged: Delta, divisor: Delta, settings: MethodSettings) -> Delta:
    """λ·merged, divided by the weights that entered if they are normalised; where these are 0, by 1."""
    if settings.normalize:
        merged = np.divide(merged, np.where(np.abs(divisor) < 1e-8, np.float32(1), divisor), dtype=np.float32)
    scale: float = settings["scale"]
    return np.multiply(merged, scale, dtype=np.float32)


def _add(deltas: Sequence[Delta]) -> Delta:
    total = np.zeros_like(deltas[0])
    for delta in deltas:
        total += delta
    return total


def drop(deltas: Mapping[str, Delta], settings: MethodSettings) -> dict[str, Delta]:
    """DARE's drop and rescale: each entry is kept with probability `density` and divided by it."""
    density, seed = settings["density"], settings["seed"]
    dropped = {}
    for name, delta in deltas.items():
        kept = drop_mask(delta.shape, density, seed=seed, expert=name, module=settings.module)
        dropped[name] = np.where(kept, delta / np.float32(density), 0)
    return dropped


def keep_largest(delta: Delta, density: float) -> Delta:
    """ΔW with the `density` share of its entries of largest absolute value (at least one), and zeros elsewhere."""
    if density >= 1:
        return delta
    count = max(1, int(density * delta.size))
    places = np.argpartition(np.abs(delta), delta.size - count, axis=None)[delta.size - count :]
    sparse = np.zeros(delta.size, delta.dtype)
    sparse[places] = delta.reshape(-1)[places]
    return sparse.reshape(delta.shape)


def keep_between(delta: Delta, density: float, gamma: float) -> Delta:
    """Breadcrumbs' masks: drop the `gamma` share of largest entries, keep the `density` share of the largest ones left.

    If the two shares add up to more than 1, fewer of the largest are dropped.
    """
    if density >= 1:
        return delta
    size = delta.size
    count = int(density * size)
    start = max(0, size - count - int(gamma * size))
    cuts = sorted({place for place in (start, start + count) if place < size})
    ascending = np.arange(size)
    if cuts:
        ascending = np.argpartition(np.abs(delta), cuts, axis=None)
    places = ascending[start : start + count]
    sparse = np.zeros(size, delta.dtype)
    sparse[places] = delta.reshape(-1)[places]
    return sparse.reshape(delta.shape)


def ranked_chances(delta: Delta, density: float, epsilon: float) -> Delta:
    """DELLA's probability of keeping each entry: density - ε for the smallest of its row, density + ε for the largest,
    and evenly by rank between them. Rows run along the last axis."""
    width = delta.shape[-1] if delta.ndim else 1
    rows = np.abs(delta).reshape(-1, width)
    ranks = np.empty(rows.shape, np.float32)
    np.put_along_axis(ranks, np.argsort(rows, axis=1, kind="stable"), np.arange(width, dtype=np.float32)[None], axis=1)

    # From 0 for the smallest of a row to 1 for its largest
    share = np.full_like(ranks, 0.5)
    if width > 1:
        share = ranks / np.float32(width - 1)
    return np.asarray(np.float32(density - epsilon) + share * np.float32(2 * epsilon), np.float32).reshape(delta.shape)


def keep_ranked(delta: Delta, chances: Delta, drawn: Mask, rescale: str) -> Delta:
    """DELLA's drop and rescale, where `drawn` marks the entries to keep.

    `l1` restores the sum of absolute values of ΔW; `probability` divides each entry by its chance of being kept.
    """
    sparse = np.where(drawn, delta, np.float32(0))
    if rescale == "probability":
        return np.asarray(sparse / chances, np.float32)
    if rescale == "l1":
        before = float(np.abs(delta).sum(dtype=np.float64))
        after = float(np.abs(sparse).sum(dtype=np.float64))
        if after > 0:
            sparse *= np.float32(before / after)
    return sparse


def drop_mask(shape: tuple[int, ...], density: float | Delta, *, seed: int, expert: str, module: str) -> Mask:
    """A random mask of entries to keep: independent for each entry, with probability `density`.

    It is drawn from the seed, the expert's name (an average of several has one name) and the module's name, so it does
    not depend on the order of computation.
    """
    digest = hashlib.sha256(f"{seed}\0{expert}\0{module}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).random(shape, np.float32) < density


def gram_of(arrays: Sequence[Delta]) -> npt.NDArray[np.float64]:
    """⟨X_i, X_j⟩ of all pairs in float64, computed in blocks."""
    flat = [array.reshape(-1) for array in arrays]
    gram = np.zeros((len(flat), len(flat)))
    for start in range(0, flat[0].size, _BLOCK):
        block = np.stack([part[start : start + _BLOCK] for part in flat]).astype(np.float64)
        gram += block @ block.T
    return gram


def summed(arrays: Sequence[Delta], coefficients: Sequence[float]) -> Delta:
    """Σ c_i·X_i in float32."""
    total = np.zeros_like(arrays[0])
    for coefficient, array in zip(coefficients, arrays, strict=True):
        total += np.float32(coefficient) * array
    return total
