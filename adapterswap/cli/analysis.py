"""`adapterswap analyze` and `suggest`: where experts changed their base, and which layers to take from which."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from adapterswap.cli.options import Count, Device, EntryPath, Expert, Json, Output, Place
from adapterswap.cli.output import (
    echo,
    note,
    note_dry_run,
    note_output,
    number_text,
    print_json,
    print_rows,
    progress_bar,
)
from adapterswap.cli.signature import declare
from adapterswap.core import words_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from adapterswap.experiments.analysis.analysis import Analysis
    from adapterswap.experiments.analysis.suggestion import Suggestion


_COLUMNS = 6  # of a table, so that it fits 80 characters


@declare("analyze")
def analyze_command(
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

    Examples:
        adapterswap analyze math=experts/math swahili=experts/swahili
        adapterswap analyze experts/math experts/swahili -o analysis
    """
    from adapterswap.experiments.analysis.analysis import Analysis, analyze

    if bool(experts) == (from_csv is not None):
        raise click.UsageError("Pass either experts or --from-csv.")
    if threshold is not None and not 0 <= threshold < float("inf"):
        raise click.UsageError(f"--threshold is {threshold:g}, but must be 0 or more.")
    if from_csv is not None:
        analysis = Analysis.read(from_csv)
        if out_path is not None:
            analysis.write(out_path, column_width=column_width, overwrite=overwrite, inputs=[from_csv], dry_run=dry_run)
    else:
        named = _named(experts)
        if dry_run:
            counts = Analysis.count_matrices(
                named, base_model=base_model or None, out_path=out_path, overwrite=overwrite
            )
            if as_json:
                print_json({"dry_run": True, "matrices": counts})
            else:
                for name, number in counts.items():
                    echo(f"{name}: {number} matrices")
            note_dry_run("measured")
            return
        analysis = analyze(
            named,
            base_model=base_model or None,
            threshold=threshold,
            out_path=out_path,
            column_width=column_width,
            overwrite=overwrite,
            bars=progress_bar,
        )
    if as_json:
        print_json(analysis.as_json())
    else:
        _print_analysis(analysis)
    for remark in analysis.remarks:
        note(f"Warning: {remark}")
    if out_path is not None:
        note_output(out_path, dry_run=dry_run)


def _named(references: tuple[str, ...]) -> dict[str, str]:
    """The experts' paths by name: the name in NAME=PATH, or the last part of the path."""
    from adapterswap.core import ExpertName
    from adapterswap.kit.errors import ArgumentError, Problems

    places: dict[str, str] = {}
    problems = Problems(ArgumentError)
    for reference in references:
        name, equals, path = reference.partition("=")
        if not equals:
            name, path = ExpertName.choose(reference, places, f"expert-{len(places) + 1}"), reference
            if name != ExpertName.of(reference):
                note(f"using the name {name!r} for {reference}")
        if name in places:
            problems.add(
                f"Two experts are called {name!r}", "Give each expert its own name: NAME=PATH", parameter="experts"
            )
        places[name] = path
    problems.raise_if_any()
    return places


def _print_analysis(analysis: Analysis) -> None:
    """Print a row per layer with each expert's change, then a table per pair of experts, and what the numbers are."""
    # The mean share of changed rows, and the norm of ΔW, of each expert
    columns: list[tuple[str, Mapping[int, float | None], str]] = []
    for shares in analysis.tables:
        by_layer: dict[int, list[float]] = {}
        for (layer, _), value in shares.cells.items():
            by_layer.setdefault(layer, []).append(value)
        means = {layer: sum(values) / len(values) for layer, values in by_layer.items()}
        columns.append((f"{shares.expert}\nrows", means, ".3f"))
    for change in analysis.changes:
        columns.append((f"{change.expert}\n‖ΔW‖", change.layer_norms(), ".4g"))
    for start in range(0, len(columns), _COLUMNS):
        _print_layers("", columns[start : start + _COLUMNS])

    # Each pair of experts
    heads = {"cosine": "cosine", "written": "written", "read": "read", "sign_conflicts": "signs"}
    for pair in analysis.pairs:
        measured: list[tuple[str, Mapping[int, float | None], str]] = []
        for key, head in heads.items():
            numbers_of = {layer: numbers[key] for layer, numbers in pair.by_layer().items()}
            measured.append((head, numbers_of, ".3f"))
        _print_layers(" and ".join(pair.experts), measured)

    # What the numbers are, and which of them mean something
    if analysis.threshold is not None:
        above = f"whose mean absolute change is above {analysis.threshold:.3g}"
        note(f"rows: the share of rows {above}, averaged over the matrices of a layer")
    for pair in analysis.pairs:
        shuffled = pair.shuffled_by_layer()
        outside: list[str] = []
        for layer, numbers in pair.by_layer().items():
            band, cosine = shuffled[layer]["cosine"], numbers["cosine"]
            if band is not None and cosine is not None and not band[0] <= cosine <= band[1]:
                outside.append(str(layer))
        place = "in no layer"
        if outside:
            place = f"in layers {', '.join(outside)}"
        note(f"{' and '.join(pair.experts)}: cosines outside the 95 % range of shuffled experts {place}")
        if pair.shared_start is not None:
            note(
                f"{' and '.join(pair.experts)} were trained from the same initial A (their rows have a mean cosine of "
                f"{pair.shared_start:.2f}), so `read` shows the shared seed, not what they learned"
            )


