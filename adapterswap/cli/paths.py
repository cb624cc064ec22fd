"""Paths as command-line options, and what the shell's completion offers for them.

A leading `~` is the home folder, also where the shell passed it on unchanged (`--out-path=~/x`). Hub ids pass through.
Completion reads folders' names and the list of shipped recipes, and opens no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["EXPERT", "EXPERT_OR_RECIPE", "FOLDER", "PATH", "EntryPath", "RecipePath"]

_MARKS = ("adapter_config.json", "config.json")  # a folder with one of these is an expert or a base
_PLAIN = re.compile(r"[\w./~+@%=:-]*")  # what bash takes from a completion as it is
_SUFFIXES = (".yaml", ".yml")


class EntryPath(click.ParamType[str]):
    """A path or a Hub id."""

    name = "text"

    def __init__(self, kind: str = "file") -> None:
        """`kind`: what the shell itself completes, `file` or `dir`."""
        self.kind = kind

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from adapterswap.files.smallfiles import expand_text

        return expand_text(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self.kind)]


class _ExpertPath(EntryPath):
    """A folder that holds an adapter or a model, or a Hub id: those in the Hub's cache are offered.

    Also as `NAME=PATH`.
    """

    def __init__(self, *, or_recipe: bool = False) -> None:
        super().__init__("file" if or_recipe else "dir")
        self.or_recipe = or_recipe

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        name, equals, typed = incomplete.rpartition("=")
        offered = _entries(typed, lambda path: _is_expert(path) or (self.or_recipe and _is_recipe(path)))
        cached = [hub_id for hub_id in _cached_ids() if hub_id.startswith(typed)]
        return _as_items([name + equals + entry for entry in (*offered, *cached)], incomplete, self.kind)


class RecipePath(EntryPath):
    """A recipe's file, or the name of a shipped recipe."""

    def __init__(self, folder: str = "") -> None:
        """`folder`: offer the shipped recipes of this folder alone, such as `train`."""
        super().__init__()
        self.folder = folder

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from adapterswap.shipped import shipped_recipes

        shipped = [name for name in shipped_recipes(self.folder) if name.startswith(incomplete)]
        files = _entries(incomplete, _is_recipe)
        return _as_items([*shipped, *files], incomplete, self.kind)


def _entries(typed: str, wanted: Callable[[Path], bool]) -> list[str]:
    """The entries that begin as `typed` does: those that are `wanted`, and with a / at the end the other folders."""
    head, _, tail = typed.rpartition("/")
    head += "/" if "/" in typed else ""
    try:
        paths = sorted(Path(os.path.expanduser(head) or ".").iterdir())
    except OSError:
        return []
    visible = [path for path in paths if path.name.startswith(tail) and (tail or not path.name.startswith("."))]
    offered = []
    for path in visible:
        if wanted(path):
            offered.append(head + path.name)
        elif path.is_dir():
            offered.append(head + path.name + "/")
    return offered


def _is_expert(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS)


def _is_recipe(path: Path) -> bool:
    return path.suffix in _SUFFIXES and path.is_file()


def _cached_ids() -> Iterable[str]:
    """The Hub ids of what huggingface_hub has in its cache."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))).expanduser()
    try:
        names = sorted(os.listdir(cache))
    except OSError:
        return []
    return [name.removeprefix("models--").replace("--", "/", 1) for name in names if name.startswith("models--")]


def _as_items(offered: list[str], incomplete: str, kind: str) -> list[CompletionItem]:
    """The completions. Left to the shell: a single folder, which must get no space after it, and what needs quotes."""
    from click.shell_completion import CompletionItem

    if not offered or (len(offered) == 1 and offered[0].endswith("/")) or not all(map(_PLAIN.fullmatch, offered)):
        return [CompletionItem(incomplete, type=kind)]
    return [CompletionItem(entry) for entry in offered]


PATH = EntryPath()
FOLDER = EntryPath("dir")
EXPERT = _ExpertPath()
EXPERT_OR_RECIPE = _ExpertPath(or_recipe=True)
