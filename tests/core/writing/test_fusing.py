"""Which LoRA on the experts of a mixture PEFT fuses: what is known without asking PEFT agrees with PEFT."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crafting import WEIGHTS, lora
from peft import LoraConfig
from pico_models import deltas
from refusals import refused

import adapterswap
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.trial import try_in_peft
from adapterswap.core.model.layers import ModelConfig
from adapterswap.core.writing import loadable
from adapterswap.kit.errors import AdapterswapError, BaseModelError, UnsupportedError
from core.matrix.architectures import ARCHITECTURES, LAYERS, build

MIXTURES = [name for name, architecture in ARCHITECTURES.items() if architecture.v4_experts is not None]


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
    width = ModelConfig(config).architecture.expert_width
    inner = config.get(width or "moe_intermediate_size", 16)
    shapes = of_experts(name, inner=inner)
    adapter = adapterswap.open_adapter(lora(tmp_path / "math", shapes, base=tmp_path / "base"))
    known = loadable._is_known_to_fuse(config, list(adapter.modules.values()))
    assert known == (width is not None)
    if known:
        import torch

        tensors = {}
        for part in adapter.modules.values():
            a_key, b_key = ModuleKeys(part.name).factors()
            tensors[a_key] = torch.empty(1, part.in_features, device="meta")
            tensors[b_key] = torch.empty(part.out_features, 1, device="meta")
        with torch.device("meta"):
            empty = type(model)(model.config)
        trial = try_in_peft(empty, LoraConfig(r=1, target_modules=list(adapter.modules)), tensors)
        assert trial is not None
        assert not trial.dropped


@pytest.mark.parametrize(
    ("wrong", "kind", "parameter"),
    [({"count": 3}, UnsupportedError, None), ({"inner": 24}, BaseModelError, "base_model")],
)
def test_another_base_is_not_known(
    wrong: Any, kind: type[AdapterswapError], parameter: str | None, tmp_path: Path
) -> None:
    """PEFT is asked about the number of experts, and refuses; the base's files show their width."""
    build(ARCHITECTURES["qwen3_moe"]).save_pretrained(tmp_path / "base")
    adapter = lora(tmp_path / "math", of_experts("qwen3_moe", **wrong), base=tmp_path / "base")
    with refused(kind, parameter):
        adapterswap.layer_swap(adapter, adapter, bottom=1, top=1).write(tmp_path / "out")


UNFUSED: dict[str, Callable[[str], str | None]] = {
    "a shared expert": lambda name: name.replace("experts.0.gate_proj", "shared_expert.gate_proj"),
    "half of a pair": lambda name: None if name.endswith("up_proj") else name,
}


@pytest.mark.parametrize("case", UNFUSED)
def test_what_peft_cannot_fuse_is_refused(case: str, tmp_path: Path) -> None:
    build(ARCHITECTURES["qwen3_moe"]).save_pretrained(tmp_path / "base")
    shapes = {new: shape for name, shape in of_experts("qwen3_moe").items() if (new := UNFUSED[case](name))}
    expert = lora(tmp_path / "math", shapes, base=tmp_path / "base")
    lacks = case == "a shared expert"  # which this base does not have
    kind, parameter, match = (
        (BaseModelError, "base_model", "no such module")
        if lacks
        else (UnsupportedError, None, "PEFT on transformers 5")
    )
    with refused(kind, parameter, match=match):
        adapterswap.layer_swap(expert, expert, bottom=1, top=1).write(tmp_path / "out")


PARTS = {"gate_proj", "up_proj", "down_proj"}


