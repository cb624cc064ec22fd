"""Training steps beside a plain TRL script with the same settings: tokens per second, memory.

    python benchmarks/training.py [--size pico|0.1b] [--steps 12] [--json]
    python benchmarks/training.py --size 8b --device cuda [--scratch DIR]
    python benchmarks/training.py --base-model BASE --rows math_english.jsonl --batch 16

These routes train the same rows with the same rsLoRA: `adapterswap train`; TRL's SFTTrainer with the same settings, and
with its own default of gradient checkpointing; `adapterswap train` with `simultaneous`, partition B in turns. Each is a
process of its own. On the CPU they take
turns step by step, the others waiting, so that whatever else the machine does hits all alike; on CUDA one runs after
the other, so that each has the memory to itself. A step is timed from the end of the last one, so that everything
between two steps counts; the first is left out. Told are medians over steps, and medians of the ratios of steps made
one after the other, in wall seconds and in processor seconds: on a busy machine, believe the latter.

Without --rows, rows are of one length, so that no padding blurs the numbers. With a base and rows of your own (prompt
and completion), steps have the same rows in every route, and the largest difference of their losses is
printed beside the medians. `8b` has the shape of Llama-3.1-8B in bfloat16 with random
weights (16 GB of scratch), rank 64, 1,024 tokens to a row.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOLD = "step: "
ROUTES = ("adapterswap", "TRL", "TRL, its defaults", "in turns")
VOCABULARY = 4096
# hidden, intermediate, layers, heads, heads of keys and values; rank; rows on the device, batches to a step, tokens
SIZES = {
    "pico": ((64, 192, 8, 4, 2), 8, (4, 2, 64)),
    "0.1b": ((768, 2048, 12, 12, 4), 16, (2, 2, 64)),
    "8b": ((4096, 14336, 32, 32, 8), 64, (4, 2, 1024)),
}


@dataclass(frozen=True)
class Step:
    """Wall seconds and processor seconds of a step, the peak of memory so far (the GPU's, or this process's), and the
    loss of the step before.
    """

    wall: float
    cpu: float
    megabytes: float
    loss: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="pico")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--base-model", type=Path, help="A base of your own, with --rows.")
    parser.add_argument("--rows", type=Path, help="JSON lines with prompt and completion.")
    parser.add_argument("--batch", type=int, default=16, help="Rows in a step, with --rows.")
    parser.add_argument("--scratch", type=Path, help="A folder for base, rows and outputs; default: a temporary one.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--route", choices=ROUTES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    if options.route:
        Clock.install(options.device)
        train_plainly(options) if options.route.startswith("TRL") else train_here(options)
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        options.scratch = Path(scratch)
        take_base_and_rows(options) if options.rows else make_base_and_rows(options)
        routes = ROUTES[:3] if options.rows else ROUTES
        groups = [routes] if options.device == "cpu" else [(route,) for route in routes]
        found: dict[str, list[Step]] = {}
        for routes in groups:
            found |= take_turns(routes, options)
    tell(found, options)


def take_turns(routes: Sequence[str], options: argparse.Namespace) -> dict[str, list[Step]]:
    """Start the routes together, let them make a step each in turn, and end them: what each step took."""
    common = [
        "--size",
        options.size,
        "--device",
        options.device,
        "--dtype",
        options.dtype,
        "--steps",
        options.steps,
        "--scratch",
        options.scratch,
        "--batch",
        options.batch,
        *(["--rows", options.rows] if options.rows else []),
    ]
    children = {}
    for route in routes:
        command = [str(part) for part in [sys.executable, __file__, "--route", route, *common]]
        children[route] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[Step]] = {route: [] for route in routes}
    try:
        for child in children.values():
            next_step(child)  # the first, which everything is made ready in
        for _ in range(options.steps - 1):
            for route, child in children.items():
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
                found[route].append(next_step(child))
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return found


def next_step(child: subprocess.Popen[str]) -> Step:
    """What the child tells of its next step, past whatever else it prints."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(TOLD):
            return Step(**json.loads(line.removeprefix(TOLD)))
    raise RuntimeError(f"{child.args} ended with {child.wait()}")


def tell(found: dict[str, list[Step]], options: argparse.Namespace) -> None:
    _, _, (rows, batches, length) = shape_of(options)
    medians = {
        route: {key: statistics.median(getattr(step, key) for step in steps) for key in ("wall", "cpu", "megabytes")}
        for route, steps in found.items()
    }
    for numbers in medians.values():
        numbers["tokens_per_second"] = rows * batches * length / numbers["wall"]
    ratios = {
        clock: {
            "throughput against TRL": ratio(found["TRL"], found["adapterswap"], clock),
            "against TRL's defaults": ratio(found["TRL, its defaults"], found["adapterswap"], clock),
            **(
                {"a step in turns against a normal one": ratio(found["in turns"], found["adapterswap"], clock)}
                if "in turns" in found
                else {}
            ),
        }
        for clock in ("wall", "cpu")
    }
    losses = [(one.loss or 0.0, two.loss or 0.0) for one, two in zip(found["adapterswap"], found["TRL"], strict=True)]
    apart = max(abs(one - two) / max(two, 1e-9) for one, two in losses)
    if options.json:
        content = {"medians": medians, "ratios": ratios, "losses": losses, "losses_apart": apart}
        print(json.dumps({"size": options.size, "device": options.device, **content}, indent=2))
        return
    unit = "rows" if options.rows else "tokens"
    print(f"| route | {unit} per second | seconds a step | processor seconds a step | peak MB |\n|---|---|---|---|---|")
    for route, n in medians.items():
        print(f"| {route} | {n['tokens_per_second']:.0f} | {n['wall']:.3f} | {n['cpu']:.3f} | {n['megabytes']:.0f} |")
    for clock, numbers in ratios.items():
        print(f"{clock}: " + ", ".join(f"{name} {value:.3f}" for name, value in numbers.items()))
    if options.rows:
        print(f"losses of adapterswap and TRL: {apart:.1e} apart at most, relatively")


