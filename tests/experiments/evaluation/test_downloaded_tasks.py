"""AfriMGSM, variants of MGSM, and MultiJail from small stand-ins for their files, with the same names and columns."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from datasets import Dataset, DatasetDict
from importing import loaded
from refusals import refused

from adapterswap.experiments.evaluation import Settings, evaluate_model, write_result
from adapterswap.experiments.evaluation.downloaded import LABELS, MULTIJAIL_PATH, multijail_task_names, score_labels
from adapterswap.experiments.evaluation.languages import language_of
from adapterswap.experiments.evaluation.mgsm import (
    LANGUAGES,
    MGSM_REV2_PATH,
    MGSM_SYMBOLIC_PATH,
    MODES,
    read_mgsm,
    variant_task_names,
)
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.experiments.sweeps.tasks import _primary
from adapterswap.kit.errors import ArgumentError, DataError, FieldError, NotFoundError

Model = tuple[Any, Any]
Run = Callable[..., Result]

# Questions of our own in AfriMGSM's columns: those of train have solutions, those of test only a number, as text.
AFRI: dict[str, list[dict[str, str | None]]] = {
    "train": [
        {"question": f"Question: Ana {n}?", "answer": f"Step-by-Step Answer: {n}.", "answer_number": f"{n}"}
        for n in (4, 5)
    ],
    "test": [
        {"question": "Juma ana 10 na 8. Ngapi?", "answer": None, "answer_number": "18"},
        {"question": "Asha ana 600 na 600. Ngapi?", "answer": None, "answer_number": "1,200"},
    ],
}


@pytest.fixture
def afrimgsm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's rows for each language of masakhane/afrimgsm."""
    from lm_eval.api import task

    def load(path: str, name: str, **_: Any) -> DatasetDict:
        assert path == "masakhane/afrimgsm"
        assert len(name) == 3
        return DatasetDict({split: Dataset.from_list(rows) for split, rows in AFRI.items()})

    monkeypatch.setattr(task.datasets, "load_dataset", load)


def scores_of(task: Any, answer: str) -> dict[str, float]:
    """exact_match of the first document by each filter, as the harness computes it."""
    doc = task.eval_docs[0]
    return {
        ensemble.name: task.process_results(doc, _filtered(ensemble, [answer], doc))["exact_match"]
        for ensemble in task._filters
    }


def _filtered(ensemble: Any, answers: list[str], doc: Any) -> list[Any]:
    responses: Any = [answers]
    for make in ensemble.filters:
        responses = make().apply(responses, [doc])
    return list(responses)


@pytest.mark.usefixtures("afrimgsm")
def test_afrimgsm_is_the_harness_task_with_one_more_score() -> None:
    names = ["afrimgsm_cot_swa_prompt_1", "afrimgsm_swa_prompt_1", "afrimgsm_cot_yor_prompt_1"]
    tasks = LoadedTasks.load(names).tasks
    swahili, direct, yoruba = (tasks[name] for name in names)
    assert [each.name for each in swahili._filters] == ["strict-match", "flexible-extract", "normalized"]
    assert [each.name for each in direct._filters] == ["remove_whitespace", "flexible-extract", "normalized"]
    assert [each.name for each in yoruba._filters] == ["strict-match", "flexible-extract"]
    assert swahili.doc_to_text(swahili.eval_docs[0]) == "Question: Juma ana 10 na 8. Ngapi?\nStep-by-Step Answer:"
    right = {"strict-match": 1.0, "flexible-extract": 1.0, "normalized": 1.0}
    assert scores_of(swahili, "10 + 8 = 18. The answer is 18.") == right
    assert scores_of(swahili, "Jibu ni 18.00") == {"strict-match": 0.0, "flexible-extract": 0.0, "normalized": 1.0}
    assert scores_of(swahili, "The answer is -18")["normalized"] == 0.0


@pytest.mark.usefixtures("afrimgsm")
def test_afrimgsm_is_evaluated(byte_model: Model) -> None:
    names = ["afrimgsm_cot_swa_prompt_1@2", "afrimgsm_swa_prompt_3"]
    result = evaluate_model(*byte_model, names, Settings(max_gen_toks=8))
    task = result.tasks[names[0]]
    assert (task.num_docs, task.num_fewshot) == (2, 2)
    assert [(score.metric, score.filter) for score in task.scores] == [
        ("exact_match", name) for name in ("strict-match", "flexible-extract", "normalized")
    ]
    first = next(sample for sample in result.samples if sample.task == names[0])
    assert all(str(row["question"]) in first.prompt for row in AFRI["train"])


