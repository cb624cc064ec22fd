"""A plan of full weights: what becomes of every stored tensor, from full checkpoints, adapters or both.

Pure data. `model_planning` makes it, `merging` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterswap.errors import AdapterswapError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.planning.allocation import Rule
from adapterswap.planning.compositions import Composition
from adapterswap.planning.parameters import ParameterPlan
from adapterswap.planning.plan import Plan

__all__ = ["AnyPlan", "ModelPlan", "adapters_only", "inputs_of"]


@dataclass(frozen=True)
class ModelPlan:
    """A checked composition of full weights: every stored tensor, with what becomes of it.

    Attributes:
        composition, rules, num_layers: as for `Plan`.
        experts: the opened experts by name, adapters and full checkpoints.
        base: the base; None where none of its bytes are needed.
        parameters: by name, in the order of the skeleton's shards and of the bytes in them.
        untied: the result holds a head of its own, where the skeleton's is tied to the embedding.
    """

    composition: Composition
    rules: tuple[Rule, ...]
    experts: Mapping[str, Adapter | Checkpoint]
    num_layers: int
    base: Checkpoint | None
    parameters: Mapping[str, ParameterPlan]
    untied: bool = False

    def __iter__(self) -> Iterator[ParameterPlan]:
        return iter(self.parameters.values())

    @property
    def skeleton(self) -> Checkpoint:
        """Whose shards, config and tokenizer the result has: the base's, or the first full expert's without one."""
        return self.base or next(iter(self.full.values()))

    @property
    def adapters(self) -> dict[str, Adapter]:
        return {name: expert for name, expert in self.experts.items() if isinstance(expert, Adapter)}

    @property
    def full(self) -> dict[str, Checkpoint]:
        return {name: expert for name, expert in self.experts.items() if isinstance(expert, Checkpoint)}


AnyPlan = Plan | ModelPlan


def inputs_of(plan: AnyPlan) -> list[str | Path | None]:
    """What no output may touch: the experts, the base, the bases that the experts name, the recipe and what it extends.

    As `check_inputs` takes them: Hub ids are passed over there.
    """
    base = plan.base.source.folder if isinstance(plan, ModelPlan) and plan.base else None
    experts = plan.experts.values()
    return [
        *(expert.source.folder for expert in experts),
        *(expert.config.base_model for expert in experts if isinstance(expert, Adapter)),
        plan.composition.base_model,
        base,
        *plan.composition.recipe_files,
    ]


def adapters_only(plan: AnyPlan) -> Plan:
    """The plan, where all its experts are adapters.

    Raises:
        AdapterswapError: one of them is a full checkpoint.
    """
    if isinstance(plan, Plan):
        return plan
    raise AdapterswapError(
        f"{next(iter(plan.full))} is a full checkpoint, and only adapters can be written as one, loaded or served",
        "Write full weights with `adapterswap merge`, or cut an adapter out of it first with `adapterswap extract`",
    )
