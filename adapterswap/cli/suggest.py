"""`adapterswap suggest`: propose which layers to take from which expert, with the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.composition_options import named_experts
from adapterswap.cli.options import EXPERT, PATH, device_option
from adapterswap.cli.printing import echo, note, note_dry_run, note_output, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from adapterswap.analysis.dominance import Dominance
    from adapterswap.analysis.suggesting import Suggestion
    from adapterswap.planning.plan import Plan


@click.command("suggest")
@click.option("-t", "--task-expert", type=EXPERT, metavar="PATH|ID", help="The expert whose middle layers to keep.")
@click.option("-l", "--language-expert", type=EXPERT, metavar="PATH|ID", help="The expert for the outer layers.")
@click.option(
    "--expert",
    "experts",
    type=EXPERT,
    multiple=True,
    metavar="NAME=PATH",
    help="Instead of -t and -l: two or more experts of any role. An expert owns what its ΔW dominates.",
)
@click.option(
    "--per",
    type=click.Choice(["layer", "module"]),
    help="With --expert: assign whole layers, or attention and MLP separately.  [default: layer]",
)
@click.option(
    "--margin",
    type=float,
    metavar="M",
    help="With --expert: an owner's ΔW is larger by this share, otherwise experts are blended.  [default: 0.15]",
)
@click.option(
    "--tie",
    type=float,
    metavar="T",
    help="With --expert, instead of --margin: blend experts whose ‖ΔW‖/‖W‖ differ by at most T.",
)
@click.option("--base-model", type=EXPERT, metavar="PATH|ID", help="The base model. Required for texts.")
@click.option(
    "--num-layers", type=click.IntRange(min=1), metavar="N", help="Number of the base's layers, if you do not name it."
)
@click.option("--task-texts", type=PATH, metavar="FILE", help="Texts of the task: .jsonl, or one text per line.")
@click.option("--language-texts", type=PATH, metavar="FILE", help="Texts in the language, without the task.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    metavar="N",
    help="Texts to read from each file.",
)
@click.option(
    "--form",
    type=click.Choice(["zones", "modules"]),
    help="Propose bottom and top layers, or an owner for each layer's attention and MLP.  [default: zones]",
)
@device_option(more="; for texts")
@click.option("-o", "--out-path", type=PATH, metavar="FILE", help="Write the proposal as a recipe for compose.")
@click.option("--overwrite", is_flag=True, help="Replace what this command wrote there before.")
@click.option("--dry-run", is_flag=True, help="Check everything, but measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    task_expert: str | None,
    language_expert: str | None,
    experts: tuple[str, ...],
    per: Any,
    margin: float | None,
    tie: float | None,
    base_model: str | None,
    num_layers: int | None,
    task_texts: str | None,
    language_texts: str | None,
    limit: int,
    form: Any,
    device: str,
    out_path: str | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Propose layers for two experts, with the reasons.

    A layer goes to the language expert if it holds a larger share of that expert's change than of the task expert's.
    Change is measured by the size of ΔW or, with texts of both sides, by how much it changes the base's predictions.
    With --expert, you can pass any number of experts: the one with the largest ΔW owns a layer, and experts close to it
    are blended.
    """
    if experts:
        if task_expert or language_expert or task_texts or language_texts or form:
            raise click.UsageError("--expert cannot be combined with -t, -l, texts or --form.")
        _owners(
            named_experts(experts), base_model, num_layers, per or "layer", margin, tie, out_path, overwrite=overwrite,
            dry_run=dry_run, as_json=as_json,
        )  # fmt: skip
        return
    if task_expert is None or language_expert is None:
        raise click.UsageError("Pass --task-expert and --language-expert, or --expert at least twice.")
    if per is not None or margin is not None or tie is not None:
        raise click.UsageError("--per, --margin and --tie can only be used with --expert.")
    form = form or "zones"
    from adapterswap.analysis.suggesting import prepare, suggest

    if (task_texts is None) != (language_texts is None):
        raise click.UsageError("Pass both --task-texts and --language-texts, or neither.")
    if task_texts is not None and base_model is None:
        raise click.UsageError("Texts require --base-model, which reads them.")
    if dry_run:
        files = {"task": task_texts, "language": language_texts}
        prepared = prepare(
            task_expert, language_expert, base_model, num_layers, files, limit, out_path, overwrite=overwrite
        )
        _print_count(prepared.plan, {side: len(rows) for side, rows in prepared.texts.items()}, as_json=as_json)
        return
    note("measuring the experts' weights" if task_texts is None else "measuring the experts on texts")
    suggestion = suggest(
        task_expert, language_expert, base_model=base_model, num_layers=num_layers, task_texts=task_texts,
        language_texts=language_texts, limit=limit, form=form, device=device, out_path=out_path, overwrite=overwrite,
        bars=progress_bar,
    )  # fmt: skip
    if as_json:
        print_json(suggestion.as_json())
    else:
        _print(suggestion)
    if out_path is not None:
        note_output(out_path)
    elif suggestion.form == "modules":
        note("pass -o recipe.yaml to write a recipe for adapterswap compose")


