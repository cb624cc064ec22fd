"""Which tests run: all with TESTS=all (`make test-all`), else none marked `full` and part of the `sampled` ones."""

from __future__ import annotations

import collections
import os

import pytest

ALL = os.environ.get("TESTS") == "all"


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that only `make test-all` runs: `full` ones, and all but each n-th row of a test with `sampled(n)`."""
    if ALL:
        return []
    rows: collections.Counter[str] = collections.Counter()
    result = []
    for item in items:
        marker = item.get_closest_marker("sampled")
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("full") or (marker and rows[test] % marker.args[0]):
            result.append(item)
        rows[test] += 1
    return result
