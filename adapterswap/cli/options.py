"""Options that several commands share: paths and their completion, devices, uploads, several processes.

A leading `~` is the home folder, even if the shell did not expand it (`--out-path=~/x`). Hub ids stay as they are.
Completion reads the names of folders and the list of shipped recipes, but opens no file. Nothing here imports torch, so
--help stays fast; `model.opened_base.choose_device` checks the name of a device.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import click
from click.core import ParameterSource

from adapterswap.cli.output import note, note_output, only_warnings, print_json, working
from adapterswap.cli.signature import Options
from adapterswap.kit.errors import AdapterswapError, ArgumentError
from adapterswap.kit.processes import Processes, TerminationHandler

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_MARKS = ("adapter_config.json", "config.json")  # a folder with one of these is an expert or a base
_PLAIN = re.compile(r"[\w./~+@%=:-]*")  # what bash accepts from a completion unquoted
_SUFFIXES = (".yaml", ".yml")


class EntryPath(click.ParamType[str]):
    """A path or a Hub id."""

    name = "text"

    def __init__(self, kind: str = "file") -> None:
        """`kind`: what the shell completes on its own, `file` or `dir`."""
        self.kind = kind

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return os.path.expanduser(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self.kind)]


class ExpertPath(EntryPath):
    """A folder that holds an adapter or a model, or a Hub id; completion offers the ids in the Hub's cache.

    `NAME=PATH` is completed too.
    """

    def __init__(self, *, or_recipe: bool = False) -> None:
        super().__init__("dir")
        if or_recipe:
            self.kind = "file"
        self.or_recipe = or_recipe

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from adapterswap.core.model.sources import Reference

        name, equals, typed = incomplete.rpartition("=")

        def is_offered(path: Path) -> bool:
            if self.or_recipe and _is_recipe(path):
                return True
            return any((path / mark).is_file() for mark in _MARKS)

        completions = _entries(typed, is_offered)
        cached = [repo for repo in Reference.cached_models() if repo.startswith(typed)]
        return _as_items([name + equals + entry for entry in (*completions, *cached)], incomplete, self.kind)


class RecipePath(EntryPath):
    """A recipe's file, or the name of a shipped recipe."""

    def __init__(self, folder: str = "") -> None:
        """`folder`: offer only the shipped recipes of this folder, such as `train`."""
        super().__init__()
        self.folder = folder

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from adapterswap.kit.files.yaml import shipped_recipes

        shipped = [name for name in shipped_recipes(self.folder) if name.startswith(incomplete)]
        files = _entries(incomplete, _is_recipe)
        return _as_items([*shipped, *files], incomplete, self.kind)


def _entries(typed: str, is_offered: Callable[[Path], bool]) -> list[str]:
    """The entries that start with `typed`: those that `is_offered` accepts, and all other folders with a trailing /."""
    head, _, tail = typed.rpartition("/")
    if "/" in typed:
        head += "/"
    try:
        paths = sorted(Path(os.path.expanduser(head) or ".").iterdir())
    except OSError:
        return []

    completions = []
    for path in paths:
        is_hidden = path.name.startswith(".") and not tail
        if is_hidden or not path.name.startswith(tail):
            continue
        if is_offered(path):
            completions.append(head + path.name)
        elif path.is_dir():
            completions.append(head + path.name + "/")
    return completions


def _is_recipe(path: Path) -> bool:
    return path.suffix in _SUFFIXES and path.is_file()


def _as_items(completions: list[str], incomplete: str, kind: str) -> list[CompletionItem]:
    """The completions. A single folder (no space may follow it) and names that need quotes are left to the shell."""
    from click.shell_completion import CompletionItem

    if (
        not completions
        or (len(completions) == 1 and completions[0].endswith("/"))
        or not all(map(_PLAIN.fullmatch, completions))
    ):
        return [CompletionItem(incomplete, type=kind)]
    return [CompletionItem(entry) for entry in completions]


EXPERT = ExpertPath()

# The types of parameters: how help names a value, how it is completed, which flag it has.
Place = Annotated[str, EntryPath(), "FILE"]
Folder = Annotated[str, EntryPath("dir"), "DIR"]
Output = Annotated[str, EntryPath("dir"), "-o", "--out-path", "DIR"]
Expert = Annotated[str, EXPERT, "PATH|ID"]
NamedExpert = Annotated[str, EXPERT, "--expert", "NAME=PATH"]
ExpertOrRecipe = Annotated[str, ExpertPath(or_recipe=True)]
Text = Annotated[str, "TEXT"]
Setting = Annotated[str, "KEY=VALUE"]
Count = Annotated[int, click.IntRange(min=1), "N"]
Rank = Annotated[int, click.IntRange(1, 65536), "R"]
Share = Annotated[float, "E"]
Device = Annotated[str, "NAME"]
Dtype = Literal["float32", "bfloat16", "float16"]
BaseDtype = Literal["auto", "float32", "bfloat16", "float16"]
Engine = Literal["transformers", "vllm"]
Json = Annotated[bool, "--json"]


def name_and_path(option: str) -> tuple[str, str]:
    """The two parts of `--expert NAME=PATH`."""
    name, equals, path = option.partition("=")
    if not equals or not name or not path:
        raise click.UsageError(f"--expert {option!r} is not NAME=PATH.")
    return name, path


