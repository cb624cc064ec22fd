"""Run the command line in a child that is killed, or next to other writers. test_kill starts it as a separate program,
so that it can fork: the library is imported once, and each child costs a few milliseconds.

Usage: crashing.py MODE '{"folder": …, "arguments": […]}', with one of the modes at the end of this file; prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import failing
from killing import How, count_steps, forked, hold, killed_at, on_touch, result


def compose(arguments: list[str]) -> int:
    from adapterswap.cli import main

    try:
        main(arguments, standalone_mode=True)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def content(folder: Path) -> dict[str, str] | None:
    """What a reader sees at `folder`; None if it does not exist."""
    if not folder.exists():
        return None
    files = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    return {str(path.relative_to(folder)): path.read_bytes().hex() for path in files if path.is_file()}


def judge(out: Path, old: Any, new: Any) -> str:
    outcome = content(out)
    return "absent" if outcome is None else "old" if outcome == old else "new" if outcome == new else "BROKEN"


def every(folder: Path, first: list[str], arguments: list[str], overwrite: bool) -> dict[str, Any]:
    """Get killed at every step; after each, check the target and compose again."""
    out, saved = folder / "out", folder.with_name(f"{folder.name} saved")
    assert result(forked(lambda: compose(first))) == 0
    old = content(out)
    shutil.copytree(out, saved)
    assert result(forked(lambda: compose([*arguments, "--overwrite"]))) == 0
    new = content(out)
    assert old != new
    states: list[str] = []
    recovered: list[str] = []
    left: set[str] = set()
    for count in range(1, 1000):
        remove(out)
        if overwrite:
            shutil.copytree(saved, out)
        options = [*arguments, "--overwrite"] if overwrite else arguments
        code = killed_at(count, f"{folder}/", lambda options=options: compose(options), "itself")
        states.append(judge(out, old, new))
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        again = result(forked(lambda: compose([*arguments, "--dry-run"])))  # a reader changes nothing
        assert again == (0 if states[-1] == "absent" else 3)
        # First without --overwrite: this must not replace anything, but restores the output that was set aside.
        result(forked(lambda: compose(arguments)))
        recovered.append(judge(out, old, new))
        assert result(forked(lambda: compose([*arguments, "--overwrite"]))) == 0
        assert content(out) == new
        left |= {path.name for path in folder.iterdir()} - {"out"}
    return {"kills": len(states) - 1, "states": states, "recovered": recovered, "left": sorted(left)}


def at_random(folder: Path, first: list[str], arguments: list[str], kills: int, seed: int) -> dict[str, Any]:
    """Get killed by another process at a random step, or soon after it."""
    chance = random.Random(seed)
    out = folder / "out"
    assert result(forked(lambda: compose(first))) == 0
    old = content(out)
    steps = count_steps(f"{folder}/", lambda: compose([*arguments, "--overwrite"]))
    new = content(out)
    states: list[str] = []
    for _ in range(kills):
        remove(out)
        if overwrite := chance.random() < 0.5:
            # A run killed between its two renames leaves the old output set aside; this run restores it first.
            assert result(forked(lambda: compose([*first, "--overwrite"]))) == 0
        options = [*arguments, "--overwrite"] if overwrite else arguments
        how: How = "held" if chance.random() < 0.5 else "going on"
        code = killed_at(chance.randint(1, steps), f"{folder}/", lambda options=options: compose(options), how)
        states.append(judge(out, old, new) if code == -signal.SIGKILL else "finished")
        assert states[-1] in ("absent", "old", "new", "finished")
    assert result(forked(lambda: compose([*arguments, "--overwrite"]))) == 0
    return {"states": states, "left": sorted({path.name for path in folder.iterdir()} - {"out"})}


def survives(folder: Path, commands: dict[str, tuple[list[str], list[str]]], kills: int, seed: int) -> dict[str, Any]:
    """See `survive`, for several commands."""
    results = {}
    for name, (first, arguments) in commands.items():
        (folder / name).mkdir()
        out = [str(folder / name / "out")]
        first, arguments = [*first, *out], [*arguments, *out]
        results[name] = survive(folder / name, first, arguments, kills, seed)
    return results


def survive(folder: Path, first: list[str], arguments: list[str], kills: int, seed: int) -> dict[str, Any]:
    """Get killed at random steps, and run the command again after each: it succeeds and leaves nothing else.

    Args:
        folder: for the output.
        first, arguments: two runs of a command with different results.
        kills: how many.
        seed: of the random steps.
    """
    chance, out, saved = random.Random(seed), folder / "out", folder.with_name(f"{folder.name} saved")
    assert compose(first) == 0  # in this process, so that everything is imported
    old = content(out)
    out.rename(saved)
    steps = [count_steps(f"{folder}/", lambda: compose(arguments))]
    new = content(out)
    assert old != new
    replacing = [*arguments, "--overwrite"]
    steps.append(count_steps(f"{folder}/", lambda: compose(replacing)))
    states: list[str] = []
    for number in range(kills):
        remove(out)
        if overwrite := chance.random() < 0.6:
            shutil.copytree(saved, out) if saved.is_dir() else shutil.copy(saved, out)
        options = replacing if overwrite else arguments
        how: How = chance.choice(("itself", "held", "going on"))
        step = chance.randint(1, steps[overwrite])
        code = killed_at(step, f"{folder}/", lambda options=options: compose(options), how)
        states.append(judge(out, old, new))
        assert states[-1] in ("absent", "old", "new"), (number, code)
        left = sorted(path.name for path in folder.iterdir())
        assert result(forked(lambda: compose(replacing))) == 0, (number, left)
        assert content(out) == new, (number, left)
        assert [path.name for path in folder.iterdir()] == ["out"], (number, left)
    return {"steps": steps, **Counter(states)}


def retired(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Get killed while the next run removes an earlier output that was set aside. Then remove the target, run again."""
    out, replacing = folder / "out", [*arguments, "--overwrite"]
    assert result(forked(lambda: compose(arguments))) == 0
    new, saved = content(out), folder.with_name(f"{folder.name} saved")
    shutil.copytree(out, saved)
    states = []
    for step in range(1, 1000):
        remove(out)
        shutil.copytree(saved, out)
        aside = folder / f".out.{step:012x}.old.tmp"
        shutil.copytree(out, aside)
        code = killed_at(step, f"{folder}/", lambda: compose(replacing), "itself", removals=True)
        remove(out)
        result(forked(lambda: compose(arguments)))  # it may say that the one that was set aside exists
        states.append(judge(out, None, new))
        for leftover in folder.glob(".*"):
            remove(leftover)
        if code == 0:
            break
    return {"states": states}


