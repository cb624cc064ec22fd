"""Comparisons across methods and settings: ranks, merging indicators, and the landscape of zones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from adapterswap.core import Composition
from adapterswap.experiments.reporting.choices import (
    Choice,
    Unit,
    as_trained,
    choices,
    families_of,
    full_units,
    group_name,
    has_split,
    is_single,
    matching,
    mean_of,
    reported,
    rungs_of,
    score,
    table_choice,
    unit_text,
)
from adapterswap.experiments.reporting.statistics import Correlation, Ranks, correlate, holm, rank
from adapterswap.experiments.sweeps import Cell, CellResult, Run, TaskInfo

Setting = tuple[str, Unit]
"""A target task and a unit."""

_ZONES = ("bottom", "top", "bottom_transition", "top_transition")
_NAMES = {"method", "task", "language", "chains"}


@dataclass(frozen=True)
class Ranking:
    """Methods ranked over settings.

    A setting is a target task and a unit. Documents of one group are one draw, and all units share the groups. So if
    the targets have groups, a setting of a run with one unit is a group. With several units, both kinds of settings are
    tested, and the kind over which methods differ less clearly is taken: the one with the larger p.

    Attributes:
        methods: the label of each family's row that was ranked.
        single: those of `methods` that compose nothing: the base, an expert, another adapter. They are far from the
            compositions, which raises χ² however the compositions compare.
        excluded: the labels of families that were excluded on request.
        left_out: the labels of families that are in fewer than half of the settings.
        dropped: the number of tasks and units that a ranked family lacks.
        ranks: the tests; the sign of scores is reversed if lower is better.
        group: what the groups of documents are called, if all targets have them: `templates`.
        over_groups: whether a setting is a group. Its score is the mean over its documents, units and tasks.
        has_both: whether this is the kind with the larger p of two.
    """

    methods: tuple[str, ...]
    single: tuple[str, ...]
    excluded: tuple[str, ...]
    left_out: tuple[str, ...]
    dropped: int
    ranks: Ranks
    group: str | None = None
    over_groups: bool = False
    has_both: bool = False


@dataclass(frozen=True)
class Indicator:
    """Experts' own scores on a task, and the scores of their compositions on the target.

    Attributes:
        experts: the family of the experts: `task expert`, `language expert`.
        signal: the task of the expert's own score.
        target: the target task.
        merged: the row of the compositions.
        points: (expert, its own score, the mean score of its compositions).
        correlation: over the points.
        pearson_holm, spearman_holm: both p corrected by Holm's method over all indicators of the same compositions on
            the same target; None if p is None.
    """

    experts: str
    signal: str
    target: str
    merged: str
    points: tuple[tuple[str, float, float], ...]
    correlation: Correlation
    pearson_holm: float | None = None
    spearman_holm: float | None = None


@dataclass(frozen=True)
class GridCell:
    """A choice of bottom and top layers, or the steps of two checkpoints: its mean over all documents and `units`, and
    how many units selected it."""

    bottom: int
    top: int
    mean: float
    units: int
    selected: int


@dataclass(frozen=True)
class ZoneGrid:
    """The landscape of b and u for one family, its transition zones and its other settings; or of two ladders.

    Attributes:
        task: the task whose score it shows.
        family: the method.
        settings: the transition zones and other fixed settings, in words: `transition zones of 1 and 0 layers`.
        cells: sorted by bottom, then top.
        ladders: the experts whose checkpoints are compared, on the task and on the language side; then bottom and top
            are the steps of a pair. Empty for zones.
    """

    task: str
    family: str
    settings: str
    cells: tuple[GridCell, ...]
    ladders: tuple[str, ...] = ()


def ranking(run: Run, targets: list[TaskInfo], reference: str, methods: Collection[str]) -> Ranking | None:
    """Rank families over all settings by their selected configuration, or else by their default or only one.

    Wilcoxon's test compares them with the family `reference`, or every pair if `reference` is not among `methods`.
    """
    cells: dict[str, dict[Setting, list[CellResult]]] = {}
    kinds: dict[str, dict[str, None]] = {}  # by family, as tasks without scores of documents have no selection
    excluded: dict[str, None] = {}
    single: set[str] = set()
    settings: list[Setting] = []
    for task in targets:
        included: list[Choice] = []
        all_units: dict[Unit, None] = {}
        for choice in _one_per_family(choices(run, task)):
            if choice.family in methods:
                included.append(choice)
                all_units |= dict.fromkeys(choice.cells)
            else:
                excluded[choice.label] = None
        units = full_units(all_units)
        settings += [(task.name, unit) for unit in units]

        for choice in included:
            kinds.setdefault(choice.family, {})[choice.label] = None
            if all(is_single(result.cell) for result in choice.cells.values()):
                single.add(choice.family)
            for unit in units:
                scored = _scored_at(unit, choice, task)
                if scored:
                    cells.setdefault(choice.family, {})[task.name, unit] = scored

    # Families that are in fewer than half of the settings are left out, and then the settings that one of the others
    # lacks.
    labels = {family: " or ".join(names) for family, names in kinds.items()}
    ranked = [family for family in labels if len(cells.get(family, ())) * 2 >= len(settings)]
    in_all = set(settings)
    for family in ranked:
        in_all &= cells[family].keys()
    complete = [setting for setting in settings if setting in in_all]

    left_out = []
    for family, label in labels.items():
        if family not in ranked:
            left_out.append(label)

    names = [labels[family] for family in ranked]
    cells_of_ranked = [cells[family] for family in ranked]
    by_unit = rank(_scores_of_units(complete, cells_of_ranked, run), names, labels.get(reference))
    by_group = rank(_scores_of_groups(complete, cells_of_ranked, run), names, labels.get(reference))

    # Groups if documents have them; if there are several units too, the kind with the larger p
    ranks = by_group or by_unit
    has_both = False
    units_as_trained = as_trained([unit for _, unit in complete], run)
    if by_unit is not None and by_group is not None and len(set(units_as_trained)) > 1:
        has_both = True
        if _overall_p(by_unit) >= _overall_p(by_group):
            ranks = by_unit
    if ranks is None:
        return None

    single_names = []
    for family, label in zip(ranked, names, strict=True):
        if family in single:
            single_names.append(label)
    group = None
    if by_group is not None:
        group_names = dict.fromkeys(group_name(task) for task in targets)
        group = " and ".join(name for name in group_names if name)
    return Ranking(
        methods=tuple(names),
        single=tuple(single_names),
        excluded=tuple(excluded),
        left_out=tuple(left_out),
        dropped=len(settings) - len(complete),
        ranks=ranks,
        group=group,
        over_groups=ranks is by_group,
        has_both=has_both,
    )


def _scores_of_units(
    complete: Sequence[Setting], cells: Sequence[Mapping[Setting, list[CellResult]]], run: Run
) -> list[list[float]]:
    """Scores (settings, families) of tasks and units; higher is better.

    Args:
        cells: setting → cells, for each family.
    """
    # Task and training run → a row of scores for each setting, which are several for the checkpoints of a ladder
    rows: dict[Setting, list[list[float]]] = {}
    units_as_trained = as_trained([unit for _, unit in complete], run)
    for setting, unit in zip(complete, units_as_trained, strict=True):
        task = run.tasks[setting[0]]
        scores = []
        for of_family in cells:
            mean = mean_of(score(result, task) for result in of_family[setting])
            assert mean is not None  # the setting is complete
            scores.append(_signed(mean, task))
        rows.setdefault((task.name, unit), []).append(scores)

    return [_mean_rows(of_run) for of_run in rows.values()]


def _scores_of_groups(
    complete: Sequence[Setting], cells: Sequence[Mapping[Setting, list[CellResult]]], run: Run
) -> list[list[float]]:
    """Scores (groups, families), means over documents, units and tasks; none unless all tasks have groups.

    A group of the same name in several tasks is one: benchmarks in several languages are written from one template.
    """
    # Kind and name of a group → a row of scores for each setting, with a score for each family
    rows: dict[tuple[str | None, str], list[list[float]]] = {}
    for setting in complete:
        task = run.tasks[setting[0]]
        if not task.groups:
            return []
        documents: dict[str, list[int]] = {}
        for doc in reported(task):
            documents.setdefault(task.groups[doc], []).append(doc)

        for group, of_group in documents.items():
            scores = []
            for of_family in cells:
                mean = mean_of(result.results[task.name].mean_over(tuple(of_group)) for result in of_family[setting])
                if mean is not None:
                    scores.append(_signed(mean, task))
            if len(scores) == len(cells):
                rows.setdefault((task.group, group), []).append(scores)

    return [_mean_rows(rows_of_group) for rows_of_group in rows.values()]


def _signed(value: float, task: TaskInfo) -> float:
    """A score whose sign is reversed if lower is better."""
    return value if task.higher_is_better else -value


def _mean_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each column."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _overall_p(ranks: Ranks) -> float:
    """Friedman's p, or of two methods Wilcoxon's; 1 if too few settings allow no test."""
    p = ranks.p
    if len(ranks.mean_ranks) == 2:
        p = ranks.comparisons[0].wilcoxon
    if p is None:
        return 1.0
    return p


def _one_per_family(all_choices: list[Choice]) -> list[Choice]:
    """Each family's choice to compare it by."""
    chosen = []
    for family in dict.fromkeys(choice.family for choice in all_choices):
        choice = table_choice(all_choices, family)
        if choice is not None:
            chosen.append(choice)
    return chosen


