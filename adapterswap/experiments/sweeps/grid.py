"""The cells of a recipe: every baseline, and every composition of every pair.

Pure data: no expert, task or model is opened. `Composition` checks the settings of a cell.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Annotated, Any, Self

from adapterswap.core import BASE, Composition, find_method
from adapterswap.experiments.sweeps.families import (
    BASELINES,
    LANGUAGE,
    TASK,
    Family,
    bound,
    casts,
    expert_row,
    named_in,
)
from adapterswap.experiments.sweeps.recipe import SweepRecipe, SweepTasks, extra_experts, pairs_of
from adapterswap.kit.errors import CompositionError, FieldError, Problems
from adapterswap.kit.files.readers import field as reading
from adapterswap.kit.files.readers import read_as


class Carrier:
    """A frozen dataclass that sweeps write as JSON, field by field."""

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for one in fields(self):  # type: ignore[arg-type]  # each class that extends this is a dataclass
            value = getattr(self, one.name)
            left_out = one.metadata.get("left_out")
            if left_out is None or not left_out(value):
                written = one.metadata.get("written", as_plain)
                content[one.name] = written(value)
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Raises FieldError, which names the fields that are missing or have another type."""
        return read_as(cls, content)


def as_plain(value: Any) -> Any:
    """A value of a carrier's field, for JSON."""
    if isinstance(value, Carrier):
        return value.as_json()
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


