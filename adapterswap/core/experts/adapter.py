"""Open an expert from its config and its safetensors header: an adapter, or a full checkpoint as one expert.

The file decides which modules an adapter holds. It is compared with the config, which PEFT never does. No tensor is
read and torch is not imported.

Experts of two bases differ in nearly every module. That is reported once: as a difference of the hidden size if
possible, else as the first module and the number of others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from adapterswap.core.companions.files import COMPANION_FILES, MODEL_CONFIG
from adapterswap.core.experts.config import AdapterConfig, Targets, is_plain, scale
from adapterswap.core.experts.keys import (
    KINDS,
    LORA_PARTS,
    TASK_HEADS,
    TOKENS,
    TRAINABLE_TOKENS,
    TRAINED_ROWS,
    TRAINED_TOKENS,
    FactorTensors,
    ModuleKeys,
    PartTensors,
    SortedKeys,
    misnamed,
    sort_keys,
)
from adapterswap.core.model.checkpoints import MODEL_INDEX, Checkpoint, check_alone, open_checkpoint
from adapterswap.core.model.layers import (
    KeptLayers,
    Kind,
    ModuleName,
    layer_container,
)
from adapterswap.core.model.sources import (
    CONFIG,
    MODEL_WEIGHTS,
    PROVENANCE,
    TRAINING_RECORD,
    WEIGHTS,
    Records,
    Reference,
    Source,
)
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    NotFoundError,
    Problems,
    UnsupportedError,
)
from adapterswap.kit.files.tensorfile import Tensor, TensorFile

if TYPE_CHECKING:
    from adapterswap.core.experts.trial import PeftTrial
    from adapterswap.core.model.base import Base

_MATRIX = re.compile(r"(\d+)×(\d+)")


def compare_shapes(
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    *,
    one: str,
    other: str,
    remedy: str,
    problems: Problems,
    parameter: str | None = None,
    kind: type[AdapterswapError] | None = None,
) -> None:
    """Add a problem if modules that both hold differ in shape.

    Args:
        ours, theirs: module → its shape as text, such as `64×32`.
        one, other: the names of their owners.
        remedy: the problem's remedy.
        problems: collects the problem.
        parameter, kind: see `Problems.add`.
    """
    common = [name for name in ours if name in theirs]
    differing = [name for name in common if ours[name] != theirs[name]]
    if not differing:
        return
    width, other_width = (_width(shapes[name] for name in common) for shapes in (ours, theirs))
    if len(differing) > 1 and width is not None and other_width is not None and width != other_width:
        problems.add(
            f"The hidden size is {width} in {one}, but {other_width} in {other}", remedy, parameter=parameter, kind=kind
        )
        return
    first = differing[0]
    more = f"; {len(differing) - 1} more modules differ" if len(differing) > 1 else ""
    message = f"{first} is {ours[first]} in {one}, but {theirs[first]} in {other}{more}"
    problems.add(message, remedy, parameter=parameter, kind=kind)


def and_more(names: Sequence[str], at_most: int = 1) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return f"{', '.join(names[:at_most])}{more}"


def _width(shapes: Iterable[str]) -> int | None:
    """The hidden size: the one number that all matrices share; None if there are several, or none."""
    matrices = [match for shape in shapes if (match := _MATRIX.fullmatch(shape))]
    shared = set.intersection(*({int(match[1]), int(match[2])} for match in matrices)) if matrices else set()
    return shared.pop() if len(shared) == 1 else None


PICKLED = "adapter_model.bin"  # what `convert` reads

_HIRA_RANK = 32  # PEFT's default

# A fused layer's two parameters in every model of transformers, in their order.
_FIRST_FUSED, _LAST_FUSED = "gate_up_proj", "down_proj"

_MISMATCH = "The file and its config do not belong together: save the adapter again"

# The files to fetch from the Hub. If there are no weights, pickles or an index explain why.
ADAPTER_FILES = [
    WEIGHTS,
    CONFIG,
    PROVENANCE,
    TRAINING_RECORD,
    "adapter_model*.bin",
    "*.index.json",
    "README.md",
    *COMPANION_FILES,
]


@dataclass(frozen=True)
class _Part:
    """What an adapter's file holds of one module of the base.

    Attributes:
        name: the module's full name in the base model.
        layer: the index of its transformer layer, or None.
    """

    name: str
    layer: int | None

    @cached_property
    def kind(self) -> Kind:
        """Attention, mlp or other, by the name."""
        return ModuleName(self.name).kind

    @property
    def misnamed(self) -> str | None:
        """What to do if the base has no module of this name; None if that is not known."""
        return misnamed(self.name)

    def at(self, name: str, layer: int | None) -> Self:
        """The same under another name, or in another layer."""
        return replace(self, name=name, layer=layer)


@dataclass(frozen=True)
class LoraModule(_Part):
    """An adapted weight W (out×in) and its factors: ΔW = s·B·A with A (rank×in) and B (out×rank).

    For an embedding, A is (rank×vocabulary) and B (width×rank): PEFT's `lora_embedding_A` and `lora_embedding_B`.

    Attributes:
        rank, alpha, rslora: as PEFT resolves them for this module.
        scale: s, which is α/√r (rsLoRA) or α/r.
        a, b: the places of the factors in the file.
        embedding: whether it is an embedding's LoRA.
        base: a copy of the base's own weight, which PEFT may save with the LoRA of an embedding or head; else None.
        parameter: whether it is a parameter (`target_parameters`), not a module; `name` is the parameter's.
        experts: the number of matrices in a fused parameter, each with factors of this rank. A is (experts·rank×in),
            with the rows of one expert together; B is (out×rank·experts), with the columns of one expert `experts`
            apart.
    """

    rank: int
    alpha: float
    rslora: bool
    scale: float
    a: Tensor
    b: Tensor
    embedding: bool
    base: Tensor | None = None
    parameter: bool = False
    experts: int = 1
    in_features: int = field(init=False, repr=False, compare=False)
    out_features: int = field(init=False, repr=False, compare=False)
    on_bias = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_features", self.a.shape[1])
        object.__setattr__(self, "out_features", self.b.shape[0])

    @property
    def lora(self) -> LoraModule:
        """The factors."""
        return self

    @property
    def height(self) -> int:
        """The rows of the weight as torch stores it: an embedding's tokens, else the outputs."""
        return self.in_features if self.embedding else self.out_features

    @property
    def keys(self) -> tuple[str, str]:
        """The keys under which PEFT stores A and B."""
        return ModuleKeys(self.name).factors(embedding=self.embedding)

    @property
    def dtype(self) -> str:
        """The dtype of A and B; float32 if they differ."""
        return self.a.dtype if self.a.dtype == self.b.dtype else "F32"

    @property
    def shape(self) -> str:
        """The shape that must agree between experts of one base, as text."""
        matrices = f"{self.experts}×" if self.experts > 1 else ""
        return f"{matrices}{self.out_features}×{self.in_features}{' (an embedding)' if self.embedding else ''}"


