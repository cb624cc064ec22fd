"""The main table of a target task: each method's scores over its units, its retention, and its differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapterswap.experiments import intervals
from adapterswap.experiments.evaluation.languages import METRIC, is_same_language
from adapterswap.experiments.reporting.choices import (
    Choice,
    Unit,
    as_trained,
    choices,
    group_name,
    groups_of,
    has_split,
    matching,
    mean_of,
    paired,
    reported,
    score,
    table_choice,
)
from adapterswap.experiments.sweeps import CellResult, Run, TaskInfo


@dataclass(frozen=True)
class Spread:
    """A score over units.

    Attributes:
        units: the number of units.
        min, mean, max: over the units.
        stderr: the standard error of the mean over documents, or their groups, with the units held fixed; None for
            corpus-level scores, and for a single document or group.
        deviation: the standard deviation over the units (n - 1); None for one unit.
    """

    units: int
    min: float
    mean: float
    max: float
    stderr: float | None
    deviation: float | None


@dataclass(frozen=True)
class ScoreDifference:
    """A method's mean minus the reference's, paired by unit and document.

    Attributes:
        to: the label of the reference's row.
        units: the number of units that both have.
        mean: the mean difference.
        low, high: its 95 % interval, see `mean_interval`; None if there is none. It stays between -1 and 1 if all
            documents' scores are from 0 to 1.
        over: what was drawn at random for the interval: `documents` or their groups (`templates`), and `task experts`,
            `language experts`, `pairs`, `experts of other roles`, `seeds` or `adapters` (of one row) if there are
            several. Empty if there is no interval.
        by_unit: the difference in each unit that both have.
        design: `crossed`, `paired` or `incomplete`, see `Interval`; empty if at most one kind of expert varies.
        reason: why there is no interval; empty if there is one.
    """

    to: str
    units: int
    mean: float
    low: float | None
    high: float | None
    over: tuple[str, ...] = ()
    by_unit: tuple[tuple[Unit, float], ...] = ()
    design: str = ""
    reason: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.low is None or self.high is None:
            return None
        return self.low, self.high


@dataclass(frozen=True)
class Chosen:
    """The cell that represents a method in one unit, and its score on the reported documents."""

    unit: Unit
    cell: str
    configuration: str
    score: float | None


@dataclass(frozen=True)
class MethodRow:
    """A method on a target task.

    Attributes:
        family, kind, label: see `Choice`.
        expected: how many units the run asks for.
        spread: the scores on the reported documents; None if only `papers` can be reported.
        interval: (low, high), the 95 % interval of the mean over units and documents, computed like that of a
            difference; None if there is none. It stays between 0 and 1 if all documents' scores do, and at or above 0
            if none is negative.
        difference: to the reference; None for the reference itself, and if the two have no unit in common.
        tasks: the scores of the same cells on every task of the run, on reported documents.
        english: their mean on the target's benchmark in English; None if the run lacks it.
        all_languages: their mean over all languages of the target's benchmark; None if there is only one.
        papers: the papers' protocol: the scores of `Choice.best` on all documents.
        chosen: the cells.
        understanding: their mean on other benchmarks in the target's language that score the share of right answers,
            such as Belebele; None if the run has none.
        fidelity: the mean share of answers in the target's language, over all documents; None if it was not scored.
        relative_error: the largest relative error of these cells, see `CellResult`; None if there are none.
    """

    family: str
    kind: str
    label: str
    expected: int
    spread: Spread | None
    interval: tuple[float, float] | None
    difference: ScoreDifference | None
    tasks: Mapping[str, Spread]
    english: float | None
    all_languages: float | None
    papers: Spread | None
    chosen: tuple[Chosen, ...]
    relative_error: float | None
    understanding: float | None = None
    fidelity: float | None = None


@dataclass(frozen=True)
class Target:
    """The table of one target task.

    Attributes:
        task: its name.
        language: its language's code.
        metric: the score's metric and filter.
        higher_is_better: whether higher scores are better.
        select, report: the numbers of selection and of reported documents. `select` is 0 if there is no split, and for
            corpus-level scores, which are over all documents.
        languages: the tasks that `all_languages` averages: those of the same benchmark with the same score that all of
            its cells were evaluated on.
        tasks: every task for which a row has a score, the target first.
        rows: grouped by family.
        chosen: whether any family has several configurations.
        of_corpus: whether the score is corpus-level (BLEU, chrF++), so single documents have none.
        group: what the groups of documents are called, in the plural: `templates`; None if documents have no groups.
        groups: the number of groups of the reported documents; None without groups.
    """

    task: str
    language: str | None
    metric: str
    higher_is_better: bool
    select: int
    report: int
    languages: tuple[str, ...]
    tasks: tuple[str, ...]
    rows: tuple[MethodRow, ...]
    chosen: bool
    of_corpus: bool = False
    group: str | None = None
    groups: int | None = None

    @property
    def of_groups(self) -> str:
        """What follows the number of reported documents: ` of 12 templates`; empty without groups."""
        if self.group is None:
            return ""
        name = self.group.removesuffix("s") if self.groups == 1 else self.group
        return f" of {self.groups} {name}"

    @property
    def untested(self) -> list[str]:
        """Why differences have no interval, in sentences without a full stop."""
        if self.of_corpus:
            return ["There is no interval, because it has one score for the whole corpus"]
        reasons: dict[str, str] = {}
        for row in self.rows:
            if row.difference is not None:
                reasons[row.label] = row.difference.reason
        by_reason: dict[str, list[str]] = {}
        for label, reason in reasons.items():
            if reason:
                by_reason.setdefault(reason, []).append(label)

        sentences = []
        for reason, labels in by_reason.items():
            of_rows = ""
            if len(labels) < len(reasons):
                of_rows = f" for {', '.join(labels)}"
            sentences.append(f"There is no interval (–){of_rows}: {reason}")
        return sentences


def is_english(task: TaskInfo) -> bool:
    return (task.language or "").replace("-", "_").split("_")[0] in ("en", "eng")


def benchmark_of(task: TaskInfo) -> str | None:
    """A task's name without its language, the same for all languages of a benchmark; None without a language."""
    if task.language is None:
        return None
    place = task.name.rfind(task.language)
    if place < 0:
        return task.name
    return task.name[:place] + task.name[place + len(task.language) :]


