"""Null, absent and unusual values in adapter_config.json, compared with PEFT value by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import peft
import pytest
import torch
from click.testing import Result
from conftest import LAYERS, load_base, logits
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tolerances import close
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import adapterswap
from adapterswap import Composition
from adapterswap.errors import AdapterswapError, ExpertError, UnsupportedError

CONFIG = "adapter_config.json"
KEYS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_dropout", "fan_in_fan_out",
        "init_lora_weights", "modules_to_save", "use_dora", "lora_bias", "ensure_weight_tying", "inference_mode",
        "layers_to_transform", "loftq_config", "revision", "task_type", "peft_version")  # fmt: skip
INITS = (True, False, None, 0, 1, "", "gaussian", "GAUSSIAN", "eva", "EVA", "orthogonal", "mica", "MiCA", "nonsense")
CHANGING = ("olora", "OLORA", "pissa", "pissa_niter_4", "corda", "loftq", "lora_ga")

Run = Callable[..., Result]


def configured(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of an adapter with other values in its config; `...` takes a key out."""
    copy.mkdir()
    (copy / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    content = json.loads((folder / CONFIG).read_text()) | changes
    content = {key: value for key, value in content.items() if value is not ...}
    (copy / CONFIG).write_text(json.dumps(content))
    return copy


def by_peft(base: Path, folder: Path) -> torch.Tensor | None:
    """The logits with the adapter as PEFT loads it; None if PEFT raises."""
    try:
        return logits(PeftModel.from_pretrained(load_base(base), folder))
    except Exception:
        return None


def agree(base: Path, folder: Path, out: Path) -> None:
    """adapterswap refuses what PEFT cannot load, and otherwise writes an adapter that computes the same."""
    loaded = by_peft(base, folder)
    try:
        name = folder.name
        plan = adapterswap.compose(Composition.model_validate({"allocation": [{"expert": name}]}), {name: folder})
        written = by_peft(base, adapterswap.write_adapter(plan, out))
    except AdapterswapError:
        assert loaded is None
        return
    assert loaded is not None
    close(written, loaded, depth=LAYERS)


@pytest.mark.parametrize("value", [None, ...], ids=["null", "absent"])
@pytest.mark.parametrize("key", KEYS)
def test_null_and_absent_mean_what_they_mean_to_peft(
    key: str, value: Any, expert: Callable[..., Path], base: Callable[[str], Path], tmp_path: Path
) -> None:
    agree(
        base("llama"), configured(expert(seed=1, r=8, lora_alpha=8), tmp_path / "x", **{key: value}), tmp_path / "out"
    )


@pytest.mark.parametrize("init", INITS, ids=repr)
def test_inits_that_do_not_change_the_base_compose(
    init: Any, math: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    own = {"eva_config": {}} if init == "eva" else {}
    agree(base("llama"), configured(math, tmp_path / "x", init_lora_weights=init, **own), tmp_path / "out")


@pytest.mark.parametrize("init", CHANGING)
def test_inits_that_change_the_base_are_refused(init: str, math: Path, tmp_path: Path) -> None:
    with refused(UnsupportedError):
        adapterswap.open_adapter(configured(math, tmp_path / "x", init_lora_weights=init))


def test_every_init_that_peft_lists_is_tried_here() -> None:
    _, listed = get_args(get_type_hints(LoraConfig)["init_lora_weights"])
    assert {name.partition("_niter_")[0] for name in get_args(listed)} <= {*INITS, *CHANGING}


def test_the_largest_rank_leaves_copies_of_the_base_out(run: Run, base: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT saves the embedding's 96 rows with its LoRA."""
    folders = []
    for seed, name in enumerate(("math", "swahili")):
        config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(seed)
        model = get_peft_model(load_base(base("llama")), config)
        model.save_pretrained(tmp_path / name, save_embedding_layers=True)
        folders.append(tmp_path / name)
    pair = ["-t", folders[0], "-l", folders[1], "--bottom", 1, "--top", 1]
    result = run("compose", *pair, "-o", tmp_path / "out")
    assert "rank up to 8;" in result.stderr  # the embedding is averaged: 4 + 4
    assert json.loads(run("compose", *pair, "-o", tmp_path / "json", "--json").stdout)["rank"]["largest"] == 8


def test_a_null_task_type_keeps_the_class_keys_that_peft_needs(base: Callable[[str], Path], tmp_path: Path) -> None:
    folders = {}
    for seed, name in enumerate(("math", "swahili")):
        model = get_peft_model(load_base(base("llama")), LoraConfig(r=4, target_modules=["q_proj"]))
        generator = torch.Generator().manual_seed(seed)
        for parameter in (p for key, p in model.named_parameters() if "lora_" in key):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        folders[name] = tmp_path / name
        model.save_pretrained(folders[name])
    out = adapterswap.write_adapter(adapterswap.soup(*folders.values()), tmp_path / "out")
    assert json.loads((out / CONFIG).read_text())["task_type"] is None
    loaded = peft.AutoPeftModel.from_pretrained(out).eval()
    close(logits(loaded), by_peft(base("llama"), out), depth=LAYERS)


def test_a_null_task_type_equals_causal_lm(
    math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}
    plain = configured(math, tmp_path / "plain", task_type=None, auto_mapping=mapping)
    for pair in ((plain, swahili), (swahili, plain)):
        out = adapterswap.write_adapter(adapterswap.soup(*pair), tmp_path / "out", overwrite=True)
        config = json.loads((out / CONFIG).read_text())
        assert config["task_type"] == "CAUSAL_LM"
        assert "auto_mapping" not in config
        assert peft.AutoPeftModelForCausalLM.from_pretrained(out) is not None
    with refused(ExpertError, "task_type"):
        adapterswap.soup(plain, configured(math, tmp_path / "classes", task_type="SEQ_CLS"))


HEADS = {
    "SEQ_CLS": (AutoModelForSequenceClassification, "score"),
    "TOKEN_CLS": (AutoModelForTokenClassification, "score"),
    "QUESTION_ANS": (AutoModelForQuestionAnswering, "qa_outputs"),
}


@pytest.mark.parametrize("task_type", HEADS)
def test_a_head_that_peft_always_loads_cannot_be_reset(
    task_type: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    model_class, head = HEADS[task_type]
    folders = {}
    for seed, name in enumerate(("math", "swahili")):
        torch.manual_seed(seed)
        model = model_class.from_pretrained(base("llama"))
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type=task_type)).save_pretrained(
            tmp_path / name
        )
        folders[name] = tmp_path / name
    rules: list[dict[str, Any]] = [{"layers": "none", "expert": "base"}, {"layers": "0-2", "expert": "swahili"}]
    composition = Composition.model_validate({"allocation": [*rules, {"expert": "math"}]})
    with refused(UnsupportedError, match=head):
        adapterswap.write_adapter(adapterswap.compose(composition, folders), tmp_path / "refused")
    composition = Composition.model_validate(
        {"allocation": [{"layers": "none", "expert": "math"}, *rules[1:], {"expert": "math"}]}
    )
    out = adapterswap.write_adapter(adapterswap.compose(composition, folders), tmp_path / "out")
    PeftModel.from_pretrained(model_class.from_pretrained(base("llama")), out)
