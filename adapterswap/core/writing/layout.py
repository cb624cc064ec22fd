"""The layout of a plan's adapter: its tensors, ranks and scales, and the config that PEFT reads.

* `exact`: a copied module keeps its tensors, rank and alpha; a blend Σ c_i s_i B_i A_i is the rank concatenation
  A' = [A_1; A_2], B' = [c_1 s_1 B_1, c_2 s_2 B_2] / s'. The scale s' of blends is the adapter's most frequent one, so
  if the experts' scales agree, even a reader that ignores the patterns computes the right sum.
* `portable`: every module has the same rank, padded with zeros, and is plain LoRA with alpha = r (s' = 1), so there are
  no patterns. In float16 small numbers lose digits, so that s' is the power of two nearest to the most frequent scale:
  every engine reads the global alpha, and B stays as large as it was.

The config is the experts' own. `AdapterConfig.check_written` has checked that settings for all modules agree; values
that differ go into the patterns. No tensor is read; the base is looked up if it takes part in an average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapterswap.core.changes.kinds import Storage
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.writing.others_layout import lay_out_kind
from adapterswap.core.writing.outputs import Form, Layout, OutputTensor, Piece, Reduced
from adapterswap.core.writing.peft_config import Shape, adapter_config, earliest, most_common
from adapterswap.core.writing.resolution import Resolved
from adapterswap.core.writing.saved_layout import saved_tensors
from adapterswap.core.writing.tokens_layout import lay_out_tokens, only_tokens
from adapterswap.core.writing.variant_layout import variant_settings, variant_tensors

# Of the scale in the portable layout: any rank times it is an alpha that `check_written` accepts.
_LEAST_EXPONENT, _LARGEST_EXPONENT = -29, 13
# Numbers with a smaller factor are written in float32 rather than in float16, where they would lose digits.
_LEAST_FACTOR = 2.0**-4


def lay_out(resolved: Resolved, form: Form, reduced: Mapping[str, Reduced]) -> Layout:
    """The layout of a plan's adapter.

    Args:
        resolved: the plan.
        form: how to write it.
        reduced: truncated modules, by name.
    """
    plan = resolved.plan
    modules = [module for module in plan.modules.values() if module.terms]

    # Kinds other than LoRA, and trained tokens alone, have layouts of their own.
    if any(module.storage is Storage.OTHER for module in modules):
        return _in_dtype(lay_out_kind(plan, modules, _fan_in_fan_out(plan)), form.dtype)
    if only_tokens(plan):
        return _in_dtype(lay_out_tokens(plan), form.dtype)

    # In the portable layout, fused parameters of a mixture that do not change get zeros.
    is_portable = form.layout == "portable"
    if is_portable and any(ModuleKeys(module.name).is_fused for module in modules):
        modules = [module for module in plan.modules.values() if module.terms or ModuleKeys(module.name).is_fused]

    # Ranks and scales, and the global pair of rank and alpha for the config
    common = blend_scale(plan, form)
    ranks = {module.name: module.total_rank for module in modules}
    ranks |= {name: truncated.rank for name, truncated in reduced.items() if name in ranks}

    if is_portable:
        rslora = False
        rank = max(ranks.values(), default=1)
        alpha = rank * common
        shapes = dict.fromkeys(ranks, Shape(rank, alpha, common))
    else:
        rslora = uses_rslora(plan)
        shapes = {}
        for module in modules:
            shapes[module.name] = _shape(module, ranks[module.name], module.name in reduced, rslora, common)
        # The most frequent pair, of modules with the common scale if there are any
        of_common = [shape for shape in shapes.values() if math.isclose(shape.scale, common)]
        pairs = [(shape.rank, shape.alpha) for shape in of_common or shapes.values()]
        rank, alpha = most_common(pairs, default=(1, 1.0))

    # A and B of each module
    tensors: list[OutputTensor] = []
    for module in modules:
        if module.name in reduced:
            tensors += _padded(reduced[module.name].tensors, rank if is_portable else None)
        else:
            tensors += _tensors(module, shapes[module.name], resolved)

    # Everything else: magnitudes and biases, copies of the base's embedding, modules trained in full
    variant = variant_settings(modules)
    if variant:
        for module in modules:
            like = module.loras[0] if module.terms else _of_another(module, plan)
            tensors += variant_tensors(module, shapes[module.name], variant, like)
    for module in modules:
        tensors += _base_copy(module)
    for saved_module in plan.saved.values():
        tensors += saved_tensors(saved_module, plan, ranks)

    return _in_dtype(Layout(_config(plan, shapes, rank, alpha, rslora), tuple(tensors)), form.dtype)


def _in_dtype(layout: Layout, dtype: str | None) -> Layout:
    """The layout with all tensors in the requested number format, if one is requested."""
    if dtype is None:
        return layout
    tensors = [replace(tensor, dtype=dtype) for tensor in layout.tensors]
    return layout._replace(tensors=tuple(tensors))


def blend_scale(plan: Plan, form: Form) -> float:
    """s' of blends: the most frequent scale of copied modules, or of all terms. In the portable layout 1, or in float16
    the power of two nearest to it."""
    loras: list[LoraModule] = []
    copied: list[float] = []
    for module in plan.modules.values():
        loras += module.loras
        if module.owner and module.terms:
            copied.append(module.loras[0].scale)

    is_in_float16 = form.dtype == "F16"
    if form.dtype is None:
        is_in_float16 = any("F16" in (lora.a.dtype, lora.b.dtype) for lora in loras)
    if form.layout == "portable" and not is_in_float16:
        return 1.0

    scales = copied or [lora.scale for lora in loras]
    common = float(most_common(scales, default=1.0))
    if form.layout == "exact":
        return common

    exponent = round(math.log2(abs(common)))
    return 2.0 ** min(max(exponent, _LEAST_EXPONENT), _LARGEST_EXPONENT)


def uses_rslora(plan: Plan) -> bool:
    """Whether the output is rank-stabilized: if any expert is. Plain experts alone keep their config values."""
    return any(adapter.config.rslora for adapter in plan.adapters.values())


def _config(plan: Plan, shapes: Mapping[str, Shape], rank: int, alpha: float, rslora: bool) -> dict[str, Any]:
    saved = []
    for name, module in plan.saved.items():
        if module.terms and name not in plan.tokens and not ModuleKeys(name).is_bias:
            saved.append(name)

    variant = variant_settings(plan.modules.values()) | trained_biases(plan) | _parameters(plan)
    if plan.tokens:
        variant["trainable_token_indices"] = {name: list(module.tokens) for name, module in plan.tokens.items()}

    return adapter_config(
        shapes,
        (rank, alpha),
        rslora=rslora,
        base_model=plan.base.name,
        revision=plan.base.revision,
        task_type=plan.task_type,
        auto_mapping=plan.auto_mapping,
        fan_in_fan_out=_fan_in_fan_out(plan),
        tied=_tied(plan),
        saved=saved,
        variant=variant,
    )


def _parameters(plan: Plan) -> dict[str, Any]:
    """The settings for LoRA on parameters, by full name. PEFT distinguishes its layouts only by its version."""
    modules, names = [], []
    for slot in plan.modules.values():
        if slot.terms and slot.storage is Storage.LORA and slot.loras[0].parameter:
            names.append(slot.loras[0].name)
        elif slot.terms:
            modules.append(slot.name)
    if not names:
        return {}

    versions = []
    for adapter in plan.adapters.values():
        adapts_parameters = any(module.parameter for module in adapter.modules.values())
        if adapts_parameters and adapter.config.peft_version:
            versions.append(adapter.config.peft_version)

    return {
        "target_modules": sorted(modules),
        "target_parameters": sorted(names),
        "peft_version": earliest(versions),
    }


def trained_biases(plan: Plan) -> dict[str, str]:
    """The setting `bias`, if the result has trained biases of the base."""
    has_biases = any(ModuleKeys(name).is_bias and module.terms for name, module in plan.saved.items())
    if not has_biases:
        return {}

    settings = {adapter.config.bias for adapter in plan.adapters.values()} - {"none"}
    if len(settings) == 1:
        return {"bias": settings.pop()}
    return {"bias": "all"}


def _tied(plan: Plan) -> bool:
    """PEFT's `ensure_weight_tying`. If embeddings and heads are both stored in full, they are no longer tied."""
    adapters = plan.adapters.values()
    as_before = all(adapter.config.tied and not adapter.vocabulary for adapter in adapters)
    return as_before or any(adapter.ties_factors for adapter in adapters)


