"""The tensors of modules trained in full, of the base's trained biases, and of trained tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from adapterswap.core.changes.locations import base_tensor
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.slots import Slot, Span
from adapterswap.core.writing.outputs import OutputTensor, Piece


def saved_tensors(module: Slot, plan: Plan, adapted: Collection[str]) -> Iterator[OutputTensor]:
    """A module trained in full, a trained bias of the base, or trained tokens: in each range of rows, b·W + Σ c_i·W_i.

    `adapted` are the modules that PEFT wraps in a layer.
    """
    if not module.terms:
        return
    if module.of_tokens:
        yield _tokens_trained(module)
        return

    # A vocabulary whose ranges of rows have different owners is written range by range.
    spans: tuple[Span, ...] = (module.ordinary,)
    has_ranges = any(not span.is_like(module.ordinary) for span in module.spans)
    if has_ranges:
        spans = module.spans

    keys = ModuleKeys(module.name)
    wrapped = keys.is_bias and module.name.removesuffix(".bias") in adapted
    base_model, like = str(plan.composition.base_model), plan.adapters[module.terms[0].expert]
    for parameter, tensor in module.whole[0].change.tensors.items():
        pieces: list[Piece] = []
        for span in spans:
            cut = (span.start, span.stop) if has_ranges else None
            for term in span.whole:
                own = term.change.tensors[parameter]
                pieces.append(Piece(term.expert, term.change.path, own, term.coefficient, span.start, cut=cut))
            for share in span.base:
                rows = span.stop if has_ranges else None
                path, own = base_tensor(base_model, like, keys.parameter_name(parameter), tensor, rows=rows)
                pieces.append(Piece(BASE, path, own, share.coefficient or 0.0, span.start, cut=cut))

        axis, shape = None, tensor.shape
        if has_ranges:
            axis, shape = 0, (module.spans[-1].stop, *tensor.shape[1:])
        key = keys.parameter(parameter, wrapped=wrapped)
        yield OutputTensor(key, _common_dtype(pieces), shape, axis, tuple(pieces))


def _common_dtype(pieces: Sequence[Piece]) -> str:
    """The dtype of all pieces, or float32 if they differ."""
    dtypes = {piece.tensor.dtype for piece in pieces}
    if len(dtypes) != 1:
        return "F32"
    return dtypes.pop()


def only_tokens(plan: Plan) -> bool:
    """Whether a plan of adapters changes nothing but trained tokens, which PEFT loads without LoRA."""
    changed = [slot for slot in plan if slot.terms]
    return bool(changed) and all(slot.of_tokens for slot in changed)


def tied_names(module: Slot, plan: Plan) -> list[str]:
    """The modules tied to an embedding with trained tokens, as far as experts with its name list them."""
    names = set[str]()
    for term in module.terms:
        adapter = plan.adapters[term.expert]
        if adapter.original.get(module.module, module.module) == module.name:
            names |= adapter.tokens[module.module].tied.keys()
    return sorted(names)


def _tokens_trained(module: Slot) -> OutputTensor:
    """The rows of trained tokens: their owner's tensor as it is, or the experts' rows sorted by token."""
    owner = module.whole[0]
    pieces: list[Piece] = []
    if module.owner is not None:
        pieces.append(Piece(owner.expert, owner.change.path, owner.change.tensor))
    else:
        offset = 0
        for span in module.spans:
            count = span.stop - span.start
            for term in span.whole:
                change, place = term.change, term.change.place_of(span.start)
                cut = (place, place + count)
                pieces.append(Piece(term.expert, change.path, change.tensor, term.coefficient, offset, cut=cut))
            offset += count
    shape = (len(module.tokens), *owner.change.tensor.shape[1:])
    return OutputTensor(ModuleKeys(module.name).tokens, _common_dtype(pieces), shape, 0, tuple(pieces))
