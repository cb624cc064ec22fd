"""How close two calculations of the same numbers must be: derived from their size, precision and depth, never chosen.

Two routes to one result (a composed adapter and merged full weights, say) add the same products in a different order,
and so does one route on two processors or with two numbers of threads. Each rounding is off by at most eps/2 of the
number that is rounded (eps is 2^-23 for float32, 2^-7 for bfloat16). The errors of a sum follow its largest terms and
not its result, so the tolerance follows the largest number of the expected array and is the same for every element.

One layer of a transformer is about a dozen roundings in a row, most of them of sums over the width of the model, whose
errors grow with the root of that width. For the models of these tests this comes to at most 50 eps per layer, hence

    tolerance = 50 · eps · depth · max |expected|

with the number of layers as the depth: 300 eps of the largest logit for six layers. The worst that has been seen over
the settings of `make numerics` is about a tenth of that. In 16-bit formats it is 4 eps: their sums run in float32, and
only the results are rounded. The mistakes that the tests look for (a wrong scale, a wrong
layer, a factor of sqrt(2)) are thousands of times larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

LAYER = 50  # eps that the roundings of one layer, most of them of sums over the width, add up to
SHORT = (torch.float16, torch.bfloat16)
LAYER_16_BIT = 4  # the same where sums run in float32 and only the dozen results of a layer are rounded to 16 bits


def tolerance(expected: Any, *, depth: int = 1, dtype: torch.dtype | None = None, scale: float | None = None) -> float:
    """The largest absolute difference that rounding alone explains.

    `depth` is the number of layers, or of products and sums in a row, between the inputs and the numbers compared; 1
    for a weight or a ΔW. `dtype` is the precision of the calculation: by default float32, or that of `expected` where
    it is lower. Arrays in float64 count as float32 unless you pass torch.float64, since most hold float32 numbers.
    `scale` replaces max |expected| where terms that cancel are larger than the result (W + ΔW - W, say).
    """
    values = _tensor(expected)
    if dtype is None:
        dtype = values.dtype if values.dtype in SHORT else torch.float32
    if scale is None:
        finite = values[values.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
    return (LAYER_16_BIT if dtype in SHORT else LAYER) * torch.finfo(dtype).eps * depth * scale


def close(
    actual: Any,
    expected: Any,
    *,
    depth: int = 1,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    name: str = "",
) -> None:
    """Assert that arrays (or mappings of arrays, with equal keys) differ by no more than `tolerance` explains.

    Shapes must be equal, and so must the dtypes of torch tensors. `name` is printed if it fails.
    """
    __tracebackhide__ = True
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            close(actual[key], value, depth=depth, dtype=dtype, scale=scale, name=f"{name}{key}")
        return
    both_torch = isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)
    limit = tolerance(expected, depth=depth, dtype=dtype, scale=scale)
    torch.testing.assert_close(
        _tensor(actual),
        _tensor(expected),
        rtol=0,
        atol=limit,
        check_dtype=both_torch,
        msg=lambda message: f"{name}: {message}" if name else message,
    )


def near(
    expected: float | Sequence[float], *, depth: int = 1, dtype: torch.dtype | None = None, scale: float | None = None
) -> Any:
    """The same for a number or a list of numbers, compared with `==`: `assert loss == near(reference, depth=6)`."""
    return pytest.approx(expected, rel=0, abs=tolerance(expected, depth=depth, dtype=dtype, scale=scale))


def rounded_once(actual: Any, expected: Any, *, dtype: torch.dtype = torch.float32, name: str = "") -> None:
    """Assert that each element is its exact value (in float64) rounded once to `dtype`.

    One eps per element is allowed and not half of one: a sum may see a tie where a longer one sees none. Elements near
    zero may differ by the error of the sum before its rounding, in float32 for 16-bit dtypes and else in float64.
    """
    __tracebackhide__ = True
    summed = tolerance(expected, dtype=torch.float32 if dtype in SHORT else torch.float64)
    torch.testing.assert_close(
        _tensor(actual).double(),
        _tensor(expected).double(),
        rtol=torch.finfo(dtype).eps,
        atol=summed + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
        msg=lambda message: f"{name}: {message}" if name else message,
    )


def _tensor(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach()
    return torch.from_numpy(np.array(values, dtype=np.float64))
