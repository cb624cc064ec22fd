"""Write a sweep's folder, a cell at a time, so that it can be resumed; and pre-register what it will compare.

A cell's samples are renamed into place before its line is appended to cells.jsonl, so a cell with a complete line is
finished. An incomplete last line is removed, also in rungs.jsonl. Every step is synced to disk before the next, so this
also holds after a power loss. A lock keeps a second sweep out of the folder.

`freeze` writes preregistration.json into the folder that the sweep will fill: everything that `prepare` knows (experts
with hashes, tasks, cells, documents to choose on), and the methods that a report will compare. Its hash can be
published before the run. `Preregistration.read` compares the file with the run. It protects against forgetting and
drift. Only a published hash proves that the file was not written afterwards.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from adapterswap import __version__
from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.sweeps.results import (
    CELLS,
    PREREGISTRATION,
    PROMPTS,
    RUNGS,
    SAMPLES,
    SWEEP,
    CellResult,
    Findings,
    Run,
    RungResult,
    prompts_file,
    read_questions,
    samples_file,
)
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    DataError,
    OutputError,
    Problems,
    RunError,
    did_you_mean,
    visible,
)
from adapterswap.kit.files import locks
from adapterswap.kit.files.folders import OutputKind, replacing, sync
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.inside import files_inside
from adapterswap.kit.files.text import expand, read_json

if TYPE_CHECKING:
    from adapterswap.experiments.sweeps.prepared import PreparedSweep

_LOCK, _TMP = "sweep.lock", ".tmp"
_LOCKS = (_LOCK, locks.marker_of(Path(_LOCK)).name)
# Files that may exist before sweep.json: those of a killed sweep, and a pre-registration.
_BEFORE = {*_LOCKS, SWEEP + _TMP, PREREGISTRATION, PREREGISTRATION + _TMP}


def check_out_path(
    folder: str | Path,
    described: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    inputs: Iterable[str | Path | None] = (),
) -> Findings:
    """The results that `folder` contains; none if it does not exist. Changes nothing, and is called by dry runs too.

    Without `described` the folder is checked before anything is read, and its sweep is not compared.
    """
    folder = expand(folder)
    OutputKind.check_place(folder, inputs)
    if not os.path.exists(folder):
        return Findings()

    # A folder without a sweep may hold what a killed sweep or a registration left, and nothing else.
    if {path.name for path in folder.iterdir()} <= _BEFORE:
        files_inside(folder, ["**/*"], kind=DataError)  # before a file in it is locked or replaced
        return Findings()
    if not os.path.exists(folder / SWEEP):
        raise OutputError(
            f"{folder} already exists and is not the folder of a sweep", "Choose another path", parameter="out_path"
        )

    if overwrite:
        _output_kind(folder).refuse_strangers(folder)
        files_inside(folder, _LOCKS, kind=DataError)  # links of other names are removed
        return Findings()

    run = Run.read(folder)
    if run.results and not os.path.exists(folder / SAMPLES):
        raise RunError(
            f"{folder} has results but no {SAMPLES}/ beside them, so the sweep cannot be resumed",
            "Restore that folder, or choose another path",
            parameter="out_path",
        )
    if described is not None:
        _compare(run.described, described, folder)
    return Findings.of(run.results, run.rungs)


def _compare(stored: Mapping[str, Any], described: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume another sweep. Keys that `described` does not have yet are not compared.

    The recipe may be written differently if it means the same.
    """
    remedy = "Repeat the first sweep's settings, choose another path, or pass `overwrite=True`"
    problems = Problems(RunError)
    for key, value in described.items():
        earlier = stored.get(key)
        if key == "recipe" or value == earlier:
            continue

        changed = [key]
        if key in ("settings", "versions", "task_files") and isinstance(earlier, dict):
            # What only a loaded model tells is in the folder alone. A recipe without an engine has transformers.
            names = value.keys() | earlier.keys()
            if key != "task_files":
                names = value.keys() | (earlier.keys() & Settings.WHERE_SET)
            changed = [f"{key}.{name}" for name in names if value.get(name) != earlier.get(name)]
        for name in sorted(changed):
            problems.add(f"{folder} holds another sweep, begun with other {name}", remedy, parameter="out_path")
    problems.raise_if_any()


