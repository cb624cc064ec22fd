"""Which cells a sweep evaluates, and in which order: all, or those that a search proposes.

A search (optuna) proposes configurations of a family, one after the other. A trial is a configuration evaluated with
every pair. Its value is the mean of the target tasks' primary scores on the documents to choose on. The table chooses
by the same number, and documents to report on are not used. Successive halving evaluates a trial on a few documents
first, then on more, and gives it up if others did better. After a sweep was killed, the results in its folder are
replayed to the sampler in its own order, so it proposes the same trials again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import import_module
from random import Random
from typing import Any

from adapterswap.experiments.sweeps.grid import Assignment, Cell, Space, Trial
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.experiments.sweeps.recipe import Search
from adapterswap.experiments.sweeps.results import Findings, TaskInfo
from adapterswap.experiments.sweeps.summary import half_value, sign_of
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import DataError

_PATIENCE = 20  # proposals in a row that were tried before, or whose zones overlap; then a trial is drawn at random


def batches(prepared: PreparedSweep, findings: Findings) -> Iterator[list[Assignment]]:
    """Lists of assignments to evaluate. Those of one list are on the same documents and may run at the same time.

    Args:
        findings: the results so far. Before the next list is requested, it must contain those of the previous one.
    """
    cells = {cell.cell: cell for cell in prepared.grid.cells}
    yield [Assignment(cell) for cell in _always(prepared)]

    search = prepared.recipe.search
    for space in _searched(prepared):
        assert search is not None
        for trial, documents in _trials(space, search, prepared, findings):
            yield [_on(documents, cells[cell], prepared) for cell in trial.cells]


def expected(prepared: PreparedSweep, seen: Collection[str]) -> list[Cell]:
    """As many cells as will be evaluated, including those in `seen`; a search may propose other ones."""
    included = {cell.cell for cell in _always(prepared)} | set(seen)

    def number_seen(trial: Trial) -> int:
        return sum(cell in seen for cell in trial.cells)

    for space in _searched(prepared):
        assert prepared.recipe.search is not None
        seen_first = sorted(space.trials, key=number_seen, reverse=True)
        included |= _cells_of(seen_first[: prepared.recipe.search.trials])
    return [cell for cell in prepared.grid.cells if cell.cell in included]


def rungs(prepared: PreparedSweep) -> tuple[int, ...]:
    """The number of documents of each target task on each rung; empty without successive halving."""
    search = prepared.recipe.search
    if search is None or search.halving is None:
        return ()

    available = []  # documents to choose on, of each target task
    for task in prepared.tasks.values():
        if task.role == "target":
            available.append(len(task.select))
    return search.halving.rungs(min(available))


def _on(documents: int | None, cell: Cell, prepared: PreparedSweep) -> Assignment:
    """A cell on a rung, or on all documents."""
    if documents is None:
        return Assignment(cell)
    assert prepared.recipe.search is not None
    documents_by_task = {}
    for name in cell.tasks:
        task = prepared.tasks[name]
        if task.role == "target":
            documents_by_task[name] = first_documents(task, documents, prepared.recipe.search.seed)
    return Assignment(cell, documents_by_task)


def first_documents(task: TaskInfo, number: int, seed: int) -> tuple[int, ...]:
    """The first documents to choose on, at least `number`, in a seeded order that tasks of one size share.

    Groups of documents stay together, as in the split: the group that reaches `number` is taken as a whole.
    """
    group_of = task.groups or range(task.num_docs)
    members: dict[str | int, list[int]] = {}
    for doc_id in task.select:
        members.setdefault(group_of[doc_id], []).append(doc_id)

    taken: list[int] = []
    for group in Random(seed).sample(list(members), len(members)):
        if len(taken) >= number:
            break
        taken += members[group]
    return tuple(sorted(taken))


def _searched(prepared: PreparedSweep) -> list[Space]:
    """The spaces that the recipe searches: those with several trials, of the chosen family if it names one."""
    search = prepared.recipe.search
    if search is None:
        return []
    searched = []
    for space in prepared.grid.spaces:
        if len(space.trials) > 1 and search.family in (None, space.family):
            searched.append(space)
    return searched


def _always(prepared: PreparedSweep) -> list[Cell]:
    """The cells that are evaluated whatever the search proposes."""
    searched, others = set(), set()
    searched_spaces = _searched(prepared)
    for space in prepared.grid.spaces:
        if space in searched_spaces:
            searched |= _cells_of(space.trials)
        else:
            others |= _cells_of(space.trials)
    return [cell for cell in prepared.grid.cells if cell.cell not in searched - others]


def _cells_of(trials: Iterable[Trial]) -> set[str]:
    cells: set[str] = set()
    for trial in trials:
        cells.update(trial.cells)
    return cells


def _trials(
    space: Space, search: Search, prepared: PreparedSweep, findings: Findings
) -> Iterator[tuple[Trial, int | None]]:
    """The configurations that the sampler proposes, and their numbers of documents. The papers' default is first."""
    cells = {cell.cell: cell for cell in prepared.grid.cells}

    def value(trial: Trial, documents: int | None) -> float:
        """The mean score of a trial's cells on the documents to choose on; higher is better."""
        results, scores = [], []
        for cell in trial.cells:
            result = findings.get(_on(documents, cells[cell], prepared))
            if result is None:
                continue
            results.append(result)
            score = half_value(result, prepared.tasks, "select")
            if score is not None:
                scores.append(score)

        if len(scores) < len(trial.cells):
            raise DataError(
                f"search: one of the tasks {', '.join(prepared.tasks)} has no score for each document to choose on",
                "Name another score in `primary`, use more documents, or leave `search` out",
                parameter="primary",
            )
        return sign_of(results, prepared.tasks) * sum(scores) / len(scores)

    defaults = {cell.cell for cell in prepared.grid.cells if cell.default}
    first = [trial for trial in space.trials if defaults.issuperset(trial.cells)]
    yield from ask(space.trials, search, value, first=first, rungs=rungs(prepared))


