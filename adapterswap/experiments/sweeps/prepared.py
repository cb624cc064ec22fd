"""Prepare a sweep before weights are loaded: open the experts, find the tasks, plan every cell.

This way all mistakes are reported early and together.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.core import (
    BASE,
    Adapter,
    Checkpoint,
    Depth,
    OpenedBase,
    Plan,
    Target,
    open_checkpoint,
    open_expert,
)
from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.core.planning.targets import clash
from adapterswap.engines.serving.places import Place, Places
from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.experiments.sweeps.families import LANGUAGE, TASK
from adapterswap.experiments.sweeps.grid import Grid, make_cells
from adapterswap.experiments.sweeps.plans import Expert, Plans
from adapterswap.experiments.sweeps.recipe import EngineByKind, SweepRecipe, extra_experts
from adapterswap.experiments.sweeps.recording import check_out_path
from adapterswap.experiments.sweeps.results import FORMAT, TaskInfo
from adapterswap.experiments.sweeps.tasks import find_tasks, named_tasks
from adapterswap.kit.errors import FieldError, Problems, UnsupportedError
from adapterswap.kit.files.hashes import sha256_of


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
        harness_tasks: the same names → the harness's own tasks, loaded once: a change of their files does not affect
            a run.
        settings: how tasks are evaluated.
        grid: the cells.
        plans: cell → its plan, made when it is read; None for the base.
        companions: whose tokenizer and chat template the prompts of all cells have.
        described: all of it as plain data, without paths of this machine: the content of sweep.json before the judge
            adds the versions and the settings of the model.
    """

    recipe: SweepRecipe
    base: OpenedBase
    num_layers: int
    experts: Mapping[str, Expert]
    sides: Mapping[str, str]
    tasks: Mapping[str, TaskInfo]
    harness_tasks: LoadedTasks
    settings: Settings
    grid: Grid
    plans: Plans
    companions: CompanionPlan
    described: Mapping[str, Any]

    @property
    def notes(self) -> list[str]:
        """Sentences on the prompts, for the user."""
        notes = self.companions.prompt_lines
        if self.settings.date != self.recipe.settings.date:
            date = self.settings.date
            notes.append(f"the chat template prints today's date: set settings.date to {date} to resume another day")
        return notes

    def exam(self, names: Iterable[str], documents: Mapping[str, Collection[int]] | None = None) -> Exam:
        """These tasks, with all documents or those of `documents`."""
        return Exam(self.base, self.harness_tasks.only(names), self.settings, documents)

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The experts that are adapters; all of them are loaded together."""
        return {name: expert for name, expert in self.experts.items() if isinstance(expert, Adapter)}

    @cached_property
    def beyond_vllm(self) -> frozenset[str]:
        """The experts whose changes vLLM cannot hold as LoRA."""
        from adapterswap.experiments.evaluation.vllm_engine import VLLMEngine

        return frozenset(
            VLLMEngine.cannot_hold(self.adapters, self.base) | (self.experts.keys() - self.adapters.keys())
        )

    @property
    def by_rules(self) -> list[tuple[str, Plan]]:
        """The short names of compositions made by rules, which do not show their layers, with their plans."""
        plans = []
        for cell in self.grid.cells:
            plan = self.plans[cell.cell] if "rules=" in cell.configuration else None
            if plan is not None:
                plans.append((cell.short, plan))
        return plans

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
    recipe: SweepRecipe,
    *,
    confirm_run_unsafe_code: bool = False,
    trust_task_code: bool = False,
    out_path: str | Path | None = None,
    overwrite: bool = False,
) -> PreparedSweep:
    """Open everything that a recipe names, and check every cell.

    Args:
        recipe: the recipe.
        confirm_run_unsafe_code: allow tasks to run code that the model wrote (MBPP).
        trust_task_code: allow the task files in `settings.include_path` to run their own Python code.
        out_path: the folder of the sweep, which is checked before anything is read.
        overwrite: replace a sweep that is in the folder.

    Raises:
        AdapterswapError: lists all mistakes that can be found together; its class is their closest common one. A base
            or an expert cannot be opened (`BaseModelError`, `ExpertError`, `NotFoundError`) or switched
            (`UnsupportedError`), a task is unknown or a setting out of range (`ArgumentError`, `FieldError`), or a
            composition does not fit the experts (`CompositionError`).
    """
    # What is quick comes first
    if out_path is not None:
        check_out_path(out_path, None, overwrite=overwrite)
    LoadedTasks.check_names(list(named_tasks(recipe)), recipe.settings.include_path)

    # The experts, and the base with the tokenizer and chat template of the prompts
    problems = Problems(FieldError)
    places = _places(recipe)
    experts, base = _opened(recipe, places, problems)
    companions = CompanionPlan.decide_prompts(
        {name: expert.source.folder for name, expert in experts.items()},
        base.source.folder,
        rows=getattr(base.config.get_text_config(), "vocab_size", None),
        tokenizer=recipe.tokenizer,
        template=recipe.settings.chat_template_from,
    )
    base = base.with_companions(companions)

    # Settings, tasks and layers
    settings = recipe.settings.as_settings(
        confirm_run_unsafe_code=confirm_run_unsafe_code, trust_task_code=trust_task_code
    )
    with problems.collect():
        settings.check(base.tokenizer)
        settings = settings.dated(base.tokenizer)
    with problems.collect():
        tasks_of_sweep, tasks, harness_tasks = find_tasks(recipe, settings)
    with problems.collect():
        base.check_depth(recipe.num_layers, "Leave num_layers out, or correct it")
        num_layers = Depth.known(
            recipe.num_layers or base.num_layers,
            base.reference,
            "Add `num_layers:` to the recipe",
            parameter="num_layers",
        )
    problems.raise_if_any()

    # The cells
    full = [name for name, expert in experts.items() if isinstance(expert, Checkpoint)]
    grid = make_cells(recipe, tasks_of_sweep, num_layers, full)
    if recipe.config_from is not None and not any("config_from" in cell.composition for cell in grid.cells):
        raise FieldError(
            f"config_from is {recipe.config_from!r}, but no composition has a full checkpoint with a config to choose",
            "Leave it out: adapters run with the base's config",
            parameter="config_from",
        )

    # Their plans. The weights of a base on the Hub are downloaded now only if experts are compared with them.
    stored = None
    merged = any(cell.output.get("full_rank") for cell in grid.cells) and base.source.revision is None
    if full or merged:
        stored = open_checkpoint(recipe.base_model)
    plans = Plans(recipe, experts, num_layers, stored, grid.cells)
    plans.check(problems)
    problems.raise_if_any()

    sides = {name: side for name, (_, side) in places.items()}
    prepared = PreparedSweep(
        recipe, base, num_layers, experts, sides, tasks, harness_tasks, settings, grid, plans, companions, {}
    )
    return replace(prepared, described=_describe(prepared))


def _places(recipe: SweepRecipe) -> dict[str, tuple[str, str]]:
    """Expert → its folder or Hub id, and its role or its row of `extra`."""
    places: dict[str, tuple[str, str]] = {}
    sides = {role: Places(members).adapters for role, members in recipe.by_role.items()}
    for side, adapters in (*sides.items(), *extra_experts(recipe).items()):
        for name, place in adapters.items():
            places[name] = place, side
    return places


def _opened(
    recipe: SweepRecipe, places: Mapping[str, tuple[str, str]], problems: Problems
) -> tuple[dict[str, Expert], OpenedBase]:
    """The experts at these places, which one model can hold together, and the base without its weights."""
    experts: dict[str, Expert] = {}
    for name, (place, _) in places.items():
        with problems.collect():
            experts[name] = _open(place, _field(name, recipe))

    # PEFT holds all adapters in one model.
    parts = {}
    for name, expert in experts.items():
        if isinstance(expert, Adapter):
            parts[name] = expert.saved, expert.parts
    reason = clash(parts)
    if reason is not None:
        problems.add(
            reason,
            "Train both the same way, or sweep them separately; `compose` and `evaluate` take compositions of both",
            parameter="experts",
            kind=UnsupportedError,
        )

    with problems.collect():
        base = OpenedBase.open(recipe.base_model, tokenizer_of_experts=True)
    problems.raise_if_any()
    return experts, base


def _field(name: str, recipe: SweepRecipe) -> str:
    """The field of the recipe that names an expert."""
    for role, experts in recipe.by_role.items():
        if name in Places(experts).adapters:
            return {TASK: "task_experts", LANGUAGE: "language_experts"}.get(role, "roles")
    return "extra"


def _open(place: str, field: str) -> Expert:
    """Open an expert that the model can hold; the error names the field of the recipe."""
    expert = open_expert(place)
    if isinstance(expert, Checkpoint):
        return expert
    try:
        Target.LIVE.check_expert(expert, place)
    except UnsupportedError as error:
        raise error.recast(parameter=field) from None
    return expert


def _describe(prepared: PreparedSweep) -> dict[str, Any]:
    """The content of sweep.json."""
    base = prepared.base.source
    experts = {}
    for name, expert in prepared.experts.items():
        # Hashes that identify it; for a full checkpoint the same as for the base
        if isinstance(expert, Adapter):
            hashes = {"sha256": sha256_of(expert.file.path), "config_sha256": expert.config.sha256}
        else:
            hashes = expert.identity
        source = {"source": expert.source.name, "revision": expert.source.revision}
        experts[name] = {"side": prepared.sides[name], **source, **hashes}

    content: dict[str, Any] = {
        "format": FORMAT,
        "adapterswap_version": __version__,
        "recipe": _public_recipe(prepared),
        "base_model": {"source": base.name, "revision": base.revision, **prepared.base.identity},
        "experts": experts,
        "num_layers": prepared.num_layers,
        "tasks": {name: info.as_json() for name, info in prepared.tasks.items()},
        "task_files": prepared.settings.task_files,
        "companions": {kind: prepared.companions.owner(kind) or BASE for kind in ("tokenizer", "chat_template")},
        "settings": prepared.settings.described(),
        "cells": [cell.as_json() for cell in prepared.grid.cells],
    }
    engines = prepared.recipe.settings.engine
    if isinstance(engines, EngineByKind):
        content["settings"]["engine"]["loglikelihood"] = engines.loglikelihood
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def _public_recipe(prepared: PreparedSweep) -> dict[str, Any]:
    """The recipe with names in place of paths; it can be read again once the paths are filled in."""
    recipe, experts = prepared.recipe, prepared.experts
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    content["base_model"] = str(prepared.base.source)

    def named(members: Mapping[str, Place]) -> dict[str, Any]:
        chains = Places(members).chains
        places: dict[str, Any] = {}
        for name in members:
            if name in chains:
                places[name] = {"chain": [experts[part].name for part in chains[name]]}
            else:
                places[name] = experts[name].name
        return places

    content["task_experts"] = named(recipe.task_experts)
    content["language_experts"] = named(recipe.language_experts)
    if recipe.roles:
        content["roles"] = {role: named(members) for role, members in recipe.roles.items()}
    if recipe.extra:
        content["extra"] = {}
        for row, names in extra_experts(recipe).items():
            content["extra"][row] = [experts[name].name for name in names]
    if recipe.settings.include_path is not None:
        content["settings"]["include_path"] = Path(recipe.settings.include_path).resolve().name
    return content
