"""Compositions on a loaded PeftModel: results are exact, the model is restored, and unsupported ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits, merged_weights
from core.merging.test_full_experts import algorithm_1
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap import Composition
from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import AdapterswapError, ArgumentError, CompositionError, UnsupportedError
from engines.live.conftest import assert_same_tensors, state_of, tensors_of

Composers = Callable[..., LiveComposer]
Folders = Callable[..., dict[str, Path]]
Bases = Callable[[str], Path]

NAMES = {
    "math+swahili@bottom=2,top=1": {"bottom": 2, "top": 1},
    "math+swahili": {"bottom": 1, "top": 0},  # the paper's 5 and 2 of 32 layers, in proportion for 6
    "math+swahili@bottom=1,top=1,bottom_transition=1,top_transition=2,task_weight=0.3,language_weight=1.7": {
        "bottom": 1,
        "top": 1,
        "bottom_transition": 1,
        "top_transition": 2,
        "task_weight": 0.3,
        "language_weight": 1.7,
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "neox"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_computes_the_swapped_full_weights(
    architecture: str, name: str, composer: Composers, folders: Folders, base: Bases
) -> None:
    experts = folders(architecture)
    full = [merged_weights(base(architecture), experts[expert]) for expert in ("math", "swahili")]
    reference = load_base(base(architecture))
    reference.load_state_dict(algorithm_1(*full, **NAMES[name]))
    composing = composer(architecture)
    with composing.use(name):
        close(logits(composing.model), logits(reference), depth=LAYERS)


@pytest.mark.parametrize("modules", [["embed_tokens", "lm_head", "q_proj"], ["q_proj", "v_proj"]])
def test_embeddings_and_partial_experts(modules: list[str], composer: Composers, folders: Folders, base: Bases) -> None:
    experts = folders(target_modules=modules)
    full = [merged_weights(base("llama"), experts[expert]) for expert in ("math", "swahili")]
    reference = load_base(base("llama"))
    reference.load_state_dict(algorithm_1(*full, bottom=2, top=1))
    composing = composer(target_modules=modules)
    with composing.use("math+swahili@bottom=2,top=1"):
        close(logits(composing.model), logits(reference), depth=LAYERS)


@pytest.mark.parametrize(
    "name",
    [
        "math+swahili@bottom=1,top=1,bottom_transition=2,weights=magnitude",
        "math+swahili@method=slerp",
        "math+swahili@method=task_arithmetic,scale=0.4",
        "math+swahili@method=soup",
        "math+telugu@partition=Z",
    ],
)
def test_a_name_computes_what_the_written_adapter_computes(
    name: str, composer: Composers, folders: Folders, base: Bases, tmp_path: Path
) -> None:
    """Magnitude weights and SLERP need tensors: these come from the model here, since PEFT loaded the experts."""
    plan = adapterswap.compose(adapterswap.parse_composition(name), folders())
    written = PeftModel.from_pretrained(load_base(base("llama")), adapterswap.write_adapter(plan, tmp_path / "out"))
    model = PeftModel.from_pretrained(load_base(base("llama")), folders()["math"], adapter_name="math")
    for expert in ("swahili", "telugu"):
        model.load_adapter(folders()[expert], adapter_name=expert)
    for composing in (LiveComposer(model), composer()):
        with composing.use(name):
            close(logits(composing.model), logits(written), depth=LAYERS)


def test_use_accepts_names_plans_experts_and_the_base(composer: Composers, folders: Folders, base: Bases) -> None:
    composing = composer()
    original = logits(load_base(base("llama")))
    composition = Composition(task="math", language="telugu", bottom=2, top=1)
    plan = adapterswap.compose(composition, folders())
    rules = ({"layers": "0-1,5", "expert": "telugu"}, {"expert": "math"})
    with composing.use("math+telugu@bottom=2,top=1"):
        expected = logits(composing.model)
        assert composing.plan is not None
    for asked in (plan, Composition(allocation=rules), composition):
        with composing.use(asked):
            assert torch.equal(logits(composing.model), expected)
    for asked in ("base", None):
        with composing.use(asked):
            assert torch.equal(logits(composing.model), original)
            assert composing.plan is None
    alone = PeftModel.from_pretrained(load_base(base("llama")), folders()["telugu"])
    with composing.use("telugu"):
        close(logits(composing.model), logits(alone), depth=LAYERS)


def test_everything_is_restored(composer: Composers) -> None:
    composing = composer()
    model = composing.model
    model.set_adapter("swahili")  # trainable, as PEFT leaves it
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.set_adapter(["math", "telugu"])  # one layer differs from the others
    layer.set_scale("math", 0.25)
    before, tensors, output = state_of(model), tensors_of(model), logits(model)
    name = "math+telugu@bottom=2,bottom_transition=1,task_weight=3"
    with composing.use(name), composing.use("swahili+math"), composing.use_rows([name, "base"]):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert state_of(model) == before
    with pytest.raises(ZeroDivisionError), composing.use(name):
        raise ZeroDivisionError
    assert state_of(model) == before
    composing.set("swahili+telugu")
    composing.set(name)
    inner = state_of(model)
    with composing.use("telugu+math"):
        composing.reset()
        assert state_of(model) == before
        composing.set("swahili+telugu")
    assert state_of(model) == inner
    composing.reset()
    composing.reset()
    assert state_of(model) == before
    assert_same_tensors(tensors_of(model), tensors)
    assert torch.equal(logits(model), output)


def test_a_failed_use_changes_nothing(composer: Composers) -> None:
    composing = composer()
    before = state_of(composing.model)
    with refused(CompositionError, "experts"):
        composing.set("math+nobody")
    assert state_of(composing.model) == before
    composing.set("math+swahili@bottom_transition=2")
    inside = state_of(composing.model)
    with refused(CompositionError, "bottom"):
        composing.set("math+swahili@bottom=9")
    assert state_of(composing.model) == inside


def test_loading_an_adapter_keeps_the_composition(composer: Composers, folders: Folders, expert: Any) -> None:
    composing = composer(target_modules=["q_proj", "v_proj"])
    model = composing.model
    other = expert(seed=9, target_modules=["q_proj", "down_proj"])  # down_proj becomes a LoRA layer only now
    before = state_of(model)
    with composing.use("math+swahili@bottom=2,top=1"):
        output = logits(model)
        model.load_adapter(other, adapter_name="other")
        assert torch.equal(logits(model), output)
        model.add_adapter("fresh", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
        assert torch.equal(logits(model), output)
        with pytest.raises(ValueError, match="already exists"):
            model.add_adapter("fresh", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
        assert torch.equal(logits(model), output)
        with composing.use("other+swahili@bottom=1,top=1"):
            assert not torch.equal(logits(model), output)
        assert torch.equal(logits(model), output)
    after = state_of(model)
    assert {name: after[name][0] for name in before if name.startswith("base_model")} == {
        name: before[name][0] for name in before if name.startswith("base_model")
    }
    model.delete_adapter("other")
    with refused(CompositionError, "experts"):
        composing.set("other+swahili")


def test_disabling_adapters_inside_a_composition(composer: Composers, base: Bases) -> None:
    """The base inside, the composition again afterwards, and nothing trainable (PEFT's own exit makes it so)."""
    composing = composer()
    with composing.use("math+swahili@bottom=2,top=1"):
        output = logits(composing.model)
        with composing.model.disable_adapter():
            assert torch.equal(logits(composing.model), logits(load_base(base("llama"))))
        assert torch.equal(logits(composing.model), output)
        assert not any(parameter.requires_grad for parameter in composing.model.parameters())
    with composing.use_rows(["math+swahili", "telugu"]), composing.model.disable_adapter():
        assert torch.equal(logits(composing.model), logits(load_base(base("llama"))))


@pytest.mark.parametrize("method", ["set_adapter", "delete_adapter"])
def test_calls_that_would_disturb_are_refused(method: str, composer: Composers) -> None:
    composing = composer()
    with composing.use("math+swahili"), refused(UnsupportedError, match=method):
        getattr(composing.model, method)("math")
    getattr(composing.model, method)("swahili")


def test_merging_inside_a_composition(composer: Composers, base: Bases) -> None:
    composing = composer()
    before = state_of(composing.model)
    with composing.use("math+swahili@bottom=2,bottom_transition=1"):
        output = logits(composing.model)
        composing.model.merge_adapter()
        close(logits(composing.model), output, depth=LAYERS)
        with refused(UnsupportedError):
            composing.set("telugu")
        with refused(UnsupportedError), composing.use_rows(["telugu", "math"]):
            pass
        close(logits(composing.model), output, depth=LAYERS)
    assert state_of(composing.model) == before
    with composing.use("base"):
        close(logits(composing.model), logits(load_base(base("llama"))), depth=LAYERS)


def test_merge_and_unload_keeps_the_merged_weights(composer: Composers) -> None:
    composing = composer()
    with composing.use("math+swahili@bottom=2,bottom_transition=1"):
        output = logits(composing.model)
        merged = composing.model.merge_and_unload()
        weights = tensors_of(merged)
    assert_same_tensors(tensors_of(merged), weights)
    close(logits(merged), output, depth=LAYERS)
    with refused(ArgumentError, "model"):
        composing.set("math")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_generation_equals_the_written_adapter(
    options: dict[str, Any], composer: Composers, folders: Folders, base: Bases, tmp_path: Path
) -> None:
    plan = adapterswap.layer_swap(folders()["math"], folders()["swahili"], bottom=2, top=1, bottom_transition=1)
    written = PeftModel.from_pretrained(load_base(base("llama")), adapterswap.write_adapter(plan, tmp_path / "out"))
    composing = composer()
    tokens = torch.arange(12).reshape(2, 6)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "pad_token_id": 0}
    outputs = []
    for generate in (
        written.generate,
        lambda **b: composing.generate(compositions="math+swahili@bottom=2,top=1,bottom_transition=1", **b),
    ):
        torch.manual_seed(0)
        outputs.append(generate(**batch, **options))
    assert torch.equal(*outputs)


