"""Reference merge methods on full weights, in float64, written out as their papers describe them.

Each takes the base's tensor and the experts', and returns the merged tensor. Vectors are moved on the sphere step by
step here, where the library works with inner products alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg
import torch

Array = npt.NDArray[np.float64]
Chooser = Callable[[int, Array], npt.NDArray[np.bool_]]  # (expert, chances) → what is kept


def merged(
    method: str, base: Any, experts: Sequence[Any], weights: Sequence[float], chosen: Chooser, **values: Any
) -> Array:
    """Apply a method to whole weights; parameters have the names that compositions use."""
    base, *full = (np.asarray(array, np.float64) for array in (base, *experts))
    return np.asarray(METHODS[method](base, full, list(weights), chosen, values))


def _elected(deltas: list[Array], weights: list[float], scale: float, normalize: bool) -> Array:
    values = np.stack([weight * delta for delta, weight in zip(deltas, weights, strict=True)])
    return scale * _agreeing(values, np.where(values.sum(0) >= 0, 1, -1), weights if normalize else None)


def _agreeing(values: Array, signs: Array, divisors: Sequence[float] | None) -> Array:
    """The sum of the values that have the elected sign, divided by the sum of their divisors."""
    agree = values * signs > 0
    total = np.where(agree, values, 0).sum(0)
    if divisors is None:
        return np.asarray(total)
    below = np.tensordot(np.asarray(divisors, np.float64), agree, 1)
    return np.divide(total, below, out=np.zeros_like(total), where=below > 0)


def _sum(deltas: list[Array], weights: list[float], scale: float) -> Array:
    return scale * np.sum([weight * delta for delta, weight in zip(deltas, weights, strict=True)], axis=0)


def _della_kept(index: int, delta: Array, chosen: Chooser, values: Mapping[str, Any]) -> Array:
    density, epsilon = values["density"], values.get("epsilon", 0.15)
    if density >= 1:
        return delta
    rows = np.abs(delta).reshape(-1, delta.shape[-1])
    chances = np.empty_like(rows)
    for row, numbers in enumerate(rows):
        order = sorted(range(len(numbers)), key=lambda place: numbers[place])
        for rank, place in enumerate(order):
            share = rank / (len(numbers) - 1) if len(numbers) > 1 else 0.5
            chances[row, place] = density - epsilon + share * 2 * epsilon
    chances = chances.reshape(delta.shape)
    kept = delta * chosen(index, chances)
    rescale = values.get("rescale", "l1")
    if rescale == "probability":
        return kept / chances
    return kept * (np.abs(delta).sum() / np.abs(kept).sum() if rescale == "l1" and np.any(kept) else 1)


def _della(base: Array, full: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    kept = [_della_kept(index, tensor - base, chosen, values) for index, tensor in enumerate(full)]
    return base + _elected(kept, weights, values.get("scale", 1), normalize=True)


def _della_linear(
    base: Array, full: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]
) -> Array:
    kept = [_della_kept(index, tensor - base, chosen, values) for index, tensor in enumerate(full)]
    return base + _sum(kept, weights, values.get("scale", 1))


def _crumbs(delta: Array, values: Mapping[str, Any]) -> Array:
    if values["density"] >= 1:
        return delta
    order = np.argsort(-np.abs(delta), axis=None, kind="stable")  # the largest first
    count = int(values["density"] * delta.size)
    dropped = min(int(values.get("gamma", 0.01) * delta.size), delta.size - count)
    mask = np.zeros(delta.size)
    mask[order[dropped : dropped + count]] = 1
    return delta * mask.reshape(delta.shape)


def _breadcrumbs(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    return base + _sum([_crumbs(tensor - base, values) for tensor in full], weights, values.get("scale", 1))


def _breadcrumbs_ties(
    base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]
) -> Array:
    kept = [_crumbs(tensor - base, values) for tensor in full]
    return base + _elected(kept, weights, values.get("scale", 1), normalize=False)


def _sce(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    deltas = np.stack([tensor - base for tensor in full])
    topk = values.get("select_topk", 1.0)
    if topk < 1:
        variance = ((deltas - deltas.mean(axis=0)) ** 2).mean(axis=0)
        count = int(np.count_nonzero(variance) * topk)
        mask = np.zeros(variance.size)
        mask[np.argsort(-variance, axis=None)[:count]] = 1
        deltas = deltas * mask.reshape(variance.shape)
    energy = [float((delta**2).sum()) for delta in deltas]
    if not sum(energy):
        return base
    shares = [one / sum(energy) for one in energy]
    return base + _elected_by_sum(deltas, shares)


def _elected_by_sum(deltas: Array, shares: Sequence[float]) -> Array:
    """SCE elects by the plain sum, and averages what agrees by its shares."""
    weighted = np.stack([delta * share for delta, share in zip(deltas, shares, strict=True)])
    return _agreeing(weighted, np.where(deltas.sum(0) >= 0, 1, -1), shares)


def _rotated(t: float, one: Array, other: Array) -> Array:
    norms = [float(np.linalg.norm(vector)) for vector in (one, other)]
    cosine = float(one.ravel() @ other.ravel()) / (norms[0] * norms[1]) if all(norms) else 0.0
    if cosine > 1 - 1e-15 or cosine < -math.sqrt(1 - 1e-6):
        return (1 - t) * one + t * other
    angle = math.acos(cosine)
    return (math.sin((1 - t) * angle) * one + math.sin(t * angle) * other) / math.sin(angle)


def _nuslerp(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    one, other = (tensor - base for tensor in full)
    t = weights[1] / sum(weights)
    if values.get("nuslerp_flatten", True):
        return base + _rotated(t, one, other)
    axis = 0 if values.get("nuslerp_row_wise") else -1
    one, other = np.moveaxis(one, axis, -1), np.moveaxis(other, axis, -1)
    turned = np.empty_like(one)
    for place in np.ndindex(*one.shape[:-1]):
        turned[place] = _rotated(t, one[place], other[place])
    return base + np.moveaxis(turned, -1, axis)


def _multislerp(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    """To the tangent space at the mean direction, averaged there, and back by the exponential map."""
    shares = [weight / sum(weights) for weight in weights]
    deltas = [tensor - base for tensor in full]
    if len(deltas) == 1:
        return full[0]
    norms = [float(np.linalg.norm(delta)) for delta in deltas]
    units = [delta / norm if norm else delta for delta, norm in zip(deltas, norms, strict=True)]
    mean = np.sum([share * unit for share, unit in zip(shares, units, strict=True)], axis=0)
    if np.linalg.norm(mean) < 1e-8:
        return base + np.sum([share * delta for share, delta in zip(shares, deltas, strict=True)], axis=0)
    mean /= np.linalg.norm(mean)
    tangent = np.sum([s * (unit - float((unit * mean).sum()) * mean) for s, unit in zip(shares, units, strict=True)], 0)
    length = float(np.linalg.norm(tangent))
    moved = math.cos(length) * mean + (math.sin(length) / length * tangent if length else 0)
    return base + moved * sum(share * norm for share, norm in zip(shares, norms, strict=True))


def _karcher(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    if len(full) == 1:
        return full[0]
    norms = [float(np.linalg.norm(tensor)) for tensor in full]
    units = [tensor / norm for tensor, norm in zip(full, norms, strict=True) if norm > 1e-5]
    if not units:
        return np.zeros_like(base)
    mean = np.mean(units, axis=0)
    mean = units[0] if np.linalg.norm(mean) < 1e-5 else mean / np.linalg.norm(mean)
    for _step in range(values.get("max_iter", 10)):
        tangent = np.zeros_like(mean)
        for unit in units:
            cosine = max(-1.0, min(1.0, float((unit * mean).sum())))
            angle = math.acos(cosine)
            if angle >= 1e-5 and math.sin(angle) >= 1e-6:
                tangent += angle / math.sin(angle) * (unit - cosine * mean) / len(units)
        length = float(np.linalg.norm(tangent))
        if length < values.get("tol", 1e-5):
            break
        mean = math.cos(length) * mean + math.sin(length) * tangent / length
        mean /= np.linalg.norm(mean)
    return np.asarray(mean * np.mean(norms))


def _model_stock(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    if values.get("filter_wise") and base.ndim > 1:
        result = np.empty_like(base)
        for place in np.ndindex(*base.shape[:-1]):
            result[place] = _model_stock(base[place], [tensor[place] for tensor in full], weights, _, {})
        return result
    cosines = []
    for one, other in combinations([(tensor - base).ravel() for tensor in full], 2):
        norms = float(np.linalg.norm(one) * np.linalg.norm(other))
        cosines.append(float(one @ other) / norms if norms else 0.0)
    cosine = float(np.mean(cosines))
    below = 1 + (len(full) - 1) * cosine
    t = len(full) * cosine / below if abs(below) >= 1e-6 else 0.0
    return t * np.mean(full, axis=0) + (1 - t) * base


def _nearswap(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    one, other = full
    t = values.get("t", 0.001)
    return one + np.clip(other - one, -t, t)


def _arcee_fusion(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    one, other = (torch.from_numpy(tensor) for tensor in full)
    p, q = (torch.softmax(tensor, -1) + 1e-8 for tensor in (other, one))
    importance = (other - one).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    low, middle, high = torch.quantile(
        importance.reshape(-1), torch.tensor([0.25, 0.5, 0.75]).double(), interpolation="lower"
    )
    return torch.where(importance >= middle + 1.5 * (high - low), other, one).numpy()


def _mean_of_vectors(method: Callable[..., Array]) -> Callable[..., Array]:
    """Average vectors, and merge each matrix of a tensor with more axes separately."""

    def merged_tensor(base: Array, full: list[Array], weights: list[float], chosen: Chooser, values: Any) -> Array:
        scale = values.get("scale", 1)
        if base.ndim < 2:
            return base + scale * np.average([tensor - base for tensor in full], axis=0, weights=weights)
        result = np.empty_like(base)
        for place in np.ndindex(*base.shape[:-2]):
            deltas = [tensor[place] - base[place] for tensor in full]
            result[place] = base[place] + scale * method(deltas, weights, chosen, values)
        return result

    return merged_tensor


_ROUNDING = 1e-6


def basis(matrix: Array, none: float = _ROUNDING) -> Array:
    """Orthonormal columns that span a matrix's columns, by QR with pivoting."""
    q, r, _ = scipy.linalg.qr(matrix, mode="economic", pivoting=True)
    size = abs(r[0, 0]) if r.size else 0.0
    return np.asarray(q[:, np.abs(np.diagonal(r)) > none * size] if size else q[:, :0])


