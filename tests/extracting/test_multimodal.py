"""A text-only fine-tune of a multimodal base, and the reverse: the adapter has the base's names, and PEFT loads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close, near

from adapterswap.errors import AdapterswapError, BaseModelError
from adapterswap.model.loading import quiet_peft
from adapterswap.tools.extraction import extract
from adapterswap.tools.verification import verify

from .conftest import changed, deltas

LAYERS = 2
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
SEEING = transformers.Gemma3ForConditionalGeneration
READING = transformers.Gemma3ForCausalLM
INSIDE, OUTSIDE = "model.language_model.", "model."  # the prefix of the language model in the two classes


def seeing(seed: int = 0) -> Any:
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, image_token_index=95, boi_token_index=94, eoi_token_index=93,
        mm_tokens_per_image=4,
    )  # fmt: skip
    torch.manual_seed(seed)
    return SEEING(config)


def reading(model: Any) -> Any:
    """The language model of a multimodal model, with copies of its weights, in the text-only class."""
    text = READING(model.config.text_config)
    own = model.state_dict()
    text.load_state_dict({name: own[inside(name)] for name in text.state_dict()})
    return text


def inside(name: str) -> str:
    """The multimodal name of a text-only model's parameter."""
    return name if name.startswith("lm_head") else INSIDE + name.removeprefix(OUTSIDE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`seeing` and `reading` are a base in both classes, `seeing-full` and `reading-full` a fine-tune of it.

    `as-in-memory` is `seeing` with the names of today's transformers in its file; `save_pretrained` writes older ones.
    """
    folder = tmp_path_factory.mktemp("multimodal")
    base = seeing()
    base.save_pretrained(folder / "seeing")
    reading(base).save_pretrained(folder / "reading")
    full = changed(seeing(), 1)
    full.save_pretrained(folder / "seeing-full")
    reading(full).save_pretrained(folder / "reading-full")
    shutil.copytree(folder / "seeing", folder / "as-in-memory")
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "as-in-memory" / "model.safetensors", metadata={"format": "pt"})
    stored = [next(iter(load_file(folder / name / "model.safetensors"))) for name in ("seeing", "as-in-memory")]
    assert stored[0].split(".")[0] != stored[1].split(".")[0]
    return folder


def loaded(model_class: Any, folder: Path) -> Any:
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 27).reshape(2, 12) * 7 % 90, use_cache=False).logits


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize(
    ("full", "base", "model_class"),
    [
        ("reading-full", "seeing", SEEING),
        ("reading-full", "as-in-memory", SEEING),
        ("seeing-full", "reading", READING),
    ],
)
def test_peft_restores_the_language_models_weights(
    full: str, base: str, model_class: Any, embeddings: bool, folders: Path, tmp_path: Path
) -> None:
    """At full rank: equals the base with the fine-tune's matrices, in all weights and in the logits of a text."""
    result = extract(folders / full, folders / base, tmp_path / "out", rank=48, embeddings=embeddings)
    names = {module.name for module in result.modules}
    assert len(names) == LAYERS * 7 + embeddings
    reference = loaded(model_class, folders / base)
    tuned = loaded(READING, folders / "reading-full").state_dict()
    own = {name if model_class is READING else inside(name): tensor for name, tensor in tuned.items()}
    assert names < {name.rpartition(".")[0] for name in own}
    untouched = answers(reference)
    for name in names:
        reference.get_submodule(name).weight.data.copy_(own[f"{name}.weight"])
    with quiet_peft():
        adapted = PeftModel.from_pretrained(loaded(model_class, folders / base), tmp_path / "out").eval()
    close(answers(adapted), answers(reference), depth=4 * LAYERS)
    assert float((answers(reference) - untouched).abs().max()) > 0.01
    if not embeddings:  # PEFT merges a tied embedding's LoRA twice
        merged = adapted.merge_and_unload().state_dict()
        for name, tensor in reference.state_dict().items():
            close(merged[name], tensor, depth=2, name=name)
    assert verify(tmp_path / "out", {"full": folders / full}, base_model=str(folders / base)).equal


def test_either_class_gives_the_same_factors(folders: Path, tmp_path: Path) -> None:
    """The factors do not depend on the class of the fine-tune; the names follow the base."""
    found = {}
    for full in ("reading-full", "seeing-full"):
        for base in ("reading", "seeing"):
            extract(folders / full, folders / base, tmp_path / f"{full}-{base}", rank=4)
            found[full, base] = deltas(tmp_path / f"{full}-{base}")
    for base in ("reading", "seeing"):
        one, other = found["reading-full", base], found["seeing-full", base]
        language = {name for name in other if "vision" not in name}
        assert one.keys() == language
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert {inside(name) for name in found["reading-full", "reading"]} == found["reading-full", "seeing"].keys()


def test_a_mixtures_experts_are_matched_one_by_one(tmp_path: Path) -> None:
    """Files hold each expert, memory holds all in one parameter; the base's text class is the text-only one."""
    text = {
        **TEXT, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    torch.manual_seed(0)
    base = transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(text_config=text, vision_config={**vision, "out_hidden_size": 32})
    )
    base.save_pretrained(tmp_path / "seeing")
    language = transformers.Qwen3_5MoeForCausalLM(base.config.text_config)
    own = base.state_dict()
    language.load_state_dict({name: own[inside(name)] for name in language.state_dict()})
    language.save_pretrained(tmp_path / "reading")
    changed(language, 1).save_pretrained(tmp_path / "full")
    assert any(".experts.3." in name for name in load_file(tmp_path / "full" / "model.safetensors"))
    found = [
        extract(tmp_path / "full", tmp_path / name, tmp_path / f"{name}-out", rank=4) for name in ("seeing", "reading")
    ]
    changes = [deltas(tmp_path / f"{name}-out") for name in ("seeing", "reading")]
    assert changes[0].keys() == {inside(name) for name in changes[1]}
    assert all(torch.equal(changes[0][inside(name)], delta) for name, delta in changes[1].items())
    assert [result.lost_by_reason["experts and routers"][0] for result in found] == [26, 26]
    classes = {
        "seeing": transformers.Qwen3_5MoeForConditionalGeneration, "reading": transformers.Qwen3_5MoeForCausalLM
    }  # fmt: skip
    with quiet_peft():
        adapted = [
            PeftModel.from_pretrained(loaded(model_class, tmp_path / name), tmp_path / f"{name}-out")
            for name, model_class in classes.items()
        ]
    assert torch.equal(answers(adapted[0].eval()), answers(adapted[1].eval()))


def test_a_tower_that_the_base_lacks_is_reported(folders: Path, tmp_path: Path) -> None:
    """Each of its tensors counts in full; a tower that only the base has counts as unchanged."""
    result = extract(folders / "seeing-full", folders / "reading", tmp_path / "out", rank=4)
    tower = {each.name: each.norm for each in result.lost if each.reason == "not in the base"}
    own = loaded(SEEING, folders / "seeing-full").state_dict()
    assert tower.keys() == {name for name in own if "vision" in name or "multi_modal" in name}
    for name, norm in tower.items():
        assert norm == near(float(own[name].double().norm()))
    assert verify(tmp_path / "out", {"full": folders / "seeing-full"}, base_model=str(folders / "reading")).equal
    other = extract(folders / "reading-full", folders / "seeing", tmp_path / "other", rank=4)
    assert not [each for each in other.lost if "language_model" not in each.name]


Q = "self_attn.q_proj.weight"


def edited(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(
        tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", metadata={"format": "pt"}
    )


def misfits() -> Iterator[tuple[str, str, torch.Tensor | None, str, str]]:
    """What is wrong, the tensor of the text-only fine-tune, its new value, and the two names in the refusal."""
    q, multimodal = f"model.layers.0.{Q}", f"model.language_model.layers.0.{Q}"
    yield "missing", q, None, multimodal, q
    yield "another shape", q, torch.ones(16, 32), q, multimodal
    extra = "model.layers.1.extra.weight"
    yield "unknown", extra, torch.ones(2, 2), extra, "model.language_model.layers.1.extra.weight"
    norm = "model.norm.weight"
    yield "a missing norm", norm, None, "model.language_model.norm.weight", norm


@pytest.mark.parametrize(("what", "name", "tensor", "first", "second"), list(misfits()))
def test_names_without_a_certain_counterpart_are_refused(
    what: str, name: str, tensor: torch.Tensor | None, first: str, second: str, folders: Path, tmp_path: Path
) -> None:
    """Both names are in the message."""
    shutil.copytree(folders / "reading-full", tmp_path / "full")
    edited(tmp_path / "full", name, tensor)
    with pytest.raises(AdapterswapError) as raised:
        extract(tmp_path / "full", folders / "seeing", tmp_path / "out", rank=2)
    assert first in str(raised.value), what
    assert second in str(raised.value), what
    assert not (tmp_path / "out").exists()


def test_a_multimodal_fine_tune_without_a_layers_weight_is_refused(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "seeing-full", tmp_path / "full")
    edited(tmp_path / "full", f"language_model.model.layers.1.{Q}", None)
    with refused(BaseModelError, "base_model", match=rf"{OUTSIDE}layers\.1\.{Q}.*{INSIDE}layers\.1\.{Q}"):
        extract(tmp_path / "full", folders / "reading", tmp_path / "out", rank=2)


def test_a_deeper_fine_tune_is_refused(folders: Path, tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(**{**TEXT, "num_hidden_layers": LAYERS + 1})
    READING(text).save_pretrained(tmp_path / "full")
    with refused(BaseModelError, "base_model", match=rf"{OUTSIDE}layers\.2\..* {INSIDE}layers\.2\."):
        extract(tmp_path / "full", folders / "seeing", tmp_path / "out", rank=2)


def test_another_language_model_is_refused(folders: Path, tmp_path: Path) -> None:
    """The same names and shapes, but another model type."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(tmp_path / "full")
    with refused(BaseModelError, "base_model", match=r"llama.* gemma3"):
        extract(tmp_path / "full", folders / "seeing", tmp_path / "out", rank=2)


def test_two_multimodal_models_of_different_types_are_refused(folders: Path, tmp_path: Path) -> None:
    """Even if they share the type of their language model."""
    shutil.copytree(folders / "seeing-full", tmp_path / "full")
    path = tmp_path / "full" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma3n"}))
    with refused(BaseModelError, "base_model", match=r"gemma3n .*gemma3 "):
        extract(tmp_path / "full", folders / "seeing", tmp_path / "out", rank=2)
