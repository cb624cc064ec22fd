"""Which cells a sweep judges, and in which order: all of them; or, where the recipe searches, those that are asked for.

A search (optuna) asks for configurations of a family, one after the other. A trial is a configuration judged with every
pair, and its value the mean of the target tasks' primary scores on the documents to choose on: the same number by which
the table chooses, so no document that is reported on is looked at. What a folder already holds is told to the sampler
in the order in which it asks, so a sweep that was killed asks the same questions again and gets the same answers.

Knows prepared sweeps and results; knows nothing of models or folders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from random import Random
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.sweeps.grid import Space, Trial
from adapterswap.sweeps.preparing import Prepared
from adapterswap.sweeps.results import Cell, CellResult
from adapterswap.sweeps.settings import Search
from adapterswap.sweeps.summary import half_value, sign_of

__all__ = ["batches", "expected"]

_PATIENCE = 20  # questions in a row that were asked before, or whose zones overlap, until one is drawn at random


def batches(prepared: Prepared, results: Mapping[str, CellResult]) -> Iterator[list[Cell]]:
    """Lists of cells that are judged one after the other, or at once.

    Args:
        prepared: the sweep.
        results: what is finished, by cell; before the next list is asked for, all of the last one must be in it.

    Raises:
        AdapterswapError: optuna is not installed; a task to search by has no score of each document.
    """
    cells = {cell.cell: cell for cell in prepared.grid.cells}
    yield _always(prepared)
    search = prepared.recipe.search
    for space in _searched(prepared):
        assert search is not None
        for trial in _trials(space, search, prepared, results):
            yield [cells[cell] for cell in trial.cells]


def expected(prepared: Prepared, done: Collection[str]) -> list[Cell]:
    """As many cells as there will be, the finished ones among them; a search does not know yet which it asks for."""
    kept = {cell.cell for cell in _always(prepared)} | set(done)
    for space in _searched(prepared):
        finished_first = sorted(space.trials, key=lambda trial: -sum(cell in done for cell in trial.cells))
        assert prepared.recipe.search is not None
        kept |= {cell for trial in finished_first[: prepared.recipe.search.trials] for cell in trial.cells}
    return [cell for cell in prepared.grid.cells if cell.cell in kept]


def _searched(prepared: Prepared) -> list[Space]:
    search = prepared.recipe.search
    if search is None:
        return []
    spaces = [space for space in prepared.grid.spaces if len(space.trials) > 1]
    return [space for space in spaces if search.family in (None, space.family)]


def _always(prepared: Prepared) -> list[Cell]:
    """The cells that no search decides on."""
    searched = _searched(prepared)
    asked = {cell for space in searched for trial in space.trials for cell in trial.cells}
    others = [space for space in prepared.grid.spaces if space not in searched]
    asked -= {cell for space in others for trial in space.trials for cell in trial.cells}
    return [cell for cell in prepared.grid.cells if cell.cell not in asked]


def _trials(space: Space, search: Search, prepared: Prepared, results: Mapping[str, CellResult]) -> Iterator[Trial]:
    """The configurations that the sampler asks for: the papers' default first, and none twice."""
    defaults = {cell.cell for cell in prepared.grid.cells if cell.default}

    def value(trial: Trial) -> float:
        found = [half_value(results[cell], prepared.tasks, "select") for cell in trial.cells]
        known = [score for score in found if score is not None]
        if len(known) < len(found):
            raise AdapterswapError(
                f"search: {', '.join(prepared.tasks)}: a target task has no score of each document to choose on",
                "Give another score in primary, more documents, or leave search out",
            )
        return sign_of([results[trial.cells[0]]], prepared.tasks) * sum(known) / len(known)

    first = [trial for trial in space.trials if defaults.issuperset(trial.cells)]
    yield from ask(space.trials, search, value, first=first)


def ask(
    trials: Collection[Trial], search: Search, value: Callable[[Trial], float], *, first: Collection[Trial] = ()
) -> Iterator[Trial]:
    """As many different trials as `search` says, each chosen by the values of those before; more is better.

    Numbers are searched by rank: neighbours in a list are neighbours for the sampler, whatever lies between them.

    Raises:
        AdapterswapError: optuna is not installed.
    """
    try:
        optuna: Any = import_module("optuna")  # so that types are checked alike where it is not installed
    except ImportError:
        raise AdapterswapError(
            "optuna, which searches, is not installed", "pip install 'adapterswap[search]' installs it"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study = optuna.create_study(sampler=samplers[search.sampler](seed=search.seed), direction="maximize")
    fields = {field: _ordered(field, trials) for field in next(iter(trials)).values}
    space = {
        field: optuna.distributions.IntDistribution(0, len(values) - 1)
        if _is_ordered(field, values)
        else optuna.distributions.CategoricalDistribution(range(len(values)))
        for field, values in fields.items()
        if len(values) > 1
    }
    left = {tuple(fields[field].index(trial.values[field]) for field in space): trial for trial in trials}
    start = [point for point, trial in left.items() if trial in first]
    drawn = Random(search.seed)
    for _ in range(min(search.trials, len(left))):
        point: tuple[Any, ...] = ()
        for _ in range(0 if start else _PATIENCE):
            question = study.ask(space)
            point = tuple(question.params[field] for field in space)
            if point in left:
                break
            study.tell(question, state=optuna.trial.TrialState.FAIL)
        if point not in left:
            point = start.pop(0) if start else drawn.choice(list(left))
            study.enqueue_trial(dict(zip(space, point, strict=True)))
            question = study.ask(space)
        trial = left.pop(point)
        yield trial
        study.tell(question, value(trial))


def _ordered(field: str, trials: Collection[Trial]) -> list[Any]:
    values = list(dict.fromkeys(trial.values[field] for trial in trials))
    return sorted(values) if _is_ordered(field, values) else values


def _is_ordered(field: str, values: list[Any]) -> bool:
    return field != "seed" and all(isinstance(value, int | float) for value in values)
