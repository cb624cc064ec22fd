"""Modules that a base lacks, or has in another width, are refused by every command if the base is on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from conftest import CONFIGS, LAYERS, SMALL, load_base, logits
from peft import LoraConfig, PeftModel
from pico_models import copied, edit_json, trained
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import adapterswap
from adapterswap.core.planning import fit
from adapterswap.kit.errors import BaseModelError, ExpertError

WEIGHTS = "adapter_model.safetensors"
Run = Callable[..., Result]


def renamed(adapter: Path, out: Path, old: str, new: str, **changes: Any) -> Path:
    """A copy of an adapter with other names in its file."""
    copied(adapter, out, **changes)
    tensors = {key.replace(old, new): tensor for key, tensor in load_file(out / WEIGHTS).items()}
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    return out


def saved(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def only_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers must not be asked."""
    monkeypatch.setattr(fit, "Base", SimpleNamespace(at=lambda *_: pytest.fail("the model was built")))


@pytest.mark.parametrize("command", ["compose", "convert", "slice", "merge", "export", "verify", "evaluate"])
def test_another_width_is_refused(math: Path, swahili: Path, tmp_path: Path, run: Run, command: str) -> None:
    wide = saved(tmp_path / "wide", transformers.LlamaConfig(vocab_size=96, **SMALL | {"hidden_size": 48}))
    out = ("-o", tmp_path / "out")
    arguments: dict[str, tuple[object, ...]] = {
        "compose": ("-t", math, "-l", swahili, "--base-model", wide, *out),
        "convert": (math, "--layout", "portable", "--base-model", wide, *out),
        "slice": (math, "--layers", "0-1", "--base-model", wide, *out),
        "merge": (math, "--base-model", wide, *out),
        "export": (math, "--base-model", wide, "-o", tmp_path / "out.gguf"),
        "verify": (wide, "--expert", f"math={math}", "--base-model", wide),
        "evaluate": ("--adapter", math, "--base-model", wide, "--tasks", "mgsm_direct_en", "--dry-run"),
    }
    if command == "evaluate":
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words(), eos_token="a")
        tokenizer.save_pretrained(wide)
    result = run(command, *arguments[command], exit_code=3)
    assert "hidden size is 32" in result.stderr
    assert "but 48" in result.stderr
    assert not (tmp_path / "out").exists()


def words() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))


def test_prefixes_of_peft_that_are_there_twice(math: Path, swahili: Path, tmp_path: Path) -> None:
    twice = renamed(math, tmp_path / "twice", "base_model.model.", "base_model.model.base_model.model.")
    with refused(BaseModelError, parameter="base_model"):
        adapterswap.layer_swap(twice, twice, bottom=1, top=1)
    with refused(BaseModelError, parameter="base_model"):
        adapterswap.convert(twice, tmp_path / "out")


def test_a_projection_of_another_name(tmp_path: Path, expert: Callable[..., Path]) -> None:
    heads = {f"linear_{of}_head_dim": 8 for of in ("key", "value")}
    heads |= {f"linear_num_{of}_heads": 2 for of in ("key", "value")}
    mixture = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    sizes = SMALL | {"num_hidden_layers": 4, "head_dim": 8, "shared_expert_intermediate_size": 16, **heads, **mixture}
    base = saved(tmp_path / "base", transformers.Qwen3NextConfig(vocab_size=96, **sizes))
    right = trained(base, LoraConfig(target_modules=["in_proj_qkvz"], task_type="CAUSAL_LM"), tmp_path / "right")
    assert adapterswap.layer_swap(right, right, bottom=1, top=1).modules
    wrong = renamed(right, tmp_path / "wrong", "in_proj_qkvz", "in_proj_q", target_modules=["in_proj_q"])
    with refused(BaseModelError, parameter="base_model", match="in_proj_q"):
        adapterswap.layer_swap(wrong, wrong, bottom=1, top=1)


