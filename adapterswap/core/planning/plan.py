"""A plan: a composition applied to real experts and checked. The same class serves adapters and full weights.

Plans are made from headers alone (see `planner`): no tensors, no torch. A plan says, for every module of an adapter or
every stored tensor of a model, which experts' changes enter with which coefficients. The executors (`writing`, `gguf`,
`live`) carry it out; `write`, `merge` and `export` call them through the package's face. `describe` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import adapterswap
from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import Depth, KeptLayers, NumLayers, Stack, check_one_list
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.facts import BaseFacts
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.planning.slices import requested_by_layer, slice_in
from adapterswap.core.planning.slots import Slot
from adapterswap.kit.errors import AdapterswapError, UnsupportedError

if TYPE_CHECKING:
    from adapterswap import Exported
    from adapterswap.core.planning.describe import Picture


@dataclass(frozen=True)
class Plan:
    """A checked composition: every module or tensor of the result, and how it is computed.

    If all experts are adapters, the slots are the modules that any of them adapts, and the result is an adapter. If one
    is a full checkpoint, or the adapters were merged into their base, the slots are the base's stored tensors, and the
    result is full weights.

    Attributes:
        composition: the request.
        rules: its allocation for this number of layers.
        experts: the opened experts by name, in the order in which the rules name them.
        num_layers: the base's number of layers, or that of each of its stacks.
        slots: modules by full name (those without a layer first, then by layer and name; those trained in full last),
            or tensors by key, in the order in which the skeleton's shards store them.
        is_model: whether the slots are stored tensors.
        base: what is known of the base.
        untied: whether the result stores a head and an embedding, one of them changed, that the skeleton's config ties.
        notes: what could not be checked on this machine, and what papers warn of. Notes change nothing in the result.

        These follow from the others:

        depth: the base's number of layers, or that of each of its stacks.
        adapters, checkpoints: the experts of each kind, by name.
        modules: the modules of an adapter with LoRA or another kind of factors, by full name.
        saved: the modules of an adapter that experts hold in full (`modules_to_save`), by full name.
    """

    composition: Composition
    rules: tuple[Rule, ...]
    experts: Mapping[str, Adapter | Checkpoint]
    num_layers: NumLayers
    slots: Mapping[str, Slot]
    is_model: bool = False
    base: BaseFacts = field(default_factory=BaseFacts)
    untied: bool = False
    notes: tuple[str, ...] = ()

    depth: Depth = field(init=False, repr=False, compare=False)
    adapters: dict[str, Adapter] = field(init=False, repr=False, compare=False)
    checkpoints: dict[str, Checkpoint] = field(init=False, repr=False, compare=False)
    modules: dict[str, Slot] = field(init=False, repr=False, compare=False)
    saved: dict[str, Slot] = field(init=False, repr=False, compare=False)
    tokens: dict[str, Slot] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.__dict__.update(
            depth=Depth(self.num_layers),
            adapters={name: expert for name, expert in self.experts.items() if isinstance(expert, Adapter)},
            checkpoints={name: expert for name, expert in self.experts.items() if isinstance(expert, Checkpoint)},
            modules={name: slot for name, slot in self.slots.items() if not slot.storage.in_full},
            saved={name: slot for name, slot in self.slots.items() if slot.storage.in_full},
            tokens={name: slot for name, slot in self.slots.items() if slot.storage.of_tokens},
        )

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    def __repr__(self) -> str:
        """A few lines: the method, the experts, the base, and the strip of layers."""
        from adapterswap.core.planning.describe import summary

        return f"<{summary(self)}>"

    def _repr_html_(self) -> str:
        """The same for a notebook, with colours."""
        from adapterswap.core.planning.describe import plan_html

        return plan_html(self)

    @property
    def headline(self) -> str:
        """The method and the size of the plan: `layer_swap, 42 modules, 6 layers`."""
        from adapterswap.core.planning.describe import headline

        return headline(self)

    @property
    def picture(self) -> Picture:
        """The strip as data."""
        from adapterswap.core.planning.describe import picture

        return picture(self)

    @property
    def zones_text(self) -> str | None:
        """The zones of a layer swap in numbers, and whether they are the paper's defaults; else None."""
        from adapterswap.core.planning.describe import zones_of

        composition = self.composition
        if not composition.has_zones:
            return None
        return "; ".join(zones_of(self, stack) for stack in composition.stacks(self.num_layers))

    @property
    def strip(self) -> str:
        """The layers from left (bottom) to right (top), one character each, and a legend."""
        return self.picture.text

    @property
    def remarks(self) -> list[str]:
        """What goes with the strip: modules outside the layers, experts that lack modules, warnings."""
        from adapterswap.core.planning.describe import unusual

        return unusual(self)

    def write(
        self,
        out_path: str | Path,
        *,
        layout: Literal["exact", "portable"] = "exact",
        max_rank: int | None = None,
        max_error: float | None = None,
        names: Literal["task", "language", "transformers4", "transformers5"] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the composed adapter to the folder `out_path`: `adapterswap.write_adapter` of this plan.

        Args:
            out_path, layout, max_rank, max_error, names, overwrite: see `write_adapter`.

        Returns:
            The folder's path.

        Raises:
            AdapterswapError: see `write_adapter`.
        """
        return adapterswap.write_adapter(
            self, out_path, layout=layout, max_rank=max_rank, max_error=max_error, names=names,
            overwrite=overwrite,
        )  # fmt: skip

    def merge(
        self,
        out_path: str | Path,
        *,
        base_model: str | Path | None = None,
        max_shard_size: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        dequantize: bool = False,
        tokenizer: str | None = None,
        config_from: str | None = None,
        device: str = "cpu",
        overwrite: bool = False,
    ) -> Path:
        """Write full weights to the folder `out_path`: `adapterswap.merge` of this plan.

        Args:
            out_path, base_model, max_shard_size, dtype, dequantize, tokenizer, config_from, device, overwrite: see
                `merge`.

        Returns:
            The folder's path.

        Raises:
            AdapterswapError: see `merge`.
        """
        return adapterswap.merge(
            self, base_model, out_path=out_path, max_shard_size=max_shard_size, dtype=dtype, dequantize=dequantize,
            tokenizer=tokenizer, config_from=config_from, device=device, overwrite=overwrite,
        )  # fmt: skip

    def export(
        self,
        out_path: str | Path,
        *,
        base_model: str | Path | None = None,
        outtype: str = "f32",
        pieces: bool | Literal["layer", "kind", "zone"] = False,
        max_rank: int | None = None,
        max_error: float | None = None,
        overwrite: bool = False,
    ) -> Exported:
        """Write the composition as LoRA in GGUF to `out_path`: `adapterswap.export` of this plan.

        Args:
            out_path, base_model, outtype, pieces, max_rank, max_error, overwrite: see `export`.

        Returns:
            The files that were written, and their errors.

        Raises:
            AdapterswapError: see `export`.
        """
        return adapterswap.export(
            self, out_path, base_model=base_model, outtype=outtype, pieces=pieces, max_rank=max_rank,
            max_error=max_error, overwrite=overwrite,
        )  # fmt: skip

    @cached_property
    def companions(self) -> CompanionPlan:
        """Whose config, tokenizer, chat templates and other companions of the weights the result takes."""
        weights, beside = self.base.weights, self.base.at_hand
        rows = config = None

        if self.is_model:
            rows = min((slot.shape[0] for slot in self if slot.has_tokens), default=None)
            config = self.composition.config_from
            if not config:
                config = next(iter(self.checkpoints)) if weights is None else BASE

        return CompanionPlan.decide(
            {name: expert.source.folder for name, expert in self.experts.items()},
            None if weights is None else weights.source.folder,
            beside=None if beside is None else beside.folder,
            rows=rows,
            tokenizer=self.composition.tokenizer,
            config=config,
            models=self.checkpoints,
        )

    @property
    def companion_lines(self) -> list[str]:
        """The lines on the companions; none if they cannot be read, which is an error where they are written."""
        try:
            return self.companions.lines
        except AdapterswapError:
            return []

    def one_depth(self, what: str) -> int:
        """The number of layers, for a feature (`what`, such as `suggest`) that supports only one list of layers.

        Raises:
            UnsupportedError: the base has an encoder and a decoder, or several lists of layers.
        """
        for name, adapter in self.adapters.items():
            check_one_list(name, adapter.parts)
        if isinstance(self.num_layers, int):
            return self.num_layers
        raise UnsupportedError(
            f"The base has an encoder and a decoder, but {what} supports only models with one list of layers",
            "Use experts of a decoder-only model",
        )

    def check_adapter(self) -> None:
        """Raise an `UnsupportedError` if the result is full weights, which cannot be written as an adapter."""
        if self.is_model:
            from adapterswap.core.planning.targets import Facts, Target, full_checkpoint

            for culprit in full_checkpoint.find(self, Facts(Target.ADAPTER, self)):
                raise UnsupportedError(culprit.message, culprit.remedy)

    @cached_property
    def slice(self) -> KeptLayers | None:
        """The layers that it keeps of its only expert, if it is a slice; else None."""
        if len(self.experts) != 1 or self.composition.allocation is None:
            return None
        return slice_in(self.rules, next(iter(self.experts)))

    @property
    def kept_layers(self) -> KeptLayers | None:
        """The layers that the result has, if it is a slice, or if slices gave it no more; None if it has all.

        A layer that was cut away from an expert, and that the plan leaves to the base, is still missing.
        """
        slices = [expert.kept_layers for expert in self.experts.values() if expert.kept_layers is not None]
        if self.slice is not None or not slices:
            return self.slice

        requested = requested_by_layer(self.rules, self, self.depth)
        by_stack: dict[Stack | None, set[int]] = {}
        for (stack, layer), names in requested.items():
            by_stack.setdefault(stack, set())
            if names or all(kept.has(stack, layer) for kept in slices):
                by_stack[stack].add(layer)

        if sum(map(len, by_stack.values())) == len(requested):
            return None
        return KeptLayers({stack: frozenset(layers) for stack, layers in by_stack.items()})

    def merged_into(self, base: Checkpoint) -> Plan:
        """The plan of full weights, for a plan of adapters: the adapters merged into their base.

        The coefficients must be final; see `writing.resolution.Resolved.of`.

        Args:
            base: the base that the experts adapt.

        Raises:
            BaseModelError: the base is another one than the experts adapt, or has other layers.
            UnsupportedError: the base is quantized where they adapt it, or the composition cannot be computed there.
        """
        from adapterswap.core.planning.planner import merge_plan

        return merge_plan(self, base)

    @property
    def task_type(self) -> str | None:
        """The declared task type, or the first that an adapter has."""
        if self.composition.task_type is not None:
            return self.composition.task_type
        for adapter in self.adapters.values():
            if adapter.config.task_type:
                return adapter.config.task_type
        return None

    @property
    def auto_mapping(self) -> Mapping[str, Any] | None:
        """The classes that PEFT needs to load an adapter without a task type."""
        for adapter in self.adapters.values():
            if adapter.config.auto_mapping:
                return adapter.config.auto_mapping
        return None

    @property
    def inputs(self) -> list[str | Path | None]:
        """Files that no output may overwrite: the experts, the base, the bases that they name, the recipe and the
        recipes that it extends. Checks of outputs ignore Hub ids among them."""
        named: dict[str | None, None] = {}
        for adapter in self.adapters.values():
            named |= {adapter.config.base_model: None, adapter.trained_on: None}
        return [
            *(expert.source.folder for expert in self.experts.values()),
            *named,
            self.composition.base_model,
            self.base.weights.source.folder if self.base.weights else None,
            *self.composition.recipe_files,
        ]

    @property
    def largest_rank(self) -> int:
        """The rank of the plan's adapter if all modules have the same: the largest of any module."""
        return max((module.total_rank for module in self.modules.values() if module.terms), default=1)
