"""How much each matrix of an expert changed: mean absolute ΔW of every row, and norms.

The measure is that of Bandarkar et al. (ICLR 2025), section 3.2 and appendix A.5: the share of a matrix's rows whose
mean absolute change is above a threshold, by layer and module. Knows numbers; draws nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adapterswap.analysis.deltas import matrices
from adapterswap.analysis.surveying import ModuleChange, survey
from adapterswap.errors import DataError, ExpertError, UnsupportedError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.layers import MAX_LAYERS, check_one_list, has_both_stacks
from adapterswap.files.smallfiles import expand

__all__ = [
    "Changes",
    "FractionTable",
    "ModuleChange",
    "check_layers",
    "choose_threshold",
    "measure",
    "read_fractions",
    "write_fractions",
]

COLUMNS = ("expert", "layer", "module", "fraction_of_rows_above_threshold")


@dataclass(frozen=True)
class FractionTable:
    """The share of rows above a threshold, by (layer, module); the threshold is None if it is unknown."""

    expert: str
    threshold: float | None
    cells: Mapping[tuple[int, str], float]

    @property
    def layers(self) -> range:
        return range(1 + max(layer for layer, _ in self.cells))

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
        cells = {cell: float(np.mean(np.concatenate(magnitudes) > threshold)) for cell, magnitudes in rows.items()}
        return FractionTable(self.expert, threshold, cells)

    def layer_norms(self, *, relative: bool = False) -> dict[int, float]:
        """‖ΔW‖ of each layer, over all of its matrices; with `relative`, divided by ‖W‖ of the same matrices."""
        changed: dict[int, float] = {}
        own: dict[int, float] = {}
        for change in self.modules:
            layer = change.matrix.layer
            if layer is not None:
                changed[layer] = changed.get(layer, 0.0) + change.norm**2
                own[layer] = own.get(layer, 0.0) + (change.base_norm or 0.0) ** 2
        return {layer: math.sqrt(total / own[layer] if relative else total) for layer, total in changed.items()}

    @property
    def magnitude(self) -> float:
        """The mean absolute change over all rows. Unlike `weights: magnitude`, it leaves embeddings out."""
        return float(np.mean(np.concatenate([change.rows for change in self.modules])))


def measure(
    expert: Adapter | Checkpoint,
    *,
    name: str,
    base: Checkpoint | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Changes:
    """Measure every matrix of an expert.

    Args:
        expert: an opened adapter or checkpoint.
        name: the expert's name in the result.
        base: the expert's base. Required for a checkpoint; for an adapter it adds the base's norms.
        progress: called after every matrix.

    Raises:
        ExpertError: the expert has no matrix in a layer.
        AdapterswapError: see `matrices` and `delta_reader`.
    """
    check_layers(name, expert, base)
    return Changes(name, tuple(survey({name: expert}, base, pairs=False, progress=progress).changes[name]))


def check_layers(name: str, expert: Adapter | Checkpoint, base: Checkpoint | None) -> None:
    """Raise `ExpertError` unless the expert changes a matrix in a layer; see also `matrices`.

    Raise `UnsupportedError` if it changes layers of an encoder and of a decoder, or of several lists.
    """
    if has_both_stacks(expert.container):
        raise UnsupportedError(
            f"{name} has an encoder and a decoder ({expert.container}); only models with a single stack of layers "
            "can be measured",
            "Use experts of a decoder-only model",
        )
    check_one_list(name, expert.parts if isinstance(expert, Adapter) else expert.parameters)
    if all(matrix.layer is None for matrix in matrices(expert, base).values()):
        raise ExpertError(
            f"{name} changes no matrix in the layers, only outside them", "Use an expert that changes attention or MLPs"
        )


def choose_threshold(changes: Iterable[Changes]) -> float:
    """The default threshold: the median over the rows of all experts, so that half of the rows are above it."""
    return float(np.median(np.concatenate([change.rows for expert in changes for change in expert.modules])))


def read_fractions(path: str | Path) -> list[FractionTable]:
    """Read tables from a CSV file with the columns expert, layer, module, fraction_of_rows_above_threshold.

    Raises:
        DataError: the file cannot be read, has other columns, or a row has an invalid value.
    """
    remedy = f"Write the columns {', '.join(COLUMNS)}"
    cells: dict[str, dict[tuple[int, str], float]] = {}
    try:
        with expand(path).open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if tuple(rows.fieldnames or ()) != COLUMNS:
                columns = ", ".join(rows.fieldnames or ()) or "none"
                raise DataError(f"{path} has the wrong columns: {columns}", remedy, parameter="path")
            for row in rows:
                layer, fraction = int(row["layer"]), float(row[COLUMNS[3]])
                if not (0 <= layer < MAX_LAYERS and 0 <= fraction <= 1):
                    raise ValueError(
                        f"layer {layer} is not between 0 and {MAX_LAYERS - 1}, or {fraction} is not between 0 and 1"
                    )
                cells.setdefault(row["expert"], {})[layer, row["module"]] = fraction
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", "Pass the path of a CSV file", parameter="path"
        ) from None
    except (ValueError, TypeError, csv.Error) as error:
        raise DataError(f"{path} is not a table of changes: {error}", remedy, parameter="path") from None
    if not cells:
        raise DataError(f"{path} has no rows", remedy, parameter="path")
    return [FractionTable(expert, None, shares) for expert, shares in cells.items()]


def write_fractions(tables: Sequence[FractionTable], path: Path) -> None:
    """Write the CSV that `read_fractions` reads, one row per expert, layer and module."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for table in tables:
            writer.writerows(
                (table.expert, layer, module, repr(value)) for (layer, module), value in table.cells.items()
            )
