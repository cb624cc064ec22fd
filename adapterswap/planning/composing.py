"""From opened experts to a plan in one call: `layer_swap`, `soup`, `task_arithmetic`, `compose`.

The short way for Python users; each builds a `Composition` and applies it. Knows nothing that those two do not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterswap.errors import Problems, check_type
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.opening import open_expert
from adapterswap.experts.sources import is_hub_id
from adapterswap.files.yamlfiles import validate
from adapterswap.planning.allocation import BASE
from adapterswap.planning.checks import check_names
from adapterswap.planning.compositions import Composition
from adapterswap.planning.making import make_plan
from adapterswap.planning.plan import Plan
from adapterswap.planning.short_names import as_composition

__all__ = ["compose", "expert_name", "layer_swap", "own_name", "soup", "task_arithmetic"]

_MEANINGFUL = frozenset("[]{}<>'\"`|\\:;*?!$")  # in recipes, tables and shells

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
        AdapterswapError: see `open_expert`, `Composition` and `make_plan`.
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


def compose(composition: Composition | str, experts: Mapping[str, Expert] | None = None) -> Plan:
    """Open the experts that a composition names and apply it to them.

    Args:
        composition: what is asked for, or its short name such as `math+swahili`.
        experts: by name, where they are not (all) in `composition.experts`; these win.

    Returns:
        The plan; one of full weights where an expert is a full checkpoint.

    Raises:
        AdapterswapError: see `open_expert` and `make_plan`.
    """
    composition = as_composition(composition)
    check_type(
        experts, (Mapping, type(None)), "experts", "Pass a mapping from names to folders, Hub ids or opened experts"
    )
    known: dict[str, Expert] = {**composition.experts, **(experts or {})}
    opened: dict[str, Adapter | Checkpoint] = {}
    problems = Problems()
    check_names(composition.expert_names, known, problems)
    for name in composition.expert_names:
        if name in known:
            with problems.collect():
                opened[name] = _open(known[name])
    problems.raise_if_any()
    return make_plan(composition, opened)


def expert_name(reference: Expert, taken: Mapping[str, Any], fallback: str) -> str:
    """A name for an expert: its folder's or repository's own, unless that is taken, reserved or unfit."""
    name = own_name(reference)
    if name not in taken and name != BASE and _is_plain(name):
        return name
    while fallback in taken:
        fallback += "_"
    return fallback


def _is_plain(name: str) -> bool:
    """Whether a name is one line of text that needs no quotes."""
    return bool(name) and name == " ".join(name.split()) and name.isprintable() and not _MEANINGFUL & set(name)


def own_name(reference: Expert) -> str:
    """The name of an expert's folder, or of its repository on the Hub."""
    if isinstance(reference, Adapter | Checkpoint):
        return reference.source.name.rpartition("/")[2]
    if isinstance(reference, str) and is_hub_id(reference):
        return reference.partition("@")[0].rpartition("/")[2]
    return Path(os.path.abspath(Path(reference).expanduser())).name


def _open(reference: Expert) -> Adapter | Checkpoint:
    return reference if isinstance(reference, Adapter | Checkpoint) else open_expert(reference)


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
    return compose(validate(content, Composition, where=method), experts)
