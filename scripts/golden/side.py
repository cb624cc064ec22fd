"""One version of the package, running jobs: a process that has imported everything and forks for each job.

Started by `golden` with the version's folder on PYTHONPATH. It uses only the public face of adapterswap: the names in
`__all__`, and the command line. A line on standard input is a job; the line on standard output that answers it is the
file with its results: what each step returned, printed and wrote.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapterswap

Json = Any

TOO_LONG = 900  # seconds for a job
SHOWN = 100_000  # texts up to this length are kept and compared by lines, longer ones by their hash
SWAP: dict[str, Any] = {"bottom": 1, "top": 1, "bottom_transition": 1, "task_weight": 1, "language_weight": 3}
HERE = "/golden/here"  # in place of the side's own folder in every text and file


# What a step wrote


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and link below the folder, with what changes when it is written."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in [*files, *(one for one in folders if os.path.islink(os.path.join(place, one)))]:
            path = os.path.join(place, name)
            status = os.lstat(path)
            found[os.path.relpath(path, folder)] = (status.st_mtime_ns, status.st_size)
    return found


def artefact(path: Path, root: str) -> Json:
    """A file as data in which differences can be named: JSON by fields, tensors by names, texts by lines."""
    if path.is_symlink():
        return {"link": str(path.readlink()).replace(root, HERE)}
    raw = path.read_bytes().replace(root.encode(), HERE.encode())
    digest = {"sha256": hashlib.sha256(raw).hexdigest()}
    try:
        if path.suffix in (".json", ".ipynb") or path.name.endswith(".index"):
            return {"json": json.loads(raw)}
        if path.suffix == ".jsonl":
            return {"json": [json.loads(line) for line in raw.splitlines()]}
        if path.suffix == ".safetensors":
            return digest | tensors(raw)
        if path.suffix == ".gguf":
            return gguf_file(path)
        text = raw.decode()
        return {"text": text} if len(text) <= SHOWN else digest
    except (ValueError, UnicodeDecodeError):
        return digest


def tensors(raw: bytes) -> Json:
    """Dtype, shape and digest of every tensor, so that a difference has a name."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    described = {"metadata": header.pop("__metadata__", None)}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        digest = hashlib.sha256(raw[start + first : start + last]).hexdigest()[:16]
        described[name] = f"{entry['dtype']} {entry['shape']} {digest}"
    return described


def gguf_file(path: Path) -> Json:
    """The same of a GGUF file, with its metadata; the record in it by fields."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    described = {name: field.contents() for name, field in reader.fields.items()}
    if record := described.get("adapterswap.record"):
        described["adapterswap.record"] = json.loads(record)
    for tensor in reader.tensors:
        digest = hashlib.sha256(tensor.data.tobytes()).hexdigest()[:16]
        described[tensor.name] = f"{tensor.tensor_type.name} {tensor.shape.tolist()} {digest}"
    return described


def printed(text: str, root: str) -> Json:
    text = text.replace(root, HERE)
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text if len(text) <= SHOWN else {"sha256": hashlib.sha256(text.encode()).hexdigest()}


# Steps


def refusal(error: BaseException, root: str) -> tuple[Json, str]:
    """The class and parameter of an error, and its message."""
    name = type(error).__name__
    if isinstance(error, adapterswap.AdapterswapError):
        return {"error": name, "parameter": error.parameter}, str(error).replace(root, HERE)
    parameter = getattr(getattr(error, "param", None), "name", None)  # click's own
    outcome = {"error": name, "parameter": parameter} if parameter else {"error": name}
    return outcome, str(error).replace(root, HERE)


def command(words: list[str], root: str, target: str | None = None) -> Json:
    """A command line, run in this process; a refused one is run again without the top level, for the error's class."""
    import click
    from click.testing import CliRunner

    from adapterswap.cli import main

    result = CliRunner().invoke(main, words, prog_name="adapterswap")
    if target:
        Path(target).write_text(result.stdout)
    outcome: Json = {"exit": result.exit_code}
    said = result.stderr.replace(root, HERE)
    if result.exit_code:
        found = main.get_command(click.Context(main), words[0]) if words else None
        if found is not None:
            again = CliRunner().invoke(found, words[1:], prog_name="adapterswap", standalone_mode=False)
            if again.exception is not None and not isinstance(again.exception, SystemExit):
                outcome |= refusal(again.exception, root)[0]
    return {"outcome": outcome, "printed": printed(result.stdout, root), "said": said}


