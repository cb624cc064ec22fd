"""The golden list: does the code still do what it did? A refactoring changes nothing of it, or says what and why.

    python scripts/golden run REV --sample           # a fixed sample, in a few minutes
    python scripts/golden run REV                    # everything
    python scripts/golden run REV --only 'matrix/llama-*' --only tools
    python scripts/golden freeze REV                 # only make REV's checkout and the inputs, in .golden/

REV, any revision of git, and the working copy (or --tree FOLDER) run side by side on the same inputs: the matrix, the
pages, the recipes, refusals, and every command. What they return, print and write is compared: every file by its
bytes, JSON field by field, every refusal by its class and parameter. Results of REV are kept, so a second run takes
half the time.

A line for each difference says cell, field, old and new; the exit status is 1 if one is not excepted below. Messages of
refusals and other text on standard error may differ: they are counted, and --messages lists them.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import fnmatch
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

Json = Any

# What is meant to change: a pattern of cells, a pattern of fields, and the reason.
EXCEPTED: list[tuple[str, str, str]] = [
    ("*", "*adapterswap.json/json/format", "records have format 1"),
    ("*", "*adapterswap.json/json/output/truncation", "records have format 1"),
    ("*", "*adapterswap.record/format", "records have format 1"),
    ("*", "*adapterswap.record/output/truncation", "records have format 1"),
    ("*", "*.json/json/fingerprints*", "records say which weights were written, so that --overwrite keeps others"),
]

# What differs from run to run.
VOLATILE: list[tuple[str, str, str]] = [
    ("*", "*/seconds/*", "how long something took"),
    ("*", "*/seconds", "how long something took"),
    ("*", "*cells.jsonl/json/*/sha256", "a hash over the line, with its seconds"),
    ("*", "*/bfloat16_speedup", "how much faster something was"),
]
TIMES = re.compile(r"\b\d+(\.\d+)? ?(ms|s|min|seconds)\b|\bseconds=\d+\.\d+")

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".golden"
HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TZ": "UTC", "COLUMNS": "100",
    "NO_COLOR": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "LC_ALL": "C.UTF-8",
}  # fmt: skip


def freeze(revision: str) -> Path:
    """The folder of a frozen revision: `tree` is its checkout, `inputs` what cells read."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", f"{revision}^{{commit}}"], capture_output=True, text=True, check=True)
    folder = HOME / commit.stdout.strip()[:12]
    if not (folder / "tree").is_dir():
        (folder / "part").mkdir(parents=True, exist_ok=True)
        archive = subprocess.run([*git, "archive", commit.stdout.strip()], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder / "part"], input=archive, check=True)
        (folder / "part").rename(folder / "tree")
    made_by = hashlib.sha256((HERE / "inputs.py").read_bytes()).hexdigest()
    stamp = folder / "made-by"
    if not stamp.exists() or stamp.read_text() != made_by:
        print(f"making the inputs in {folder.relative_to(ROOT)}", flush=True)
        for old in folder.glob("results-*"):
            shutil.rmtree(old)
        arguments = [sys.executable, HERE / "inputs.py", folder / "inputs"]
        subprocess.run(arguments, env=_environment(folder / "tree", folder), check=True)
        stamp.write_text(made_by)
    return folder


def _environment(tree: Path, frozen: Path) -> dict[str, str]:
    """A side's: its package comes first, and the helpers are the frozen version's on both sides."""
    return os.environ | ENVIRONMENT | {"PYTHONPATH": f"{tree}:{frozen / 'tree' / 'tests'}"}


# Running


