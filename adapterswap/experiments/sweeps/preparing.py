"""Prepare a sweep before weights are loaded: open the experts, find the tasks, plan every cell.

This way all mistakes are reported early and together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.core import (
    Adapter,
    Checkpoint,
    Form,
    ModelConfig,
    OpenedBase,
    Place,
    Places,
    Plan,
    Target,
    known_depth,
    make_plan,
    merge_plan,
    open_checkpoint,
    open_expert,
)
from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.core.companions.files import MODEL_CONFIG
from adapterswap.core.companions.tokenizer import BASE_FOLDER
from adapterswap.core.model.checkpoints import model_fingerprints
from adapterswap.core.model.layers import check_depth_of
from adapterswap.core.model.sources import WEIGHTS
from adapterswap.core.planning.targets import clash
from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.experiments.sweeps.grid import Cell, Grid, make_cells
from adapterswap.experiments.sweeps.recipe import EngineByKind, SweepRecipe, SweepTasks, extra_experts
from adapterswap.experiments.sweeps.recording import check_out_path
from adapterswap.experiments.sweeps.results import FORMAT, TaskInfo
from adapterswap.kit.errors import (
    AdapterswapError,
    FieldError,
    Problems,
    UnsupportedError,
)
from adapterswap.kit.files.hashes import sha256_of

_OURS = "normalized"  # the filter of our own MGSM tasks that compares numbers as numbers


def named_tasks(recipe: SweepRecipe) -> dict[str, None]:
    """The tasks, groups and patterns that a recipe names, once each."""
    listed = [recipe.tasks] if isinstance(recipe.tasks, list) else list(recipe.tasks.values())
    return dict.fromkeys(name for names in [*listed, recipe.retention] for name in names)


def find_tasks(recipe: SweepRecipe, settings: Settings) -> tuple[SweepTasks, dict[str, TaskInfo], LoadedTasks]:
    """The tasks of each language expert's pairs; all tasks that a recipe names; and the harness's own."""
    groups = recipe.target_groups()
    problems = Problems(FieldError)
    loaded: dict[str, dict[str, Any]] = {}  # the recipe's names, joined → tasks

    def load(names: list[str]) -> tuple[str, ...]:
        key = "\n".join(names)
        if key not in loaded:
            with problems.collect():
                loaded[key] = LoadedTasks.load(names, settings).tasks
        return tuple(loaded.get(key, ()))

    target = {language: load(names) for language, names in groups.items()}
    retention = load(recipe.retention) if recipe.retention else ()
    problems.raise_if_any()
    known = LoadedTasks({name: task for tasks in loaded.values() for name, task in tasks.items()})
    known.check_own_settings(named_tasks(recipe), settings)
    if settings.language_fidelity:
        known.check_languages()
    targets = dict.fromkeys(task for tasks in target.values() for task in tasks)
    for name in retention:
        if name in targets:
            problems.add(
                f"The task {name} is both in tasks and in retention", "Name it only once", parameter="retention"
            )
    for name in recipe.primary:
        if name not in known.tasks:
            problems.add(
                f"primary: {name!r} is not among the tasks ({', '.join(known.tasks)})",
                "Name one of them",
                parameter="primary",
            )
    infos = {}
    for name in (*targets, *retention):
        role = "target" if name in targets else "retention"
        with problems.collect():
            infos[name] = _describe_task(name, known, role, recipe, settings)
    problems.raise_if_any()
    kinds = {known.tasks[name].OUTPUT_TYPE == "generate_until" for name in infos}
    if isinstance(recipe.settings.engine, EngineByKind) and len(kinds) == 1:
        engine = recipe.settings.engine.generate if kinds == {True} else recipe.settings.engine.loglikelihood
        raise FieldError(
            "settings.engine names an engine for each kind of task, but all tasks are of one kind",
            f"Set `engine: {engine}`",
            parameter="settings.engine",
        )
    _check_directions([info for info in infos.values() if info.role == "target"])
    return SweepTasks(target, retention), infos, known.only(infos)


def _check_directions(targets: Sequence[TaskInfo]) -> None:
    """Refuse targets with opposite directions of better scores: configurations are chosen by the targets' mean."""
    higher, lower = ([task.name for task in targets if task.higher_is_better is more] for more in (True, False))
    if higher and lower:
        raise FieldError(
            f"tasks: higher scores are better in {', '.join(higher)}, but lower ones in {', '.join(lower)}, so their "
            "mean is meaningless",
            "Move one kind to `retention`, or run a sweep for each",
            parameter="tasks",
        )


