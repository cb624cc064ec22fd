"""Configs by other tools and older versions of PEFT: opened if PEFT opens them, with the same result.

The keys are those of adapters on the Hub. `AdapterConfig.unknown` lists the keys that PEFT says it ignores, if they
are set.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from tolerances import close

import adapterswap
from adapterswap.kit.errors import AdapterswapError, UnsupportedError

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# What PEFT 0.5.0 wrote; later versions added keys.
V05: dict[str, Any] = {
    "auto_mapping": None, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layers_pattern": None, "layers_to_transform": None, "lora_alpha": 16, "lora_dropout": 0.05,
    "modules_to_save": None,
    "peft_type": "LORA", "r": 8, "revision": None, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM",
}  # fmt: skip
V07 = {**V05, "alpha_pattern": {}, "rank_pattern": {}, "loftq_config": {}, "megatron_config": None,
       "megatron_core": "megatron.core", "use_rslora": True}  # fmt: skip
V10 = {**V07, "use_dora": False, "layer_replication": None}
V15 = {**V10, "eva_config": None, "corda_config": None, "exclude_modules": None, "lora_bias": False,
       "trainable_token_indices": None}  # fmt: skip
V17 = {**V15, "peft_version": "0.17.1", "qalora_group_size": 16, "use_qalora": False, "target_parameters": None}
SWIFT = r"^(model(?=\.).*\.(o_proj|q_proj|k_proj|v_proj|gate_proj|up_proj|down_proj))$"
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|o_proj"
    r"|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn"
    r"|dense)\.(?:(?:k_proj|v_proj|q_proj|o_proj|gate_proj|up_proj|down_proj)))"
)

WILD: dict[str, dict[str, Any]] = {
    "alpaca-lora (PEFT 0.3)": {**V05, "enable_lora": None, "merge_weights": False},
    "PEFT 0.3, inference mode off": {**V05, "inference_mode": False, "layers_to_transform": None},
    "PEFT 0.5": V05,
    "PEFT 0.7": V07,
    "PEFT 0.10, runtime config": {**V10, "runtime_config": {"ephemeral_gpu_offload": False}},
    "PEFT 0.15": V15,
    "PEFT 0.17": V17,
    "Unsloth": {**V15, "auto_mapping": {"base_model_class": "LlamaForCausalLM",
                "parent_library": "transformers.models.llama.modeling_llama", "unsloth_fixed": True},
                "task_type": None},
    "Unsloth, vision": {**V17, "target_modules": UNSLOTH},
    "Unsloth, a key of its own": {**V17, "unsloth_version": "2025.9.1"},
    "ms-swift 2": {**V10, "lora_dtype": None, "lorap_lr_ratio": None, "use_qa_lora": False, "use_merged_linear": False,
                   "enable_lora": None, "model_key_mapping": None},
    "ms-swift 3": {**V15, "target_modules": SWIFT, "modules_to_save": [], "lora_dtype": None, "lorap_lr_ratio": None},
    "LLaMA-Factory": {**V15, "additional_target": None, "finetuning_type": "lora", "modules_to_save": None},
    "LLaMA-Factory, create_new_adapter": {**V17, "create_new_adapter": False, "lora_target": "all"},
    "axolotl": {**V15, "lora_fan_in_fan_out": None, "target_modules": sorted(PROJECTIONS)},
    "LongLoRA": {**V05, "trainable_params": "embed,norm", "flash_attn": True},
    "a development version": {**V17, "peft_version": "0.18.0.dev0@6030f9160ed2fc17220f6f41382a66f1257b6a93"},
    "a string of a single module": {**V10, "target_modules": "q_proj"},
    "no task type": {**V10, "task_type": None},
    "no bias": {key: value for key, value in V05.items() if key not in ("bias", "fan_in_fan_out", "lora_dropout")},
    "a null bias": {**V05, "bias": None},
    "a null alpha": {**V05, "lora_alpha": None},
    "another kind of adapter": {**V05, "peft_type": "SVDIFF"},
    "no kind": {key: value for key, value in V05.items() if key != "peft_type"},
}  # fmt: skip


def by_peft(base: Path, folder: Path) -> tuple[Any, set[str]] | None:
    """The model as PEFT loads it, and the keys that it ignores; None if PEFT does not load it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            PeftConfig.from_pretrained(str(folder))
            model = PeftModel.from_pretrained(load_base(base), folder).eval()
            logits(model)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
    said = [str(warning.message) for warning in caught if "Unexpected keyword" in str(warning.message)]
    return model, {key for text in said for key in re.findall(r"'(\w+)'", text.partition("]")[0])}


@pytest.mark.parametrize("case", WILD)
def test_configs_that_peft_opens_are_opened(case: str, base: Callable[[str], Path], math: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wild"
    shutil.copytree(math, folder)
    content = {**WILD[case], "base_model_name_or_path": str(base("llama"))}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    loaded = by_peft(base("llama"), folder)
    if loaded is None:
        with pytest.raises(AdapterswapError):
            adapterswap.open_adapter(folder)
        return
    model, ignored = loaded
    adapter = adapterswap.open_adapter(folder)
    assert set(adapter.config.unknown) == {key for key in ignored if content[key]}
    alone = adapterswap.Composition.model_validate({"allocation": [{"expert": "x"}]})
    written = adapterswap.compose(alone, {"x": adapter}).write(tmp_path / "out")
    result = PeftModel.from_pretrained(load_base(base("llama")), written).eval()
    close(logits(result), logits(model), depth=LAYERS)


def test_a_head_with_a_bias_needs_no_copy_of_it(base: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT saves the head's weight and bias beside LoRA on it; the remedy of the refusal leaves both out."""
    model = load_base(base("llama"))
    model.lm_head.bias = torch.nn.Parameter(torch.ones(model.lm_head.out_features))
    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "copied", save_embedding_layers=True)
    with pytest.raises(UnsupportedError, match=r"lm_head\.base_layer\.bias is a copy"):
        adapterswap.open_expert(tmp_path / "copied")
    adapted.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    assert "lm_head" in adapterswap.open_expert(tmp_path / "plain").modules
