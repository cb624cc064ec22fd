"""From experts to a plan in one call: `layer_swap`, `soup`, `slerp`, `task_arithmetic` …, and slices of one expert.

Shortcuts for Python users: each function builds a `Composition` and applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from adapterswap.core.experts.adapter import Adapter, open_adapter, open_expert
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import KeptLayers, ModuleName, NumLayers, Stack, check_one_list, format_layers
from adapterswap.core.planning.checks import check_names
from adapterswap.core.planning.composition import ZONES, Composition, Outside, Stacks, as_composition
from adapterswap.core.planning.names import ExpertName
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.slices import rules_of_slice
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    CompositionError,
    Problems,
    UnsupportedError,
    check_type,
)


def slice_layers(
    adapter: Adapter | str | Path,
    layers: str,
    *,
    stack: Stack | None = None,
    num_layers: NumLayers | None = None,
    base_model: str | Path | None = None,
) -> Plan:
    """Plan a slice: keep `layers` of an adapter and its modules outside the layers.

    Args:
        adapter: the whole expert, or a slice that still has these layers: an opened adapter, a folder or a Hub id.
        layers: the layers to keep, such as `0-4,30-31`.
        stack: for a model with an encoder and a decoder, the stack whose layers are kept; the other's are removed. By
            default the layers of both are kept.
        num_layers: the base's number of layers, or that of each stack; by default from the base's config.
        base_model: the base, if the adapter names none or names it differently.

    Returns:
        The plan, to be written or merged.

    Raises:
        ArgumentError: `layers` is not a list of layers, or the adapter has none of them; `stack` is unknown.
        CompositionError: the base, or the slice, does not have these layers or this stack.
        NotFoundError, ExpertError: see `open_adapter`.
        UnsupportedError: see `open_adapter`; or the adapter has several lists of layers.
        AdapterswapError: see `make_plan`.
    """
    check_type(adapter, (Adapter, str, Path), "adapter", "Pass a local folder, a Hub id or an opened adapter")
    remedy = "Pass layers such as `layers=0-4,30-31`"
    check_type(layers, str, "layers", remedy)

    if not isinstance(adapter, Adapter):
        adapter = open_adapter(adapter)

    # Read without the stack first, so that an error names the argument that is wrong.
    try:
        kept = KeptLayers.of(layers)
    except ValueError as error:
        raise ArgumentError(f"`layers`: {str(error).partition(';')[0]}", remedy, parameter="layers") from None
    try:
        kept = KeptLayers.of(layers, stack)
    except ValueError as error:
        raise ArgumentError(f"`stack`: {error}", "Pass encoder or decoder", parameter="stack") from None
    if not any(kept.by_stack.values()):
        raise ArgumentError(f"`layers` {layers!r} names no layer", remedy, parameter="layers")

    name = ExpertName.choose(adapter, {}, "expert")
    check_one_list(name, adapter.parts)

    # A slice without a module would be an empty adapter.
    adapted = []
    for part in adapter.parts.values():
        if part.layer is not None:
            adapted.append((ModuleName(part.name).stack, part.layer))
    if not any(kept.has(own_stack, layer) for own_stack, layer in adapted):
        choices = format_layers(layer for own_stack, layer in adapted if stack in (None, own_stack))
        raise ArgumentError(
            f"{name} adapts none of the {kept}",
            f"Choose from those that it adapts: {choices}",
            parameter="layers",
        )

    base = None if base_model is None else str(base_model)
    composition = Composition(allocation=rules_of_slice(name, kept), num_layers=num_layers, base_model=base)
    try:
        return make_plan(composition, {name: adapter})
    except CompositionError as error:
        if error.parameter == "allocation":  # the rules are made of `layers`
            raise error.recast(parameter="layers") from None
        raise


Expert = Adapter | Checkpoint | str | Path


def layer_swap(
    task: Expert,
    language: Expert,
    *,
    num_layers: NumLayers | None = None,
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int = 0,
    top_transition: int = 0,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    outside: Outside = "average",
    stack: Stacks = "both",
    base_model: str | Path | None = None,
    tokenizer: str | None = None,
    config_from: str | None = None,
) -> Plan:
    """Take the bottom and top layers from the language expert, the middle from the task expert (Bandarkar et al. 2025).

    Layer l is the language's where l < b or l > L-1-u, the task's where l > b-1+t_b and l < L-u-t_u, and otherwise the
    weighted average (w_task·ΔW_task + w_lang·ΔW_lang) / (w_task + w_lang).

    Args:
        task, language: opened adapters or full checkpoints, folders or Hub ids; `language="base"` resets the outer
            layers to the base.
        num_layers: L, or that of each stack; by default from the base's config.
        bottom, top: b and u; by default the paper's 5 and 2 of 32 layers, in proportion.
        bottom_transition, top_transition: t_b and t_u.
        task_weight, language_weight: w_task and w_lang.
        outside: whether modules outside the layers are averaged, the task's or the language's.
        stack: the stacks of an encoder-decoder that are swapped; the other one is the task's.
        base_model: the experts' base, if they do not name it or name it differently.
        tokenizer: whose tokenizer and chat templates the result takes: `task`, `language`, an expert by the name of
            its folder, or `base`; by default the experts' where they agree, else the task expert's.
        config_from: likewise, whose config full weights take, if those of full checkpoints compute differently.

    Returns:
        The plan. If an expert is a full checkpoint, it is a plan of full weights.

    Raises:
        AdapterswapError: see `open_expert` (the parameter is `task` or `language`), `Composition` and `make_plan`.
    """
    return _two_sided("layer_swap", locals())


def soup(
    task: Expert,
    language: Expert,
    *,
    num_layers: NumLayers | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    base_model: str | Path | None = None,
    tokenizer: str | None = None,
    config_from: str | None = None,
) -> Plan:
    """Average two experts' ΔW in every module, by their weights. Arguments and errors as for `layer_swap`."""
    return _two_sided("soup", locals())


