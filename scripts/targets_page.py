"""Write the table of docs/adapters.md: what each target can hold, from `adapterswap.core.planning.targets`."""

from __future__ import annotations

from pathlib import Path

from adapterswap.core.planning.targets import LIMITS, Target

PAGE = Path(__file__).parent.parent / "docs" / "adapters.md"
MARKS = "<!-- written by python scripts/targets_page.py -->\n", "<!-- end -->\n"
COLUMNS = [target for target in Target if target not in Target.DIFF | Target.ANALYZE | Target.PLAN]


def page(text: str) -> str:
    """The page with its table; a cell is empty where the target holds the row's changes exactly."""
    before, _, rest = text.partition(MARKS[0])
    rows: dict[str, dict[Target, str]] = {}
    for limit in LIMITS:
        cells = rows.setdefault(limit.what, {})
        for column in COLUMNS:
            for target in limit.targets & (column | Target.PLAN):
                cells[column] = limit.cells.get(target, "no")
    table = [["", *(column.called for column in COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
    table += [[what, *(cells.get(column, "") for column in COLUMNS)] for what, cells in rows.items()]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    return f"{before}{MARKS[0]}\n{lines}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
