"""The first paper's figures 2 and 4-9, and tables 1 and 2 of both papers laid out from a sweep of the lab, as one PDF.

    python examples/which_layers/papers.py paper

The figures show the paper's own numbers (first_paper.csv). The tables are mock-ups: their numbers are those of models
of 0.4 million parameters, trained here, and only their layout is the papers'. Needs pdflatex. docs/log.md lists what
each still lacks beside the papers' own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapterswap
from adapterswap.experiments.analysis.analysis import Analysis
from adapterswap.experiments.analysis.interference import FractionTable
from adapterswap.experiments.analysis.pictures import draw_fractions
from adapterswap.experiments.lab.bases import write_base
from adapterswap.experiments.lab.scenes import SCENES, language_rows, math_rows
from adapterswap.experiments.reporting import make_report, open_source
from adapterswap.experiments.sweeps import Run, SweepRecipe, sweep
from adapterswap.experiments.training import TrainRecipe, train
from adapterswap.kit.style import STYLE

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from make_tasks import make_tasks  # noqa: E402

SCENE = SCENES["gap"]
FIGURES = {
    4: "math expert #1", 5: "math expert #2", 6: "Swahili expert #1", 7: "Japanese expert #1", 8: "Telugu expert #1",
    9: "Bengali expert #1",
}  # fmt: skip
# Figure 2 shows a language expert and a math expert without naming them; the thresholds are those of its caption.
REPRESENTATIVE = {"Swahili expert #1": 1.9e-5, "math expert #1": 1.0e-5}
PARTITIONS = {
    "Z": "outer layers only, the inverse of B", "A": "attention, and the MLPs of outer layers",
    "B": "more outer layers", "C": "fewer outer layers",
}  # fmt: skip
SHOWN = (
    "The share of rows of each matrix whose mean absolute change is above a threshold, which the paper does not give "
    "for this figure; layer 31 is on top.",
    "The share of rows of each matrix whose mean absolute change is above a threshold, "
    + " and ".join(f"{threshold:g} ({name})" for name, threshold in REPRESENTATIVE.items())
    + "; layer 31 is on top, and each expert has a colour scale of its own.",
)
WIDTH = 5.5  # inches


def draw_figures(folder: Path) -> None:
    """Figures 2 and 4 to 9, as PDF, SVG and PNG."""
    tables = {table.expert: table for table in Analysis.read(HERE / "first_paper.csv").tables}
    with STYLE.applied():
        pair = [replace(tables[name], threshold=threshold) for name, threshold in REPRESENTATIVE.items()]
        STYLE.save(draw_fractions(pair, WIDTH, one_scale=False), folder, "figure-2")
        for number, name in FIGURES.items():
            figure = draw_fractions([tables[name]], WIDTH)
            _write_numbers(figure.axes[0], tables[name])
            STYLE.save(figure, folder, f"figure-{number}")


def _write_numbers(axes: Any, table: FractionTable) -> None:
    """Write every share in its cell, as in the paper's appendix."""
    image = axes.images[0]
    for (layer, module), value in table.cells.items():
        colour = STYLE.readable_on(image.cmap(image.norm(value)))
        axes.text(
            table.modules.index(module),
            layer,
            f"{value:.3f}",
            ha="center",
            va="center",
            fontsize=STYLE.note,
            color=colour,
        )


class Lab:
    """The lab's base, tasks and experts in a folder; an expert is trained when it is first needed."""

    def __init__(self, folder: Path, rows: int | None, problems: int) -> None:
        self.folder, self.rows = folder, rows
        write_base(SCENE, 0, folder / "base")
        make_tasks(folder / "tasks", problems)

    def expert(self, name: str, sides: Sequence[str], seed: int = 0, **recipe: Any) -> str:
        """Train an expert on the rows of one side or of both, and return its folder."""
        place = self.folder / "experts" / name
        print(f"training {name}", file=sys.stderr)
        sources = [self._source(side, seed) for side in sides]
        rate = 8e-4 if "language" in sides else 1.5e-3
        content: dict[str, Any] = {
            "base_model": str(self.folder / "base"),
            "adapter": {"r": 8, "alpha": 16},
            "datasets": sources,
            "training": {
                "batch_size": 32, "gradient_accumulation": 1, "schedule": "cosine", "warmup": 0.05, "adam_beta2": 0.99,
                "max_length": 128, "device": "cpu", "save_every_samples": None, "learning_rate": rate,
                "seed": seed, "data_seed": seed,
            },
        }  # fmt: skip
        content["adapter"] |= recipe.pop("adapter", {})
        train(TrainRecipe.model_validate(content | recipe), out_path=place, progress=False)
        return str(place)

    def _source(self, side: str, seed: int) -> dict[str, Any]:
        path = self.folder / f"{side}-{seed}.jsonl"
        drawn = (math_rows if side == "task" else language_rows)(SCENE, seed)[: self.rows]
        path.write_text(
            "".join(json.dumps({"prompt": row.prompt, "completion": row.completion}) + "\n" for row in drawn)
        )
        return {"path": str(path), "prompt": "{prompt}", "completion": " {completion}", "side": side}

    def sweep(self, name: str, **content: Any) -> Run:
        """Evaluate on the lab's problems in xx and in English."""
        print(f"evaluating {name}", file=sys.stderr)
        recipe = {
            "base_model": str(self.folder / "base"), "tasks": ["lab_xx"], "retention": ["lab_en"],
            "settings": {"include_path": str(self.folder / "tasks"), "batch_size": 100},
        }  # fmt: skip
        return sweep(SweepRecipe.model_validate(recipe | content), self.folder / name, device="cpu")


