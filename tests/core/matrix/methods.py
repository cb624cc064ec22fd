"""What merge methods make of a pair of experts, by tests/core/methods' dense ones on each parameter in float64.

Methods that drop at random are not here: their masks are the library's own (tests/core/methods compares them).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.methods.dense_methods import METHODS as DENSE
from core.methods.dense_methods import merged

__all__ = ["METHODS", "VALUES", "by_module", "combined"]

VALUES: dict[str, dict[str, Any]] = {
    "breadcrumbs": {"density": 0.6, "gamma": 0.1, "scale": 0.8},
    "breadcrumbs_ties": {"density": 0.6, "gamma": 0.1},
    "sce": {"select_topk": 0.4},
    "nuslerp": {"nuslerp_flatten": False},
    "multislerp": {},
    "model_stock": {"filter_wise": True},
    "nearswap": {"t": 0.02},
    "karcher": {},
    "arcee_fusion": {},
    "tsv": {},
    "iso_c": {"scale": 0.7},
    "iso_cts": {"common_space_fraction": 0.5},
    "knots_ties": {"density": 0.6},
    "ram": {"threshold": 0.01},
    "ramplus_tl": {"threshold": 0.01, "boost": 0.5, "boost_limit": 0.3},
    "magmax": {"scale": 0.5},
    "cart": {"rank_fraction": 0.3, "own_scale": 0.4},
    "wudi": {"max_iter": 30, "learning_rate": 1e-3},
}
METHODS = tuple(method for method in DENSE if method in VALUES)


def combined(method: str, weight: torch.Tensor, changes: list[torch.Tensor], *, transposed: bool) -> torch.Tensor:
    """The method's ΔW of a parameter.

    Args:
        weight: the base's, as it is stored.
        changes: ΔW of both experts, zero where one does not change it.
        transposed: it is stored in×out.
    """

    def turned(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
        return (tensor.T if transposed else tensor).detach().double().numpy()

    base, deltas = turned(weight), [turned(change) for change in changes]
    result = merged(method, base, [base + delta for delta in deltas], [1.0, 1.0], _never, **VALUES[method]) - base
    return torch.from_numpy(np.ascontiguousarray(result.T if transposed else result))


def by_module(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of a parameter that are modules of their own in transformers 4: gate, up and down of each expert."""
    if tensor.ndim != 3 or ".experts." not in name:
        return [tensor]
    halves = 2 if name.endswith("gate_up_proj") else 1
    return [part for expert in tensor for part in expert.chunk(halves)]


def _never(expert: int, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    raise AssertionError("no method here drops at random")