def resampled(target: Target) -> str:
    """What was drawn at random for a table's intervals: `task experts, language experts and documents`.

    A side with a single expert is not named: intervals then hold for that expert only. Rows whose intervals are over
    other draws follow in parentheses.
    """
    by_row: dict[str, tuple[str, ...]] = {}
    for row in target.rows:
        if row.difference is not None and row.difference.over:
            by_row[row.label] = row.difference.over

    # What most rows have
    draws = list(by_row.values())
    usual = max(draws, key=draws.count, default=(target.group or "documents",))
    text = _listed(usual)

    exceptions = []
    for label, over in by_row.items():
        if over != usual:
            exceptions.append(f"{label}: {_listed(over)}")
    if exceptions:
        text += f" ({'; '.join(exceptions)})"
    return text


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def target_table(run: Run, task: TaskInfo, reference: str) -> Target:
    """The table of `task`, with every method compared with the family `reference`."""
    all_choices = choices(run, task)
    languages = _languages(run, task)
    rows = [_row(run, task, choice, all_choices, languages, reference) for choice in all_choices]
    with_score: set[str] = set()
    for row in rows:
        with_score |= row.tasks.keys()
    others = [name for name in run.tasks if name in with_score and name != task.name]

    # A corpus-level score is over all documents, whatever the split, and none of them has a score of its own.
    of_corpus = True
    for result in run.results:
        if task.name in result.results and result.results[task.name].docs:
            of_corpus = False
    select, report = 0, task.num_docs
    if not of_corpus:
        report = len(reported(task))
        if has_split(task):
            select = len(task.select)

    groups = None
    if task.groups:
        groups = len({*groups_of(task, reported(task))})

    metric = [part for part in task.primary if part != "none"]
    return Target(
        task=task.name,
        language=task.language,
        metric=", ".join(metric),
        higher_is_better=task.higher_is_better,
        select=select,
        report=report,
        languages=tuple(languages) if len(languages) > 1 else (),
        tasks=(task.name, *others),
        rows=tuple(rows),
        chosen=any(row.kind != "only" for row in rows),
        of_corpus=of_corpus,
        group=group_name(task),
        groups=groups,
    )