@contextmanager
def recording(
    folder: str | Path,
    described: Mapping[str, Any],
    *,
    overwrite: bool = False,
    inputs: Iterable[str | Path | None] = (),
) -> Iterator[Recording]:
    """Lock the folder of a sweep, and read the results in it.

    Args:
        folder: created if it does not exist.
        described: the sweep to run, which is compared with the one in the folder.
        overwrite: remove the sweep in the folder.
        inputs: paths that are read; the output may not overlap them.
    """
    folder, inputs = expand(folder), tuple(inputs)
    check_out_path(folder, described, overwrite=overwrite, inputs=inputs)
    with ExitStack() as stack:
        with _explained(folder):
            stack.enter_context(_locked_folder(folder))
            findings = check_out_path(
                folder, described, overwrite=overwrite, inputs=inputs
            )  # again, now that it is locked
            if overwrite:
                _clear(folder)
            _clean_up(folder)
        yield Recording(folder, findings)


class Recording:
    """A sweep's folder that is being written.

    Attributes:
        findings: the results in it.
    """

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.findings = findings
        self._folder = folder
        self._checked: set[str] = set()

    def begin(self, described: Mapping[str, Any]) -> None:
        """Write sweep.json, or compare `described` with it if it exists."""
        if os.path.exists(self._folder / SWEEP):
            remedy = "Restore it, or start again with `overwrite=True`"
            _compare(read_json(self._folder / SWEEP, remedy, kind=DataError), described, self._folder)
            return
        text = visible(json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False))
        self._place(self._folder / SWEEP, text + "\n")

    def add(self, result: CellResult, samples: Iterable[Mapping[str, Any]]) -> None:
        """Record a finished cell: its samples, then its line."""
        self._place(self._samples(result), "".join(map(_line, samples)))
        self._finish(result)

    def add_copy(self, result: CellResult, like: CellResult) -> None:
        """Record a cell that equals a finished one, with a copy of its samples."""
        self._place(self._samples(result), self._samples(like).read_text(encoding="utf-8"))
        self._finish(result)

    def add_rung(self, result: RungResult) -> None:
        """Record the scores of a cell on a rung."""
        self._append(RUNGS, result.as_json())
        self.findings.rungs[result.cell, result.documents] = result

    def keep_questions(self, task: str, questions: Sequence[Mapping[str, Any]]) -> None:
        """Write a task's prompts and targets, or compare them with those in the folder. Happens once in a process.

        Args:
            task: its name.
            questions: doc_id, prompt and target of each document.
        """
        if task in self._checked:
            return

        path = prompts_file(self._folder, task)
        text = "".join(map(_line, questions))
        if not os.path.exists(path):
            self._place(path, text)
        elif path.read_bytes() != text.encode("utf-8", "backslashreplace"):
            prompts = [json.loads(_line(row))["prompt"] for row in questions]
            before = [row.get("prompt") for row in read_questions(self._folder, task)]
            part = "prompts" if before != prompts else "targets"
            raise RunError(
                f"{task} has other {part} than those that {self._folder} was begun with",
                "Restore the task's files, choose another path, or pass `overwrite=True`",
                parameter="out_path",
            )
        self._checked.add(task)

    def _samples(self, result: CellResult) -> Path:
        return samples_file(self._folder, result.cell)

    def _finish(self, result: CellResult) -> None:
        self._append(CELLS, result.as_json())
        self.findings.results[result.cell.cell] = result

    def _append(self, name: str, content: Mapping[str, Any]) -> None:
        """Append a line to a file so that it is complete or absent."""
        path = self._folder / name
        line = _line(content).encode("utf-8", "backslashreplace")
        with _explained(self._folder):
            is_new = not os.path.exists(path)
            with path.open("ab", buffering=0) as file:
                before = file.tell()
                try:
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                    sync(path)
                except BaseException:
                    file.truncate(before)
                    raise
            if is_new:
                sync(self._folder)

    def _place(self, path: Path, text: str) -> None:
        """Write a file so that it is complete or absent."""
        with _explained(self._folder):
            if not os.path.exists(path.parent):
                path.parent.mkdir()
                sync(path.parent.parent)
            with replacing(path, path.with_name(path.name + _TMP)) as building:
                building.write_text(text, encoding="utf-8", errors="backslashreplace")


def _line(content: Mapping[str, Any]) -> str:
    return visible(json.dumps(content, ensure_ascii=False, allow_nan=False, default=str)) + "\n"


