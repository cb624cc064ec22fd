"""adapterswap.json: how a folder was made. Records are written, read and checked here.

A record holds no time and no local path, so the same inputs give the same bytes. A record that is read is untrusted: it
is validated first, and paths in it are never followed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from adapterswap import __version__
from adapterswap.core.companions.files import MODEL_CONFIG
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import MAX_LAYERS, KeptLayers, Stack, format_layers
from adapterswap.core.model.sources import CONFIG, FORMAT, WEIGHTS, Records, Reference, Source, base_fingerprints
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE
from adapterswap.kit.errors import FieldError
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.readers import field

_DEPTH = 8  # generations of origins to keep; JSON that nests deeper is refused when it is read


_Depth = Annotated[int, field(ge=1, le=MAX_LAYERS)]


class _Written(Declared, strict=True, finite=True, checked=False, unknown="ignore"):
    """What we write ourselves is not checked; what is read is."""

    def content(self) -> dict[str, Any]:
        """The record as plain data, ready to be written."""
        return self.model_dump(mode="json", exclude_unset=True)


class _Partial(_Written, strict=False, unknown="keep"):
    """Only the fields that are shown or read again are checked; others are kept."""


class SourceRecord(_Written):
    """The identity of an expert or a base: a Hub id with its commit, or a folder's name, and hashes of its files."""

    source: str
    revision: str | None = None
    sha256: dict[str, str] = field(default={}, description="Hashes of its small files, and of an adapter's weights.")
    fingerprints: dict[str, str] = field(default={}, description="A local base's weights; see `fingerprint`.")
    base_model: str | None = field(default=None, description="The base that an adapter's own config names.")
    base_revision: str | None = None
    base_fingerprints: dict[str, str] = field(
        default={}, description="The weights of an expert's local base, by the expert's own record."
    )
    entered: dict[str, dict[str, int | str]] = field(
        default={}, description="A full checkpoint's bytes that were copied or computed with; see `writing.blocks`."
    )
    mode: Literal["chain"] | None = field(
        default=None, description="Of a start: chain, if the adapter that was trained lies on top of it."
    )
    origin: Origin | None = field(default=None, description="How it was made, from the adapterswap.json in its folder.")

    def __str__(self) -> str:
        if not self.revision:
            return self.source
        return f"{self.source}@{self.revision}"

    @property
    def reference(self) -> str | None:
        """The Hub id with its commit; None for anything else, since paths in a record are never followed."""
        if self.revision and Reference(str(self)).hub_id:
            return str(self)
        return None

    @staticmethod
    def of_adapter(adapter: Adapter, sha256: str) -> SourceRecord:
        """The identity of an adapter; `sha256` is the hash of its weights."""
        base = adapter.trained_on or adapter.config.base_model
        if base:
            base = Reference(base).public_name
        return _source(
            adapter,
            sha256={WEIGHTS: sha256, CONFIG: adapter.config.sha256},
            base_model=base,
            base_revision=adapter.config.revision,
        )

    @staticmethod
    def of_base(source: Source, config_sha256: str | None = None) -> SourceRecord:
        """The identity of a base whose weights were not needed: its config and, for a local folder, fingerprints.

        `config_sha256` is the hash of the config, if that was read.
        """
        config = source.folder / MODEL_CONFIG
        if config_sha256 is None and os.path.exists(config):
            config_sha256 = sha256_of(config)
        sha256: dict[str, str] = {}
        if config_sha256 is not None:
            sha256[MODEL_CONFIG] = config_sha256

        if source.revision is not None:
            return SourceRecord(source=source.name, revision=source.revision, sha256=sha256)
        return SourceRecord(
            source=source.name, revision=None, sha256=sha256, fingerprints=base_fingerprints(source.folder)
        )

    @staticmethod
    def of_shards(checkpoint: Checkpoint, sha256: Mapping[str, str]) -> SourceRecord:
        """The identity of a full checkpoint that an adapter is extracted from; `sha256` has its shards' hashes."""
        return _source(checkpoint, sha256=dict(sha256))

    @staticmethod
    def of_checkpoint(checkpoint: Checkpoint, entered: Mapping[str, Mapping[str, int | str]]) -> SourceRecord:
        """The identity of a full checkpoint, as an expert or a base, and how many of its bytes entered."""
        config = checkpoint.source.folder / MODEL_CONFIG
        return _source(
            checkpoint,
            sha256={MODEL_CONFIG: sha256_of(config)},
            entered={use: dict(numbers) for use, numbers in entered.items()},
        )

    def with_fingerprints(self, base: Source) -> SourceRecord:
        """The record of a base with the fingerprints of its weights, by which later steps know a local base."""
        if not base.identity:
            return self
        return self.model_copy(update={"fingerprints": base.identity})


