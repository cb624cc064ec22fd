"""Whether the copies of the base's weights that adapters carry are the base's own.

Full weights are base + ΔW, and PEFT's result is copy + ΔW: where the two differ, the adapter was trained on another
base. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from adapterswap.arithmetic.copies import is_one_weight, stored_weight
from adapterswap.arithmetic.tensors import open_files
from adapterswap.errors import Problems
from adapterswap.files.tensorfile import Tensor
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.parameters import LowRankTerm, ParameterPlan

__all__ = ["check_copies"]


def check_copies(plan: ModelPlan) -> None:
    """Compare every copy with the base's weight, up to the rounding of the narrower of their dtypes.

    Raises:
        AdapterswapError: an adapter carries another weight than the base has.
    """
    carried = list(_copies(plan))
    if not carried or plan.base is None:
        return
    problems = Problems()
    used = {term.path for _, term, _ in carried}
    adapters = [adapter.file for adapter in plan.adapters.values() if adapter.file.path in used]
    with open_files([*adapters, *plan.base.shards]) as files:
        for parameter, term, copy in carried:
            base = parameter.base
            if base is not None and not is_one_weight(
                stored_weight(copy, files[term.path]), stored_weight(base.tensor, files[base.path])
            ):
                problems.add(
                    f"{term.expert} was trained on another {parameter.name} than {plan.base.name} has: it carries a "
                    f"copy ({copy.name}), which PEFT would put in its place",
                    "Give the base that it was trained on with `base_model`",
                )
    problems.raise_if_any()


def _copies(plan: ModelPlan) -> Iterator[tuple[ParameterPlan, LowRankTerm, Tensor]]:
    for parameter in plan:
        for term in parameter.low_rank:
            if term.module.base is not None:
                yield parameter, term, term.module.base
