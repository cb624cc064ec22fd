"""A chain of adapters, each trained on top of those before it, counts as one expert.

The reference is PEFT's own merge of one adapter after another, or numpy on dense ΔW in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import CONFIGS, LAYERS, load_base, logits, merged_weights
from peft import LoraConfig, PeftModel
from pico_models import copied, trained
from refusals import refused
from safetensors.torch import load_file
from tolerances import close

import adapterswap
from adapterswap.kit.errors import ExpertError, FieldError, UnsupportedError
from core.writing.test_blends import deltas

SEEDS = {"sft": 11, "dpo": 12, "sw": 13}


@pytest.fixture(scope="module")
def chain(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """`sft` and `sw` on the base, `dpo` on the base with `sft` merged in by adapterswap, whose record says so."""
    root = tmp_path_factory.mktemp("chain")
    sft, sw = expert(seed=SEEDS["sft"]), expert(seed=SEEDS["sw"], r=4)
    merged = adapterswap.merge(sft, base("llama"), out_path=root / "merged")
    return {"base": base("llama"), "merged": merged, "sft": sft, "sw": sw, "dpo": on_top(root / "dpo", merged)}


def on_top(folder: Path, base: Path, *, copies: bool = False, **options: Any) -> Path:
    """A random LoRA that PEFT saved for a model in the folder `base`."""
    settings = {"r": 2, "lora_alpha": 3, "target_modules": CONFIGS["llama"][2], "task_type": "CAUSAL_LM", **options}
    return trained(base, LoraConfig(**settings), folder, seed=SEEDS["dpo"], save_embedding_layers=copies)


def composed(chain: dict[str, Path], **fields: Any) -> adapterswap.Plan:
    experts = {name: str(chain[name]) for name in ("sft", "dpo", "sw")}
    return adapterswap.compose(
        adapterswap.Composition(experts=experts, chains={"math": ("sft", "dpo")}, language="sw", **fields)
    )


def alone(*parts: str, **experts: Path) -> adapterswap.Plan:
    """A chain of these parts, by itself."""
    places = {name: str(folder) for name, folder in experts.items()}
    return adapterswap.compose(adapterswap.Composition(experts=places, chains={"math": parts}, rules=["math"]))


def after_both(chain: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The base with one adapter merged after the other, by PEFT."""
    model = PeftModel.from_pretrained(load_base(chain["base"]), chain["sft"]).merge_and_unload()
    return PeftModel.from_pretrained(model, chain["dpo"]).merge_and_unload().state_dict()


def test_a_swap_takes_its_middle_from_both_adapters(chain: dict[str, Path], tmp_path: Path) -> None:
    plan = composed(chain, task="math", bottom=2, top=1)
    middle, outer = after_both(chain), merged_weights(chain["base"], chain["sw"])
    written, full = plan.write(tmp_path / "adapter"), plan.merge(out_path=tmp_path / "full")
    running, merged = merged_weights(chain["base"], written), load_file(full / "model.safetensors")
    for name, weight in middle.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        expected = outer[name] if layer is not None and (layer < 2 or layer == LAYERS - 1) else weight
        close(running[name], expected, name=name, depth=2)
        if name in merged:
            close(merged[name], expected, name=name, depth=2)
    assert json.loads((written / "adapter_config.json").read_text())["base_model_name_or_path"] == str(chain["base"])
    assert "mmmmm"[: LAYERS - 3] in plan.strip


