"""The comparison of all methods: their search spaces, one small seed, statistics over seeds, the folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from peft import PeftModel
from refusals import refused
from rich.console import Console
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from adapterswap import layer_swap
from adapterswap.cli import main
from adapterswap.errors import ArgumentError, OutputError, RunError
from adapterswap.files.folders import strangers
from adapterswap.files.text import write_json
from adapterswap.lab import SCENES, comparing, comparison, plan_comparison, run_comparison
from adapterswap.lab.comparing import (
    BUDGET,
    CONTROLS,
    SUGGESTED,
    ComparisonSizes,
    choices,
    chosen_methods,
    compare_seed,
)
from adapterswap.lab.comparison import compared, comparison_tables, markdown_tables
from adapterswap.lab.scenes import draw_problems, source_rows
from adapterswap.lab.seed import Questions, exact_match
from adapterswap.methods.registry import BUILT_IN, all_methods
from adapterswap.planning.composition import Composition
from adapterswap.planning.plan import Plan

from .conftest import Run

SIZES = ComparisonSizes(development=60, test=80, english=40)
METHODS = ("soup", "ties", "karcher", "adamergex", "dominance")


def test_every_method_has_a_budget() -> None:
    methods = [name for name, method in BUILT_IN.items() if method.as_composition]
    assert chosen_methods("all") == (*methods, "dominance")
    assert [len(configurations) for configurations in SUGGESTED.values()] == [BUDGET]
    for name in methods:
        configurations = choices(all_methods()[name])
        assert 1 <= len(configurations) <= BUDGET
        language = ["language", "source"] if name == "adamergex" else "language"
        made = {str(Composition(method=name, language=language, **fields)) for fields in configurations}
        assert len(made) == len(configurations)


def test_names_of_methods() -> None:
    assert chosen_methods("soup, cat,soup") == ("soup", "task_arithmetic")
    assert chosen_methods("dominance,soup") == ("dominance", "soup")
    for names in ("linear", "nothing"):
        with pytest.raises(ArgumentError):
            chosen_methods(names)


def test_the_source_expert_sees_no_xx() -> None:
    scene = replace(SCENES["gap"], language_rows=200)
    words = set().union(*(row.words for row in source_rows(scene, 0)))
    assert "ka" not in words
    assert "<xx>" not in words


@pytest.fixture(scope="module")
def seed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with one small seed, and its results; base and experts come from the demonstration's test."""
    folder = tmp_path_factory.mktemp("comparison")
    shutil.copytree(run.folder / "seed-0", folder / "seed-0")
    shutil.rmtree(folder / "seed-0" / "math+language")
    scene = replace(SCENES["gap"], language_rows=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "_TRAININGS", ({"learning_rate": 1e-3, "max_steps": 2},))
        result = compare_seed(scene, METHODS, folder, False, SIZES, 0)
        patch.setattr(comparing, "_experts", None)  # finished results are read
        assert compare_seed(scene, METHODS, folder, False, SIZES, 0) == result
    return folder, result


def test_a_seed_judges_every_configuration_and_tests_the_best(seed: tuple[Path, dict[str, Any]]) -> None:
    rows = seed[1]["rows"]
    assert list(rows) == ["layer_swap", *METHODS, *CONTROLS]
    for name in ("layer_swap", *METHODS):
        row = rows[name]
        fields = SUGGESTED[name] if name in SUGGESTED else choices(BUILT_IN[name])
        assert row["configurations"] == [dict(each) for each in fields]
        if len(row["configurations"]) > 1:
            assert row["development"][row["chosen"]["all"]] == max(row["development"])
        assert set(row["xx"]) == {str(place) for place in row["chosen"].values()}
    assert all(len(marks) == 80 for row in rows.values() for marks in row["xx"].values())
    assert all(len(row["en"]) == 40 for row in rows.values())
    swap, inverse = rows["layer_swap"], rows["inverse swap"]
    assert inverse["configurations"] == [swap["configurations"][swap["chosen"]["all"]]]


