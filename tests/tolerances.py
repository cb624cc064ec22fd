"""How close two calculations of the same numbers must be: derived from their size, precision and depth, never chosen.

Two routes to one result (a composed adapter and merged full weights, say) add the same products in different orders.
So does one route on two processors or with two numbers of threads. Each rounding is off by at most eps/2 of the
number that is rounded (eps is 2^-23 for float32, 2^-7 for bfloat16). The errors of a sum follow its largest terms and
not its result, so the tolerance follows the largest number of the expected array and is the same for every element.

One layer of a transformer is about a dozen roundings in a row, most of them of sums over the width of the model, whose
errors grow with the root of that width. For the models of these tests this comes to at most 50 eps per layer, hence

    tolerance = 50 · eps · depth · max |expected|

with the number of layers as the depth: 300 eps of the largest logit for six layers. The worst that was measured, with
AVX-512 kernels, is an eighth of that. In 16-bit formats it is 4 eps: their sums run in float32, and only the results
are rounded. The mistakes that the tests look for are larger: a blend's coefficient that is off by 1e-4 fails where ΔW
is compared, one that is off by 1e-3 where logits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

LAYER = 50  # in eps: the roundings of one layer added up, most of them of sums over the width
SHORT = (torch.float16, torch.bfloat16)
LAYER_16_BIT = 4  # the same if sums run in float32 and only the dozen results of a layer are rounded to 16 bits


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
    expected: float | Sequence[float] | Mapping[Any, float],
    *,
    depth: int = 1,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
) -> Any:
    """The same for one or several numbers, which are compared with `==`: `loss == near(reference, depth=6)`."""
    return pytest.approx(expected, rel=0, abs=tolerance(expected, depth=depth, dtype=dtype, scale=scale))


def rounded_once(actual: Any, expected: Any, *, dtype: torch.dtype, name: str = "") -> None:
    """Assert that each element is its exact value rounded once to `dtype`, which has 16 bits.

    One eps per element is allowed and not half of one, since a sum in float32 may see a tie where float64 sees none.
    Elements near zero may differ by the error of that sum.
    """
    __tracebackhide__ = True
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(
        _tensor(actual).double(),
        _tensor(expected).double(),
        rtol=torch.finfo(dtype).eps,
        atol=tolerance(expected, dtype=torch.float32) + smallest,
        msg=lambda message: f"{name}: {message}" if name else message,
    )


def close_after_adam(
    actual: Any, expected: Any, *, learning_rate: float, steps: int, depth: int, name: str = ""
) -> None:
    """Assert that weights are close after a few steps of Adam, from the same start and on the same rows.

    Adam divides a gradient by its own size, so where that is within rounding of zero its step may go either way: up to
    two learning rates apart. This is rare: at most one element in a hundred (or a single one) of any tensor.
    The others differ by the rounding of the weights, and of steps as large as the learning rate. `depth` counts the
    layers of one step, forwards and backwards.
    """
    __tracebackhide__ = True
    apart = (_tensor(actual) - _tensor(expected)).abs()
    limit = tolerance(expected, depth=steps) + tolerance(learning_rate, depth=depth * steps)
    either_way = int((apart > limit).sum())
    assert either_way <= max(1, apart.numel() // 100), f"{name}: {either_way} elements are off by over {limit:.1e}"
    assert apart.max() <= 2 * steps * learning_rate + limit, f"{name}: off by up to {apart.max():.1e}"


def _tensor(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach()
    if isinstance(values, Mapping):
        values = list(values.values())
    return torch.from_numpy(np.array(values, dtype=np.float64))