@pytest.mark.usefixtures("afrimgsm")
def test_tags_of_afrimgsm_in_included_files() -> None:
    tasks = LoadedTasks.load(["afrimgsm_cot_tasks_prompt_1"]).tasks
    assert len(tasks) == 19
    assert {name.split("_")[2] for name in tasks} >= {"swa", "yor", "zul"}


@pytest.mark.usefixtures("afrimgsm")
def test_answers_of_afrimgsm_that_are_not_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AFRI, "test", [*AFRI["test"], {"question": "?", "answer": None, "answer_number": "kumi"}])
    with refused(DataError, "tasks", match="kumi"):
        LoadedTasks.load(["afrimgsm_cot_swa_prompt_2"])


def test_languages_of_afrimgsm() -> None:
    assert language_of("afrimgsm_cot_swa_prompt_1@2") == "swa"
    assert language_of("afrimgsm_yor_prompt_5") == "yor"
    assert language_of("afrimgsm_translate_swa_prompt_1") is None


@pytest.fixture
def rev2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Swahili and German files in MGSM-Rev2's form; the first question is changed."""
    folder = tmp_path / "MGSM-Rev2"
    folder.mkdir()
    for code in ("sw", "de"):
        pairs = [*read_mgsm(code).questions]
        pairs[0] = (f"{pairs[0][0]} (?)", 1200)
        lines = [f"{question}\t{answer:,}\n" for question, answer in pairs]
        (folder / f"mgsm_{code}.tsv").write_text("".join(lines), encoding="utf-8")
    monkeypatch.setenv(MGSM_REV2_PATH, str(folder))
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_mgsm_rev2_prompts_like_mgsm_with_its_own_questions(rev2: Path, mode: str) -> None:
    new, old = f"mgsm_rev2_{mode}_sw", f"mgsm_{mode}_sw"
    tasks = LoadedTasks.load([new, old]).tasks
    prompts = {
        name: [task.fewshot_context(doc, num_fewshot=8) for doc in task.eval_docs] for name, task in tasks.items()
    }
    question = read_mgsm("sw").questions[0][0]
    assert prompts[new][0] == prompts[old][0].replace(question, f"{question} (?)")
    assert prompts[new][1:] == prompts[old][1:]
    assert tasks[new].eval_docs[0]["answer"] == "1200"
    assert [each.name for each in tasks[new]._filters] == [each.name for each in tasks[old]._filters]
    assert tasks[new].get_config("num_fewshot") == 8
    assert language_of(new) == "sw"


def test_names_of_mgsm_rev2(rev2: Path) -> None:
    assert set(LoadedTasks.load(["mgsm_rev2_*_sw"]).tasks) == {f"mgsm_rev2_{mode}_sw" for mode in MODES}
    assert len(variant_task_names()) == 2 * 3 * len(LANGUAGES)
    assert set(LoadedTasks.load(["mgsm_*_sw"]).tasks) == {f"mgsm_{mode}_sw" for mode in MODES}
    assert "mgsm_rev2_direct_sw" in LoadedTasks.known_names("mgsm_rev2_d")
    with refused(ArgumentError, "tasks", match="mgsm_rev2_direct_xx"):
        LoadedTasks.check_names(["mgsm_rev2_direct_xx"])
    with refused(ArgumentError, "num_fewshot"):
        LoadedTasks.load(["mgsm_rev2_direct_sw"], Settings(num_fewshot=9))


def test_files_of_mgsm_rev2_that_do_not_fit(rev2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(DataError, match=r"mgsm_bn\.tsv"):
        LoadedTasks.load(["mgsm_rev2_direct"])
    path = rev2 / "mgsm_sw.tsv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for text, said in (
        ("".join(lines[:-1]), "249"),
        ("".join([*lines[:-1], "Ngapi?\t18.5\n"]), "line 250"),
        ("".join([*lines[:-1], "Ngapi? 18\n"]), "line 250"),
    ):
        path.write_text(text, encoding="utf-8")
        with refused(DataError, match=said):
            LoadedTasks.load(["mgsm_rev2_direct_sw"])
    monkeypatch.delenv(MGSM_REV2_PATH)
    with refused(NotFoundError, match="MGSM_REV2_PATH is not set"):
        LoadedTasks.load(["mgsm_rev2_direct_sw", "mgsm_rev2_direct_de"])


