"""`adapterswap recipes`: listed recipes exist, copies work by themselves, and mistakes are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from ruamel.yaml import YAML

from adapterswap.experiments.recipes import check_recipe, list_recipes, resolve_recipe, standalone_copy
from adapterswap.kit.files.yaml import RecipeFile, shipped_recipes

Run = Callable[..., Result]
WHOLE = [recipe.name for recipe in list_recipes() if recipe.kind in ("train", "compose", "sweep")]


def test_every_shipped_recipe_is_listed_with_its_purpose(run: Run) -> None:
    shown = run("recipes", "ls").stdout.splitlines()
    assert [line.split()[0] for line in shown] == [*shipped_recipes()]
    output = json.loads(run("recipes", "ls", "--json").stdout)
    assert [recipe["name"] for recipe in output] == [*shipped_recipes()]
    assert {recipe["kind"] for recipe in output} >= {"train", "compose", "models", "data", "regimes"}
    assert all(recipe["about"].endswith(".") and recipe["about"][0] != "#" for recipe in output)
    assert len({recipe["about"] for recipe in output}) == len(output)
    only = run("recipes", "ls", "--kind", "models").stdout.splitlines()
    assert only
    assert all(line.startswith("models/") for line in only)
    wrong = run("recipes", "ls", "--kind", "model", exit_code=2)
    assert "Kinds are: compose, data, models, regimes" in wrong.stderr


@pytest.mark.parametrize("name", WHOLE)
def test_a_shipped_recipe_is_valid(name: str) -> None:
    assert check_recipe(shipped_recipes()[name]) == name.split("/")[0]


def test_an_entry_point_is_short_and_contains_no_ids() -> None:
    """Ids, columns and rates are in the fragments, so that each is changed in one place."""
    for name in WHOLE:
        text = shipped_recipes()[name].read_text(encoding="utf-8")
        assert len(text.splitlines()) <= (20 if name.startswith(("sweep/", "compose/papers/")) else 12), name
        if name.startswith("train/"):
            assert text.splitlines()[2] == f"out_path: experts/{name.removeprefix('train/')}"
            assert "path:" not in text.replace("out_path:", ""), name
    fragments = [path.read_text("utf-8") for name, path in shipped_recipes().items() if name.startswith("data/")]
    ids = [line.split("#")[0].strip() for text in fragments for line in text.splitlines() if "path: " in line]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ["train/llama-3.1-8b-instruct/simultaneous-swahili", "train/llama-3.1-8b/bengali"])
def test_a_resolved_recipe_is_equivalent(name: str, run: Run, tmp_path: Path) -> None:
    whole = RecipeFile.read(shipped_recipes()[name]).content
    text = run("recipes", "cat", name, "--resolved").stdout
    assert YAML(typ="safe").load(text) == whole
    assert "  # regimes/" in text
    assert json.loads(run("recipes", "cat", name, "--json").stdout) == whole
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert check_recipe(tmp_path / "mine.yaml") == "train"
    assert run("recipes", "cat", name).stdout == shipped_recipes()[name].read_text(encoding="utf-8")


def test_each_line_of_a_resolved_recipe_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("a: {x: 1, y: 2}\nb: {l: [1, 2], m: 'p\n\n  q'}\nc: []\n", encoding="utf-8")
    (tmp_path / "two.yaml").write_text("extends: one.yaml\na: {y: 3}\nd: {e: null}\n", encoding="utf-8")
    content, text = resolve_recipe(tmp_path / "two.yaml")
    assert (
        YAML(typ="safe").load(text)
        == content
        == {"a": {"x": 1, "y": 3}, "b": {"l": [1, 2], "m": "p\nq"}, "c": [], "d": {"e": None}}
    )
    lines = re.sub(f" +# {tmp_path}/", "  # ", text).splitlines()  # the comments begin in one column
    assert {line.index("#") for line in text.splitlines() if "#" in line} == {60}
    assert lines == [
        "a:",
        "  x: 1  # one.yaml",
        "  y: 3  # two.yaml",
        "b:  # one.yaml",
        "  l:",
        "  - 1",
        "  - 2",
        '  m: "p\\nq"',
        "c: []  # one.yaml",
        "d:  # two.yaml",
        "  e: null",
    ]  # fmt: skip


EXPERTS = {"math": "experts/math", "code": "experts/code", "swahili": "experts/swahili"}
SWEEP = {
    "base_model": "base", "tasks": ["t"], "task_experts": {"math": "m"}, "language_experts": {"sw": "s", "te": "t"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"experts": EXPERTS, "task": "math", "language": "base", "method": "slerp"}, "slerp"),
        ({"experts": EXPERTS, "task": "maths", "language": "swahili"}, "'maths'"),
        ({"experts": EXPERTS, "allocation": [{"expert": "maths"}]}, "'maths'"),
        ({"experts": EXPERTS, "allocation": [{"expert": "base"}]}, "base"),
        (
            {"experts": EXPERTS, "task": "math", "language": "swahili", "bottom": 4, "top": 4, "num_layers": 6},
            "overlap",
        ),
        (
            {
                "experts": EXPERTS,
                "num_layers": 6,
                "allocation": [{"layers": "0-9", "expert": "math"}, {"expert": "code"}],
            },
            "layers 6-9",
        ),
        ({"expert": EXPERTS, "allocation": [{"expert": "math"}]}, "Did you mean 'experts'?"),
        ({**SWEEP, "compositions": [{"method": "slerp", "language": "base"}]}, "slerp"),
        ({**SWEEP, "compositions": [{"method": "ties", "density": 0.5}]}, "ties"),
        ({**SWEEP, "tasks": {"jp*": ["t"]}}, "jp*"),
        ({**SWEEP, "num_layers": 4, "baselines": [], "compositions": [{"bottom": 3, "top": 3}]}, "overlap"),
    ],
)
def test_recipes_that_commands_refuse_are_invalid(
    run: Run, tmp_path: Path, recipe: dict[str, object], named: str
) -> None:
    """Rules are made and names looked up as `compose` and `sweep` do it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    result = run("recipes", "validate", path, exit_code=1)
    assert named in result.stderr
    assert str(path) in result.stderr


