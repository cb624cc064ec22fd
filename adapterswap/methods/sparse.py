"""TIES, DARE and magnitude pruning: methods that keep a share of each ΔW.

They act on the ΔW of a module, never on A and B apart: pruning the factors is pruning nothing that the papers speak of.
Parameters are named as in mergekit (density, weight, normalize, lambda).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from adapterswap.methods.method import DENSITY, SCALE, SEED, NonlinearMethod, Settings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Deltas = Mapping[str, npt.NDArray[np.float32]]
    Delta = npt.NDArray[np.float32]

__all__ = ["DareLinear", "DareTies", "MagnitudePrune", "Ties"]


class Ties(NonlinearMethod):
    name = "ties"
    title = "TIES merging (Yadav et al. 2023)"
    reference = "Yadav et al., NeurIPS 2023, arXiv:2306.01708"
    formula = "each ΔW keeps its largest entries; those that agree with the sign of Σ w_i·ΔW_i are averaged; times λ"
    parameters = (SCALE, DENSITY)
    published: ClassVar[Mapping[str, Any]] = {"density": 0.2}  # the top 20 %, and λ = 1
    normalizes = True

    def combine(self, deltas: Deltas, weights: Mapping[str, float], settings: Settings) -> Delta:
        from adapterswap.methods.dense import keep_largest, sum_agreeing

        kept = {name: keep_largest(delta, settings["density"]) for name, delta in deltas.items()}
        return sum_agreeing(kept, weights, settings)


class DareLinear(NonlinearMethod):
    name = "dare_linear"
    title = "DARE (Yu et al. 2024)"
    reference = "Yu et al., ICML 2024, arXiv:2311.03099"
    formula = "entries are dropped at random, the others divided by the density; then λ·Σ w_i·ΔW_i"
    parameters = (SCALE, DENSITY, SEED)

    def combine(self, deltas: Deltas, weights: Mapping[str, float], settings: Settings) -> Delta:
        from adapterswap.methods.dense import drop, weighted_sum

        return weighted_sum(drop(deltas, settings), weights, settings)


class DareTies(NonlinearMethod):
    name = "dare_ties"
    title = "DARE with TIES' election of signs (Yu et al. 2024)"
    reference = "Yu et al., ICML 2024, arXiv:2311.03099"
    formula = "entries are dropped at random, the others divided by the density; then TIES' election of signs; times λ"
    parameters = (SCALE, DENSITY, SEED)

    def combine(self, deltas: Deltas, weights: Mapping[str, float], settings: Settings) -> Delta:
        from adapterswap.methods.dense import drop, sum_agreeing

        return sum_agreeing(drop(deltas, settings), weights, settings)


class MagnitudePrune(NonlinearMethod):
    name = "magnitude_prune"
    title = "magnitude pruning"
    reference = "Han et al., NeurIPS 2015, arXiv:1506.02626"
    formula = "each ΔW keeps its largest entries; then λ·Σ w_i·ΔW_i"
    parameters = (SCALE, DENSITY)

    def combine(self, deltas: Deltas, weights: Mapping[str, float], settings: Settings) -> Delta:
        from adapterswap.methods.dense import keep_largest, weighted_sum

        kept = {name: keep_largest(delta, settings["density"]) for name, delta in deltas.items()}
        return weighted_sum(kept, weights, settings)