@pytest.mark.parametrize("method", ["soup", "ties", "slerp", "dare_linear"])
def test_methods_take_the_sum_for_one_expert(chain: dict[str, Path], method: str, tmp_path: Path) -> None:
    """The same as with an adapter that holds the sum of both, written by rank concatenation."""
    own = {"density": 0.5} if method in ("ties", "dare_linear") else {}
    plan = composed(chain, task="math", method=method, **own)
    task, first, second = (deltas(chain[name]) for name in ("sw", "sft", "dpo"))
    joined = alone("sft", "dpo", sft=chain["sft"], dpo=chain["dpo"]).write(tmp_path / "math")
    for name, delta in deltas(joined).items():
        close(delta, first[name] + second[name], name=name)
    two = adapterswap.compose(
        adapterswap.Composition(
            experts={"math": str(joined), "sw": str(chain["sw"])}, task="math", language="sw", method=method, **own
        )
    )
    rank = {} if method in ("soup", "slerp") else {"max_rank": 32}
    results = [deltas(p.write(tmp_path / f"{i}", **rank)) for i, p in enumerate((plan, two))]
    for name, delta in results[0].items():
        close(delta, results[1][name], name=name, depth=8)
        assert any("2606.18521" in note for note in plan.notes) is bool(own)
        if method == "soup":
            close(delta, (first[name] + second[name] + task[name]) / 2, name=name)


def test_a_chain_within_an_average(chain: dict[str, Path], tmp_path: Path) -> None:
    """Each adapter of the chain has the share of the chain; its first may also be an expert of its own."""
    experts = {name: str(chain[name]) for name in ("sft", "dpo", "sw")}
    composition = adapterswap.Composition(
        experts=experts, chains={"math": ["sft", "dpo"]}, task=["math", "sft"], language="base", method="soup",
        language_weight=0.0,
    )  # fmt: skip
    written = deltas(adapterswap.compose(composition).write(tmp_path / "adapter"))
    first, second = deltas(chain["sft"]), deltas(chain["dpo"])
    for name, delta in written.items():
        close(delta, first[name] + second[name] / 2, name=name)


def test_a_running_model_adds_both(chain: dict[str, Path], tmp_path: Path) -> None:
    experts = {name: str(chain[name]) for name in ("sft", "dpo", "sw")}
    composer = adapterswap.LiveComposer.from_experts(load_base(chain["base"]), experts)
    composer.set(adapterswap.Composition(chains={"math": ("sft", "dpo")}, task="math", language="sw", bottom=2, top=1))
    full = composed(chain, task="math", bottom=2, top=1).merge(out_path=tmp_path / "full")
    close(logits(composer.model), logits(load_base(full)), depth=LAYERS)


def test_the_command_and_the_record(chain: dict[str, Path], run: Callable[..., Result], tmp_path: Path) -> None:
    arguments = [f"--expert={name}={chain[name]}" for name in ("sft", "dpo", "sw")]
    arguments += ["--chain", "math=sft,dpo", "--rule", "sw: 0-1", "--rule", "math"]
    result = run("compose", *arguments, "-o", tmp_path / "out", exit_code=0)
    assert "Not checked" not in result.output
    record = json.loads((tmp_path / "out" / "adapterswap.json").read_text())
    assert record["composition"]["chains"] == {"math": ["sft", "dpo"]}
    assert run("verify", tmp_path / "out", *arguments[:3]).exit_code == 0
    assert run("compose", *arguments[1:], "-o", tmp_path / "never").exit_code == 2
    assert run("compose", "-t", chain["sft"], "-l", chain["sw"], "--chain", "a=b,c", "--dry-run").exit_code == 2


def test_parts_that_do_not_lie_on_top_of_each_other(chain: dict[str, Path], tmp_path: Path) -> None:
    with refused(ExpertError, "base_model"):  # alone, `dpo` is only what it adds
        adapterswap.layer_swap(chain["dpo"], chain["sw"], bottom=1, top=1, base_model=chain["base"])
    for names in (("sw", "dpo"), ("dpo", "sft")):
        with refused(ExpertError, "chains"):
            alone(*names, **{name: chain[name] for name in names})
    moved = copied(chain["dpo"], tmp_path / "moved", base_model_name_or_path="org/merged")
    plan = alone("sft", "dpo", sft=chain["sft"], dpo=moved)
    assert [note for note in plan.notes if note.startswith("Not checked whether dpo was trained on top of sft")]


