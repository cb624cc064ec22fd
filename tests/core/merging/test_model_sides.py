"""Full weights of several experts per side, adapters and full checkpoints mixed, against numpy on dense ΔW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import weights
from pico_models import merged_by_peft
from tolerances import close, near

import adapterswap
from adapterswap import Composition
from adapterswap.core.writing.stream import ModelForm
from adapterswap.core.writing.weights import prepare_model
from adapterswap.tools.verification import verify
from core.planning.test_sides import METHODS, combined, label

Dense = dict[str, np.ndarray]

FULL = (("tuned",), ("full",))
MIXED = [
    (("math", "tuned"), ("swahili", "code")),
    (("math", "code"), ("code", "swahili")),
    (("math", "code"), ("full",)),
]
# Every method on full checkpoints alone, and on a mixture.
CELLS = [(options, FULL) for options in METHODS] + [
    (options, MIXED[number % len(MIXED)]) for number, options in enumerate(METHODS)
]


def dense(folder: Path, base: Path, model: Dense) -> Dense:
    """ΔW of an adapter or a checkpoint in float64."""
    result = merged_by_peft(base, folder) if (folder / "adapter_config.json").exists() else weights(folder)
    return {name: result[name].double().numpy() - tensor for name, tensor in model.items()}


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        pytest.param(*cell, id=f"{'-'.join(map(str, cell[0].values()))} {'+'.join(map(label, cell[1]))}")
        for cell in CELLS
    ],
)
def test_each_side_is_averaged_first(
    options: dict[str, Any], sides: tuple[tuple[str, ...], ...], base: Callable[..., Path], model: Callable[..., Path],
    expert: Callable[..., Path], tmp_path: Path,
) -> None:  # fmt: skip
    experts = {"math": expert(seed=1), "code": expert(seed=3, r=4), "tuned": model(seed=4), "full": model(seed=6)}
    experts["swahili"] = model(seed=5) if "tuned" in sides[0] else expert(seed=5)
    start = {name: tensor.double().numpy() for name, tensor in weights(base("llama")).items()}
    task, language = sides
    composition = Composition(
        task=task, language=language, language_weight=0.5, base_model=str(base("llama")), **options
    )
    plan = adapterswap.compose(composition, experts)
    merged = prepare_model(plan, ModelForm())
    out = merged.write(tmp_path / "out")
    single = {name: dense(experts[name], base("llama"), start) for name in {*task, *language}}
    averages = {
        label(names): {key: sum(single[name][key] for name in names) / len(names) for key in start} for names in sides
    }
    magnitudes = [1.0, 1.0]
    if "weights" in options:
        assert list(merged.magnitudes) == list(averages)
        magnitudes = list(merged.magnitudes.values())
        for names, actual in zip(sides, magnitudes, strict=True):
            is_full = any(not (experts[name] / "adapter_config.json").exists() for name in names)
            matrices = [d for d in averages[label(names)].values() if d.ndim > 1 and (is_full or d.any())]
            largest = max(float(np.abs(matrix).max()) for matrix in start.values() if matrix.ndim > 1)
            expected = float(np.concatenate([np.abs(d).mean(1) for d in matrices]).mean())
            assert actual == near(expected, scale=largest)
    for key, written in weights(out).items():
        parts = {
            side: (weight, averages[side][key]) for side, weight in zip(averages, (1.0, 0.5), strict=True)
            if averages[side][key].any()
        }  # fmt: skip
        expected = start[key]
        if len(parts) == 2 or (parts and options["method"] != "slerp"):
            used = [m for side, m in zip(averages, magnitudes, strict=True) if side in parts]
            if options["method"] == "soup" and len(parts) == 1:
                continue  # the other side's ΔW is zero: covered by the plain tests of soups
            expected = expected + combined(options, parts, key.removesuffix(".weight"), used)
        elif parts:
            ((side, (_, delta)),) = parts.items()
            expected = expected + (2 / 3 if side == label(task) else 1 / 3) * delta
        scale = np.abs(expected).max() + sum(np.abs(delta).max() for _, delta in parts.values())
        close(written.numpy(), expected, scale=scale, name=key)
    assert verify(out, {name: experts[name] for name in single}, base_model=str(base("llama"))).equal


def test_the_strip_names_a_side_as_one(base: Callable[..., Path], model: Callable[..., Path]) -> None:
    experts = {"math": model(seed=1), "code": model(seed=2), "swahili": model(seed=3)}
    composition = Composition(task=["math", "code"], language="swahili", bottom=2, top=1, norms="layer")
    plan = adapterswap.compose(composition, experts)
    assert plan.is_model
    assert plan.strip.splitlines()[1:] == [
        "layers  sscccs",
        "        c mean(code, math), s swahili",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "layer_swap", "bottom": 1, "top": 1, "bottom_transition": 1},
        {"method": "slerp"},
        {"method": "ties", "density": 1.0},
        {"method": "soup", "weights": "magnitude"},
    ],
    ids=lambda options: options["method"],
)
def test_an_adapter_in_an_average_equals_its_full_weights(
    options: dict[str, Any], model: Callable[..., Path], lora: Callable[..., Path], tmp_path: Path
) -> None:
    """GPT-2 stores its weights transposed compared with ΔW."""
    adapter = lora("gpt2", seed=1)
    full = adapterswap.merge(adapter, out_path=tmp_path / "full")
    others = {"code": model("gpt2", seed=2), "swahili": model("gpt2", seed=3)}
    composition = Composition(
        task=["math", "code"], language="swahili", base_model=str(model("gpt2")), **options
    )  # fmt: skip
    results = []
    for name, math in (("mixed", adapter), ("whole", full)):
        plan = adapterswap.compose(composition, {"math": math, **others})
        results.append(weights(adapterswap.merge(plan, out_path=tmp_path / name)))
    close(*results)
