"""Evaluations in the background: their tasks, their progress, and the table of results.

Uses the workspace's model and the functions of `evaluation`. Scores are shares of correct answers.
"""

from __future__ import annotations

import csv
import io
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from adapterswap.core import Composition
from adapterswap.experiments import intervals
from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.answers import is_right
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.experiments.evaluation.mgsm import mgsm_task_names
from adapterswap.experiments.studio.choice import check_values
from adapterswap.experiments.studio.html import text
from adapterswap.experiments.studio.workspace import Workspace
from adapterswap.kit.errors import AdapterswapError, ArgumentError, DataError, RunError, reason_of
from adapterswap.kit.files.readers import field as reading
from adapterswap.kit.files.readers import read_fields
from adapterswap.kit.files.text import csv_text, json_lines

OWN_FILE = "your own file"
_LAB = "lab problems in "
_TOKENS = 256
_MOST_ROWS = 500
LARGEST_FILE = 1_000_000
"""The most bytes of a visitor's file."""


@dataclass(frozen=True)
class Progress:
    """How many documents of an evaluation are done."""

    done: int
    of: int


def _query(address: str) -> str:
    if not address.startswith("?"):
        raise ValueError("it is not the query of an address")
    return address


@dataclass(frozen=True)
class Evaluated:
    """One row of the table.

    Attributes:
        composition: a short label of the composition.
        address: the query of the page that shows it.
        task: the name of the task.
        right, of: the number of documents answered correctly, and of all.
        low, high: the 95 % interval of the share.
    """

    composition: str
    address: Annotated[str, reading(after=_query)]
    task: str
    right: Annotated[int | float, reading(ge=0, le=1_000_000)]
    of: Annotated[int, reading(ge=1, le=1_000_000)]
    low: float
    high: float

    def __post_init__(self) -> None:
        read_fields(self)

    @property
    def share(self) -> float:
        return self.right / self.of


def read_rows(content: str) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of a visitor's file: JSON Lines with `prompt` and `answer`.

    Args:
        content: the file's text; U+FFFD where it is not UTF-8.
    """
    remedy = 'Write lines such as {"prompt": "2 + 2 =", "answer": "4"}'
    if len(content.encode(errors="replace")) > LARGEST_FILE:
        raise DataError("The file is too large", f"Choose one of at most {LARGEST_FILE} bytes", parameter="file")
    if "\ufffd" in content:
        raise DataError("The file is not UTF-8", "Save it as UTF-8", parameter="file")
    try:
        rows = [*json_lines(content.split("\n"), _pair)]
    except (AdapterswapError, ValueError) as error:
        raise DataError(reason_of(error), remedy, parameter="file") from None
    if not 1 <= len(rows) <= _MOST_ROWS:
        raise DataError(f"The file has {len(rows)} rows", f"Upload 1 to {_MOST_ROWS} rows", parameter="file")
    return rows


def _pair(row: Mapping[str, Any]) -> tuple[str, str]:
    """The prompt and the answer of a row; an answer may be a number."""
    check_values(row)
    prompt, answer = row["prompt"], row["answer"]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not all(isinstance(value, str) and value.strip() for value in (prompt, answer)):
        raise ValueError("the prompt or answer is empty or not text")
    return prompt, answer.strip()


def tasks(workspace: Workspace) -> list[str]:
    """The tasks: the lab's problems if the models are the lab's, MGSM, and the visitor's own file."""
    own: list[str] = []
    if workspace.lab:
        own = [_LAB + language for language in workspace.lab.languages]
    return [*own, *mgsm_task_names(), OWN_FILE]


def evaluate_live(
    workspace: Workspace,
    composition: Composition | None,
    task: str,
    limit: int,
    *,
    label: str,
    address: str,
    stopped: threading.Event,
    rows: Sequence[tuple[str, str]] = (),
) -> Iterator[Progress | Evaluated]:
    """Evaluate a composition on a task, in its own thread; others may use the model between batches.

    Args:
        label, address: the row's `composition` and `address`.
        stopped: set it to stop after the current batch.
        rows: the rows of the visitor's file, for the task `OWN_FILE`.

    Yields:
        Progress, and the row at the end unless it was stopped.
    """
    if task not in tasks(workspace):
        raise ArgumentError(f"There is no task {task}", "Choose one of the list", parameter="task")
    news: queue.Queue[Progress | Evaluated | BaseException | None] = queue.Queue()

    def step(step_aside: Callable[[], None], done: int, of: int) -> None:
        news.put(Progress(done, of))
        if stopped.is_set():
            raise _Stopped
        step_aside()

    def work() -> None:
        try:
            if task == OWN_FILE:
                right, of = _score_rows(workspace, composition, rows[:limit], news.put, stopped)
            else:
                score = _score_lab if task.startswith(_LAB) else _score_task
                with workspace.holding(composition) as step_aside:
                    right, of = score(workspace, task, limit, partial(step, step_aside))
            news.put(Evaluated(label, address, task, right, of, *intervals.wilson(right, of)))
        except _Stopped:
            pass
        except BaseException as error:  # the reader raises it
            news.put(error)
        finally:
            news.put(None)

    threading.Thread(target=work, daemon=True, name="adapterswap-evaluate").start()
    try:
        while (item := news.get()) is not None:
            if isinstance(item, BaseException):
                raise _explained(item)
            yield item
    finally:
        stopped.set()


