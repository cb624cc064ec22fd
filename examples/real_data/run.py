"""Real text, end to end: a base, two experts trained on it, their composition, evaluation, held-out losses.

    python examples/real_data/run.py                    # about four minutes on two CPU cores, no network

Every command is printed before it is run; they are the ones that README.md explains. The output goes to
examples/real_data/out/.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).parent
DATA = HERE / "data"
TASKS = "mgsm_direct_sw,mgsm_direct_en"


def command(*arguments: object) -> None:
    """Print an adapterswap command, and run it in this process (saving each a start-up)."""
    from adapterswap.cli import main

    words = [str(argument) for argument in arguments]
    print(f"\n$ adapterswap {shlex.join(words)}", flush=True)
    main(words, prog_name="adapterswap", standalone_mode=False)


def run(
    out: Path, *, pretrain_steps: int, expert_steps: int | None, limit: int, overwrite: bool = False
) -> dict[str, dict[str, dict[str, float]]]:
    """The whole example into the folder `out`; returns what results.json holds."""
    sys.path.insert(0, str(HERE))
    from heldout import heldout_losses
    from make_base import make_base

    again = ["--overwrite"] if overwrite else []
    base, experts = out / "base", {name: out / "experts" / name for name in ("math", "swahili")}
    print(f"make_base.py: a tokenizer and a Llama of 2.6 million parameters, pretrained for {pretrain_steps} steps")
    make_base(DATA, base, steps=pretrain_steps)

    for name, folder in experts.items():
        shorter = [] if expert_steps is None else ["--set", f"training.max_steps={expert_steps}"]
        words = ["train", HERE / f"{name}.yaml", "--base-model", base, "--out-path", folder]
        command(*words, *shorter, *again)

    composed = out / "math-swahili"
    zones = ["--bottom", 2, "--top", 1]
    command(
        "compose", "-t", experts["math"], "-l", experts["swahili"], *zones, "--base-model", base, "-o", composed, *again
    )

    settings = ["--num-fewshot", 2, "--limit", limit, "--max-gen-toks", 48, "--batch-size", limit]
    scored = {"base": None, **experts, "composition": composed}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, adapter in scored.items():
        on_top = [] if adapter is None else ["--adapter", adapter]
        target = out / "evaluation" / name
        command("evaluate", "--base-model", base, *on_top, "--tasks", TASKS, *settings, "--out-path", target, *again)
        told = json.loads((target / "results.json").read_text(encoding="utf-8"))
        mgsm = {
            task["name"]: next(score["value"] for score in task["scores"] if score["filter"] == "normalized")
            for task in told["tasks"]
        }
        results[name] = {"heldout_loss": heldout_losses(base, adapter, DATA), "mgsm": mgsm}
    return results


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = "", "loss, math", "loss, Swahili", "MGSM sw", "MGSM en"
    table = Table(*columns, title="held-out loss in nats per token, and exact match (normalized)")
    for name, told in results.items():
        losses, mgsm = told["heldout_loss"], told["mgsm"]
        scores = f"{mgsm['mgsm_direct_sw']:.2f}", f"{mgsm['mgsm_direct_en']:.2f}"
        table.add_row(name, f"{losses['math']:.3f}", f"{losses['swahili']:.3f}", *scores)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-path", type=Path, default=HERE / "out", help="folder to write")
    parser.add_argument("--pretrain-steps", type=int, default=450, help="steps that the base is pretrained for")
    parser.add_argument("--expert-steps", type=int, help="steps of each expert, instead of the recipe's epochs")
    parser.add_argument("--limit", type=int, default=8, help="MGSM problems to a language")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run wrote there")
    options = parser.parse_args()
    if options.out_path.exists() and not options.overwrite:
        parser.error(f"{options.out_path} already exists; choose another --out-path or pass --overwrite")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs the network
    from transformers.utils import logging

    logging.disable_progress_bar()
    # PEFT uses a name that transformers has renamed; it cannot be fixed here.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    began = time.monotonic()
    results = run(
        options.out_path,
        pretrain_steps=options.pretrain_steps,
        expert_steps=options.expert_steps,
        limit=options.limit,
        overwrite=options.overwrite,
    )
    (options.out_path / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    show(results)
    print(f"{time.monotonic() - began:.0f} seconds")


if __name__ == "__main__":
    main()
