"""Open an expert from its config and its safetensors header: an adapter, or a full checkpoint as one expert.

The file decides which modules an adapter holds (see `held`). No tensor is read and torch is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from adapterswap.core.companions.files import MODEL_CONFIG
from adapterswap.core.experts.config import AdapterConfig
from adapterswap.core.experts.held import Held
from adapterswap.core.experts.keys import sort_keys
from adapterswap.core.experts.parts import FullModule, LoraModule, OpaqueModule, Part
from adapterswap.core.model.checkpoints import MODEL_INDEX, Checkpoint, check_alone, open_checkpoint
from adapterswap.core.model.layers import KeptLayers, ModuleName, has_both_stacks, layer_container
from adapterswap.core.model.sources import CONFIG, MODEL_WEIGHTS, WEIGHTS, Records, Source
from adapterswap.kit.errors import ExpertError, NotFoundError, Problems, UnsupportedError, and_more
from adapterswap.kit.files.tensorfile import TensorFile

if TYPE_CHECKING:
    from adapterswap.core.model.base import Base


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: pure data, no open file.

    Attributes:
        source: the folder, and its name or Hub id.
        config: the content of adapter_config.json.
        file: the safetensors file's header.
        parts: everything that it changes, by full name: what has no layer first, then by layer and name; modules in
            full last.
        container: the list of layers in the base, such as `model.layers`; None if no module has a layer, or there are
            several lists.
        kept_layers: the layers of a slice, whose other layers were cut away; None for a whole expert.
        ignored: modules in the file that its own config does not target. PEFT would not load them, so they are not part
            of the expert.
        renamed: whether the file uses other names than `parts`, because of wrappers (`_orig_mod.`, `module.`, …), or
            of another class or version of the model.
        original: new name → name in the file, without wrappers, for modules that were renamed; see `under_names_of`.
        base_fingerprints: the local base's weights, by the record in its folder; empty if that does not say.
        trained_on: of an adapter on top of others in a chain: the base that its own file names, into which those are
            merged. `config` names the base of the chain's first.
    """

    source: Source
    config: AdapterConfig
    file: TensorFile
    parts: Mapping[str, Part]
    container: str | None
    kept_layers: KeptLayers | None = None
    ignored: tuple[str, ...] = ()
    renamed: bool = False
    original: Mapping[str, str] = field(default_factory=dict)
    base_fingerprints: Mapping[str, str] = field(default_factory=dict)
    trained_on: str | None = None

    def __repr__(self) -> str:
        facts = [repr(self.name)]
        if self.modules or not (self.opaque or self.tokens):
            facts.append(f"{len(self.modules)} modules")
        if self.opaque:
            facts.append(f"{len(self.opaque)} modules of {self.config.title}")

        ranks = sorted({module.rank for module in self.modules.values()})
        if len(ranks) == 1:
            facts.append(f"rank {ranks[0]}")
        elif ranks:
            facts.append(f"rank {ranks[0]}-{ranks[-1]}")

        whole = len(self.saved) - len(self.tokens)
        if whole:
            facts.append(f"{whole} trained in full")
        facts += [f"tokens trained in {name}" for name in self.tokens]
        return f"<Adapter {', '.join(facts)}, base {self.config.base_model!r}>"

    @property
    def name(self) -> str:
        return str(self.source)

    @cached_property
    def modules(self) -> Mapping[str, LoraModule]:
        """The LoRA modules."""
        return {name: part for name, part in self.parts.items() if isinstance(part, LoraModule)}

    @cached_property
    def saved(self) -> Mapping[str, FullModule]:
        """The modules trained in full (`modules_to_save`), or whose tokens were trained."""
        return {name: part for name, part in self.parts.items() if isinstance(part, FullModule)}

    @cached_property
    def opaque(self) -> Mapping[str, OpaqueModule]:
        """The modules whose change is not a product of two factors (DoRA, OFT, …)."""
        return {name: part for name, part in self.parts.items() if isinstance(part, OpaqueModule)}

    @cached_property
    def adapted(self) -> Mapping[str, LoraModule | OpaqueModule]:
        """The modules that have a change of their weight, whatever its kind, and are not held in full."""
        return {**self.opaque, **self.modules}

    @property
    def ties_factors(self) -> bool:
        """Whether the LoRA of an embedding also applies to the head that is tied to it (`ensure_weight_tying`).

        This does not concern modules in `modules_to_save`: PEFT saves both, each under its own name.
        """
        return self.config.tied and any(module.layer is None for module in self.factors.values())

    @cached_property
    def factors(self) -> Mapping[str, LoraModule]:
        """The modules with factors A and B, by name: those of LoRA and of its variants."""
        variants = {name: part.lora for name, part in self.opaque.items() if part.lora is not None}
        if not variants:
            return self.modules
        return {**self.modules, **variants}

    @property
    def vocabulary(self) -> dict[str, Part]:
        """The embeddings and heads that it changes, by name."""
        vocabulary: dict[str, Part] = {}
        for name, part in self.parts.items():
            is_outside = part.layer is None and ModuleName(name).is_vocabulary(None)
            if is_outside or name in self.tokens:
                vocabulary[name] = part
        return vocabulary

    @cached_property
    def tokens(self) -> Mapping[str, FullModule]:
        """The embeddings and heads with single trained rows (`trainable_token_indices`), by name."""
        return {name: part for name, part in self.saved.items() if part.rows}

    @property
    def has_both_stacks(self) -> bool:
        """Whether its list of layers stands for both an encoder's and a decoder's."""
        return has_both_stacks(self.container)

    def with_parts(self, parts: Iterable[Part], container: str | None) -> Adapter:
        """The adapter with other parts, in their order; `container` is their list of layers."""
        return replace(self, parts=_in_order(parts), container=container)

    def with_names(self, names: Mapping[str, str], expert: str, container: str | None) -> Adapter:
        """The adapter with its modules renamed. Its file keeps the old names and is read by them.

        Args:
            names: old name → new name, for every module.
            expert: the adapter's name, for messages.
            container: the list of layers under the new names.
        """
        if all(new == old for old, new in names.items()):
            return self
        check_distinct(names, expert)

        parts: list[Part] = []
        original: dict[str, str] = {}
        for old, part in self.parts.items():
            new = names[old]
            parts.append(part.at(new, ModuleName(new).layer(container)))
            original[new] = self.original.get(old, old)

        if all(part.layer is None for part in parts):
            container = None
        return replace(self.with_parts(parts, container), renamed=True, original=original)

    def under_names_of(self, base: Base, expert: str, base_name: str) -> Adapter:
        """The adapter with the names that its base has for the modules; see `Base.find`.

        Args:
            base: the base.
            expert, base_name: the names of both in messages.
        """
        names: dict[str, str] = {}
        for module in self.parts.values():
            shape = None
            if module.lora is not None:
                shape = (module.lora.out_features, module.lora.in_features)

            canonical = base.find(module.name, self.container, shape)
            if canonical is None:
                remedy = (
                    "Pass the base that the experts adapt as `base_model`, or save the expert again with this version "
                    "of transformers"
                )
                raise ExpertError(
                    f"{expert} adapts {module.name}, but {base_name} has no module of this shape under this or an "
                    "older name",
                    module.misnamed or remedy,
                    parameter="base_model",
                )
            names[module.name] = canonical
        return self.with_names(names, expert, base.container)

    @staticmethod
    def read(source: Source) -> Adapter:
        """Open the PEFT adapter of a source; see `open_adapter`."""
        folder = source.folder
        if not os.path.exists(folder / WEIGHTS):
            raise _missing(source)

        # The config and the header, with the mistakes of both
        problems = Problems(ExpertError)
        config = file = None
        with problems.collect():
            config = AdapterConfig.read(folder / CONFIG)
        with problems.collect():
            file = TensorFile.read(folder / WEIGHTS)
        problems.raise_if_any()
        assert config is not None
        assert file is not None

        # What the tensors are, and which of them PEFT loads
        problems = Problems(ExpertError, str(folder))
        keys = sort_keys(
            file,
            config.modules_to_save,
            problems,
            biases=config.bias != "none",
            kind=config.kind,
            tokens=bool(config.trained_tokens),
        )
        held = Held.of(keys, config, file, folder, problems)
        container = layer_container([*held.parts, *held.saved])
        parts = held.read(keys.shared, container, problems)

        # Of a slice, the layers that were kept
        kept = None
        try:
            kept = Records(folder).kept_layers((part.name, part.layer) for part in parts)
        except ExpertError as error:
            problems.keep(error)  # it names the folder

        if not held.parts and not held.tied and not problems:
            title = held.config.title
            problems.add(f"{WEIGHTS} holds no {title} tensors", f"Pass a {title} adapter saved by PEFT")
        problems.raise_if_any()
        return Adapter(
            source,
            held.config,
            file,
            _in_order(parts),
            container,
            kept,
            held.ignored,
            keys.renamed,
            base_fingerprints=Records(folder).base(),
        )


