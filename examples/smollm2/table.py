"""The tables of docs/lab.md: the scores of every pair, and the layer swap minus each row with its intervals.

    python examples/smollm2/table.py                    # from results.json
    python examples/smollm2/table.py runs/3 runs/4      # adds sweeps of PLAN.md to results.json first

A run of `adapterswap lab --scene french` among the folders gives the scores of the demonstration. An expert is called
by its seed: math-0, french-0; french-0-moved has its layers 4 to 7 in 0 to 3, and 0 to 3 in 4 to 7. Sweeps whose folder
is called fourth-… give rows that are described beside the pairs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.experiments.intervals import DIFFERENCE, mean_interval
from adapterswap.experiments.lab.french import FRENCH_FORMAT
from adapterswap.experiments.sweeps import CellResult, Run

RESULTS = Path(__file__).with_name("results.json")
TEST = Path(__file__).parent / "data" / "further_fr.jsonl"
LANGUAGES = {"fr": "French", "es": "Spanish", "en": "English", "de": "German"}
SWAP, MOVED = "layer swap", "-moved"
ROWS = {
    "base": "base",
    "language expert": "French expert",
    "soup": "soup",
    "TIES": "TIES",
    "inverse swap": "inverse swap (French in layers 8 to 29 alone)",
    "task expert": "**math expert** (= reset)",
    "swap, layers moved": "swap, French layers in other places",
    "sum": "sum",
    "tuned sum": "tuned sum (math + 0.5 French)",
    SWAP: SWAP,
}
"""Rows in the order of the table, with their headings."""

Marks = dict[str, dict[str, str]]
"""Row → experts, joined by + → for each problem 1 if the likeliest choice was the right one, else 0."""


def marks_of(results: Iterable[CellResult]) -> Marks:
    """The marks of the cells of a sweep."""
    marks: Marks = {}
    for result in results:
        (value,) = result.results.values()
        experts = "+".join([*result.cell.task_expert, *result.cell.language_expert])
        row = result.cell.family
        if experts.endswith(MOVED):
            row = "swap, layers moved"
        marks.setdefault(row, {})[experts.removesuffix(MOVED)] = text_of(value.docs)
    return marks


def text_of(docs: Mapping[int, float]) -> str:
    """A mark for each problem, in the order of their numbers."""
    return "".join(str(int(docs[number])) for number in sorted(docs))


def described_of(results: Iterable[CellResult]) -> dict[str, dict[str, str]]:
    """Language of the test → composition → marks, of sweeps that the tables of pairs do not have."""
    described: dict[str, dict[str, str]] = {}
    for result in results:
        ((task, value),) = result.results.items()
        experts = " + ".join([*result.cell.task_expert, *result.cell.language_expert]).replace("-", " ")
        family = result.cell.family
        name = experts
        if family not in ("task expert", "language expert"):
            name = f"{experts}, {family}".lstrip(", ")  # the base has no experts
        described.setdefault(LANGUAGES[task[-2:]], {})[name] = text_of(value.docs)
    return described


def pairs_of(marks: Marks) -> list[str]:
    """The pairs of the plan: seed k of both experts."""
    return [pair for pair in marks[SWAP] if re.fullmatch(r"math-(\d+)\+french-\1", pair)]


@cache
def test_problems() -> list[dict[str, str]]:
    return [json.loads(line) for line in TEST.read_text(encoding="utf-8").splitlines()]


def of_pair(cells: Mapping[str, str], pair: str) -> NDArray[np.float64] | None:
    """A row's marks (problems,) for a pair: a single expert stands in each pair that contains it, the base in all."""
    for experts, text in cells.items():
        is_base = experts == ""
        if is_base or set(experts.split("+")) <= set(pair.split("+")):
            return array_of(text)
    return None  # not evaluated


def array_of(text: str) -> NDArray[np.float64]:
    """Marks (problems,) as numbers."""
    return np.array([float(mark) for mark in text])


def half(values: NDArray[np.float64]) -> str:
    """Half of the 95 % interval of a mean (Student's t), as text."""
    found = mean_interval(values).half
    if found is None:
        return "–"
    return f"± {short(found)}"


def over_both(apart: NDArray[np.float64], pairs: Iterable[str]) -> str:
    """The 95 % interval of differences (pairs, problems), with templates and pairs drawn at random."""
    experts = [pair.split("+") for pair in pairs]
    templates = [problem["template"] for problem in test_problems()]
    interval = mean_interval(apart, experts, templates, documents="templates", bounds=DIFFERENCE, equal_groups=True)
    if len(apart) == 1 or interval.ends is None:
        return "–"
    low, high = interval.ends
    return f"[{signed(low)}, {signed(high)}]"


