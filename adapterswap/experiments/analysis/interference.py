"""What a pass through the matrices shows: how much each expert changed, and how the task vectors of two interfere.

How much is measured as by Bandarkar et al. (ICLR 2025), section 3.2 and appendix A.5: the share of a matrix's rows
whose mean absolute change is above a threshold, by layer and module. For each matrix that two experts change: the
cosine of the two ΔW; the overlap of the subspaces that they write into (columns) and read from (rows); the share of
elements whose signs differ.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adapterswap.core import Adapter, Checkpoint, check_one_list
from adapterswap.core.changes.joint import cosine
from adapterswap.core.model.layers import MAX_LAYERS
from adapterswap.experiments.analysis.matrices import matrices
from adapterswap.experiments.analysis.survey import ModuleChange, ModuleInterference, survey
from adapterswap.kit.errors import DataError, ExpertError, UnsupportedError
from adapterswap.kit.files.text import csv_rows, csv_text, expand

Block = tuple[int, str]
"""A layer and a kind of module, `attention` or `mlp`; the kind is empty for the whole layer."""

COLUMNS = ("expert", "layer", "module", "fraction_of_rows_above_threshold")


@dataclass(frozen=True)
class FractionTable:
    """The share of rows above a threshold, by (layer, module); the threshold is None if it is unknown."""

    expert: str
    threshold: float | None
    cells: Mapping[tuple[int, str], float]

    @property
    def layers(self) -> range:
        deepest = max(layer for layer, _ in self.cells)
        return range(deepest + 1)

    @property
    def modules(self) -> list[str]:
        """The columns, in their original order."""
        return list(dict.fromkeys(module for _, module in self.cells))


@dataclass(frozen=True)
class Changes:
    """How much an expert changed its base, matrix by matrix."""

    expert: str
    modules: tuple[ModuleChange, ...]

    def fractions(self, threshold: float) -> FractionTable:
        """The share of rows whose mean absolute change is above `threshold`, by layer and part of the layer."""
        rows: dict[tuple[int, str], list[npt.NDArray[np.float64]]] = {}
        for change in self.modules:
            if change.matrix.layer is not None:
                rows.setdefault((change.matrix.layer, change.matrix.part), []).append(change.rows)

        cells: dict[tuple[int, str], float] = {}
        for cell, magnitudes in rows.items():
            cells[cell] = float(np.mean(np.concatenate(magnitudes) > threshold))
        return FractionTable(self.expert, threshold, cells)

    def layer_norms(self, *, relative: bool = False) -> dict[int, float]:
        """‖ΔW‖ of each layer, over all of its matrices; with `relative`, divided by ‖W‖ of the same matrices."""
        norms: dict[int, float] = {}
        for (layer, _), (changed, own) in self.squares(per_kind=False).items():
            if relative:
                norms[layer] = math.sqrt(changed / own)
            else:
                norms[layer] = math.sqrt(changed)
        return norms

    def squares(self, *, per_kind: bool) -> dict[Block, tuple[float, float]]:
        """‖ΔW‖² and ‖W‖² of each block; ‖W‖ of an unknown base is 0."""
        sums: dict[Block, tuple[float, float]] = {}
        for change in self.modules:
            if change.matrix.layer is None:
                continue
            block = (change.matrix.layer, "")
            if per_kind:
                block = (change.matrix.layer, change.matrix.source.kind)
            changed, own = sums.get(block, (0.0, 0.0))
            sums[block] = changed + change.norm**2, own + (change.base_norm or 0.0) ** 2
        return sums

    @property
    def has_base_norms(self) -> bool:
        """Whether the norm of the base's weight is known, and not 0, for every matrix."""
        return all(change.base_norm for change in self.modules)

    @property
    def magnitude(self) -> float:
        """The mean absolute change over all rows. Unlike `weights: magnitude`, it leaves embeddings out."""
        rows = [change.rows for change in self.modules]
        return float(np.mean(np.concatenate(rows)))


