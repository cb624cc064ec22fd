"""The helper behind all numerical tests must accept rounding and reject anything larger."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import close, near, rounded_once, tolerance


def chain(dtype: torch.dtype, *, scale: float = 1.0, backwards: bool = False) -> torch.Tensor:
    """Six matrix products in a row, each scaled back to the size of its input."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=generator).to(dtype)
    for step in range(6):
        weight = torch.randn(64, 64, generator=generator).to(dtype) / 8
        factor = scale if step == 3 else 1.0
        x = factor * ((x.flip(-1) @ weight.flip(0)) if backwards else (x @ weight))
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_orders_of_one_sum_are_close(dtype: torch.dtype) -> None:
    close(chain(dtype), chain(dtype, backwards=True), depth=6)


def test_one_scale_that_is_slightly_off_is_not_close() -> None:
    with pytest.raises(AssertionError, match="not close"):
        close(chain(torch.float32, scale=1.0002), chain(torch.float32), depth=6)
    close(chain(torch.float64, scale=1 + 1e-15), chain(torch.float64), depth=6, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        close(chain(torch.float64, scale=1 + 1e-12), chain(torch.float64), depth=6, dtype=torch.float64)


def test_tolerance_depends_on_size_depth_and_precision() -> None:
    eps = 2.0**-23
    assert tolerance(np.array([-3.0, 2.0])) == 50 * eps * 3
    assert tolerance(torch.tensor([1.0, float("-inf")]), depth=6) == 300 * eps
    assert tolerance([0.5], scale=8) == 400 * eps
    assert tolerance(torch.ones(1, dtype=torch.bfloat16)) == 4 * 2**-7
    assert tolerance(np.zeros(3)) == 0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}),
        ({"a": torch.zeros(2)}, {"a": torch.ones(2)}),
        (np.array([1.0, np.nan]), np.array([1.0, 1.0])),
        (np.array([1.0]), np.array([np.inf])),
    ],
)
def test_different_arrays_are_not_close(actual: object, expected: object) -> None:
    with pytest.raises(AssertionError):
        close(actual, expected)


def test_numbers() -> None:
    assert near(1.0) == 1.0 + 1e-6
    assert near(1.0) != 1.0 + 1e-5
    assert near([1.0, 0.0]) == [1.0, 1e-6]


def test_one_rounding_is_not_two() -> None:
    exact = torch.linspace(1, 2, 1001, dtype=torch.float64)
    rounded_once(exact.to(torch.bfloat16), exact, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        rounded_once((exact.to(torch.bfloat16) * 1.01).to(torch.bfloat16), exact, dtype=torch.bfloat16)
