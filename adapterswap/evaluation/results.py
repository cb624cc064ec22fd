"""What an evaluation found: scores, samples, and the folder that keeps them.

Plain data. Two evaluations of the same thing give the same values, and the folder the same bytes: no clock, no path of
this machine. Knows nothing of how the scores came about.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.files.folders import OutputKind, atomic_folder
from adapterswap.files.smallfiles import write_json

__all__ = ["EVALUATION", "EvaluationResult", "Sample", "Score", "TaskResult", "write_result"]

EVALUATION = OutputKind(
    "results.json",
    lambda record: ("results.json", "samples.jsonl") if record.keys() >= {"adapterswap", "tasks"} else (),
)
"""What `evaluate` writes."""


@dataclass(frozen=True)
class Score:
    """One number of a task.

    Attributes:
        metric: lm-evaluation-harness's name of it: exact_match, acc, acc_norm.
        filter: how the answer was taken from the output: strict-match, flexible-extract, normalized, none.
        value: the mean over the documents, unless the metric says otherwise.
        stderr: its standard error (for a mean: sample standard deviation / √n); None where it is not known.
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
        num_fewshot: how many shots stood before each; None for a group whose tasks differ in it.
        version: the task's own version.
        scores: one for each metric and filter.
        cut: outputs that ended because they reached the limit of tokens, not by themselves; None for tasks that
            compare likelihoods.
        truncated: prompts that lost their beginning, because they did not fit.
        max_gen_toks: the limit of tokens, the task's own where it has one; None for tasks that generate nothing.
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
        """The one score of that filter and metric.

        Raises:
            KeyError: there is none, or more than one.
        """
        found = [s for s in self.scores if filter in (None, s.filter) and metric in (None, s.metric)]
        if len(found) != 1:
            raise KeyError(f"{self.name} has {len(found)} scores for metric={metric}, filter={filter}")
        return found[0]


@dataclass(frozen=True)
class Sample:
    """One document of one task, and what the model made of it.

    Attributes:
        task: the task's name.
        doc_id: the document's place in its data set, from 0: pair two evaluations by it.
        doc: the document itself.
        prompt: what the model was given.
        target: the right answer.
        output: what it wrote; where likelihoods are compared, each choice's log-likelihood and whether it is greedy.
        answers: what each filter took from the output.
        scores: each filter's metrics.
        cut: the output ended at the limit of tokens.
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

    def as_json(self) -> dict[str, Any]:
        """The sample as plain data; the prompt, which repeats the shots every time, as its sha256."""
        content = asdict(self)
        digest = hashlib.sha256(content.pop("prompt").encode("utf-8")).hexdigest()
        return dict(_finite({**content, "prompt_sha256": digest}))


@dataclass(frozen=True)
class EvaluationResult:
    """Everything that one call of `evaluate` found.

    Attributes:
        tasks: by name, in the order in which they were asked for.
        groups: by name, the means that lm-evaluation-harness forms over groups of tasks.
        samples: every document of every task.
        settings: what was asked for (shots, limit, tokens, seed and so on), and what else outputs depend on: dtype,
            kind of device, the model's own generation settings, versions of libraries.
    """

    tasks: Mapping[str, TaskResult]
    samples: tuple[Sample, ...]
    settings: Mapping[str, Any]
    groups: Mapping[str, TaskResult] = field(default_factory=dict)

    def __repr__(self) -> str:
        """A line for each task, with its scores."""
        lines = []
        for task in (*self.tasks.values(), *self.groups.values()):
            scores = (f"{score.metric},{score.filter} {score.value:.3f}" for score in task.scores)
            lines.append(f"\n{task.name} (n = {task.num_docs}): {'; '.join(scores)}")
        return f"<EvaluationResult{''.join(lines)}>"

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
    """Write the folder `out_path` with results.json and samples.jsonl (one line for each document).

    Args:
        result: what `evaluate` returned.
        subject: what was evaluated, as plain data: it goes into results.json.
        overwrite: replace the folder, if an evaluation wrote it.
        inputs: what was read; the output may not overlap it.

    Raises:
        AdapterswapError: see `atomic_folder`.
    """
    content = result.as_json() | {
        "subject": dict(subject or {}),
        "first_prompts": {sample.task: sample.prompt for sample in result.samples if sample.doc_id == 0},
    }
    with atomic_folder(out_path, kind=EVALUATION, overwrite=overwrite, inputs=inputs) as folder:
        write_json(folder / "results.json", content)
        with (folder / "samples.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as file:
            for sample in result.samples:
                file.write(json.dumps(sample.as_json(), ensure_ascii=False, allow_nan=False, default=str) + "\n")


def _finite(content: Any) -> Any:
    """`content` with None for NaN and infinity, which JSON cannot say (a score over nothing, a likelihood of zero)."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content
