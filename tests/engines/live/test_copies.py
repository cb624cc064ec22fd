"""Copies of the base's embedding and head in experts' files: never put over the running base's own weights."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file
from tolerances import close
from transformers import AutoModelForCausalLM, PreTrainedModel

import adapterswap
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.writing import copies
from adapterswap.engines.live import LiveComposer, load_expert
from adapterswap.kit.errors import ExpertError, UnsupportedError
from engines.live.conftest import assert_same_tensors, state_of, tensors_of, written_files

Make = Callable[..., Path]
TARGETS = ["embed_tokens", "lm_head", "q_proj"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def carrying(expert: Make, tmp_path: Path) -> Make:
    """`carrying(model, "math")`: an expert of that base, with the copies that PEFT saves of its embedding and head."""

    def make(model: PreTrainedModel, name: str = "math", targets: list[str] = TARGETS) -> Path:
        folder = expert(seed=len(name), target_modules=targets)
        with quiet_peft(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")  # PEFT reports what it saves
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            PeftModel.from_pretrained(model, folder).save_pretrained(tmp_path / name)
        carried = [key for key in load_file(tmp_path / name / "adapter_model.safetensors") if ".base_layer." in key]
        assert len(carried) == len(targets) - 1
        return tmp_path / name

    return make


def other_base(folder: Path) -> PreTrainedModel:
    """The base after another training, which changed its embedding and nothing else."""
    model = load_base(folder)
    model.get_input_embeddings().weight.data += 0.01
    return model


def own_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The base's weights, with or without LoRA layers around its modules."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }


@pytest.mark.parametrize("layers", [None, "0-1,5"])
def test_an_expert_of_another_embedding_is_refused(
    layers: str | None, base: Make, expert: Make, carrying: Make
) -> None:
    foreign = carrying(other_base(base("llama")), "foreign")
    model = load_base(base("llama"))
    before = tensors_of(model)
    with refused(ExpertError, "expert", match="model.embed_tokens.weight") as caught:
        load_expert(model, foreign, "foreign", layers=layers)
    assert "lm_head" not in str(caught.value)
    assert_same_tensors(tensors_of(model), before)
    composing = LiveComposer.from_experts(
        model, {"math": expert(seed=1), "swahili": carrying(load_base(base("llama")))}
    )
    state, tensors = state_of(composing.model), tensors_of(composing.model)
    with composing.use("math+swahili@bottom=2,top=1"), refused(ExpertError, "expert"):
        composing.load_expert(foreign, layers=layers)
    assert state_of(composing.model) == state
    assert_same_tensors(tensors_of(composing.model), tensors)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layers", [None, "0-5"])
@pytest.mark.parametrize(("trained", "running"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_the_base_is_unchanged_bit_for_bit(
    trained: torch.dtype, running: torch.dtype, layers: str | None, base: Make, carrying: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For any dtypes of storing, training and loading; the factors have the dtype that PEFT gives them."""
    monkeypatch.setattr(copies, "_ELEMENTS", 1000)
    for stored in {trained, running}:
        folder = carrying(load_base(base("llama")).to(stored).to(trained))
        model = load_base(base("llama")).to(stored).to(running)
        before, values = own_weights(model), tensors_of(model)
        loaded = load_expert(model, folder, "math", layers=layers)
        after = own_weights(loaded)
        assert all(after[name] is parameter for name, parameter in before.items())
        assert_same_tensors(after, values)
        file = load_file(folder / "adapter_model.safetensors")
        for key, tensor in loaded.state_dict().items():
            if ".lora_" in key:  # PEFT rounds to the base's dtype first
                assert torch.equal(tensor, file[key.replace(".math", "")].to(running).float())


def test_a_copy_does_not_change_the_result(base: Make, carrying: Make, expert: Make) -> None:
    """An expert of this base computes the same with the copy, without it, and as PEFT loads it."""
    folder = carrying(load_base(base("llama")))
    ours = logits(load_expert(load_base(base("llama")), folder, "math"))
    without = load_expert(load_base(base("llama")), expert(seed=4, target_modules=TARGETS), "math")
    assert torch.equal(ours, logits(without))
    assert torch.equal(ours, logits(PeftModel.from_pretrained(load_base(base("llama")), folder)))


def test_a_tied_head_stays_tied(base: Make, carrying: Make) -> None:
    """PEFT by itself separates the embedding from the head that shares its numbers."""

    def tied() -> Any:
        source = load_base(base("llama"))
        config = type(source.config).from_dict(source.config.to_dict() | {"tie_word_embeddings": True})
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()

    folder = carrying(tied(), targets=["embed_tokens", "q_proj"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        model = load_expert(tied(), folder, "math").get_base_model()
    assert model.lm_head.weight is model.model.embed_tokens.base_layer.weight


def test_merged_adapters_hide_the_bases_weights(base: Make, carrying: Make) -> None:
    model = load_expert(load_base(base("llama")), carrying(load_base(base("llama"))), "math")
    model.merge_adapter()
    second = carrying(load_base(base("llama")), "swahili")
    before = tensors_of(model)
    with refused(UnsupportedError):
        load_expert(model, second, "swahili")
    assert_same_tensors(tensors_of(model), before)


@pytest.mark.parametrize("how", [{"dtype": torch.float8_e4m3fn}, {"device": "meta"}], ids=str)
def test_weights_that_cannot_be_compared_are_refused(how: dict[str, Any], base: Make, carrying: Make) -> None:
    model = load_base(base("llama"))
    model.lm_head.to(**how)
    with refused(UnsupportedError, "model", match="lm_head.weight") as caught:
        load_expert(model, carrying(load_base(base("llama"))), "math")
    assert "embed_tokens" not in str(caught.value)


def test_compositions_saved_live_contain_the_copies(base: Make, carrying: Make, tmp_path: Path) -> None:
    experts = {name: carrying(load_base(base("llama")), name) for name in ("math", "swahili")}
    composing = LiveComposer.from_experts(load_base(base("llama")), experts)
    name = "math+swahili@bottom=2,top=1"
    written = adapterswap.write_adapter(
        adapterswap.compose(adapterswap.parse_composition(name), experts), tmp_path / "written"
    )
    with composing.use(name):
        output, saved = logits(composing.model), composing.save(tmp_path / "saved")
    assert written_files(saved) == written_files(written)
    again = load_expert(load_base(base("llama")), saved, "again")
    close(logits(again), output, depth=LAYERS)
