"""An adapter with copies of the base's weights is evaluated on that base, and refused if they are another base's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from adapterswap import AdapterswapError, layer_swap, write_adapter
from adapterswap.core.model.opened_base import OpenedBase, quiet_peft
from adapterswap.engines.live import find_adapter
from adapterswap.experiments.evaluation.subjects import Subject

TOKENS = torch.arange(40).reshape(2, 20) * 7 % 259


def carrying(model: LlamaForCausalLM, folder: Path, **options: Any) -> Path:
    """A random adapter of `model`, with the copy that PEFT saves of its embedding."""
    config = LoraConfig(target_modules=["embed_tokens", "q_proj"], r=2, init_lora_weights=False, **options)
    with quiet_peft(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")  # PEFT reports what it saves
        get_peft_model(model, config).save_pretrained(folder)
    assert any(".base_layer." in key for key in load_file(folder / "adapter_model.safetensors"))
    return folder


def base_model(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(TOKENS).logits
    return result


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_another_base_is_refused(options: dict[str, Any], byte_base: Path, tmp_path: Path) -> None:
    """For every kind: the second adapter cannot be composed."""
    other = base_model(byte_base)
    other.get_input_embeddings().weight.data += 0.01
    foreign = find_adapter(str(carrying(other, tmp_path / "foreign", **options)))
    told = r"The adapter foreign carries a copy of model.embed_tokens.weight .*trained on another base"
    with (
        pytest.raises(AdapterswapError, match=told),
        Subject(OpenedBase.open(str(byte_base)), adapter=foreign).loaded(device="cpu"),
    ):
        pass


def test_numbers_that_cannot_be_compared_are_refused(byte_base: Path, tmp_path: Path) -> None:
    folder = carrying(base_model(byte_base), tmp_path / "math")
    file = folder / "adapter_model.safetensors"
    save_file({key: t.double() if ".base_layer." in key else t for key, t in load_file(file).items()}, file)
    with (
        pytest.raises(AdapterswapError, match=r"embed_tokens.*, and its dtype is F64\. Save it as one of F32"),
        Subject(OpenedBase.open(str(byte_base)), adapter=find_adapter(str(folder))).loaded(device="cpu"),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bases_own_copy_changes_nothing(dtype: torch.dtype, byte_base: Path, tmp_path: Path) -> None:
    """A copy that training rounded does not replace the base's weight. Otherwise PEFT's result is the reference."""
    folder = carrying(base_model(byte_base).to(dtype), tmp_path / "math")
    base = base_model(byte_base)
    with Subject(OpenedBase.open(str(byte_base)), adapter=find_adapter(str(folder))).loaded(device="cpu") as model:
        assert torch.equal(model.get_input_embeddings().base_layer.weight, base.get_input_embeddings().weight)
        result = logits(model)
    assert not torch.equal(result, logits(base))
    if dtype == torch.float32:
        assert torch.equal(result, logits(PeftModel.from_pretrained(base, folder)))


def test_experts_may_have_names_that_peft_cannot_hold(byte_base: Path, tmp_path: Path) -> None:
    """`lora` is part of PEFT's keys and a dot separates modules; such a composition is written first, and loaded."""
    folders = []
    for seed, name in enumerate(("lora", "swahili-v1.5")):
        torch.manual_seed(seed)
        config = LoraConfig(target_modules=["q_proj", "up_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
        with quiet_peft():
            get_peft_model(base_model(byte_base), config).save_pretrained(tmp_path / name)
        folders.append(tmp_path / name)
    plan = layer_swap(*folders, bottom=1, top=1, base_model=str(byte_base))
    assert list(plan.experts) == ["lora", "swahili-v1.5"]
    composed = write_adapter(plan, tmp_path / "composed")
    with quiet_peft():
        expected = logits(PeftModel.from_pretrained(base_model(byte_base), composed))
    with Subject(OpenedBase.open(str(byte_base)), plan=plan).loaded(device="cpu") as model:
        assert torch.equal(logits(model), expected)