def test_experts_by_number_of_a_base_that_has_them_in_one(tmp_path: Path) -> None:
    sizes = {**SMALL, "num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    base = saved(tmp_path / "base", transformers.GptOssConfig(vocab_size=96, sliding_window=16, **sizes))
    parameters = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    together: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": parameters}
    right = trained(base, LoraConfig(task_type="CAUSAL_LM", **together), tmp_path / "right")
    assert adapterswap.layer_swap(right, right, bottom=1, top=1).modules
    wrong = copied(trained(base, LoraConfig(target_modules=["q_proj"]), tmp_path / "q"), tmp_path / "wrong",
                   target_modules=["q_proj", "down_proj"])  # fmt: skip
    tensors = load_file(wrong / WEIGHTS)
    for expert in range(2):
        module = f"base_model.model.model.layers.0.mlp.experts.{expert}.down_proj"
        tensors |= {f"{module}.lora_A.weight": torch.ones(8, 48), f"{module}.lora_B.weight": torch.ones(32, 8)}
    save_file(tensors, wrong / WEIGHTS, {"format": "pt"})
    for attempt in (
        lambda: adapterswap.layer_swap(wrong, wrong, bottom=1, top=1),
        lambda: adapterswap.convert(wrong, tmp_path / "converted"),
    ):
        with refused(BaseModelError, parameter="base_model", match=r"experts\.0\.down_proj"):
            attempt()


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
@pytest.mark.usefixtures("only_headers")
def test_headers_decide_for_ordinary_experts(expert: Callable[..., Path], architecture: str) -> None:
    """So that composing needs no torch; the base's names, transposed weights and heads included."""
    ends = {"llama": ["lm_head"], "qwen2": ["lm_head", "embed_tokens"], "gpt2": ["wte"], "neox": ["embed_out"]}
    modules = [*CONFIGS[architecture][2], *ends.get(architecture, [])]
    one, two = (expert(architecture, seed=seed, target_modules=modules) for seed in (1, 2))
    plan = adapterswap.layer_swap(one, two, bottom=0, top=1) if architecture != "wide" else adapterswap.soup(one, two)
    assert not any("Not checked" in note for note in plan.notes)


def test_a_config_alone_is_enough(math: Path, tmp_path: Path, base: Callable[[str], Path]) -> None:
    """As in the Hub's cache, where only config.json may be: for widths by itself, for names with transformers."""
    for folder, width in (("right", 32), ("wrong", 48)):
        (tmp_path / folder).mkdir()
        shutil.copy(base("llama") / "config.json", tmp_path / folder)
        edit_json(tmp_path / folder / "config.json", hidden_size=width)
    assert adapterswap.layer_swap(math, math, bottom=1, top=1, base_model=tmp_path / "right").modules
    with refused(BaseModelError, parameter="base_model", match="48"):
        adapterswap.layer_swap(math, math, bottom=1, top=1, base_model=tmp_path / "wrong")
    other = renamed(math, tmp_path / "other", "q_proj", "query", target_modules=[*CONFIGS["llama"][2], "query"])
    with refused(BaseModelError, parameter="base_model", match="query"):
        adapterswap.layer_swap(other, other, bottom=1, top=1, base_model=tmp_path / "right")


def test_what_cannot_be_compared_is_noted(math: Path, tmp_path: Path, base: Callable[[str], Path]) -> None:
    unknown = Path(shutil.copytree(base("llama"), tmp_path / "unknown"))
    edit_json(unknown / "config.json", model_type="nobodys", architectures=["NobodysModel"])
    other = renamed(math, tmp_path / "other", "q_proj", "query", target_modules=[*CONFIGS["llama"][2], "query"])
    plan = adapterswap.layer_swap(other, other, bottom=1, top=1, base_model=unknown)
    assert any("Not checked whether" in note and "query" in note for note in plan.notes)


def test_a_reward_model_on_a_causal_base(tmp_path: Path, run: Run) -> None:
    """It composes; it is merged into the base with a head, as the remedy says."""
    base = saved(tmp_path / "base", transformers.LlamaConfig(vocab_size=96, pad_token_id=0, **SMALL))
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    config = LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")
    reward = trained(model, config, tmp_path / "reward")
    composed = adapterswap.layer_swap(reward, reward, bottom=1, top=1).write(tmp_path / "composed")
    result = run("merge", reward, "-o", tmp_path / "out", exit_code=3)
    assert "AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=3)" in result.stderr
    assert "--base-model PATH" in result.stderr
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).save_pretrained(tmp_path / "with-head")
    (composed / "adapterswap.json").unlink()  # it says by which files the base is known
    for adapter in (reward, composed):
        out = adapterswap.merge(adapter, tmp_path / "with-head", out_path=tmp_path / f"merged-{adapter.name}")
        ours = AutoModelForSequenceClassification.from_pretrained(out)
        theirs = PeftModel.from_pretrained(
            AutoModelForSequenceClassification.from_pretrained(tmp_path / "with-head"), reward
        )
        close(logits(ours.eval()), logits(theirs.eval()), depth=LAYERS)