def test_mgsm_symbolic_may_have_any_number_of_questions(rev2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/mgsm_symbolic.py writes the files; its exemplars, prompts and scores are MGSM's."""
    with refused(NotFoundError, match="MGSM_SYMBOLIC_PATH is not set"):
        LoadedTasks.load(["mgsm_symbolic_native_cot_sw"])
    monkeypatch.setenv(MGSM_SYMBOLIC_PATH, str(rev2))
    (rev2 / "mgsm_sw.tsv").write_text("Anna ana kalamu tatu. Ngapi?\t3\nBen ana mbili. Ngapi?\t2\n", encoding="utf-8")
    tasks = LoadedTasks.load(["mgsm_symbolic_native_cot_sw", "mgsm_native_cot_sw"]).tasks
    symbolic, mgsm = tasks["mgsm_symbolic_native_cot_sw"], tasks["mgsm_native_cot_sw"]
    assert [doc["answer"] for doc in symbolic.eval_docs] == ["3", "2"]
    prompts = [task.fewshot_context(task.eval_docs[0], num_fewshot=8) for task in (symbolic, mgsm)]
    assert prompts[0] == prompts[1].replace(read_mgsm("sw").questions[0][0], "Anna ana kalamu tatu. Ngapi?")
    assert [each.name for each in symbolic._filters] == [each.name for each in mgsm._filters]
    assert language_of("mgsm_symbolic_native_cot_sw") == "sw"
    assert set(LoadedTasks.load(["mgsm_symbolic_*_sw"]).tasks) == {f"mgsm_symbolic_{mode}_sw" for mode in MODES}
    with refused(ArgumentError, "num_fewshot"):
        LoadedTasks.load(["mgsm_symbolic_direct_sw"], Settings(num_fewshot=9))
    with refused(DataError, match=r"mgsm_te\.tsv"):
        LoadedTasks.load(["mgsm_symbolic_direct_te"])
    (rev2 / "mgsm_sw.tsv").write_text("Ngapi?\n", encoding="utf-8")
    with refused(DataError, match="line 1"):
        LoadedTasks.load(["mgsm_symbolic_direct_sw"])


class Template:
    """A template of the package `multilingual_gsm_symbolic`, made up."""

    def __init__(self, id_orig: int, ending: str = "#### {number}") -> None:
        self.id_orig, self._ending = id_orig, ending

    def generate_questions(self, n: int, *, rng: Random, verbose: bool) -> list[SimpleNamespace]:
        numbers = [rng.randrange(1000, 2000) for _ in range(n)]
        return [
            SimpleNamespace(
                question=f"Anna\tana\n{number}.", answer="Hivyo\n" + self._ending.format(number=f"{number:,}")
            )
            for number in numbers
        ]


def test_questions_are_written_without_those_of_mgsm(rev2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = loaded(Path(__file__).parents[3] / "scripts" / "mgsm_symbolic.py")
    templates = [Template(700), Template(249), Template(250)]
    lines = script.rows(templates, 3, 0)
    assert len(lines) == 6  # question 249 is MGSM's last
    assert lines == script.rows(templates[::-1], 3, 0)
    assert lines != script.rows(templates, 3, 1)
    monkeypatch.setenv(MGSM_SYMBOLIC_PATH, str(rev2))
    (rev2 / "mgsm_sw.tsv").write_text("".join(lines), encoding="utf-8")
    docs = LoadedTasks.load(["mgsm_symbolic_direct_sw"]).tasks["mgsm_symbolic_direct_sw"].eval_docs
    assert all(doc["question"] == f"Anna ana {doc['answer']}." for doc in docs)
    assert set(script.CODES) == set(LANGUAGES)
    with pytest.raises(SystemExit, match="Template 300"):
        script.rows([Template(300, "nothing")], 1, 0)


@pytest.fixture
def multijail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Harmless requests of our own in MultiJail's columns."""
    folder = tmp_path / "MultiJail"
    folder.mkdir()
    languages = [name.removeprefix("multijail_") for name in multijail_task_names()]
    with (folder / "MultiJail.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "source", *languages])
        writer.writeheader()
        for number in range(3):
            texts = {code: f'{code}: "where, exactly,\nis item {number}?"' for code in languages}
            writer.writerow({"id": number, "source": "ours", **texts})
    monkeypatch.setenv(MULTIJAIL_PATH, str(folder))
    return folder


def test_multijail_has_responses_but_no_score(byte_model: Model, multijail: Path, tmp_path: Path) -> None:
    result = evaluate_model(*byte_model, ["multijail_sw", "multijail_en"], Settings(max_gen_toks=6))
    assert [task.scores for task in result.tasks.values()] == [(), ()]
    assert [task.num_docs for task in result.tasks.values()] == [3, 3]
    swahili = [sample for sample in result.samples if sample.task == "multijail_sw"]
    assert [sample.prompt for sample in swahili] == [f'sw: "where, exactly,\nis item {number}?"' for number in range(3)]
    assert all(isinstance(sample.output, str) for sample in swahili)

    folder, labels = tmp_path / "evaluated", tmp_path / "labels.jsonl"
    write_result(result, folder)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    given = ["safe", "unsafe", "safe", "invalid", "safe", "safe"]
    labelled = [row | {"label": label} for row, label in zip(rows, given, strict=True)]
    labels.write_text("".join(f"{json.dumps(row)}\n" for row in labelled[::-1]), encoding="utf-8")
    sw, en = score_labels(folder, labels)
    assert (sw.name, en.name, sw.num_docs) == ("multijail_sw", "multijail_en", 3)
    assert [score.metric for score in sw.scores] == [*LABELS]
    assert [score.value for score in sw.scores] == [2 / 3, 1 / 3, 0]
    assert [score.value for score in en.scores] == [2 / 3, 0, 1 / 3]
    # The sample standard deviation of 1, 0, 1 over √3.
    assert sw.score(metric="safe").stderr == pytest.approx(math.sqrt(1 / 3) / math.sqrt(3))
    assert [score.higher_is_better for score in sw.scores] == [True, False, False]

    for wrong, said in (
        (labelled[1:], "no label for 1 of 6"),
        ([*labelled, labelled[0]], "labelled twice"),
        ([labelled[0] | {"label": "harmful"}, *labelled[1:]], "'harmful'"),
        ([labelled[0] | {"output": "other"}, *labelled[1:]], "output differs"),
        ([labelled[0] | {"doc_id": 7}, *labelled[1:]], "document 7"),
        ([rows[0], *labelled[1:]], "has no label"),
    ):
        labels.write_text("".join(f"{json.dumps(row)}\n" for row in wrong), encoding="utf-8")
        with refused(DataError, match=said):
            score_labels(folder, labels)
    labels.write_text("[", encoding="utf-8")
    with refused(DataError, match="cannot be read"):
        score_labels(folder, labels)


def test_files_of_multijail_that_do_not_fit(multijail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = multijail / "MultiJail.csv"
    for text, said in (
        ("id,en,sw\n1,where?,\n", "row 1"),
        ("id,en\n1,where?\n", "column sw"),
        ("id,en,sw\n", "no rows"),
        ("id,en,sw\n1,where, there?,wapi\n", "4 fields"),
    ):
        path.write_text(text, encoding="utf-8")
        with refused(DataError, match=said):
            LoadedTasks.load(["multijail_sw"])
    with refused(ArgumentError, "tasks", match="2 shots"):
        LoadedTasks.load(["multijail_sw@2"])
    path.unlink()
    with refused(DataError, match=r"MultiJail\.csv"):
        LoadedTasks.load(["multijail_sw"])
    monkeypatch.setenv(MULTIJAIL_PATH, str(path))
    with refused(NotFoundError, match="not a folder"):
        LoadedTasks.load(["multijail_sw"])


def test_the_command_keeps_responses_for_a_judge(run: Run, byte_base: Path, multijail: Path, tmp_path: Path) -> None:
    arguments = (
        "evaluate",
        "--base-model",
        byte_base,
        "--tasks",
        "multijail_sw",
        "--max-gen-toks",
        4,
        "--device",
        "cpu",
    )
    refusal = run(*arguments)
    assert (refusal.exit_code, refusal.stdout) == (2, "")
    assert "--out-path" in refusal.stderr
    result = run(*arguments, "--out-path", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "multijail_sw has no score" in result.stderr
    assert len((tmp_path / "out" / "samples.jsonl").read_text("utf-8").splitlines()) == 3


def test_a_task_without_a_score_cannot_select(multijail: Path) -> None:
    task = LoadedTasks.load(["multijail_sw"]).tasks["multijail_sw"]
    with refused(FieldError, "tasks", match="no score"):
        _primary("multijail_sw", task, None)
