"""Evaluate checkpoints during a run, keep the weights of the best ones, and decide when to stop.

Evaluating does not affect training: modes and random generators are restored. The scores are kept next to the
checkpoints, so a resumed run measures nothing twice. Importing this module imports transformers.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from adapterswap.core import OpenedBase
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.experiments.training.checkpoints import link_weights
from adapterswap.experiments.training.recipe import TrainRecipe
from adapterswap.experiments.training.selection import (
    CheckpointSelection,
    Enough,
    JudgedCheckpoint,
    SelectionOptions,
    best_first,
    is_judged,
    worn_out,
)
from adapterswap.kit.errors import FieldError, Problems, RunError, UnsupportedError
from adapterswap.kit.files.folders import replacing, sync
from adapterswap.kit.files.text import read_json
from adapterswap.kit.processes import Processes
from adapterswap.kit.progress import ProgressRow

_REMEDY = "Pass `overwrite=True` without `resume` to start again"

_PRIMARY = {"exact_match": "normalized"}  # the filter of MGSM's main score


@dataclass(frozen=True)
class Examination:
    """What each checkpoint is evaluated on.

    Attributes:
        metrics: the metric and filter of each task or group that counts.
        documents, requests: how many each checkpoint answers, over all tasks.
        exam: the tasks, loaded once: a change of their files does not affect a run.
        fingerprints: hashes of the tasks, and of the files of `include_path`.
    """

    metrics: Mapping[str, tuple[str, str]]
    documents: int
    requests: int
    exam: Exam
    fingerprints: Mapping[str, str]


def examine(recipe: TrainRecipe, base: OpenedBase, *, trust_task_code: bool) -> Examination:
    """Load the tasks of `recipe.selection` and build their prompts, so that mistakes are reported before training."""
    options = recipe.judged_by
    assert options is not None
    exam = Exam.load(options.tasks, options.as_settings(recipe.folder, trust_task_code=trust_task_code), base)
    previews = exam.preview()
    problems = Problems(FieldError)

    # Prompts that do not fit in the model's context.
    for task in previews:
        if options.truncate:
            break
        budget = task.max_gen_toks
        if task.room is not None and budget is not None and task.room < budget:
            problems.add(
                f"selection: {task.name}: the longest prompt has {task.longest} tokens, which leaves {task.room} of "
                f"the model's context for an output of up to {budget}",
                "Use fewer shots (num_fewshot), a lower max_gen_toks, or truncate: true",
                parameter="selection",
            )
        if task.overlong:
            problems.add(
                f"selection: {task.name}: {task.overlong} prompts with their continuations are longer than the model's "
                "context",
                "Use fewer shots (num_fewshot), or truncate: true",
                parameter="selection",
            )

    metrics = {}
    for name in _counted(options.tasks, exam.tasks):
        with problems.collect():
            metrics[name] = _metric(name, exam.tasks, options)
    if isinstance(options.metric, dict):
        for name in sorted(options.metric.keys() - metrics.keys()):
            problems.add(
                f"selection.metric: {name!r} is not one of the selected tasks",
                f"Use one of {', '.join(metrics)}",
                parameter="selection.metric",
            )
    problems.raise_if_any()

    prints = {f"task {name}": exam.tasks.fingerprint(name) for name in exam.tasks.tasks}
    return Examination(
        metrics,
        documents=sum(task.num_docs for task in previews),
        requests=sum(task.num_requests for task in previews),
        exam=exam,
        fingerprints={**prints, **exam.settings.task_files},
    )


def _counted(names: list[str], loaded: LoadedTasks) -> list[str]:
    """The tasks and groups with one score each: those named, and the tasks that a pattern or family matches."""
    named = dict.fromkeys(names)
    counted: dict[str, None] = {}
    members: set[str] = set()
    for name in named:
        if name in loaded.groups:
            counted[name] = None
            members.update(task.task_name for task in loaded.groups[name].get_all_tasks())
    for name in loaded.tasks:
        if name in named or name not in members:
            counted[name] = None

    # In the recipe's order, and then those that it does not name.
    in_order = [name for name in named if name in counted]
    in_order += [name for name in counted if name not in named]
    return in_order


def _metric(name: str, loaded: LoadedTasks, options: SelectionOptions) -> tuple[str, str]:
    """The metric and filter to use for a task or a group."""
    # A group has its tasks' metrics, but only those of which it forms a mean.
    group = loaded.groups.get(name)
    if group:
        task = group.get_all_tasks()[0]
        formed = {entry.metric for entry in group.aggregate_metric_list or ()}
        metrics = [metric for metric in task.aggregation() if metric in formed]
        message, remedy = f"selection.tasks: the group {name} has no overall score", "List its tasks instead"
    else:
        task = loaded.tasks[name]
        metrics = list(task.aggregation())
        message, remedy = f"selection.tasks: {name} has no score", "Use a task that is scored automatically"
    choices: list[tuple[str, str]] = []
    for metric in metrics:
        choices += [(metric, filters.name) for filters in task._filters]
    if not choices:
        raise FieldError(message, remedy, parameter="selection.tasks")

    requested = options.metric
    if isinstance(requested, dict):
        requested = requested.get(name)
    if requested is None:
        for metric, filter_name in choices:
            if _PRIMARY.get(metric) == filter_name:
                return metric, filter_name
        return choices[0]

    metric, _, filter_name = requested.partition(",")
    for pair in choices:
        if pair[0] == metric and filter_name in ("", pair[1]):
            return pair
    names = ", ".join(",".join(pair) for pair in choices)
    raise FieldError(
        f"selection.metric: {name} has no metric {requested!r}", f"Use one of {names}", parameter="selection.metric"
    )


class CheckpointJudge(TrainerCallback):  # type: ignore[misc]
    """Evaluates checkpoints as they are saved, on the main process; the others wait.

    Attributes:
        seconds: how long evaluating took.
    """

    def __init__(
        self, options: SelectionOptions, examination: Examination, trainer: Any,
        *, processes: Processes, bar: ProgressRow,
    ) -> None:  # fmt: skip
        if trainer.is_fsdp_enabled:
            raise UnsupportedError(
                "`selection` evaluates on one process, but FSDP splits the model across all of them",
                "Train with keep_checkpoints: true and without `selection`, then run `adapterswap evaluate` on the "
                "checkpoints",
                parameter="selection",
            )

        self._options, self._examination = options, examination
        self._trainer = trainer
        self._processes, self._bar = processes, bar
        folder = Path(trainer.args.output_dir)
        self._table_path, self._best = folder / "selection.json", folder / "best"
        self._table: list[JudgedCheckpoint] = []
        self._stopped = False
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load earlier scores, and score the last checkpoint if the run ended before that."""
        rows: list[dict[str, Any]] = []
        if self._processes.main:
            rows = self._read(args, state)
        self._table = [JudgedCheckpoint(**row) for row in self._processes.from_main(rows)]
        if state.global_step and state.global_step not in {row.step for row in self._table}:
            self._judge_if_due(args, state)
        if self._has_enough(state):
            raise Enough

    def _read(self, args: Any, state: Any) -> list[dict[str, Any]]:
        """The rows up to the step from which the run resumes."""
        rows: list[dict[str, Any]] = []
        if self._table_path.is_file():
            content = read_json(self._table_path, _REMEDY, kind=RunError)
            rows = [row for row in content["table"] if row["step"] <= state.global_step]
        due = [step for step in range(1, state.global_step) if self._is_due_at(step, args, state)]
        if [row["step"] for row in rows if row["step"] < state.global_step] != due:
            raise RunError(f"{self._table_path} has changed since it was written", _REMEDY, parameter="resume")
        return rows

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the validation loss before the checkpoint is saved, because it goes into the table too."""
        if self._trainer.eval_dataset is not None and control.should_save and self._is_due(args, state):
            control.should_evaluate = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop and state.global_step < state.max_steps:
            return  # the run must end now; this checkpoint is scored when the run is resumed
        self._judge_if_due(args, state)
        control.should_training_stop |= self._has_enough(state)

    def _has_enough(self, state: Any) -> bool:
        self._stopped = state.global_step < state.max_steps and worn_out(self._table, self._options.early_stopping)
        return self._stopped

    def _is_due(self, args: Any, state: Any) -> bool:
        return self._is_due_at(state.global_step, args, state)

    def _is_due_at(self, step: int, args: Any, state: Any) -> bool:
        return is_judged(step, state.max_steps, int(args.save_steps), self._options.every)

    def _judge_if_due(self, args: Any, state: Any) -> None:
        """Evaluate the checkpoint that was just saved, if it is due, and keep it if it is among the best."""
        if not self._is_due(args, state):
            return
        began = time.monotonic()
        self._bar.begin(f"evaluating checkpoint {state.global_step}")
        row: dict[str, Any] = {}
        if self._processes.main:
            row = self._judge(state)
        self._table.append(JudgedCheckpoint(**self._processes.from_main(row)))
        if self._processes.main:
            self._keep(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self.seconds += time.monotonic() - began
        self._bar.begin("training", state.max_steps, done=state.global_step, amount=state.num_input_tokens_seen)

    def _judge(self, state: Any) -> dict[str, Any]:
        """The row of the model as it is now."""
        examination = self._examination
        result = examination.exam.evaluate(self._trainer.model)
        scores = {}
        for name, (metric, filter_name) in examination.metrics.items():
            score = (result.groups.get(name) or result.tasks[name]).score(filter_name, metric)
            scores[name] = (metric, score.value, score.stderr, score.higher_is_better)

        # The last validation loss that was measured at this step.
        loss = None
        for entry in state.log_history:
            if entry["step"] == state.global_step:
                loss = entry.get("eval_loss", loss)
        return asdict(JudgedCheckpoint.of(state.global_step, scores, loss))

    def _keep(self, checkpoint: Path) -> None:
        """Add this checkpoint's weights to the best, then write the table, then remove weights no longer kept."""
        link_weights(checkpoint, self._best / checkpoint.name)
        sync(self._best, whole=True)
        kept = {f"checkpoint-{step}" for step in self._kept()}
        content = {"table": [asdict(row) for row in self._table]}
        with replacing(self._table_path, self._table_path.with_suffix(".tmp")) as building:
            building.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for folder in self._best.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder)

    def _kept(self) -> list[int]:
        return [row.step for row in best_first(self._table)[: self._options.keep_best]]

    def selection(self) -> CheckpointSelection:
        """The table of scores, and the checkpoints chosen by it."""
        metrics = {name: ",".join(pair) for name, pair in self._examination.metrics.items()}
        return CheckpointSelection(metrics, tuple(self._table), tuple(self._kept()), self._stopped)

    def restored(self) -> Iterator[int]:
        """Load each kept checkpoint's weights into the trainer's model, as resuming does, and yield its step. The best
        one's weights are loaded last and stay there; its step is not yielded.
        """
        best, *others = self._kept()
        for step in (*reversed(others), best):
            self._trainer._load_from_checkpoint(str(self._best / f"checkpoint-{step}"))
            if step != best:
                yield step
