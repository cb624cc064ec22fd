"""Which tokenizer and chat template a result has, of those that its experts and its base carry.

Knows plans; how tokenizers are compared and united, `experts.tokenizers` knows.
"""

from __future__ import annotations

from pathlib import Path

from adapterswap.experts.layers import is_vocabulary
from adapterswap.experts.tokenizers import BASE, United, unite
from adapterswap.planning.plan import Plan

__all__ = ["tokenizer_folders", "united_tokenizer"]


def tokenizer_folders(plan: Plan) -> dict[str, Path]:
    """The folders whose tokenizers a result may have, by the experts' names; the base's where full weights are made."""
    found = {name: adapter.source.folder for name, adapter in plan.adapters.items()}
    return {**found, **({} if plan.base is None else {BASE: plan.base.source.folder})}


def united_tokenizer(plan: Plan) -> United | None:
    """The tokenizer of a result that is composed of adapters; None where nobody carries one.

    Raises:
        ExpertError: a tokenizer.json is damaged.
    """
    folders = tokenizer_folders(plan)
    experts = {name: folder for name, folder in folders.items() if name != BASE}
    sizes = [slot.shape[0] for slot in plan if slot.is_stored and is_vocabulary(slot.module, slot.layer)]
    return unite(experts, folders.get(BASE), rows=min(sizes, default=None))
