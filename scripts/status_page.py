"""Write what was measured (docs/status.json) and how to install (one setting) into README.md and the other pages.

Each entry of the file has `what`, `number`, `device`, `date` and the `revision` that was measured. Change the file, and
run this script; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
STATUS = ROOT / "docs" / "status.json"
LOG = ROOT / "docs" / "log.md"  # the developers' record of what was so on a day
PAGES = (
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != LOG),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("examples/notebooks/*.ipynb")),
)
RELEASED = False  # True on the day on which `pip install adapterswap` gives this version

_BLOCK = re.compile(r"(<!-- (?P<name>status|install|install-lab) -->\n).*?(<!-- end -->)", flags=re.DOTALL)

# Elsewhere on a page. In an installed environment, what an error recommends adds an extra without asking for a release.
_LINE = re.compile(r"(?<!Run `)(pip (?:install|wheel) (?:jupyterlab )?)'(?:\.|adapterswap)\[([\w,]+)\]'")

_INSTALL = [
    ("", "compose, slice, inspect, diff, verify, analyze, suggest: 180 MB, without torch"),
    ("models", "and compose live, merge, extract, convert other kinds: torch, transformers, PEFT"),
    ("all", "and train (TRL), evaluate and sweep (lm-evaluation-harness), report, draw"),
]


def _command(extra: str, *, released: bool) -> str:
    """How to install with an extra: from PyPI or, before the release, in a checkout."""
    source = "adapterswap" if released else "."
    return f"pip install '{source}[{extra}]'" if extra else f"pip install {source}"


def install(*, released: bool) -> str:
    """The commands that install each size."""
    commands = [(_command(extra, released=released), why) for extra, why in _INSTALL]
    width = max(len(command) for command, _ in commands)
    lines = "".join(f"{command:<{width}}  # {why}\n" for command, why in commands)
    where = "" if released else "There is no release on PyPI yet. In a checkout:\n\n"
    return f"{where}```bash\n{lines}```\n"


def install_lab(*, released: bool) -> str:
    """The command that installs what the lab needs."""
    return f"```bash\n{_command('lab', released=released)}\n```\n"


def status() -> str:
    """The table of what was measured."""
    rows = json.loads(STATUS.read_text(encoding="utf-8"))
    lines = [
        f"| {row['what']} | {row['number']} | {row['device']} | {row['date']} | {row['revision']} |" for row in rows
    ]
    return "\n".join(["| what | measured | on | when | revision |", "|---|---|---|---|---|", *lines, ""])


def page(text: str, *, released: bool = RELEASED) -> str:
    """A page with its generated blocks, and its other commands that install adapterswap."""
    blocks = {"status": status(), "install": install(released=released), "install-lab": install_lab(released=released)}
    text = _BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match['name']]}\n{match[3]}", text)
    return _LINE.sub(lambda match: f"{match[1]}'{'adapterswap' if released else '.'}[{match[2]}]'", text)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
