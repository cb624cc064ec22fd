"""Tasks that run the model's code: refused before they are loaded, and run if that is confirmed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from refusals import refused

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.stock_tasks import code_allowed, unsafe_tasks
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import ArgumentError

from .conftest import byte_tokenizer, pico_model

Model = tuple[Any, Any]

ROWS = [{"asked": "x = 2 + ", "wanted": 5}, {"asked": "x = 4 + ", "wanted": 9}]
TASK = """
task: pico_code
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
unsafe_code: true
output_type: generate_until
doc_to_text: "{{{{asked}}}}"
doc_to_target: "{{{{wanted}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\n"], do_sample: false, max_gen_toks: 4}}
process_results: !function pico_scores.passes
metric_list:
  - {{metric: pass_at_1, aggregation: mean, higher_is_better: true}}
"""
# As MBPP's own file does, this refuses to be imported unless the evaluate library's variable is set.
SCORES = """
import os
if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
    raise ValueError("code evaluation is not enabled")

def passes(doc, results):
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"
    names = {}
    exec(doc["asked"] + results[0], names)
    return {"pass_at_1": float(names["x"] == doc["wanted"])}
"""
GROUPS = {
    "named": "group: pico_group\ntask: [pico_code]\n",
    "nested": "group: pico_nested\ntask: [{group: inner, task: [pico_code]}]\n",
    "overridden": "group: pico_overridden\ntask: [{task: mgsm_direct_sw, unsafe_code: true}]\n",
}


@pytest.fixture(autouse=True)
def closed_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)


@pytest.fixture(scope="module")
def code_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, data = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("data")
    (data / "rows.json").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    text = TASK.format(data=data / "rows.json")
    (folder / "code.yaml").write_text(text + "tag: pico_tag\n", encoding="utf-8")
    (folder / "pico_scores.py").write_text(SCORES, encoding="utf-8")
    for name, group in GROUPS.items():
        (folder / f"{name}.yaml").write_text(group, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def coder() -> Model:
    """A model that has memorised 3 after both prompts: right once."""
    tokenizer, model = byte_tokenizer(), pico_model(layers=1, spread=0.05).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = [torch.tensor([tokenizer(row["asked"] + "3\n")["input_ids"]]) for row in ROWS]
    for _ in range(60):
        for ids in rows:
            torch.nn.functional.cross_entropy(model(ids).logits[0, -3:-1], ids[0, -2:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


@pytest.mark.parametrize("name", ["pico_code", "pico_group", "pico_nested", "pico_tag"])
def test_code_is_refused_before_it_is_loaded(code_tasks: Path, name: str) -> None:
    with refused(ArgumentError, "confirm_run_unsafe_code", match="pico_code"):
        LoadedTasks.load([name], Settings(include_path=code_tasks, trust_task_code=True))
    with refused(ArgumentError, "confirm_run_unsafe_code", match="mgsm_direct_sw"):
        LoadedTasks.load(["pico_overridden"], Settings(include_path=code_tasks, trust_task_code=True))


def test_mbpp_is_refused_by_its_name(code_tasks: Path) -> None:
    with refused(ArgumentError, "confirm_run_unsafe_code", match="humaneval, mbpp"):
        LoadedTasks.load(["mbpp", "humaneval", "gsm8k"], Settings(include_path=code_tasks, trust_task_code=True))


@pytest.mark.parametrize("name", ["pico_code", "pico_group", "pico_tag"])
def test_confirmed_code_runs(coder: Model, code_tasks: Path, name: str) -> None:
    settings = Settings(include_path=code_tasks, trust_task_code=True, confirm_run_unsafe_code=True, batch_size=1)
    result = evaluate_model(*coder, [name], settings)
    assert [sample.output.strip() for sample in result.samples] == ["3", "3"]
    assert list(result.tasks) == ["pico_code"]
    assert result.groups == {}  # a group without its own means
    assert result.tasks["pico_code"].score(metric="pass_at_1").value == 0.5
    assert result.settings["confirm_run_unsafe_code"] is True
    assert "HF_ALLOW_CODE_EVAL" not in os.environ


def test_the_gate_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    with code_allowed(True):
        assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "0"
    with code_allowed(False):
        assert os.environ["HF_ALLOW_CODE_EVAL"] == "0"


def test_a_group_that_holds_itself_is_walked_once() -> None:
    class Entry:
        cfg = {"group": "a", "task": ["a", "absent"]}  # noqa: RUF012
        tags: frozenset[str] = frozenset()

    assert unsafe_tasks(["a"], {"a": Entry()}) == []


def test_the_command_line_refuses_and_runs(run: Callable[..., Result], byte_base: Path, code_tasks: Path) -> None:
    command = ("evaluate", "--base-model", byte_base, "--tasks", "pico_code", "--include-path", code_tasks)
    command = (*command, "--trust-task-code", "--dry-run")
    refused = run(*command)
    assert refused.exit_code == 2
    assert "would run code written by the model on this machine" in refused.stderr
    allowed = run(*command, "--confirm-run-unsafe-code")
    assert allowed.exit_code == 0, allowed.output
    assert "pico_code" in allowed.stdout
