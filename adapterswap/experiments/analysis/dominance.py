"""Propose an owner for each layer, from any number of experts: the one whose ΔW dominates, or a blend if several tie.

There are two criteria. A tie band (after arXiv:2601.22620): the expert with the largest relative ΔW owns a layer or
module, and is blended in equal parts with experts within τ of it. A margin (after AraSwap): an expert owns what it
dominates by a margin, 15 % there; blending in equal parts otherwise is our addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adapterswap.core import Adapter, Composition, Rule, compose, format_layers, open_checkpoint
from adapterswap.experiments.analysis.analysis import Bars, no_bars
from adapterswap.experiments.analysis.interference import Block, measure
from adapterswap.experiments.analysis.suggestion import PROPOSAL, expert_place, from_recipe
from adapterswap.kit.errors import ArgumentError, ExpertError, check_type
from adapterswap.kit.files.yaml import dump_yaml

MARGIN = 0.15
"""The default margin, as in AraSwap."""

Expert = Adapter | str | Path


@dataclass(frozen=True)
class Dominance:
    """Proposed rules.

    Attributes:
        per: `layer`, or `module` for attention and MLP separately.
        relative: whether sizes are ‖ΔW‖ / ‖W‖ rather than ‖ΔW‖.
        sizes: expert → (layer, kind) → size; the kind is empty for whole layers.
        rules: the proposal; the first match wins.
        unused: experts that appear in no rule.
    """

    per: Literal["layer", "module"]
    relative: bool
    sizes: Mapping[str, Mapping[Block, float]]
    rules: tuple[Rule, ...]
    unused: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data, as `adapterswap suggest --json` prints it."""
        blocks = sorted({block for sizes in self.sizes.values() for block in sizes})
        return {
            "per": self.per,
            "relative": self.relative,
            "rules": [rule.text for rule in self.rules],
            "unused": list(self.unused),
            "sizes": [
                {
                    "layer": layer,
                    **({"kind": kind} if kind else {}),
                    **{name: sizes.get((layer, kind), 0.0) for name, sizes in self.sizes.items()},
                }
                for layer, kind in blocks
            ],
        }


def suggest_owners(
    experts: Mapping[str, Expert],
    *,
    base_model: str | Path | None = None,
    num_layers: int | None = None,
    per: Literal["layer", "module"] = "layer",
    margin: float | None = None,
    tie: float | None = None,
    out_path: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    bars: Bars = no_bars,
) -> Dominance | None:
    """Propose an owner or a blend for each layer, from the sizes (Frobenius norms) of two or more adapters' ΔW.

    Args:
        experts: by name: opened adapters, folders or Hub ids, in any roles.
        base_model: the experts' base. With it, sizes are ‖ΔW‖ / ‖W‖ over the matrices that an expert adapts. Required
            for `tie`.
        num_layers: the number of layers; by default from the base's config.
        per: `layer`, or `module` to choose for each layer's attention and MLP separately.
        margin: an expert owns a layer if size_1 > (1 + margin) · size_2; experts within the margin of the largest are
            blended in equal parts. 0.15 by default, unless `tie` is set.
        tie: τ: experts whose relative sizes are less than τ below the largest are blended in equal parts.
        out_path: a file for the proposal, as a recipe for `adapterswap compose`; nothing is written by default.
        overwrite: replace `out_path`, if `suggest_owners` wrote it.
        dry_run: check everything, but read no tensors.
        bars: shows progress.

    Returns:
        The proposal, whose rules make a `Composition`. None for a dry run.

    Raises:
        ArgumentError: there are fewer than two experts, `per` is unknown, both criteria are set, one is negative or not
            finite, or `tie` comes without a base.
        ExpertError: an expert changes nothing in the layers.
        UnsupportedError: the base has an encoder and a decoder.
        OutputError: the file exists (without `overwrite`) or cannot be written.
        AdapterswapError: an expert cannot be opened, or is a full checkpoint; see also `make_plan`.
    """
    check_type(experts, Mapping, "experts", "Pass a mapping from names to folders, Hub ids or opened adapters")
    _check(experts, per, margin, tie, base_model)
    places = {name: expert_place(expert) for name, expert in experts.items()}
    inputs = [*places.values(), None if base_model is None else str(base_model)]
    if out_path is not None:
        PROPOSAL.check(out_path, overwrite=overwrite, inputs=inputs)
    together = Composition(
        allocation=(Rule(blend=dict.fromkeys(experts, 1.0)),),
        base_model=None if base_model is None else str(base_model),
        num_layers=num_layers,
    )
    plan = compose(together, experts)
    plan.check_adapter()
    plan.one_depth("`suggest`")
    if dry_run:
        return None
    base = None if base_model is None else open_checkpoint(base_model)
    with bars("matrices", sum(len(adapter.modules) for adapter in plan.adapters.values())) as step:
        changes = [
            measure(plan.adapters[name], name=name, base=base, progress=step, norms_only=True) for name in experts
        ]
    sizes = {each.expert: each.sizes(per_kind=per == "module", relative=base is not None) for each in changes}
    for name, block_sizes in sizes.items():
        if not any(block_sizes.values()):
            raise ExpertError(f"{name} changes nothing", "Check that these are the right expert and base")
    rules = choose_owners(sizes, margin=MARGIN if margin is None and tie is None else margin, tie=tie)
    used = {name for rule in rules for name in rule.experts}
    proposal = Dominance(per, base is not None, sizes, rules, tuple(name for name in experts if name not in used))
    if out_path is not None:
        named = {name: from_recipe(place, out_path) for name, place in places.items() if name in used}
        content: dict[str, Any] = {"experts": named}
        content |= {} if base_model is None else {"base_model": from_recipe(str(base_model), out_path)}
        content |= {} if num_layers is None else {"num_layers": num_layers}
        text = PROPOSAL.start.decode() + dump_yaml(content | {"rules": [rule.text for rule in rules]})
        with PROPOSAL.file(out_path, overwrite=overwrite, inputs=[*inputs, *plan.inputs]) as file:
            file.write_text(text, encoding="utf-8")
    return proposal


