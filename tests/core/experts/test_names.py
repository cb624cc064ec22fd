"""Names of modules: wrappers, old and new names, towers, and what an adapter's own config leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft.tuners.tuners_utils
import pytest
import torch
from conftest import load_base, logits
from peft import LoraConfig, PeftModel
from pico_models import trained
from refusals import refused
from safetensors.torch import load_file, save_file

import adapterswap
from adapterswap.core.experts.config import read_targets
from adapterswap.core.model.layers import ModelConfig, ModuleName, layer_container
from adapterswap.kit.errors import BaseModelError, CompositionError, ExpertError, NotFoundError
from core.matrix.architectures import ARCHITECTURES, LAYERS, build

ZONES = {"bottom": 2, "top": 1, "bottom_transition": 1}
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def rewritten(
    source: Path,
    out: Path,
    rename: Callable[[str], str] = lambda key: key,
    *,
    keep: Callable[[str], bool] = lambda key: True,
    **changes: Any,
) -> Path:
    """A copy of an adapter with other keys, fewer tensors, or another config."""
    out.mkdir(parents=True)
    tensors = {rename(key): tensor for key, tensor in load_file(source / WEIGHTS).items() if keep(key)}
    save_file(tensors, out / WEIGHTS)
    (out / CONFIG).write_text(json.dumps(json.loads((source / CONFIG).read_text()) | changes))
    return out


def test_data_parallelism_around_the_adapter(math: Path, swahili: Path, tmp_path: Path) -> None:
    """The one wrapper outside PEFT's prefix; those inside it are in `test_naming`."""
    wrapped = rewritten(swahili, tmp_path / "wrapped", lambda key: f"module.{key}")
    expected, written = (
        adapterswap.layer_swap(math, language, **ZONES).write(tmp_path / f"out-{language.name}")
        for language in (swahili, wrapped)
    )
    for name in (WEIGHTS, CONFIG):
        assert (written / name).read_bytes() == (expected / name).read_bytes()


def test_one_key_under_two_names_is_refused(math: Path, tmp_path: Path) -> None:
    folder = rewritten(math, tmp_path / "twice")
    tensors = load_file(folder / WEIGHTS)
    key = next(iter(tensors))
    save_file({**tensors, f"module.{key}": tensors[key].clone()}, folder / WEIGHTS)
    with refused(ExpertError, match="stored twice"):
        adapterswap.open_adapter(folder)


OTHER_NAMES: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    "multimodal": ({}, lambda key: key.replace("model.layers.", "model.language_model.layers.")),
    "multimodal, transformers 4": ({}, lambda key: key.replace("model.layers.", "language_model.model.layers.")),
    "without the head's model": ({}, lambda key: key.replace("model.layers.", "layers.")),
    "an embedding": (
        {"target_modules": ["embed_tokens", "q_proj"]},
        lambda key: key.replace("model.embed_tokens", "model.language_model.embed_tokens"),
    ),
    "a head": ({"target_modules": ["lm_head", "q_proj"]}, lambda key: key.replace("lm_head", "language_model.lm_head")),
}


@pytest.mark.parametrize("case", OTHER_NAMES)
def test_two_names_of_one_module_are_refused_without_the_base(
    case: str, expert: Callable[..., Path], tmp_path: Path
) -> None:
    """Otherwise the result would hold half of each expert, and PEFT would load only one of the two names."""
    options, rename = OTHER_NAMES[case]
    keep = lambda key: ".base_layer." not in key  # noqa: E731
    source = expert(seed=1, **options)
    one, other = (
        rewritten(source, tmp_path / name, renaming, keep=keep, base_model_name_or_path="/nowhere")
        for name, renaming in (("one", lambda key: key), ("other", rename))
    )
    for pair in ((one, other), (other, one)):
        with refused(ExpertError, "base_model"):
            adapterswap.soup(*pair, num_layers=6)


