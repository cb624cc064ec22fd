"""Allocation rules: which layers and modules go to an expert, a blend of experts, or the base.

A rule is pure data that can be written in YAML. Rules are tried in order and the first match wins; `plan` applies them.
Knows modules by name, layer and kind only, and experts by name only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from adapterswap.layers import Kind
from adapterswap.yamlfiles import StrictModel

__all__ = ["BASE", "Rule", "format_layers", "parse_layers"]

BASE = "base"  # the reserved name of the unchanged base model
NO_LAYER = "none"  # the layer selection of modules outside the layers: embeddings, heads

_KINDS = ("attention", "mlp", "other")


def parse_layers(text: str) -> frozenset[int]:
    """The layers in a text such as `0-4,30-31`; empty for `none`.

    Raises:
        ValueError: the text is no such list, or a range runs backwards.
    """
    if text == NO_LAYER:
        return frozenset()
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None:
            raise ValueError(f"{text!r} is no list of layers; write for instance 0-4,30-31, or none")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"the range {part.strip()} runs backwards")
        layers.update(range(first, last + 1))
    return frozenset(layers)


def format_layers(layers: Iterable[int]) -> str:
    """The shortest text that `parse_layers` reads as these layers: `0-4,30-31`."""
    ranges: list[list[int]] = []
    for layer in sorted(set(layers)):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges) or NO_LAYER


def _canonical_layers(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = str(value)
    if isinstance(value, list | tuple):
        value = ",".join(str(item) for item in value)
    if isinstance(value, str):
        value = value.strip()
        return NO_LAYER if value == NO_LAYER else format_layers(parse_layers(value))
    return value


class Rule(StrictModel):
    """Gives the modules that it matches to one expert, to the base, or to a blend."""

    layers: Annotated[str, BeforeValidator(_canonical_layers)] | None = Field(
        default=None,
        description="Layers: 5, 0-4, 0-4,30-31, [0, 1], or `none` for modules outside the layers. Absent: all modules.",
    )
    modules: tuple[str, ...] | None = Field(
        default=None,
        description="Kinds (attention, mlp, other) or parts of names (self_attn, q_proj, mlp.down_proj). Absent: all.",
    )
    expert: str | None = Field(default=None, description="The expert that owns them; `base` leaves them unchanged.")
    blend: dict[str, float] | None = Field(default=None, description="Experts and their weights.")
    normalize: bool = Field(default=True, description="Divide a blend's weights by their sum.")
    optional: bool = Field(default=False, description="The rule may match nothing; otherwise that is an error.")

    @field_validator("modules", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Rule:
        if (self.expert is None) == (self.blend is None):
            raise ValueError("a rule gives its modules to one `expert` or to a `blend`: write exactly one of them")
        if self.modules is not None and not all(self.modules):
            raise ValueError("`modules` holds an empty name")
        if self.modules == ():
            raise ValueError("`modules` is empty: leave it out to match all modules")
        if self.blend is not None:
            check_weights(self.blend, normalize=self.normalize)
        return self

    def matches(self, name: str, layer: int | None, kind: Kind) -> bool:
        """Whether the rule takes the module of this name, layer and kind."""
        if self.layers is not None:
            wanted = layer is None if self.layers == NO_LAYER else layer in parse_layers(self.layers)
            if not wanted:
                return False
        return self.modules is None or any(selects(module, name, kind) for module in self.modules)

    def coefficients(self) -> dict[str, float]:
        """The factor of each expert's ΔW: 1 for an owner, w_i/Σw or w_i for a blend; the base and zeros left out."""
        if self.expert is not None:
            return {} if self.expert == BASE else {self.expert: 1.0}
        assert self.blend is not None
        total = math.fsum(self.blend.values()) if self.normalize else 1.0
        return {name: weight / total for name, weight in self.blend.items() if name != BASE and weight != 0}

    def __str__(self) -> str:
        where = [] if self.layers is None else [f"layers {self.layers}"]
        where += [] if self.modules is None else [f"modules {', '.join(self.modules)}"]
        if self.expert is not None:
            what = self.expert
        else:
            assert self.blend is not None
            what = " + ".join(f"{weight:g}·{name}" for name, weight in self.blend.items())
        return f"{' and '.join(where) or 'everything'} → {what}"


def selects(selector: str, name: str, kind: Kind) -> bool:
    """Whether a `modules` entry names this module: its kind, or consecutive parts of its name."""
    return selector == kind if selector in _KINDS else f".{selector}." in f".{name}."


def check_weights(weights: Mapping[str, float], *, normalize: bool) -> None:
    """Raise ValueError for weights that make no blend: none, not finite, all zero, or a sum of zero to divide by."""
    if not weights:
        raise ValueError("a blend names no expert")
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {name} is {weight}, which is not a finite number")
    if not any(weights.values()):
        raise ValueError("all weights are 0: give at least one expert a weight")
    if normalize and abs(math.fsum(weights.values())) < 1e-12 * max(map(abs, weights.values())):
        raise ValueError("the weights sum to 0, and are to be divided by their sum: change them, or normalize: false")
