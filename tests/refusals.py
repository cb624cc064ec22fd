"""How tests check a refusal: by the class of the error and the parameter at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from adapterswap.kit.errors import AdapterswapError


@contextmanager
def refused(
    kind: type[AdapterswapError], parameter: str | None = None, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[AdapterswapError]]:
    """Like `pytest.raises`, for an error of exactly this class that names this parameter; None if it names none."""
    with pytest.raises(AdapterswapError, match=match) as caught:
        yield caught
    assert (type(caught.value), caught.value.parameter) == (kind, parameter), caught.value
