"""A merge method in one file: entry by entry, the median of the experts' ΔW, pulled towards their mean."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from adapterswap.core.methods.method import SCALE, MethodSettings, NonlinearMethod, Parameter

__all__ = ["Median"]


class Median(NonlinearMethod):
    name = "median"
    title = "the median of ΔW"
    reference = "an example of adapterswap"
    formula = "λ·((1 - s)·median ΔW_i + s·mean ΔW_i), entry by entry"
    parameters = (SCALE, Parameter("softness", "share s of the mean", 0.0, ge=0, le=1))
    weighted = False  # all experts count the same
    counts_absent = True  # an expert that does not change a module has ΔW = 0 there

    def combine(
        self, deltas: Mapping[str, npt.NDArray[np.float32]], weights: Mapping[str, float], settings: MethodSettings
    ) -> npt.NDArray[np.float32]:
        stacked = np.stack(list(deltas.values()))
        softness = settings["softness"]
        middle = (1 - softness) * np.median(stacked, axis=0) + softness * stacked.mean(axis=0)
        return np.asarray(settings["scale"] * middle, np.float32)
