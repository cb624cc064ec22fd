"""The recipe of a sweep: the base, the experts of either side, what is made of them, and what judges it.

Every field is documented where it stands; unknown keys are errors. Experts, the base and `include_path` may be folders
beside the recipe. Knows nothing of torch or lm-evaluation-harness, and opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from adapterswap.experts.layers import MAX_LAYERS
from adapterswap.files.smallfiles import exists
from adapterswap.files.yamlfiles import StrictModel, read_recipe
from adapterswap.planning.allocation import BASE
from adapterswap.planning.compositions import Method, Partition
from adapterswap.sweeps.settings import Search, Selection, SweepSettings

__all__ = [
    "BASELINES",
    "EXTRA",
    "GRID_FIELDS",
    "SWEEP_PATHS",
    "Baseline",
    "Family",
    "Pair",
    "SweepRecipe",
    "read_sweep_recipe",
    "with_places",
]

Baseline = Literal["base", "task", "language", "soup", "magnitude_soup", "task_arithmetic", "slerp"]
BASELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "soup": ("soup", {"method": "soup"}),
    "magnitude_soup": ("magnitude soup", {"method": "soup", "weights": "magnitude"}),
    "task_arithmetic": ("task_arithmetic", {"method": "task_arithmetic"}),
    "slerp": ("slerp", {"method": "slerp"}),
}
"""The baselines that are compositions: what their row is called, and the composition."""

_Value = TypeVar("_Value")

EXTRA = "extra-"
"""How the names begin under which the adapters of `extra` are loaded."""

# PEFT keeps an expert's tensors under its name, so it has no dots, and is no part of the word that begins PEFT's keys.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def _expert_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == BASE or name in "lora_" or name.startswith(EXTRA):
        raise ValueError(
            f"{name!r} cannot name an expert: use letters, digits, - and _, and not {BASE!r}, 'lora' or {EXTRA!r}…"
        )
    return name


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _named(value: Any) -> Any:
    """A mapping from names to families as a list of families; null takes one away that a fragment gave."""
    if not isinstance(value, dict):
        return value
    items = {name: item for name, item in value.items() if item is not None}
    return [{"name": name, **item} if isinstance(item, dict) else item for name, item in items.items()]


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A grid's values, without those that are said twice."""
    if not values:
        raise ValueError("give at least one value")
    return tuple(dict.fromkeys(values))


Name = Annotated[str, AfterValidator(_expert_name)]
Grid = Annotated[tuple[_Value, ...], BeforeValidator(_as_list), AfterValidator(_distinct)]
"""A value, or a list of values that are tried in turn; empty where the recipe says nothing."""
Count = Annotated[int, Field(ge=0)]