def _owners(
    experts: dict[str, str],
    base_model: str | None,
    num_layers: int | None,
    per: Any,
    margin: float | None,
    tie: float | None,
    out_path: str | None,
    *,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Propose owners for any number of experts."""
    from adapterswap.analysis.dominance import suggest_owners

    if not dry_run:
        note("measuring the experts' weights")
    proposal = suggest_owners(
        experts, base_model=base_model, num_layers=num_layers, per=per, margin=margin, tie=tie, out_path=out_path,
        overwrite=overwrite, dry_run=dry_run, bars=progress_bar,
    )  # fmt: skip
    if proposal is None:
        print_json({"dry_run": True, "experts": list(experts)}) if as_json else echo(" and ".join(experts))
        note_dry_run("measured")
        return
    if as_json:
        print_json(proposal.as_json())
    else:
        _print_owners(proposal)
    if out_path is not None:
        note_output(out_path)


def _print_owners(proposal: Dominance) -> None:
    import shlex

    from rich.table import Table

    content = proposal.as_json()
    table = Table("layer", *(["module"] if proposal.per == "module" else []), box=None, header_style="bold")
    for name in proposal.sizes:
        table.add_column(name, justify="right")
    for row in content["sizes"]:
        labels = [str(row["layer"]), *([row["kind"]] if "kind" in row else [])]
        table.add_row(*labels, *(f"{row[name]:.4g}" for name in proposal.sizes))
    print_table(table)
    echo("sizes are ‖ΔW‖ / ‖W‖" if proposal.relative else "sizes are ‖ΔW‖")
    for rule in proposal.rules:
        echo(shlex.join(["--rule", rule.text]))
    for name in proposal.unused:
        note(f"{name} owns no layer and is in no blend, so no rule names it")


def _print_count(plan: Plan, texts: dict[str, int], *, as_json: bool) -> None:
    """Print what a run would measure."""
    if as_json:
        print_json({"dry_run": True, "experts": list(plan.experts), "num_layers": plan.num_layers, "texts": texts})
    else:
        echo(f"{' and '.join(plan.experts)}: {plan.num_layers} layers")
        for side, count in texts.items():
            echo(f"{side}: {count} texts")
    note_dry_run("measured")


def _print(suggestion: Suggestion) -> None:
    from rich.table import Table

    importance = suggestion.importance
    table = Table("layer", box=None, header_style="bold")
    for name in ("task", "language"):
        table.add_column(name, justify="right")
    for layer in range(importance.num_layers):
        task, language = importance.of_layer(layer)
        table.add_row(str(layer), f"{task:.1%}", f"{language:.1%}")
    print_table(table)
    for reason in suggestion.reasons:
        echo(reason)
    task, language = suggestion.kept
    echo(f"kept: {task:.0%} of the task expert's change in the layers, {language:.0%} of the language expert's")
    if suggestion.form == "zones":
        echo(" ".join(f"--{name} {count}" for name, count in suggestion.composition.items()))