TARGETS: dict[str, dict[str, Any]] = {
    "layers": {"layers_to_transform": [1, 4]},
    "one layer": {"layers_to_transform": 3},
    "layers of a list": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "layers of another list": {"layers_to_transform": [0], "layers_pattern": ["h", "blocks"]},
    "names": {"target_modules": ["q_proj", "up_proj"]},
    "full names ignore layers": {
        "target_modules": ["model.layers.5.mlp.up_proj", "v_proj"],
        "layers_to_transform": [0],
    },
    "a regex": {"target_modules": r".*\.[0-3]\..*(q|v)_proj"},
    "excluded names": {"exclude_modules": ["k_proj", "model.layers.2.mlp.down_proj"]},
    "an exclusion by regex": {"exclude_modules": r".*\.mlp\..*"},
    "modules to save": {"modules_to_save": ["mlp"]},
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_match_peft(case: str, math: Path) -> None:
    config = json.loads((math / CONFIG).read_text()) | TARGETS[case]
    names = sorted(adapterswap.open_adapter(math).modules)
    by_peft = LoraConfig(**{key: config.get(key) for key in ("target_modules", *TARGETS[case])})
    check = peft.tuners.tuners_utils.check_target_module_exists
    expected = {name for name in names if check(by_peft, name)}
    targets = read_targets(config, "adapter_config.json", adapterswap.kit.errors.Problems())
    assert targets.loaded(names) == expected


@pytest.mark.parametrize("case", ["layers", "names", "a regex", "excluded names"])
def test_excluded_modules_are_not_composed(
    case: str, base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path
) -> None:
    narrowed = rewritten(math, tmp_path / "narrowed", **TARGETS[case])
    expert = adapterswap.open_adapter(narrowed)
    assert expert.ignored
    assert not set(expert.ignored) & set(expert.modules)
    plan = adapterswap.compose(adapterswap.Composition.model_validate({"allocation": [{"expert": "x"}]}), {"x": expert})
    alone = adapterswap.write_adapter(plan, tmp_path / "alone")
    loaded = [PeftModel.from_pretrained(load_base(base("llama")), folder) for folder in (alone, narrowed)]
    assert torch.equal(*map(logits, loaded))
    card = (adapterswap.write_adapter(adapterswap.soup(expert, swahili), tmp_path / "out") / "README.md").read_text()
    assert f"{len(expert.ignored)} modules in its file are left out" in card


def test_a_config_that_targets_nothing_in_the_file_is_refused(math: Path, tmp_path: Path) -> None:
    with refused(ExpertError, match="targets no module"):
        adapterswap.open_adapter(rewritten(math, tmp_path / "none", target_modules=["c_attn"]))


@pytest.mark.parametrize(("pattern", "reason"), [("(", "not a valid regex"), ("(?:.|..)+[xyz]", "takes too long")])
def test_hostile_patterns_are_refused(
    pattern: str, reason: str, math: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapterswap.core.experts.config._SECONDS", 0.2)
    with refused(ExpertError, match=reason):
        adapterswap.open_adapter(rewritten(math, tmp_path / "hostile", target_modules=pattern))


@pytest.fixture(scope="module")
def llava_expert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    base = tmp_path_factory.mktemp("llava")
    build(ARCHITECTURES["llava"]).save_pretrained(base)

    def make(seed: int, targets: str) -> Path:
        config = LoraConfig(r=4, use_rslora=True, target_modules=targets)
        model = ARCHITECTURES["llava"].model_class.from_pretrained(base)
        return trained(model, config, tmp_path_factory.mktemp("expert"), seed=seed)

    return make


def test_blocks_of_a_vision_tower_are_not_layers(llava_expert: Callable[..., Path]) -> None:
    """One expert has LoRA only in the tower, the other only in the language model. The matrix composes such a pair."""
    seeing = llava_expert(1, r".*vision_tower.*\.(q|v)_proj")
    reading = llava_expert(2, r".*language_model.*\.(q|v)_proj")
    assert adapterswap.open_adapter(seeing).container is None
    for task, language in ((seeing, reading), (reading, seeing)):
        plan = adapterswap.layer_swap(task, language, num_layers=LAYERS, **ZONES)
        for name, module in plan.modules.items():
            assert (module.layer is None) == ("vision_tower" in name)
    with refused(CompositionError):
        adapterswap.layer_swap(seeing, llava_expert(3, r".*vision_tower.*\.(q|v)_proj"), bottom=2, top=1)


@pytest.mark.parametrize(
    ("names", "container"),
    [
        (["vision_tower.encoder.layers.0.q"], None),
        (["visual.blocks.1.attn.qkv", "model.layers.0.q"], "model.layers"),
        (["thinker.model.visual.blocks.0.x", "thinker.model.language_model.layers.0.x"],
         "thinker.model.language_model.layers"),
        (["model.vision_model.encoder.layers.0.x", "model.text_model.layers.0.x"], "model.text_model.layers"),
        (["mtp.layers.0.x", "model.layers.0.x"], "model.layers"),
        (["model.audio_tower.layers.0.x"], None),
        (["model.layers.0.x", "model.gated_cross_attn_layers.0.x"], "model.layers"),
        (["visual_bert.encoder.layer.0.x"], "visual_bert.encoder.layer"),  # a model's own name is no tower's
        (["vit.encoder.layer.0.x"], "vit.encoder.layer"),
        (["model.vit.layers.0.x", "model.layers.0.x"], "model.layers"),
        (["speecht5.encoder.wrapped_encoder.layers.0.x", "speecht5.decoder.wrapped_decoder.layers.0.x"],
         "speecht5.*.wrapped_*.layers"),
        (["albert.encoder.albert_layer_groups.0.albert_layers.0.x"], None),
    ],
)  # fmt: skip
def test_the_language_models_list_of_layers(names: list[str], container: str | None) -> None:
    assert layer_container(names) == container
    assert layer_container(reversed(names)) == container


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("backbone.layers.0.mixer.q_proj", "attention"),
        ("backbone.layers.0.mixer.o_proj", "attention"),
        ("backbone.layers.1.mixer.up_proj", "mlp"),
        ("backbone.layers.1.mixer.experts.3.down_proj", "mlp"),
        ("backbone.layers.1.mixer.shared_experts.up_proj", "mlp"),
        ("backbone.layers.2.mixer.in_proj", "other"),
        ("backbone.layers.2.mixer.out_proj", "other"),
        ("model.layers.0.temporal_block.k_proj", "attention"),
        ("model.layers.0.temporal_block.linear_x", "other"),
        ("model.layers.0.mlp_block.gate_proj", "mlp"),
    ],
)
def test_blocks_of_several_kinds_are_distinguished_by_their_projections(name: str, kind: str) -> None:
    assert ModuleName(name).kind == kind


