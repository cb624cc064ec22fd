"""The shapes of a base model's modules, from its config alone, and a check that an adapter fits them.

A server that loads an adapter of the wrong width answers with garbage, and a module that the base does not have is
ignored. Both are refused here. transformers builds the model without memory for its weights, so names and shapes are
right for every architecture that it knows. Knows nothing of compositions.
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
    """Each module of the base that LoRA can adapt, with its shape in the format of `LoraModule.shape`.

    Args:
        base_model: a folder or Hub id.
        memo: stores the answer, because building even an empty model of 8B takes about a second.

    Raises:
        NotFoundError: the base's config is not a local file and could not be downloaded.
        BaseModelError: its config is damaged, or transformers has no model for it.
    """
    folder = find_source(base_model, ["config.json"], what="base model").folder
    config = read_json(folder / "config.json", _REMEDY, kind=BaseModelError)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    key = f"shapes {digest} transformers {version('transformers')}"
    stored = memo.get(key)
    if isinstance(stored, dict):
        return stored
    shapes = _build(folder, base_model)
    memo.put(key, shapes)
    return shapes


def _build(folder: Path, base_model: str) -> dict[str, str]:
    weights = adaptable_weights(empty_model_as_saved(folder, f"the base {base_model}"))
    return {name: weight.shape for name, weight in weights.items()}


def check_fits(adapter: Adapter, shapes: Mapping[str, str], name: str, engine: str = "vLLM") -> None:
    """Raise if a server with this base cannot load the adapter, or would answer wrongly with it.

    Messages call the adapter `name` and the server `engine`.

    Raises:
        ExpertError: it adapts modules that the base does not have, or has in another shape.
        UnsupportedError: it has something that the engine does not serve: LoRA on fused experts, modules trained in
            full, or LoRA on an embedding that also changes the tied head.
    """
    problems = Problems(ExpertError)
    with problems.collect():
        adapter.check_low_rank(f"{engine} serves", name)
    remedy = "Serve experts of this base model"
    fused = [module.name for module in adapter.modules.values() if module.parameter]
    if fused:
        problems.add(
            f"{name} has LoRA on the experts of a mixture ({and_more(fused, _SHOWN)}, target_parameters), which "
            f"{engine} cannot serve by name",
            "Merge the composition into full weights with `merge`, or, for llama.cpp, write it with `export`",
            parameter="experts",
            kind=UnsupportedError,
        )
    missing = [module for module in adapter.modules if module not in shapes and module not in fused]
    if missing:
        problems.add(
            f"{name} adapts {and_more(missing, _SHOWN)}, which the base does not have", remedy, parameter="experts"
        )
    adapter_shapes = {module.name: module.shape for module in adapter.modules.values() if not module.parameter}
    compare_shapes(
        adapter_shapes, shapes, one=name, other="the base", remedy=remedy, problems=problems, parameter="experts"
    )
    if adapter.saved:
        tokens = bool(adapter.tokens)
        saved = ", ".join(adapter.saved)
        problems.add(
            f"{name} holds {f'trained tokens of {saved}' if tokens else f'{saved} trained in full (modules_to_save)'}, "
            f"which {engine} does not serve",
            "Merge it into its base with `merge`, and serve that"
            if tokens
            else "Convert them to LoRA with `adapterswap convert` and a `saved_rank`, or train them as LoRA",
            parameter="experts",
            kind=UnsupportedError,
        )
    if adapter.config.tied and any(module.embedding for module in adapter.modules.values()):
        problems.add(
            f"{name} adapts an embedding together with the head tied to it (ensure_weight_tying), which {engine} does "
            "not support",
            "Merge it into full weights, or train it without ensure_weight_tying",
            parameter="experts",
            kind=UnsupportedError,
        )
    problems.raise_if_any()
