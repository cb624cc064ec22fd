"""The tensors of modules trained in full, of the base's trained biases, and of trained tokens beside LoRA."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from adapterswap.core.changes.locations import base_tensor
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.slots import Slot, Span
from adapterswap.core.writing.outputs import OutputTensor, Piece, common_dtype
from adapterswap.core.writing.tokens_layout import token_rows


def saved_tensors(module: Slot, plan: Plan, adapted: Collection[str]) -> Iterator[OutputTensor]:
    """A module trained in full, a trained bias of the base, or trained tokens: in each range of rows, b·W + Σ c_i·W_i.

    `adapted` are the modules that PEFT wraps in a layer.
    """
    if not module.terms:
        return
    if module.name in plan.tokens:
        yield token_rows(module)
        return

    # A vocabulary whose ranges of rows have different owners is written range by range.
    spans: tuple[Span, ...] = (module.ordinary,)
    has_ranges = any(not span.is_like(module.ordinary) for span in module.spans)
    if has_ranges:
        spans = module.spans

    # Each tensor of the module: its experts' pieces, then the base's
    keys = ModuleKeys(module.name)
    wrapped = keys.is_bias and module.name.removesuffix(".bias") in adapted
    base_model, like = str(plan.composition.base_model), plan.adapters[module.terms[0].expert]
    for parameter, tensor in module.whole[0].change.tensors.items():
        pieces: list[Piece] = []
        for span in spans:
            cut, rows = None, None
            if has_ranges:
                cut, rows = (span.start, span.stop), span.stop
            for term in span.whole:
                own = term.change.tensors[parameter]
                pieces.append(Piece(term.expert, term.change.path, own, term.coefficient, span.start, cut=cut))
            for share in span.base:
                path, own = base_tensor(base_model, like, keys.parameter_name(parameter), tensor, rows=rows)
                pieces.append(Piece(BASE, path, own, share.coefficient or 0.0, span.start, cut=cut))

        axis, shape = None, tensor.shape
        if has_ranges:
            axis, shape = 0, (module.spans[-1].stop, *tensor.shape[1:])
        key = keys.parameter(parameter, wrapped=wrapped)
        yield OutputTensor(key, common_dtype(pieces), shape, axis, tuple(pieces))