def task_arithmetic(
    task: Expert,
    language: Expert,
    *,
    scale: float = 1.0,
    num_layers: NumLayers | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    allow_negative: bool = False,
    base_model: str | Path | None = None,
    tokenizer: str | None = None,
    config_from: str | None = None,
) -> Plan:
    """Compute λ·(w_task·ΔW_task + w_lang·ΔW_lang) in every module, with λ = `scale` (Ilharco et al. 2023).

    Arguments and errors as for `layer_swap`; negative weights (unlearning) need `allow_negative`.
    """
    return _two_sided("task_arithmetic", locals())


def slerp(
    task: Expert,
    language: Expert,
    *,
    num_layers: NumLayers | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    base_model: str | Path | None = None,
    tokenizer: str | None = None,
    config_from: str | None = None,
) -> Plan:
    """Interpolate spherically between two experts' ΔW, module by module (Shoemake 1985).

    The interpolation parameter is t = w_lang / (w_task + w_lang): 0 is the task expert, 1 the language expert.
    Arguments and errors as for `layer_swap`.
    """
    return _two_sided("slerp", locals())


def ties(
    task: Expert,
    language: Expert,
    *,
    density: float,
    scale: float = 1.0,
    num_layers: NumLayers | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    allow_negative: bool = False,
    base_model: str | Path | None = None,
    tokenizer: str | None = None,
    config_from: str | None = None,
) -> Plan:
    """Trim each ΔW, elect a sign for each entry, and add the entries that agree with it (TIES; Yadav et al. 2023).

    Merging into full weights is exact. Writing an adapter needs `max_rank` or `max_error`.

    Args:
        task, language: see `layer_swap`.
        density: the share of entries of each ΔW to keep, those with the largest absolute value.
        scale: λ, the factor of the result.
        num_layers, task_weight, language_weight, base_model, tokenizer, config_from: see `layer_swap`.
        allow_negative: weights and λ may be negative (unlearning).

    Returns:
        The plan. If an expert is a full checkpoint, it is a plan of full weights.

    Raises:
        AdapterswapError: see `open_expert` (the parameter is `task` or `language`), `Composition` and `make_plan`.
    """
    return _two_sided("ties", locals())


def dare(
    task: Expert,
    language: Expert,
    *,
    density: float,
    seed: int = 0,
    method: Literal["dare_linear", "dare_ties"] = "dare_linear",
    scale: float = 1.0,
    num_layers: NumLayers | None = None,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    allow_negative: bool = False,
    base_model: str | Path | None = None,
    tokenizer: str | None = None,
    config_from: str | None = None,
) -> Plan:
    """Drop entries of each ΔW at random, rescale the others by 1 / density, and add them up (DARE; Yu et al. 2024).

    Merging into full weights is exact. Writing an adapter needs `max_rank` or `max_error`.

    Args:
        task, language: see `layer_swap`.
        density: the share of entries of each ΔW to keep.
        seed: decides which entries are dropped.
        method: `dare_linear` adds up what is left; `dare_ties` elects signs first, as `ties` does.
        scale: λ, the factor of the result.
        num_layers, task_weight, language_weight, base_model, tokenizer, config_from: see `layer_swap`.
        allow_negative: weights and λ may be negative (unlearning).

    Returns:
        The plan. If an expert is a full checkpoint, it is a plan of full weights.

    Raises:
        ArgumentError: `method` is not one of the two.
        AdapterswapError: see `layer_swap`.
    """
    if method not in ("dare_linear", "dare_ties"):
        raise ArgumentError(
            f"`method` is {method!r}, which is not a DARE method", "Pass dare_linear or dare_ties", parameter="method"
        )
    return _two_sided(method, locals())