def _in_order(parts: Iterable[Part]) -> dict[str, Part]:
    """Parts by name: those without a layer first, then by layer and name; modules in full last."""

    def place(part: Part) -> tuple[bool, int, str]:
        layer = -1 if part.layer is None else part.layer
        return isinstance(part, FullModule), layer, part.name

    return {part.name: part for part in sorted(parts, key=place)}


def check_distinct(names: Mapping[str, str], whose: str) -> None:
    """Raise `ExpertError` if two modules of `whose` would get the same name; `names` maps old to new."""
    old_names: dict[str, str] = {}
    for old, new in names.items():
        if new in old_names:
            raise ExpertError(
                f"{whose}: {old_names[new]} and {old} are two names of one module, {new}", "Save the expert again"
            )
        old_names[new] = old


def open_adapter(reference: str | Path) -> Adapter:
    """Open a PEFT adapter from a local folder or a Hub id `org/name[/subfolder][@revision]`.

    Raises:
        NotFoundError: it exists neither on this machine nor on the Hub.
        ExpertError: it is damaged or incomplete.
        UnsupportedError: it is sharded, pickled or of mlx-lm, or is a kind of adapter that cannot be composed exactly.
        AdapterswapError: several of these, reported together.
    """
    return Adapter.read(Source.of_adapter(reference, parameter="reference"))


