"""Full weights and adapters that other tools wrote: are they the base, the base plus an expert, how much, and where?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import merged_weights
from peft import LoraConfig, PeftModel
from pico_models import copied, trained
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import adapterswap
from adapterswap.kit.errors import ArgumentError, ExpertError, UnsupportedError
from adapterswap.tools.attribution import Attribution

Expert = Callable[..., Path]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def peft_merge(
    base: Path, expert: Path, out: Path, dtype: torch.dtype = torch.float32, *, rounded: bool = False
) -> Path:
    """What PEFT's merge_and_unload saves; with `rounded`, of factors in the model's dtype."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=dtype), expert, autocast_adapter_dtype=not rounded
    )
    model = model.to(dtype) if rounded else model
    model.merge_and_unload().save_pretrained(out)
    return out


def changed(source: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of full weights with changed tensors."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def attribution(path: Path, base: Path, rules: list[str] | None = None, **experts: Path) -> Attribution:
    found = adapterswap.verify(path, experts, base_model=base, rules=rules)
    assert isinstance(found, Attribution)
    return found


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_peft_merged_is_recognised(
    tmp_path: Path, base: Any, expert: Expert, dtype: torch.dtype, architecture: str, rounded: bool
) -> None:
    math = expert(architecture, seed=1)
    merged = peft_merge(base(architecture), math, tmp_path / "merged", dtype, rounded=rounded)
    found = attribution(merged, base(architecture), x=math)
    assert (found.equal, found.answers) == (True, ("base + x",)), found
    assert not attribution(merged, base(architecture), x=expert(architecture, seed=2)).equal
    assert not attribution(merged, base(architecture)).equal


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_base_is_recognised(tmp_path: Path, base: Any, math: Path, dtype: torch.dtype) -> None:
    out = tmp_path / "copy"
    AutoModelForCausalLM.from_pretrained(base("llama"), dtype=dtype).save_pretrained(out)
    found = attribution(out, base("llama"))
    assert (found.equal, found.answers) == (True, ("base",))
    found = attribution(out, base("llama"), x=math)
    if dtype == torch.float32:
        assert found.answers == ("Equals the base in every number: nothing was merged",)
    else:
        assert found.answers == ("base, and not base + x",)
    assert not found.equal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, -1.0, 8**-0.5])
def test_another_scale_is_measured(tmp_path: Path, base: Any, math: Path, scale: float, dtype: torch.dtype) -> None:
    """The last one is what an α/r merger makes of a rank-stabilized adapter of rank 8."""
    alpha = json.loads((math / "adapter_config.json").read_text())["lora_alpha"]
    folder = copied(math, tmp_path / "expert", lora_alpha=alpha * scale)
    merged = peft_merge(base("llama"), folder, tmp_path / "merged", dtype)
    found = attribution(merged, base("llama"), x=math)
    text = f"{'-' if scale < 0 else '+'} " + {0.5: "0.5 × x", -1.0: "x"}.get(scale, "0.3536 × x")
    assert (found.equal, found.answers[0].partition(":")[0]) == (False, f"base {text}, and not base + x"), found
    assert len(found.answers) == 1
    assert all(f.found and f.found["x"] == pytest.approx(scale, rel=1e-2) for f in found.findings if f.stated)
    assert ("α/r was applied" in found.answers[0]) == (scale == 8**-0.5)
    assert attribution(merged, base("llama"), [f"x*{abs(scale)} with normalize=false"], x=math).equal == (scale > 0)


def test_a_buffer_of_integers_is_compared_by_its_bytes(tmp_path: Path, base: Any, math: Path) -> None:
    def buffer(last: int) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda tensors: tensors.update({"model.position_ids": torch.tensor([0, 1, last])})

    own = changed(base("llama"), tmp_path / "base", buffer(2))
    merged = peft_merge(base("llama"), math, tmp_path / "merged")
    same = changed(merged, tmp_path / "same", buffer(2))
    assert attribution(same, own, x=math).equal
    assert attribution(changed(merged, tmp_path / "other", buffer(3)), own, x=math).differing == ("model.position_ids",)


