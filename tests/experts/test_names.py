"""Names of modules: wrappers, old and new names, towers, and what an adapter's own config leaves out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft.tuners.tuners_utils
import pytest
import torch
import transformers
from conftest import load_base, logits
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap import LiveComposer
from adapterswap.errors import CompositionError, ExpertError, NotFoundError, UnsupportedError
from adapterswap.experts.config import read_targets
from adapterswap.model.layers import kind_of, layer_container, num_layers_in_config

ZONES = {"bottom": 2, "top": 1, "bottom_transition": 1}
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."


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


WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda key: key.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "torch.compile, a layer": lambda key: key.replace(".self_attn.", "._orig_mod.self_attn."),
    "DDP around the adapter": lambda key: f"module.{key}",
    "DDP around the base": lambda key: key.replace(PREFIX, f"{PREFIX}module."),
    "FSDP": lambda key: key.replace("layers.3.", "layers.3._fsdp_wrapped_module."),
    "checkpointing": lambda key: key.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "a raw state dict": lambda key: key.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrapped_names_compose_like_bare_ones(
    wrapper: str, base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path
) -> None:
    wrapped = rewritten(swahili, tmp_path / "wrapped", WRAPPED[wrapper])
    expected = adapterswap.write_adapter(adapterswap.layer_swap(math, swahili, **ZONES), tmp_path / "expected")
    written = adapterswap.write_adapter(adapterswap.layer_swap(math, wrapped, **ZONES), tmp_path / "written")
    assert (written / WEIGHTS).read_bytes() == (expected / WEIGHTS).read_bytes()
    assert json.loads((written / CONFIG).read_text()) == json.loads((expected / CONFIG).read_text())
    live = LiveComposer.from_experts(load_base(base("llama")), {"math": math, "swahili": wrapped})
    with live.use("math+swahili@bottom=2,top=1,bottom_transition=1"):
        close(logits(live.model), logits(PeftModel.from_pretrained(load_base(base("llama")), expected)), depth=6)


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
@pytest.mark.parametrize("method", ["layer_swap", "soup"])
def test_two_names_of_one_module_are_one_module(
    case: str, method: str, expert: Callable[..., Path], tmp_path: Path
) -> None:
    """The base decides the names; the result equals, byte for byte, that of experts with those names."""
    options, rename = OTHER_NAMES[case]
    keep = lambda key: ".base_layer." not in key  # noqa: E731
    one, two = (rewritten(expert(seed=seed, **options), tmp_path / f"{seed}", keep=keep) for seed in (1, 2))
    other = rewritten(two, tmp_path / "other", rename)
    for index, (pair, plain) in enumerate((((one, other), (one, two)), ((other, one), (two, one)))):
        plans = [getattr(adapterswap, method)(*experts) for experts in (pair, plain)]
        written, expected = (
            adapterswap.write_adapter(plan, tmp_path / f"{index}-{name}")
            for plan, name in zip(plans, ("out", "expected"), strict=True)
        )
        assert (written / WEIGHTS).read_bytes() == (expected / WEIGHTS).read_bytes()
        assert (written / CONFIG).read_text() == (expected / CONFIG).read_text()
        assert adapterswap.verify(written, dict(zip(plans[0].experts, pair, strict=True))).equal


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
        with refused(ExpertError, "base_model", match="may be the same module"):
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
    targets = read_targets(config, "adapter_config.json", adapterswap.errors.Problems())
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
    monkeypatch.setattr("adapterswap.experts.config._SECONDS", 0.2)
    with refused(ExpertError, match=reason):
        adapterswap.open_adapter(rewritten(math, tmp_path / "hostile", target_modules=pattern))


CLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=95,
    )
    folder = tmp_path_factory.mktemp("llava")
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def load_llava(folder: Path) -> torch.nn.Module:
    return transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def llava_expert(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(seed: int, targets: str) -> Path:
        model = get_peft_model(load_llava(llava), LoraConfig(r=4, use_rslora=True, target_modules=targets))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        folder = tmp_path_factory.mktemp("expert")
        model.save_pretrained(folder)
        return folder

    return make


def deltas(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return {
        name.removeprefix(PREFIX): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def test_blocks_of_a_vision_tower_are_not_layers(
    llava: Path, llava_expert: Callable[..., Path], tmp_path: Path
) -> None:
    """One expert has LoRA only in the tower, the other only in the language model; either way the tower is averaged."""
    seeing = llava_expert(1, r".*vision_tower.*\.(q|v)_proj")
    reading = llava_expert(2, r".*language_model.*\.(q|v)_proj")
    assert adapterswap.open_adapter(seeing).container is None
    for task, language in ((seeing, reading), (reading, seeing)):
        plan = adapterswap.layer_swap(task, language, num_layers=6, **ZONES)
        for name, module in plan.modules.items():
            assert (module.layer is None) == ("vision_tower" in name)
        out = adapterswap.write_adapter(plan, tmp_path / task.name)
        result = deltas(PeftModel.from_pretrained(load_llava(llava), out))
        own = deltas(PeftModel.from_pretrained(load_llava(llava), seeing))
        for name, delta in own.items():
            close(result[name], delta / 2, name=name)
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
    assert kind_of(name) == kind


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
    assert num_layers_in_config(config) == depth


def as_transformers_4(key: str) -> str:
    return key.replace("model.language_model.", "language_model.model.").replace("model.vision_tower.", "vision_tower.")


def test_names_of_transformers_4_are_written_as_the_base_has_them_now(
    llava: Path, llava_expert: Callable[..., Path], tmp_path: Path
) -> None:
    new = [llava_expert(seed, r".*language_model.*\.(q|v)_proj") for seed in (1, 2)]
    old = [
        rewritten(folder, tmp_path / folder.name, as_transformers_4, target_modules=["q_proj", "v_proj"])
        for folder in new
    ]
    expected = adapterswap.write_adapter(adapterswap.layer_swap(*new, **ZONES), tmp_path / "expected")
    written = adapterswap.write_adapter(adapterswap.layer_swap(*old, **ZONES), tmp_path / "written")
    assert (written / WEIGHTS).read_bytes() == (expected / WEIGHTS).read_bytes()
    assert json.loads((written / CONFIG).read_text()) == json.loads((expected / CONFIG).read_text())
    recorded = json.loads((written / "adapterswap.json").read_text())["modules"]
    assert recorded.keys() == adapterswap.open_adapter(written).modules.keys()
    nowhere = [
        rewritten(folder, tmp_path / f"{folder.name}-moved", base_model_name_or_path="/nowhere") for folder in old
    ]
    plan = adapterswap.layer_swap(*nowhere, num_layers=6, **ZONES)
    with refused(NotFoundError, "base_model", match="/nowhere"):
        adapterswap.write_adapter(plan, tmp_path / "lost")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **TEXT, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    )
    folder = tmp_path_factory.mktemp("moe")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def moe_expert(base: Path, folder: Path, *, seed: int, rank: int, names: tuple[str, ...], **config: Any) -> Path:
    """An adapter with LoRA on every expert of every layer, as PEFT saved it with transformers 4."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}
    tensors = {}
    for layer in range(6):
        for name in names:
            for number in range(3) if name in shapes else [None]:
                at = f"mlp.experts.{number}.{name}" if name in shapes else f"self_attn.{name}"
                out, into = shapes.get(name, (32, 32))
                key = f"{PREFIX}model.layers.{layer}.{at}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * 0.2
                tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.2
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank}
    (folder / CONFIG).write_text(json.dumps(content | {"target_modules": sorted(names)} | config))
    return folder