def _fan_in_fan_out(plan: Plan) -> bool:
    """PEFT's one flag for all modules. If it is wrong for a module, PEFT corrects it and warns.

    A saved adapter has the value of the last module that PEFT adapted. If the experts' values differ, their base has
    Conv1D modules in its layers and a Linear, such as the head, outside them.
    """
    flags = {adapter.config.fan_in_fan_out for adapter in plan.adapters.values() if adapter.adapted}
    if len(flags) == 1:
        return flags.pop()
    return any(module.layer is not None and module.terms for module in plan.modules.values())


def _shape(module: Slot, rank: int, is_reduced: bool, rslora: bool, common: float) -> Shape:
    part = module.loras[0]
    if not module.owner or is_reduced:
        return Shape.of_scale(rank, rslora, common)
    if part.rslora != rslora:
        return Shape.of_scale(rank, rslora, part.scale)
    return Shape(rank, part.alpha, part.scale)


def _tensors(module: Slot, shape: Shape, resolved: Resolved) -> list[OutputTensor]:
    """A and B of a module that is copied or concatenated."""
    first = module.loras[0] if module.terms else _of_another(module, resolved.plan)
    dtypes = {lora.dtype for lora in module.loras} or {first.dtype}
    dtype_of_all = dtypes.pop() if len(dtypes) == 1 else "F32"

    # A' = [A_1; A_2] (r'×in), B' = [c_1 s_1 B_1, c_2 s_2 B_2] / s' (out×r')
    a_pieces, b_pieces = [], []
    offset = 0
    for term, part in zip(module.terms, module.loras, strict=True):
        path = term.change.path
        factor = term.coefficient * part.scale / shape.scale
        if module.owner and math.isclose(factor, 1, rel_tol=1e-12):
            factor = 1.0  # the same scale, from the other formula (rsLoRA or plain)
        rows = resolved.kept_rows.get((term.side, module.name))
        a_pieces.append(Piece(term.expert, path, part.a, 1.0, offset))
        b_pieces.append(Piece(term.expert, path, part.b, factor, offset, rows))
        offset += part.rank

    if first.parameter:
        return list(_fused(first, shape, a_pieces, b_pieces, dtype_of_all, resolved.plan))

    factors = []
    sizes = ((shape.rank, first.in_features), (first.out_features, shape.rank))
    for axis, (key, pieces) in enumerate(zip(first.keys, (a_pieces, b_pieces), strict=True)):
        dtype = dtype_of_all
        if module.owner and pieces:
            dtype = pieces[0].tensor.dtype
        if dtype == "F16" and _are_small(pieces):
            dtype = "F32"
        factors.append(OutputTensor(key, dtype, sizes[axis], axis, tuple(pieces)))
    return factors