def _scored_at(unit: Unit, choice: Choice, task: TaskInfo) -> list[CellResult]:
    """A choice's cells that match `unit` and have a score."""
    scored = []
    for _, _, other in matching([unit], choice.cells):
        result = choice.cells[other]
        if score(result, task) is not None:
            scored.append(result)
    return scored


def indicators(run: Run, target: TaskInfo) -> list[Indicator]:
    """Correlations of experts' own scores, on every task, with the mean score of the compositions that include them.

    If there is a split, experts are scored on the selection documents and compositions on the reported ones, because
    chance on shared documents would look like a correlation. A point is an expert; a point for every pair would count
    each expert many times.
    """
    experts = [family for family in families_of(run) if family.endswith(" expert")]

    corrected = []
    for merged in _one_per_family(choices(run, target)):
        if any(is_single(result.cell) for result in merged.cells.values()):
            continue
        computed: list[Indicator] = []
        for family in experts:
            computed += _of_experts(run, target, merged, family)

        pearson = _corrected([indicator.correlation.pearson_p for indicator in computed])
        spearman = _corrected([indicator.correlation.spearman_p for indicator in computed])
        for indicator, pearson_p, spearman_p in zip(computed, pearson, spearman, strict=True):
            corrected.append(replace(indicator, pearson_holm=pearson_p, spearman_holm=spearman_p))
    return corrected


