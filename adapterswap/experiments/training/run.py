"""Train an expert from a recipe, in one process or several, or estimate what that would take.

Under torchrun or `accelerate launch` every process runs `train`. All of them read the same rows; one writes.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.experiments.training.base import (
    attention_of,
    bfloat16_speedup,
    check_libraries,
    device_and_dtype,
    load_trainable,
    with_padding,
)
from adapterswap.experiments.training.recipe import TrainRecipe
from adapterswap.experiments.training.report import TrainEstimate, TrainReport
from adapterswap.experiments.training.selection import Enough
from adapterswap.kit.errors import ArgumentError, RunError, check_type
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.files.text import expand
from adapterswap.kit.files.yaml import find_recipe
from adapterswap.kit.progress import Progress

if TYPE_CHECKING:
    from adapterswap.core import OpenedBase
    from adapterswap.experiments.training.checkpoints import Checkpoints
    from adapterswap.experiments.training.data import Data
    from adapterswap.experiments.training.judge import CheckpointJudge, Examination
    from adapterswap.experiments.training.probes import Head
    from adapterswap.experiments.training.start import Start
    from adapterswap.experiments.training.targets import TrainingTargets
    from adapterswap.experiments.training.trainer import Ladder
    from adapterswap.kit.processes import Processes
    from adapterswap.kit.progress import ProgressRow


@contextmanager
def isolated() -> Iterator[None]:
    """Silence the libraries' progress bars and logs inside the block, and restore everything they changed after it.

    Restored: the random generators (Python, NumPy, torch on CPU and CUDA), the environment, transformers' verbosity and
    progress bars, datasets' progress bars, warning filters. accelerate's process-wide state is reset.
    """
    import datasets
    import numpy
    import torch
    import transformers.utils.logging as transformers_logging
    from accelerate.state import AcceleratorState

    python_state, numpy_state, torch_state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    environment = dict(os.environ)
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    had_data_bars = not datasets.are_progress_bars_disabled()

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 and TRL 1.16 use names that transformers 5.23 renamed; users can do nothing about it.
            warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
        if had_data_bars:
            datasets.enable_progress_bars()
        AcceleratorState._reset_state(reset_partial_state=True)


def train(
    recipe: TrainRecipe | str | Path,
    *,
    overrides: Iterable[str] = (),
    out_path: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool | Callable[[int, int], None] = True,
    trust_task_code: bool = False,
) -> TrainReport:
    """Train the expert that `recipe` describes, and write the folder of a PEFT adapter or of a whole model.

    The folder appears once it is complete. On CPU, and with the same machine and versions, the same recipe gives the
    same bytes, even if the run was interrupted and resumed.

    Args:
        recipe: a YAML file, the name of a shipped recipe, or a `TrainRecipe` (see `TrainRecipe`).
        overrides: values to set in a recipe's file, such as `training.seed=1`.
        out_path: the folder to write; by default the recipe's `out_path`.
        overwrite: replace the folder if `train` wrote it, and discard the checkpoints of an unfinished run.
        resume: continue from the last checkpoint of an unfinished run; if there is none, start at the beginning.
        progress: show a bar on stderr; or, in its place, call this with the number of finished steps and their total.
        trust_task_code: allow the task files in `selection.include_path` to run their Python code.

    Returns:
        The folder, the losses, and the counts of rows and tokens.

    Raises:
        ArgumentError: there are `overrides` without a file, or there is no output folder.
        FieldError: the recipe has mistakes; it names modules or layers that the base does not have, or modules that
            cannot have an adapter; rows are longer than the base's positions; warmup and decay are longer than the run;
            a task of the selection lacks its metric, or has prompts that are longer than the
            model's context.
        NotFoundError: the recipe, the base or a dataset does not exist, or could not be downloaded.
        BaseModelError: the base or its tokenizer is damaged, does not support what the recipe needs, or reads the
            tokens that it is to predict.
        DataError: a dataset is malformed, lacks a column, or has no rows left; a task of the selection is unknown, runs
            code that is not trusted, or cannot be loaded.
        OutputError: the output exists, contains other files or overlaps an input; or the disk is full.
        UnsupportedError: the base mixes packed rows, or the rows of a batch; `selection` or `simultaneous` is used with
            FSDP.
        DependencyError: the `train` extra, or another library that the recipe needs, is not installed.
        RunError: the device is not available; the unfinished run is a different one, or damaged; the loss is NaN or
            infinite; memory runs out; the run received SIGTERM (and wrote a checkpoint), or another of its processes
            died.
        KeyboardInterrupt: of Ctrl-C, with the step and the checkpoint to continue from as its text.
    """
    recipe = _recipe(recipe, overrides)
    if out_path is None:
        out_path = recipe.out_path
    if out_path is None:
        raise ArgumentError(
            "There is no output folder", "Pass `out_path`, or set `out_path:` in the recipe", parameter="out_path"
        )
    target = expand(out_path)
    _check_output(target, recipe.inputs, resume=resume, overwrite=overwrite)
    check_libraries(recipe)
    judged_by = recipe.judged_by
    if judged_by:
        from adapterswap.experiments.evaluation.tasks import LoadedTasks

        LoadedTasks.check_names(judged_by.tasks, judged_by.as_settings(recipe.folder).include_path)

    from adapterswap.experiments.training.checkpoints import Checkpoints, explained
    from adapterswap.experiments.training.output import EXPERT, write_expert, write_weights
    from adapterswap.kit.processes import Processes

    checkpoints = Checkpoints(target)
    device, dtype = device_and_dtype(recipe.training)
    with (
        isolated(),
        Processes.joined(device) as processes,
        Progress(shown=progress is True and processes.main, tell=progress if callable(progress) else None) as bars,
        scratch_folder("training") as scratch,
        checkpoints.tidied(keep=not processes.main),
    ):
        bar = bars.row("opening the base")
        prepared = _prepare(
            recipe, scratch, processes.count, device, dtype, trust_task_code=trust_task_code, tell=bar.begin
        )

        # Without checkpoints, what TRL itself writes goes to the temporary folder.
        saves = bool(recipe.training.save_every_samples)
        trainer_folder = scratch
        if saves:
            trainer_folder = checkpoints.folder
        run = _Run(prepared, processes, bar, device=device, dtype=dtype, folder=trainer_folder)
        checkpoint = None
        if saves:
            checkpoint = run.last_checkpoint(checkpoints, resume=resume)
        run.train(checkpoint, checkpoints.folder)
        trainer, report = run.trainer, run.report(target, checkpoint)

        # With FSDP each process holds a part of the weights, so all must take part.
        bar.begin("writing")
        weights = None
        if trainer.is_fsdp_enabled:
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if processes.main:
            inputs = [*recipe.inputs, prepared.base.source.folder]
            with (
                EXPERT.folder(target, overwrite=overwrite, inputs=inputs) as folder,
                explained("the expert", target),
            ):
                expert = trainer.model, recipe, prepared.base, prepared.targets
                for step in run.kept():
                    if not (folder / f"checkpoint-{step}").exists():
                        write_weights(folder / f"checkpoint-{step}", *expert)
                write_expert(folder, *expert, report, start=prepared.start, weights=weights)
            if not recipe.training.keep_checkpoints:
                checkpoints.remove()
        processes.wait()
    return report


@dataclass(frozen=True)
class _Prepared:
    """What a run reads before it loads the weights; `model` has none, and `rows` are packed if the recipe says so."""

    recipe: TrainRecipe
    base: OpenedBase
    model: Any
    attention: str | None
    start: Start | None
    targets: TrainingTargets
    data: Data
    rows: Any
    parts: tuple[int, ...]
    steps: int
    examination: Examination | None
    head: Head | None

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Hashes of what the run reads besides the recipe and the base, by name."""
        read: dict[str, Any] = {"rows": self.data.rows.sha256}
        if self.data.validation:
            read["validation_rows"] = self.data.validation.sha256()
        if self.examination:
            read["selection_tasks"] = self.examination.fingerprints
        if self.start:
            read["start_files"] = self.start.record.sha256
        return read


