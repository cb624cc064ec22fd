"""The recipe of a sweep: the base, the experts, their compositions, the tasks and the settings.

Every field has a description; unknown keys are errors. Paths of experts, the base and `include_path` may be relative to
the recipe's folder. Nothing is opened, and neither torch nor lm-evaluation-harness is imported.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from adapterswap.core import BASE, Rule, check_names
from adapterswap.core.model.layers import MAX_LAYERS
from adapterswap.engines.serving.places import Place, Places
from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.settings import EvaluationOptions
from adapterswap.experiments.permitted import check_settings
from adapterswap.experiments.sweeps.families import (
    EXTRA,
    LANGUAGE,
    TASK,
    Baseline,
    ExpertPair,
    Families,
    Family,
    Name,
    as_list,
    check_roles,
    expert_row,
    named_in,
)
from adapterswap.kit.errors import CompositionError, FieldError, Problems, did_you_mean
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import FieldMistake, Source, field
from adapterswap.kit.files.text import expand
from adapterswap.kit.files.yaml import read_recipe


class EngineByKind(Declared):
    """An engine for each kind of task. vLLM is faster where answers are generated, transformers where they are not."""

    generate: Literal["vllm"] = field(description="Tasks whose answers are generated.")
    loglikelihood: Literal["transformers"] = field(description="Tasks that compare or add up likelihoods.")


def _harmless(key: str, value: Any, source: Source) -> Any:
    """Refuse what a recipe may not pass on to the libraries; see `permitted`."""
    if isinstance(value, Mapping):
        check_settings(key, source.from_files(value, ("settings", key)))
    return value


class SweepSettings(EvaluationOptions):
    """How tasks are evaluated: the options of `evaluate`, and some that only sweeps have."""

    chat_template_from: str | None = field(
        default=None,
        description="Whose chat template the prompts of all cells have: an expert's name, or `base`. Default: the "
        "experts' where they agree, else the first task expert's.",
    )
    gen_kwargs: dict[str, Any] = field(
        default={},
        sited=partial(_harmless, "gen_kwargs"),
        description="Generation settings that override the tasks' own.",
    )
    seed: int = field(default=Settings.seed, ge=0, description="The seed of shots and sampling.")
    engine: Literal["transformers", "vllm"] | EngineByKind = field(
        default="transformers", description="What computes the answers. vllm has several compositions in flight."
    )
    engine_args: dict[str, Any] = field(
        default={},
        sited=partial(_harmless, "engine_args"),
        description="With vllm: its own settings, such as gpu_memory_utilization.",
    )
    in_flight: int = field(default=4, ge=1, description="With vllm: compositions that are evaluated at once.")

    def as_settings(self, folder: Path | None = None, **more: Any) -> Settings:
        """See `EvaluationOptions`. Of two engines, the one that generates."""
        settings = super().as_settings(folder, **more)
        if isinstance(self.engine, EngineByKind):
            settings = replace(settings, engine="vllm")
        return settings


class DocumentSplit(Declared):
    """MGSM has no development set, so configurations are chosen on one part of the documents and reported on the other.

    Tasks with the same number of documents are split alike: MGSM has the same questions in every language.
    """

    fraction: float = field(default=0.5, gt=0, lt=1, description="The share of documents to choose on.")
    seed: int = field(default=0, ge=0, description="The seed by which documents are chosen.")

    def split(self, num_docs: int, groups: Sequence[str] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(documents to choose on, documents to report on), both sorted. A single one is only reported on.

        Args:
            num_docs: the number of documents.
            groups: the group of each document, if they have groups: a group is not divided.
        """
        unit_of = groups or range(num_docs)
        units = list(dict.fromkeys(unit_of))
        number = min(max(1, round(self.fraction * len(units))), len(units) - 1)
        selected = {units[place] for place in Random(self.seed).sample(range(len(units)), number)}

        select, report = [], []
        for doc_id, unit in enumerate(unit_of):
            if unit in selected:
                select.append(doc_id)
            else:
                report.append(doc_id)
        return tuple(select), tuple(report)


