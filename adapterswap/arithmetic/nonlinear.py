"""Merging methods that are not linear in ΔW: TIES, DARE and magnitude pruning, on dense task vectors; SLERP's weights.

They act on ΔW of one module, never on A and B apart: pruning A and B is pruning nothing that the method's papers speak
of. Parameters are named as in mergekit (density, weight, normalize, lambda). Knows dense arrays, nothing of adapters.

TIES: Yadav et al. 2023, arXiv:2306.01708. DARE: Yu et al. 2024, arXiv:2311.03099. SLERP: Shoemake 1985.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from adapterswap.planning.allocation import Rule

__all__ = ["drop_mask", "keep_largest", "merge_deltas", "slerp_share", "slerp_weights"]

_ALIKE = 0.9995  # |cosine| from which two directions count as one

Delta = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def merge_deltas(
    rule: Rule, deltas: Sequence[Delta], weights: Sequence[float], masks: Sequence[Mask] | None = None
) -> Delta:
    """Combine the experts' ΔW of one module by the method of `rule`.

    * ties: each ΔW keeps its largest entries; an entry's sign is that of Σ w_i·ΔW_i; the merged entry is the weighted
      sum of the ΔW_i of that sign, divided by their weights' sum where the rule normalises.
    * dare_linear, dare_ties: each ΔW loses the entries that its mask drops, and the others are divided by the density,
      so that the expectation stays; then a weighted sum, or TIES' election of signs.
    * magnitude_prune: each ΔW keeps its largest entries; then a weighted sum.

    The result is multiplied by the rule's lambda.

    Args:
        rule: the method, density, lambda and whether weights are divided by their sum.
        deltas: one array per expert, out×in, of any shape that they share.
        weights: w_i.
        masks: for DARE: what each expert keeps; see `drop_mask`.
    """
    if rule.method in ("dare_linear", "dare_ties"):
        assert masks is not None, "DARE needs masks"
        kept = [np.where(mask, delta / np.float32(rule.density), 0) for delta, mask in zip(deltas, masks, strict=True)]
    else:
        kept = [keep_largest(delta, rule.density) for delta in deltas]
    weighted = [np.float32(w) * delta for w, delta in zip(weights, kept, strict=True)]
    if rule.method in ("ties", "dare_ties"):
        merged, divisor = _elect(weighted, weights)
    else:
        merged, divisor = _add(weighted), np.asarray(sum(weights), np.float32)
    if rule.normalizes:
        merged = np.divide(merged, np.where(np.abs(divisor) < 1e-8, np.float32(1), divisor), dtype=np.float32)
    return np.multiply(merged, rule.lambda_, dtype=np.float32)


def _add(weighted: Sequence[Delta]) -> Delta:
    total = np.zeros_like(weighted[0])
    for delta in weighted:
        total += delta
    return total


def _elect(weighted: Sequence[Delta], weights: Sequence[float]) -> tuple[Delta, Delta]:
    """TIES' sign election: the sum of what agrees with the sign of the whole, and the sum of the agreeing weights."""
    positive = _add(weighted) >= 0
    merged = np.zeros_like(weighted[0])
    divisor = np.zeros_like(weighted[0])
    for delta, weight in zip(weighted, weights, strict=True):
        agrees = np.where(positive, delta > 0, delta < 0)
        merged += np.where(agrees, delta, 0)
        divisor += np.where(agrees, np.float32(weight), 0)
    return merged, divisor


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


def slerp_share(rule: Rule) -> float:
    """t, the second side's share of the weights of a SLERP."""
    first, second = (rule.blend or {}).values()
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