def _describe_task(name: str, loaded: LoadedTasks, role: str, recipe: SweepRecipe, settings: Settings) -> TaskInfo:
    from lm_eval.evaluator_utils import get_sample_size

    task = loaded.tasks[name]
    metric, filter_name = _primary(name, task, recipe.primary.get(name))
    available = len(task.eval_docs)
    num_docs = min(get_sample_size(task, settings.limit) or available, available)
    select, report = recipe.selection.split(num_docs)
    better = _better(task).get(metric) is not False
    return TaskInfo(
        name, role, loaded.language(name), (metric, filter_name), better, num_docs, select, report,
        loaded.fingerprint(name), averaged=_is_mean(task.aggregation()[metric]),
    )  # fmt: skip


def _is_mean(aggregate: Callable[[list[float]], float]) -> bool:
    """Whether a task's aggregation is the mean of its documents' numbers, whatever it is called."""
    numbers = [0.0, 0.25, 1.0]
    try:
        return math.isclose(aggregate(numbers), math.fsum(numbers) / len(numbers))
    except Exception:  # it takes something else than numbers, and may be the user's own
        return False


def _better(task: Any) -> Mapping[str, bool]:
    return task.higher_is_better() or {}


def _primary(name: str, task: Any, requested: str | None) -> tuple[str, str]:
    """(metric, filter) of the primary score: the recipe's, or the first; the filter `normalized` goes before others."""
    metrics = list(task.aggregation())
    if not metrics:
        raise FieldError(f"tasks: {name} has no score", "Run it with `adapterswap evaluate`", parameter="tasks")
    filters = [ensemble.name for ensemble in task._filters]
    if not requested:
        return metrics[0], _OURS if _OURS in filters else filters[0]
    metric, _, filter_name = requested.partition(",")
    filter_name = filter_name or (_OURS if _OURS in filters else filters[0])
    if metric not in metrics or filter_name not in filters:
        choices = ", ".join(f"{measure},{chosen}" for measure in metrics for chosen in filters)
        raise FieldError(f"primary: {name} has no score {requested!r}", f"Use one of {choices}", parameter="primary")
    return metric, filter_name


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
        cells = (cell for cell in self.grid.cells if "rules=" in cell.configuration)
        return [(cell.short, plan) for cell in cells if (plan := self.plans[cell.cell]) is not None]

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
    if out_path is not None:
        check_out_path(out_path, None, overwrite=overwrite)
    LoadedTasks.check_names(list(named_tasks(recipe)), recipe.settings.include_path)  # first, because it is quick
    problems = Problems(FieldError)
    places: dict[str, tuple[str, str]] = {}
    for role, members in recipe.by_role.items():
        places |= {name: (place, role) for name, place in Places(members).adapters.items()}
    for row, adapters in extra_experts(recipe).items():
        places |= {name: (place, row) for name, place in adapters.items()}
    experts: dict[str, Expert] = {}
    for name, (place, _) in places.items():
        with problems.collect():
            experts[name] = _open(place, _field(name, recipe))
    _check_together(experts, problems)
    with problems.collect():
        base = OpenedBase.open(recipe.base_model)
    problems.raise_if_any()
    settings = recipe.settings.as_settings(
        confirm_run_unsafe_code=confirm_run_unsafe_code, trust_task_code=trust_task_code
    )
    companions = CompanionPlan.decide_prompts(
        {name: expert.source.folder for name, expert in experts.items()}, base.source.folder,
        rows=getattr(base.config.get_text_config(), "vocab_size", None), tokenizer=recipe.tokenizer,
        template=recipe.settings.chat_template_from,
    )  # fmt: skip
    base = base.with_companions(companions)
    with problems.collect():
        settings.check(base.tokenizer)
        settings = settings.dated(base.tokenizer)
    with problems.collect():
        tasks_of_sweep, tasks, harness_tasks = find_tasks(recipe, settings)
    with problems.collect():
        num_layers = _num_layers(base, recipe.num_layers)
    problems.raise_if_any()
    full = [name for name, expert in experts.items() if isinstance(expert, Checkpoint)]
    grid = make_cells(recipe, tasks_of_sweep, num_layers, full)
    _check_config_owner(recipe, grid)
    # The weights of a base on the Hub are downloaded now only if experts are compared with them.
    merged = any(cell.output.get("full_rank") for cell in grid.cells) and base.source.revision is None
    stored = open_checkpoint(recipe.base_model) if full or merged else None
    plans = Plans(recipe, experts, num_layers, stored, grid.cells)
    plans.check(problems)
    problems.raise_if_any()
    sides = {name: side for name, (_, side) in places.items()}
    prepared = PreparedSweep(
        recipe, base, num_layers, experts, sides, tasks, harness_tasks, settings, grid, plans, companions, {}
    )  # fmt: skip
    return replace(prepared, described=_describe(prepared))


