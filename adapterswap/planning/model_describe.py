"""A plan of full weights in words and characters: the strip of layers, and what is unusual.

Plain text only, for terminals and model cards. Decides nothing.
"""

from __future__ import annotations

from adapterswap.experts.layers import format_layers
from adapterswap.planning.describe import (
    Mark,
    absence_text,
    differing_bases,
    draw_strip,
    ignored_modules,
    method_text,
    owner_label,
)
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.parameters import ParameterPlan

__all__ = ["model_strip", "model_unusual"]


def model_strip(plan: ModelPlan) -> str:
    """The layers from left (bottom) to right (top), a character each, and a legend.

    Tensors that no expert adapts are left out where another of their kind in the layer is adapted.
    """
    adapted = {(parameter.layer, parameter.kind) for parameter in plan if parameter.terms}
    marks = []
    for parameter in plan:
        if parameter.layer is not None and (parameter.terms or (parameter.layer, parameter.kind) not in adapted):
            owner = owner_label(parameter.owner, parameter.rule)
            marks.append(Mark(parameter.layer, parameter.kind, owner, "" if owner else _blend(parameter)))
    return draw_strip(marks, plan.num_layers, tuple(plan.experts))


def model_unusual(plan: ModelPlan) -> list[str]:
    """What a reader should know beside the strip: tensors outside the layers, and experts that lack a tensor."""
    lines = [*differing_bases(plan.adapters, plan.composition.base_model), *ignored_modules(plan.adapters)]
    grouped: dict[tuple[str, str], list[int]] = {}
    for parameter in plan:
        if parameter.rule is None:
            continue
        present = {term.expert for term in parameter.terms}
        absent = [name for name in parameter.asked if name not in present]
        remark = absence_text(parameter.weights, absent, stays=not parameter.terms) if absent else ""
        if parameter.layer is None:
            lines.append(
                f"{parameter.name}: {remark or owner_label(parameter.owner, parameter.rule) or _blend(parameter)}"
            )
        elif remark and parameter.kind != "other":
            within = parameter.name.partition(f".{parameter.layer}.")[2]
            grouped.setdefault((within, remark), []).append(parameter.layer)
    lines += [f"{name} in layers {format_layers(layers)}: {remark}" for (name, remark), layers in grouped.items()]
    if plan.untied:
        lines.append("the head and the embedding were tied, and are not any more: tie_word_embeddings is false")
    return lines


def _blend(parameter: ParameterPlan) -> str:
    return method_text(parameter.rule, parameter.weights, parameter.method)
