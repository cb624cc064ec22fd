"""Documents that cannot be scored are refused before weights are loaded, by the task's name and their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.kit.errors import DataError

Model = tuple[Any, Any]

HEAD = """
task: pico
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
CHOICES = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: target\n"
LIKELIHOOD = "output_type: loglikelihood\ndoc_to_target: target\n"
CONTEXTS = """
output_type: multiple_choice
doc_to_text: label
doc_to_choice: choices
doc_to_target: target
"""


def write(folder: Path, task: str, rows: list[dict[str, Any]]) -> Settings:
    folder.mkdir()
    data = folder / "rows.json"
    data.write_text(json.dumps(rows), encoding="utf-8")
    head = HEAD if task is not CONTEXTS else HEAD.replace('doc_to_text: "{{{{q}}}}"\n', "")
    (folder / "pico.yaml").write_text(head.format(data=data) + task, encoding="utf-8")
    return Settings(include_path=folder)


GOOD = {"q": "ab", "choices": ["c", "d"], "target": 1}
WRITTEN = {"q": "ab", "target": "c"}


@pytest.mark.parametrize(
    ("task", "rows", "match"),
    [
        (CHOICES, [GOOD, {**GOOD, "choices": ["", "d"]}], "pico: one of the choices has no text"),
        (CHOICES, [GOOD, {**GOOD, "choices": []}], "pico: there are no choices"),
        (CHOICES, [GOOD, {**GOOD, "target": 2}], "pico: the target 2 is none of the choices"),
        (CHOICES, [GOOD, {**GOOD, "target": -1}], "pico: the target -1 is none of the choices"),
        (CHOICES.replace("doc_to_target: target", "doc_to_target: name"), [
            {**GOOD, "name": "d"}, {**GOOD, "name": "e"},
        ], "pico: the target 'e' is none of the choices"),
        (LIKELIHOOD, [WRITTEN, {**WRITTEN, "target": ""}], "pico: the target has no text"),
        (CONTEXTS, [{"choices": ["a", "b"], "target": "c", "label": 0}, {
            "choices": ["a", "b"], "target": "", "label": 0,
        }], "pico: the target has no text"),
    ],
    ids=["empty choice", "no choices", "beyond", "negative", "another text", "empty target", "contexts"],
)  # fmt: skip
def test_documents_that_cannot_be_scored_are_refused(
    byte_model: Model, tmp_path: Path, task: str, rows: list[dict[str, Any]], match: str
) -> None:
    model, tokenizer = byte_model
    settings = write(tmp_path / "tasks", task, rows)
    for ask in (
        lambda: preview(tokenizer, model.config, ["pico"], settings),
        lambda: evaluate_model(model, tokenizer, ["pico"], settings),
        lambda: Exam.load(["pico"], settings, _Base(model, tokenizer)),  # type: ignore[arg-type]
    ):
        with refused(DataError, "tasks", match=f"{match}.* in document 1"):
            ask()
    first = Settings(include_path=settings.include_path, limit=1)
    assert evaluate_model(model, tokenizer, ["pico"], first).tasks["pico"].num_docs == 1


class _Base:
    """What an exam needs of a base to load its tasks."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.config, self.tokenizer = model.config, tokenizer


@pytest.mark.parametrize(
    "row",
    [
        {**GOOD, "choices": ["c"], "target": 0},
        {**GOOD, "choices": ["c", "c"], "target": 0},
        {**GOOD, "q": ""},
        {**GOOD, "target": "d"},
    ],
    ids=["one choice", "equal choices", "empty prompt", "text"],
)
def test_unusual_documents_are_scored(byte_model: Model, tmp_path: Path, row: dict[str, Any]) -> None:
    model, tokenizer = byte_model
    (score,) = (
        evaluate_model(model, tokenizer, ["pico"], write(tmp_path / "tasks", CHOICES, [row])).tasks["pico"].scores
    )
    assert score.value in (0, 1)


WRITTEN_TASK = """
output_type: generate_until
doc_to_target: target
generation_kwargs: {until: ["."], do_sample: false, max_gen_toks: 4}
"""


def test_an_empty_prompt_of_a_generated_answer(byte_model: Model, tmp_path: Path) -> None:
    model, tokenizer = byte_model
    settings = write(tmp_path / "tasks", WRITTEN_TASK, [WRITTEN, {**WRITTEN, "q": ""}])
    for ask in (
        lambda: preview(tokenizer, model.config, ["pico"], settings),
        lambda: evaluate_model(model, tokenizer, ["pico"], settings),
    ):
        with refused(DataError, "tasks", match="pico: the prompt of document 1 has no tokens"):
            ask()
