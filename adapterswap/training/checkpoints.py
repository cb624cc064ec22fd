"""Checkpoints of an unfinished run, in `<out_path>.checkpoints` beside the output, so that `--resume` can go on.

They hold what the transformers Trainer saves (adapter, optimizer, schedule, generators) and `run.json`, a fingerprint
of recipe and rows: a run is only resumed as the same run. Removed when training is done, unless they are to be kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError

__all__ = ["Checkpoints"]

_WITHOUT_EFFECT = ("keep_checkpoints", "report_to")  # options of training that do not change its result


class Checkpoints:
    """The checkpoints that belong to the output `out_path`.

    Attributes:
        folder: where they are.
    """

    def __init__(self, out_path: Path) -> None:
        self.folder = out_path.with_name(out_path.name + ".checkpoints")

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse to trample on an unfinished run.

        Raises:
            AdapterswapError: there is one, and neither `resume` nor `overwrite` is asked for.
        """
        if self._complete() and not (resume or overwrite):
            raise AdapterswapError(
                f"{self.folder} holds checkpoints of an unfinished run",
                "Pass `resume=True` to continue it, or `overwrite=True` to start again",
            )

    def prepare(self, recipe: dict[str, Any], rows_sha256: str, *, resume: bool, processes: int = 1) -> Path | None:
        """Make the folder ready; return the checkpoint to resume from, if there is a complete one.

        Raises:
            AdapterswapError: to be resumed is a run of another recipe or rows, or on another number of processes.
        """
        run = _fingerprint(recipe | {"processes": processes}, rows_sha256)
        note = self.folder / "run.json"
        if not resume:
            shutil.rmtree(self.folder, ignore_errors=True)
        if note.is_file():
            before = json.loads(note.read_text(encoding="utf-8"))
            if before != run:
                changed = sorted(key for key in run if before.get(key) != run[key])
                raise AdapterswapError(
                    f"{self.folder} holds checkpoints of another run: changed since then: {', '.join(changed)}",
                    "Undo the change, or pass `overwrite=True` without `resume` to start again",
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(run, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return max(self._complete(), key=lambda path: int(path.name.rpartition("-")[2]), default=None)

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
        """The Trainer writes trainer_state.json last: without it a checkpoint was not completed."""
        return [path.parent for path in self.folder.glob("checkpoint-*/trainer_state.json")]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _fingerprint(recipe: dict[str, Any], rows_sha256: str) -> dict[str, str]:
    """Per key of the recipe a short hash; what does not change the result is left out."""
    parts = {key: value for key, value in recipe.items() if key != "out_path"}
    parts["training"] = {key: value for key, value in parts["training"].items() if key not in _WITHOUT_EFFECT}
    parts["rows"] = rows_sha256
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16] for key, value in parts.items()
    }