def _names(side: str | Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(side, str):
        return (side,)
    return tuple(side or ())


def _side(names: tuple[str, ...]) -> str | list[str] | None:
    if not names:
        return None
    if len(names) == 1:
        return names[0]
    return list(names)


Side = Annotated[tuple[str, ...], reading(before=_names)]
"""The experts of a side: in JSON a name, a list of names that are averaged, or null."""
_AS_SIDE = {"written": _side}
UNLESS_EMPTY = {"left_out": operator.not_}
"""Metadata of a field that JSON leaves out if it is empty."""


@dataclass(frozen=True)
class Cell(Carrier):
    """The base, an expert alone, or a composition of a pair.

    Attributes:
        cell: the id: 12 hexadecimal digits of a SHA-256 of the other attributes.
        family: the name of its row in tables: base, task expert, language expert, layer_swap, soup, partition A, ….
        task_expert: the names of the experts on the task side. Several are averaged; empty if there is none.
        language_expert: the same for the language side; also empty for a reset to the base.
        composition: the fields of a `Composition` that are not its defaults; empty for the base.
        short: the short name: `math1+sw1@bottom=3,top=1`; an expert's name; or `base`.
        default: whether it is the papers' default configuration of its family; see `default_of`.
        tasks: the tasks that it is evaluated on: target tasks, then retention.
        output: `max_rank` or `max_error` if the composition is first reduced to an adapter; `full_rank` if it is
            merged into full weights.
        other_experts: the experts of all other roles.
    """

    cell: str
    family: str
    task_expert: Side = field(metadata=_AS_SIDE)
    language_expert: Side = field(metadata=_AS_SIDE)
    composition: Mapping[str, Any]
    short: str
    default: bool
    tasks: tuple[str, ...]
    output: Mapping[str, Any] = field(default_factory=dict, metadata=UNLESS_EMPTY)
    other_experts: tuple[str, ...] = field(default=(), metadata=UNLESS_EMPTY)

    @property
    def configuration(self) -> str:
        """The settings without the experts: `bottom=3,top=1`. Cells of one configuration differ only in their pair."""
        return self.short.partition("@")[2] if self.composition else ""

    @property
    def unit(self) -> tuple[str | None, str | None, str | None, str | None]:
        """What methods are averaged over: (task expert, language expert, variant, experts of other roles).

        Each is None if absent. The names of several experts of a side are joined by +. A variant is a seed of the lab,
        or one of several adapters in a row of their own.
        """
        task = "+".join(self.task_expert) or None
        language = "+".join(self.language_expert) or None
        others = "+".join(self.other_experts) or None

        variant = None
        if self.composition and task is language is others is None:
            variant = self.short.partition("@")[0]
        return task, language, variant, others

    @property
    def identity(self) -> str:
        """Equal for cells of different families that are the same composition: only one of them is evaluated."""
        return repr((sorted(self.composition.items()), sorted(self.output.items()), self.tasks))

    @property
    def is_reduced(self) -> bool:
        """Whether the rank is bounded, so that the evaluated adapter is an approximation."""
        return bool(self.output.keys() - {"full_rank"})

    @property
    def parsed(self) -> Composition | None:
        """The composition, checked; None for the base."""
        if not self.composition:
            return None
        return Composition.model_validate(dict(self.composition))


@dataclass(frozen=True)
class Assignment:
    """A cell to evaluate, on all documents or on those of a rung of successive halving.

    Attributes:
        cell: the cell.
        documents: target task → the documents to evaluate on, the same number for each task unless they have groups,
            which stay whole; None for all documents.
    """

    cell: Cell
    documents: Mapping[str, tuple[int, ...]] | None = None

    @property
    def rung(self) -> int | None:
        """The number of documents of the first task; None for all."""
        if self.documents is None:
            return None
        return len(next(iter(self.documents.values())))


def default_of(configurations: Sequence[Composition], num_layers: int) -> int | None:
    """The index of the papers' default among the configurations that one pair has in one row of a table.

    For a layer swap by zones: b = 5 and u = 2 of 32 layers, scaled, without transitions. For methods: the values that
    their paper published, otherwise their parameters' defaults (`Method.published`). Weights are equal in both. A
    single configuration without zones is always the default. None if no configuration is the default, or more than one
    (partitions A and B, TIES at two ranks).
    """
    is_only = len(configurations) == 1
    defaults = []
    for index, composition in enumerate(configurations):
        if _is_default(composition, num_layers, is_only=is_only):
            defaults.append(index)

    if len(defaults) != 1:
        return None
    return defaults[0]


def _is_default(composition: Composition, num_layers: int, *, is_only: bool) -> bool:
    """Whether a composition is what its method does by default; `is_only` if its family has one configuration."""
    free = {"task_weight", "language_weight", "weights", "norms", "row_threshold", "seed"}
    changed = composition.model_dump(exclude_defaults=True).keys() & free
    if composition.has_zones:
        return composition.requested_zones(num_layers) == Composition().requested_zones(num_layers) and not changed
    if is_only:
        return True

    method = find_method(composition.method)
    defaults: dict[str, Any] = {}
    for parameter in method.own_parameters:
        defaults[parameter.name] = None if parameter.required else parameter.default
    return not changed and composition.parameters == {**defaults, **method.published}


def overlaps(composition: Composition, num_layers: int) -> bool:
    """Whether a layer swap's zones need more layers than the base has."""
    return composition.has_zones and sum(composition.requested_zones(num_layers)) > num_layers


@dataclass(frozen=True)
class Trial:
    """A configuration of a family: field → value, and the ids of its cells, one for each pair."""

    values: Mapping[str, Any]
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """A family's name in the recipe, and its configurations without those whose zones overlap."""

    family: str | None
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class _Candidate:
    """A composition of a pair, before it is known whether it is its row's default. Its id is appended to `trial`."""

    row: str
    composition: Composition
    output: Mapping[str, Any]
    short: str
    tasks: tuple[str, ...]
    trial: list[str]
    task: tuple[str, ...]
    language: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def setting(self) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Its row and its experts. At most one of the compositions that share them is the default."""
        return self.row, self.task, self.language, self.others


@dataclass(frozen=True)
class Grid:
    """The cells of a recipe.

    Attributes:
        cells: in the order in which they are evaluated.
        left_out: the number of skipped compositions, over all pairs: their zones need more layers than the base has.
        repeated: the number of duplicates within families, over all pairs.
        spaces: the cells of compositions of pairs, by family and configuration.
    """

    cells: tuple[Cell, ...]
    left_out: int
    repeated: int
    spaces: tuple[Space, ...]


def make_cells(recipe: SweepRecipe, tasks: SweepTasks, num_layers: int, full: Collection[str] = ()) -> Grid:
    """Every cell of a recipe: baselines first, then family by family, pair by pair.

    Args:
        tasks: the tasks, by their full names.
        num_layers: the number of layers of the base.
        full: the experts that are full checkpoints; compositions with one of them are evaluated as merged weights.
    """
    problems = Problems(FieldError)
    cells: dict[str, Cell] = {}
    left_out = repeated = 0

    def add(cell: Cell) -> str:
        nonlocal repeated
        cell = _identified(cell, recipe, full)
        repeated += cell.cell in cells
        cells.setdefault(cell.cell, cell)
        return cell.cell

    for cell in _baselines(recipe, tasks):
        add(cell)

    families: list[Family] = []
    for name in recipe.baselines:
        if name in BASELINES:
            row, content = BASELINES[name]
            families.append(Family.model_validate({"name": row, **content}))
    families += recipe.compositions

    candidates: list[_Candidate] = []
    expanded: list[list[tuple[dict[str, Any], list[str]]]] = []
    for family in families:
        # Its configurations, each with a list for the ids of its cells
        trials: list[tuple[dict[str, Any], list[str]]] = []
        expanded.append(trials)
        fields = family.grid
        for values in product(*fields.values()):
            configuration = dict(zip(fields, values, strict=True))
            with problems.collect():
                trials.append((_checked(configuration, family), []))

        # Their compositions: with every cast of experts for rules, otherwise with every pair
        if family.rules is not None:
            for content, ids in trials:
                with problems.collect():
                    candidates += _by_rules(recipe, family, content, tasks, ids, full)
            continue
        for task, language in pairs_of(recipe, family):
            own_tasks = tasks.of(language or recipe.language_experts)
            for content, ids in trials:
                with problems.collect():
                    candidate = _of_pair(family, content, task, language, own_tasks, ids)
                    _check_form(candidate.composition, family, full)
                    if overlaps(candidate.composition, num_layers):
                        left_out += 1
                    else:
                        candidates.append(candidate)
    problems.raise_if_any()

    for candidate, default in _with_defaults(candidates, num_layers):
        cell = Cell(
            cell="",
            family=candidate.row,
            task_expert=candidate.task,
            language_expert=candidate.language,
            composition=_as_data(candidate.composition),
            short=candidate.short,
            default=default,
            tasks=candidate.tasks,
            output=dict(candidate.output),
            other_experts=candidate.others,
        )
        candidate.trial.append(add(cell))
    if not cells:
        raise CompositionError(
            f"Nothing is left to evaluate: all zones overlap in {num_layers} layers",
            "Lower bottom, top and the transitions",
            parameter="compositions",
        )

    spaces = []
    for family, trials in zip(families, expanded, strict=True):
        filled = []
        for content, ids in trials:
            if ids:
                filled.append(Trial(content, tuple(ids)))
        spaces.append(Space(family.name, tuple(filled)))

    # Cells with the same tasks are next to each other, those on all tasks first, so each set of tasks is loaded once
    everything = tasks.of(recipe.language_experts)
    ordered = sorted(cells.values(), key=lambda cell: (cell.tasks != everything, cell.tasks))
    return Grid(tuple(ordered), left_out, repeated, tuple(spaces))


def _baselines(recipe: SweepRecipe, tasks: SweepTasks) -> Iterator[Cell]:
    """The base, and every expert alone, each as far as the recipe has it."""
    everything = tasks.of(recipe.language_experts)
    if "base" in recipe.baselines:
        yield Cell("", "base", (), (), {}, BASE, default=True, tasks=everything)
    if "task" in recipe.baselines:
        for name in recipe.task_experts:
            yield _expert_cell("task expert", name, everything, task=(name,))
    if "language" in recipe.baselines:
        for name in recipe.language_experts:
            yield _expert_cell("language expert", name, tasks.of([name]), language=(name,))
    if "roles" in recipe.baselines:
        for role, experts in recipe.roles.items():
            for name in experts:
                yield _expert_cell(expert_row(role), name, everything, others=(name,))

    for row, adapters in extra_experts(recipe).items():
        for number, name in enumerate(adapters, 1):
            short = f"{row} {number}" if len(adapters) > 1 else row
            yield _expert_cell(row, name, everything, short=short)


def _with_defaults(candidates: list[_Candidate], num_layers: int) -> Iterator[tuple[_Candidate, bool]]:
    """Every composition, and whether it is the papers' default of its row; of two equal ones the first is."""
    # Row and experts → the different compositions among them
    rows: dict[Any, dict[str, _Candidate]] = {}
    for candidate in candidates:
        content = repr((_as_data(candidate.composition), sorted(candidate.output.items())))
        rows.setdefault(candidate.setting, {}).setdefault(content, candidate)

    defaults = set()
    for setting, different in rows.items():
        configurations = list(different.values())
        index = default_of([candidate.composition for candidate in configurations], num_layers)
        if index is not None:
            defaults.add((setting, configurations[index].short))

    for candidate in candidates:
        yield candidate, (candidate.setting, candidate.short) in defaults


def _checked(configuration: dict[str, Any], family: Family) -> dict[str, Any]:
    """A configuration of a family, with `allow_negative` if the family has it. Refuses what is no valid composition."""
    where = f"compositions: {_name_of(family, configuration.get('method', 'layer_swap'))}"
    settings = [f"{key}={value}" for key, value in configuration.items()]
    if settings:
        where += f" at {', '.join(settings)}"

    if family.allow_negative:
        configuration = {**configuration, "allow_negative": True}
    content = configuration
    if family.rules:
        content = {**content, "rules": family.rules}
    Composition.read_content(content, where=where)
    return configuration


def _name_of(family: Family, method: str) -> str:
    """What error messages call a family."""
    if family.name:
        return family.name
    if family.rules:
        return "rules"
    return method


def _check_form(composition: Composition, family: Family, full: Collection[str]) -> None:
    """Check that a composition can be evaluated in the form that its family requires: switched, reduced or merged."""
    name = _name_of(family, composition.method)
    full_expert = next((expert for expert in composition.expert_names if expert in full), None)
    bound = next((key for key in family.output if key != "full_rank"), None)
    if full_expert is not None and bound is not None:
        raise FieldError(
            f"compositions: {name}: {bound} does not apply: {full_expert} is a full checkpoint, so the composition is "
            "evaluated as merged weights",
            f"Leave {bound} out",
            parameter=bound,
        )
    if full_expert is not None or family.full_rank:
        return

    used = [(composition.method, composition.parameters)]
    if family.rules:
        used = []
        for rule in family.rules:
            if rule.blend is not None:
                used.append((rule.method, rule.parameters))
    for method, parameters in used:
        if find_method(method).acts_on == "weights":
            raise FieldError(
                f"compositions: {name}: {method} combines whole weights, which an adapter cannot hold",
                "Set full_rank: true in the family to evaluate its merged weights, or use a method on ΔW",
                parameter="full_rank",
            )
        if not find_method(method).exact_in_adapters(parameters) and not family.output:
            raise FieldError(
                f"compositions: {name}: the result of {method} does not have low rank, so an adapter cannot hold it",
                "Set full_rank: true in the family to evaluate its merged weights, or max_rank (such as the experts' "
                "rank, or twice that) or max_error to evaluate an adapter that approximates it",
                parameter="max_rank",
            )


def _by_rules(
    recipe: SweepRecipe,
    family: Family,
    content: dict[str, Any],
    tasks: SweepTasks,
    ids: list[str],
    full: Collection[str],
) -> Iterator[_Candidate]:
    """The compositions of one configuration of a family of rules: one for every choice of experts for its roles."""
    rules = family.rules or ()
    family_name = family.name or "rules"
    roles = {role: [*experts] for role, experts in recipe.by_role.items()}
    settings = {"rules": "; ".join(rule.text for rule in rules), **content, **family.output}

    for cast in casts(named_in(rules), roles, pairs_of(recipe, family)):
        task, language, others = cast.of(TASK), cast.of(LANGUAGE), cast.others
        where = f"compositions: {family_name} with {', '.join((*task, *language, *others))}"
        composition = Composition.read_content({**content, "rules": bound(rules, cast)}, where=where)
        _check_form(composition, family, full)

        souped = any(len(names) > 1 for names in cast.experts.values())
        sides = ["&".join(side) for side in (task, language, others) if side]
        yield _Candidate(
            row=f"{family_name} of soups" if souped else family_name,
            composition=composition,
            output=family.output,
            short=f"{'+'.join(sides)}@{_settings_text(settings)}",
            tasks=tasks.of(language or recipe.language_experts),
            trial=ids,
            task=task,
            language=language,
            others=others,
        )


def _of_pair(
    family: Family,
    content: dict[str, Any],
    task: tuple[str, ...],
    language: tuple[str, ...],
    tasks: tuple[str, ...],
    ids: list[str],
) -> _Candidate:
    """The composition of one configuration with one pair."""
    sides = {"task": task, "language": language or (BASE,)}
    where = f"compositions: {' and '.join(task)} with {' and '.join(sides['language'])}"
    composition = Composition.read_content({**content, **sides}, where=where)

    # Its row in tables; compositions of averaged sides have their own
    row = composition.method
    if composition.partition:
        row = f"partition {composition.partition}"
    elif row == "layer_swap" and composition.language == (BASE,):
        row = "reset"
    if composition.weights == "magnitude":
        row = f"magnitude {row}"
    row = family.name or row
    if len(composition.task) > 1 or len(composition.language) > 1:
        row += " of soups"

    short = f"{'&'.join(task)}+{'&'.join(sides['language'])}"
    settings = _settings_text({**content, **family.output})
    if settings:
        short += f"@{settings}"
    return _Candidate(row, composition, family.output, short, tasks, ids, task, language)


def _as_data(composition: Composition) -> dict[str, Any]:
    """A composition as sweep.json has it: without defaults, but always with its method and experts."""
    always = set()
    if composition.allocation is None:
        always = {"method", "task", "language"}
    content = composition.model_dump(mode="json", include=always)
    return content | composition.model_dump(mode="json", exclude_defaults=True)


def _expert_cell(
    row: str,
    name: str,
    tasks: tuple[str, ...],
    *,
    short: str | None = None,
    task: tuple[str, ...] = (),
    language: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
) -> Cell:
    composition = {"allocation": [{"expert": name}]}
    return Cell("", row, task, language, composition, short or name, default=True, tasks=tasks, other_experts=others)


def _identified(cell: Cell, recipe: SweepRecipe, full: Collection[str]) -> Cell:
    """The cell with the chains among its experts, the owners of its tokenizer and its config, and its id."""
    composition = dict(cell.composition)
    chains = recipe.chains
    used = {}
    for name in (*cell.task_expert, *cell.language_expert, *cell.other_experts):
        if name in chains:
            used[name] = list(chains[name])
    if used:
        composition["chains"] = used

    # Who owns the tokenizer and the config depends on the experts, those of chains included
    cell = replace(cell, composition=composition)
    cell = replace(cell, composition={**composition, **_owners(cell, recipe, full)})
    content = json.dumps(cell.as_json(), sort_keys=True, ensure_ascii=False)
    return replace(cell, cell=hashlib.sha256(content.encode("utf-8")).hexdigest()[:12])


def _owners(cell: Cell, recipe: SweepRecipe, full: Collection[str]) -> dict[str, str]:
    """The recipe's `tokenizer` and `config_from`, as far as their owners take part in the cell.

    Only compositions of full checkpoints have a config. An expert alone keeps its own.
    """
    composition = cell.parsed
    if composition is None:
        return {}
    names = composition.expert_names
    owners = {}
    if recipe.tokenizer in (*names, BASE) and names:
        owners["tokenizer"] = str(recipe.tokenizer)

    models = [name for name in names if name in full]
    if recipe.config_from is not None and models:
        members = recipe.by_role.get(recipe.config_from, (recipe.config_from,))
        candidates = [name for name in (*models, BASE) if name in members]
        if cell.composition.get("allocation") == [{"expert": models[0]}]:
            candidates = models
        if candidates:
            owners["config_from"] = candidates[0]
    return owners


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={_number(value)}" for key, value in settings.items())


def _number(value: Any) -> str:
    """A value as text, such as `0.5`, `true` or `1e-06`."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)

    # Configurations are distinguished by it, so it is in full if six digits are not enough
    short = f"{value:g}"
    if float(short) != value:
        return repr(value)
    return short
