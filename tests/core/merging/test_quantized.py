"""Quantized bases at real sizes: equal to transformers' dequantization plus PEFT, or kept as they are, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from pico_models import merged_by_peft, trained
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap.kit.errors import BaseModelError, UnsupportedError
from core.merging import quantized

ATTENTION, MLP = ["q_proj", "o_proj"], ["gate_proj", "down_proj"]
HALF_UNIT = 2.0**-8  # of bfloat16, relative to a number

BASES: dict[str, Callable[[Path], Path]] = {
    "fp8": lambda folder: quantized.in_fp8(quantized.saved("llama", folder), fmt="e4m3"),
    "fp8-sharded": lambda folder: quantized.in_fp8(
        quantized.saved("llama", folder), shards=2, modules_to_not_convert=["lm_head"]
    ),
    "fp8-tied": lambda folder: quantized.in_fp8(quantized.saved("tied", folder)),
    "fp8-excluded": lambda folder: quantized.in_fp8(
        quantized.saved("llama", folder), excluded=("lm_head", "self_attn"),
        modules_to_not_convert=["lm_head", *(f"model.layers.{i}.self_attn" for i in range(3))],
    ),
    "fp8-experts": lambda folder: quantized.in_fp8(quantized.saved("qwen3_moe", folder)),
    "mxfp4": lambda folder: quantized.in_mxfp4(quantized.saved("gpt_oss", folder)),
}  # fmt: skip
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {"target_modules": [*ATTENTION, *MLP, "lm_head"]}),
    ("fp8", {"target_modules": ["q_proj"], "modules_to_save": ["o_proj", "norm"]}),
    ("fp8-sharded", {"target_modules": MLP}),
    ("fp8-tied", {"target_modules": ["q_proj", "lm_head"]}),
    ("fp8-excluded", {"target_modules": ATTENTION + MLP}),
    ("fp8-experts", {"target_modules": ["q_proj"], **EXPERTS}),
    ("fp8-experts", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    ("mxfp4", {"target_modules": [*ATTENTION, "lm_head"]}),
    ("mxfp4", {"target_modules": ["q_proj"], **EXPERTS}),
    ("mxfp4", {"target_modules": ["q_proj"], "target_parameters": ["mlp.router.weight"]}),
]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = BASES[kind](tmp_path_factory.mktemp("quantized") / "base")
        return made[kind]

    return make


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """A written model as transformers loads it, in float32; it has all of its weights, and is not quantized."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    return dict(model.state_dict())


