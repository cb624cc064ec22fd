"""The index of the tasks that are asked for equals the harness's own index of all its files, as far as they go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from tiers import ALL

from adapterswap.experiments.evaluation.stock_tasks import _manager, _members, _with_data_beside, harness_folder

pytestmark = pytest.mark.slow

# Tasks, groups of groups, tags, and tags that only an included file has.
NAMES = [
    "arc_easy",
    "ai2_arc",
    "belebele_swh_Latn",
    "afrimgsm-irokobench",
    "mmlu_pro",
    "gsm8k",
    "leaderboard",
    "xcopa_sw",
]


# The folders that define them and what they stand for.
FOLDERS = ["afrimgsm", "arc", "belebele", "gsm8k", "leaderboard", "mmlu_pro", "xcopa"]


def whole_index(own: Path) -> Any:
    """The harness's own index: of all its files with TESTS=all, else of those in `FOLDERS`."""
    if ALL:
        return _manager(["*"], str(own)).task_index
    from lm_eval.tasks import TaskManager

    root = harness_folder()
    assert root is not None
    manager = TaskManager(include_path=[*(str(root / name) for name in FOLDERS), str(own)], include_defaults=False)
    return _with_data_beside(manager, str(own)).task_index


def closure(index: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a name stands for: its entry, and those of its members."""
    entries: dict[str, Any] = {}
    waiting = [name]
    for each in waiting:  # grows while it is read
        if each in index and each not in entries:
            entry = index[each]
            entries[each] = entry.kind, str(entry.yaml_path), entry.cfg, sorted(entry.tags)
            waiting += sorted(entry.tags) if entry.cfg is None else _members(entry.cfg)
    return entries


def test_a_small_index_says_what_the_whole_one_says(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine.yaml").write_text("include: base_yaml\ntask: mine\n")
    (own / "base_yaml").write_text("tag: my_tag\ndataset_path: json\n")
    (own / "other.yaml").write_text("task: other\ntag: my_tag\ndataset_path: json\n")
    (own / "group.yaml").write_text("group: my_group\ntask: [my_tag, arc_easy]\n")
    (own / "gsm8k.yaml").write_text("task: gsm8k\ndataset_path: json\n")  # goes before the harness's
    whole = whole_index(own)
    for name in (*NAMES, "my_group", "my_tag"):
        small = _manager([name], str(own)).task_index
        assert closure(small, name) == closure(whole, name) != {}, name
        assert len(small) < 1000  # of more than ten thousand
    together = _manager(NAMES, str(own)).task_index
    assert all(closure(together, name) == closure(whole, name) for name in NAMES)
    # The file of one task tells of a tag that others have as well.
    assert closure(_manager(["my_group", "mine"], str(own)).task_index, "my_group") == closure(whole, "my_group")
    assert _manager(["no_such_task"], None).task_index == {}


def test_members_of_a_group_may_be_groups_of_their_own() -> None:
    members = [{"task": "one"}, "two", {"group": "three", "task": ["four", {"task": "five"}]}]
    assert _members({"task": members}) == ["one", "two", "three", "four", "five"]
