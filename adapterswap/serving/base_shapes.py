"""The shapes of a base model's modules, from its config alone, and whether an adapter fits them.

A server that loads an adapter of the wrong width answers with garbage, and one that meets a module that the base does
not have ignores it: both are refused here. transformers builds the model without memory for its weights, so that every
architecture it knows has its own names and shapes. Knows nothing of compositions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from adapterswap.errors import BaseModelError, ExpertError, Problems, UnsupportedError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.anatomy import adaptable_weights
from adapterswap.experts.empty_models import empty_model_as_saved
from adapterswap.experts.shapes import and_more, compare_shapes
from adapterswap.experts.sources import find_source
from adapterswap.files.smallfiles import read_json
from adapterswap.serving.memo import Memo

__all__ = ["base_shapes", "check_fits"]

_SHOWN = 3  # modules named in one message
_REMEDY = "Choose the experts' base model, one that the installed transformers knows"


def base_shapes(base_model: str, memo: Memo) -> dict[str, str]:
    """Each module of the base that LoRA can adapt, with its shape in the words of `LoraModule.shape`.

    Args:
        base_model: a folder or Hub id.
        memo: where the answer is kept; building even an empty model of 8B takes about a second.

    Raises:
        NotFoundError: the base's config is not a local file and could not be downloaded.
        BaseModelError: its config is damaged, or transformers has no model for it.
    """
    folder = find_source(base_model, ["config.json"], what="base model").folder
    config = read_json(folder / "config.json", _REMEDY, kind=BaseModelError)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    key = f"shapes {digest} transformers {version('transformers')}"
    known = memo.get(key)
    if isinstance(known, dict):
        return known
    shapes = _build(folder, base_model)
    memo.put(key, shapes)
    return shapes


def _build(folder: Path, base_model: str) -> dict[str, str]:
    weights = adaptable_weights(empty_model_as_saved(folder, f"the base {base_model}"))
    return {name: weight.shape for name, weight in weights.items()}


def check_fits(adapter: Adapter, shapes: Mapping[str, str], name: str, engine: str = "vLLM") -> None:
    """Whether a server with this base can load the adapter and answer right; `name` and `engine` stand for it and the
    server in messages.

    Raises:
        ExpertError: it adapts modules that the base does not have, or in another shape.
        UnsupportedError: it holds what the engine does not serve: LoRA on fused experts, modules trained in full, or an
            embedding whose LoRA also changes the tied head.
    """
    problems = Problems(ExpertError)
    with problems.collect():
        adapter.check_low_rank(f"{engine} serves", name)
    remedy = "Serve experts of this base model"
    fused = [module.name for module in adapter.modules.values() if module.parameter]
    if fused:
        problems.add(
            f"{name} has LoRA on the experts of a mixture ({and_more(fused, _SHOWN)}, target_parameters), which cannot "
            f"be served with {engine} by name",
            "Merge the composition into full weights with `merge`, or, for llama.cpp, write it with `export`",
            parameter="experts",
            kind=UnsupportedError,
        )
    missing = [module for module in adapter.modules if module not in shapes and module not in fused]
    if missing:
        problems.add(
            f"{name} adapts {and_more(missing, _SHOWN)}, which the base does not have", remedy, parameter="experts"
        )
    held = {module.name: module.shape for module in adapter.modules.values() if not module.parameter}
    compare_shapes(held, shapes, one=name, other="the base", remedy=remedy, problems=problems, parameter="experts")
    if adapter.saved:
        setting = "trainable_token_indices" if adapter.tokens else "modules_to_save"
        problems.add(
            f"{name} holds {', '.join(adapter.saved)} trained in full ({setting}), which {engine} does not serve",
            "Make LoRA of them with `adapterswap convert` and a `saved_rank`, or train them as LoRA",
            parameter="experts",
            kind=UnsupportedError,
        )
    if adapter.config.tied and any(module.embedding for module in adapter.modules.values()):
        problems.add(
            f"{name} adapts an embedding and the head tied to it together (ensure_weight_tying), unknown to {engine}",
            "Merge it into full weights, or train it without ensure_weight_tying",
            parameter="experts",
            kind=UnsupportedError,
        )
    problems.raise_if_any()