class Family(StrictModel):
    """Compositions that belong together: fields of a composition, each with a value or a list of values.

    All combinations are judged, with every pair. Zones that need more layers than there are, are left out and counted.
    """

    name: str | None = Field(
        default=None,
        min_length=1,
        description="What its row of a table is called. Default: the method; `partition A`; `magnitude soup`; `reset`.",
    )
    language: Literal["base"] | None = Field(
        default=None, description="base: no language expert; the layers that were its own are reset to the base."
    )
    method: Grid[Method] = ()
    bottom: Grid[Count] = ()
    top: Grid[Count] = ()
    bottom_transition: Grid[Count] = ()
    top_transition: Grid[Count] = ()
    partition: Grid[Partition] = ()
    task_weight: Grid[float] = ()
    language_weight: Grid[float] = ()
    weights: Grid[Literal["equal", "magnitude"]] = ()
    scale: Grid[float] = ()
    density: Grid[float] = ()
    seed: Grid[Count] = ()
    row_threshold: Grid[float] = ()
    allow_negative: bool = Field(default=False, description="Weights may be negative (unlearning).")
    max_rank: int | None = Field(default=None, ge=1, description="Reduce each composition to an adapter of this rank.")
    max_error: float | None = Field(
        default=None, gt=0, lt=1, description="Likewise, as far as this relative error of ΔW."
    )

    @property
    def output(self) -> dict[str, Any]:
        """The bound on the rank, if there is one."""
        bounds = {"max_rank": self.max_rank, "max_error": self.max_error}
        return {key: value for key, value in bounds.items() if value is not None}

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one configuration."""
        return any(len(getattr(self, field)) > 1 for field in GRID_FIELDS)

    @model_validator(mode="after")
    def _one_bound(self) -> Family:
        if len(self.output) == 2:
            raise ValueError("max_rank and max_error are both given: give one of them")
        return self


GRID_FIELDS = (
    "method", "bottom", "top", "bottom_transition", "top_transition", "partition", "task_weight", "language_weight",
    "weights", "scale", "density", "seed", "row_threshold",
)  # fmt: skip
"""The fields of a `Family` that take lists, in the order in which a grid runs through them: the last one fastest."""


class Pair(StrictModel):
    """A task expert and a language expert; several names on a side are souped first."""

    task: Grid[str]
    language: Grid[str]


class SweepRecipe(StrictModel):
    """What is judged, and on what."""

    base_model: str = Field(description="A local folder, or a Hub id: org/name@revision.")
    num_layers: int | None = Field(
        default=None, ge=1, le=MAX_LAYERS, description="The base's layers, if its config does not say."
    )
    task_experts: dict[Name, str] = Field(min_length=1, description="Name → folder or Hub id of an adapter.")
    language_experts: dict[Name, str] = Field(min_length=1, description="Likewise.")
    pairs: Annotated[list[Pair], Field(min_length=1)] | None = Field(
        default=None, description="{task: NAME, language: NAME}; default: each task expert with each language expert."
    )
    soup_sides: bool = Field(
        default=False,
        description="One more pair: all task experts souped, with all language experts souped that share their tasks.",
    )
    compositions: Annotated[list[Family], BeforeValidator(_named)] = Field(
        default=[], description="What is made of each pair: a list, or a mapping from the families' names."
    )
    baselines: list[Baseline] = Field(
        default=["base", "task", "language"],
        description="base; task and language: each expert alone; soup and so on: of each pair, by its defaults.",
    )
    extra: dict[str, str | list[str]] = Field(
        default={}, description="Other adapters on the base, such as joint SFT: name of the row → one or several."
    )
    tasks: list[str] | dict[str, list[str]] = Field(
        min_length=1,
        description="Task names as for evaluate; or language expert (patterns such as sw*) → the tasks of its pairs.",
    )
    retention: list[str] = Field(default=[], description="Tasks that everything is judged on beside.")
    primary: dict[str, str] = Field(
        default={}, description="Task → the score that counts, as metric or metric,filter. Default: `normalized`, or "
        "the task's first."
    )  # fmt: skip
    settings: SweepSettings = Field(default=SweepSettings(), description="How tasks are evaluated.")
    selection: Selection = Field(default=Selection(), description="The documents on which configurations are chosen.")
    search: Search | None = Field(default=None, description="Search the families' grids, instead of judging all.")

    @field_validator("tasks")
    @classmethod
    def _some_task(cls, value: list[str] | dict[str, list[str]]) -> list[str] | dict[str, list[str]]:
        if isinstance(value, dict) and (empty := [name for name, tasks in value.items() if not tasks]):
            raise ValueError(f"{empty[0]} has no task")
        return value

    @model_validator(mode="after")
    def _check(self) -> SweepRecipe:
        if both := sorted(self.task_experts.keys() & self.language_experts.keys()):
            raise ValueError(f"{both[0]!r} names a task expert and a language expert: rename one")
        for pair in self.pairs or []:
            for side, names, known in (
                ("task", pair.task, self.task_experts),
                ("language", pair.language, self.language_experts),
            ):
                if unknown := [name for name in names if name not in known]:
                    raise ValueError(f"pairs: {unknown[0]!r} is no {side} expert ({', '.join(known)} are)")
        if not self.compositions and not self.baselines and not self.extra:
            raise ValueError("there is nothing to judge: give compositions, baselines or extra")
        rows = {family.name or "" for family in self.compositions} | {"base", "task expert", "language expert"}
        if clash := sorted(rows & self.extra.keys()):
            raise ValueError(f"extra: {clash[0]!r} is a row of its own already: choose another name")
        if self.search is not None:
            choices = [family for family in self.compositions if family.has_choice]
            if not choices:
                raise ValueError("search: no family of compositions has a list of values: there is nothing to search")
            if self.search.family is not None and self.search.family not in {family.name for family in choices}:
                raise ValueError(f"search.family: {self.search.family!r} names no family with a list of values")
        return self


SWEEP_PATHS = ("base_model", "task_experts.*", "language_experts.*", "extra.*", "extra.*.*", "settings.include_path")
"""Keys that may be local paths."""


def read_sweep_recipe(path: str | Path, overrides: Iterable[str] = ()) -> SweepRecipe:
    """Read a recipe (YAML) and apply `key=value` overrides. What exists beside the recipe is taken from there.

    Raises:
        AdapterswapError: with every mistake in it.
    """
    recipe = read_recipe(path, SweepRecipe, overrides, paths=SWEEP_PATHS)
    beside = Path(path).parent

    def found(reference: str) -> str:
        return str(beside / reference) if exists(beside / reference) else reference

    return with_places(recipe, found)


def with_places(recipe: SweepRecipe, found: Callable[[str], str]) -> SweepRecipe:
    """The recipe with `found(place)` for the place of the base, of each expert and of `include_path`."""

    def each(places: dict[str, str]) -> dict[str, str]:
        return {name: found(place) for name, place in places.items()}

    settings = recipe.settings
    if settings.include_path is not None:
        settings = settings.model_copy(update={"include_path": found(settings.include_path)})
    return recipe.model_copy(
        update={
            "base_model": found(recipe.base_model),
            "task_experts": each(recipe.task_experts),
            "language_experts": each(recipe.language_experts),
            "extra": {row: [found(place) for place in _as_list(places)] for row, places in recipe.extra.items()},
            "settings": settings,
        }
    )