def rivals(folder: Path, first: list[str], arguments: list[str], rounds: int, overwrite: bool) -> dict[str, Any]:
    """Two compose runs write to one target at once. Their results differ, so that a mixture would show."""
    out = folder / "out"
    wholes = []
    for options in (first, arguments):
        assert result(forked(lambda options=options: compose([*options, "--overwrite"]))) == 0
        wholes.append(content(out))
    outcomes: list[list[int]] = []
    broken = 0
    pair = [[*options, "--overwrite"] if overwrite else options for options in (first, arguments)]
    for _ in range(rounds):
        remove(out)
        children = [forked(lambda options=options: compose(options)) for options in pair]
        outcomes.append([result(child) for child in children])
        broken += content(out) not in wholes
    return {
        "outcomes": outcomes,
        "broken": broken,
        "left": sorted({path.name for path in folder.iterdir()} - {"out"}),
    }


def exclusive(folder: Path, writers: int, rounds: int) -> dict[str, Any]:
    """Many writers to one target, repeatedly: only one holds it at a time."""
    from adapterswap.kit.errors import AdapterswapError
    from adapterswap.kit.files.folders import OutputKind

    kind = OutputKind(None, names=lambda: ["file"])
    inside = folder.parent / "inside"

    def work() -> int:
        wrote = 0
        for _ in range(rounds):
            with (
                contextlib.suppress(AdapterswapError),
                kind.folder(folder / "out", overwrite=True) as building,
            ):
                try:
                    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return 255
                (building / "file").write_text(str(os.getpid()))
                inside.unlink()
                wrote = 7
        return wrote

    codes = [result(child) for child in [forked(work) for _ in range(writers)]]
    return {"codes": codes, "left": sorted(path.name for path in folder.iterdir())}


def faults(
    folder: Path, first: list[str], arguments: list[str], errors: list[int], stride: int
) -> list[dict[str, Any]]:
    """Each call to the operating system fails once, in a first write and in a replacement.

    Args:
        folder: for the output.
        first, arguments: two runs of a command with different results.
        errors: the numbers of the errors.
        stride: 0 for each call with each error; otherwise each stride-th call, with errors that take turns.
    """
    out, saved = folder / "out", folder.with_name(f"{folder.name} saved")
    assert result(forked(lambda: compose(first))) == 0
    old = content(out)
    out.rename(saved)
    assert result(forked(lambda: compose(arguments))) == 0
    new = content(out)
    assert old != new

    outcomes = []
    for overwrite in (False, True):
        options = [*arguments, "--overwrite"] if overwrite else arguments
        number, ended = 1, False
        while not ended:
            number += stride or 1
            for error in [errors[number % len(errors)]] if stride else errors:
                remove(out)
                if overwrite:
                    shutil.copytree(saved, out) if saved.is_dir() else shutil.copy(saved, out)

                outcome = failing(number, error, folder, lambda options=options: compose(options))
                ended = not outcome.call
                left = sorted({path.name for path in folder.iterdir()} - {"out"})
                state = judge(out, old, new)
                outcomes.append({**outcome._asdict(), "error": error, "state": state, "left": left})
                for name in left:
                    remove(folder / name)
    return outcomes


def each_faults(
    folder: Path, commands: dict[str, tuple[list[str], list[str]]], errors: list[int], strides: dict[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """See `faults`, for several commands: by name."""
    results = {}
    for name, (first, arguments) in commands.items():
        (folder / name).mkdir()
        out = folder / name / "out"
        assert compose([*first, str(out)]) == 0  # in this process, so that everything is imported
        remove(out)
        results[name] = faults(folder / name, [*first, str(out)], [*arguments, str(out)], errors, strides[name])
    return results


def held(folder: Path, arguments: list[str], step: int) -> None:
    """Compose in this process, and stop at a step until killed."""
    left = step

    def act() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            hold()

    on_touch(f"{folder}/", act, removals=True)
    sys.exit(compose(arguments))


def remove(folder: Path) -> None:
    shutil.rmtree(folder) if folder.is_dir() else folder.unlink(missing_ok=True)


if __name__ == "__main__":
    what, settings = sys.argv[1], json.loads(sys.argv[2])
    settings["folder"] = Path(settings["folder"])
    if what == "held":
        held(**settings)
    if "arguments" in settings:  # import everything once, in the parent
        assert compose([*settings["arguments"], "--dry-run"]) == 0
        import filelock  # noqa: F401
    modes: dict[str, Callable[..., Any]] = {
        "every": every, "random": at_random, "survives": survives, "retired": retired, "rivals": rivals,
        "exclusive": exclusive, "faults": faults, "each faults": each_faults,
    }  # fmt: skip
    sys.stdout = sys.__stdout__
    print(json.dumps(modes[what](**settings)), flush=True)
