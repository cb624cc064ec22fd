"""Several experts on a side count as one, their average, in every method. The reference is numpy on dense ΔW."""

from __future__ import annotations

import hashlib
import json
import math as mathematics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap import Composition
from adapterswap.kit.errors import ExpertError, FieldError
from adapterswap.tools.verification import verify
from core.writing.test_blends import deltas, handmade

Deltas = dict[str, np.ndarray]

FULL = 12  # the largest rank that a 12×8 or 8×12 module can have, and more
LAYERS = 5
NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sides")
    return {
        name: handmade(root / name, layers=LAYERS, rank=1 + i % 3, alpha=3 + i, rslora=i % 2 == 0, seed=i)
        for i, name in enumerate(NAMES)
    }


def mean(members: Sequence[Deltas]) -> Deltas:
    return {name: sum(each[name] for each in members) / len(members) for name in members[0]}


def largest(delta: np.ndarray, density: float) -> np.ndarray:
    order = np.argsort(-np.abs(delta), axis=None)[: max(1, int(density * delta.size))]
    kept = np.zeros(delta.size)
    kept[order] = delta.ravel()[order]
    return kept.reshape(delta.shape)


def dropped(delta: np.ndarray, density: float, seed: int, side: str, module: str) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}\0{side}\0{module}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest, "little")).random(delta.shape, np.float32)
    return np.where(random < density, delta / density, 0)


def elected(parts: Sequence[np.ndarray], weights: Sequence[float], *, normalize: bool) -> np.ndarray:
    weighted = [weight * part for weight, part in zip(weights, parts, strict=True)]
    sign = np.where(sum(weighted) >= 0, 1, -1)
    agreeing = [part * sign > 0 for part in parts]
    total = sum(np.where(agrees, part, 0) for agrees, part in zip(agreeing, weighted, strict=True))
    divisor = sum(np.where(agrees, weight, 0.0) for agrees, weight in zip(agreeing, weights, strict=True))
    return total / np.where(divisor == 0, 1, divisor) if normalize else total


def turned(one: np.ndarray, other: np.ndarray, t: float) -> np.ndarray:
    angle = mathematics.acos(np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other))
    return (mathematics.sin((1 - t) * angle) * one + mathematics.sin(t * angle) * other) / mathematics.sin(angle)


def combined(
    composition: Mapping[str, Any], sides: Mapping[str, tuple[float, np.ndarray]], module: str, magnitudes: list[float]
) -> np.ndarray:
    """Apply a method's formula to the sides' dense ΔW of one module."""
    method, scale = composition["method"], composition.get("scale", 1.0)
    density, seed = composition.get("density", 1.0), composition.get("seed", 0)
    weights, parts = [w for w, _ in sides.values()], [part for _, part in sides.values()]
    if method == "slerp":
        return turned(parts[0], parts[1], weights[1] / sum(weights))
    if method == "soup":
        weights = [w / m for w, m in zip(weights, magnitudes, strict=True)]
        return sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)
    if method == "task_arithmetic":
        return scale * sum(w * part for w, part in zip(weights, parts, strict=True))
    if method.startswith("dare"):
        parts = [dropped(part, density, seed, side, module) for side, part in zip(sides, parts, strict=True)]
    else:
        parts = [largest(part, density) for part in parts]
    if method in ("ties", "dare_ties"):
        return scale * elected(parts, weights, normalize=method == "ties")
    return scale * sum(w * part for w, part in zip(weights, parts, strict=True))


METHODS: list[dict[str, Any]] = [
    {"method": "soup"},
    {"method": "soup", "weights": "magnitude"},
    {"method": "task_arithmetic", "scale": 0.7},
    {"method": "task_arithmetic", "scale": -0.5, "allow_negative": True},
    {"method": "slerp"},
    {"method": "ties", "density": 0.6, "scale": 0.9},
    {"method": "dare_linear", "density": 0.5, "seed": 3},
    {"method": "dare_ties", "density": 0.5, "seed": 4},
    {"method": "magnitude_prune", "density": 0.4},
]
SIDES = [(("a",), ("b",)), (("a", "b", "c"), ("d", "e")), (("c", "a"), ("a", "d")), (("a",), ("b", "c"))]


def label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"mean({', '.join(sorted(names))})"


