"""What a test says of a refusal: the class of the error, and the parameter that is at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from adapterswap.errors import AdapterswapError


@contextmanager
def refused(
    kind: type[AdapterswapError], parameter: str | None = None, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[AdapterswapError]]:
    """Like `pytest.raises`, but the error is of exactly this class, and names this parameter; None: it names none."""
    with pytest.raises(AdapterswapError, match=match) as caught:
        yield caught
    assert (type(caught.value), caught.value.parameter) == (kind, parameter), caught.value