def compose(composition: Composition | str, experts: Mapping[str, Expert] | None = None) -> Plan:
    """Open the experts that a composition names, and apply the composition to them.

    Args:
        composition: the composition, or its short name such as `math+swahili`.
        experts: name → expert. They override those of the same name in `composition.experts`.

    Returns:
        The plan. If an expert is a full checkpoint, it is a plan of full weights.

    Raises:
        AdapterswapError: see `open_expert` (the parameter is `experts`) and `make_plan`.
    """
    return _compose(composition, experts, {})


def _compose(
    composition: Composition | str, experts: Mapping[str, Expert] | None, parameters: Mapping[str, str]
) -> Plan:
    """See `compose`; `parameters` maps an expert's name to the parameter to blame for it, by default `experts`."""
    composition = as_composition(composition)
    check_type(
        experts, (Mapping, type(None)), "experts", "Pass a mapping from names to folders, Hub ids or opened experts"
    )
    references: dict[str, Expert] = {**composition.experts, **(experts or {})}

    # All names and all experts are looked at before an error is raised, which then has every problem.
    problems = Problems(CompositionError)
    check_names(composition.expert_names, references, problems, composition.allocation)

    opened: dict[str, Adapter | Checkpoint] = {}
    for name in composition.expert_names:
        if name not in references:  # said by `check_names`
            continue
        reference = references[name]
        if isinstance(reference, Adapter | Checkpoint):
            opened[name] = reference
            continue
        try:
            opened[name] = open_expert(reference)
        except AdapterswapError as error:
            problems.keep(error.recast(parameter=parameters.get(name, "experts")))
    problems.raise_if_any()

    return make_plan(composition, opened)


def adapter_plan(
    reference: Adapter | str | Path,
    base_model: str | Path | None = None,
    num_layers: int | None = None,
    *,
    tokenizer: str | None = None,
) -> Plan:
    """The plan that takes every module from one adapter; of a slice, those that it has.

    With `tokenizer="base"` the result has the base's tokenizer, not the adapter's.
    """
    adapter = reference if isinstance(reference, Adapter) else open_expert(reference)
    if isinstance(adapter, Checkpoint):
        raise UnsupportedError(
            f"{reference} is a full checkpoint, not an adapter", "Pass an adapter, or two experts", parameter="plan"
        )

    name = ExpertName.choose(adapter, {}, "expert")
    base = None if base_model is None else str(base_model)
    composition = Composition.of_one(name, adapter, base_model=base, num_layers=num_layers, tokenizer=tokenizer)
    return make_plan(composition, {name: adapter})


def _two_sided(method: str, arguments: Mapping[str, Any]) -> Plan:
    """Compose two experts; `arguments` are all those of a method's function: `task`, `language`, and keys of a
    composition."""
    sides = {side: arguments[side] for side in ("task", "language")}
    for side, expert in sides.items():
        check_type(expert, (Adapter, Checkpoint, str, Path), side, "Pass a local folder, a Hub id or an opened expert")

    experts: dict[str, Expert] = {}
    names: dict[str, str] = {}
    for side, expert in sides.items():
        if expert == BASE:
            names[side] = BASE
            continue
        names[side] = ExpertName.choose(expert, experts, side)
        experts[names[side]] = expert

    # None means the default of a zone, as if the argument were left out.
    given = {key: value for key, value in arguments.items() if value is not None or key not in ZONES}
    owners = {key: _owner(arguments[key], names) for key in ("tokenizer", "config_from")}
    composition = Composition.read_content({**given, "method": method, **names, **owners}, where=method)
    return _compose(composition, experts, {names[side]: side for side in ("language", "task")})


def _owner(requested: str | None, names: Mapping[str, str]) -> str | None:
    """The expert that a side (`task`, `language`) means; other names stay. `names` maps sides to their experts."""
    if requested is None or requested in names.values():
        return requested
    return names.get(requested, requested)
