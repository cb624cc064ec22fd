"""Adapters that are not plain LoRA: what is written, what is refused and why, and which settings must agree.

That copies and merges are exact is in tests/core/matrix; the references are PEFT's own.
"""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import LAYERS, load_base, logits
from peft import (
    BOFTConfig,
    HiraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftConfig,
    PromptTuningConfig,
    RoadConfig,
    TaskType,
    TrainableTokensConfig,
    VeraConfig,
)
from pico_models import in_peft, merged_by_peft, trained
from refusals import refused
from safetensors.torch import load_file
from tolerances import close

import adapterswap
from adapterswap import Composition
from adapterswap.core.experts.config import AdapterConfig
from adapterswap.core.experts.keys import KINDS, REFUSED_KINDS
from adapterswap.engines.serving.composer import check_fits
from adapterswap.kit.errors import ExpertError, UnsupportedError

Run = Callable[..., Result]
Base = Callable[[str], Path]

TARGETS = ["q_proj", "v_proj", "down_proj"]
COPIED: Any = [
    {"layers": "none", "expert": "swahili", "optional": True},
    {"layers": "0-1", "expert": "swahili"},
    {"expert": "math"},
]


def dora(**options: Any) -> PeftConfig:
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, "use_dora": True, "task_type": "CAUSAL_LM", **options})


def pair(base: Path, folder: Path, math: PeftConfig, swahili: PeftConfig, **saving: Any) -> dict[str, Path]:
    return {
        name: trained(base, config, folder / name, seed=seed, **saving)
        for seed, (name, config) in enumerate({"math": math, "swahili": swahili}.items())
    }


def composed(experts: dict[str, Path], rules: Any = COPIED, **fields: Any) -> adapterswap.Plan:
    return adapterswap.compose(Composition(allocation=rules, **fields), experts)


def test_every_copied_kind_is_in_the_table_and_none_is_refused_too() -> None:
    from peft import PeftType

    known = {kind.value for kind in PeftType}
    assert KINDS.keys() | REFUSED_KINDS.keys() <= known
    assert not KINDS.keys() & REFUSED_KINDS.keys()


def test_dora_modules_are_copied_byte_for_byte(base: Base, tmp_path: Path) -> None:
    experts = pair(base("llama"), tmp_path, dora(), dora(r=3, use_rslora=True))
    out = adapterswap.write_adapter(composed(experts), tmp_path / "out")
    written = load_file(out / "adapter_model.safetensors")
    for name, folder in experts.items():
        own = load_file(folder / "adapter_model.safetensors")
        layers = {"layers.0.", "layers.1."} if name == "swahili" else {f"layers.{n}." for n in range(2, LAYERS)}
        held = [key for key in own if any(layer in key for layer in layers)]
        assert held
        for key in held:
            assert torch.equal(own[key], written[key])
    config = AdapterConfig.read(out / "adapter_config.json")
    assert config.dora
    names = [f"model.layers.{n}.mlp.down_proj" for n in range(LAYERS)]
    assert list(config.resolved(names)[0].values()) == [3, 3, 4, 4, 4, 4]


def test_a_slice_and_a_verified_composition_of_another_kind(base: Base, tmp_path: Path) -> None:
    oft = OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS, task_type="CAUSAL_LM")
    experts = pair(base("llama"), tmp_path, oft, copy.deepcopy(oft))
    out = composed(experts).write(tmp_path / "out")
    assert adapterswap.verify(out, experts=experts).equal
    sliced = adapterswap.slice_layers(experts["math"], "1-2").write(tmp_path / "slice")
    opened = adapterswap.open_expert(sliced)
    assert {part.layer for part in opened.parts.values()} == {1, 2}
    assert {part.method for part in opened.parts.values()} == {"OFT"}


