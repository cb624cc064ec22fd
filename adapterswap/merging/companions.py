"""The files next to the weights: config.json, generation config, tokenizer, chat template, licence.

They are copied from the skeleton. config.json is rewritten if the result has another dtype or vocabulary size, or an
untied head, and the tokenizer is the experts' if they have tokens or a chat template of their own. Knows Hugging Face's
file names; nothing of tensors.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterswap.experts.checkpoints import COMPANIONS, MODEL_CONFIG
from adapterswap.experts.layers import is_vocabulary
from adapterswap.experts.tokenizers import write_united
from adapterswap.files.smallfiles import exists, write_json
from adapterswap.merging.shards import ModelForm
from adapterswap.planning.plan import Plan
from adapterswap.writing.tokenizer import tokenizer_folders, united_tokenizer

__all__ = ["copy_companions", "differing_tokenizers", "tokenizer_source"]

_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 and 4
_TOKENIZER = "tokenizer.json"


def copy_companions(plan: Plan, form: ModelForm, folder: Path) -> None:
    """Write config.json and copy the other small files into `folder`."""
    source = plan.skeleton.source.folder
    for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, folder / path.name)
    united = None if plan.checkpoints else united_tokenizer(plan)
    if united is not None:
        write_united(united, tokenizer_folders(plan), folder)
    changed = _config(plan.skeleton.config, plan, form)
    if changed == plan.skeleton.config:
        shutil.copyfile(source / MODEL_CONFIG, folder / MODEL_CONFIG)
    else:
        write_json(folder / MODEL_CONFIG, changed, allow_nan=True)  # Mamba's configs hold Infinity


def tokenizer_source(plan: Plan) -> str:
    """The owner of the result's tokenizer: `base`, or an expert's name."""
    if plan.checkpoints:
        return "base" if plan.base is not None else next(iter(plan.checkpoints))
    united = united_tokenizer(plan)
    return "base" if united is None else united.owner


def differing_tokenizers(plan: Plan) -> list[str]:
    """The experts whose tokenizer differs from the result's: full ones whose tokenizer.json has other bytes, and
    adapters whose tokens have other ids."""
    if not plan.checkpoints:
        united = united_tokenizer(plan)
        return [] if united is None else list(united.others)

    def digest(folder: Path) -> str | None:
        path = folder / _TOKENIZER
        return hashlib.sha256(path.read_bytes()).hexdigest() if exists(path) else None

    ours = digest(plan.skeleton.source.folder)
    return [name for name, expert in plan.checkpoints.items() if digest(expert.source.folder) != ours]


def resized_vocabulary(plan: Plan) -> dict[int, int]:
    """The skeleton's numbers of rows in embeddings and heads that the result resizes → the result's."""
    stored = plan.skeleton.parameters
    sizes = {slot.name: slot.shape[0] for slot in plan if is_vocabulary(slot.module, slot.layer)}
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