def _prepare(
    recipe: TrainRecipe,
    scratch: Path,
    processes: int,
    device: str,
    dtype: str,
    *,
    trust_task_code: bool,
    tell: Callable[[str], None],
) -> _Prepared:
    """Read everything that a run needs except the weights, and refuse what would stop it."""
    from adapterswap.core import OpenedBase
    from adapterswap.experiments.training.data import load_data, sequences
    from adapterswap.experiments.training.rehearsal import rehearse
    from adapterswap.experiments.training.start import open_start
    from adapterswap.experiments.training.targets import find_targets

    # A model without weights is enough to report a wrong name before rows and weights are read.
    base = OpenedBase.open(recipe.base_model)
    model = base.empty_model()
    attention = attention_of(model, recipe.training, device=device, dtype=dtype)
    start = None
    if recipe.start is not None:
        start = open_start(recipe.start, base, model, scratch)
        base = base.with_companions(start.companions)
    base = with_padding(base)
    targets = find_targets(model, recipe, base.config, start)

    tell("reading rows")
    data = load_data(recipe, base)
    head = rehearse(recipe, base, model, targets, data, device=device)
    rows, parts = sequences(data, recipe.training)
    steps = _steps(recipe, parts, processes)

    examination = None
    if recipe.judged_by:
        from adapterswap.experiments.training.judge import examine

        tell("reading the selection's tasks")
        examination = examine(recipe, base, trust_task_code=trust_task_code)
    return _Prepared(recipe, base, model, attention, start, targets, data, rows, parts, steps, examination, head)


