"""Embeddings and heads as PEFT saves them beside a LoRA (`save_embedding_layers`): what opens, that remedies work."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap.errors import UnsupportedError

FULL_NAMES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(6)] + ["model.embed_tokens"]

Save = Callable[..., Path]


@pytest.fixture
def save(base: Callable[[str], Path], tmp_path: Path) -> Save:
    """`save(False, target_modules=…)`: a random LoRA that PEFT saves; trained embeddings and heads where asked for."""

    def make(save_embedding_layers: bool | str, *, trained: bool = False, **options: Any) -> Path:
        model = get_peft_model(load_base(base("llama")), LoraConfig(r=2, task_type="CAUSAL_LM", **options))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            whole = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            if "lora_" in name or "modules_to_save" in name or (trained and whole):
                parameter.data += torch.randn_like(parameter) * 0.05
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")  # PEFT tells of what it does
            model.save_pretrained(tmp_path / "adapter", save_embedding_layers=save_embedding_layers)
        return tmp_path / "adapter"

    return make


def answers(base: Path, adapter: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(load_base(base), adapter))


@pytest.mark.parametrize(
    ("targets", "how", "copies"),
    [
        (["q_proj"], "auto", []),
        (["q_proj", "embed_tokens"], "auto", ["model.embed_tokens"]),
        (["q_proj", "lm_head"], "auto", ["lm_head"]),
        (r".*(q_proj|embed_tokens)$", "auto", ["model.embed_tokens"]),
        (FULL_NAMES, "auto", []),
        (["q_proj", "embed_tokens", "lm_head"], False, []),
    ],
    ids=str,
)
def test_what_peft_saves_by_itself_opens(targets: Any, how: Any, copies: list[str], save: Save) -> None:
    opened = adapterswap.open_adapter(save(how, target_modules=targets))
    assert [module.name for module in opened.modules.values() if module.base is not None] == copies
    assert not opened.saved


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_modules": ["q_proj"]}, r"lm_head.weight, model.embed_tokens.weight are whole weights"),
        ({"target_modules": FULL_NAMES}, r"lm_head.weight is a whole weight"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            r"lm_head.original_module.weight is a copy that PEFT saved(.|\n)*embed_tokens.weight is a whole weight",
        ),
    ],
    ids=["layers", "full names", "modules_to_save"],
)
def test_copies_that_can_be_left_out_are_refused_and_saving_again_mends_it(
    options: dict[str, Any], told: str, save: Save, base: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save(True, **options)
    with refused(UnsupportedError, match=told) as caught:
        adapterswap.open_adapter(folder)
    assert "save_pretrained(PATH, save_embedding_layers=False)" in str(caught.value)
    loaded = PeftModel.from_pretrained(load_base(base("llama")), folder)
    loaded.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    opened = adapterswap.open_adapter(tmp_path / "again")
    assert list(opened.saved) == options.get("modules_to_save", [])
    assert torch.equal(answers(base("llama"), tmp_path / "again"), answers(base("llama"), folder))


@pytest.mark.parametrize(
    ("targets", "modules"), [(["q_proj"], ["lm_head", "embed_tokens"]), (FULL_NAMES, ["lm_head"])], ids=str
)
def test_trained_weights_are_never_dropped_and_naming_them_mends_it(
    targets: list[str], modules: list[str], save: Save, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """PEFT puts them over the base's own weights; as modules_to_save they give the same answers and leave it alone."""
    folder = save(True, trained=True, target_modules=targets)
    expected = answers(base("llama"), folder)
    shared = PeftModel.from_pretrained(load_base(base("llama")), folder)
    with shared.disable_adapter():
        assert not torch.equal(logits(shared), logits(load_base(base("llama"))))
    with refused(UnsupportedError, match="if it was trained, name its module in modules_to_save"):
        adapterswap.open_adapter(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": modules}))
    loaded = PeftModel.from_pretrained(load_base(base("llama")), folder)
    close(logits(loaded), expected, depth=LAYERS)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), logits(load_base(base("llama"))))
    merged = adapterswap.merge(folder, base("llama"), out_path=tmp_path / "merged")
    close(logits(load_base(merged)), expected, depth=LAYERS)
