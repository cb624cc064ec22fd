"""Checkpoints of an unfinished run, so that it can be resumed; and devices or disks that are full.

Each contains what the transformers Trainer saves (adapter, optimizer, schedule, generators), and a mark once it is
complete. `run.json` has fingerprints of recipe, rows, tasks and base, so you can only resume the same run. The folder
is removed when training ends, unless you keep the checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adapterswap.core.model.checkpoints import model_fingerprints
from adapterswap.kit.errors import OutputError, RunError, and_more
from adapterswap.kit.files.folders import OutputKind, replacing, sync
from adapterswap.kit.files.text import read_json, shown, write_json


@contextmanager
def explained(output: str, folder: Path) -> Iterator[None]:
    """Raise an error with a remedy if the device runs out of memory or `output` cannot be written to `folder`."""
    import torch
    from safetensors import SafetensorError

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"Out of memory on the device: {str(error).partition('.')[0]}",
            "Lower training.batch_size and raise gradient_accumulation, or set gradient_checkpointing: true",
            parameter="training.batch_size",
        ) from None
    except OSError as error:
        raise _unwritten(output, folder, error.strerror or str(error)) from None
    except (SafetensorError, RuntimeError) as error:
        # A full disk, as safetensors and torch's zip writer report it.
        signs = ("I/O error", "PytorchStreamWriter", "unexpected pos", "iostream error")
        if not any(sign in str(error) for sign in signs):
            raise
        raise _unwritten(output, folder, str(error).partition("\n")[0]) from None


def _unwritten(output: str, folder: Path, reason: str) -> OutputError:
    """The error for an output that could not be written."""
    return OutputError(
        f"{output} cannot be written to {folder}: {reason}",
        "Free some space, or choose another `out_path`; earlier checkpoints are kept for `resume=True`",
        parameter="out_path",
    )


_COMPLETE = "complete"  # an empty file in each checkpoint, written last

_RUN = "run.json"
_BUILDING = "run.tmp"
LADDER = "ladder"  # the folder of the adapters that `selection.ladder` keeps
_CHECKPOINT = re.compile(r"(tmp-)?checkpoint-\d+")
_MOST_CHANGES = 6  # that a message lists
_WITHOUT_EFFECT = ("keep_checkpoints", "report_to")  # options of training that do not change its result


class Checkpoints:
    """The checkpoints that belong to the output `out_path`.

    Attributes:
        folder: where they are.
    """

    def __init__(self, out_path: Path) -> None:
        self.folder = out_path.with_name(out_path.name + ".checkpoints")

    def check(self, *, resume: bool = False, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
        """Check that no unfinished run and no other file would be lost."""
        OutputKind.check_place(self.folder, inputs)
        if not resume and self.folder.is_dir():
            OutputKind(None, names=self._names).refuse_strangers(self.folder)
        if self._complete() and not (resume or overwrite):
            raise RunError(
                f"{self.folder} contains checkpoints of an unfinished run",
                "Pass `resume=True` to continue it, or `overwrite=True` to start again",
                parameter="resume",
            )

    def prepare(
        self, recipe: dict[str, Any], inputs: Mapping[str, Any], base: Path, *, resume: bool, processes: int = 1
    ) -> Path | None:
        """Prepare the folder, and return the last complete checkpoint to resume from, if there is one.

        Args:
            recipe: the recipe with all values.
            inputs: hashes of everything else that the run reads, by name: its rows, and so on.
            base: the folder of the base.
            resume: whether to look for a checkpoint.
            processes: how many processes train together.

        Raises:
            RunError: the unfinished run has another recipe, other rows or tasks, another base or another number of
                processes; or its run.json is missing.
        """
        # What the run depends on: settings as they are, and hashes of all that it reads.
        settings = {key: value for key, value in recipe.items() if key != "out_path"}
        settings["training"] = {key: value for key, value in recipe["training"].items() if key not in _WITHOUT_EFFECT}
        settings["processes"] = processes
        hashes = {"base": _hash(model_fingerprints(base))}
        for name, value in inputs.items():
            hashes[name] = _hash(value)
        run = {"settings": settings, "inputs": hashes}

        note = self.folder / _RUN
        if not resume:
            self.remove()
        if not note.is_file():  # a new run
            if self._complete():
                raise RunError(
                    f"{self.folder} contains checkpoints but no {_RUN}, so it is unknown what they were trained on",
                    "Restore that file, or pass `overwrite=True` without `resume` to start again",
                    parameter="resume",
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(note, self.folder / _BUILDING) as building:
                write_json(building, run, sort_keys=True)
        else:
            before = read_json(note, "Pass `overwrite=True` without `resume` to start again", kind=RunError)
            if before != run:
                raise RunError(
                    f"{self.folder} contains checkpoints of another run; changed since then: {_changes(before, run)}",
                    "Undo the change, or pass `overwrite=True` without `resume` to start again",
                    parameter="resume",
                )
        return last_complete(self.folder)

    @contextmanager
    def tidied(self, *, keep: bool = False) -> Iterator[None]:
        """When the block ends or fails, remove the folder if it has no complete checkpoint."""
        try:
            yield
        finally:
            if not (keep or self._complete()):
                self.remove()

    def _complete(self) -> list[Path]:
        return _complete_in(self.folder)

    def remove(self) -> None:
        """Remove the checkpoints. If the folder contains other files, they stay."""
        if not self.folder.is_dir():
            return
        with suppress(OSError):  # files that cannot be removed stay
            for name in self._names():
                path = self.folder / name.removesuffix("/**")
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _names(self) -> list[str]:
        """The paths that training wrote there, in the form of `OutputKind.names`."""
        if not (self.folder / _RUN).is_file():
            return [_BUILDING]
        names = ["selection.json", "selection.tmp", "best/**", f"{LADDER}/**", "runs/**"]
        for path in self.folder.iterdir():
            if _CHECKPOINT.fullmatch(path.name) and path.is_dir():
                names.append(f"{path.name}/**")
        return [*names, _BUILDING, _RUN]


def _complete_in(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob(f"checkpoint-*/{_COMPLETE}")]


def last_complete(folder: Path) -> Path | None:
    """The last complete checkpoint in a folder of checkpoints."""
    return max(_complete_in(folder), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def complete(checkpoint: Path) -> None:
    """Mark a checkpoint whose files are all written, and sync it, as the one before it is removed next."""
    sync(checkpoint, whole=True)
    (checkpoint / _COMPLETE).touch()
    for folder in (checkpoint, checkpoint.parent):
        sync(folder)


def link_weights(checkpoint: Path, folder: Path) -> None:
    """Fill `folder` with the weights of `checkpoint` (no optimizer), as hard links where possible."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for pattern in ("*.safetensors", "*.index.json", "*config.json"):
        for file in checkpoint.glob(pattern):
            try:
                os.link(file, folder / file.name)
            except OSError:  # a file system without hard links
                shutil.copy2(file, folder / file.name)


def _hash(value: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _changes(before: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """The keys that differ between two contents of run.json, settings with their old and new values."""
    old, new = _flat(before.get("settings", {})), _flat(run["settings"])
    changes = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            changes.append(f"{key}: {_shown(old, key)}, now {_shown(new, key)}")
    inputs = before.get("inputs", {})
    changes += [f"{name} (its content)" for name in run["inputs"] if inputs.get(name) != run["inputs"][name]]
    return and_more(changes, _MOST_CHANGES)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """The values in nested mappings and lists, by their paths: training.learning_rate, datasets.0.path."""
    if isinstance(value, Mapping) and value:
        items = list(value.items())
    elif isinstance(value, list) and value:
        items = list(enumerate(value))
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flat(item, f"{path}.{key}".removeprefix("."))
    return flat


def _shown(settings: Mapping[str, Any], key: str) -> str:
    """A setting's value, for messages."""
    if key not in settings:
        return "not set"
    return shown(settings[key])
