"""docs/reproducing.md is consistent: its recipes exist, and each command reads what an earlier one wrote."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from adapterswap.experiments.evaluation.downloaded import is_flores
from adapterswap.experiments.evaluation.tasks import split_shots
from adapterswap.experiments.sweeps.recipe import SweepRecipe
from adapterswap.experiments.training import TrainRecipe
from adapterswap.kit.files.yaml import find_recipe, shipped_recipes

PAGE = (Path(__file__).parents[3] / "docs" / "reproducing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|yaml)\n(.*?)```", PAGE, flags=re.DOTALL)
LINES = [
    line
    for kind, block in BLOCKS
    if kind == "bash"
    for line in (text.split("  #")[0].strip() for text in block.replace("\\\n", " ").splitlines())
    if line.startswith("adapterswap ")
]


def options(words: list[str], *names: str) -> list[str]:
    """The values of these options."""
    return [value for name, value in itertools.pairwise(words) if name in names]


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[1] == "train"], ids=lambda line: line[18:70])
def test_recipes_and_their_changes_are_read(line: str) -> None:
    words = shlex.split(line)
    recipe = TrainRecipe.read(find_recipe(words[2], "train"), options(words, "--set"))
    tasks = recipe.selection.tasks if recipe.selection else []
    assert bool(tasks) == ("selection" in line)


def test_files_are_written_before_they_are_read(tmp_path: Path) -> None:
    written: set[str] = set()
    for line in LINES:
        words = shlex.split(line)
        command, out = words[1], options(words, "-o", "--out-path")
        read = options(words, "-t", "-l", "--adapter", "--base-model")
        if command in ("merge", "report", "analyze"):
            read += [word for word in words[2:] if "/" in word and word not in (*out, *options(words, "--base-model"))]
        local = [path for path in read if not path.startswith("meta-llama/") and path != "base"]
        assert written.issuperset(local), f"{line}: {set(local) - written}"
        if command == "train" and "--dry-run" not in words:
            written.update(out or [str(TrainRecipe.read(find_recipe(words[2], "train")).out_path)])
        elif command == "compose" and words[2] in shipped_recipes("compose"):
            experts = re.findall(r"experts/[\w./-]+", _with_fragments(words[2]))
            assert written.issuperset(experts), f"{line}: {set(experts) - written}"
            written.update(out)
        elif "--dry-run" not in words:
            written.update(out)
    assert {"composed/swap", "merged/swap", "runs/swahili"} <= written
    sweep = SweepRecipe.read(_sweep(tmp_path))
    used = [
        *sweep.task_experts.values(),
        *sweep.language_experts.values(),
        *(p for ps in sweep.extra.values() for p in ps),
    ]
    assert written.issuperset(used)


def _with_fragments(name: str) -> str:
    """The recipe's text; if it extends another and names no experts, the other's text."""
    path = find_recipe(name, "compose")
    text = path.read_text(encoding="utf-8")
    beside = re.search(r"^extends: (\S+)", text, flags=re.MULTILINE)
    return text if "experts:" in text or beside is None else (path.parent / beside[1]).read_text(encoding="utf-8")


def _sweep(folder: Path) -> Path:
    (block,) = [block for kind, block in BLOCKS if kind == "yaml"]
    path = folder / "swahili.yaml"
    path.write_text(block, encoding="utf-8")
    return path


def test_tasks_are_known(tmp_path: Path, known_tasks: frozenset[str]) -> None:
    named = {task for line in LINES for value in options(shlex.split(line), "--tasks") for task in value.split(",")}
    sweep = SweepRecipe.read(_sweep(tmp_path))
    assert isinstance(sweep.tasks, list)
    named |= {*sweep.tasks, *sweep.retention, *re.findall(r"belebele_\w+|global_mmlu_full_\w+", PAGE)}
    assert len(named) > 8
    stems = {split_shots(task)[0] for task in named}
    assert {task for task in stems if task not in known_tasks and not is_flores(task)} == set()


def test_the_page_counts_its_sweep_correctly(tmp_path: Path) -> None:
    sweep = SweepRecipe.read(_sweep(tmp_path))
    swaps = next(family for family in sweep.compositions if family.name == "layer swap")
    others = [family for family in sweep.compositions if family is not swaps]
    assert sum(max(1, len(family.partition)) for family in others) == 5
    count = len(swaps.bottom) * len(swaps.top) * len(swaps.bottom_transition) * len(swaps.top_transition)
    pairs = len(sweep.task_experts) * len(sweep.language_experts) + sweep.soup_sides
    assert f"{count} layer swaps and five others" in PAGE
    assert pairs == 10
    assert "each of ten pairs" in PAGE
