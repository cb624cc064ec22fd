"""Compare the shapes of two experts' modules, or of an expert's and its base's, and report one problem per cause.

Experts of two bases differ in nearly every module. That is reported once: as a difference of the hidden size if
possible, else as the first module and the number of others. Knows names, and shapes as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from adapterswap.errors import AdapterswapError, Problems

__all__ = ["and_more", "compare_shapes"]

_MATRIX = re.compile(r"(\d+)×(\d+)")


def compare_shapes(
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    *,
    one: str,
    other: str,
    remedy: str,
    problems: Problems,
    parameter: str | None = None,
    kind: type[AdapterswapError] | None = None,
) -> None:
    """Add a problem if modules that both hold differ in shape.

    Args:
        ours, theirs: module → its shape as text, such as `64×32`.
        one, other: the names of their owners.
        remedy: the problem's remedy.
        problems: collects the problem.
        parameter, kind: see `Problems.add`.
    """
    common = [name for name in ours if name in theirs]
    differing = [name for name in common if ours[name] != theirs[name]]
    if not differing:
        return
    width, other_width = (_width(shapes[name] for name in common) for shapes in (ours, theirs))
    if len(differing) > 1 and width is not None and other_width is not None and width != other_width:
        problems.add(
            f"The hidden size is {width} in {one}, but {other_width} in {other}", remedy, parameter=parameter, kind=kind
        )
        return
    first = differing[0]
    more = f"; {len(differing) - 1} more modules differ" if len(differing) > 1 else ""
    message = f"{first} is {ours[first]} in {one}, but {theirs[first]} in {other}{more}"
    problems.add(message, remedy, parameter=parameter, kind=kind)


def and_more(names: Sequence[str], at_most: int = 1) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return f"{', '.join(names[:at_most])}{more}"


def _width(shapes: Iterable[str]) -> int | None:
    """The hidden size: the one number that all matrices share; None if there are several, or none."""
    matrices = [match for shape in shapes if (match := _MATRIX.fullmatch(shape))]
    shared = set.intersection(*({int(match[1]), int(match[2])} for match in matrices)) if matrices else set()
    return shared.pop() if len(shared) == 1 else None
