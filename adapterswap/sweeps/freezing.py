"""Pre-registration: write what a sweep will choose and compare before it runs, and check it afterwards.

`freeze` writes preregistration.json into the folder that the sweep will fill: everything that `prepare` knows (experts
with hashes, tasks, cells, documents to choose on), and the methods that a report will compare. Its hash can be
published before the run. `read_frozen` compares the file with the run. It protects against forgetting and drift. Only a
published hash proves that the file was not written afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.errors import ArgumentError, DataError, OutputError, RunError, did_you_mean
from adapterswap.files.folders import check_place, replacing
from adapterswap.files.sealing import SEAL, is_sealed, sealed
from adapterswap.files.smallfiles import exists, expand, read_json
from adapterswap.sweeps.preparing import PreparedSweep
from adapterswap.sweeps.results import CELLS, PREREGISTRATION, RUNGS, SWEEP

__all__ = ["PREREGISTRATION_FORMAT", "REFERENCES", "Preregistration", "default_reference", "freeze", "read_frozen"]

PREREGISTRATION_FORMAT = "adapterswap-preregistration/1"
REFERENCES = ("soup", "task expert", "math expert", "base")
_COMPARED = ("base_model", "experts", "num_layers", "tasks", "task_files", "settings", "cells")
_REMEDY = "Restore it, or delete it and report that the run was not pre-registered"


@dataclass(frozen=True)
class Preregistration:
    """A pre-registration, and how the run differs from it.

    Attributes:
        sha256: the hash of the pre-registration.
        reference, methods: the methods that a report was to compare; `methods` is None for all.
        differences: how the run and the comparison differ from it, in words; empty if they do not.
    """

    sha256: str
    reference: str
    methods: tuple[str, ...] | None
    differences: tuple[str, ...]


def default_reference(families: Sequence[str]) -> str:
    """The default reference: the first of `REFERENCES` among the families, otherwise the first family."""
    return next((family for family in REFERENCES if family in families), families[0])


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
        reference: the method that the others will be compared with; by default soup, as in a report.
        methods: the methods that will be ranked and tested; by default all.
        dry_run: check everything and write nothing.

    Returns:
        The file's content; `sha256` is its hash.

    Raises:
        ArgumentError: the recipe has no such method, or `methods` names fewer than two.
        OutputError: the folder contains other files or another pre-registration, or cannot be written.
        RunError: the folder contains a sweep that has already started.
    """
    families = list(dict.fromkeys(cell.family for cell in prepared.grid.cells))
    for parameter, names in (("reference", [reference] if reference is not None else []), ("methods", methods or [])):
        for name in names:
            if name not in families:
                remedy = did_you_mean(name, families, f"Use one of: {', '.join(families)}")
                raise ArgumentError(f"the recipe has no method {name!r}", remedy, parameter=parameter)
    if methods is not None and len(set(methods)) < 2:
        raise ArgumentError(
            f"`methods` names {len(set(methods))}, but a comparison needs two", "Name two or more",
            parameter="methods",
        )  # fmt: skip
    chosen = reference if reference is not None else default_reference(families)
    content = sealed(
        {
            "format": PREREGISTRATION_FORMAT, "adapterswap_version": __version__,
            "sweep": dict(prepared.described),
            "comparison": {"reference": chosen, "methods": None if methods is None else list(methods)},
            "selection": "for each pair by itself, the best configuration on the documents to choose on; of equals the "
            "default, then the first; reported on the other documents",
        }
    )  # fmt: skip
    folder = expand(out_path)
    check_place(folder, prepared.inputs)
    if any(exists(folder / name) for name in (SWEEP, CELLS, RUNGS)):
        raise RunError(
            f"{folder} contains a sweep that has already started, so it cannot be pre-registered",
            "Choose another path", parameter="out_path",
        )  # fmt: skip
    path = folder / PREREGISTRATION
    if exists(path):
        if _read(path) == content:
            return content
        raise OutputError(
            f"{path} already exists and contains another pre-registration", "Choose another path, or delete it",
            parameter="out_path",
        )  # fmt: skip
    if exists(folder) and any(folder.iterdir()):
        raise OutputError(f"{folder} already exists and is not empty", "Choose another path", parameter="out_path")
    if not dry_run:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, path.with_name(path.name + ".tmp")) as building:
                text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
                building.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise OutputError(
                f"{folder} cannot be written: {error.strerror}", "Choose another path", parameter="out_path"
            ) from None
    return content


def read_frozen(
    folder: Path,
    described: Mapping[str, Any],
    reference: str,
    methods: Sequence[str],
    units: Sequence[str] | None = None,
) -> Preregistration | None:  # fmt: skip
    """The pre-registration of a run, compared with the run; None if there is none.

    Args:
        folder: the run's folder.
        described: the content of its sweep.json.
        reference, methods: the methods that a report compares.
        units: the units that the report is restricted to; None for all.

    Raises:
        DataError: the file is damaged, or was changed after it was written.
    """
    path = folder / PREREGISTRATION
    if not exists(path):
        return None
    content = _read(path)
    registered, comparison = content["sweep"], content["comparison"]
    differences = [name for key in _COMPARED for name in _differing(key, registered.get(key), described.get(key))]
    if comparison["reference"] != reference:
        differences.append(f"methods are compared with {reference}, not with {comparison['reference']}")
    registered_methods = comparison["methods"]
    expected_methods = registered_methods or list(dict.fromkeys(cell["family"] for cell in registered["cells"]))
    if set(expected_methods) != set(methods):
        differences.append(f"the methods that are tested are {', '.join(methods)}, not {', '.join(expected_methods)}")
    if units is not None:
        differences.append(f"everything is computed over {', '.join(units)} only")
    return Preregistration(
        content[SEAL],
        comparison["reference"],
        None if registered_methods is None else tuple(registered_methods),
        tuple(differences),
    )


def _differing(key: str, before: Any, after: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        # Settings that come from the loaded model (its dtype) are unknown when `freeze` runs.
        names = before if key == "settings" else before.keys() | after.keys()
        return [f"{key}.{name} differs" for name in sorted(names) if before.get(name) != after.get(name)]
    if key == "cells" and isinstance(before, list) and isinstance(after, list):
        old, new = ({cell["cell"] for cell in cells} for cells in (before, after))
        lines = [f"registered compositions that are missing: {len(old - new)}"] * bool(old - new)
        return lines + [f"compositions that were not registered: {len(new - old)}"] * bool(new - old)
    return [] if before == after else [f"{key} differs"]


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path, _REMEDY)
    is_valid = content.get("format") == PREREGISTRATION_FORMAT and is_sealed(content)
    if not is_valid or not isinstance(content.get("sweep"), dict) or not isinstance(content.get("comparison"), dict):
        raise DataError(f"{path} is damaged, or was changed after it was written", _REMEDY, parameter="run")
    return content
