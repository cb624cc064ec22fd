"""Documents on which two methods disagree, with their outputs: in both directions, picked by a fixed rule.

Reads a sweep's prompts and samples. Their text comes from models and data sets, so callers must escape it before they
show it. Knows nothing of statistics and pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapterswap.errors import DataError
from adapterswap.files.smallfiles import exists
from adapterswap.reporting.choosing import Choice, Unit, matching, reported
from adapterswap.sweeps import CellResult, Run, TaskInfo, read_samples
from adapterswap.sweeps.results import prompts_file, read_prompts, samples_file

__all__ = ["AnswerExample", "Disagreements", "Output", "disagreements"]

_EACH_WAY = 3
_LONGEST = 1500  # characters shown of a text


@dataclass(frozen=True)
class Output:
    """A method's output for a document: its text, the answers that filters extracted from it, and its primary score.

    If the task asks for likelihoods, they are the text and there are no answers.
    """

    method: str
    text: str
    answers: Mapping[str, str]
    score: float | None


@dataclass(frozen=True)
class AnswerExample:
    """A document: the end of its prompt, the right answer, and the outputs."""

    doc_id: int
    question: str
    target: str
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Disagreements:
    """Where one method does better or worse than another in one unit.

    Attributes:
        task: the target task.
        language: the code of its language.
        unit: the experts.
        one, other: the labels of the two methods' rows.
        better, worse: the number of reported documents on which `one` does better, and worse.
        examples: some of each, evenly spaced.
    """

    task: str
    language: str | None
    unit: Unit
    one: str
    other: str
    better: int
    worse: int
    examples: tuple[AnswerExample, ...]


def disagreements(run: Run, task: TaskInfo, shown: Sequence[Choice]) -> Disagreements | None:
    """Where the first two of `shown` disagree, and the outputs of all; None if they cannot be compared.

    Args:
        shown: the two methods to compare, and others whose outputs are shown too.

    Raises:
        DataError: a file of samples or prompts is damaged.
    """
    common = _cells(shown, task)
    if common is None:
        return None
    unit, cells = common
    first, second = (cell.results[task.name].docs for cell in cells[:2])
    sign = 1 if task.higher_is_better else -1
    differences = {doc: sign * (first[doc] - second[doc]) for doc in reported(task) if doc in first and doc in second}
    better = [doc for doc, difference in differences.items() if difference > 0]
    worse = [doc for doc, difference in differences.items() if difference < 0]
    chosen = [*_spaced(better), *_spaced(worse)]
    folders = [run.folder_of(cell.cell.cell) for cell in cells]
    files = [samples_file(folder, cell.cell) for folder, cell in zip(folders, cells, strict=True)]
    examples: list[AnswerExample] = []
    if chosen and all(map(exists, [*files, prompts_file(folders[0], task.name)])):
        try:
            prompts = read_prompts(folders[0], task.name)
            samples = [
                {row["doc_id"]: row for row in read_samples(folder, cell.cell.cell) if row["task"] == task.name}
                for folder, cell in zip(folders, cells, strict=True)
            ]
            labels = [choice.label for choice in shown]
            examples = [
                _example(doc, prompts.get(doc, ""), labels, [rows[doc] for rows in samples], cells, task)
                for doc in chosen
                if all(doc in rows for rows in samples)
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"samples or prompts of {task.name} in {folders[0]} are damaged: {error!r}",
                "Run the sweep again with `overwrite=True`",
                parameter="run",
            ) from None
    return Disagreements(
        task.name, task.language, unit, shown[0].label, shown[1].label, len(better), len(worse), tuple(examples)
    )


def _cells(shown: Sequence[Choice], task: TaskInfo) -> tuple[Unit, list[CellResult]] | None:
    """The first unit that all of `shown` have, and their cells in it."""
    if len(shown) < 2:
        return None
    for unit in shown[0].cells:
        cells = []
        for choice in shown:
            matched = next((other for _, _, other in matching([unit], choice.cells)), None)
            if matched is not None and choice.cells[matched].results[task.name].docs:
                cells.append(choice.cells[matched])
        if len(cells) == len(shown):
            return unit, cells
    return None


def _spaced(documents: list[int]) -> list[int]:
    """At most `_EACH_WAY` of the documents, evenly spaced."""
    if len(documents) <= _EACH_WAY:
        return documents
    return [documents[place * len(documents) // _EACH_WAY] for place in range(_EACH_WAY)]


def _example(
    doc: int, prompt: str, labels: Sequence[str], rows: Sequence[Mapping[str, Any]], cells: Sequence[CellResult],
    task: TaskInfo,
) -> AnswerExample:  # fmt: skip
    outputs = tuple(
        Output(
            label,
            _text(row["output"]),
            {}
            if _likelihoods(row["output"])
            else {str(name): _text(answer) for name, answer in row["answers"].items()},
            cell.results[task.name].docs.get(doc),
        )
        for label, row, cell in zip(labels, rows, cells, strict=True)
    )
    return AnswerExample(doc, _question(prompt), _text(rows[0]["target"]), outputs)


def _question(prompt: str) -> str:
    """The last paragraph of a prompt, which is the question after the shots."""
    last = prompt.rstrip().rpartition("\n\n")[2]
    return last if len(last) <= _LONGEST else f"…{last[-_LONGEST:]}"


def _likelihoods(output: Any) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy decoding produces it) of each continuation, as lm-eval records likelihoods."""
    pairs = output if isinstance(output, list) and output and isinstance(output[0], list) else [output]
    are_pairs = [isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], bool) for pair in pairs]
    return [(float(likelihood), greedy) for likelihood, greedy in pairs] if all(are_pairs) else []


def _text(value: Any) -> str:
    if likelihoods := _likelihoods(value):
        lines = [f"log-likelihood {likelihood:.2f}" + ", greedy" * greedy for likelihood, greedy in likelihoods]
        return lines[0] if len(lines) == 1 else "\n".join(f"choice {place}: {line}" for place, line in enumerate(lines))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
