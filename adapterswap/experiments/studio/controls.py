"""The controls of Compose, which fields each preset has, and conversion between their values and a choice.

`Composition` checks which values go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import gradio as gr

from adapterswap.core import BASE, ZONES, Composition, Kind, Method, Parameter, Partition, find_method
from adapterswap.core.methods.registry import PARAMETERS, names_of
from adapterswap.experiments.studio.choice import Choice
from adapterswap.experiments.studio.workspace import Workspace
from adapterswap.kit.errors import ArgumentError

_PARTITION = "partition "
WEIGHTS = ("task_weight", "language_weight", "weights")
_DENSITY = 0.5  # the initial value of a required parameter
_LABELS = {
    "bottom": "Bottom layers",
    "top": "Top layers",
    "bottom_transition": "Bottom transition",
    "top_transition": "Top transition",
}


def presets() -> list[tuple[str, str]]:
    """(title, name) of what can be composed: the layer swap, the second paper's partitions, and the other methods.

    Methods that a running model cannot hold come last. Methods that only full weights can hold are left out.
    """
    methods = {name: find_method(name) for name in names_of()[1:]}
    methods = {name: method for name, method in methods.items() if method.in_adapters != "no"}
    partitions = [(title_of({"partition": name}), _PARTITION + name) for name in get_args(Partition)]
    answering = [(title_of({"method": name}), name) for name, method in methods.items() if _answers(method)]
    to_files = [
        (f"Files only: {title_of({'method': name})}", name) for name, method in methods.items() if not _answers(method)
    ]
    return [(title_of({}), "layer_swap"), *partitions, *answering, *to_files]


def preset_of(fields: Mapping[str, Any]) -> str:
    """The name of a choice's preset."""
    return _PARTITION + str(fields["partition"]) if "partition" in fields else str(fields.get("method", "layer_swap"))


def is_offered(fields: Mapping[str, Any]) -> bool:
    """Whether the controls can show a choice's method."""
    return preset_of(fields) in {name for _, name in presets()}


def title_of(fields: Mapping[str, Any]) -> str:
    """What the page calls a choice's method."""
    if "partition" in fields:
        return f"Partition {fields['partition']} of the second paper"
    name = fields.get("method", "layer_swap")
    title = "layer swap" if name == "layer_swap" else find_method(str(name)).title
    return title[0].upper() + title[1:]


def _answers(method: Method) -> bool:
    """Whether a running model can hold the method's result: a weighted sum of the experts."""
    return method.is_sum


@dataclass(frozen=True)
class _Offer:
    """The fields that a preset has controls for."""

    method: str
    partition: str | None
    fields: tuple[str, ...]

    @classmethod
    def of(cls, preset: str) -> _Offer:
        if preset.startswith(_PARTITION):
            return cls("layer_swap", preset.removeprefix(_PARTITION), ("outside",))
        method = find_method(preset)
        fields = [*ZONES, "outside", "weights"] if preset == "layer_swap" else []
        fields += ["weights"] if preset == "soup" else []
        fields += ["task_weight", "language_weight"] if method.weighted else []
        fields += [parameter.name for parameter in method.parameters]
        return cls(preset, None, tuple(fields))