class _Run:
    """A run in one of its processes.

    Args:
        prepared: what it reads.
        processes: those that train together.
        bar: shows the steps.
        device, dtype: see `device_and_dtype`.
        folder: where checkpoints go.

    Attributes:
        trainer: with the base's weights loaded.
        seconds: how long training took, without evaluations.
    """

    def __init__(
        self, prepared: _Prepared, processes: Processes, bar: ProgressRow, *, device: str, dtype: str, folder: Path
    ) -> None:
        from adapterswap.engines.live.start import put_below
        from adapterswap.experiments.training.trainer import Stopping, build_trainer

        recipe, data, start = prepared.recipe, prepared.data, prepared.start
        self._prepared, self._processes, self._bar = prepared, processes, bar
        self._stopping = Stopping(processes)

        bar.begin("loading the base")
        model = load_trainable(prepared.base, recipe, attention=prepared.attention, dtype=dtype)
        head = self._head_for(model)
        if start and start.on_top:
            model = put_below(model, start.adapter, quantized=recipe.quantization is not None)
        self.trainer = build_trainer(
            recipe, prepared.base, model, prepared.targets, prepared.rows, prepared.parts,
            data.validation.dataset() if data.validation else None, head=head, start=start,
            steps=prepared.steps, device=device, dtype=dtype, processes=processes, bar=bar, checkpoints=folder,
        )  # fmt: skip
        self._ladder, self._judge = self._watched()
        self.seconds = 0.0

    def _head_for(self, model: Any) -> Head:
        """How losses are computed from the base, which is refused here if it does not compute rows one by one.

        Weights that FSDP or DeepSpeed spread are not all here: then a small copy has decided.
        """
        from adapterswap.experiments.training.base import is_spread
        from adapterswap.experiments.training.probes import Head
        from adapterswap.experiments.training.rehearsal import check_length, check_rows

        prepared, options = self._prepared, self._prepared.recipe.training
        if is_spread():
            return prepared.head or Head()
        if prepared.recipe.quantization is None:
            from accelerate import PartialState

            model.to(PartialState().device)
        head = check_rows(model, prepared.base.reference, options)
        if prepared.head is None and next(model.parameters()).device.type == "cpu":  # on CUDA it would end the process
            check_length(model, options, prepared.data)
        return head

    def _watched(self) -> tuple[Ladder | None, CheckpointJudge | None]:
        """What keeps and evaluates checkpoints of the trainer, if the recipe asks for it."""
        from adapterswap.experiments.training.trainer import Completing, Ladder

        recipe, trainer, processes = self._prepared.recipe, self.trainer, self._processes
        if recipe.training.save_every_samples:
            trainer.add_callback(Completing(processes))  # before the judge, which reads complete checkpoints
        ladder = judge = None
        if recipe.selection and recipe.selection.ladder:
            ladder = Ladder(recipe.selection.rungs(self._prepared.steps), trainer, processes)
            trainer.add_callback(ladder)
        examination = self._prepared.examination
        if examination and recipe.judged_by:
            from adapterswap.experiments.training.judge import CheckpointJudge

            judge = CheckpointJudge(recipe.judged_by, examination, trainer, processes=processes, bar=self._bar)
            trainer.add_callback(judge)
        return ladder, judge

    def last_checkpoint(self, checkpoints: Checkpoints, *, resume: bool) -> Path | None:
        """The checkpoint to continue from, in all processes, after the folder of checkpoints has been prepared."""
        prepared, processes = self._prepared, self._processes
        checkpoint = None
        processes.wait()  # until all have checked the folder that one of them changes next
        if processes.main:
            checkpoint = checkpoints.prepare(
                prepared.recipe.resolved(),
                prepared.fingerprints,
                prepared.base.source.folder,
                resume=resume,
                processes=processes.count,
            )
        return processes.from_main(checkpoint)

    def train(self, checkpoint: Path | None, folder: Path) -> None:
        """Train, from a checkpoint or the beginning, with checkpoints in `folder`."""
        from adapterswap.experiments.training.checkpoints import explained

        recipe, trainer, judge = self._prepared.recipe, self.trainer, self._judge

        # Where there are checkpoints, SIGTERM ends the run with one.
        listening: AbstractContextManager[None] = nullcontext()
        if recipe.training.save_every_samples:
            trainer.add_callback(self._stopping)
            listening = self._stopping.listening()
        began = time.monotonic()
        try:
            with explained("a checkpoint", folder), listening, suppress(Enough):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._interrupted(folder)) from None
        if self._stopping.stopped is not None:
            stopped = RunError(
                f"Training was stopped by SIGTERM after step {self._stopping.stopped} of {self._prepared.steps}",
                "Pass `resume=True` to continue",
            )
            stopped.signal = signal.SIGTERM
            raise stopped

        self.seconds = time.monotonic() - began - trainer.seconds_evaluating
        is_measured = judge is not None
        if judge:
            self.seconds -= judge.seconds
        if recipe.stops_early:
            is_measured = bool(_losses(trainer.state.log_history, "eval_loss"))
        if self._prepared.data.validation and not is_measured:
            self._bar.begin("measuring the validation loss")
            trainer.evaluate()

    def _interrupted(self, folder: Path) -> str:
        """What Ctrl-C has ended, and how to go on from the last checkpoint in `folder`, if there is one."""
        from adapterswap.experiments.training.checkpoints import last_complete, step_of

        ended = f"Training was interrupted after step {self.trainer.state.global_step} of {self._prepared.steps}"
        checkpoint = last_complete(folder)
        if checkpoint is None:
            return f"{ended}, before its first checkpoint: nothing is kept."
        return f"{ended}. Pass `resume=True` to continue from step {step_of(checkpoint)}."

    def report(self, path: Path, checkpoint: Path | None) -> TrainReport:
        """The report of the run, which continued from `checkpoint` and will be written to `path`."""
        from adapterswap.experiments.training.checkpoints import step_of

        state = self.trainer.state
        return TrainReport(
            path=path,
            steps=state.global_step,
            resumed_from=step_of(checkpoint) if checkpoint else None,
            train_losses=_losses(state.log_history, "loss"),
            eval_losses=_losses(state.log_history, "eval_loss"),
            rows=self._prepared.data.rows,
            tokens=int(state.num_input_tokens_seen),
            seconds=self.seconds,
            trainable_parameters=self._prepared.targets.parameters,
            processes=self._processes.count,
            selection=self._judge.selection() if self._judge else None,
            ladder=tuple(self._ladder.kept) if self._ladder else (),
        )

    def kept(self) -> Iterator[int]:
        """The steps whose weights are kept too. Each one's are loaded into the trainer's model when it is yielded; at
        the end the model has those of the expert.
        """
        for keeper in (self._ladder, self._judge):
            if keeper is not None:
                yield from keeper.restored()