class Origin(_Partial):
    """How an expert was made: the relevant keys of its own record. Only the fields that are shown are validated."""

    KEYS: ClassVar = (
        "kind", "num_layers", "base_model", "base_revision", "composition", "experts", "rules", "output", "companions",
        "slice",
    )  # of a composition: what it takes to show it, and to compose it again  # fmt: skip

    experts: dict[str, SourceRecord] = field(default={})
    slice: SliceRecord | None = None
    extraction: ExtractionOrigin | None = None
    start: SourceRecord | None = field(default=None, description="Where its training started, by training.json.")

    def __str__(self) -> str:
        if self.extraction is not None:
            return f"was extracted from {self.extraction.full}"
        if self.start is not None:
            preposition = "on top of" if self.start.mode else "from"
            text = f"was trained {preposition} {self.start}"
            if self.start.origin:
                text += f", which {self.start.origin}"
            return text

        sources = ", ".join(f"{name} ({source})" for name, source in self.experts.items())
        if self.slice is not None:
            return f"keeps the {self.slice} of {sources}"
        return f"was composed from {sources}"


class SliceRecord(_Written):
    """The layers of a slice, such as `0-4,30-31`, or of each of its stacks; with `stack`, only those of that stack.

    The others were cut away, by this command or from an expert.
    """

    layers: str | dict[Stack, str]
    stack: Stack | None = None

    @classmethod
    def of(cls, kept: KeptLayers | None) -> dict[str, SliceRecord]:
        """The field of a record, if the result is a slice."""
        if kept is None:
            return {}
        texts = {stack: format_layers(layers) for stack, layers in kept.by_stack.items()}
        if len(texts) > 1:
            return {"slice": cls(layers={stack: text for stack, text in texts.items() if stack is not None})}

        [(stack, text)] = texts.items()
        if stack is None:
            return {"slice": cls(layers=text)}
        return {"slice": cls(layers=text, stack=stack)}

    def __str__(self) -> str:
        try:
            return str(KeptLayers.of(self.layers, self.stack))
        except ValueError:  # a record that was edited; `verify` reports it
            return f"layers {self.layers!r}"


class ExtractionOrigin(_Partial):
    """The full checkpoint that an adapter was extracted from."""

    full: SourceRecord


class ConversionRecord(_Written):
    """A conversion from another kind of adapter, from modules trained in full, or from a pickled file.

    The last digits of a singular value decomposition differ between machines, so the result is identified by its hash.
    """

    peft_type: str
    pickled: bool = False
    rank: int | None = None
    max_error: float | None = None
    saved_rank: int | None = field(default=None, description="The rank of modules that had been trained in full.")
    relative_error: float | None = field(default=None, ge=0, description="Over all converted modules together.")
    modules: dict[str, dict[str, int | float]] = field(default={}, description="Rank, relative error and norm of ΔW.")
    sha256: dict[str, str] = field(description="Hashes of the adapter's own files.")


class RuleRecord(_Partial):
    """A rule as it was applied, with the fields of `Rule`. Only the fields that are read again are validated."""

    layers: Any = None
    stack: Any = None
    modules: Any = None
    expert: str | None = None
    blend: Any = None
    averages: dict[str, list[str]] = field(default={})