class Controls:
    """The components of Compose.

    Attributes:
        components: by name (task, language, preset, and fields of a composition), in the order in which events pass
            their values.
    """

    def __init__(self, workspace: Workspace, choice: Choice) -> None:
        self._workspace = workspace
        self.components: dict[str, Any] = {}
        names = list(workspace.experts)
        add = self.components
        with gr.Row(elem_classes="sides"):
            add["task"] = gr.Dropdown(names, label="Task expert", multiselect=True, min_width=140)
            add["language"] = gr.Dropdown([*names, BASE], label="Language expert", multiselect=True, min_width=140)
        add["preset"] = gr.Dropdown(presets(), label="Method", filterable=True)
        most = workspace.num_layers
        for pair in (ZONES[:2], ZONES[2:]):
            with gr.Row(elem_classes="zones"):
                for name in pair:
                    add[name] = gr.Slider(0, most, step=1, label=_LABELS[name], min_width=140, buttons=[])
        with gr.Row():
            for name, label in (("task_weight", "Task weight"), ("language_weight", "Language weight")):
                add[name] = gr.Slider(0, 2, step=0.05, label=label, min_width=140, buttons=[])
        with gr.Row():
            for parameter in PARAMETERS.values():
                add[parameter.name] = _control(parameter)
        add["outside"] = gr.Radio(
            ["average", "task", "language"], label="Embeddings, heads and towers", value="average"
        )
        add["weights"] = gr.Radio(["equal", "magnitude"], label="Blend weights", value="equal")
        for name, component in add.items():
            component.elem_id = f"set-{name}"
        for name, update in zip(add, self.updates(choice), strict=True):
            for key, value in update.items():
                if key in ("value", "visible"):
                    setattr(add[name], key, value)

    @property
    def sliders(self) -> dict[str, int]:
        """The `elem_id` of each slider → its place among `components`, counted from the end: -1 is the last."""
        components = enumerate(self.components.values(), -len(self.components))
        return {component.elem_id: place for place, component in components if isinstance(component, gr.Slider)}

    def averages(self, transitions: Sequence[int]) -> bool:
        """Whether a layer swap with these transition zones averages a module, so that weights count."""
        return any(transitions) or self._workspace.changes_outside

    def choice(self, values: Mapping[str, Any], painted: Mapping[str, str], prompt: str = "") -> Choice:
        """The choice that the controls' values describe: the preset's fields that differ from their defaults."""
        try:
            return self._choice(values, painted, prompt)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise ArgumentError("The page sent a value that none of its controls has", "Reload the page") from None

    def _choice(self, values: Mapping[str, Any], painted: Mapping[str, str], prompt: str) -> Choice:
        """`choice`, unchecked."""
        offer = _Offer.of(values["preset"])
        fields: dict[str, Any] = {"method": offer.method}
        fields |= {"partition": offer.partition} if offer.partition else {}
        for name in offer.fields:
            value = values[name]
            required = name in PARAMETERS or name in ZONES[:2]
            if value is not None and (required or value != Composition.model_fields[name].default):
                fields[name] = _whole(name, value)
        return Choice(
            tuple(values["task"] or ()), tuple(values["language"] or ()), fields, unpacked(painted), prompt or ""
        )

    def updates(self, choice: Choice) -> list[dict[str, Any]]:
        """An update of each control that shows a choice, valid or not."""
        fields = choice.fields
        preset = preset_of(fields) if is_offered(fields) else "layer_swap"
        offer = _Offer.of(preset)
        values: dict[str, Any] = {"task": list(choice.task), "language": list(choice.language), "preset": preset}
        values |= {name: _number(fields.get(name), default) for name, default in self._defaults(offer).items()}
        useless = set() if self._workspace.changes_outside else {"outside"}
        if preset == "layer_swap" and not self.averages([values[name] for name in ZONES[2:]]):
            useless |= {*WEIGHTS}
        offered = ({"task", "language", "preset"} | {*offer.fields}) - useless
        names = list(self._workspace.experts)
        choices = {"task": {"choices": names}, "language": {"choices": [*names, BASE]}}
        return [
            gr.update(value=values[name], visible=name in offered, **choices.get(name, {})) for name in self.components
        ]

    def _defaults(self, offer: _Offer) -> dict[str, Any]:
        """The initial value of each field."""
        layers = self._workspace.num_layers
        try:
            zones = dict(zip(ZONES, Composition(method="layer_swap").zones(layers), strict=True))
        except ValueError:  # too few layers for the paper's zones, which scale to none
            zones = dict.fromkeys(ZONES, 0) | {"bottom": min(1, layers)}
        own = {p.name: p for p in find_method(offer.method).parameters}
        found: dict[str, Any] = {**zones, "task_weight": 1.0, "language_weight": 1.0}
        for name, parameter in PARAMETERS.items():
            parameter = own.get(name, parameter)
            found[name] = _DENSITY if parameter.required else parameter.default
        return {**found, "outside": "average", "weights": "equal"}


def unpacked(painted: Mapping[str, str]) -> dict[tuple[int, Kind], str]:
    """The page's {"3.mlp": owner} as {(layer, kind): owner}."""
    found: dict[tuple[int, Kind], str] = {}
    for place, owner in painted.items():
        layer, _, name = place.partition(".")
        found |= {(int(layer), kind): owner for kind in get_args(Kind) if kind == name}
    return found


def packed(painted: Mapping[tuple[int, Kind], str]) -> dict[str, str]:
    """The inverse of `unpacked`."""
    return {f"{layer}.{kind}": owner for (layer, kind), owner in painted.items()}


def _control(parameter: Parameter) -> Any:
    label = f"{parameter.name}: {parameter.description}"
    if parameter.kind is bool:
        return gr.Checkbox(label=label, visible=False, min_width=140)
    if parameter.choices:
        return gr.Dropdown(list(parameter.choices), label=label, visible=False, min_width=140)
    low = parameter.ge if parameter.ge is not None else parameter.gt
    high = parameter.le if parameter.le is not None else parameter.lt
    if parameter.kind is float and low == 0 and high == 1:
        return gr.Slider(0, 1, step=0.01, label=label, visible=False, min_width=140, buttons=[])
    precision = 0 if parameter.kind is int else None
    return gr.Number(label=label, visible=False, min_width=140, precision=precision)


def _whole(name: str, value: Any) -> Any:
    """The value of a field; a number of layers that was typed arrives as a float and becomes an int."""
    return int(value) if name in ZONES and float(value).is_integer() else value


def _number(value: Any, default: Any) -> Any:
    """A field's value with the type of its default, because values from an address are text."""
    if value is None or isinstance(value, type(default)):
        return default if value is None else value
    try:
        if isinstance(default, bool):
            return str(value).lower() == "true"
        return type(default)(value)
    except ValueError:
        return default