def first_paper(lab: Lab, experts: int) -> list[str]:
    """Tables 1 and 2 of Bandarkar et al. (2025): several experts on each side, merged in pairs."""
    run = lab.sweep(
        "first-paper",
        task_experts={f"math{seed}": lab.expert(f"math{seed}", ["task"], seed) for seed in range(experts)},
        language_experts={f"xx{seed}": lab.expert(f"xx{seed}", ["language"], seed) for seed in range(experts)},
        extra={"xx & math joint SFT": [lab.expert(f"joint{s}", ["task", "language"], s) for s in range(experts)]},
        baselines=["base", "language", "task"],
        compositions={
            "model soup": {"method": "soup", "weights": ["equal", "magnitude"]},
            "TIES": {"method": "ties", "density": [0.2, 0.5], "max_rank": 16},
            "layer swap": {"bottom": [0, 1, 2, 3], "top": [0, 1, 2]},
        },
    )  # fmt: skip
    report = make_report(open_source(run.folder), reference="model soup", draws=1000)
    best = ["model soup, selected", "TIES, selected", "layer swap, default", "layer swap, selected"]
    detailed = ["base", "language expert", "task expert", "xx & math joint SFT", *best]
    plain = [row for row in detailed if row not in ("xx & math joint SFT", "TIES, selected")]
    (target,) = report.targets
    mock = (
        "Mock-up, with the lab's numbers: after table {} of Bandarkar et al. (ICLR 2025). Right answers in percent, of "
        f"{target.report} problems; {target.select} others chose the configurations. Experts on a side: {experts}; "
        f"pairs: {experts**2}. Best in bold, second underlined."
    )
    scores = {
        "xx min": lambda row: row.spread.min,
        "xx mean": lambda row: row.spread.mean,
        "xx max": lambda row: row.spread.max,
        "English mean": lambda row: row.english,
        "all languages, mean": lambda row: row.all_languages,
    }
    by_label = {row.label: row for row in target.rows}
    tables = []
    for number, (labels, shown) in enumerate([(plain, ["xx mean", "xx max"]), (detailed, list(scores))], 1):
        heads = [label.replace("&", r"\&").replace(" ", r"\\") for label in labels]
        rows = [(name, *(scores[name](by_label[label]) for label in labels)) for name in shown]
        stacked = ["setting", *(f"\\shortstack[r]{{{head}}}" for head in heads)]
        tables.append(_grid(stacked, rows, mock.format(number), marked=True))
    return tables


def second_paper(lab: Lab, shared: Path) -> list[str]:
    """Tables 1 and 2 of Bandarkar & Peng (2025): regimes of training, and partitions that are frozen or reset."""
    frozen = {
        letter: lab.expert(f"frozen-{letter}", ["task"], adapter={"partition": letter, "side": "task"})
        for letter in PARTITIONS
    }
    baselines = ["base", "task", "language"]
    partial = lab.sweep(
        "second-paper-partial",
        task_experts={"partmath": frozen["B"]},
        language_experts={"partxx": lab.expert("partxx", ["language"], adapter={"partition": "B", "side": "language"})},
        baselines=baselines,
        compositions={"swap": {"partition": "B"}},
    )
    whole = lab.sweep(
        "second-paper",
        task_experts={"math0": str(shared / "math0")},
        language_experts={"xx0": str(shared / "xx0")},
        baselines=baselines,
        extra={
            "data mixing": str(shared / "joint0"),
            "simultaneous": lab.expert("simultaneous", ["task", "language"], simultaneous={"partition": "B"}),
            **{f"frozen {letter}": place for letter, place in frozen.items()},
        },
        compositions={"swap": {"partition": "B"}}
        | {f"reset {letter}": {"language": "base", "partition": letter} for letter in PARTITIONS},
    )  # fmt: skip
    results = [*whole.results, *partial.results]
    xx, en = ({_key(result.cell): result.results[task].value for result in results} for task in ("lab_xx", "lab_en"))
    base = xx["base", (), ()]
    caption = f"Right answers in percent, of {whole.tasks['lab_xx'].num_docs} problems; one expert on a side."
    regimes = [
        ("Math-only", xx["task expert", ("partmath",), ()], xx["task expert", ("math0",), ()]),
        ("Language-only", xx["language expert", (), ("partxx",)], xx["language expert", (), ("xx0",)]),
        ("Data mixing", None, xx["data mixing", (), ()]),
        ("Simultaneous SFT", xx["simultaneous", (), ()], None),
        ("Layer-Swapping", xx["swap", ("partmath",), ("partxx",)], xx["swap", ("math0",), ("xx0",)]),
    ]
    first = _grid(
        ["Training description", "Base", "Partial LoRA", "LoRA"],
        [(name, base, partial, whole) for name, partial, whole in regimes],
        f"Mock-up, with the lab's numbers in xx: after table 1 of Bandarkar \\& Peng (2025). {caption}",
    )
    second = _grid(
        ["Frozen or reset", "frozen during", "reset after"],
        [
            ("base (no SFT)", en["base", (), ()], en["base", (), ()]),
            *((f"{{[}}{letter}] {what}", en[f"frozen {letter}", (), ()], en[f"reset {letter}", ("math0",), ()])
              for letter, what in PARTITIONS.items()),
            ("None", en["task expert", ("math0",), ()], en["task expert", ("math0",), ()]),
        ],
        f"Mock-up, with the lab's numbers in English: after table 2 of Bandarkar \\& Peng (2025). {caption}",
    )  # fmt: skip
    return [first, second]