def _check_config_owner(recipe: SweepRecipe, grid: Grid) -> None:
    """Refuse a `config_from` that decides nothing."""
    if recipe.config_from is not None and not any("config_from" in cell.composition for cell in grid.cells):
        raise FieldError(
            f"config_from is {recipe.config_from!r}, but no composition has a full checkpoint with a config to choose",
            "Leave it out: adapters run with the base's config",
            parameter="config_from",
        )


def _field(name: str, recipe: SweepRecipe) -> str:
    """The field of the recipe that names an expert."""
    fields = {"task": "task_experts", "language": "language_experts", **dict.fromkeys(recipe.roles, "roles")}
    roles = (role for role, experts in recipe.by_role.items() if name in Places(experts).adapters)
    return next((fields[role] for role in roles), "extra")


def _open(place: str, field: str) -> Expert:
    expert = open_expert(place)
    if isinstance(expert, Checkpoint):
        return expert
    try:
        Target.LIVE.check_expert(expert, place)
    except UnsupportedError as error:
        raise error.recast(parameter=field) from None
    return expert


def _check_together(experts: Mapping[str, Expert], problems: Problems) -> None:
    """Check that PEFT can hold all adapters in one model."""
    adapters = {name: expert for name, expert in experts.items() if not isinstance(expert, Checkpoint)}
    if (reason := clash({name: (adapter.saved, adapter.parts) for name, adapter in adapters.items()})) is not None:
        problems.add(
            reason,
            "Train both the same way, or sweep them separately; `compose` and `evaluate` take compositions of both",
            parameter="experts",
            kind=UnsupportedError,
        )


_MOST_KEPT = 128  # plans, which take about 1 kB for each module


class Plans(Mapping[str, "Plan | None"]):
    """Cell → its plan; None for the base. A plan is made once, when it is checked or read, unless there are very many:
    then only the first ones and the latest are kept.

    Args:
        recipe, experts, num_layers: see `PreparedSweep`.
        stored: the base's weights, if a cell is merged into them.
        cells: all cells.
    """

    def __init__(
        self,
        recipe: SweepRecipe,
        experts: Mapping[str, Expert],
        num_layers: int,
        stored: Checkpoint | None,
        cells: Sequence[Cell],
    ) -> None:
        self._recipe, self._experts, self._num_layers, self._stored = recipe, experts, num_layers, stored
        self._cells = {cell.cell: cell for cell in cells}
        self._latest: tuple[str, Plan | None] = ("", None)
        self._kept: dict[str, Plan | None] = {}
        self._regular = {name for name, expert in experts.items() if _is_regular(expert, num_layers)}
        self._live: dict[str, bool] = {}
        self._zones: dict[str, set[Any]] = {}
        self.checked: list[Cell] = []

    def __getitem__(self, cell: str) -> Plan | None:
        if self._latest[0] != cell:
            self._latest = cell, self._made(cell)
        return self._latest[1]

    def _made(self, cell: str) -> Plan | None:
        """The plan of a cell, made unless it is kept."""
        if cell in self._kept:
            return self._kept[cell]
        plan = self._plan(self._cells[cell])
        if len(self._kept) < _MOST_KEPT:
            self._kept[cell] = plan
        return plan

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def check(self, problems: Problems) -> None:
        """Plan the cells that can show a mistake, or need a rank, that no cell before them does.

        What happens to a layer depends only on the rule that it gets. If every layer of the experts has the same
        modules, cells that differ only in their zones are therefore checked by those of them in which a layer gets
        a rule for the first time.
        """
        for cell in self._cells.values():
            settings, parts = self._parts(cell)
            seen = self._zones.setdefault(settings, set())
            if parts is not None and parts <= seen:
                continue
            with problems.collect():
                plan = self._made(cell.cell)
                seen |= parts or set()
                self._live[settings] = self._live.get(settings, True) and _is_live(plan)
            self.checked.append(cell)

    def is_live(self, cell: Cell) -> bool:
        """Whether a cell is evaluated by switching adapters on and off."""
        return self._live.get(self._parts(cell)[0], False) or _is_live(self[cell.cell])

    def _parts(self, cell: Cell) -> tuple[str, set[Any] | None]:
        """A cell's settings without its zones, and which layer gets which rule; None if it is to be planned itself."""
        composition = cell.parsed
        if (
            composition is None
            or composition.method != "layer_swap"
            or composition.allocation is not None
            or composition.partition is not None
            or composition.bottom is None
            or composition.top is None
            or cell.output.get("full_rank")
            or not self._regular.issuperset(composition.expert_names)
        ):
            return cell.cell, None
        rules = composition.rules(self._num_layers)
        kinds = [repr({**rule.model_dump(exclude_defaults=True), "layers": None}) for rule in rules]
        owners = [
            next((kind for rule, kind in zip(rules, kinds, strict=True) if rule.matches("", layer, "other")), None)
            for layer in range(self._num_layers)
        ]
        settings = {key: value for key, value in cell.composition.items() if key not in _ZONES}
        return repr((settings, cell.output)), {*enumerate(owners), tuple(kinds), frozenset(owners)}

    def _plan(self, cell: Cell) -> Plan | None:
        """The plan of a cell, checked."""
        from adapterswap.core.writing.loadable import check_form

        composition, stored = cell.parsed, self._stored
        if composition is None:
            return None
        uses_checkpoint = stored is not None and any(
            isinstance(self._experts[name], Checkpoint) for name in composition.expert_names
        )
        try:
            # The folder, so that a base on the Hub is not looked up again for every cell.
            base_model = str(stored.source.folder) if uses_checkpoint and stored else self._recipe.base_model
            declared = composition.model_copy(update={"base_model": base_model})
            plan = make_plan(declared, self._experts, num_layers=self._num_layers)
            if plan.is_model:
                _check_vocabulary(plan)
            elif cell.output.get("full_rank"):
                if stored is not None:
                    _check_vocabulary(merge_plan(plan, stored))  # reports mistakes before anything is evaluated
            elif cell.output or not _is_live(plan):  # reduced to an adapter
                check_form(plan, Form(**cell.output))
            return plan
        except AdapterswapError as error:
            raise error.within(cell.short) from None


