"""`adapterswap analyze`: where experts changed their base, and where two of them meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.paths import PATH
from adapterswap.cli.printing import note, note_dry_run, note_output, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from adapterswap.analysis import Changes, FractionTable, Interference
    from adapterswap.experts.adapters import Adapter
    from adapterswap.experts.checkpoints import Checkpoint


_COLUMNS = 6  # of a table, so that it fits 80 characters


@click.command("analyze")
@click.argument("experts", type=PATH, nargs=-1, metavar="[NAME=]EXPERT…")
@click.option(
    "--base-model", type=PATH, metavar="PATH|ID", help="The base: needed for full checkpoints; adds relative norms."
)
@click.option("--threshold", type=float, metavar="X", help="Of a row's mean absolute ΔW.  [default: the median row]")
@click.option(
    "--from-csv", type=PATH, metavar="FILE", help="Draw a table of such shares instead: expert, layer, module, share."
)
@click.option("-o", "--out-path", type=PATH, metavar="O", help="Folder to write: PNG, CSV and JSON.")
@click.option("--overwrite", is_flag=True, help="Replace what this command wrote there before.")
@click.option("--dry-run", is_flag=True, help="Check everything, say what would be measured, read no tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
def command(
    experts: tuple[str, ...],
    base_model: str | None,
    threshold: float | None,
    from_csv: str | None,
    out_path: str | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Show where experts changed their base, layer by layer.

    For every matrix: the share of rows whose mean absolute change is above a threshold, one threshold for all experts,
    and the norm of ΔW. With two experts or more also, for every two: cosine, overlap of subspaces, and signs in
    conflict. EXPERT is an adapter or a full checkpoint.
    """
    from adapterswap.analysis import choose_threshold, interfere, measure, read_fractions
    from adapterswap.analysis.deltas import matrices
    from adapterswap.analysis.files import ANALYSIS
    from adapterswap.experts.adapters import Adapter
    from adapterswap.experts.checkpoints import open_checkpoint
    from adapterswap.files.folders import check_target

    if bool(experts) == (from_csv is not None):
        raise click.UsageError("Name experts, or give --from-csv: one of the two.")
    if threshold is not None and not 0 <= threshold < float("inf"):
        raise click.UsageError(f"--threshold {threshold:g} is no size of a change: give 0 or more.")
    if from_csv is not None:
        tables, changes, pairs = read_fractions(from_csv), [], []
        inputs: list[str | Path | None] = [from_csv]
    else:
        opened = _open(experts)
        base = open_checkpoint(base_model) if base_model else None
        inputs = [each.source.folder for each in [*opened.values(), *([base] if base else [])]]
        inputs += [each.config.base_model for each in opened.values() if isinstance(each, Adapter)]
    if out_path is not None:
        check_target(out_path, kind=ANALYSIS, overwrite=overwrite, inputs=inputs)
    if from_csv is None:
        count = {name: len(matrices(expert, base)) for name, expert in opened.items()}
        if dry_run:
            _print_count(count, as_json=as_json)
            return
        with progress_bar("matrices", sum(count.values())) as step:
            changes = [measure(expert, name=name, base=base, progress=step) for name, expert in opened.items()]
        threshold = choose_threshold(changes) if threshold is None else threshold
        tables = [each.fractions(threshold) for each in changes]
        names = list(opened)
        couples = [(one, other) for i, one in enumerate(names) for other in names[i + 1 :]]
        with progress_bar("matrices of two", sum(min(count[one], count[other]) for one, other in couples)) as step:
            pairs = [interfere({one: opened[one], other: opened[other]}, base, step) for one, other in couples]
    content = _content(tables, changes, pairs)
    if out_path is not None:
        _write(out_path, content, tables, changes, pairs, overwrite=overwrite, inputs=inputs)
    if as_json:
        print_json(content)
    else:
        _print(tables, changes, pairs)
    if out_path is not None:
        note_output(out_path)


def _open(references: tuple[str, ...]) -> dict[str, Adapter | Checkpoint]:
    """The experts by name: the one given, or the last part of the path."""
    from adapterswap.errors import Problems
    from adapterswap.experts.opening import open_expert
    from adapterswap.planning.composing import expert_name, own_name

    opened: dict[str, Adapter | Checkpoint] = {}
    problems = Problems()
    for reference in references:
        name, equals, path = reference.partition("=")
        if not equals:
            name, path = expert_name(reference, opened, f"expert-{len(opened) + 1}"), reference
            if name != own_name(reference):
                note(f"{reference} is called {name!r} here")
        if name in opened:
            problems.add(f"two experts are called {name!r}", "Give each a name of its own: NAME=PATH")
        if not name.isprintable():
            problems.add(f"{name!r} cannot be the name of an expert", "Give it one of printable characters: NAME=PATH")
        with problems.collect():
            opened[name] = open_expert(path)
    problems.raise_if_any()
    return opened


def _print_count(count: dict[str, int], *, as_json: bool) -> None:
    """What a dry run found."""
    if as_json:
        print_json({"dry_run": True, "matrices": count})
    else:
        for name, matrices_there in count.items():
            click.echo(f"{name}: {matrices_there} matrices")
    note_dry_run("measured")


