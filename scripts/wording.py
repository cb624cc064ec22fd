"""Report wording that reads as translated, with what to write instead: part of `make lint`.

    python scripts/wording.py            # every tracked .py and .md file
    python scripts/wording.py FILE …     # these files

A line that needs such a word (a quotation, data) says `wording: ok` in a comment. docs/log.md and CHANGELOG.md quote
what the program once said, so they are left out. A page can be free of all of this and still read badly.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = {"scripts/wording.py", "tests/test_wording.py", "docs/log.md", "CHANGELOG.md"}
ALLOWED = "wording: ok"

TICS: dict[str, str] = {
    r"\b(is|are|was|were|been|be) told\b": "is reported, is printed; or say who does it: `the command prints`",
    r"\btold (of|once|together|apart|by)\b": "reported, printed once, reported together, distinguished",
    r"\b(to be had|can be had|be had from)\b": "available, installed, downloaded",
    r"\b(gone|go|goes|going) on with\b": "continue, resume",
    r"\bunasked\b": "without being asked; for files: `already exists. Choose another path or pass --overwrite`",
    r"\bdo(es)? not suffice\b|\bsuffices\b": "is enough, is not enough; `Out of memory`",
    r"(?<!there )\b(is|are) no (file|folder|name|regex|number|list|adapter|text|row|recipe|plan|base)\b": "is not a …",
    r"\bstands? (beside|under|above|in the)\b": "is next to, is in, is listed under",
    r"\bwhoever\b": "name them: the caller, the user, the reader; or `if you`",
    r"\bmend(s|ed|ing)?\b": "fix, remedy, correct",
    r"\bmay be (asked|told)\b(?! for)": "can be requested, can be set",
    r"\bby itself alone\b|\bruled out by itself\b": "separately, on its own",
    r"\blies? (beside|in the folder)\b": "is next to, is in",
}
_PATTERNS = {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in TICS.items()}


def mistakes(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the findings in a text: line number, words, and what to write instead."""
    for number, line in enumerate(text.splitlines(), start=1):
        if ALLOWED in line:
            continue
        for pattern, instead in _PATTERNS.items():
            for match in pattern.finditer(line):
                yield number, match[0], instead


def tracked() -> list[Path]:
    """The tracked .py and .md files that are checked."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if name not in SKIPPED and "/data/" not in name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def main(files: Iterable[Path]) -> int:
    """Print every finding; return 1 if there is one."""
    count = 0
    for path in files:
        for number, words, instead in mistakes(path.read_text(encoding="utf-8")):
            count += 1
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            print(f"{shown}:{number}: {words!r}. Better: {instead}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]] or tracked()))
