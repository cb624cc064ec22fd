"""Where an adapter starts to be trained: another adapter, or a composition, instead of zero.

The trained LoRA has the start's modules with their ranks and scales, and takes over its factors, so before the first
step the two compute the same. Whatever PEFT's LoRA cannot start from is refused. In a chain, a new LoRA is trained on
top of the start, which becomes a part of the base: merged into its weights in memory, or beside them if they are
quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterswap.core import (
    Adapter,
    Base,
    Composition,
    ModelConfig,
    OpenedBase,
    SourceRecord,
    check_base_weights,
    compose,
    open_adapter,
    write_adapter,
)
from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.core.companions.tokenizer import token_clashes
from adapterswap.core.model.sources import Reference
from adapterswap.experiments.training.recipe import ChainStart
from adapterswap.experiments.training.targets import MERGE_INSTEAD, TrainingTargets
from adapterswap.kit.errors import AdapterswapError, ExpertError, Problems, UnsupportedError
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.tools.recipes import read_composition


@dataclass(frozen=True)
class Start:
    """The adapter that training starts from.

    Attributes:
        adapter: the adapter, under the base's names for its modules.
        record: its identity, for the record of what is trained.
        companions: whose tokenizer and chat templates are trained with: the start's, unless it has none.
        on_top: whether it stays frozen, and a new adapter is trained on top of it.
    """

    adapter: Adapter
    record: SourceRecord
    companions: CompanionPlan
    on_top: bool

    def write_companions(self, folder: Path) -> None:
        """Write the tokenizer and the chat templates that the start has beside it into a folder."""
        CompanionPlan.decide({"start": self.adapter.source.folder}).write(folder)

    def describe(self, targets: TrainingTargets) -> str:
        """What training takes over, adds and keeps, in a line."""
        others = [f"its {line}" for line in self.companions.lines]
        if self.on_top:
            return ", ".join([f"on top of {self.record}", *others])

        modules = self.adapter.modules
        ranks = {module.rank for module in modules.values()}
        rank = f"rank {min(ranks)}"
        if len(ranks) > 1:
            rank += f" to {max(ranks)}"
        parts = [f"{self.record}: {len(modules)} modules of {rank}"]
        added = len(targets.modules - modules.keys())
        if added:
            parts.append(f"{added} more start at zero")
        kept = len(modules.keys() - targets.modules)
        if kept:
            parts.append(f"{kept} of them are not trained")
        return ", ".join([*parts, *others])


def open_start(start: str | Composition | ChainStart, base: OpenedBase, model: Any, scratch: Path) -> Start:
    """Open the adapter that training starts from, and check that it has this base and that LoRA can start from it.

    Args:
        start: a folder or Hub id; the recipe of a composition (.yaml); a composition; or what to train on top of.
        scratch: a temporary folder, where a composition is written. It is needed until `take_over`.
    """
    try:
        on_top = isinstance(start, ChainStart)
        if isinstance(start, str) and start.endswith((".yaml", ".yml")):
            start = read_composition(start)
        if isinstance(start, ChainStart):
            adapter = open_adapter(start.adapter)
        elif isinstance(start, Composition):
            # The depth is that of the base to train on, which the experts may only name.
            if start.base_model is None and start.num_layers is None:
                depth = ModelConfig(base.config.to_dict()).stacked_layers
                start = start.model_copy(update={"num_layers": depth})
            adapter = open_adapter(write_adapter(compose(start), scratch / "composition"))
        else:
            adapter = open_adapter(start)
        _check_kind(adapter)
        _check_base(adapter, base)

        record = SourceRecord.of_adapter(adapter, sha256_of(adapter.file.path))
        if on_top:
            record = record.model_copy(update={"mode": "chain"})
        named = adapter.under_names_of(Base(model), "the start", str(base.source))
        companions = CompanionPlan.decide_prompts({"start": adapter.source.folder}, base.source.folder)
        return Start(named, record, companions, on_top)
    except AdapterswapError as error:
        raise error.recast(parameter="start") from None


def _check_kind(adapter: Adapter) -> None:
    """Raise if the adapter holds something that training does not continue."""
    problems = Problems(UnsupportedError)

    # Parts that are no LoRA of a module
    opaque = list(adapter.opaque.values())
    if opaque:
        more = ""
        if len(opaque) > 1:
            more = f" and {len(opaque) - 1} more"
        problems.add(
            f"The start is {opaque[0].method} ({opaque[0].name}{more}), and training can only start from LoRA",
            MERGE_INSTEAD,
        )
    if adapter.saved:
        part = next(iter(adapter.saved.values()))
        problems.add(f"The start holds {part.name} {part.words}, and training can only start from LoRA", MERGE_INSTEAD)
    fused = [module.name for module in adapter.modules.values() if module.parameter]
    if fused:
        problems.add(f"The start adapts the parameter {fused[0]}, and training adapts modules only", MERGE_INSTEAD)

    # What else training would not keep
    if adapter.ties_factors:
        problems.add("The start ties the LoRA of an embedding to the head, which training does not", MERGE_INSTEAD)
    if adapter.kept_layers is not None:
        problems.add(
            "The start is a slice, whose other layers were cut away", "Start from the whole expert, or a composition"
        )
    if not (adapter.parts or problems):
        problems.add("The start adapts no module", "Remove `start`")
    problems.raise_if_any()


def _check_base(adapter: Adapter, base: OpenedBase) -> None:
    """Raise unless the start adapts the base to train on: by its weights if both are known, else by its name."""
    problems = Problems(ExpertError)
    config = adapter.config
    check_base_weights({"the start": adapter.base_fingerprints}, base.source, {"the start": config.base_reference})

    by_weights = bool(adapter.base_fingerprints and base.source.identity)
    if config.base_model and not by_weights and Reference(config.base_model).public_name != base.source.name:
        problems.add(
            f"The start adapts the base {config.base_model}, but the recipe trains on {base.source.name}",
            "Train on the start's base. If both names mean the same weights, write the start again with `compose` and "
            f"`base_model={base.reference}`",
        )

    # The start may name the commit, or the branch or tag that was requested.
    hub_id = Reference(base.reference).hub_id
    requested = "main"
    if hub_id and hub_id.revision:
        requested = hub_id.revision
    revision = config.revision or "main"
    if not by_weights and base.source.revision and revision not in (base.source.revision, requested):
        problems.add(
            f"The start adapts the revision {revision} of {config.base_model}, but the recipe trains on "
            f"{base.source.revision}",
            f"Set `base_model: {base.source.name}@{revision}`",
        )

    differing = token_clashes(base.source.folder, adapter.source.folder)
    if differing:
        problems.add(
            f"The tokenizer beside the start is not the base's: {differing[0]}",
            "Train on a base with the start's tokenizer, or remove it from the start's folder if it is not in use",
        )
    problems.raise_if_any()
