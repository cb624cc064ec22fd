"""Losses and gradients of whole classes of models beside plain torch; `make training` tries every class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from refusals import refused
from tolerances import near

from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.kit.errors import AdapterswapError, BaseModelError, FieldError, UnsupportedError

from .conftest import echo_rows, recipe_maker, word_tokenizer

SCRIPTS = str(Path(__file__).parents[3] / "scripts")

# What becomes of plain rows and of packed ones: the loss and the gradient are torch's, or the run is refused.
CLASSES = {
    "gpt2": "equal",  # its class is not called …ForCausalLM
    "bert": "refused",  # its head transforms hidden states first, and positions are not read
    "recurrent_gemma": "refused",  # it caps logits under another name
    "granitemoe": "equal",  # its config has no num_experts
    "aya_vision": "equal",  # it does not scale logits, though its config has a scale
    "openai-gpt": "refused",
    "mpt": "refused",
    "llama4_text": "equal",  # its backbone is not what `base_model` says
    "qwen3_5_text": "refused",
    "prophetnet": "refused",
    "xlstm": "refused",
}


@contextmanager
def scripts() -> Iterator[None]:
    sys.path.insert(0, SCRIPTS)
    try:
        yield
    finally:
        sys.path.remove(SCRIPTS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_is_that_of_torch(name: str, tmp_path: Path) -> None:
    with scripts():
        from training import examine
    found = {row["way"]: row for row in examine(name, ["plain", "completions", "packed"], tmp_path)}
    assert {row["outcome"] for row in found.values()} <= {"equal", "refused"}, found
    assert found["packed"]["outcome"] == CLASSES[name], found
    assert not any(row.get("true") == "UNTRUE" for row in found.values()), found


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def refused_alike(recipe: TrainRecipe, out: Path, kind: type[AdapterswapError], parameter: str) -> AdapterswapError:
    """The error of a run, and of its dry run."""
    with refused(kind, parameter) as run:
        train(recipe, out_path=out)
    with refused(kind, parameter) as dry_run:
        estimate(recipe)
    assert str(run.value) == str(dry_run.value)
    assert not out.exists()
    return run.value


GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}


def test_rows_beyond_learned_positions_are_refused_and_cut_rows_are_trained(tmp_path: Path) -> None:
    base = saved(transformers.GPT2Config(**GPT2), tmp_path / "base")
    make = recipe_maker(base, tmp_path)
    rows = echo_rows(8, words=18)
    error = refused_alike(make(rows=rows), tmp_path / "out", FieldError, "training.max_length")
    assert "16" in str(error)
    texts = [{"path": str(tmp_path / "rows.jsonl"), "text": "{question}"}]
    assert train(make(rows=rows, datasets=texts, training={"max_length": 16}), out_path=tmp_path / "out").steps == 1


def test_rotary_positions_have_no_end(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16,
    )  # fmt: skip
    make = recipe_maker(saved(config, tmp_path / "base"), tmp_path)
    assert train(make(rows=echo_rows(8, words=18)), out_path=tmp_path / "out").steps == 1


def test_packing_is_refused_where_rows_see_each_other(tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    make = recipe_maker(saved(config, tmp_path / "base"), tmp_path)
    for option in ("packing", "padding_free"):
        refused_alike(make(training={option: True}), tmp_path / "out", UnsupportedError, f"training.{option}")


def test_a_model_that_reads_ahead_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    make = recipe_maker(saved(config, tmp_path / "base"), tmp_path)
    error = refused_alike(make(), tmp_path / "out", BaseModelError, "base_model")
    assert "is_decoder" in str(error)


def test_a_mixtures_router_loss_is_the_models_own(tmp_path: Path) -> None:
    """Granite's config calls its number of experts num_local_experts, and TRL reads num_experts."""
    config = transformers.GraniteMoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5,
    )  # fmt: skip
    base = saved(config, tmp_path / "base")
    rows = echo_rows(8)
    texts = [{"path": str(tmp_path / "rows.jsonl"), "text": "{question}"}]
    report = train(recipe_maker(base, tmp_path)(rows=rows, datasets=texts), out_path=tmp_path / "out")

    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    ids = word_tokenizer()([row["question"] for row in rows], return_tensors="pt")["input_ids"]
    ids = torch.cat([ids, torch.full((len(ids), 1), 1)], dim=1)
    with torch.no_grad():
        expected = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, output_router_logits=True, use_cache=False
        ).loss
        plain = model(input_ids=ids, labels=ids).loss
    assert report.train_losses[0][1] == near(expected.item(), depth=2)
    assert abs(expected - plain) > 0.1
