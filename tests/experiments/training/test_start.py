"""Training that starts from an adapter or a composition, against PEFT and plain torch."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS
from peft import OFTConfig, PeftModel
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import near
from transformers import AutoModelForCausalLM, AutoTokenizer

import adapterswap
import adapterswap.engines.live
from adapterswap.core.experts.adapter import open_adapter
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    FieldError,
    NotFoundError,
    RunError,
    UnsupportedError,
)

from .conftest import echo_rows, make_expert, two_sides
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]
STILL = {"max_steps": 1, "warmup": 1}  # the rate of the first step is zero
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def logits(base: Path, adapter: Path) -> torch.Tensor:
    """What PEFT computes with an adapter on a base."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(4, 20)[None]).logits
    return result


def described(folder: Path, name: str = "training.json") -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


SHAPES = {
    "rslora": {},
    "lora": {"use_rslora": False, "lora_alpha": 12},
    "patterns": {"rank_pattern": {r"layers\.[13]\..*q_proj": 7}, "alpha_pattern": {"v_proj": 3.5}},
    "some layers": {"target_modules": ["down_proj"], "layers_to_transform": [0, 3]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "a copy of the base's embedding": {"target_modules": ["embed_tokens"], "copies": True},
    "full names": {"target_modules": ["model.layers.2.mlp.up_proj", "model.layers.0.self_attn.k_proj"]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_before_the_first_step_it_is_the_start(tmp_path: Path, make_recipe: MakeRecipe, pico: Any, shape: str) -> None:
    base = pico("llama")
    start = make_expert(base, tmp_path / "start", **SHAPES[shape])
    recipe = make_recipe(start=str(start), training=STILL)
    theirs = {name: tensor for name, tensor in load_file(start / WEIGHTS).items() if "lora" in name}
    assert estimate(recipe).trainable_parameters == sum(tensor.numel() for tensor in theirs.values())
    report = train(recipe, out_path=tmp_path / "trained")
    ours = load_file(report.path / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits(base, report.path), logits(base, start))
    opened, before = open_adapter(report.path), open_adapter(start)
    assert {n: (m.rank, m.alpha, m.scale) for n, m in opened.modules.items()} == {
        n: (m.rank, m.alpha, m.scale) for n, m in before.modules.items()
    }


@pytest.mark.parametrize("on_top", [False, True])
def test_it_is_trained_with_the_starts_template_and_tokenizer(
    tmp_path: Path, make_recipe: MakeRecipe, pico: Any, on_top: bool
) -> None:
    """The rows are those that transformers renders with the start's folder, which is also what is saved."""
    start = make_expert(pico(), tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(pico())
    tokenizer.chat_template = (
        "{% for m in messages %}w90 {{ m.content }} {{ eos_token }} {% endfor %}"
        "{% if add_generation_prompt %}w90 {% endif %}"
    )
    tokenizer.eos_token = "w91"
    tokenizer.save_pretrained(start)
    rows = [{"m": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": f"w{i}"}]} for i in range(8)]
    place: Any = {"adapter": str(start), "mode": "chain"} if on_top else str(start)
    recipe = make_recipe(
        start=place, rows=rows, datasets=[{"path": str(tmp_path / "rows.jsonl"), "messages": "m"}],
        training={"max_steps": 1},
    )  # fmt: skip
    report = train(recipe, out_path=tmp_path / "out", progress=False)
    written = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (written.chat_template, written.eos_token) == (tokenizer.chat_template, "w91")
    expected = [written.apply_chat_template(row["m"], return_dict=False) for row in rows]
    assert report.rows.tokens == sum(map(len, expected))
    assert report.rows.without_end == 0
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["companions"] == {"tokenizer": "start", "chat_template": "start"}


def test_it_learns_from_there(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    learned = train(make_recipe(training={"epochs": 6}), out_path=tmp_path / "learned")
    rows = echo_rows(16, seed=5)
    further = train(make_recipe(rows=rows, start=str(learned.path), training={"max_steps": 2}), out_path=tmp_path / "b")
    anew = train(make_recipe(rows=rows, training={"max_steps": 2}), out_path=tmp_path / "c")
    assert further.train_losses[0][1] < 0.5 * anew.train_losses[0][1]
    changed = load_file(further.path / WEIGHTS), load_file(learned.path / WEIGHTS)
    assert not any(torch.equal(changed[0][name], changed[1][name]) for name in changed[0])


def test_a_composition_is_a_start(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    """With a transition, so that ranks differ between layers; and the record says what lies below."""
    base = pico("llama")
    experts = {"math": str(make_expert(base, tmp_path / "math")), "xx": str(make_expert(base, tmp_path / "xx", seed=1))}
    swap = {"experts": experts, "task": "math", "language": "xx", "bottom": 1, "top": 1, "bottom_transition": 1}
    composed = adapterswap.compose(adapterswap.Composition(num_layers=LAYERS, **swap), None).write(
        tmp_path / "composed"
    )
    report = train(make_recipe(start=swap, training=STILL), out_path=tmp_path / "trained")
    ours, theirs = load_file(report.path / WEIGHTS), load_file(composed / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len({module.rank for module in open_adapter(report.path).modules.values()}) == 2
    assert torch.equal(logits(base, report.path), logits(base, composed))

    record = described(report.path)
    assert record["recipe"]["start"]["experts"] == {"math": "math", "xx": "xx"}
    hashes = {name: hashlib.sha256((composed / name).read_bytes()).hexdigest() for name in (WEIGHTS, CONFIG)}
    assert record["start"]["sha256"] == hashes
    assert record["start"]["origin"]["experts"]["math"]["sha256"].keys() == {CONFIG, WEIGHTS}
    assert "was composed from math (math), xx (xx)" in (report.path / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in "".join(path.read_text(errors="ignore") for path in report.path.iterdir())

    assert adapterswap.verify(report.path, experts).equal
    assert dict(adapterswap.verify(report.path, {**experts, "xx": experts["math"]}).changed_sources) == {"xx": WEIGHTS}

    recipe = tmp_path / "swap.yaml"
    recipe.write_text(json.dumps(swap | {"num_layers": LAYERS}), encoding="utf-8")
    from_file = train(make_recipe(start=str(recipe), training=STILL), out_path=tmp_path / "from-file")
    assert load_file(from_file.path / WEIGHTS).keys() == ours.keys()
    assert described(from_file.path)["start"] == record["start"]


def test_the_chain_is_recorded_shown_and_verified(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    base = pico("llama")
    math, other = make_expert(base, tmp_path / "math"), make_expert(base, tmp_path / "xx", seed=1)
    recipe = make_recipe(start=str(math), training={"max_steps": 2})
    first = train(recipe, out_path=tmp_path / "first").path
    second = train(make_recipe(start=str(first), training={"max_steps": 2}), out_path=tmp_path / "second").path

    inspection = adapterswap.inspect(second)
    assert inspection.as_json()["trained_from"] == "first, which was trained from math"
    assert adapterswap.inspect(math).trained_from is None
    swap = adapterswap.layer_swap(second, other, num_layers=LAYERS, base_model=base).write(tmp_path / "swap")
    assert adapterswap.inspect(swap).record.origins == ["second was trained from first, which was trained from math"]
    assert adapterswap.verify(swap, {"second": second, "xx": other}, base_model=base).equal

    assert adapterswap.verify(second).unchecked == ("start",)
    verified = adapterswap.verify(second, {"start": first})
    assert (verified.equal, verified.unchecked, verified.made) == (True, (), "trained")
    assert dict(adapterswap.verify(second, {"start": math}).changed_sources) == {"start": CONFIG}
    with refused(ArgumentError, "experts"):
        adapterswap.verify(second, {"math": math})
    shutil.copyfile(first / WEIGHTS, second / WEIGHTS)
    assert adapterswap.verify(second, {"start": first}).differing == (WEIGHTS,)


def test_the_recipe_says_what_is_trained(
    tmp_path: Path, make_recipe: MakeRecipe, pico: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that the start lacks start at zero, with the recipe's scale; those that are not named are kept."""
    base = pico("llama")
    start = make_expert(base, tmp_path / "start", use_rslora=False, r=3, lora_alpha=6)
    adapter = {"r": 4, "alpha": 10, "target_modules": ["v_proj", "up_proj"], "layers": "0-2"}
    recipe = make_recipe(start=str(start), adapter=adapter, training={"max_steps": 3})
    expected = estimate(recipe)
    assert expected.start == "start: 12 modules of rank 3, 3 more start at zero, 9 of them are not trained"
    assert expected.trained_modules == 6
    first: dict[str, torch.Tensor] = {}
    with spied(monkeypatch, lambda step, before, after, tokens: first.update(before[0] if step == 0 else {})):
        report = train(recipe, out_path=tmp_path / "trained")
    assert report.trainable_parameters == expected.trainable_parameters
    zeros = {name for name, tensor in first.items() if "lora_B" in name and not tensor.any()}
    assert {name.partition("base_model.model.")[2].partition(".lora")[0] for name in zeros} == {
        f"model.layers.{layer}.mlp.up_proj" for layer in range(3)
    }
    ours, theirs = load_file(report.path / WEIGHTS), load_file(start / WEIGHTS)
    for name in theirs:
        trained = "v_proj" in name and any(f"layers.{layer}." in name for layer in range(3))
        assert torch.equal(ours[name], theirs[name]) != trained
    modules = open_adapter(report.path).modules
    assert {module.rank for name, module in modules.items() if "up_proj" in name} == {4}
    assert [module.scale for name, module in modules.items() if "up_proj" in name] == [near(10 / 4**0.5)] * 3
    assert {module.scale for name, module in modules.items() if "up_proj" not in name} == {2.0}


def test_both_sides_of_a_partition_start_from_it(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    start = make_expert(pico("llama"), tmp_path / "start", target_modules=["q_proj", "up_proj"])
    options = {"datasets": two_sides(tmp_path), "simultaneous": {"partition": "A"}, "training": {"max_steps": 4}}
    report = train(make_recipe(start=str(start), **options), out_path=tmp_path / "trained")
    ours, theirs = load_file(report.path / WEIGHTS), load_file(start / WEIGHTS)
    assert not any(torch.equal(ours[name], theirs[name]) for name in theirs)
    on_top = train(make_recipe(start=chain(start), **options), out_path=tmp_path / "on-top")
    merged = merged_by_peft(pico("llama"), start, tmp_path / "merged")
    expected = train(make_recipe(base_model=str(merged), **options), out_path=tmp_path / "expected")
    assert (on_top.path / WEIGHTS).read_bytes() == (expected.path / WEIGHTS).read_bytes()


@pytest.mark.parametrize("on_top", [False, True])
def test_an_interrupted_run_resumes(
    tmp_path: Path, make_recipe: MakeRecipe, pico: Any, monkeypatch: pytest.MonkeyPatch, on_top: bool
) -> None:
    start = make_expert(pico("llama"), tmp_path / "start")
    recipe = make_recipe(
        start=chain(start) if on_top else str(start), training={"max_steps": 4, "save_every_samples": 16}
    )
    unbroken = train(recipe, out_path=tmp_path / "unbroken")

    def seen(step: int, *_: Any) -> None:
        if step == 3:
            raise KeyError("crash")

    def broken(out: Path) -> None:
        with spied(monkeypatch, seen), pytest.raises(KeyError, match="crash"):
            train(recipe, out_path=out)

    broken(tmp_path / "broken")
    resumed = train(recipe, out_path=tmp_path / "broken", resume=True)
    assert resumed.resumed_from == 2
    assert {p.name: p.read_bytes() for p in resumed.path.iterdir()} == {
        p.name: p.read_bytes() for p in unbroken.path.iterdir()
    }

    broken(tmp_path / "again")
    make_expert(pico("llama"), start, seed=3)
    with refused(RunError, "resume", match="start_files"):
        train(recipe, out_path=tmp_path / "again", resume=True)


REFUSED: dict[str, tuple[dict[str, Any], type[AdapterswapError], str]] = {
    "DoRA": ({"use_dora": True}, UnsupportedError, "start"),
    "OFT": ({"kind": OFTConfig, "oft_block_size": 4}, UnsupportedError, "start"),
    "a module in full": ({"modules_to_save": ["lm_head"]}, UnsupportedError, "start"),
    "the head": ({"target_modules": ["lm_head"]}, UnsupportedError, "start"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_lora_cannot_start_from_is_refused(tmp_path: Path, make_recipe: MakeRecipe, pico: Any, kind: str) -> None:
    changes, error, parameter = REFUSED[kind]
    start = make_expert(pico("llama"), tmp_path / "start", **changes)
    for action in (estimate, train):
        with refused(error, parameter):
            action(make_recipe(start=str(start), out_path=str(tmp_path / "trained")))


def test_another_base_is_refused(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    start = make_expert(pico("llama"), tmp_path / "start")
    recipe = make_recipe(start=str(start))
    config = described(start, CONFIG)
    for changes, error in (
        ({"base_model_name_or_path": "org/other"}, ExpertError),
        ({"base_model_name_or_path": None}, None),
    ):
        (start / CONFIG).write_text(json.dumps(config | changes), encoding="utf-8")
        if error is None:
            assert estimate(recipe).start
        else:
            with refused(error, "start", match="org/other"):
                estimate(recipe)
    # Known by its weights, whatever its name: those of another seed, and the same under another name.
    trained = train(make_recipe(training=STILL), out_path=tmp_path / "trained").path
    other = Path(shutil.copytree(pico("llama"), tmp_path / "other"))
    assert estimate(make_recipe(start=str(trained), base_model=str(other))).start
    tensors = load_file(other / "model.safetensors")
    save_file({n: t + 1 for n, t in tensors.items()}, other / "model.safetensors", metadata={"format": "pt"})
    with refused(BaseModelError, "start"):
        estimate(make_recipe(start=str(trained), base_model=str(other)))


def test_a_wrong_start_is_refused(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    with refused(NotFoundError, "start"):
        estimate(make_recipe(start=str(tmp_path / "missing")))
    with refused(FieldError, "start.botom"):
        make_recipe(start={"task": "math", "botom": 1})
    with refused(FieldError, None, match="base_model"):
        make_recipe(start="x", adapter={"method": "none"})
    start = make_expert(pico("llama"), tmp_path / "start", layers_to_transform=[0])
    with refused(FieldError, "adapter.layers"):
        estimate(make_recipe(start=str(start), adapter={"layers": "2-3"}))
    sliced = adapterswap.slice_layers(make_expert(pico("llama"), tmp_path / "whole"), "0-1", num_layers=LAYERS)
    with refused(UnsupportedError, "start"):
        estimate(make_recipe(start=str(sliced.write(tmp_path / "slice"))))


def chain(adapter: Path) -> dict[str, str]:
    return {"adapter": str(adapter), "mode": "chain"}


def merged_by_peft(base: Path, adapter: Path, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    shutil.copytree(base, folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", ["rslora", "patterns", "embedding", "a copy of the base's embedding"])
def test_on_top_of_an_adapter_it_trains_as_on_the_merged_base(
    tmp_path: Path, make_recipe: MakeRecipe, pico: Any, shape: str
) -> None:
    base = pico("llama")
    below = make_expert(base, tmp_path / "sft", **SHAPES[shape])
    merged = merged_by_peft(base, below, tmp_path / "merged")
    options = {"training": {"max_steps": 3}}
    ours = train(make_recipe(start=chain(below), **options), out_path=tmp_path / "ours")
    theirs = train(make_recipe(base_model=str(merged), **options), out_path=tmp_path / "theirs")
    assert ours.train_losses == theirs.train_losses
    assert (ours.path / WEIGHTS).read_bytes() == (theirs.path / WEIGHTS).read_bytes()
    if shape == "a copy of the base's embedding":
        return  # such a copy is not composed
    both = {"experts": {"sft": str(below), "dpo": str(ours.path)}, "chains": {"math": ["sft", "dpo"]}}
    plan = adapterswap.compose(adapterswap.Composition(**both, rules=[{"expert": "math"}], num_layers=LAYERS), None)
    assert not plan.notes  # the record says that one lies on the other
    composed = plan.write(tmp_path / "composed")
    assert near(logits(base, composed)) == logits(merged, theirs.path)


def test_on_top_of_a_tied_embedding_is_refused(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    """Merged in memory, it would change the head as well; `merge` stores them apart."""
    base = pico("gpt2")
    start = make_expert(base, tmp_path / "start", target_modules=["wte", "c_attn"], fan_in_fan_out=True)
    for action in (estimate, train):
        with refused(UnsupportedError, "start", match="transformer.wte, whose weight lm_head uses too.*merge"):
            action(make_recipe(start=chain(start), base_model=str(base), out_path=str(tmp_path / "trained")))
    merged = adapterswap.merge(start, base, out_path=tmp_path / "merged")
    assert estimate(make_recipe(base_model=str(merged))).trained_modules
    plain = make_expert(base, tmp_path / "plain", target_modules=["c_attn"], fan_in_fan_out=True)
    assert estimate(make_recipe(start=chain(plain), base_model=str(base))).start == "on top of plain"


def test_what_lies_on_an_adapter_is_not_used_alone(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    base = pico("llama")
    below, other = make_expert(base, tmp_path / "sft"), make_expert(base, tmp_path / "xx", seed=1)
    dpo = train(make_recipe(start=chain(below), training={"max_steps": 2}), out_path=tmp_path / "dpo").path
    assert estimate(make_recipe(start=chain(below))).start == "on top of sft"
    assert adapterswap.inspect(dpo).as_json()["trained_from"] == "on top of sft"
    assert "on top of sft" in (dpo / "README.md").read_text(encoding="utf-8")
    assert described(dpo)["recipe"]["start"] == {"adapter": "sft", "mode": "chain"}
    assert described(dpo)["start"]["sha256"].keys() == {WEIGHTS, CONFIG}
    assert adapterswap.verify(dpo, {"start": below}).equal
    assert dict(adapterswap.verify(dpo, {"start": other}).changed_sources) == {"start": WEIGHTS}

    merged = adapterswap.merge(below, base, out_path=tmp_path / "merged")
    for declared in (None, base):
        for experts in ((dpo, other), (dpo, below)):
            with refused(ExpertError, "chains"):
                adapterswap.layer_swap(*experts, num_layers=LAYERS, base_model=declared)
        with refused(ExpertError, "chains"):
            part = adapterswap.slice_layers(dpo, "0-1", num_layers=LAYERS).write(tmp_path / f"part-{declared is None}")
            adapterswap.layer_swap(part, other, num_layers=LAYERS, base_model=declared)
    with refused(ExpertError, "chains"):
        adapterswap.merge(dpo, base, out_path=tmp_path / "wrong")
    with refused(ExpertError, "chains"):
        adapterswap.engines.live.load_expert(AutoModelForCausalLM.from_pretrained(base), dpo, "dpo")
    for start in (str(dpo), chain(dpo)):
        with refused(ExpertError, "start"):
            estimate(make_recipe(start=start))
    whole = adapterswap.merge(dpo, merged, out_path=tmp_path / "whole")  # the base that it was trained on
    both = {"experts": {"a": str(below), "b": str(dpo), "c": str(other)}, "num_layers": LAYERS}
    right = adapterswap.Composition(**both | {"chains": {"m": ["a", "b"]}, "rules": [{"expert": "m"}]})
    adapterswap.merge(adapterswap.compose(right, None), base, out_path=tmp_path / "at-once")
    one, two = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "at-once"))
    assert all(near(one[name]) == two[name] for name in one)
    for wrong in (["c", "b"], ["b", "a"]):
        with refused(ExpertError, "chains"):
            adapterswap.compose(
                adapterswap.Composition(**both | {"chains": {"m": wrong}, "rules": [{"expert": "m"}]}), None
            )
