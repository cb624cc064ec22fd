"""The study in French and Spanish: its compositions and its scores, each beside plain torch; and a part of it whole."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiers import ALL
from tolerances import close
from transformers import AutoModelForCausalLM

import adapterswap as asw
from adapterswap.cli import main

from .conftest import EXAMPLE, EXPERTS, deltas, layer_of, logits, with_change

Change = dict[str, torch.Tensor]
CHOSEN = {"weight": 0.3, "bottom": 6}


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped experts under the study's names; the Spanish one is the French one with its layers moved."""
    moved = tmp_path_factory.mktemp("moved") / "french"
    subprocess.run([sys.executable, str(EXAMPLE / "move_layers.py"), str(EXPERTS["french"]), str(moved)], check=True)
    return {"math-0": EXPERTS["math"], "french-0": EXPERTS["french"], "spanish-0": moved, "french-0-moved": moved}


def added(*weighted: tuple[float, Change]) -> Change:
    """The weighted sum of several ΔW."""
    result: Change = {}
    for weight, change in weighted:
        for name, delta in change.items():
            result[name] = result.get(name, 0) + weight * delta
    return result


def within(change: Change, first: int, end: int) -> Change:
    return {name: delta for name, delta in change.items() if first <= layer_of(name) < end}


def expected(row: str, math: Change, french: Change, moved: Change) -> Change:
    """ΔW of a row of the tables for French questions, from those of its experts."""
    return {
        "base": {},
        "language expert": french,
        "soup": added((0.5, math), (0.5, french)),
        "inverse swap": within(french, 8, 30),
        "math expert (= reset)": math,
        "sum": added((1, math), (1, french)),
        "tuned sum": added((1, math), (0.3, french)),
        "layer swap": within(math, 8, 30) | within(french, 0, 8),
        "tuned swap": within(math, 6, 30) | within(french, 0, 6),
        "swap with the other language's layers": within(math, 8, 30) | within(moved, 0, 8),
        "swap with layers in other places": within(math, 8, 30) | within(moved, 0, 8),
    }[row]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.sampled(11))
        for row in [
            "soup", "inverse swap", "tuned sum", "tuned swap", "layer swap", "language expert", "sum",
            "math expert (= reset)", "base", "swap with the other language's layers",
            "swap with layers in other places",
        ]
    ],
)  # fmt: skip
def test_every_row_is_the_composition_that_it_says(
    row: str, base: Path, model: Any, folders: dict[str, Path], prompts: list[torch.Tensor]
) -> None:
    study = runpy.run_path(str(EXAMPLE / "study.py"))
    assert row in study["ROWS"]
    text = study["composition_of"](row, "fr", 0, CHOSEN)
    math, french, moved = (deltas(folders[name]) for name in ("math-0", "french-0", "french-0-moved"))
    right = logits(with_change(AutoModelForCausalLM.from_pretrained(base), expected(row, math, french, moved)), prompts)
    composer = asw.LiveComposer.from_experts(model, folders)
    with composer.use(None if text == "base" else text):
        for ours, reference in zip(logits(composer.model, prompts), right, strict=True):
            close(ours, reference, depth=30)


@pytest.mark.parametrize(("name", "steps"), [("math-1", 264), ("spanish-0", 140)])
def test_experts_can_be_trained(name: str, steps: int, base: Path, tmp_path: Path) -> None:
    """The command's own account of the run: the rows, the steps, the layers."""
    study = runpy.run_path(str(EXAMPLE / "study.py"))
    recipe = study["recipe_of"](name, study["write_rows"](name, tmp_path), base, "cpu")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command = ["train", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out"), "--dry-run", "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    account = json.loads(result.stdout)
    assert account["steps"] == steps
    assert account["rows"]["train"] == {"math": 2100, "spanish": 5600}[name.partition("-")[0]]


def test_scores_are_those_of_plain_loops(model: Any, tokenizer: Any) -> None:
    """A forward pass for each choice, and transformers' own greedy answers."""
    scoring = runpy.run_path(str(EXAMPLE / "scoring.py"))
    study = runpy.run_path(str(EXAMPLE / "study.py"))
    documents = [*study["documents_of"]("new_fr")[:: 160 if ALL else 320], study["documents_of"]("translations_es")[0]]
    for document, one in zip(documents, scoring["score"](model, tokenizer, documents), strict=True):
        prompt = tokenizer(document.prompt, return_tensors="pt")["input_ids"]
        for choice, total, with_end in zip(document.choices, one.sums, one.ends, strict=True):
            ids = tokenizer(f"{document.prompt} {choice}")["input_ids"] + [tokenizer.eos_token_id]
            with torch.no_grad():
                tokens = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            values = [tokens[at - 1, ids[at]].item() for at in range(prompt.shape[1], len(ids))]
            assert total == pytest.approx(sum(values[:-1]), abs=2e-4)
            assert with_end == pytest.approx(sum(values), abs=2e-4)
        if document.answer:
            answer = model.generate(prompt, max_new_tokens=scoring["NEW_TOKENS"], do_sample=False)
            assert one.text == tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True)


def test_marks(tokenizer: Any) -> None:
    scoring = runpy.run_path(str(EXAMPLE / "scoring.py"))
    row = {
        "question": "?", "template": "n", "choices": ["12", "7"], "label": 0, "equal_choices": ["13", "12"],
        "equal_label": 1,
    }  # fmt: skip
    document = scoring["Document"].of(row, "French")
    assert document.choices == ("12", "7", "13")
    scores = scoring["Scores"](sums=(-4.0, -3.0, -5.0), ends=(-6.0, -7.0, -5.5), text=" 12 euros, not 7")
    assert scoring["marks_of"]([document], [scores]) == {
        "usual": "0", "usual with end": "1", "usual by character": "1",
        "equal": "1", "equal with end": "0", "equal by character": "1", "generated": "1",
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.slow
def test_one_pair_and_forty_templates(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """The command as users run it, with the shipped experts in place of trained ones; a second run scores nothing."""
    out = tmp_path / "study"
    (out / "experts").mkdir(parents=True)
    (out / "base").symlink_to(base)
    for name in ("french-0", "spanish-0"):
        shutil.copytree(folders[name], out / "experts" / name)
    command = [
        sys.executable, str(EXAMPLE / "study.py"), "scores", "--pairs", "1", "--templates", "40", "--test", "new_fr",
        "--device", "cpu", "--out-path", str(out),
    ]  # fmt: skip
    first = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in (out / "scores-40.jsonl").read_text(encoding="utf-8").splitlines()]
    assert first.count(" on new_fr in ") == sum(line["test"] == "new_fr" for line in lines) >= 10
    for line in lines:
        number = 40 if line["test"] == "new_fr" else 12
        assert {len(marks) for marks in line["marks"].values()} == {number}
    again = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert " on new_fr in " not in again
