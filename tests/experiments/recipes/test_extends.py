"""`extends:`: what is merged, what paths are relative to, and which file a mistake is reported for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from adapterswap.experiments.training import TrainRecipe
from adapterswap.kit.errors import AdapterswapError
from adapterswap.kit.files.yaml import Layer, RecipeFile, merge_layers


def write(folder: Path, **files: str) -> Path:
    """The files, by name without suffix; the path of the last one."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def content(path: Path, *overrides: str) -> dict[str, Any]:
    return RecipeFile.read(path, overrides).content


def error_of(path: Path) -> str:
    with pytest.raises(AdapterswapError) as caught:
        TrainRecipe.read(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_mappings_are_merged_and_all_else_is_replaced(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        one="a: {x: 1, y: {p: 1, q: 2}}\nb: [1, 2]\nc: 1\nd: {k: 1}",
        two="a: {y: {q: 3}, z: 4}\nb: [3]\ne: 5",
        recipe="extends: [one.yaml, two.yaml]\na: {y: {p: 9}}\nc: [0]\nd: null",
    )
    merged = {"a": {"x": 1, "y": {"p": 9, "q": 3}, "z": 4}, "b": [3], "c": [0], "d": None, "e": 5}
    assert content(path) == merged
    assert content(path, "a.y.p=8", "b.0=7") == {**merged, "a": {**merged["a"], "y": {"p": 8, "q": 3}}, "b": [7]}


def test_fragments_extend_fragments_and_may_be_named_twice(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        deep__ground="a: 0\nb: 0\nc: 0",
        deep__left="extends: ground.yaml\nb: 1",
        right="extends: deep/ground.yaml\nc: 2",
        recipe="extends: [deep/left.yaml, right.yaml]",
    )
    assert content(path) == {"a": 0, "b": 0, "c": 2}  # right.yaml extends ground.yaml again, which therefore comes last


def test_a_shipped_fragment_is_found_by_name_and_a_file_wins(tmp_path: Path) -> None:
    path = write(tmp_path, recipe="extends: models/llama-3.1-8b")
    assert content(path)["base_model"] == "meta-llama/Llama-3.1-8B"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama-3.1-8b").write_text("base_model: mine")
    assert content(path) == {"base_model": "mine"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"recipe": "extends: recipe.yaml"}, "extend each other in a circle: recipe.yaml → recipe.yaml"),
        (
            {"one": "extends: two.yaml", "two": "extends: ./one.yaml", "recipe": "extends: one.yaml"},
            "in a circle: recipe.yaml → one.yaml → two.yaml → one.yaml",
        ),
        (
            {
                **{f"f{i}": f"extends: f{i + 1}.yaml" for i in range(9)},
                "f9": "a: 1",
                "recipe": "extends: f0.yaml",
            },
            "more than 8 deep: recipe.yaml → f0.yaml → f1.yaml",
        ),
        (
            {
                "f": "a: 1",
                **{f"g{i}": f"extends: [{'f.yaml, ' * 40}]" for i in range(2)},
                "recipe": "extends: [g0.yaml, g1.yaml]",
            },
            "more than 64 files: recipe.yaml → g1.yaml → f.yaml",
        ),
        ({"recipe": "extends: 5"}, "recipe.yaml: extends is 5, but must be a name or a list of names"),
        ({"recipe": "extends: [a, [b]]"}, "recipe.yaml: extends is ['a', ['b']], but must be"),
        ({"recipe": "extends: {a: b}"}, "recipe.yaml: extends is {'a': 'b'}, but must be"),
        ({"recipe": "extends: ''"}, "recipe.yaml: extends is '', but must be"),
        ({"one": "extends: none", "recipe": "extends: one.yaml"}, "one.yaml: extends names 'none', which is neither"),
        ({"one": "a: [", "recipe": "extends: one.yaml"}, "one.yaml is not valid YAML"),
    ],
)  # fmt: skip
def test_unusable_fragments(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    assert reason in error_of(write(tmp_path, **files))


def test_missing_fragments_are_reported_together(tmp_path: Path) -> None:
    lines = error_of(write(tmp_path, recipe="extends: [models/lama-3.1-8b, two]")).splitlines()
    assert "'models/lama-3.1-8b', which is neither a file nor a shipped recipe" in lines[0]
    assert "such as models/llama-3.1-8b" in lines[0]
    assert "'two'" in lines[1]


def test_each_mistake_is_reported_with_its_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        model="base_model: 5\nadaptor: {r: 4}",
        data="datasets:\n  good: {path: o/a, text: '{t}'}\n  gone: null\n  bad: {path: o/b, text: '{t', samples: 0}",
        more="datasets: {bad: {split: 7}}\nadapter: {r: 0, alpha: 1}",
        recipe="extends: [model.yaml, data.yaml, more.yaml]\nadapter: {alpha: -1}\ndatasets: {new: {text: '{t}'}}",
    )
    lines = error_of(path).splitlines()
    assert [line.split(": ")[0] + ": " + line.split(": ")[1].split(" is ")[0] for line in lines] == [
        "model.yaml: base_model",
        "more.yaml: adapter.r",
        "recipe.yaml: adapter.alpha",
        "more.yaml: datasets.bad.split",
        "data.yaml: datasets.bad.text",
        "data.yaml: datasets.bad.samples",
        "recipe.yaml: datasets.new.path",
        "model.yaml: adaptor",
    ]