def _fused(
    first: LoraModule, shape: Shape, a_pieces: Sequence[Piece], b_pieces: Sequence[Piece], dtype: str, plan: Plan
) -> Iterator[OutputTensor]:
    """A and B of a parameter, with ranks concatenated per expert of the mixture.

    A is stored as (experts·rank)×in and viewed as experts×rank×in, B as out×(rank·experts) and out×rank×experts.
    """
    count, out, into = first.experts, first.out_features, first.in_features

    a_viewed, b_viewed = [], []
    for a_piece, b_piece in zip(a_pieces, b_pieces, strict=True):
        rank = a_piece.tensor.shape[0] // count
        a_viewed.append(a_piece._replace(tensor=replace(a_piece.tensor, shape=(count, rank, into))))
        b_viewed.append(b_piece._replace(tensor=replace(b_piece.tensor, shape=(out, rank, count))))

    a_key, b_key = written_keys(first, plan)
    rank = shape.rank
    for key, pieces, stored, view in (
        (a_key, a_viewed, (count * rank, into), (count, rank, into)),
        (b_key, b_viewed, (out, rank * count), (out, rank, count)),
    ):
        own_dtype = pieces[0].tensor.dtype if len(pieces) == 1 else dtype
        if own_dtype == "F16" and _are_small(pieces):
            own_dtype = "F32"
        yield OutputTensor(key, own_dtype, stored, 1, tuple(pieces), view=view)


def _are_small(pieces: Sequence[Piece]) -> bool:
    """Whether all numbers of a factor become so much smaller that float16 would lose digits."""
    return bool(pieces) and all(abs(piece.factor) < _LEAST_FACTOR for piece in pieces)


def written_keys(module: LoraModule, plan: Plan) -> tuple[str, str]:
    """The keys of a module's A and B in the file.

    PEFT nests the layer for a module's first parameter inside the layer for its second.
    """
    if not module.parameter:
        return module.keys
    holder, _, name = module.name.rpartition(".")
    second = plan.modules.get(f"{holder}.down_proj")
    layer = holder
    if name == "gate_up_proj" and second is not None and second.terms:
        layer = f"{holder}.base_layer"
    return ModuleKeys(layer).part("lora_A.weight"), ModuleKeys(layer).part("lora_B.weight")


def _of_another(module: Slot, plan: Plan) -> LoraModule:
    """For a slot without terms: the LoRA of an expert that does not take part, under the slot's name."""
    holders = (adapter.modules for adapter in plan.adapters.values() if module.module in adapter.modules)
    return replace(next(holders)[module.module], name=module.name)


def _padded(tensors: tuple[OutputTensor, ...], rank: int | None) -> Iterator[OutputTensor]:
    """Truncated factors, padded with zeros to `rank` if it is given."""
    for tensor in tensors:
        if rank is None:
            yield tensor
        elif tensor.axis == 0:  # A, rank×in
            yield replace(tensor, shape=(rank, tensor.shape[1]))
        else:  # B, out×rank
            yield replace(tensor, shape=(tensor.shape[0], rank))


def _base_copy(module: Slot) -> Iterator[OutputTensor]:
    """The base's own weight next to the LoRA of an embedding, if an expert carries it; LoRA never changes it.

    All experts carry the same copy; see `copies.check_one_base`.
    """
    for term, lora in zip(module.terms, module.loras, strict=True):
        base = lora.base
        if base is not None:
            piece = Piece(term.expert, term.change.path, base)
            yield OutputTensor(ModuleKeys(module.name).base_copy, base.dtype, base.shape, 0, (piece,))
            return
