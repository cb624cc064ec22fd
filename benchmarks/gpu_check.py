"""Every place where a device matters, on the device and on the CPU: do both give the same, and how long does it take?

    make gpu-check                                              # or: python benchmarks/gpu_check.py OUT.json
    python benchmarks/gpu_check.py OUT.json --device cuda --base-model BASE --expert math=M --expert language=L

Meant to take ten minutes on one GPU; no GPU has run it yet. Prints a table and writes OUT.json, for an issue. Models
are the lab's base and two experts, trained on the CPU; with --base-model, live switching, merging, evaluation and vLLM
use yours instead. `difference` is that to the same computation on the CPU (of losses, of logits and weights relative to
the largest, of ΔW, or the share of other answers; in vLLM, to transformers), beside the largest that passes. `peer` is
the time of the libraries alone. Without a GPU everything runs on the CPU, and what needs one is skipped, with the
reason. Exits with 1 if anything failed or differs by more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import median
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import adapterswap as asw
from adapterswap.engines.live import LiveComposer, load_experts
from adapterswap.experiments.lab.bases import write_base
from adapterswap.experiments.lab.scenes import SCENES, language_rows, math_rows
from adapterswap.experiments.lab.seed import train_expert

HERE, SCENE, STEPS, REPEATS = Path(__file__).parent, SCENES["gap"], 30, 10
TASK = "lab_en"
PACKAGES = ("adapterswap", "torch", "transformers", "peft", "trl", "lm_eval", "vllm", "flash_attn", "bitsandbytes")
HEADINGS = ("place", "", "difference", "at most", "seconds", "on the CPU", "peer, seconds")


class Skipped(Exception):
    """Why a place cannot be checked here."""


class Found(NamedTuple):
    """What a place gave: its difference to the CPU, seconds here and on the CPU, and those of the peer here."""

    difference: float
    largest: float
    seconds: float | None = None
    cpu_seconds: float | None = None
    peer: str = ""
    peer_seconds: float | None = None


def timed(call: Callable[[], Any], device: str = "cpu") -> tuple[Any, float]:
    start = time.perf_counter()
    value = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return value, time.perf_counter() - start


class World:
    """The models that the places use, made when first needed."""

    def __init__(self, folder: Path, device: str, base: str | None, experts: dict[str, str]) -> None:
        self.folder, self.device, self.named = folder, device, experts
        self.base = Path(base) if base and Path(base).exists() else base or self.lab_base
        self.dtype = "auto" if base else torch.float32

    @cached_property
    def lab_base(self) -> Path:
        write_base(SCENE, 0, self.folder / "base")
        return self.folder / "base"

    @cached_property
    def experts(self) -> dict[str, str]:
        if not self.named:
            self.losses("math", device="cpu")
            self.losses("language", device="cpu")
        return self.named or {name: str(self.folder / f"{name}-cpu") for name in ("math", "language")}

    @cached_property
    def swap(self) -> asw.Plan:
        math, language = self.experts.values()
        return asw.layer_swap(math, language, base_model=self.base)

    @cached_property
    def tasks(self) -> Path:
        sys.path.insert(0, str(HERE.parent / "examples" / "which_layers"))
        from make_tasks import make_tasks

        make_tasks(self.folder / "tasks")
        return self.folder / "tasks"

    def losses(self, name: str, label: str = "", **training: Any) -> float:
        """Train a lab expert for some steps, and return the last loss."""
        draw = {"math": math_rows, "language": language_rows}[name]
        out = self.folder / f"{name}-{label or training['device']}"
        return train_expert(self.lab_base, out, draw(SCENE, 0)[: 32 * STEPS], 0, learning_rate=1e-3,
                            max_steps=STEPS, logging_steps=STEPS, **training)  # fmt: skip

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def need_gpu(self, package: str = "") -> None:
        if not self.on_gpu:
            raise Skipped("needs a CUDA device")
        if package and find_spec(package) is None:
            raise Skipped(f"needs {package}")


def training(world: World) -> Found:
    there, cpu = timed(lambda: world.losses("math", "reference", device="cpu"))
    loss, seconds = timed(lambda: world.losses("math", "here", device=world.device.split(":")[0]), world.device)
    words = ["--size", "pico", "--steps", 12, "--device", world.device.split(":")[0], "--json"]
    ratios = json.loads(script("training.py", *words))["ratios"]["wall" if world.on_gpu else "cpu"]
    peer = f"a step of TRL's takes {ratios['throughput against TRL']:.2f} ×"
    return Found(abs(loss - there), 0.1, seconds, cpu, peer)


def flash_attention(world: World) -> Found:
    world.need_gpu("flash_attn")
    sdpa, peer = timed(lambda: world.losses("math", "sdpa", device="cuda", attn_implementation="sdpa"))
    loss, seconds = timed(
        lambda: world.losses("math", "flash", device="cuda", attn_implementation="flash_attention_2"), "cuda"
    )
    return Found(abs(loss - sdpa), 0.1, seconds, None, "sdpa", peer)


def eight_bit_optimizer(world: World) -> Found:
    world.need_gpu("bitsandbytes")
    whole, peer = timed(lambda: world.losses("math", "adamw", device="cuda"))
    loss, seconds = timed(lambda: world.losses("math", "8bit", device="cuda", optimizer="paged_adamw_8bit"), "cuda")
    return Found(abs(loss - whole), 0.2, seconds, None, "AdamW in float32", peer)


def live(world: World) -> Found:
    tokenizer = AutoTokenizer.from_pretrained(world.base)
    ids = tokenizer("Anna has seven pens . Anna finds five pens .", return_tensors="pt").input_ids
    logits, seconds = {}, {}
    for device in dict.fromkeys(("cpu", world.device)):
        base = AutoModelForCausalLM.from_pretrained(world.base, dtype=world.dtype).to(device).eval()
        model = load_experts(base, world.swap)
        composer = LiveComposer(model)
        with composer.use(world.swap), torch.inference_mode():
            logits[device] = model(input_ids=ids.to(device)).logits.float().cpu()
        names = list(model.peft_config)
        seconds[device] = median(lambda composer=composer: composer.set(world.swap), REPEATS, device) / 1000
        composer.reset()
        if device == world.device:
            peer = median(lambda model=model, names=names: model.set_adapter(names[0]), REPEATS, device) / 1000
    scale = float(logits["cpu"].abs().max())
    difference = float((logits["cpu"] - logits[world.device]).abs().max()) / scale
    return Found(difference, 0.05, seconds[world.device], seconds["cpu"], "set_adapter", peer)


def merging(world: World) -> Found:
    math, language = world.experts.values()
    plan = asw.soup(math, language, base_model=world.base)
    places = {device: world.folder / f"merged-{device.replace(':', '-')}" for device in ("cpu", world.device)}
    seconds = {d: timed(lambda d=d: asw.merge(plan, world.base, out_path=places[d], device=d, overwrite=True))[1]
               for d in places}  # fmt: skip

    def peer() -> None:
        from peft import PeftModel

        model = AutoModelForCausalLM.from_pretrained(world.base, dtype=world.dtype).to(world.device)
        PeftModel.from_pretrained(model, math).merge_and_unload().save_pretrained(world.folder / "peer")

    return Found(weights_apart(*places.values()), 1e-2, seconds[world.device], seconds["cpu"],
                 "PEFT, one adapter", timed(peer, world.device)[1])  # fmt: skip


def weights_apart(one: Path, *others: Path) -> float:
    """The largest difference of a weight between two folders, relative to the largest entry of its tensor."""
    worst = 0.0
    for file in one.glob("*.safetensors"):
        reference = load_file(file)
        for other in others:
            for name, tensor in load_file(other / file.name).items():
                apart = (tensor.float() - reference[name].float()).abs().max()
                worst = max(worst, float(apart / reference[name].float().abs().max().clamp_min(1e-30)))
    return worst


def extracting(world: World) -> Found:
    full = world.folder / "merged-cpu"
    places = {device: world.folder / f"cut-{device.replace(':', '-')}" for device in ("cpu", world.device)}
    errors, seconds = {}, {}
    for device, place in places.items():
        cut, seconds[device] = timed(
            lambda device=device, place=place: asw.extract(
                full, world.base, place, rank=8, device=device, overwrite=True
            )
        )
        errors[device] = cut.error
    # Where singular values are close to each other, the best factors are not unique, but their error is.
    return Found(abs(errors["cpu"] - errors[world.device]), 1e-3, seconds[world.device], seconds["cpu"])


def evaluating(world: World) -> Found:
    tasks = world.tasks
    scores, seconds = {}, {}
    for device in dict.fromkeys(("cpu", world.device)):
        result, seconds[device] = timed(
            lambda device=device: asw.evaluate(
                world.base, TASK, plan=world.swap, batch_size=16, include_path=tasks, device=device
            )
        )
        scores[device] = [sample.scores for sample in result.samples]
    apart = [a != b for a, b in zip(scores["cpu"], scores[world.device], strict=True)]

    def peer() -> None:
        import lm_eval

        lm_eval.simple_evaluate(
            model="hf", model_args={"pretrained": str(world.folder / "merged-cpu")}, tasks=[TASK], batch_size=16,
            device=world.device, task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
        )  # fmt: skip

    there = timed(peer)[1]
    return Found(statistics.fmean(apart), 0.02, seconds[world.device], seconds["cpu"], "lm-eval, merged", there)


def in_vllm(world: World) -> Found:
    world.need_gpu("vllm")
    words: list[object] = ["--swaps", 4, "--documents", 8, "--tokens", 32, "--device", "cuda", "--dtype", "bfloat16"]
    if world.named:
        math, language = world.experts.values()
        words += ["--base", world.base, "--task", math, "--language", language]
    lines = script("engines.py", *words).splitlines()
    numbers = [re.findall(r"[\d.]+", line.replace("%", " ")) for line in lines[1:]]
    equal, total = map(int, numbers[2][-2:])
    seconds, peer = float(numbers[2][2]), float(numbers[0][2])  # all cells in flight, and in transformers
    return Found(1 - equal / total, 0.3, seconds, None, "transformers", peer)


def several_processes(world: World) -> Found:
    if world.on_gpu and torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    math, language = world.experts.values()
    words = ["evaluate", "--base-model", world.base, "-t", math, "-l", language, "--tasks", TASK, "--batch-size", 16,
             "--include-path", world.tasks, "--device", world.device.split(":")[0]]  # fmt: skip
    alone, together = world.folder / "alone", world.folder / "together"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    seconds = timed(lambda: python(*launch, "-m", "adapterswap", *words, "-o", together))[1]
    peer = timed(lambda: python("-m", "adapterswap", *words, "-o", alone))[1]
    same = (alone / "samples.jsonl").read_bytes() == (together / "samples.jsonl").read_bytes()
    return Found(float(not same), 0.0, seconds, None, "one process", peer)


def french(world: World) -> Found:
    """The lab's scene on a pretrained model: its scores beside those of docs/lab.md, which a CPU gave."""
    from adapterswap.experiments.lab.french import FrenchPlan
    from adapterswap.experiments.lab.smollm2 import INSTALL, package_file

    world.need_gpu()
    if package_file() is None:
        raise Skipped(INSTALL)
    recorded = json.loads((HERE.parent / "examples" / "smollm2" / "results.json").read_text(encoding="utf-8"))["scores"]
    plan = FrenchPlan.of(world.folder / "french", experts=HERE.parent / "examples" / "smollm2" / "experts")
    result, seconds = timed(lambda: plan.run(device=world.device))
    apart = max(abs(result.score(method) - score) for method, score in recorded.items())
    return Found(apart, 0.03, seconds, None, f"layer swap {result.score('layer swap'):.3f}")


