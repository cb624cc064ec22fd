"""Statistics over a sweep or a lab run, and the report that shows them.

`open_source` reads a run's folder, `make_report` computes the report, and `write_report` writes it. Importing this
package imports neither scipy nor jinja2.
"""

from __future__ import annotations

from adapterswap.experiments.reporting.output import write_report
from adapterswap.experiments.reporting.report import Report, make_report
from adapterswap.experiments.reporting.source import ReportSource, open_source

__all__ = ["Report", "ReportSource", "make_report", "open_source", "write_report"]
