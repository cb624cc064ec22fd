"""Data flows one way: a room imports only rooms that are listed before it, and nothing but `cli/` prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import adapterswap

ROOT = Path(adapterswap.__file__).parent
ROOMS = (
    "errors", "files", "drawing", "shipped", "experts", "changes", "methods", "planning", "arithmetic", "records",
    "processes", "progress", "bases", "writing", "merging", "extracting", "live", "serving", "checking", "converting",
    "evaluation", "training", "sweeps", "analysis", "reporting", "lab", "recipes", "studio", "cli",
)  # fmt: skip
UPWARD = {
    ("files", "shipped"),  # a recipe may extend a shipped one by its name
    ("planning", "writing"),  # `plan.write`, and
    ("planning", "merging"),  # `plan.merge`: imported when they are called
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Each file's room and its source."""
    for path in sorted(ROOT.rglob("*.py")):
        room, *below = path.relative_to(ROOT).parts
        if below or room not in ("__init__.py", "__main__.py"):
            yield room.removesuffix(".py"), ast.parse(path.read_text(encoding="utf-8"))


def test_every_room_is_listed() -> None:
    assert {room for room, _ in sources()} == set(ROOMS)


def test_a_room_imports_only_rooms_before_it() -> None:
    upward = set()
    for room, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("adapterswap."):
                other = node.module.split(".")[1]
                if other != room and ROOMS.index(other) > ROOMS.index(room):
                    upward.add((room, other))
    assert upward == UPWARD


def test_nothing_but_the_command_line_prints() -> None:
    printing = set()
    for room, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                printing.add(room)
    assert printing <= {"cli", "serving"}  # the server process prints when it is ready
