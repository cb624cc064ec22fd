"""Compositions of full checkpoints, against plain torch loops over whole state dicts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, logits, weights
from tolerances import close

import adapterswap
from core.merging.conftest import ARCHITECTURES, State, equal, loaded

PARTS = {
    "attention": re.compile(r"self_attn|\.attn\.|\.attention\."),
    "mlp": re.compile(r"\.mlp\.|block_sparse_moe"),
}


def layer_of(name: str) -> int | None:
    result = re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", name)
    return int(result[1]) if result else None


def is_transformer(name: str) -> bool:
    """Whether Algorithm 1's line 2 gives this parameter a layer: attention and feed-forward parameters only."""
    return any(part.search(name) for part in PARTS.values())


def algorithm_1(
    task: State,
    language: State,
    *,
    bottom: int,
    top: int,
    bottom_transition: int = 0,
    top_transition: int = 0,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
    norms: str = "average",
) -> State:
    """Algorithm 1 of Bandarkar et al. 2025, parameter by parameter, with line 5 read as "and"."""
    merged = {}
    total = task_weight + language_weight
    for name in task:
        layer = layer_of(name) if is_transformer(name) or norms == "layer" else None
        if layer is not None and (layer < bottom or layer > LAYERS - 1 - top):
            merged[name] = language[name]
        elif layer is not None and layer > bottom - 1 + bottom_transition and layer < LAYERS - top - top_transition:
            merged[name] = task[name]
        else:
            exact = (task_weight * task[name].double() + language_weight * language[name].double()) / total
            merged[name] = exact.to(task[name].dtype)
    return merged


def same_weights(actual: State, wanted: State, *experts: State) -> None:
    """Bit-equal where a tensor is an expert's own; the rounding of a sum elsewhere."""
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert actual[name].dtype == tensor.dtype
        if any(tensor is expert[name] for expert in experts):
            assert torch.equal(actual[name], tensor), name
        else:
            close(actual[name], tensor, name=name)


ZONES = [
    {"bottom": 2, "top": 1},
    {"bottom": 1, "top": 1, "bottom_transition": 1, "top_transition": 2},
    {"bottom": 2, "top": 0, "bottom_transition": 1, "task_weight": 0.3, "language_weight": 1.7},
    {"bottom": 2, "top": 1, "norms": "layer"},
]


@pytest.mark.parametrize("zones", ZONES, ids=lambda zones: "-".join(map(str, zones.values())))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_algorithm_1(architecture: str, zones: dict[str, Any], model: Callable[..., Path], tmp_path: Path) -> None:
    task, language = model(architecture, seed=1), model(architecture, seed=2)
    composition = adapterswap.Composition(task="task", language="language", **zones)
    plan = adapterswap.compose(composition, {"task": task, "language": language})
    assert plan.is_model
    assert plan.base.weights is None
    merged = adapterswap.merge(plan, out_path=tmp_path / "out")
    ours, theirs = weights(task), weights(language)
    same_weights(weights(merged), algorithm_1(ours, theirs, **zones), ours, theirs)
    reference = loaded(task)
    reference.load_state_dict(loaded(merged).state_dict())
    assert torch.isfinite(logits(reference)).all()


@pytest.mark.parametrize("partition", ["A", "B", "C", "Z"])
def test_partitions(partition: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """Counts of 28 layers in proportion for 6: 6 and 2 become 1 and 0, 8 and 4 become 2 and 1."""
    task, language = model(seed=1), model(seed=2)
    composition = adapterswap.Composition(task="task", language="language", partition=partition)
    plan = adapterswap.compose(composition, {"task": task, "language": language})
    merged = weights(adapterswap.merge(plan, out_path=tmp_path / "out"))
    outer = {"A": {0}, "B": {0, 1, 5}, "C": {0}, "Z": {0, 1, 5}}[partition]
    ours, theirs = weights(task), weights(language)
    wanted = {}
    for name in ours:
        if not is_transformer(name):
            wanted[name] = (ours[name] + theirs[name]) / 2
        elif partition == "A" and "self_attn" in name:
            wanted[name] = theirs[name]
        else:
            wanted[name] = (theirs if (layer_of(name) in outer) != (partition == "Z") else ours)[name]
    same_weights(merged, wanted, ours, theirs)


def test_reset_gives_layers_back_to_the_base(model: Callable[..., Path], tmp_path: Path) -> None:
    base, task = model(), model(seed=1)
    plan = adapterswap.layer_swap(task, "base", bottom=2, top=1, base_model=str(base))
    merged = weights(adapterswap.merge(plan, out_path=tmp_path / "out"))
    ours, original = weights(task), weights(base)
    equal(merged, {n: original[n] if is_transformer(n) and layer_of(n) in {0, 1, 5} else ours[n] for n in ours})
