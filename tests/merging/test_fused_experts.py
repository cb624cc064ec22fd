"""LoRA on the fused experts of mixtures (`target_parameters`), merged into full weights and switched live.

Qwen3-MoE and Mixtral store each expert's matrices, GPT-OSS stores the parameters, in×out. The reference is PEFT's own
merge_and_unload of each expert alone, module by module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import load_base
from matrix.architectures import ARCHITECTURES, build
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap import Composition, LiveComposer
from adapterswap.errors import BaseModelError, ExpertError, UnsupportedError
from adapterswap.model.loading import quiet_peft

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Weights = dict[str, torch.Tensor]
BLEND: Any = {"math": 1, "swahili": 3}
RULES: Any = [{"layers": 0, "expert": "swahili"}, {"layers": 1, "blend": BLEND}, {"expert": "math"}]
SHARES = {0: (0, 1), 1: (0.25, 0.75)}


def gpt_oss() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: build(ARCHITECTURES["qwen3_moe"]),
    "mixtral": lambda: build(ARCHITECTURES["mixtral"]),
    "gpt_oss": gpt_oss,
}


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`mixture("mixtral")` is a folder with a base, and the experts math and swahili, of other ranks and scales."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            MODELS[name]().save_pretrained(made[name] / "base")
            train(made[name], "math", 1)
            train(made[name], "swahili", 2, r=5, use_rslora=True, rank_pattern={})
        return made[name]

    return make


def train(folder: Path, name: str, seed: int, **options: Any) -> Path:
    settings: dict[str, Any] = {
        "r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "target_parameters": PARAMETERS,
        "rank_pattern": {"q_proj": 3, "gate_up_proj": 2}, **options,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(folder / "base"), LoraConfig(**settings))
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.05
        model.save_pretrained(folder / name)
    return folder / name


@cache
def merged(folder: Path, name: str) -> Weights:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_base(folder / "base"), folder / name).merge_and_unload()
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def expected(folder: Path, shares: dict[int, tuple[float, float]] = SHARES) -> Weights:
    """Each expert's change, as PEFT merges it, by its share in the layer."""
    own, math, swahili = load_base(folder / "base").state_dict(), merged(folder, "math"), merged(folder, "swahili")
    result = {}
    for key, tensor in own.items():
        one, other = shares.get(int(key.split(".")[2]) if ".layers." in key else -1, (1, 0))
        deltas = (part[key].double() - tensor.double() for part in (math, swahili))
        result[key] = (tensor.double() + sum(share * d for share, d in zip((one, other), deltas, strict=True))).float()
    return result


def composed(folder: Path, rules: Any = RULES, *names: str) -> adapterswap.Plan:
    experts = dict(zip(("math", "swahili"), names or ("math", "swahili"), strict=True))
    return adapterswap.compose(Composition(allocation=rules), {name: folder / place for name, place in experts.items()})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(24).reshape(2, 12) * 7 % 64).logits
    return result