class _Stopped(BaseException):
    """The visitor left or pressed Stop. A BaseException, so that no library handles it as an error."""


def _score_lab(workspace: Workspace, task: str, limit: int, step: Any) -> tuple[float, int]:
    """(right answers, problems) on the lab's problems in one language."""
    assert workspace.lab is not None
    lab = workspace.lab
    language = task.removeprefix(_LAB)
    problems = lab.draw_problems(limit)
    right = 0
    step(0, len(problems))
    for start in range(0, len(problems), lab.batch_size):
        batch = problems[start : start + lab.batch_size]
        right += int(lab.make_questions(batch, language).exact_match(workspace.live.model).sum())
        step(start + len(batch), len(problems))
    return right, len(problems)


def _score_rows(
    workspace: Workspace,
    composition: Composition | None,
    rows: Sequence[tuple[str, str]],
    tell: Callable[[Progress], None],
    stopped: threading.Event,
) -> tuple[float, int]:
    """Score greedy answers, each in its own turn."""
    right = 0
    for number, (prompt, answer) in enumerate(rows):
        tell(Progress(number, len(rows)))
        if stopped.is_set():
            raise _Stopped
        *_, last = workspace.answers(prompt, [composition], max_new_tokens=_TOKENS, chat=False)
        right += is_right(last.texts[0], answer)
    return right, len(rows)


def _score_task(workspace: Workspace, task: str, limit: int, step: Any) -> tuple[float, int]:
    """(right answers, documents) on a task of lm-evaluation-harness; for other scores, the mean times the documents."""
    exam = Exam.load([task], Settings(limit=limit), workspace.base)
    result = exam.evaluate(workspace.live.model, on_progress=step).tasks[task]
    names = [score.filter for score in result.scores]
    if not names:
        raise ArgumentError(f"{task} has no automatic score", "Choose another task", parameter="task")
    name = "normalized" if "normalized" in names else names[0]
    best = result.score(name)
    return round(best.value * result.num_docs, 6), result.num_docs


def _explained(error: BaseException) -> BaseException:
    """The error to show: our own as it is, and what to do if memory ran out."""
    if isinstance(error, AdapterswapError):
        return error
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return RunError("Out of memory while evaluating", "Evaluate fewer documents at once, or use a smaller model")
    return error


def table_html(rows: Sequence[Evaluated]) -> str:
    """The results as a table, latest first."""
    if not rows:
        return '<p class="timing">Nothing has been evaluated yet.</p>'
    head = body = ""
    for name in ("composition", "task", "correct", "accuracy", "95 % interval"):
        head += f'<th scope="col">{name}</th>'
    for row in reversed(rows):
        body += (
            f'<tr><td><a href="{text(row.address)}">{text(row.composition)}</a></td><td>{text(row.task)}</td>'
            f'<td class="number">{row.right:g} / {row.of}</td><td class="number"><b>{row.share:.1%}</b></td>'
            f'<td class="number">{row.low:.1%} – {row.high:.1%}</td></tr>'
        )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="evaluated scroll" tabindex="0">{table}</div>'


def as_csv(rows: Sequence[Evaluated]) -> str:
    """The results as CSV, oldest first."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["composition", "task", "right", "of", "share", "low", "high", "address"])
    for row in rows:
        numbers = [row.right, row.of, row.share, row.low, row.high]
        writer.writerow([csv_text(row.composition), csv_text(row.task), *numbers, csv_text(row.address)])
    return stream.getvalue()


def as_rows(kept: object) -> list[Evaluated]:
    """The rows that a browser stored; anything else is left out."""
    rows: list[Evaluated] = []
    if not isinstance(kept, list):
        return rows
    for content in kept:
        with suppress(TypeError, ValueError):
            rows.append(Evaluated(**content))
    return rows