def test_layers_that_lack_it_are_named(tmp_path: Path, base: Any, math: Path) -> None:
    merged = peft_merge(base("llama"), math, tmp_path / "merged", torch.bfloat16)
    original = load_file(base("llama") / "model.safetensors")

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if ".layers." in name and int(name.split(".")[2]) >= 3:
                tensors[name] = original[name].bfloat16()

    found = attribution(changed(merged, tmp_path / "some", without), base("llama"), x=math)
    assert (found.equal, found.answers) == (False, ("layers 3-5 lack x",))
    # And a statement that says so is true.
    assert attribution(tmp_path / "some", base("llama"), ["x: 0-2", "base"], x=math).equal

    def half(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = original[name].bfloat16()

    found = attribution(changed(merged, tmp_path / "other", half), base("llama"), x=math)
    assert found.answers == ("model.layers.1.mlp.up_proj.weight lacks x",)


def test_sums_of_two_experts(tmp_path: Path, base: Any, math: Path, swahili: Path) -> None:
    """As mergekit's linear merges and PEFT's merges one after another make them."""
    one, two = merged_weights(base("llama"), math), merged_weights(base("llama"), swahili)
    own = load_file(base("llama") / "model.safetensors")
    merged = changed(
        base("llama"), tmp_path / "sum",
        lambda written: written.update({n: own[n] + 0.3 * (one[n] - own[n]) + 0.7 * (two[n] - own[n]) for n in own}),
    )  # fmt: skip
    assert attribution(merged, base("llama"), ["x*0.3 + y*0.7"], x=math, y=swahili).equal
    found = attribution(merged, base("llama"), ["x + y"], x=math, y=swahili)
    assert found.answers == ("base + 0.3 × x + 0.7 × y, and not base + 0.5 × x + 0.5 × y",)
    with refused(ArgumentError, "rules"):
        attribution(merged, base("llama"), x=math, y=swahili)


def test_another_base_and_tensors_in_anothers_place(tmp_path: Path, base: Any, math: Path) -> None:
    merged = peft_merge(base("llama"), math, tmp_path / "merged")
    other = changed(
        base("llama"), tmp_path / "other", lambda t: t.update({n: v + 0.01 * torch.randn_like(v) for n, v in t.items()})
    )
    (answer,) = attribution(merged, other, x=math).answers
    assert answer.startswith("Not made from other: ")

    def permuted(tensors: dict[str, torch.Tensor]) -> None:
        one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
        tensors[one], tensors[two] = tensors[two], tensors[one]

    (answer,) = attribution(changed(merged, tmp_path / "permuted", permuted), base("llama"), x=math).answers
    assert answer.startswith("2 tensors in another's place: model.layers.0.mlp.up_proj.weight holds what belongs in ")

    def damaged(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] += 0.01
        del tensors["model.layers.2.mlp.up_proj.weight"]

    found = attribution(changed(merged, tmp_path / "damaged", damaged), base("llama"), x=math)
    assert found.differing == ("model.layers.2.mlp.up_proj.weight", "model.norm.weight")
    assert found.answers == (
        "1 tensor neither the base's nor a weighted sum with the experts: model.norm.weight",
        "1 tensor that only the base has: model.layers.2.mlp.up_proj.weight",
    )


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    """A LoRA of an embedding leaves the tied head as it is in PEFT's running model; one stored weight cannot."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    base, expert = tmp_path / "base", tmp_path / "expert"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    lora = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])
    trained(base, lora, expert, scale=0.1, save_embedding_layers=False)
    found = attribution(peft_merge(base, expert, tmp_path / "merged"), base, x=expert)
    assert (found.equal, found.differing) == (False, ("lm_head.weight",))
    assert found.answers == (
        "lm_head.weight is tied to model.embed_tokens.weight, and changes with it, but the experts leave it as it is",
    )
    ours = adapterswap.merge(expert, base, out_path=tmp_path / "ours")
    (ours / "adapterswap.json").unlink()
    assert attribution(ours, base, x=expert).equal


def test_an_adapter_without_a_record(tmp_path: Path, base: Any, expert: Expert) -> None:
    math, swahili = (expert(seed=seed, use_rslora=False) for seed in (1, 2))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base("llama")), math, adapter_name="x")
    model.load_adapter(swahili, "y")
    model.add_weighted_adapter(["x", "y"], [0.25, 0.75], "z", combination_type="cat")
    model.save_pretrained(tmp_path / "out", selected_adapters=["z"])
    written = tmp_path / "out" / "z"
    assert attribution(written, base("llama"), ["x*0.25 + y*0.75"], x=math, y=swahili).equal
    found = attribution(written, base("llama"), ["x + y"], x=math, y=swahili)
    assert found.answers == ("base + 0.25 × x + 0.75 × y, and not base + 0.5 × x + 0.5 × y",)
    assert attribution(math, base("llama"), x=math).equal
    (answer,) = attribution(swahili, base("llama"), x=math).answers
    assert answer.startswith(
        "42 modules neither zero nor a weighted sum with the experts: model.layers.0.mlp.down_proj,"
    )


def test_coefficients_that_agree_within_their_error_are_one_sentence(tmp_path: Path, base: Any, expert: Expert) -> None:
    """PEFT's `cat` of rank-stabilized adapters multiplies both by the root of the sum of their ranks."""
    math, swahili = expert(seed=1), expert(seed=2, r=4)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base("llama")), math, adapter_name="x")
    model.load_adapter(swahili, "y")
    model.add_weighted_adapter(["x", "y"], [1.0, 1.0], "z", combination_type="cat")
    model.save_pretrained(tmp_path / "cat", selected_adapters=["z"])
    rules = ["x + y with normalize=false"]
    found = attribution(tmp_path / "cat" / "z", base("llama"), rules, x=math, y=swahili)
    factor = f"{12**0.5:.4g}"
    assert found.answers == (f"base + {factor} × x + {factor} × y, and not base + x + y",)
    model.set_adapter("z")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert attribution(tmp_path / "merged", base("llama"), rules, x=math, y=swahili).answers == found.answers
    assert found.within is not None
    assert found.within < 1e-3


