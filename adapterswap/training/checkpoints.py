"""Checkpoints of an unfinished run, in `<out_path>.checkpoints` beside the output, so that a run can be resumed.

They hold what the transformers Trainer saves (adapter, optimizer, schedule, generators) with a hash of each file and of
the run, and `run.json`, a fingerprint of recipe, rows, tasks and base: a run is only resumed as the same run, and from
a checkpoint of it that is as it was written. Removed when training is done, unless they are to be kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adapterswap.errors import ExpertError, RunError
from adapterswap.experts.identity import fingerprints, model_fingerprints
from adapterswap.files.folders import check_place, refuse_strangers, replacing, strangers, sync_folder, sync_one
from adapterswap.files.smallfiles import read_json, write_json

__all__ = ["Checkpoints", "seal"]

_SEAL = "fingerprints.json"  # in each checkpoint: written last, so one without it was not completed

_RUN = "run.json"
_BUILDING = "run.tmp"
_BESIDE = f"../{_RUN}"  # in a seal: the run that the checkpoint belongs to
_CHECKPOINT = re.compile(r"(tmp-)?checkpoint-\d+")
_WITHOUT_EFFECT = ("keep_checkpoints", "report_to")  # options of training that do not change its result


class Checkpoints:
    """The checkpoints that belong to the output `out_path`.

    Attributes:
        folder: where they are.
    """

    def __init__(self, out_path: Path) -> None:
        self.folder = out_path.with_name(out_path.name + ".checkpoints")

    def check(self, *, resume: bool = False, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
        """Check that no unfinished run is lost, and no file of others.

        Raises:
            RunError: there is an unfinished run, and neither `resume` nor `overwrite` is true.
            OutputError: the folder holds other files, or overlaps an input.
        """
        check_place(self.folder, inputs)
        if not resume:
            refuse_strangers(self.folder, self._strangers())
        if self._complete() and not (resume or overwrite):
            raise RunError(
                f"{self.folder} holds checkpoints of an unfinished run",
                "Pass `resume=True` to continue it, or `overwrite=True` to start again",
                parameter="resume",
            )

    def prepare(
        self, recipe: dict[str, Any], inputs: Mapping[str, Any], base: Path, *, resume: bool, processes: int = 1
    ) -> Path | None:
        """Make the folder ready; return the last checkpoint that is as it was written, to resume from, if there is one.

        Args:
            recipe: with all values.
            inputs: hashes of what else the run reads, by what it is: its rows, and so on.
            base: the folder of the base.
            resume: whether to look for one.
            processes: how many train together.

        Raises:
            RunError: the unfinished run has another recipe, other rows or tasks, another base or number of
                processes, or its run.json is gone; or each of its checkpoints was damaged.
        """
        run = _fingerprint(recipe | {"processes": processes, "base": model_fingerprints(base)}, inputs)
        note = self.folder / _RUN
        if not resume:
            self.remove()
        if not note.is_file():
            if self._complete():
                raise RunError(
                    f"{self.folder} holds checkpoints and no {_RUN}, so nothing says what they were trained on",
                    "Restore that file, or pass `overwrite=True` without `resume` to start again",
                    parameter="resume",
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(note, self.folder / _BUILDING) as building:
                write_json(building, run, sort_keys=True)
        else:
            before = read_json(note, "Pass `overwrite=True` without `resume` to start again", kind=RunError)
            if before != run:
                changed = sorted(key for key in run if before.get(key) != run[key])
                raise RunError(
                    f"{self.folder} holds checkpoints of another run: changed since then: {', '.join(changed)}",
                    "Undo the change, or pass `overwrite=True` without `resume` to start again",
                    parameter="resume",
                )
        complete = sorted(self._complete(), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
        damaged = {}
        for checkpoint in complete:
            if (file := _changed(checkpoint)) is None:
                return checkpoint
            damaged[checkpoint] = file
        if damaged:
            names = ", ".join(f"{path.name} ({name})" for path, name in damaged.items())
            raise RunError(
                f"no checkpoint in {self.folder} is as it was written: {names}",
                "Pass `overwrite=True` without `resume` to start again",
                parameter="resume",
            )
        return None

    @contextmanager
    def tidied(self, *, keep: bool = False) -> Iterator[None]:
        """Leave no folder behind without a complete checkpoint in it, whatever happens inside the block.

        Args:
            keep: leave that to another process.
        """
        try:
            yield
        finally:
            if not (keep or self._complete()):
                self.remove()

    def _complete(self) -> list[Path]:
        return [path.parent for path in self.folder.glob(f"checkpoint-*/{_SEAL}")]

    def remove(self) -> None:
        """Remove the checkpoints; a folder that holds other files stays, with them alone."""
        if not self.folder.is_dir():
            return
        with suppress(OSError):  # what cannot be removed stays
            for name in self._names():
                path = self.folder / name.removesuffix("/**")
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _strangers(self) -> list[str]:
        return strangers(self.folder, None, names=self._names()) if self.folder.is_dir() else []

    def _names(self) -> list[str]:
        """What training writes there, as `OutputKind.names` has it; nothing, if it never did."""
        if not (self.folder / _RUN).is_file():
            return [_BUILDING]
        folders = [path.name for path in self.folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
        return [
            "selection.json",
            "selection.tmp",
            "best/**",
            "runs/**",
            *(f"{name}/**" for name in folders),
            _BUILDING,
            _RUN,
        ]


def seal(checkpoint: Path) -> None:
    """Note what a checkpoint's files hold, once all of them are written, and force them to the disk.

    The checkpoint before it, which a machine that loses power would go on from, may go as soon as the next one comes.
    """
    sync_folder(checkpoint)
    write_json(checkpoint / _SEAL, _contents(checkpoint))
    sync_one(checkpoint / _SEAL)
    for folder in (checkpoint, checkpoint.parent):
        sync_one(folder)


def _changed(checkpoint: Path) -> str | None:
    """A file of a checkpoint that is not as it was written; None where all are."""
    try:
        written = read_json(checkpoint / _SEAL)
    except ExpertError:
        return _SEAL
    now = _contents(checkpoint)
    return next((name for name in sorted(written.keys() | now.keys()) if written.get(name) != now.get(name)), None)


def _contents(checkpoint: Path) -> dict[str, str]:
    """The fingerprints of a checkpoint's files, and of the run that it belongs to."""
    found = {name: value for name, value in fingerprints(checkpoint).items() if name != _SEAL}
    return {**found, _BESIDE: _hash(read_json(checkpoint.parent / _RUN))}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _fingerprint(recipe: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, str]:
    """Per key of the recipe a short hash; what does not change the result is left out."""
    parts = {key: value for key, value in recipe.items() if key != "out_path"}
    parts["training"] = {key: value for key, value in parts["training"].items() if key not in _WITHOUT_EFFECT}
    return {key: _hash(value) for key, value in {**parts, **inputs}.items()}