def shell(text: str, root: str) -> Json:
    """One line of a page: a command in this process, `cd`, or anything else with bash."""
    words = shlex.split(text, comments=True)
    if words[0] == "cd" and len(words) == 2:
        os.chdir(words[1])
        return {"outcome": {}}
    if words[0] == "adapterswap" and not {"|", "&&", ";"} & set(words) and "\n" not in text:
        target = words[words.index(">") + 1] if ">" in words else None
        return command(words[1 : words.index(">")] if target else words[1:], root, target)
    shims = f'python() {{ "{sys.executable}" "$@"; }}; adapterswap() {{ python -m adapterswap "$@"; }}'
    script = f"set -e; {shims}\n{text}\necho; pwd"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    if result.returncode == 0:
        os.chdir(lines.pop())
    said = result.stderr.replace(root, HERE)
    return {"outcome": {"exit": result.returncode}, "printed": printed("\n".join(lines), root), "said": said}


def python(text: str, names: dict[str, Any], root: str) -> Json:
    """Statements, or one expression whose value is described."""
    output = io.StringIO()
    outcome: Json = {}
    said = ""
    value = None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        try:
            try:
                code = compile(text, "step", "eval")
            except SyntaxError:
                exec(compile(text, "step", "exec"), names)
            else:
                value = described(eval(code, names))
        except Exception as error:
            outcome, said = refusal(error, root)
    value = json.loads(json.dumps(value, default=repr).replace(root, HERE))
    return {"outcome": outcome, "value": value, "printed": printed(output.getvalue(), root), "said": said}


def described(value: Any) -> Json:
    """A returned value as data: as JSON where it offers that, else as it is printed."""
    for method in ("as_json", "model_dump_json", "as_dict"):
        if hasattr(value, method) and not isinstance(value, type):
            return getattr(value, method)()
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def matrix(operation: str, pair: dict[str, str], root: str) -> Json:
    """One operation of tests/core/matrix on a pair of adapters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = _operate(operation, pair)
        except Exception as error:
            outcome, said = refusal(error, root)
            return {"outcome": outcome, "said": said}
    return {"outcome": {}, "value": json.loads(json.dumps(value, default=str).replace(root, HERE))}


def _operate(operation: str, pair: dict[str, str]) -> Json:
    asw, task, language = adapterswap, pair["task"], pair["language"]
    experts = {"task": task, "language": language}
    swap = lambda: asw.layer_swap(task, language, **SWAP)  # noqa: E731
    match operation:
        case "swap" | "portable":
            return swap().write("out", layout="portable" if operation == "portable" else "exact")
        case "soup":
            return asw.soup(task, language, task_weight=1, language_weight=3).write("out")
        case "copied":
            return _copied(experts).write("out")
        case "partition_a":
            return asw.compose(asw.Composition(task="task", language="language", partition="A"), experts).write("out")
        case "merge":
            return asw.merge(swap(), out_path="out")
        case "live" | "live_copied":
            return _live(pair, _copied(experts) if operation == "live_copied" else None)
        case "inspect" | "export":
            done = asw.inspect(task) if operation == "inspect" else asw.export(swap(), "out.gguf")
            return described(done)
        case "diff":
            return described(asw.diff(task, language))
        case "convert":
            return described(asw.convert(task, "out", layout="portable", rank=4))
        case "verify":
            folder = swap().write("out")
            return described(asw.verify(folder, experts))
        case "extract":
            merged = asw.merge(swap(), out_path="merged")
            return described(asw.extract(merged, pair["base"], "out", rank=2))
    from core.matrix.methods import VALUES

    composition = asw.Composition(method=operation, task="task", language="language", **VALUES[operation])
    return asw.merge(asw.compose(composition, experts), out_path="out")


def _copied(experts: dict[str, str]) -> Any:
    rules: Any = [
        {"layers": "none", "expert": "language", "optional": True},
        {"layers": "0,4", "expert": "language"},
        {"expert": "task"},
    ]
    return adapterswap.compose(adapterswap.Composition(allocation=rules), experts)


_BASES: dict[str, Any] = {}


def _live(pair: dict[str, str], plan: Any) -> Json:
    """The digests of the composed model's logits and of its ΔW."""
    import transformers
    from core.matrix.reference import changes_in, logits

    if pair["base"] not in _BASES:
        _BASES[pair["base"]] = getattr(transformers, pair["class"]).from_pretrained(pair["base"]).eval()
    base = _BASES[pair["base"]]
    experts = {"task": pair["task"], "language": pair["language"]}
    composer = adapterswap.LiveComposer.from_experts(copy.deepcopy(base), experts)
    settings = ",".join(f"{key}={value}" for key, value in SWAP.items())
    with composer.use(plan if plan is not None else f"task+language@{settings}"):
        found = {name: change.contiguous() for name, change in changes_in(composer.model, base).items()}
        found["logits"] = logits(composer.model).contiguous()
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in sorted(found.items())}


