"""From experts to a plan in one call: `layer_swap`, `soup`, `slerp`, `task_arithmetic`, `ties`, `dare`, `compose`.

The short way for Python users; each builds a `Composition` and applies it. Knows nothing that those two do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from adapterswap.errors import (
    AdapterswapError,
    ArgumentError,
    CompositionError,
    Problems,
    UnsupportedError,
    check_type,
)
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.opening import open_expert
from adapterswap.files.smallfiles import expand, is_folder
from adapterswap.files.yamlfiles import read_recipe, validate
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.checks import check_names
from adapterswap.planning.compositions import Composition
from adapterswap.planning.making import make_plan
from adapterswap.planning.mergekit import is_mergekit, read_mergekit
from adapterswap.planning.names import expert_name
from adapterswap.planning.plan import Plan
from adapterswap.planning.short_names import as_composition
from adapterswap.shipped import find_recipe

__all__ = [
    "adapter_plan",
    "compose",
    "dare",
    "layer_swap",
    "read_composition",
    "slerp",
    "soup",
    "task_arithmetic",
    "ties",
]

Expert = Adapter | Checkpoint | str | Path


def layer_swap(
    task: Expert,
    language: Expert,
    *,
    num_layers: int | None = None,
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int = 0,
    top_transition: int = 0,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    base_model: str | None = None,
) -> Plan:
    """Bottom and top layers from the language expert, the middle from the task expert (Bandarkar et al. 2025).

    Layer l is the language's where l < b or l > L-1-u, the task's where l > b-1+t_b and l < L-u-t_u, and otherwise the
    weighted average (w_task·ΔW_task + w_lang·ΔW_lang) / (w_task + w_lang). Modules outside the layers are averaged.

    Args:
        task, language: opened adapters or full checkpoints, folders or Hub ids; `language="base"` resets the outer
            layers to the base.
        num_layers: L; by default from the base's config.
        bottom, top: b and u; by default the paper's 5 and 2 of 32 layers, in proportion.
        bottom_transition, top_transition: t_b and t_u.
        task_weight, language_weight: w_task and w_lang.
        base_model: the experts' base, where they name none or name it differently.

    Returns:
        The plan; one of full weights where an expert is a full checkpoint.

    Raises:
        AdapterswapError: see `open_expert` (the parameter is `task` or `language`), `Composition` and `make_plan`.
    """
    zones = {"bottom": bottom, "top": top, "bottom_transition": bottom_transition, "top_transition": top_transition}
    given = {key: count for key, count in zones.items() if count is not None}
    return _two_sided("layer_swap", task, language, task_weight, language_weight, num_layers, base_model, **given)


def soup(
    task: Expert,
    language: Expert,
    *,
    num_layers: int | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    base_model: str | None = None,
) -> Plan:
    """The weighted average of two experts' ΔW in every module; arguments and errors as for `layer_swap`."""
    return _two_sided("soup", task, language, task_weight, language_weight, num_layers, base_model)


def task_arithmetic(
    task: Expert,
    language: Expert,
    *,
    scale: float = 1.0,
    num_layers: int | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    allow_negative: bool = False,
    base_model: str | None = None,
) -> Plan:
    """λ·(w_task·ΔW_task + w_lang·ΔW_lang) in every module, with λ = `scale` (Ilharco et al. 2023).

    Arguments and errors as for `layer_swap`; negative weights (unlearning) need `allow_negative`.
    """
    return _two_sided(
        "task_arithmetic", task, language, task_weight, language_weight, num_layers, base_model,
        scale=scale, allow_negative=allow_negative,
    )  # fmt: skip


def slerp(
    task: Expert,
    language: Expert,
    *,
    num_layers: int | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    base_model: str | None = None,
) -> Plan:
    """Spherical interpolation between two experts' ΔW, module by module (Shoemake 1985).

    The share of the way from the task to the language is w_lang / (w_task + w_lang). Arguments and errors as for
    `layer_swap`.
    """
    return _two_sided("slerp", task, language, task_weight, language_weight, num_layers, base_model)


def ties(
    task: Expert,
    language: Expert,
    *,
    density: float,
    scale: float = 1.0,
    num_layers: int | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    allow_negative: bool = False,
    base_model: str | None = None,
) -> Plan:
    """Trim each ΔW, elect a sign for each entry, and add up what agrees with it (TIES; Yadav et al. 2023).

    Full weights are exact; writing an adapter needs `max_rank` or `max_error`.

    Args:
        task, language: see `layer_swap`.
        density: the share of the entries of each ΔW that is kept, those of the largest size.
        scale: λ, the factor of the result.
        num_layers, task_weight, language_weight, base_model: see `layer_swap`.
        allow_negative: weights and λ may be negative (unlearning).

    Returns:
        The plan; one of full weights where an expert is a full checkpoint.

    Raises:
        AdapterswapError: see `open_expert` (the parameter is `task` or `language`), `Composition` and `make_plan`.
    """
    return _two_sided(
        "ties", task, language, task_weight, language_weight, num_layers, base_model,
        density=density, scale=scale, allow_negative=allow_negative,
    )  # fmt: skip


