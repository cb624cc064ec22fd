"""Sides of several experts on a loaded model: what it computes is what the written composition computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import load_base, logits
from peft import PeftModel
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap import Composition
from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import UnsupportedError

TASK, LANGUAGE = ("math", "telugu"), ("swahili", "math")


@pytest.mark.parametrize(
    "options",
    [
        {"method": "slerp"},
        {"method": "nuslerp", "language_weight": 0.5},
        {"method": "multislerp", "task_weight": 2},
        {"method": "model_stock"},
        {"method": "soup", "weights": "magnitude", "task_weight": 2},
        {"method": "task_arithmetic", "scale": 0.6},
        {"bottom": 2, "top": 1, "bottom_transition": 1, "weights": "magnitude"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_sides_live_equal_the_written_sides(
    options: dict[str, Any], composer: Callable[..., LiveComposer], folders: Callable[..., dict[str, Path]],
    base: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    """`math` is on both sides."""
    composition = Composition(task=TASK, language=LANGUAGE, **options)
    out = adapterswap.write_adapter(adapterswap.compose(composition, folders()), tmp_path / "out")
    written = logits(PeftModel.from_pretrained(load_base(base("llama")), out))
    composing = composer()
    with composing.use(composition):
        close(logits(composing.model), written, depth=6)
        composing.save(tmp_path / "saved")
    name = "adapter_model.safetensors"
    assert (tmp_path / "saved" / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"method": "ties", "density": 0.5},
        {"method": "tsv"},
        {"method": "karcher"},
        {"method": "model_stock", "filter_wise": True},
    ],
    ids=lambda options: options["method"],
)
def test_nonlinear_methods_of_sides_are_not_live(
    options: dict[str, Any], composer: Callable[..., LiveComposer]
) -> None:
    composing = composer()
    with refused(UnsupportedError, "composition"):
        composing.set(Composition(task=TASK, language=LANGUAGE, **options))
