"""Which LoRA on the experts of a mixture PEFT fuses: what is known without asking PEFT agrees with PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matrix.architectures import ARCHITECTURES, LAYERS, build
from peft import LoraConfig
from refusals import refused

import adapterswap
from adapterswap.errors import UnsupportedError
from adapterswap.experts.keys import factor_key
from adapterswap.experts.trial import try_in_peft
from adapterswap.model.architectures import architecture_of
from adapterswap.writing import loadable

MIXTURES = [name for name, architecture in ARCHITECTURES.items() if architecture.v4_experts is not None]


def write_adapter(folder: Path, base: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, (out, into) in shapes.items():
        tensors[factor_key(name, "A", embedding=False)] = torch.ones(1, into)
        tensors[factor_key(name, "B", embedding=False)] = torch.ones(out, 1)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 1,
        "lora_alpha": 1,
        "base_model_name_or_path": str(base),
    }
    config["target_modules"] = sorted({name.rpartition(".")[2] for name in shapes})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def of_experts(name: str, count: int = 4, inner: int = 16, hidden: int = 32) -> dict[str, tuple[int, int]]:
    naming = ARCHITECTURES[name].v4_experts
    assert naming is not None
    shapes = {}
    for layer in range(LAYERS):
        for expert in range(count):
            gate, up, down = naming(layer, expert)
            shapes |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    return shapes


@pytest.mark.parametrize("name", MIXTURES)
def test_bases_known_to_be_fused_are_fused(name: str, tmp_path: Path) -> None:
    model = build(ARCHITECTURES[name])
    model.config.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    width = architecture_of(config).expert_width
    inner = config.get(width or "moe_intermediate_size", 16)
    shapes = of_experts(name, inner=inner)
    adapter = adapterswap.open_adapter(write_adapter(tmp_path / "math", tmp_path / "base", shapes))
    known = loadable._is_known_to_fuse(config, list(adapter.modules.values()))
    assert known == (width is not None)
    if known:
        import torch

        tensors = {
            factor_key(part.name, factor, embedding=False): torch.empty(1, part.in_features, device="meta")
            if factor == "A"
            else torch.empty(part.out_features, 1, device="meta")
            for part in adapter.modules.values()
            for factor in ("A", "B")
        }
        with torch.device("meta"):
            empty = type(model)(model.config)
        trial = try_in_peft(empty, LoraConfig(r=1, target_modules=list(adapter.modules)), tensors)
        assert trial is not None
        assert not trial.dropped


@pytest.mark.parametrize("wrong", [{"count": 3}, {"inner": 24}])
def test_another_base_is_not_known(wrong: Any, tmp_path: Path) -> None:
    """PEFT is asked then, and refuses."""
    build(ARCHITECTURES["qwen3_moe"]).save_pretrained(tmp_path / "base")
    adapter = write_adapter(tmp_path / "math", tmp_path / "base", of_experts("qwen3_moe", **wrong))
    with refused(UnsupportedError):
        adapterswap.layer_swap(adapter, adapter, bottom=1, top=1).write(tmp_path / "out")


def test_experts_with_one_rank_are_copied_byte_for_byte(tmp_path: Path) -> None:
    """The layout `exact` has no patterns, so PEFT loads it like `portable`, and no tensor is computed."""
    import torch
    from matrix.reference import load_with_peft, logits
    from safetensors.torch import load_file, save_file
    from tolerances import close
    from transformers import AutoModelForCausalLM

    build(ARCHITECTURES["qwen3_moe"]).save_pretrained(tmp_path / "base")
    adapters = {}
    for seed, name in enumerate(("math", "swahili")):
        folder = write_adapter(tmp_path / name, tmp_path / "base", of_experts("qwen3_moe"))
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2}))
        generator = torch.Generator().manual_seed(seed)
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        adapters[name] = tensors
    plan = adapterswap.layer_swap(tmp_path / "math", tmp_path / "swahili", bottom=1, top=1)
    exact = plan.write(tmp_path / "exact")
    portable = plan.write(tmp_path / "portable", layout="portable")
    written = load_file(exact / "adapter_model.safetensors")
    assert written.keys() == adapters["math"].keys()
    for key, tensor in written.items():
        owner = "swahili" if int(key.split(".layers.")[1].split(".")[0]) in (0, LAYERS - 1) else "math"
        assert torch.equal(tensor, adapters[owner][key])

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    loaded = [logits(load_with_peft(base, folder)[0]) for folder in (exact, portable)]
    close(loaded[0], loaded[1], depth=LAYERS)
    assert not torch.allclose(loaded[0], logits(base))