def _of_experts(run: Run, target: TaskInfo, merged: Choice, family: str) -> list[Indicator]:
    """The correlations of one row with the experts of a side, on every task."""
    own = {result.cell.unit: result for result in run.results if result.cell.family == family}
    means: dict[Unit, float] = {}
    for unit in own:
        mean = mean_of(score(result, target) for result in _scored_at(unit, merged, target))
        if mean is not None:
            means[unit] = mean

    computed = []
    for signal in run.tasks.values():
        part = "select" if has_split(signal) else "all"
        points = []
        for unit, mean in means.items():
            value = score(own[unit], signal, part)
            if value is not None:
                points.append((unit_text(unit), value, mean))
        if len(points) < 2:
            continue

        _, own_scores, mean_scores = zip(*points, strict=True)
        correlation = correlate(own_scores, mean_scores)
        if len({*as_trained(means, run)}) < len(means):  # checkpoints of one run are not independent
            correlation = replace(correlation, pearson_p=None, spearman_p=None)
        computed.append(Indicator(family, signal.name, target.name, merged.label, tuple(points), correlation))
    return computed


def _corrected(p_values: list[float | None]) -> list[float | None]:
    """Holm's correction of the p-values that are not None."""
    present = [p for p in p_values if p is not None]
    corrected = iter(holm(present))
    return [None if p is None else next(corrected) for p in p_values]


