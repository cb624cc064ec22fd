"""Optional libraries: reported before training if missing, and used if installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import LAYERS, SMALL
from refusals import refused
from safetensors.torch import load_file
from tolerances import near

from adapterswap.core import OpenedBase
from adapterswap.core.experts.adapter import open_adapter
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.experiments.training.base import attention_of, load_trainable
from adapterswap.kit.errors import DependencyError, FieldError, UnsupportedError

from .conftest import echo_rows, make_expert, word_tokenizer

MakeRecipe = Callable[..., TrainRecipe]


@pytest.mark.parametrize(
    ("changes", "parameter", "named"),
    [
        ({"quantization": {"bits": 4}}, "quantization", "bitsandbytes"),
        ({"training": {"optimizer": "paged_adamw_8bit"}}, "training.optimizer", "paged_adamw_8bit .*bitsandbytes"),
        ({"training": {"attn_implementation": "flash_attention_2"}}, "training.attn_implementation", "flash_attn,"),
        ({"training": {"kernels": True}}, "training.kernels", "kernels"),
        ({"training": {"report_to": ["nobody"]}}, "training.report_to", "'nobody'"),
    ],
)
def test_missing_libraries_are_reported(
    tmp_path: Path,
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    parameter: str,
    named: str,
) -> None:
    find, absent = importlib.util.find_spec, ("bitsandbytes", "flash_attn")
    monkeypatch.setattr(
        "adapterswap.experiments.training.base.find_spec", lambda name: None if name in absent else find(name)
    )
    monkeypatch.setattr("transformers.utils.is_kernels_available", lambda: False)
    recipe = make_recipe(**changes)
    for attempt in (lambda: estimate(recipe), lambda: train(recipe, out_path=tmp_path / "expert")):
        with refused(DependencyError, parameter, match=named):
            attempt()


@pytest.mark.parametrize(
    ("training", "field"),
    [
        ({"optimizer": "sgd"}, "optimizer"),
        ({"attn_implementation": "flash"}, "attn_implementation"),
        ({"weight_dtype": "float16"}, "weight_dtype"),
    ],
)
def test_unknown_choices_are_refused(make_recipe: MakeRecipe, training: dict[str, Any], field: str) -> None:
    with refused(FieldError, f"training.{field}"):
        make_recipe(training=training)


def test_optimizers_and_attentions_compute_the_same(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    curves = []
    for name, choice in {
        "fused": {}, "plain": {"optimizer": "adamw_torch"}, "eager": {"attn_implementation": "eager"}
    }.items():  # fmt: skip
        report = train(make_recipe(training={"max_steps": 3} | choice), out_path=tmp_path / name)
        curves.append([loss for _, loss in report.train_losses])
    assert curves[1] == near(curves[0], depth=3 * LAYERS)
    assert curves[2] == near(curves[0], depth=3 * LAYERS)


@pytest.mark.parametrize(
    ("dtype", "max_length", "attention"),
    [("bfloat16", 256, "eager"), ("bfloat16", 257, "sdpa"), ("float32", 256, "sdpa")],
)
def test_short_rows_in_bfloat16_have_plain_attention_on_a_cpu(
    make_recipe: MakeRecipe, dtype: str, max_length: int, attention: str
) -> None:
    """Whose backward pass takes a fraction of the time there."""
    recipe = make_recipe(training={"max_length": max_length})
    base = OpenedBase.open(recipe.base_model)
    requested = attention_of(base.empty_model(), recipe.training, device="cpu", dtype=dtype)
    model = load_trainable(base, recipe, attention=requested, dtype=dtype)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        (transformers.LlamaForCausalLM, "flash_attention_2"),
        (transformers.BloomForCausalLM, None),
        (transformers.MambaForCausalLM, None),
        (transformers.Llama4ForCausalLM, None),
        (transformers.GptOssForCausalLM, None),  # transformers would fetch another kernel from the Hub
    ],
)
def test_flash_attention_is_for_classes_that_have_it(
    kind: Any, attention: str | None, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapterswap.experiments.training.base.find_spec", lambda name: name)  # all is installed
    options = make_recipe().training
    assert attention_of(kind, options, device="cuda", dtype="bfloat16") == attention
    assert attention_of(kind, options, device="cuda", dtype="float32") is None

    named = make_recipe(training={"attn_implementation": "flash_attention_2"}).training
    if attention is None:
        with refused(UnsupportedError, "training.attn_implementation"):
            attention_of(kind, named, device="cuda", dtype="bfloat16")
    else:
        assert attention_of(kind, named, device="cuda", dtype="bfloat16") == attention
    for device, dtype in (("cuda", "float32"), ("cpu", "bfloat16")):
        with refused(UnsupportedError, "training.attn_implementation"):
            attention_of(kind, named, device=device, dtype=dtype)


def test_an_attention_that_the_class_lacks_stops_a_dry_run(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    base = tmp_path / "gemma2"
    config = transformers.Gemma2Config(**SMALL, head_dim=8)
    transformers.Gemma2ForCausalLM(config).save_pretrained(base)
    word_tokenizer().save_pretrained(base)
    options = {"attn_implementation": "eager", "max_steps": 1}
    train(make_recipe(base_model=str(base), training=options), out_path=tmp_path / "eager")

    recipe = make_recipe(base_model=str(base), training=options | {"attn_implementation": "sdpa"})
    for attempt in (lambda: estimate(recipe), lambda: train(recipe, out_path=tmp_path / "expert")):
        with refused(UnsupportedError, "training.attn_implementation"):
            attempt()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.filterwarnings("ignore")  # bitsandbytes warns about kernels that CPUs lack
def test_an_adapter_on_a_base_in_few_bits(tmp_path: Path, make_recipe: MakeRecipe, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    recipe = make_recipe(quantization={"bits": bits}, rows=echo_rows(256), training={"epochs": 3})
    report = train(recipe, out_path=tmp_path / "expert")
    assert report.train_losses[-1][1] < 0.6 * report.train_losses[0][1]
    saved = load_file(report.path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert len(open_adapter(report.path).modules) == 6 * 7
    assert estimate(recipe).memory["base"] == estimate(recipe).base_parameters * bits // 8


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.filterwarnings("ignore")  # bitsandbytes warns about kernels that CPUs lack
def test_on_a_base_in_few_bits_an_adapter_below_stays_as_it_is(
    tmp_path: Path, make_recipe: MakeRecipe, pico: Any, bits: int
) -> None:
    """Before the first step the loss is that of the start, trained further with a rate of zero."""
    pytest.importorskip("bitsandbytes")
    start = make_expert(pico("llama"), tmp_path / "sft")
    still = {"quantization": {"bits": bits}, "training": {"max_steps": 1, "warmup": 1, "logging_steps": 1}}
    alone = train(make_recipe(start=str(start), **still), out_path=tmp_path / "alone")
    below = {"adapter": str(start), "mode": "chain"}
    report = train(make_recipe(start=below, **still), out_path=tmp_path / "on-top")
    assert [loss for _, loss in report.train_losses] == near([loss for _, loss in alone.train_losses], depth=LAYERS)
    assert not any(t.any() for n, t in load_file(report.path / "adapter_model.safetensors").items() if "lora_B" in n)
    without = train(make_recipe(**still), out_path=tmp_path / "without")
    assert abs(without.train_losses[0][1] - report.train_losses[0][1]) > 0.01
    report = train(make_recipe(start=below, **still | {"training": {"max_steps": 4}}), out_path=tmp_path / "learned")
    assert any(t.any() for n, t in load_file(report.path / "adapter_model.safetensors").items() if "lora_B" in n)
