"""The study of math in French and Spanish from nothing: rows, experts, scores, tables. It can be stopped and resumed.

    python examples/smollm2/study.py                    # all of it; the hours that it takes are printed first
    python examples/smollm2/study.py --pairs 1          # one pair of experts instead of five
    python examples/smollm2/study.py experts            # rows and experts only
    python examples/smollm2/study.py scores             # scores of the experts that exist
    python examples/smollm2/study.py table              # the tables, from results.json
    python examples/smollm2/study.py freeze             # registered/fifth-experts.json: hashes of rows and experts

PLAN.md has the plan, which is the fifth. Everything is written to study/ (`--out-path`): the base, the rows, an expert
in each folder of experts/, and a line of scores.jsonl for each finished composition and test. `scores` adds to
results.json what has the whole test. An expert is called by its seed: math-0, french-0; french-0-moved has its layers
4 to 7 in 0 to 3, and 0 to 3 in 4 to 7.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from make_data import NAMES, drawn_rows
from numpy.typing import NDArray
from scoring import Document, marks_of, score

from adapterswap.experiments.intervals import DIFFERENCE, Interval, mean_interval
from adapterswap.experiments.lab.smollm2 import write_smollm2
from adapterswap.kit.files.hashes import sha256_of

HERE = Path(__file__).parent
DATA, REGISTERED = HERE / "data", HERE / "registered"
FROZEN, RESULTS = REGISTERED / "fifth-experts.json", HERE / "results.json"
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


# Scores

BOTTOM = 8
WEIGHTS, BOTTOMS = (0.3, 0.5, 0.7, 1.0), (6, 8, 10)
"""Of the tuned sum and the tuned swap, chosen on development problems with pair 0."""
SUM = "math+own@method=task_arithmetic,language_weight={weight}"
SWAP = "math+own@bottom={bottom},top=0"
ROWS = {
    "base": "base",
    "language expert": "own",
    "soup": "math+own@method=soup",
    "inverse swap": f"own+math@bottom={BOTTOM},top=0",
    "math expert (= reset)": "math",
    "sum": "math+own@method=task_arithmetic",
    "tuned sum": SUM,
    "layer swap": SWAP.format(bottom=BOTTOM),
    "tuned swap": SWAP,
    "swap with the other language's layers": f"math+other@bottom={BOTTOM},top=0",
    "swap with layers in other places": f"math+own-moved@bottom={BOTTOM},top=0",
}
"""Rows of the tables → compositions, with `own` and `other` for a language's expert and the other one."""
BOTH_SKILLS = (
    "base", "language expert", "soup", "math expert (= reset)", "sum", "tuned sum", "layer swap",
)  # fmt: skip
"""Rows of which English problems and translations are asked too."""


SHIPPED = f"math-0+shipped@bottom={BOTTOM},top=0"
"""The pair that is in the repository, which is described beside the plan."""


@dataclass(frozen=True)
class Cell:
    """A composition of a pair on a test."""

    composition: str
    test: str


def composition_of(row: str, language: str, pair: int, chosen: Mapping[str, float]) -> str:
    """The composition of a row of the tables, for the problems of a language."""
    (other,) = (one for one in LANGUAGES if one != language)
    text = ROWS[row].format(**chosen)
    for role, expert in (("own", NAMES[language].lower()), ("other", NAMES[other].lower()), ("math", "math")):
        text = text.replace(role, f"{expert}-{pair}")

    return text


def development_cells() -> list[Cell]:
    """What the settings are chosen by."""
    settings = [SUM.format(weight=weight) for weight in WEIGHTS] + [SWAP.format(bottom=bottom) for bottom in BOTTOMS]
    cells = []

    for language in LANGUAGES:
        for setting in settings:
            text = setting.replace("own", f"{NAMES[language].lower()}-0").replace("math", "math-0")
            cells.append(Cell(text, f"development_{language}"))

    return cells


