"""Helpers that write a report and read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapterswap.experiments.reporting import Report, make_report, open_source
from adapterswap.experiments.reporting.headline import MethodRow
from adapterswap.experiments.reporting.latex import csv_table, latex_table
from adapterswap.experiments.reporting.output import render_page

SW, EN, TE = "mgsm_native_cot_sw", "mgsm_native_cot_en", "mgsm_native_cot_te"


def row(report: Report, label: str) -> MethodRow:
    return next(row for row in report.targets[0].rows if row.label == label)


def reported(folder: Path, **content: Any) -> Report:
    return make_report(open_source(folder), **content)


def strict(report: Report) -> None:
    """Check that the page, the tables and the JSON exist and contain no NaN."""
    text = json.dumps(report.as_json(), allow_nan=False)
    for content in (text, render_page(report), csv_table(report), latex_table(report)):
        assert "nan" not in content.lower().replace("finance", "")
