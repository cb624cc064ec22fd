"""The Evaluate panel in headless Chromium: a visitor's file, MGSM, Stop and Clear, against the library's scores."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapterswap.engines.live import Reading
from adapterswap.experiments.evaluation.mgsm import read_mgsm
from adapterswap.experiments.intervals import wilson
from adapterswap.experiments.studio import evaluations
from adapterswap.experiments.studio.choice import first_choice, from_address
from adapterswap.experiments.studio.workspace import Workspace
from tests.experiments.evaluation.conftest import byte_tokenizer, pico_model

from .conftest import random_expert

Visit = Callable[..., Any]
QUERY = "?task=math&language=language&bottom=2&top=0"


def evaluate_on(page: Any, task: str) -> None:
    page.get_by_role("tab", name="Evaluate").click()
    page.get_by_role("combobox", name="Task", exact=True).click()
    page.get_by_role("option", name=task, exact=True).click()


def upload(page: Any, path: Path) -> None:
    chosen = page.locator("#rows input[type=file]")
    chosen.set_input_files(path)
    assert chosen.evaluate("e => e.files[0].text()") == path.read_text(encoding="utf-8")  # after the page read it


def test_an_uploaded_file_is_evaluated_and_stays_visible(visit: Visit, workspace: Workspace, tmp_path: Path) -> None:
    composition = workspace.composition(from_address(QUERY, first_choice(["math", "language"])))
    prompt = "Eva ka leles fika paris ."
    *_, last = workspace.answers(prompt, [composition], max_new_tokens=256, chat=False)
    rows = [{"prompt": prompt, "answer": last.texts[0].strip()}, {"prompt": prompt, "answer": "another"}]
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    bad.write_text('{"prompt": "a"}\n', encoding="utf-8")
    good.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    page = visit(QUERY)
    evaluate_on(page, evaluations.OWN_FILE)
    page.locator("#evaluate").click()
    page.locator("#evaluating .problem", has_text="no file").wait_for()
    upload(page, bad)
    page.locator("#evaluate").click()
    page.locator("#evaluating .problem", has_text="'answer'").wait_for()
    assert page.locator("#evaluated td").count() == 0
    upload(page, good)
    page.locator("#evaluate").click()
    page.locator("#evaluated td").first.wait_for()
    assert page.locator("#evaluated td.number").first.inner_text() == "1 / 2"
    assert page.locator("#evaluating .problem").count() == 0
    page.locator("#evaluate").click()
    page.locator("#evaluated tbody tr").nth(1).wait_for()
    page.get_by_role("button", name="Clear the table").click()
    page.locator("#evaluated", has_text="Nothing has been evaluated").wait_for()


def test_mgsm_is_scored_as_evaluate_scores_it(
    visit: Visit, serve: Callable[[Workspace], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that answers 18 to everything while the composition is set, on the first ten questions."""
    pico_model(layers=2).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("math", "language"), 1):
        random_expert(tmp_path / "base", tmp_path / "experts" / name, seed)
    workspace = Workspace.open(str(tmp_path / "base"), tmp_path / "experts", device="cpu")
    query = "?task=math&language=language&bottom=1&top=0"
    composition = workspace.composition(from_address(query, first_choice(["math", "language"])))
    page = visit(query, url=serve(workspace))
    plans = []

    def answer(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        plans.append(repr(workspace.live.plan))
        written = workspace.tokenizer(" 18\n\nQuestion:", return_tensors="pt", add_special_tokens=False)["input_ids"]
        return torch.cat([input_ids, written.expand(len(input_ids), -1)], dim=1)

    evaluate_on(page, "mgsm_direct_en")
    documents = page.get_by_role("spinbutton", name="Documents")
    documents.fill("10")
    documents.press("Tab")
    # How the model reads batches is measured with its own answers, before it gets these.
    assert Reading.of(workspace.live.model).left
    monkeypatch.setattr(workspace.live.model, "generate", answer)
    page.locator("#evaluate").click()
    page.locator("#evaluated td").first.wait_for()
    golds = [gold for _, gold in read_mgsm("en").questions[:10]]
    assert page.locator("#evaluated td.number").first.inner_text() == f"{golds.count(18)} / 10"
    low, high = wilson(golds.count(18), 10)
    assert page.locator("#evaluated td.number").nth(2).inner_text() == f"{low:.1%} – {high:.1%}"
    with workspace.turns.turn(), workspace.live.use(composition):
        assert set(plans) == {repr(workspace.live.plan)}
    assert golds.count(18) == 1


def test_a_task_that_does_not_fit_the_model_is_reported(visit: Visit) -> None:
    page = visit(QUERY)
    evaluate_on(page, "mgsm_direct_en")
    page.locator("#evaluate").click()
    page.locator("#evaluating .problem", has_text="do not fit").wait_for()
    assert page.locator("#evaluated td").count() == 0


def test_an_evaluation_can_be_stopped(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    going, released = threading.Event(), threading.Event()
    score = evaluations._score_lab

    def held(workspace: Workspace, task: str, limit: int, step: Any) -> Any:
        step(0, limit)
        going.set()
        assert released.wait(900)
        return score(workspace, task, limit, step)

    monkeypatch.setattr(evaluations, "_score_lab", held)
    page = visit(QUERY)
    page.get_by_role("tab", name="Evaluate").click()
    page.locator("#evaluate").click()
    assert going.wait(900)
    page.locator("#evaluating .progress").wait_for()
    page.get_by_role("button", name="Stop").click()
    released.set()
    page.locator("#evaluating", has_text="Stopped.").wait_for()
    assert page.locator("#evaluated td").count() == 0
