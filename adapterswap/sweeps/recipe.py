"""The recipe of a sweep: the base, the experts, their compositions, and the tasks.

Every field has a description; unknown keys are errors. Paths of experts, the base and `include_path` may be relative
to the recipe's folder. Knows nothing of torch or lm-evaluation-harness, and opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator, model_validator

from adapterswap.errors import FieldError, Problems
from adapterswap.experts.layers import MAX_LAYERS
from adapterswap.files.smallfiles import exists, expand
from adapterswap.files.yamlfiles import FieldMistake, StrictModel, read_recipe, validate
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.checks import check_names
from adapterswap.sweeps.families import Baseline, ExpertPair, Families, Name, as_list
from adapterswap.sweeps.ruling import LANGUAGE, TASK, check_roles, expert_row, named_in
from adapterswap.sweeps.settings import DocumentSplit, Search, SweepSettings

__all__ = ["OTHER", "SWEEP_PATHS", "SweepRecipe", "read_sweep_recipe", "with_places", "with_rules"]


def _role_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in (TASK, LANGUAGE, BASE):
        raise ValueError(
            f"{name!r} cannot name a role: use a word such as culture or safety, not task, language or base"
        )
    return name


RoleName = Annotated[str, AfterValidator(_role_name)]


class SweepRecipe(StrictModel):
    """What a sweep evaluates, and on which tasks."""

    base_model: str = Field(description="A local folder, or a Hub id: org/name@revision.")
    num_layers: int | None = Field(
        default=None, ge=1, le=MAX_LAYERS, description="The base's layers, if its config does not say."
    )
    task_experts: dict[Name, str] = Field(
        min_length=1, description="Name → folder or Hub id of an adapter or a full checkpoint."
    )
    language_experts: dict[Name, str] = Field(
        min_length=1, description="Name → folder or Hub id of an adapter or a full checkpoint."
    )
    roles: dict[RoleName, Annotated[dict[Name, str], Field(min_length=1)]] = Field(
        default={},
        description="Experts of other roles, for `rules`: culture, safety, … → name → folder or Hub id.",
    )
    pairs: Annotated[list[ExpertPair], Field(min_length=1)] | None = Field(
        default=None, description="{task: NAME, language: NAME}. Default: each task expert with each language expert."
    )
    soup_sides: bool = Field(
        default=False,
        description="Add a pair: all task experts averaged, with all language experts averaged that share their tasks.",
    )
    compositions: Families = Field(
        default=[], description="Families of compositions of each pair: a list, or a mapping from their names."
    )
    baselines: list[Baseline] = Field(
        default=["base", "task", "language", "roles"],
        description="base; task, language and roles: each expert alone; soup and others: each pair, by its defaults.",
    )
    extra: dict[str, str | list[str]] = Field(
        default={}, description="Other adapters on the base, such as joint SFT: the name of their row → one or several."
    )
    tasks: list[str] | dict[str, list[str]] = Field(
        min_length=1,
        description="Task names as for evaluate; or language expert (patterns such as sw*) → the tasks of its pairs.",
    )
    retention: list[str] = Field(default=[], description="More tasks that everything is evaluated on.")
    primary: dict[str, str] = Field(
        default={}, description="Task → the score that counts, as metric or metric,filter. Default: `normalized`, or "
        "the task's first."
    )  # fmt: skip
    settings: SweepSettings = Field(default=SweepSettings(), description="How tasks are evaluated.")
    selection: DocumentSplit = Field(
        default=DocumentSplit(), description="The documents on which configurations are chosen."
    )
    search: Search | None = Field(default=None, description="Search the families' grids instead of evaluating all.")

    @property
    def by_role(self) -> dict[str, dict[str, str]]:
        """Role → its experts: task, language, and what `roles` adds."""
        return {TASK: self.task_experts, LANGUAGE: self.language_experts, **self.roles}

    @field_validator("tasks")
    @classmethod
    def _some_task(cls, value: list[str] | dict[str, list[str]]) -> list[str] | dict[str, list[str]]:
        if isinstance(value, dict) and (empty := [name for name, tasks in value.items() if not tasks]):
            raise ValueError(f"{empty[0]} has no task")
        return value

    @model_validator(mode="after")
    def _check(self) -> SweepRecipe:
        if shared := sorted(self.task_experts.keys() & self.language_experts.keys()):
            raise ValueError(f"{shared[0]!r} is both a task expert and a language expert: rename one")
        self._check_roles()
        for pair in self.pairs or []:
            for side, names, experts in (
                ("task", pair.task, self.task_experts),
                ("language", pair.language, self.language_experts),
            ):
                if unknown := [name for name in names if name not in experts]:
                    raise ValueError(f"pairs: {unknown[0]!r} is not a {side} expert ({', '.join(experts)})")
        if not self.compositions and not self.baselines and not self.extra:
            raise ValueError("there is nothing to evaluate: add compositions, baselines or extra")
        rows = {family.name or "" for family in self.compositions} | {"base", *map(expert_row, self.by_role)}
        if clash := sorted(rows & self.extra.keys()):
            raise ValueError(f"extra: {clash[0]!r} is already the name of another row: choose another name")
        if self.search is not None:
            choices = [family for family in self.compositions if family.has_choice]
            if not choices:
                raise ValueError("search: no family of compositions has a list of values to search")
            if self.search.family is not None and self.search.family not in {family.name for family in choices}:
                raise ValueError(f"search.family: {self.search.family!r} is not a family with a list of values")
        return self

    def _check_roles(self) -> None:
        homes: dict[str, str] = {}
        for role, experts in self.by_role.items():
            for name in experts:
                if name in homes:
                    raise FieldMistake(f"{name!r} is an expert of two roles: {homes[name]} and {role}", "roles")
                homes[name] = role
        for family in self.compositions:
            rules = family.rules or ()
            problems = Problems(FieldError)
            if family.rules is not None:
                check_names(named_in(rules), [*homes, *self.by_role], problems, rules)
            mistake = next(iter(problems), None)
            prefix = f"compositions: {family.name or 'rules'}: "
            if mistake is not None:
                raise FieldMistake(prefix + mistake.message, "compositions", remedy=mistake.remedy)
            if message := check_roles(named_in(rules), {role: [*names] for role, names in self.by_role.items()}):
                raise FieldMistake(prefix + message, "compositions")


SWEEP_PATHS = (
    "base_model", "task_experts.*", "language_experts.*", "roles.*.*", "extra.*", "extra.*.*", "settings.include_path",
)  # fmt: skip
"""Keys that may be local paths."""


def read_sweep_recipe(path: str | Path, overrides: Iterable[str] = ()) -> SweepRecipe:
    """Read a recipe (YAML) and apply `key=value` overrides. Relative paths are first looked up in the recipe's folder.

    Raises:
        FieldError: the recipe is invalid; lists every mistake.
        AdapterswapError: the recipe cannot be read; see `read_recipe`.
    """
    recipe = read_recipe(path, SweepRecipe, overrides, paths=SWEEP_PATHS)
    beside = Path(path).parent

    def resolve(reference: str) -> str:
        place = beside / expand(reference)
        return str(place) if exists(place) else reference

    return with_places(recipe, resolve)


OTHER = "other"
"""The role of experts that are added to a recipe."""


def with_rules(recipe: SweepRecipe, experts: Mapping[str, str], rules: Sequence[Rule]) -> SweepRecipe:
    """The recipe with more experts, of the role `other`, and one more composition, `rules`.

    Raises:
        FieldError: an expert's name is taken or invalid, or a rule names an unknown expert.
    """
    content = recipe.model_dump(exclude_defaults=True, by_alias=True)
    if experts:
        content["roles"] = {**recipe.roles, OTHER: {**recipe.roles.get(OTHER, {}), **experts}}
    if rules:
        content["compositions"] = [*content.get("compositions", []), {"rules": [rule.as_data() for rule in rules]}]
    changed = validate(content, SweepRecipe, where="the recipe with the options")
    changed._files = recipe.recipe_files
    return changed


def with_places(recipe: SweepRecipe, resolve: Callable[[str], str]) -> SweepRecipe:
    """The recipe with `resolve(place)` in place of the paths of the base, each expert and `include_path`."""

    def replaced(places: dict[str, str]) -> dict[str, str]:
        return {name: resolve(place) for name, place in places.items()}

    settings = recipe.settings
    if settings.include_path is not None:
        settings = settings.model_copy(update={"include_path": resolve(settings.include_path)})
    return recipe.model_copy(
        update={
            "base_model": resolve(recipe.base_model),
            "task_experts": replaced(recipe.task_experts),
            "language_experts": replaced(recipe.language_experts),
            "roles": {role: replaced(experts) for role, experts in recipe.roles.items()},
            "extra": {row: [resolve(place) for place in as_list(places)] for row, places in recipe.extra.items()},
            "settings": settings,
        }
    )
