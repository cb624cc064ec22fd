"""Runs that are killed, and whose inputs and folders change before they are resumed.

A separate program, so that it can fork: libraries are imported once, and a child costs little more than its own run.

Usage: program.py FOLDER. Reads lines of JSON, each with a kind (sweep, train, serve) and events. For each line it
applies the events in a fresh copy of that kind's world and writes a line of JSON with the outcome. The first line of a
kind has no events: it creates the world, and the answer lists the files that are read there.
"""

from __future__ import annotations

import ctypes
import fnmatch
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from killing import count_steps, forked, killed_at, result

# Files that a run reads, as patterns of paths in its world. It must not read any other: see `unknown`.
INPUTS = {
    "sweep": {
        "recipe": ["recipe.yaml", "common.yaml"],
        "base": ["base/*.json", "base/*.safetensors", "base/*.jinja", "base/README.md"],
        "experts": ["math/*", "sw/*"],
        "tasks": ["tasks/*.yaml", "tasks/*.py", "tasks/weights.json", "shared/common.yaml", "tasks/README.md"],
        "documents": ["tasks/data/*.jsonl"],
    },
    "train": {
        "recipe": ["recipe.yaml", "common.yaml"],
        "base": ["base/*.json", "base/*.safetensors", "base/*.jinja", "base/README.md"],
        "rows": ["rows.jsonl", "held-out.jsonl"],
        "tasks": ["tasks/*.yaml", "tasks/*.py", "tasks/weights.json", "shared/common.yaml", "tasks/README.md"],
        "documents": ["tasks/data/*.jsonl"],
    },
    "serve": {
        "recipe": ["experts.yaml"],
        "base": ["base/*.json", "base/*.safetensors", "base/*.jinja", "base/README.md"],
        "experts": ["experts/*"],
    },
}
# Files that it writes and may read again.
OWN = {
    "sweep": ["out/sweep.json", "out/cells.jsonl", "out/rungs.jsonl", "out/samples/*", "out/prompts/*"],
    "train": [
        "out/*", "out.checkpoints/run.json", "out.checkpoints/selection.*", "out.checkpoints/best/*",
        "out.checkpoints/checkpoint-*", "out.checkpoints/tmp-*",
    ],
    "serve": ["cache/known.json", "cache/compositions/*", "cache/hashes/*", "cache/in-use"],
}  # fmt: skip
PASSING = ["*.lock", "*.tmp", ".*", "out.checkpoints/runs/*", "cache/locks/*", "cache/building/*", "*/.*"]
"""Below runs/: locks, files on their way, logs."""

NAMES = ["math", "math+sw", "math+sw@bottom=1,top=1", "code+sw@bottom=2,top=0"]


def group_of(path: str, kind: str) -> str | None:
    """The group of a file of the world; None if it is not listed."""
    if path.startswith("runs/"):
        inside = path.removeprefix("runs/")
        if any(fnmatch.fnmatch(inside, pattern) for pattern in PASSING):
            return "passing"
        return "own" if any(fnmatch.fnmatch(inside, pattern) for pattern in OWN[kind]) else None
    for group, patterns in INPUTS[kind].items():
        if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
            return group
    return None


# --- what is run ---


def commanded(*arguments: str) -> int:
    """Run the command line as a user would: its exit code, or 99 if it ends unexpectedly."""
    from adapterswap.cli import main

    with Path("said").open("w") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            main(list(arguments), standalone_mode=True)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except BaseException:
            traceback.print_exc(file=said)
            return 99
        else:
            code = 0
    if code in (2, 3) and "Error" not in Path("said").read_text():
        return 98
    return code


def swept(out: str = "runs/out") -> int:
    return commanded("sweep", "recipe.yaml", "--out-path", out, "--device", "cpu", "--trust-task-code")


def trained(out: str = "runs/out") -> int:
    return commanded("train", "recipe.yaml", "--out-path", out, "--resume", "--trust-task-code")


