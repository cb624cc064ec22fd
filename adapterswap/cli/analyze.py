"""`adapterswap analyze`: where experts changed their base, and where two of them meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import click

from adapterswap.cli.options import Expert, Json, Output, Place
from adapterswap.cli.printing import echo, note, note_dry_run, note_output, print_json, print_rows, progress_bar
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from adapterswap.analysis.analyzing import Analysis


_COLUMNS = 6  # of a table, so that it fits 80 characters


@declare("analyze")
def command(
    experts: Annotated[tuple[Expert, ...], "[NAME=]EXPERT…"] = (),
    *,
    base_model: Expert | None = None,
    threshold: float | None = None,
    from_csv: Place | None = None,
    out_path: Output | None = None,
    column_width: Annotated[str, "W"] = "6.75in",
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Show where experts changed their base, layer by layer.

    For every matrix: the share of rows whose mean absolute change is above a threshold (the same for all experts), and
    the norm of ΔW. For every pair of experts: cosine, overlap of subspaces, and conflicting signs. EXPERT is an adapter
    or a full checkpoint.

    Args:
        base_model: The base model. Required for full checkpoints; adds relative norms.
        threshold: Threshold of a row's mean absolute ΔW.  [default: the median row]
        from_csv: Plot a table of shares instead: expert, layer, module, share.
        out_path: Folder to write PDF, SVG, PNG, CSV and JSON to.
        column_width: Width of the pictures: in, cm, mm or pt.
        dry_run: Check everything, print what would be measured, read no tensor.
    """
    from adapterswap.analysis.analyzing import ANALYSIS, analyze, count_matrices, inputs_of, open_experts, read_analysis
    from adapterswap.files.folders import check_target
    from adapterswap.model.checkpoints import open_checkpoint

    if bool(experts) == (from_csv is not None):
        raise click.UsageError("Pass either experts or --from-csv.")
    if threshold is not None and not 0 <= threshold < float("inf"):
        raise click.UsageError(f"--threshold is {threshold:g}, but must be 0 or more.")
    if from_csv is not None:
        analysis = read_analysis(from_csv)
        if out_path is not None:
            check_target(out_path, kind=ANALYSIS, overwrite=overwrite, inputs=[from_csv])
            if not dry_run:
                analysis.write(out_path, column_width=column_width, overwrite=overwrite, inputs=[from_csv])
    else:
        opened = open_experts(_named(experts))
        base = open_checkpoint(base_model) if base_model else None
        if dry_run:
            if out_path is not None:
                check_target(out_path, kind=ANALYSIS, overwrite=overwrite, inputs=inputs_of(opened, base))
            _print_count(count_matrices(opened, base), as_json=as_json)
            return
        analysis = analyze(
            opened, base_model=base, threshold=threshold, out_path=out_path, column_width=column_width,
            overwrite=overwrite, bars=progress_bar,
        )  # fmt: skip
    if as_json:
        print_json(analysis.as_json())
    else:
        _print(analysis)
    if out_path is not None:
        note_output(out_path, dry_run=dry_run)


def _named(references: tuple[str, ...]) -> dict[str, str]:
    """The experts' paths by name: the name in NAME=PATH, or the last part of the path."""
    from adapterswap.errors import ArgumentError, Problems
    from adapterswap.planning.composition import expert_name, own_name

    places: dict[str, str] = {}
    problems = Problems(ArgumentError)
    for reference in references:
        name, equals, path = reference.partition("=")
        if not equals:
            name, path = expert_name(reference, places, f"expert-{len(places) + 1}"), reference
            if name != own_name(reference):
                note(f"using the name {name!r} for {reference}")
        if name in places:
            problems.add(
                f"two experts are called {name!r}", "Give each expert its own name: NAME=PATH", parameter="experts"
            )
        places[name] = path
    problems.raise_if_any()
    return places


def _print_count(count: dict[str, int], *, as_json: bool) -> None:
    """Print what a run would measure."""
    if as_json:
        print_json({"dry_run": True, "matrices": count})
    else:
        for name, num_matrices in count.items():
            echo(f"{name}: {num_matrices} matrices")
    note_dry_run("measured")


def _print(analysis: Analysis) -> None:
    """Print a row per layer with each expert's change, then a table per pair of experts."""
    columns = []
    for shares_of in analysis.tables:
        shares: dict[int, list[float]] = {}
        for (layer, _), value in shares_of.cells.items():
            shares.setdefault(layer, []).append(value)
        columns.append((f"{shares_of.expert}\nrows", {layer: sum(s) / len(s) for layer, s in shares.items()}, ".3f"))
    columns += [(f"{change.expert}\n‖ΔW‖", change.layer_norms(), ".4g") for change in analysis.changes]
    for start in range(0, len(columns), _COLUMNS):
        _print_layers("", columns[start : start + _COLUMNS])
    for pair in analysis.pairs:
        by_layer = pair.by_layer()
        heads = {"cosine": "cosine", "written": "written", "read": "read", "sign_conflicts": "signs"}
        measured = [(head, {layer: numbers[key] for layer, numbers in by_layer.items()}, ".3f")
                    for key, head in heads.items()]  # fmt: skip
        _print_layers(" and ".join(pair.experts), measured)
    if analysis.threshold is not None:
        above = f"whose mean absolute change is above {analysis.threshold:.3g}"
        note(f"rows: the share of rows {above}, averaged over the matrices of a layer")
    for pair in analysis.pairs:
        shuffled, outside = pair.shuffled_by_layer(), []
        for layer, numbers in pair.by_layer().items():
            band, cosine = shuffled[layer]["cosine"], numbers["cosine"]
            if band is not None and cosine is not None and not band[0] <= cosine <= band[1]:
                outside.append(str(layer))
        place = f"in layers {', '.join(outside)}" if outside else "in no layer"
        note(f"{' and '.join(pair.experts)}: cosines outside the 95 % range of shuffled experts {place}")
        if pair.shared_start is not None:
            note(
                f"{' and '.join(pair.experts)} were trained from the same initial A (their rows have a mean cosine of "
                f"{pair.shared_start:.2f}), so `read` shows the shared seed, not what they learned"
            )


def _print_layers(title: str, columns: Sequence[tuple[str, Mapping[int, float | None], str]]) -> None:
    """Print a table with a row per layer; a column is a head, numbers by layer, and their format."""
    layers = sorted({layer for _, numbers, _ in columns for layer in numbers})
    rows = [
        [layer, *(_number(numbers[layer], form) if layer in numbers else "" for _, numbers, form in columns)]
        for layer in layers
    ]
    print_rows("layer", *(head for head, _, _ in columns), rows=rows, title=title or None)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
