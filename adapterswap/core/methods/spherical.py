"""Methods that find their coefficients from norms and angles: SLERP and its relatives, the Karcher mean, Model Stock.

Each result lies in the span of the experts, so the coefficients follow from their n×n inner products, in float64. Dense
ΔW are used only if a method rotates each row separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from adapterswap.core.methods.method import MethodSettings, Parameter, SpanMethod
from adapterswap.kit.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[np.float32]]
    Gram = npt.NDArray[np.float64]


_ALIKE = 0.9995  # |cosine| above which SLERP treats two directions as the same
# Sines up to which NuSLERP interpolates linearly. mergekit has 1e-8 for both, but between opposite directions the path
# depends on the rounding of float32 much earlier.
_PARALLEL, _OPPOSITE = 1e-6, 1e-3
_SINGULAR = 1e-6  # Model Stock's denominators below this size count as zero


class Slerp(SpanMethod):
    name = "slerp"
    title = "spherical interpolation of ΔW (SLERP)"
    reference = "Shoemake, SIGGRAPH 1985"
    formula = "sin((1-t)Ω)/sin Ω·ΔW_1 + sin(tΩ)/sin Ω·ΔW_2, with t = w_2/(w_1 + w_2) and Ω the angle between the two"
    normalizes = True
    sides = (2, 2)

    def coefficients(self, gram: Gram, weights: Sequence[float], settings: MethodSettings) -> tuple[float, float]:
        """SLERP's coefficients, or 1-t and t if the two are (almost) parallel or opposite, or one is zero."""
        t = weights[1] / (weights[0] + weights[1])
        norms = math.sqrt(float(gram[0, 0]) * float(gram[1, 1]))
        cosine = 1.0
        if norms:
            cosine = float(gram[0, 1]) / norms
        if abs(cosine) > _ALIKE:
            return 1 - t, t
        return _turned(t, cosine)


def _turned(t: float, cosine: float) -> tuple[float, float]:
    """sin((1-t)Ω)/sin Ω and sin(tΩ)/sin Ω."""
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


FLATTEN = Parameter("nuslerp_flatten", "rotate the whole ΔW at once; false rotates each row separately", True)
ROW_WISE = Parameter("nuslerp_row_wise", "with nuslerp_flatten false: along the first axis of ΔW, not the last", False)


class NuSlerp(SpanMethod):
    name = "nuslerp"
    title = "NuSLERP of ΔW (mergekit)"
    reference = "mergekit, https://github.com/arcee-ai/mergekit (Shoemake, SIGGRAPH 1985)"
    formula = (
        "SLERP of ΔW, of each row separately with `nuslerp_flatten: false`; a ΔW of zero is at right angles to all"
    )
    notes = (
        "As mergekit with a base_model; without one mergekit interpolates whole weights. ΔW that are opposite to "
        "within 0.06 degrees are interpolated linearly."
    )
    parameters = (FLATTEN, ROW_WISE)
    normalizes = True
    sides = (2, 2)

    def spans(self, values: Mapping[str, Any]) -> bool:
        return bool(values["nuslerp_flatten"])

    def coefficients(self, gram: Gram, weights: Sequence[float], settings: MethodSettings) -> tuple[float, float]:
        t = weights[1] / (weights[0] + weights[1])
        norms = math.sqrt(float(gram[0, 0]) * float(gram[1, 1]))
        cosine = 0.0
        if norms:
            cosine = max(-1.0, min(1.0, float(gram[0, 1]) / norms))
        no_angle = _PARALLEL if cosine > 0 else _OPPOSITE
        if 1 - cosine**2 <= no_angle**2:
            return 1 - t, t
        return _turned(t, cosine)

    def combine(
        self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings
    ) -> npt.NDArray[np.float32]:
        import numpy as np

        if self.spans(settings.values):
            return super().combine(deltas, weights, settings)

        axis = 0 if settings["nuslerp_row_wise"] else -1
        (first_side, first_delta), (second_side, second_delta) = deltas.items()
        first, second = np.asarray(first_delta, np.float64), np.asarray(second_delta, np.float64)
        t = weights[second_side] / (weights[first_side] + weights[second_side])

        # The angle of each row
        norms = np.sqrt(np.square(first).sum(axis, keepdims=True) * np.square(second).sum(axis, keepdims=True))
        cosine = np.clip((first * second).sum(axis, keepdims=True) / np.where(norms == 0, 1, norms), -1, 1)
        straight = 1 - cosine**2 <= np.where(cosine > 0, _PARALLEL, _OPPOSITE) ** 2
        angle = np.arccos(np.where(straight, 0, cosine))

        def coefficient(share: float) -> npt.NDArray[np.float64]:
            """That of each row along the arc, or along the line where there is none."""
            return np.where(straight, share, np.sin(share * angle) / np.sin(angle))

        return np.asarray(coefficient(1 - t) * first + coefficient(t) * second, np.float32)