def test_tinkers_name_of_the_head(base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path) -> None:
    head = expert(seed=3, target_modules=["q_proj", "lm_head"])
    names = "model.lm_head", "model.model.unembed_tokens"
    tinker = renamed(head, tmp_path / "tinker", *names, target_modules="all-linear")
    for attempt in (
        lambda: adapterswap.layer_swap(tinker, tinker, bottom=1, top=1),
        lambda: adapterswap.merge(tinker, out_path=tmp_path / "out"),
    ):
        with pytest.raises(adapterswap.AdapterswapError, match="Tinker"):
            attempt()


def test_keys_of_peft_s_wrapper(expert: Callable[..., Path], tmp_path: Path) -> None:
    whole = expert(seed=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapped = renamed(whole, tmp_path / "wrapped", "lm_head.weight", "lm_head.modules_to_save.weight")
    with refused(ExpertError, match=r"Rename the tensor to base_model\.model\.lm_head\.weight"):
        adapterswap.open_expert(wrapped)
    again = renamed(wrapped, tmp_path / "again", "lm_head.modules_to_save.weight", "lm_head.weight")
    assert adapterswap.open_expert(again).parts.keys() == adapterswap.open_expert(whole).parts.keys()


def test_a_wrong_expert_is_a_difference(math: Path, swahili: Path, tmp_path: Path, run: Run) -> None:
    """`verify` compares what was passed, rather than ending where it cannot be composed."""
    out = adapterswap.layer_swap(math, swahili, bottom=1, top=1).write(tmp_path / "out")
    elsewhere = copied(swahili, tmp_path / "elsewhere", base_model_name_or_path="nobody/another")
    found = adapterswap.verify(out, {math.name: math, swahili.name: elsewhere})
    assert not found.equal
    assert swahili.name in found.changed_sources


def in_dtype(base: Path, folder: Path, dtype: torch.dtype, *, changed: bool = False) -> Path:
    model = load_base(base).to(dtype)
    if changed:
        model.get_input_embeddings().weight.data += 0.01
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("changed", [False, True])
def test_a_base_in_another_dtype_is_told_from_another_model(
    base: Callable[[str], Path], math: Path, tmp_path: Path, run: Run, changed: bool
) -> None:
    from adapterswap.core.model.sources import base_fingerprints

    own = Path(shutil.copytree(base("llama"), tmp_path / "own"))
    expert = copied(math, tmp_path / "expert", base_model_name_or_path=str(own))
    (expert / "training.json").write_text(json.dumps({"base": {"fingerprints": base_fingerprints(own)}}))
    other = in_dtype(own, tmp_path / "other", torch.bfloat16, changed=changed)
    with refused(BaseModelError, parameter="base_model", match="another model" if changed else "rounded to BF16"):
        adapterswap.merge(expert, other, out_path=tmp_path / "out")
    (expert / "training.json").write_text("{}")  # declared, as the remedy says
    assert adapterswap.merge(expert, other, out_path=tmp_path / "out").exists()


def test_verify_knows_a_rounded_base(base: Callable[[str], Path], math: Path, tmp_path: Path) -> None:
    half = in_dtype(base("llama"), tmp_path / "half", torch.bfloat16)
    for record in (True, False):
        out = adapterswap.merge(math, base("llama"), out_path=tmp_path / f"out-{record}")
        if not record:
            (out / "adapterswap.json").unlink()
        with refused(BaseModelError, parameter="base_model", match="rounded to BF16"):
            adapterswap.verify(out, {math.name: math}, base_model=half)


def test_chains_are_named_as_their_option_is(base: Callable[[str], Path], math: Path, tmp_path: Path, run: Run) -> None:
    merged = adapterswap.merge(math, base("llama"), out_path=tmp_path / "merged")
    link = trained(merged, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), tmp_path / "link")
    result = run("compose", "-t", math, "-l", link, "-o", tmp_path / "out", exit_code=3)
    assert f"--chain NAME={math.name},link" in result.stderr
    options = [f"--expert={math.name}={math}", f"--expert=link={link}", f"--chain=NAME={math.name},link", "--rule=NAME"]
    run("compose", *options, "-o", tmp_path / "out", exit_code=0)
