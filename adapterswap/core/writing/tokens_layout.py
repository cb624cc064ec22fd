"""The layout of trained tokens: rows of embeddings and heads, beside LoRA or alone (TRAINABLE_TOKENS)."""

from __future__ import annotations

from dataclasses import replace

from adapterswap.core.experts.keys import TRAINABLE_TOKENS, ModuleKeys
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.writing.outputs import Layout, OutputTensor, Piece, common_dtype
from adapterswap.core.writing.peft_config import purpose


def only_tokens(plan: Plan) -> bool:
    """Whether a plan of adapters changes nothing but trained tokens, which PEFT loads without LoRA."""
    changed = [slot for slot in plan if slot.terms]
    return bool(changed) and all(slot.name in plan.tokens for slot in changed)


def lay_out_tokens(plan: Plan) -> Layout:
    """The layout of a plan that changes nothing but trained tokens, the same in each embedding or head.

    If the base's head is tied to its embedding, PEFT expects the rows under both names.
    """
    slots = [slot for slot in plan.saved.values() if slot.terms]
    tensors: list[OutputTensor] = []
    for slot in slots:
        rows = token_rows(slot)
        for name in (slot.name, *_tied_names(slot, plan)):
            tensors.append(replace(rows, key=ModuleKeys(name).trained_rows))

    targets = sorted(slot.name for slot in slots)
    config = {
        **purpose(TRAINABLE_TOKENS, plan.task_type, plan.auto_mapping, plan.base.name, plan.base.revision),
        "token_indices": list(slots[0].tokens),
        "target_modules": targets[0] if len(targets) == 1 else targets,  # PEFT writes a single name as a regex, too
        "init_weights": True,
        "inference_mode": True,
    }
    return Layout(config, tuple(tensors))


def token_rows(module: Slot) -> OutputTensor:
    """The rows of trained tokens: their owner's tensor as it is, or the experts' rows sorted by token."""
    owner = module.whole[0]
    pieces: list[Piece] = []
    if module.owner is not None:
        pieces.append(Piece(owner.expert, owner.change.path, owner.change.tensor))
    else:
        # Each span has consecutive tokens of the same experts; `offset` counts the rows that are placed already.
        offset = 0
        for span in module.spans:
            count = span.stop - span.start
            for term in span.whole:
                change, place = term.change, term.change.place_of(span.start)
                cut = (place, place + count)
                pieces.append(Piece(term.expert, change.path, change.tensor, term.coefficient, offset, cut=cut))
            offset += count

    shape = (len(module.tokens), *owner.change.tensor.shape[1:])
    return OutputTensor(ModuleKeys(module.name).tokens, common_dtype(pieces), shape, 0, tuple(pieces))


def _tied_names(module: Slot, plan: Plan) -> list[str]:
    """The modules tied to an embedding with trained tokens, as far as experts with its name list them."""
    names: set[str] = set()
    for term in module.terms:
        adapter = plan.adapters[term.expert]
        if adapter.original.get(module.module, module.module) == module.name:
            names.update(adapter.tokens[module.module].tied)
    return sorted(names)
