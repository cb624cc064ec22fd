"""Propose which layers to take from which expert, from how much each layer matters to each of them.

An importance is a share: how much of an expert's total effect comes from this layer (or its attention, or its MLP)? A
layer goes to the language expert if the language's share is larger than the task's, within the form of allocation that
you choose. The task is judged by task texts and the language by texts in the language; no task data in the target
language is needed. Knows shares, which `changes` (weights) and `effects` (activations) measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adapterswap.analysis.changes import Changes
from adapterswap.errors import ExpertError, UnsupportedError
from adapterswap.experts.layers import format_layers
from adapterswap.files.folders import FileKind

__all__ = ["PROPOSAL", "Block", "Form", "Importance", "Suggestion", "choose_layers", "importance_of_weights"]

PROPOSAL = FileKind(b"# Proposed by adapterswap suggest\n")
"""The recipes that `suggest` writes, by their first line."""

Form = Literal["zones", "modules"]
Block = tuple[int, str]  # a layer and `attention` or `mlp`


@dataclass(frozen=True)
class Importance:
    """Each expert's shares by layer and kind; the shares of an expert sum to 1.

    Attributes:
        measured: `weights` or `activations`.
        num_layers: the number of layers.
        task, language: block → share, for the blocks that the expert adapts.
    """

    measured: Literal["weights", "activations"]
    num_layers: int
    task: Mapping[Block, float]
    language: Mapping[Block, float]

    def gain(self, block: Block) -> float:
        """The gain from giving the block to the language: its share for the language minus its share for the task."""
        return self.language.get(block, 0.0) - self.task.get(block, 0.0)

    def of_layer(self, layer: int) -> tuple[float, float]:
        """(task, language): the shares of a whole layer."""
        task, language = (
            sum(share for (where, _), share in shares.items() if where == layer)
            for shares in (self.task, self.language)
        )
        return task, language


@dataclass(frozen=True)
class Suggestion:
    """A proposed composition.

    Attributes:
        form: `zones` (a bottom and a top), or `modules` for an owner of each layer's attention and MLP.
        composition: the fields of a `Composition`, without the experts.
        kept: (task, language): the share of each expert that the proposal keeps.
        reasons: why, as sentences.
        importance: the shares behind the proposal.
    """

    form: Form
    composition: Mapping[str, Any]
    kept: tuple[float, float]
    reasons: tuple[str, ...]
    importance: Importance

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data, as `adapterswap suggest --json` prints it."""
        layers = map(self.importance.of_layer, range(self.importance.num_layers))
        return {
            "form": self.form,
            "measured": self.importance.measured,
            "composition": self.composition,
            "kept": dict(zip(("task", "language"), self.kept, strict=True)),
            "reasons": list(self.reasons),
            "layers": [dict(zip(("task", "language"), shares, strict=True)) for shares in layers],
        }


def importance_of_weights(task: Changes, language: Changes, num_layers: int) -> Importance:
    """Shares of ‖ΔW‖² (Frobenius), which add up over matrices."""
    return Importance("weights", num_layers, _shares(_energies(task)), _shares(_energies(language)))


def choose_layers(importance: Importance, *, form: Form = "zones") -> Suggestion:
    """Choose the allocation that keeps the largest shares: the language's in its layers, the task's in the others.

    Args:
        importance: the shares of both experts.
        form: `zones` for a bottom and a top of whole layers, from one layer to half of them (shares sum to 1, so
            without this limit the complement of a bad choice would look good); `modules` to choose freely for each
            layer's attention and MLP.

    Raises:
        UnsupportedError: the model has only one layer.
        ExpertError: one expert would own everything.
    """
    if form == "modules":
        return _by_modules(importance)
    layers = importance.num_layers
    if layers < 2:
        raise UnsupportedError("the model has only one layer, so no layers can be swapped", "Use `method=soup`")
    gains = [language - task for task, language in map(importance.of_layer, range(layers))]
    zones = [(b, u) for b in range(layers) for u in range(layers - b) if 0 < b + u <= layers / 2]
    # Break ties by the fewest layers taken from the task, then by the larger bottom.
    bottom, top = max(zones, key=lambda z: (sum(gains[: z[0]]) + sum(gains[layers - z[1] :]), -sum(z), z[0]))
    outer = {*range(bottom), *range(layers - top, layers)}
    owned = {block for block in {*importance.task, *importance.language} if block[0] in outer}
    reasons = [_reason(importance, outer)]
    if sum(gains[layer] for layer in outer) <= 0:
        reasons.append("no outer layer matters more to the language than to the task; this takes the least harmful one")
    inside = [layer for layer in range(layers) if layer not in outer and gains[layer] > 0]
    if inside:
        reasons.append(
            f"layers {format_layers(inside)} also matter more to the language but are inside: see --form modules"
        )
    chosen = {"bottom": bottom, "top": top}
    return Suggestion("zones", chosen, _kept(importance, owned), tuple(reasons), importance)


def _by_modules(importance: Importance) -> Suggestion:
    blocks = sorted({*importance.task, *importance.language})
    owned = {block for block in blocks if importance.gain(block) > 0}
    if not owned or len(owned) == len(blocks):
        whose = "language" if owned else "task"
        raise ExpertError(f"everything would go to the {whose} expert", "Check that the experts and their texts differ")
    rules = []
    for kind in dict.fromkeys(kind for _, kind in blocks):
        layers = [layer for layer, of in owned if of == kind]
        if layers:
            rules.append({"layers": format_layers(layers), "modules": kind, "expert": "language"})
    blend = {"layers": "none", "blend": {"task": 1, "language": 1}, "optional": True}
    reasons = [f"{rule['modules']} of layers {rule['layers']}: a larger share for the language than for the task"
               for rule in rules]  # fmt: skip
    allocation = [*rules, blend, {"expert": "task"}]
    return Suggestion("modules", {"allocation": allocation}, _kept(importance, owned), tuple(reasons), importance)


def _energies(changes: Changes) -> dict[Block, float]:
    energies: dict[Block, float] = {}
    for change in changes.modules:
        if change.matrix.layer is not None:
            block = (change.matrix.layer, change.matrix.source.kind)
            energies[block] = energies.get(block, 0.0) + change.norm**2
    return energies


def _shares(values: Mapping[Block, float]) -> dict[Block, float]:
    total = sum(values.values())
    if not total > 0:
        raise ExpertError("an expert changes nothing", "Check that these are the right expert, base and texts")
    return {block: value / total for block, value in values.items()}


def _kept(importance: Importance, language_owns: set[Block]) -> tuple[float, float]:
    task = sum(share for block, share in importance.task.items() if block not in language_owns)
    language = sum(share for block, share in importance.language.items() if block in language_owns)
    return task, language


def _reason(importance: Importance, outer: set[int]) -> str:
    shares = [importance.of_layer(layer) for layer in sorted(outer)]
    task, language = (sum(share[side] for share in shares) for side in (0, 1))
    held = f"layer {min(outer)} holds" if len(outer) == 1 else f"layers {format_layers(outer)} hold"
    return (
        f"{held} {language:.0%} of the language expert's effect in the layers, "
        f"and {task:.0%} of the task expert's, measured by {importance.measured}"
    )