def parsed_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts as settings of an engine: JSON, such as numbers and true, or text."""
    arguments: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ArgumentError(f"{text!r} is not key=value", "Pass such as max_num_seqs=64", parameter="engine_args")
        try:
            arguments[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            arguments[key.replace("-", "_")] = value
    return arguments


def only_with(needed: str, passed: object, *names: str) -> None:
    """Refuse options that were passed without another one that they need.

    Args:
        needed: the other one, as `-h` shows it.
        passed: whether it was passed.
        names: the parameters that need it.
    """
    context = click.get_current_context()
    options = {param.name: [max(param.opts, key=len), *param.secondary_opts] for param in context.command.params}
    used = [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if used and not passed:
        flags = " and ".join("/".join(options[name]) for name in used)
        raise click.UsageError(f"{flags} can only be used with {needed}.")


def with_short(overrides: Iterable[str], short: Mapping[str, Any]) -> list[str]:
    """The values of --set, and those of the options that are short for it, as `KEY=VALUE`."""
    values = [*overrides]
    for key, value in short.items():
        if value is not None:
            values.append(f"{key}={value}")
    return values


class Push(NamedTuple):
    """Where to upload what a command writes; `repo` is None if nothing is uploaded."""

    repo: str | None
    settings: dict[str, Any]

    @classmethod
    def of(
        cls,
        *,
        push_to_hub: Annotated[str, "ID"] | None = None,
        private: Annotated[bool, "--private/--public"] | None = None,
        revision: Annotated[str, "BRANCH"] | None = None,
        commit_message: Text | None = None,
    ) -> Push:
        """Check the options before anything is computed.

        Args:
            push_to_hub: Upload the folder to this Hub repository, with its model card.
            private: Require a private repository, or create a public one.  [default: a new one is private]
            revision: Branch to upload to; created if it does not exist.
            commit_message: Commit message of the upload.
        """
        settings = {"private": private, "revision": revision, "commit_message": commit_message}
        if push_to_hub is not None:
            from adapterswap.cli.upload import check_repository

            check_repository(push_to_hub)
        only_with("--push-to-hub", push_to_hub is not None, *settings)
        return cls(push_to_hub, settings)

    def upload(self, folder: str | Path) -> None:
        """Upload the folder, if --push-to-hub was passed, and print its address."""
        if self.repo is None:
            return
        from adapterswap.cli.upload import publish

        with working("uploading"):
            url = publish(folder, self.repo, **self.settings)
        note(f"uploaded: {url}")

    def announce(self, base: str | None = None) -> None:
        """Say what would be uploaded, in a dry run, and what was not checked.

        Args:
            base: the base that the adapter's config will name; None if it is unknown, or if full weights are written.
        """
        if self.repo is None:
            return
        from adapterswap.cli.upload import check_public_base

        check_public_base(base, "The adapter would not be uploaded")
        branch = ""
        if self.settings["revision"]:
            branch = f", branch {self.settings['revision']}"
        visible = {True: "only if it is private", False: "public if it is new", None: "private if it is new"}
        note(
            f"would be uploaded to {self.repo}{branch} ({visible[self.settings['private']]}). Not checked: the login, "
            "and whether you may write there."
        )


Pushed = Annotated[Push, Options(Push.of)]


class Writing(NamedTuple):
    """What a command that writes a folder or a file does with its result."""

    out_path: str
    overwrite: bool
    dry_run: bool
    as_json: bool
    push: Push | None = None

    @classmethod
    def of(
        cls, *, out_path: Output, push: Pushed, overwrite: bool = False, dry_run: bool = False, as_json: Json = False
    ) -> Writing:
        """The options of commands that write an adapter or a model."""
        return cls(out_path, overwrite, dry_run, as_json, push)

    def report(
        self, content: Callable[[], Mapping[str, Any]], show: Callable[[], None], *, base: str | None = None
    ) -> None:
        """Upload what was written, then let `show` print, or print `content` as JSON and the warnings of `show`.

        `base` is what an adapter's config names, if this is known before it is written.
        """
        if self.push is not None and not self.dry_run:
            self.push.upload(self.out_path)
        elif self.push is not None:
            self.push.announce(base)
        if self.as_json:
            print_json({"out_path": self.out_path, "written": not self.dry_run, **content()})
            with only_warnings():
                show()
        else:
            show()
            note_output(self.out_path, dry_run=self.dry_run)


Result = Annotated[Writing, Options(Writing.of)]

_GRACE = 30  # seconds


@contextmanager
def one_voice() -> Iterator[None]:
    """Let only one process print an error.

    The launcher stops all processes as soon as one of them exits, so the others wait until the error is printed. A
    process that is still running after the wait is the only one with the error, and raises it. One that was stopped
    before, while it trained and only took note of that, has nothing to wait for.
    """
    try:
        yield
    except (AdapterswapError, click.UsageError):
        if not Processes.first_to_report():
            if TerminationHandler.received:
                sys.exit(128 + signal.SIGTERM)
            time.sleep(_GRACE)
        raise


@contextmanager
def together(device: str) -> Iterator[Processes]:
    """Join the other processes, if there are any, and leave them at the end: see `Processes.joined`."""
    if Processes.started() == 1:
        yield Processes()
        return
    with Processes.joined(device) as processes:
        yield processes
    Processes.leave()
