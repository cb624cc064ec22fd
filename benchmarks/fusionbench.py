"""FusionBench's table of LoRA on Flan-T5-base: every method that combines eight experts, scored on GLUE.

    pip install --no-deps fusion-bench              # only its prompts are read
    python benchmarks/fusionbench.py FOLDER         # the first 200 rows of each task
    python benchmarks/fusionbench.py FOLDER --limit 0 --only 'pretrained,individual,average,task arithmetic'

Base, adapters and rows come from the Hub. Prompts, labels and scores are FusionBench's: greedy answers of at most ten
tokens, exact match, and Spearman's ρ for STS-B. Each composition is merged into full weights, so that no method is
reduced to a rank. GLUE's test labels are not public, so everything is scored on validation rows, and nothing is chosen:
the configurations below were written down before any score was seen. A row of the table with a file in FOLDER is
finished, so the same command resumes a stopped run.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from adapterswap import Composition, compose, merge
from adapterswap.kit.files.yaml import read_recipe, shipped_recipes

TEMPLATES = Path("tasks", "flan_t5_text_generation", "glue_prompt_templates.py")
REGRESSION = "stsb"
SPLITS = {"mnli": "validation_matched"}
BATCH = 32
MAX_LENGTH = 10  # of an answer in tokens, with the one that starts it

# As rules: λ = 0.3 where a method sums, as there; else 1. Densities are the papers' or mergekit's.
TRIMMED = {"density": 0.2}
METHODS: dict[str, dict[str, Any]] = {
    "average": {"method": "linear"},
    "task arithmetic": {"method": "linear", "weight": 0.3, "normalize": False},
    # There, TIES sums the entries that agree, and keeps the largest 20 % of all parameters of the model. LoRA on q and
    # v of Flan-T5-base changes 14 % of them, so nothing is trimmed.
    "TIES as there": {"method": "ties", "density": 1.0, "normalize": False, "lambda": 0.3},
    "ties": {"method": "ties", **TRIMMED},
    "dare_linear": {"method": "dare_linear", "lambda": 0.3, **TRIMMED},
    "dare_ties": {"method": "dare_ties", "lambda": 0.3, **TRIMMED},
    "magnitude_prune": {"method": "magnitude_prune", "lambda": 0.3, **TRIMMED},
    "della": {"method": "della", **TRIMMED},
    "della_linear": {"method": "della_linear", "lambda": 0.3, **TRIMMED},
    "breadcrumbs": {"method": "breadcrumbs", "lambda": 0.3, "density": 0.9},
    "breadcrumbs_ties": {"method": "breadcrumbs_ties", "lambda": 0.3, "density": 0.9},
    "sce": {"method": "sce", "select_topk": 0.1},
    "ram": {"method": "ram"},
    "ramplus_tl": {"method": "ramplus_tl"},
    "magmax": {"method": "magmax"},
    "multislerp": {"method": "multislerp"},
    "model_stock": {"method": "model_stock"},
    "karcher": {"method": "karcher"},
    "tsv": {"method": "tsv"},
    "iso_c": {"method": "iso_c"},
    "iso_cts": {"method": "iso_cts"},
    "knots_ties": {"method": "knots_ties", **TRIMMED},
    "knots_dare_ties": {"method": "knots_dare_ties", **TRIMMED},
    "core_ties": {"method": "core_ties", **TRIMMED},
    "core_dare_ties": {"method": "core_dare_ties", **TRIMMED},
    "cart": {"method": "cart"},
    "wudi": {"method": "wudi"},
}


class Task(NamedTuple):
    """A task of GLUE: its prompts, and the answers that count as right."""

    name: str
    prompts: tuple[str, ...]
    answers: tuple[str, ...]

    def score(self, outputs: Sequence[str]) -> float:
        """The share of equal answers, or Spearman's ρ of numbers; what is not a number counts as 0, as there."""
        if self.name != REGRESSION:
            return statistics.fmean(output == answer for output, answer in zip(outputs, self.answers, strict=True))
        from scipy.stats import spearmanr

        numbers, wanted = [_number(text) for text in outputs], [_number(text) for text in self.answers]
        # Equal answers throughout have no ranks; they score 0, so that a mean over tasks exists.
        return float(spearmanr(numbers, wanted)[0]) if len(set(numbers)) > 1 else 0.0


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return 0.0 if math.isnan(number) else number


def templates() -> Mapping[str, Mapping[str, Any]]:
    """FusionBench's templates by task, from the installed package; its other modules are not imported."""
    spec = find_spec("fusion_bench")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The prompts are FusionBench's: pip install --no-deps fusion-bench")
    found = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / TEMPLATES))
    return found["glue_prompt_templates"]  # type: ignore[no-any-return]


