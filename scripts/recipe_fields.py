"""Write docs/fields.md from the declared fields of recipes."""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pymdownx.slugs import slugify

from adapterswap.core.planning.composition import Composition
from adapterswap.engines.serving.names import Manifest
from adapterswap.experiments.sweeps.recipe import SweepRecipe
from adapterswap.experiments.training.recipe import TrainRecipe
from adapterswap.kit.files.declared import Declared, types_of
from adapterswap.kit.files.readers import Field

PAGE = Path(__file__).parent.parent / "docs" / "fields.md"

RECIPES: dict[type[Declared], str] = {
    Composition: "Compositions: `adapterswap compose RECIPE`",
    TrainRecipe: "Training: `adapterswap train RECIPE`",
    SweepRecipe: "Sweeps: `adapterswap sweep RECIPE`",
    Manifest: "Serving: `experts.yaml` in the folder of `adapterswap serve --experts`",
}

INTRODUCTION = """# Recipe fields

Every key that a recipe may have. Written by `python scripts/recipe_fields.py` from the models that recipes are read
into. [Recipes](recipes.md) shows them at work, and `adapterswap recipes validate FILE` checks a file.
"""


def page() -> str:
    """The page: each kind of recipe, and below it the models that its fields hold."""
    parts = [INTRODUCTION]
    shown: dict[type[Declared], set[tuple[str, str]]] = {}
    for model, title in RECIPES.items():
        parts.append(f"## {title}\n")
        parts += _sections(model, shown)
    return "\n".join(parts)


def _sections(model: type[Declared], shown: dict[type[Declared], set[tuple[str, str]]]) -> list[str]:
    """A table of the model's fields, then those of the models that it holds and that no table shows yet.

    Three fields or more that another table explains in the same words are named instead.
    """
    texts = {name: _description(name, field) for name, field in model.model_fields.items()}
    same = {other: [name for name in texts if (name, texts[name]) in explained] for other, explained in shown.items()}
    same = {other: names for other, names in same.items() if len(names) > 2}
    named = {name for names in same.values() for name in names}
    shown[model] = set(texts.items())
    lines = [_summary(model), ""]
    for other, names in same.items():
        lines += [f"As in {_type(other)}: {', '.join(f'`{name}`' for name in names)}.", ""]
    lines += ["| field | values | default | |", "|---|---|---|---|"]
    inner: list[type[Declared]] = []
    for name, kind in types_of(model).items():
        inner += [held for held in _models(kind) if held not in shown and held not in inner]
        if name not in named:
            field = model.model_fields[name]
            cells = (f"`{name}`", _values(kind, field), _default(field), _cell(texts[name]))
            lines.append(f"| {' | '.join(cells)} |")
    parts = ["\n".join(lines) + "\n"]
    for held in inner:
        if held not in shown:
            parts += [f"### {held.__name__}\n", *_sections(held, shown)]
    return parts


def _description(name: str, field: Field) -> str:
    """What a field means. A sweep's families have the fields of a composition, each with several values."""
    return field.description or getattr(Composition.model_fields.get(name), "description", None) or ""


def _summary(model: type[Declared]) -> str:
    """The first paragraph of the model's docstring."""
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _models(annotation: Any) -> list[type[Declared]]:
    """The models that an annotation names, also inside containers."""
    if isinstance(annotation, type) and issubclass(annotation, Declared):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _values(kind: Any, field: Field) -> str:
    """The values that the field accepts, with bounds."""
    text = _type(kind)
    for name, sign in {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}.items():
        value = getattr(field, name)
        if value is not None:
            text += f", {sign} {_number(value)}"
    return text


def _type(annotation: Any) -> str:
    """A type in words: `text`, `number`, `a` or `b`, a list or a mapping of these, or the section of a model."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if isinstance(annotation, type) and issubclass(annotation, Declared):
        title = RECIPES.get(annotation, annotation.__name__)
        return f"[{annotation.__name__}](#{slugify(case='lower')(title.replace('`', ''), '-')})"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(kind) for kind in inner if kind is not NoneType))
    if origin in (list, tuple, set, frozenset) or (isinstance(origin, type) and origin.__name__ == "Sequence"):
        return f"list of {_type(inner[0])}" if inner else "list"
    if origin is dict or (isinstance(origin, type) and origin.__name__ == "Mapping"):
        return f"mapping to {_type(inner[1])}"
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: Field) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is None or isinstance(value, Declared) or value in ((), {}, [], ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{_number(value)}`" if isinstance(value, float) else f"`{value}`"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"


def _cell(text: str) -> str:
    """Text that stays in one cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
