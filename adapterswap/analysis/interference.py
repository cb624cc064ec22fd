"""How the task vectors of two experts interfere: cosine, overlap of their subspaces, and conflicting signs.

For each matrix that both change: the cosine of the two ΔW; the overlap of the subspaces that they write into (columns)
and read from (rows); the share of elements whose signs differ. Knows numbers; draws nothing and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from adapterswap.analysis.deltas import matrices
from adapterswap.analysis.surveying import ModuleInterference, survey
from adapterswap.arithmetic.lowrank import cosine
from adapterswap.errors import ExpertError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint

__all__ = ["Interference", "ModuleInterference", "check_shared", "interfere"]

# The same seed gives two LoRA experts the same initial A, and training changes A little: a mean cosine of .92 was
# measured after ordinary training. By chance it is about 0, so any threshold between the two detects a shared start.
_SHARED_START = 0.5
_NORMAL = 1.96  # 95 % lie within this many standard deviations of the mean


@dataclass(frozen=True)
class Interference:
    """Two experts compared on each matrix that both change."""

    experts: tuple[str, str]
    modules: tuple[ModuleInterference, ...]

    @property
    def shared_start(self) -> float | None:
        """The mean cosine of A's rows if it shows that both experts started from the same A; otherwise None.

        With a shared start, `read` reflects the seed rather than what the experts learned.
        """
        starts = [module.start for module in self.modules if module.start is not None]
        mean = float(np.mean(starts)) if starts else 0.0
        return mean if mean > _SHARED_START else None

    def by_layer(self) -> dict[int, dict[str, float | None]]:
        """By layer: the cosine over all of its matrices, mean overlaps, and the share of conflicting signs."""
        return {layer: _together(modules) for layer, modules in self._layers().items()}

    def shuffled_by_layer(self) -> dict[int, dict[str, tuple[float, float] | None]]:
        """By layer: the 95 % interval (low, high) of the same numbers if the second expert is shuffled."""
        return {layer: _band(modules) for layer, modules in self._layers().items()}

    @property
    def cosine(self) -> float | None:
        """The cosine over all matrices in the layers."""
        modules = [module for module in self.modules if module.matrix.layer is not None]
        return cosine(math.fsum(module.product for module in modules), _norms(modules))

    @property
    def shuffled_cosine(self) -> tuple[float, float] | None:
        """The 95 % interval of `cosine` if the second expert is shuffled."""
        modules = [module for module in self.modules if module.matrix.layer is not None]
        return _band(modules)["cosine"] if modules else None

    def _layers(self) -> dict[int, list[ModuleInterference]]:
        layers: dict[int, list[ModuleInterference]] = {}
        for module in self.modules:
            if module.matrix.layer is not None:
                layers.setdefault(module.matrix.layer, []).append(module)
        return dict(sorted(layers.items()))


def interfere(
    experts: dict[str, Adapter | Checkpoint],
    base: Checkpoint | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Interference:
    """Compare two experts.

    Args:
        experts: the two, by name.
        base: their base. Required if one of them is a full checkpoint.
        progress: called after every matrix.

    Raises:
        ExpertError: they share no matrix, or a matrix has different shapes; see also `delta_reader`.
    """
    names = check_shared(experts, base)
    comparison = survey(experts, base, rows=False, progress=progress)
    return Interference(names, tuple(comparison.meetings[names]))


def check_shared(experts: Mapping[str, Adapter | Checkpoint], base: Checkpoint | None) -> tuple[str, str]:
    """The names of two experts, after a check that both change a common matrix.

    Raises:
        ExpertError: they share no matrix; see also `matrices`.
    """
    (first_name, first), (second_name, second) = experts.items()
    if not matrices(first, base).keys() & matrices(second, base).keys():
        raise ExpertError(
            f"{first_name} and {second_name} change no matrix in common",
            "Compare experts of one base that adapt the same modules",
            parameter="experts",
        )
    return first_name, second_name


def _norms(modules: list[ModuleInterference]) -> tuple[float, float]:
    first, second = (math.sqrt(math.fsum(module.norms[side] ** 2 for module in modules)) for side in (0, 1))
    return first, second


def _band(modules: list[ModuleInterference]) -> dict[str, tuple[float, float] | None]:
    """The 95 % intervals of the numbers of `_together`, with every module shuffled independently."""
    norms = _norms(modules)
    elements = [module.elements for module in modules]
    weights: dict[str, list[float] | None] = {
        "product": [1 / (norms[0] * norms[1])] * len(modules) if norms[0] * norms[1] else None,
        "written": [1 / len(modules)] * len(modules),
        "read": [1 / len(modules)] * len(modules),
        "conflict": [each / sum(elements) for each in elements] if sum(elements) else None,
    }
    ends = {"cosine": (-1.0, 1.0)}
    bands: dict[str, tuple[float, float] | None] = {}
    for name, key in (("cosine", "product"), ("written", "written"), ("read", "read"), ("sign_conflicts", "conflict")):
        shares = weights[key]
        if shares is None:
            bands[name] = None
            continue
        mean = math.fsum(share * module.shuffled[key].mean for share, module in zip(shares, modules, strict=True))
        variance = math.fsum(
            share**2 * module.shuffled[key].variance for share, module in zip(shares, modules, strict=True)
        )
        low, high = ends.get(name, (0.0, 1.0))
        half = _NORMAL * math.sqrt(variance)
        bands[name] = max(low, mean - half), min(high, mean + half)
    return bands


def _together(modules: list[ModuleInterference]) -> dict[str, float | None]:
    norms = _norms(modules)
    elements = sum(module.elements for module in modules)
    return {
        "cosine": cosine(math.fsum(module.product for module in modules), norms),
        "written": float(np.mean([module.written for module in modules])),
        "read": float(np.mean([module.read for module in modules])),
        "sign_conflicts": sum(module.conflicts for module in modules) / elements if elements else None,
    }
