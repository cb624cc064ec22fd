"""Prepare a sweep before weights are loaded: open the experts, find the tasks, plan every cell.

This way all mistakes are reported early and together. Knows nothing of models in memory or of the sweep's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.arithmetic.outputs import Form
from adapterswap.bases import Base, open_base
from adapterswap.errors import (
    AdapterswapError,
    BaseModelError,
    CompositionError,
    FieldError,
    Problems,
    UnsupportedError,
)
from adapterswap.evaluation.fingerprints import task_files
from adapterswap.evaluation.settings import Settings
from adapterswap.evaluation.tasks import check_task_names
from adapterswap.experts.adapters import WEIGHTS, Adapter
from adapterswap.experts.checkpoints import MODEL_CONFIG, Checkpoint, open_checkpoint
from adapterswap.experts.identity import model_fingerprints, sha256_of
from adapterswap.experts.layers import num_layers_in_config
from adapterswap.experts.opening import open_expert
from adapterswap.planning.making import make_plan, merge_plan
from adapterswap.planning.plan import Plan
from adapterswap.sweeps.cells import Cell
from adapterswap.sweeps.grid import Grid, composition_of, make_cells
from adapterswap.sweeps.recipe import SweepRecipe
from adapterswap.sweeps.results import FORMAT
from adapterswap.sweeps.sides import extra_experts
from adapterswap.sweeps.tasks import find_tasks
from adapterswap.sweeps.values import TaskInfo

__all__ = ["PreparedSweep", "prepare"]

Expert = Adapter | Checkpoint


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep that is ready to run.

    Attributes:
        recipe: the recipe.
        base: the base's config and tokenizer.
        num_layers: the number of layers of the base.
        experts: name in compositions → adapter or full checkpoint.
        sides: the same names → task, language, another role, or the expert's row of `extra`.
        tasks: name → task.
        settings: how tasks are evaluated.
        grid: the cells.
        plans: cell → its plan; None for the base.
        described: all of it as plain data, without paths of this machine: the content of sweep.json before the judge
            adds the versions and the settings of the model.
    """

    recipe: SweepRecipe
    base: Base
    num_layers: int
    experts: Mapping[str, Expert]
    sides: Mapping[str, str]
    tasks: Mapping[str, TaskInfo]
    settings: Settings
    grid: Grid
    plans: Mapping[str, Plan | None]
    described: Mapping[str, Any]

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The experts that are adapters; all of them are loaded together."""
        return {name: expert for name, expert in self.experts.items() if isinstance(expert, Adapter)}

    @property
    def inputs(self) -> list[str | Path | None]:
        """Paths that the output may not overlap: bases, experts, task files, the recipe and those that it extends."""
        return [
            self.base.source.folder,
            *(expert.source.folder for expert in self.experts.values()),
            *(adapter.config.base_model for adapter in self.adapters.values()),
            self.settings.include_path,
            *self.recipe.recipe_files,
        ]


def prepare(
    recipe: SweepRecipe, *, confirm_run_unsafe_code: bool = False, trust_task_code: bool = False
) -> PreparedSweep:
    """Open everything that a recipe names, and plan every cell.

    Args:
        recipe: the recipe.
        confirm_run_unsafe_code: allow tasks to run code that the model wrote (MBPP).
        trust_task_code: allow the task files in `settings.include_path` to run their own Python code.

    Raises:
        AdapterswapError: lists all mistakes that can be found together; its class is their closest common one. A base
            or an expert cannot be opened (`BaseModelError`, `ExpertError`, `NotFoundError`) or switched
            (`UnsupportedError`), a task is unknown or a setting out of range (`ArgumentError`, `FieldError`), or a
            composition does not fit the experts (`CompositionError`).
    """
    listed = [recipe.tasks] if isinstance(recipe.tasks, list) else list(recipe.tasks.values())
    named = dict.fromkeys(name for names in [*listed, recipe.retention] for name in names)
    check_task_names(list(named), recipe.settings.include_path)  # first, because it is quick
    problems = Problems(FieldError)
    places = {name: (place, "task") for name, place in recipe.task_experts.items()}
    places |= {name: (place, "language") for name, place in recipe.language_experts.items()}
    places |= {name: (place, role) for role, experts in recipe.roles.items() for name, place in experts.items()}
    for row, adapters in extra_experts(recipe).items():
        places |= {name: (place, row) for name, place in adapters.items()}
    experts: dict[str, Expert] = {}
    for name, (place, _) in places.items():
        with problems.collect():
            experts[name] = _open(place, _field(name, recipe))
    _check_together(experts, problems)
    with problems.collect():
        base = open_base(recipe.base_model)
    problems.raise_if_any()
    settings = recipe.settings.as_settings(
        confirm_run_unsafe_code=confirm_run_unsafe_code, trust_task_code=trust_task_code
    )
    with problems.collect():
        settings.check(base.tokenizer)
    with problems.collect():
        tasks_of_sweep, tasks = find_tasks(recipe, settings)
    with problems.collect():
        num_layers = _num_layers(base, recipe.num_layers)
    problems.raise_if_any()
    full = [name for name, expert in experts.items() if isinstance(expert, Checkpoint)]
    grid = make_cells(recipe, tasks_of_sweep, num_layers, full)
    # The weights of a base on the Hub are downloaded now only if experts are compared with them.
    merged = any(cell.output.get("full_rank") for cell in grid.cells) and base.source.revision is None
    stored = open_checkpoint(recipe.base_model) if full or merged else None
    plans: dict[str, Plan | None] = {}
    for cell in grid.cells:
        with problems.collect():
            plans[cell.cell] = _plan(cell, recipe, experts, num_layers, stored)
    problems.raise_if_any()
    sides = {name: side for name, (_, side) in places.items()}
    prepared = PreparedSweep(recipe, base, num_layers, experts, sides, tasks, settings, grid, plans, {})
    return replace(prepared, described=_describe(prepared))


def _field(name: str, recipe: SweepRecipe) -> str:
    """The field of the recipe that names an expert."""
    fields = {
        "task_experts": recipe.task_experts, "language_experts": recipe.language_experts,
        "roles": [name for experts in recipe.roles.values() for name in experts],
    }  # fmt: skip
    return next((field for field, experts in fields.items() if name in experts), "extra")


def _open(place: str, field: str) -> Expert:
    from adapterswap.live.loading import check_loadable

    expert = open_expert(place)
    if isinstance(expert, Checkpoint):
        return expert
    try:
        check_loadable(expert, place)
    except UnsupportedError as error:
        raise error.recast(parameter=field) from None
    return expert


def _check_together(experts: Mapping[str, Expert], problems: Problems) -> None:
    """Check that PEFT can hold all adapters in one model."""
    from adapterswap.live.switching import clash

    adapters = {name: expert for name, expert in experts.items() if not isinstance(expert, Checkpoint)}
    if (reason := clash(adapters)) is not None:
        problems.add(
            reason,
            "Train both the same way, or sweep them separately; `compose` and `evaluate` take compositions of both",
            parameter="experts",
            kind=UnsupportedError,
        )


def _plan(
    cell: Cell, recipe: SweepRecipe, experts: Mapping[str, Expert], num_layers: int, stored: Checkpoint | None
) -> Plan | None:
    """The plan of a cell; None for the base. `stored` are the base's weights if a cell is merged into them."""
    from adapterswap.live import why_not_live
    from adapterswap.writing.kinds import check_kinds

    composition = composition_of(cell)
    if composition is None:
        return None
    uses_checkpoint = stored is not None and any(
        isinstance(experts[name], Checkpoint) for name in composition.expert_names
    )
    try:
        # The folder, so that a base on the Hub is not looked up again for every cell.
        base_model = str(stored.source.folder) if uses_checkpoint and stored is not None else recipe.base_model
        declared = composition.model_copy(update={"base_model": base_model})
        plan = make_plan(declared, experts, num_layers=num_layers)
        if plan.is_model:
            _check_vocabulary(plan)
            return plan
        if cell.output.get("full_rank"):
            if stored is not None:
                _check_vocabulary(merge_plan(plan, stored))  # reports mistakes before anything is evaluated
        elif cell.output or why_not_live(plan) is not None:  # reduced to an adapter
            check_kinds(plan, Form(**cell.output))
        return plan
    except AdapterswapError as error:
        raise error.within(cell.short) from None


