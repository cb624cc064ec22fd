"""The files next to the weights: config.json, generation config, tokenizer, chat template, licence.

They are copied from the skeleton. config.json is rewritten if the result has another dtype or vocabulary size, or an
untied head, and the tokenizer is the experts' if they have tokens or a chat template of their own. Knows Hugging Face's
file names; nothing of tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterswap.errors import ExpertError
from adapterswap.experts.checkpoints import COMPANIONS, MODEL_CONFIG
from adapterswap.experts.tokenizers import BASE, read_tokens, tokenizer_bytes, write_united
from adapterswap.files.smallfiles import write_json
from adapterswap.merging.shards import ModelForm
from adapterswap.planning.plan import Plan
from adapterswap.writing.tokenizer import tokenizer_folders, united_tokenizer

__all__ = ["check_tokens", "config_source", "copy_companions", "differing_tokenizers", "tokenizer_source"]

_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 and 4


def copy_companions(plan: Plan, form: ModelForm, folder: Path) -> None:
    """Write config.json and copy the other small files into `folder`."""
    source = plan.skeleton.source.folder
    for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, folder / path.name)
    united = united_tokenizer(plan)
    if united is not None:
        write_united(united, tokenizer_folders(plan), folder)
    changed = _config(plan.skeleton.config, plan, form)
    if changed == plan.skeleton.config:
        shutil.copyfile(source / MODEL_CONFIG, folder / MODEL_CONFIG)
    else:
        write_json(folder / MODEL_CONFIG, changed, allow_nan=True)  # Mamba's configs hold Infinity


def tokenizer_source(plan: Plan) -> str:
    """The owner of the result's tokenizer: `base`, or an expert's name."""
    united = united_tokenizer(plan)
    if united is None:
        return config_source(plan)
    return united.owner


def config_source(plan: Plan) -> str:
    """The owner of the result's config: `base`, or the name of the first full expert."""
    return BASE if plan.base is not None else next(iter(plan.checkpoints))


def differing_tokenizers(plan: Plan) -> list[str]:
    """The experts whose tokenizer differs from the result's: those whose tokens have other ids, and full ones whose
    tokenizer.json has other bytes, unless its tokens are more or fewer."""
    united = united_tokenizer(plan)
    if united is None:
        return []
    folders = tokenizer_folders(plan)
    ours = tokenizer_bytes(folders[united.owner])

    def has_other_tokens(name: str) -> bool:
        tokens, others = read_tokens(folders[united.owner]), read_tokens(folders[name])
        return None not in (tokens, others) and tokens != others

    odd = [
        name
        for name in plan.checkpoints
        if name not in united.others and tokenizer_bytes(folders[name]) != ours and not has_other_tokens(name)
    ]
    return [*united.others, *odd]


def check_tokens(plan: Plan) -> None:
    """Check that the result's tokenizer has the tokens whose rows it has from their owners.

    Raises:
        ExpertError: the experts' tokenizers cannot be united.
    """
    united = united_tokenizer(plan)
    if united is None or not any(slot.rows for slot in plan):
        return
    folders = tokenizer_folders(plan)
    tokens = dict(read_tokens(folders[united.owner]) or {})
    tokens |= {i: (read_tokens(folder) or {})[i] for i, folder in united.added.items()}
    for slot in plan:
        for part in (part for part in slot.rows if part.is_new):
            expert = part.terms[0].expert
            theirs = read_tokens(folders[expert]) or {}
            odd = next((i for i in range(part.start, part.stop) if i in theirs and theirs[i] != tokens.get(i)), None)
            if odd is not None:
                raise ExpertError(
                    f"row {odd} of {slot.name} is that of {theirs[odd]!r} in {expert}, but the tokenizer of "
                    f"{united.owner}, which the result would have, cannot have that token",
                    "Use experts whose tokenizers agree, or save one tokenizer that has all tokens in each folder",
                )


def resized_vocabulary(plan: Plan) -> dict[int, int]:
    """The skeleton's numbers of rows in embeddings and heads that the result resizes → the result's."""
    stored = plan.skeleton.parameters
    sizes = {slot.name: slot.shape[0] for slot in plan if slot.has_tokens}
    return {
        stored[name].tensor.shape[0]: size
        for name, size in sizes.items()
        if name in stored and stored[name].tensor.shape[0] != size
    }


def _config(config: Mapping[str, Any], plan: Plan, form: ModelForm) -> dict[str, Any]:
    """config.json with the result's dtype, vocabulary size and ties, also in nested language models."""
    changed = dict(config)
    resized = resized_vocabulary(plan)
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict) and "model_type" in value:
            changed[key] = _config(value, plan, form)
        elif key in _DTYPE_KEYS and form.dtype:
            changed[key] = form.dtype
        elif key == "tie_word_embeddings" and plan.untied:
            changed[key] = False
        elif key == "vocab_size" and value in resized:
            changed[key] = resized[value]
    if config is plan.skeleton.config:
        if plan.untied:
            changed["tie_word_embeddings"] = False
        if form.dtype and not any(key in config for key in _DTYPE_KEYS):
            changed["torch_dtype"] = form.dtype  # which transformers 5 reads too
    return changed
