"""What `density` counts, by hand."""

from __future__ import annotations

from pathlib import Path

from density import Density, density

DENSE = (
    '''"""A module."""

def _helper(x):
    """A docstring."""
    return [[y for y in row] for row in x] if x else []

def outer(x):
    return _helper(x)

def long(a):
'''
    + "    a += 1\n" * 15
)
SPARSE = DENSE.replace("    a += 1\n", "\n    a += 1  # why\n", 1)


def test_counts(tmp_path: Path) -> None:
    (tmp_path / "dense.py").write_text(DENSE)
    # Twenty lines of code: three with `def`, two with `return`, fifteen in the long function.
    per_line = 1000 / 20
    expected = Density(
        conditionals=per_line, comprehensions=2 * per_line, nested=per_line, used_once=per_line, bare=100
    )
    assert density(tmp_path) == expected


def test_a_comment_is_a_paragraph(tmp_path: Path) -> None:
    (tmp_path / "sparse.py").write_text(SPARSE)
    assert density(tmp_path).bare == 0
