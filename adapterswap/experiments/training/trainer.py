"""TRL's SFTTrainer set up from a recipe, two partitions in turns, and a stop on SIGTERM.

Rows are already tokenised and masked, so the trainer's own preparation is skipped. Added are a stop at the first loss
that is not finite, a progress bar, a checkpoint every N samples, and training of two sides in turns. Importing this
module imports torch and trl.

In turns, the parameters of the other side are frozen and have no gradient. AdamW skips parameters without a gradient,
so their weights, moments and step counts stay the same, bit for bit. A gradient of zero would change them, through the
moments and weight decay.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import multimode
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTConfig, SFTTrainer

from adapterswap.core import OpenedBase
from adapterswap.engines.live.start import take_over
from adapterswap.experiments.training.batches import RowsInSteps, by_length, only_labelled
from adapterswap.experiments.training.checkpoints import LADDER, complete, link_weights
from adapterswap.experiments.training.data import row_lengths
from adapterswap.experiments.training.probes import Head, add_head
from adapterswap.experiments.training.recipe import SIDES, AdapterOptions, Side, TrainRecipe
from adapterswap.experiments.training.report import choose_schedule, parts_of_batch, rows_a_step, steps_between
from adapterswap.experiments.training.start import Start
from adapterswap.experiments.training.targets import TrainingTargets
from adapterswap.kit.errors import RunError, UnsupportedError
from adapterswap.kit.processes import Processes, TerminationHandler
from adapterswap.kit.progress import ProgressRow


def side_of_step(step: int, steps_per_switch: int) -> Side:
    """The side that a step trains, counted from 0. The task side comes first."""
    return SIDES[step // steps_per_switch % 2]


class RowsInTurns(Sampler[int]):
    """The order of the rows of a whole run. All rows of a step belong to the side that the step trains.

    The rows of a side are shuffled again for each pass over them.

    Args:
        lengths: tokens of each row; the rows of a step are sorted by them.
        parts: how many rows each side has; in the dataset the task's come first.
        steps: how many steps the run has.
        rows_a_step: how many rows a step has, on all processes together.
        steps_per_switch: how many steps one side trains before the other takes over.
        seed: for shuffling.
    """

    def __init__(
        self, lengths: NDArray[np.int64], parts: Sequence[int], *, steps: int, rows_a_step: int, steps_per_switch: int,
        seed: int,
    ) -> None:  # fmt: skip
        self._rows = np.empty((steps, rows_a_step), np.int64)
        turns = np.arange(steps) // steps_per_switch % 2
        for side, (first, count) in enumerate(zip((0, parts[0]), parts, strict=True)):
            own_steps = turns == side
            drawn = _passes(count, int(own_steps.sum()) * rows_a_step, np.random.default_rng([seed, side]))
            self._rows[own_steps] = by_length(first + drawn.reshape(-1, rows_a_step), lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows.ravel().tolist())

    def __len__(self) -> int:
        return self._rows.size


class RowsByLength(LengthGroupedSampler):  # type: ignore[misc]
    """Rows of similar length one after the other, in another order in each pass; see the Trainer's own sampler.

    Its generator depends on the seed and the pass alone, so that every process and a resumed run have the same order.

    Args:
        lengths: tokens of each row.
        rows: how many rows one process has in a step.
        seed: for shuffling.
    """

    def __init__(self, lengths: Sequence[int], *, rows: int, seed: int) -> None:
        super().__init__(rows, lengths=list(lengths))
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        seed = int(np.random.default_rng([self._seed, self._epoch]).integers(2**63))
        self.generator = torch.Generator().manual_seed(seed)
        return iter(super().__iter__())


def _passes(count: int, length: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """`length` numbers below `count`, from one permutation after the other."""
    passes = [chance.permutation(count) for _ in range(-(-length // count))]
    return np.concatenate([np.empty(0, np.int64), *passes])[:length]


class Turns(TrainerCallback):  # type: ignore[misc]
    """Before each step, freezes the parameters of one side and unfreezes those of the other.

    Args:
        model: the model, before it is wrapped for several processes.
        targets: says which side a parameter belongs to.
        steps_per_switch: how many steps one side trains before the other takes over.
    """

    def __init__(self, model: Any, targets: TrainingTargets, steps_per_switch: int) -> None:
        self._steps_per_switch = steps_per_switch
        self.parameters: dict[Side, list[Any]] = {side: [] for side in SIDES}
        for name, parameter in model.named_parameters():
            side = targets.side_of(name)
            if parameter.requires_grad and side:
                self.parameters[side].append(parameter)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        active = side_of_step(state.global_step, self._steps_per_switch)
        for side, parameters in self.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(side == active)


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Ends training after the current step, with a checkpoint, if any process of the run has received SIGTERM.

    Attributes:
        stopped: the last step, if training was ended in this way.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._received = False
        self.stopped: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signal inside the block. Python allows this in the main thread only; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, TerminationHandler(self._receive))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _receive(self) -> None:
        self._received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._processes.any(self._received) and state.global_step < state.max_steps:
            self.stopped = state.global_step
            control.should_save = control.should_log = control.should_training_stop = True


class ExpertTrainer(SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that stops if the loss is not finite, and sends no telemetry.

    Attributes:
        order: the order of the rows, if it is not random.
        seconds_evaluating: how long the validation loss has been measured so far.
    """

    order: RowsInTurns | RowsByLength | RowsInSteps | None = None
    seconds_evaluating = 0.0
    _head = Head()

    def use(self, head: Head) -> None:
        """Compute losses by this head, each as the mean over the labels that it sees.

        transformers counts the labels for that mean by the name of the model's class: of some it counts each row's
        first token too, which nothing predicts, and of others it averages the means of batches.
        """
        self._head = head
        self._loss_shifts_labels = self.model_accepts_loss_kwargs = True
        if not head.fused:
            add_head(self._own_model(), head)

    def _own_model(self) -> Any:
        """The model of transformers, without wrappers for several processes and without PEFT's."""
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel):
            return model.get_base_model()
        return model

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return self.order or super()._get_train_sampler(*args, **kwargs)

    @contextmanager
    def _labelled(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Inputs for which logits are computed only where there is a label; TRL sees to that itself on CUDA."""
        if self.args.device.type != "cpu" or self.args.torch_compile or not self._head.fused:
            yield inputs
            return
        with only_labelled(self._own_model().base_model, inputs) as labelled:
            yield labelled

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """See the Trainer."""
        with self._labelled(inputs) as labelled:
            return super().compute_loss(model, labelled, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise RunError(
                f"The loss is {loss.item()} in step {self.state.global_step + 1}",
                "Lower training.learning_rate, or raise training.warmup; nothing was written, checkpoints are kept",
                parameter="training.learning_rate",
            )
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See the Trainer. Reading rows draws from dropout's random generator, whose state is restored here."""
        began = time.monotonic()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            losses: dict[str, float] = super().evaluate(*args, **kwargs)
        self.seconds_evaluating += time.monotonic() - began
        return losses

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """See the Trainer. Its loss is a mean of batch means; this one is the mean over all tokens."""
        self._held_out = torch.zeros(2, dtype=torch.float64)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss, tokens = self._held_out.tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = loss / tokens
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None, None]:
        """See the Trainer. Sums losses and tokens by row, so that gathering can drop rows that fill a batch up."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager(), self._labelled(inputs) as prepared:
            outputs = model(**prepared, use_cache=False, fused_lm_head=True)

        # Which row each label (batch, tokens - 1) belongs to. Rows without padding lie one after the other in one row.
        labelled = inputs["labels"][:, 1:] != -100
        if len(labelled) == 1 and "position_ids" in inputs:
            row = ((inputs["position_ids"] == 0).cumsum(1) - 1)[:, : labelled.shape[1]]
        else:
            row = torch.arange(len(labelled), device=labelled.device)[:, None].expand(labelled.shape)

        # The losses of the labels (labels,): with `only_labelled` there are no others.
        losses = -outputs.log_probs.double()
        losses = losses[labelled] if losses.shape == labelled.shape else losses[0]

        # [sum of losses, number of labels] of each row (rows, 2)
        by_row = losses.new_zeros(int(row[-1, -1]) + 1, 2)
        by_row.index_add_(0, row[labelled], torch.stack([losses, torch.ones_like(losses)], dim=1))
        total = self.accelerator.gather_for_metrics(by_row).sum(dim=0).cpu()
        self._held_out += total
        return (total[0] / total[1].clamp(min=1)).to(losses.device), None, None

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Skips TRL's card for checkpoints. The expert's card is written at the end."""

    def _send_telemetry(self) -> None:
        """Skips TRL's report of each run over the network; training works offline."""


