"""Adapters out of fine-tunes in other classes than causal language models compute what the fine-tunes do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as T
from peft import PeftModel
from tolerances import close

import adapterswap
from adapterswap.tools.extraction import extract

from .conftest import changed

_ENCODER = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def bert() -> T.PretrainedConfig:
    return T.BertConfig(**_ENCODER)


def roberta() -> T.PretrainedConfig:
    return T.RobertaConfig(**_ENCODER)


def modernbert() -> T.PretrainedConfig:
    return T.ModernBertConfig(**_ENCODER, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)


def llama() -> T.PretrainedConfig:
    return T.LlamaConfig(**_ENCODER, num_key_value_heads=2)


# The config, the base's class, the fine-tune's, the task type, and the modules that the adapter holds whole.
PAIRS: dict[str, tuple[Callable[[], T.PretrainedConfig], str, str, str | None, list[str] | None]] = {
    "masked": (bert, "BertForMaskedLM", "BertForMaskedLM", None, None),
    "masked ModernBERT": (modernbert, "ModernBertForMaskedLM", "ModernBertForMaskedLM", None, None),
    "classifiers": (bert, "BertForSequenceClassification", "BertForSequenceClassification", "SEQ_CLS", ["classifier"]),
    "masked to classifier": (
        bert, "BertForMaskedLM", "BertForSequenceClassification", "SEQ_CLS", ["bert.pooler", "classifier"]
    ),
    "masked to a head of two modules": (
        roberta, "RobertaForMaskedLM", "RobertaForSequenceClassification", "SEQ_CLS", ["classifier"]
    ),
    "masked to questions": (bert, "BertForMaskedLM", "BertForQuestionAnswering", "QUESTION_ANS", ["qa_outputs"]),
    "causal to reward": (llama, "LlamaForCausalLM", "LlamaForSequenceClassification", "SEQ_CLS", ["score"]),
    "causal to embeddings": (llama, "LlamaForCausalLM", "LlamaModel", "FEATURE_EXTRACTION", None),
}  # fmt: skip


LINEAR = re.compile(r"layers?\.\d+\.(?!.*norm)(attention|self_attn|attn|mlp|intermediate).*weight$", re.IGNORECASE)


def outputs(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor([[3, 7, 11, 5, 23, 42, 1, 9], [2, 4, 8, 16, 32, 64, 31, 17]])
    with torch.no_grad():
        result = model.eval()(input_ids=ids)
    names = ("logits", "start_logits", "last_hidden_state")
    value: torch.Tensor = next(result[name] for name in names if name in result)
    return value


@pytest.mark.parametrize("pair", PAIRS)
def test_peft_computes_what_the_fine_tune_does(pair: str, tmp_path: Path) -> None:
    """In the fine-tune's class, whose other modules are the base's or, where the base has none, drawn at random."""
    config, base_class, full_class, task_type, saved = PAIRS[pair]
    torch.manual_seed(0)
    getattr(T, base_class)(config()).save_pretrained(tmp_path / "base")
    full = changed(
        getattr(T, full_class).from_pretrained(tmp_path / "base"), 1, only=lambda name: LINEAR.search(name) is not None
    )
    full.save_pretrained(tmp_path / "full")
    result = extract(tmp_path / "full", tmp_path / "base", tmp_path / "out", rank=48)
    assert result.in_full == tuple(saved or ())
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == (task_type, saved)
    assert (written.get("auto_mapping") or {}).get("base_model_class") == (None if task_type else full_class)
    torch.manual_seed(9)
    base = getattr(T, full_class).from_pretrained(tmp_path / "base")
    close(outputs(PeftModel.from_pretrained(base, tmp_path / "out")), outputs(full), depth=8)
    checked = adapterswap.verify(
        tmp_path / "out", experts={"full": tmp_path / "full"}, base_model=str(tmp_path / "base")
    )
    assert checked.equal