class Side:
    """One version, with the results that it has so far."""

    def __init__(self, name: str, tree: Path, frozen: Path, results: Path) -> None:
        self.results, self.root = results, HOME / "run" / name
        self.tree = self.root / "tree"  # a link, so that paths within the package are as long on either side
        self.environment = _environment(self.tree, frozen) | {
            "TMPDIR": str(self.root / "tmp"), "HF_HOME": str(self.root / "hf"), "HOME": str(self.root / "home"),
        }  # fmt: skip
        for folder in (results, *(self.root / one for one in ("tmp", "hf", "home"))):
            folder.mkdir(parents=True, exist_ok=True)
        self.tree.unlink(missing_ok=True)
        self.tree.symlink_to(tree)

    def path(self, group: str) -> Path:
        return self.results / f"{group.replace('/', '__')}.json"

    def found(self, group: str) -> dict[str, Json]:
        path = self.path(group)
        return json.loads(path.read_text()) if path.exists() else {}

    def missing(self, job: Json) -> list[Json]:
        found = self.found(job["group"])
        left = [step for step in job["steps"] if step["cell"] not in found]
        return left if job.get("fresh") or not left else job["steps"]

    def work(self, jobs: queue.Queue[Json], number: int) -> None:
        """Run jobs in one process until none is left."""
        log = (self.root / f"side-{number}.log").open("w")
        process = subprocess.Popen(
            [sys.executable, HERE / "side.py", self.root, self.results], cwd=self.root, env=self.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        imported = process.stdout.readline().strip()
        if imported != str(self.tree):
            raise RuntimeError(f"adapterswap was imported from {imported}, not {self.tree}: see {log.name}")
        while True:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                break
            before, steps = self.found(job["group"]), self.missing(job)
            self.path(job["group"]).unlink(missing_ok=True)
            process.stdin.write(json.dumps({**job, "steps": steps}) + "\n")
            if not process.stdout.readline():
                raise RuntimeError(f"the process for {self.tree} died: see {log.name}")
            self.path(job["group"]).write_text(json.dumps(before | self.found(job["group"])))
        process.stdin.close()
        process.wait()


def run_both(old: Side, new: Side, jobs: list[Json], processes: int) -> None:
    """Run what is missing, with one process for each core."""
    waiting: dict[Side, queue.Queue[Json]] = {old: queue.Queue(), new: queue.Queue()}
    for job in jobs:
        for side in (old, new):
            if side.missing(job):
                waiting[side].put(job)
    sides = [side for side in (old, new) if waiting[side].qsize()]
    workers = [sides[number % len(sides)] for number in range(max(processes, len(sides)))] if sides else []
    threads = [threading.Thread(target=side.work, args=(waiting[side], i)) for i, side in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def chosen(jobs: list[Json], sample: bool, only: list[str]) -> list[Json]:
    """The jobs with the steps to run: those of a job that builds on earlier steps stay together."""
    result = []
    for job in jobs:
        steps = [
            step for step in job["steps"]
            if (step["sample"] or not sample)
            and (not only or any(fnmatch.fnmatch(step["cell"], f"{one}*") for one in only))
        ]  # fmt: skip
        if steps:
            result.append({**job, "steps": steps if job.get("fresh") else job["steps"]})
    return result


# Comparing


def fields(value: Json, at: str = "") -> Iterator[tuple[str, Json]]:
    """Every leaf of plain data with its place; a text is one leaf per line."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from fields(one, f"{at}/{key}" if at else key)
    elif isinstance(value, list) and value:
        for index, one in enumerate(value):
            yield from fields(one, f"{at}/{index}")
    elif isinstance(value, str) and "\n" in value:
        yield from ((f"{at}:{number}", TIMES.sub("TIME", line)) for number, line in enumerate(value.split("\n"), 1))
    else:
        yield at, TIMES.sub("TIME", value) if isinstance(value, str) else value


def differences(old: Json, new: Json) -> list[tuple[str, Json, Json]]:
    """Field, old and new, for every leaf that differs."""
    first, second = (dict(fields({key: one.get(key) for key in ("outcome", "value", "printed", "files", "removed")}))
                     for one in (old, new))  # fmt: skip
    return [(key, first.get(key, "(absent)"), second.get(key, "(absent)"))
            for key in [*first, *(second.keys() - first.keys())]
            if repr(first.get(key, "(absent)")) != repr(second.get(key, "(absent)"))]  # fmt: skip


def reason(table: list[tuple[str, str, str]], cell: str, field: str) -> str | None:
    return next((why for cells, at, why in table if fnmatch.fnmatch(cell, cells) and fnmatch.fnmatch(field, at)), None)


def compare(old: Side, new: Side, jobs: list[Json], *, most: int, messages: bool) -> int:
    """Print every difference and the tally; the number of differences that are not excepted."""
    cells, counted, worded = collections.Counter(), collections.Counter(), 0
    outcomes: collections.Counter[str] = collections.Counter()
    for job in jobs:
        first, second = old.found(job["group"]), new.found(job["group"])
        for cell in (step["cell"] for step in job["steps"]):
            cells[cell.partition("/")[0]] += 1
            outcome = second[cell]["outcome"]
            outcomes[str(outcome.get("error") or ("ok" if not outcome.get("exit") else f"exit {outcome['exit']}"))] += 1
            found = []
            for field, was, now in differences(first[cell], second[cell]):
                if reason(VOLATILE, cell, field) is None:
                    why = reason(EXCEPTED, cell, field)
                    counted[f"excepted: {why}" if why else "differences"] += 1
                    found += [(field, was, now)] if why is None else []
            for field, was, now in found[:most]:
                print(f"{cell} | {field} | {_short(was)} | {_short(now)}")
            if len(found) > most:
                print(f"{cell} | … and {len(found) - most} more fields")
            if "lost" in outcome and not found:
                print(f"{cell} | lost | on both sides: {outcome['lost']}")
                counted["differences"] += 1
            said = [TIMES.sub("TIME", one[cell].get("said", "")) for one in (first, second)]
            if said[0] != said[1]:
                worded += 1
                if messages:
                    print(f"  message of {cell}:\n    - {said[0]}\n    + {said[1]}")
    for counter in (cells, outcomes):
        print(", ".join(f"{count:,} {name}" for name, count in counter.most_common()))
    print(f"{cells.total():,} cells; {worded:,} other messages")
    for what, count in counted.most_common():
        print(f"{count:6,} {what}")
    return counted["differences"]


def _stamps(folder: Path) -> set[tuple[str, int]]:
    """Every file, with the time of its last change."""
    return {(str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*") if not path.is_dir()}


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:119]}…"


def main() -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["freeze", "run"])
    parser.add_argument("revision")
    parser.add_argument("--sample", action="store_true", help="a fixed sample")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cells whose names begin so")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the folder with the new package")
    parser.add_argument("--most", type=int, default=5, help="fields to list for each cell")
    parser.add_argument("--messages", action="store_true", help="list messages that differ")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    start = time.monotonic()
    HOME.mkdir(exist_ok=True)
    lock = (HOME / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # another run in this checkout is waited for
    frozen = freeze(options.revision)
    if options.command == "freeze":
        return 0
    jobs = chosen(json.loads((frozen / "inputs" / "jobs.json").read_text()), options.sample, options.only)
    if not jobs:
        parser.error(f"no cell's name begins like {' or '.join(options.only)}; names are in {frozen}/inputs/jobs.json")
    packages = [version(name) for name in ("torch", "transformers", "peft", "numpy", "safetensors", "trl", "lm_eval")]
    key = hashlib.sha256((HERE / "side.py").read_bytes() + repr([sys.version, *packages]).encode()).hexdigest()[:12]
    old = Side("old", frozen / "tree", frozen, frozen / f"results-{key}")
    shutil.rmtree(HOME / "run" / "results", ignore_errors=True)
    new = Side("new", options.tree.resolve(), frozen, HOME / "run" / "results")
    before = _stamps(frozen / "inputs")
    run_both(old, new, jobs, options.processes)
    found = compare(old, new, jobs, most=options.most, messages=options.messages)
    for path, _ in sorted(before ^ _stamps(frozen / "inputs")):
        print(f"an input was changed: {path}")
        found += 1
    print(f"{time.monotonic() - start:,.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