class _ProgressCallback(TrainerCallback):  # type: ignore[misc]
    """Updates the bar, and logs the loss at checkpoints and at the end, so that a resumed run reports the same."""

    def __init__(self, bar: ProgressRow) -> None:
        self._bar = bar

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.begin("training", state.max_steps, done=state.global_step, amount=state.num_input_tokens_seen)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= control.should_save or state.global_step == state.max_steps
        self._bar.update(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            rate = self._bar.rate_of(state.num_input_tokens_seen)
            self._bar.update(state.global_step, note=f"loss {logs['loss']:.3f}, {rate:,.0f} tokens/s")


class Ladder(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint at each rung of the ladder, and keeps its adapter beside the checkpoints, which are removed.

    Attributes:
        kept: the steps whose adapters are kept so far.
    """

    def __init__(self, rungs: Sequence[int], trainer: ExpertTrainer, processes: Processes) -> None:
        if trainer.is_fsdp_enabled:
            raise UnsupportedError(
                "FSDP spreads an adapter over processes, and selection.ladder needs it whole",
                "Start it without FSDP, or without the ladder",
                parameter="selection",
            )
        self._rungs, self._trainer, self._processes = rungs, trainer, processes
        self._folder = Path(trainer.args.output_dir) / LADDER

    @property
    def kept(self) -> list[int]:
        return [step for step in self._rungs if (self._folder / f"checkpoint-{step}").is_dir()]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep(args, state)  # a run may end between the checkpoint and its copy

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step in self._rungs

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep(args, state)

    def _keep(self, args: Any, state: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._processes.main and state.global_step in self._rungs and checkpoint.is_dir():
            link_weights(checkpoint, self._folder / checkpoint.name)

    def restored(self) -> Iterator[int]:
        """Load the adapter of each rung into the trainer's model, the last one last, and yield its step."""
        kept = self.kept
        for step in sorted(self._rungs):
            if step <= self._trainer.state.global_step and step not in kept:
                raise RunError(
                    f"The adapter of step {step}, a rung of selection.ladder, is no longer in {self._folder}",
                    "Pass `overwrite=True` without `resume` to start again",
                    parameter="resume",
                )
        for step in kept:
            self._trainer._load_from_checkpoint(str(self._folder / f"checkpoint-{step}"))
            yield step


class Completing(TrainerCallback):  # type: ignore[misc]
    """Marks a checkpoint as complete once every process has written its part."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._processes.wait()
        if self._processes.main:
            complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def lora_config(options: AdapterOptions, targets: TrainingTargets) -> LoraConfig:
    """PEFT's config of the adapter."""
    shapes = {name: (shape.rank, shape.alpha) for name, shape in targets.shapes.items()}

    # The most frequent rank and α are the config's own, and patterns name the modules with others.
    rank, alpha = min(multimode(shapes.values()), default=(options.r, options.alpha))
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        use_rslora=targets.rslora,
        rank_pattern={name: own for name, (own, _) in shapes.items() if own != rank},
        alpha_pattern={name: own for name, (_, own) in shapes.items() if own != alpha},
        lora_dropout=options.dropout,
        target_modules=targets.names,
        layers_to_transform=targets.layers,
        modules_to_save=sorted(options.modules_to_save) or None,
        fan_in_fan_out=targets.conv1d,
        bias="none",
    )


def build_trainer(
    recipe: TrainRecipe, base: OpenedBase, model: Any, targets: TrainingTargets, train: Any, parts: Sequence[int],
    validation: Any, *, head: Head, start: Start | None, steps: int, device: str, dtype: str, checkpoints: Path,
    processes: Processes, bar: ProgressRow,
) -> ExpertTrainer:  # fmt: skip
    """A trainer ready to train.

    Args:
        head: how losses are computed from this model.
        train, validation: datasets with input_ids and labels (and seq_lengths if packed); validation may be None.
        parts: how many rows of `train` each side has.
        steps: how many steps the run has, for schedules that decay at the end.
    """
    options, lengths = recipe.training, row_lengths(train)
    divided = parts_of_batch(options, lengths, device, processes=processes.count)
    if getattr(base.config.get_text_config(), "output_router_logits", False):  # a loss of whole batches
        divided = 1
    adapted = recipe.adapter.method == "lora"
    if not adapted:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(targets.trains(name))

    trainer = ExpertTrainer(
        model=model,
        args=_arguments(recipe, steps, device, dtype, checkpoints, processes, parts=divided, head=head),
        train_dataset=train,
        eval_dataset=validation,
        processing_class=base.tokenizer,
        peft_config=lora_config(recipe.adapter, targets) if adapted else None,
        callbacks=[_ProgressCallback(bar)],
    )
    trainer.use(head)
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for data
    if recipe.stops_early:
        trainer.add_callback(EarlyStoppingCallback(recipe.stops_early))
    if recipe.quantization:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:  # TRL rounds the adapters on a quantized base to bfloat16
                parameter.data = parameter.data.float()
    if start is not None and not start.on_top:
        take_over(trainer.model, start.adapter, targets.modules)

    # The order of the rows
    turns = recipe.simultaneous
    if options.group_by_length:
        rows = options.batch_size * options.gradient_accumulation
        trainer.order = RowsByLength(lengths.tolist(), rows=rows, seed=options.data_seed)
    elif not (options.packing or options.padding_free):
        trainer.order = RowsInSteps(lengths, rows=rows_a_step(options, processes.count), seed=options.data_seed)
    if turns:
        if trainer.is_fsdp_enabled:
            raise UnsupportedError(
                "FSDP joins parameters that `simultaneous` has to freeze separately",
                "Start it without FSDP, or train the sides in separate runs and compose them",
                parameter="simultaneous",
            )
        trainer.order = RowsInTurns(
            lengths,
            parts,
            steps=steps,
            rows_a_step=rows_a_step(recipe.training, processes.count),
            steps_per_switch=turns.steps_per_switch,
            seed=recipe.training.data_seed,
        )
        trainer.add_callback(Turns(trainer.model, targets, turns.steps_per_switch))
    return trainer


def _arguments(
    recipe: TrainRecipe, steps: int, device: str, dtype: str, checkpoints: Path, processes: Processes, *, parts: int,
    head: Head,
) -> SFTConfig:  # fmt: skip
    """TRL's arguments."""
    options = recipe.training
    name, warmup, schedule_options = choose_schedule(options, steps)
    evaluate_every = None
    if recipe.validation:
        evaluate_every = recipe.validation.every_samples
    save_every = options.save_every_samples
    if recipe.stops_early:
        save_every = evaluate_every
    return SFTConfig(
        output_dir=str(checkpoints),
        # what is computed
        max_steps=steps,
        per_device_train_batch_size=options.batch_size // parts,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.gradient_accumulation * parts,
        learning_rate=options.learning_rate,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=schedule_options,
        warmup_steps=warmup,
        optim=options.optimizer,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        max_grad_norm=options.max_grad_norm,
        seed=options.seed,
        data_seed=options.data_seed,
        max_length=None if options.padding_free else options.max_length,  # rows have been cut
        packing=options.packing,
        padding_free=options.padding_free,
        eval_packing=False,
        activation_checkpointing=options.gradient_checkpointing,
        torch_compile=options.torch_compile,
        use_cpu=device == "cpu",
        bf16=dtype == "bfloat16",
        dataset_kwargs={"skip_prepare_dataset": True},
        router_aux_loss_coef=None if head.router_loss else 0.0,  # None is the model's own
        # Each step uses the parameters of one side only; the others must have no gradient.
        ddp_find_unused_parameters=recipe.simultaneous is not None,
        # when something is saved or logged
        save_strategy="steps" if save_every else "no",
        save_steps=steps_between(save_every, options, processes.count),
        save_total_limit=2,
        eval_strategy="steps" if evaluate_every else "no",
        eval_steps=steps_between(evaluate_every, options, processes.count),
        load_best_model_at_end=recipe.stops_early is not None,
        metric_for_best_model="eval_loss" if recipe.stops_early else None,
        logging_steps=options.logging_steps,
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="all" if options.packing or options.padding_free else "non_padding",
        report_to=options.report_to or "none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        # the process
        dataloader_num_workers=0,
        dataloader_pin_memory=device == "cuda",
    )
