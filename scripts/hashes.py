"""Write constraints-hashes.txt: the packages of constraints.txt with the SHA-256 of the file that pip would install.

    python scripts/hashes.py
    pip install --require-hashes --no-deps -r constraints-hashes.txt

For a release. The files are those for this Python and this platform, because other wheels of a version have other
hashes. pip chooses them and reports their hashes; of wheels, it downloads the metadata only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_ASK = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--prefer-binary", "--quiet", "--report", "-"]


def lines(installed: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of the file, from the part `install` of pip's report."""
    found = []
    for package in installed:
        name, version = (package["metadata"][key] for key in ("name", "version"))
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        found.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(found, key=str.lower)


def main() -> None:
    command = [sys.executable, "-m", "pip", *_ASK, "-r", str(ROOT / "constraints.txt")]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    environment = report["environment"]
    place = ", ".join(environment[key] for key in ("python_version", "platform_machine", "sys_platform"))
    head = f"# Made by scripts/hashes.py for Python {place}"
    content = "\n".join([head, *lines(report["install"]), ""])
    (ROOT / "constraints-hashes.txt").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
