"""The report of a training run, and the estimate of a dry run: steps, learning rates, memory. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.experiments.training.recipe import TrainingOptions, TrainRecipe
from adapterswap.experiments.training.selection import CheckpointSelection
from adapterswap.kit.errors import FieldError
from adapterswap.kit.files.numbers import Dtype

Schedule = tuple[str, int, dict[str, Any]]


def rows_a_step(options: TrainingOptions, processes: int = 1) -> int:
    """The effective batch size: how many rows (or packed sequences) enter one update of the weights."""
    return options.batch_size * options.gradient_accumulation * processes


def steps_between(samples: int | None, options: TrainingOptions, processes: int = 1) -> int:
    """How many steps train on about `samples` rows, at least one; for example between two checkpoints."""
    return max(1, (samples or 0) // rows_a_step(options, processes))


def total_steps(rows: int, options: TrainingOptions, *, processes: int = 1) -> int:
    """How many steps `rows` rows (or packed sequences) take, as the transformers Trainer counts them."""
    if options.max_steps is not None:
        return options.max_steps
    batches = math.ceil(math.ceil(rows / options.batch_size) / processes)  # for each process
    return math.ceil(options.epochs * math.ceil(batches / options.gradient_accumulation))


def simultaneous_steps(
    parts: Sequence[int], options: TrainingOptions, *, steps_per_switch: int, processes: int = 1
) -> int:
    """How many steps a run with alternating sides has. An epoch ends once all rows of the larger side were used.

    The smaller side starts again when its rows are used up. Both sides have the same number of steps, unless max_steps
    is set.
    """
    if options.max_steps is not None:
        return options.max_steps
    steps_per_side = math.ceil(options.epochs * math.ceil(max(parts) / rows_a_step(options, processes)))
    return 2 * steps_per_switch * math.ceil(steps_per_side / steps_per_switch)


def choose_schedule(options: TrainingOptions, steps: int) -> Schedule:
    """The scheduler's name in transformers, its number of warmup steps, and its other arguments."""
    warmup = _steps(options.warmup, steps)
    decay = _steps(options.decay, steps) if options.schedule == "warmup_stable_decay" else 0
    if warmup + decay > steps:
        lengths = f"{warmup} steps of training.warmup"
        if decay:
            lengths += f" and {decay} of training.decay"
        raise FieldError(
            f"{lengths} do not fit into the {steps} steps of the run",
            "Set them to shares, such as 0.1",
            parameter="training.warmup",
        )

    if options.schedule == "warmup_stable_decay":
        return options.schedule, warmup, {"num_decay_steps": decay, "decay_type": "linear"}
    if options.schedule == "constant":
        return "constant_with_warmup", warmup, {}
    return options.schedule, warmup, {}


def _steps(value: float, steps: int) -> int:
    """`value` as a number of steps. Below 1 it is a share of `steps`, rounded up as in transformers."""
    return math.ceil(value * steps) if value < 1 else int(value)


# From where a dry run says so. With AVX-512 alone, products are 2.4 times as fast in bfloat16 and steps 1.25 times, but
# the first steps learn less: a change below half a unit in the last place of an output is lost. AMX is worth it.
_MUCH_PADDING, _MUCH_FASTER = 0.15, 4
_FEWEST = 4  # rows in a part of a batch, so that products stay large enough
_PASS = 32  # tokens whose computation takes as long as starting another forward and backward pass on a CPU, about
_STEPS = 256  # drawn to count padding


def padded_tokens(
    options: TrainingOptions, lengths: NDArray[np.int64], *, processes: int = 1, parts: int = 1
) -> tuple[float, float]:
    """Tokens of a step with and without padding, means over steps drawn at random, see `batches.RowsInSteps`.

    Args:
        lengths: tokens of each row.
        parts: into how many parts each batch is divided.
    """
    if options.packing or options.padding_free or not len(lengths):
        return float(lengths.sum()), float(lengths.sum())

    rows, size = rows_a_step(options, processes), options.batch_size // parts
    order = np.random.default_rng(options.data_seed).permutation(len(lengths))
    if options.group_by_length:
        order = np.argsort(lengths, kind="stable")

    # The rows of a step are sorted, and each batch is padded to its last, longest row.
    starts = range(0, max(1, len(order) - rows + 1), rows)[:_STEPS]
    padded = real = 0
    for start in starts:
        step = np.sort(lengths[order[start : start + rows]])
        real += int(step.sum())
        for begin in range(0, len(step), size):
            batch = step[begin : begin + size]
            padded += int(batch[-1]) * len(batch)
    return padded / len(starts), real / len(starts)