@pytest.mark.parametrize(
    ("rules", "whole"),
    [
        (["sft"], True),
        (["sft*2"], True),  # divided by the sum of the weights
        (["attention of sft", "base"], False),
        (["base: 0-1", "sft"], False),
        ([{"blend": {"sft": 0.5}, "normalize": False}], False),
        (["sft + base"], False),
    ],
)
def test_a_base_with_only_a_part_merged_in(
    chain: dict[str, Path], rules: list[Any], whole: bool, tmp_path: Path
) -> None:
    experts = {"sft": str(chain["sft"])}
    part = adapterswap.compose(adapterswap.Composition(experts=experts, rules=rules)).merge(out_path=tmp_path / "part")
    both = {"sft": chain["sft"], "dpo": on_top(tmp_path / "dpo", part)}
    if whole:
        assert alone("sft", "dpo", **both).notes == ()
    else:
        with refused(ExpertError, "chains"):
            alone("sft", "dpo", **both)


def test_only_lora_lies_on_top(chain: dict[str, Path], tmp_path: Path) -> None:
    for name, options in (("dora", {"use_dora": True}), ("saved", {"modules_to_save": ["lm_head"]})):
        top = on_top(tmp_path / name, chain["merged"], **options)
        with refused(UnsupportedError, "chains"):
            alone("sft", "top", sft=chain["sft"], top=top)
    with refused(UnsupportedError, "chains"):
        alone("sft", "top", sft=chain["merged"], top=chain["dpo"])


def test_a_copy_with_a_lower_adapter_merged_in(chain: dict[str, Path], tmp_path: Path) -> None:
    """The upper adapter's copy of its base's embedding is not the base's own, and without it the chain is right."""
    targets = {"target_modules": ["embed_tokens", "q_proj"]}
    lower = on_top(tmp_path / "lower", chain["base"], copies=True, **targets)
    merged = adapterswap.merge(lower, chain["base"], out_path=tmp_path / "merged")
    copied_too, upper = (
        on_top(tmp_path / f"upper-{copies}", merged, copies=copies, **targets) for copies in (True, False)
    )
    with refused(UnsupportedError, "chains", match="with lower merged into it"):
        alone("lower", "upper", lower=lower, upper=copied_too)
    plan = alone("lower", "upper", lower=lower, upper=upper)
    full = load_file(plan.merge(out_path=tmp_path / "full") / "model.safetensors")
    model = PeftModel.from_pretrained(load_base(chain["base"]), lower).merge_and_unload()
    for name, weight in PeftModel.from_pretrained(model, upper).merge_and_unload().state_dict().items():
        if name in full:
            close(full[name], weight, name=name, depth=2)


def test_a_chain_of_chains_says_so() -> None:
    """Also where nothing uses the inner one but the outer one."""
    with refused(FieldError, "chains", match="names the chain 'm'"):
        adapterswap.Composition(chains={"m": ("sft", "dpo"), "n": ("m", "more")}, allocation=[{"expert": "n"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"chains": {"math": ("sft",)}, "task": "math"},
        {"chains": {"math": ("sft", "sft")}, "task": "math"},
        {"chains": {"math": ("sft", "base")}, "task": "math"},
        {"chains": {"base": ("sft", "dpo")}, "task": "sft"},
        {"chains": {"sw": ("sft", "dpo")}, "task": "sft", "experts": {"sw": "here"}},
        {"chains": {"math": ("sft", "dpo")}, "task": "sft"},
        {"chains": {"math": ("sft", "dpo")}, "task": ("math", "dpo")},
        {"chains": {"math": ("sft", "more"), "more": ("sft", "dpo")}, "task": ("math", "more")},
    ],
)
def test_chains_that_mean_nothing(fields: dict[str, Any]) -> None:
    with refused(FieldError, "chains"):
        adapterswap.Composition(**{"language": "sw", **fields})
