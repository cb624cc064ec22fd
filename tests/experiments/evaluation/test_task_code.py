"""Python in a folder of task files: refused before it runs, and run if the user trusts it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from refusals import refused

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.experiments.evaluation.stock_tasks import _manager, from_source, harness_folder, refuse_task_code
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.experiments.sweeps import SweepRecipe
from adapterswap.kit.errors import ArgumentError, DataError, Problems

Model = tuple[Any, Any]
Call = Callable[..., Result]

ROWS = [{"text": "Maji ni uhai"}, {"text": "Haba na haba"}]
PLAIN = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[0]}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
# Both the import and the call write to the marker.
CODE = """
from pathlib import Path
from lm_eval.api.task import ConfigurableTask

Path({marker!r}).write_text("imported")


def docs(docs):
    Path({marker!r}).write_text("called")
    return docs


def rows(**options):
    import datasets

    Path({marker!r}).write_text("called")
    return {{"test": datasets.Dataset.from_list({rows})}}


class Own(ConfigurableTask):
    def __init__(self, config):
        Path({marker!r}).write_text("called")
        config.pop("class")
        super().__init__(config=config)
"""
METRIC = """
import datasets
import evaluate
from pathlib import Path

Path({marker!r}).write_text("imported")


class Own(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {{"own": 1.0}}
"""
ESCAPE = "{{{{ cycler.__init__.__globals__.os.system('echo run > {marker}') }}}}"
FILES = {
    "plain": "task: own_plain\ninclude: ../plain.inc\n",
    "function": "task: own_function\ninclude: ../plain.inc\nprocess_docs: !function own_code.docs\ntag: own_tag\n",
    "custom": "task: own_custom\ninclude: ../plain.inc\ncustom_dataset: !function own_code.rows\n",
    "class": "task: own_class\ninclude: ../plain.inc\nclass: !function own_code.Own\n",
    "included": "task: own_included\ninclude: [../plain.inc, ../outside/code.inc]\n",
    "group": "group: own_group\ntask: [own_plain, own_function]\n",
    "nested": "group: own_nested\ntask:\n  - own_plain\n  - {{group: inner, task: [own_function]}}\n",
    "metric": "task: own_metric\ninclude: ../plain.inc\nmetric_list:\n  - {{metric: {metric}, hf_evaluate: true,"
    " aggregation: mean, higher_is_better: true}}\n",
    "template": f'task: own_template\ninclude: ../plain.inc\ndoc_to_text: "{ESCAPE}"\n',
    "broken": "task: own_broken\ninclude: ../plain.inc\ndoc_to_text: '{{{{ absent }}}}'\n",
    "changed": "task: own_changed\ninclude: ../plain.inc\n",
    "coded": "task: own_coded\ninclude: {coded}\n",
    "biology": "task: mmlu_pro_biology\ninclude: ../plain.inc\nprocess_docs: !function own_code.docs\n",
    "later": "task: own_later\ninclude: ../plain.inc\n"
    f"doc_to_text: \"{{{{% if text.startswith('Haba') %}}}}{ESCAPE}{{{{% endif %}}}}Maji\"\n",
}
HARNESS = harness_folder()
assert HARNESS is not None
CODED = HARNESS / "mmlu_pro/mmlu_pro_biology.yaml"
RUNNING = [
    "own_function", "own_custom", "own_class", "own_included", "own_group", "own_nested", "own_tag", "own_metric",
    "own_template",
]  # fmt: skip


class Tasks:
    """A folder of task files whose code, wherever it runs, writes `marker`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker = folder / "tasks", folder / "marker"
        for place in (self.folder, folder / "outside", folder / "own_score"):
            place.mkdir()
        (folder / "rows.json").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
        known = {"data": folder / "rows.json", "marker": self.marker}
        known |= {"metric": folder / "own_score", "coded": CODED}
        texts = {self.folder / f"{name}.yaml": text for name, text in FILES.items()}
        texts |= {folder / "plain.inc": PLAIN, folder / "own_score/own_score.py": METRIC}
        code = CODE.format(marker=str(self.marker), rows=ROWS)
        for place in (self.folder, folder / "outside"):
            (place / "own_code.py").write_text(code, encoding="utf-8")
        (folder / "outside/code.inc").write_text("process_docs: !function own_code.docs\n", encoding="utf-8")
        for path, text in texts.items():
            marker = repr(str(self.marker)) if path.suffix == ".py" else str(self.marker)
            text = text.replace("{marker!r}", marker)
            path.write_text(text.format(**known), encoding="utf-8")

    @property
    def ran(self) -> bool:
        return self.marker.exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    return Tasks(tmp_path_factory.mktemp("made"))  # one folder, since indexing the harness's tasks takes seconds


@pytest.fixture
def tasks(made: Tasks, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    made.marker.unlink(missing_ok=True)
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", made.folder.parent / "modules")
    return made


@pytest.mark.parametrize("name", RUNNING)
def test_code_is_refused_before_it_runs(tasks: Tasks, name: str) -> None:
    with refused(ArgumentError, "trust_task_code") as result:
        LoadedTasks.load([name], Settings(include_path=tasks.folder))
    assert {problem.parameter for problem in result.value.problems} == {"trust_task_code"}
    assert not tasks.ran


@pytest.mark.parametrize("name", RUNNING)
def test_trusted_code_runs(tasks: Tasks, name: str) -> None:
    LoadedTasks.load([name], Settings(include_path=tasks.folder, trust_task_code=True))
    assert tasks.ran
    tasks.marker.unlink()
    with refused(ArgumentError, "trust_task_code") as result:  # a task loaded with trust is not reused without it
        LoadedTasks.load([name], Settings(include_path=tasks.folder))
    assert {problem.parameter for problem in result.value.problems} == {"trust_task_code"}
    assert not tasks.ran


def test_a_tasks_fingerprint_does_not_depend_on_its_folder(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(tasks.folder.parent, moved)
    monkeypatch.chdir(moved)
    names = ["own_plain", "own_function", "own_custom", "own_class"]
    found = []
    for folder in (tasks.folder, Path("tasks")):
        loaded = LoadedTasks.load(names, Settings(include_path=folder, trust_task_code=True))
        found.append({name: loaded.fingerprint(name) for name in loaded.tasks})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(names)


def test_an_edited_function_is_the_one_that_runs(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would run a cached compilation of a file that has the same size and second as before the edit."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr("adapterswap.experiments.evaluation.tasks._KEPT", {})
    scoring = tasks.folder.parent / "scoring.py"

    def word(text: str, context: AbstractContextManager[None]) -> str:
        scoring.write_text(f"WORD = {text!r}\n")
        os.utime(scoring, (1_700_000_000, 1_700_000_000))
        spec = importlib.util.spec_from_file_location("scoring", scoring)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with context:
            spec.loader.exec_module(module)
        return str(module.WORD)

    assert [word("one", nullcontext()), word("two", nullcontext())] == ["one", "one"]
    assert [word("one", from_source()), word("two", from_source())] == ["one", "two"]
    LoadedTasks.load(["own_function"], Settings(include_path=tasks.folder, trust_task_code=True))
    assert tasks.ran
    assert not [*tasks.folder.rglob("*.pyc")]


def test_changed_files_are_read_again(tasks: Tasks) -> None:
    """In one process, as in a notebook: a task file, a file that it includes, its data, and a new task."""
    settings = Settings(include_path=tasks.folder)

    def loaded(name: str = "own_changing") -> tuple[str, int]:
        task = LoadedTasks.load([name], settings).tasks[name]
        return task.config.doc_to_text, len(task.eval_docs)

    data, file = tasks.folder / "data.json", tasks.folder / "changing.yaml"
    shared = tasks.folder / "shared.inc"
    data.write_text('{"text": "a b"}\n')
    shared.write_text((tasks.folder.parent / "plain.inc").read_text().replace("rows.json", "tasks/data.json"))
    file.write_text("task: own_changing\ninclude: shared.inc\ndoc_to_text: one\n")
    assert loaded() == ("one", 1)
    file.write_text("task: own_changing\ninclude: shared.inc\ndoc_to_text: two\n")
    assert loaded() == ("two", 1)
    data.write_text('{"text": "a b"}\n{"text": "c d"}\n')
    assert loaded() == ("two", 2)
    outside = tasks.folder.parent / "elsewhere.json"
    outside.write_text('{"text": "a b"}\n' * 3)
    shared.write_text(shared.read_text().replace("tasks/data.json", "elsewhere.json"))
    assert loaded() == ("two", 3)
    outside.write_text('{"text": "a b"}\n' * 4)
    assert loaded() == ("two", 4)
    (tasks.folder / "new.yaml").write_text("task: own_new\ninclude: shared.inc\n")
    assert loaded("own_new")[1] == 4
    for path in (data, file, shared, outside, tasks.folder / "new.yaml"):
        path.unlink()


def test_every_place_is_named(tasks: Tasks) -> None:
    with refused(ArgumentError, "trust_task_code") as result:
        LoadedTasks.load(["own_group", "own_included", "own_metric"], Settings(include_path=tasks.folder))
    named = [problem.message.split(" ")[0] for problem in result.value.problems]
    places = [tasks.folder.parent / "outside/code.inc", tasks.folder / "metric.yaml", tasks.folder / "function.yaml"]
    assert [name.rstrip(",") for name in named] == [str(place) for place in places]
    assert all(
        name in str(result.value) for name in ("own_code.docs", "line 3", str(tasks.folder.parent / "own_score"))
    )


def test_files_without_code_need_no_trust(byte_model: Model, tasks: Tasks) -> None:
    settings = Settings(include_path=tasks.folder)
    (task,) = evaluate_model(*byte_model, ["own_plain"], settings).tasks.values()
    assert (task.name, task.num_docs) == ("own_plain", 2)
    assert "trust_task_code" not in settings.described()
    assert not tasks.ran


def test_a_later_document_cannot_leave_the_sandbox(byte_model: Model, tasks: Tasks) -> None:
    """The harness renders the first document when it loads a task, and the others when they are evaluated."""
    model, tokenizer = byte_model
    settings = Settings(include_path=tasks.folder)
    LoadedTasks.load(["own_later"], settings)
    for asking in (
        lambda: preview(tokenizer, model.config, ["own_later"], settings),
        lambda: evaluate_model(model, tokenizer, ["own_later"], settings),
    ):
        with refused(ArgumentError, "trust_task_code") as result:
            asking()
        assert {problem.parameter for problem in result.value.problems} == {"trust_task_code"}
        assert not tasks.ran
    evaluate_model(model, tokenizer, ["own_later"], Settings(include_path=tasks.folder, trust_task_code=True))
    assert tasks.ran


def test_a_broken_template_is_refused(tasks: Tasks) -> None:
    with refused(DataError, "tasks", match="absent"):
        LoadedTasks.load(["own_broken"], Settings(include_path=tasks.folder))


def test_files_changed_since_indexing_are_read_again(tasks: Tasks) -> None:
    settings = Settings(include_path=tasks.folder)
    LoadedTasks.load(["own_changed"], settings)
    with (tasks.folder / "changed.yaml").open("a", encoding="utf-8") as file:
        file.write("process_docs: !function own_code.docs\n")
    with refused(ArgumentError, "trust_task_code") as result:
        LoadedTasks.load(["own_changed"], Settings(include_path=tasks.folder, num_fewshot=0))
    assert {problem.parameter for problem in result.value.problems} == {"trust_task_code"}
    assert not tasks.ran


def test_the_harness_is_trusted_also_where_a_file_includes_it(tasks: Tasks) -> None:
    problems = Problems()
    refuse_task_code(
        ["own_coded", "mmlu_pro_math"], _manager(["own_coded", "mmlu_pro_math"], str(tasks.folder)).task_index, problems
    )
    problems.raise_if_any()
    assert "!function" in CODED.with_name("_default_template_yaml").read_text(encoding="utf-8")


def test_a_group_of_the_harness_may_hold_a_task_of_the_folder(tasks: Tasks) -> None:
    """Task files of the folder go before those of the harness with the same name."""
    problems = Problems()
    refuse_task_code(["mmlu_pro"], _manager(["mmlu_pro"], str(tasks.folder)).task_index, problems)
    assert [problem.message.split(",")[0] for problem in problems] == [str(tasks.folder / "biology.yaml")]


@pytest.mark.parametrize("dry", [True, False])
def test_evaluate_on_the_command_line(run: Call, byte_base: Path, tasks: Tasks, dry: bool) -> None:
    command = ["evaluate", "--base-model", byte_base, "--tasks", "own_function", "--include-path", tasks.folder]
    command += ["--dry-run"] if dry else ["--device", "cpu"]
    stopped = run(*command)
    assert stopped.exit_code == 2
    assert "--trust-task-code" in stopped.stderr
    assert not tasks.ran
    allowed = run(*command, "--trust-task-code")
    assert allowed.exit_code == 0, allowed.output
    assert tasks.ran


def test_no_recipe_trusts_its_own_code(tasks: Tasks) -> None:
    settings = {"include_path": str(tasks.folder), "trust_task_code": True}
    content = {"base_model": "b", "task_experts": {"t": "t"}, "language_experts": {"l": "l"}, "tasks": ["own_function"]}
    with pytest.raises(ValueError, match="trust_task_code"):
        SweepRecipe.model_validate({**content, "settings": settings})
