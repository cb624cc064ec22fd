"""Compare one sweep in two engines: a line for each task, and the answers that differ.

python examples/engines/compare.py RUN-IN-TRANSFORMERS RUN-IN-VLLM
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from adapterswap.experiments.sweeps import Run

FORM = "{:<16}{:>9}{:>7}{:>24}{:>14}{:>7}"


def samples(run: Run, task: str) -> dict[tuple[str, int], Any]:
    """(a composition's short name, a document) → its sample."""
    rows = {}
    for cell in (result.cell for result in run.results):
        for line in (run.folder / "samples" / f"{cell.cell}.jsonl").read_text(encoding="utf-8").splitlines():
            if (sample := json.loads(line))["task"] == task:
                rows[cell.short, sample["doc_id"]] = sample
    return rows


def numbers(output: Any) -> Iterator[float]:
    """The log-likelihoods of an output, and for each 1 or 0 if it is greedy or not."""
    return chain.from_iterable(map(numbers, output)) if isinstance(output, list) else iter([float(output)])


def main(ours: Run, theirs: Run) -> None:
    print(FORM.format("task", "answers", "equal", "log-likelihoods up to", "transformers", "vLLM"))
    for task in ours.tasks:
        one, other = samples(ours, task), samples(theirs, task)
        pairs = {key: (sample["output"], other[key]["output"]) for key, sample in one.items()}
        differing, apart = [], ""
        if isinstance(next(iter(pairs.values()))[0], str):
            differing = [key for key, pair in pairs.items() if pair[0] != pair[1]]
        else:
            gaps = [abs(a - b) for pair in pairs.values() for a, b in zip(*map(numbers, pair), strict=True)]
            differing = [key for key, sample in one.items() if sample["scores"] != other[key]["scores"]]
            apart = f"{max(gaps):.0e} apart"
        means = (
            sum(result.results[task].value or 0 for result in run.results) / len(run.results) for run in (ours, theirs)
        )
        print(FORM.format(task, len(pairs), len(pairs) - len(differing), apart, *(f"{mean:.3f}" for mean in means)))
        for key in differing:
            print("  {}, document {}: {!r} / {!r}".format(*key, *pairs[key]))
    for name, run in (("transformers", ours), ("vLLM", theirs)):
        seconds = sum(sum(result.seconds.values()) for result in run.results)
        print(f"{name}: {len(run.results)} compositions in {seconds:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2)
    main(*map(Run.read, parser.parse_args().runs))
