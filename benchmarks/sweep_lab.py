"""A sweep on the lab's pico world, and the same sweep killed again and again: is the final table the same?

    OMP_NUM_THREADS=2 python benchmarks/sweep_lab.py --out-path /tmp/sweep-lab [--kills 20] [--seed 0] [--json]

Takes a shipped base, trains three math and three language experts as the lab does (each on rows of its own seed), and
judges 9 pairs × 81 layer swaps (b, u, t_b and t_u of 0, 1, 2, of which those that need more than 6 layers are left
out) and the baselines on 100 word problems in each language, through lm-evaluation-harness. A word problem is right if
the greedy answer is: a likelihood task, as the lab scores it. Experts that are there are taken, not trained again.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "which_layers"))
from make_tasks import make_tasks

PROBLEMS = 100
RECIPE = """\
# The lab's world: three math and three language experts of one base, the papers' grid scaled to 6 layers.
base_model: base
task_experts: {math0: math0, math1: math1, math2: math2}
language_experts: {xx0: xx0, xx1: xx1, xx2: xx2}
baselines: [base, task, language, soup, magnitude_soup, task_arithmetic]
compositions:
  - {bottom: [0, 1, 2], top: [0, 1, 2], bottom_transition: [0, 1, 2], top_transition: [0, 1, 2]}
tasks: [lab_xx]
retention: [lab_en]
settings: {include_path: tasks, batch_size: 100}
"""


def make_world(folder: Path, problems: int = PROBLEMS) -> Path:
    """The base, six experts, two tasks and the recipe in `folder`; the recipe's path."""
    from adapterswap.experiments.lab.bases import write_base
    from adapterswap.experiments.lab.scenes import SCENES, language_rows, math_rows
    from adapterswap.experiments.lab.seed import LEARNING_RATES, train_expert

    scene, base = SCENES["gap"], folder / "base"
    if not base.exists():
        write_base(scene, 0, base)
    for seed in range(3):
        for name, kind, rows in (("math", "math", math_rows), ("xx", "language", language_rows)):
            if not (folder / f"{name}{seed}").exists():
                rate = LEARNING_RATES[kind]
                train_expert(base, folder / f"{name}{seed}", rows(scene, seed), seed, learning_rate=rate)
    make_tasks(folder / "tasks", problems)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


def command(recipe: Path, out_path: Path) -> list[str]:
    return [sys.executable, "-m", "adapterswap", "sweep", str(recipe), "--out-path", str(out_path), "--device", "cpu"]


def killed(recipe: Path, out_path: Path, kills: int, total: int, seed: int) -> list[int]:
    """Kill the sweep after a random number of further cells and a random moment, `kills` times; then let it end."""
    random, at = Random(seed), []
    lines = out_path / "cells.jsonl"
    for number in range(kills):
        process = subprocess.Popen(command(recipe, out_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        done = at[-1] if at else 0
        until = done + random.randint(0, 2 * (total - done) // (kills - number + 1))
        while process.poll() is None and (lines.read_bytes().count(b"\n") if lines.exists() else 0) < until:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        at.append(lines.read_bytes().count(b"\n") if lines.exists() else 0)
    subprocess.run(command(recipe, out_path), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return at


def content(folder: Path) -> dict[str, Any]:
    """Every file of a sweep's folder, the seconds left out."""
    files: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = path.read_bytes()
        if name == "cells.jsonl":
            files[name] = [{**json.loads(line), "seconds": None} for line in path.open()]
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-path", type=Path, required=True, help="folder for the world and both runs")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.out_path.mkdir(parents=True, exist_ok=True)
    recipe = make_world(options.out_path)
    start = time.perf_counter()
    subprocess.run(command(recipe, options.out_path / "whole"), check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    whole = content(options.out_path / "whole")
    total = len(whole["cells.jsonl"])
    at = killed(recipe, options.out_path / "killed", options.kills, total, options.seed) if options.kills else []
    same = content(options.out_path / "killed") == whole if options.kills else None
    evaluated = [json.loads(line)["seconds"] for line in (options.out_path / "whole" / "cells.jsonl").open()]
    found = {
        "cells": total,
        "seconds": round(seconds, 1),
        "seconds_a_cell": round(sum(cell["evaluate"] for cell in evaluated) / total, 3),
        "switch_share": round(sum(c["switch"] for c in evaluated) / sum(c["evaluate"] for c in evaluated), 5),
        "killed_after_cells": at,
        "identical": same,
    }
    print(json.dumps(found, indent=2) if options.json else "\n".join(f"{key:<20}{v}" for key, v in found.items()))


if __name__ == "__main__":
    main()
