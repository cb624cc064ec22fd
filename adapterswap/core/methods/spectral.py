"""Methods on singular values and aligned spaces: TSV-Merge, Iso-C, Iso-CTS, CART, KnOTS, Core Space, WUDI-Merging.

LoRA's ΔW have few directions, which together span the joint space of the experts: ΔW_i = U·M_i·Vᵀ with one U (out×p),
one V (in×q) and cores M_i (p×q). The methods combine the cores, so the rank of the result is at most min(p, q), and an
adapter can hold it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from adapterswap.core.methods.method import LARGEST, SCALE, Method, MethodSettings, NonlinearMethod, Parameter
from adapterswap.core.methods.sparse import DareTies, Ties
from adapterswap.kit.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from adapterswap.core.changes.joint import Joint
    from adapterswap.core.methods.method import Pair, Pairs

    Array = npt.NDArray[np.float32]
    Core = npt.NDArray[np.float64]
    Cores = Mapping[str, Core]


# Directions below this share of the largest singular value count as none: for ΔW, which may be rounded to float32, and
# for factors.
_NONE, _NONE_OF_FACTORS = 1e-6, 1e-10


class CoreMethod(Method, ABC):
    """A method on the joint space of the experts, in which its result lies too."""

    linear = False
    on_cores = True
    counts_absent = True

    def exact_in_adapters(self, values: Mapping[str, Any]) -> bool:
        return True

    def combine(self, deltas: Mapping[str, Array], weights: Mapping[str, float], settings: MethodSettings) -> Array:
        """The merged ΔW from dense ones. Stored tensors with more than two axes are merged matrix by matrix.

        Vectors have no singular values, so λ times their weighted mean is taken, as in the authors' code.
        """
        import numpy as np

        shape = next(iter(deltas.values())).shape
        if len(shape) < 2:
            total = sum(weights[name] for name in deltas)
            mean = sum(weights[name] / total * delta.astype(np.float64) for name, delta in deltas.items())
            return np.asarray(settings.values.get("scale", 1) * mean, np.float32)

        merged = np.empty(shape, np.float32)
        for place in np.ndindex(*shape[:-2]):
            matrices = {name: delta[place].astype(np.float64) for name, delta in deltas.items()}
            merged[place] = self._combine_dense(matrices, weights, settings)
        return merged

    def _combine_dense(self, deltas: Cores, weights: Mapping[str, float], settings: MethodSettings) -> Core:
        import numpy as np

        left = _directions(np.concatenate(list(deltas.values()), axis=1))
        right = _directions(np.concatenate([delta.T for delta in deltas.values()], axis=1))
        cores = {name: left.T @ delta @ right for name, delta in deltas.items()}
        shape = (len(left), len(right))
        return np.asarray(left @ self._core(cores, shape, weights, settings) @ right.T, np.float64)

    def combine_factors(self, pairs: Pairs, weights: Mapping[str, float], settings: MethodSettings) -> Pair:
        """The factors B (out×k) and A (k×in) of the merged ΔW, from the factors of each side. No dense ΔW is formed.

        Args:
            pairs: (B, A) by side, without sides that do not change the module.
            weights: w_i of all sides.
            settings: see `MethodSettings`.
        """
        joint, cores = _joint(pairs, weights)
        merged = joint.factors(self._core(cores, joint.shape, weights, settings))
        return merged.b, merged.a

    def _core(
        self, cores: Cores, shape: tuple[int, int], weights: Mapping[str, float], settings: MethodSettings
    ) -> Core:
        import numpy as np

        size = next(iter(cores.values())).shape
        if not all(size):  # no expert changes anything
            return np.zeros(size)
        return self.combine_cores(cores, shape, weights, settings)

    @abstractmethod
    def combine_cores(
        self, cores: Cores, shape: tuple[int, int], weights: Mapping[str, float], settings: MethodSettings
    ) -> Core:
        """The merged core, λ included.

        Args:
            cores: the core of each side, p×q, float64.
            shape: the shape of ΔW, (out, in).
            weights: w_i of the sides.
            settings: see `MethodSettings`.
        """


def _directions(matrix: Core, none: float = _NONE) -> Core:
    """An orthonormal basis of the columns, by descending singular values, without those that are only rounding."""
    import numpy as np

    u, sigma, _ = np.linalg.svd(matrix, full_matrices=False)
    least = none * sigma.max(initial=0)
    return np.asarray(u[:, sigma > least], np.float64)


def _joint(pairs: Pairs, weights: Mapping[str, float]) -> tuple[Joint, Cores]:
    """The joint space of the sides, and the core of each; the core is zero for a side that changes nothing."""
    import numpy as np

    from adapterswap.core.changes.factors import Factors
    from adapterswap.core.changes.joint import Joint

    joint = Joint([Factors(a, b) for b, a in pairs.values()])
    cores = {side: joint.core_of(index) for index, side in enumerate(pairs)}
    zero = np.zeros_like(next(iter(cores.values())))
    return joint, {side: cores.get(side, zero) for side in weights}


def _svd(matrix: Core, count: int, cores: Cores) -> tuple[Core, Core, Core]:
    """The first singular vectors and values, without values that are only rounding relative to the experts' norms."""
    import numpy as np

    u, sigma, vt = np.linalg.svd(matrix, full_matrices=False)
    largest = max(float(np.linalg.norm(core)) for core in cores.values())
    rank = min(count, int(np.sum(sigma > _NONE * largest)))
    return u[:, :rank], sigma[:rank], vt[:rank]


