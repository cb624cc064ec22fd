"""Measure experts one by one and in pairs, and write the results to a folder.

Reads experts; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from adapterswap.core import Adapter, Checkpoint, open_checkpoint, open_expert
from adapterswap.experiments.analysis.interference import (
    Changes,
    FractionTable,
    Interference,
    check_layers,
    check_shared,
    choose_threshold,
    read_fractions,
    write_fractions,
)
from adapterswap.experiments.analysis.matrices import matrices, under_stored_names
from adapterswap.experiments.analysis.pictures import (
    describe_fractions,
    describe_interference,
    describe_meetings,
    describe_norms,
)
from adapterswap.experiments.analysis.survey import survey
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, Problems, check_type
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.text import write_json
from adapterswap.kit.style import STYLE

_RECORD = "analysis.json"


ANALYSIS = OutputKind(_RECORD, lambda record: record.keys() >= {"experts", "pairs"})
"""The kind of folder that `analyze` writes."""


WIDTH = 6.75  # inches: both columns of a page
Expert = Adapter | Checkpoint
Bars = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Makes a progress bar from the name and number of what it counts; yields a function that advances it by one."""


def no_bars(what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
    """A progress bar that shows nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class Analysis:
    """The results of `analyze`.

    Attributes:
        tables: for each expert, the share of rows with a change above the threshold, by layer and kind of matrix.
        changes: for each expert, the norm of every matrix's ΔW; empty if `tables` were read from a file.
        pairs: for each pair of experts, how their ΔW compare.
        remarks: full checkpoints whose config computes differently from the base's, which ΔW does not show.
    """

    tables: tuple[FractionTable, ...]
    changes: tuple[Changes, ...] = ()
    pairs: tuple[Interference, ...] = ()
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Analysis of {', '.join(repr(table.expert) for table in self.tables)}; threshold {self.threshold}>"

    @property
    def threshold(self) -> float | None:
        """The threshold on a row's mean absolute ΔW; None if the tables were read from a file."""
        return self.tables[0].threshold

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data, as `adapterswap analyze --json` prints it."""
        # What each expert changed
        experts: dict[str, Any] = {}
        for table in self.tables:
            cells = []
            for (layer, part), value in table.cells.items():
                cells.append({"layer": layer, "module": part, "fraction": value})
            experts[table.expert] = {"threshold": table.threshold, "fractions_of_rows": cells}

        for expert_changes in self.changes:
            matrices_changed = {}
            for change in expert_changes.modules:
                matrices_changed[change.matrix.name] = {
                    "norm": change.norm,
                    "base_norm": change.base_norm,
                    "mean_row_magnitude": float(change.rows.mean()),
                }
            experts[expert_changes.expert] |= {
                "mean_row_magnitude": expert_changes.magnitude,
                "modules": matrices_changed,
            }

        # How the changes of each pair compare
        pairs = []
        for pair in self.pairs:
            matrices_shared = {}
            for module in pair.modules:
                sign_conflicts = None
                if module.elements:
                    sign_conflicts = module.conflicts / module.elements
                matrices_shared[module.matrix.name] = {
                    "cosine": module.cosine,
                    "written": module.written,
                    "read": module.read,
                    "by_chance": list(module.by_chance),
                    "sign_conflicts": sign_conflicts,
                }
            facts = {
                "experts": list(pair.experts),
                "shared_start": pair.shared_start,
                "layers": {str(layer): numbers for layer, numbers in pair.by_layer().items()},
                "shuffled": {str(layer): bands for layer, bands in pair.shuffled_by_layer().items()},
                "cosine": pair.cosine,
                "shuffled_cosine": pair.shuffled_cosine,
                "modules": matrices_shared,
            }
            pairs.append(facts)

        return {"experts": experts, "captions": self.captions(), "remarks": list(self.remarks), "pairs": pairs}

    def captions(self) -> dict[str, str]:
        """By name of a picture that `write` writes: a caption with its thresholds, and what its bands are."""
        captions_by_name = {"changes": describe_fractions(self.tables)}
        if self.changes:
            captions_by_name["norms"] = describe_norms(len(self.changes), relative=self._relative)
        if len(self.pairs) > 1:
            captions_by_name["cosines"] = describe_meetings(len(self.pairs))
        for pair in self.pairs:
            captions_by_name["-".join(pair.experts)] = describe_interference(pair)
        return captions_by_name

    @property
    def _relative(self) -> bool:
        """Whether norms are shown relative to the base's."""
        return all(expert_changes.has_base_norms for expert_changes in self.changes)

    def write(
        self, out_path: str | Path, *, column_width: str | float = WIDTH, overwrite: bool = False,
        inputs: Sequence[str | Path | None] = (), dry_run: bool = False,
    ) -> None:  # fmt: skip
        """Write the pictures (PDF, SVG and PNG), a CSV of the shares, and a JSON of everything, with captions.

        Args:
            out_path: the folder.
            column_width: the pictures' width: `3.25in`, `8.2cm` or `234pt`; a number is in inches.
            overwrite: replace the folder if `analyze` wrote it.
            inputs: folders that the output must not overlap.
            dry_run: check the folder, and write nothing.

        Raises:
            ArgumentError: `column_width` is not a width.
            DependencyError: matplotlib is not installed.
            OutputError: the folder exists (without `overwrite`), holds other files, overlaps an input, or cannot be
                written.
        """
        if dry_run:
            ANALYSIS.check(out_path, overwrite=overwrite, inputs=inputs)
            return
        require("plots")
        width = STYLE.inches(column_width)
        from adapterswap.experiments.analysis.pictures import (
            draw_fractions,
            draw_interference,
            draw_meetings,
            draw_norms,
        )

        with ANALYSIS.folder(out_path, overwrite=overwrite, inputs=inputs) as folder, STYLE.applied():
            write_fractions(self.tables, folder / "changes.csv")
            write_json(folder / "analysis.json", self.as_json())
            STYLE.save(draw_fractions(list(self.tables), width), folder, "changes")
            if self.changes:
                relative = self._relative
                norms = {own.expert: own.layer_norms(relative=relative) for own in self.changes}
                STYLE.save(draw_norms(norms, width, relative=relative), folder, "norms")
            if len(self.pairs) > 1:
                STYLE.save(draw_meetings(self.pairs, width), folder, "cosines")
            for pair in self.pairs:
                STYLE.save(draw_interference(pair, width), folder, "-".join(pair.experts))

    @staticmethod
    def read(path: str | Path) -> Analysis:
        """Shares of rows that were measured elsewhere, from a CSV file; see `read_fractions`."""
        return Analysis(tuple(read_fractions(path)))

    @staticmethod
    def count_matrices(
        experts: Mapping[str, Expert | str | Path],
        *,
        base_model: str | Path | None = None,
        out_path: str | Path | None = None,
        overwrite: bool = False,
    ) -> dict[str, int]:
        """How many matrices of each expert `analyze` would measure; the arguments are `analyze`'s. Reads no tensors."""
        opened = open_experts(experts)
        base = None
        if base_model is not None:
            base = open_checkpoint(base_model)
        if out_path is not None:
            ANALYSIS.check(out_path, overwrite=overwrite, inputs=inputs_of(opened, base))
        return {name: len(matrices(expert, base)) for name, expert in under_stored_names(opened, base).items()}


def analyze(
    experts: Mapping[str, Expert | str | Path],
    *,
    base_model: Checkpoint | str | Path | None = None,
    threshold: float | None = None,
    out_path: str | Path | None = None,
    column_width: str | float = WIDTH,
    overwrite: bool = False,
    bars: Bars = no_bars,
) -> Analysis:
    """Measure where experts changed their base, layer by layer, and compare the changes of each pair of experts.

    Args:
        experts: by name: opened experts, folders or Hub ids.
        base_model: the experts' base. Required for full checkpoints; adds relative norms.
        threshold: on a row's mean absolute ΔW; by default the median over the rows of all experts.
        out_path: a folder for pictures, CSV and JSON; nothing is written by default.
        column_width: the pictures' width, see `Analysis.write`.
        overwrite: replace `out_path` if `analyze` wrote it.
        bars: shows progress.

    Returns:
        All measurements.

    Raises:
        ArgumentError: there are no experts, a name is unsuitable, a full checkpoint comes without its base, or the
            threshold is negative or not finite.
        BaseModelError: the base lacks a weight of an expert, or has it in another shape.
        ExpertError: an expert cannot be opened, changes no matrix in the layers, or holds NaN or infinity; two experts
            share no matrix, or use different module names that the base does not resolve.
        AdapterswapError: see also `Analysis.write`.
    """
    check_type(base_model, (Checkpoint, str, Path, type(None)), "base_model", "Pass a local folder or a Hub id")
    check_type(out_path, (str, Path, type(None)), "out_path", "Pass the path of the folder to write")
    check_type(threshold, (int, float, type(None)), "threshold", "Pass a number, 0 or more")
    if threshold is not None and not (isfinite(threshold) and threshold >= 0):
        raise ArgumentError(
            f"`threshold` is {threshold:g}, but must be finite and 0 or more",
            "Pass 0 or more",
            parameter="threshold",
        )
    STYLE.inches(column_width)
    opened = open_experts(experts)
    if isinstance(base_model, str | Path):
        base: Checkpoint | None = open_checkpoint(base_model)
    else:
        base = base_model
    opened = under_stored_names(opened, base)
    inputs = inputs_of(opened, base)
    if out_path is not None:
        ANALYSIS.check(out_path, overwrite=overwrite, inputs=inputs)  # before anything is computed
    for name, expert in opened.items():
        check_layers(name, expert, base)
    check_shared(opened, base)

    # One pass through the matrices.
    names: set[str] = set()
    for expert in opened.values():
        names.update(matrices(expert, base))
    with bars("matrices", len(names)) as step:
        measured = survey(opened, base, step)

    changes = tuple(Changes(name, tuple(measured.changes[name])) for name in opened)
    if threshold is None:
        threshold = choose_threshold(changes)
    tables = tuple(change_set.fractions(threshold) for change_set in changes)
    pairs = tuple(Interference(pair, tuple(modules)) for pair, modules in measured.meetings.items())

    # Full checkpoints whose config computes differently from the base's.
    remarks = []
    for name, expert in opened.items():
        if isinstance(expert, Checkpoint) and base is not None:
            difference = base.compared_config(expert)
            if difference:
                text = difference.text("the base", name)
                remarks.append(
                    f"the configs of {name} and the base compute differently, which ΔW does not show: {text}"
                )

    analysis = Analysis(tables, changes, pairs, tuple(remarks))
    if out_path is not None:
        analysis.write(out_path, column_width=column_width, overwrite=overwrite, inputs=inputs)
    return analysis


def open_experts(experts: Mapping[str, Expert | str | Path]) -> dict[str, Expert]:
    """Open experts, and check that tables and file names can contain their names."""
    remedy = "Pass a mapping from names to folders, Hub ids or opened experts"
    check_type(experts, Mapping, "experts", remedy)
    if not experts:
        raise ArgumentError("`experts` is empty", remedy, parameter="experts")

    problems = Problems(ArgumentError)
    opened: dict[str, Expert] = {}
    for name, expert in experts.items():
        with problems.collect():
            check_type(name, str, "experts", remedy)
            check_type(expert, (Adapter, Checkpoint, str, Path), f"experts[{name!r}]", remedy)
            if not name or not name.isprintable() or {"/", "\\"} & {*name}:
                raise ArgumentError(
                    f"{name!r} cannot be the name of an expert",
                    "Use printable characters without slashes",
                    parameter="experts",
                )
            if isinstance(expert, str | Path):
                expert = open_expert(expert)
            opened[name] = expert
    problems.raise_if_any()
    return opened


def inputs_of(experts: Mapping[str, Expert], base: Checkpoint | None) -> list[str | Path | None]:
    """Paths that the output must not overlap: the experts, their base, and the bases that they name."""
    paths: list[str | Path | None] = [expert.source.folder for expert in experts.values()]
    if base:
        paths.append(base.source.folder)
    for expert in experts.values():
        if isinstance(expert, Adapter):
            paths.append(expert.config.base_model)
    return paths
