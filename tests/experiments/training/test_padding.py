"""Less padding: rows of similar length together, or joined, change neither losses nor what a resumed run writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS
from refusals import refused
from tolerances import near

from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.kit.errors import FieldError, UnsupportedError

from .conftest import echo_rows
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]
ROWS = [row for words in range(1, 21) for row in echo_rows(4, seed=words, words=words)]
GROUPED = {"group_by_length": True, "gradient_accumulation": 2, "batch_size": 4, "save_every_samples": 24, "epochs": 2}


class _Crash(Exception):
    pass


def batches_of(recipe: TrainRecipe, out: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[torch.Tensor]:
    batches: list[torch.Tensor] = []
    with spied(monkeypatch, lambda step, before, after, tokens: batches.extend(tokens)):
        train(recipe, out_path=out, **more)
    return batches


def padding(batches: list[torch.Tensor]) -> float:
    return sum(int((batch == 0).sum()) for batch in batches) / sum(batch.numel() for batch in batches)


def rows_of(batches: list[torch.Tensor]) -> list[list[int]]:
    return sorted([token for token in row if token] for batch in batches for row in batch.tolist())


def test_rows_of_similar_length_come_together_and_each_once_in_a_pass(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, grouped = (
        batches_of(make_recipe(rows=ROWS, training={**GROUPED, "group_by_length": value}), out, monkeypatch)
        for value, out in ((False, tmp_path / "plain"), (True, tmp_path / "grouped"))
    )
    assert padding(grouped) < padding(plain)  # whose rows are sorted within each step
    first, second = grouped[:20], grouped[20:]
    assert rows_of(first) == rows_of(second) == rows_of(plain[:20])
    assert [batch.tolist() for batch in first] != [batch.tolist() for batch in second]


def test_a_resumed_run_has_the_same_order(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(rows=ROWS, training=GROUPED, adapter={"dropout": 0.1})
    train(recipe, out_path=tmp_path / "unbroken")

    def crash(step: int, *_: Any) -> None:
        if step == 13:  # in the second pass
            raise _Crash

    with spied(monkeypatch, crash), pytest.raises(_Crash):
        train(recipe, out_path=tmp_path / "broken")
    assert train(recipe, out_path=tmp_path / "broken", resume=True).resumed_from == 12
    for file in (tmp_path / "unbroken").iterdir():
        assert file.read_bytes() == (tmp_path / "broken" / file.name).read_bytes()


def test_joined_rows_do_not_see_each_other(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"path": str(tmp_path / "rows.jsonl"), "prompt": "{question}", "completion": " {answer}"}
    given = {"rows": ROWS, "validation": {"datasets": [source]}}
    plain = train(make_recipe(**given), out_path=tmp_path / "plain")
    batches: list[torch.Tensor] = []
    with spied(monkeypatch, lambda step, before, after, tokens: batches.extend(tokens)):
        joined = train(make_recipe(**given, training={"padding_free": True}), out_path=tmp_path / "joined")
    assert padding(batches) == 0
    assert joined.tokens == plain.tokens
    assert joined.train_losses[0] == (1, near(plain.train_losses[0][1], depth=LAYERS))
    assert joined.eval_losses[0][1] == pytest.approx(plain.eval_losses[0][1], rel=1e-3)  # after ten steps


@pytest.mark.parametrize("name", ["group_by_length", "padding_free"])
def test_packed_rows_have_no_padding(make_recipe: MakeRecipe, name: str) -> None:
    with refused(FieldError, match="packing"):
        make_recipe(training={"packing": True, name: True})


@pytest.mark.parametrize(
    ("environment", "changes", "parameter"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {}, None),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero.json"}, {}, None),
        ({"ACCELERATE_USE_FSDP": "true"}, {"quantization": {"bits": 4}}, "quantization"),
    ],
)
def test_launchers_that_would_lose_weights_are_refused(
    environment: dict[str, str], changes: Any, parameter: str | None, tmp_path: Path, make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    monkeypatch.setattr("adapterswap.experiments.training.base.find_spec", lambda name: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe = make_recipe(**changes)
    for attempt in (lambda: estimate(recipe), lambda: train(recipe, out_path=tmp_path / "expert")):
        with refused(UnsupportedError, parameter):
            attempt()
