"""`adapterswap studio`: a base and experts → a page on which compositions are seen, tried, judged and taken home."""

from __future__ import annotations

import click

from adapterswap.cli.device_options import device_option, dtype_option
from adapterswap.cli.paths import EXPERT, FOLDER, PATH
from adapterswap.cli.printing import note, note_dry_run, working

_EXPERTS = "A folder of adapter folders, or experts.yaml: names and places."


@click.command("studio")
@click.option("--base-model", type=EXPERT, metavar="PATH|ID", help="The base model of all experts.")
@click.option("--experts", "experts_path", type=PATH, metavar="DIR|YAML", help=_EXPERTS)
@click.option("--lab", type=FOLDER, metavar="DIR", help="Instead of both: what `adapterswap lab` wrote.")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Of the lab's models, those of this seed.  [default: 0]"
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where the page is served.")
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N", help="Its port.  [default: the first free from 7860]"
)
@click.option("--allow-paths", is_flag=True, help="Let visitors open experts by the path of a folder or a Hub id.")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the default browser.")
@device_option()
@dtype_option("Of the base's weights.", auto=True)
@click.option("--dry-run", is_flag=True, help="Open and load everything, and serve nothing.")
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
    """See, try, judge and take home compositions on a local page.

    Give --base-model and --experts, or --lab with what `adapterswap lab` (or `make demo`) wrote. The page is served to
    this machine alone unless --host says otherwise; anybody who can reach it can use the models.
    """
    if (lab is None) == (base_model is None and experts_path is None):
        raise click.UsageError("Give --base-model and --experts, or --lab.")
    if lab is None and (base_model is None or experts_path is None):
        raise click.UsageError("Give --base-model and --experts together.")
    if lab is None and seed is not None:
        raise click.UsageError("--seed chooses among the lab's models: give it with --lab.")
    from adapterswap.studio.serving import check_installed, serve_page
    from adapterswap.studio.workspace import open_lab, open_workspace

    check_installed()
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
    click.echo(url)
    note("the studio is open at this address; Ctrl-C ends it")
