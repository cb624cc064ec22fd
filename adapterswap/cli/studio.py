"""`adapterswap studio`: a base and experts → a local page to explore, try, compare and export compositions."""

from __future__ import annotations

import click

from adapterswap.cli.options import EXPERT, FOLDER, PATH, device_option, dtype_option
from adapterswap.cli.printing import echo, note, note_dry_run, working
from adapterswap.dependencies import require

_EXPERTS = "A folder of adapter folders, or experts.yaml with names and paths."


@click.command("studio")
@click.option("--base-model", type=EXPERT, metavar="PATH|ID", help="The base model of all experts.")
@click.option("--experts", "experts_path", type=PATH, metavar="DIR|YAML", help=_EXPERTS)
@click.option("--lab", type=FOLDER, metavar="DIR", help="Instead of both: a folder that `adapterswap lab` wrote.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="With --lab: which seed's models to open.  [default: 0]"
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="Port to listen on.  [default: the first free one from 7860]",
)
@click.option("--allow-paths", is_flag=True, help="Let visitors open experts by the path of a folder or a Hub id.")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the default browser.")
@device_option()
@dtype_option("Dtype of the base's weights.", auto=True)
@click.option("--dry-run", is_flag=True, help="Open and load everything, but serve nothing.")
def command(
    base_model: str | None,
    experts_path: str | None,
    lab: str | None,
    seed: int | None,
    host: str,
    port: int | None,
    allow_paths: bool,
    open_browser: bool,
    device: str,
    dtype: str,
    dry_run: bool,
) -> None:
    """Explore, try, compare and export compositions on a local page.

    Pass --base-model and --experts, or --lab with a folder that `adapterswap lab` (or `make demo`) wrote. Only this
    machine can open the page unless --host says otherwise; anyone who can reach it can use the models.
    """
    if (lab is None) == (base_model is None and experts_path is None):
        raise click.UsageError("Pass either --base-model and --experts, or --lab.")
    if lab is None and (base_model is None or experts_path is None):
        raise click.UsageError("Pass --base-model and --experts together.")
    if lab is None and seed is not None:
        raise click.UsageError("--seed can only be used with --lab.")
    from adapterswap.studio.serving import serve_page
    from adapterswap.studio.workspace import open_lab, open_workspace

    require("studio")
    with working("loading the base and the experts"):
        if lab is not None:
            workspace = open_lab(lab, seed or 0, device=device, dtype=dtype, allow_paths=allow_paths)
        else:
            assert base_model is not None
            assert experts_path is not None
            workspace = open_workspace(
                base_model, experts_path, device=device, dtype=dtype, allow_paths=allow_paths
            )  # fmt: skip
    for name, fault in {**workspace.faults, **workspace.not_live}.items():
        note(f"Warning: {name}: {fault}")
    note(f"{workspace.base_model}: {workspace.num_layers} layers; experts: {', '.join(workspace.experts)}")
    if dry_run:
        note_dry_run("served")
        return
    serve_page(workspace, host=host, port=port, open_browser=open_browser, on_ready=_announce)


def _announce(url: str) -> None:
    echo(url)
    note("the studio runs at this address; press Ctrl-C to stop it")