def _check_vocabulary(plan: Plan) -> None:
    """Refuse full weights with rows for tokens that the base lacks, because all cells use the base's tokenizer.

    Raises:
        UnsupportedError: an expert has such rows.
    """
    for slot in plan:
        if slot.rows or (slot.base is not None and slot.shape != slot.base.tensor.shape):
            raise UnsupportedError(
                f"{slot.name} has rows for tokens that the base lacks, but a sweep uses the base's tokenizer",
                "Write the composition with `adapterswap merge`, and evaluate the result with `adapterswap evaluate`",
            )


def _num_layers(base: Base, from_recipe: int | None) -> int:
    from_config = num_layers_in_config(base.config.to_dict())
    if from_recipe is not None and from_config not in (None, from_recipe):
        raise CompositionError(
            f"num_layers is {from_recipe}, but {base.reference} has {from_config} layers",
            "Leave num_layers out, or correct it",
            parameter="num_layers",
        )
    if from_recipe is None and from_config is None:
        raise BaseModelError(
            f"the config of {base.reference} does not say how many layers it has",
            "Add `num_layers:` to the recipe",
            parameter="num_layers",
        )
    return from_recipe or from_config or 0


def _describe(prepared: PreparedSweep) -> dict[str, Any]:
    base, experts, sides = prepared.base.source, prepared.experts, prepared.sides
    content = {
        "format": FORMAT,
        "adapterswap_version": __version__,
        "recipe": _public_recipe(prepared),
        "base_model": {
            "source": base.name, "revision": base.revision, "config_sha256": sha256_of(base.folder / MODEL_CONFIG),
            # A Hub commit identifies its files, which may not all be downloaded yet.
            "files": None if base.revision else model_fingerprints(base.folder),
        },
        "experts": {
            name: {
                "side": sides[name],
                "source": expert.source.name,
                "revision": expert.source.revision,
                **_hashes(expert),
            }
            for name, expert in experts.items()
        },
        "num_layers": prepared.num_layers,
        "tasks": {name: info.as_json() for name, info in prepared.tasks.items()},
        "task_files": task_files(prepared.settings.include_path),
        "settings": prepared.settings.described(),
        "cells": [cell.as_json() for cell in prepared.grid.cells],
    }  # fmt: skip
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def _hashes(expert: Expert) -> dict[str, Any]:
    """The hashes that identify an expert; for a full checkpoint the same as for the base."""
    if isinstance(expert, Adapter):
        return {"sha256": sha256_of(expert.source.folder / WEIGHTS), "config_sha256": expert.config.sha256}
    folder = expert.source.folder
    files = None if expert.source.revision else model_fingerprints(folder)
    return {"config_sha256": sha256_of(folder / MODEL_CONFIG), "files": files}


def _public_recipe(prepared: PreparedSweep) -> dict[str, Any]:
    """The recipe with names in place of paths; it can be read again once the paths are filled in."""
    recipe, experts = prepared.recipe, prepared.experts
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    content["base_model"] = str(prepared.base.source)
    for side in ("task_experts", "language_experts"):
        content[side] = {name: experts[name].name for name in content[side]}
    if recipe.roles:
        content["roles"] = {
            role: {name: experts[name].name for name in members} for role, members in recipe.roles.items()
        }
    if recipe.extra:
        content["extra"] = {
            row: [experts[name].name for name in names] for row, names in extra_experts(recipe).items()
        }  # fmt: skip
    if recipe.settings.include_path is not None:
        content["settings"]["include_path"] = Path(recipe.settings.include_path).resolve().name
    return content
