"""Print a table at the end of a run: how many cells are exact, refused for which reason, or failed."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    outcomes: Counter[str] = Counter()
    failures = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", []))
            if getattr(report, "when", None) != "call" or "outcome" not in properties:
                continue
            outcome = properties["outcome"]
            if outcome.startswith("failed"):
                failures.append(f"{report.nodeid.rpartition('[')[2].rstrip(']')}: {outcome}")
            outcomes["failed" if outcome.startswith("failed") else outcome] += 1
    if not outcomes:
        return
    terminalreporter.section("matrix")
    for failure in failures:
        terminalreporter.write_line(failure)
    for outcome, count in [*outcomes.most_common(), ("cells", outcomes.total())]:
        terminalreporter.write_line(f"{count:6} {outcome}")