@pytest.mark.parametrize("name", sorted(MODELS))
def test_copies_and_blends_are_merged(name: str, mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture(name)
    out = composed(folder).merge(tmp_path / "out")
    close(load_base(out).state_dict(), expected(folder), name=name)
    sources: dict[str, str | Path] = {"math": folder / "math", "swahili": folder / "swahili"}
    assert adapterswap.verify(out, sources, base_model=folder / "base").equal


def test_parameters_stored_fused_are_merged(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    """The same weights, saved as transformers holds them."""
    folder = mixture("qwen3_moe")
    load_base(folder / "base").save_pretrained(tmp_path / "base", save_original_format=False)
    keys = adapterswap.open_checkpoint(tmp_path / "base").parameters
    assert "model.layers.0.mlp.experts.gate_up_proj" in keys
    out = composed(folder).merge(tmp_path / "out", base_model=tmp_path / "base")
    close(load_base(out).state_dict(), expected(folder))
    with refused(UnsupportedError, "method"):
        plan = adapterswap.ties(folder / "math", folder / "swahili", density=0.5)
        plan.merge(tmp_path / "ties", base_model=tmp_path / "base")


def test_beside_a_full_checkpoint(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture("mixtral")
    full = load_base(folder / "base")
    generator = torch.Generator().manual_seed(3)
    for parameter in full.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.01
    full.save_pretrained(tmp_path / "full")
    experts = {"math": folder / "math", "full": tmp_path / "full"}
    rules: Any = [{"layers": 0, "expert": "math"}, {"blend": {"math": 1, "full": 1}}]
    out = adapterswap.compose(Composition(allocation=rules), experts).merge(tmp_path / "out")
    one, other, result = merged(folder, "math"), full.state_dict(), load_base(out).state_dict()
    for key, tensor in result.items():
        wanted = one[key] if ".layers.0." in key else (one[key] + other[key]) / 2
        close(tensor, wanted, name=key, scale=float(other[key].abs().max()))


def test_sparse_methods_take_one_matrix_of_one_expert(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture("qwen3_moe")
    out = adapterswap.ties(folder / "math", folder / "swahili", density=1.0).merge(tmp_path / "out")
    own, result = load_base(folder / "base").state_dict(), load_base(out).state_dict()
    key = "model.layers.2.mlp.experts.down_proj"
    one, other = (merged(folder, name)[key] - own[key] for name in ("math", "swahili"))
    elected = torch.sign(one + other)
    agree = [torch.where(torch.sign(delta) == elected, delta, 0) for delta in (one, other)]
    count = sum((torch.sign(delta) == elected).float() for delta in (one, other))
    close(result[key], own[key] + sum(agree) / count, scale=float(own[key].abs().max()))


def test_one_expert_adapts_the_matrices_singly(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    """LoRA on `experts.N.down_proj`, as transformers 4 named it, beside LoRA on the fused parameter."""
    folder = mixture("qwen3_moe")
    single(folder / "math", tmp_path / "single")
    experts = {"math": tmp_path / "single", "swahili": folder / "swahili"}
    rules: Any = [{"blend": {"math": 1, "swahili": 1}}]
    plan = adapterswap.compose(Composition(allocation=rules), experts)
    out = plan.merge(tmp_path / "out")
    wanted = expected(folder, dict.fromkeys(range(5), (0.5, 0.5)))
    close(load_base(out).state_dict(), wanted)
    with refused(UnsupportedError):  # PEFT cannot hold both
        plan.write(tmp_path / "adapter")
    with refused(UnsupportedError, "method"):
        adapterswap.ties(tmp_path / "single", folder / "swahili", density=0.5).merge(tmp_path / "ties")


def single(fused: Path, out: Path) -> None:
    """The same change under the names of transformers 4: a LoRA on each matrix of each expert."""
    import json

    from safetensors.torch import load_file, save_file

    tensors, written = load_file(fused / "adapter_model.safetensors"), {}
    ranks: dict[str, int] = {}
    for key, tensor in tensors.items():
        if ".experts." not in key:
            written[key] = tensor
    for layer in range(5):
        holder = f"base_model.model.model.layers.{layer}.mlp.experts"
        for place, names in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            a, b = (tensors[f"{holder}{place}.lora_{factor}.weight"] for factor in "AB")
            rank = a.shape[0] // 4
            columns = b.reshape(b.shape[0], rank, 4)
            for expert in range(4):
                for rows, name in zip(columns[:, :, expert].chunk(len(names)), names, strict=True):
                    stem = f"{holder}.{expert}.{name}"
                    written[f"{stem}.lora_A.weight"] = a[expert * rank : (expert + 1) * rank].clone()
                    written[f"{stem}.lora_B.weight"] = rows.clone().contiguous()
                    ranks[name] = rank
    out.mkdir()
    save_file(written, out / "adapter_model.safetensors")
    config = json.loads((fused / "adapter_config.json").read_text())
    config |= {"target_parameters": None, "target_modules": ["q_proj", *ranks], "rank_pattern": {"q_proj": 3, **ranks}}
    (out / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_live(name: str, mixture: Callable[[str], Path]) -> None:
    folder = mixture(name)
    experts = {name: folder / name for name in ("math", "swahili")}
    composer = LiveComposer.from_experts(load_base(folder / "base"), experts)
    reference = load_base(folder / "base")
    swap = {layer: (0, 1) if layer == 0 else (1, 0) for layer in range(5)}
    compositions: list[tuple[Any, dict[int, tuple[float, float]]]] = [
        (Composition(allocation=RULES), SHARES), ("math", {}), ("swahili", dict.fromkeys(range(-1, 5), (0, 1))),
    ]  # fmt: skip
    if name != "gpt_oss":
        compositions.append(("math+swahili@bottom=1,top=0", swap))
    for composition, shares in compositions:
        reference.load_state_dict(expected(folder, shares))
        with composer.use(composition):
            close(logits(composer.model), logits(reference), depth=5, name=str(composition))
    with composer.use("base"):
        close(logits(composer.model), logits(load_base(folder / "base")), depth=5)


def test_live_saves_what_it_computes(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture("qwen3_moe")
    with quiet_peft(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_base(folder / "base"), folder / "math", adapter_name="math")
        model.load_adapter(folder / "swahili", adapter_name="swahili")
    composer = LiveComposer(model)  # which the composer did not load
    with composer.use(Composition(allocation=RULES)):
        now = logits(composer.model)
        composer.save(tmp_path / "live")
    files = [
        place / "adapter_model.safetensors" for place in (tmp_path / "live", composed(folder).write(tmp_path / "out"))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(now, logits(PeftModel.from_pretrained(load_base(folder / "base"), tmp_path / "out")), depth=5)


def test_live_refuses(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture("qwen3_moe")
    composer = LiveComposer.from_experts(
        load_base(folder / "base"), {name: folder / name for name in ("math", "swahili")}
    )
    with refused(UnsupportedError), composer.use_rows(["math", "swahili"]):
        pass
    with refused(UnsupportedError), composer.pinned():
        pass
    other = train(folder, "down", 4, target_parameters=["mlp.experts.down_proj"], rank_pattern={})
    with refused(UnsupportedError, "expert"):  # PEFT's rule: all adapters of a model adapt the same parameters
        composer.load_expert(other)
    with refused(UnsupportedError, "expert"):  # a slice adapts fewer
        composer.load_expert(folder / "swahili", "shell", layers="0")
    with composer.use("math"):  # and the model is unchanged
        pass
    wrong = mixture("mixtral")
    with refused(ExpertError, "expert"):
        LiveComposer.from_experts(load_base(wrong / "base"), {"math": folder / "math"})


def test_a_router_beside_modules_that_need_the_bases_names(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT turns LoRA on all linear layers of a Mixtral into LoRA on the parameter `gate.weight`, not on a module."""
    folder = mixture("mixtral")
    train(folder, "linear", 3, target_modules="all-linear", target_parameters=None, rank_pattern={})
    train(folder, "embedding", 4, target_modules=["k_proj", "embed_tokens"], target_parameters=None, rank_pattern={})
    plan = composed(folder, [{"layers": "0-2", "expert": "math"}, {"expert": "swahili"}], "linear", "embedding")
    plan.write(tmp_path / "out")
    one, other, result = (merged(folder, name) for name in ("linear", "embedding", str(tmp_path / "out")))
    for key, tensor in load_base(folder / "base").state_dict().items():
        layer = int(key.split(".")[2]) if ".layers." in key else None
        close(result[key], (one if layer in (0, 1, 2) else other)[key], scale=float(tensor.abs().max()), name=key)


def test_blended_routers_are_noted(mixture: Callable[[str], Path]) -> None:
    folder = mixture("mixtral")
    for seed, name in enumerate(("one", "other"), 5):
        train(folder, name, seed, target_modules="all-linear", target_parameters=None, rank_pattern={})
    rules = {"swap": [{"layers": "0-1", "expert": "math"}, {"expert": "swahili"}]}
    rules["average"] = [{"blend": {"math": 1, "swahili": 1}}]
    rules["kept"] = [{"modules": ["gate"], "expert": "math"}, *rules["average"]]
    noted = {
        name: any("2606.03391" in note for note in composed(folder, each, "one", "other").notes)
        for name, each in rules.items()
    }
    assert noted == {"swap": False, "average": True, "kept": False}


def test_another_base_is_refused(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture("qwen3_moe")
    config = transformers.AutoConfig.from_pretrained(folder / "base")
    config.num_experts = 2
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    with refused(BaseModelError, "base_model"):
        composed(folder).merge(tmp_path / "out", base_model=tmp_path / "base")