def served(out: str = "runs/out", live: dict[str, Any] | None = None) -> int:
    """Ask a server's composer for every name; `out` then lists the content of each folder, or the refusal.

    With `live`, an event that happens while the server is running, it is asked again afterwards.
    """
    from adapterswap import AdapterswapError
    from adapterswap.engines.serving import Cache, Manifest, NamedComposer

    place = Path(out)
    with Path("said").open("w") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            composer = NamedComposer(Manifest.read("experts.yaml"), "base", Cache(place.with_name("cache")), 16)
            ask(composer, place)
            if live is not None:
                disturb("serve", live)
                ask(composer, place)
        except AdapterswapError as error:
            print("Error:", error)
            return 3
        except BaseException:
            traceback.print_exc()
            return 99
    return 0


def ask(composer: Any, place: Path) -> None:
    from adapterswap import AdapterswapError

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for number, name in enumerate(NAMES):
        try:
            folder = composer.folder(name)
        except AdapterswapError as error:
            (place / f"{number}-refused").write_text(type(error).__name__)
        else:
            shutil.copytree(folder, place / str(number))


RUNS: dict[str, Callable[..., int]] = {"sweep": swept, "train": trained, "serve": served}


def outcome(folder: Path) -> dict[str, Any]:
    """The output of a finished run: bytes, except a sweep's seconds, and its lines in any order."""
    collected: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == "sweep.lock":
            continue
        if name in ("cells.jsonl", "rungs.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            collected[name] = sorted(
                json.dumps({**line, "seconds": None, "sha256": None}, sort_keys=True) for line in lines
            )
        else:
            collected[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return collected


# --- events between runs ---


def changed_text(chance: random.Random, raw: bytes) -> bytes:
    """Replace a digit or a letter by another: the length stays, and the file usually stays valid."""
    places = [at for at, byte in enumerate(raw) if chr(byte).isascii() and chr(byte).isalnum()]
    if not places:
        return raw[:-1] + bytes([raw[-1] ^ 1]) if raw else raw
    digits = [at for at in places if chr(raw[at]).isdigit()]
    at = chance.choice(digits if digits and chance.random() < 0.7 else places)
    others = "123456789" if chr(raw[at]).isdigit() else "abcdefgh"
    new = chance.choice([other for other in others if other != chr(raw[at])])
    return raw[:at] + new.encode() + raw[at + 1 :]


def changed_field(chance: random.Random, raw: bytes) -> bytes:
    """Replace a value of a JSON file, or of one line of a JSON Lines file."""
    from mutations import mutate_json

    try:
        lines = raw.decode().splitlines(keepends=True)
        whole = json.loads(raw)
    except ValueError:
        if not lines:
            return raw
        at = chance.randrange(len(lines))
        try:
            lines[at] = json.dumps(mutate_json(chance, json.loads(lines[at])), sort_keys=True) + "\n"
        except ValueError:
            return changed_text(chance, raw)
        return "".join(lines).encode(errors="surrogatepass")
    return json.dumps(mutate_json(chance, whole), indent=1).encode(errors="surrogatepass")


def changed_weights(chance: random.Random, raw: bytes) -> bytes:
    """Flip the sign of some numbers: the header and the size stay, and the numbers stay finite."""
    start = 8 + int.from_bytes(raw[:8], "little")
    content = bytearray(raw)
    for _ in range(64):
        at = start + 4 * chance.randrange((len(raw) - start) // 4) + 3
        content[at] ^= 0x80
    return bytes(content)


def disturb(kind: str, event: dict[str, Any]) -> str:
    """Apply an event to a file of the world; returns the file's group."""
    chance = random.Random(event["seed"])
    files: dict[str, list[Path]] = {}
    for path in sorted(path for path in Path().rglob("*") if path.is_file() and not path.is_symlink()):
        group = group_of(path.as_posix(), kind)
        if group is not None and path.name != "said":
            files.setdefault(group, []).append(path)
    groups = [group for group in files if group != "passing" or chance.random() < 0.2]
    groups = [group for group in groups if group != "own" or kind == "serve"]
    group = event["group"] if event["group"] in files else chance.choice(groups)
    path = chance.choice(files[group])
    raw, stamp, what = path.read_bytes(), path.stat(), event["what"]
    if what == "delete":
        path.unlink()
    elif what == "truncate":
        os.truncate(path, chance.randrange(len(raw)) if raw else 0)
    elif what == "swap":
        other = chance.choice(files[group])
        place = path.with_name("swapping.tmp")
        path.rename(place)
        if other != path:
            other.rename(path)
        place.rename(other)
    elif what == "flip" and raw:
        at = chance.randrange(len(raw))
        new = raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :]
        path.write_bytes(new)  # written in place, so that hard links change too
    else:
        if path.suffix == ".safetensors":
            new = changed_weights(chance, raw)
        elif what == "edit" and path.suffix in (".json", ".jsonl"):
            new = changed_field(chance, raw)
        else:
            new = changed_text(chance, raw)
        if what == "replace":
            place = path.with_name("replacing.tmp")
            place.write_bytes(new)
            os.utime(place, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            place.replace(path)
        else:
            path.write_bytes(new)
    return f"{what} {group} {path.relative_to('runs') if group == 'own' else path}"


# --- a world ---


class World:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.pristine, self.place = kind, folder / "pristine", folder / "world"
        self.work = RUNS[kind]
        self.prefix = str(self.place / "runs" / "cache") if kind == "serve" else "runs/"
        self.expected: dict[str, Any] = {}
        self.steps = 0

    def begin(self) -> None:
        os.chdir("/")
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.pristine, self.place)
        os.chdir(self.place)

    def learn(self) -> dict[str, Any]:
        """Run once undisturbed, and record the files that are read."""
        self.begin()
        try:
            read = self.opened(lambda: count_steps(self.prefix, self.work))
        except AssertionError:
            raise AssertionError(Path("said").read_text()) from None
        self.steps = read.pop("code")
        self.expected = outcome(Path("runs/out"))
        self.begin()
        assert killed_at(self.steps // 2, self.prefix, self.work, "itself") == -9
        again = self.opened(lambda: result(forked(self.work)))
        assert again.pop("code") == 0, Path("said").read_text()
        assert outcome(Path("runs/out")) == self.expected
        paths = sorted({*read["paths"], *again["paths"]})
        return {
            "steps": self.steps, "read": {path: group_of(path, self.kind) for path in paths},
            "elsewhere": sorted({*read["elsewhere"], *again["elsewhere"]}),
        }  # fmt: skip

    def opened(self, body: Callable[[], int]) -> dict[str, Any]:
        """The files that are opened while `body` runs: by any means in the world, by Python elsewhere."""
        watch = Watch()
        for place in [Path(), *(path for path in Path().rglob("*") if path.is_dir())]:
            watch.add(place)
        record = self.place.parent / "elsewhere"
        record.write_text("")
        os.environ["DISTURBING_TOLD"] = str(record)
        code = body()
        del os.environ["DISTURBING_TOLD"]
        return {"code": code, "paths": watch.files(), "elsewhere": sorted({*record.read_text().splitlines()})}

    def run(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        """Apply the events in order, then let the run finish."""
        self.begin()
        reports: list[str] = []
        codes: list[int] = []
        body: Callable[[], int] = self.work
        for event in events:
            if event.get("live"):
                body = partial(served, live=event)
                reports.append(f"live: {event['what']} {event['group']}")
            elif event["what"] == "kill":
                step = 1 + event["seed"] % self.steps
                codes.append(killed_at(step, self.prefix, self.work, event["how"]))
                reports.append(f"kill at {step}: {codes[-1]}")
            else:
                reports.append(disturb(self.kind, event))
            if codes and codes[-1] not in (0, 2, 3, -9):
                break
        else:
            codes.append(result(forked(body)))
        said = Path("said").read_text()
        summary = {"events": reports, "codes": codes, "said": said[-2000:], "failure": None}
        if any(code not in (0, 2, 3, -9) for code in codes) or "Traceback" in said:
            return {**summary, "failure": f"ended with {codes}", "outcome": "failed"}
        if codes[-1] in (2, 3):
            return {**summary, "outcome": "refused"}
        now = outcome(Path("runs/out"))
        if self.kind != "serve" and same(self.kind, now, self.expected):  # a server reads its inputs for each request
            return {**summary, "outcome": "undisturbed"}
        Path("runs").rename("earlier")
        Path("runs").mkdir()
        code = result(forked(self.work))
        fresh = outcome(Path("runs/out"))
        if code == 0 and same(self.kind, now, fresh):
            if self.kind == "serve" and any(name.endswith("-refused") for name in now):
                return {**summary, "outcome": "refused"}
            return {**summary, "outcome": "undisturbed" if now == self.expected else "begun anew"}
        differing = sorted(name for name in {*now, *fresh} if now.get(name) != fresh.get(name))
        unlike = sorted(name for name in {*now, *self.expected} if now.get(name) != self.expected.get(name))
        return {
            **summary, "outcome": "mixed",
            "failure": f"from nothing (exit {code}) other {differing}, undisturbed other {unlike}",
        }  # fmt: skip


def same(kind: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results count as equal.

    Lines of rungs.jsonl may be lost, since a finished cell repeats them. A server may refuse some names.
    """
    if kind == "serve":
        refused = {name.removesuffix("-refused") for name in one if name.endswith("-refused")}
        one, other = (
            {name: content for name, content in contents.items() if re.split("[-/]", name)[0] not in refused}
            for contents in (one, other)
        )
    if kind == "sweep":
        one, other = dict(one), dict(other)
        if not {*one.pop("rungs.jsonl", ())} <= {*other.pop("rungs.jsonl", ())}:
            return False
    return one == other


class Watch:
    """Which files below some folders are opened, by any means (inotify)."""

    OPEN, FOLDER = 0x20, 0x40000000

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._stream = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._stream >= 0
        self._places: dict[int, Path] = {}

    def add(self, place: Path) -> None:
        number = self._libc.inotify_add_watch(self._stream, os.fsencode(place), self.OPEN)
        assert number >= 0
        self._places[number] = place

    def files(self) -> list[str]:
        paths: set[str] = set()
        while True:
            try:
                raw = os.read(self._stream, 2**16)
            except BlockingIOError:
                break
            at = 0
            while at < len(raw):
                number, mask, _, length = struct.unpack_from("iIII", raw, at)
                name = raw[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                at += 16 + length
                assert number >= 0, "more was opened than the kernel remembers"
                if name and not mask & self.FOLDER:
                    paths.add((self._places[number] / name).as_posix())
        os.close(self._stream)
        return sorted(paths - {"said"})


def tell_of_others() -> None:
    """In children that request it: record the files that Python opens outside the world and outside programs."""
    import tempfile

    places = [sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/proc", "/sys", "/dev", "/etc", "/usr"]
    places += [os.path.realpath(place) for place in (sys.executable, *places)]
    places.append(str(Path(os.path.realpath(sys.executable)).parents[1]))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or "DISTURBING_TOLD" not in os.environ or not isinstance(arguments[0], str):
            return
        path, message = os.path.abspath(arguments[0]), os.environ["DISTURBING_TOLD"]
        own = [os.getcwd(), tempfile.gettempdir() + "/adapterswap-", message, os.environ["HF_HOME"]]
        if not any(path.startswith(place) for place in [*places, *own]):
            stream = os.open(message, os.O_WRONLY | os.O_APPEND)
            os.write(stream, path.encode() + b"\n")
            os.close(stream)

    sys.addaudithook(hook)


IMPORTED = [
    "adapterswap.cli", "adapterswap.engines.serving", "adapterswap.experiments.sweeps", "adapterswap.engines.live",
    "lm_eval.evaluator", "adapterswap.experiments.training.trainer", "datasets", "trl",
]  # fmt: skip


def warm() -> None:
    """Import what the runs import and read the libraries' own data, but nothing of the world."""
    for name in IMPORTED:
        importlib.import_module(name)
    import torch
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import TaskIndex

    from adapterswap.experiments.evaluation import stock_tasks

    torch.set_num_threads(1)
    stock_tasks._task_files(stock_tasks.harness_folder())

    shipped, build = TaskManager()._index, TaskIndex.build

    def built(paths: Any) -> Any:
        return {**shipped, **build(list(paths)[1:])}

    TaskIndex.build = staticmethod(built)


def main() -> None:
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # catch everything else that is printed
    os.environ |= {"HF_HOME": str(folder / "hf"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    from disturbing.worlds import WORLDS

    warm()
    tell_of_others()
    worlds: dict[str, World] = {}
    for line in sys.stdin:
        requested = json.loads(line)
        kind = requested["kind"]
        if kind not in worlds:
            (folder / kind / "pristine").mkdir(parents=True)
            WORLDS[kind](folder / kind / "pristine")
            worlds[kind] = World(kind, folder / kind)
            answer = worlds[kind].learn()
        else:
            answer = worlds[kind].run(requested["events"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
