"""Write docs/commands.md from scripts/commands.md (exit codes, use in scripts) and the commands' --help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from adapterswap.cli import COMMANDS, EXIT_CODES, find_command, main

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
BEGINNING = Path(__file__).with_name("commands.md")
GROUPS = {
    "a composition": ("compose", "ask", "merge", "export", "evaluate"),
    "an upload": ("compose", "merge", "slice", "convert", "extract", "train"),
}

# An option with the lines that explain it.
_OPTION = re.compile(r"^  -.*\n(?:^ {6,}.*\n)*", flags=re.MULTILINE)
_EMPTY_GROUP = re.compile(r"^\n?\S[^\n]*:\n(?=\n|\Z)", flags=re.MULTILINE)


def reference() -> str:
    """The page: its beginning, `adapterswap -h`, options that several commands share, then each command's own help."""
    helps = {name: _help(name) for name in ("", *_names())}
    everywhere = _shared(text for name, text in helps.items() if "COMMAND [ARGS]" not in text)
    shared: dict[str, frozenset[str]] = {}
    for group, names in GROUPS.items():
        shared[group] = _shared(helps[name] for name in names).difference(everywhere, *shared.values())
    parts = [
        _beginning(),
        _section("adapterswap", helps[""]),
        _section("Options of every command", _only(helps["compose"], everywhere)),
    ]
    for group, names in GROUPS.items():
        links = ", ".join(f"[`{name}`](#adapterswap-{name})" for name in names)
        parts.append(f"## Options of {group}\n\nOf {links}.\n\n```text\n{_only(helps[names[0]], shared[group])}```\n")
    for name in list(helps)[1:]:
        groups = [group for group, names in GROUPS.items() if name in names]
        links = " and of ".join(f"[{group}](#options-of-{group.replace(' ', '-')})" for group in groups)
        elsewhere = everywhere.union(*(shared[group] for group in groups))
        note = f"\nAlso the options of {links}.\n" if groups else ""
        parts.append(_section(f"adapterswap {name}", _without(helps[name], elsewhere)) + note)
    return "\n".join(parts)


def _help(name: str) -> str:
    """A command's help, without a stream that a thread of another test may write to."""
    context = main.make_context("adapterswap", [], resilient_parsing=True, terminal_width=100)
    for part in name.split():
        assert isinstance(context.command, click.Group)
        command = context.command.get_command(context, part)
        assert command is not None
        context = command.make_context(part, [], context, resilient_parsing=True)
    return context.get_help().rstrip() + "\n"


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}```\n"


def _shared(helps: Iterable[str]) -> frozenset[str]:
    """The options that all these helps explain in the same words."""
    return frozenset.intersection(*(frozenset(map(_words, _OPTION.findall(text))) for text in helps))


def _words(option: str) -> str:
    """An option without its columns, which differ between commands."""
    return " ".join(option.split())


def _only(text: str, options: frozenset[str]) -> str:
    return "".join(option for option in _OPTION.findall(text) if _words(option) in options)


def _without(text: str, options: frozenset[str]) -> str:
    rest = _OPTION.sub(lambda match: "" if _words(match[0]) in options else match[0], text)
    return _EMPTY_GROUP.sub("", rest).rstrip() + "\n"


def _beginning() -> str:
    """The beginning of the page, with the classes of errors that have an exit code."""
    text = BEGINNING.read_text(encoding="utf-8")
    for place, code in {"@WRONG_REQUEST@": 2, "@NOT_DONE@": 3}.items():
        names = [f"`{kind.__name__}`" for kind, own in EXIT_CODES.items() if own == code]
        text = text.replace(place, ", ".join(names))
    return text


def _names() -> Iterator[str]:
    """Every command, followed by its subcommands."""
    for name in COMMANDS:
        yield name
        command = find_command(name)
        if isinstance(command, click.Group):
            yield from (f"{name} {below}" for below in command.commands)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