def test_dominance_gives_each_layer_to_the_larger_change(seed: tuple[Path, dict[str, Any]]) -> None:
    place = seed[0] / "seed-0"
    base = load_file(place / "base" / "model.safetensors")

    def sizes(name: str) -> dict[int, float]:
        """‖ΔW‖ / ‖W‖ of each layer, up to the scale that both experts share."""
        tensors = load_file(place / name / "adapter_model.safetensors")
        changed, own = dict.fromkeys(range(6), 0.0), dict.fromkeys(range(6), 0.0)
        for key, a in tensors.items():
            if "lora_A" in key:
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                layer = int(module.split(".")[2])
                changed[layer] += float(np.linalg.norm(tensors[key.replace("lora_A", "lora_B")] @ a) ** 2)
                own[layer] += float(np.linalg.norm(base[f"{module}.weight"]) ** 2)
        return {layer: (changed[layer] / own[layer]) ** 0.5 for layer in changed}

    configs = [json.loads((place / name / "adapter_config.json").read_text()) for name in ("math", "language")]
    assert configs[0]["r"] == configs[1]["r"]
    assert configs[0]["lora_alpha"] == configs[1]["lora_alpha"]
    math, language = sizes("math"), sizes("language")
    first, *others = comparing._jobs(("dominance",), place)["dominance"]
    assert first.fields == {"margin": 0.15, "per": "layer"}
    assert len(others) == 7
    assert isinstance(first.plan, Plan)
    for slot in first.plan.slots.values():
        layer = slot.layer
        assert layer is not None
        largest = max(math[layer], language[layer])
        near = {name for name, size in (("math", math), ("language", language)) if largest <= 1.15 * size[layer]}
        assert {term.expert for term in slot.terms} == near, layer