def shape_of(options: argparse.Namespace) -> tuple[Any, int, tuple[int, int, int]]:
    """The base's shape, the rank, and rows on the device, batches to a step, and tokens to a row (1 if rows differ)."""
    if options.rows:
        return None, 16, (options.batch, 1, 1)
    return SIZES[options.size]


def ratio(over: Sequence[Step], under: Sequence[Step], clock: str) -> float:
    """The median of the ratios of steps that were made one after the other."""
    return statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in zip(over, under, strict=True))


class Clock:
    """At the end of each step, tells what it took and waits for a signal, in whichever trainer runs here."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._begin = (0.0, 0.0)
        self.loss: float | None = None

    @classmethod
    def install(cls, device: str) -> None:
        import transformers.trainer
        from transformers import TrainerCallback

        clock = cls(device)

        class Told(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.tick()

            def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
                clock.loss = (logs or {}).get("loss", clock.loss)

        transformers.trainer.DEFAULT_CALLBACKS.append(Told)  # every trainer has these

    def tick(self) -> None:
        import torch

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        if self._device == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 1e6
        step = Step(time.perf_counter() - self._begin[0], time.process_time() - self._begin[1], peak, self.loss)
        print(TOLD + json.dumps(asdict(step)), flush=True)
        sys.stdin.readline()
        self._begin = time.perf_counter(), time.process_time()


def take_base_and_rows(options: argparse.Namespace) -> None:
    """Put the user's base and rows into the scratch folder; the rows also in the order that adapterswap shuffles to."""
    import numpy as np

    (options.scratch / "base").symlink_to(options.base_model.resolve())
    lines = options.rows.read_text(encoding="utf-8").splitlines()
    (options.scratch / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    order = np.random.default_rng(0).permutation(len(lines))
    (options.scratch / "shuffled.jsonl").write_text("\n".join(lines[place] for place in order), encoding="utf-8")


def make_base_and_rows(options: argparse.Namespace) -> None:
    import random

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    (hidden, intermediate, layers, heads, kv), _, (rows, batches, length) = SIZES[options.size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256 if options.size == "8b" else VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
    )
    with torch.device(options.device):
        model = LlamaForCausalLM(config).to(getattr(torch, options.dtype))
    base = options.scratch / "base"
    model.save_pretrained(base)
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(base)
    chance = random.Random(0)
    with (options.scratch / "rows.jsonl").open("w") as file:
        for _ in range(rows * batches * (options.steps + 1)):
            text = [f"w{chance.randrange(2, VOCABULARY)}" for _ in range(length - 1)]  # and the end-of-sequence token
            half = length // 2
            row = {"prompt": " ".join(text[:half]), "completion": " " + " ".join(text[half:])}
            file.write(json.dumps(row) + "\n")


def longest(options: argparse.Namespace, length: int) -> int:
    """The longest row allowed: rows of one's own have at most 256 tokens."""
    return 256 if options.rows else max(length, 1024)


def train_here(options: argparse.Namespace) -> None:
    from adapterswap.experiments.training import TrainRecipe, train

    _, rank, (rows, batches, length) = shape_of(options)
    turns = options.route == "in turns"
    source = {"path": str(options.scratch / "rows.jsonl"), "prompt": "{prompt}", "completion": "{completion}"}
    recipe = TrainRecipe.model_validate(
        {
            "base_model": str(options.scratch / "base"),
            "adapter": {"r": rank, "alpha": 16},
            "datasets": [source | {"side": "task"}, source | {"side": "language"}] if turns else [source],
            "simultaneous": {"partition": "B"} if turns else None,
            "training": {
                "max_steps": options.steps,
                "batch_size": rows,
                "gradient_accumulation": batches,
                "max_length": longest(options, length),
                "gradient_checkpointing": options.size == "8b",
                "device": options.device,
                "dtype": options.dtype,
                "save_every_samples": None,
                "logging_steps": 1,
                "schedule": "constant",
                "warmup": 0,
            },
        }
    )
    train(recipe, out_path=options.scratch / "expert", overwrite=True, progress=False)


def train_plainly(options: argparse.Namespace) -> None:
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    _, rank, (rows, batches, length) = shape_of(options)
    cuda = options.device == "cuda"
    base = options.scratch / "base"
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, options.dtype)),
        args=SFTConfig(
            output_dir=str(options.scratch / "plain"),
            max_steps=options.steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=batches,
            learning_rate=1e-4,
            max_length=longest(options, length),
            gradient_checkpointing=options.size == "8b" or options.route != "TRL",
            lr_scheduler_type="constant",
            logging_steps=1,
            seed=0,
            data_seed=0,
            bf16=options.dtype == "bfloat16",
            use_cpu=not cuda,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset(
            "json",
            data_files=str(options.scratch / ("shuffled.jsonl" if options.rows else "rows.jsonl")),
            split="train",
            cache_dir=str(options.scratch / options.route),
        ),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=16, use_rslora=True, target_modules=projections
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