def _output_kind(folder: Path) -> OutputKind:
    """The files that a sweep writes into this folder."""
    prompts = ["*.jsonl"]
    with suppress(AdapterswapError, TypeError, AttributeError):
        tasks = read_json(folder / SWEEP).get("tasks", {})
        prompts = [prompts_file(folder, name).name for name in tasks]

    # Files that are written under another name first, and those to which lines are appended
    cell = "[0-9a-f]" * 12
    replaced = [f"{SAMPLES}/{cell}.jsonl", *(f"{PROMPTS}/{name}" for name in prompts), SWEEP, PREREGISTRATION]
    unfinished = [file + _TMP for file in replaced]
    return OutputKind(None, names=lambda: [*_LOCKS, CELLS, RUNGS, *replaced, *unfinished])


def _clean_up(folder: Path) -> None:
    """Clean up after a killed sweep: cut off incomplete lines, and remove unfinished files."""
    foreign = _output_kind(folder).strangers(folder)
    for place in (folder, folder / SAMPLES, folder / PROMPTS):
        for leftover in place.glob(f"*{_TMP}"):
            if leftover.relative_to(folder).as_posix() not in foreign:
                leftover.unlink()

    for path in (folder / CELLS, folder / RUNGS):
        if os.path.exists(path):
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _clear(folder: Path) -> None:
    """Remove a sweep. sweep.json, which identifies it, is removed last. A pre-registration stays."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == SWEEP):
        if path.name in (*_LOCKS, PREREGISTRATION):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Create the folder if necessary, and lock it."""
    is_new = not os.path.exists(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locks.locked(folder / _LOCK, locks.being_written(folder, "sweep")):
            yield
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # succeeds only if nothing was written


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system into an OutputError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise OutputError(
            f"{folder} cannot be written: {reason}",
            "Correct that and run the same command again: what is finished stays",
            parameter="out_path",
        ) from error


PREREGISTRATION_FORMAT = "adapterswap-preregistration/1"
_COMPARED = ("base_model", "experts", "num_layers", "tasks", "task_files", "settings", "cells")
_REMEDY = "Restore it, or delete it and report that the run was not pre-registered"


@dataclass(frozen=True)
class Preregistration:
    """A pre-registration, and how the run differs from it.

    Attributes:
        sha256: the hash of preregistration.json.
        reference, methods: the methods that a report was to compare; `methods` is None for all.
        differences: how the run and the comparison differ from it, in words; empty if they do not.
    """

    REFERENCES: ClassVar[tuple[str, ...]] = ("task expert", "math expert", "soup", "base")
    """The methods that others are compared with, the first that there is."""

    sha256: str
    reference: str
    methods: tuple[str, ...] | None
    differences: tuple[str, ...]

    @staticmethod
    def read(
        folder: Path,
        described: Mapping[str, Any],
        reference: str,
        methods: Sequence[str],
        units: Sequence[str] | None = None,
    ) -> Preregistration | None:
        """The pre-registration of a run, compared with the run; None if there is none.

        Args:
            folder: the run's folder.
            described: the content of its sweep.json.
            reference, methods: the methods that a report compares.
            units: the units that the report is restricted to; None for all.
        """
        path = folder / PREREGISTRATION
        if not os.path.exists(path):
            return None

        # What the sweep is
        content = _read(path)
        registered, comparison = content["sweep"], content["comparison"]
        differences: list[str] = []
        for key in _COMPARED:
            differences += _differing(key, registered.get(key), described.get(key))

        # What a report compares
        if comparison["reference"] != reference:
            differences.append(f"methods are compared with {reference}, not with {comparison['reference']}")
        registered_methods = comparison["methods"]
        expected_methods = registered_methods
        if not registered_methods:
            expected_methods = list(dict.fromkeys(cell["family"] for cell in registered["cells"]))
        if set(expected_methods) != set(methods):
            differences.append(
                f"the methods that are tested are {', '.join(methods)}, not {', '.join(expected_methods)}"
            )
        if units is not None:
            differences.append(f"everything is computed over {', '.join(units)} only")
        return Preregistration(
            sha256_of(path),
            comparison["reference"],
            None if registered_methods is None else tuple(registered_methods),
            tuple(differences),
        )

    @classmethod
    def default_reference(cls, families: Sequence[str]) -> str:
        """The first of `REFERENCES` among the families that are tested, otherwise the first of them."""
        for family in cls.REFERENCES:
            if family in families:
                return family
        return families[0]

    @staticmethod
    def freeze(
        prepared: PreparedSweep,
        out_path: str | Path,
        *,
        reference: str | None = None,
        methods: Sequence[str] | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Write what a sweep will choose and compare into the folder that it will fill. Evaluates nothing.

        Args:
            prepared: the sweep, from `prepare`.
            out_path: the folder of the sweep.
            reference: the method that the others will be compared with; by default as in a report.
            methods: the methods that will be ranked and tested; by default all.
            dry_run: check everything and write nothing.

        Returns:
            The file's content, and its hash as `sha256`.
        """
        families = list(dict.fromkeys(cell.family for cell in prepared.grid.cells))
        requested = [("methods", name) for name in methods or []]
        if reference is not None:
            requested.insert(0, ("reference", reference))
        for parameter, name in requested:
            if name not in families:
                remedy = did_you_mean(name, families, f"Use one of: {', '.join(families)}")
                raise ArgumentError(f"The recipe has no method {name!r}", remedy, parameter=parameter)
        if methods is not None and len(set(methods)) < 2:
            raise ArgumentError(
                f"`methods` names {len(set(methods))}, but a comparison needs two",
                "Name two or more",
                parameter="methods",
            )

        if reference is None:
            tested = [family for family in families if methods is None or family in methods]
            reference = Preregistration.default_reference(tested)
        content = {
            "format": PREREGISTRATION_FORMAT,
            "adapterswap_version": __version__,
            "sweep": dict(prepared.described),
            "comparison": {"reference": reference, "methods": None if methods is None else list(methods)},
            "selection": "for each pair by itself, the best configuration on the documents to choose on; of equals the "
            "default, then the first; reported on the other documents",
        }
        text = visible(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"
        raw = text.encode("utf-8", "backslashreplace")
        registered = {**content, "sha256": hashlib.sha256(raw).hexdigest()}

        # Only an empty folder, or one with the same pre-registration, may be written
        folder = expand(out_path)
        OutputKind.check_place(folder, prepared.inputs)
        if any(os.path.exists(folder / name) for name in (SWEEP, CELLS, RUNGS)):
            raise RunError(
                f"{folder} contains a sweep that has already started, so it cannot be pre-registered",
                "Choose another path",
                parameter="out_path",
            )
        path = folder / PREREGISTRATION
        if os.path.exists(path):
            if sha256_of(path) == registered["sha256"]:
                return registered
            raise OutputError(
                f"{path} already exists and contains another pre-registration",
                "Choose another path, or delete it",
                parameter="out_path",
            )
        if os.path.exists(folder) and any(folder.iterdir()):
            raise OutputError(f"{folder} already exists and is not empty", "Choose another path", parameter="out_path")
        if dry_run:
            return registered

        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, path.with_name(path.name + ".tmp")) as building:
                building.write_bytes(raw)
        except OSError as error:
            raise OutputError(
                f"{folder} cannot be written: {error.strerror}", "Choose another path", parameter="out_path"
            ) from None
        return registered


def _differing(key: str, before: Any, after: Any) -> list[str]:
    """How a part of sweep.json differs from what was registered, in sentences."""
    if before == after:
        return []

    if isinstance(before, dict) and isinstance(after, dict):
        # Settings that come from the loaded model (its dtype) are unknown when `freeze` runs
        names = set(before)
        if key != "settings":
            names |= after.keys()
        return [f"{key}.{name} differs" for name in sorted(names) if before.get(name) != after.get(name)]

    if key == "cells" and isinstance(before, list) and isinstance(after, list):
        old = {cell["cell"] for cell in before}
        new = {cell["cell"] for cell in after}
        lines = []
        if old - new:
            lines.append(f"registered compositions that are missing: {len(old - new)}")
        if new - old:
            lines.append(f"compositions that were not registered: {len(new - old)}")
        return lines
    return [f"{key} differs"]


def _read(path: Path) -> dict[str, Any]:
    """A registration, from its file."""
    content = read_json(path, _REMEDY, kind=DataError)
    is_valid = content.get("format") == PREREGISTRATION_FORMAT
    if not is_valid or not isinstance(content.get("sweep"), dict) or not isinstance(content.get("comparison"), dict):
        raise DataError(f"{path} is damaged, or of another version of adapterswap", _REMEDY, parameter="run")
    return content