def cores_of(deltas: list[Array]) -> tuple[Array, list[Array], Array]:
    left, right = basis(np.hstack(deltas)), basis(np.hstack([delta.T for delta in deltas]))
    return left, [left.T @ delta @ right for delta in deltas], right


def _polar(columns: Array) -> Array:
    """C·(CᵀC)^(-1/2), by eigenvalues."""
    values, vectors = np.linalg.eigh(columns.T @ columns)
    kept = values > 1e-12 * max(values.max(initial=0), 1e-300)
    return np.asarray(columns @ (vectors[:, kept] / np.sqrt(values[kept])) @ vectors[:, kept].T)


def _leading(matrix: Array, count: int, size: float) -> tuple[Array, Array, Array]:
    u, sigma, v = (part.numpy() for part in torch.linalg.svd(torch.from_numpy(matrix), full_matrices=False))
    count = min(count, int((sigma > _ROUNDING * size).sum()))
    return u[:, :count], sigma[:count], v[:count].T


def _size(cores: list[Array]) -> float:
    return max(float(np.linalg.norm(core)) for core in cores)


@_mean_of_vectors
def _tsv(deltas: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    left, cores, right = cores_of(deltas)
    if not cores[0].size:
        return np.zeros_like(deltas[0])
    parts = [_leading(core, max(1, int(min(deltas[0].shape) / len(cores))), _size(cores)) for core in cores]
    u, sigma, v = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return left @ _polar(u) @ np.diag(sigma) @ _polar(v).T @ right.T if len(sigma) else np.zeros_like(deltas[0])


@_mean_of_vectors
def _iso_c(deltas: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    total = np.sum(deltas, axis=0)
    u, sigma, v = _leading(total, min(total.shape), _size(deltas))
    return float(sigma.mean()) * u @ v.T if len(sigma) else np.zeros_like(total)


@_mean_of_vectors
def _iso_cts(deltas: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    left, cores, right = cores_of(deltas)
    if not cores[0].size:
        return np.zeros_like(deltas[0])
    total, count = np.sum(cores, axis=0), len(cores)
    size = len(_leading(total, min(total.shape), _size(cores))[1])
    each = round((size - int(size * values.get("common_space_fraction", 0.8))) / count)
    each = each if each * count <= size else each - 1
    shared = _leading(total, size - each * count, _size(cores))
    outside = np.eye(len(cores[0])) - shared[0] @ shared[0].T
    parts = [*(_leading(outside @ core, each, _size(cores)) for core in cores), shared]
    u, sigma, v = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    if not len(sigma):
        return np.zeros_like(deltas[0])
    return left @ (float(sigma.mean()) * _polar(u) @ _polar(v).T) @ right.T


def _aligned(deltas: list[Array]) -> tuple[Array, list[Array]]:
    """U and Uᵀ·ΔW_i, with U the left singular vectors of the ΔW side by side."""
    u, sigma, _ = np.linalg.svd(np.hstack(deltas), full_matrices=False)
    u = u[:, sigma > _ROUNDING * sigma[0]]
    return u, [u.T @ delta for delta in deltas]


def trimmed(delta: Array, density: float) -> Array:
    if density >= 1:
        return delta
    order = np.argsort(-np.abs(delta), axis=None)[: max(1, int(density * delta.size))]
    mask = np.zeros(delta.size)
    mask[order] = 1
    return delta * mask.reshape(delta.shape)


def elected(parts: list[Array], weights: list[float], scale: float) -> Array:
    """TIES' election, divided by the sum of the weights that agree."""
    return _elected(parts, weights, scale, normalize=True)


@_mean_of_vectors
def _knots_ties(deltas: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    u, parts = _aligned(deltas)
    return u @ elected([trimmed(part, values["density"]) for part in parts], weights, 1)


@_mean_of_vectors
def _knots_dare_ties(deltas: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    u, parts = _aligned(deltas)
    density = values["density"]
    kept = [part * chosen(i, np.full(part.shape, density)) / density for i, part in enumerate(parts)]
    return u @ elected(kept, weights, 1)


def _ram(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    """Entry by entry: the changes of the experts that have one, averaged; those of one alone times its factor."""
    deltas = [(tensor - base).ravel() for tensor in full]
    users = [[i for i, delta in enumerate(deltas) if abs(delta[place]) > values.get("threshold", 1e-5)]
             for place in range(base.size)]  # fmt: skip
    factors = []
    for expert in range(len(deltas)):
        shared = sum(expert in using and len(using) > 1 for using in users)
        alone = sum(using == [expert] for using in users)
        ratio = min(shared / alone, values["boost_limit"]) if alone and "boost" in values else 0.0
        factors.append(1 + values.get("boost", 0.0) * ratio)
    merged = [
        factors[using[0]] * deltas[using[0]][place] if len(using) == 1
        else sum(deltas[i][place] for i in using) / max(len(using), 1)
        for place, using in enumerate(users)
    ]  # fmt: skip
    return base + np.reshape(merged, base.shape)


def _magmax(base: Array, full: list[Array], weights: list[float], _: Chooser, values: Mapping[str, Any]) -> Array:
    deltas = np.stack([tensor - base for tensor in reversed(full)])
    largest = np.take_along_axis(deltas, np.abs(deltas).argmax(axis=0)[None], axis=0)[0]
    return base + values.get("scale", 1) * largest


@_mean_of_vectors
def _cart(deltas: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    mean = np.mean(deltas, axis=0)
    rank = math.ceil(values.get("rank_fraction", 0.04) * min(mean.shape))
    parts = [_leading(delta - mean, rank, _size(deltas)) for delta in deltas]
    return mean + values.get("own_scale", 1) * np.sum([u @ np.diag(sigma) @ v.T for u, sigma, v in parts], axis=0)


@_mean_of_vectors
def _wudi(deltas: list[Array], weights: list[float], chosen: Chooser, values: Mapping[str, Any]) -> Array:
    """By autograd and torch's Adam."""
    own = torch.from_numpy(np.stack([delta for delta in deltas if delta.any()] or [np.zeros_like(deltas[0])]))
    merged = torch.nn.Parameter(own.sum(0))
    optimizer = torch.optim.Adam([merged], lr=values.get("learning_rate", 1e-5))
    sizes = own.square().sum((1, 2), keepdim=True).clamp(min=1e-300)
    for _ in range(values.get("max_iter", 300)):
        optimizer.zero_grad()
        (((merged - own) @ own.mT).square() / sizes).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return merged.detach().numpy()


METHODS: dict[str, Callable[..., Array]] = {
    "della": _della,
    "della_linear": _della_linear,
    "breadcrumbs": _breadcrumbs,
    "breadcrumbs_ties": _breadcrumbs_ties,
    "sce": _sce,
    "nuslerp": _nuslerp,
    "multislerp": _multislerp,
    "karcher": _karcher,
    "model_stock": _model_stock,
    "nearswap": _nearswap,
    "arcee_fusion": _arcee_fusion,
    "tsv": _tsv,
    "iso_c": _iso_c,
    "iso_cts": _iso_cts,
    "knots_ties": _knots_ties,
    "knots_dare_ties": _knots_dare_ties,
    "ram": _ram,
    "ramplus_tl": _ram,
    "magmax": _magmax,
    "cart": _cart,
    "wudi": _wudi,
}