REFUSED: dict[str, tuple[PeftConfig, PeftConfig, str]] = {
    "two kinds": (
        dora(), LoHaConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM"), "is LoHa and math is DoRA"
    ),
    "DoRA and LoRA": (dora(), dora(use_dora=False), "need the norms of the base's weights"),
    "OFT and LoRA": (
        OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS, task_type="CAUSAL_LM"), dora(use_dora=False),
        "an adapter holds only one kind",
    ),
    "settings of OFT": (
        OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
        OFTConfig(r=0, oft_block_size=4, coft=True, target_modules=TARGETS, task_type="CAUSAL_LM"),
        "coft is True and False",
    ),
    "projections of VeRA": (
        VeraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
        VeraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", projection_prng_key=7),
        "projection_prng_key is 7 and 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_kinds_that_one_config_cannot_hold_are_merged_instead(case: str, base: Base, tmp_path: Path) -> None:
    math, swahili, words = REFUSED[case]
    experts = pair(base("llama"), tmp_path, math, swahili)
    plan = composed(experts)
    with pytest.raises(UnsupportedError, match=words.replace("(", r"\(")):
        plan.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged = load_base(plan.merge(tmp_path / "merged", base_model=base("llama")))
    close(merged.state_dict(), transplanted(base("llama"), experts))


def transplanted(base: Path, experts: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The layers that `COPIED` names out of what PEFT merges for each expert alone."""
    full = {name: merged_by_peft(base, folder) for name, folder in experts.items()}
    owners = {
        key: "math" if "layers." in key and not any(f"layers.{n}." in key for n in (0, 1)) else "swahili"
        for key in full["math"]
    }
    return {key: full[owner][key] for key, owner in owners.items()}


SETTINGS: dict[str, PeftConfig] = {
    "MiSS of matrices": MissConfig(r=4, init_weights="bat", target_modules=TARGETS, task_type="CAUSAL_LM"),
    "MiSS of few columns": MissConfig(
        r=4, mini_r=2, init_weights="mini", target_modules=TARGETS, task_type="CAUSAL_LM"
    ),
    "HiRA with a pattern": HiraConfig(
        r=4, rank_pattern={"q_proj": 2}, target_modules=TARGETS, task_type="CAUSAL_LM"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_decide_the_shapes(case: str, base: Base, tmp_path: Path) -> None:
    """PEFT reads MiSS's form from `init_weights`, and ignores HiRA's `rank_pattern`."""
    experts = pair(base("llama"), tmp_path, SETTINGS[case], copy.deepcopy(SETTINGS[case]))
    expected = transplanted(base("llama"), experts)
    plan = composed(experts)
    close(merged_by_peft(base("llama"), plan.write(tmp_path / "out")), expected)
    close(load_base(plan.merge(tmp_path / "merged", base_model=base("llama"))).state_dict(), expected)


def test_ranks_of_hira_differ_only_in_full_weights(base: Base, tmp_path: Path) -> None:
    """PEFT could not load an adapter with both, nor one whose ranks are not its config's."""
    options: Any = {"target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    experts = pair(base("llama"), tmp_path, HiraConfig(r=4, **options), HiraConfig(r=2, **options))
    plan = composed(experts)
    with refused(UnsupportedError):
        plan.write(tmp_path / "out")
    merged = load_base(plan.merge(tmp_path / "merged", base_model=base("llama"))).state_dict()
    close(merged, transplanted(base("llama"), experts))
    config = experts["math"] / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 2, "rank_pattern": {"proj": 4}}))
    with refused(UnsupportedError, "experts"):
        composed(experts)


def test_vera_keeps_a_module_as_wide_as_its_projections(base: Base, tmp_path: Path) -> None:
    vera = VeraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
    experts = pair(base("llama"), tmp_path, vera, copy.deepcopy(vera))
    rules: Any = [{"modules": "down_proj", "expert": "base"}, *COPIED]
    with pytest.raises(UnsupportedError, match="no module like"):
        composed(experts, rules).write(tmp_path / "out")


