"""TIES, DARE, DELLA, Breadcrumbs and magnitude pruning: methods that keep a share of each ΔW.

They act on the ΔW of a module, as in the papers, and never on A and B separately. Parameters are named as in mergekit
(density, weight, normalize, lambda).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from adapterswap.methods.method import DENSITY, SCALE, SEED, MethodSettings, NonlinearMethod, Parameter

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Deltas = Mapping[str, npt.NDArray[np.float32]]
    Delta = npt.NDArray[np.float32]

__all__ = ["Breadcrumbs", "BreadcrumbsTies", "DareLinear", "DareTies", "Della", "DellaLinear", "MagnitudePrune", "Ties"]

EPSILON = Parameter("epsilon", "how far the chance of being kept goes below and above the density", 0.15, ge=0, lt=1)
RESCALE = Parameter(
    "rescale",
    "rescale kept entries to the L1 norm of ΔW (l1), or divide each by its chance as in the paper",
    "l1",
    choices=("l1", "probability", "none"),
)
GAMMA = Parameter("gamma", "share of the largest entries to drop", 0.01, ge=0, lt=1)


class _Sparse(NonlinearMethod):
    """Drop entries of each ΔW, then add up the rest, with TIES' election of signs if `elects`."""

    elects: ClassVar[bool] = False

    @abstractmethod
    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        """Each ΔW with zeros for the entries that are dropped."""

    def combine(self, deltas: Deltas, weights: Mapping[str, float], settings: MethodSettings) -> Delta:
        from adapterswap.methods.dense import sum_agreeing, weighted_sum

        return (sum_agreeing if self.elects else weighted_sum)(self.kept(deltas, settings), weights, settings)


class _Largest(_Sparse):
    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.methods.dense import keep_largest

        return {name: keep_largest(delta, settings["density"]) for name, delta in deltas.items()}


class _Dropped(_Sparse):
    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.methods.dense import drop

        return drop(deltas, settings)


class _Between(_Sparse):
    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.methods.dense import keep_between

        return {name: keep_between(delta, settings["density"], settings["gamma"]) for name, delta in deltas.items()}


class Ties(_Largest):
    elects = True
    name = "ties"
    title = "TIES merging (Yadav et al. 2023)"
    reference = "Yadav et al., NeurIPS 2023, arXiv:2306.01708"
    formula = "each ΔW keeps its largest entries; those that agree with the sign of Σ w_i·ΔW_i are averaged; times λ"
    parameters = (SCALE, DENSITY)
    published: ClassVar[Mapping[str, Any]] = {"density": 0.2}  # the top 20 %, and λ = 1
    normalizes = True


class DareLinear(_Dropped):
    name = "dare_linear"
    title = "DARE (Yu et al. 2024)"
    reference = "Yu et al., ICML 2024, arXiv:2311.03099"
    formula = "entries are dropped at random, the others divided by the density; then λ·Σ w_i·ΔW_i"
    notes = "Divides by the density as in the paper; mergekit rescales to the L1 norm of the whole ΔW."
    parameters = (SCALE, DENSITY, SEED)


class DareTies(_Dropped):
    elects = True
    name = "dare_ties"
    title = "DARE with TIES' election of signs (Yu et al. 2024)"
    reference = "Yu et al., ICML 2024, arXiv:2311.03099"
    formula = "entries are dropped at random, the others divided by the density; then TIES' election of signs; times λ"
    notes = DareLinear.notes
    parameters = (SCALE, DENSITY, SEED)


class MagnitudePrune(_Largest):
    name = "magnitude_prune"
    title = "magnitude pruning"
    reference = "Han et al., NeurIPS 2015, arXiv:1506.02626"
    formula = "each ΔW keeps its largest entries; then λ·Σ w_i·ΔW_i"
    parameters = (SCALE, DENSITY)


class _DellaBase(_Sparse):
    reference = "Deep et al. 2024, arXiv:2406.11617"
    notes = (
        "An entry's chance of being kept grows evenly with its rank in its row, from density - ε to density + ε. By "
        "default kept entries are rescaled to the L1 norm, as in mergekit; the paper divides by the chance "
        "(`rescale: probability`)."
    )
    parameters = (SCALE, DENSITY, EPSILON, RESCALE, SEED)

    def check(self, values: Mapping[str, Any]) -> None:
        density, epsilon = values["density"], values["epsilon"]
        if density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            raise ValueError(
                f"density is {density:g} and epsilon {epsilon:g}, but density - epsilon and density + epsilon must be "
                "between 0 and 1"
            )

    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.methods.dense import drop_mask, keep_ranked, ranked_chances

        if settings["density"] >= 1:
            return deltas
        kept = {}
        for name, delta in deltas.items():
            chances = ranked_chances(delta, settings["density"], settings["epsilon"])
            drawn = drop_mask(delta.shape, chances, seed=settings["seed"], expert=name, module=settings.module)
            kept[name] = keep_ranked(delta, chances, drawn, settings["rescale"])
        return kept


class Della(_DellaBase):
    elects = True
    name = "della"
    title = "DELLA (Deep et al. 2024)"
    formula = (
        "entries are dropped at random, small ones of a row more often, and rescaled; then TIES' election; times λ"
    )
    normalizes = True


class DellaLinear(_DellaBase):
    name = "della_linear"
    title = "DELLA without an election of signs (Deep et al. 2024)"
    formula = "entries are dropped at random, small ones of a row more often, and rescaled; then λ·Σ w_i·ΔW_i"


class Breadcrumbs(_Between):
    name = "breadcrumbs"
    title = "Model Breadcrumbs (Davari & Belilovsky 2024)"
    notes = "As in mergekit, fewer of the largest are dropped if gamma and the density add up to more than 1."
    reference = "Davari & Belilovsky, ECCV 2024, arXiv:2312.06795"
    formula = "each ΔW loses its γ share of largest entries and keeps the density share below them; then λ·Σ w_i·ΔW_i"
    parameters = (SCALE, DENSITY, GAMMA)


class BreadcrumbsTies(_Between):
    elects = True
    name = "breadcrumbs_ties"
    title = "Model Breadcrumbs with TIES' election of signs"
    notes = Breadcrumbs.notes
    reference = "Davari & Belilovsky, ECCV 2024, arXiv:2312.06795"
    formula = (
        "each ΔW loses its γ share of largest entries, keeps the density share below them; TIES' election; times λ"
    )
    parameters = (SCALE, DENSITY, GAMMA)
