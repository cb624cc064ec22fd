"""Train an expert from a recipe, or estimate what that would take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.files.folders import atomic_folder, check_target
from adapterswap.training.recipe import TrainRecipe
from adapterswap.training.report import TrainEstimate, TrainReport

__all__ = ["estimate", "train"]


def train(
    recipe: TrainRecipe,
    *,
    out_path: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> TrainReport:
    """Train the expert that `recipe` describes, and write it as a PEFT adapter folder.

    The folder appears when it is complete. On the same machine and with the same versions, the same recipe gives the
    same bytes on CPU, also when the run was interrupted and resumed.

    Args:
        recipe: see `read_train_recipe`, or make a `TrainRecipe` in Python.
        out_path: the folder to write; the recipe's own by default.
        overwrite: replace it, and checkpoints of an unfinished run.
        resume: go on from the last checkpoint of an unfinished run; without one, start at the beginning.
        progress: show a bar on stderr.

    Raises:
        AdapterswapError: the output exists; the base, its tokenizer or a dataset cannot be had or does not fit the
            recipe (unknown columns, modules or layers; no rows left); a resumed run is another one; the loss is no
            number; the `train` extra is not installed.
    """
    target = _target(recipe, out_path)
    _require_libraries()
    from adapterswap.bases import load_weights
    from adapterswap.training.base import choose_device, empty_model, find_targets, open_trainable
    from adapterswap.training.checkpoints import Checkpoints
    from adapterswap.training.data import load_data, packed
    from adapterswap.training.isolation import isolated
    from adapterswap.training.output import write_expert
    from adapterswap.training.progress import Bar
    from adapterswap.training.schedule import choose_schedule, total_steps

    checkpoints = Checkpoints(target)
    scratch_folder = tempfile.TemporaryDirectory(prefix="adapterswap-")
    with isolated(), Bar(shown=progress) as bar, scratch_folder as scratch, checkpoints.tidied():
        from adapterswap.training.trainer import build_trainer

        options = recipe.training
        bar.phase("opening the base")
        base = open_trainable(recipe.base_model)
        check_target(target, overwrite=overwrite, inputs=[base.source.folder])
        checkpoints.check(resume=resume, overwrite=overwrite)
        device, dtype = choose_device(options)
        # On modules without weights, so that a wrong name is told before rows and weights are read.
        targets = find_targets(empty_model(base), recipe.adapter, base.config)
        bar.phase("reading rows")
        data = load_data(recipe, base)
        rows = packed(data.train, options.max_length) if options.packing else data.train.dataset()
        steps = total_steps(len(rows), options)
        choose_schedule(options, steps)
        bar.phase("loading the base")
        trainer = build_trainer(
            recipe, base, load_weights(base, dtype=dtype), targets, rows,
            data.validation.dataset() if data.validation else None,
            steps=steps, device=device, dtype=dtype, bar=bar,
            checkpoints=checkpoints.folder if options.save_every_samples else Path(scratch),
        )  # fmt: skip
        start = None
        if options.save_every_samples:
            start = checkpoints.prepare(recipe.resolved(), data.rows.sha256, resume=resume)
        began = time.monotonic()
        with _told(checkpoints.folder):
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        seconds = time.monotonic() - began
        if data.validation:
            bar.phase("measuring the validation loss")
            trainer.evaluate()
        report = TrainReport(
            path=target,
            steps=trainer.state.global_step,
            resumed_from=int(start.name.rpartition("-")[2]) if start else None,
            train_losses=_losses(trainer.state.log_history, "loss"),
            eval_losses=_losses(trainer.state.log_history, "eval_loss"),
            rows=data.rows,
            tokens=int(trainer.state.num_input_tokens_seen),
            seconds=seconds,
            trainable_parameters=targets.parameters,
        )
        bar.phase("writing")
        with atomic_folder(target, overwrite=overwrite, inputs=[base.source.folder]) as folder:
            write_expert(folder, trainer.model, recipe, base, targets, report)
        if not options.keep_checkpoints:
            checkpoints.remove()
    return report


@contextmanager
def _told(checkpoints: Path) -> Iterator[None]:
    """What machines run out of, as our errors."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise AdapterswapError(
            f"the device ran out of memory: {str(error).partition('.')[0]}",
            "Lower training.batch_size and raise gradient_accumulation, or set gradient_checkpointing: true",
        ) from None
    except OSError as error:
        raise AdapterswapError(
            f"a checkpoint cannot be written to {checkpoints}: {error.strerror or error}",
            "Free some space, or choose another --out-path; earlier checkpoints are kept for --resume",
        ) from None


def _losses(history: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """[step, loss] of the Trainer's log, one entry to a step (the last one told)."""
    return list({entry["step"]: (entry["step"], entry[key]) for entry in history if key in entry}.values())


def _target(recipe: TrainRecipe, out_path: str | Path | None) -> Path:
    chosen = out_path if out_path is not None else recipe.out_path
    if chosen is None:
        raise AdapterswapError("there is no output folder", "Give --out-path, or `out_path:` in the recipe")
    return Path(chosen)


def _require_libraries() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("datasets", "trl") if find_spec(name) is None]:
        raise AdapterswapError(
            f"training needs {' and '.join(missing)}, which is not installed", "pip install 'adapterswap[train]'"
        )


def estimate(recipe: TrainRecipe) -> TrainEstimate:
    """What `train` would do: parameters, steps, tokens, rows kept and dropped, memory. Reads the rows, but no weights.

    Raises:
        AdapterswapError: as `train`, as far as it can be known without training.
    """
    _require_libraries()
    from adapterswap.training.base import choose_device, empty_model, find_targets, open_trainable
    from adapterswap.training.data import load_data, packed
    from adapterswap.training.isolation import isolated
    from adapterswap.training.memory import memory
    from adapterswap.training.schedule import choose_schedule, total_steps

    with isolated():
        options = recipe.training
        base = open_trainable(recipe.base_model)
        device, dtype = choose_device(options)
        model = empty_model(base)
        targets = find_targets(model, recipe.adapter, base.config)
        data = load_data(recipe, base)
        sequences = len(packed(data.train, options.max_length)) if options.packing else len(data.train)
        steps = total_steps(sequences, options)
        choose_schedule(options, steps)
        epochs = options.epochs
        if options.max_steps is not None:
            epochs = steps * options.batch_size * options.gradient_accumulation / sequences
        base_parameters = sum(parameter.numel() for parameter in model.parameters())
        return TrainEstimate(
            base_model=str(base.source),
            target_modules=targets.names,
            adapted_modules=targets.count,
            trainable_parameters=targets.parameters,
            base_parameters=base_parameters,
            steps=steps,
            tokens=round(epochs * data.rows.tokens),
            rows=data.rows,
            memory=memory(
                base.config.get_text_config(), options, targets.parameters, base_parameters, dtype=dtype,
                longest=min(data.rows.longest, options.max_length),
            ),
            device=device,
            dtype=dtype,
        )  # fmt: skip
