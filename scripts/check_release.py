"""Check that everything that names the version or its date agrees before it is published.

python scripts/check_release.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def mistakes(tag: str, root: Path = ROOT) -> list[str]:
    """What is not ready for a release from this tag."""

    def found(pattern: str, file: str) -> str | None:
        match = re.search(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else None

    version = found(r'^__version__ = "(.*)"', "adapterswap/__init__.py")
    wrong = []
    if tag != f"v{version}":
        wrong.append(f"the tag is {tag}, but the version is {version}: start this from the tag v{version}")
    if found(r"^version: (.*)$", "CITATION.cff") != version:
        wrong.append(f"CITATION.cff does not say {version}")
    if found(r"^## (\S+) \(\d{4}-\d\d-\d\d\)", "CHANGELOG.md") != version:
        wrong.append(f"CHANGELOG.md does not begin with {version} and a date")
    if found(r"^RELEASED = (\w+)", "scripts/status_page.py") != "True":
        wrong.append("RELEASED in scripts/status_page.py is not True: set it, and run `make pages`")
    return wrong


if __name__ == "__main__":
    problems = mistakes(*sys.argv[1:])
    sys.exit("\n".join(problems) or 0)
