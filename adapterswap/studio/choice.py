"""A visitor's choice: the fields of a composition and the layers set by hand; and the address that holds it.

Plain data, converted from and to the page's address. Knows nothing of Gradio.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, get_args
from urllib.parse import parse_qsl, urlencode

from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass

from adapterswap.errors import ArgumentError, CompositionError
from adapterswap.experts.layers import Kind, format_layers, parse_layers
from adapterswap.files.yamlfiles import validate
from adapterswap.planning.compositions import ZONES, Composition
from adapterswap.planning.painting import paint
from adapterswap.planning.parameters import parameter_keys

__all__ = ["FIELDS", "LONGEST_PROMPT", "Choice", "check_values", "first_choice", "from_address"]

FIELDS = (
    "method", "partition", *ZONES, "task_weight", "language_weight", "weights", "outside", *parameter_keys(), "seed",
    "allow_negative",
)  # fmt: skip
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

    Raises:
        ValueError: a value has another type.
    """

    task: tuple[str, ...]
    language: tuple[str, ...]
    fields: Mapping[str, bool | int | FiniteFloat | str] = field(default_factory=dict)
    painted: Mapping[tuple[int, Kind], str] = field(default_factory=dict)
    prompt: Annotated[str, Field(max_length=LONGEST_PROMPT)] = ""

    def content(self) -> dict[str, Any]:
        """The fields of the composition without the layers set by hand."""
        return {"task": list(self.task), "language": list(self.language), **self.fields}

    def composition(self, num_layers: int, **more: Any) -> Composition:
        """The composition, with the layers set by hand as rules.

        Args:
            num_layers: L.
            more: further fields, such as `experts` and `base_model`.

        Raises:
            FieldError, CompositionError: see `Composition` and `paint`.
        """
        plain = validate({**self.content(), **more}, Composition, where="this composition")
        return paint(plain, self.painted, num_layers)

    def address(self) -> str:
        """The query of an address that holds the choice: `?task=math&language=swahili&bottom=1`."""
        items = [(key, value) for key in ("task", "language") for value in getattr(self, key)]
        items += [(key, _text(value)) for key, value in self.fields.items()]
        items += [("give", text) for text in self._painted_texts()]
        items += [("prompt", self.prompt)] if self.prompt else []
        return "?" + urlencode(items, safe=",+=")

    def _painted_texts(self) -> Iterator[str]:
        grouped: dict[tuple[Kind, str], list[int]] = {}
        for (layer, kind), owner in self.painted.items():
            grouped.setdefault((kind, owner), []).append(layer)
        for (kind, owner), layers in sorted(grouped.items()):
            yield f"{kind}.{format_layers(layers)}={owner}"


def first_choice(experts: Sequence[str], num_layers: int | None = None) -> Choice:
    """The choice that a page opens with: the paper's layer swap of the first two experts, or of one and the base.

    Args:
        experts: their names.
        num_layers: L. If it is too small for the paper's zones, one bottom layer is swapped instead.
    """
    names = [*experts, "base"]
    fields: dict[str, Any] = {"method": "layer_swap"}
    if num_layers is not None and not _has_paper_layers(num_layers):
        fields |= {"bottom": min(1, num_layers), "top": 0}
    return Choice((names[0],), (names[1],), fields)


def _has_paper_layers(num_layers: int) -> bool:
    try:
        Composition(method="layer_swap").zones(num_layers)
    except CompositionError:
        return False
    return True


def from_address(query: str, fallback: Choice) -> Choice:
    """The choice that an address holds; a side that it does not name is that of `fallback`.

    Raises:
        ArgumentError: it is too long, or a part of it cannot be read. `Choice.composition` checks the values.
    """
    if len(query) > _LONGEST:
        raise ArgumentError(f"the address has {len(query)} characters", f"Shorten it to {_LONGEST}", parameter="query")
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
                f"the address has an unknown setting {key!r}", f"Remove it; the settings are {', '.join(FIELDS)}",
                parameter="query",
            )  # fmt: skip
    if not (sides["task"] or sides["language"] or fields):
        fields = dict(fallback.fields)
    return Choice(
        tuple(sides["task"]) or fallback.task, tuple(sides["language"]) or fallback.language, fields, painted, prompt
    )


def _read_painted(text: str) -> dict[tuple[int, Kind], str]:
    match = _PAINT.fullmatch(text)
    if match is None:
        raise ArgumentError(
            f"the address assigns layers with give={text!r}",
            "Write KIND.LAYERS=EXPERT, as in mlp.0-2=math",
            parameter="query",
        )
    kind = next(kind for kind in get_args(Kind) if kind == match[1])
    try:
        layers = parse_layers(match[2])
    except ValueError as error:
        raise ArgumentError(f"the address has give={text!r}: {error}", "Correct it", parameter="query") from None
    return {(layer, kind): match[3] for layer in layers}


def check_values(values: object) -> None:
    """Raise `ArgumentError` if JSON values that a page sent hold what UTF-8 or JSON cannot express."""
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (RecursionError, ValueError):
        raise ArgumentError(
            "the page sent half a character, a number that is not finite, or lists that are too deep",
            "Correct the last input",
        ) from None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