@pytest.mark.parametrize(
    "recipe",
    [
        {"experts": EXPERTS, "task": "math", "language": "swahili", "bottom": 40, "top": 20},
        {"experts": EXPERTS, "task": ["math", "code"], "language": "swahili"},
        {"experts": EXPERTS, "allocation": [{"layers": "60", "expert": "math"}, {"expert": "code"}]},
        {**SWEEP, "soup_sides": True, "compositions": [{"bottom": [30, 60]}, {"method": "soup"}]},
    ],
)
def test_a_recipe_that_fits_some_base_is_valid(run: Run, tmp_path: Path, recipe: dict[str, object]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert run("recipes", "validate", path).exit_code == 0


def test_a_copy_works_by_itself(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["train/qwen3-1.7b/swahili", "compose/llama-3.1-8b-instruct/partial-b-swahili"]
    whole = [RecipeFile.read(shipped_recipes()[name]).content for name in names]
    target = tmp_path / "mine"
    dry = json.loads(run("recipes", "cp", *names, target, "--dry-run", "--json").stdout)
    assert not target.exists()
    output = json.loads(run("recipes", "cp", *names, target, "--json").stdout)
    assert output == dry | {"written": True}
    assert sorted(output["files"]) == sorted(str(path.relative_to(target)) for path in target.rglob("*.yaml"))
    astray = run("recipes", "cp", *names, tmp_path / "mine.yaml", exit_code=3)
    assert "recipes cat" in astray.stderr
    again = run("recipes", "cp", *names, target, exit_code=3)
    assert "--overwrite" in again.stderr
    monkeypatch.setattr("adapterswap.kit.files.yaml.shipped_folder", lambda: tmp_path / "nothing")
    assert [RecipeFile.read(target / name).content for name in output["recipes"]] == whole
    assert "# unconfirmed" in (target / "data" / "swahili.yaml").read_text(encoding="utf-8")


def test_only_what_is_shipped_can_be_copied(run: Run, tmp_path: Path) -> None:
    result = run("recipes", "cp", "train/qwen3-1.7b/swahilli", "train/none", tmp_path / "mine", exit_code=3)
    assert [line.split("'")[1] for line in result.stderr.splitlines()] == ["train/qwen3-1.7b/swahilli", "train/none"]
    assert "Did you mean 'train/qwen3-1.7b/swahili'?" in result.stderr
    assert not (tmp_path / "mine").exists()


def test_every_whole_recipe_can_be_copied_at_once(tmp_path: Path) -> None:
    for name, text in standalone_copy(WHOLE).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in WHOLE:
        assert RecipeFile.read(tmp_path / f"{name}.yaml").content == RecipeFile.read(shipped_recipes()[name]).content


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_copy_differs_only_in_the_names_that_it_extends(name: str) -> None:
    """Comments, blank lines, quotes and numbers stay as they were written."""
    before = shipped_recipes()[name].read_text(encoding="utf-8").splitlines()
    after = standalone_copy([name])[f"{name}.yaml"].splitlines()
    changed = [line for line, copied in zip(before, after, strict=True) if line != copied]
    assert all(line.startswith("extends: ") for line in changed)


def test_validate_reports_every_mistake_in_every_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("extends: data/math\ntraining: {seed: -1, epoch: 2}\n")
    (tmp_path / "both.yaml").write_text("datasets: []\nexperts: {}\n")
    (tmp_path / "good.yaml").write_text("experts: {task: a, language: b}\n")
    files = [
        tmp_path / "bad.yaml",
        tmp_path / "both.yaml",
        tmp_path / "good.yaml",
        "train/qwen3-1.7b/math",
        "models/qwen3-1.7b",
    ]
    result = run("recipes", "validate", *files, exit_code=1)
    assert result.stdout.replace(f"{tmp_path}/", "").splitlines() == [
        "bad.yaml: invalid",
        "both.yaml: invalid",
        "good.yaml: valid (compose)",
        "train/qwen3-1.7b/math: valid (train)",
        "models/qwen3-1.7b: invalid",
    ]
    errors = result.stderr.replace(f"{tmp_path}/", "").splitlines()
    assert [error.removeprefix("Error: ").split(". ")[0] for error in errors[:4]] == [
        "bad.yaml: base_model is missing",
        "bad.yaml: training.seed is -1, but must be 0 or more.",
        "bad.yaml: training.epoch is not a known key",
        "both.yaml must have exactly one of these keys, "
        "but has several: `datasets` (train), `experts` (compose), `task_experts` (sweep)",
    ]
    assert "but has none: " in errors[4]
    assert len(errors) == 5
    as_json = run("recipes", "validate", *files, "--json", exit_code=1)
    output = json.loads(as_json.stdout)
    assert [(recipe["kind"], len(recipe["problems"])) for recipe in output] == [
        (None, 3), (None, 1), ("compose", 0), ("train", 0), (None, 1),
    ]  # fmt: skip
    run("recipes", "validate", tmp_path / "good.yaml", "--json", exit_code=0)