EPS = Parameter("eps", "norms below this count as zero", 1e-8, gt=0, lt=1)


class MultiSlerp(SpanMethod):
    name = "multislerp"
    title = "multi-SLERP of ΔW (mergekit)"
    reference = "Goddard 2025, https://goddard.blog/posts/multislerp-wow-what-a-cool-idea"
    formula = "the direction of Σ w_i·ΔW_i/‖ΔW_i‖, with the length Σ w_i·‖ΔW_i‖"
    notes = (
        "As mergekit with a base_model. mergekit works in the tangent space at the mean direction, where the weighted "
        "sum is zero, so the result is the same. Three or more directions that cancel are refused."
    )
    parameters = (EPS,)
    normalizes = True
    sides = (1, None)

    def coefficients(self, gram: Gram, weights: Sequence[float], settings: MethodSettings) -> list[float]:
        """The tangent vectors at the mean's direction cancel, so the term that mergekit adds for them is zero."""
        total = math.fsum(weights) if settings.normalize else 1.0
        shares = [weight / total for weight in weights]
        if len(shares) == 1:
            return [1.0]

        # The length of the mean direction Σ w_i·ΔW_i/‖ΔW_i‖
        norms = [math.sqrt(max(0.0, float(gram[i, i]))) for i in range(len(shares))]
        parts = [share / (norm + settings["eps"]) for share, norm in zip(shares, norms, strict=True)]
        products = []
        for i, a in enumerate(parts):
            products += [a * float(gram[i, j]) * b for j, b in enumerate(parts)]
        length = math.sqrt(max(0.0, math.fsum(products)))
        if length < settings["eps"]:
            if len(shares) == 2 or not any(norms):
                return shares
            raise UnsupportedError(
                f"{settings.module}: the directions of the experts cancel, so multislerp has no mean direction",
                "Use other weights or another method",
                parameter="weights",
            )

        reach = math.fsum(share * norm for share, norm in zip(shares, norms, strict=True))
        return [reach / length * part for part in parts]


MAX_ITER = Parameter("max_iter", "maximum number of steps", 10, ge=1, le=10_000)
TOL = Parameter("tol", "length of a step below which the search stops", 1e-5, gt=0, lt=1)


