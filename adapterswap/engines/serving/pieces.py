"""Turn names into scales: a composition becomes a list of scales for the pieces that llama.cpp has loaded.

llama.cpp loads adapters when it starts, and a request gives each a scale. Every expert is loaded as two files for each
layer, attention and MLP. Any layer swap, partition or linear blend is then a list of scales, and no file is written for
it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from adapterswap import __version__
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.layers import Kind, format_layers
from adapterswap.core.model.sources import FORMAT, Reference
from adapterswap.core.planning.base import with_chains
from adapterswap.core.planning.functions import adapter_plan
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.outputs import Form
from adapterswap.core.writing.resolution import Resolved
from adapterswap.engines.gguf.export import check_outtype, write_gguf
from adapterswap.engines.gguf.layout import PreparedGguf
from adapterswap.engines.serving.cache import Cache
from adapterswap.engines.serving.composer import NamedComposer
from adapterswap.engines.serving.names import Manifest
from adapterswap.kit.errors import Problems, UnsupportedError
from adapterswap.kit.files.text import shown

_MOST_REMEMBERED = 1000  # names whose scales are remembered


@dataclass(frozen=True)
class LayerPiece:
    """One loaded file: an expert's change to one kind of modules in one layer, or outside the layers (None)."""

    expert: str
    layer: int | None
    kind: Kind | None
    path: Path

    def holds(self, module: LoraModule) -> bool:
        """Whether the piece contains the expert's change to this module."""
        return module.layer == self.layer and self.kind in (None, module.kind)


class PieceComposer(NamedComposer):
    """Turns names into scales of pieces, for one base and one manifest. Several threads may use it.

    Experts are opened once, because llama.cpp loads them once.

    Args:
        manifest: the experts and the names that may be requested.
        base_model: the folder or Hub id of the base, whose config is read.
        cache: where the pieces are written.
        outtype: their number format; see `adapterswap.export`.

    Attributes:
        pieces: all pieces in the order in which the engine loads them. A piece's position is its id.
        unchecked: what could not be checked of the chains.
    """

    target = Target.LLAMA

    def __init__(self, manifest: Manifest, base_model: str, cache: Cache, outtype: str = "f32") -> None:
        super().__init__(manifest, base_model, cache, None)
        check_outtype(outtype)
        self.outtype = outtype
        self._opened: dict[str, Adapter] = {}
        problems = Problems()
        plans: dict[str, Plan] = {}
        for name in manifest.adapters:
            with problems.collect():
                self._opened[name] = super().open(name)
        problems.raise_if_any()
        on_base, self.unchecked = with_chains(self._opened, manifest.chains, problems, recorded=False)
        for name, adapter in on_base.items():
            assert isinstance(adapter, Adapter)
            with problems.collect():
                plans[name] = adapter_plan(adapter, base_model)
        problems.raise_if_any()
        self._prepared: dict[str, PreparedGguf] = {}  # by key in the cache
        self.pieces: list[LayerPiece] = []
        for name, plan in plans.items():
            with problems.collect():
                self._prepare(name, plan)
        problems.raise_if_any()
        self._scales: dict[str, dict[int, float]] = {}
        self._remembering = threading.Lock()

    def open(self, name: str) -> Adapter:
        """The expert of this name, as it was when this composer was created."""
        return self._opened[name]

    @property
    def remembered(self) -> int:
        """How many names have scales that need not be computed again."""
        return len(self._scales)

    def scales(self, name: str) -> Mapping[int, float]:
        """The scale of each piece that `name` uses, by the piece's id. All other pieces have the scale 0."""
        with self._remembering:
            by_piece = self._scales.get(name)
        if by_piece is None:
            with self._hidden_paths():
                by_piece = self._compute_scales(name)
            with self._remembering:
                if len(self._scales) >= _MOST_REMEMBERED:
                    self._scales.clear()
                self._scales[name] = by_piece
        return by_piece

    def _compute_scales(self, name: str) -> dict[int, float]:
        """The scale of each piece, by its place, for a composition; pieces with scale 0 are left out."""
        plan = self.plan(name)
        coefficients = _coefficients(Resolved.of(plan).plan)
        scales: dict[int, float] = {}
        split: set[int | None] = set()
        for place, piece in enumerate(self.pieces):
            if piece.expert not in plan.experts:
                continue
            values: set[float] = set()
            for module in self._opened[piece.expert].modules.values():
                if piece.holds(module):
                    values.add(coefficients.get((piece.expert, module.name), 0.0))
            if len(values) > 1:
                split.add(piece.layer)
            scales[place] = values.pop()

        if split:
            layers = format_layers(layer for layer in split if layer is not None)
            raise UnsupportedError(
                f"{shown(name)} gives modules of one kind in one layer (of {layers}) different scales, but llama.cpp "
                "can only scale the whole attention or the whole MLP of a layer here",
                "Write it with `adapterswap export` and serve that file",
                parameter="name",
            )
        return {place: scale for place, scale in scales.items() if scale}

    def write(self) -> None:
        """Write the pieces that are not in the cache, and keep all of them there while this process runs."""
        self.cache.hold()
        problems = Problems()
        for key, prepared in self._prepared.items():
            with problems.collect():
                self.cache.get(key, partial(write_gguf, prepared, outtype=self.outtype, pieces="kind"))
        problems.raise_if_any()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the base's architecture."""
        return next(iter(self._prepared.values())).architecture

    def _prepare(self, name: str, plan: Plan) -> None:
        """Prepare the pieces of an expert, which are written when they are first needed."""
        prepared = PreparedGguf.of(plan, Form())
        adapter = self._opened[name]
        origin = {
            "adapterswap": __version__,
            "format": FORMAT,
            "pieces": ["kind", self.outtype],
            "expert": [name, self.cache.hash_of(adapter), adapter.config.sha256],
            "base": [Reference(self.base_model).config()[1], plan.base.name, plan.base.revision],
        }
        key = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:32]
        self._prepared[key] = prepared
        exported = write_gguf(prepared, self.cache.entry(key), outtype=self.outtype, pieces="kind", dry_run=True)
        self.pieces += [LayerPiece(name, file.layer, file.kind, file.path) for file in exported.files]


def _coefficients(plan: Plan) -> dict[tuple[str, str], float]:
    """The coefficient of each expert in each module that it changes."""
    coefficients: dict[tuple[str, str], float] = {}
    for slot in plan:
        for term in slot.terms:
            key = term.expert, slot.name
            coefficients[key] = coefficients.get(key, 0.0) + term.coefficient
    return coefficients