def test_mistakes_in_overrides_are_not_blamed_on_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        data="base_model: b\ndatasets: [{path: a, text: '{t}'}]\ntraining: {seed: -1}",
        recipe="extends: data.yaml",
    )
    with pytest.raises(AdapterswapError) as caught:
        TrainRecipe.read(path, ["datasets.0.samples=0", "training.epochs=0"])
    assert [str(problem).removeprefix(f"{tmp_path}/").split(" is ")[0] for problem in caught.value.problems] == [
        "`overrides`: datasets.0.samples",
        "`overrides`: training.epochs",
        "data.yaml: training.seed",
    ]


def test_local_paths_are_relative_to_the_file_that_contains_them(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        shared__data="datasets: {own: {path: rows.jsonl, text: '{t}'}, hub: {path: org/rows, text: '{t}'}}\n"
        "validation: {datasets: [{path: held.jsonl, text: '{t}'}]}\nhygiene: {overlap: [mgsm, flores.txt]}",
        recipes__recipe="extends: ../shared/data.yaml\nbase_model: b\n"
        "datasets: {mine: {path: rows.jsonl, text: '{t}'}}",
    )
    for name in ("shared/rows.jsonl", "recipes/rows.jsonl", "shared/held.jsonl", "shared/flores.txt"):
        (tmp_path / name).write_text("")
    recipe = TrainRecipe.read(path)
    assert [source.path for source in recipe.datasets] == ["../shared/rows.jsonl", "org/rows", "rows.jsonl"]
    assert recipe.validation is not None
    assert recipe.validation.datasets is not None
    assert recipe.validation.datasets[0].path == "../shared/held.jsonl"
    assert recipe.hygiene is not None
    assert recipe.hygiene.overlap == ["mgsm", "../shared/flores.txt"]
    changed = TrainRecipe.read(path, ["datasets.own.path=rows.jsonl"])  # as everything on the command line
    assert changed.datasets[0].path == "rows.jsonl"


def test_named_sources_are_added_changed_and_removed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        one="datasets: {a: {path: org/a, text: '{t}'}, b: {path: org/b, text: '{t}'}}",
        two="datasets: {c: {path: org/c, text: '{t}'}}",
        recipe="extends: [one.yaml, two.yaml]\nbase_model: b\ndatasets: {a: null, b: {samples: 3}}",
    )
    recipe = TrainRecipe.read(path, ["datasets.c.samples=5"])
    assert [(source.path, source.samples) for source in recipe.datasets] == [("org/b", 3), ("org/c", 5)]


def test_compositions_extend_too(
    run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "language").symlink_to(swahili)
    path = write(
        tmp_path,
        shared__experts=f"experts: {{task: {math}, language: language}}\nbottom: 3",
        recipes__recipe="extends: ../shared/experts.yaml\ntop: 1",
    )
    options = ["-t", math, "-l", swahili, "--bottom", 3, "--top", 1, "-o", tmp_path / "options"]
    assert run("compose", *options).exit_code == 0
    run("compose", path, "-o", tmp_path / "recipe", exit_code=0)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("options", "recipe")]
    assert files[0].read_bytes() == files[1].read_bytes()


plain = st.recursive(
    st.integers(0, 3) | st.none() | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
layers_strategy = st.lists(st.dictionaries(st.sampled_from("abc"), plain, max_size=3), min_size=1, max_size=4)


@given(layers_strategy)
def test_every_value_is_attributed_to_its_file(contents: list[dict[str, Any]]) -> None:
    layers = [Layer(Path(str(number)), each) for number, each in enumerate(contents)]
    recipe = RecipeFile(merge_layers(layers), layers)

    def walk(value: Any, location: tuple[str, ...]) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, (*location, key))
        elif location:
            source = recipe.source_of(location)
            assert source is not None
            there: Any = contents[int(str(source))]
            for step in location:
                there = there[step]
            assert there == value

    walk(recipe.content, ())


@given(layers_strategy)
def test_merging_in_steps_equals_merging_at_once(contents: list[dict[str, Any]]) -> None:
    layers = [Layer(Path(), each) for each in contents]
    stepwise: dict[str, Any] = {}
    for layer in layers:
        stepwise = merge_layers([Layer(Path(), stepwise), layer])
    assert stepwise == merge_layers(layers)
    assert merge_layers([*layers, layers[-1]]) == merge_layers(layers)


def test_a_recipe_without_fragments_is_one_file(tmp_path: Path) -> None:
    path = write(tmp_path, recipe="a: 1")
    recipe = RecipeFile.read(path)
    assert (recipe.content, recipe.files) == ({"a": 1}, (path,))