def _key(cell: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return cell.family, cell.task_expert, () if cell.language_expert == ("base",) else cell.language_expert


def _grid(heads: Sequence[str], rows: Iterable[tuple[Any, ...]], caption: str, *, marked: bool = False) -> str:
    """A table of scores in percent; one that does not exist is a dash. If `marked`, the two best of a row stand out."""
    lines = []
    for name, *values in rows:
        texts = ["--" if value is None else f"{100 * value:.1f}" for value in values]
        best = sorted({*texts} - {"--"}, key=float, reverse=True) if marked else []
        marks = dict(zip(best, (r"\textbf", r"\underline"), strict=False)) if len(best) > 1 else {}
        cells = [f"{marks[text]}{{{text}}}" if text in marks else text for text in texts]
        lines.append(" & ".join([name, *cells]) + r" \\")
    return "\n".join(
        [
            r"\begin{table}[t]", r"\centering\small\setlength{\tabcolsep}{4pt}",
            f"\\sbox0{{\\begin{{tabular}}{{@{{}}l{'r' * (len(heads) - 1)}@{{}}}}",
            r"\toprule", " & ".join(heads) + r" \\", r"\midrule", *lines, r"\bottomrule", r"\end{tabular}}%",
            r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
            f"\\caption{{{caption}}}", r"\end{table}", "",
        ]
    )  # fmt: skip


def typeset(folder: Path, tables: Mapping[str, Sequence[str]]) -> None:
    """papers.tex and papers.pdf of the figures and tables."""
    body = []
    for number, name in {2: "a language expert and a math expert", **FIGURES}.items():
        text = (
            f"After figure {number} of Bandarkar et al. (ICLR 2025), from its own numbers: {name}. {SHOWN[number == 2]}"
        )
        caption = text.replace("#", "\\#").replace("%", "\\%")
        body.append(
            f"\\begin{{figure}}[t]\\centering\\includegraphics{{figure-{number}.pdf}}\\caption{{{caption}}}\\end{{figure}}"
        )
    for name, layouts in tables.items():
        for number, table in enumerate(layouts, 1):
            (folder / f"{name}-table-{number}.tex").write_text(table, encoding="utf-8")
            body.append(f"\\input{{{name}-table-{number}}}")
    head = [r"\documentclass[10pt]{article}", r"\usepackage[textwidth=5.5in,textheight=9in]{geometry}"]
    head.append(r"\usepackage{booktabs,graphicx}")
    (folder / "papers.tex").write_text("\n".join([*head, r"\begin{document}", *body, r"\end{document}", ""]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "papers.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise adapterswap.AdapterswapError(f"pdflatex failed:\n{done.stdout[-2000:]}", "See papers.log")
    for left in ("papers.aux", "papers.log"):
        (folder / left).unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--experts", type=int, default=3, help="on each side [3]")
    parser.add_argument("--problems", type=int, default=200, help="that each model is evaluated on [200]")
    parser.add_argument("--rows", type=int, default=6000, help="that each expert is trained on, of a side [6000]")
    options = parser.parse_args()
    if shutil.which("pdflatex") is None:
        parser.error("pdflatex is not installed: apt install texlive-latex-recommended texlive-fonts-recommended")
    if options.folder.exists():
        parser.error(f"{options.folder} exists already")
    options.folder.mkdir(parents=True)
    draw_figures(options.folder)
    lab = Lab(options.folder / "lab", options.rows, options.problems)
    tables = {"first-paper": first_paper(lab, options.experts)}
    tables["second-paper"] = second_paper(lab, options.folder / "lab" / "experts")
    typeset(options.folder, tables)
    print(options.folder / "papers.pdf")


if __name__ == "__main__":
    main()
