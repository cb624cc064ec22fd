"""Interrupted runs can be resumed to the same weights, bit for bit, in every regime."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load, save

from adapterswap.experiments.training import TrainRecipe, train
from adapterswap.experiments.training.checkpoints import explained
from adapterswap.kit.errors import AdapterswapError, OutputError, RunError

from .conftest import echo_rows, two_sides, write_jsonl
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]
OPTIONS = {"max_steps": 7, "batch_size": 4, "save_every_samples": 16, "gradient_accumulation": 2}
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
    if regime == "turns":
        ended_by_sigterm(recipe, tmp_path, monkeypatch)
        assert files(tmp_path / "ended") == files(unbroken.path)


def ended_by_sigterm(recipe: TrainRecipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends after its step, with a checkpoint."""
    handler = signal.getsignal(signal.SIGTERM)
    ask = cut_short(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with ask, refused(RunError, match="5 of 7") as caught:
        train(recipe, out_path=folder / "ended")
    assert caught.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not (folder / "ended").exists()
    resumed = train(recipe, out_path=folder / "ended", resume=True)
    assert resumed.resumed_from == 5  # and not 4, the last one that save_every_samples asked for


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, after: int, limit: int) -> Iterator[None]:
    """After so many steps no file may grow beyond `limit` bytes: each library reports that differently."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with cut_short(monkeypatch, after, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit", [20_000, 100_000])
def test_a_full_disk_is_reported_and_the_run_resumed(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    recipe = make_recipe(training=OPTIONS)
    with full_disk(monkeypatch, 5, limit), refused(OutputError, "out_path", match="a checkpoint"):
        train(recipe, out_path=tmp_path / "expert")
    assert not (tmp_path / "expert").exists()
    assert train(recipe, out_path=tmp_path / "expert", resume=True).resumed_from == 4


@pytest.mark.parametrize("numbers", [1, 1000, 1_000_000])
def test_a_full_disk_is_recognised_however_torch_reports_it(numbers: int, tmp_path: Path) -> None:
    """Its words depend on the size of what is saved, such as the optimizer, and on where the disk ends."""
    content = {"state": torch.zeros(numbers)}
    with refused(OutputError, "out_path"), explained("a checkpoint", tmp_path):
        torch.save(content, "/dev/full")
    whole = tmp_path / "optimizer.pt"
    torch.save(content, whole)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, 100, whole.stat().st_size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with refused(OutputError, "out_path"), explained("a checkpoint", tmp_path):
                torch.save(content, whole)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_too_full_for_the_expert(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(adapter="none", training={"max_steps": 2})
    with full_disk(monkeypatch, 2, 20_000), refused(OutputError, "out_path", match="the expert"):
        train(recipe, out_path=tmp_path / "expert")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}


def interrupted_run(recipe: TrainRecipe, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A run that ends in step 5; its checkpoints after steps 2 and 4."""
    with cut_short(monkeypatch, 5, crash), pytest.raises(Crash):
        train(recipe, out_path=out)
    result = sorted(out.with_name(f"{out.name}.checkpoints").glob("checkpoint-*"))
    assert [path.name for path in result] == ["checkpoint-2", "checkpoint-4"]
    return result


def test_an_incomplete_checkpoint_is_skipped(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a run that was killed while it saved a checkpoint."""
    recipe = make_recipe(training=OPTIONS)
    unbroken = files(train(recipe, out_path=tmp_path / "unbroken").path)
    _, last = interrupted_run(recipe, tmp_path / "broken", monkeypatch)
    for name in ("complete", "scheduler.pt"):
        (last / name).unlink()
    resumed = train(recipe, out_path=tmp_path / "broken", resume=True)
    assert (resumed.resumed_from, files(resumed.path)) == (2, unbroken)


def other_weights(file: Path) -> None:
    tensors = load(file.read_bytes())
    tensors["model.norm.weight"][3] += 0.25
    file.write_bytes(save(tensors, {"format": "pt"}))


def other_rows(file: Path) -> None:
    write_jsonl(file, echo_rows(8, seed=2))


def other_text(file: Path) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"changed": 1} if file.name == "config.json" else content, indent=1))


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "base/model.safetensors": (": base", other_weights),
    "base/config.json": (": base", other_text),
    "base/tokenizer.json": (": base", other_text),
    "held-out.jsonl": (": validation_rows", other_rows),  # their losses would be mixed with those on the earlier rows
    "broken.checkpoints/run.json": (r"run\.json", Path.unlink),
}


def test_a_run_is_not_resumed_on_what_was_changed(
    tmp_path: Path, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same paths, and the same time stamps, with other content."""
    base = shutil.copytree(make_recipe().base_model, tmp_path / "base")
    held_out = write_jsonl(tmp_path / "held-out.jsonl", echo_rows(8, seed=1))
    validation = {"datasets": [{"path": str(held_out), "prompt": "{question}", "completion": " {answer}"}]}
    recipe = make_recipe(base_model=str(base), training=OPTIONS, validation=validation)
    interrupted_run(recipe, tmp_path / "broken", monkeypatch)
    for name, (named, change) in CHANGES.items():
        file = tmp_path / name
        before, stamp = file.read_bytes(), file.stat()
        change(file)
        if file.exists():
            os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        with refused(RunError, "resume", match=named):
            train(recipe, out_path=tmp_path / "broken", resume=True)
        file.write_bytes(before)
    assert train(recipe, out_path=tmp_path / "broken", resume=True).resumed_from == 4


BROKEN_CONFIGS = {"heads": {"num_attention_heads": 0}, "rope": {"rope_parameters": {"rope_type": "spiral"}},
                  "vocabulary": {"vocab_size": 10**12}}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN_CONFIGS)
def test_a_broken_config_of_the_base_is_refused(tmp_path: Path, make_recipe: MakeRecipe, kind: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(make_recipe().base_model, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | BROKEN_CONFIGS[kind]))
    with pytest.raises(AdapterswapError, match="base"):
        train(make_recipe(base_model=str(base), training=OPTIONS), out_path=tmp_path / "expert")
    assert not (tmp_path / "expert").exists()


def test_a_lone_surrogate_names_its_row(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    rows = [{"question": "? w1 w2", "answer": "w2"}, {"question": "? w1 \ud800", "answer": "w1"}] * 8
    with pytest.raises(AdapterswapError, match=r"rows\.jsonl"):
        train(make_recipe(rows=rows, training=OPTIONS), out_path=tmp_path / "expert")