@dataclass(frozen=True)
class FullModule(_Part):
    """A module trained in full (PEFT's `modules_to_save`): its whole weights W, not ΔW; or only the trained rows of W.

    Attributes:
        tensors: the places of its parameters in the file, by their name within the module (`weight`, `bias`).
        rows: the rows of the weight that the only tensor holds, in order (`trainable_token_indices`); empty for all.
        tied: for TRAINABLE_TOKENS, modules tied to this one, under whose names PEFT stores the same rows again.
    """

    tensors: Mapping[str, Tensor]
    rows: tuple[int, ...] = ()
    tied: Mapping[str, Tensor] = field(default_factory=dict)
    lora = None

    @property
    def first(self) -> Tensor:
        """The first tensor, or the only one if it holds rows."""
        return next(iter(self.tensors.values()))

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of a row of the first tensor."""
        return self.first.shape[1:]

    @property
    def words(self) -> str:
        """How it was trained."""
        return "trained tokens" if self.rows else "trained in full"

    @property
    def shape(self) -> str:
        """The shapes that must agree between experts of one base, as text."""
        return ", ".join(f"{name} {'×'.join(map(str, tensor.shape))}" for name, tensor in sorted(self.tensors.items()))


@dataclass(frozen=True)
class OpaqueModule(_Part):
    """A module whose change is not just a product of two factors.

    It can be copied. It can be averaged if the base's weights are available, or if it `is_linear`.

    Attributes:
        method: the usual name of its kind: DoRA, OFT, …
        peft_type: PEFT's name of its kind.
        tensors: the places of its tensors in the file, by the end of their keys.
        settings: the settings that PEFT reads for it. They must be the same in an adapter that it is copied to.
        values: settings that may differ between modules; see `AdapterConfig.values_of`.
        shared: tensors that all modules of the adapter use, by name.
        lora: the factors, for a variant of LoRA.
    """

    method: str
    peft_type: str
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    lora: LoraModule | None = None

    def at(self, name: str, layer: int | None) -> Self:
        return replace(self, name=name, layer=layer, lora=self.lora and self.lora.at(name, layer))

    @property
    def is_linear(self) -> bool:
        """Whether it adds s·(B·A·x + bias) to the module's output (`lora_bias`): sums of these have the same form."""
        return self.lora is not None and "lora_B.bias" in self.tensors and not self.settings.get("use_dora")

    @property
    def beside(self) -> dict[str, Tensor]:
        """What a variant of LoRA stores beside A and B, such as DoRA's magnitudes."""
        return {name: tensor for name, tensor in self.tensors.items() if name in LORA_PARTS}

    @property
    def on_bias(self) -> bool:
        """Whether it also changes the module's bias."""
        if "ia3_l" in self.tensors:
            return self.tensors["ia3_l"].shape[0] != 1  # otherwise it scales the module's input
        return "lora_B.bias" in self.tensors or (self.peft_type in KINDS and KINDS[self.peft_type].on_biases)

    @property
    def shape(self) -> str:
        """The shapes that must agree between experts of one base and with the same settings, as text."""
        if self.lora is not None:
            return self.lora.shape
        tensors = ", ".join(f"{n} {'×'.join(map(str, t.shape))}" for n, t in sorted(self.tensors.items()))
        settings = {**self.settings, **self.values}
        return f"{tensors} ({self.method}, {', '.join(f'{key} {settings[key]}' for key in sorted(settings))})"