EXPERTS = ("gate_proj", "up_proj", "down_proj", "q_proj")


def fused(base: Path, experts: Mapping[str, tuple[Path, float]], weights: Mapping[int, Mapping[str, float]]) -> Any:
    """The base with Σ c·s·B·A added to each expert's part of the fused parameters, each product in float64."""
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(base).eval()
    for name, (folder, scale) in experts.items():
        tensors = load_file(folder / WEIGHTS)
        for key, a in tensors.items():
            if "lora_A" not in key:
                continue
            module = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            layer = int(module.split(".")[2])
            delta = scale * tensors[key.replace("lora_A", "lora_B")].double() @ a.double()
            delta *= weights[layer].get(name, 0)
            if ".experts." not in module:
                model.get_submodule(module).weight.data += delta
                continue
            number, projection = module.split(".")[-2:]
            parameters = model.model.layers[layer].mlp.experts
            if projection == "down_proj":
                parameters.down_proj.data[int(number)] += delta
            else:
                half = slice(0, 24) if projection == "gate_proj" else slice(24, 48)
                parameters.gate_up_proj.data[int(number)][half] += delta
    return model


@pytest.mark.parametrize("layout", ["exact", "portable"])
@pytest.mark.parametrize("case", ["ranks", "alphas", "rslora", "reset"])
def test_fused_experts_get_the_change_of_each_expert(case: str, layout: Any, moe: Path, tmp_path: Path) -> None:
    """PEFT gives fused experts one rank and one alpha; the result must also be right with different ones."""
    options = {"ranks": ((2, 3), (4, 6), False), "alphas": ((2, 2), (4, 10), False), "rslora": ((2, 3), (4, 5), True)}
    ranks, alphas, rslora = options.get(case, ((2, 2), (4, 4), False))
    scales = [alpha / (rank**0.5 if rslora else rank) for rank, alpha in zip(ranks, alphas, strict=True)]
    folders = [
        moe_expert(moe, tmp_path / name, seed=seed, rank=rank, names=EXPERTS, lora_alpha=alpha, use_rslora=rslora)
        for seed, (name, rank, alpha) in enumerate(zip(("math", "swahili"), ranks, alphas, strict=True))
    ]
    language: Any = "base" if case == "reset" else folders[1]
    zones = {"bottom": 2, "top": 1} if case == "reset" else ZONES
    out = adapterswap.write_adapter(
        adapterswap.layer_swap(folders[0], language, **zones), tmp_path / "out", layout=layout
    )
    middle = {layer: {"math": 1.0} for layer in range(6)}
    outer = {} if case == "reset" else {"swahili": 1.0}
    weights = middle | dict.fromkeys((0, 1, 5), outer) | ({} if case == "reset" else {2: {"math": 0.5, "swahili": 0.5}})
    reference = fused(moe, dict(zip(("math", "swahili"), zip(folders, scales, strict=True), strict=True)), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
        # PEFT adds this pattern itself, then looks for it among modules and not among parameters.
        warnings.filterwarnings("ignore", r".*did not match any targeted module.*gate_up_proj", RuntimeWarning)
        model = PeftModel.from_pretrained(transformers.Qwen3MoeForCausalLM.from_pretrained(moe).eval(), out)
    close(logits(model), logits(reference), depth=6)


@pytest.mark.parametrize("case", ["a shared expert", "half of a pair"])
def test_what_peft_cannot_fuse_is_refused(case: str, moe: Path, tmp_path: Path) -> None:
    names = ("gate_proj", "down_proj") if case == "half of a pair" else EXPERTS
    rename: Callable[[str], str] = lambda key: key  # noqa: E731
    if case == "a shared expert":
        rename = lambda key: key.replace("experts.0.gate_proj", "shared_expert.gate_proj")  # noqa: E731
    folders = [
        rewritten(moe_expert(moe, tmp_path / f"{seed}", seed=seed, rank=2, names=names), tmp_path / f"{seed}x", rename)
        for seed in (0, 1)
    ]
    plan = adapterswap.layer_swap(*folders, **ZONES)
    with refused(UnsupportedError, match="PEFT on transformers 5"):
        adapterswap.write_adapter(plan, tmp_path / "out")


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
