"""Train in child processes that are killed. test_killed starts it as a separate program, so that it can fork: libraries
are imported once.

Usage: dying.py '{"recipe": {…}, "folder": …, "kills": 4, "seed": 0}'; prints JSON.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killing import How, count_steps, forked, killed_at, result


def main(recipe: dict[str, Any], folder: str, kills: int, seed: int) -> list[dict[str, Any]]:
    """Kill at random accesses to the folder, a first run or one that replaces an expert, then repeat the command."""
    import torch

    from adapterswap.experiments.training import TrainRecipe, train

    torch.set_num_threads(1)
    made, place, former = TrainRecipe.model_validate(recipe), Path(folder, "out"), Path(folder, "..", "former")

    def work(**options: bool) -> Callable[[], None]:
        return lambda: train(made, out_path=place, progress=False, **options) and None

    Path(folder).mkdir()
    steps = count_steps(folder, work())
    expected = files(place)
    place.rename(former)
    chosen, found = random.Random(seed), []
    for number in range(kills):
        replacing = bool(number % 2)
        if replacing:
            shutil.copytree(former, place)
            (place / "README.md").write_text("the former one")
        old = files(place)
        how: How = "held" if number % 3 else "itself"
        code = killed_at(chosen.randint(1, steps), folder, work(overwrite=replacing), how)
        left = files(place)
        done = replacing or left is not None  # nothing is resumed once the expert is in place
        again = result(forked(work(overwrite=True) if done else work(resume=True)))
        found.append(
            {
                "code": code, "left": "old" if left == old else "new" if left == expected else "a part", "again": again,
                "same": files(place) == expected, "beside": sorted(path.name for path in Path(folder).iterdir()),
            }
        )  # fmt: skip
        shutil.rmtree(place)
    return found


def files(folder: Path) -> dict[str, bytes] | None:
    """The files of an expert; None if there is none."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else None


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