def _orthogonal(columns: Core) -> Core:
    """The nearest matrix with orthonormal columns (the polar factor), or nearly so if they are dependent."""
    import numpy as np

    u, sigma, vt = np.linalg.svd(columns, full_matrices=False)
    nonzero = sigma > _NONE * sigma.max(initial=0)
    return np.asarray(u[:, nonzero] @ vt[nonzero], np.float64)


class Tsv(CoreMethod):
    name = "tsv"
    title = "TSV-Merge (Gargiulo et al. 2025)"
    reference = "Gargiulo et al., CVPR 2025, arXiv:2412.00081"
    formula = "λ·U⊥·Σ·V⊥ᵀ of the experts' first singular vectors side by side, each side made orthonormal"
    notes = (
        "Each of n experts keeps min(out, in)/n singular values, rounded down, as in the authors' code; an expert of "
        "lower rank keeps all. Singular values of zero are left out. Vectors (biases, norms) are averaged."
    )
    parameters = (SCALE,)
    weighted = False

    def combine_cores(
        self, cores: Cores, shape: tuple[int, int], weights: Mapping[str, float], settings: MethodSettings
    ) -> Core:
        import numpy as np

        rank = max(1, min(shape) // len(cores))
        parts = [_svd(core, rank, cores) for core in cores.values()]
        left, sigma, right = _side_by_side(parts)
        merged = (_orthogonal(left) * sigma) @ _orthogonal(right).T
        return np.asarray(settings["scale"] * merged, np.float64)


def _side_by_side(parts: Sequence[tuple[Core, Core, Core]]) -> tuple[Core, Core, Core]:
    import numpy as np

    us, sigmas, vts = zip(*parts, strict=True)
    return (
        np.concatenate(us, axis=1),
        np.concatenate(sigmas),
        np.concatenate([vt.T for vt in vts], axis=1),
    )


class IsoC(CoreMethod):
    name = "iso_c"
    title = "Iso-C (Marczak et al. 2025)"
    reference = "Marczak et al., ICML 2025, arXiv:2502.04959"
    formula = "λ·σ̄·U·Vᵀ of the singular vectors of Σ ΔW_i, with σ̄ the mean of its singular values"
    notes = (
        "The mean is over the nonzero singular values of Σ ΔW_i. The authors' code divides by the size of the matrix, "
        "which is the same for fine-tuned weights; with LoRA most of those directions are undefined. Vectors are "
        "averaged."
    )
    parameters = (SCALE,)
    weighted = False

    def combine_cores(
        self, cores: Cores, shape: tuple[int, int], weights: Mapping[str, float], settings: MethodSettings
    ) -> Core:
        import numpy as np

        total = np.sum(list(cores.values()), axis=0)
        u, sigma, vt = _svd(total, min(total.shape), cores)
        if not len(sigma):
            return np.zeros_like(total)
        return np.asarray(settings["scale"] * sigma.mean() * u @ vt, np.float64)


COMMON = Parameter("common_space_fraction", "share of the directions that the experts have in common", 0.8, ge=0, le=1)


class IsoCts(CoreMethod):
    name = "iso_cts"
    title = "Iso-CTS (Marczak et al. 2025)"
    reference = "Marczak et al., ICML 2025, arXiv:2502.04959"
    formula = "λ·σ̄·U⊥·V⊥ᵀ of the first singular vectors of Σ ΔW_i and of the ΔW_i outside of these; σ̄ their mean value"
    notes = (
        "As in the authors' code, the number of common directions is adjusted so that the others divide evenly among "
        "the experts; only directions of Σ ΔW_i with nonzero singular values count. Vectors are averaged."
    )
    parameters = (SCALE, COMMON)
    weighted = False

    def combine_cores(
        self, cores: Cores, shape: tuple[int, int], weights: Mapping[str, float], settings: MethodSettings
    ) -> Core:
        import numpy as np

        total = np.sum(list(cores.values()), axis=0)
        u, sigma, vt = _svd(total, min(total.shape), cores)

        # Of all directions, each expert gets the same number, and the common ones the rest.
        size, count = len(sigma), len(cores)
        own_rank = round((size - int(size * settings["common_space_fraction"])) / count)
        if own_rank * count > size:  # rounding up may exceed the total
            own_rank -= 1
        shared_rank = size - own_rank * count
        u, sigma, vt = u[:, :shared_rank], sigma[:shared_rank], vt[:shared_rank]

        # The experts' own directions are those of ΔW_i outside of the common ones.
        parts = [_svd(core - u @ (u.T @ core), own_rank, cores) for core in cores.values()]
        left, sigma, right = _side_by_side([*parts, (u, sigma, vt)])
        if not len(sigma):
            return np.zeros_like(total)
        return np.asarray(settings["scale"] * sigma.mean() * _orthogonal(left) @ _orthogonal(right).T, np.float64)


FRACTION = Parameter(
    "rank_fraction", "rank of what an expert adds to the mean, as a share of full rank", 0.04, gt=0, le=1
)
OWN_SCALE = Parameter("own_scale", "factor of what the experts add to their mean", 1.0, ge=-LARGEST, le=LARGEST)


class Cart(CoreMethod):
    name = "cart"
    title = "CART (Choi et al. 2024)"
    reference = "Choi et al. 2024, arXiv:2412.12153"
    formula = "ΔW̄ + own_scale·Σ (ΔW_i - ΔW̄, reduced to a share of full rank), with ΔW̄ the mean"
    notes = (
        "As in the code of Core Space, the rank is rounded up. What two experts add to their mean cancels, so with two "
        "this is the soup. Vectors are averaged."
    )
    parameters = (FRACTION, OWN_SCALE)
    weighted = False

    def combine_cores(
        self, cores: Cores, shape: tuple[int, int], weights: Mapping[str, float], settings: MethodSettings
    ) -> Core:
        import numpy as np

        rank = math.ceil(settings["rank_fraction"] * min(shape))
        mean = np.mean(list(cores.values()), axis=0)
        parts = [_svd(core - mean, rank, cores) for core in cores.values()]
        own = sum((u * sigma) @ vt for u, sigma, vt in parts)
        return np.asarray(mean + settings["own_scale"] * own, np.float64)


class _Knots(CoreMethod):
    """KnOTS: [ΔW_1, ΔW_2, …] = U·Σ·[V_1ᵀ, V_2ᵀ, …], and the Σ·V_iᵀ = Uᵀ·ΔW_i are merged entry by entry."""

    reference = "Stoica et al., ICLR 2025, arXiv:2410.19735"
    notes = "Shares count the entries of one module; the authors' code counts over all modules together."
    normalizes = True

    def _combine_dense(self, deltas: Cores, weights: Mapping[str, float], settings: MethodSettings) -> Core:
        import numpy as np

        left = _directions(np.concatenate(list(deltas.values()), axis=1))
        parts = {name: left.T @ delta for name, delta in deltas.items()}
        shape = next(iter(deltas.values())).shape
        return np.asarray(left @ self._core(parts, (shape[0], shape[1]), weights, settings), np.float64)

    def combine_factors(self, pairs: Pairs, weights: Mapping[str, float], settings: MethodSettings) -> Pair:
        import numpy as np

        # The left singular vectors of the ΔW side by side are those of the cores: the basis of A is orthonormal.
        joint, cores = _joint(pairs, weights)
        left = _directions(np.concatenate(list(cores.values()), axis=1))
        if not left.shape[1]:  # no expert changes anything
            return np.zeros((joint.shape[0], 1)), np.zeros((1, joint.shape[1]))
        parts = {name: joint.right.expand(core.T @ left).T for name, core in cores.items()}
        return joint.left.expand(left), self._core(parts, joint.shape, weights, settings)


class _Core(CoreMethod):
    """Core Space: cores between the left singular vectors of all B and the right singular vectors of all A."""

    reference = "Panariello et al., NeurIPS 2025, arXiv:2509.17786"
    notes = "The space comes from LoRA's A and B (with its scale), so full checkpoints and vectors are refused."
    normalizes = True
    needs_factors = True

    def combine_factors(self, pairs: Pairs, weights: Mapping[str, float], settings: MethodSettings) -> Pair:
        import numpy as np

        from adapterswap.core.changes.joint import Basis

        bs = [b for b, _ in pairs.values()]
        as_ = [a for _, a in pairs.values()]
        b_basis, a_basis = Basis(bs, 1), Basis(as_, 0)
        left = _directions(b_basis.coordinates, _NONE_OF_FACTORS)
        right = _directions(a_basis.coordinates, _NONE_OF_FACTORS)

        # Each side's core, from its own columns of the coordinates; zero for a side that changes nothing
        ends = np.cumsum([len(a) for a in as_])[:-1]
        own_bs = np.split(b_basis.coordinates, ends, axis=1)
        own_as = np.split(a_basis.coordinates, ends, axis=1)
        cores = dict.fromkeys(weights, np.zeros((left.shape[1], right.shape[1])))
        for side, b, a in zip(pairs, own_bs, own_as, strict=True):
            cores[side] = (left.T @ b) @ (a.T @ right)

        core = self._core(cores, (len(bs[0]), as_[0].shape[1]), weights, settings)
        return b_basis.expand(left @ core), a_basis.expand(right).T

    def combine(self, deltas: Mapping[str, Array], weights: Mapping[str, float], settings: MethodSettings) -> Array:
        raise UnsupportedError(
            f"{settings.module}: {self.name} needs LoRA's factors, but an expert has whole weights",
            "Use the corresponding method on ΔW, or extract adapters from the checkpoints with `adapterswap extract`",
            parameter="method",
        )


class _EntryByEntry:
    """Merge the cores entry by entry, as `method` merges ΔW."""

    method: ClassVar[NonlinearMethod]

    def combine_cores(
        self, cores: Cores, shape: tuple[int, int], weights: Mapping[str, float], settings: MethodSettings
    ) -> Core:
        import numpy as np

        single = {name: core.astype(np.float32) for name, core in cores.items()}
        return self.method.combine(single, weights, settings).astype(np.float64)


class KnotsTies(_EntryByEntry, _Knots):
    method = Ties()
    parameters = method.parameters
    name = "knots_ties"
    title = "KnOTS with TIES (Stoica et al. 2025)"
    formula = "U·TIES(Uᵀ·ΔW_1, Uᵀ·ΔW_2, …), with U the left singular vectors of all ΔW side by side"


class KnotsDareTies(_EntryByEntry, _Knots):
    method = DareTies()
    parameters = method.parameters
    name = "knots_dare_ties"
    title = "KnOTS with DARE and TIES' election of signs (Stoica et al. 2025)"
    formula = "U·DARE-TIES(Uᵀ·ΔW_1, Uᵀ·ΔW_2, …), with U the left singular vectors of all ΔW side by side"


class CoreTies(_EntryByEntry, _Core):
    method = Ties()
    parameters = method.parameters
    name = "core_ties"
    title = "TIES in Core Space (Panariello et al. 2025)"
    formula = "U·TIES(Uᵀ·ΔW_1·V, Uᵀ·ΔW_2·V, …)·Vᵀ, with U and V the singular vectors of all B, and of all A"


class CoreDareTies(_EntryByEntry, _Core):
    method = DareTies()
    parameters = method.parameters
    name = "core_dare_ties"
    title = "DARE with TIES' election of signs in Core Space (Panariello et al. 2025)"
    formula = "U·DARE-TIES(Uᵀ·ΔW_1·V, Uᵀ·ΔW_2·V, …)·Vᵀ, with U and V the singular vectors of all B, and of all A"


MAX_ITER = Parameter("max_iter", "maximum number of steps", 300, ge=1, le=10_000)
RATE = Parameter("learning_rate", "size of a step of Adam", 1e-5, gt=0, le=1)
_MEAN_DECAY, _SQUARE_DECAY, _EPSILON = 0.9, 0.999, 1e-8  # Adam's usual values


class Wudi(NonlinearMethod):
    name = "wudi"
    title = "WUDI-Merging (Cheng et al. 2025)"
    reference = "Cheng et al., ICML 2025, arXiv:2503.08099"
    formula = "ΔW that minimizes Σ ‖(ΔW - ΔW_i)·ΔW_iᵀ‖²/‖ΔW_i‖², by steps of Adam from Σ ΔW_i"
    notes = "Steps have about the size of the learning rate, whatever the size of ΔW. Vectors are averaged."
    parameters = (MAX_ITER, RATE)
    weighted = False
    counts_absent = True

    def combine(self, deltas: Mapping[str, Array], weights: Mapping[str, float], settings: MethodSettings) -> Array:
        import numpy as np

        stacked = np.stack([delta.astype(np.float64) for delta in deltas.values()])
        if stacked.ndim < 3:
            return np.asarray(stacked.mean(axis=0), np.float32)
        merged = np.empty(stacked.shape[1:], np.float32)
        for place in np.ndindex(*merged.shape[:-2]):
            merged[place] = _least_interfering(stacked[:, *place], settings["max_iter"], settings["learning_rate"])
        return merged


def _least_interfering(deltas: Core, steps: int, rate: float) -> Core:
    """WUDI's ΔW of n matrices (n, out, in). The gradient 2·(ΔW·P - Q) takes one product, however many there are."""
    import numpy as np

    # P = Σ ΔW_iᵀ·ΔW_i/‖ΔW_i‖² and Q = Σ ΔW_i·ΔW_iᵀ·ΔW_i/‖ΔW_i‖²
    merged, wanted = deltas.sum(axis=0), np.zeros(deltas.shape[1:])
    total = np.zeros((merged.shape[1],) * 2)
    for delta in deltas:
        if not delta.any():
            continue
        own = delta.T @ delta / np.linalg.norm(delta) ** 2
        total += own
        wanted += delta @ own

    # Adam: running means of the gradient and of its square, each divided by its bias
    mean, square = np.zeros_like(merged), np.zeros_like(merged)
    for step in range(1, steps + 1):
        gradient = 2 * (merged @ total - wanted)
        mean += (1 - _MEAN_DECAY) * (gradient - mean)
        square += (1 - _SQUARE_DECAY) * (gradient**2 - square)
        size = np.sqrt(square / (1 - _SQUARE_DECAY**step)) + _EPSILON
        merged -= rate / (1 - _MEAN_DECAY**step) * mean / size
    return np.asarray(merged)
