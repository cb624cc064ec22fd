"""The tensors of modules trained in full, of the base's trained biases, and of trained tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from adapterswap.core.changes.locations import base_tensor
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.slots import Slot
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
    wrapped = ModuleKeys(module.name).is_bias and module.name.removesuffix(".bias") in adapted
    differ = any(not span.is_like(module.ordinary) for span in module.spans)
    for parameter, tensor in module.whole[0].change.tensors.items():
        pieces = []
        for span in module.spans if differ else (module.ordinary,):
            cut = (span.start, span.stop) if differ else None
            sources = [(t.expert, t.change.path, t.change.tensors[parameter], t.coefficient) for t in span.whole]
            for share in span.base:
                rows = span.stop if differ else None
                adapter, name = plan.adapters[module.terms[0].expert], ModuleKeys(module.name).parameter_name(parameter)
                own = base_tensor(str(plan.composition.base_model), adapter, name, tensor, rows=rows)
                sources.append((BASE, *own, share.coefficient or 0.0))
            pieces += [Piece(*source, span.start, cut=cut) for source in sources]
        shape = (module.spans[-1].stop, *tensor.shape[1:]) if differ else tensor.shape
        axis, key = (0 if differ else None), ModuleKeys(module.name).parameter(parameter, wrapped=wrapped)
        yield OutputTensor(key, _common_dtype(pieces), shape, axis, tuple(pieces))


def _common_dtype(pieces: Sequence[Piece]) -> str:
    """The dtype of all pieces, or float32 if they differ."""
    dtypes = {piece.tensor.dtype for piece in pieces}
    return dtypes.pop() if len(dtypes) == 1 else "F32"


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