def choose_owners(
    sizes: Mapping[str, Mapping[Block, float]], *, margin: float | None = None, tie: float | None = None
) -> tuple[Rule, ...]:
    """The rules for these sizes of ΔW, see `suggest_owners`. Modules outside the layers are blended in equal parts."""
    blocks = sorted({block for block_sizes in sizes.values() for block in block_sizes})
    chosen: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for layer, kind in blocks:
        values = {name: block_sizes.get((layer, kind), 0.0) for name, block_sizes in sizes.items()}
        near = tuple(name for name, value in values.items() if _near(value, max(values.values()), margin, tie))
        chosen.setdefault((kind, near), []).append(layer)
    rules = [
        _owning(near, layers=format_layers(layers), modules=(kind,) if kind else None)
        for (kind, near), layers in chosen.items()
    ]
    used = tuple(name for name in sizes if any(name in near for _, near in chosen))
    return (*rules, _owning(used, optional=True))


def _near(value: float, largest: float, margin: float | None, tie: float | None) -> bool:
    """Whether a size ties with the largest."""
    if value == largest:
        return True
    if value == 0:
        return False
    return largest - value < tie if tie is not None else largest <= (1 + (margin or 0.0)) * value


def _owning(names: Sequence[str], **where: Any) -> Rule:
    content: dict[str, Any] = {"expert": names[0]} if len(names) == 1 else {"blend": dict.fromkeys(names, 1.0)}
    return Rule.model_validate({**content, **{key: value for key, value in where.items() if value is not None}})


def _check(
    experts: Mapping[str, Expert], per: str, margin: float | None, tie: float | None, base_model: str | Path | None
) -> None:
    if len(experts) < 2:
        raise ArgumentError(
            f"`experts` names {len(experts)}; a comparison needs two", "Pass two or more", parameter="experts"
        )
    if per not in ("layer", "module"):
        raise ArgumentError(f"`per` is {per!r}", "Pass layer or module", parameter="per")
    if margin is not None and tie is not None:
        raise ArgumentError("`margin` and `tie` cannot be combined", "Pass only one of them", parameter="tie")
    for name, value in (("margin", margin), ("tie", tie)):
        if value is not None and not 0 <= value < math.inf:
            raise ArgumentError(f"`{name}` is {value:g}", "Pass a number of 0 or more", parameter=name)
    if tie is not None and base_model is None:
        raise ArgumentError(
            "`tie` compares relative sizes, ‖ΔW‖ / ‖W‖, which need the base's weights",
            "Pass `base_model`, or use `margin`",
            parameter="base_model",
        )
