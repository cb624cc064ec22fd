"""Compare every merge method on fresh seeds of the lab, with an equal budget, beside controls.

    python benchmarks/methods_lab.py FOLDER [--seeds 10] [--first-seed 5] [--scene gap] [--methods soup,ties] [--jobs 2]

A seed is a base and its experts. Each method has at most eight configurations, which were fixed before the comparison
was run; the first of a list is the method's default, if the list has it, and wins ties. They are evaluated on
development problems in xx, as full float32 weights, and only the chosen ones on the test set. A seed with a seed-N.json
is finished, so the same command resumes a stopped run; a seed takes about nine minutes on one core.

FOLDER/results.json becomes docs/lab_methods.json, of which scripts/methods_page.py makes the tables of docs/methods.md.
Seeds 0 to 4 were used to design scenes and training.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from adapterswap import Composition, compose, merge
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE
from adapterswap.experiments.intervals import DIFFERENCE, mean_interval
from adapterswap.experiments.lab.bases import NUM_LAYERS, write_base
from adapterswap.experiments.lab.scenes import SCENES, Scene, draw_problems, language_rows, math_rows, source_rows
from adapterswap.experiments.lab.seed import LEARNING_RATES, Questions, train_expert
from adapterswap.experiments.lab.seeds import run_seeds
from adapterswap.experiments.lab.study import summarize
from adapterswap.experiments.lab.tasks import LabRow

Fields = dict[str, Any]
"""Fields of a composition, apart from its experts and its method."""
Job = tuple[Fields, Plan | Path | None, Path]
"""A configuration: its fields, what is merged (None: nothing), and into which base."""


def grid(**values: Sequence[Any]) -> list[Fields]:
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def shares(*language: float) -> list[Fields]:
    return [{"task_weight": round(1 - share, 2), "language_weight": share} for share in language]


ZONES = grid(bottom=(3, 1, 2, 4), top=(0, 1))
SCALES = grid(scale=(1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2))
SHARES = shares(0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8)
SUMS = grid(density=(0.3, 0.8), scale=(1.0, 0.6, 0.8, 1.2))
ELECTED = grid(density=(0.3, 0.8), scale=(1.0, 0.8, 1.3, 1.6))  # entries of one expert alone keep their size
CHOICES: dict[str, list[Fields]] = {
    "layer_swap": ZONES,
    "soup": SHARES,
    "task_arithmetic": SCALES,
    "ties": ELECTED,
    "dare_linear": SUMS,
    "dare_ties": ELECTED,
    "slerp": SHARES,
    "magnitude_prune": SUMS,
    "adamergex": grid(scale=(1.0, 0.2, 0.4, 0.6, 0.8, 1.2, 1.4, 1.6)),
    "della": ELECTED,
    "della_linear": SUMS,
    "breadcrumbs": SUMS,
    "breadcrumbs_ties": ELECTED,
    "sce": grid(select_topk=(1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)),
    "nuslerp": [{**s, "nuslerp_flatten": flatten} for s in shares(0.5, 0.2, 0.35, 0.65) for flatten in (True, False)],
    "multislerp": SHARES,
    "model_stock": grid(filter_wise=(False, True)),
    "nearswap": grid(t=(1e-3, 1e-4, 3e-4, 3e-3, 1e-2, 2e-2, 5e-2, 1e-1)),
    "karcher": [{}],
    "arcee_fusion": [{}],
    "tsv": SCALES,
    "iso_c": grid(scale=(1.0, 0.6, 0.8, 1.2, 1.4, 1.6, 2.0, 2.5)),
    "iso_cts": grid(common_space_fraction=(0.8, 0.5), scale=(1.0, 0.7, 1.4, 2.0)),
    "knots_ties": ELECTED,
    "knots_dare_ties": ELECTED,
    "core_ties": ELECTED,
    "core_dare_ties": ELECTED,
    "ram": grid(threshold=(1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    "ramplus_tl": grid(threshold=(1e-5, 1e-3), boost=(0.1, 0.5), boost_limit=(0.2, 1.0)),
    "magmax": SCALES,
    "cart": [{}],  # of two experts the soup, whatever its parameters
    "wudi": grid(learning_rate=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
}
REFERENCE, MATH = COMPARED_WITH = ("layer_swap", "math expert")
FEW = (10, 30, 100)  # numbers of problems in xx to choose on, or to train on instead
TRAININGS = [{"learning_rate": rate, "max_steps": steps} for rate, steps in product((1.5e-3, 5e-4), (40, 10, 20, 80))]
CONTROLS = [
    "base", MATH, "language expert", "inverse swap", "reset", "random swap", "random sum",
    *(f"trained on {number}" for number in FEW),
]  # fmt: skip
SIZES = {"development": 300, "test": 1000, "english": 300}  # problems


def compare_seed(
    scene: Scene, methods: Sequence[str], folder: Path, sizes: Mapping[str, int], seed: int,
    tell: Callable[[str, float], None] = lambda step, share: None,
) -> dict[str, Any]:  # fmt: skip
    """Make a seed's models in `folder`/seed-N, evaluate everything, and write seed-N.json; read it if it exists.

    A row has its `configurations`; `development`, the accuracy of each; `chosen`, the index of the best on all
    development problems (`all`) and on few; `xx`, by index, and `en`: a character per test problem, 1 for right.
    """
    record, place = folder / f"seed-{seed}.json", folder / f"seed-{seed}"
    if record.exists():
        return json.loads(record.read_text())  # type: ignore[no-any-return]
    disable_progress_bar()
    shutil.rmtree(place, ignore_errors=True)
    problems = draw_problems(scene, "development", sizes["development"] + max(FEW))
    tell("base and experts", 0)
    make_models(scene, problems[sizes["development"] :], place, seed)
    test = draw_problems(scene, "test", sizes["test"])
    questions = [Questions(problems, "xx"), Questions(test, "xx"), Questions(test[: sizes["english"]], "en")]
    rows: dict[str, Any] = {}
    for name, jobs in jobs_of(methods, place):
        tell(name, len(rows) / (len(methods) + len(CONTROLS)))
        if name == "inverse swap":  # choosing would be unfair: inverse(b, 0) is swap(0, L - b)
            jobs = [jobs[rows[REFERENCE]["chosen"]["all"]]]
        rows[name] = evaluated(jobs, *questions, () if name.startswith("trained") else FEW)
    record.write_text(json.dumps({"seed": seed, "rows": rows}))
    return {"seed": seed, "rows": rows}


def make_models(scene: Scene, few: Sequence[Any], place: Path, seed: int) -> None:
    """The base, its experts, the math expert in full, and training on top of that on problems in xx."""
    write_base(scene, seed, place / "base")
    for name, rows in {"math": math_rows, "language": language_rows, "source": source_rows}.items():
        rate = LEARNING_RATES["math" if name == "math" else "language"]
        train_expert(place / "base", place / name, rows(scene, seed), seed, learning_rate=rate)
    write_random(place / "language", place / "random", seed)
    merge(place / "math", place / "base", out_path=place / "math-merged")
    worked = [LabRow(problem.prompt("xx"), problem.answer) for problem in few]
    for number, options in product(FEW, TRAININGS):
        train_expert(place / "math-merged", trained(place, number, options), worked[:number], seed,
                     batch_size=10, **options)  # fmt: skip


def trained(place: Path, number: int, options: Fields) -> Path:
    return place / f"trained-{number}-{options['learning_rate']:g}-{options['max_steps']}"


def write_random(expert: Path, out_path: Path, seed: int) -> None:
    """Write an adapter like `expert` with random factors; each module's ΔW has the same norm."""
    from safetensors.numpy import load_file, save_file

    tensors, rng = load_file(expert / "adapter_model.safetensors"), np.random.default_rng(seed)
    drawn: dict[str, NDArray[np.float32]] = {}
    for name in sorted(name for name in tensors if "lora_A" in name):
        partner = name.replace("lora_A", "lora_B")
        a, b = (rng.standard_normal(tensors[key].shape).astype(np.float32) for key in (name, partner))
        factor = np.linalg.norm(tensors[partner] @ tensors[name]) / np.linalg.norm(b @ a)
        drawn[name], drawn[partner] = a, (b * factor).astype(np.float32)
    out_path.mkdir()
    save_file(drawn, out_path / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copy(expert / "adapter_config.json", out_path)


def jobs_of(methods: Sequence[str], place: Path) -> Iterator[tuple[str, list[Job]]]:
    """The configurations of every row. The layer swap comes before its inverse."""
    base, merged = place / "base", place / "math-merged"

    def composed(method: str, task: str, language: str, configurations: list[Fields]) -> list[Job]:
        languages = [language, "source"] if method == "adamergex" else [language]
        experts = {name: str(place / name) for name in (task, *languages) if name != BASE}
        jobs: list[Job] = []
        for fields in configurations:
            composition = Composition(
                experts=experts, base_model=str(base), num_layers=NUM_LAYERS,
                method=method, task=task, language=languages[0] if len(languages) == 1 else languages, **fields,
            )  # fmt: skip
            jobs.append((fields, compose(composition), base))
        return jobs

    for name in dict.fromkeys((REFERENCE, *methods)):
        yield name, composed(name, "math", "language", CHOICES[name])
    yield "base", [({}, None, base)]
    yield MATH, [({}, place / "math", base)]
    yield "language expert", [({}, place / "language", base)]
    yield "inverse swap", composed(REFERENCE, "language", "math", ZONES)
    yield "reset", composed(REFERENCE, "math", BASE, ZONES)
    yield "random swap", composed(REFERENCE, "math", "random", ZONES)
    yield "random sum", composed("task_arithmetic", "math", "random", SCALES)
    for number in FEW:
        yield f"trained on {number}", [(options, trained(place, number, options), merged) for options in TRAININGS]


def evaluated(
    jobs: Sequence[Job], choosing: Questions, test: Questions, english: Questions, few: Sequence[int]
) -> dict[str, Any]:
    """Evaluate configurations, choose the best (the first of equals), and score these on the test set.

    The last max(FEW) problems of `choosing` are not among those that `all` chooses on.
    """
    split = choosing.number - max(FEW)
    right = [answers(job, choosing)[0] for job in jobs]
    accuracies = [float(row[:split].mean()) for row in right]
    chosen = {"all": int(np.argmax(accuracies))}
    chosen |= {str(n): int(np.argmax([row[split : split + n].sum() for row in right])) for n in few}
    marks = {place: list(map(_marks, answers(jobs[place], test, english))) for place in sorted(set(chosen.values()))}
    return {
        "configurations": [fields for fields, *_ in jobs],
        "development": accuracies,
        "chosen": chosen,
        "xx": {str(place): xx for place, (xx, _) in marks.items()},
        "en": marks[chosen["all"]][1],
    }


def answers(job: Job, *questions: Questions) -> list[NDArray[np.bool_]]:
    """Which questions a configuration answers correctly, with its weights written in full."""
    _, plan, base = job
    with TemporaryDirectory() as scratch:
        folder = base if plan is None else merge(plan, base, out_path=Path(scratch) / "merged")
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        return [asked.exact_match(model) for asked in questions]


def _marks(right: NDArray[np.bool_]) -> str:
    return "".join("01"[int(value)] for value in right)


def compared(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers over seeds, by row, and for training the best method chosen on the same problems."""

    def right(name: str, chosen_on: str = "all") -> NDArray[np.float64]:
        """Whether the chosen configuration answered each test problem in xx correctly (seeds, problems)."""
        found = [seed["rows"][name] for seed in seeds]
        return np.array([[mark == "1" for mark in row["xx"][str(row["chosen"][chosen_on])]] for row in found], float)

    def minus(of: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, float | None]:
        summary = mean_interval(of - other, names=("seeds",), documents="problems", bounds=DIFFERENCE)
        return {"mean": summary.mean, "low": summary.low, "high": summary.high}

    def spread(values: Sequence[float]) -> dict[str, float | None]:
        summary = summarize(values)
        return {"mean": summary.mean, "spread": summary.spread}

    rows: dict[str, Any] = {}
    for name, first in seeds[0]["rows"].items():
        own = [seed["rows"][name] for seed in seeds]
        rows[name] = {
            "configurations": len(first["configurations"]),
            "xx": spread(right(name).mean(1).tolist()),
            "en": spread([row["en"].count("1") / len(row["en"]) for row in own]),
            "per_seed": right(name).mean(1).tolist(),
            "chosen": [row["configurations"][row["chosen"]["all"]] for row in own],
            "few": {n: float(right(name, n).mean()) for n in first["chosen"] if n != "all"},
            "minus": {other: minus(right(name), right(other)) for other in COMPARED_WITH if other != name},
        }
    training = {}
    for n in map(str, FEW):
        best = max((name for name in rows if name not in CONTROLS), key=lambda name: rows[name]["few"][n])
        against = right(f"trained on {n}")
        training[n] = {"best": best, "minus": {name: minus(right(name, n), against) for name in (best, REFERENCE)}}
    return {"rows": rows, "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=5)
    parser.add_argument("--scene", choices=list(SCENES), default="gap")
    parser.add_argument("--methods", default=",".join(CHOICES))
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    methods, seeds = options.methods.split(","), range(options.first_seed, options.first_seed + options.seeds)
    options.folder.mkdir(parents=True, exist_ok=True)
    work = partial(compare_seed, SCENES[options.scene], methods, options.folder, SIZES)
    found = run_seeds(work, seeds, jobs=options.jobs, tell=lambda seed, step, _: print(f"seed {seed}: {step}"))
    results = {
        "scene": options.scene, "methods": methods, "controls": CONTROLS, "few": FEW, "sizes": SIZES,
        "budget": max(map(len, CHOICES.values())), "seeds": list(seeds), **compared(found),
        "versions": {name: version(name) for name in ("adapterswap", "torch", "transformers", "peft", "trl")},
    }  # fmt: skip
    (options.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
