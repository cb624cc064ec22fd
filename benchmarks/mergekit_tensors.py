"""Methods against mergekit's functions on the same float64 weights: the largest difference of any weight.

    python benchmarks/mergekit_tensors.py    # where mergekit 0.1.5 can be imported

adapterswap computes in float32 from ΔW; mergekit gets the full weights W. Random methods share adapterswap's masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from mergekit.merge_methods.base import PerInputValues, TensorGroup
from mergekit.merge_methods.registry import get

from adapterswap.core.methods.dense import drop_mask
from adapterswap.core.planning.rules import Rule

NAMES = ("a", "b", "c")
WEIGHTED = {"della", "della_linear", "breadcrumbs", "breadcrumbs_ties", "nuslerp", "multislerp", "ties"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ties": (3, {"density": 0.4, "lambda": 0.9}),
    "della": (3, {"density": 0.5, "epsilon": 0.2, "lambda": 0.7}),
    "della_linear": (3, {"density": 0.5, "epsilon": 0.2}),
    "breadcrumbs": (3, {"density": 0.6, "gamma": 0.1}),
    "breadcrumbs_ties": (3, {"density": 0.6, "gamma": 0.1}),
    "sce": (3, {"select_topk": 0.4}),
    "nuslerp": (2, {}),
    "nuslerp by rows": (2, {"nuslerp_flatten": False}),
    "nuslerp by columns": (2, {"nuslerp_flatten": False, "nuslerp_row_wise": True}),
    "multislerp": (3, {}),
    "karcher": (3, {}),
    "model_stock": (3, {}),
    "model_stock by rows": (3, {"filter_wise": True}),
    "nearswap": (2, {"t": 0.3}),
    "arcee_fusion": (2, {}),
}


def main() -> None:
    for case in CASES:
        apart = max(compare(case, seed) for seed in range(5))
        print(f"{case:20} {apart:.1e}")


def compare(case: str, seed: int) -> float:
    name, (count, parameters) = case.split()[0], CASES[case]
    random = np.random.default_rng(seed)
    base = random.standard_normal((24, 16))
    deltas = {who: 0.5 * random.standard_normal(base.shape) for who in NAMES[:count]}
    weights = dict(zip(NAMES, (1.0, 0.6, 0.8) if name in WEIGHTED else (1.0, 1.0, 1.0), strict=True))
    blend = {who: weights[who] for who in deltas}
    rule = Rule.model_validate({"blend": blend, "method": name, **parameters})
    entered = {who: np.float32(delta + base * rule.acts_on_weights) for who, delta in deltas.items()}
    ours = rule.combine(entered, blend, seed=seed, module="m") + base * (not rule.acts_on_weights)
    theirs = mergekit(name, base, deltas, blend, parameters, seed)
    return float(np.abs(ours - theirs).max())


def mergekit(name: str, base: Any, deltas: Any, blend: dict[str, float], parameters: dict[str, Any], seed: int) -> Any:
    method = get(name)
    tensors = [torch.from_numpy(base + delta) for delta in deltas.values()]
    ids = list(deltas)
    first = name in ("nearswap", "arcee_fusion")  # their base is the first of the two
    if name != "karcher" and not first:
        tensors, ids = [torch.from_numpy(base), *tensors], ["base", *ids]
    group = TensorGroup.from_tensors(tensors, ids=ids, base_index=None if name == "karcher" else 0)
    values: dict[str, Any] = {}
    for spec in method.spec.parameters:
        if "NON_BASE" in str(spec.scope).upper():
            shared = parameters.get(spec.name, spec.default)
            each = blend if spec.name == "weight" else dict.fromkeys(blend, shared)
            values[spec.name] = PerInputValues(list(each.items()))
        else:
            values[spec.name] = parameters.get(spec.name, spec.default)
    with own_masks(iter(deltas), seed):
        return method.merge_group(group, **values).numpy()


@contextmanager
def own_masks(experts: Iterator[str], seed: int) -> Iterator[None]:
    def drawn(chances: torch.Tensor) -> torch.Tensor:
        mask = drop_mask(tuple(chances.shape), chances.numpy(), seed=seed, expert=next(experts), module="m")
        return torch.from_numpy(mask).to(chances.dtype)

    with patch("torch.bernoulli", drawn):
        yield


if __name__ == "__main__":
    main()
