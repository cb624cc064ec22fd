"""Plans: the checks before anything is written, and how a plan describes itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from pico_models import copied
from refusals import refused
from safetensors.torch import load_file, save_file

import adapterswap
from adapterswap import Composition
from adapterswap.core.planning.depth import find_num_layers
from adapterswap.core.planning.describe import Picture
from adapterswap.core.planning.facts import BaseFacts
from adapterswap.kit.errors import (
    BaseModelError,
    CompositionError,
    ExpertError,
    NotFoundError,
)


def allocation(*rules: dict[str, Any], **options: Any) -> Composition:
    return Composition.model_validate({"allocation": list(rules), **options})


def test_a_general_allocation(math: Path, swahili: Path, expert: Callable[..., Path]) -> None:
    """Three experts, the base, module kinds and names; the first rule that matches wins."""
    experts = {"math": math, "swahili": swahili, "code": expert(seed=3)}
    plan = adapterswap.compose(
        allocation(
            {"layers": "0-1", "modules": ["attention"], "expert": "swahili"},
            {"layers": [5], "modules": ["mlp.down_proj", "q_proj"], "blend": {"math": 1, "code": 3}},
            {"layers": 5, "expert": "base"},
            {"expert": "math"},
        ),
        experts,
    )
    owners = {name.removeprefix("model.layers."): module.owner for name, module in plan.modules.items()}
    assert owners["0.self_attn.q_proj"] == owners["1.self_attn.o_proj"] == "swahili"
    assert owners["0.mlp.up_proj"] == owners["4.self_attn.q_proj"] == "math"
    assert owners["5.mlp.up_proj"] == owners["5.self_attn.k_proj"] == "base"
    for name in ("model.layers.5.mlp.down_proj", "model.layers.5.self_attn.q_proj"):
        assert {t.expert: t.coefficient for t in plan.modules[name].terms} == {"math": 0.25, "code": 0.75}
    assert plan.strip.splitlines() == [
        "           012345",
        "attention  ssmmm*",
        "mlp        mmmmm*",
        "           s swahili, m math, * differs by module",
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"layers": "0-9", "expert": "math"}, {"expert": "swahili"}], "names layers 6-9, but the base has 6"),
        ([{"modules": "lm_head", "expert": "math"}, {"expert": "swahili"}], "matches no module"),
        ([{"layers": "none", "expert": "math"}, {"expert": "swahili"}], "matches no module"),
        ([{"expert": "math"}, {"layers": 3, "expert": "swahili"}], "Earlier rules match all of its modules"),
        (
            [{"layers": "0-4", "expert": "math"}, {"layers": 5, "modules": ["mlp"], "expert": "swahili"}],
            "No rule covers",
        ),
    ],
)
def test_invalid_rules_are_refused(rules: list[dict[str, Any]], message: str, math: Path, swahili: Path) -> None:
    with refused(CompositionError, "allocation", match=message):
        adapterswap.compose(allocation(*rules), {"math": math, "swahili": swahili})


def test_rules_name_existing_experts(math: Path) -> None:
    with refused(CompositionError, "experts", match="Did you mean 'math'"):
        adapterswap.compose(allocation({"expert": "maths"}), {"math": math})
    with refused(CompositionError, match="Every rule gives its modules to the base"):
        adapterswap.compose(allocation({"expert": "base"}), {"math": math})


def test_all_mistakes_are_reported_together(math: Path, swahili: Path) -> None:
    composition = allocation({"modules": "w1", "expert": "swahili"}, {"layers": "0-2", "expert": "math"})
    with refused(CompositionError, "allocation") as caught:
        adapterswap.compose(composition, {"math": math, "swahili": swahili})
    message = str(caught.value)
    assert "modules w1" in message
    assert "No rule covers" in message
    assert "'swahili' contributes no module" in message
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj in layers 0-5" in message


def test_rules_that_cover_nothing(expert: Callable[..., Path]) -> None:
    """The rows of the embedding have no rule either."""
    adapter = expert(seed=3, target_modules=["q_proj", "embed_tokens"])
    with refused(CompositionError, "allocation", match="adapt embed_tokens, q_proj in layers 0-5"):
        adapterswap.compose(allocation({"modules": "w1", "expert": "math"}), {"math": adapter})


def test_a_rule_beyond_the_layers_is_one_mistake(math: Path, swahili: Path) -> None:
    """It would also leave nothing for the rules after it and nothing for its expert."""
    composition = allocation({"layers": "0-9", "expert": "swahili"}, {"expert": "math"})
    with refused(CompositionError, "allocation", match=r"names layers 6-9, .* has 6 layers \(0-5\)") as caught:
        adapterswap.compose(composition, {"math": math, "swahili": swahili})
    assert len(caught.value.problems) == 1


def test_experts_of_two_bases_are_refused(math: Path, swahili: Path, tmp_path: Path) -> None:
    other = copied(swahili, tmp_path / "other", base_model_name_or_path="org/other-base")
    with refused(ExpertError, match=r"but other adapts org/other-base.*`base_model`"):
        adapterswap.layer_swap(math, other, bottom=1, top=1, num_layers=6)
    declared = adapterswap.layer_swap(math, other, bottom=1, top=1, num_layers=6, base_model="org/other-base")
    assert declared.base.name == "org/other-base"


def test_experts_for_other_tasks_are_refused(math: Path, swahili: Path, tmp_path: Path) -> None:
    with refused(ExpertError, "task_type", match="task_type"):
        adapterswap.layer_swap(math, copied(swahili, tmp_path / "x", task_type="SEQ_CLS"), bottom=1, top=1)


def test_lora_on_a_tied_embedding_is_tied_in_all_experts_or_in_none(
    math: Path, swahili: Path, expert: Callable[..., Path], tmp_path: Path
) -> None:
    """For experts that do not adapt the embedding, the setting is ignored."""
    ends = copied(expert(seed=3, target_modules=["q_proj", "embed_tokens"]), tmp_path / "x", ensure_weight_tying=True)
    with refused(ExpertError, match="ensure_weight_tying"):
        adapterswap.layer_swap(math, ends, bottom=1, top=1)
    adapterswap.layer_swap(math, copied(swahili, tmp_path / "y", ensure_weight_tying=True), bottom=1, top=1)


def test_experts_of_another_shape_are_refused(math: Path, expert: Callable[..., Path], tmp_path: Path) -> None:
    """NeoX and GPT-2 have other module names; Qwen2 shares Llama's names, so its shapes decide."""
    other = copied(math, tmp_path / "wide")
    tensors = load_file(other / "adapter_model.safetensors")
    key = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    tensors[key] = tensors[key].repeat(2, 1)
    save_file(tensors, other / "adapter_model.safetensors")
    with refused(ExpertError, match=r"layers\.2\.mlp\.up_proj is 48×32 in .*, but 96×32 in"):
        adapterswap.soup(math, other)
    with refused(ExpertError, "base_model"):
        adapterswap.soup(math, expert("gpt2", seed=1), base_model="declared", num_layers=6)