def dare(
    task: Expert,
    language: Expert,
    *,
    density: float,
    seed: int = 0,
    method: Literal["dare_linear", "dare_ties"] = "dare_linear",
    scale: float = 1.0,
    num_layers: int | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    allow_negative: bool = False,
    base_model: str | None = None,
) -> Plan:
    """Drop entries of each ΔW at random, rescale the others by 1 / density, and add them up (DARE; Yu et al. 2024).

    Full weights are exact; writing an adapter needs `max_rank` or `max_error`.

    Args:
        task, language: see `layer_swap`.
        density: the share of the entries of each ΔW that is kept.
        seed: of what is dropped.
        method: `dare_linear` adds up what is left; `dare_ties` elects signs first, as `ties` does.
        scale: λ, the factor of the result.
        num_layers, task_weight, language_weight, base_model: see `layer_swap`.
        allow_negative: weights and λ may be negative (unlearning).

    Returns:
        The plan; one of full weights where an expert is a full checkpoint.

    Raises:
        ArgumentError: `method` is not one of the two.
        AdapterswapError: see `layer_swap`.
    """
    if method not in ("dare_linear", "dare_ties"):
        raise ArgumentError(
            f"`method` is {method!r}, which is not a form of DARE", "Pass dare_linear or dare_ties", parameter="method"
        )
    return _two_sided(
        method, task, language, task_weight, language_weight, num_layers, base_model,
        density=density, seed=seed, scale=scale, allow_negative=allow_negative,
    )  # fmt: skip


def compose(composition: Composition | str, experts: Mapping[str, Expert] | None = None) -> Plan:
    """Open the experts that a composition names and apply it to them.

    Args:
        composition: the composition, or its short name such as `math+swahili`.
        experts: by name, where they are not (all) in `composition.experts`; these win.

    Returns:
        The plan; one of full weights where an expert is a full checkpoint.

    Raises:
        AdapterswapError: see `open_expert` (the parameter is `experts`) and `make_plan`.
    """
    return _compose(composition, experts, {})


def _compose(
    composition: Composition | str, experts: Mapping[str, Expert] | None, parameters: Mapping[str, str]
) -> Plan:
    """See `compose`; `parameters` are those that name an expert, by the expert's name; by default `experts`."""
    composition = as_composition(composition)
    check_type(
        experts, (Mapping, type(None)), "experts", "Pass a mapping from names to folders, Hub ids or opened experts"
    )
    known: dict[str, Expert] = {**composition.experts, **(experts or {})}
    opened: dict[str, Adapter | Checkpoint] = {}
    problems = Problems(CompositionError)
    check_names(composition.expert_names, known, problems, composition.allocation)
    for name in composition.expert_names:
        if name in known:
            with problems.collect():
                opened[name] = _open(known[name], parameters.get(name, "experts"))
    problems.raise_if_any()
    return make_plan(composition, opened)


def adapter_plan(reference: Adapter | str | Path, base_model: str | None = None) -> Plan:
    """The plan that gives everything to one adapter.

    Raises:
        UnsupportedError: it is a full checkpoint.
        AdapterswapError: see `open_expert` and `make_plan`.
    """
    adapter = reference if isinstance(reference, Adapter) else open_expert(reference)
    if isinstance(adapter, Checkpoint):
        raise UnsupportedError(
            f"{reference} is a full checkpoint, and holds no LoRA", "Give an adapter, or two experts", parameter="plan"
        )
    name = expert_name(adapter, {}, "expert")
    composition = Composition(allocation=(Rule(expert=name),), base_model=base_model)
    return make_plan(composition, {name: adapter})


def read_composition(recipe: str | Path) -> Composition:
    """Read a recipe of a composition. Experts that are next to the recipe are found there.

    Args:
        recipe: a YAML file, or the name of a shipped recipe such as `compose/llama-3.1-8b/swahili`. A mergekit YAML
            is read too; see `read_mergekit`.

    Returns:
        The composition, for `compose`.

    Raises:
        NotFoundError: there is no such recipe.
        FieldError: with every mistake in it.
        UnsupportedError: a mergekit YAML says a dtype, which a composition does not hold, or what has no meaning here.
    """
    check_type(recipe, (str, Path), "recipe", "Pass a YAML file, or the name of a shipped recipe")
    path = find_recipe(recipe, "compose")
    if is_mergekit(path):
        found = read_mergekit(path)
        if found.dtype is not None:
            raise UnsupportedError(
                f"{path}: dtype is {found.dtype}, and a composition does not say how its weights are stored",
                "Remove it from the file and pass `dtype` to `merge`, or call `read_mergekit`, which returns both",
                parameter="dtype",
            )
        return found.composition
    composition = read_recipe(path, Composition, paths=["experts.*"])
    experts = {
        name: str(beside) if is_folder(beside := path.parent / expand(place)) else place
        for name, place in composition.experts.items()
    }
    return composition.model_copy(update={"experts": experts})


def _open(reference: Expert, parameter: str) -> Adapter | Checkpoint:
    if isinstance(reference, Adapter | Checkpoint):
        return reference
    try:
        return open_expert(reference)
    except AdapterswapError as error:
        raise error.recast(parameter=parameter) from None


def _two_sided(
    method: str,
    task: Expert,
    language: Expert,
    task_weight: float,
    language_weight: float,
    num_layers: int | None,
    base_model: str | None,
    **options: Any,
) -> Plan:
    for side, expert in (("task", task), ("language", language)):
        check_type(expert, (Adapter, Checkpoint, str, Path), side, "Pass a local folder, a Hub id or an opened expert")
    experts: dict[str, Expert] = {}
    names = {}
    for side, expert in (("task", task), ("language", language)):
        names[side] = BASE if expert == BASE else expert_name(expert, experts, side)
        if expert != BASE:
            experts[names[side]] = expert
    content = {
        "method": method, **names, "task_weight": task_weight, "language_weight": language_weight,
        "num_layers": num_layers, "base_model": base_model, **options,
    }  # fmt: skip
    parameters = {names[side]: side for side in ("language", "task")}
    return _compose(validate(content, Composition, where=method), experts, parameters)
