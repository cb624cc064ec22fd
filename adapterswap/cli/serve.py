"""`adapterswap serve`: a base and experts → an OpenAI server (vLLM, llama.cpp) that composes by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from adapterswap.cli.options import Count, Expert, Folder, Json, Place
from adapterswap.cli.printing import echo, human_bytes, note, note_dry_run, print_json, working
from adapterswap.cli.signature import Command, declare
from adapterswap.dependencies import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from adapterswap.experts.adapter import Adapter
    from adapterswap.serving import NamedComposer
    from adapterswap.serving.vllm import Launch


class _Serve(Command):
    """Explains where vLLM's options go when one of them is among ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        all_args = list(args)  # click removes what it has parsed from the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name  # click reports `-tp` as `-t`
            option = next(
                arg for arg in all_args if arg.partition("=")[0] == name or (len(name) == 2 and arg.startswith(name))
            )
            value = "".join(f" {arg}" for arg in all_args[all_args.index(option) + 1 :][:1] if not arg.startswith("-"))
            raise click.UsageError(
                f"{error.format_message()} The engine's own options go after `--`: "
                f"adapterswap serve … -- {option}{value}",
                error.ctx,
            ) from None


@declare("serve", cls=_Serve)
def command(
    engine_args: Annotated[tuple[str, ...], click.UNPROCESSED, "[-- ENGINE ARGS]"] = (),
    *,
    base_model: Expert,
    experts_path: Annotated[Place, "--experts", "DIR|YAML"],
    cache: Folder | None = None,
    engine: Literal["vllm", "llama.cpp"] = "vllm",
    gguf: Place | None = None,
    llama_server: Annotated[Place, "BIN"] | None = None,
    outtype: Literal["f32", "f16", "bf16", "q8_0"] | None = None,
    max_request_mb: Count | None = None,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Serve compositions by name with vLLM or llama.cpp.

    A request names a composition as its model: `math+swahili`, `math+swahili@bottom=4,top=1`, or a single expert. It is
    composed on first use. Arguments after `--` go to the engine's server and override the defaults: `-- --port 8001
    --dtype bfloat16`. The server listens on 127.0.0.1 unless you pass `--host` there. It prints `ready` once it has
    decoded a token, or exits with 3 and the reason if the engine cannot serve the base.

    Args:
        base_model: The base model of all experts.
        cache: Folder for composed adapters.  [default: ~/.cache/adapterswap/serving]
        engine: Engine that runs the base.
        gguf: llama.cpp: the base model, converted by convert_hf_to_gguf.py.
        llama_server: llama.cpp: its server.  [default: llama-server on the PATH, or xllamacpp]
        outtype: llama.cpp: the experts' number format.  [default: f32]
        max_request_mb: llama.cpp: megabytes of the largest request that is read.  [default: 1]
        dry_run: Check everything, print the command, start nothing.
    """
    if engine == "llama.cpp":
        if gguf is None:
            raise click.UsageError("--engine llama.cpp requires --gguf, the base model as a GGUF file.")
        from adapterswap.cli.serve_llama import serve_with_llama

        serve_with_llama(
            base_model, experts_path, cache, gguf, llama_server, outtype or "f32", max_request_mb or 1,
            engine_args, dry_run=dry_run, as_json=as_json,
        )  # fmt: skip
        return
    if gguf or llama_server or outtype or max_request_mb:
        raise click.UsageError(
            "--gguf, --llama-server, --outtype and --max-request-mb can only be used with --engine llama.cpp."
        )
    import os
    import sys

    from adapterswap.errors import ExpertError, Problems
    from adapterswap.serving import Cache, NamedComposer, read_manifest
    from adapterswap.serving.cache import content_hash, default_cache
    from adapterswap.serving.vllm import plan_launch

    if not dry_run:
        require("vllm")
    manifest = read_manifest(experts_path)
    store = Cache(cache or default_cache())
    composer = NamedComposer(manifest, base_model, store, None)
    problems, experts = Problems(ExpertError), {}
    for name in manifest.experts:
        with problems.collect():
            experts[name] = composer.open(name)
    problems.raise_if_any()
    launch = plan_launch(composer, experts, experts_path, engine_args)
    if as_json:
        print_json(_as_json(launch, composer, experts, dry_run))
    else:
        _print(launch, composer, experts)
    if dry_run:
        note_dry_run("started")
        return
    store.collect(manifest.max_compositions)
    with working("hashing the experts"):
        for adapter in experts.values():
            content_hash(adapter, store.memo)  # now, so that no request waits for it
    sys.stdout.flush()
    os.execve(launch.command[0], launch.command, {**os.environ, **launch.env})


def _as_json(launch: Launch, composer: NamedComposer, experts: Mapping[str, Adapter], dry_run: bool) -> dict[str, Any]:
    return {
        "started": not dry_run,
        "command": list(launch.command),
        "environment": dict(launch.env),
        "url": launch.url,
        "base": {"name": launch.served_name, "num_layers": composer.num_layers},
        "experts": {name: {"source": str(adapter.source), "rank": _rank(adapter)} for name, adapter in experts.items()},
        "allow": list(composer.manifest.allow) if composer.manifest.allow is not None else None,
        "max_compositions": composer.manifest.max_compositions,
        "max_lora_rank": launch.max_lora_rank,
        "max_loras": launch.max_loras,
        "cache": str(composer.cache.root),
        "curl": _curl(launch, _example(composer)),
    }


def _print(launch: Launch, composer: NamedComposer, experts: Mapping[str, Adapter]) -> None:
    from shlex import join

    from adapterswap.serving.vllm import other_bases

    for name, adapter in experts.items():
        note(f"{name}: {adapter.source}, rank {_rank(adapter)}, {human_bytes(adapter.file.size)}")
    for line in other_bases(experts, composer.base_model):
        note(f"Warning: {line}")
    manifest = composer.manifest
    if manifest.skipped:
        note(f"left out, since they are compositions, which the server makes: {', '.join(manifest.skipped)}")
    served = f"only {', '.join(manifest.allow)}" if manifest.allow is not None else "every TASK+LANGUAGE pair"
    note(f"served: {served}; at most {manifest.max_compositions} compositions, kept in {composer.cache.root}")
    note(f"chosen: rank up to {launch.max_lora_rank}, {launch.max_loras} adapters in one batch")
    note("The environment and the command, and a request to send once it prints ready:")
    echo(" ".join(f"{name}={join([value])}" for name, value in launch.env.items()) + " " + join(launch.command))
    echo(_curl(launch, _example(composer)))


def _rank(adapter: Adapter) -> int:
    return max(module.rank for module in adapter.modules.values())


def _example(composer: NamedComposer) -> str:
    """A composition that can be requested."""
    manifest = composer.manifest
    if manifest.allow is not None:
        return manifest.allow[0]
    return "+".join(list(manifest.experts)[:2])


def _curl(launch: Launch, name: str) -> str:
    body = f'{{"model": "{name}", "prompt": "Once", "max_tokens": 16}}'
    return f"curl {launch.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
