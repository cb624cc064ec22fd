"""Choose the tokenizer and chat template of a result from those of its experts and its base.

Knows plans; `experts.tokenizers` compares and unites tokenizers.
"""

from __future__ import annotations

from pathlib import Path

from adapterswap.experts.tokenizers import BASE, United, unite
from adapterswap.planning.plan import Plan

__all__ = ["tokenizer_folders", "united_tokenizer"]


def tokenizer_folders(plan: Plan) -> dict[str, Path]:
    """The folders that may hold the result's tokenizer, by the experts' names; also the base's for full weights."""
    folders = {name: expert.source.folder for name, expert in plan.experts.items()}
    return {**folders, **({} if plan.base is None else {BASE: plan.base.source.folder})}


def united_tokenizer(plan: Plan) -> United | None:
    """The tokenizer of a composition; None if neither the experts nor the base have one.

    Raises:
        ExpertError: a tokenizer.json is damaged.
    """
    folders = tokenizer_folders(plan)
    experts = {name: folder for name, folder in folders.items() if name != BASE}
    sizes = [slot.shape[0] for slot in plan if slot.has_tokens]
    return unite(experts, folders.get(BASE), rows=min(sizes, default=None))