def test_modules_of_the_adapter_that_was_active_are_switched_off(base: Bases, folders: Folders, expert: Any) -> None:
    """A head that another adapter trained in full is not part of a composition, and is restored afterwards."""
    chat = expert(seed=8, modules_to_save=["lm_head"])
    model = PeftModel.from_pretrained(load_base(base("llama")), chat, adapter_name="chat")
    model.get_base_model().lm_head.modules_to_save["chat"].weight.data.mul_(2)
    for name in ("math", "swahili"):
        model.load_adapter(folders()[name], adapter_name=name)
    plan = adapterswap.compose(adapterswap.parse_composition("math+swahili@bottom=2,top=1"), folders())
    clean = LiveComposer.from_experts(load_base(base("llama")), folders())
    before, output, composing = state_of(model), logits(model), LiveComposer(model)
    with composing.use("math+swahili@bottom=2,top=1"), clean.use(plan):
        assert torch.equal(logits(model), logits(clean.model))
    assert state_of(model) == before
    assert torch.equal(logits(model), output)
    with composing.use("chat"):
        assert torch.equal(logits(model), output)


def test_compositions_that_cannot_run_live_are_refused(composer: Composers, folders: Folders, base: Bases) -> None:
    composing = composer()
    with refused(UnsupportedError, "composition"):
        composing.set("math+swahili@method=ties,density=0.5")
    for name in ("maths+swahili", "maths"):
        with refused(CompositionError, "experts", match=r"\(experts: math, swahili, telugu\). Did you mean 'math'"):
            composing.set(name)
    cases: dict[str, tuple[type[AdapterswapError], str]] = {
        "math+nobody": (CompositionError, "experts"),
        "math+swahili@bottom=5,top=2": (CompositionError, "bottom"),
        "math swahili": (ArgumentError, "name"),
    }
    for name, (kind, parameter) in cases.items():
        with refused(kind, parameter):
            composing.set(name)
    with refused(CompositionError, "num_layers"):
        composing.set(Composition(task="math", language="swahili", num_layers=7))
    plan = adapterswap.layer_swap(folders()["math"], folders()["swahili"], bottom=2, top=1)
    assert isinstance(plan, adapterswap.Plan)
    deeper = replace(plan, num_layers=7)
    with refused(CompositionError, "composition", match="7 layers.* 6"):
        composing.set(deeper)
    with refused(ArgumentError, "model"):
        LiveComposer(load_base(base("llama")))


