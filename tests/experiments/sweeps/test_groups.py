"""The groups of a task's documents: which column names them, and what they are for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from adapterswap.experiments.sweeps import SweepRecipe, TaskInfo, prepare
from adapterswap.experiments.sweeps.search import first_documents
from adapterswap.kit.errors import FieldError

Recipe = Callable[..., SweepRecipe]
ROWS = [{"question": f"a {n}", "label": 0, "topic": f"topic {n // 4}", "template": f"t{n // 2}"} for n in range(12)]


def described(
    recipe: Recipe, folder: Path, rows: Sequence[Mapping[str, Any]] = ROWS, *,
    metadata: Mapping[str, Any] | None = None, **changes: Any,
) -> TaskInfo:  # fmt: skip
    """What a sweep knows of a task with these rows."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": ["ab", "ba"], "doc_to_target": "label", "metadata": {"version": 1, **(metadata or {})},
    }  # fmt: skip
    (folder / "own.yaml").write_text(json.dumps(task))
    settings = {"include_path": str(folder), "num_fewshot": 0, **changes.pop("settings", {})}
    return prepare(recipe(tasks=["own"], settings=settings, baselines=["base"], **changes)).tasks["own"]


def test_a_column_template_names_groups(recipe: Recipe, tmp_path: Path) -> None:
    task = described(recipe, tmp_path)
    assert (task.group, task.groups) == ("template", tuple(row["template"] for row in ROWS))
    sides = [{ROWS[doc]["template"] for doc in documents} for documents in (task.select, task.report)]
    assert sides[0].isdisjoint(sides[1])
    assert len(task.select) == len(task.report) == 6
    assert TaskInfo.from_json(json.loads(json.dumps(task.as_json()))) == task
    limited = described(recipe, tmp_path, settings={"limit": 5})
    assert limited.groups == ("t0", "t0", "t1", "t1", "t2")


def test_the_task_or_the_recipe_names_another(recipe: Recipe, tmp_path: Path) -> None:
    of_task = described(recipe, tmp_path, metadata={"group": "topic"})
    assert (of_task.group, len({*of_task.groups})) == ("topic", 3)
    of_recipe = described(recipe, tmp_path, group={"own": "topic"})
    assert (of_recipe.group, of_recipe.groups) == ("topic", of_task.groups)


@pytest.mark.parametrize("templates", [["{question}"] * 12, [str(n) for n in range(12)]], ids=["one", "one each"])
def test_a_column_that_divides_nothing_is_none(templates: list[str], recipe: Recipe, tmp_path: Path) -> None:
    rows = [{**row, "template": template} for row, template in zip(ROWS, templates, strict=True)]
    task = described(recipe, tmp_path, rows)
    assert (task.group, task.groups) == (None, ())
    assert {"group", "groups"}.isdisjoint(task.as_json())


def test_a_column_that_rows_lack_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with refused(FieldError, "group", match="topics"):
        described(recipe, tmp_path, group={"own": "topics"})
    with refused(FieldError, "group", match="other"):
        described(recipe, tmp_path, group={"other": "topic"})


def test_a_search_begins_with_whole_groups(recipe: Recipe, tmp_path: Path) -> None:
    task = described(recipe, tmp_path, selection={"fraction": 0.75})
    assert len(task.select) == 8  # of four templates
    taken = [first_documents(task, number, seed=0) for number in (1, 2, 3, 5, 8)]
    assert [len(documents) for documents in taken] == [2, 2, 4, 6, 8]
    for smaller, larger in pairwise(taken):
        assert {*smaller} <= {*larger} <= {*task.select}
    for documents in taken:
        templates = {ROWS[doc]["template"] for doc in documents}
        assert documents == tuple(doc for doc in task.select if ROWS[doc]["template"] in templates)
    each = {first_documents(task, 2, seed) for seed in range(30)}
    assert sorted(doc for documents in each for doc in documents) == list(task.select)