def ask(
    trials: Collection[Trial],
    search: Search,
    value: Callable[[Trial, int | None], float],
    *,
    first: Collection[Trial] = (),
    rungs: Sequence[int] = (),
) -> Iterator[tuple[Trial, int | None]]:
    """Propose `search.trials` different trials, each chosen by the values of the previous ones. Higher is better.

    Numbers are searched by rank: values that are next to each other in a list are neighbours, at any distance.

    Args:
        value: the value of a trial on that many documents, None for all; called when the next trial is requested.
        first: the trials to start with.
        rungs: numbers of documents. A trial is yielded for each before it is yielded for all, and may be given up after
            each.
    """
    require("search")
    optuna: Any = import_module("optuna")  # untyped, so that type checks do not depend on it
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    sampler = samplers[search.sampler](seed=search.seed)
    pruner = optuna.pruners.NopPruner()
    if search.halving is not None:
        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=search.halving.min_documents, reduction_factor=search.halving.reduction_factor
        )
    study = optuna.create_study(sampler=sampler, pruner=pruner, direction="maximize")

    # A point has the places of a trial's values in the lists of the fields that have a choice
    lists: dict[str, list[Any]] = {}
    space: dict[str, Any] = {}
    for field in next(iter(trials)).values:
        different = dict.fromkeys(trial.values[field] for trial in trials)
        values = list(different)
        is_ordered = field != "seed" and all(isinstance(value, int | float) for value in values)
        if is_ordered:
            values.sort()
        if len(values) == 1:
            continue
        lists[field] = values
        if is_ordered:
            space[field] = optuna.distributions.IntDistribution(0, len(values) - 1)
        else:
            space[field] = optuna.distributions.CategoricalDistribution(range(len(values)))

    untried: dict[tuple[Any, ...], Trial] = {}
    for trial in trials:
        point = tuple(values.index(trial.values[field]) for field, values in lists.items())
        untried[point] = trial
    start = [point for point, trial in untried.items() if trial in first]

    drawn = Random(search.seed)
    for _ in range(min(search.trials, len(untried))):
        # The sampler proposes points until one is new. At the start, and after many that are not, a point is chosen
        # for it.
        point = ()
        for _ in range(0 if start else _PATIENCE):
            question = study.ask(space)
            point = tuple(question.params[field] for field in space)
            if point in untried:
                break
            study.tell(question, state=optuna.trial.TrialState.FAIL)
        if point not in untried:
            point = start.pop(0) if start else drawn.choice(list(untried))
            study.enqueue_trial(dict(zip(space, point, strict=True)))
            question = study.ask(space)

        trial = untried.pop(point)
        for documents in rungs:
            yield trial, documents
            question.report(value(trial, documents), documents)
            if question.should_prune():
                study.tell(question, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            yield trial, None
            study.tell(question, value(trial, None))
