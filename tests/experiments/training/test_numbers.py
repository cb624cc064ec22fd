"""Numbers of training: packed and plain logits, long texts in pieces, and loss curves as they were before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import LAYERS
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import close, near

from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.experiments.training import TrainRecipe, train
from adapterswap.experiments.training.base import with_padding
from adapterswap.experiments.training.data import load_data, sequences
from adapterswap.experiments.training.texts import Example
from adapterswap.experiments.training.tokens import tokenize
from adapterswap.kit.errors import FieldError

from .conftest import echo_rows, two_sides, word_tokenizer
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]


def test_packed_logits_equal_those_of_single_rows(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of each row has no prediction and is not trained on; the rest of plain text is."""
    text = {"path": str(tmp_path / "rows.jsonl"), "text": "{question} {answer}"}
    options = {"packing": True, "max_length": 40, "batch_size": 2, "max_steps": 1}
    recipe = make_recipe(rows=[*echo_rows(5), *echo_rows(6, words=9)], datasets=[text], training=options)
    with spied(monkeypatch, lambda *_: None) as trainers:
        train(recipe, out_path=tmp_path / "expert")
    trainer = trainers[0]
    rows, _ = sequences(load_data(recipe, with_padding(OpenedBase.open(recipe.base_model))), recipe.training)
    batch = trainer.data_collator([rows[index] for index in range(len(rows))])
    model = trainer.model.eval()
    with torch.no_grad():
        logits = model(**{key: batch[key] for key in ("input_ids", "position_ids")}).logits[0]
        starts = [*torch.nonzero(batch["position_ids"][0] == 0).ravel().tolist(), logits.shape[0]]
        assert len(starts) - 1 == 11
        for begin, end in pairwise(starts):
            alone = model(input_ids=batch["input_ids"][:, begin:end]).logits[0]
            close(logits[begin:end], alone, depth=LAYERS)
            assert batch["labels"][0, begin] == -100
            assert torch.equal(batch["labels"][0, begin + 1 : end], batch["input_ids"][0, begin + 1 : end])


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(2, 12))
def test_long_texts_in_pieces_lose_no_token(words: int, max_length: int) -> None:
    text = " ".join(f"w{i}" for i in range(words))
    tokens, counts = tokenize(
        [Example(text, ((0, len(text)),))], word_tokenizer(), max_length=max_length, split_long=True
    )
    pieces = [tokens.row(row)[0].tolist() for row in range(len(tokens))]
    whole = word_tokenizer()(text + " <eos>")["input_ids"]
    assert all(2 <= len(piece) <= max_length for piece in pieces)
    assert [piece[-1] for piece in pieces[:-1]] == [piece[0] for piece in pieces[1:]]
    # All pieces together predict every token except the first exactly once.
    assert [token for piece in pieces for token in piece[1:]] == whole[1:]
    assert tokens.trained.all()
    assert counts.split == (len(whole) > max_length)
    assert not any(counts.truncated)
    assert counts.cut_off == 0