class CompositionRecord(_Written):
    """How an adapter was composed, or a model merged. Unknown keys are ignored."""

    format: Literal[1] = FORMAT
    kind: Literal["adapter", "model"] = "adapter"
    adapterswap_version: str = ""
    base_model: str | None = None
    base_revision: str | None = None
    base: SourceRecord | None = field(
        default=None, description="The base's identity, if it was declared as a folder or its weights were needed."
    )
    num_layers: _Depth | dict[Stack, _Depth]
    composition: dict[str, Any] = field(default={}, description="The request, with defaults filled in.")
    experts: dict[str, SourceRecord]
    rules: list[RuleRecord] = field(default=[])
    output: dict[str, Any] = field(default={}, description="How it was written: layout, rank, dtype, size of shards.")
    modules: dict[str, str | dict[str, float]] = field(
        alias="tensors",  # of a merged model
        description="The owner, or each expert's coefficient.",
    )
    rows: dict[str, dict[str, str | dict[str, float]]] = field(
        default={}, description="For embeddings and heads with new tokens: the same by ranges of rows, such as `96-97`."
    )
    companions: dict[str, str] = field(
        default={}, description="Whose config, tokenizer and the like it has: an expert's name or `base`."
    )
    slice: SliceRecord | None = None
    conversion: ConversionRecord | None = None
    magnitudes: dict[str, float] = field(default={}, description="The mean |ΔW| by which weights were divided.")
    kept_rows: dict[str, float] = field(default={}, description="The share of rows above the row threshold.")
    reduced: dict[str, dict[str, int | float]] = field(
        default={}, description="Rank and relative error of truncated modules."
    )

    def check(self) -> None:
        owners: set[str] = set()
        for owner in self.modules.values():
            owners.update([owner] if isinstance(owner, str) else owner)
        if not owners <= {*self.experts, BASE}:
            raise ValueError("a module names an expert that is not among the experts")

    def content(self) -> dict[str, Any]:
        content = super().content()
        modules = content.pop("modules")
        key = "tensors" if self.kind == "model" else "modules"
        return {**content, key: modules}

    @property
    def origins(self) -> list[str]:
        """A line for each expert that adapterswap made, saying how."""
        return [f"{name} {expert.origin}" for name, expert in self.experts.items() if expert.origin is not None]

    def owner_of(self, module: str) -> str | dict[str, float] | None:
        """The expert or the average that owns a module, or else its coefficients; None if the record lacks it."""
        recorded = self.modules.get(module)
        if not isinstance(recorded, dict):
            return recorded

        # Coefficients that are those of a whole average belong to that. The base's share of it is not recorded.
        for rule in self.rules:
            members = rule.averages.get(rule.expert or "")
            if not members:
                continue
            shares = {name: 1 / len(members) for name in members if name != BASE}
            if recorded == shares:
                return rule.expert
        return recorded

    def converted(self, sha256_of_source: Mapping[str, str], **conversion: Any) -> CompositionRecord:
        """The record of an adapter that was converted first.

        Args:
            sha256_of_source: the hashes of the files that it was converted from.
            conversion: fields of `ConversionRecord`.
        """
        experts = {}
        for name, source in self.experts.items():
            experts[name] = source.model_copy(update={"sha256": dict(sha256_of_source)})
        return self.model_copy(update={"experts": experts, "conversion": ConversionRecord(**conversion)})

    @staticmethod
    def read(folder: Path) -> CompositionRecord | None:
        """The record of the composition in a folder; None if it holds something else, or no readable record."""
        record = read_record(folder)
        if not isinstance(record, CompositionRecord):
            return None
        return record

    @staticmethod
    def of(
        plan: Plan,
        experts: Mapping[str, SourceRecord],
        base: SourceRecord | None,
        *,
        output: Mapping[str, Any],
        measured: Mapping[str, Any],
        companions: bool = True,
    ) -> CompositionRecord:
        """The record of a plan that was carried out.

        Args:
            plan: the plan.
            experts: the experts' identities, by name.
            base: the base's identity, if it was declared or needed.
            output: how the result was written; values that are None are left out.
            measured: values that depend on tensors, if there are any: `magnitudes`, `kept_rows` and `reduced`.
            companions: whether the tokenizer and the like are written; else they are not even read.
        """
        fields: dict[str, Any] = {
            "format": FORMAT,
            "kind": "adapter",
            "adapterswap_version": __version__,
            "num_layers": plan.num_layers,
        }
        if not plan.is_model:
            fields |= {"base_model": plan.base.public_name, "base_revision": plan.base.revision}
        elif plan.base.weights is None:
            fields |= {"kind": "model", "base_model": None, "base_revision": None}
        else:
            source = plan.base.weights.source
            fields |= {"kind": "model", "base_model": source.name, "base_revision": source.revision}
        fields |= SliceRecord.of(plan.kept_layers)
        fields["base"] = base
        fields["companions"] = plan.companions.record if companions else {}

        # Embeddings and heads with new tokens, by ranges of rows
        rows = {}
        for slot in plan:
            if slot.spans:
                rows[slot.name] = {f"{span.start}-{span.stop - 1}": span.made_of for span in slot.spans}
        if rows:
            fields["rows"] = rows

        return CompositionRecord(
            composition=plan.composition.settled(plan.num_layers, full=bool(plan.checkpoints)),
            experts=dict(experts),
            rules=[RuleRecord(**rule.as_data()) for rule in plan.rules],
            output={key: value for key, value in output.items() if value is not None},
            modules={slot.name: slot.coefficients for slot in plan},
            **fields,
            **measured,
        )