def _languages(run: Run, task: TaskInfo) -> dict[str, TaskInfo]:
    """The tasks of a target's benchmark in all languages, which every cell of the target was evaluated on."""
    benchmark = benchmark_of(task)
    if benchmark is None:
        return {}

    # Those of other scores are left out, because a mean over different scores means nothing.
    shared = set(run.tasks)
    for cell in run.cells:
        if task.name in cell.tasks:
            shared &= set(cell.tasks)
    languages = {}
    for name, info in run.tasks.items():
        if benchmark_of(info) == benchmark and info.primary == task.primary and name in shared:
            languages[name] = info
    return languages


def _row(
    run: Run,
    task: TaskInfo,
    choice: Choice,
    all_choices: list[Choice],
    languages: Mapping[str, TaskInfo],
    reference: str,
) -> MethodRow:
    """A method's row: the scores of its cells on all tasks, and its difference from the reference."""
    cells = list(choice.cells.values())
    tasks: dict[str, Spread] = {}
    for name, info in run.tasks.items():
        spread = _spread(cells, info)
        if spread is not None:
            tasks[name] = spread

    # The same cells in English, and in all languages of the benchmark
    english = None
    in_languages = []
    for name, info in languages.items():
        if name in tasks:
            in_languages.append(tasks[name].mean)
            if english is None and is_english(info):
                english = tasks[name].mean
    all_languages = None
    if len(in_languages) > 1 and len(in_languages) == len(languages):
        all_languages = mean_of(in_languages)

    # The same cells on other benchmarks in the target's language
    understanding = []
    for name, spread in tasks.items():
        if _is_understanding(run.tasks[name], task):
            understanding.append(spread.mean)

    # The share of answers in the target's language, if it was scored in every cell
    fidelities = []
    for cell in cells:
        share = None
        if task.name in cell.results:
            share = cell.results[task.name].scores.get(",".join(METRIC))
        fidelities.append(share)
    fidelity = None
    if None not in fidelities:
        fidelity = mean_of(fidelities)

    # The largest error of a reduction to a lower rank: of the chosen cells, or of the best if none is chosen
    errors = []
    for cell in cells or choice.best.values():
        if cell.relative_error is not None:
            errors.append(cell.relative_error)

    chosen = []
    for unit, result in choice.cells.items():
        chosen.append(Chosen(unit, result.cell.cell, result.cell.configuration, score(result, task)))
    return MethodRow(
        family=choice.family,
        kind=choice.kind,
        label=choice.label,
        expected=choice.expected,
        spread=tasks.get(task.name),
        interval=_interval(run, choice, task),
        difference=_difference(run, task, choice, table_choice(all_choices, reference, choice.kind)),
        tasks=tasks,
        english=english,
        all_languages=all_languages,
        papers=_spread(list(choice.best.values()), task, "all"),
        chosen=tuple(chosen),
        relative_error=max(errors, default=None),
        understanding=mean_of(understanding),
        fidelity=fidelity,
    )


def _is_understanding(task: TaskInfo, target: TaskInfo) -> bool:
    """Whether a task is another benchmark in the target's language, scored by the share of right answers."""
    if task.language is None or target.language is None or task.name == target.name:
        return False
    if task.primary[0] not in ("acc", "acc_norm", "exact_match"):
        return False

    # mgsm_sw@2 and mgsm_sw@8 are one benchmark with different shots.
    benchmark = (benchmark_of(task) or "").partition("@")[0]
    target_benchmark = (benchmark_of(target) or "").partition("@")[0]
    return benchmark != target_benchmark and is_same_language(task.language, target.language)