def test_the_number_of_layers_is_never_guessed(math: Path, swahili: Path, tmp_path: Path) -> None:
    unknown = [
        copied(folder, tmp_path / folder.name, base_model_name_or_path="/nowhere/base") for folder in (math, swahili)
    ]
    told = r"that \S+'s adapter_config.json names: The path /nowhere/base does not exist\. Pass `base_model`"
    with refused(NotFoundError, "base_model", match=told):
        adapterswap.layer_swap(*unknown, bottom=1, top=1)
    told = r"the base that `base_model` names: The path /lost does not exist\. Correct it, or pass `num_layers`"
    with refused(NotFoundError, "base_model", match=told):
        adapterswap.layer_swap(*unknown, bottom=1, top=1, base_model="/lost")
    assert adapterswap.layer_swap(*unknown, bottom=1, top=1, num_layers=6).num_layers == 6
    with refused(ExpertError, match="adapts layer 5, but the base has 4 layers"):
        adapterswap.layer_swap(*unknown, bottom=1, top=1, num_layers=4)


def test_the_number_of_layers_comes_from_the_base(math: Path, base: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = {"math": adapterswap.open_adapter(math)}
    assert find_num_layers(BaseFacts.of(adapter, None))[0] == 6
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 11}, "num_layers": 3}))
    assert find_num_layers(BaseFacts.of(adapter, str(tmp_path)))[0] == 11
    (tmp_path / "config.json").write_text(json.dumps({"is_encoder_decoder": True, "num_layers": 3}))
    assert find_num_layers(BaseFacts.of(adapter, str(tmp_path)))[0] == {"encoder": 3, "decoder": 3}
    for config in ({"is_encoder_decoder": True, "d_model": 3}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert find_num_layers(BaseFacts.of(adapter, str(tmp_path)))[0] is None
        with refused(BaseModelError, "num_layers"):
            adapterswap.slice_layers(adapter["math"], "0-1", base_model=tmp_path)


def test_an_expert_without_modules_in_the_result_is_refused(math: Path, expert: Callable[..., Path]) -> None:
    outer_only = expert(seed=4, layers_to_transform=[0, 5])
    with refused(CompositionError, "allocation"):
        adapterswap.compose(
            allocation({"layers": "1-4", "expert": "shell"}, {"expert": "math"}), {"math": math, "shell": outer_only}
        )


@pytest.mark.parametrize("zone", ["bottom", "top", "bottom_transition", "top_transition"])
def test_a_zone_that_is_none_has_its_default(math: Path, swahili: Path, zone: str) -> None:
    expected = adapterswap.layer_swap(math, swahili).rules
    assert adapterswap.layer_swap(math, swahili, **{zone: None}).rules == expected


def test_zones_of_zero_layers_are_allowed(math: Path, swahili: Path) -> None:
    plan = adapterswap.layer_swap(math, swahili, bottom=0, top=0)
    assert {module.owner for module in plan} == {plan.composition.task[0]}


def test_a_module_that_its_owner_lacks_is_shown(math: Path, expert: Callable[..., Path]) -> None:
    attention_only = expert(seed=3, target_modules=["q_proj", "v_proj"])
    plan = adapterswap.layer_swap(math, attention_only, bottom=2, top=0, bottom_transition=1)
    result = plan.remarks
    name = plan.composition.language[0]
    assert f"mlp.up_proj in layers 0-1: {name}, but {name} does not adapt it: it stays as in the base" in result
    assert any(line.startswith("mlp.up_proj in layers 2:") and "counts as zero" in line for line in result)
    assert plan.modules["model.layers.0.mlp.up_proj"].owner == "base"
    assert plan.modules["model.layers.2.mlp.up_proj"].terms[0].coefficient == 0.5


def test_layers_without_an_adapter_are_shown(expert: Callable[..., Path]) -> None:
    folders = [expert(seed=seed, layers_to_transform=[0, 1, 5]) for seed in (1, 2)]
    plan = adapterswap.layer_swap(*folders, bottom=1, top=1)
    assert plan.remarks == ["layers 2-4: no expert adapts them, so they stay as in the base"]


def test_names_of_experts_follow_their_folders(math: Path, swahili: Path) -> None:
    plan = adapterswap.layer_swap(math, swahili, bottom=1, top=1)
    assert list(plan.experts) == [math.name, swahili.name]
    twice = adapterswap.soup(math, math)
    assert list(twice.experts) == [math.name, "language"]


@pytest.mark.parametrize(
    ("one", "other", "declared"),
    [
        (
            "unsloth/Llama-3.1-8B-Instruct-bnb-4bit",
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Llama-3.1-8B-Instruct",
        ),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/qwen2.5-7b-unsloth-bnb-4bit", "unsloth/Qwen2.5-7B", "unsloth/Qwen2.5-7B"),
        ("/data/models/Qwen2.5-7B", "Qwen/Qwen2.5-7B", None),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", ""),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B", ""),
    ],
)
def test_two_names_of_one_base(one: str, other: str, declared: str | None, math: Path, tmp_path: Path) -> None:
    """The error suggests a base: it must be declared, or the experts are refused."""
    for number, pair in enumerate(((one, other), (other, one))):
        experts = [
            copied(math, tmp_path / f"{number}-{index}", base_model_name_or_path=name)
            for index, name in enumerate(pair)
        ]
        with refused(ExpertError) as caught:
            adapterswap.soup(*experts, num_layers=6)
        assert ("as their names suggest" in str(caught.value)) == (declared != "")
        if declared:
            assert f"`base_model={declared}`" in str(caught.value)
            plan = adapterswap.soup(*experts, num_layers=6, base_model=declared)
            assert plan.base.name == declared