class ExtractedModule(_Written):
    """A module of an extracted adapter: its rank, its relative error and ‖ΔW‖ (Frobenius)."""

    rank: int
    relative_error: float = field(ge=0)
    norm: float = field(gt=0)


class LeftOut(_Written):
    """A change of the fine-tune that is not in the adapter: the reason and ‖ΔW‖."""

    reason: str = ""
    norm: float = field(gt=0)


class ExtractionRequest(_Written):
    """The arguments of `extract`, and the two models that it compared."""

    full: SourceRecord
    base: SourceRecord
    rank: int | None = None
    max_error: float | None = None
    layers: str | None
    modules: list[str]
    embeddings: bool
    config_from: Literal["base"] | None = None


class ExtractionRecord(_Written):
    """How an adapter was extracted from a full checkpoint. Unknown keys are ignored."""

    format: Literal[1] = FORMAT
    kind: Literal["extraction"] = "extraction"
    adapterswap_version: str = ""
    base_model: str | None = None
    num_layers: int = field(ge=1, le=MAX_LAYERS)
    sha256: dict[str, str] = field(description="Hashes of the adapter's own files.")
    companions: dict[str, str] = field(default={}, description="Whose tokenizer and the like it has: `full` or none.")
    extraction: ExtractionRequest
    extracted: dict[str, ExtractedModule]
    unchanged: list[str] = field(default=[])
    in_full: list[str] = field(
        default=[], description="Parameters that the adapter holds whole, such as a classifier's head."
    )
    left_out: dict[str, LeftOut] = field(default={})
    slice: SliceRecord | None = None

    @staticmethod
    def of(
        request: Mapping[str, Any],
        extracted: Mapping[str, Mapping[str, Any]],
        left_out: Mapping[str, Mapping[str, Any]],
        kept: KeptLayers | None,
        **fields: Any,
    ) -> ExtractionRecord:
        """The record of an extraction.

        Args:
            request: fields of `ExtractionRequest`.
            extracted, left_out: by module or parameter, fields of `ExtractedModule` and of `LeftOut`.
            kept: the layers of the adapter, if it is a slice.
            fields: the other fields.
        """
        return ExtractionRecord(
            format=FORMAT,
            kind="extraction",
            adapterswap_version=__version__,
            extraction=ExtractionRequest(**request),
            extracted={name: ExtractedModule(**module) for name, module in extracted.items()},
            left_out={name: LeftOut(**parameter) for name, parameter in left_out.items()},
            **SliceRecord.of(kept),
            **fields,
        )


def read_record(folder: Path) -> CompositionRecord | ExtractionRecord | None:
    """The record in a folder; None if there is none or it cannot be understood."""
    content = Records(folder).provenance()
    if not content:
        return None
    kind = ExtractionRecord if "extraction" in content else CompositionRecord
    try:
        return kind.model_validate(content)
    except FieldError:
        return None


def _source(expert: Adapter | Checkpoint, **fields: Any) -> SourceRecord:
    source = expert.source
    if expert.base_fingerprints:
        fields["base_fingerprints"] = dict(expert.base_fingerprints)
    origin = origin_of(source.folder)
    if origin is not None:
        fields["origin"] = origin
    return SourceRecord(source=source.name, revision=source.revision, **fields)


def origin_of(folder: Path) -> Origin | None:
    """How the expert in a folder was made, by its own record; None if adapterswap made it from nothing but its base."""
    record = read_record(folder)
    content: dict[str, Any]
    if record is None:
        training = Records(folder).training()
        if "start" not in training:
            return None
        content = _shortened({"start": training["start"]}, _DEPTH - 1)
    elif isinstance(record, ExtractionRecord):
        content = {"extraction": record.extraction.model_dump(mode="json", exclude_unset=True)}
    else:
        recorded = record.content()
        content = _shortened({key: recorded[key] for key in Origin.KEYS if key in recorded}, _DEPTH - 1)
    return Origin.model_validate(content)


def _shortened(origin: dict[str, Any], generations: int) -> dict[str, Any]:
    """An origin, cut off after this many generations."""
    sources = list(origin.get("experts", {}).values())
    if "start" in origin:
        sources.append(origin["start"])

    for expert in sources:
        if not generations:
            expert.pop("origin", None)
        elif isinstance(expert.get("origin"), dict):
            _shortened(expert["origin"], generations - 1)
    return origin
