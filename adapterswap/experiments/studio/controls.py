"""The controls of Compose, which fields each preset has, and conversion between their values and a choice.

`Composition` checks which values go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import gradio as gr

from adapterswap.core import BASE, ZONES, Composition, Kind, Parameter, Partition, find_method
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

    Methods that a running model cannot hold, because they are no weighted sum of the experts, come last. Methods that
    only full weights can hold are left out.
    """
    entries = [(title_of({}), "layer_swap")]
    for name in get_args(Partition):
        entries.append((title_of({"partition": name}), _PARTITION + name))

    only_files = []
    for name in names_of()[1:]:
        method = find_method(name)
        title = title_of({"method": name})
        if method.in_adapters == "no":
            continue
        if method.is_sum:
            entries.append((title, name))
        else:
            only_files.append((f"Files only: {title}", name))
    return entries + only_files


def preset_of(fields: Mapping[str, Any]) -> str:
    """The name of a choice's preset."""
    if "partition" in fields:
        return _PARTITION + str(fields["partition"])
    return str(fields.get("method", "layer_swap"))


def is_offered(fields: Mapping[str, Any]) -> bool:
    """Whether the controls can show a choice's method."""
    return preset_of(fields) in {name for _, name in presets()}


def title_of(fields: Mapping[str, Any]) -> str:
    """What the page calls a choice's method."""
    if "partition" in fields:
        return f"Partition {fields['partition']} of the second paper"
    name = fields.get("method", "layer_swap")
    title = "layer swap"
    if name != "layer_swap":
        title = find_method(str(name)).title
    return title[0].upper() + title[1:]


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
        fields: list[str] = []
        if preset == "layer_swap":
            fields += [*ZONES, "outside", "weights"]
        if preset == "soup":
            fields += ["weights"]
        if method.weighted:
            fields += ["task_weight", "language_weight"]
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
        add = self.components

        # The experts and the method
        names = list(workspace.experts)
        with gr.Row(elem_classes="sides"):
            add["task"] = gr.Dropdown(names, label="Task expert", multiselect=True, min_width=140)
            add["language"] = gr.Dropdown([*names, BASE], label="Language expert", multiselect=True, min_width=140)
        add["preset"] = gr.Dropdown(presets(), label="Method", filterable=True)

        # The settings of all methods; `updates` says which are visible
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

        for (name, component), update in zip(add.items(), self.updates(choice), strict=True):
            component.elem_id = f"set-{name}"
            component.value = update["value"]
            component.visible = update["visible"]

    @property
    def sliders(self) -> dict[str, int]:
        """The `elem_id` of each slider → its place among `components`, counted from the end: -1 is the last."""
        places = {}
        for place, component in enumerate(self.components.values(), -len(self.components)):
            if isinstance(component, gr.Slider):
                places[component.elem_id] = place
        return places

    def averages(self, transitions: Sequence[int]) -> bool:
        """Whether a layer swap with these transition zones averages a module, so that weights count."""
        return any(transitions) or self._workspace.changes_outside

    def choice(self, values: Mapping[str, Any], painted: Mapping[str, str], prompt: str = "") -> Choice:
        """The choice that the controls' values describe: the preset's fields that differ from their defaults."""
        try:
            offer = _Offer.of(values["preset"])
            fields: dict[str, Any] = {"method": offer.method}
            if offer.partition:
                fields["partition"] = offer.partition
            for name in offer.fields:
                value = values[name]
                is_required = name in PARAMETERS or name in ZONES[:2]
                if value is None or not (is_required or value != Composition.model_fields[name].default):
                    continue
                # A number of layers that was typed arrives as a float.
                if name in ZONES and float(value).is_integer():
                    value = int(value)
                fields[name] = value

            task, language = tuple(values["task"] or ()), tuple(values["language"] or ())
            return Choice(task, language, fields, unpacked(painted), prompt or "")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise ArgumentError("The page sent a value that none of its controls has", "Reload the page") from None

    def updates(self, choice: Choice) -> list[dict[str, Any]]:
        """An update of each control that shows a choice, valid or not."""
        fields = choice.fields
        preset = preset_of(fields) if is_offered(fields) else "layer_swap"
        offer = _Offer.of(preset)
        values: dict[str, Any] = {"task": list(choice.task), "language": list(choice.language), "preset": preset}
        for name, default in self._defaults(offer).items():
            values[name] = _number(fields.get(name), default)

        # Only controls that have an effect can be seen.
        offered = {"task", "language", "preset", *offer.fields}
        if not self._workspace.changes_outside:
            offered.discard("outside")
        if preset == "layer_swap" and not self.averages([values[name] for name in ZONES[2:]]):
            offered.difference_update(WEIGHTS)

        names = list(self._workspace.experts)
        choices = {"task": {"choices": names}, "language": {"choices": [*names, BASE]}}
        updates = []
        for name in self.components:
            updates.append(gr.update(value=values[name], visible=name in offered, **choices.get(name, {})))
        return updates

    def _defaults(self, offer: _Offer) -> dict[str, Any]:
        """The initial value of each field."""
        layers = self._workspace.num_layers
        try:
            zones = dict(zip(ZONES, Composition(method="layer_swap").zones(layers), strict=True))
        except ValueError:  # too few layers for the paper's zones, which scale to none
            zones = dict.fromkeys(ZONES, 0) | {"bottom": min(1, layers)}

        own = {parameter.name: parameter for parameter in find_method(offer.method).parameters}
        defaults: dict[str, Any] = {**zones, "task_weight": 1.0, "language_weight": 1.0}
        for name, parameter in PARAMETERS.items():
            parameter = own.get(name, parameter)
            defaults[name] = _DENSITY if parameter.required else parameter.default
        return {**defaults, "outside": "average", "weights": "equal"}


def unpacked(painted: Mapping[str, str]) -> dict[tuple[int, Kind], str]:
    """The page's {"3.mlp": owner} as {(layer, kind): owner}."""
    owners: dict[tuple[int, Kind], str] = {}
    for place, owner in painted.items():
        layer, _, name = place.partition(".")
        for kind in get_args(Kind):
            if kind == name:
                owners[int(layer), kind] = owner
    return owners


def packed(painted: Mapping[tuple[int, Kind], str]) -> dict[str, str]:
    """The inverse of `unpacked`."""
    return {f"{layer}.{kind}": owner for (layer, kind), owner in painted.items()}


def _control(parameter: Parameter) -> Any:
    """The component for a parameter of a method, by its type and limits."""
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


def _number(value: Any, default: Any) -> Any:
    """A field's value with the type of its default, because values from an address are text."""
    if value is None:
        return default
    if isinstance(value, type(default)):
        return value
    try:
        if isinstance(default, bool):
            return str(value).lower() == "true"
        return type(default)(value)
    except ValueError:
        return default
