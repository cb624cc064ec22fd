"""Compare the proposals of `adapterswap suggest` with every choice of b and u, on a finished lab run.

    python benchmarks/suggest.py lab-run [--texts 200]

For each seed, `suggest` proposes zones and owners of modules, by weights and by activations (on the first rows that
each expert was trained on). Accuracies are on the lab's 1,500 test problems in xx. The best b and u are chosen on the
development problems and, as a bound, on the test problems themselves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapterswap import Composition, LiveComposer, compose, open_adapter
from adapterswap.core.planning.plan import Plan
from adapterswap.engines.live import load_experts
from adapterswap.experiments.analysis.interference import measure
from adapterswap.experiments.analysis.suggestion import (
    choose_layers,
    importance_of_activations,
    importance_of_weights,
    read_texts,
)
from adapterswap.experiments.lab.bases import NUM_LAYERS
from adapterswap.experiments.lab.scenes import SCENES, draw_problems
from adapterswap.experiments.lab.seed import ZONES, Questions

ROWS = {"task": "math", "language": "language"}  # the lab's names for the rows of each side


def judge_seed(folder: Path, scene: str, texts: int) -> dict[str, tuple[float, Any]]:
    """Method → (accuracy, what was chosen) for one seed."""
    experts = {"task": open_adapter(folder / "math"), "language": open_adapter(folder / "language")}

    def planned(**fields: Any) -> Plan:
        return compose(Composition.model_validate({**fields, "num_layers": NUM_LAYERS}), experts)

    swaps = {(bottom, top): planned(bottom=bottom, top=top) for bottom, top in ZONES[1:]}
    model = load_experts(AutoModelForCausalLM.from_pretrained(folder / "base").eval(), planned(method="soup"))
    composer = LiveComposer(model)
    problems = {
        part: Questions(draw_problems(SCENES[scene], part, number), "xx")
        for part, number in (("development", 500), ("test", 1500))
    }

    def accuracy(wanted: Plan, part: str = "test") -> float:
        with composer.use(wanted):
            return float(problems[part].exact_match(model).mean())

    test = {zone: accuracy(swap) for zone, swap in swaps.items()}
    development = {zone: accuracy(swap, "development") for zone, swap in swaps.items()}
    found: dict[str, tuple[float, Any]] = {}
    for name, zone in (
        ("paper's default, scaled", (1, 0)),
        ("best on development", max(development, key=lambda zone: development[zone])),
        ("best on test (a bound)", max(test, key=lambda zone: test[zone])),
    ):
        found[name] = (test[zone], zone)
    found["mean of the grid"] = (float(np.mean(list(test.values()))), "")
    read = {side: read_texts(folder / f"{name}.jsonl", texts) for side, name in ROWS.items()}
    weights = importance_of_weights(*(measure(each, name=side) for side, each in experts.items()), NUM_LAYERS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    sides = {side: side for side in experts}
    activations = importance_of_activations(model, tokenizer, planned(method="soup"), sides=sides, texts=read)
    for importance in (weights, activations):
        for form in ("zones", "modules"):
            fields = choose_layers(importance, form=form).composition
            rules = fields.get("allocation", ())
            chosen = [(rule["layers"], rule["modules"]) for rule in rules if "modules" in rule] or list(fields.values())
            found[f"suggest, {importance.measured}, {form}"] = (accuracy(planned(**fields)), chosen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scene = json.loads((arguments.run / "results.json").read_text())["scene"]["name"]
    scores: dict[str, list[float]] = {}
    for folder in sorted(arguments.run.glob("seed-*")):
        for name, (accuracy, chosen) in judge_seed(folder, scene, arguments.texts).items():
            scores.setdefault(name, []).append(accuracy)
            print(f"{folder.name}  {name:32} {accuracy:.3f}  {chosen}", flush=True)
    for name, values in scores.items():
        print(f"{name:32} {np.mean(values):.3f}  {' '.join(f'{value:.3f}' for value in values)}")


if __name__ == "__main__":
    main()
