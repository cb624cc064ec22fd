"""Methods that keep some entries of each ΔW: TIES, DARE, DELLA, Breadcrumbs, pruning, SCE, NearSwap, MagMax, RAM.

They act on the ΔW of a module, as in the papers, and never on A and B separately. Parameters are named as in mergekit
(density, weight, normalize, lambda).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from adapterswap.core.methods.method import DENSITY, SCALE, SEED, MethodSettings, NonlinearMethod, Parameter

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

if TYPE_CHECKING:
    Deltas = Mapping[str, npt.NDArray[np.float32]]
    Delta = npt.NDArray[np.float32]


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
        from adapterswap.core.methods.dense import sum_agreeing, weighted_sum

        kept = self.kept(deltas, settings)
        if self.elects:
            return sum_agreeing(kept, weights, settings)
        return weighted_sum(kept, weights, settings)


class _Largest(_Sparse):
    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.core.methods.dense import keep_largest

        return {name: keep_largest(delta, settings["density"]) for name, delta in deltas.items()}


class _Dropped(_Sparse):
    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.core.methods.dense import drop

        return drop(deltas, settings)


class _Between(_Sparse):
    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.core.methods.dense import keep_between

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
                f"`density` is {density:g} and `epsilon` {epsilon:g}, but their difference and their sum must be "
                "between 0 and 1"
            )

    def kept(self, deltas: Deltas, settings: MethodSettings) -> Deltas:
        from adapterswap.core.methods.dense import drop_mask, keep_ranked, ranked_chances

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


if TYPE_CHECKING:
    Arrays = Mapping[str, npt.NDArray[np.float32]]
    Array = npt.NDArray[np.float32]


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

        # Only the entries that vary most over the experts
        if settings["select_topk"] < 1:
            variance = stacked.var(axis=0, dtype=np.float64).reshape(-1)
            mask = np.zeros(variance.size, np.bool_)
            count = int(np.count_nonzero(variance) * settings["select_topk"])
            if count:
                mask[np.argpartition(variance, variance.size - count)[variance.size - count :]] = True
            stacked = np.where(mask.reshape(stacked.shape[1:]), stacked, np.float32(0))

        # The experts' shares η, by their energy
        energy = np.square(stacked, dtype=np.float64).reshape(len(stacked), -1).sum(axis=1)
        if energy.sum() == 0:
            return np.zeros_like(stacked[0])
        shares = (energy / energy.sum()).reshape(-1, *[1] * (stacked.ndim - 1))

        # The average over those with the elected sign
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

    width = first_weight.shape[-1] if first_weight.ndim else 1
    first_rows, second_rows = first_weight.reshape(-1, width), second_weight.reshape(-1, width)
    importance = np.empty_like(first_rows)
    step = max(1, _BLOCK // width)
    for start in range(0, len(importance), step):
        first = first_rows[start : start + step].astype(np.float64)
        second = second_rows[start : start + step].astype(np.float64)
        q, p = _softmax(first) + 1e-8, _softmax(second) + 1e-8
        importance[start : start + step] = np.abs(second - first) * np.sum(p * np.log(p / q), axis=1, keepdims=True)
    return importance


def _softmax(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    import numpy as np

    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


THRESHOLD = Parameter(
    "threshold", "smallest change that counts: entries of ΔW up to it are dropped", 1e-5, ge=0, has_option=True
)
BOOST = Parameter("boost", "how much entries that one expert alone changes are scaled up", 0.1, ge=0)
BOOST_LIMIT = Parameter("boost_limit", "largest ratio of shared to own entries that scales them up", 0.2, ge=0)


class MagMax(NonlinearMethod):
    name = "magmax"
    title = "MagMax (Marczak et al. 2024)"
    reference = "Marczak et al., ECCV 2024, arXiv:2407.06322"
    formula = "λ times, entry by entry, the ΔW_i of largest absolute value; of equals the last"
    parameters = (SCALE,)
    weighted = False

    def combine(self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings) -> Array:
        import numpy as np

        merged, *others = deltas.values()
        for delta in others:
            merged = np.where(np.abs(delta) >= np.abs(merged), delta, merged)
        return np.asarray(settings["scale"] * merged, np.float32)


class Ram(NonlinearMethod):
    name = "ram"
    title = "Reinforced Agent Merging (RAM)"
    reference = "Yuan et al. 2026, arXiv:2601.13572"
    formula = "each entry is the average over the experts that change it, |ΔW_i| > threshold: one expert's is kept"
    notes = "mergekit's epsilon is `threshold` here."
    parameters: ClassVar[tuple[Parameter, ...]] = (THRESHOLD,)
    weighted = False

    def combine(self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings) -> Array:
        import numpy as np

        changed = {name: np.abs(delta) > settings["threshold"] for name, delta in deltas.items()}
        count = sum(mask.astype(np.int32) for mask in changed.values())
        total = np.zeros_like(next(iter(deltas.values())))
        for name, delta in deltas.items():
            alone = changed[name] & (count == 1)
            shared = int(np.count_nonzero(changed[name] & (count > 1)))
            factor = np.float32(self.boosted(shared, int(np.count_nonzero(alone)), settings))
            total += np.where(changed[name], np.where(alone, factor * delta, delta), np.float32(0))
        return np.asarray(total / np.maximum(count, 1), np.float32)

    def boosted(self, shared: int, alone: int, settings: MethodSettings) -> float:
        """The factor of entries that one expert alone changes, from how many it shares and how many it does not."""
        return 1.0


class RamPlus(Ram):
    name = "ramplus_tl"
    title = "RAM+, within each module"
    formula = "RAM, with an expert's own entries times 1 + boost·min(boost_limit, its shared entries / its own)"
    notes = "mergekit's epsilon, r and alpha are `threshold`, `boost` and `boost_limit` here."
    parameters: ClassVar[tuple[Parameter, ...]] = (THRESHOLD, BOOST, BOOST_LIMIT)

    def boosted(self, shared: int, alone: int, settings: MethodSettings) -> float:
        ratio: float = min(shared / max(alone, 1), settings["boost_limit"])
        return 1.0 + float(settings["boost"]) * ratio