def _spread(cells: Sequence[CellResult], task: TaskInfo, part: str = "report") -> Spread | None:
    """A task's score over cells; None unless every cell has one."""
    values = []
    for cell in cells:
        value = score(cell, task, part)
        if value is None:
            return None
        values.append(value)
    if not values:
        return None

    # The documents that all cells have, with their means over cells
    scores_of_cells = [cell.results[task.name].docs for cell in cells]
    considered = tuple(scores_of_cells[0])
    if part == "report":
        considered = reported(task)
    common, means = [], []
    for doc in considered:
        if all(doc in docs for docs in scores_of_cells):
            scores = [docs[doc] for docs in scores_of_cells]
            common.append(doc)
            means.append(sum(scores) / len(scores))
    error = None
    if means:
        error = intervals.standard_error(means, groups_of(task, common))

    deviation = None
    if len(values) > 1:
        deviation = float(np.std(values, ddof=1))
    return Spread(len(values), min(values), sum(values) / len(values), max(values), error, deviation)


def _interval(run: Run, choice: Choice, task: TaskInfo) -> tuple[float, float] | None:
    """The interval of a choice's mean; None without scores of documents."""
    scores_of_cells = [cell.results[task.name].docs for cell in choice.cells.values()]
    if not scores_of_cells:
        return None
    in_all = set(reported(task)).intersection(*scores_of_cells)
    common = [doc for doc in reported(task) if doc in in_all]
    if not common:
        return None

    # (units, documents)
    values = np.zeros((len(scores_of_cells), len(common)))
    for row, docs in enumerate(scores_of_cells):
        values[row] = [docs[doc] for doc in common]
    bounds = None
    if values.min() >= 0 and values.max() <= 1:
        bounds = intervals.SHARE
    interval = _over_draws(run, task, list(choice.cells), common, values, bounds)
    if interval.ends is None:
        return None
    low, high = interval.ends
    if values.min() >= 0:
        low = max(low, 0.0)
    return low, high


def _over_draws(
    run: Run, task: TaskInfo, units: Sequence[Unit], documents: Sequence[int], values: NDArray[np.float64],
    bounds: tuple[float, float] | None,
) -> intervals.Interval:  # fmt: skip
    """The interval of the mean of values (units, documents), over whatever was drawn."""
    trained = as_trained(units, run)

    # A variant without experts is a seed of the lab, or one of several adapters in a row of their own.
    variants = "seeds"
    for task_side, language_side, variant, _ in trained:
        if task_side or language_side or not (variant or "").startswith("seed "):
            variants = "adapters"
    return intervals.mean_interval(
        values,
        trained,
        groups_of(task, documents),
        names=("task experts", "language experts", variants, "experts of other roles"),
        documents=group_name(task) or "documents",
        bounds=bounds,
    )


def _difference(run: Run, task: TaskInfo, choice: Choice, reference: Choice | None) -> ScoreDifference | None:
    """A choice minus the reference; None for the reference itself, or without a unit that both have."""
    if reference is None or not choice.cells or choice.family == reference.family:
        return None
    units, documents, values = paired(choice.cells, reference.cells, task)
    if not units:
        return None

    if not values.size:  # corpus-level scores, or no document in common
        differences = []
        for unit, a, b in matching(choice.cells, reference.cells):
            own, other = score(choice.cells[a], task), score(reference.cells[b], task)
            if own is not None and other is not None:
                differences.append((unit, own - other))
        if not differences:
            return None
        mean = sum(value for _, value in differences) / len(differences)
        return ScoreDifference(reference.label, len(differences), mean, None, None, (), tuple(differences))

    # If every document's score is from 0 to 1, no mean difference is beyond -1 or 1.
    single_scores: list[float] = []
    for cell in (*choice.cells.values(), *reference.cells.values()):
        single_scores += cell.results[task.name].docs.values()
    bounds = None
    if all(0 <= value <= 1 for value in single_scores):
        bounds = intervals.DIFFERENCE
    interval = _over_draws(run, task, units, documents, values, bounds)
    return ScoreDifference(
        to=reference.label,
        units=len(units),
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        over=interval.over,
        by_unit=tuple(zip(units, values.mean(1).tolist(), strict=True)),
        design=interval.design,
        reason=interval.reason,
    )