def of_all_linear(name: str, base: Path) -> dict[str, tuple[int, int]]:
    """Every linear module in the layers of a mixture but its experts, as transformers 4 has them."""
    import torch

    model = build(ARCHITECTURES[name])
    model.save_pretrained(base)
    modules = ((part, module) for part, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {
        part: (module.out_features, module.in_features)
        for part, module in modules
        if ".layers." in part and not part.endswith("gate")
    }


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_what_peft_takes_for_experts_is_refused(name: str, tmp_path: Path) -> None:
    """LoRA on shared experts and dense MLPs, in a file and live; the merge is exact, and attention alone loads."""
    import torch
    from tolerances import close
    from transformers import AutoModelForCausalLM

    from core.matrix.reference import load_with_peft, logits

    shapes = of_all_linear(name, tmp_path / "base")
    beside = {part: shape for part, shape in shapes.items() if part.rpartition(".")[2] in PARTS}
    assert beside
    expert = lora(tmp_path / "math", shapes, base=tmp_path / "base", size=0.2)
    plan = adapterswap.layer_swap(expert, expert, bottom=1, top=1)
    for layout in ("exact", "portable"):
        with refused(UnsupportedError, match="PEFT would not load"):
            plan.write(tmp_path / "out", layout=layout)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with refused(UnsupportedError, match="PEFT would not load"):
        adapterswap.LiveComposer.from_experts(base, {"math": expert})

    wanted = copy.deepcopy(base)
    with torch.no_grad():
        for part, delta in deltas(expert).items():
            wanted.get_submodule(part).weight += torch.from_numpy(delta).float()
    merged = AutoModelForCausalLM.from_pretrained(plan.merge(tmp_path / "merged")).eval()
    close(logits(merged), logits(wanted), depth=LAYERS)

    rules = [{"modules": sorted(PARTS), "expert": "base"}, {"expert": "math"}]
    attention = adapterswap.compose(adapterswap.Composition(allocation=rules), {"math": expert})
    loaded = load_with_peft(base, attention.write(tmp_path / "attention"))[0]
    merged = AutoModelForCausalLM.from_pretrained(attention.merge(tmp_path / "merged attention")).eval()
    close(logits(loaded), logits(merged), depth=LAYERS)


@pytest.mark.parametrize("layout", ["exact", "portable"])
def test_rank_stabilized_experts_have_their_scale_in_peft(layout: Any, tmp_path: Path) -> None:
    """PEFT scales fused gates √2 too large if it divides by √r; the reference is the merged model."""
    from tolerances import close
    from transformers import AutoModelForCausalLM

    from core.matrix.reference import load_with_peft, logits

    build(ARCHITECTURES["qwen3_moe"]).save_pretrained(tmp_path / "base")
    pair = [
        lora(tmp_path / name, of_experts("qwen3_moe"), base=tmp_path / "base", seed=seed, use_rslora=True)
        for seed, name in enumerate(("math", "swahili"))
    ]
    plan = adapterswap.layer_swap(*pair, bottom=1, top=1)
    plan.write(tmp_path / "out", layout=layout)
    plan.merge(tmp_path / "merged", base_model=tmp_path / "base")
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("base", "merged"))
    close(logits(load_with_peft(base, tmp_path / "out")[0]), logits(merged), depth=LAYERS)


def test_experts_with_one_rank_are_copied_byte_for_byte(tmp_path: Path) -> None:
    """The layout `exact` has no patterns, so PEFT loads it like `portable`, and no tensor is computed."""
    import torch
    from safetensors.torch import load_file
    from tolerances import close
    from transformers import AutoModelForCausalLM

    from core.matrix.reference import load_with_peft, logits

    build(ARCHITECTURES["qwen3_moe"]).save_pretrained(tmp_path / "base")
    adapters = {
        name: load_file(
            lora(tmp_path / name, of_experts("qwen3_moe"), base=tmp_path / "base", seed=seed, use_rslora=False)
            / WEIGHTS
        )
        for seed, name in enumerate(("math", "swahili"))
    }
    plan = adapterswap.layer_swap(tmp_path / "math", tmp_path / "swahili", bottom=1, top=1)
    exact = plan.write(tmp_path / "exact")
    portable = plan.write(tmp_path / "portable", layout="portable")
    written = load_file(exact / WEIGHTS)
    assert written.keys() == adapters["math"].keys()
    for key, tensor in written.items():
        owner = "swahili" if int(key.split(".layers.")[1].split(".")[0]) in (0, LAYERS - 1) else "math"
        assert torch.equal(tensor, adapters[owner][key])

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    loaded = [logits(load_with_peft(base, folder)[0]) for folder in (exact, portable)]
    close(loaded[0], loaded[1], depth=LAYERS)
    assert not torch.allclose(loaded[0], logits(base))
