"""`adapterswap serve --engine llama.cpp`: check, print, and start the server."""

from __future__ import annotations

from shlex import join
from typing import TYPE_CHECKING, Any

from adapterswap.cli.printing import echo, human_bytes, note, note_dry_run, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapterswap.serving.llama_cpp import LlamaLaunch
    from adapterswap.serving.pieces import PieceComposer


def serve_with_llama(
    base_model: str,
    experts_path: str,
    cache: str | None,
    gguf: str,
    llama_server: str | None,
    outtype: str,
    max_request_mb: int,
    arguments: Sequence[str],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Check, print, and serve until the process is stopped."""
    from adapterswap.serving import Cache, read_manifest
    from adapterswap.serving.cache import default_cache
    from adapterswap.serving.llama_cpp import plan_llama, serve_llama
    from adapterswap.serving.pieces import PieceComposer

    manifest = read_manifest(experts_path)
    composer = PieceComposer(manifest, base_model, Cache(cache or default_cache()), outtype)
    launch = plan_llama(composer, gguf, arguments, llama_server, max_request_mb)
    for name in manifest.allow or ():
        composer.scales(name)  # an allowed name must not fail later
    if as_json:
        print_json(_as_json(launch, composer, dry_run))
    else:
        _print(launch, composer)
    if dry_run:
        note_dry_run("started")
        return
    serve_llama(launch, composer)


def _as_json(launch: LlamaLaunch, composer: PieceComposer, dry_run: bool) -> dict[str, Any]:
    manifest = composer.manifest
    return {
        "started": not dry_run,
        "command": list(launch.command),
        "url": launch.url,
        "base": {"name": launch.base_name, "num_layers": composer.num_layers, "architecture": composer.architecture},
        "experts": {name: {"source": str(composer.open(name).source)} for name in manifest.experts},
        "pieces": len(composer.pieces),
        "allow": list(manifest.allow) if manifest.allow is not None else None,
        "cache": str(composer.cache.root),
        "curl": _curl(launch, composer),
    }


def _print(launch: LlamaLaunch, composer: PieceComposer) -> None:
    from adapterswap.serving.vllm import other_bases

    manifest = composer.manifest
    opened = {name: composer.open(name) for name in manifest.experts}
    for name, adapter in opened.items():
        note(f"{name}: {adapter.source}, {human_bytes(adapter.file.size)}")
    for line in other_bases(opened, composer.base_model):
        note(f"Warning: {line}")
    if manifest.skipped:
        note(f"left out, since they are compositions, which the server makes: {', '.join(manifest.skipped)}")
    served = f"only {', '.join(manifest.allow)}" if manifest.allow is not None else "every TASK+LANGUAGE pair"
    note(f"served: {served}; {len(composer.pieces)} files of layers, kept in {composer.cache.root}")
    note("The llama.cpp command (clients cannot reach it directly), and a request to send once it prints ready:")
    echo(join(launch.command))
    echo(_curl(launch, composer))


def _curl(launch: LlamaLaunch, composer: PieceComposer) -> str:
    from adapterswap.serving.llama_engine import KEY

    manifest = composer.manifest
    name = manifest.allow[0] if manifest.allow is not None else "+".join(list(manifest.experts)[:2])
    body = f'{{"model": "{name}", "prompt": "Once", "max_tokens": 16}}'
    key = f' -H "Authorization: Bearer ${KEY}"' if launch.keys else ""
    return f"curl {launch.url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
