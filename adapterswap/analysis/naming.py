"""Give each matrix one name in all experts, whatever their files call it, so that the same matrices are compared.

Without a base the experts' own names are reconciled as for a composition. With a base, matrices get the names under
which the base stores them, which full checkpoints use too. Knows names; reads only headers.
"""

from __future__ import annotations

from collections.abc import Mapping

from adapterswap.changes.locating import find_tied_head, locate_all, with_head
from adapterswap.errors import ExpertError, Problems
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.naming import renamed_adapter
from adapterswap.planning.reconciling import under_one_name

__all__ = ["under_stored_names"]

Expert = Adapter | Checkpoint


def under_stored_names(experts: Mapping[str, Expert], base: Checkpoint | None) -> dict[str, Expert]:
    """The experts with one name for each module.

    Args:
        experts: by name.
        base: their base, if it is known.

    Raises:
        ExpertError: adapters use different names for a module, and the base does not resolve them.
        BaseModelError: the base lacks a module of an adapter, or has it in another shape.
        UnsupportedError: the ΔW of an adapter is not s·B·A.
    """
    problems = Problems(ExpertError)
    adapters = {name: expert for name, expert in experts.items() if isinstance(expert, Adapter)}
    for name, adapter in adapters.items():
        with problems.collect():
            adapter.check_low_rank("`analyze` measures", name)
    problems.raise_if_any()
    adapters = under_one_name(adapters, None if base is None else str(base.source.folder), problems)
    problems.raise_if_any()
    if base is not None and adapters:
        stored = with_head(base.parameters, find_tied_head(base, adapters))
        located = locate_all(adapters, stored, "the base", base, problems)
        problems.raise_if_any()
        for name, adapter in adapters.items():
            keys = {found.module: key.rpartition(".")[0] for key, found in located[name].items()}
            names = {part: keys.get(part, part) for part in adapter.parts}
            adapters[name] = renamed_adapter(adapter, names, name, base.container)
    return {**experts, **adapters}
