"""Fuzz for as long as you like: python fuzz/campaign.py --seconds 600 --seed 1 [--kinds weights config].

Does the same as tests/test_fuzz.py, with plain seeds instead of hypothesis, and continues after a failure: one failure
is printed per place in the code, with the seed that reproduces it (--seed S --count 1). Ends with a summary.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from mutations import KINDS, Subject


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="how many inputs at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first input; each next one adds 1")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is damaged")
    chosen = parser.parse_args()
    warnings.simplefilter("error")
    outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
    places: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        subject = Subject(Path(folder))
        seed = chosen.seed
        while seed < chosen.seed + chosen.count and time.monotonic() < start + chosen.seconds:
            chance = random.Random(seed)
            kind = chance.choice(chosen.kinds)
            try:
                outcomes[kind, subject.check(chance, kind)] += 1
            except Exception as error:
                outcomes[kind, "FAILED"] += 1
                frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
                place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {str(error)[:80]}"
                places[place] += 1
                if places[place] == 1:
                    print(f"\n--seed {seed} --count 1 --kinds {' '.join(chosen.kinds)}: {kind}\n{error}")
                    traceback.print_exception(error.__cause__ or error)
                subject = _again(Path(folder), subject)
            seed += 1
    elapsed = time.monotonic() - start
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{kind:10} {outcome:10} {count:>9,}")
    with open("/proc/self/status") as status:
        memory = next(line.split(":")[1].strip() for line in status if line.startswith("VmHWM"))
    print(f"{outcomes.total():,} inputs in {elapsed:.0f} s, from seed {chosen.seed}; slowest {subject.slowest:.2f} s")
    print(f"peak memory {memory}; {places.total()} failures in {len(places)} places")
    for place, count in places.most_common():
        print(f"{count:>7} {place}")
    return 1 if places else 0


def _again(folder: Path, old: Subject) -> Subject:
    """A fresh subject, since the failed one may still be damaged."""
    fresh = Subject(Path(tempfile.mkdtemp(dir=folder)))
    fresh.slowest = old.slowest
    return fresh


if __name__ == "__main__":
    sys.exit(main())