def test_continued_pretraining(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    """Plain text is packed and long documents are split; prompts with completions are still cut."""
    rows = [*echo_rows(12, words=70), *echo_rows(12)]
    text = {"path": str(tmp_path / "rows.jsonl"), "text": "{question} {answer}"}
    pairs = {"path": str(tmp_path / "rows.jsonl"), "prompt": "{question}", "completion": " {answer}"}
    options = {"packing": True, "split_long": True, "max_length": 32, "batch_size": 4}
    report = train(make_recipe(rows=rows, datasets=[text, pairs], training=options), out_path=tmp_path / "expert")
    counts = report.rows
    assert (counts.split, counts.cut_off, counts.truncated) == (12, 12, 0)
    assert counts.train == 12 * 3 + 12 + 12
    assert counts.tokens == 12 * (73 + 2) + 24 * 7  # each further piece repeats one token
    assert report.tokens == counts.tokens
    assert "12 texts longer than max_length split into several rows" in counts.notes()
    with pytest.raises(FieldError, match="split_long"):
        make_recipe(training={"split_long": True})


CURVES: dict[str, list[float]] = {
    "lora": [7.5317, 8.7273, 5.1848, 4.1987, 2.9766, 3.8746, 3.1573, 3.5536],
    "turns": [8.6844, 7.9347, 4.191, 3.1545, 4.2961, 3.9662, 3.6429, 3.3014],
    "full": [7.5317, 8.7273, 4.6486, 3.3133, 2.6227, 3.541, 2.9921, 3.4368],
}


@pytest.mark.parametrize("regime", CURVES)
def test_loss_curves_are_unchanged(tmp_path: Path, make_recipe: MakeRecipe, regime: str) -> None:
    """Numbers of this test's first run, with torch 2.13 on a CPU. Change them only if you know why they changed."""
    changes: dict[str, dict[str, Any]] = {
        "lora": {"training": {"schedule": "warmup_stable_decay", "warmup": 2, "weight_decay": 0.1, "max_steps": 8}},
        "turns": {
            "datasets": two_sides(tmp_path),
            "simultaneous": {"partition": "B", "steps_per_switch": 2},
            "training": {"max_steps": 8, "schedule": "constant"},
        },
        "full": {"adapter": "none", "training": {"max_steps": 8, "learning_rate": 0.003}},
    }
    report = train(make_recipe(**changes[regime]), out_path=tmp_path / "expert")
    assert [loss for _, loss in report.train_losses] == near(CURVES[regime], depth=8 * LAYERS)


def test_seeds_of_rows_and_of_weights_are_independent(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(training={"seed": 5})
    base = with_padding(OpenedBase.open(recipe.base_model))
    one, other, third = (
        load_data(make_recipe(training=seeds), base).train
        for seeds in ({"seed": 5}, {"seed": 6}, {"seed": 5, "data_seed": 1})
    )
    assert np.array_equal(one.ids, other.ids)
    assert not np.array_equal(one.ids, third.ids)


@pytest.mark.parametrize("packing", [False, True])
def test_the_validation_loss_is_per_token(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    """Rows of very different lengths, in batches of 3: neither a mean of rows nor one of batches."""
    text = {"path": str(tmp_path / "rows.jsonl"), "text": "{question} {answer}"}
    rows = [*echo_rows(9), *echo_rows(10, seed=1, words=24)]
    options = {"packing": packing, "max_length": 40, "batch_size": 3, "max_steps": 2}
    recipe = make_recipe(rows=rows, datasets=[text], training=options, validation={"rows": 11})
    with spied(monkeypatch, lambda *_: None) as trainers:
        report = train(recipe, out_path=tmp_path / "expert")
    held_out = load_data(recipe, with_padding(OpenedBase.open(recipe.base_model))).validation
    assert held_out is not None
    model, total, count, means = trainers[0].model.eval(), 0.0, 0, []
    for row in held_out.dataset():
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            predicted = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        losses = -predicted.gather(1, ids[0, 1:, None])
        total, count = total + float(losses.sum()), count + losses.numel()
        means.append(float(losses.mean()))
    assert report.eval_losses[-1][1] == near(total / count, depth=LAYERS)
    assert report.eval_losses[-1][1] != near(sum(means) / len(means), depth=LAYERS)


@pytest.mark.parametrize("packing", [False, True])
def test_trained_tokens_are_those_with_a_loss(tmp_path: Path, make_recipe: MakeRecipe, packing: bool) -> None:
    """Nothing predicts the first token of a row, so it has none: labels are shifted by one."""
    text = {"path": str(tmp_path / "rows.jsonl"), "text": "{question} {answer}"}
    options = {"packing": packing, "max_length": 12, "split_long": True}
    recipe = make_recipe(rows=[*echo_rows(5), *echo_rows(6, words=9)], datasets=[text], training=options)
    data = load_data(recipe, with_padding(OpenedBase.open(recipe.base_model)))
    lengths = np.diff(data.train.starts)
    assert data.rows.trained_tokens == data.rows.tokens - len(lengths) == sum(length - 1 for length in lengths.tolist())
    labels = [data.train.dataset()[row]["labels"][1:] for row in range(len(lengths))]
    assert data.rows.trained_tokens == sum(label != -100 for row in labels for label in row)
