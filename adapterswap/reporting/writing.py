"""The files of a report: report.html, tables.tex, tables.csv, summary.json.

The same report gives the same bytes. Knows nothing of how a report is made.
"""

from __future__ import annotations

import json
from pathlib import Path

from adapterswap.files.folders import OutputKind, atomic_folder
from adapterswap.reporting.page import render_page
from adapterswap.reporting.report import REPORT_FORMAT, Report
from adapterswap.reporting.tables import csv_table, latex_tables

__all__ = ["REPORT", "REPORT_FILES", "write_files", "write_report"]

REPORT_FILES = ("report.html", "tables.csv", "tables.tex", "summary.json")
REPORT = OutputKind("summary.json", lambda record: REPORT_FILES if record.get("format") == REPORT_FORMAT else ())
"""What `report` writes."""


def write_report(report: Report, out_path: str | Path, *, overwrite: bool = False, run: Path | None = None) -> None:
    """Write a report's folder.

    Args:
        out_path: the folder to write.
        overwrite: replace it, if it is a report.
        run: the folder that the report was made from; the output may not overlap it.

    Raises:
        AdapterswapError: see `atomic_folder`.
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
