"""Write docs/methods.md from the registry of methods."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterswap.core.methods.method import Method, Parameter
from adapterswap.core.methods.registry import ALIASES, BUILT_IN

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
LAB = PAGE.parent / "lab_methods.json"
"""results.json of `benchmarks/methods_lab.py`, as it was run."""

INTRODUCTION = """# Merge methods

Written by `python scripts/methods_page.py` from the registry. `adapterswap methods` lists the same, and what installed
packages add.

```bash
adapterswap compose -t experts/math -l experts/swahili --method della --density 0.5 --max-rank 64 -o merged
adapterswap merge -t experts/math -l experts/swahili --method karcher --base-model org/base -o merged-weights
```

* A method combines ΔW = W - W_base, module by module. Parameters are next to `method` in recipes, rules, sweeps and
  short names (`math+swahili@method=della,density=0.5`), and are options of the same name on the command line.
* **in an adapter**: *exact*: a weighted sum of the experts' ΔW, which an adapter holds unchanged. *reduced*: the result
  has full rank; pass `--max-rank` or `--max-error`. *no*: the method combines whole weights, which only
  `adapterswap merge` writes. Full weights are exact for all.
* Several experts on one side are averaged first. An expert that does not change a module has ΔW = 0 there.
* A row is a slice of ΔW (out×in) along its last axis; for full checkpoints, along the last axis of the stored tensor.
* Random choices depend on the seed, the expert's name and the module's name, not on the order of computation.

"""


def page() -> str:
    """The page: a table of all methods, then a section for each."""
    rows = ["| method | in an adapter | experts | weights | parameters |", "|---|---|---|---|---|"]
    rows += [_row(method) for method in BUILT_IN.values()]
    aliases = "".join(f"\n`{name}` is another name of `{method}`.\n" for name, method in ALIASES.items())
    counts = Counter(_parameter(parameter, method) for method in BUILT_IN.values() for parameter in method.parameters)
    shared = [row for row, count in counts.items() if count > 2]
    parts = [
        INTRODUCTION + "\n".join(rows) + "\n",
        aliases,
        f"\nParameters of several methods:\n\n{_table(shared)}",
        _worth(),
    ]
    return "".join([*parts, *(_section(method, shared) for method in BUILT_IN.values())])


def _worth() -> str:
    results = json.loads(LAB.read_text(encoding="utf-8"))
    table, line = _markdown(_methods(results)), _markdown(_training(results))
    seeds, sizes = results["seeds"], results["sizes"]
    few = [str(number) for number in results["few"]]
    return f"""
## What they are worth in the lab

Two experts of the [lab](constructed.md)'s scene `{results["scene"]}`, English math and the language xx without math,
are combined by every method and tested on word problems in xx. This is a constructed demonstration on models of 0.4
million parameters. It says nothing about other scenes or sizes. The bases have the shape of those that ship, with four
heads of 32.

```bash
python benchmarks/methods_lab.py comparison --seeds {len(seeds)}    # resumes if it was stopped
```

* **Seeds** {seeds[0]} to {seeds[-1]}, {len(seeds)} of them: each a base and its experts. Seeds 0 to 4, on which the
  scene was designed, are not among them. Every base was pretrained for this run.
* **Budget.** Each method and control has at most {results["budget"]} configurations (column `tried`; written down in
  `benchmarks/methods_lab.py` before the run). They are evaluated on {sizes["development"]} development problems in
  xx, and the best (the first of several equals) is tested on {sizes["test"]:,} others. Weights are merged in full and
  in float32: no method is reduced to a rank.
* **xx math**, and **English** on {sizes["english"]} problems, on which nothing is chosen: exact match, mean ±
  standard deviation over seeds. Differences in xx are paired, with 95 % intervals over seeds and problems, not
  corrected for their number.
* **On {", ".join(reversed(few))}**: the accuracy on the test if only that many problems in xx are available to
  choose on.
