"""A visitor's choice: the fields of a composition, the layers set by hand, and the address that holds it.

Plain data, converted from and to the page's address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args
from urllib.parse import parse_qsl, urlencode

from adapterswap.core import ZONES, Composition, Kind, Rule, format_layers, parse_layers
from adapterswap.core.methods.registry import PARAMETERS
from adapterswap.kit.errors import ArgumentError, CompositionError
from adapterswap.kit.files.readers import field as reading
from adapterswap.kit.files.readers import read_fields

Painted = Mapping[tuple[int, Kind], str]
"""(layer, kind of module) → the expert that owns it, or `base`."""

_KINDS: tuple[Kind, ...] = ("attention", "mlp", "other")
_KEPT = {"experts", "base_model", "task_type", "tokenizer", "num_layers", "row_threshold", "allow_negative"}


def paint(composition: Composition, painted: Painted, num_layers: int) -> Composition:
    """The composition as an allocation in which the painted modules have new owners and all others stay as before."""
    if not painted:
        return composition
    layers = {layer for layer, _ in painted}
    for layer in sorted(layers):
        if not 0 <= layer < num_layers:
            raise CompositionError(
                f"Layer {layer} does not exist: the model has {num_layers} layers, counted from 0",
                f"Choose a layer from 0 to {num_layers - 1}",
                parameter="layers",
            )

    # The composition's own rules come second. Painting may leave them without a module, so they become optional.
    rules = _painted_rules(painted)
    for rule in composition.rules(num_layers):
        if rule.layers is None or not layers.isdisjoint(parse_layers(rule.layers)):
            rule = rule.model_copy(update={"optional": True})
        rules.append(rule)
    return _with_rules(composition, rules)


def by_rules(composition: Composition, num_layers: int) -> Composition:
    """The same composition as an allocation: its method and its sides are written as rules."""
    return _with_rules(composition, composition.rules(num_layers))


def _with_rules(composition: Composition, rules: Sequence[Rule]) -> Composition:
    """An allocation with the composition's experts and base."""
    content: dict[str, Any] = {}
    for name in composition.model_fields_set:
        if name in _KEPT or (name == "seed" and composition.is_random):
            content[name] = getattr(composition, name)
    for rule in rules:
        if rule.blend and min(rule.blend.values()) < 0:
            content["allow_negative"] = True  # AdaMergeX subtracts an expert
    return Composition(allocation=tuple(rules), **content)


def _painted_rules(painted: Painted) -> list[Rule]:
    """A rule for each owner and set of kinds."""
    by_layer: dict[tuple[int, str], set[Kind]] = {}
    for (layer, kind), owner in painted.items():
        by_layer.setdefault((layer, owner), set()).add(kind)

    layers_of: dict[tuple[str, tuple[Kind, ...]], list[int]] = {}
    for (layer, owner), kinds in sorted(by_layer.items()):
        named = tuple(kind for kind in _KINDS if kind in kinds)
        layers_of.setdefault((owner, named), []).append(layer)

    rules = []
    for (owner, named), layers in layers_of.items():
        rules.append(Rule(layers=format_layers(layers), modules=named, expert=owner))
    return rules


FIELDS = (
    *("method", "partition", *ZONES, "task_weight", "language_weight", "weights", "outside"),
    *(name for name in PARAMETERS if name != "seed"),
    *("seed", "allow_negative"),
)
"""The fields of a composition that the page and its address can set, besides the experts."""

_PAINT = re.compile(r"(attention|mlp|other)\.(\d[\d,-]*)=(.+)")
_LONGEST = 8_000  # characters of an address
LONGEST_PROMPT = 20_000
"""The most characters of a prompt."""


@dataclass(frozen=True)
class Choice:
    """One visitor's composition.

    Attributes:
        task, language: the experts of each side.
        fields: other fields of the `Composition`, by their names in `FIELDS`.
        painted: (layer, kind) → the owner set by hand.
        prompt: the current prompt, which is part of the address.
    """

    task: tuple[str, ...]
    language: tuple[str, ...]
    fields: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    painted: Mapping[tuple[int, Kind], str] = field(default_factory=dict)
    prompt: Annotated[str, reading(max_length=LONGEST_PROMPT)] = ""

    def __post_init__(self) -> None:
        read_fields(self)

    def content(self) -> dict[str, Any]:
        """The fields of the composition without the layers set by hand."""
        return {"task": list(self.task), "language": list(self.language), **self.fields}

    def composition(self, num_layers: int, **more: Any) -> Composition:
        """The composition, with the layers set by hand as rules."""
        plain = Composition.read_content({**self.content(), **more}, where="this composition")
        return paint(plain, self.painted, num_layers)

    def address(self) -> str:
        """The query of an address that holds the choice: `?task=math&language=swahili&bottom=1`."""
        items = [("task", name) for name in self.task]
        items += [("language", name) for name in self.language]
        items += [(key, _text(value)) for key, value in self.fields.items()]

        # One item for each kind and owner, with all of their layers.
        layers_of: dict[tuple[Kind, str], list[int]] = {}
        for (layer, kind), owner in self.painted.items():
            layers_of.setdefault((kind, owner), []).append(layer)
        for (kind, owner), layers in sorted(layers_of.items()):
            items.append(("give", f"{kind}.{format_layers(layers)}={owner}"))

        if self.prompt:
            items.append(("prompt", self.prompt))
        return "?" + urlencode(items, safe=",+=")