def chosen_settings(results: Mapping[str, Mapping[str, Mapping[str, str]]]) -> dict[str, float]:
    """The weight and the bottom layers with the best mean over development problems; of equals the first."""

    def mean_of(setting: str) -> float:
        values = []
        for language in LANGUAGES:
            text = setting.replace("own", f"{NAMES[language].lower()}-0").replace("math", "math-0")
            values.append(share(results[text][f"development_{language}"]["usual"]))
        return sum(values) / len(values)

    return {
        "weight": max(WEIGHTS, key=lambda weight: mean_of(SUM.format(weight=weight))),
        "bottom": max(BOTTOMS, key=lambda bottom: mean_of(SWAP.format(bottom=bottom))),
    }


QUESTIONS = ("math expert (= reset)", "layer swap", "swap with the other language's layers")
"""The rows that the two questions compare."""


def question_cells(pair: int) -> list[Cell]:
    """What the two questions ask of a pair."""
    settings = {"weight": WEIGHTS[1], "bottom": BOTTOM}  # of rows that are not among these
    cells = []

    for row in QUESTIONS:
        for language in LANGUAGES:
            cells.append(Cell(composition_of(row, language, pair, settings), f"new_{language}"))

    return cells


def test_cells(pair: int, chosen: Mapping[str, float]) -> list[Cell]:
    """All cells of a pair, those of the two questions first."""
    cells = []

    for row in [*QUESTIONS, *(row for row in ROWS if row not in QUESTIONS)]:
        for language in LANGUAGES:
            text = composition_of(row, language, pair, chosen)
            cells.append(Cell(text, f"new_{language}"))
            if row in BOTH_SKILLS:
                cells += [Cell(text, "new_en"), Cell(text, f"translations_{language}")]

    return list(dict.fromkeys(cells))