def test_a_plan_of_other_experts_is_refused(composer: Composers, expert: Any) -> None:
    composing = composer()
    composition = Composition(task="math", language="swahili", bottom=2, top=1)
    for options, message in (
        ({"r": 4}, "has rank 8 in the model, and 4 in the plan"),
        ({"lora_alpha": 3}, "has the scale"),
    ):
        other = {"math": expert(seed=1, **options), "swahili": expert(seed=2, r=4, lora_alpha=8)}
        with refused(CompositionError, "composition", match=f"'math' {message}"):
            composing.set(adapterswap.compose(composition, other))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bias": "all"}, "bias"), ({"init_lora_weights": "pissa"}, "pissa")],
)
def test_variants_of_lora_are_refused_with_their_reason(options: dict[str, Any], message: str, base: Bases) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    composing = LiveComposer(get_peft_model(load_base(base("qwen2")), config, "odd"))
    with refused(UnsupportedError, match=f"The adapter 'odd'.*{message}"):
        composing.set("odd")


@pytest.mark.parametrize("name", ["math+swahili@method=soup,weights=magnitude", "math+swahili@method=slerp"])
def test_experts_that_are_trained_between_compositions(composer: Composers, name: str) -> None:
    """Coefficients that depend on the experts' tensors are those of the tensors at that time."""
    composing = composer()
    composing.set(name)
    for key, parameter in composing.model.named_parameters():
        if "lora_B.math" in key:  # an optimizer's step
            with torch.no_grad():
                parameter.mul_(3).add_(0.01)
    composing.reset()
    with composing.use(name):
        found = logits(composing.model)
    composing._catalogue._look()  # forgets all
    with composing.use(name):
        assert torch.equal(found, logits(composing.model))


def test_remembered_compositions_are_bounded(composer: Composers) -> None:
    from adapterswap.engines.live import catalogue

    composing = composer()
    for step in range(catalogue._REMEMBERED + 20):
        composing.set(f"math+swahili@bottom_transition=1,task_weight={1 + step / 100}")
    assert len(composing._catalogue._switches) == catalogue._REMEMBERED
