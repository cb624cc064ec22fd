"""The report of a training run, and the estimate of a dry run. Plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapterswap.training.selection import CheckpointSelection

__all__ = ["RowCounts", "TrainEstimate", "TrainReport"]


@dataclass(frozen=True)
class RowCounts:
    """How many rows were used, dropped and cut.

    Attributes:
        sources: for each source: its path, rows read, rows kept by filter and samples, empty rows, rows dropped by
            hygiene, and its files with their sha256.
        train, validation: rows used.
        empty: rows dropped because a value was missing or there was no completion.
        math: rows dropped because they look like maths.
        overlap: rows dropped because they share text with an evaluation.
        cut_off: rows dropped because nothing to train on was left within max_length.
        surplus: rows left out beyond `samples_per_side`.
        truncated: rows used for training, or held out of the same sources, that were cut to max_length.
        split: long texts that were split into several rows of max_length.
        boundary_moved: rows used whose prompt ends in other tokens than the prompt alone would.
        longest: tokens of the longest row of the sources, used or not, before it was cut.
        tokens, trained_tokens: tokens in one pass over the training rows: all, and those that the loss is computed on.
        sha256: the hash of the training rows' tokens.
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
        """Sentences about rows that were dropped or cut, for the user."""
        messages = []
        if self.empty:
            messages.append(f"{self.empty} rows dropped: a value is missing or there is nothing to train on")
        if self.math:
            messages.append(f"{self.math} rows dropped: they look like maths ({self._by_source('math')})")
        if self.overlap:
            messages.append(f"{self.overlap} rows dropped: they share text with an evaluation ({self._overlaps()})")
        if self.cut_off:
            messages.append(f"{self.cut_off} rows dropped: max_length cuts off their whole completion")
        if self.surplus:
            messages.append(f"{self.surplus} rows left out beyond samples_per_side")
        if self.truncated:
            messages.append(f"{self.truncated} rows cut to max_length (the longest has {self.longest} tokens)")
        if self.split:
            messages.append(f"{self.split} texts longer than max_length split into several rows")
        if self.boundary_moved:
            messages.append(
                f"{self.boundary_moved} rows have a prompt whose last token merges with the completion: end prompts "
                "without a space and begin completions with one"
            )
        return messages


@dataclass(frozen=True)
class TrainReport:
    """A finished run.

    Attributes:
        path: the expert's folder.
        steps: updates of the weights.
        resumed_from: the step of the checkpoint that it resumed from, or None.
        train_losses: [step, mean loss of the steps since the last entry]; a step's loss is per trained token.
        eval_losses: [step, loss on the validation rows], the last one at the end; empty without validation.
        rows: the counts of rows used and dropped.
        tokens: tokens read in training, without padding.
        seconds: wall time of this process's training steps, including checkpoints but not evaluation.
        trainable_parameters: the number of trained parameters: the adapter's, or the model's own.
        processes: how many processes trained together.
        selection: the checkpoints' scores, and which one was written; None if the last step's weights were written.
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
    """What a run would do, computed from the base's config, its tokenizer and the rows. No weights are loaded.

    Attributes:
        base_model: the base's name (and commit).
        target_modules: the modules that get an adapter, or are themselves trained, by the end of their name.
        trained_modules: how many modules that is.
        trainable_parameters, base_parameters: numbers of parameters.
        steps: updates of the weights.
        tokens: roughly how many tokens are read; rows are drawn whole, so part of an epoch is only close to its share.
        rows: the counts of rows used and dropped.
        memory: bytes per process by part, as a rough guide: base, training (the adapter's weights, gradients and
            AdamW's two moments), activations, and their total.
        device, dtype: the recipe's values, with `auto` resolved.
        processes: how many processes there are.
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