def scaled(math: Path, base: Path, out: Path, factor: float, dtype: torch.dtype) -> Path:
    """Full weights with `factor` times the expert, computed in float64."""
    own, merged = load_file(base / "model.safetensors"), merged_weights(base, math)
    weights = {n: (own[n].double() + factor * (merged[n].double() - own[n].double())).to(dtype) for n in own}
    return changed(base, out, lambda written: written.update(weights))


def test_a_slightly_smaller_coefficient_is_one_sentence(tmp_path: Path, base: Any, math: Path) -> None:
    merged = scaled(math, base("llama"), tmp_path / "merged", 0.995, torch.float32)
    assert attribution(merged, base("llama"), x=math).answers == ("base + 0.995 × x, and not base + x",)


def test_how_closely_bfloat16_tells_a_coefficient_is_said(tmp_path: Path, base: Any, math: Path) -> None:
    exact = attribution(scaled(math, base("llama"), tmp_path / "1", 1.0, torch.bfloat16), base("llama"), x=math)
    assert (exact.equal, exact.answers) == (True, ("base + x",))
    assert exact.within is not None
    assert 0.003 < exact.within < 0.005  # one unit in bfloat16's last place, by all tensors together
    assert f"{exact.within:.2g}" in exact.notes[-1]
    for share, equal in ((0.5, True), (2.5, False)):
        factor = 1 - share * exact.within
        other = scaled(math, base("llama"), tmp_path / str(share), factor, torch.bfloat16)
        found = attribution(other, base("llama"), x=math)
        assert found.equal == equal, (factor, found.answers)
        if not equal:
            assert found.answers[0].endswith(", and not base + x")
            assert len(found.answers) == 1