def make_task(name: str, template: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Task:
    """The prompts and answers of rows with GLUE's columns. A row without a label is an error."""
    target = template["target_text"]
    answers = [target.format(row["label"]) if isinstance(target, str) else target[str(row["label"])] for row in rows]
    return Task(name, tuple(template["input_text"].format(**row) for row in rows), tuple(answers))


def glue_rows(name: str, folder: Path | None, limit: int) -> list[dict[str, Any]]:
    """The first validation rows of a task, from the Hub or from `folder`/TASK.jsonl; all if `limit` is 0."""
    from datasets import load_dataset

    if folder is None:
        rows = load_dataset("nyu-mll/glue", name, split=SPLITS.get(name, "validation"))
    else:
        rows = load_dataset("json", data_files=str(folder / f"{name}.jsonl"), split="train")
    return list(rows.select(range(min(limit or len(rows), len(rows)))))


class Judge:
    """Scores models of one base on all tasks."""

    def __init__(self, base: str, tasks: Sequence[Task], device: str) -> None:
        from transformers import AutoTokenizer

        self.base, self.tasks, self.device = base, tasks, device
        self.tokenizer = AutoTokenizer.from_pretrained(base)

    def scores(self, folder: str | Path, only: str | None = None) -> dict[str, float]:
        """Task → score × 100 of the model in `folder`, on all tasks or on one."""
        from transformers import AutoModelForSeq2SeqLM

        model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval().to(self.device)
        return {
            task.name: 100 * task.score(self._outputs(model, task.prompts))
            for task in self.tasks if only in (None, task.name)
        }  # fmt: skip

    def _outputs(self, model: Any, prompts: Sequence[str]) -> list[str]:
        import torch

        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        outputs = [""] * len(prompts)
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            batch = self.tokenizer([prompts[place] for place in places], padding=True, truncation=True,
                                   return_tensors="pt")  # fmt: skip
            with torch.inference_mode():
                ids = model.generate(**batch.to(self.device), max_length=MAX_LENGTH, num_beams=1, do_sample=False)
            for place, text in zip(places, self.tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
                outputs[place] = text
        return outputs


def rows_of(judge: Judge, experts: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """The rows of the table and how to compute each: the base, each expert on its own task, all methods."""

    def scored(names: Sequence[str], only: str | None = None, weight: float = 1.0, **more: Any) -> dict[str, float]:
        rule = {"blend": dict.fromkeys(names, weight), **more}
        used = {name: experts[name] for name in names}
        with TemporaryDirectory() as scratch:
            plan = compose(Composition(base_model=judge.base, experts=used, rules=[rule]))
            return judge.scores(merge(plan, judge.base, out_path=Path(scratch) / "merged"), only)

    def individual() -> dict[str, float]:
        return {task: score for name in experts for task, score in scored([name], only=name).items()}

    yield "pretrained", lambda: judge.scores(judge.base)
    yield "individual", individual
    for name, fields in METHODS.items():
        yield name, partial(scored, [*experts], **fields)


def line(name: str, scores: Mapping[str, float]) -> str:
    cells = [*(f"{score:.1f}" for score in scores.values()), f"{statistics.fmean(scores.values()):.1f}"]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=200, help="rows of each task; 0: all")
    parser.add_argument("--only", help="rows of the table, separated by commas")
    parser.add_argument("--recipe", default="compose/papers/fusion-bench", help="the base and the experts")
    parser.add_argument("--rows", type=Path, help="a folder with TASK.jsonl instead of the Hub's GLUE")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    shipped = shipped_recipes()
    path = shipped.get(options.recipe, Path(options.recipe))
    recipe = read_recipe(path, Composition)
    assert recipe.base_model is not None
    found = templates()
    tasks = [make_task(name, found[name], glue_rows(name, options.rows, options.limit)) for name in recipe.experts]
    judge = Judge(recipe.base_model, tasks, options.device)
    chosen = options.only.split(",") if options.only else None
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"| | {' | '.join(task.name for task in tasks)} | mean |\n|---|{'---:|' * (len(tasks) + 1)}", flush=True)
    for name, compute in rows_of(judge, recipe.experts):
        if chosen is not None and name not in chosen:
            continue
        record = options.folder / f"{name}.json"
        conditions = {"limit": options.limit, "base": recipe.base_model, "experts": recipe.experts}
        conditions |= {"versions": versions(), "device": options.device}
        if not record.exists() or (read := json.loads(record.read_text()))["conditions"] != conditions:
            read = {"row": name, "fields": METHODS.get(name), "scores": compute(), "conditions": conditions}
            record.write_text(json.dumps(read, indent=1) + "\n")
        print(line(name, read["scores"]), flush=True)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("adapterswap", "torch", "transformers", "fusion-bench"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a copy on the path, without metadata
            found[name] = None
    return found


if __name__ == "__main__":
    main()
