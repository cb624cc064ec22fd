"""Data flows one way: rooms import only rooms listed before them, no import is circular, only `cli/` prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import adapterswap

ROOT = Path(adapterswap.__file__).parent
ROOMS = (
    "errors", "dependencies", "progress", "processes", "files", "model", "experts", "changes", "methods", "planning",
    "writing", "live", "gguf", "tools", "serving", "drawing", "evaluation", "training", "analysis", "sweeps",
    "reporting", "lab", "studio", "recipes", "cli",
)  # fmt: skip


def name_of(path: Path) -> str:
    """A module's name without `adapterswap.`; a package has its folder's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {
    name: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
    if (name := name_of(path)) not in ("", "__main__")  # the face of the package
}


def imported(node: ast.AST) -> set[str]:
    """The modules of the package that an import names."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("adapterswap."):
        module = (node.module or "").removeprefix("adapterswap.")
        names = {f"{module}.{alias.name}" for alias in node.names}
        return names & MODULES.keys() or {module}
    return set()


def executed(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements that run when a module is imported."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        typing_only = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not typing_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            pending += ast.iter_child_nodes(node)


def test_every_room_is_listed() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(ROOMS)


def test_a_room_imports_only_rooms_before_it() -> None:
    upward = set()
    for name, tree in MODULES.items():
        room = name.split(".")[0]
        for node in ast.walk(tree):
            for other in {module.split(".")[0] for module in imported(node)}:
                if ROOMS.index(other) > ROOMS.index(room):
                    upward.add((name, other))
    assert upward == set()


def test_no_import_is_circular() -> None:
    graph = {name: {other for node in executed(tree) for other in imported(node)} for name, tree in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_nothing_but_the_command_line_prints() -> None:
    printing = set()
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                printing.add(name.split(".")[0])
    assert printing <= {"cli", "serving"}  # the server process prints when it is ready


def test_kinds_of_changes_are_told_apart_in_one_room() -> None:
    asking = set()
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                asking |= {name} if names & {"LowRank", "Whole", "Opaque"} else set()
    assert {name.split(".")[0] for name in asking} == {"changes"}


def test_choices_have_one_order() -> None:
    """`typing` keeps one object for `Literal["a", "b"] | None` and `Literal["b", "a"] | None`: the first one that is
    imported decides the order in which --help lists the choices.
    """
    orders: dict[frozenset[str], set[str]] = {}
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
                choices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                names = [ast.unparse(choice) for choice in choices]
                orders.setdefault(frozenset(names), set()).add(", ".join(names))
    assert [found for found in orders.values() if len(found) > 1] == []
