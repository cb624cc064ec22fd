"""Runs that are cut short leave what --resume needs to end at the same weights, bit for bit, in every regime."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapterswap.errors import AdapterswapError
from adapterswap.training import TrainRecipe, train

from .conftest import two_sides
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]
OPTIONS = {"max_steps": 11, "batch_size": 4, "save_every_samples": 16, "gradient_accumulation": 2}
REGIMES = {
    "turns": {"simultaneous": {"partition": "A", "steps_per_switch": 2}},
    "full": {"adapter": "none"},
}


def recipe_of(regime: str, folder: Path, make_recipe: MakeRecipe) -> TrainRecipe:
    return make_recipe(datasets=two_sides(folder), training=OPTIONS, **REGIMES[regime])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def cut_short(monkeypatch: pytest.MonkeyPatch, after: int, how: Callable[[], None]) -> Any:
    """Let `how` happen after so many steps."""

    def seen(step: int, *_: Any) -> None:
        if step + 1 == after:
            how()

    return spied(monkeypatch, seen)


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


@pytest.mark.parametrize("regime", REGIMES)
def test_a_crashed_run_resumes_to_the_same_bytes(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, regime: str
) -> None:
    recipe = recipe_of(regime, tmp_path, make_recipe)
    unbroken = train(recipe, out_path=tmp_path / "unbroken")
    with cut_short(monkeypatch, 5, crash), pytest.raises(Crash):
        train(recipe, out_path=tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    resumed = train(recipe, out_path=tmp_path / "broken", resume=True)
    assert resumed.resumed_from == 4
    assert files(resumed.path) == files(unbroken.path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"unbroken", "broken"}


def test_sigterm_ends_a_run_after_its_step(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("turns", tmp_path, make_recipe)
    unbroken = train(recipe, out_path=tmp_path / "unbroken")
    handler = signal.getsignal(signal.SIGTERM)
    told = r"stopped by SIGTERM after step 5 of 11. Pass `resume=True`"
    ask = cut_short(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with ask, pytest.raises(AdapterswapError, match=told):
        train(recipe, out_path=tmp_path / "broken")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "broken").exists()
    resumed = train(recipe, out_path=tmp_path / "broken", resume=True)
    assert resumed.resumed_from == 5  # and not 4, the last one that save_every_samples asked for
    name = "adapter_model.safetensors"
    assert (resumed.path / name).read_bytes() == (unbroken.path / name).read_bytes()


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, after: int, limit: int) -> Iterator[None]:
    """After so many steps no file may grow beyond `limit` bytes: each library tells that differently."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with cut_short(monkeypatch, after, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit", [20_000, 100_000])
def test_a_full_disk_is_told_and_mended(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    recipe = make_recipe(training=OPTIONS)
    told = r"a checkpoint cannot be written to .*Free some space"
    with full_disk(monkeypatch, 5, limit), pytest.raises(AdapterswapError, match=told):
        train(recipe, out_path=tmp_path / "expert")
    assert not (tmp_path / "expert").exists()
    assert train(recipe, out_path=tmp_path / "expert", resume=True).resumed_from == 4


def test_a_disk_too_full_for_the_expert(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(adapter="none", training={"max_steps": 2})
    told = r"the expert cannot be written to .*Free some space"
    with full_disk(monkeypatch, 2, 20_000), pytest.raises(AdapterswapError, match=told):
        train(recipe, out_path=tmp_path / "expert")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}