def test_all_tensors_together_tell_a_coefficient_more_closely(tmp_path: Path, base: Any, math: Path) -> None:
    """.992 in bfloat16 fits each tensor as 1 does; their sums do not."""
    merged = scaled(math, base("llama"), tmp_path / "merged", 0.992, torch.bfloat16)
    found = attribution(merged, base("llama"), x=math)
    assert not found.equal
    assert found.answers[0].startswith("base + 0.99")
    assert found.answers[0].endswith(" × x, and not base + x")
    assert all(f.found and f.found["x"] == pytest.approx(0.992, abs=2e-3) for f in found.findings if f.stated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_of_zero_hides_no_coefficient(tmp_path: Path, base: Any, math: Path, dtype: torch.dtype) -> None:
    """Beside an untrained expert, and beside itself, the coefficient is measured as it is alone."""
    zero = shutil.copytree(math, tmp_path / "zero")
    tensors = load_file(zero / "adapter_model.safetensors")
    save_file({n: torch.zeros_like(t) if "lora_B" in n else t for n, t in tensors.items()},
              zero / "adapter_model.safetensors", metadata={"format": "pt"})  # fmt: skip
    merged = scaled(math, base("llama"), tmp_path / "merged", 0.8, dtype)
    rule = "{} + {} with normalize=false"
    found = attribution(merged, base("llama"), [rule.format("x", "y*0.5")], x=math, y=zero)
    assert found.answers == ("base + 0.8 × x + 0.5 × y, and not base + x + 0.5 × y",)
    assert any(note.startswith("y changes nothing in 42 tensors") for note in found.notes)
    assert attribution(merged, base("llama"), [rule.format("x*0.8", "y*0.5")], x=math, y=zero).equal
    assert attribution(merged, base("llama"), [rule.format("x*0.5", "y*0.3")], x=math, y=math).equal
    assert not attribution(merged, base("llama"), [rule.format("x*0.5", "y*0.2")], x=math, y=math).equal


def test_the_command(tmp_path: Path, base: Any, math: Path, run: Callable[..., Result]) -> None:
    merged = peft_merge(base("llama"), math, tmp_path / "merged")
    done = run("verify", merged, "--base-model", base("llama"), "--expert", f"x={math}")
    assert (done.exit_code, done.stdout) == (0, "base + x\n"), done.stderr
    done = run("verify", merged, "--base-model", base("llama"), "--expert", f"x={math}", "--rule", "x*0.5 + base*0.5")
    assert (done.exit_code, done.stdout) == (1, "base + x, and not base + 0.5 × x\n"), done.stderr
    assert done.stderr == f"Error: {merged} is not base + 0.5 × x.\n"
    done = run("verify", merged, "--base-model", base("llama"), "--json")
    output = json.loads(done.stdout)
    assert (done.exit_code, output["equal"], output["stated"]) == (1, False, "base")
    assert output["found"]["model.layers.0.mlp.up_proj.weight"] is None


def test_what_cannot_be_taken_apart_is_refused(tmp_path: Path, base: Any, math: Path, swahili: Path) -> None:
    merged = peft_merge(base("llama"), math, tmp_path / "merged")
    with refused(ExpertError, "path", match="experts"):
        adapterswap.verify(merged)
    with refused(UnsupportedError, "rules"):
        attribution(merged, base("llama"), ["x + y with method=ties, density=0.5"], x=math, y=swahili)
    ours = adapterswap.merge(math, base("llama"), out_path=tmp_path / "ours")
    with refused(ArgumentError, "rules"):
        adapterswap.verify(ours, {"x": math}, base_model=base("llama"), rules=["x"])