def measure(
    expert: Adapter | Checkpoint,
    *,
    name: str,
    base: Checkpoint | None = None,
    progress: Callable[[], None] = lambda: None,
    norms_only: bool = False,
) -> Changes:
    """Measure every matrix of an expert.

    Args:
        expert: an opened adapter or checkpoint.
        name: the expert's name in the result.
        base: the expert's base. Required for a checkpoint; for an adapter it adds the base's norms.
        progress: called after every matrix.
        norms_only: measure only norms, which for LoRA need no ΔW; `fractions` and `magnitude` need its rows.

    Raises:
        ExpertError: the expert has no matrix in a layer.
        AdapterswapError: see `matrices` and `delta_reader`.
    """
    check_layers(name, expert, base)
    measured = survey({name: expert}, base, progress, norms_only=norms_only)
    return Changes(name, tuple(measured.changes[name]))


def check_layers(name: str, expert: Adapter | Checkpoint, base: Checkpoint | None) -> None:
    """Raise `ExpertError` unless the expert changes a matrix in a layer; see also `matrices`.

    Raise `UnsupportedError` if it changes layers of an encoder and of a decoder, or of several lists.
    """
    if expert.has_both_stacks:
        raise UnsupportedError(
            f"{name} has an encoder and a decoder ({expert.container}); only models with a single stack of layers "
            "can be measured",
            "Use experts of a decoder-only model",
        )
    if isinstance(expert, Adapter):
        check_one_list(name, expert.parts)
    else:
        check_one_list(name, expert.parameters)
    if all(matrix.layer is None for matrix in matrices(expert, base).values()):
        raise ExpertError(
            f"{name} changes no matrix in the layers, only outside them", "Use an expert that changes attention or MLPs"
        )


def choose_threshold(changes: Iterable[Changes]) -> float:
    """The default threshold: the median over the rows of all experts, so that half of the rows are above it."""
    rows: list[npt.NDArray[np.float64]] = []
    for expert in changes:
        rows += [change.rows for change in expert.modules]
    return float(np.median(np.concatenate(rows)))


def read_fractions(path: str | Path) -> list[FractionTable]:
    """Read tables from a CSV file with the columns expert, layer, module, fraction_of_rows_above_threshold.

    Raises:
        DataError: the file cannot be read, has other columns, or a row has an invalid value.
    """
    remedy = f"Write the columns {', '.join(COLUMNS)}"
    cells: dict[str, dict[tuple[int, str], float]] = {}
    try:
        with expand(path).open(encoding="utf-8", newline="") as file:
            for row in csv_rows(file):
                if tuple(row) != COLUMNS:
                    raise DataError(f"{path} has the wrong columns: {', '.join(row)}", remedy, parameter="path")
                layer, fraction = int(row["layer"]), float(row[COLUMNS[3]])
                if not (0 <= layer < MAX_LAYERS and 0 <= fraction <= 1):
                    raise ValueError(
                        f"layer {layer} is not between 0 and {MAX_LAYERS - 1}, or {fraction} is not between 0 and 1"
                    )
                shares = cells.setdefault(_name_in(row["expert"]), {})
                module = _name_in(row["module"])
                if (layer, module) in shares:
                    raise ValueError(f"{module} in layer {layer} of {row['expert']} occurs twice")
                shares[layer, module] = fraction

    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", "Pass the path of a CSV file", parameter="path"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is not a table of changes: {error}", remedy, parameter="path") from None
    if not cells:
        raise DataError(f"{path} has no rows", remedy, parameter="path")
    return [FractionTable(expert, None, shares) for expert, shares in cells.items()]


def _name_in(cell: str) -> str:
    """The name that `csv_text` wrote into a cell."""
    if cell.startswith("'") and csv_text(cell[1:]) == cell:
        return cell[1:]
    return cell


