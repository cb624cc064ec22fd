"""The benchmark behind the table of docs/methods.md: its configurations, one small seed, its numbers over seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from importing import loaded
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from adapterswap import layer_swap
from adapterswap.core.methods.registry import BUILT_IN
from adapterswap.core.planning.composition import Composition
from adapterswap.experiments.lab.scenes import SCENES, draw_problems, source_rows
from adapterswap.experiments.lab.seed import Questions

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "methods_lab.py"


def test_every_method_has_a_budget() -> None:
    choices = loaded(BENCHMARK).CHOICES
    methods = [name for name, method in BUILT_IN.items() if method.as_composition]
    assert list(choices) == methods
    for name, configurations in choices.items():
        assert 1 <= len(configurations) <= 8
        assert len({str(fields) for fields in configurations}) == len(configurations)
        for fields in configurations:
            Composition(method=name, language=["a", "b"] if name == "adamergex" else "a", **fields)


def test_the_source_expert_sees_no_xx() -> None:
    scene = replace(SCENES["gap"], language_rows=200)
    words = set().union(*(row.words for row in source_rows(scene, 0)))
    assert "ka" not in words
    assert "<xx>" not in words


@pytest.mark.full
def test_a_small_seed(tmp_path: Path) -> None:
    lab = loaded(BENCHMARK)
    lab.ZONES[2:], lab.SCALES[2:], lab.TRAININGS[:] = [], [], [{"learning_rate": 1e-3, "max_steps": 2}]
    scene = replace(SCENES["gap"], math_rows=640, language_rows=320)
    arguments = (scene, ["adamergex"], tmp_path, {"development": 40, "test": 80, "english": 20}, 0)
    result = lab.compare_seed(*arguments)
    lab.make_models = None
    assert lab.compare_seed(*arguments) == result  # a finished seed is read
    rows, place = result["rows"], tmp_path / "seed-0"
    assert list(rows) == ["layer_swap", "adamergex", *lab.CONTROLS]
    for row in rows.values():
        assert row["development"][row["chosen"]["all"]] == max(row["development"])
        assert set(row["xx"]) == {str(number) for number in row["chosen"].values()}
    (zones,) = rows["inverse swap"]["configurations"]
    assert zones == rows["layer_swap"]["configurations"][rows["layer_swap"]["chosen"]["all"]]

    swapped = layer_swap(place / "math", place / "language", num_layers=6, **zones).write(tmp_path / "swap")
    trained = place / "trained-10-0.001-2"
    test = draw_problems(scene, "test", 80)
    for name, base, adapter in (
        ("math expert", "base", place / "math"),
        ("layer_swap", "base", swapped),
        ("trained on 10", "math-merged", trained),
    ):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / base), adapter).eval()
        marks = (rows[name]["xx"][str(rows[name]["chosen"]["all"])], rows[name]["en"])
        for mark, questions in zip(marks, (Questions(test, "xx"), Questions(test[:20], "en")), strict=True):
            assert mark == "".join("01"[right] for right in questions.exact_match(model).astype(int)), name

    drawn, own = (load_file(place / name / "adapter_model.safetensors") for name in ("random", "language"))
    for key in (key for key in own if "lora_A" in key):
        a, b = (tensors[key.replace("lora_A", "lora_B")] @ tensors[key] for tensors in (drawn, own))
        assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(b), rel=1e-5)
        assert abs((a * b).sum()) < 0.5 * np.linalg.norm(b) ** 2


def test_numbers_over_seeds() -> None:
    lab, rng = loaded(BENCHMARK), np.random.default_rng(0)

    def row(name: str, share: float) -> dict[str, Any]:
        xx = {str(place): "".join("01"[value] for value in (rng.random(50) < share).astype(int)) for place in (0, 1)}
        few = {} if name.startswith("trained") else {"10": 1, "30": 0, "100": 0}
        return {"configurations": [{}, {"x": 1}], "chosen": {"all": 0, **few}, "xx": xx, "en": "10"}

    names = ["layer_swap", "soup", *lab.CONTROLS]
    seeds = [{"rows": {name: row(name, 0.05 * (place + 4)) for place, name in enumerate(names)}} for _ in range(4)]
    results = lab.compared(seeds)

    def right(name: str, place: int = 0) -> list[float]:
        return [seed["rows"][name]["xx"][str(place)].count("1") / 50 for seed in seeds]

    soup = results["rows"]["soup"]
    assert soup["xx"] == pytest.approx({"mean": np.mean(right("soup")), "spread": np.std(right("soup"), ddof=1)})
    assert soup["en"]["mean"] == 0.5
    assert soup["few"]["10"] == pytest.approx(np.mean(right("soup", 1)))
    assert list(soup["minus"]) == ["layer_swap", "math expert"]
    minus = soup["minus"]["layer_swap"]
    assert minus["mean"] == pytest.approx(np.mean(right("soup")) - np.mean(right("layer_swap")))
    assert minus["low"] < minus["mean"] < minus["high"]
    on_ten = {name: np.mean(right(name, 1)) for name in ("soup", "layer_swap")}
    training = results["training"]["10"]
    assert training["best"] == max(on_ten, key=lambda name: on_ten[name])
    for name, difference in training["minus"].items():
        assert difference["mean"] == pytest.approx(on_ten[name] - np.mean(right("trained on 10")))
