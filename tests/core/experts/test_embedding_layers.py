"""Embeddings and heads that PEFT saves with a LoRA (`save_embedding_layers`): what opens, and that remedies work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits
from peft import LoraConfig
from pico_models import in_peft, noisy, trained
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap.kit.errors import UnsupportedError

FULL_NAMES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(6)] + ["model.embed_tokens"]

Save = Callable[..., Path]


@pytest.fixture
def save(base: Callable[[str], Path], tmp_path: Path) -> Save:
    """`save(False, target_modules=…)`: a random LoRA saved by PEFT, optionally with a changed embedding and head."""

    def make(save_embedding_layers: bool | str, *, changed: bool = False, **options: Any) -> Path:
        model = load_base(base("llama"))
        if changed:
            noisy(model.lm_head, 2)
        if changed and "model.embed_tokens" not in options["target_modules"]:
            noisy(model.model.embed_tokens, 3)
        config = LoraConfig(r=2, task_type="CAUSAL_LM", **options)
        return trained(model, config, tmp_path / "adapter", save_embedding_layers=save_embedding_layers)

    return make


@pytest.mark.parametrize(
    ("targets", "how", "copies"),
    [
        (["q_proj"], "auto", []),
        (["q_proj", "embed_tokens"], "auto", ["model.embed_tokens"]),
        (["q_proj", "lm_head"], "auto", ["lm_head"]),
        (r".*(q_proj|embed_tokens)$", "auto", ["model.embed_tokens"]),
        (FULL_NAMES, "auto", []),
        (["q_proj", "embed_tokens", "lm_head"], False, []),
    ],
    ids=str,
)
def test_adapters_as_peft_saves_them_open(targets: Any, how: Any, copies: list[str], save: Save) -> None:
    opened = adapterswap.open_adapter(save(how, target_modules=targets))
    assert [module.name for module in opened.modules.values() if module.base is not None] == copies
    assert not opened.saved


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({"target_modules": ["q_proj"]}, ["lm_head", "model.embed_tokens"]),
        ({"target_modules": FULL_NAMES}, ["lm_head"]),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, ["lm_head", "model.embed_tokens"]),
    ],
    ids=["layers", "full names", "modules_to_save"],
)
@pytest.mark.parametrize("changed", [False, True], ids=["own", "changed"])
def test_whole_weights_count_as_modules_held_in_full(
    options: dict[str, Any], whole: list[str], changed: bool, save: Save, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """PEFT overwrites the base's weights with them; as modules_to_save they answer alike and leave the base alone."""
    folder = save(True, changed=changed, **options)
    opened = adapterswap.open_adapter(folder)
    assert list(opened.saved) == whole
    expected = logits(in_peft(base("llama"), folder))
    out = adapterswap.slice_layers(opened, "0-5").write(tmp_path / "again")
    close(logits(in_peft(base("llama"), out)), expected, depth=LAYERS)
    merged = adapterswap.merge(folder, base("llama"), out_path=tmp_path / "merged")
    close(logits(load_base(merged)), expected, depth=LAYERS)


def test_other_whole_weights_are_refused(save: Save) -> None:
    """The adapter does not say which of the base's weights PEFT would overwrite."""
    folder = save(False, target_modules=["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.norm.weight"] = torch.ones(32)
    save_file(tensors, folder / "adapter_model.safetensors")
    with refused(UnsupportedError, match="name its module in modules_to_save"):
        adapterswap.open_adapter(folder)
