"""Copies of the base's embedding and head that PEFT saves with their LoRA: merged with that base, and no other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from conftest import LAYERS, logits
from peft import PeftModel
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.kit.errors import BaseModelError
from core.merging.conftest import loaded

Make = Callable[..., Path]
TARGETS = ["embed_tokens", "lm_head", "q_proj"]


@pytest.fixture
def carrying(lora: Make, tmp_path: Path) -> Make:
    """`carrying(base, dtype)`: a LoRA on embedding and head as PEFT saves it over that base."""

    def make(base: Path, dtype: torch.dtype = torch.float32) -> Path:
        folder = lora(target_modules=TARGETS)
        with quiet_peft(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")  # PEFT reports what it saves
            model = PeftModel.from_pretrained(loaded(base).to(dtype), folder)
            model.save_pretrained(tmp_path / "carrying")
        opened = adapterswap.open_adapter(tmp_path / "carrying")
        assert [module.name for module in opened.modules.values() if module.base] == ["lm_head", "model.embed_tokens"]
        return tmp_path / "carrying"

    return make


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_base_in_any_precision(
    trained: torch.dtype, stored: torch.dtype, model: Make, carrying: Make, tmp_path: Path
) -> None:
    """The base may be stored in any precision, as long as it is the same base."""
    source = model(dtype=stored) if trained != torch.float32 else model()
    adapter = carrying(source, trained)
    merged = adapterswap.merge(adapter, model(dtype=stored), out_path=tmp_path / "out")
    if trained == stored == torch.float32:
        with quiet_peft():
            live = PeftModel.from_pretrained(loaded(model()), adapter)
        close(logits(loaded(merged)), logits(live), depth=LAYERS)
    with refused(BaseModelError, "base_model"):
        adapterswap.merge(adapter, model(seed=1, dtype=stored), out_path=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_adapter_over_a_merged_one_needs_the_merged_weights(
    run: Callable[..., Result], model: Make, lora: Make, carrying: Make, tmp_path: Path
) -> None:
    """It was trained over base + first adapter; merging it into the base alone would silently lose the first."""
    first = adapterswap.merge(lora(seed=2, target_modules=TARGETS), model(), out_path=tmp_path / "first")
    second = carrying(first)
    with quiet_peft():
        expected = logits(PeftModel.from_pretrained(loaded(first), second))
    merged = adapterswap.merge(second, first, out_path=tmp_path / "out")
    close(logits(loaded(merged)), expected, depth=LAYERS)
    for options in ([], ["--dry-run"]):
        refused = run("merge", second, "--base-model", model(), "-o", tmp_path / "wrong", *options)
        assert (refused.exit_code, refused.stdout) == (3, "")
        assert "another lm_head.weight than" in refused.stderr
        assert "another model.embed_tokens.weight than" in refused.stderr
        assert "Pass the base that it was trained on as --base-model" in refused.stderr
    mixed = ["-t", second, "-l", model(seed=3), "--base-model", model(), "--bottom", 2, "--top", 1]
    assert "another lm_head.weight than" in run("merge", *mixed, "-o", tmp_path / "wrong").stderr
    assert not (tmp_path / "wrong").exists()


def test_one_number_among_many(model: Make, carrying: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    from adapterswap.core.writing import copies

    monkeypatch.setattr(copies, "_ELEMENTS", 100)
    adapter = carrying(model())
    adapterswap.merge(adapter, model(), out_path=tmp_path / "out")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.base_layer.weight"][95, 31] += 1e-3
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    with refused(BaseModelError, "base_model", match=r"another lm_head.weight than .*lm_head.base_layer.weight"):
        adapterswap.merge(adapter, model(), out_path=tmp_path / "again")