def _steps(recipe: TrainRecipe, parts: Sequence[int], processes: int) -> int:
    """The number of steps of the run. Checks that the schedule fits into them."""
    from adapterswap.experiments.training.report import choose_schedule, simultaneous_steps, total_steps

    if recipe.simultaneous:
        switch = recipe.simultaneous.steps_per_switch
        steps = simultaneous_steps(parts, recipe.training, steps_per_switch=switch, processes=processes)
    else:
        steps = total_steps(sum(parts), recipe.training, processes=processes)
    choose_schedule(recipe.training, steps)
    return steps


def _losses(history: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, loss) from the Trainer's log, the last entry of each step."""
    losses = {}
    for entry in history:
        if key in entry:
            losses[entry["step"]] = entry[key]
    return list(losses.items())


def _check_output(
    target: Path, inputs: Sequence[str | Path | None], *, resume: bool = False, overwrite: bool = False
) -> None:
    """Check before training, and for an estimate, that the output and its checkpoints may be written."""
    from adapterswap.experiments.training.checkpoints import Checkpoints
    from adapterswap.experiments.training.output import EXPERT

    EXPERT.check(target, overwrite=overwrite, inputs=inputs)
    Checkpoints(target).check(resume=resume, overwrite=overwrite, inputs=inputs)