def test_one_expert_without_bias_beside_one_with(base: Base, tmp_path: Path) -> None:
    """Plain LoRA is LoRA with a bias of zeros."""
    experts = pair(base("llama"), tmp_path, dora(use_dora=False, lora_bias=True), dora(use_dora=False))
    out = composed(experts).write(tmp_path / "out")
    written = load_file(out / "adapter_model.safetensors")
    biases = {key: tensor for key, tensor in written.items() if key.endswith("lora_B.bias")}
    assert len(biases) == LAYERS * len(TARGETS)
    assert all(bool(tensor.any()) == (".0." not in key and ".1." not in key) for key, tensor in biases.items())
    layer, twin = (
        in_peft(base("llama"), folder).get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        for folder in (out, experts["swahili"])
    )
    x = torch.randn(2, 32)
    assert torch.equal(layer(x), twin(x))


def biased() -> tuple[PeftConfig, PeftConfig]:
    """Biases of B on modules with a bias in the base, with other ranks, alphas and formulas of the scale."""
    options: Any = {"use_dora": False, "lora_bias": True, "target_modules": ["q_proj", "v_proj"]}
    return dora(**options, lora_alpha=6), dora(**options, r=3, lora_alpha=9, use_rslora=True)


@pytest.mark.parametrize("options", [{}, {"max_rank": 32}], ids=str)
def test_blends_of_biases_of_b(options: Any, base: Base, tmp_path: Path) -> None:
    """A soup, of PEFT's own merges of W and b; the average of a bias with plain LoRA, and of a sum without norm."""
    experts = pair(base("qwen2"), tmp_path, *biased())
    rules: Any = [
        {"layers": 0, "blend": {"math": 1, "swahili": 3}},
        {"layers": 1, "blend": {"math": 0.5, "swahili": -0.25}, "normalize": False},
        {"layers": 2, "blend": {"math": 0.3}, "normalize": False},
        {"expert": "swahili"},
    ]
    shares: Any = {0: (0.25, 0.75), 1: (0.5, -0.25), 2: (0.3, 0)}
    composition = Composition(allocation=rules, allow_negative=True)
    plan = adapterswap.compose(composition, experts)
    out = plan.write(tmp_path / "out", **options)
    full = [merged_by_peft(base("qwen2"), folder) for folder in (*experts.values(), out)]
    own = load_base(base("qwen2")).state_dict()
    for key, weight in own.items():
        layer = int(key.split(".")[2]) if ".layers." in key else -1
        one, other = shares.get(layer, (0, 1))
        math, swahili, written = (state[key].double() - weight.double() for state in full)
        close(written, one * math + other * swahili, scale=float(weight.abs().max()), name=key)
    merged = load_base(plan.merge(tmp_path / "merged", base_model=base("qwen2")))
    close(logits(merged), logits(in_peft(base("qwen2"), out)), depth=LAYERS)
    assert adapterswap.verify(out, experts=experts).equal


def test_biases_of_b_are_truncated_whole(base: Base, tmp_path: Path) -> None:
    """Truncation is of s·B·A; the biases are summed as they are."""
    experts = pair(base("qwen2"), tmp_path, *biased())
    exact, cut = (composed(experts, BLENDED).write(tmp_path / str(rank), max_rank=rank) for rank in (32, 2))
    states = [merged_by_peft(base("qwen2"), folder) for folder in (exact, cut)]
    name = "model.layers.3.self_attn.v_proj"
    assert AdapterConfig.read(cut / "adapter_config.json").resolved([name])[0] == {name: 2}
    close(states[1][f"{name}.bias"], states[0][f"{name}.bias"])
    own = load_base(base("qwen2")).state_dict()[f"{name}.weight"].double()
    changes = [state[f"{name}.weight"].double() - own for state in states]
    u, s, v = torch.linalg.svd(changes[0])
    close(changes[1], (u[:, :2] * s[:2]) @ v[:2], scale=float(own.abs().max()))