class Halving(Declared):
    """Asynchronous successive halving (Li et al. 2020): trials start on few documents, and the best ones continue."""

    min_documents: int = field(default=16, ge=1, description="Documents of each target task on the first rung.")
    reduction_factor: int = field(
        default=3,
        ge=2,
        description="Each rung has this many times as many documents, and one in this many trials continues.",
    )

    def rungs(self, available: int) -> tuple[int, ...]:
        """The number of documents of each rung; every one is below `available`."""
        numbers = []
        documents = self.min_documents
        while documents < available:
            numbers.append(documents)
            documents *= self.reduction_factor
        return tuple(numbers)


class Search(Declared):
    """Evaluate some configurations of a family instead of all. A trial is one configuration with every pair."""

    sampler: Literal["tpe", "random"] = field(
        default="tpe", description="tpe: Bayesian, from the trials so far (Bergstra et al. 2011); random: uniform."
    )
    trials: int = field(default=40, ge=1, description="How many configurations of each searched family to try.")
    halving: Halving | None = field(default=None, description="Give up most trials after some documents.")
    seed: int = field(default=0, ge=0, description="The seed of the sampler, and of each rung's documents.")
    family: str | None = field(default=None, description="The only family to search. Default: all that have a choice.")


def _role_name(name: str) -> str:
    """The name, if it can name a role."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in (TASK, LANGUAGE, BASE):
        raise ValueError(
            f"{name!r} cannot name a role: use a word such as culture or safety, not task, language or base"
        )
    return name


RoleName = Annotated[str, field(after=_role_name)]


def _with_ladders(value: Any, source: Source) -> Any:
    """The experts, with NAME-STEP for each checkpoint of `NAME: {ladder: PATH}`."""
    if not isinstance(value, Mapping):
        return value

    experts: dict[str, Any] = {}
    for name, place in value.items():
        added = {name: place}
        if isinstance(place, Mapping) and place.keys() == {"ladder"} and isinstance(place["ladder"], str):
            folder = source.folder / expand(place["ladder"])
            if not os.path.exists(folder):
                folder = expand(place["ladder"])
            steps = []
            for path in folder.glob("checkpoint-*"):
                match = re.fullmatch(r"checkpoint-(\d+)", path.name)
                if match is not None:
                    steps.append(int(match[1]))
            if not steps:
                raise ValueError(f"{name}: {place['ladder']} holds no checkpoints: train it with `selection.ladder`")
            added = {f"{name}-{step}": f"{place['ladder']}/checkpoint-{step}" for step in sorted(steps)}

        twice = sorted(added.keys() & experts.keys())
        if twice:
            raise ValueError(f"{twice[0]!r} is both an expert and a checkpoint of a ladder: rename one")
        experts |= added
    return experts


def _with_tasks(value: list[str] | dict[str, list[str]]) -> list[str] | dict[str, list[str]]:
    """The tasks, if each language has some."""
    if isinstance(value, dict):
        for name, tasks in value.items():
            if not tasks:
                raise ValueError(f"{name} has no task")
    return value


_PLACES = ("task_experts.*", "language_experts.*", "roles.*.*")


class SweepRecipe(Declared):
    """What a sweep evaluates, and on which tasks."""

    PATHS: ClassVar[tuple[str, ...]] = (
        "base_model",
        *_PLACES,
        *(f"{place}.chain.*" for place in _PLACES),
        *(f"{place}.ladder" for place in _PLACES[:2]),
        "extra.*",
        "extra.*.*",
        "settings.include_path",
    )
    """Keys that may be local paths."""

    base_model: str = field(description="A local folder, or a Hub id: org/name@revision.")
    num_layers: int | None = field(
        default=None, ge=1, le=MAX_LAYERS, description="The base's layers, if its config does not say."
    )
    tokenizer: str | None = field(
        default=None,
        description="Whose tokenizer and chat templates the prompts of all cells have: an expert's name, or `base`. "
        "Default: the experts' where they agree, else the first task expert's.",
    )
    config_from: str | None = field(
        default=None,
        description="Whose config compositions of full checkpoints take, if theirs or the base's compute differently: "
        "an expert, or a role such as `task`, for the compositions with it; or `base`. By default they must agree.",
    )
    task_experts: dict[Name, Place] = field(
        sited=_with_ladders,
        min_length=1,
        description="Name → folder or Hub id of an adapter or a full checkpoint; {chain: [FIRST, SECOND]} for adapters "
        "that were trained one on top of another; or {ladder: FOLDER}, with whose checkpoints as experts NAME-STEP.",
    )
    language_experts: dict[Name, Place] = field(sited=_with_ladders, min_length=1, description="Likewise.")
    roles: dict[RoleName, Annotated[dict[Name, Place], field(min_length=1)]] = field(
        default={},
        description="Experts of other roles, for `rules`: culture, safety, … → name → folder or Hub id.",
    )
    pairs: Annotated[list[ExpertPair], field(min_length=1)] | None = field(
        default=None, description="{task: NAME, language: NAME}. Default: each task expert with each language expert."
    )
    soup_sides: bool = field(
        default=False,
        description="Add a pair: all task experts averaged, with all language experts averaged that share their tasks.",
    )
    compositions: Families = field(
        default=[], description="Families of compositions of each pair: a list, or a mapping from their names."
    )
    baselines: list[Baseline] = field(
        default=["base", "task", "language", "roles"],
        description="base; task, language and roles: each expert alone; soup and others: each pair, by its defaults.",
    )
    extra: dict[str, str | list[str]] = field(
        default={}, description="Other adapters on the base, such as joint SFT: the name of their row → one or several."
    )
    tasks: list[str] | dict[str, list[str]] = field(
        after=_with_tasks,
        min_length=1,
        description="Task names as for evaluate; or language expert (patterns such as sw*) → the tasks of its pairs.",
    )
    retention: list[str] = field(default=[], description="More tasks that everything is evaluated on.")
    primary: dict[str, str] = field(
        default={},
        description="Task → the score that counts, as metric or metric,filter. Default: `normalized`, or "
        "the task's first.",
    )
    group: dict[str, str] = field(
        default={},
        description="Task → the column of its rows that names what documents share, such as a template: they are one "
        "draw in intervals, and on one side of the split. Default: the task's `metadata: {group: …}`, or a column "
        "`template`.",
    )
    settings: SweepSettings = field(default=SweepSettings(), description="How tasks are evaluated.")
    selection: DocumentSplit = field(
        default=DocumentSplit(), description="The documents on which configurations are chosen."
    )
    search: Search | None = field(default=None, description="Search the families' grids instead of evaluating all.")

    @property
    def by_role(self) -> dict[str, dict[str, Place]]:
        """Role → its experts: task, language, and what `roles` adds."""
        return {TASK: self.task_experts, LANGUAGE: self.language_experts, **self.roles}

    @property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Each chain among the experts → the names of its adapters."""
        chains: dict[str, tuple[str, ...]] = {}
        for experts in self.by_role.values():
            chains |= Places(experts).chains
        return chains

    def check(self) -> None:
        shared = sorted(self.task_experts.keys() & self.language_experts.keys())
        if shared:
            raise ValueError(f"{shared[0]!r} is both a task expert and a language expert: rename one")
        self._check_roles()
        self._check_owners()
        for pair in self.pairs or []:
            sides = (("task", pair.task, self.task_experts), ("language", pair.language, self.language_experts))
            for side, names, experts in sides:
                for name in names:
                    if name not in experts:
                        raise ValueError(f"pairs: {name!r} is not a {side} expert ({', '.join(experts)})")

        # The rows of tables
        if not self.compositions and not self.baselines and not self.extra:
            raise ValueError("there is nothing to evaluate: add compositions, baselines or extra")
        rows = {"base"}
        for role in self.by_role:
            rows.add(expert_row(role))
        for family in self.compositions:
            rows.add(family.name or "")
        clash = sorted(rows & self.extra.keys())
        if clash:
            raise ValueError(f"extra: {clash[0]!r} is already the name of another row: choose another name")

        if self.search is not None:
            choices = [family for family in self.compositions if family.has_choice]
            if not choices:
                raise ValueError("search: no family of compositions has a list of values to search")
            if self.search.family is not None and self.search.family not in {family.name for family in choices}:
                raise ValueError(f"search.family: {self.search.family!r} is not a family with a list of values")

    def _check_owners(self) -> None:
        """Check the names in `tokenizer` and `config_from`."""
        experts = [BASE]
        for members in self.by_role.values():
            experts += Places(members).adapters
        owners = (
            ("tokenizer", self.tokenizer, experts),
            ("config_from", self.config_from, [*experts, *self.by_role]),
        )
        for key, owner, known in owners:
            if owner is not None and owner not in known:
                remedy = did_you_mean(owner, known, f"Choose from {', '.join(known)}")
                raise FieldMistake(f"{key} is {owner!r}, which this recipe does not name", key, remedy=remedy)

    def _check_roles(self) -> None:
        """Check that each name has one meaning, and that rules name experts or roles."""
        homes: dict[str, str] = {}
        places: dict[str, Place] = {}
        for role, experts in self.by_role.items():
            for name, place in experts.items():
                if name in homes:
                    raise FieldMistake(f"{name!r} is an expert of two roles: {homes[name]} and {role}", "roles")
                homes[name] = role
                places[name] = place
        shared = Places(places).shared_name
        if shared:
            raise ValueError(f"{shared!r} is an expert and an adapter of a chain: rename the expert")

        roles = {role: list(names) for role, names in self.by_role.items()}
        for family in self.compositions:
            if family.rules is None:
                continue
            prefix = f"compositions: {family.name or 'rules'}: "
            names = named_in(family.rules)

            problems = Problems(FieldError)
            check_names(names, [*homes, *roles], problems, family.rules)
            mistake = next(iter(problems), None)
            if mistake is not None:
                raise FieldMistake(prefix + mistake.message, "compositions", remedy=mistake.remedy)
            message = check_roles(names, roles)
            if message:
                raise FieldMistake(prefix + message, "compositions")

    def check_cells(self, num_layers: int) -> None:
        """Check every composition, without its experts and tasks.

        Raises:
            AdapterswapError: lists all mistakes.
        """
        from adapterswap.experiments.sweeps.grid import make_cells

        target = {name: tuple(tasks) for name, tasks in self.target_groups().items()}
        problems = Problems(CompositionError)
        for cell in make_cells(self, SweepTasks(target, tuple(self.retention)), num_layers).cells:
            composition = cell.parsed
            if composition is not None:
                with problems.collect():
                    composition.rules(num_layers)
        problems.raise_if_any()

    def target_groups(self) -> dict[str, list[str]]:
        """Language expert → the names of its target tasks, as in the recipe."""
        if isinstance(self.tasks, list):
            return dict.fromkeys(self.language_experts, self.tasks)

        problems = Problems(FieldError)
        groups: dict[str, list[str]] = {}
        for pattern, tasks in self.tasks.items():
            matched = fnmatch.filter(self.language_experts, pattern)
            if not matched:
                problems.add(
                    f"tasks: {pattern!r} does not match any language expert",
                    f"Use their names ({', '.join(self.language_experts)}), or patterns that match them",
                    parameter="tasks",
                )
            for name in matched:
                groups.setdefault(name, []).extend(tasks)

        for name in self.language_experts:
            if name not in groups:
                problems.add(
                    f"tasks: the language expert {name!r} has no task", f"Add `{name}: [TASK, …]`", parameter="tasks"
                )
        problems.raise_if_any()
        return groups

    def with_rules(self, experts: Mapping[str, str], rules: Sequence[Rule]) -> SweepRecipe:
        """The recipe with more experts, of the role `other`, and one more composition, `rules`."""
        content = self.model_dump(exclude_defaults=True)
        if experts:
            content["roles"] = {**self.roles, OTHER: {**self.roles.get(OTHER, {}), **experts}}
        if rules:
            content["compositions"] = [*content.get("compositions", []), {"rules": [rule.as_data() for rule in rules]}]
        changed = SweepRecipe.read_content(content, where="the recipe with the options")
        changed._files = self.recipe_files
        return changed

    @staticmethod
    def read(path: str | Path, overrides: Iterable[str] = ()) -> SweepRecipe:
        """Read a recipe (YAML) and apply `key=value` overrides. Relative paths are first looked up in its folder.

        Raises:
            FieldError: the recipe is invalid; lists every mistake.
            AdapterswapError: the recipe cannot be read; see `read_recipe`.
        """
        recipe = read_recipe(path, SweepRecipe, overrides, paths=SweepRecipe.PATHS, kind="sweep")
        folder = Path(path).parent

        def resolve(reference: str) -> str:
            place = folder / expand(reference)
            return str(place) if os.path.exists(place) else reference

        return with_places(recipe, resolve)


