"""The pipeline: order, errors, early ends, several devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from crafting import snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

import adapterswap
from adapterswap.merging import ModelForm, blocks, prepare_model, streaming
from adapterswap.merging.ahead import ahead
from merging.conftest import equal, weights


@settings(deadline=None)
@given(items=st.lists(st.integers()), depth=st.integers(1, 4), stages=st.integers(1, 3))
def test_items_come_in_order(items: list[int], depth: int, stages: int) -> None:
    chained: Iterator[int] = iter(items)
    for _ in range(stages):
        chained = ahead(chained, depth)
    assert list(chained) == items


def test_an_error_of_the_producer_is_raised_at_the_consumer() -> None:
    def produce() -> Iterator[int]:
        yield 1
        raise OSError(5, "Input/output error")

    found = ahead(ahead(produce(), 2), 2)
    assert next(found) == 1
    with pytest.raises(OSError, match="Input/output error"):
        next(found)


def test_the_producer_stops_with_the_consumer() -> None:
    """However many items there would be; the iterator is closed, and no thread is left."""
    before = threading.active_count()
    closed = []

    def produce() -> Iterator[int]:
        try:
            number = 0
            while True:
                yield number
                number += 1
        finally:
            closed.append(True)

    found = ahead(ahead(produce(), 2), 2)
    assert [next(found) for _ in range(5)] == [0, 1, 2, 3, 4]
    found.close()
    assert closed == [True]
    assert threading.active_count() == before


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu"] * 5])
def test_layers_spread_over_devices_give_the_same_bytes(
    devices: list[str], model: Callable[..., Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    plan = adapterswap.layer_swap(expert(seed=1), model(seed=2), bottom=2, top=1, bottom_transition=1)
    merged = prepare_model(plan, ModelForm("40KB"))
    for name, on in (("one", ["cpu"]), ("many", devices)):
        (tmp_path / name).mkdir()
        streaming.stream(merged.plan, merged.shards, tmp_path / name, devices=on, kept_rows={})
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
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, rtol=1e-6, atol=1e-7)
