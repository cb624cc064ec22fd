"""Worker threads: every item once, errors, early ends, several devices, blocks of any size."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import weights
from crafting import snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import close

import adapterswap
from adapterswap import AdapterswapError
from adapterswap.core.model.opened_base import choose_device
from adapterswap.core.writing import blocks, stream
from adapterswap.core.writing.stream import ModelForm, Stopped, work_off
from adapterswap.core.writing.weights import prepare_model
from core.merging.conftest import equal


@settings(deadline=None)
@given(items=st.lists(st.integers()), workers=st.integers(1, 4))
def test_every_item_is_processed_once(items: list[int], workers: int) -> None:
    done: list[int] = []
    work_off(items, lambda item, stopped: done.append(item), workers)
    assert sorted(done) == sorted(items)
    if workers == 1:
        assert done == items


def test_the_first_error_stops_all() -> None:
    """The remaining items are skipped and running ones are stopped; no thread is left."""
    before = threading.active_count()
    gave_up = threading.Event()

    def do(item: int, stopped: Stopped) -> None:
        if item == 3:
            raise OSError(5, "Input/output error")
        while item == 2 and not stopped():
            time.sleep(0.001)
        if item == 2:
            gave_up.set()

    with pytest.raises(OSError, match="Input/output error"):
        work_off(range(100_000), do, 2)
    assert gave_up.is_set()
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["cpu", "auto", "cpu:0", "cuda", "cuda:99", "mps", "meta", "abacus", ""])
def test_devices_are_named_as_in_torch(name: str) -> None:
    """The same kind of device, or the same refusal."""

    def outcome(choose: Callable[[], list[str]]) -> set[str]:
        try:
            return {torch.device(device).type for device in choose()}
        except AdapterswapError as error:
            return {str(error)}

    assert outcome(lambda: stream.choose_devices(name)) == outcome(lambda: [str(choose_device(name))])


def test_devices_hold_numbers() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type != "meta"
    with pytest.raises(AdapterswapError, match="The device 'meta' cannot be used: Cannot copy out of meta tensor"):
        choose_device("meta")


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu"] * 5])
def test_layers_spread_over_devices_give_the_same_bytes(
    devices: list[str], model: Callable[..., Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    plan = adapterswap.layer_swap(expert(seed=1), model(seed=2), bottom=2, top=1, bottom_transition=1)
    merged = prepare_model(plan, ModelForm("40KB"))
    for name, on in (("one", ["cpu"]), ("many", devices)):
        (tmp_path / name).mkdir()
        stream.stream(merged.plan, merged.shards, tmp_path / name, devices=on, kept_rows={})
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "many")


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_the_size_of_blocks_changes_nothing(
    kind: str, model: Callable[..., Path], expert: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones cut every matrix into rows; a product of factors may then be added up in another order."""
    task = expert(seed=1) if kind == "mixed" else model(seed=1)
    plan = adapterswap.layer_swap(task, model(seed=2), bottom=2, top=1, bottom_transition=1)
    whole = weights(adapterswap.merge(plan, out_path=tmp_path / "whole"))
    monkeypatch.setattr(blocks, "_COPIED", 64)
    monkeypatch.setattr(blocks, "_COMPUTED", 100)
    cut = weights(adapterswap.merge(plan, out_path=tmp_path / "cut"))
    if kind == "full":
        equal(whole, cut)
    close(cut, whole)