def test_a_wrong_task_type(math: Path, run: Callable[..., Result], tmp_path: Path) -> None:
    wrong = copied(math, tmp_path / "wrong", task_type="SEQ_2_SEQ_LM")
    none = copied(math, tmp_path / "none", task_type=None)
    assert adapterswap.soup(math, none).task_type == adapterswap.soup(none, math).task_type == "CAUSAL_LM"
    with refused(ExpertError, "task_type"):
        adapterswap.soup(math, wrong)
    experts = ("compose", "-t", math, "-l", wrong, "--method", "soup", "-o", tmp_path / "out")
    assert "--task-type" in run(*experts).stderr
    run(*experts, "--task-type", "CAUSAL_LM", exit_code=0)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    assert (
        run("verify", tmp_path / "out", "--expert", f"{math.name}={math}", "--expert", f"wrong={wrong}").exit_code == 0
    )


def test_layers_that_a_slice_lacks_are_reset(expert: Callable[..., Path], tmp_path: Path) -> None:
    """The result is the slice."""
    core = adapterswap.write_adapter(adapterswap.slice_layers(expert(seed=1), "2-4"), tmp_path / "core")
    plan = adapterswap.layer_swap(core, "base", bottom=2, top=1)
    out = adapterswap.write_adapter(plan, tmp_path / "out")
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (out, core))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_that_replaced_those_of_a_slice(expert: Callable[..., Path], tmp_path: Path) -> None:
    """PEFT, which saves an expert over a slice, leaves its record; `merge` and `convert` dropped the other layers."""
    core = adapterswap.write_adapter(adapterswap.slice_layers(expert(seed=1), "2-4"), tmp_path / "core")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(expert(seed=2) / name, core)
    with refused(ExpertError):
        adapterswap.merge(core, out_path=tmp_path / "merged")
    with refused(ExpertError, "adapter"):
        adapterswap.convert(core, tmp_path / "converted")
    (core / "adapterswap.json").unlink()
    assert adapterswap.open_adapter(core).modules.keys() == adapterswap.open_adapter(expert(seed=2)).modules.keys()


def test_the_ruler_of_a_deep_model() -> None:
    """Each ten stands over its layer, also where it has two digits."""
    picture = Picture({"layers": "m" * 126}, 126, {"m": "math"}, ("m",), ())
    tens, digits, row, _ = picture.text.splitlines()
    start = row.index("m")
    for ten in range(13):
        place = start + 10 * ten
        assert tens[place:].startswith(str(ten))
        assert tens[place - 1].isspace()
        assert digits[place] == "0"