def write_fractions(tables: Sequence[FractionTable], path: Path) -> None:
    """Write the CSV that `read_fractions` reads, one row per expert, layer and module."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for table in tables:
            for (layer, module), value in table.cells.items():
                writer.writerow((csv_text(table.expert), layer, csv_text(module), repr(value)))


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
        if not starts:
            return None
        mean = float(np.mean(starts))
        if mean > _SHARED_START:
            return mean
        return None

    def by_layer(self) -> dict[int, dict[str, float | None]]:
        """By layer: the cosine over all of its matrices, mean overlaps, and the share of conflicting signs."""
        return {layer: _together(modules) for layer, modules in self._layers().items()}

    def shuffled_by_layer(self) -> dict[int, dict[str, tuple[float, float] | None]]:
        """By layer: the 95 % interval (low, high) of the same numbers if the second expert is shuffled."""
        return {layer: _band(modules) for layer, modules in self._layers().items()}

    @property
    def cosine(self) -> float | None:
        """The cosine over all matrices in the layers."""
        return _cosine(self._in_layers)

    @property
    def shuffled_cosine(self) -> tuple[float, float] | None:
        """The 95 % interval of `cosine` if the second expert is shuffled."""
        if not self._in_layers:
            return None
        return _band(self._in_layers)["cosine"]

    @property
    def _in_layers(self) -> list[ModuleInterference]:
        """The modules in the layers, without those outside, such as embeddings."""
        return [module for module in self.modules if module.matrix.layer is not None]

    def _layers(self) -> dict[int, list[ModuleInterference]]:
        """The modules of each layer, from the bottom; those outside the layers are left out."""
        layers: dict[int, list[ModuleInterference]] = {}
        for module in self.modules:
            if module.matrix.layer is not None:
                layers.setdefault(module.matrix.layer, []).append(module)
        return dict(sorted(layers.items()))


def check_shared(experts: Mapping[str, Adapter | Checkpoint], base: Checkpoint | None) -> None:
    """Raise `ExpertError` unless every two experts change a common matrix."""
    names = {name: matrices(expert, base).keys() for name, expert in experts.items()}
    for first, second in combinations(names, 2):
        if not names[first] & names[second]:
            raise ExpertError(
                f"{first} and {second} change no matrix in common",
                "Compare experts of one base that adapt the same modules",
                parameter="experts",
            )


def _norms(modules: list[ModuleInterference]) -> tuple[float, float]:
    """‖X‖ and ‖Y‖ over several matrices."""
    first = math.fsum(module.norms[0] ** 2 for module in modules)
    second = math.fsum(module.norms[1] ** 2 for module in modules)
    return math.sqrt(first), math.sqrt(second)


def _cosine(modules: list[ModuleInterference]) -> float | None:
    """The cosine over several matrices."""
    return cosine(math.fsum(module.product for module in modules), _norms(modules))


def _band(modules: list[ModuleInterference]) -> dict[str, tuple[float, float] | None]:
    """The 95 % intervals of the numbers of `_together`, with every module shuffled independently."""
    size = len(modules)
    norms = _norms(modules)
    elements = [module.elements for module in modules]

    # Each number is a weighted sum over the modules: of products, of overlaps, of shares of signs.
    product_weights = sign_weights = None
    if norms[0] * norms[1]:
        product_weights = [1 / (norms[0] * norms[1])] * size
    if sum(elements):
        sign_weights = [number / sum(elements) for number in elements]
    return {
        "cosine": _interval(modules, "product", product_weights, lowest=-1.0),
        "written": _interval(modules, "written", [1 / size] * size),
        "read": _interval(modules, "read", [1 / size] * size),
        "sign_conflicts": _interval(modules, "conflict", sign_weights),
    }


def _interval(
    modules: list[ModuleInterference], key: str, weights: list[float] | None, lowest: float = 0.0
) -> tuple[float, float] | None:
    """Where 95 % of a weighted sum of a shuffled number lie, between `lowest` and 1; None without weights."""
    if weights is None:
        return None
    means: list[float] = []
    variances: list[float] = []
    for module, weight in zip(modules, weights, strict=True):
        shuffled = module.shuffled[key]
        means.append(weight * shuffled.mean)
        variances.append(weight**2 * shuffled.variance)

    mean = math.fsum(means)
    half = _NORMAL * math.sqrt(math.fsum(variances))
    return max(lowest, mean - half), min(1.0, mean + half)


def _together(modules: list[ModuleInterference]) -> dict[str, float | None]:
    """The numbers of several modules: their cosine, mean overlaps, and the share of conflicting signs."""
    sign_conflicts = None
    elements = sum(module.elements for module in modules)
    if elements:
        sign_conflicts = sum(module.conflicts for module in modules) / elements
    return {
        "cosine": _cosine(modules),
        "written": float(np.mean([module.written for module in modules])),
        "read": float(np.mean([module.read for module in modules])),
        "sign_conflicts": sign_conflicts,
    }