def _recipe(recipe: TrainRecipe | str | Path, overrides: Iterable[str]) -> TrainRecipe:
    """The recipe, read from its file if it is one."""
    check_type(recipe, (TrainRecipe, str, Path), "recipe", "Pass a YAML file, the name of a shipped one, or a recipe")
    overrides = tuple(overrides)
    if not isinstance(recipe, TrainRecipe):
        return TrainRecipe.read(find_recipe(recipe, "train"), overrides)
    if overrides:
        raise ArgumentError(
            "`overrides` apply to a recipe's file, but `recipe` is not a file",
            "Change the recipe itself",
            parameter="overrides",
        )
    return recipe


def estimate(
    recipe: TrainRecipe,
    *,
    out_path: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    trust_task_code: bool = False,
) -> TrainEstimate:
    """Estimate parameters, steps, tokens and memory, and count rows. Reads the rows, but no weights.

    Args:
        recipe: what to train.
        out_path: the folder that `train` would write, which is checked; None for no folder.
        overwrite, resume, trust_task_code: see `train`.

    Raises:
        AdapterswapError: see `train`, for all that can be checked without training.
    """
    if out_path is not None:
        _check_output(expand(out_path), recipe.inputs, resume=resume, overwrite=overwrite)
    check_libraries(recipe)
    from adapterswap.experiments.training.data import row_lengths
    from adapterswap.experiments.training.report import (
        memory,
        padded_tokens,
        parts_of_batch,
        rows_a_step,
        steps_between,
    )
    from adapterswap.kit.processes import Processes

    with isolated(), scratch_folder("training") as scratch:
        options, processes = recipe.training, Processes.started()
        device, dtype = device_and_dtype(options)
        prepared = _prepare(
            recipe, scratch, processes, device, dtype, trust_task_code=trust_task_code, tell=lambda step: None
        )
        base, start, targets = prepared.base, prepared.start, prepared.targets
        data, steps = prepared.data, prepared.steps

        # How often a row is trained on, and what evaluating checkpoints takes.
        passes = options.epochs
        if options.max_steps is not None or recipe.simultaneous:
            passes = steps * rows_a_step(options, processes) / sum(prepared.parts)
        selection = None
        judged_by, examination = recipe.judged_by, prepared.examination
        if judged_by and examination:
            between = steps_between(options.save_every_samples, options, processes) * judged_by.every
            selection = {
                "checkpoints": math.ceil(steps / between),
                "documents": examination.documents,
                "requests": examination.requests,
            }

        base_parameters = sum(parameter.numel() for parameter in prepared.model.parameters())
        lengths = row_lengths(prepared.rows)
        parts = parts_of_batch(options, lengths, device, processes=processes)
        padded, real = padded_tokens(options, lengths, processes=processes, parts=parts)

        return TrainEstimate(
            base_model=str(base.source),
            start=start.describe(targets) if start else None,
            target_modules=targets.ends,
            trained_modules=len(targets.modules),
            trainable_parameters=targets.parameters,
            base_parameters=base_parameters,
            steps=steps,
            tokens=round(passes * data.rows.tokens),
            rows=data.rows,
            memory=memory(
                base.config.get_text_config(), recipe, targets.parameters, base_parameters, dtype=dtype,
                longest=min(data.rows.longest, options.max_length), device=device, parts=parts,
                labelled=data.rows.trained_tokens / max(1, data.rows.tokens),
            ),
            device=device,
            dtype=dtype,
            processes=processes,
            selection=selection,
            padding=1 - real / padded,
            bfloat16_speedup=bfloat16_speedup() if (device, dtype) == ("cpu", "float32") else None,
        )  # fmt: skip
