r"""The results of an evaluation: scores, samples, and the folder that holds them.

Equal evaluations give equal values and folders with the same bytes: there are no times and no local paths. JSON can
hold `"\ud800"`, which Python reads as a character, but tokenizers and UTF-8 files cannot.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.kit.errors import DataError, Problems, visible
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.text import write_json

_AROUND = 30  # characters shown on either side


def broken_texts(content: Any) -> Iterator[str]:
    """The text around the first half of a surrogate pair in each text of plain data, keys of mappings included."""
    if isinstance(content, str):
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            yield content[max(0, error.start - _AROUND) : error.start + _AROUND]
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from broken_texts(key)
            yield from broken_texts(value)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from broken_texts(item)


def check_texts(tasks: Mapping[str, Any]) -> None:
    """Refuse tasks with a text that cannot be tokenized or written."""
    problems = Problems(DataError)
    for name, task in tasks.items():
        seen = set()
        for request in task.instances or ():
            parts = {"prompt": request.args}
            if request.doc_id not in seen:
                parts |= {"row": request.doc, "target": task.doc_to_target(request.doc)}
            seen.add(request.doc_id)
            for part, content in parts.items():
                if (text := next(broken_texts(content), None)) is not None:
                    problems.add(
                        f"{name}: the {part} of document {request.doc_id} contains an unpaired surrogate, which is "
                        f"not a character: {text!r}",
                        "Correct it in the task's file or data, in the shots, or in the chat template",
                        parameter="tasks",
                    )
    problems.raise_if_any()


EVALUATION = OutputKind("results.json", lambda record: record.keys() >= {"adapterswap", "tasks"})
"""What `evaluate` writes."""


@dataclass(frozen=True)
class Score:
    """One number of a task.

    Attributes:
        metric: its name in lm-evaluation-harness: exact_match, acc, acc_norm.
        filter: how the answer was read from the output: strict-match, flexible-extract, normalized, none.
        value: the mean over the documents, unless the metric defines something else.
        stderr: its standard error (of a mean: sample standard deviation / √n); None if unknown.
        higher_is_better: whether more is better.
    """

    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool


@dataclass(frozen=True)
class TaskResult:
    """The scores of one task.

    Attributes:
        name: the task.
        num_docs: n, how many documents were evaluated.
        num_fewshot: shots before each document; None for a group whose tasks have different numbers.
        version: the task's own version.
        scores: one per metric and filter; none for tasks whose responses need a judge.
        cut: documents with an output that ended at the limit of tokens; None for tasks that compare likelihoods.
        truncated: prompts that lost their beginning because they did not fit.
        max_gen_toks: the limit of tokens, the task's own if it has one; None for tasks that generate nothing.
    """

    name: str
    num_docs: int
    num_fewshot: int | None
    version: str
    scores: tuple[Score, ...]
    cut: int | None = None
    truncated: int = 0
    max_gen_toks: int | None = None

    def score(self, filter: str | None = None, metric: str | None = None) -> Score:
        """The only score with that filter and metric.

        Raises:
            KeyError: there are none or several.
        """
        scores = [s for s in self.scores if filter in (None, s.filter) and metric in (None, s.metric)]
        if len(scores) != 1:
            raise KeyError(f"{self.name} has {len(scores)} scores for metric={metric}, filter={filter}")
        return scores[0]


@dataclass(frozen=True)
class Sample:
    """One document of one task, with the model's output.

    Attributes:
        task: the task's name.
        doc_id: the document's index in its data set, from 0, by which two evaluations are paired.
        doc: the document itself.
        prompt: the model's input.
        target: the right answer.
        output: the model's text; if likelihoods are compared, each choice's log-likelihood and whether it is greedy.
        answers: filter → the answer that it read from the output.
        scores: filter → its metrics.
        cut: the output, or one of several to the document, ended at the limit of tokens.
        choices: the texts whose likelihoods are compared; empty for other tasks.
    """

    task: str
    doc_id: int
    doc: Mapping[str, Any]
    prompt: str
    target: str
    output: Any
    answers: Mapping[str, str]
    scores: Mapping[str, Mapping[str, float]]
    cut: bool = False
    choices: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The sample as plain data, with the SHA-256 of the prompt, since every prompt repeats the shots."""
        content = asdict(self)
        if not self.choices:
            del content["choices"]
        digest = hashlib.sha256(content.pop("prompt").encode("utf-8")).hexdigest()
        return dict(_finite({**content, "prompt_sha256": digest}))


@dataclass(frozen=True)
class EvaluationResult:
    """The results of one call of `evaluate`.

    Attributes:
        tasks: by name, in the requested order.
        groups: by name, lm-evaluation-harness's means over groups of tasks.
        samples: every document of every task.
        settings: shots, limit, tokens, seed and so on, and everything else that outputs depend on: dtype, kind of
            device, the model's own generation settings, versions of libraries, and `one_by_one`: the kinds of requests
            that were not batched, because padding would have changed the model's answers.
    """

    tasks: Mapping[str, TaskResult]
    samples: tuple[Sample, ...]
    settings: Mapping[str, Any]
    groups: Mapping[str, TaskResult] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line per task, with its scores."""
        lines = []
        for task in (*self.tasks.values(), *self.groups.values()):
            scores = (f"{score.metric},{score.filter} {score.value:.3f}" for score in task.scores)
            lines.append(f"\n{task.name} (n = {task.num_docs}): {'; '.join(scores)}")
        return f"<EvaluationResult{''.join(lines)}>"

    def by_scores(self) -> list[list[TaskResult]]:
        """The tasks and groups, those with the same metrics and filters together."""
        alike: dict[tuple[tuple[str, str], ...], list[TaskResult]] = {}
        for task in (*self.tasks.values(), *self.groups.values()):
            alike.setdefault(tuple((score.metric, score.filter) for score in task.scores), []).append(task)
        return list(alike.values())

    def as_json(self) -> dict[str, Any]:
        """Scores and settings as plain data, without the samples."""
        content = {
            "adapterswap": __version__,
            "settings": dict(self.settings),
            "tasks": [asdict(task) for task in self.tasks.values()],
            "groups": [asdict(group) for group in self.groups.values()],
        }
        return dict(_finite(content))


def write_result(
    result: EvaluationResult,
    out_path: str | Path,
    *,
    subject: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Write the folder `out_path` with results.json and samples.jsonl (one line per document).

    Args:
        result: what `evaluate` returned.
        subject: what was evaluated, as plain data for results.json.
        overwrite: replace the folder if an evaluation wrote it.
        inputs: paths that were read; the output may not overlap them.

    Raises:
        AdapterswapError: see `OutputKind.folder`.
    """
    first_prompts = {}
    for sample in result.samples:
        if sample.doc_id == 0:
            first_prompts[sample.task] = sample.prompt
    content = result.as_json() | {"subject": dict(subject or {}), "first_prompts": first_prompts}
    with EVALUATION.folder(out_path, overwrite=overwrite, inputs=inputs) as folder:
        write_json(folder / "results.json", content)
        with (folder / "samples.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as file:
            for sample in result.samples:
                line = json.dumps(sample.as_json(), ensure_ascii=False, allow_nan=False, default=str)
                file.write(visible(line) + "\n")


def _finite(content: Any) -> Any:
    """`content` with None for NaN and infinity, which JSON lacks (the mean of nothing, the log of zero)."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content
