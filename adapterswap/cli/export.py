"""`adapterswap export`: an adapter or a composition → LoRA in GGUF, for llama.cpp and what is built on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from adapterswap.cli.compose import truncating
from adapterswap.cli.composition_options import Requested, plan_of
from adapterswap.cli.options import Count, EntryPath, Expert, ExpertOrRecipe, Json, Share, Writing, only_with
from adapterswap.cli.printing import echo, human_bytes, note
from adapterswap.cli.signature import declare
from adapterswap.cli.summary import plan_as_json, print_errors_of_rank, print_plan

if TYPE_CHECKING:
    from adapterswap.gguf.export import Exported
    from adapterswap.gguf.layout import PreparedGguf


@declare("export")
def command(
    path: ExpertOrRecipe | None = None,
    *,
    request: Requested,
    base_model: Expert | None = None,
    out_path: Annotated[str, EntryPath(), "-o", "--out-path", "FILE"],
    outtype: Literal["f32", "f16", "bf16", "q8_0"] = "f32",
    pieces: bool = False,
    by: Literal["layer", "kind", "zone"] | None = None,
    max_rank: Annotated[Count, "R"] | None = None,
    max_error: Share | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Export an adapter or a composition as LoRA in GGUF.

    PATH is an adapter or a recipe (YAML). Without PATH, the options say what to compose. llama.cpp, Ollama and similar
    engines load the file together with the base in GGUF, which llama.cpp's convert_hf_to_gguf.py makes. The command
    prints an Ollama Modelfile and the llama-server command line.

    Args:
        out_path: File to write, or with --pieces a folder.
        outtype: Number format. f32 is exact; q8_0 needs ranks that are multiples of 32.
        pieces: Write several files; requests to llama-server combine them by their scales.
        by: What each piece holds: a layer, its attention or MLP, or a zone of the composition.  [default: layer]
    """
    from adapterswap.gguf.export import check_gguf, write_gguf
    from adapterswap.gguf.layout import prepare_gguf
    from adapterswap.writing.outputs import Form

    only_with("--pieces", pieces, "by")
    division = (by or "layer") if pieces else None
    form = Form(max_rank=max_rank, max_error=max_error)
    plan = plan_of(path, request, base_model=base_model)
    check_gguf(plan, out_path, pieces=division, overwrite=overwrite)
    with truncating(plan, form) as advance:
        prepared = prepare_gguf(plan, form, advance)
    exported = write_gguf(prepared, out_path, outtype=outtype, pieces=division, overwrite=overwrite, dry_run=dry_run)
    result = Writing(out_path, overwrite, dry_run, as_json)
    result.report(lambda: _as_json(prepared, exported), lambda: _print(prepared, exported))


def _as_json(prepared: PreparedGguf, exported: Exported) -> dict[str, Any]:
    return {
        **plan_as_json(prepared.plan),
        "architecture": exported.architecture,
        "outtype": exported.outtype,
        "alpha": exported.alpha,
        "base_model": exported.base_model,
        "files": [
            {"name": file.path.name, "layer": file.layer, "kind": file.kind, "layers": list(file.layers),
             "modules": file.modules, "bytes": file.nbytes}
            for file in exported.files
        ],
        "bytes": exported.nbytes,
        "modelfile": exported.modelfile(),
        "server_command": exported.server_command(),
        **prepared.measured,
    }  # fmt: skip


def _print(prepared: PreparedGguf, exported: Exported) -> None:
    import shlex

    modules = sum(file.modules for file in exported.files)
    files = f" in {len(exported.files)} files" if exported.is_pieces else ""
    summary = f"{modules} modules of {exported.architecture} as {exported.outtype}{files}"
    print_plan(
        prepared.plan, f"{summary}; alpha {exported.alpha:g}; {human_bytes(exported.nbytes)}", has_template=False
    )
    print_errors_of_rank(prepared.reduced)
    if (modelfile := exported.modelfile()) is not None:
        echo("", "Ollama Modelfile:", "", *modelfile.removesuffix("\n").split("\n", 1), "")
    else:
        echo("", "A file has no effect until a request gives its id a scale:")
        echo('"lora": [{"id": 0, "scale": 1.0}, ...]', "")
    echo(shlex.join(exported.server_command()), "")
    if exported.base_model is not None:
        note(f"base.gguf is {exported.base_model}, converted by llama.cpp's convert_hf_to_gguf.py")
