"""Paths as command-line options, and their shell completion.

A leading `~` is the home folder, even if the shell did not expand it (`--out-path=~/x`). Hub ids stay as they are.
Completion reads the names of folders and the list of shipped recipes, but opens no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["EXPERT", "EXPERT_OR_RECIPE", "FOLDER", "PATH", "EntryPath", "RecipePath", "name_and_path"]

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
        from adapterswap.files.smallfiles import expand_text

        return expand_text(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self.kind)]


class _ExpertPath(EntryPath):
    """A folder that holds an adapter or a model, or a Hub id; completion offers the ids in the Hub's cache.

    `NAME=PATH` is completed too.
    """

    def __init__(self, *, or_recipe: bool = False) -> None:
        super().__init__("file" if or_recipe else "dir")
        self.or_recipe = or_recipe

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from adapterswap.experts.hub_cache import cached_models

        name, equals, typed = incomplete.rpartition("=")
        completions = _entries(typed, lambda path: _is_expert(path) or (self.or_recipe and _is_recipe(path)))
        cached = [repo for repo in cached_models() if repo.startswith(typed)]
        return _as_items([name + equals + entry for entry in (*completions, *cached)], incomplete, self.kind)


class RecipePath(EntryPath):
    """A recipe's file, or the name of a shipped recipe."""

    def __init__(self, folder: str = "") -> None:
        """`folder`: offer only the shipped recipes of this folder, such as `train`."""
        super().__init__()
        self.folder = folder

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from adapterswap.shipped import shipped_recipes

        shipped = [name for name in shipped_recipes(self.folder) if name.startswith(incomplete)]
        files = _entries(incomplete, _is_recipe)
        return _as_items([*shipped, *files], incomplete, self.kind)


def _entries(typed: str, is_offered: Callable[[Path], bool]) -> list[str]:
    """The entries that start with `typed`: those that `is_offered` accepts, and all other folders with a trailing /."""
    head, _, tail = typed.rpartition("/")
    head += "/" if "/" in typed else ""
    try:
        paths = sorted(Path(os.path.expanduser(head) or ".").iterdir())
    except OSError:
        return []
    visible = [path for path in paths if path.name.startswith(tail) and (tail or not path.name.startswith("."))]
    completions = []
    for path in visible:
        if is_offered(path):
            completions.append(head + path.name)
        elif path.is_dir():
            completions.append(head + path.name + "/")
    return completions


def _is_expert(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS)


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


PATH = EntryPath()
FOLDER = EntryPath("dir")
EXPERT = _ExpertPath()
EXPERT_OR_RECIPE = _ExpertPath(or_recipe=True)


def name_and_path(option: str) -> tuple[str, str]:
    """The two parts of `--expert NAME=PATH`."""
    name, equals, path = option.partition("=")
    if not equals or not name or not path:
        raise click.UsageError(f"--expert {option!r} is not NAME=PATH.")
    return name, path
