"""Methods that weight the experts entry by entry: SCE, NearSwap, Arcee Fusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from adapterswap.methods.method import MethodSettings, NonlinearMethod, Parameter

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[np.float32]]
    Array = npt.NDArray[np.float32]

__all__ = ["ArceeFusion", "NearSwap", "Sce"]

_BLOCK = 2**18  # entries to compute in float64 at a time

SELECT_TOPK = Parameter("select_topk", "share of entries to keep, those that vary most over experts", 1.0, ge=0, le=1)


class Sce(NonlinearMethod):
    name = "sce"
    title = "SCE (Wan et al. 2024)"
    reference = "Wan et al. 2024 (FuseChat), arXiv:2408.07990"
    formula = "of the entries that vary most, Σ η_i·ΔW_i/Σ η_i over those with the elected sign; η_i = ‖ΔW_i‖²/Σ‖ΔW‖²"
    notes = (
        "mergekit weights all experts equally if the mean squares of ΔW sum to less than 1e-6; here η always applies."
    )
    parameters = (SELECT_TOPK,)
    weighted = False
    counts_absent = True

    def combine(self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings) -> Array:
        import numpy as np

        stacked = np.stack(list(deltas.values()))
        if settings["select_topk"] < 1:
            variance = stacked.var(axis=0, dtype=np.float64).reshape(-1)
            mask = np.zeros(variance.size, np.bool_)
            if count := int(np.count_nonzero(variance) * settings["select_topk"]):
                mask[np.argpartition(variance, variance.size - count)[variance.size - count :]] = True
            stacked = np.where(mask.reshape(stacked.shape[1:]), stacked, np.float32(0))
        energy = np.square(stacked, dtype=np.float64).reshape(len(stacked), -1).sum(axis=1)
        if energy.sum() == 0:
            return np.zeros_like(stacked[0])
        shares = (energy / energy.sum()).reshape(-1, *[1] * (stacked.ndim - 1))
        positive = stacked.sum(axis=0) >= 0
        agreeing = np.where(np.where(positive, stacked > 0, stacked < 0), shares, 0)
        divisor = np.maximum(agreeing.sum(axis=0), 1e-6)
        return np.asarray((stacked * agreeing).sum(axis=0) / divisor, np.float32)


NEAR = Parameter("t", "largest distance that an entry may move", 0.001, gt=0)


class NearSwap(NonlinearMethod):
    name = "nearswap"
    title = "NearSwap"
    reference = "alchemonaut 2024, https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001"
    formula = "W_1 + s·(W_2 - W_1), with s = min(1, t/|W_1 - W_2|) entry by entry; the base's part of both cancels"
    notes = "mergekit's base_model is the first expert here (the task's), and its model the second."
    parameters = (NEAR,)
    weighted = False
    sides = (2, 2)
    counts_absent = True

    def combine(self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings) -> Array:
        import numpy as np

        first, second = deltas.values()
        apart = np.maximum(np.abs(first - second), np.float32(1e-6))  # as in mergekit
        share = np.minimum(np.float32(settings["t"]) / apart, np.float32(1))
        return np.asarray(share * second + (1 - share) * first, np.float32)


class ArceeFusion(NonlinearMethod):
    name = "arcee_fusion"
    title = "Arcee Fusion"
    reference = "Arcee AI 2025, https://github.com/arcee-ai/mergekit"
    formula = "W_1, and W_2 where |W_2 - W_1|·KL(softmax of W_2's row, of W_1's) is at least median + 1.5·(Q3 - Q1)"
    notes = (
        "mergekit's base_model is the first expert here (the task's), and its model the second. Quartiles are computed "
        "over all entries; mergekit samples tensors of more than a million."
    )
    acts_on: ClassVar[Literal["delta", "weights"]] = "weights"
    weighted = False
    sides = (2, 2)

    def combine(self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings) -> Array:
        import numpy as np

        first, second = deltas.values()
        importance = _importance(first, second).reshape(-1)
        places = [int(share * (importance.size - 1)) for share in (0.25, 0.5, 0.75)]
        low, middle, high = np.partition(importance, places)[places]
        takes_second = (importance >= middle + 1.5 * (high - low)).reshape(first.shape)
        return np.asarray(np.where(takes_second, second, first), np.float32)


def _importance(first_weight: Array, second_weight: Array) -> Array:
    """|W_2 - W_1|·KL of the rows' softmaxes; in float64, because the two differ by little, and a few rows at a time."""
    import numpy as np

    rows = [
        np.atleast_1d(array).reshape(-1, array.shape[-1] if array.ndim else 1)
        for array in (first_weight, second_weight)
    ]
    importance = np.empty_like(rows[0])
    step = max(1, _BLOCK // importance.shape[1])
    for start in range(0, len(importance), step):
        first, second = (part[start : start + step].astype(np.float64) for part in rows)
        q, p = (_softmax(part) + 1e-8 for part in (first, second))
        importance[start : start + step] = np.abs(second - first) * np.sum(p * np.log(p / q), axis=1, keepdims=True)
    return importance


def _softmax(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    import numpy as np

    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
