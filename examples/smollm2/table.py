"""The table of docs/lab.md: the scores of every pair, and the layer swap minus each row with its intervals.

    python examples/smollm2/table.py                       # from results.json
    python examples/smollm2/table.py runs/0 runs/1 ...     # from the sweeps of PLAN.md, which results.json then has

An expert is called by its seed: math-0, french-0; french-0-moved has its layers 4 to 7 in 0 to 3, and 0 to 3 in 4 to 7.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from adapterswap.experiments.lab.french import over_templates
from adapterswap.experiments.lab.word_problems import draw_problems
from adapterswap.experiments.sweeps import CellResult, Run

RESULTS = Path(__file__).with_name("results.json")
SWAP, MOVED = "layer swap", "-moved"
PAIRS = ("math-0+french-0", "math-1+french-1", "math-2+french-2")
"""The pairs of the plan; the results also have math-1 and math-2 with french-0."""
ROWS = {
    "base": "base",
    "language expert": "French expert",
    "soup": "soup",
    "inverse swap": "inverse swap (French in layers 8 to 29 alone)",
    "task expert": "**math expert** (= reset)",
    "swap, layers moved": "swap, French layers in other places",
    "sum": "sum",
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
        moved = experts.endswith(MOVED)
        row = "swap, layers moved" if moved else result.cell.family
        text = "".join(str(int(value.docs[number])) for number in sorted(value.docs))
        marks.setdefault(row, {})[experts.removesuffix(MOVED)] = text
    return marks


def of_pair(cells: Mapping[str, str], pair: str) -> NDArray[np.float64]:
    """A row's marks (problems,) for a pair: a single expert stands in each pair that contains it, the base in all."""
    for experts, text in cells.items():
        if set(filter(None, experts.split("+"))) <= set(pair.split("+")):
            return np.array([float(mark) for mark in text])
    raise KeyError(pair)


def half(values: NDArray[np.float64]) -> float:
    """Half of the 95 % interval of a mean (Student's t)."""
    return float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)


def table(marks: Marks, pairs: Sequence[str] = PAIRS) -> list[str]:
    """Lines in Markdown."""
    templates = [problem.template for problem in draw_problems("test")]
    names = [pair.replace("+", " + ").replace("-", " ") for pair in pairs]
    lines = [
        "| | " + " | ".join([*names, "mean", "swap − it", "over templates", "over problems", "over pairs"]) + " |",
        "|---|" + "---:|" * (len(pairs) + 5),
    ]
    swap = np.array([of_pair(marks[SWAP], pair) for pair in pairs])
    for row in (row for row in ROWS if row in marks):
        scores = np.array([of_pair(marks[row], pair) for pair in pairs])
        cells = [short(mean) for mean in scores.mean(1)] + [short(scores.mean())]
        if row != SWAP:
            difference, spread = over_templates(swap.mean(0), scores.mean(0), templates)
            apart = swap - scores
            cells.append(f"{difference:+.3f}".replace("0.", ".").replace("-", "−"))
            cells += [f"± {short(one)}" for one in (spread, half(apart.mean(0)), half(apart.mean(1)))]
        lines.append(f"| {ROWS[row]} | " + " | ".join(cells) + " |")
    return lines


def in_short(marks: Marks) -> list[str]:
    """The mean scores in one line, for README."""
    rows = [row for row in ROWS if row in marks]
    means = [short(float(np.mean([of_pair(marks[row], pair) for pair in PAIRS]))) for row in rows]
    names = [ROWS[row].partition(" (")[0].replace("*", "") for row in rows]
    return [f"| {' | '.join(line)} |" for line in (names, ["---:"] * len(rows), means)]


def by_operation(marks: Marks) -> list[str]:
    """For each operation, the mean scores of all rows."""
    problems = draw_problems("test")
    lines = ["| | + | − | × | ÷ |", "|---|---:|---:|---:|---:|"]
    for row in (row for row in ROWS if row in marks):
        scores = np.mean([of_pair(marks[row], pair) for pair in PAIRS], axis=0)
        parts = (scores[[problem.operation == operation for problem in problems]].mean() for operation in "+-*/")
        lines.append(f"| {ROWS[row]} | " + " | ".join(short(part) for part in parts) + " |")
    return lines


def short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def main() -> None:
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    if folders := sys.argv[1:]:
        marks: Marks = {}
        for folder in folders:
            for row, cells in marks_of(Run.read(folder).results).items():
                marks.setdefault(row, {}).update(cells)
        content["marks"] = {row: marks[row] for row in ROWS if row in marks}
        shipped = {row: of_pair(marks[row], PAIRS[0]).mean() for row in content["scores"]}
        content["scores"] = {row: round(float(score), 4) for row, score in shipped.items()}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join("\n".join(make(content["marks"])) for make in (table, by_operation, in_short)))


if __name__ == "__main__":
    main()