Part = LoraModule | OpaqueModule | FullModule


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
        ranks = sorted({module.rank for module in self.modules.values()})
        rank = [f"rank {ranks[0]}" + (f"-{ranks[-1]}" if len(ranks) > 1 else "")] if ranks else []
        whole = sum(not part.rows for part in self.saved.values())
        saved = [f"{whole} trained in full"] if whole else []
        saved += [f"tokens trained in {part.name}" for part in self.saved.values() if part.rows]
        modules = [f"{len(self.modules)} modules"] if self.modules or not (self.opaque or self.tokens) else []
        opaque = [f"{len(self.opaque)} modules of {self.config.title}"] if self.opaque else []
        facts = [repr(self.name), *modules, *opaque, *rank, *saved, f"base {self.config.base_model!r}"]
        return f"<Adapter {', '.join(facts)}>"

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
        return {**self.modules, **variants} if variants else self.modules

    @property
    def vocabulary(self) -> dict[str, Part]:
        """The embeddings and heads that it changes, by name."""
        outside = {name: part for name, part in self.parts.items() if part.layer is None or name in self.tokens}
        return {n: part for n, part in outside.items() if ModuleName(n).is_vocabulary(part.layer) or n in self.tokens}

    @cached_property
    def tokens(self) -> Mapping[str, FullModule]:
        """The embeddings and heads with single trained rows (`trainable_token_indices`), by name."""
        return {name: part for name, part in self.saved.items() if part.rows}

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
        parts = [part.at(names[old], ModuleName(names[old]).layer(container)) for old, part in self.parts.items()]
        layered = any(part.layer is not None for part in parts)
        original = {names[name]: self.original.get(name, name) for name in self.parts}
        return replace(self.with_parts(parts, container if layered else None), renamed=True, original=original)

    def under_names_of(self, base: Base, expert: str, base_name: str) -> Adapter:
        """The adapter with the names that its base has for the modules; see `Base.find`.

        Args:
            base: the base.
            expert, base_name: the names of both in messages.
        """
        names: dict[str, str] = {}
        for module in self.parts.values():
            shape = (module.lora.out_features, module.lora.in_features) if module.lora else None
            canonical = base.find(module.name, self.container, shape)
            if canonical is None:
                raise ExpertError(
                    f"{expert} adapts {module.name}, but {base_name} has no module of this shape under this or an "
                    "older name",
                    module.misnamed
                    or "Pass the base that the experts adapt as `base_model`, or save the expert again with this "
                    "version of transformers",
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
        problems = Problems(ExpertError)
        config = file = None
        with problems.collect():
            config = AdapterConfig.read(folder / CONFIG)
        with problems.collect():
            file = TensorFile.read(folder / WEIGHTS)
        problems.raise_if_any()
        assert config is not None
        assert file is not None
        keys = sort_keys(
            file,
            config.modules_to_save,
            folder,
            problems,
            biases=config.bias != "none",
            kind=TRAINED_TOKENS if config.peft_type == TRAINABLE_TOKENS else KINDS.get(config.peft_type),
            tokens=bool(config.trained_tokens),
        )
        held = _Held.of(keys, config, file, folder, problems)
        config, container = held.config, None
        with problems.collect():
            container = layer_container([*held.parts, *held.saved])
        read = held.read(keys.shared, container, folder, problems)
        if config.trained_tokens and not any(TOKENS in tensors for tensors in held.saved.values()):
            problems.add(f"{folder}: {CONFIG} has trainable_token_indices, but {WEIGHTS} has no such rows", _MISMATCH)
        kept = None
        with problems.collect():
            kept = Records(folder).kept_layers((part.name, part.layer) for part in read)
        if all(isinstance(part, FullModule) for part in read) and not held.tied and not problems:
            problems.add(
                f"{folder / WEIGHTS} holds no {config.title} tensors", f"Pass a {config.title} adapter saved by PEFT"
            )
        problems.raise_if_any()
        return Adapter(
            source,
            config,
            file,
            _in_order(read),
            container,
            kept,
            held.ignored,
            keys.renamed,
            base_fingerprints=Records(folder).base(),
        )


def _in_order(parts: Iterable[Part]) -> dict[str, Part]:
    """Parts by name: those without a layer first, then by layer and name; modules in full last."""
    ordered = sorted(parts, key=lambda p: (isinstance(p, FullModule), -1 if p.layer is None else p.layer, p.name))
    return {part.name: part for part in ordered}


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
        UnsupportedError: it is sharded or pickled, or is a kind of adapter that cannot be composed exactly.
        AdapterswapError: several of these, reported together.
    """
    return Adapter.read(Source.find(reference, ADAPTER_FILES, what="adapter", parameter="reference"))


@dataclass(frozen=True)
class _Held:
    """What an adapter holds: the tensors in its file that PEFT loads.

    Attributes:
        config: the adapter's, with the targets that a trial in PEFT found, if there was one.
        parts, saved: as in `SortedKeys`.
        parameters: those of `parts` that are parameters, not modules.
        ignored: modules in the file that the config does not target.
        tied: for TRAINABLE_TOKENS, see `_tied_rows`.
    """

    config: AdapterConfig
    parts: Mapping[str, PartTensors]
    saved: Mapping[str, Mapping[str, Tensor]]
    parameters: Collection[str] = ()
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(keys: SortedKeys, config: AdapterConfig, file: TensorFile, folder: Path, problems: Problems) -> _Held:
        """By the config or, if only the base can tell, by a trial in PEFT."""
        parts, parameters = keys.parts, set[str]()
        # With problems, the rest would be guesses.
        trial = None if problems else _try_in_base(config, parts, keys.saved, file, folder)
        with problems.collect():
            if trial is not None:
                config = replace(config, targets=Targets(modules=trial.adapted))
            if config.target_parameters:
                parts, parameters = _with_parameters(parts, config, trial, folder)
        ignored = _ignored([name for name in parts if name not in parameters], keys.saved, config, folder, problems)
        if config.peft_type == TRAINABLE_TOKENS:
            return _Held._of_tokens(keys, config, ignored, folder, problems)
        parts = {name: tensors for name, tensors in parts.items() if name not in ignored}
        if config.peft_type == "IA3" and config.targets.feedforward is not None:
            _check_feedforward(_of_kind(parts), config, folder, problems)
        return _Held(config, parts, keys.saved, parameters, ignored)

    @staticmethod
    def _of_tokens(
        keys: SortedKeys, config: AdapterConfig, ignored: tuple[str, ...], folder: Path, problems: Problems
    ) -> _Held:
        """Of TRAINABLE_TOKENS, whose parts are rows of modules that are otherwise the base's."""
        rows = {name: tensors[TRAINED_ROWS] for name, tensors in _of_kind(keys.parts).items()}
        tied: dict[str, dict[str, Tensor]] = {}
        with problems.collect():
            tied = _tied_rows(rows, ignored, config, folder)
        ignored = tuple(name for name in ignored if not any(name in names for names in tied.values()))
        saved = keys.saved | {name: {**keys.saved.get(name, {}), TOKENS: rows[name]} for name in tied}
        return _Held(config, {}, saved, ignored=ignored, tied=tied)

    def read(self, shared: Mapping[str, Tensor], container: str | None, folder: Path, problems: Problems) -> list[Part]:
        """The parts; `shared` as in `SortedKeys`, and `container` as in `Adapter`."""
        config, read = self.config, list[Part]()
        ranks, alphas = config.resolved(self.parts)
        for name, tensors in self.parts.items():
            try:
                if isinstance(tensors, FactorTensors):
                    given = ranks[name], alphas[name]
                    parameter = name in self.parameters
                    read.append(_lora(name, tensors, config, given, container, folder, parameter=parameter))
                else:
                    read.append(_opaque(name, tensors, shared, config, container, folder))
            except AdapterswapError as error:
                problems.keep(error)
        for name, own_tensors in self.saved.items():
            with problems.collect():
                if name in self.parts:
                    raise ExpertError(
                        f"{folder}: {name} has both LoRA factors and full weights", "Save the adapter again"
                    )
                layer = ModuleName(name).layer(container)
                rows = _trained_rows(name, layer, own_tensors, config, folder) if TOKENS in own_tensors else ()
                read.append(FullModule(name, layer, own_tensors, rows, self.tied.get(name, {})))
        return read


def _tied_rows(
    own_rows: Mapping[str, Tensor], ignored: Collection[str], config: AdapterConfig, folder: Path
) -> dict[str, dict[str, Tensor]]:
    """For TRAINABLE_TOKENS: each targeted module → the modules tied to it.

    If the base ties its head to its embedding, PEFT stores the rows under both names, but targets only the embedding.
    """
    tied: dict[str, dict[str, Tensor]] = {name: {} for name in own_rows if name not in ignored}
    if config.targets.modules is None and (len(tied) > 1 or any(ModuleName(name).is_head for name in tied)):
        raise ExpertError(
            f"{folder / CONFIG}: target_modules is null, and {WEIGHTS} has rows of {and_more(sorted(tied))}",
            "Name the embedding that was trained in target_modules",
        )
    embeddings = [name for name in tied if not ModuleName(name).is_head]
    for name in ignored if len(embeddings) == 1 else ():
        if own_rows[name].shape == own_rows[embeddings[0]].shape:
            tied[embeddings[0]][name] = own_rows[name]
    return tied


def _trained_rows(
    name: str, layer: int | None, tensors: Mapping[str, Tensor], config: AdapterConfig, folder: Path
) -> tuple[int, ...]:
    """The rows of the weight of an embedding or head that its trained tokens hold."""
    rows, shape = config.tokens_of(name), tensors[TOKENS].shape
    if layer is not None:
        raise UnsupportedError(
            f"{folder}: {name} has trained tokens, but it is a module of layer {layer}, whose rows are not tokens",
            "Train rows of the embedding or the head, and LoRA on the layers",
        )
    if len(tensors) > 1:
        raise ExpertError(f"{folder}: {name} has both trained tokens and full weights", "Save the adapter again")
    if len(shape) != 2 or shape[0] != len(rows):
        raise ExpertError(
            f"{folder}: {name} has trained tokens of shape {list(shape)}, but {CONFIG} names {len(rows)} tokens",
            _MISMATCH,
        )
    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        setting = "token_indices" if config.peft_type == TRAINABLE_TOKENS else "trainable_token_indices"
        raise UnsupportedError(
            f"{folder}: {setting} names the token {twice} twice, so it has two rows for {name}",
            "Remove one of them from the config and from the file",
        )
    return rows


def _try_in_base(
    config: AdapterConfig, names: Collection[str], saved: Collection[str], file: TensorFile, folder: Path
) -> PeftTrial | None:
    """How PEFT loads the adapter, if only the base can tell which modules PEFT loads, or whether it can; else None."""
    base = config.base_reference
    reason = _reason_for_base(config, names, saved, folder)
    if reason is None:
        heads = TASK_HEADS.get(config.task_type or "", ())
        parameters: Collection[str] = ()
        with suppress(UnsupportedError):  # raised again if the base is not at hand
            parameters = _parameters(names, config, folder).values() if config.target_parameters else ()
        is_usual = all(
            end in saved or end in heads or ("." not in end and ModuleName(end).is_vocabulary(None))
            for end in config.modules_to_save
        ) and all(any(f".{name}".endswith(f".{end}") for name in parameters) for end in config.target_parameters)
        if is_usual or config.holds_regexes or base is None or Reference(base).cached_folder is None:
            return None
    elif odd := [name for name in names if name.endswith("unembed_tokens")]:  # of which no base has such a module
        raise ExpertError(f"{folder}: {odd[0]} is not a name that PEFT gives", misnamed(odd[0]) or "")
    elif base is None or config.holds_regexes:
        raise UnsupportedError(
            f"{folder / CONFIG}: {reason}, and what PEFT makes of it depends on the base, but the config "
            f"{'names none' if base is None else 'also holds regexes, which are not run in PEFT'}",
            "Name all modules in target_modules, and only those in modules_to_save that have tensors",
        )
    # PEFT and torch take seconds to import. PEFT itself writes configs without this need.
    from adapterswap.core.experts.trial import load_into_base

    try:
        return load_into_base(folder, base, config.task_type, file, names)
    except (ArgumentError, BaseModelError, NotFoundError, UnsupportedError) as error:
        if reason is None:
            return None
        raise error.within(f"{folder / CONFIG}: {reason}, and what PEFT makes of it depends on the base") from None


def _reason_for_base(config: AdapterConfig, names: Collection[str], saved: Collection[str], folder: Path) -> str | None:
    """What in a config can only be read beside the base; None if nothing is."""
    targets = config.targets
    modules = targets.modules
    only_experts = config.target_parameters and all(re.search(r"\.experts(\.base_layer)*$", name) for name in names)
    if targets.depend_on_base and config.peft_type != TRAINABLE_TOKENS and not (only_experts and modules is None):
        return (
            f"target_modules is {modules}" if isinstance(modules, str | None) else "target_modules has 20 names or more"
        )
    if config.target_parameters:
        weights = {f".{name}.weight" for name in _loaded(config, names, folder)}
        if twice := [end for end in config.target_parameters if any(name.endswith(f".{end}") for name in weights)]:
            return f"target_parameters names {twice[0]}, of a module in target_modules"
    if config.peft_type == "IA3" and targets.feedforward is None:
        return "feedforward_modules is null"
    shares = config.peft_type in KINDS and KINDS[config.peft_type].shared
    if shares and len(_loaded(config, names, folder)) < len(names):
        return "it targets only some of the modules in the file, which share tensors as large as the largest"
    heads = TASK_HEADS.get(config.task_type or "", ())
    ends = [end for end in config.modules_to_save if is_plain(end) and end not in heads]
    empty = [end for end in ends if not any(name.endswith(end) for name in saved)]
    return f"modules_to_save names {empty[0]}, which has no tensors" if empty else None


def _loaded(config: AdapterConfig, names: Collection[str], folder: Path) -> set[str]:
    """The modules of `names` that the config targets; an `ExpertError` if its regexes are invalid or too slow."""
    try:
        return config.targets.loaded(names)
    except ValueError as error:
        raise ExpertError(f"{folder / CONFIG}: {error}", "Use plain module names in target_modules") from None


def _check_feedforward(
    parts: Mapping[str, Mapping[str, Tensor]], config: AdapterConfig, folder: Path, problems: Problems
) -> None:
    """Check that (IA)³ scales the inputs of the modules in `feedforward_modules`, and the outputs of the others."""
    try:
        feedforward = config.targets.are_feedforward(parts)
    except ValueError as error:
        problems.add(f"{folder / CONFIG}: {error}", "Use plain module names in feedforward_modules")
        return
    for name, tensors in parts.items():
        shape = tensors["ia3_l"].shape
        if (shape[0] == 1) != (name in feedforward) and shape != (1, 1):
            side, says = ("output", "is") if name in feedforward else ("input", "is not")
            problems.add(f"{folder}: {name} scales its {side}, but {CONFIG} says that it {says} feedforward", _MISMATCH)


def _ignored(
    pairs: Collection[str],
    saved: Collection[str],
    config: AdapterConfig,
    folder: Path,
    problems: Problems,
) -> tuple[str, ...]:
    """The modules with LoRA factors that the config does not target."""
    selections: list[set[str]] = []
    with problems.collect():
        parents = {name[: dot.start()] for name in pairs for dot in re.finditer(r"\.", name)} - {*pairs}
        is_decided = config.targets.modules is not None  # otherwise everything in the file counts
        selections = [_loaded(config, pairs, folder), _loaded(config, parents if is_decided else (), folder)]
    if not selections:
        return ()
    loaded, too_much = selections
    if too_much:
        problems.add(
            f"{folder / CONFIG} targets {min(too_much)}, which has modules in it, so PEFT cannot load it",
            "Correct target_modules, or save the adapter again",
        )
    if config.tied:  # PEFT also applies an embedding's LoRA to the head, which the config may not name
        loaded |= {name for name in pairs if not any(segment.isdecimal() for segment in name.split("."))}
    ignored = tuple(name for name in pairs if name not in loaded and name not in saved)
    if ignored and not loaded and not config.target_parameters:
        problems.add(
            f"{folder / CONFIG} targets no module in {WEIGHTS} (such as {ignored[0]}), so PEFT would load none",
            "Correct target_modules, layers_to_transform or exclude_modules, or save the adapter again",
        )
    return ignored


def _with_parameters(
    pairs: Mapping[str, PartTensors], config: AdapterConfig, trial: PeftTrial | None, folder: Path
) -> tuple[dict[str, PartTensors], set[str]]:
    """The factors, with those of parameters under the parameters' own names, and these names."""
    if trial is None:
        own_names = _parameters(pairs, config, folder)
    else:
        own_names = {name: f"{_bare(name)}.{last}" for name, last in trial.parameters.items() if name in pairs}
    return {own_names.get(name, name): factors for name, factors in pairs.items()}, set(own_names.values())


def _parameters(names: Collection[str], config: AdapterConfig, folder: Path) -> dict[str, str]:
    """The names of modules with LoRA on a parameter → the parameter's own name.

    PEFT wraps the module once for each of its parameters, in the order of the parameters; the keys of inner layers
    contain `base_layer`.
    """
    # If the default for null were not empty, PEFT would have written its names.
    adapted = set() if config.targets.modules is None else _loaded(config, names, folder)
    ends = [target.rpartition(".") for target in config.target_parameters]
    chains: dict[str, list[str]] = {}
    for name in sorted(names, key=len, reverse=True):
        module = _bare(name)
        if module != name or name not in adapted:
            chains.setdefault(module, []).append(name)  # the innermost first
    parameters: dict[str, str] = {}
    for module, chain in chains.items():
        inside = [last for start, _, last in ends if start and f".{module}".endswith(f".{start}")]
        anywhere = [last for start, _, last in ends if not start]
        found = inside if len(inside) == len(chain) else [*inside, *anywhere]
        found = sorted(set(found), key=lambda name: name != _FIRST_FUSED)
        if len(found) != len(chain) or (len(found) > 1 and set(found) != {_FIRST_FUSED, _LAST_FUSED}):
            raise UnsupportedError(
                f"{folder}: {module} has LoRA on {len(chain)} of its parameters, but target_parameters does not say "
                f"which ({', '.join(config.target_parameters)})",
                "Name the parameters with their module in the config, such as mlp.experts.down_proj",
            )
        parameters |= {name: f"{module}.{parameter}" for name, parameter in zip(chain, found, strict=True)}
    return parameters


def _bare(name: str) -> str:
    """The module that PEFT wrapped, for the name of a layer that it nested in another."""
    return re.sub(r"(\.base_layer)+$", "", name)


def _missing(source: Source) -> ExpertError | NotFoundError | UnsupportedError:
    folder = source.folder
    if any(folder.glob("adapter_model*.bin")):
        return UnsupportedError(
            f"{folder} holds a pickled adapter (.bin), which can run code when loaded",
            "Rewrite it with `convert` and `allow_pickle`, which reads its tensors without running code",
        )
    if any(folder.glob("adapter_model*.safetensors")) or any(folder.glob("*.index.json")):
        return UnsupportedError(
            f"{folder} holds a sharded adapter",
            f"PEFT cannot load it either: save the tensors of all its files in one {WEIGHTS}",
        )
    if below := source.subfolders_with(CONFIG):  # PEFT saves adapters with other names than `default` in subfolders
        return NotFoundError(
            f"{source.name} has no {WEIGHTS} of its own", f"Pass one of the adapters in it: {and_more(below, 5)}"
        )
    return ExpertError(f"{folder} has no {WEIGHTS}", "Pass the folder of a PEFT adapter")


def _of_kind(parts: Mapping[str, PartTensors]) -> dict[str, Mapping[str, Tensor]]:
    """The parts of another kind than LoRA."""
    return {name: tensors for name, tensors in parts.items() if not isinstance(tensors, FactorTensors)}


def _check_not_empty(name: str, tensors: Mapping[str, Tensor], folder: Path) -> None:
    for part, tensor in tensors.items():
        if 0 in tensor.shape:
            raise ExpertError(
                f"{folder}: {name}: {part} is empty ({list(tensor.shape)}), as DeepSpeed ZeRO-3 leaves it",
                "Gather the weights before saving (stage3_gather_16bit_weights_on_model_save), and save again",
            )


def _lora(
    name: str,
    factors: FactorTensors,
    config: AdapterConfig,
    given: tuple[int, float],
    container: str | None,
    folder: Path,
    *,
    parameter: bool = False,
) -> LoraModule | OpaqueModule:
    """A module of LoRA, or of a variant; `given` are its rank and alpha in the config."""
    (a, b), (rank, alpha) = (factors.a, factors.b), given
    if 0 in a.shape or 0 in b.shape:
        _check_not_empty(name, {"lora_A": a, "lora_B": b}, folder)
    for factor, tensor in (("A", a), ("B", b)):
        if len(tensor.shape) != 2:
            raise UnsupportedError(
                f"{folder}: {name}: lora_{factor} has the shape {list(tensor.shape)}, but must be a matrix",
                "Only linear and embedding modules can be composed, not convolutions",
            )
    if a.shape[0] != b.shape[1]:
        raise ExpertError(f"{folder}: {name}: lora_A has rank {a.shape[0]}, but lora_B has {b.shape[1]}", _MISMATCH)
    experts = a.shape[0] // rank if parameter and a.shape[0] % rank == 0 else 1
    if experts > 1 and not config.is_at_least((0, 19)):
        raise UnsupportedError(
            f"{folder}: {name} is a fused parameter with LoRA in the layout of PEFT before 0.19, which exchanges "
            "inputs and outputs for most models. Later versions of PEFT misread it or refuse it",
            "Convert it with `adapterswap convert`, which compares it with its base",
        )
    if a.shape[0] != rank * experts:
        raise ExpertError(f"{folder}: {name} has rank {a.shape[0]}, but {CONFIG} says {rank}", _MISMATCH)
    module = LoraModule(
        name,
        ModuleName(name).layer(container),
        rank,
        alpha,
        config.rslora,
        scale(rank, alpha, config.rslora),
        a,
        b,
        factors.embedding,
        factors.base,
        parameter,
        experts,
    )
    return _variant(module, factors, config, folder) if config.dora or config.lora_bias or factors.extras else module


def _variant(module: LoraModule, factors: FactorTensors, config: AdapterConfig, folder: Path) -> OpaqueModule:
    """A module of DoRA, or of LoRA with biases."""
    expected = {part for part, setting in zip(LORA_PARTS, (config.dora, config.lora_bias), strict=True) if setting}
    if odd := sorted(expected ^ factors.extras.keys()):
        holds, says = ("has", "it should not") if odd[0] in factors.extras else ("has no", "it should")
        raise ExpertError(f"{folder}: {module.name} {holds} {odd[0]}, but {CONFIG} says that {says}", _MISMATCH)
    for part, tensor in factors.extras.items():
        if prod(tensor.shape) != module.out_features:
            raise ExpertError(
                f"{folder}: {module.name}: {part} has the shape {list(tensor.shape)}, but B has {module.out_features} "
                "rows",
                _MISMATCH,
            )
    stem = ModuleKeys(module.name).part("")
    tensors = {key.removeprefix(stem): tensor for key, tensor in zip(module.keys, (module.a, module.b), strict=True)}
    settings = {"use_dora": config.dora, "lora_bias": config.lora_bias}
    return OpaqueModule(
        module.name, module.layer, config.title, config.peft_type, {**tensors, **factors.extras}, settings, lora=module
    )


def _opaque(
    name: str,
    tensors: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    config: AdapterConfig,
    container: str | None,
    folder: Path,
) -> OpaqueModule:
    """A module of another kind than LoRA."""
    _check_not_empty(name, tensors, folder)
    rank = config.settings.get("r", _HIRA_RANK)
    if config.peft_type == "HIRA" and "hira_A" in tensors and tensors["hira_A"].shape[0] != rank:
        raise UnsupportedError(
            f"{folder}: {name}: hira_A has the rank {tensors['hira_A'].shape[0]}, but {CONFIG} says r: {rank}, which "
            "PEFT 0.21 gives every module",
            "Train it without `rank_pattern`",
        )
    return OpaqueModule(
        name,
        ModuleName(name).layer(container),
        config.title,
        config.peft_type,
        tensors,
        config.settings,
        config.values_of(name),
        shared,
    )


def open_expert(reference: str | Path) -> Adapter | Checkpoint:
    """Open the adapter or full checkpoint in a local folder or with a Hub id `org/name[/subfolder][@revision]`.

    An adapter's folder may also hold the base's config.json, so adapter_config.json decides. A folder with
    adapter_config.json and full weights is refused.

    Raises:
        ExpertError: the folder holds neither, or both.
        NotFoundError, ExpertError, UnsupportedError: see `open_adapter` and `open_checkpoint`.
    """
    source = Source.find(reference, [*ADAPTER_FILES, MODEL_CONFIG], what="expert", parameter="reference")
    folder = source.folder
    if not os.path.exists(folder / CONFIG) and os.path.exists(folder / MODEL_CONFIG):
        if source.revision is None:
            return Checkpoint.read(source, what="expert")
        return open_checkpoint(str(source), what="expert")  # fetches the weights of the same commit
    if os.path.exists(folder / MODEL_WEIGHTS) or os.path.exists(folder / MODEL_INDEX):
        check_alone(folder)
    return Adapter.read(source)  # reports what is missing
