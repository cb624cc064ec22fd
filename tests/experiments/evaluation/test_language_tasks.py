"""TyDi QA and XCOPA are lm-evaluation-harness's own tasks: here over a few rows of our own, as there is no Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import choices
import pytest
import torch
from datasets import Dataset, DatasetDict
from refusals import refused
from tolerances import near

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import ArgumentError

from .conftest import LAYERS

Model = tuple[Any, Any]
PASSAGE = "Tanzania ina majimbo 214 bara na majimbo 50 Zanzibar."


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's rows of TyDi QA's gold passages, in its columns."""
    from lm_eval.api import task

    def load(path: str, name: str, **_: Any) -> DatasetDict:
        assert (path, name) == ("google-research-datasets/tydiqa", "secondary_task")
        answers = {"text": ["majimbo 50", "50"], "answer_start": [5, 6]}
        row = {"title": "T", "context": PASSAGE, "question": "Zanzibar ina majimbo mangapi?", "answers": answers}
        both = [row | {"id": "swahili-1"}, row | {"id": "telugu-1"}]
        return DatasetDict({split: Dataset.from_list(both) for split in ("train", "validation")})

    monkeypatch.setattr(task.datasets, "load_dataset", load)


@pytest.mark.usefixtures("hub")
def test_tydiqa_is_the_harness_task() -> None:
    task = LoadedTasks.load(["tydiqa_goldp_sw@1"]).tasks["tydiqa_goldp_sw@1"]
    (row,) = task.eval_docs
    assert task.doc_to_text(row) == f"Muktadha: {PASSAGE}\n\nSwali: {row['question']}\n\nJibu:"
    assert task.process_results(row, [" Majimbo 50!"]) == {"exact_match": 1, "f1": 1}
    assert task.process_results(row, ["majimbo 214"]) == {"exact_match": 0, "f1": 0.5}
    assert task.get_config("num_fewshot") == 1


def test_choices_equal_a_plain_loop(byte_model: Model, tmp_path: Path) -> None:
    model, tokenizer = byte_model
    folder = choices.write_task(tmp_path)
    result = evaluate_model(model, tokenizer, [choices.TASK], Settings(limit=4, include_path=str(folder)))
    right = []
    for row, sample in zip(choices.rows(4), result.samples, strict=True):
        prompt = f"{row['premise'][:-1]} {'kwa sababu' if row['question'] == 'cause' else 'kwa hiyo'}"
        totals = []
        for choice in (row["choice1"], row["choice2"]):
            begin = len(tokenizer(prompt)["input_ids"])
            ids = tokenizer(f"{prompt} {choice[0].lower() + choice[1:]}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logs = model(ids).logits[0].log_softmax(-1)
            totals.append(sum(float(logs[i - 1, ids[0, i]]) for i in range(begin, ids.shape[1])))
        assert [likelihood for likelihood, _ in sample.output] == near(totals, depth=LAYERS)
        right.append(totals.index(max(totals)) == row["label"])
    task = result.tasks[choices.TASK]
    assert task.score(metric="acc").value == sum(right) / 4
    assert (task.num_fewshot, task.cut) == (0, None)


def test_more_shots_than_rows_are_refused(tmp_path: Path) -> None:
    folder = str(choices.write_task(tmp_path))
    most = choices.SHOTS  # the harness draws them from the validation split
    LoadedTasks.load([choices.TASK], Settings(num_fewshot=most, include_path=folder))
    with refused(ArgumentError, "num_fewshot"):
        LoadedTasks.load([choices.TASK], Settings(num_fewshot=choices.QUESTIONS + 1, include_path=folder))