def test_merged_weights_score_as_the_adapters_do(seed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    place, rows = seed[0] / "seed-0", seed[1]["rows"]
    zones = rows["layer_swap"]["configurations"][rows["layer_swap"]["chosen"]["all"]]
    swapped = layer_swap(place / "math", place / "language", num_layers=6, **zones).write(tmp_path / "swap")
    questions = Questions(draw_problems(SCENES["gap"], "test", 80), "xx")
    for name, adapter in (("math expert", place / "math"), ("layer_swap", swapped)):
        base = AutoModelForCausalLM.from_pretrained(place / "base")
        right = exact_match(PeftModel.from_pretrained(base, adapter).eval(), questions)
        marks = rows[name]["xx"][str(rows[name]["chosen"]["all"])]
        assert marks == "".join("01"[mark] for mark in right.astype(int))


def test_the_random_expert_has_the_norms_of_the_language_expert(seed: tuple[Path, dict[str, Any]]) -> None:
    from adapterswap import diff

    place = seed[0] / "seed-0"
    distances = diff(place / "random", place / "language")
    for module in distances.modules:
        assert module.norms[0] == pytest.approx(module.norms[1], rel=1e-5)
        assert module.cosine is not None
        assert abs(module.cosine) < 0.5


def made_up(seeds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rng = np.random.default_rng(0)
    names = ["layer_swap", "soup", *CONTROLS]

    def row(name: str, share: float) -> dict[str, Any]:
        xx = {str(place): "".join("01"[value] for value in (rng.random(50) < share).astype(int)) for place in (0, 1)}
        few = {} if name.startswith("trained") else {"10": 1, "30": 0, "100": 0}
        return {"configurations": [{}, {"x": 1}], "chosen": {"all": 0, **few}, "xx": xx, "en": "10"}

    found = [
        {"seed": seed, "rows": {name: row(name, 0.05 * (place + 4)) for place, name in enumerate(names)}}
        for seed in range(seeds)
    ]
    described = {"few": [10, 30, 100], "controls": list(CONTROLS), "sizes": {"test": 50}}
    return described, found


def test_numbers_over_seeds() -> None:
    described, seeds = made_up(4)
    results = compared(described, seeds)

    def right(name: str, place: int = 0) -> list[float]:
        return [seed["rows"][name]["xx"][str(place)].count("1") / 50 for seed in seeds]

    soup = results["rows"]["soup"]
    assert soup["xx"]["mean"] == pytest.approx(np.mean(right("soup")))
    assert soup["xx"]["spread"] == pytest.approx(np.std(right("soup"), ddof=1), abs=1e-6)
    assert soup["en"]["mean"] == 0.5
    assert soup["few"]["10"] == pytest.approx(np.mean(right("soup", 1)))
    minus = soup["minus"]["layer_swap"]
    assert minus["mean"] == pytest.approx(np.mean(right("soup")) - np.mean(right("layer_swap")))
    assert minus["low"] < minus["mean"] < minus["high"]
    line = results["training"]["10"]
    on_ten = {name: np.mean(right(name, 1)) for name in ("soup", "layer_swap")}  # chosen on 10; the place is 1
    best = max(on_ten, key=lambda name: on_ten[name])
    assert line["best"] == best
    assert line["minus"][best]["mean"] == pytest.approx(on_ten[best] - np.mean(right("trained on 10")))
    assert line["minus"]["layer_swap"]["mean"] == pytest.approx(on_ten["layer_swap"] - np.mean(right("trained on 10")))
    assert list(results["rows"]["layer_swap"]["minus"]) == ["math expert"]
    console = Console(width=300, record=True)
    console.print(*comparison_tables(results))
    page = "".join(markdown_tables(results))
    for text in (console.export_text(), page):
        assert f"{soup['xx']['mean']:.3f} ± {soup['xx']['spread']:.3f}" in text
        assert f"{minus['mean']:+.3f} [{minus['low']:+.3f}, {minus['high']:+.3f}]" in text
    assert "| [soup](#soup) |" in page
    one = compared(*made_up(1))  # no interval from a single seed, and no error
    assert one["rows"]["soup"]["xx"]["spread"] is None


def test_a_folder_is_resumed_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, out = SCENES["gap"], tmp_path / "out"
    requested: list[list[int]] = []

    def work(work: Any, seeds: Any, **other: Any) -> list[dict[str, Any]]:
        requested.append(list(seeds))
        result = made_up(len(seeds))[1]
        for number, content in zip(seeds, result, strict=True):
            write_json(out / f"seed-{number}.json", content)
        return result

    monkeypatch.setattr(comparison, "run_seeds", work)
    run_comparison(plan_comparison(scene, "soup", 2, out))
    result = run_comparison(plan_comparison(scene, "soup", 3, out))  # one more seed
    assert requested == [[5, 6], [5, 6, 7]]
    assert json.loads((out / "results.json").read_text()) == result
    assert result["methods"] == ["soup"]
    assert strangers(out, comparison.COMPARISON) == []
    with refused(RunError, "out_path"):
        plan_comparison(scene, "ties", 2, out)
    assert plan_comparison(scene, "ties", 2, out, overwrite=True).pretrained == (5, 6)
    run_comparison(plan_comparison(scene, "ties", 1, out, overwrite=True))
    assert not (out / "seed-6.json").exists()
    (out / "thesis.txt").touch()
    with refused(OutputError, "out_path"):
        run_comparison(plan_comparison(scene, "ties", 1, out, overwrite=True))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with refused(OutputError, "out_path"):
        plan_comparison(scene, "ties", 1, tmp_path / "other")


def test_command_line(tmp_path: Path) -> None:
    arguments = ["lab", "--methods", "soup,ties", "--seeds", "2", "-o", str(tmp_path / "out"), "--dry-run"]
    output = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert output["seeds"] == [5, 6] == output["pretrained"]
    assert output["methods"] == ["soup", "ties"]
    text = CliRunner().invoke(main, [*arguments, "--first-seed", "3"]).stdout
    assert "3 to 4" in text
    assert CliRunner().invoke(main, ["lab", "--first-seed", "3"]).exit_code == 2
    assert CliRunner().invoke(main, ["lab", "--methods", "nothing", "--dry-run"]).exit_code == 1
    assert not (tmp_path / "out").exists()
