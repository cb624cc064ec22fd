"""Names of tasks, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tolerances import near

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.mgsm import LANGUAGES
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import ArgumentError, DataError, DependencyError, NotFoundError

from .conftest import LAYERS

Model = tuple[Any, Any]

CHOICES = """
task: pico_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 3}}
"""
GROUP = """
group: pico
task: [pico_one, pico_two]
aggregate_metric_list:
  - {metric: acc, aggregation: mean, weight_by_size: true}
"""
ROWS = [
    {"question": f"{i} and {i} are", "choices": [str(i), str(i + i), str(i * i)], "label": i % 3} for i in range(3, 9)
]


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two task files and a group, over a local data file."""
    folder = tmp_path_factory.mktemp("tasks")
    data = tmp_path_factory.mktemp("data")
    (data / "rows.json").write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    for name in ("one", "two"):
        text = CHOICES.format(name=name, data=data / "rows.json")
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "group.yaml").write_text(GROUP, encoding="utf-8")
    return folder


def choose(model: Any, tokenizer: Any, row: dict[str, Any]) -> tuple[int, list[float]]:
    """The likeliest choice and every choice's log-likelihood, by a plain loop."""
    totals = []
    for choice in row["choices"]:
        begin = len(tokenizer(row["question"])["input_ids"])
        ids = tokenizer(f"{row['question']} {choice}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logs = model(ids).logits[0].log_softmax(-1)
        totals.append(sum(float(logs[i - 1, ids[0, i]]) for i in range(begin, ids.shape[1])))
    return max(range(3), key=totals.__getitem__), totals


def test_a_task_of_the_harness_equals_a_plain_loop(byte_model: Model, own_tasks: Path) -> None:
    result = evaluate_model(
        *byte_model, ["pico", "mgsm_direct_sw"], Settings(include_path=own_tasks, limit=5, max_gen_toks=2)
    )
    right = []
    for row, sample in zip(ROWS, [s for s in result.samples if s.task == "pico_one"], strict=False):
        choice, totals = choose(*byte_model, row)
        right.append(choice == row["label"])
        assert [likelihood for likelihood, _ in sample.output] == near(totals, depth=LAYERS)
        assert sample.scores["none"]["acc"] == right[-1]
        assert sample.doc["question"] == row["question"]
    assert len(right) == 5
    task = result.tasks["pico_one"]
    assert task.score(metric="acc").value == pytest.approx(sum(right) / 5)
    assert (task.num_docs, task.num_fewshot, task.cut, task.version) == (5, 0, None, "3")
    assert list(result.groups) == ["pico"]
    assert result.groups["pico"].score(metric="acc").value == task.score(metric="acc").value
    assert result.groups["pico"].num_docs == 10
    assert set(result.tasks) == {"pico_one", "pico_two", "mgsm_direct_sw"}


def test_shots_of_a_task_of_the_harness_follow_the_seed(byte_model: Model, own_tasks: Path) -> None:
    def prompts(seed: int) -> list[str]:
        options = {"include_path": own_tasks, "num_fewshot": 1, "seed": seed}
        return [sample.prompt for sample in evaluate_model(*byte_model, ["pico_one"], Settings(**options)).samples]

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


def test_a_name_can_set_the_shots(byte_model: Model, own_tasks: Path) -> None:
    """One evaluation with several numbers of shots equals several evaluations with one number each; also for groups."""
    names, settings = ["pico@2", "mgsm_direct_sw", "pico@0", "mgsm_direct_s?@1"], {"limit": 3, "max_gen_toks": 2}
    settings |= {"include_path": own_tasks, "batch_size": 1}
    together = evaluate_model(*byte_model, names, Settings(num_fewshot=0, **settings))
    assert {name: task.num_fewshot for name, task in together.tasks.items()} == {
        "pico_one@2": 2, "pico_two@2": 2, "mgsm_direct_sw": 0, "pico_one@0": 0, "pico_two@0": 0, "mgsm_direct_sw@1": 1,
    }  # fmt: skip
    for asked, shots in (("pico", 2), ("pico", 0), ("mgsm_direct_sw", 1)):
        alone = evaluate_model(*byte_model, [asked], Settings(num_fewshot=shots, **settings))
        for name, task in alone.tasks.items():
            assert replace(together.tasks[f"{name}@{shots}"], name=name) == task
        samples = [
            replace(one, task=one.task.partition("@")[0])
            for one in together.samples
            if one.task.endswith(f"@{shots}") and one.task.startswith(asked)
        ]
        assert tuple(samples) == alone.samples
        for name, group in alone.groups.items():
            assert replace(together.groups[f"{name}@{shots}"], name=name) == group
    assert together.groups["pico@2"] != together.groups["pico@0"]
    for name, reason in (("mgsm_direct_sw@9", "MGSM has 8"), ("mgsm_direct_swa@2", "'mgsm_direct_swa'")):
        with refused(ArgumentError, "tasks", match=reason):
            LoadedTasks.load([name])


def test_an_unknown_task_is_refused_with_its_nearest_names(own_tasks: Path) -> None:
    with refused(ArgumentError, "tasks") as caught:
        LoadedTasks.load(["mgsm_direct_swa", "picko_one", "mgsm_direct_sw"], Settings(include_path=own_tasks))
    first, second = caught.value.problems
    assert first.message == "There is no task 'mgsm_direct_swa'"
    assert "mgsm_direct_sw" in first.remedy
    assert "pico_one" in second.remedy


def test_a_task_with_missing_data_is_refused(own_tasks: Path) -> None:
    with refused(DataError, "tasks", match="gsm8k"):
        LoadedTasks.load(["gsm8k"], Settings(include_path=own_tasks))


BROKEN = {
    "its code": ("scoring.py", "raise NameError('Paath')"),
    "its data": ("rows.jsonl", '{"question": "a", '),
    "a row without a choice": ("rows.jsonl", '{"question": "q", "choices": ["a", "b"], "label": 7}'),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_task_of_the_user_is_refused(kind: str, byte_model: Model, tmp_path: Path) -> None:
    """Templates and functions of a task are other people's programs, which may raise any error."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    text = CHOICES.format(name="broken", data=folder / "rows.jsonl")
    (folder / "task.yaml").write_text(text + "process_results: !function scoring.score\n")
    (folder / "scoring.py").write_text(
        "def score(doc, results):\n    return {'acc': len(doc['choices'][doc['label']])}\n"
    )
    (folder / "rows.jsonl").write_text('{"question": "q", "choices": ["a", "b"], "label": 0}\n')
    name, content = BROKEN[kind]
    (folder / name).write_text(content + "\n")
    with refused(DataError, "tasks", match="pico_broken"):
        evaluate_model(*byte_model, ["pico_broken"], Settings(include_path=folder, trust_task_code=True))


def test_families_and_patterns() -> None:
    assert list(LoadedTasks.load(["mgsm_direct"]).tasks) == [f"mgsm_direct_{code}" for code in LANGUAGES]
    assert list(LoadedTasks.load(["mgsm_*_sw"]).tasks) == ["mgsm_direct_sw", "mgsm_native_cot_sw", "mgsm_en_cot_sw"]
    assert list(LoadedTasks.load(["mgsm_direct_sw", "mgsm_direct_s?"]).tasks) == ["mgsm_direct_sw"]


def test_a_missing_folder_of_tasks(tmp_path: Path) -> None:
    with refused(NotFoundError, "include_path"):
        LoadedTasks.load(["pico"], Settings(include_path=tmp_path / "absent"))


def test_no_task() -> None:
    with refused(ArgumentError, "tasks"):
        LoadedTasks.load([])


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with refused(DependencyError, match=r"pip install 'adapterswap\[eval\]'"):
        LoadedTasks.load(["mgsm_direct_sw"])
