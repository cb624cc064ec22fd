"""`adapterswap serve`: a base and experts → an OpenAI server (vLLM, llama.cpp) that composes by name."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import click

from adapterswap.cli.options import Count, Expert, Folder, Json, Place, only_with
from adapterswap.cli.output import echo, human_bytes, is_verbose, note, note_dry_run, print_json, working
from adapterswap.cli.signature import Command, declare
from adapterswap.kit.dependencies import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from adapterswap.core import Adapter
    from adapterswap.engines.serving import NamedComposer
    from adapterswap.engines.serving.llama_cpp import LlamaLaunch
    from adapterswap.engines.serving.pieces import PieceComposer
    from adapterswap.engines.serving.vllm import Launch


class _Serve(Command):
    """Explains where vLLM's options go when one of them is among ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        all_args = list(args)  # click removes what it has parsed from the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # The option as it was typed: click reports `-tp` as `-t`.
            name = error.option_name
            is_short = len(name) == 2
            typed = [arg for arg in all_args if arg.partition("=")[0] == name or (is_short and arg.startswith(name))]
            option = typed[0]
            _refuse_reserved(option, all_args)

            # With its value, if one follows
            words = [option]
            after = all_args[all_args.index(option) + 1 :]
            if after and not after[0].startswith("-"):
                words.append(after[0])
            raise click.UsageError(
                f"{error.format_message()} The engine's own options go after `--`: "
                f"adapterswap serve … -- {' '.join(words)}",
                error.ctx,
            ) from None


def _refuse_reserved(option: str, all_args: list[str]) -> None:
    """Raise for an option that the engine cannot get from here either, such as a key, which others could read."""
    from adapterswap.engines.serving.llama_cpp import LlamaLaunch
    from adapterswap.engines.serving.vllm import Launch

    if {"llama.cpp", "--engine=llama.cpp"} & {*all_args}:
        LlamaLaunch.check_reserved([option])
    else:
        Launch.check_reserved([option])


