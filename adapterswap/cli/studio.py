"""`adapterswap studio`: a base and experts → a local page to explore, try, compare and export compositions."""

from __future__ import annotations

from typing import Annotated

import click

from adapterswap.cli.options import BaseDtype, Device, Expert, Folder, Place, only_with
from adapterswap.cli.output import echo, note, note_dry_run, working
from adapterswap.cli.signature import declare
from adapterswap.kit.dependencies import require


@declare("studio")
def studio_command(
    *,
    base_model: Expert | None = None,
    experts_path: Annotated[Place, "--experts", "DIR|YAML"] | None = None,
    lab: Folder | None = None,
    lab_seed: Annotated[int, click.IntRange(min=0), "N"] | None = None,
    host: Annotated[str, "ADDRESS"] = "127.0.0.1",
    port: Annotated[int, click.IntRange(1, 65535), "N"] | None = None,
    allow_paths: bool = False,
    open_browser: Annotated[bool, "--open"] = False,
    device: Device = "auto",
    dtype: BaseDtype = "auto",
    dry_run: bool = False,
) -> None:
    """Explore, try, compare and export compositions on a local page.

    Pass --base-model and --experts, or --lab with a folder that `adapterswap lab` or `make demo` wrote. Only this
    machine can open the page unless --host says otherwise; anyone who can reach it can use the models.

    Args:
        base_model: The base model of all experts.
        lab: Instead of both: a folder that `adapterswap lab` wrote.
        lab_seed: With --lab: which seed's models to open.  [default: 0]
        host: Address to listen on.
        port: Port to listen on.  [default: the first free one from 7860]
        allow_paths: Let visitors open experts by the path of a folder or a Hub id.
        open_browser: Open the page in the default browser.
        dry_run: Open and load everything, but serve nothing.

    Examples:
        adapterswap studio --base-model org/base --experts experts --open
        adapterswap studio --lab demo-run
    """
    if (lab is None) == (base_model is None and experts_path is None):
        raise click.UsageError("Pass either --base-model and --experts, or --lab.")
    if lab is None and (base_model is None or experts_path is None):
        raise click.UsageError("Pass --base-model and --experts together.")
    only_with("--lab", lab, "lab_seed")
    from adapterswap.experiments.studio.server import serve_page
    from adapterswap.experiments.studio.workspace import Workspace

    require("studio")
    with working("loading the base and the experts"):
        if lab is not None:
            workspace = Workspace.of_lab(lab, lab_seed or 0, device=device, dtype=dtype, allow_paths=allow_paths)
        else:
            assert base_model is not None
            assert experts_path is not None
            workspace = Workspace.open(base_model, experts_path, device=device, dtype=dtype, allow_paths=allow_paths)
    for name, fault in {**workspace.faults, **workspace.not_live}.items():
        note(f"Warning: {name}: {fault}")
    for line in workspace.notes:
        note(line)
    note(f"{workspace.base_model}: {workspace.num_layers} layers; experts: {', '.join(workspace.experts)}")
    if dry_run:
        note_dry_run("served")
        return
    serve_page(workspace, host=host, port=port, open_browser=open_browser, on_ready=_announce)


def _announce(url: str) -> None:
    echo(url)
    note("the studio runs at this address; press Ctrl-C to stop it")