OTHER = "other"
"""The role of experts that are added to a recipe."""


def with_places(recipe: SweepRecipe, resolve: Callable[[str], str]) -> SweepRecipe:
    """The recipe with `resolve(place)` in place of the paths of the base, each expert and `include_path`."""
    settings = recipe.settings
    if settings.include_path is not None:
        settings = settings.model_copy(update={"include_path": resolve(settings.include_path)})
    roles = {role: Places(experts).placed(resolve) for role, experts in recipe.roles.items()}
    extra = {}
    for row, places in recipe.extra.items():
        extra[row] = [resolve(place) for place in as_list(places)]
    return recipe.model_copy(
        update={
            "base_model": resolve(recipe.base_model),
            "task_experts": Places(recipe.task_experts).placed(resolve),
            "language_experts": Places(recipe.language_experts).placed(resolve),
            "roles": roles,
            "extra": extra,
            "settings": settings,
        }
    )


Tasks = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class SweepTasks:
    """The tasks that a cell is evaluated on.

    Attributes:
        target: language expert → the target tasks of its pairs.
        retention: the tasks that every cell is evaluated on too.
    """

    target: Tasks
    retention: tuple[str, ...]

    def of(self, languages: Iterable[str]) -> tuple[str, ...]:
        """The target tasks of these language experts, each once, then retention."""
        tasks: dict[str, None] = {}
        for language in languages:
            tasks |= dict.fromkeys(self.target[language])
        return tuple(tasks | dict.fromkeys(self.retention))


def extra_experts(recipe: SweepRecipe) -> dict[str, dict[str, str]]:
    """Row of `extra` → its adapters, by the names under which they are loaded: extra-1, extra-2, …"""
    number = 0
    experts: dict[str, dict[str, str]] = {}
    for row, places in recipe.extra.items():
        experts[row] = {}
        for place in as_list(places):
            number += 1
            experts[row][f"{EXTRA}{number}"] = place
    return experts


def pairs_of(recipe: SweepRecipe, family: Family) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(task side, language side) for each pair. A reset has every task side once, and an empty language side."""
    if recipe.pairs is not None:
        pairs = [(pair.task, pair.language) for pair in recipe.pairs]
    else:
        pairs = [((task,), (language,)) for task, language in product(recipe.task_experts, recipe.language_experts)]

    if recipe.soup_sides:
        by_tasks: dict[tuple[str, ...], list[str]] = {}
        for name, tasks in recipe.target_groups().items():
            by_tasks.setdefault(tuple(tasks), []).append(name)
        for languages in by_tasks.values():
            pairs.append((tuple(recipe.task_experts), tuple(languages)))
    if family.language == BASE:
        pairs = [(task, ()) for task, _ in pairs]
    return list(dict.fromkeys(pairs))