@pytest.mark.parametrize(
    ("config", "depth"),
    [
        ({"layers_block_type": ["mamba", "attention", "mlp"]}, 3),
        ({"hybrid_override_pattern": "M-M*-"}, 5),
        ({"text_config": {"layer_types": ["full_attention"] * 4}}, 4),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, 2),
        ({"layers_block_type": []}, None),
    ],
)
def test_the_depth_of_hybrid_models(config: dict[str, Any], depth: int | None) -> None:
    assert ModelConfig(config).num_layers == depth


def test_names_of_transformers_4_need_the_base(llava_expert: Callable[..., Path], tmp_path: Path) -> None:
    old = [
        rewritten(
            llava_expert(seed, r".*language_model.*\.(q|v)_proj"), tmp_path / f"{seed}",
            lambda key: key.replace("model.language_model.", "language_model.model."),
            base_model_name_or_path="/nowhere", target_modules=["q_proj", "v_proj"],
        )
        for seed in (1, 2)
    ]  # fmt: skip
    plan = adapterswap.layer_swap(*old, num_layers=LAYERS, **ZONES)
    with refused(NotFoundError, "base_model", match="/nowhere"):
        adapterswap.write_adapter(plan, tmp_path / "lost")


def test_names_need_the_config_of_the_base(math: Path, swahili: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    plan = adapterswap.soup(math, swahili, base_model=tmp_path / "base", num_layers=6)
    with refused(BaseModelError, "base_model"):
        plan.write(tmp_path / "out", names="transformers5")


@pytest.mark.parametrize(
    "name", ["a|b", "*bold*", "[x](javascript:y)", "<b>x</b>", "__x__", "`x`", "a\\b", "~~x~~", "&amp;", "snake_case"]
)
def test_names_in_a_model_card_are_escaped(name: str, math: Path, swahili: Path, tmp_path: Path) -> None:
    """Rendered as CommonMark with tables, the heading and the table show the names unchanged."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    experts = {name: adapterswap.open_adapter(math), "swahili": adapterswap.open_adapter(swahili)}
    composition = adapterswap.Composition.model_validate({"allocation": [{"blend": {name: 1, "swahili": 1}}]})
    out = adapterswap.write_adapter(adapterswap.compose(composition, experts), tmp_path / "out")
    tokens = markdown.parse((out / "README.md").read_text().split("---", 2)[2])
    texts = ("text", "text_special", "softbreak")
    inline = [token.children for token in tokens if token.type == "inline"]
    shown = ["".join(c.content for c in line) for line in inline if all(child.type in texts for child in line)]
    assert f"{name} + swahili" in shown
    assert name in shown