* **Controls** are at the end. `reset` puts outer layers back to the base; `random` is an expert with random factors
  and the language expert's norms; the last rows train the math expert further on {", ".join(few[:-1])} or {few[-1]}
  worked problems in xx, with rates and steps chosen on the {sizes["development"]}.

{table}
A learned mixture has to beat training on the problems in xx on which it would be chosen. The line favors both a
little: the best method is the best on the test, and the training has the rate and steps that are best on the
{sizes["development"]} problems.

{line}
This training starts from the math expert. From the swap, the sum, the soup or the language expert it goes further:
[a second study](constructed.md#where-to-start-and-which-checkpoints) compares starts, also on ten seeds.
"""


def _methods(results: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """The headings; then methods by their mean, the best first, linked to their sections; then the controls."""
    few, others, rows = [str(n) for n in reversed(results["few"])], ("layer_swap", "math expert"), results["rows"]
    minus = [f"minus {other} (95 %)" for other in others]
    yield ["method", "tried", "xx math", "English", *minus, *(f"on {n}" for n in few)]
    methods = [name for name in rows if name not in results["controls"]]
    for name in [*sorted(methods, key=lambda name: -rows[name]["xx"]["mean"]), *results["controls"]]:
        row = rows[name]
        differences = [_interval(row["minus"][other]) if other in row["minus"] else "" for other in others]
        chosen = [f"{row['few'][n]:.3f}" if n in row["few"] else "" for n in few]
        label = f"[{name}](#{name})" if name in BUILT_IN else name
        yield [label, f"{row['configurations']}", _spread(row["xx"]), _spread(row["en"]), *differences, *chosen]


def _training(results: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Headings, then per number of problems: the score of training on them, and of methods chosen on them."""
    rows = results["rows"]
    yield ["problems in xx", "trained on them", "best method chosen on them", "difference (95 %)", "layer_swap's"]
    for number, result in results["training"].items():
        best, minus = result["best"], result["minus"]
        training, chosen = _spread(rows[f"trained on {number}"]["xx"]), f"{best}, {rows[best]['few'][number]:.3f}"
        yield [number, training, chosen, _interval(minus[best]), _interval(minus["layer_swap"])]


def _spread(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['spread']:.3f}"


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"


def _markdown(lines: Iterable[Sequence[str]]) -> str:
    headings, *rows = lines
    ruler = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ruler, *rows)) + "\n"


def _row(method: Method) -> str:
    least, most = method.sides
    experts = f"{least}" if least == most else f"{least} or more"
    parameters = ", ".join(f"`{parameter.name}`" for parameter in method.parameters) or "–"
    weights = "yes" if method.weighted else "–"
    return f"| [{method.name}](#{method.name}) | {method.in_adapters} | {experts} | {weights} | {parameters} |"


def _section(method: Method, shared: Sequence[str]) -> str:
    where = [] if method.in_rules else ["whole compositions only"]
    where += [] if method.as_composition else ["rules only"]
    lines = [
        f"\n## {method.name}\n",
        f"{method.title[0].upper()}{method.title[1:]}. {method.reference}." + f" ({', '.join(where)})" * bool(where),
        f"\n> {method.formula}",
    ]
    lines += [f"\n{method.notes}"] if method.notes else []
    own = [row for parameter in method.parameters if (row := _parameter(parameter, method)) not in shared]
    return "\n".join(lines) + "\n" + (f"\n{_table(own)}" if own else "")


def _table(parameters: Iterable[str]) -> str:
    return "\n".join(["| parameter | default | values | |", "|---|---|---|---|", *parameters]) + "\n"


def _parameter(parameter: Parameter, method: Method) -> str:
    default = str(parameter.default).lower() if isinstance(parameter.default, bool | str) else f"{parameter.default:g}"
    default = "required" if parameter.required else default
    in_rules = f" (`{parameter.rule_name}` in rules)" if parameter.rule_name and method.in_rules else ""
    return f"| `{parameter.name}`{in_rules} | {default} | {parameter.allowed} | {parameter.description} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