@declare("serve", cls=_Serve)
def serve_command(
    engine_args: Annotated[tuple[str, ...], click.UNPROCESSED, "[-- ENGINE ARGS]"] = (),
    *,
    base_model: Expert | None = None,
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
    composed on first use. An experts.yaml can hold all of a service: `base_model`, and `engine` with options of the
    server. Arguments after `--` go to the engine's server and override the defaults: `-- --port 8001
    --dtype bfloat16`. The server listens on 127.0.0.1 unless you pass `--host` there. It prints `ready` once it has
    decoded a token, or exits with 3 and the reason if the engine cannot serve the base.

    Args:
        base_model: The base model of all experts.  [required, unless experts.yaml has `base_model`]
        cache: Folder for composed adapters.  [default: ~/.cache/adapterswap/serving]
        engine: Engine that runs the base.
        gguf: llama.cpp: the base model, converted by convert_hf_to_gguf.py.
        llama_server: llama.cpp: its server.  [default: llama-server on the PATH, or xllamacpp]
        outtype: llama.cpp: the experts' number format.  [default: f32]
        max_request_mb: llama.cpp: megabytes of the largest request that is read.  [default: 1]
        dry_run: Check everything, print the command, start nothing.

    Examples:
        adapterswap serve --base-model org/base --experts experts -- --port 8001
        adapterswap serve --base-model org/base --experts experts --engine llama.cpp --gguf base.gguf
    """
    is_llama = engine == "llama.cpp"
    only_with("--engine llama.cpp", is_llama, "gguf", "llama_server", "outtype", "max_request_mb")
    if is_llama and gguf is None:
        raise click.UsageError("--engine llama.cpp requires --gguf, the base model as a GGUF file.")
    from adapterswap.engines.serving import Cache, Manifest

    if not (dry_run or is_llama):
        require("vllm")
    manifest, store = Manifest.read(experts_path), Cache(cache or Cache.default())
    base_model = base_model or manifest.base_model
    if base_model is None:
        raise click.UsageError("Pass --base-model, or name the base in experts.yaml: base_model: PATH|ID.")
    engine_args = (*manifest.engine_args, *engine_args)

    # llama.cpp: this process stays, in front of its server
    if gguf is not None:
        from adapterswap.engines.serving.llama_cpp import LlamaLaunch
        from adapterswap.engines.serving.pieces import PieceComposer

        LlamaLaunch.find_base(gguf)
        pieces = PieceComposer(manifest, base_model, store, outtype or "f32")
        llama = LlamaLaunch.plan(pieces, gguf, engine_args, llama_server, max_request_mb or 1)
        for name in manifest.allow or ():
            pieces.scales(name)  # an allowed name must not fail later
        opened = {name: pieces.open(name) for name in manifest.adapters}
        warned = list(pieces.unchecked)
        if llama.remark:
            warned.append(llama.remark)
        _show(llama, pieces, opened, warned, _of_llama(llama, pieces), started=not dry_run, as_json=as_json)
        if dry_run:
            note_dry_run("started")
        else:
            llama.serve(pieces)
        return

    # vLLM: its server takes the place of this process
    import os

    from adapterswap.engines.serving import NamedComposer
    from adapterswap.engines.serving.vllm import Launch
    from adapterswap.kit.errors import ExpertError, Problems

    composer = NamedComposer(manifest, base_model, store, None)
    experts: dict[str, Adapter] = {}
    problems = Problems(ExpertError)
    for name in manifest.adapters:
        with problems.collect():
            experts[name] = composer.open(name)
    problems.raise_if_any()
    launch = Launch.plan(composer, experts, experts_path, engine_args)
    unchecked = composer.check_chains(experts)
    _show(
        launch, composer, experts, unchecked, _of_vllm(launch, composer, experts), started=not dry_run, as_json=as_json
    )
    if dry_run:
        note_dry_run("started")
        return
    store.collect(manifest.max_compositions)
    with working("hashing the experts"):
        for adapter in experts.values():
            store.hash_of(adapter)  # now, so that no request waits for it
    sys.stdout.flush()
    os.execve(launch.command[0], launch.command, {**os.environ, **launch.env})


class _Shown(NamedTuple):
    """What differs between the engines in what is printed.

    Attributes:
        facts: keys of the JSON.
        kept: what the cache keeps, in words.
        remarks: lines before the command.
        ranks: the experts' ranks, if they matter.
        before: the command's environment.
        key: the request's header with a key.
    """

    facts: dict[str, Any]
    kept: str
    remarks: Sequence[str]
    ranks: Mapping[str, int] = {}
    before: str = ""
    key: str = ""


def _of_vllm(launch: Launch, composer: NamedComposer, experts: Mapping[str, Adapter]) -> _Shown:
    """What a dry run shows of vLLM."""
    limit, rank, loras = composer.manifest.max_compositions, launch.max_lora_rank, launch.max_loras
    facts = {
        "environment": dict(launch.env),
        "base": {"name": launch.served_name, "num_layers": composer.num_layers},
        "max_compositions": limit,
        "max_lora_rank": rank,
        "max_loras": loras,
    }

    remarks = [
        f"chosen: rank up to {rank}, {loras} adapters in one batch",
        "The environment and the command, and a request to send once it prints ready:",
    ]
    ranks: dict[str, int] = {}
    for name, adapter in experts.items():
        ranks[name] = max(module.rank for module in adapter.modules.values())
    variables = [f"{name}={shlex.join([value])} " for name, value in launch.env.items()]
    return _Shown(facts, f"at most {limit} compositions", remarks, ranks, "".join(variables))


def _of_llama(launch: LlamaLaunch, composer: PieceComposer) -> _Shown:
    """What a dry run shows of llama.cpp."""
    count = len(composer.pieces)
    base = {"name": launch.base_name, "num_layers": composer.num_layers, "architecture": composer.architecture}
    remark = "The llama.cpp command (clients cannot reach it directly), and a request to send once it prints ready:"
    return _Shown({"base": base, "pieces": count}, f"{count} files of layers", [remark], key=launch.key_header)


def _show(
    launch: Launch | LlamaLaunch,
    composer: NamedComposer,
    experts: Mapping[str, Adapter],
    unchecked: Sequence[str],
    shown: _Shown,
    *,
    started: bool,
    as_json: bool,
) -> None:
    """Print what is served: one line at the start; otherwise also the engine's command and a request."""
    from adapterswap.core.companions.companions import CompanionPlan
    from adapterswap.core.model.sources import Reference

    manifest, cache = composer.manifest, composer.cache.root

    # Names do not tell tasks from languages, so the example asks for a single expert, which is always right.
    example = manifest.names[0]
    body = f'{{"model": "{example}", "prompt": "Once", "max_tokens": 16}}'
    curl = f"curl {launch.url}/v1/completions{shown.key} -H 'Content-Type: application/json' -d '{body}'"
    served, allow = "every TASK+LANGUAGE pair", None
    if manifest.allow is not None:
        served, allow = f"only {', '.join(manifest.allow)}", list(manifest.allow)

    briefly = started and not (as_json or is_verbose())
    if briefly:
        count = "1 expert"
        if len(manifest.experts) > 1:
            count = f"{len(manifest.experts)} experts"
        base = f"{count} of {shown.facts['base']['name']} ({served})"
        note(f"serving {base} at {launch.url}; metrics at {launch.url}/metrics")
    elif not as_json:
        for name, adapter in experts.items():
            details = [str(adapter.source), human_bytes(adapter.file.size)]
            if shown.ranks:
                details.insert(1, f"rank {shown.ranks[name]}")
            note(f"{name}: {', '.join(details)}")

    for line in (*composer.other_bases(experts), *unchecked):
        note(f"Warning: {line}")
    folders = {name: expert.source.folder for name, expert in experts.items()}
    for line in CompanionPlan.on_the_base(folders, Reference(composer.base_model).cached_folder):
        note(line)
    if manifest.skipped:
        note(f"left out, since they are compositions, which the server makes: {', '.join(manifest.skipped)}")

    if as_json:
        listed: dict[str, dict[str, Any]] = {}
        for name, expert in experts.items():
            listed[name] = {"source": str(expert.source)}
            if name in shown.ranks:
                listed[name]["rank"] = shown.ranks[name]
        content = {"command": list(launch.command), "url": launch.url, **shown.facts, "experts": listed}
        print_json({"started": started, **content, "allow": allow, "cache": str(cache), "curl": curl})
        return
    if briefly:
        return
    for remark in (f"served: {served}; {shown.kept}, kept in {cache}", *shown.remarks):
        note(remark)
    echo(shown.before + shlex.join(map(_shortened, launch.command)), curl)


_LONG = 300  # characters of an argument: llama.cpp gets the paths of all pieces in one


def _shortened(argument: str) -> str:
    """An argument as it is shown: the beginning of a long one, unless --verbose or --json asks for all of it."""
    if len(argument) <= _LONG or is_verbose():
        return argument
    return f"{argument[: _LONG // 2]}… (--verbose shows it)"