def test_ia3_finds_its_feedforward_modules_again(base: Base, tmp_path: Path) -> None:
    ia3 = IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    experts = pair(base("llama"), tmp_path, ia3, copy.deepcopy(ia3))
    out = composed(experts).write(tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["feedforward_modules"] == [f"model.layers.{n}.mlp.down_proj" for n in range(LAYERS)]
    ranked = composed(experts).write(tmp_path / "ranked", max_rank=4)  # there is no rank to reduce
    assert (ranked / "adapter_model.safetensors").read_bytes() == (out / "adapter_model.safetensors").read_bytes()


Call = Callable[[dict[str, Path], Path], object]
EQUAL: Any = {"blend": {"math": 1, "swahili": 1}}
# What is done with two experts of DoRA, and the parameter at fault.
NEEDS_FACTORS: dict[str, tuple[Call, str | None]] = {
    "row_threshold": (lambda experts, out: composed(experts, row_threshold=0.1), "row_threshold"),
    "magnitudes": (lambda experts, out: composed(experts, [{**EQUAL, "weights": "magnitude"}]), None),
    "core_ties": (lambda experts, out: composed(experts, [{**EQUAL, "method": "core_ties", "density": 0.5}]), "method"),
    "portable": (lambda experts, out: composed(experts).write(out, layout="portable"), "layout"),
    "max_rank": (lambda experts, out: composed(experts).write(out, max_rank=2), "max_rank"),
    "diff": (lambda experts, out: adapterswap.diff(*experts.values()), None),
    "analyze": (lambda experts, out: adapterswap.analyze(experts), None),
}
# Likewise for experts with biases of B.
NO_PLACE_FOR_BIASES: dict[str, tuple[Call, str | None]] = {
    "portable": (lambda experts, out: composed(experts).write(out, layout="portable"), "layout"),
    "ties": (
        lambda experts, out: composed(experts, [{**EQUAL, "method": "ties", "density": 0.5}]).write(out, max_rank=4),
        "method",
    ),
    "slerp": (lambda experts, out: composed(experts, [{**EQUAL, "method": "slerp"}]).write(out), "method"),
    "diff": (lambda experts, out: adapterswap.diff(*experts.values()), None),
    "convert": (lambda experts, out: adapterswap.convert(experts["math"], out, rank=4), "adapter"),
}


@pytest.mark.parametrize("case", NEEDS_FACTORS)
def test_what_needs_factors(case: str, base: Base, tmp_path: Path) -> None:
    """s·B·A is not DoRA's ΔW."""
    call, parameter = NEEDS_FACTORS[case]
    experts = pair(base("llama"), tmp_path, dora(), dora())
    with refused(UnsupportedError, parameter):
        call(experts, tmp_path / "out")


@pytest.mark.parametrize("case", NO_PLACE_FOR_BIASES)
def test_forms_that_have_no_place_for_biases_of_b(case: str, base: Base, tmp_path: Path) -> None:
    """The remedy is not `convert`, which refuses them too, but `merge`."""
    call, parameter = NO_PLACE_FOR_BIASES[case]
    experts = pair(base("qwen2"), tmp_path, *biased())
    with refused(UnsupportedError, parameter) as caught:
        call(experts, tmp_path / "out")
    assert "`convert`" not in str(caught.value)
    assert adapterswap.merge(experts["math"], out_path=tmp_path / "merged", base_model=base("qwen2")).exists()


def test_a_blend_of_another_kind_becomes_an_adapter(base: Base, tmp_path: Path) -> None:
    """As docs/adapters.md says: merged and extracted again at full rank, or each expert converted first."""
    experts = pair(base("llama"), tmp_path, dora(), OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS))
    folders = list(experts.values())
    one, other = (merged_by_peft(base("llama"), folder) for folder in folders)
    average = load_base(base("llama"))
    average.load_state_dict({name: (weight + other[name]) / 2 for name, weight in one.items()})
    merged = adapterswap.soup(*folders).merge(tmp_path / "merged", base_model=base("llama"))
    rank = max(max(parameter.shape) for parameter in average.parameters())
    adapterswap.extract(merged, base("llama"), tmp_path / "extracted", rank=rank)
    loras = [tmp_path / f"lora-{folder.name}" for folder in folders]
    for folder, lora in zip(folders, loras, strict=True):
        adapterswap.convert(folder, lora, base_model=base("llama"), rank=rank)
    blended = adapterswap.soup(*loras).write(tmp_path / "blended")
    for folder in (tmp_path / "extracted", blended):
        close(logits(in_peft(base("llama"), folder)), logits(average), depth=LAYERS)


