"""What is known of the base of a composition. The planner makes these facts once, and the plan carries them on.

The experts and the request say who calls the base what, and which weights it has. A base on this machine has a folder,
a config.json and headers, each of which is read when it is first needed, and once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from adapterswap.core.companions.files import MODEL_CONFIG
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint, open_checkpoint
from adapterswap.core.model.sources import Reference, Source
from adapterswap.core.planning.base import adapt_one_base, published_name
from adapterswap.kit.errors import AdapterswapError, BaseModelError, ExpertError
from adapterswap.kit.files.hashes import Stamps
from adapterswap.kit.files.text import expand, parse_json, read_small

Expert = Adapter | Checkpoint

PASS_BASE = "Pass the base's folder or Hub id as `base_model`"


class LocalBase:
    """What is on this machine of a base. The network is not used.

    What is not here is looked for again when it is next needed, since it may have been downloaded meanwhile.
    """

    def __init__(self, reference: str | None) -> None:
        """Args: reference: a folder or a Hub id; None if nobody names the base."""
        self.reference = reference
        self._folder: Path | None = None
        self._config: _Config | None = None

    @property
    def folder(self) -> Path | None:
        """Its folder; None if it is not here."""
        if self._folder is None and self.reference:
            self._folder = Reference(self.reference).cached_folder
        return self._folder

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The content of its config.json; None if that is not here or cannot be read."""
        if self._config is None and self.folder is not None:
            with suppress(ExpertError):
                self._config = _read_config(self.folder)
        if self._config is None:
            return None
        return self._config.content

    @property
    def config_sha256(self) -> str | None:
        """The SHA-256 of the config.json that was read; None if none was."""
        if self._config is None:
            return None
        return self._config.sha256

    @property
    def headers(self) -> Checkpoint | None:
        """The headers of its weights; None if they are not here or cannot be read."""
        if self.config is None or self._config is None or self.folder is None:
            return None

        files = [path for path in self.folder.glob("model*.safetensors*") if path.is_file()]
        if not files:
            return None
        return _headers(self.folder, Stamps.of(sorted(files)), self._config)

    def fetched(self, remedy: str) -> tuple[Source, LocalBase]:
        """The base, with its config.json, which comes from the Hub if it is not here.

        Args:
            remedy: what to do if nobody names the base.

        Raises:
            BaseModelError: nobody names it, or its config.json is damaged.
            NotFoundError: it is neither on this machine nor on the Hub.
        """
        source = Source.of_base(Reference.to_base(self.reference, remedy))

        local = self
        if self.folder is not None and self.folder != source.folder and not self.folder.samefile(source.folder):
            local = LocalBase(self.reference)  # the Hub has a newer revision than the one that was here

        if local.config is None:
            local._config = _read_config(source.folder, kind=BaseModelError)
        return source, local


@dataclass(frozen=True)
class _Config:
    """A config.json: the SHA-256 of the file, and its content."""

    sha256: str
    content: Mapping[str, Any] = field(compare=False)


def _read_config(folder: Path, *, kind: type[AdapterswapError] = ExpertError) -> _Config:
    """The config.json in a folder; an error of this class if it cannot be read."""
    path, remedy = folder / MODEL_CONFIG, "Pass a base model's folder with a valid config.json"
    raw = read_small(path, remedy, kind=kind)
    return _Config(hashlib.sha256(raw).hexdigest(), parse_json(raw, str(path), remedy, kind=kind))


@lru_cache(maxsize=4)
def _headers(folder: Path, weights: Stamps, config: _Config) -> Checkpoint | None:
    """The headers in a folder with these files of weights and this config."""
    with suppress(AdapterswapError):  # what needs the weights reports why
        return Checkpoint.read(Checkpoint.find(folder), config=config.content)
    return None


@dataclass(frozen=True)
class BaseFacts:
    """What is known of the base of a composition.

    Attributes:
        declared: where it is by the request; None if that does not say.
        named: where each adapter's config says that it is, at its revision; None if it does not say.
        recorded: the fingerprints of its weights, by each expert's own record; empty where that does not say.
        reference: where to open it: the declared place, or the first that an adapter names; None if nobody names it.
        name: what results call it: the name by the adapters or, if they give none or differ, the declared one. Where
            that is a folder, but an adapter names an id on the Hub, it is this id, with which others can load it.
        public_name: the name as it is published, without local paths; see `Reference.public_name`.
        revision: its revision on the Hub: the declared one, or the one on which all adapters agree.
        local: what is on this machine of `reference`.
        source: its folder, if it was declared as one or its config gave the number of layers.
        weights: the base with its headers, if its weights enter; None if none are needed.
        skeleton: the checkpoint whose shards and config full weights have: the base, or the first full expert; None for
            a plan of adapters.
    """

    declared: str | None = None
    named: Mapping[str, str | None] = field(default_factory=dict)
    recorded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    reference: str | None = None
    name: str | None = None
    public_name: str | None = None
    revision: str | None = None
    local: LocalBase = field(default_factory=lambda: LocalBase(None))
    source: Source | None = None
    weights: Checkpoint | None = None
    skeleton: Checkpoint | None = None

    @classmethod
    def of(cls, experts: Mapping[str, Expert], declared: str | None) -> BaseFacts:
        """What opened experts and a request say of their base.

        Args:
            experts: by name.
            declared: the base that the request declares; None if it declares none.
        """
        adapters = {name: expert for name, expert in experts.items() if isinstance(expert, Adapter)}
        named = {name: adapter.config.base_reference for name, adapter in adapters.items()}
        reference = declared or next(filter(None, named.values()), None)

        # The name and the revision by all adapters, as the first one writes them.
        common = revision = None
        first = next(iter(adapters.values()), None)
        if first is not None and all(adapt_one_base(first, adapter) for adapter in adapters.values()):
            common = first.config.base_model
            revisions = {adapter.config.revision for adapter in adapters.values()}
            if common is not None and len(revisions) == 1:
                revision = first.config.revision

        name = common
        if declared is not None:
            declared_name, declared_revision = Reference(declared).parts
            if common is None:
                name = declared_name
            if declared_revision is not None:
                revision = declared_revision

        # A folder means nothing on another machine; an id on the Hub does, if an adapter names one.
        if name is not None and not Reference(name).is_hub_id:
            name = published_name(adapter.config.base_model for adapter in adapters.values()) or name

        return cls(
            declared=declared,
            named=named,
            recorded={name: expert.base_fingerprints for name, expert in experts.items()},
            reference=reference,
            name=name,
            public_name=name and Reference(name).public_name,
            revision=revision,
            local=LocalBase(reference),
        )

    @cached_property
    def at_hand(self) -> Source | None:
        """The base that the plan used, or the folder that was declared; None if there is neither."""
        if self.weights is not None:
            return self.weights.source

        if self.source is not None or self.declared is None or not os.path.isdir(expand(self.declared)):
            return self.source
        return Source.find(self.declared, [], what="base model")

    def open(self, base_model: str | None = None) -> Checkpoint:
        """Open the base: `base_model`, or the one that the request or the experts name.

        Raises:
            BaseModelError: nobody names it; and see `open_checkpoint`.
        """
        return open_checkpoint(Reference.to_base(base_model or self.reference, PASS_BASE))
