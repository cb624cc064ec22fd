"""Kill runs, and edit or replace any file that they read: the final result belongs to one input, or is refused.

For a sweep, for training, and for the cache of a server. The events are drawn from seeds, and a failure prints the
seed that reproduces it. `DISTURBANCES=1000 pytest tests/disturbing` draws that many for each kind of run;
`DISTURBANCES_FROM` is the first seed.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .program import INPUTS, OWN, group_of

HERE = Path(__file__).parent
COUNTS = {"sweep": 60, "train": 60, "serve": 160}
FIRST = int(os.environ.get("DISTURBANCES_FROM", "0"))
WHAT = ["flip", "edit", "replace", "truncate", "delete", "swap"]

Ask = Callable[..., dict[str, Any]]

# `make test` kills each writer (test_kill.py, sweeps/test_dying.py, training/test_interrupted.py), and resumes sweeps,
# training and caches on inputs that were changed, one kind of input at a time (test_folder.py, test_cache.py).
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """`program("sweep", events)` returns the outcome."""
    folder = tmp_path_factory.mktemp("disturbing")
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    with (folder / "errors").open("w") as errors:
        running = subprocess.Popen(
            [sys.executable, str(HERE / "program.py"), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
    assert running.stdin is not None
    assert running.stdout is not None
    learnt: dict[str, dict[str, Any]] = {}

    def ask(kind: str, events: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        if kind not in learnt:
            learnt[kind] = {}
            learnt[kind] = ask(kind, [])
        if events is None:
            return learnt[kind]
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps({"kind": kind, "events": events}) + "\n")
        running.stdin.flush()
        line = running.stdout.readline()
        assert line, (folder / "errors").read_text()[-3000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    yield ask
    running.stdin.close()
    running.stdout.close()
    assert running.wait() == 0


def events_of(seed: int, kind: str) -> list[dict[str, Any]]:
    """Usually a kill, then one or two changes; sometimes repeated; for a server also while it is running.

    Of its own files only a server's are changed: results that their owner edits are not defended, see docs/security.md.
    """
    chance = random.Random(seed)
    groups = [*["own", "own"] * (kind == "serve"), *INPUTS[kind]]

    def killed() -> dict[str, Any]:
        return {
            "what": "kill", "seed": chance.randrange(10**6), "how": chance.choice(["itself", "held", "going on"])
        }  # fmt: skip

    def changed(among: list[str]) -> dict[str, Any]:
        return {"what": chance.choice(WHAT), "seed": chance.randrange(10**6), "group": chance.choice(among)}

    events = [killed()] if chance.random() < 0.9 else []
    events += [changed(groups) for _ in range(chance.choice([1, 1, 1, 2]))]
    if chance.random() < 0.25:
        events += [killed(), changed(groups)]
    if kind == "serve" and chance.random() < 0.4:
        events.append({**changed(["own", "experts"]), "live": True})
    return events


@pytest.mark.parametrize("kind", INPUTS)
def test_every_file_that_is_read_is_known(kind: str, program: Ask) -> None:
    """The other test changes the files that a run opens. A file missing from its list fails here."""
    learnt = program(kind)
    assert [path for path, group in learnt["read"].items() if group is None] == []
    assert learnt["elsewhere"] == []
    assert {"own", *INPUTS[kind]} <= {*learnt["read"].values()}


def test_an_unlisted_file_is_unknown() -> None:
    for kind in INPUTS:
        assert group_of("base/config.json", kind) == "base"
        assert group_of("base/model.bin", kind) is None
        assert group_of("notes/answers.json", kind) is None
        assert group_of("runs/out2/sweep.json", kind) is None
        assert OWN[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_results_of_disturbed_runs_belong_to_one_input_or_are_refused(kind: str, program: Ask) -> None:
    count = int(os.environ.get("DISTURBANCES", "0")) or COUNTS[kind]
    outcomes: collections.Counter[str] = collections.Counter()
    failures = []
    program(kind)
    only_killed = [{"what": "kill", "seed": 0, "how": "itself"}]  # every change may be refused
    for seed, events in enumerate([only_killed, *(events_of(seed, kind) for seed in range(FIRST, FIRST + count))]):
        result = program(kind, events)
        outcomes[result["outcome"]] += 1
        if result["failure"] is not None:
            failures.append((FIRST + seed - 1, result["failure"], result["events"], result["said"]))
    print(kind, dict(outcomes))
    assert failures == []
    assert outcomes["refused"]
    assert outcomes["undisturbed"] + outcomes["begun anew"]