def _missing(source: Source) -> ExpertError | NotFoundError | UnsupportedError:
    folder = source.folder
    if os.path.exists(folder / Source.MLX_WEIGHTS):
        return UnsupportedError(
            f"{folder} holds an adapter of mlx-lm ({Source.MLX_WEIGHTS}), not of PEFT",
            f"Convert it first: adapterswap convert {folder} -o OUT",
        )
    if any(folder.glob("adapter_model*.bin")):
        return UnsupportedError(
            f"{folder} holds a pickled adapter (.bin), which can run code when loaded",
            f"Rewrite it without running code: adapterswap convert {folder} --allow-pickle -o OUT",
        )
    if any(folder.glob("adapter_model*.safetensors")) or any(folder.glob("*.index.json")):
        return UnsupportedError(
            f"{folder} holds a sharded adapter",
            f"PEFT cannot load it either: save the tensors of all its files in one {WEIGHTS}",
        )
    below = source.subfolders_with(CONFIG)  # PEFT saves adapters with other names than `default` in subfolders
    if below:
        return NotFoundError(
            f"{source.name} has no {WEIGHTS} of its own", f"Pass one of the adapters in it: {and_more(below, 5)}"
        )
    return ExpertError(f"{folder} has no {WEIGHTS}", "Pass the folder of a PEFT adapter")


def open_expert(reference: str | Path) -> Adapter | Checkpoint:
    """Open the adapter or full checkpoint in a local folder or with a Hub id `org/name[/subfolder][@revision]`.

    An adapter's folder may also hold the base's config.json, so adapter_config.json decides. A folder with
    adapter_config.json and full weights is refused.

    Raises:
        ExpertError: the folder holds neither, or both.
        NotFoundError, ExpertError, UnsupportedError: see `open_adapter` and `open_checkpoint`.
    """
    source = Source.of_expert(reference)
    folder = source.folder
    if not os.path.exists(folder / CONFIG) and os.path.exists(folder / MODEL_CONFIG):
        if source.revision is None:
            return Checkpoint.read(source, what="expert")
        return open_checkpoint(str(source), what="expert")  # fetches the weights of the same commit
    if os.path.exists(folder / MODEL_WEIGHTS) or os.path.exists(folder / MODEL_INDEX):
        check_alone(folder)
    return Adapter.read(source)  # reports what is missing