def by_template(marks: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of every template (…, templates) of marks (…, problems): each template counts as much as another."""
    problems: dict[str, list[int]] = {}  # template → the places of its problems
    for place, problem in enumerate(test_problems()):
        problems.setdefault(problem["template"], []).append(place)
    return np.stack([marks[..., places].mean(-1) for places in problems.values()], axis=-1)


def of_pairs(marks: Marks, row: str) -> dict[str, NDArray[np.float64]]:
    """A row's marks (problems,) for each pair that has them."""
    found = {}
    for pair in pairs_of(marks):
        values = of_pair(marks[row], pair)
        if values is not None:
            found[pair] = values
    return found


def table(marks: Marks) -> list[str]:
    """Lines in Markdown. A row that only some pairs have is compared with the swap of these."""
    pairs = pairs_of(marks)
    names = [pair.replace("+", " + ").replace("-", " ") for pair in pairs]
    lines = [
        "| | " + " | ".join([*names, "mean", "swap − it", "95 %", "templates alone", "pairs alone", "problems"]) + " |",
        "|---|" + "---:|" * (len(names) + 6),
    ]
    swap = of_pairs(marks, SWAP)
    for row in ROWS:
        if row not in marks:
            continue

        # Its score in each pair, and the mean
        scores = of_pairs(marks, row)
        cells = []
        for pair in pairs:
            score = "–"
            if pair in scores:
                score = short(by_template(scores[pair]).mean())
            cells.append(score)
        cells.append(short(mean_of(scores)))

        # The swap minus it, with the intervals
        if row != SWAP:
            apart = np.array([swap[pair] - values for pair, values in scores.items()])  # (pairs, problems)
            means = by_template(apart)  # (pairs, templates)
            cells += [signed(means.mean()), over_both(apart, scores)]
            cells += [half(means.mean(0)), half(means.mean(1))]

            # The mean over problems is another one: templates have different numbers of them.
            cells.append(f"{signed(apart.mean())} {half(apart.mean(0))}")
        else:
            cells += [""] * 5
        lines.append(f"| {ROWS[row]} | " + " | ".join(cells) + " |")
    return lines


def mean_of(scores: Mapping[str, NDArray[np.float64]]) -> float:
    """The mean over pairs and templates of a row's marks."""
    return float(by_template(np.array(list(scores.values()))).mean())


def complete(marks: Marks) -> list[str]:
    """The rows that every pair has."""
    return [row for row in ROWS if row in marks and of_pairs(marks, row).keys() == set(pairs_of(marks))]


def in_short(marks: Marks) -> list[str]:
    """The mean scores in one line, for README."""
    rows = complete(marks)
    means = [short(mean_of(of_pairs(marks, row))) for row in rows]
    names = [ROWS[row].partition(" (")[0].replace("*", "") for row in rows]
    return [f"| {' | '.join(line)} |" for line in (names, ["---:"] * len(rows), means)]


def by_operation(marks: Marks) -> list[str]:
    """For each operation, the mean scores of the rows that every pair has."""
    operations = {problem["template"]: problem["operation"] for problem in test_problems()}
    of_template = np.array(list(operations.values()))  # (templates,)
    lines = ["| | + | − | × | ÷ |", "|---|---:|---:|---:|---:|"]
    for row in complete(marks):
        values = np.array(list(of_pairs(marks, row).values()))  # (pairs, problems)
        scores = by_template(values).mean(0)  # (templates,)
        cells = [short(scores[of_template == operation].mean()) for operation in "+-*/"]
        lines.append(f"| {ROWS[row]} | {' | '.join(cells)} |")
    return lines


def beside_pairs(content: Mapping[str, Any]) -> list[str]:
    """The rows that are described: tests in other languages, and experts that no pair has; each minus math 0."""
    lines = ["| test | composition | score | it − math 0 | over templates |", "|---|---|---:|---:|---:|"]
    french = {"math 0": content["marks"]["task expert"]["math-0"], **content["described"].get("French", {})}
    for language, rows in {**content["described"], "French": french}.items():
        scores = {name: by_template(array_of(text)) for name, text in rows.items()}
        for name, score in scores.items():
            cells = [language, in_words(name), short(score.mean()), "", ""]
            if name != "math 0":
                apart = score - scores["math 0"]
                cells[3:] = [signed(apart.mean()), half(apart)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def in_words(name: str) -> str:
    """How the table calls a composition of the fourth plan."""
    name = re.sub(r"few (math|swap) (\d+)", r"\1 0 trained further on \2 French problems", name)
    return name.replace("few base 100", "a new adapter trained on 100 French problems").replace("all", "of all layers")


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def short(value: float) -> str:
    return f"{value:.3f}"


def add(content: dict[str, Any], folder: Path) -> None:
    """Add the results of a folder to those of results.json."""
    record = folder / "results.json"
    if record.exists():
        demonstration = json.loads(record.read_text(encoding="utf-8"))
        assert demonstration["format"] == FRENCH_FORMAT
        content["scores"] = {row: round(score, 4) for row, score in demonstration["scores"].items()}
    elif folder.name.startswith("fourth-"):
        for language, rows in described_of(Run.read(folder).results).items():
            content.setdefault("described", {}).setdefault(language, {}).update(rows)
    else:
        for row, cells in marks_of(Run.read(folder).results).items():
            content["marks"].setdefault(row, {}).update(cells)


def main() -> None:
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    if sys.argv[1:]:
        for folder in map(Path, sys.argv[1:]):
            add(content, folder)
        content["marks"] = {row: content["marks"][row] for row in ROWS if row in content["marks"]}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    marks = content["marks"]
    tables = [table(marks), by_operation(marks), in_short(marks), beside_pairs(content)]
    print("\n\n".join("\n".join(lines) for lines in tables))


if __name__ == "__main__":
    main()
