"""Outputs in every language with the number that a careful reader takes from them, and the numbers that scorers read.

`answer_labels.json` says how the rows were made. Run this file to print the tables of docs/evaluate.md.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from adapterswap.experiments.evaluation.answers import extract_answer
from adapterswap.experiments.evaluation.harness import build_mgsm_task
from adapterswap.experiments.evaluation.mgsm import LANGUAGES

Reader = Callable[[str, str], Fraction | Decimal | None]


@dataclass(frozen=True)
class Labelled:
    """One output, and the number that a careful reader takes from it; None if it gives no single number."""

    language: str
    form: str
    output: str
    answer: Fraction | None


def read_labels(name: str = "answer_labels.json") -> list[Labelled]:
    """The rows of that file, in order."""
    rows = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))["rows"]
    return [
        Labelled(language, form, output, None if answer is None else Fraction(answer))
        for language, form, output, answer in rows
    ]


def outcome(answer: Fraction | None, found: Fraction | Decimal | None) -> str:
    """`right`, `wrong` (a number that the output does not give) or `unread` (none, where the output gives one)."""
    if found is None:
        return "right" if answer is None else "unread"
    return "right" if answer == Fraction(found) else "wrong"


def count(reader: Reader, rows: list[Labelled]) -> dict[str, Counter[str]]:
    """How `reader` does on the rows: language → the number of right, wrong and unread rows."""
    counts: dict[str, Counter[str]] = {language: Counter() for language in LANGUAGES}
    for row in rows:
        counts[row.language][outcome(row.answer, reader(row.output, row.language))] += 1
    return counts


def stock_reader(name: str) -> Reader:
    """The whole number that a filter of the real MGSM task reads from an output; None if it reads none."""
    tasks: dict[str, Any] = {code: build_mgsm_task(f"mgsm_native_cot_{code}") for code in LANGUAGES}

    def read(output: str, language: str) -> Fraction | None:
        task = tasks[language]
        instance = Instance("generate_until", {"question": "", "answer": "0"}, ("", {}), 0, ("", 0, 1))
        instance.resps = [output]
        task._instances = [instance]
        task.apply_filters()
        taken = str(instance.filtered_resps[name])
        gold = "".join(char for char in taken if char not in string.punctuation)  # as the metric compares
        if not (gold.isascii() and gold.isdigit()):
            return None
        assert name == "normalized" or task.process_results({"answer": gold}, [taken])["exact_match"]
        return Fraction(gold)

    return read


READERS: dict[str, Callable[[], Reader]] = {
    "strict-match": lambda: stock_reader("strict-match"),
    "flexible-extract": lambda: stock_reader("flexible-extract"),
    "normalized": lambda: extract_answer,
}

if __name__ == "__main__":
    rows = read_labels()
    sizes = Counter(row.language for row in rows)
    print("| | " + " | ".join(LANGUAGES) + " | all |")
    print("|" + "---|" * (len(LANGUAGES) + 2))
    print("| outputs | " + " | ".join(str(sizes[code]) for code in LANGUAGES) + f" | {len(rows)} |")
    for name, build in READERS.items():
        counts = count(build(), rows)
        for kind in ("wrong", "unread"):
            figures = [counts[code][kind] for code in LANGUAGES]
            print(f"| `{name}`, {kind} | " + " | ".join(map(str, figures)) + f" | {sum(figures)} |")