def grids(run: Run, target: TaskInfo) -> list[ZoneGrid]:
    """Every landscape of bottom and top layers, or of the checkpoints of two ladders, with at least two cells."""
    # The ids of the cells that were selected, each for one unit
    selected: set[str] = set()
    for choice in choices(run, target):
        if choice.kind == "selected":
            selected |= {result.cell.cell for result in choice.cells.values()}

    # (family, other settings) → (bottom, top) → (score, whether it was selected) of each unit
    values: dict[tuple[str, str], dict[tuple[int, int], list[tuple[float, bool]]]] = {}
    layers = run.described.get("num_layers")
    for result in run.results:
        mean = score(result, target, "all")
        cell_zones = _zones(result.cell, layers)
        if mean is None or cell_zones is None:
            continue
        zones, settings = cell_zones
        landscape = values.setdefault((result.cell.family, settings), {})
        landscape.setdefault(zones, []).append((mean, result.cell.cell in selected))

    landscapes = []
    for (family, settings), by_zones in values.items():
        if len(by_zones) < 2:
            continue
        cells = []
        for (bottom, top), of_units in sorted(by_zones.items()):
            units = len(of_units)
            mean = sum(value for value, _ in of_units) / units
            votes = sum(is_selected for _, is_selected in of_units)
            cells.append(GridCell(bottom, top, mean, units, votes))
        landscapes.append(ZoneGrid(target.name, family, settings, tuple(cells)))
    return landscapes + _ladder_grids(run, target)


def _ladder_grids(run: Run, target: TaskInfo) -> list[ZoneGrid]:
    """The landscape of the pairs of two ladders' checkpoints, for every family that has two pairs or more.

    A pair has the score of the family's configuration in tables, on all documents.
    """
    steps = rungs_of(run)
    landscapes = []
    for choice in _one_per_family(choices(run, target)):
        pairs: dict[tuple[str, str], list[GridCell]] = {}
        for (task, language, *_), result in choice.cells.items():
            mean = score(result, target, "all")
            if task in steps and language in steps and mean is not None:
                one, bottom = steps[task]
                other, top = steps[language]
                pairs.setdefault((one, other), []).append(GridCell(bottom, top, mean, 1, 0))

        for ladders, cells in pairs.items():
            if len(cells) > 1:
                in_order = tuple(sorted(cells, key=lambda cell: (cell.bottom, cell.top)))
                landscapes.append(ZoneGrid(target.name, choice.label, "", in_order, ladders))
    return landscapes


def _zones(cell: Cell, num_layers: int | None) -> tuple[tuple[int, int], str] | None:
    """A layer swap's (bottom, top) and its other settings as text; None for a cell without zones."""
    if num_layers is None or not cell.task_expert or not cell.composition:
        return None
    composition = Composition.read_content(dict(cell.composition), where=f"the cell {cell.short}")
    if not composition.has_zones:
        return None
    bottom, top, bottom_transition, top_transition = composition.zones(num_layers)

    words = []
    if bottom_transition or top_transition:
        words.append(f"transition zones of {bottom_transition} and {top_transition} layers")
    for key, value in {**cell.composition, **cell.output}.items():
        if key not in _ZONES and key not in _NAMES:
            words.append(f"{key.replace('_', ' ')} {value}")
    return (bottom, top), ", ".join(words)