# Jobs


def run_job(job: Json, here: Path, root: str) -> Iterator[tuple[str, Json]]:
    """What each step returned, printed and wrote, by the step's name."""
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(job["world"], here, symlinks=True) if job["world"] else (here / "here").mkdir(parents=True)
    os.chdir(here / "here")
    if (here / "hub").is_dir():
        import huggingface_hub

        huggingface_hub.constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"] = str(here / "hub")
    names: dict[str, Any] = {"asw": adapterswap, "adapterswap": adapterswap}
    if job.get("page"):
        names = importlib.import_module("pages.worlds").names_for(job["page"])
    before = stamps(here / "here")
    for step in job["steps"]:
        start = time.perf_counter()
        match step["kind"]:
            case "matrix":
                done = matrix(step["text"], job["pair"], root)
            case "command":
                done = command(step["words"], root)
            case "shell":
                done = shell(step["text"], root)
            case "python":
                done = python(step["text"], names, root)
            case "file":
                Path(step["name"]).write_text(step["text"])
                done = {"outcome": {}}
        after = stamps(here / "here")
        changed = sorted(name for name, stamp in after.items() if before.get(name) != stamp)
        done["files"] = {name: artefact(here / "here" / name, root) for name in changed}
        done["removed"] = sorted(before.keys() - after.keys())
        done["seconds"] = round(time.perf_counter() - start, 3)
        yield step["cell"], done
        if job.get("fresh"):  # the next step must not see what this one wrote
            os.chdir(here / "here")
            if changed or done["removed"]:
                _restore(job, here / "here", before)
                after = {**before, **{n: s for n, s in stamps(here / "here").items() if n in before}}
        before = after


def _restore(job: Json, here: Path, before: dict[str, tuple[int, int]]) -> None:
    """Remove the files that are new; bring back those that were removed or changed."""
    for name, stamp in stamps(here).items():
        if name not in before:
            (here / name).unlink()
        elif before[name] != stamp:
            shutil.copy2(Path(job["world"]) / "here" / name, here / name, follow_symlinks=False)
    for name in before.keys() - stamps(here).keys():
        shutil.copy2(Path(job["world"]) / "here" / name, here / name, follow_symlinks=False)
    for place, _, _ in sorted(os.walk(here), reverse=True):
        if Path(place) != here and not os.listdir(place) and not _in_world(job, here, Path(place)):
            os.rmdir(place)


def _in_world(job: Json, here: Path, place: Path) -> bool:
    return bool(job["world"]) and (Path(job["world"]) / "here" / place.relative_to(here)).is_dir()


def in_child(job: Json, here: Path, root: str, target: Path) -> None:
    """Run the job in a fork of this process; what it prints itself goes to a file next to the results."""
    child = os.fork()
    if child:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.alarm(TOO_LONG)
        os.waitpid(child, 0)
        signal.alarm(0)
        return
    log = os.open(target.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    results: dict[str, Json] = {}
    try:
        for cell, done in run_job(job, here, root):
            results[cell] = done
    except BaseException:
        traceback.print_exc()
    for step in job["steps"]:
        results.setdefault(step["cell"], {"outcome": {"lost": "the job died here or before; see its .log"}})
    target.with_suffix(".part").write_text(json.dumps(results))
    target.with_suffix(".part").rename(target)
    shutil.rmtree(here, ignore_errors=True)
    os._exit(0)


def main(root: Path, results: Path) -> None:
    """Import everything once, then answer jobs."""
    import peft  # noqa: F401
    import transformers

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for name in adapterswap.__all__:
        getattr(adapterswap, name)
    importlib.import_module("adapterswap.cli")
    answers.write(f"{Path(adapterswap.__file__).parent.parent}\n")
    for line in sys.stdin:
        job = json.loads(line)
        target = results / f"{job['group'].replace('/', '__')}.json"
        in_child(job, root / job["group"].replace("/", "__"), str(root), target)
        if not target.exists():
            lost = {step["cell"]: {"outcome": {"lost": f"no result after {TOO_LONG} s"}} for step in job["steps"]}
            target.write_text(json.dumps(lost))
        answers.write(f"{target}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
