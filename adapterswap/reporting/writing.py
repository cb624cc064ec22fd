"""The files of a report: report.html, tables.tex, tables.csv, summary.json.

The same report gives the same bytes. `report` makes and writes one in a call.
"""

from __future__ import annotations

import json
from pathlib import Path

from adapterswap.errors import check_type
from adapterswap.files.folders import OutputKind, atomic_folder, check_target
from adapterswap.files.smallfiles import expand
from adapterswap.reporting.page import render_page
from adapterswap.reporting.reading import open_source
from adapterswap.reporting.report import REPORT_FORMAT, Report, make_report
from adapterswap.reporting.tables import csv_table, latex_tables

__all__ = ["REPORT", "REPORT_FILES", "default_out_path", "report", "write_files", "write_report"]

REPORT_FILES = ("report.html", "tables.csv", "tables.tex", "summary.json")
REPORT = OutputKind("summary.json", lambda record: REPORT_FILES if record.get("format") == REPORT_FORMAT else ())
"""What `report` writes."""


def report(
    run: str | Path,
    out_path: str | Path | None = None,
    *,
    reference: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> Report:
    """What a sweep or a lab run found, and its page, tables and JSON.

    Args:
        run: the folder that `sweep` or `adapterswap lab` wrote; a sweep need not be finished.
        out_path: a folder to write report.html, tables.tex, tables.csv and summary.json to; by default nothing is
            written.
        reference: the method that the others are compared with; by default soup.
        seed: of the bootstrap.
        overwrite: replace that folder, if it is a report.

    Returns:
        Everything that the report says, as data.

    Raises:
        ArgumentError: the run has no such method as `reference`.
        DataError: the run is damaged, or no cell is finished.
        DependencyError: the `report` extra is not installed.
        NotFoundError: the folder holds neither a sweep nor a lab run.
        OutputError: the output exists (without `overwrite`), holds other files, overlaps the run, or cannot be written.
    """
    check_type(run, (str, Path), "run", "Pass the folder that `adapterswap sweep` or `adapterswap lab` wrote")
    check_type(out_path, (str, Path, type(None)), "out_path", "Pass the path of the folder to write")
    folder = expand(run)
    source = open_source(folder)
    if out_path is not None:
        check_target(out_path, kind=REPORT, overwrite=overwrite, inputs=[folder])  # before the work
    made = make_report(source, reference=reference, seed=seed)
    if out_path is not None:
        write_report(made, out_path, overwrite=overwrite, run=folder)
    return made


def default_out_path(run: str | Path) -> Path:
    """Where a run's report goes if nobody says: beside it, with `-report` behind its name."""
    folder = expand(run)
    named = folder.resolve() if folder.name in ("", "..") else folder  # `.` has no name to put -report behind
    return named.with_name(f"{named.name}-report")


def write_report(report: Report, out_path: str | Path, *, overwrite: bool = False, run: Path | None = None) -> None:
    """Write a report's folder.

    Args:
        out_path: the folder to write.
        overwrite: replace it, if it is a report.
        run: the folder that the report was made from; the output may not overlap it.

    Raises:
        OutputError: see `atomic_folder`.
    """
    with atomic_folder(out_path, kind=REPORT, overwrite=overwrite, inputs=[run]) as folder:
        write_files(report, folder)


def write_files(report: Report, folder: Path) -> None:
    """Write a report's files into a folder that is there."""
    contents = {
        "report.html": render_page(report),
        "tables.csv": csv_table(report),
        "tables.tex": latex_tables(report),
        "summary.json": json.dumps(report.as_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    }
    for name, content in contents.items():
        # What models write may hold half of a character, which UTF-8 has no bytes for.
        (folder / name).write_bytes(content.encode("utf-8", errors="backslashreplace"))