def test_inspect_lists_them(base: Base, tmp_path: Path, run: Run) -> None:
    loha = LoHaConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM")
    expert = trained(base("llama"), loha, tmp_path / "math")
    output = json.loads(run("inspect", expert, "--json").stdout)
    assert output["peft_type"] == "LOHA"
    assert len(output["opaque"]) == LAYERS * len(TARGETS)
    assert output["parameters"] == sum(t.numel() for t in load_file(expert / "adapter_model.safetensors").values())
    assert "LoHa" in run("inspect", expert).stdout


def test_prompts_are_refused_with_the_reason(base: Base, tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    with pytest.raises(UnsupportedError, match="virtual tokens"):
        adapterswap.open_expert(trained(base("llama"), config, tmp_path / "math"))


def test_a_head_that_one_expert_trained_in_full_and_another_by_lora(base: Base, tmp_path: Path) -> None:
    """The owner decides the form; an average of the two is exact only in full weights."""
    full = dora(use_dora=False, modules_to_save=["lm_head"])
    low = dora(use_dora=False, target_modules=[*TARGETS, "lm_head"])
    experts = pair(base("llama"), tmp_path, full, low)
    for owner in experts:
        rules: Any = [{"modules": ["lm_head"], "expert": owner}, *COPIED]
        out = composed(experts, rules).write(tmp_path / f"{owner}-out")
        merged = load_base(composed(experts, rules).merge(tmp_path / f"{owner}-full", base_model=base("llama")))
        close(logits(in_peft(base("llama"), out)), logits(merged), depth=LAYERS)
    rules = [{"modules": ["lm_head"], "blend": {"math": 1, "swahili": 3}}, *COPIED]
    with pytest.raises(UnsupportedError):
        composed(experts, rules).write(tmp_path / "out")
    merged = load_base(composed(experts, rules).merge(tmp_path / "full", base_model=base("llama")))
    heads = [merged_by_peft(base("llama"), folder)["lm_head.weight"].double() for folder in experts.values()]
    close(merged.lm_head.weight, (0.25 * heads[0] + 0.75 * heads[1]).float())


@pytest.mark.parametrize("make", [IA3Config, OFTConfig, VeraConfig])
@pytest.mark.parametrize("known", [True, False])
def test_a_head_that_one_expert_changes_without_factors_and_another_by_lora(
    make: Any, known: bool, base: Base, tmp_path: Path
) -> None:
    """Methods without factors do not say how many rows the head has."""
    sizes = {IA3Config: {"feedforward_modules": []}, OFTConfig: {"r": 0, "oft_block_size": 4}, VeraConfig: {"r": 4}}
    other = make(target_modules=["lm_head"], task_type="CAUSAL_LM", **sizes[make])
    lora = dora(use_dora=False, target_modules=["lm_head"])
    experts = pair(base("llama"), tmp_path, other, lora, save_embedding_layers=False)
    rules: Any = [{"blend": {"math": 1, "swahili": 3}}]
    given: Any = {"base_model": str(base("llama"))} if known else {"num_layers": LAYERS}
    plan = composed(experts, rules, **given)
    with refused(UnsupportedError):
        plan.write(tmp_path / "out")
    merged = load_base(plan.merge(tmp_path / "full", base_model=base("llama")))
    heads = [merged_by_peft(base("llama"), folder)["lm_head.weight"].double() for folder in experts.values()]
    close(merged.lm_head.weight, (0.25 * heads[0] + 0.75 * heads[1]).float())


def test_a_module_inside_one_that_another_expert_holds_in_full(base: Base, tmp_path: Path) -> None:
    inside = dora(use_dora=False)
    whole = dora(use_dora=False, target_modules=["lm_head"], modules_to_save=["mlp"])
    experts = pair(base("llama"), tmp_path, inside, whole)
    with refused(ExpertError, match="inside it"):
        composed(experts)
    full = adapterswap.merge(experts["math"], out_path=tmp_path / "merged", base_model=base("llama"))
    out = composed({**experts, "math": full}).merge(tmp_path / "out", base_model=base("llama"))
    close(load_base(out).state_dict(), transplanted(base("llama"), experts))


def test_lora_bias_beside_lora_on_an_embedding_is_only_merged(base: Base, tmp_path: Path) -> None:
    """PEFT has no lora_bias for embeddings, so it could not load an adapter with both."""
    model = base("qwen2")
    plain = dora(use_dora=False, target_modules=["embed_tokens", "q_proj", "v_proj"])
    experts = pair(model, tmp_path, plain, dora(use_dora=False, lora_bias=True, target_modules=["q_proj", "v_proj"]))
    plan = composed(experts, COPIED[1:])
    with refused(UnsupportedError):
        plan.write(tmp_path / "out")
    own = {name: merged_by_peft(model, folder) for name, folder in experts.items()}
    owners = {
        key: "swahili" if key.startswith(("model.layers.0.", "model.layers.1.")) else "math" for key in own["math"]
    }
    merged = load_base(plan.merge(tmp_path / "merged", base_model=model)).state_dict()
    close(merged, {key: own[owner][key] for key, owner in owners.items()})


def table(title: str) -> list[list[str]]:
    """The rows of the first table under a heading of docs/adapters.md."""
    page = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text(encoding="utf-8")
    lines = page.partition(f"# {title}\n")[2].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


MAKERS: dict[str, Callable[[], PeftConfig]] = {
    "LoRA, rsLoRA": lambda: dora(use_dora=False),
    "modules_to_save": lambda: dora(use_dora=False, modules_to_save=["lm_head", "input_layernorm"]),
    "trainable_token_indices": lambda: dora(use_dora=False, trainable_token_indices=[3, 1]),
    "TRAINABLE_TOKENS": lambda: TrainableTokensConfig(token_indices=[3, 1], task_type="CAUSAL_LM"),
    "bias": lambda: dora(use_dora=False, bias="lora_only", target_modules=["q_proj", "v_proj"]),
    "lora_bias": lambda: dora(use_dora=False, lora_bias=True, target_modules=["q_proj", "v_proj"]),
    "DoRA": dora,
    "(IA)³": lambda: IA3Config(**OTHER, feedforward_modules=["down_proj"]),
    "OFT": lambda: OFTConfig(**OTHER, r=0, oft_block_size=4),
    "BOFT": lambda: BOFTConfig(**OTHER, boft_block_size=4),
    "LoHa": lambda: LoHaConfig(**OTHER, r=3),
    "LoKr": lambda: LoKrConfig(**OTHER, r=3),
    "VeRA": lambda: VeraConfig(**OTHER, r=4),
    "HRA": lambda: HRAConfig(**OTHER, r=4),
    "MiSS": lambda: MissConfig(**OTHER, r=4),
    "HiRA": lambda: HiraConfig(**OTHER, r=4),
    "RoAd": lambda: RoadConfig(**OTHER, group_size=8),
}
OTHER: Any = {"target_modules": TARGETS, "task_type": "CAUSAL_LM"}
BLENDED: Any = [{"blend": {"math": 1, "swahili": 1}}]


def test_the_page_lists_every_kind() -> None:
    rows = [row[0] for row in table("Adapters and models")]
    assert {kind.title for kind in KINDS.values()} | {"DoRA"} <= set(rows)
    assert all(sum(name in row for row in rows) >= 1 for name in MAKERS)
    refused = " ".join(row[0] for row in table("Refused"))
    for name in ("aLoRA", "Arrow", "PiSSA", "OLoRA", "CorDA", "LoftQ", "prompt tuning", "target_parameters"):
        assert name in refused


@pytest.mark.parametrize("name", MAKERS)
def test_the_page_lists_supported_operations(name: str, base: Base, tmp_path: Path) -> None:
    """A tick where an operation succeeds, a reason where it is refused. Qwen2 has biases on q_proj and v_proj."""
    row = next(row for row in table("Adapters and models") if (f"`{name}" in row[0] or row[0] == name))
    model = base("qwen2")
    experts = pair(model, tmp_path, MAKERS[name](), MAKERS[name]())
    copied: Any = [{"expert": "math"}] if name == "TRAINABLE_TOKENS" else COPIED  # which has nothing in the layers

    def live() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            composer = adapterswap.LiveComposer.from_experts(load_base(model), experts)
        with composer.use("math+swahili@bottom=1,top=1"):
            pass

    def served() -> None:
        adapter = adapterswap.open_expert(experts["math"])
        assert isinstance(adapter, adapterswap.Adapter)
        shapes = {module.name: module.shape for module in adapter.modules.values()}
        check_fits(adapter, shapes, "math")

    operations: list[Callable[[], object]] = [
        lambda: composed(experts, copied).write(tmp_path / "copy"),
        lambda: composed(experts, BLENDED).write(tmp_path / "blend"),
        lambda: composed(experts, BLENDED).merge(tmp_path / "full", base_model=model),
        live,
        served,
        lambda: composed(experts, copied, base_model=str(model)).export(tmp_path / "adapter.gguf"),
    ]
    for operation, cell in zip(operations, row[1:], strict=True):
        try:
            operation()
        except UnsupportedError:
            done = False
        else:
            done = True
        assert done == cell.startswith("✓"), cell


@pytest.mark.parametrize("name", ["LoRA, rsLoRA", "DoRA", "(IA)³", "OFT", "LoHa", "HRA", "TRAINABLE_TOKENS"])
def test_the_command_composes_other_kinds(name: str, base: Base, run: Run, tmp_path: Path) -> None:
    """Only LoRA's configs have ranks to report."""
    experts = pair(base("llama"), tmp_path, MAKERS[name](), MAKERS[name]())
    command = ["compose", "--expert", f"math={experts['math']}", "--rule", "math"]
    if name != "TRAINABLE_TOKENS":  # which has nothing in the layers
        command[3:3] = ["--expert", f"swahili={experts['swahili']}", "--rule", "swahili: 0-1"]
    shown = run(*command, "-o", tmp_path / "text")
    assert (shown.exit_code, "rank up to" in shown.stderr) == (0, name in ("LoRA, rsLoRA", "DoRA")), shown.output
    rank = json.loads(run(*command, "-o", tmp_path / "json", "--json").stdout)["rank"]
    assert rank == ({"global": 4, "largest": 4} if name in ("LoRA, rsLoRA", "DoRA") else None)


def test_unknown_keys_are_ignored_with_a_warning(base: Base, tmp_path: Path, run: Run) -> None:
    """As PEFT ignores them: ms-swift's, LLaMA-Factory's, those of old versions."""
    experts = pair(base("llama"), tmp_path, dora(use_dora=False), dora(use_dora=False))
    config = experts["math"] / "adapter_config.json"
    content = json.loads(config.read_text()) | {"lorap_lr_ratio": 16.0, "enable_lora": [True]}
    config.write_text(json.dumps(content))
    for version in (None, "0.5.0", "0.21.9"):
        config.write_text(json.dumps(content | {"peft_version": version}))
        assert AdapterConfig.read(config).unknown == ("enable_lora", "lorap_lr_ratio")
    result = run(
        "compose",
        "-t",
        experts["math"],
        "-l",
        experts["swahili"],
        "-o",
        tmp_path / "out",
        "--bottom",
        1,
        "--top",
        1,
        exit_code=0,
    )
    assert "lorap_lr_ratio" in result.output
    assert "lorap_lr_ratio" not in (tmp_path / "out" / "adapter_config.json").read_text()
    config.write_text(json.dumps(content | {"peft_version": "0.22.0"}))
    with pytest.raises(UnsupportedError):
        AdapterConfig.read(config)