PLACES: dict[str, Callable[[World], Found]] = {
    "training": training,
    "training with FlashAttention": flash_attention,
    "training with 8-bit AdamW": eight_bit_optimizer,
    "live switching": live,
    "merging": merging,
    "extracting": extracting,
    "evaluation": evaluating,
    "vLLM: a sweep": in_vllm,
    "several processes": several_processes,
    "French on a pretrained model": french,
}


def python(*words: object) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout).splitlines()[-1])
    return done.stdout


def script(name: str, *words: object) -> str:
    return python(HERE / name, *words)


def checked(world: World) -> Iterator[dict[str, Any]]:
    for place, check in PLACES.items():
        try:
            found = check(world)
            status = "ok" if found.difference <= found.largest else "differs"
            yield {"place": place, "status": status, **found._asdict()}
        except Skipped as reason:
            yield {"place": place, "status": "skipped", "reason": str(reason)}
        except Exception as error:  # each place is reported, whatever happens in it
            yield {"place": place, "status": "failed", "reason": f"{type(error).__name__}: {error}"}


def machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"device": device, "processor": platform.processor(), "python": platform.python_version()}
    if device.startswith("cuda"):
        found |= {"gpu": torch.cuda.get_device_name(device), "capability": torch.cuda.get_device_capability(device)}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def row(result: dict[str, Any]) -> str:
    def number(key: str, form: str) -> str:
        return format(result[key], form) if result.get(key) is not None else ""

    peer = " ".join(filter(None, (result.get("peer", ""), number("peer_seconds", ".3g"))))
    shown = [result["place"], result["status"], number("difference", ".2g"), number("largest", ".2g"),
             number("seconds", ".3g"), number("cpu_seconds", ".3g"), peer or result.get("reason", "")]  # fmt: skip
    return f"| {' | '.join(shown)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--base-model")
    parser.add_argument("--expert", action="append", default=[], metavar="NAME=PATH", help="two: task, language")
    options = parser.parse_args()
    experts = dict(text.partition("=")[::2] for text in options.expert)
    if bool(options.base_model) != (len(experts) == 2):
        parser.error("--base-model and two --expert belong together")
    results = []
    print(f"| {' | '.join(HEADINGS)} |\n|---|---|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for result in checked(World(Path(scratch), options.device, options.base_model, experts)):
            results.append(result)
            print(row(result), flush=True)
    content = {"machine": machine(options.device), "base_model": options.base_model, "places": results}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(any(result["status"] in ("failed", "differs") for result in results))


if __name__ == "__main__":
    main()