def first_choice(experts: Sequence[str], num_layers: int | None = None, zones: tuple[int, int] | None = None) -> Choice:
    """The choice that a page opens with: a layer swap of the first two experts, or of one and the base.

    Args:
        num_layers: L. If it is too small for the paper's zones, one bottom layer is swapped instead.
        zones: bottom and top layers; by default the paper's.
    """
    names = [*experts, "base"]
    fields: dict[str, Any] = {"method": "layer_swap"}
    if zones is not None:
        fields |= {"bottom": zones[0], "top": zones[1]}
    elif num_layers is not None:
        try:
            Composition(method="layer_swap").zones(num_layers)
        except CompositionError:
            fields |= {"bottom": min(1, num_layers), "top": 0}
    return Choice((names[0],), (names[1],), fields)


def from_address(query: str, fallback: Choice) -> Choice:
    """The choice that an address holds; a side that it does not name is that of `fallback`."""
    if len(query) > _LONGEST:
        raise ArgumentError(f"The address has {len(query)} characters", f"Shorten it to {_LONGEST}", parameter="query")
    sides: dict[str, list[str]] = {"task": [], "language": []}
    fields: dict[str, Any] = {}
    painted: dict[tuple[int, Kind], str] = {}
    prompt = ""
    for key, value in parse_qsl(query.removeprefix("?")):
        if key in sides:
            sides[key].append(value)
        elif key == "prompt":
            prompt = value
        elif key == "give":
            painted |= _read_painted(value)
        elif key in FIELDS:
            fields[key] = value
        elif not key.startswith("__"):  # Gradio's own, such as __theme
            raise ArgumentError(
                f"The address has an unknown setting {key!r}",
                f"Remove it; the settings are {', '.join(FIELDS)}",
                parameter="query",
            )

    if not (sides["task"] or sides["language"] or fields):
        fields = dict(fallback.fields)
    task = tuple(sides["task"]) or fallback.task
    language = tuple(sides["language"]) or fallback.language
    return Choice(task, language, fields, painted, prompt)


def _read_painted(text: str) -> dict[tuple[int, Kind], str]:
    """What `give=mlp.0-2=math` in an address assigns."""
    match = _PAINT.fullmatch(text)
    if match is None:
        raise ArgumentError(
            f"The address assigns layers with give={text!r}",
            "Write KIND.LAYERS=EXPERT, as in mlp.0-2=math",
            parameter="query",
        )
    kind = next(kind for kind in get_args(Kind) if kind == match[1])
    try:
        layers = parse_layers(match[2])
    except ValueError as error:
        raise ArgumentError(f"The address has give={text!r}: {error}", "Correct it", parameter="query") from None
    return {(layer, kind): match[3] for layer in layers}


def check_values(values: object) -> None:
    """Raise `ArgumentError` if JSON values that a page sent hold what UTF-8 or JSON cannot express, or name a file.

    Gradio would open a file that a value names, and fetch it if it is an address.
    """
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (RecursionError, ValueError):
        raise ArgumentError(
            "The page sent an incomplete character, a number that is not finite, or lists that are too deep",
            "Correct the last input",
        ) from None
    if _names_file(values):
        raise ArgumentError("The page sent a file, which none of its controls has", "Reload the page")


def _names_file(value: object) -> bool:
    """Whether a value, or one inside it, has the form of a file of Gradio's."""
    if isinstance(value, Mapping):
        return bool(value.keys() & _OF_FILES) or any(map(_names_file, value.values()))
    return isinstance(value, list | tuple) and any(map(_names_file, value))


_OF_FILES = {"path", "url", "meta"}


def _text(value: Any) -> str:
    """A field's value in an address."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