def parts_of_batch(options: TrainingOptions, lengths: NDArray[np.int64], device: str, *, processes: int = 1) -> int:
    """Into how many parts a batch is divided, so that there is less padding; 1 on CUDA, where small batches are slow.

    On a CPU, a batch takes as long as its tokens, padding included. The parts are accumulated into the same step.
    """
    if device != "cpu" or options.packing or options.padding_free or options.group_by_length:
        return 1
    batches = options.gradient_accumulation * processes

    def cost(parts: int) -> float:
        """Tokens of a step with padding, and what starting the passes takes."""
        padded, _ = padded_tokens(options, lengths, processes=processes, parts=parts)
        return padded + _PASS * parts * batches

    possible = [parts for parts in range(1, options.batch_size // _FEWEST + 1) if options.batch_size % parts == 0]
    return min(possible or [1], key=cost)


# Values that a layer keeps for the backward pass, for each token, as counted on a Llama with LoRA on every projection:
# 8·hidden + 4·intermediate in float32; in bfloat16 the adapters' float32 copies of their inputs come on top.
_HIDDEN = {"float32": 8, "bfloat16": 14}
_INTERMEDIATE = 4
_TILE = 4096, 32768  # tokens and entries of the vocabulary whose logits TRL computes at once
# On a CPU, what the process holds: Python and the libraries; what the backward pass needs beside the kept values, and
# the allocator keeps; copies of the logits where there is no Triton.
_PROCESS, _SPARE, _COPIES = 0.65e9, 1.9, 8


def memory(
    config: Any, recipe: TrainRecipe, trainable: int, base_parameters: int, *, dtype: str, longest: int,
    device: str = "cuda", parts: int = 1, labelled: float = 1.0,
) -> dict[str, int]:  # fmt: skip
    """Bytes by part, and their `total`: of one process that holds everything, as without FSDP.

    On CUDA it is the device's memory, on a CPU the peak of the process.

    Args:
        longest: tokens of the longest row as trained on; with packing, sequences are max_length long.
        parts: see `parts_of_batch`.
        labelled: the share of the tokens that the loss is computed on.
    """
    options = recipe.training
    size = Dtype.BYTES[Dtype.NAMES[dtype]]
    hidden = int(config.hidden_size)
    intermediate = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    if isinstance(intermediate, list):  # one for each layer
        intermediate = max(intermediate)

    # What the layers keep for the backward pass, and the logits that are computed at once.
    row_length = longest
    if options.packing:
        row_length = options.max_length
    tokens = options.batch_size // parts * row_length
    layer = tokens * size * (_HIDDEN[dtype] * hidden + _INTERMEDIATE * intermediate)
    layers = int(config.num_hidden_layers)
    activations = layers * layer
    if options.gradient_checkpointing:  # each layer keeps only its input, and one layer at a time is recomputed
        activations = layers * tokens * size * hidden + layer
    logits = size * min(tokens, _TILE[0]) * min(int(config.vocab_size), _TILE[1])

    by_part = _weights(recipe, trainable, base_parameters, size)
    if device == "cpu":
        by_part["activations"] = round(_SPARE * activations + _COPIES * labelled * logits)
        by_part["process"] = round(_PROCESS)
    else:
        by_part["activations"] = activations + logits
    return {**by_part, "total": sum(by_part.values())}


def _weights(recipe: TrainRecipe, trainable: int, base_parameters: int, size: int) -> dict[str, int]:
    """Bytes of the base's weights, `size` each unless the recipe says otherwise, and of what training adds."""
    # AdamW's two moments have as many bytes as a trained weight, or one each.
    trained = 4  # an adapter is trained in float32
    if recipe.adapter.method == "none":
        trained = Dtype.BYTES[Dtype.NAMES[recipe.training.weight_dtype]]
    moment = trained
    if "8bit" in recipe.training.optimizer:
        moment = 1

    # Full weights: the gradient and the moments come on top of the weights themselves.
    if recipe.adapter.method == "none":
        return {"base": base_parameters * trained, "training": trainable * (trained + 2 * moment)}

    # An adapter: its weights, their gradients and the moments.
    base = base_parameters * size
    if recipe.quantization:
        base = base_parameters * recipe.quantization.bits // 8
    return {"base": base, "training": trainable * (trained + trained + 2 * moment)}


@dataclass(frozen=True)
class RowCounts:
    """How many rows were used, dropped and cut.

    Attributes:
        sources: for each source: its path, rows read, rows kept by filter and samples, empty rows, rows dropped by
            hygiene, columns that nothing reads, what its chat template does to rows, and its files with their sha256.
        train, validation: rows used.
        empty: rows dropped because a value was missing or there was no completion.
        math: rows dropped because they look like math.
        overlap: rows dropped because they share text with an evaluation.
        cut_off: rows dropped because nothing to train on was left within max_length.
        surplus: rows left out beyond `samples_per_side`.
        truncated: rows used for training, or held out of the same sources, that were cut to max_length.
        split: long texts that were split into several rows of max_length.
        boundary_moved: rows used whose prompt ends in other tokens than the prompt alone would.
        without_end: rows used whose last trained turn has no token at which the model stops.
        longest: tokens of the longest row of the sources, used or not, before it was cut.
        tokens, trained_tokens: tokens in one pass over the training rows: all, and those that the loss is computed on.
        sha256: the hash of the training rows' tokens.
        date: the date that the chat template wrote as today's; None if it writes none.
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
    without_end: int
    longest: int
    tokens: int
    trained_tokens: int
    sha256: str
    date: str | None = None

    @property
    def dropped(self) -> int:
        return self.empty + self.math + self.overlap + self.cut_off

    def notes(self) -> list[str]:
        """Sentences about rows that were dropped or cut, for the user."""
        messages = []
        if self.date:
            messages.append(f"the chat template writes the date, {self.date}: `date` in the recipe fixes it")
        if self.empty:
            messages.append(f"{self.empty} rows dropped: a value is missing or there is nothing to train on")
        if self.math:
            by_source = [f"{source['source']}: {source['math']}" for source in self.sources if source["math"]]
            messages.append(f"{self.math} rows dropped: they look like math ({', '.join(by_source)})")
        if self.overlap:
            overlaps = []
            for source in self.sources:
                for evaluation, count in source["overlap"].items():
                    overlaps.append(f"{source['source']}: {count} with {evaluation}")
            messages.append(f"{self.overlap} rows dropped: they share text with an evaluation ({', '.join(overlaps)})")
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
        if self.without_end:
            messages.append(
                f"{self.without_end} rows have no end-of-sequence token after their last turn, as the chat template "
                "writes none: the expert will not learn to stop"
            )

        for source in self.sources:
            for remark, (count, example) in source["remarks"].items():
                messages.append(f"{source['source']}: {count} rows: {remark}, such as {example}")
            if source["unread"]:
                messages.append(
                    f"{source['source']}: not used: {', '.join(source['unread'])} (neither the recipe nor the chat "
                    "template reads it)"
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
        ladder: the steps whose adapters were kept as well, in folders such as checkpoint-100.
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
    ladder: tuple[int, ...] = ()

    def losses_text(self, digits: int) -> str:
        """The training loss at the first and at the last entry of the log, or the only one."""
        (_, first), (steps, last) = self.train_losses[0], self.train_losses[-1]
        if len(self.train_losses) > 1:
            return f"{first:.{digits}f} at the start, {last:.{digits}f} at the end"
        if steps > 1:
            return f"{first:.{digits}f}, the mean of {steps:,} steps"
        return f"{first:.{digits}f}"

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
            AdamW's two moments), activations, on a CPU the process itself, and their total.
        padding: the share of padding in what is computed.
        bfloat16_speedup: on a CPU in float32, how many times as fast this processor multiplies in bfloat16.
        device, dtype: the recipe's values, with `auto` resolved.
        processes: how many processes there are.
        selection: checkpoints that would be evaluated, and documents and requests of each; None without a selection.
        start: where the adapter starts, as a line of text; None for zero.
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
    start: str | None = None
    padding: float = 0.0
    bfloat16_speedup: float | None = None

    def notes(self) -> list[str]:
        """What would make the run faster."""
        lines = []
        if self.padding > _MUCH_PADDING:
            lines.append(
                f"{self.padding:.0%} of the tokens computed are padding: training.group_by_length=true takes rows of "
                "similar length together"
            )
        if self.bfloat16_speedup is not None and self.bfloat16_speedup > _MUCH_FASTER:
            lines.append(
                f"This processor multiplies {self.bfloat16_speedup:.1f} times as fast in bfloat16: consider "
                "training.dtype=bfloat16"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