def rounded_once(written: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """Each number is the exact one, rounded to bfloat16."""
    for name, tensor in exact.items():
        room = HALF_UNIT * tensor.abs() + 1e-6
        assert bool(((written[name] - tensor).abs() <= room).all()), name


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_merge_equals_transformers_and_peft(
    base: Callable[[str], Path], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    expert = quantized.adapter(base(kind), tmp_path / "math", **options)
    out = adapterswap.merge(expert, out_path=tmp_path / "out", dequantize=True)
    rounded_once(loaded(out), quantized.merged(base(kind), expert))
    assert adapterswap.verify(out, {"math": expert}, base_model=base(kind)).equal


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fp8", {"target_modules": ["lm_head"]}),
        ("fp8", {"target_modules": ["embed_tokens"], "modules_to_save": ["norm"]}),
        ("fp8-sharded", {"target_modules": ["lm_head"]}),
        ("fp8-excluded", {"target_modules": ATTENTION}),
        ("fp8-experts", {"target_modules": ["lm_head"], "target_parameters": ["mlp.gate.weight"]}),
        ("mxfp4", {"target_modules": ATTENTION}),
        ("mxfp4", {"target_modules": ["lm_head"], "target_parameters": ["mlp.router.weight"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_quantized_is_merged_and_the_rest_copied(
    base: Callable[[str], Path], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    expert = quantized.adapter(base(kind), tmp_path / "math", **options)
    out = adapterswap.merge(expert, out_path=tmp_path / "out")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base(kind), out))
    assert before == after
    files = sorted(path.name for path in base(kind).glob("*.safetensors*"))
    assert files == sorted(path.name for path in out.glob("*.safetensors*"))
    changed = set()
    for name in (name for name in files if name.endswith(".safetensors")):
        theirs, ours = load_file(base(kind) / name), load_file(out / name)
        assert theirs.keys() == ours.keys()
        same = {key for key in ours if torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8))}
        changed |= ours.keys() - same
        assert all(ours[key].dtype == theirs[key].dtype for key in ours)
    assert changed
    assert not any("scale" in key or "blocks" in key for key in changed)
    rounded_once(dict(quantized.dense(out).state_dict()), quantized.merged(base(kind), expert))
    assert adapterswap.verify(out, {"math": expert}, base_model=base(kind)).equal


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fp8", {"target_modules": ["q_proj"]}),
        ("fp8", {"target_modules": ["lm_head"], "modules_to_save": ["o_proj"]}),
        ("fp8-excluded", {"target_modules": [*ATTENTION, "down_proj"]}),
        ("fp8-experts", {"target_modules": ["lm_head"], **EXPERTS}),
        ("mxfp4", {"target_modules": ["q_proj"], **EXPERTS}),
        ("fp8-tied", {"target_modules": ["lm_head"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_quantized_is_refused_by_that(
    base: Callable[[str], Path], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    expert = quantized.adapter(base(kind), tmp_path / "math", **options)
    with refused(UnsupportedError, parameter="base_model", match="FP8" if kind.startswith("fp8") else "MXFP4"):
        adapterswap.merge(expert, out_path=tmp_path / "out")


def test_scales_keep_their_dtype(base: Callable[[str], Path], tmp_path: Path) -> None:
    expert = quantized.adapter(base("fp8"), tmp_path / "math", target_modules=["lm_head"])
    with refused(UnsupportedError, parameter="dtype"):
        adapterswap.merge(expert, out_path=tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize(
    ("method", "title"),
    [("gptq", "GPTQ"), ("awq", "AWQ"), ("bitsandbytes", "bitsandbytes"), ("nobody-knows", "nobody-knows")],
)
def test_other_methods_are_refused_by_name(
    base: Callable[[str], Path], tmp_path: Path, method: str, title: str
) -> None:
    """Their layers are packed, so that neither names nor shapes are those of the adapter's modules."""
    expert = quantized.adapter(base("fp8"), tmp_path / "math", target_modules=["q_proj", "up_proj"])
    packed = quantized.saved("llama", tmp_path / "packed")

    def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if "_proj" not in name:
            return {name: weight}
        if method == "bitsandbytes":
            codes = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
            return {name: codes, f"{name}.absmax": torch.ones(weight.numel() // 64)}
        module = name.removesuffix("weight")
        return {f"{module}qweight": torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)}

    quantized.with_settings(quantized.rewritten(packed, pack), {"quant_method": method, "bits": 4})
    with refused(UnsupportedError, parameter="base_model", match=title):
        adapterswap.merge(expert, packed, out_path=tmp_path / "out")
    plan = adapterswap.layer_swap(expert, expert, base_model=packed, bottom=1, top=1)  # the names are there
    assert plan.write(tmp_path / "composed")


def test_settings_of_a_language_model_count(base: Callable[[str], Path], tmp_path: Path) -> None:
    """Multimodal models may have them in `text_config`; and what transformers does not load is named."""
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tower, "image_size": 28, "patch_size": 14}
    text = {**quantized.sizes(), "model_type": "gemma3_text"}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    folder = quantized.in_fp8(
        tmp_path / "base", excluded=("vision", "lm_head"), modules_to_not_convert=["vision_tower"]
    )
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["quantization_config"] = content.pop("quantization_config")
    path.write_text(json.dumps(content))
    kind = transformers.Gemma3ForConditionalGeneration
    whole = quantized.dense(folder, kind)
    settings = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|down_proj)", task_type="CAUSAL_LM")
    expert = trained(whole, settings, tmp_path / "math", save_embedding_layers=False)
    with refused(UnsupportedError, parameter="base_model", match="FP8"):
        adapterswap.merge(expert, folder, out_path=tmp_path / "out")
    out = adapterswap.merge(expert, folder, out_path=tmp_path / "out", dequantize=True)
    written = kind.from_pretrained(out, dtype=torch.float32).state_dict()
    rounded_once(dict(written), merged_by_peft(quantized.dense(folder, kind), expert))
    assert "quantization_config" not in (out / "config.json").read_text()


def test_a_module_trained_in_full_becomes_lora(base: Callable[[str], Path], tmp_path: Path) -> None:
    expert = quantized.adapter(base("fp8"), tmp_path / "math", target_modules=["q_proj"], modules_to_save=["o_proj"])
    adapterswap.convert(expert, tmp_path / "out", saved_rank=quantized.SIDE, dtype="float32")
    ours, exact = quantized.merged(base("fp8"), tmp_path / "out"), quantized.merged(base("fp8"), expert)
    for name, tensor in exact.items():
        assert torch.allclose(ours[name], tensor, atol=1e-5), name


def test_a_base_of_other_names_is_refused_before_it_is_dequantized(base: Callable[[str], Path], tmp_path: Path) -> None:
    expert = quantized.adapter(base("fp8-experts"), tmp_path / "math", target_modules=["q_proj"], **EXPERTS)
    with refused(BaseModelError, parameter="base_model"):
        adapterswap.merge(expert, base("fp8"), out_path=tmp_path / "out", dequantize=True)
