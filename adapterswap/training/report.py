"""What training tells: the report of a run, and the estimate that a dry run gives. Plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapterswap.training.selection import CheckpointSelection

__all__ = ["RowCounts", "TrainEstimate", "TrainReport"]


@dataclass(frozen=True)
class RowCounts:
    """What became of the rows.

    Attributes:
        sources: per source: its path, rows read, rows kept by filter and samples, rows empty, rows dropped by
            hygiene, files with their sha256.
        train, validation: rows used.
        empty: rows dropped, because a value was missing or there was no completion.
        math: rows dropped, because they look like maths.
        overlap: rows dropped, because they share text with an evaluation.
        cut_off: rows dropped, because nothing to train on was left within max_length.
        surplus: rows left out beyond `samples_per_side`.
        truncated: rows used, to train on or held out of the same sources, that were cut to max_length.
        split: long texts that became several rows of max_length.
        boundary_moved: rows used whose prompt ends in other tokens than when it stands alone.
        longest: tokens of the longest row of the sources, used or not, before it was cut.
        tokens, trained_tokens: in one pass over the training rows: all, and those that the loss is taken on.
        sha256: of the training rows' tokens.
    """

    sources: list[dict[str, Any]]
    train: int
    validation: int
    empty: int
    math: int
    overlap: int
    cut_off: int
    surplus: int
    truncated: int
    split: int
    boundary_moved: int
    longest: int
    tokens: int
    trained_tokens: int
    sha256: str

    @property
    def dropped(self) -> int:
        return self.empty + self.math + self.overlap + self.cut_off

    def _by_source(self, count: str) -> str:
        return ", ".join(f"{source['source']}: {source[count]}" for source in self.sources if source[count])

    def _overlaps(self) -> str:
        return ", ".join(
            f"{source['source']}: {count} with {evaluation}"
            for source in self.sources
            for evaluation, count in source["overlap"].items()
        )

    def notes(self) -> list[str]:
        """What a user should know of, in words."""
        found = []
        if self.empty:
            found.append(f"{self.empty} rows dropped: a value is missing, or there is nothing to train on")
        if self.math:
            found.append(f"{self.math} rows dropped: they look like maths ({self._by_source('math')})")
        if self.overlap:
            found.append(f"{self.overlap} rows dropped: they share text with an evaluation ({self._overlaps()})")
        if self.cut_off:
            found.append(f"{self.cut_off} rows dropped: max_length leaves nothing of their completion")
        if self.surplus:
            found.append(f"{self.surplus} rows left out beyond samples_per_side")
        if self.truncated:
            found.append(f"{self.truncated} rows cut to max_length (the longest has {self.longest} tokens)")
        if self.split:
            found.append(f"{self.split} texts longer than max_length became several rows")
        if self.boundary_moved:
            found.append(
                f"{self.boundary_moved} rows have a prompt whose last token merges with the completion: end prompts "
                "without a space, and begin completions with one"
            )
        return found


@dataclass(frozen=True)
class TrainReport:
    """A finished run.

    Attributes:
        path: the expert's folder.
        steps: updates of the weights.
        resumed_from: the step that a checkpoint gave, or None.
        train_losses: [step, mean of the losses of the steps since the last entry; that of a step is per trained token].
        eval_losses: [step, loss on the validation rows], the last one at the end; empty without validation.
        rows: what became of the rows.
        tokens: tokens read in training, padding not counted.
        seconds: wall time of the training steps of this process, checkpoints included, but not what evaluating took.
        trainable_parameters: of the adapter; without one, of the model.
        processes: how many computed it together.
        selection: the checkpoints' scores, and which one was written; None where the last step's weights were.
    """

    path: Path
    steps: int
    resumed_from: int | None
    train_losses: list[tuple[int, float]]
    eval_losses: list[tuple[int, float]]
    rows: RowCounts
    tokens: int
    seconds: float
    trainable_parameters: int
    processes: int
    selection: CheckpointSelection | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True)
class TrainEstimate:
    """What a run would do, known from the base's config, its tokenizer and the rows; no weights are loaded.

    Attributes:
        base_model: its name (and commit).
        target_modules: the modules that get an adapter, or are themselves trained, by the end of their name.
        trained_modules: how many there are.
        trainable_parameters, base_parameters: numbers of parameters.
        steps: updates of the weights.
        tokens: tokens read in training, about: rows are drawn whole, so a part of an epoch is only near its share.
        rows: what becomes of the rows.
        memory: bytes by part: base, training (the adapter's weights, gradients, AdamW's two moments), activations, and
            their total; on each process, and a rough guide.
        device, dtype: as the recipe's `auto` was resolved here.
        processes: how many there are.
        selection: checkpoints that would be evaluated, and documents and requests of each; None without a selection.
    """

    base_model: str
    target_modules: list[str]
    trained_modules: int
    trainable_parameters: int
    base_parameters: int
    steps: int
    tokens: int
    rows: RowCounts
    memory: dict[str, int]
    device: str
    dtype: str
    processes: int
    selection: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
