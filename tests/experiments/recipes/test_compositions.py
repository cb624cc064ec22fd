"""The shipped compositions run on handmade adapters of 32 layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import crafting
import pytest
from click.testing import Result

from adapterswap.core.planning.composition import Composition
from adapterswap.experiments.recipes import resolve_recipe
from adapterswap.kit.files.yaml import read_recipe, shipped_recipes

PAPERS = shipped_recipes("compose/papers")
COMPOSITIONS = {name: path for name, path in shipped_recipes("compose").items() if name not in PAPERS}

# The language's layers of q_proj and of down_proj, out of 32; None for a blend. From the text of the papers.
OUTER = {*range(5), 30, 31}
A, B, C = {*range(6), 30, 31}, {*range(8), *range(28, 32)}, {*range(6), 30, 31}
EXPECTED: dict[str, tuple[set[int], set[int]]] = {
    "swahili": (OUTER, OUTER),
    "bengali": (OUTER, OUTER),
    "telugu": (OUTER, OUTER),
    "japanese": (OUTER, OUTER),
    "swahili-a": ({*range(32)}, A),
    "swahili-b": (B, B),
    "swahili-c": (C, C),
    "partial-b-swahili": (B, B),
    "math-reset": (C, C),
}


@pytest.fixture
def experts(tmp_path: Path) -> dict[str, Path]:
    """Adapters over the same 32 layers under the names in the recipes: the task's and the language's."""
    return {
        side: crafting.adapter(tmp_path / side, crafting.tensors(layers=32, seed=seed))
        for seed, side in enumerate(("task", "language"))
    }


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_it_composes(name: str, run: Callable[..., Result], experts: dict[str, Path], tmp_path: Path) -> None:
    requested = read_recipe(COMPOSITIONS[name], Composition)
    places = {requested.task[0]: experts["task"], requested.language[0]: experts["language"]}
    named = ", ".join(f"{expert}: {places[expert]}" for expert in requested.experts)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"extends: {name}\nexperts: {{{named}}}\nnum_layers: 32\n", encoding="utf-8")
    result = run("compose", recipe, "-o", tmp_path / "out", "--json", exit_code=0)
    modules = json.loads(result.stdout)["modules"]
    language = requested.language[0]
    owned = {
        kind: {int(module.split(".")[2]) for module, owner in modules.items() if kind in module and owner == language}
        for kind in ("q_proj", "down_proj")
    }
    if name == "compose/llama-3.1-8b/swahili":
        blended = {int(module.split(".")[2]) for module, owner in modules.items() if isinstance(owner, dict)}
        assert blended == {5, 29}
        assert owned["q_proj"] == owned["down_proj"] == OUTER
        return
    short = name.rpartition("/")[2]
    assert (owned["q_proj"], owned["down_proj"]) == EXPECTED[short]


def test_every_experts_folder_is_what_a_shipped_train_recipe_writes() -> None:
    written = {resolve_recipe(path)[0]["out_path"] for path in shipped_recipes("train").values()}
    for path in COMPOSITIONS.values():
        assert set(resolve_recipe(path)[0]["experts"].values()) <= written


def coefficients(name: str, run: Callable[..., Result], tmp_path: Path, layers: int) -> dict[str, dict[str, float]]:
    """A paper's recipe on adapters made by hand: module → expert → its factor."""
    requested = read_recipe(PAPERS[name], Composition)
    tensors = {expert: crafting.tensors(layers=layers, seed=seed) for seed, expert in enumerate(requested.experts)}
    places = {expert: crafting.adapter(tmp_path / expert, found) for expert, found in tensors.items()}
    named = ", ".join(f"{expert}: {place}" for expert, place in places.items())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"extends: {name}\nexperts: {{{named}}}\nnum_layers: {layers}\n", encoding="utf-8")
    result = run("compose", recipe, "-o", tmp_path / "out", "--json", exit_code=0)
    modules = json.loads(result.stdout)["modules"]
    return {name: owner if isinstance(owner, dict) else {owner: 1.0} for name, owner in modules.items()}


def test_layers_match_the_paper(run: Callable[..., Result], tmp_path: Path) -> None:
    result = coefficients("compose/papers/lighton-swahili", run, tmp_path, 36)
    for module, owner in result.items():
        layer = int(module.split(".")[2])
        assert owner == {"reasoning" if 13 <= layer <= 22 else "swahili": 1.0}


def test_adamergex_adds_what_the_language_changed(run: Callable[..., Result], tmp_path: Path) -> None:
    result = coefficients("compose/papers/adamergex-swahili", run, tmp_path, 4)
    assert result
    assert all(factors == {"math": 1, "swahili": 1, "english": -1} for factors in result.values())


def test_recipes_that_were_not_run_say_so() -> None:
    assert PAPERS
    for path in PAPERS.values():
        text = path.read_text("utf-8")
        assert "arXiv:" in text.partition("\n")[0]
        assert "Not run here." in text
