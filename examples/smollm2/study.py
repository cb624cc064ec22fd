"""The study of math in French and Spanish from nothing: rows, experts, scores, tables. It can be stopped and resumed.

    python examples/smollm2/study.py                    # all of it; the hours that it takes are printed first
    python examples/smollm2/study.py --pairs 1          # one pair of experts instead of five
    python examples/smollm2/study.py experts            # rows and experts only
    python examples/smollm2/study.py freeze             # registered/fifth-experts.json: hashes of rows and experts

PLAN.md has the plan, which is the fifth. Everything is written to study/ (`--out-path`): the base, the rows, an expert
in each folder of experts/, and a line of scores.jsonl for each finished composition and test.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from make_data import NAMES, drawn_rows

from adapterswap.experiments.lab.smollm2 import write_smollm2
from adapterswap.kit.files.hashes import sha256_of

HERE = Path(__file__).parent
DATA, REGISTERED = HERE / "data", HERE / "registered"
FROZEN = REGISTERED / "fifth-experts.json"
PAIRS = 5
LANGUAGES = ("fr", "es")
"""The languages with experts of their own. `de` has rows too, and no test."""

# Rows and experts


def experts_of(pair: int) -> list[str]:
    """The experts of a pair, in the order in which they are trained."""
    return [f"math-{pair}", *(f"{NAMES[language].lower()}-{pair}" for language in LANGUAGES)]


def write_rows(name: str, folder: Path) -> Path:
    """The rows on which an expert is trained, as a file. Those of math experts are in data/."""
    kind, _, seed = name.partition("-")

    if kind == "math":
        return DATA / f"{name}.jsonl"

    language = next(code for code, heading in NAMES.items() if heading.lower() == kind)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in drawn_rows(language, int(seed))]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(lines), encoding="utf-8")

    return file


def recipe_of(name: str, rows: Path, base: Path, device: str) -> dict[str, Any]:
    """The recipe of an expert: math.yaml or french.yaml with other rows, its seed, and float32."""
    kind, _, seed = name.partition("-")
    file = HERE / ("math.yaml" if kind == "math" else "french.yaml")
    recipe: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))

    recipe["base_model"] = str(base.absolute())
    recipe["datasets"][0]["path"] = str(rows.absolute())
    recipe["training"] |= {
        "seed": int(seed), "data_seed": int(seed), "device": device, "dtype": "float32", "save_every_samples": None,
    }  # fmt: skip

    # One batch of 40 instead of four of 10: the same step, with less to wait for.
    if kind != "math":
        recipe["training"] |= {"batch_size": 40, "gradient_accumulation": 1}

    return recipe


def expert_folder(name: str, out: Path) -> Path:
    """Where an expert is. The math expert of seed 0 is the shipped one."""
    return HERE / "experts" / "math" if name == "math-0" else out / "experts" / name


def train_experts(pairs: Iterable[int], out: Path, device: str) -> None:
    """Train the experts of the pairs that are not there yet, each with `adapterswap train`."""
    base = write_smollm2(out / "base")

    for folder in ("rows", "recipes", "experts"):
        (out / folder).mkdir(exist_ok=True)

    for name in [name for pair in pairs for name in experts_of(pair)]:
        target = expert_folder(name, out)
        if (target / "training.json").exists():
            continue

        recipe = out / "recipes" / f"{name}.yaml"
        content = recipe_of(name, write_rows(name, out / "rows"), base, device)
        recipe.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

        print(f"training {name}", flush=True)
        command = [sys.executable, "-m", "adapterswap", "train", str(recipe), "-o", str(target), "--overwrite"]
        subprocess.run(command, check=True)


def freeze(out: Path) -> dict[str, Any]:
    """What decides the experts: the rows and recipes of all pairs, and the weights of the experts that exist."""
    (out / "rows").mkdir(parents=True, exist_ok=True)
    names = [name for pair in range(PAIRS) for name in experts_of(pair)]
    rows = {name: write_rows(name, out / "rows") for name in [*names, *(f"german-{pair}" for pair in range(PAIRS))]}

    recipes = {}
    for kind in ("math", "french"):
        recipe = recipe_of(f"{kind}-0", Path("ROWS"), Path("BASE"), "cpu")
        recipes[kind] = {"adapter": recipe["adapter"], "training": recipe["training"]}

    weights = {name: expert_folder(name, out) / "adapter_model.safetensors" for name in names}

    return {
        "recipes of seed 0": recipes,
        "rows": {name: sha256_of(file) for name, file in rows.items()},
        "experts": {name: sha256_of(file) for name, file in weights.items() if file.exists()},
    }


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="all", choices=("all", "experts", "freeze"))
    parser.add_argument("--out-path", "-o", type=Path, default=HERE / "study")
    parser.add_argument("--pairs", type=int, default=PAIRS, choices=range(1, PAIRS + 1))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args()
    options.out_path.mkdir(parents=True, exist_ok=True)

    if options.step == "freeze":
        write_json(FROZEN, freeze(options.out_path))
    else:
        train_experts(range(options.pairs), options.out_path, options.device)


if __name__ == "__main__":
    main()