class Karcher(SpanMethod):
    name = "karcher"
    title = "the Karcher mean of whole weights"
    reference = "Karcher, Comm. Pure Appl. Math. 1977; arXiv:2603.04972"
    formula = "the mean of W_i/‖W_i‖ on the sphere, by steps along the mean tangent; times the mean norm"
    notes = "As mergekit, on the experts' whole weights; the base is used only if an expert is an adapter."
    parameters = (MAX_ITER, TOL)
    linear = False
    acts_on: ClassVar[Literal["delta", "weights"]] = "weights"
    weighted = False

    def spans(self, values: Mapping[str, Any]) -> bool:
        return False  # not in ΔW: every W_i contains the base's weights

    def coefficients(self, gram: Gram, weights: Sequence[float], settings: MethodSettings) -> list[float]:
        import numpy as np

        tol, count = settings["tol"], len(weights)
        if count == 1:
            return [1.0]
        norms = np.sqrt(np.diagonal(gram).clip(0))
        valid = norms > tol
        if not valid.any():
            return [0.0] * count

        cosines = gram[np.ix_(valid, valid)] / np.outer(norms[valid], norms[valid])
        share = 1 / len(cosines)

        def length(vector: npt.NDArray[np.float64]) -> float:
            return math.sqrt(max(0.0, float(vector @ cosines @ vector)))

        # Begin at the mean direction, in terms of the unit vectors; at the first expert if they cancel.
        mean = np.full(len(cosines), share)
        start = length(mean)
        if start < tol:
            mean = np.eye(len(cosines))[0]
        else:
            mean /= start

        # Step along the mean tangent
        for _ in range(settings["max_iter"]):
            tangent = np.zeros_like(mean)
            for i, dot in enumerate(np.clip(cosines @ mean, -1, 1)):
                angle = math.acos(float(dot))
                # Already there, or opposite, where all paths have one length
                if angle < tol or math.sin(angle) < _PARALLEL:
                    continue
                tangent[i] += share * angle / math.sin(angle)
                tangent -= share * angle / math.sin(angle) * dot * mean

            step = length(tangent)
            if step < tol:
                break
            mean = math.cos(step) * mean + math.sin(step) / step * tangent
            norm = length(mean)
            if norm > tol:
                mean /= norm

        coefficients = np.zeros(count)
        coefficients[valid] = float(norms.mean()) * mean / norms[valid]
        return [float(value) for value in coefficients]


FILTER_WISE = Parameter("filter_wise", "compute t for each row separately", False)


class ModelStock(SpanMethod):
    name = "model_stock"
    title = "Model Stock (Jang et al. 2024)"
    reference = "Jang et al., ECCV 2024, arXiv:2403.19522"
    formula = "t·mean ΔW_i, with t = n·cos θ/(1 + (n-1)·cos θ) and cos θ the mean cosine of all pairs"
    notes = (
        "mergekit's formula in ΔW, where the base cancels, so it works in adapters too. mergekit bounds ‖ΔW_i‖·‖ΔW_j‖ "
        "from below by 1e-6, which makes cosines of tiny tensors too small; here they are exact. t is 0 if it is not "
        "finite."
    )
    parameters = (FILTER_WISE,)
    weighted = False
    sides = (2, None)

    def spans(self, values: Mapping[str, Any]) -> bool:
        return not values["filter_wise"]

    def coefficients(self, gram: Gram, weights: Sequence[float], settings: MethodSettings) -> list[float]:
        import numpy as np

        share = float(_stock_share(gram[:, :, np.newaxis])[0])
        return [share / len(weights)] * len(weights)

    def combine(
        self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings
    ) -> npt.NDArray[np.float32]:
        import numpy as np

        if self.spans(settings.values):
            return super().combine(deltas, weights, settings)

        # As experts×rows×columns; a vector is one row
        stacked = np.stack(list(deltas.values())).astype(np.float64)
        columns = stacked.shape[-1] if stacked.ndim > 2 else stacked[0].size
        stacked = stacked.reshape(len(deltas), -1, columns)

        share = _stock_share(np.einsum("irk,jrk->ijr", stacked, stacked))
        merged = share[:, np.newaxis] * stacked.mean(axis=0)
        return np.asarray(merged, np.float32).reshape(next(iter(deltas.values())).shape)


def _stock_share(gram: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """t for each n×n Gram matrix along the last axis; an expert with ΔW = 0 counts as orthogonal to the others."""
    import numpy as np

    count = len(gram)
    squares = np.einsum("iir->ir", gram)
    norms = np.sqrt(squares[:, np.newaxis] * squares[np.newaxis])
    cosines = np.clip(np.divide(gram, norms, out=np.zeros_like(gram), where=norms > 0), -1, 1)

    # The mean over all pairs
    rows, columns = np.triu_indices(count, 1)
    mean = cosines[rows, columns].mean(axis=0)
    below = 1 + (count - 1) * mean
    share = np.zeros_like(mean)  # 0 (the base) if t is not finite: opposing experts would be amplified
    np.divide(count * mean, below, out=share, where=np.abs(below) >= _SINGULAR)
    return np.asarray(share, np.float64)