_ZONES = ("bottom", "top", "bottom_transition", "top_transition")


def _is_live(plan: Plan | None) -> bool:
    """Whether a plan can be computed by switching adapters on and off."""
    from adapterswap.engines.live import why_not_live

    return plan is None or why_not_live(plan) is None


def _is_regular(expert: Expert, num_layers: int) -> bool:
    """Whether an expert is an adapter that adapts the same modules in every layer."""
    if not isinstance(expert, Adapter):
        return False
    layers: dict[int | None, set[str]] = {layer: set() for layer in range(num_layers)}
    for name, part in expert.parts.items():
        if part.layer in layers:
            layers[part.layer].add(name.replace(f".{part.layer}.", ".", 1))
    return expert.kept_layers is None and all(names == layers[0] for names in layers.values())


def _check_vocabulary(plan: Plan) -> None:
    """Refuse full weights with rows for tokens that the base lacks, because all cells have one vocabulary."""
    for slot in plan:
        if slot.spans or (slot.base is not None and slot.shape != slot.base.tensor.shape):
            raise UnsupportedError(
                f"{slot.name} has rows for tokens that the base lacks, but all cells of a sweep have one vocabulary",
                "Write the composition with `adapterswap merge`, and evaluate the result with `adapterswap evaluate`",
            )


def _num_layers(base: OpenedBase, from_recipe: int | None) -> int:
    from_config = ModelConfig(base.config.to_dict()).num_layers
    check_depth_of(base.reference, from_config, from_recipe, "Leave num_layers out, or correct it")
    remedy = "Add `num_layers:` to the recipe"
    return known_depth(from_recipe or from_config, base.reference, remedy, parameter="num_layers")


def _describe(prepared: PreparedSweep) -> dict[str, Any]:
    base, experts, sides = prepared.base.source, prepared.experts, prepared.sides
    content: dict[str, Any] = {
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
        "task_files": prepared.settings.task_files,
        "companions": {
            kind: prepared.companions.owner(kind) or BASE_FOLDER for kind in ("tokenizer", "chat_template")
        },
        "settings": prepared.settings.described(),
        "cells": [cell.as_json() for cell in prepared.grid.cells],
    }  # fmt: skip
    if isinstance(engines := prepared.recipe.settings.engine, EngineByKind):
        content["settings"]["engine"]["loglikelihood"] = engines.loglikelihood
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

    def named(members: Mapping[str, Place]) -> dict[str, Any]:
        chains = {
            name: {"chain": [experts[part].name for part in parts]} for name, parts in Places(members).chains.items()
        }
        return {name: chains.get(name) or experts[name].name for name in members}

    content |= {"task_experts": named(recipe.task_experts), "language_experts": named(recipe.language_experts)}
    if recipe.roles:
        content["roles"] = {role: named(members) for role, members in recipe.roles.items()}
    if recipe.extra:
        content["extra"] = {
            row: [experts[name].name for name in names] for row, names in extra_experts(recipe).items()
        }  # fmt: skip
    if recipe.settings.include_path is not None:
        content["settings"]["include_path"] = Path(recipe.settings.include_path).resolve().name
    return content
