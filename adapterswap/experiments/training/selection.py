"""Choose the checkpoint that becomes the expert: the recipe's options, the table of scores, the choice. Pure data.

In the second paper (section 5) language understanding (Belebele, Global-MMLU) predicts a good language expert, and MGSM
in English a good math expert. Both predict better than math in the target language, which is what the composition is
used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adapterswap.experiments.evaluation.settings import EvaluationOptions
from adapterswap.kit.files.readers import field


class Enough(Exception):
    """A resumed run is already complete, because early stopping had ended it before it was interrupted."""


class SelectionOptions(EvaluationOptions):
    """Keep checkpoints: the best on tasks, evaluated while training (needs the `eval` extra), or a ladder of them."""

    tasks: list[str] = field(
        default=[],
        description="What checkpoints are evaluated on: for a language expert such as [belebele_swh_Latn, "
        "global_mmlu_full_sw]; for a math expert [mgsm_native_cot_en].",
    )
    metric: str | dict[str, str] | None = field(
        default=None,
        description="A metric (acc_norm), or a metric and a filter (exact_match,flexible-extract), for all tasks or by "
        "task. Default: MGSM normalized, FLORES chrf++, else the task's first.",
    )
    keep_best: int = field(
        default=1,
        ge=1,
        description="How many checkpoints to keep: the best one is the expert, the others are in its folder.",
    )
    early_stopping: int | None = field(
        default=None, ge=1, description="Stop after this many checkpoints in a row without improvement. Default: never."
    )
    every: int = field(default=1, ge=1, description="Evaluate every Nth checkpoint, and the last one.")
    ladder: int | None = field(
        default=None,
        ge=2,
        description="Also keep this many adapters, evenly spaced over the run, the last at its end; each is a folder "
        "in the expert's.",
    )

    def check(self) -> None:
        if not self.tasks and self.ladder is None:
            raise ValueError("`selection` needs `tasks` to choose by, or a `ladder`")

    def rungs(self, steps: int) -> list[int]:
        """The steps whose adapters the ladder keeps, in a run of this length."""
        count = self.ladder or 0
        return sorted({max(1, (steps * rung + count // 2) // count) for rung in range(1, count + 1)})

    def notes(self) -> list[str]:
        """Warnings about this choice of tasks."""
        others = [name for name in self.tasks if name.startswith("mgsm_") and not name.endswith("_en")]
        if not others:
            return []
        return [
            f"selection by {', '.join(others)}: the second paper found math in the target language a weaker sign of a "
            "good expert than Belebele and Global-MMLU (language experts) and MGSM in English (math experts)"
        ]


@dataclass(frozen=True)
class JudgedCheckpoint:
    """A checkpoint's row in the table.

    Attributes:
        step: after how many steps it was saved.
        score: the mean over tasks; higher is better. BLEU, chrF and TER are divided by 100, and metrics of which less
            is better are negated.
        stderr: the standard error of the score, √Σσ²/n over n tasks with standard errors σ; None if one is unknown.
        tasks: the score on each task, as its metric gives it.
        eval_loss: the loss on the validation rows at this step, if there are any.
    """

    step: int
    score: float
    stderr: float | None
    tasks: dict[str, float]
    eval_loss: float | None

    @classmethod
    def of(
        cls, step: int, scores: Mapping[str, tuple[str, float, float | None, bool]], eval_loss: float | None
    ) -> JudgedCheckpoint:
        """A row from scores: task → (metric, value, standard error, whether higher is better)."""
        values, errors = [], []
        for name, value, error, higher_is_better in scores.values():
            unit = 1
            if name.startswith(("bleu", "chrf", "ter")):
                unit = 100
            sign = 1
            if not higher_is_better:
                sign = -1
            values.append(sign * value / unit)
            if error is not None:
                errors.append(error / unit)

        stderr = None
        if len(errors) == len(scores):
            stderr = math.hypot(*errors) / len(scores)
        tasks = {task: value for task, (_, value, _, _) in scores.items()}
        return cls(step, math.fsum(values) / len(scores), stderr, tasks, eval_loss)


@dataclass(frozen=True)
class CheckpointSelection:
    """The scores of the checkpoints, and the ones that were chosen.

    Attributes:
        metrics: task → the metric and filter that count.
        table: a row for each evaluated checkpoint, in the order of steps.
        kept: the steps of the best checkpoints, best first; the first one is the expert.
        stopped_early: whether early stopping ended the run.
    """

    metrics: dict[str, str]
    table: tuple[JudgedCheckpoint, ...]
    kept: tuple[int, ...]
    stopped_early: bool

    @property
    def chosen(self) -> JudgedCheckpoint:
        return next(row for row in self.table if row.step == self.kept[0])

    def markdown(self) -> list[str]:
        """The table as lines of Markdown, with the chosen row in bold."""
        has_losses = any(row.eval_loss is not None for row in self.table)
        columns = ["step", "score", *self.metrics]
        if has_losses:
            columns.append("validation loss")
        lines = ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]

        for row in self.table:
            cells = [f"{row.step:,}", _with_error(row)]
            cells += [f"{row.tasks[name]:.3f}" for name in self.metrics]
            if row.eval_loss is not None:
                cells.append(f"{row.eval_loss:.3f}")
            if row.step == self.kept[0]:
                cells = [f"**{cell}**" for cell in cells]
            if has_losses and row.eval_loss is None:
                cells.append("")
            lines.append("| " + " | ".join(cells) + " |")
        return lines

    def lines(self) -> list[str]:
        """The table as lines of text."""
        lines = []
        for row in self.table:
            numbers = [f"{name} {value:.4g}" for name, value in row.tasks.items()]
            if row.eval_loss is not None:
                numbers.append(f"validation loss {row.eval_loss:.4f}")
            line = f"{row.step:,}: {_with_error(row)} ({', '.join(numbers)})"
            if row.step == self.kept[0]:
                line += ", written"
            elif row.step in self.kept:
                line += ", kept"
            lines.append(line)
        return lines

    def notes(self) -> list[str]:
        """Warnings about the result."""
        others = [row for row in self.table if row.step != self.chosen.step]
        lines = []
        error = self.chosen.stderr
        if others and error is not None and self.chosen.score - max(row.score for row in others) < error:
            lines.append("the best checkpoint is ahead of another by less than one standard error")
        if self.stopped_early:
            lines.append(f"stopped early after step {self.table[-1].step:,}")
        return lines


def _with_error(row: JudgedCheckpoint) -> str:
    """The score with its standard error, if that is known."""
    if row.stderr is None:
        return f"{row.score:.4f}"
    return f"{row.score:.4f} ± {row.stderr:.4f}"


def is_judged(step: int, steps: int, save_steps: int, every: int) -> bool:
    """Whether the checkpoint of this step is evaluated. One that was saved because the run was stopped is not."""
    return step == steps or step % (save_steps * every) == 0


def best_first(table: Sequence[JudgedCheckpoint]) -> list[JudgedCheckpoint]:
    """The rows by score; of equal scores the earlier step comes first."""
    return sorted(table, key=lambda row: (-row.score, row.step))


def worn_out(table: Sequence[JudgedCheckpoint], patience: int | None) -> bool:
    """Whether none of the last `patience` rows is better than the best one before them."""
    if patience is None or not table:
        return False
    best = best_first(table)[0]
    return len([row for row in table if row.step > best.step]) >= patience
