"""Training two partitions in turns: weights that a step may not change are unchanged, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from adapterswap.core.model.layers import ModuleName
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.experiments.training.data import load_data
from adapterswap.experiments.training.recipe import TrainingOptions
from adapterswap.experiments.training.report import simultaneous_steps
from adapterswap.experiments.training.trainer import RowsInTurns, side_of_step
from adapterswap.kit.errors import DataError, FieldError

from .conftest import WORDS, two_sides
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]


def is_language_in_a(name: str) -> bool:
    """Partition A on six layers, written out: 6·6/28 and 2·6/28 rounded half up are layers 0 and none at the top."""
    name = name.removeprefix("base_model.model.")
    layer = ModuleName(name).layer("model.layers")
    return layer is not None and (ModuleName(name).kind == "attention" or layer == 0)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_twelve_steps_leave_the_other_side_unchanged(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    """With weight decay, clipping, accumulation and checkpointing: weights, both moments and their step counts."""
    recipe = make_recipe(
        **({"adapter": "none"} if adapter == "none" else {}),
        datasets=two_sides(tmp_path),
        simultaneous={"partition": "A"},
        training={
            "max_steps": 12, "batch_size": 4, "gradient_accumulation": 2, "gradient_checkpointing": True,
            "weight_decay": 0.1, "max_grad_norm": 0.5, "schedule": "constant", "learning_rate": 0.003,
        },
    )  # fmt: skip
    changed: dict[str, list[int]] = {"task": [], "language": []}

    def seen(step: int, before: Any, after: Any, tokens: list[torch.Tensor]) -> None:
        language = step % 2 == 1
        words = {WORDS[i] for batch in tokens for i in batch.ravel().tolist()}
        assert not words & ({f"w{i}" for i in range(8)} if language else {f"w{i}" for i in range(8, 16)})
        moved = 0
        for name in before[0]:
            inside = ModuleName(name.removeprefix("base_model.model.")).layer("model.layers") is not None
            mine = inside and is_language_in_a(name) == language and (adapter == "none" or "lora_" in name)
            same = torch.equal(before[0][name], after[0][name])
            moments = (before[1].get(name), after[1].get(name))
            if not mine:
                assert same, (step, name)
                assert (moments[0] is None) == (moments[1] is None)
                for key in moments[0] or {}:
                    assert torch.equal(moments[0][key], moments[1][key]), (step, name, key)  # type: ignore[index]
            else:
                assert moments[1] is not None
                assert moments[1]["step"] == step // 2 + 1
                moved += not same
        changed["language" if language else "task"].append(moved)

    with spied(monkeypatch, seen):
        report = train(recipe, out_path=tmp_path / "expert")
    assert report.steps == 12
    assert [len(counts) for counts in changed.values()] == [6, 6]
    a_layer = {"lora": 2, "none": 1}[adapter]  # parameters to a module
    task, language = 5 * 3, 6 * 4 + 3
    if adapter == "none":
        task, language = task + 5 * 2, language + 2  # norms belong to their layer
    # B of an adapter changes from the first step, A only once B is nonzero; then all trainable weights change.
    assert set(changed["task"][2:]) == {task * a_layer}
    assert set(changed["language"][2:]) == {language * a_layer}
    assert report.trainable_parameters == estimate(recipe).trainable_parameters


@settings(deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(0, 12), st.integers(1, 9), st.integers(1, 4), st.integers(0, 9)
)
def test_rows_in_turns(task: int, language: int, steps: int, a_step: int, switch: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 9, task + language)
    rows = list(
        RowsInTurns(lengths, (task, language), steps=steps, rows_a_step=a_step, steps_per_switch=switch, seed=seed)
    )
    assert len(rows) == steps * a_step
    drawn = {"task": np.zeros(task, int), "language": np.zeros(language, int)}
    for step in range(steps):
        side = side_of_step(step, switch)
        assert side == ("task", "language")[(step // switch) % 2]
        taken = np.array(rows[step * a_step : (step + 1) * a_step]) - (task if side == "language" else 0)
        assert ((taken >= 0) & (taken < len(drawn[side]))).all()
        assert (np.diff(lengths[:task][taken] if side == "task" else lengths[task:][taken]) >= 0).all()
        np.add.at(drawn[side], taken, 1)
        assert np.ptp(drawn[side]) <= 1  # each pass uses every row once


def test_steps_of_a_run_in_turns() -> None:
    options = TrainingOptions(batch_size=4, gradient_accumulation=4)
    assert simultaneous_steps((160, 33), options, steps_per_switch=1) == 2 * 10
    assert simultaneous_steps((160, 33), options, steps_per_switch=1, processes=2) == 2 * 5
    assert simultaneous_steps((33, 160), options, steps_per_switch=4) == 2 * 4 * 3  # whole turns
    half = TrainingOptions(batch_size=4, gradient_accumulation=4, epochs=0.5)
    assert simultaneous_steps((160, 33), half, steps_per_switch=1) == 2 * 5
    assert simultaneous_steps((9, 9), TrainingOptions(max_steps=7), steps_per_switch=2) == 7


def test_validation_is_half_of_either_side(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    from adapterswap.core.model.opened_base import OpenedBase
    from adapterswap.experiments.training.base import with_padding
    from adapterswap.experiments.training.data import load_data

    def held_out(**validation: Any) -> tuple[int, int]:
        recipe = make_recipe(datasets=two_sides(tmp_path), simultaneous={"partition": "B"}, validation=validation)
        data = load_data(recipe, with_padding(OpenedBase.open(recipe.base_model)))
        assert data.validation is not None
        words = [{WORDS[i] for i in data.validation.row(row)[0].tolist()} for row in range(len(data.validation))]
        task = sum(bool(row & {f"w{i}" for i in range(8)}) for row in words)
        return task, len(words) - task

    assert held_out(rows=10) == (5, 5)
    assert held_out(rows=5) == (3, 3)
    assert held_out(fraction=0.25) == (12, 12)
    assert held_out(datasets=two_sides(tmp_path)) == (32, 32)
    recipe = make_recipe(datasets=two_sides(tmp_path), simultaneous={"partition": "B"}, validation={"rows": 64})
    with refused(DataError, "validation", match="32 rows of each side.* 32"):
        estimate(recipe)


def test_an_epoch_ends_with_the_longer_side(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    options = {"batch_size": 4, "gradient_accumulation": 2, "packing": False}
    recipe = make_recipe(datasets=two_sides(tmp_path), simultaneous={"partition": "C"}, training=options)
    expected = estimate(recipe)
    assert expected.steps == 2 * 64 // 8
    report = train(recipe, out_path=tmp_path / "expert")
    assert report.steps == expected.steps
    assert report.tokens == expected.tokens == 16 * 8 * 7


def test_packed_sequences_hold_rows_of_one_side(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    from adapterswap.core.model.opened_base import OpenedBase
    from adapterswap.experiments.training.base import with_padding
    from adapterswap.experiments.training.data import load_data, sequences

    recipe = make_recipe(
        datasets=two_sides(tmp_path), simultaneous={"partition": "B"}, training={"packing": True, "max_length": 21}
    )
    data = load_data(recipe, with_padding(OpenedBase.open(recipe.base_model)))
    rows, parts = sequences(data, recipe.training)
    assert len(rows) == sum(parts)
    assert parts[0] == -(-64 // 3)
    sides = np.array([np.isin(ids, range(4, 12)).any() for ids in rows["input_ids"]])
    assert sides.tolist() == [True] * parts[0] + [False] * parts[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"one": True}, "both task and language"),
        ({"without": True}, "set `side` for each"),
        ({"adapter": {"partition": "A", "side": "task"}}, "remove adapter.partition and adapter.side"),
        ({"adapter": {"modules_to_save": ["lm_head"]}}, "belong to no side"),
        ({"simultaneous": {"partition": "D"}}, "partition"),
        ({"simultaneous": {"partition": "A", "steps_per_switch": 0}}, "steps_per_switch"),
    ],
)
def test_conflicting_settings_are_refused(
    tmp_path: Path, make_recipe: MakeRecipe, changes: dict[str, Any], message: str
) -> None:
    sources = two_sides(tmp_path)
    if changes.pop("one", False):
        sources = sources[:1]
    if changes.pop("without", False):
        del sources[1]["side"]
    with pytest.raises(ValueError, match=message):
        make_recipe(**({"datasets": sources, "simultaneous": {"partition": "A"}} | changes))


def test_without_turns_sides_are_mixed(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    """Data mixing: one run over both sources, whose rows are joined and shuffled."""
    from adapterswap.core.model.opened_base import OpenedBase
    from adapterswap.experiments.training.base import with_padding
    from adapterswap.experiments.training.data import load_data

    recipe = make_recipe(datasets=two_sides(tmp_path))
    data = load_data(recipe, with_padding(OpenedBase.open(recipe.base_model)))
    assert data.parts == (64 + 32,)
    task = [np.isin(data.train.row(row)[0], range(4, 12)).any() for row in range(96)]
    assert sum(task) == 64
    assert all(8 < sum(task[begin : begin + 24]) < 24 for begin in range(0, 96, 24))  # of both in each quarter
    assert train(recipe, out_path=tmp_path / "expert").steps == 96 // 8


def test_a_side_without_a_module_is_refused(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        datasets=two_sides(tmp_path), simultaneous={"partition": "A"}, adapter={"target_modules": ["q_proj"]}
    )
    with refused(FieldError, "simultaneous.partition"):
        estimate(recipe)


@pytest.mark.parametrize("in_turns", [True, False])
def test_samples_per_side_bounds_each_side(tmp_path: Path, make_recipe: MakeRecipe, in_turns: bool) -> None:
    """64 rows of the task (words w0 to w7) and 32 of the language (w8 to w15), of which 20 each are used."""
    options: dict[str, Any] = {"simultaneous": {"partition": "A"}} if in_turns else {}
    options |= {"datasets": two_sides(tmp_path), "validation": {"rows": 8}}
    recipe = make_recipe(**options, samples_per_side=20)
    data = load_data(recipe, OpenedBase.open(recipe.base_model))
    assert (data.rows.train, data.rows.validation, data.rows.surplus) == (32, 8, 44 + 12)
    task = {WORDS.index(f"w{i}") for i in range(8)}
    sides = [bool(task & set(row["input_ids"])) for part in (data.train, data.validation) for row in part.dataset()]
    assert sides.count(True) == sides.count(False) == 20
    if in_turns:
        assert data.parts == (16, 16)
    again = load_data(recipe, OpenedBase.open(recipe.base_model))
    assert again.rows.sha256 == data.rows.sha256
    everything = load_data(make_recipe(**options, samples_per_side=64), OpenedBase.open(recipe.base_model))
    assert everything.rows.surplus == 0


def test_rows_that_are_left_out_are_not_counted_as_cut(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    """All rows have 7 tokens, so all used rows are cut at 6; the others are unused."""
    recipe = make_recipe(datasets=two_sides(tmp_path), validation={"rows": 8}, samples_per_side=20)
    cut = recipe.model_copy(update={"training": recipe.training.model_copy(update={"max_length": 6})})
    rows = load_data(cut, OpenedBase.open(recipe.base_model)).rows
    assert (rows.train, rows.validation, rows.surplus) == (32, 8, 44 + 12)
    assert rows.truncated == 40
    report = train(cut, out_path=tmp_path / "out", progress=False)
    card = (report.path / "README.md").read_text(encoding="utf-8")
    assert "32 rows were trained on, 8 held out, 0 dropped, 56 left out beyond samples_per_side." in card


def test_training_time_excludes_measuring_the_loss(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adapterswap.experiments.training.trainer import ExpertTrainer

    measured, walls = [], []
    plain, whole = ExpertTrainer.evaluation_loop, ExpertTrainer.train

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        measured.append(self.state.global_step)
        return plain(self, *args, **options)

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        began = time.monotonic()
        result = whole(self, *args, **options)
        walls.append(time.monotonic() - began - 0.5 * len(measured))
        return result

    monkeypatch.setattr(ExpertTrainer, "evaluation_loop", slow)
    monkeypatch.setattr(ExpertTrainer, "train", timed)
    options = {"max_steps": 4, "batch_size": 8}
    recipe = make_recipe(validation={"rows": 8, "every_samples": 16}, training=options)
    report = train(recipe, out_path=tmp_path / "out", progress=False)
    assert measured[:2] == [2, 4]
    assert report.seconds < walls[0] + 0.2