def _content(tables: list[FractionTable], changes: list[Changes], pairs: list[Interference]) -> dict[str, Any]:
    """Everything that was measured, as plain data."""
    experts: dict[str, Any] = {}
    for table in tables:
        cells = [
            {"layer": layer, "module": module, "fraction": value} for (layer, module), value in table.cells.items()
        ]
        experts[table.expert] = {"threshold": table.threshold, "fractions_of_rows": cells}
    for each in changes:
        experts[each.expert] |= {
            "mean_row_magnitude": each.magnitude,
            "modules": {
                change.matrix.name: {
                    "norm": change.norm,
                    "base_norm": change.base_norm,
                    "mean_row_magnitude": float(change.rows.mean()),
                }
                for change in each.modules
            },
        }
    return {
        "experts": experts,
        "pairs": [
            {
                "experts": list(pair.experts),
                "shared_start": pair.shared_start,
                "layers": {str(layer): numbers for layer, numbers in pair.by_layer().items()},
                "modules": {
                    module.matrix.name: {
                        "cosine": module.cosine,
                        "written": module.written,
                        "read": module.read,
                        "by_chance": list(module.by_chance),
                        "sign_conflicts": module.conflicts / module.elements if module.elements else None,
                    }
                    for module in pair.modules
                },
            }
            for pair in pairs
        ],
    }


def _write(
    out_path: str, content: dict[str, Any], tables: list[FractionTable], changes: list[Changes],
    pairs: list[Interference], *, overwrite: bool, inputs: list[str | Path | None],
) -> None:  # fmt: skip
    from importlib.util import find_spec

    from adapterswap.analysis.changes import write_fractions
    from adapterswap.analysis.files import ANALYSIS
    from adapterswap.analysis.pictures import draw_fractions, draw_interference, draw_norms
    from adapterswap.errors import AdapterswapError
    from adapterswap.files.folders import atomic_folder
    from adapterswap.files.smallfiles import write_json

    if find_spec("matplotlib") is None:
        raise AdapterswapError("pictures need matplotlib, which is not installed", "pip install 'adapterswap[plots]'")
    with atomic_folder(out_path, kind=ANALYSIS, overwrite=overwrite, inputs=inputs) as folder:
        write_fractions(tables, folder / "changes.csv")
        write_json(folder / "analysis.json", content)
        draw_fractions(tables, folder / "changes.png")
        if changes:
            relative = all(change.base_norm for each in changes for change in each.modules)
            norms = {each.expert: each.layer_norms(relative=relative) for each in changes}
            draw_norms(norms, folder / "norms.png", relative=relative)
        for pair in pairs:
            draw_interference(pair, folder / f"{'-'.join(pair.experts)}.png")


def _print(tables: list[FractionTable], changes: list[Changes], pairs: list[Interference]) -> None:
    """A row for each layer: what each expert changed there; then a table for every two, so that none is too wide."""
    columns = []
    for table in tables:
        shares: dict[int, list[float]] = {}
        for (layer, _), value in table.cells.items():
            shares.setdefault(layer, []).append(value)
        columns.append((f"{table.expert}\nrows", {layer: sum(s) / len(s) for layer, s in shares.items()}, ".3f"))
    columns += [(f"{each.expert}\n‖ΔW‖", each.layer_norms(), ".4g") for each in changes]
    for start in range(0, len(columns), _COLUMNS):
        _print_layers("", columns[start : start + _COLUMNS])
    for pair in pairs:
        by_layer = pair.by_layer()
        heads = {"cosine": "cosine", "written": "written", "read": "read", "sign_conflicts": "signs"}
        measured = [(head, {layer: numbers[key] for layer, numbers in by_layer.items()}, ".3f")
                    for key, head in heads.items()]  # fmt: skip
        _print_layers(" and ".join(pair.experts), measured)
    if tables[0].threshold is not None:
        above = f"whose mean absolute change is above {tables[0].threshold:.3g}"
        note(f"rows: the share {above}, of each kind of matrix, averaged over the kinds in a layer")
    for pair in pairs:
        if pair.shared_start is not None:
            note(
                f"{' and '.join(pair.experts)} were trained from the same initial A (their rows have a mean cosine of "
                f"{pair.shared_start:.2f}), so `read` shows the shared seed, not what they learned"
            )


def _print_layers(title: str, columns: Sequence[tuple[str, Mapping[int, float | None], str]]) -> None:
    """A table with a row for each layer; columns are a head, numbers by layer, and their format."""
    from rich.table import Table

    shown = Table("layer", box=None, header_style="bold", title=title or None, title_justify="left")
    for head, _, _ in columns:
        shown.add_column(head, justify="right", overflow="fold")
    for layer in sorted({layer for _, numbers, _ in columns for layer in numbers}):
        cells = (_number(numbers[layer], form) if layer in numbers else "" for _, numbers, form in columns)
        shown.add_row(str(layer), *cells)
    print_table(shown)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
