"""LoRA on the fused experts of mixtures (`target_parameters`), merged into full weights and switched live.

Qwen3-MoE and Mixtral store each expert's matrices, GPT-OSS stores the parameters, in×out. The reference is PEFT's own
merge_and_unload of each expert alone, module by module.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import load_base
from crafting import lora
from peft import LoraConfig, PeftModel
from pico_models import copied, in_peft, merged_by_peft, trained
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap import Composition, LiveComposer
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.planning.targets import Target
from adapterswap.engines.serving.cache import Memo
from adapterswap.engines.serving.composer import base_shapes, check_fits
from adapterswap.kit.errors import BaseModelError, ExpertError, UnsupportedError
from core.matrix.architectures import ARCHITECTURES, build
from core.writing.test_fusing import of_experts

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
    return trained(folder / "base", LoraConfig(**settings), folder / name, seed=seed)


@cache
def merged(folder: Path, name: str) -> Weights:
    return merged_by_peft(folder / "base", folder / name)


def expected(
    folder: Path, shares: dict[int, tuple[float, float]] = SHARES, task: str = "math", language: str = "swahili"
) -> Weights:
    """Each expert's change, as PEFT merges it, by its share in the layer."""
    own, math, swahili = load_base(folder / "base").state_dict(), merged(folder, task), merged(folder, language)
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


@pytest.mark.parametrize("layout", ["exact", "portable"])
@pytest.mark.parametrize("only", [PARAMETERS, PARAMETERS[1:]], ids=["both", "one"])
def test_copies_and_blends_are_written(
    only: list[str], layout: Any, mixture: Callable[[str], Path], tmp_path: Path
) -> None:
    """The language expert adapts both parameters of a layer, or one of them."""
    folder = mixture("qwen3_moe")
    name = f"swahili-{len(only)}"
    train(folder, name, 2, r=5, use_rslora=True, target_parameters=only, rank_pattern={})
    out = composed(folder, RULES, "math", name).write(tmp_path / "out", layout=layout)
    close(merged_by_peft(folder / "base", out), expected(folder, language=name))


@pytest.mark.parametrize("layout", ["exact", "portable"])
@pytest.mark.parametrize("case", ["ranks", "alphas", "rslora", "reset"])
def test_lora_on_each_matrix_is_fused(case: str, layout: Any, mixture: Callable[[str], Path], tmp_path: Path) -> None:
    """As PEFT saved it with transformers 4, with ranks and alphas that differ, which PEFT cannot give fused experts.

    PEFT loads rank-stabilized ones with a wrong scale, so the reference is made from plain adapters of the same ΔW.
    """
    folder, shapes = mixture("qwen3_moe"), of_experts("qwen3_moe")
    options = {"ranks": ((2, 3), (4, 6), False), "alphas": ((2, 2), (4, 10), False), "rslora": ((2, 3), (4, 5), True)}
    ranks, alphas, rslora = options.get(case, ((2, 2), (4, 4), False))
    experts, twins = [], [f"{case}-{layout}-{seed}" for seed in range(2)]
    for seed, (twin, rank, alpha) in enumerate(zip(twins, ranks, alphas, strict=True)):
        made: dict[str, Any] = {"base": folder / "base", "rank": rank, "seed": seed, "size": 0.2}
        experts.append(lora(tmp_path / f"{seed}", shapes, **made, use_rslora=rslora, lora_alpha=alpha))
        lora(folder / twin, shapes, **made, use_rslora=False, lora_alpha=alpha * (rank**0.5 if rslora else 1))
    if case == "reset":
        plan = adapterswap.layer_swap(experts[0], "base", bottom=1, top=1)
        wanted = expected(folder, {0: (0, 0), 4: (0, 0)}, *twins)
    else:
        plan = adapterswap.layer_swap(*experts, bottom=1, top=1, bottom_transition=1)
        wanted = expected(folder, {0: (0, 1), 1: (0.5, 0.5), 4: (0, 1)}, *twins)
    close(merged_by_peft(folder / "base", plan.write(tmp_path / "out", layout=layout)), wanted)


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
    close(now, logits(in_peft(folder / "base", tmp_path / "out")), depth=5)


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


@pytest.mark.parametrize("version", [None, "0.18.1"])
def test_an_older_peft(version: str | None, mixture: Callable[[str], Path], tmp_path: Path) -> None:
    """Before 0.19 PEFT stored A and B transposed, which the shapes do not reveal if a matrix is square."""
    older = copied(mixture("qwen3_moe") / "math", tmp_path / "older", peft_version=version)
    with refused(UnsupportedError, match=r"before 0\.19"):
        adapterswap.open_expert(older)


def test_a_result_has_the_earliest_version_of_its_experts(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    """As numbers: as text, 0.19.10 would come before 0.19.2."""
    versions = {"math": "0.19.10", "swahili": "0.19.2"}
    experts = {
        name: copied(mixture("qwen3_moe") / name, tmp_path / name, peft_version=version)
        for name, version in versions.items()
    }
    plan = adapterswap.soup(experts["math"], experts["swahili"])
    out = plan.write(tmp_path / "out")
    assert json.loads((out / "adapter_config.json").read_text())["peft_version"] == "0.19.2"


@pytest.mark.parametrize("target", [Target.VLLM, Target.LLAMA])
def test_they_are_not_served_by_name(target: Target, mixture: Callable[[str], Path], tmp_path: Path) -> None:
    """The base has them: the message is not of modules that it lacks."""
    folder = mixture("qwen3_moe")
    shapes = base_shapes(str(folder / "base"), Memo(tmp_path / "memo"))
    with refused(
        UnsupportedError, "experts", match=f"mixture-of-experts layers .* {target.called} cannot serve"
    ) as error:
        check_fits(adapterswap.open_adapter(folder / "math"), shapes, "math", target)
    assert "does not have" not in str(error.value)


def test_adapters_by_sparse_methods_need_factors_of_modules(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture("qwen3_moe")
    plan = adapterswap.ties(folder / "math", folder / "swahili", density=0.5)
    with refused(UnsupportedError, match="fused parameter"):
        plan.write(tmp_path / "out", max_rank=4)


def test_another_base_is_refused(mixture: Callable[[str], Path], tmp_path: Path) -> None:
    folder = mixture("qwen3_moe")
    config = transformers.AutoConfig.from_pretrained(folder / "base")
    config.num_experts = 2
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    with refused(BaseModelError, "base_model"):
        composed(folder).merge(tmp_path / "out", base_model=tmp_path / "base")
