"""The study in French and Spanish: its rows and test are the registered ones, and its design has the power it says."""

from __future__ import annotations

import json
import re
import runpy
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from scipy import stats

from adapterswap.experiments.intervals import mean_interval
from adapterswap.kit.files.hashes import sha256_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"
ALL_DRAWS, DRAWS = 1000, 200


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / f"{name}.py"))


def registered(name: str) -> Any:
    return json.loads((EXAMPLE / "registered" / f"{name}.json").read_text(encoding="utf-8"))


def test_the_registered_test_is_what_the_generator_writes() -> None:
    made = script("new_test")
    for name, digest in registered("fifth-test").items():
        assert sha256_of(EXAMPLE / name) == digest, name
    for language, rows in made["problems"]().items():
        lines = (EXAMPLE / "data" / f"new_{language}.jsonl").read_text(encoding="utf-8").splitlines()
        assert rows == [json.loads(line) for line in lines]


def test_answers_and_choices() -> None:
    """Answers by Python's own arithmetic on the form's text; choices of equal length have as many digits."""
    made = script("new_test")
    for form in made["FORMS"]:
        rng = Random(form)
        for _ in range(20):
            numbers, answer = made["draw_numbers"](form, rng)
            values = dict(zip("abc", map(Fraction, numbers), strict=False))
            assert eval(form, {}, values) == answer
            for equal in (False, True):
                choices = made["draw_choices"](numbers, answer, rng, equal=equal)
                assert len(set(choices)) == 4
                assert answer in choices
                assert min(choices) > 0
                assert not equal or {len(str(choice)) for choice in choices} == {len(str(answer))}


def test_no_question_is_one_of_the_training_rows() -> None:
    """Without names and numbers, no English problem of the test is one that a math expert has read."""

    def bare(question: str) -> str:
        return re.sub(r"\d+|\b[A-Z][a-z]+\b", "#", question)

    rows = [json.loads(line) for line in (EXAMPLE / "data" / "math-0.jsonl").read_text("utf-8").splitlines()]
    read = {bare(row["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:")) for row in rows}
    asked = [json.loads(line) for line in (EXAMPLE / "data" / "new_en.jsonl").read_text("utf-8").splitlines()]
    assert len(read) > 100
    assert not [row["question"] for row in asked if bare(row["question"]) in read]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sampled(7))
        for name in registered("fifth-experts")["rows"]
        if not name.startswith("math")
    ],
)
def test_rows_are_those_that_were_frozen(name: str, tmp_path: Path) -> None:
    file = script("study")["write_rows"](name, tmp_path)
    assert sha256_of(file) == registered("fifth-experts")["rows"][name]
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert not any(re.search(r"\d", text) for text in texts)
    assert len({text.partition("\nEnglish: ")[2] for text in texts}) == len(texts)  # each English sentence once
    sentences = [text.partition("\n")[0].partition(": ")[2] for text in texts]
    assert {4, 10} <= {len(sentence.split()) for sentence in sentences} <= set(range(4, 11))


def test_sentences_to_translate_are_in_no_rows(tmp_path: Path) -> None:
    study = script("study")
    for language, heading in (("fr", "French"), ("es", "Spanish")):
        rows = [study["write_rows"](f"{heading.lower()}-{seed}", tmp_path).read_text("utf-8") for seed in range(5)]
        read = {json.loads(line)["text"] for text in rows for line in text.splitlines()}
        file = EXAMPLE / "data" / f"translations_{language}.jsonl"
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            assert f"{heading}: {row['sentence']}\nEnglish: {row['choices'][row['label']]}" not in read
            assert len({len(choice.split()) for choice in row["choices"]}) == 1


def drawn(spread: Any, shape: tuple[int, int, int], gain: float, rng: np.random.Generator) -> Any:
    """Differences (pairs, templates, problems) with the parts of a spread."""
    pairs, templates, problems = shape
    parts = [
        (spread.template, (1, templates, 1)), (spread.pair, (pairs, 1, 1)), (spread.problem, (1, templates, problems)),
        (spread.template_in_pair, (pairs, templates, 1)), (spread.problem_in_pair, shape),
    ]  # fmt: skip
    return gain + sum(rng.normal(0, variance**0.5, size) for variance, size in parts)


def test_the_spread_is_found_again() -> None:
    design = script("power")
    spread = design["Spread"](0.02, 0.01, 0.015, 0.03, 0.05)
    values = drawn(spread, (60, 60, 12), 0.0, np.random.default_rng(1))
    found = design["split"]([values[:, template] for template in range(60)])
    for name, variance in vars(spread).items():
        assert getattr(found, name) == pytest.approx(variance, rel=0.5), name


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(ALL_DRAWS, marks=pytest.mark.full)])
def test_the_power_is_what_simulations_find(draws: int) -> None:
    """The share of simulated studies whose interval, as the study computes it, is above zero."""
    design = script("power")
    spread = design["measured_spread"]()
    shape, gain = (5, 100, 4), 0.055
    expected = design["power"](gain, *design["interval_of"](spread, *shape[1:], shape[0]))
    rng, found = np.random.default_rng(2), 0
    templates = np.repeat(np.arange(shape[1]), shape[2]).tolist()
    units = [(f"math-{pair}", f"french-{pair}") for pair in range(shape[0])]
    for _ in range(draws):
        values = drawn(spread, shape, gain, rng).reshape(shape[0], -1)
        low = mean_interval(values, units, templates, equal_groups=True).low
        found += low is not None and low > 0
    assert expected == pytest.approx(0.8, abs=0.02)
    # Three standard errors of the share, and what Satterthwaite's approximation costs.
    assert found / draws == pytest.approx(expected, abs=3 * (expected * (1 - expected) / draws) ** 0.5 + 0.05)