@pytest.mark.parametrize("sides", SIDES, ids=lambda sides: "+".join("".join(side) for side in sides))
@pytest.mark.parametrize("options", METHODS, ids=lambda options: "-".join(map(str, options.values())))
def test_each_side_is_averaged_first(
    options: dict[str, Any], sides: tuple[tuple[str, ...], tuple[str, ...]], experts: dict[str, Path], tmp_path: Path
) -> None:
    task, language = sides
    weights = {"task_weight": 1.5, "language_weight": 0.5}
    composition = Composition(task=task, language=language, num_layers=LAYERS, **weights, **options)
    out = adapterswap.write_adapter(adapterswap.compose(composition, experts), tmp_path / "out", max_rank=FULL)
    single = {name: deltas(folder) for name, folder in experts.items()}
    averages = {label(names): mean([single[name] for name in names]) for names in sides}
    magnitudes = [1.0, 1.0]
    if "weights" in options:  # of the average, over all rows of all modules
        magnitudes = [
            float(np.concatenate([np.abs(d).mean(1) for d in side.values()]).mean()) for side in averages.values()
        ]
    for module, actual in deltas(out).items():
        by_side = {
            side: (weight, averages[side][module]) for side, weight in zip(averages, weights.values(), strict=True)
        }
        expected = combined(options, by_side, module, magnitudes)
        close(actual, expected, depth=2, name=module)
    assert json.loads((out / "adapterswap.json").read_text())["format"] == 1
    assert verify(out, {name: experts[name] for name in composition.expert_names}).equal


def test_task_arithmetic_is_the_composition_of_its_name(experts: dict[str, Path]) -> None:
    plan = adapterswap.task_arithmetic(experts["a"], experts["b"], scale=-0.5, allow_negative=True, num_layers=LAYERS)
    options = {"method": "task_arithmetic", "scale": -0.5, "allow_negative": True, "num_layers": LAYERS}
    assert plan.rules == adapterswap.compose(Composition(task="a", language="b", **options), experts).rules


def test_the_order_on_a_side_changes_nothing(experts: dict[str, Path], tmp_path: Path) -> None:
    reports = []
    for task in (("a", "b"), ("b", "a")):
        composition = Composition(task=task, language="c", method="dare_linear", density=0.5, num_layers=LAYERS)
        plan = adapterswap.compose(composition, experts)
        reports.append(deltas(adapterswap.write_adapter(plan, tmp_path / task[0], max_rank=FULL)))
    close(reports[1], reports[0], depth=2)


@pytest.mark.parametrize("options", METHODS[2:], ids=lambda options: str(options["method"]))
def test_experts_of_one_side_alone_are_combined_singly(
    options: dict[str, Any], experts: dict[str, Path], tmp_path: Path
) -> None:
    composition = Composition(task=["a", "b"], language="base", num_layers=LAYERS, task_weight=0.8, **options)
    out = adapterswap.write_adapter(adapterswap.compose(composition, experts), tmp_path / "out", max_rank=FULL)
    single = {name: deltas(experts[name]) for name in ("a", "b")}
    for module, actual in deltas(out).items():
        expected = combined(options, {name: (0.8, single[name][module]) for name in single}, module, [])
        close(actual, expected, depth=2, name=module)


@pytest.mark.parametrize("shared", [False, True])
def test_a_row_threshold_applies_to_each_sides_average(shared: bool, experts: dict[str, Path], tmp_path: Path) -> None:
    """An expert on both sides keeps the rows that either side's average keeps, with that side's weight."""
    task, language = ("a", "b"), ("a" if shared else "c", "d")
    single = {name: deltas(folder) for name, folder in experts.items()}
    averages = [mean([single[name] for name in names]) for names in (task, language)]
    threshold = float(
        np.median(np.concatenate([np.abs(delta).mean(1) for side in averages for delta in side.values()]))
    )
    composition = Composition(
        task=task, language=language, num_layers=LAYERS, method="task_arithmetic", row_threshold=threshold
    )
    out = adapterswap.write_adapter(adapterswap.compose(composition, experts), tmp_path / "out")
    for module, actual in deltas(out).items():
        kept = [side[module] * (np.abs(side[module]).mean(1) >= threshold)[:, None] for side in averages]
        expected = kept[0] + kept[1]
        close(actual, expected, depth=2, name=module)


def test_a_layer_swap_gives_each_zone_to_a_side(experts: dict[str, Path], tmp_path: Path) -> None:
    """The sides own their layers, and the strip and its legend name each side as one."""
    composition = Composition(
        task=["b", "a"], language=["c", "d"], bottom=1, top=1, bottom_transition=1, num_layers=LAYERS
    )
    plan = adapterswap.compose(composition, experts)
    assert plan.strip.splitlines() == [
        "        01234",
        "layers  c+aac",
        "        c mean(c, d), a mean(a, b), + 0.5·mean(a, b) + 0.5·mean(c, d)",
    ]
    out = deltas(adapterswap.write_adapter(plan, tmp_path / "out"))
    single = {name: deltas(folder) for name, folder in experts.items()}
    task, language = mean([single["a"], single["b"]]), mean([single["c"], single["d"]])
    for module, actual in out.items():
        layer = int(module.split(".")[2])
        share = {0: 1.0, 1: 0.5, LAYERS - 1: 1.0}.get(layer, 0.0)
        expected = share * language[module] + (1 - share) * task[module]
        close(actual, expected, depth=2, name=module)


