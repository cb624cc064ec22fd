"""The tensors that an adapter stores in full: modules in `modules_to_save`, and trained biases of the base.

Reads no tensors, but looks up the base if it takes part in an average.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from adapterswap.arithmetic.outputs import OutputTensor, Piece
from adapterswap.changes.locating import stored_tensor
from adapterswap.errors import AdapterswapError, BaseModelError
from adapterswap.experts.adapter_keys import TOKENS, is_bias, parameter_key, parameter_name
from adapterswap.experts.checkpoints import find_base_tensor, open_checkpoint
from adapterswap.files.tensorfile import Tensor
from adapterswap.planning.allocation import BASE
from adapterswap.planning.plan import Plan
from adapterswap.planning.slots import Slot

__all__ = ["only_tokens", "saved_tensors", "tied_names", "trained_tokens"]


def saved_tensors(module: Slot, plan: Plan, adapted: Collection[str]) -> Iterator[OutputTensor]:
    """A module trained in full, or a trained bias of the base: Σ c_i W_i + (1 - Σ c_i) W_base.

    `adapted` are the modules that PEFT wraps in a layer.
    """
    if not module.terms:
        return
    if module.of_tokens:
        yield _tokens(module)
        return
    if any((part.terms, part.rest) != (module.terms, module.rest) for part in module.rows):
        yield from _by_rows(module, plan)
        return
    wrapped = is_bias(module.name) and module.name.removesuffix(".bias") in adapted
    for parameter, tensor in module.terms[0].whole.tensors.items():
        pieces = [
            Piece(term.expert, term.change.path, term.whole.tensors[parameter], term.coefficient)
            for term in module.terms
        ]
        if module.needs_base:
            path, original = _base_tensor(module, parameter, tensor, plan)
            pieces.append(Piece(BASE, path, original, module.rest))
        dtypes = {piece.tensor.dtype for piece in pieces}
        dtype = tensor.dtype if len(dtypes) == 1 else "F32"
        yield OutputTensor(
            parameter_key(module.name, parameter, wrapped=wrapped), dtype, tensor.shape, None, tuple(pieces)
        )


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


def trained_tokens(module: Slot) -> tuple[int, ...]:
    """The tokens whose rows a module of trained tokens holds, in the order of its tensor."""
    if module.owner is not None:
        return module.terms[0].whole.rows
    return tuple(row for part in module.rows for row in range(part.start, part.stop))


def _tokens(module: Slot) -> OutputTensor:
    """The rows of trained tokens: their owner's tensor as it is, or the experts' rows sorted by token."""
    first = module.terms[0].whole.tensor
    tokens = trained_tokens(module)
    pieces: list[Piece] = []
    if module.owner is not None:
        pieces.append(Piece(module.terms[0].expert, module.terms[0].whole.path, first))
    else:
        offset = 0
        for part in module.rows:
            count = part.stop - part.start
            for term in part.terms:
                place = term.whole.place_of(part.start)
                cut = (place, place + count)
                pieces.append(Piece(term.expert, term.whole.path, term.whole.tensor, term.coefficient, offset, cut=cut))
            offset += count
    dtypes = {piece.tensor.dtype for piece in pieces}
    dtype = first.dtype if len(dtypes) == 1 else "F32"
    shape = (len(tokens), *first.shape[1:])
    return OutputTensor(parameter_key(module.name, TOKENS), dtype, shape, 0, tuple(pieces))


def _by_rows(module: Slot, plan: Plan) -> Iterator[OutputTensor]:
    """An embedding or head whose rows have different terms; see `planning.vocabulary`."""
    first = module.terms[0].whole
    for parameter, tensor in first.tensors.items():
        pieces = []
        for part in module.rows:
            cut = part.start, part.stop
            for term in part.terms:
                expert_tensor = term.whole.tensors[parameter]
                pieces.append(
                    Piece(term.expert, term.change.path, expert_tensor, term.coefficient, part.start, cut=cut)
                )
            if part.rest:
                path, base_tensor = _base_tensor(module, parameter, tensor, plan, rows=part.stop)
                pieces.append(Piece(BASE, path, base_tensor, part.rest, part.start, cut=cut))
        dtypes = {piece.tensor.dtype for piece in pieces}
        shape = (module.rows[-1].stop, *tensor.shape[1:])
        dtype = tensor.dtype if len(dtypes) == 1 else "F32"
        yield OutputTensor(parameter_key(module.name, parameter), dtype, shape, 0, tuple(pieces))


def _base_tensor(
    module: Slot, parameter: str, like: Tensor, plan: Plan, *, rows: int | None = None
) -> tuple[Path, Tensor]:
    """The base's own tensor, by the name that the experts have for it or else by the name that the base stores.

    The second needs transformers, which takes seconds to import.
    """
    base_model, key = plan.composition.base_model, parameter_name(module.name, parameter)
    assert base_model is not None
    try:
        return find_base_tensor(base_model, key, like, rows=rows)
    except BaseModelError as error:
        stored, (holder, _, name) = None, key.rpartition(".")
        with suppress(AdapterswapError):
            adapter = plan.adapters[module.terms[0].expert]
            stored = stored_tensor(adapter, holder, name, open_checkpoint(base_model))
        if stored is None or stored.name == key:
            raise error from None
        return find_base_tensor(base_model, stored.name, like, rows=rows)