@pytest.fixture
def content() -> dict[str, Any]:
    """Marks of all cells of five pairs, at random: swaps with a language's own layers are right more often."""
    study, rng = script("study"), np.random.default_rng(4)
    chosen = {"weight": 0.7, "bottom": 10}
    cells = [cell for pair in range(5) for cell in study["test_cells"](pair, chosen)]
    marks: dict[str, dict[str, dict[str, str]]] = {}
    for cell in dict.fromkeys(cells):
        number = len(study["documents_of"](cell.test))
        probability = 0.6 if "@bottom=8" in cell.composition else 0.4
        texts = {metric: "".join(map(str, (rng.random(number) < probability) * 1)) for metric in study["METRICS"]}
        marks.setdefault(cell.composition, {})[cell.test] = texts
    return {"chosen": chosen, "marks": marks}


def test_the_two_questions(content: dict[str, Any]) -> None:
    """Both by sums over marks, and their intervals by the analysis of variance of two crossed factors."""
    made = script("study")["Tables"](content)

    def right(composition: str, test: str) -> Any:
        marks = np.array([int(mark) for mark in content["marks"][composition][test]["equal"]])
        return marks.reshape(100, 4).mean(1)  # templates

    def swap(layers: str, questions: str, pair: int) -> Any:
        return right(f"math-{pair}+{layers}-{pair}@bottom=8,top=0", f"new_{questions}")

    gain, contrast = np.zeros((5, 100)), np.zeros((5, 100))
    for pair in range(5):
        own = swap("french", "fr", pair) + swap("spanish", "es", pair)
        gain[pair] = (own - right(f"math-{pair}", "new_fr") - right(f"math-{pair}", "new_es")) / 2
        contrast[pair] = (own - swap("spanish", "fr", pair) - swap("french", "es", pair)) / 2

    for row, means in (("math expert (= reset)", gain), ("swap with the other language's layers", contrast)):
        interval = made.interval(made.question(row))
        assert interval.mean == pytest.approx(means.mean())
        of_pairs, of_templates = 100 * means.mean(1).var(ddof=1), 5 * means.mean(0).var(ddof=1)
        left = means - means.mean(1, keepdims=True) - means.mean(0) + means.mean()
        of_left = (left**2).sum() / (4 * 99)
        total = of_pairs + of_templates - of_left
        if total < max(of_pairs, of_templates):  # never below that of one kind of draws
            total = max(of_pairs, of_templates)
            freedom = 4 if of_pairs > of_templates else 99
        else:
            freedom = total**2 / (of_pairs**2 / 4 + of_templates**2 / 99 + of_left**2 / (4 * 99))
        assert interval.half == pytest.approx(stats.t.ppf(0.975, freedom) * (total / 500) ** 0.5)


def test_settings_are_those_with_the_best_development_mean() -> None:
    study = script("study")
    results: dict[str, Any] = {}
    for cell in study["development_cells"]():
        best = "weight=0.7" in cell.composition or ("bottom=6" in cell.composition) or ("bottom=8" in cell.composition)
        results.setdefault(cell.composition, {})[cell.test] = {"usual": "11" if best else "10"}
    assert study["chosen_settings"](results) == {"weight": 0.7, "bottom": 6}  # of equals the first


def test_both_skills_are_of_the_same_pairs(content: dict[str, Any]) -> None:
    """A pair whose translations are not scored is not in the row's math scores either."""
    study = script("study")
    whole = "math-3+french-3@bottom=8,top=0"
    for pair in range(5):
        composition = f"math-{pair}+french-{pair}@bottom=8,top=0"
        if composition != whole:
            del content["marks"][composition]["translations_fr"]

    (line,) = (line for line in study["Tables"](content).both_skills() if line.startswith("| layer swap"))
    asked = (("translations_fr", "usual"), ("new_en", "equal"), ("new_fr", "equal"))
    shares = [study["share"](content["marks"][whole][test][metric]) for test, metric in asked]
    assert line.split(" | ")[2:5] == [f"{share:.3f}" for share in shares]


def test_tables_have_what_is_scored(content: dict[str, Any]) -> None:
    study = script("study")
    rows, questions, both = study["tables"](content)
    assert len(rows) == 2 + len(study["ROWS"])
    assert len(questions) == 2 + len(study["METRICS"])
    assert len(both) == 2 + len(study["BOTH_SKILLS"])

    # Without a pair of the plan there is the shipped one, if it is scored: French only, here.
    alone = {name: {"new_fr": content["marks"]["math-0"]["new_fr"]} for name in ("math-0", study["SHIPPED"])}
    (shipped,) = study["tables"]({"chosen": {}, "marks": alone})
    assert len(shipped) == 2 + len(study["METRICS"])
    assert all(" | +0.000 " in line and line.endswith("| – | – | – |") for line in shipped[2:])
    del alone[study["SHIPPED"]]
    assert study["tables"]({"chosen": {}, "marks": alone}) == []


def test_the_page_has_the_tables() -> None:
    content = json.loads((EXAMPLE / "results.json").read_text(encoding="utf-8"))["fifth"]
    lab = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8").splitlines()
    for table in script("study")["tables"](content):
        for line in table:
            assert line in lab