def test_inspect_shows_sides_as_owners(run: Callable[..., Result], experts: dict[str, Path], tmp_path: Path) -> None:
    composition = Composition(task=["a", "b"], language=["c", "d"], bottom=1, top=1, num_layers=LAYERS)
    out = adapterswap.write_adapter(adapterswap.compose(composition, experts), tmp_path / "out")
    shown = run("inspect", out).stdout
    assert "layers  caaac" in shown
    assert "mean(a, b)" in shown


@pytest.mark.parametrize(
    "content",
    [
        {"task": ["a", "b"], "language": ["b", "a"]},
        {"task": ["a"], "language": ["a"]},
        {"task": ["a"], "language": ["base"]},
        {"task": ["a", "b", "c"], "language": ["base"]},
        {"task": ["a"], "language": ["b"], "task_weight": -1, "language_weight": 3, "allow_negative": True},
    ],
)
def test_slerp_needs_two_that_differ(content: dict[str, Any], tmp_path: Path, run: Callable[..., Result]) -> None:
    with pytest.raises(FieldError, match="slerp"):
        Composition(method="slerp", **content)
    recipe = tmp_path / "recipe.yaml"
    names = {name for side in ("task", "language") for name in content[side]} - {"base"}
    recipe.write_text(json.dumps({"experts": {name: f"x/{name}" for name in names}, "method": "slerp", **content}))
    composing = ("compose", recipe, "--dry-run", "-o", tmp_path / "out")
    for code, command in ((1, ("recipes", "validate", recipe)), (2, composing)):
        result = run(*command)
        assert result.exit_code == code, result.output
        assert "slerp" in result.output


@pytest.mark.parametrize(
    "content",
    [
        {"task": ["a", "a"], "language": ["b"]},
        {"task": ["a", "b"], "language": ["mean(a, b)"]},
        {"task": ["a"], "language": ["base"], "method": "soup", "weights": "magnitude"},
        {"task": ["a"], "language": ["base"], "bottom_transition": 1, "weights": "magnitude"},
        {"task": ["a"], "language": ["b"], "method": "task_arithmetic", "task_weight": 1e9, "scale": 1e3},
        {"allocation": [{"blend": {"x": 1, "c": 1}, "averages": {"x": ["a", "b"], "y": ["a"]}}]},
        {"allocation": [{"blend": {"x": 1, "c": 1}, "averages": {"x": []}}]},
        {"allocation": [{"blend": {"x": 1, "c": 1}, "averages": {"x": ["a", "a"]}}]},
        {"allocation": [{"expert": "x", "averages": {"x": ["x", "a"]}}]},
        {"allocation": [{"expert": "x", "averages": {"x": ["a", "b"]}}, {"expert": "x", "layers": "1"}]},
        {"allocation": [{"blend": {"a": 1, "base": 1}, "weights": "magnitude"}]},
    ],
)
def test_sides_that_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=r"twice|once|average|magnitude|1e9"):
        Composition.model_validate(content)


def test_an_average_in_a_rule(experts: dict[str, Path], tmp_path: Path) -> None:
    """The same in YAML: a name that stands for the average of several experts."""
    rule = {"blend": {"reasoning": 2, "c": 1}, "averages": {"reasoning": ["a", "b"]}, "method": "ties", "density": 0.5}
    composition = Composition.model_validate({"allocation": [rule], "num_layers": LAYERS})
    assert composition.expert_names == ("a", "b", "c")
    out = adapterswap.write_adapter(adapterswap.compose(composition, experts), tmp_path / "out", max_rank=FULL)
    single = {name: deltas(experts[name]) for name in "abc"}
    for module, actual in deltas(out).items():
        parts = {"reasoning": (2.0, (single["a"][module] + single["b"][module]) / 2), "c": (1.0, single["c"][module])}
        expected = combined({"method": "ties", "density": 0.5}, parts, module, [])
        close(actual, expected, depth=2, name=module)


def test_an_untrained_expert_has_no_magnitude(experts: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    still = handmade(tmp_path / "still", layers=LAYERS, rank=2, alpha=4, rslora=True, seed=1)
    tensors = load_file(still / "adapter_model.safetensors")
    save_file(
        {key: value * ("lora_A" in key) for key, value in tensors.items()}, still / "adapter_model.safetensors",
        {"format": "pt"},
    )  # fmt: skip
    given = {**experts, "still": still}
    requested = {"method": "soup", "weights": "magnitude", "num_layers": LAYERS}
    plan = adapterswap.compose(Composition(task="a", language="still", **requested), given)
    with refused(ExpertError, "weights"):
        adapterswap.write_adapter(plan, tmp_path / "out")
    plan = adapterswap.compose(Composition(task="a", language=["b", "still"], **requested), given)
    adapterswap.write_adapter(plan, tmp_path / "out")  # the average does change something
