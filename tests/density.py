"""How dense code is: how much of it stands in expressions that are read twice, and how much is explained.

A line of code is one that is not blank, a comment or part of a docstring. A long function has 15 lines or more.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_LONG = 15  # lines
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Density:
    """Numbers per 1,000 lines of code, except the last.

    Attributes:
        conditionals: conditional expressions.
        comprehensions: of any kind.
        nested: comprehensions that contain another, or have several `for`.
        used_once: private functions whose name their file has twice: the definition and one call.
        bare: long functions with neither a blank line nor a comment, in percent of the long ones.
    """

    conditionals: float
    comprehensions: float
    nested: float
    used_once: float
    bare: float


def density(folder: Path) -> Density:
    """Measure all Python files of a folder."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        counts.update(_counts(path))

    per_thousand = 1000 / counts["code"]
    return Density(
        conditionals=counts["conditional"] * per_thousand,
        comprehensions=counts["comprehension"] * per_thousand,
        nested=counts["nested"] * per_thousand,
        used_once=counts["used once"] * per_thousand,
        bare=100 * counts["bare"] / counts["long"],
    )


@cache
def _counts(path: Path) -> Counter[str]:
    """What one file has; it is part of its own folder and of those above."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    counts: Counter[str] = Counter(code=len(_lines_of_code(source, tree)))
    counts.update(_expressions(tree))
    counts.update(_functions(source, tree))
    return counts


def _lines_of_code(source: str, tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))

    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and _has_docstring(node):
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def _has_docstring(node: ast.Module | ast.ClassDef | Function) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _expressions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield "conditional"
        if isinstance(node, Comprehension):
            yield "comprehension"
            inner = [below for below in ast.walk(node) if isinstance(below, Comprehension)]
            if len(node.generators) > 1 or len(inner) > 1:
                yield "nested"


def _functions(source: str, tree: ast.Module) -> Iterator[str]:
    names = Counter(token.string for token in tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        is_private = node.name.startswith("_") and not node.name.startswith("__")
        if is_private and names[node.name] == 2:
            yield "used once"

        body = node.body[1:] if _has_docstring(node) else node.body
        if not body:
            continue
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        if last - first + 1 < _LONG:
            continue
        yield "long"
        part = lines[first - 1 : last]
        if all(line.strip() and "#" not in line for line in part):
            yield "bare"
