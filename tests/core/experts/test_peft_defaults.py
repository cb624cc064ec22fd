"""Task types and heads that PEFT loads by default; single odd values are in `test_odd_configs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from click.testing import Result
from conftest import LAYERS, logits
from peft import LoraConfig, PeftModel
from pico_models import copied, in_peft, trained
from refusals import refused
from tolerances import close
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import adapterswap
from adapterswap import Composition
from adapterswap.kit.errors import ExpertError, UnsupportedError

CONFIG = "adapter_config.json"

Run = Callable[..., Result]


def test_the_largest_rank_leaves_copies_of_the_base_out(run: Run, base: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT saves the embedding's 96 rows with its LoRA."""
    folders = []
    for seed, name in enumerate(("math", "swahili")):
        config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
        folders.append(trained(base("llama"), config, tmp_path / name, seed=seed, save_embedding_layers=True))
    pair = ["-t", folders[0], "-l", folders[1], "--bottom", 1, "--top", 1]
    result = run("compose", *pair, "-o", tmp_path / "out")
    assert "rank up to 8;" in result.stderr  # the embedding is averaged: 4 + 4
    assert json.loads(run("compose", *pair, "-o", tmp_path / "json", "--json").stdout)["rank"]["largest"] == 8


def test_a_null_task_type_keeps_the_class_keys_that_peft_needs(base: Callable[[str], Path], tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    folders = [trained(base("llama"), config, tmp_path / name, seed=len(name)) for name in ("math", "swahili")]
    out = adapterswap.write_adapter(adapterswap.soup(*folders), tmp_path / "out")
    assert json.loads((out / CONFIG).read_text())["task_type"] is None
    loaded = peft.AutoPeftModel.from_pretrained(out).eval()
    close(logits(loaded), logits(in_peft(base("llama"), out)), depth=LAYERS)


def test_a_null_task_type_equals_causal_lm(
    math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}
    plain = copied(math, tmp_path / "plain", task_type=None, auto_mapping=mapping)
    for pair in ((plain, swahili), (swahili, plain)):
        out = adapterswap.write_adapter(adapterswap.soup(*pair), tmp_path / "out", overwrite=True)
        config = json.loads((out / CONFIG).read_text())
        assert config["task_type"] == "CAUSAL_LM"
        assert "auto_mapping" not in config
        assert peft.AutoPeftModelForCausalLM.from_pretrained(out) is not None
    with refused(ExpertError, "task_type"):
        adapterswap.soup(plain, copied(math, tmp_path / "classes", task_type="SEQ_CLS"))


HEADS = {
    "SEQ_CLS": (AutoModelForSequenceClassification, "score"),
    "TOKEN_CLS": (AutoModelForTokenClassification, "score"),
    "QUESTION_ANS": (AutoModelForQuestionAnswering, "qa_outputs"),
}


@pytest.mark.parametrize("task_type", HEADS)
def test_a_head_that_peft_always_loads_cannot_be_reset(
    task_type: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    model_class, head = HEADS[task_type]
    folders = {}
    for seed, name in enumerate(("math", "swahili")):
        config = LoraConfig(r=4, target_modules=["q_proj"], task_type=task_type)
        folders[name] = trained(model_class.from_pretrained(base("llama")), config, tmp_path / name, seed=seed)
    rules: list[dict[str, Any]] = [{"layers": "none", "expert": "base"}, {"layers": "0-2", "expert": "swahili"}]
    composition = Composition.model_validate({"allocation": [*rules, {"expert": "math"}]})
    with refused(UnsupportedError, match=head):
        adapterswap.write_adapter(adapterswap.compose(composition, folders), tmp_path / "refused")
    composition = Composition.model_validate(
        {"allocation": [{"layers": "none", "expert": "math"}, *rules[1:], {"expert": "math"}]}
    )
    out = adapterswap.write_adapter(adapterswap.compose(composition, folders), tmp_path / "out")
    PeftModel.from_pretrained(model_class.from_pretrained(base("llama")), out)
