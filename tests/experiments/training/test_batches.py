"""Less to compute in a step, with the same rows: parts of a batch, rows sorted in a step, logits at labels only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import near
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from adapterswap.experiments.training import TrainRecipe, TrainReport, estimate, train
from adapterswap.experiments.training.batches import RowsInSteps, only_labelled
from adapterswap.experiments.training.recipe import TrainingOptions
from adapterswap.experiments.training.report import padded_tokens, parts_of_batch

from .conftest import echo_rows
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]
ROWS = [row for words in range(1, 25) for row in echo_rows(2, seed=words, words=words)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5), st.integers(0, 3))
def test_a_step_has_the_rows_of_the_trainers_own_order(number: int, rows: int, seed: int, epoch: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 9, number)
    ours, theirs = RowsInSteps(lengths, rows=rows, seed=seed), SeedableRandomSampler(range(number), data_seed=seed)
    for sampler in (ours, theirs):
        sampler.set_epoch(epoch)
    one, other = list(ours), list(theirs)
    assert len(ours) == number
    for start in range(0, number, rows):
        step = one[start : start + rows]
        assert sorted(step) == sorted(other[start : start + rows])
        assert [lengths[row] for row in step] == sorted(lengths[step])


def test_parts_are_worth_their_passes() -> None:
    options = TrainingOptions(batch_size=16, gradient_accumulation=1)
    mixed = np.random.default_rng(0).integers(10, 400, 500)
    assert parts_of_batch(options, mixed, "cpu") == 4  # of four rows at least
    assert parts_of_batch(options, mixed, "cuda") == 1
    assert parts_of_batch(options, np.full(500, 100), "cpu") == 1  # nothing is padded
    for changed in ({"packing": True}, {"padding_free": True}, {"group_by_length": True}):
        assert parts_of_batch(options.model_copy(update=changed), mixed, "cpu") == 1


def test_padding_is_counted_as_it_is_computed(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(rows=ROWS, training={"batch_size": 8, "gradient_accumulation": 1, "epochs": 1})
    batches: list[torch.Tensor] = []
    with spied(monkeypatch, lambda step, before, after, tokens: batches.extend(tokens)):
        train(recipe, out_path=tmp_path / "out", progress=False)
    padding = 1 - sum(int((one != 0).sum()) for one in batches) / sum(one.numel() for one in batches)
    expected = estimate(recipe)
    assert expected.padding == pytest.approx(padding, abs=0.1)  # other steps are drawn
    assert max(map(len, batches)) == 4  # in two parts, for they are worth it here
    plain = padded_tokens(recipe.training, np.array([len(row) for one in batches for row in one]))
    assert plain[0] >= plain[1]


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_batch_in_parts_trains_as_one(tmp_path: Path, make_recipe: MakeRecipe, adapter: str) -> None:
    """Losses and weights equal those of a run whose rows are taken one by one."""
    training = {"max_steps": 3, "logging_steps": 1, "save_every_samples": None}
    losses = {}
    for batch, accumulation in ((8, 1), (1, 8)):
        recipe = make_recipe(
            rows=ROWS,
            adapter={"method": adapter},
            training=training | {"batch_size": batch, "gradient_accumulation": accumulation},
        )
        losses[batch] = train(recipe, out_path=tmp_path / f"{adapter}-{batch}", progress=False).train_losses
    assert [loss for _, loss in losses[8]] == pytest.approx([loss for _, loss in losses[1]], rel=1e-4)


def test_logits_are_computed_at_labels_only_and_are_the_same(pico: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(pico("llama"), dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(pico("llama"), dtype=torch.float32)
    add_fused_lm_head(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (3, 9), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, ids, -100)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    with only_labelled(model.base_model, inputs) as prepared:
        outputs = model(**prepared, fused_lm_head=True)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits[:, :-1].log_softmax(-1)
    labelled = labels[:, 1:] != -100
    assert outputs.log_probs.shape == (1, int(labelled.sum()))
    chosen = expected[labelled].gather(1, labels[:, 1:][labelled][:, None])[:, 0]
    for one, other in zip(outputs.log_probs[0].tolist(), chosen.tolist(), strict=True):
        assert one == near(other, depth=model.config.num_hidden_layers)
    assert not model.base_model._forward_hooks


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([(1, 2.5)], "2.50"),
        ([(7, 2.5)], "2.50, the mean of 7 steps"),
        ([(10, 2.5), (20, 1.25)], "2.50 at the start, 1.25 at the end"),
    ],
)
def test_a_loss_that_was_logged_once_is_not_at_both_ends(losses: list[tuple[int, float]], text: str) -> None:
    rows: Any = None
    report = TrainReport(Path(), losses[-1][0], None, losses, [], rows, 0, 1.0, 0, 1)
    assert report.losses_text(2) == text