def _print_layers(title: str, columns: Sequence[tuple[str, Mapping[int, float | None], str]]) -> None:
    """Print a table with a row per layer; a column is a head, numbers by layer, and their format."""
    layers: set[int] = set()
    for _, numbers, _ in columns:
        layers.update(numbers)

    rows: list[list[Any]] = []
    for layer in sorted(layers):
        row: list[Any] = [layer]
        for _, numbers, form in columns:
            cell = ""
            if layer in numbers:
                cell = number_text(numbers[layer], form)
            row.append(cell)
        rows.append(row)
    print_rows("layer", *(head for head, _, _ in columns), rows=rows, title=title or None)


@declare("suggest")
def suggest_command(
    *,
    task_expert: Annotated[Expert, "-t", "--task-expert"],
    language_expert: Annotated[Expert, "-l", "--language-expert"],
    base_model: Expert | None = None,
    num_layers: Count | None = None,
    task_texts: Place | None = None,
    language_texts: Place | None = None,
    limit: Count = 200,
    form: Literal["zones", "modules"] = "zones",
    device: Device = "auto",
    out_path: Annotated[str, EntryPath(), "-o", "--out-path", "FILE"] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Propose layers for two experts, with the reasons.

    A layer goes to the language expert if it holds a larger share of that expert's change than of the task expert's.
    Change is measured by the size of ΔW or, with texts of both sides, by how much it changes the base's predictions.

    Args:
        task_expert: The expert whose middle layers to keep.
        language_expert: The expert for the outer layers.
        base_model: The base model. Required for texts.
        num_layers: Number of the base's layers, if you do not name it.
        task_texts: Texts of the task: .jsonl, or one text per line.
        language_texts: Texts in the language, without the task.
        limit: Texts to read from each file.
        form: Propose bottom and top layers, or an owner for each layer's attention and MLP.
        device: auto, cpu, cuda, cuda:N, mps; for texts.
        out_path: Write the proposal as a recipe for compose.
        dry_run: Check everything, but measure nothing.

    Examples:
        adapterswap suggest -t experts/math -l experts/swahili
        adapterswap suggest -t experts/math -l experts/swahili -o suggested.yaml
    """
    if (task_texts is None) != (language_texts is None):
        raise click.UsageError("Pass both --task-texts and --language-texts, or neither.")
    if task_texts is not None and base_model is None:
        raise click.UsageError("Texts require --base-model, which reads them.")
    from adapterswap.experiments.analysis.suggestion import prepare, suggest

    if dry_run:
        files = {"task": task_texts, "language": language_texts}
        prepared = prepare(
            task_expert, language_expert, base_model, num_layers, files, limit, out_path, overwrite=overwrite
        )
        plan = prepared.plan
        texts = {side: len(rows) for side, rows in prepared.texts.items()}
        if as_json:
            print_json({"dry_run": True, "experts": list(plan.experts), "num_layers": plan.num_layers, "texts": texts})
        else:
            echo(f"{' and '.join(plan.experts)}: {plan.num_layers} layers")
            for side, count in texts.items():
                echo(f"{side}: {count} texts")
        note_dry_run("measured")
        return

    if task_texts is None:
        note("measuring the experts' weights")
    else:
        note("measuring the experts on texts")
    suggestion = suggest(
        task_expert, language_expert, base_model=base_model, num_layers=num_layers, task_texts=task_texts,
        language_texts=language_texts, limit=limit, form=form, device=device, out_path=out_path,
        overwrite=overwrite, bars=progress_bar,
    )  # fmt: skip
    if as_json:
        print_json(suggestion.as_json())
    else:
        command = ["adapterswap", "compose", "-t", task_expert, "-l", language_expert]
        if base_model:
            command += ["--base-model", base_model]
        _print_suggestion(suggestion, command)
    if out_path is not None:
        note_output(out_path)
    elif suggestion.form == "modules":
        note("pass -o recipe.yaml to write a recipe for adapterswap compose")


def _print_suggestion(suggestion: Suggestion, command: list[str]) -> None:
    """Print the shares, the reasons, and the command that composes the proposal."""
    importance = suggestion.importance
    rows: list[tuple[Any, ...]] = []
    for layer in range(importance.num_layers):
        task_share, language_share = importance.of_layer(layer)
        rows.append((layer, f"{task_share:.1%}", f"{language_share:.1%}"))
    print_rows("layer", "task", "language", rows=rows)

    for reason in suggestion.reasons:
        echo(reason)
    task, language = suggestion.kept
    echo(f"kept: {task:.0%} of the task expert's change in the layers, {language:.0%} of the language expert's")

    if suggestion.form == "zones":
        for name, count in suggestion.composition.items():
            command += words_of(name, count)
        echo(shlex.join([*command, "-o", "composed"]))
    if importance.measured == "weights":
        note("a proposal from weights only may be worse than the paper's default: evaluate both, or pass texts")