def documents_of(test: str, templates: int | None = None) -> list[Document]:
    """The documents of a test; with `templates`, one of each of up to so many templates, evenly spaced."""
    lines = (DATA / f"{test}.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [Document.of(json.loads(line), NAMES.get(test[-2:], "")) for line in lines]

    if templates is None or not documents[0].template:
        return documents

    first = {document.template: document for document in reversed(documents)}
    names = list(dict.fromkeys(document.template for document in documents))
    number = min(templates, len(names))
    return [first[names[place * len(names) // number]] for place in range(number)]


class Study:
    """The model with the experts of a pair, and the scores that exist."""

    def __init__(self, out: Path, device: str, templates: int | None) -> None:
        self.out, self.templates = out, templates
        self.device = device
        self.file = out / ("scores.jsonl" if templates is None else f"scores-{templates}.jsonl")
        self.results: dict[str, dict[str, dict[str, str]]] = {}
        self._composers: dict[int, Any] = {}

        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        for line in map(json.loads, lines):
            self.results.setdefault(line["composition"], {})[line["test"]] = line["marks"]

    def composer(self, pair: int) -> Any:
        """A live composer with the experts of a pair that exist."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from adapterswap import LiveComposer

        if pair not in self._composers:
            base = write_smollm2(self.out / "base")
            self.tokenizer = AutoTokenizer.from_pretrained(base)
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(self.device).eval()
            experts = {}

            for name in experts_of(pair):
                folder = expert_folder(name, self.out)
                if (folder / "adapter_config.json").exists():
                    experts[name] = folder
                    if not name.startswith("math"):
                        experts[f"{name}-moved"] = moved_expert(name, self.out)

            if pair == 0:
                experts["shipped"] = HERE / "experts" / "french"

            self._composers = {pair: LiveComposer.from_experts(model, experts)}

        return self._composers[pair]

    def run(self, pair: int, cells: Iterable[Cell]) -> None:
        """Score the cells that are not scored yet and whose experts exist."""
        for cell in cells:
            if cell.test in self.results.get(cell.composition, {}):
                continue

            composer = self.composer(pair)
            needed = cell.composition.partition("@")[0].split("+")
            if not set(needed) <= {"base", *composer.names}:
                continue

            began = time.monotonic()
            documents = documents_of(cell.test, self.templates)
            with composer.use(None if cell.composition == "base" else cell.composition):
                marks = marks_of(documents, score(composer.model, self.tokenizer, documents))

            line = {"composition": cell.composition, "test": cell.test, "marks": marks}
            line["seconds"] = round(time.monotonic() - began, 1)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

            self.results.setdefault(cell.composition, {})[cell.test] = marks
            shares = ", ".join(f"{metric} {share(text):.3f}" for metric, text in marks.items())
            print(f"{cell.composition} on {cell.test} in {line['seconds']} s: {shares}", flush=True)

    def keep(self, chosen: Mapping[str, float]) -> None:
        """Add the scores of the whole test to results.json, from which the tables are made.

        Args:
            chosen: the settings that were chosen; empty as long as development problems are not scored.
        """
        if self.templates is None:
            content = json.loads(RESULTS.read_text(encoding="utf-8"))
            content["fifth"] = {"chosen": dict(chosen), "marks": self.results}
            write_json(RESULTS, content)


def moved_expert(name: str, out: Path) -> Path:
    """The control whose layers 0 to 7 stand in other places, written once."""
    target = out / "experts" / f"{name}-moved"

    if not target.exists():
        source = expert_folder(name, out)
        subprocess.run([sys.executable, str(HERE / "move_layers.py"), str(source), str(target)], check=True)

    return target


def score_pairs(options: argparse.Namespace) -> Study:
    """Score every pair: first what settings are chosen by, then the tests. What has the whole test is kept."""
    device = options.device

    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"

    study = Study(options.out_path, device, options.templates)
    wanted = options.test or [
        *(f"new_{code}" for code in (*LANGUAGES, "en")),
        *(f"translations_{x}" for x in LANGUAGES),
    ]

    study.run(0, [Cell(SHIPPED, f"new_{code}") for code in LANGUAGES if f"new_{code}" in wanted])

    # What the two questions ask of every pair comes before anything that is only described.
    for pair in range(options.pairs):
        study.run(pair, [cell for cell in question_cells(pair) if cell.test in wanted])
        study.keep({})

    study.run(0, development_cells())
    complete = all(cell.test in study.results.get(cell.composition, {}) for cell in development_cells())
    chosen = chosen_settings(study.results) if complete else {}

    for pair in range(options.pairs):
        settings = chosen or {"weight": WEIGHTS[1], "bottom": BOTTOM}
        cells = test_cells(pair, settings)

        # Without a choice there are no tuned rows. A tuned swap may be the layer swap, which stays.
        if not chosen:
            tuned = {
                composition_of(row, one, pair, settings) for row in ("tuned sum", "tuned swap") for one in LANGUAGES
            }
            tuned -= {composition_of("layer swap", one, pair, settings) for one in LANGUAGES}
            cells = [cell for cell in cells if cell.composition not in tuned]

        study.run(pair, [cell for cell in cells if cell.test in wanted])

        study.keep(chosen)

    return study


# Tables


def share(marks: str) -> float:
    return marks.count("1") / len(marks)


METRICS = (
    "equal", "equal with end", "usual", "usual by character", "usual with end", "generated",
)  # fmt: skip
PRIMARY = "equal"
Marks = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Composition → test → metric → marks, as in results.json."""


class Tables:
    """The tables of docs/lab.md, from the marks of the pairs that have them."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.marks: Marks = content["marks"]
        self.chosen = content["chosen"] or {"weight": WEIGHTS[1], "bottom": BOTTOM}
        self.is_tuned = bool(content["chosen"])
        self.templates = [document.template for document in documents_of("new_fr")]

    def values(self, row: str, language: str, pair: int, *, test: str = "", metric: str = PRIMARY) -> Any:
        """The marks (documents,) of a row for the problems of a language; None if they are not there."""
        if "tuned" in row and not self.is_tuned:
            return None

        found = self.marks.get(composition_of(row, language, pair, self.chosen), {}).get(test or f"new_{language}")
        return None if found is None else np.array([float(mark) for mark in found[metric]])

    def pairs(self, row: str, language: str, *, test: str = "", metric: str = PRIMARY) -> dict[int, NDArray[Any]]:
        """A row's marks by pair."""
        found = {pair: self.values(row, language, pair, test=test, metric=metric) for pair in range(PAIRS)}
        return {pair: values for pair, values in found.items() if values is not None}

    def gain(self, row: str, language: str, metric: str = PRIMARY) -> dict[int, NDArray[Any]]:
        """Layer swap minus a row, by pair and document."""
        swap, other = (self.pairs(one, language, metric=metric) for one in ("layer swap", row))
        return {pair: swap[pair] - other[pair] for pair in swap if pair in other}

    def question(self, row: str, metric: str = PRIMARY) -> dict[int, NDArray[Any]]:
        """Layer swap minus a row, mean over the languages, of the pairs that have both."""
        parts = [self.gain(row, language, metric) for language in LANGUAGES]
        return {pair: np.mean([part[pair] for part in parts], axis=0) for pair in parts[0] if pair in parts[1]}

    def interval(self, apart: Mapping[int, NDArray[Any]]) -> Interval:
        """Over templates and pairs if all pairs are there; otherwise over templates, of the mean over pairs."""
        if len(apart) == PAIRS:
            table, units = np.array(list(apart.values())), [(f"math-{pair}", f"language-{pair}") for pair in apart]
        else:
            table, units = np.mean(list(apart.values()), axis=0), []

        return mean_interval(
            table, units, self.templates,
            names=("math experts", "language experts"), documents="templates", bounds=DIFFERENCE, equal_groups=True,
        )  # fmt: skip

    def shown(self, apart: Mapping[int, NDArray[Any]]) -> str:
        """A difference with its interval, as text."""
        if not apart:
            return "–"

        interval = self.interval(apart)
        ends = "" if interval.ends is None else " [" + ", ".join(signed(end) for end in interval.ends) + "]"
        return signed(interval.mean) + ends

    def rows(self) -> list[str]:
        """Scores by the primary metric, and the layer swap minus each row."""
        heads = [f"{NAMES[language]} | swap − it" for language in LANGUAGES]
        lines = [f"| | pairs | {' | '.join(heads)} |", "|---|---:|" + "---:|---:|" * len(LANGUAGES)]

        for row in ROWS:
            found = {language: self.pairs(row, language) for language in LANGUAGES}
            if not any(found.values()):
                continue

            cells = ["" if row == "base" else str(max(len(pairs) for pairs in found.values()))]
            for language, pairs in found.items():
                cells.append(short(np.mean(list(pairs.values()))) if pairs else "–")
                cells.append("" if row == "layer swap" else self.shown(self.gain(row, language)))

            lines.append(f"| {row} | {' | '.join(cells)} |")

        return lines

    def questions(self) -> list[str]:
        """The gain over the math expert and the contrast of languages, by every metric."""
        heads = [*(f"gain in {NAMES[language]}" for language in LANGUAGES), "1: gain", "2: contrast"]
        lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]

        for metric in METRICS:
            gains = [self.gain("math expert (= reset)", language, metric) for language in LANGUAGES]
            gains.append(self.question("math expert (= reset)", metric))
            gains.append(self.question("swap with the other language's layers", metric))
            name = f"**{metric}**" if metric == PRIMARY else metric
            if any(gains):
                lines.append(f"| {name} | {' | '.join(self.shown(gain) for gain in gains)} |")

        return lines

    def shipped(self) -> list[str]:
        """The shipped pair's layer swap minus its math expert, by every metric."""
        heads = [f"math, {NAMES[code]} | swap | swap − math" for code in LANGUAGES]
        lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|---:|---:|" * len(LANGUAGES)]

        for metric in METRICS:
            cells = []
            for language in LANGUAGES:
                texts = [self.marks.get(name, {}).get(f"new_{language}") for name in ("math-0", SHIPPED)]
                if None in texts:
                    cells += ["–"] * 3
                    continue
                math, swap = (np.array([float(mark) for mark in text[metric]]) for text in texts if text)
                cells += [short(math.mean()), short(swap.mean()), self.shown({0: swap - math})]

            if set(cells) != {"–"}:
                lines.append(f"| {metric} | {' | '.join(cells)} |")

        return lines

    def both_skills(self) -> list[str]:
        """For each language: English readings of its sentences, math in English, and math in the language.

        A row's three scores are means over the same pairs, those of which all three are there.
        """
        heads = [
            f"{NAMES[language]} read | math in English | math in {NAMES[language]}" for language in LANGUAGES
        ]  # fmt: skip
        lines = [f"| | pairs | {' | '.join(heads)} |", "|---|---:|" + "---:|---:|---:|" * len(LANGUAGES)]

        for row in BOTH_SKILLS:
            cells: list[str] = []
            number = 0

            for language in LANGUAGES:
                scores = [
                    self.pairs(row, language, test=f"translations_{language}", metric="usual"),
                    self.pairs(row, language, test="new_en"),
                    self.pairs(row, language),
                ]
                whole = set.intersection(*(set(found) for found in scores))
                number = max(number, len(whole))

                for found in scores:
                    cells.append(short(np.mean([found[pair] for pair in whole])) if whole else "–")

            if number:
                lines.append(f"| {row} | {'' if row == 'base' else number} | {' | '.join(cells)} |")

        return lines


def tables(content: Mapping[str, Any]) -> list[list[str]]:
    """The tables of the fifth plan, as lines in Markdown: those of its pairs, and the one of the shipped pair."""
    made = Tables(content)
    has_pairs = any(made.pairs("layer swap", language) for language in LANGUAGES)
    of_pairs = [made.rows(), made.questions(), made.both_skills()] if has_pairs else []

    return [lines for lines in (*of_pairs, made.shipped()) if len(lines) > 2]


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def short(value: Any) -> str:
    return f"{value:.3f}"


# The command

MINUTES = {"math": 11, "language": 12, "cell": 2}
"""By which the hours are reckoned, of one core: an expert, at the 200 tokens a second that the math expert was measured
at on a quiet core, and 400 problems of a composition, which took two processor minutes beside other work."""


def hours(pairs: int) -> str:
    """What the whole takes, in words."""
    settings = {"weight": WEIGHTS[1], "bottom": BOTTOMS[0]}
    cells = set(development_cells())
    for pair in range(pairs):
        cells |= set(test_cells(pair, settings))

    experts = MINUTES["math"] * (pairs - 1) + MINUTES["language"] * pairs * len(LANGUAGES)
    total = (experts + MINUTES["cell"] * len(cells)) / 60
    return (
        f"{pairs} pairs: {experts} minutes of training and {len(cells)} scores: {total:.1f} hours on one core, "
        f"at least {total / 2:.1f} on two"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="all", choices=("all", "experts", "scores", "table", "freeze"))
    parser.add_argument("--out-path", "-o", type=Path, default=HERE / "study")
    parser.add_argument("--pairs", type=int, default=PAIRS, choices=range(1, PAIRS + 1))
    parser.add_argument("--templates", type=int, help="one problem of each of so many templates, instead of all")
    parser.add_argument("--test", action="append", help="score only these tests, such as new_fr")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args()

    if options.step == "table":
        print("\n\n".join("\n".join(lines) for lines in tables(json.loads(RESULTS.read_text("utf-8"))["fifth"])))
        return

    options.out_path.mkdir(parents=True, exist_ok=True)

    if options.step == "freeze":
        write_json(FROZEN, freeze(options.out_path))
        return

    print(hours(options.pairs), flush=True)
    if options.step in ("all", "experts"):
        train_experts(range(options.pairs), options.out_path, options.device)
    if options.step in ("all", "scores"):
        score_pairs(options)


if __name__ == "__main__":
    main()
