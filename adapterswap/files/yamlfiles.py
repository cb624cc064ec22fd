"""Read a YAML recipe into a pydantic model, and report every mistake in it at once.

Recipes may extend others (`files.extending`). An unknown key is refused with the most similar known one, and each
mistake is reported with the file that it is in. Knows nothing of what recipes mean: the models do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from adapterswap.errors import AdapterswapError, ArgumentError, FieldError, Problem, Problems, did_you_mean
from adapterswap.files.extending import Layer, Location, load_layers, merge_layers, writer
from adapterswap.files.smallfiles import exists, shown
from adapterswap.files.yamltext import parse_yaml

__all__ = [
    "MEMBER",
    "FieldMistake",
    "StrictModel",
    "apply_overrides",
    "list_values",
    "read_content",
    "read_recipe",
    "validate",
]

MEMBER = "\0"
"""What the tag of a union's member begins with, which pydantic names in a mistake's place, and no recipe has."""

_AnyModel = TypeVar("_AnyModel", bound=BaseModel)


if TYPE_CHECKING:
    _Model = BaseModel
else:

    class _OurErrors(type(BaseModel)):
        """Makes `Model(...)` raise a `FieldError`.

        Only calls from Python come here. When pydantic creates a model inside another, its own errors remain, so the
        outer model can report all mistakes at once.
        """

        def __call__(cls, *args, **fields):
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                raise _explained(error, fields, cls, cls.__name__) from None

    class _Model(BaseModel, metaclass=_OurErrors):
        """A model that raises `FieldError`s."""


class FieldMistake(ValueError):
    """Raised by a validator of several fields, to name the one at fault and what to do about it."""

    def __init__(self, message: str, parameter: str | None = None, *, remedy: str = "Correct it") -> None:
        super().__init__(message)
        self.parameter = parameter
        self.remedy = remedy


class StrictModel(_Model):
    """A part of a recipe. Unknown keys are errors, and values cannot be changed.

    Raises:
        FieldError: lists every mistake in the fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    _files: tuple[Path, ...] = PrivateAttr(default=())

    @property
    def recipe_files(self) -> tuple[Path, ...]:
        """The files that this was read from: the recipe and what it extends. Empty if it was created in Python."""
        return self._files

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys that a recipe may have here."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """See pydantic; raises a `FieldError`."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _explained(error, obj, cls, cls.__name__) from None


class FiniteModel(StrictModel):
    """A model whose numbers are finite: `.inf` is valid YAML, but not a valid rate, rank or norm."""

    model_config = ConfigDict(allow_inf_nan=False)


def list_values(value: Any) -> Any:
    """A mapping's values that are not null, as a list; for list fields that a recipe may write as a mapping.

    The keys let fragments add an item, change one or remove one (with null); a plain list is replaced as a whole.
    """
    return [item for item in value.values() if item is not None] if isinstance(value, dict) else value


def apply_overrides(content: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return `content` with each `key=value` of `overrides` applied; `a.b.0.c` reaches into mappings and lists.

    Values are read as YAML (`3e-4`, `true`, `[a, b]`). `content` itself is not changed.

    Raises:
        ArgumentError: an override has no `=`, or its path leads through a plain value or past the end of a list.
    """
    import copy

    content = copy.deepcopy(content)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ArgumentError(
                f"`overrides`: {override!r} is not key=value",
                "Write it like training.seed=1",
                parameter="overrides",
            )
        try:
            value = parse_yaml(text)
        except ValueError:
            value = text
        place: Any = content
        *parents, last = path.split(".")
        for step in parents:
            place = place.setdefault(step, {}) if isinstance(place, dict) else _item(place, step, override)
        if isinstance(place, dict):
            place[last] = value
        else:
            _item(place, last, override)
            place[int(last)] = value
    return content


def _item(place: Any, step: str, override: str) -> Any:
    if not isinstance(place, list) or not step.isdecimal() or int(step) >= len(place):
        raise ArgumentError(
            f"`overrides`: {override!r}: there is nothing at {step!r}",
            "Use keys of the recipe, and list positions counted from 0",
            parameter="overrides",
        )
    return place[int(step)]


def read_recipe(
    path: str | Path, model: type[_AnyModel], overrides: Iterable[str] = (), *, paths: Iterable[str] = ()
) -> _AnyModel:
    """Read the YAML file at `path` and what it extends, apply `overrides`, and check the result against `model`.

    Args:
        path: the recipe.
        model: the model that checks it.
        overrides: see `apply_overrides`.
        paths: keys of local paths, such as `datasets.*.path`; see `read_content`.

    Raises:
        NotFoundError, ArgumentError: see `read_content`.
        FieldError: see `load_layers`; otherwise lists every mistake with its file, key, value and what is allowed.
    """
    content, layers = read_content(path, overrides, paths=paths)
    recipe = validate(content, model, where=str(path), layers=layers)
    if isinstance(recipe, StrictModel):
        recipe._files = tuple(dict.fromkeys(layer.path for layer in layers))
    return recipe


def read_content(
    path: str | Path, overrides: Iterable[str] = (), *, paths: Iterable[str] = ()
) -> tuple[dict[str, Any], list[Layer]]:
    """Read a recipe as plain data; also returns the files that it consists of.

    Args:
        path: the recipe.
        overrides: see `apply_overrides`.
        paths: keys whose values may be local paths; `*` matches any one key or position. If a fragment sets such a path
            and it exists relative to the fragment, it is made relative to the recipe's folder.

    Raises:
        NotFoundError, FieldError: see `load_layers`.
        ArgumentError: see `apply_overrides`.
    """
    layers, overrides = load_layers(path), list(overrides)
    content: Any = merge_layers(layers)
    for pattern in paths:
        content = _relocated(content, pattern.split("."), (), layers)
    return apply_overrides(content, overrides), [*layers, Layer(Path(path), _overridden(overrides))]


def _relocated(value: Any, steps: Sequence[str], location: tuple[int | str, ...], layers: Sequence[Layer]) -> Any:
    """`value` with the local paths at `steps` below it made relative to the recipe's folder."""
    if steps:
        items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        moved = {
            key: _relocated(item, steps[1:], (*location, key), layers) if steps[0] in ("*", key) else item
            for key, item in items
        }
        return moved if isinstance(value, dict) else [*moved.values()] if isinstance(value, list) else value
    recipe, source = layers[-1].path, writer(layers, location)
    if not isinstance(value, str) or source in (None, recipe) or not exists(source.parent / value):
        return value
    return os.path.relpath(source.parent / value, recipe.parent)


def _overridden(overrides: Iterable[str]) -> dict[str, Any]:
    """The keys that `overrides` name, as a file would nest them."""
    nested: dict[Any, Any] = {}
    for override in overrides:
        *parents, last = (int(step) if step.isdecimal() else step for step in override.partition("=")[0].split("."))
        place = nested
        for step in parents:
            place = place.setdefault(step, {})
            if not isinstance(place, dict):  # replaced as a whole by an earlier override
                break
        else:
            place[last] = None
    return nested


def validate(content: dict[str, Any], model: type[_AnyModel], *, where: str, layers: Sequence[Layer] = ()) -> _AnyModel:
    """`content` as a `model`, or a `FieldError` that lists every mistake.

    `where` names the source of a mistake, unless one of `layers` made it: then that file is named.
    """
    try:
        return model.__pydantic_validator__.validate_python(content)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _explained(error, content, model, where, layers) from None


def _explained(
    error: ValidationError, content: Any, model: type[BaseModel], where: str, layers: Sequence[Layer] = ()
) -> AdapterswapError:
    problems = Problems(FieldError)
    for details in error.errors(include_url=False):
        file_location = _as_written(details["loc"], content)
        # A missing key is a mistake of the file that wrote the mapping around it.
        source = writer(layers, file_location[:-1] if details["type"] == "missing" else file_location)
        problem = _explain(details, file_location, model, str(source or where))
        problems.add(problem.message, problem.remedy, parameter=problem.parameter)
    return problems.as_error(FieldError)


def _as_written(location: Location, content: Any) -> tuple[int | str, ...]:
    """`location` as written in the recipe, with the keys of mappings that `list_values` turned into lists."""
    steps: list[int | str] = []
    for step in location:
        if isinstance(step, str) and (step.startswith(MEMBER) or step == "[key]"):
            continue
        if isinstance(content, dict) and isinstance(step, int):
            step = [key for key, value in content.items() if value is not None][step]
        if step == "parameters" and isinstance(content, Mapping) and step not in content:
            continue  # the parameters of a method are next to it (`planning.parameters`)
        steps.append(step)
        try:
            content = content[step]
        except (KeyError, IndexError, TypeError):  # a missing key, or a step of pydantic's own
            content = None
    return tuple(steps)


def _explain(details: Any, file_location: Location, model: type[BaseModel], where: str) -> Problem:
    """Turn one pydantic error into a problem that names the key, its value and what is allowed."""
    location, kind = details["loc"], details["type"]
    path = ".".join(str(part) for part in file_location)
    parameter, key = path or None, path or "the recipe"
    if kind == "extra_forbidden":
        known_keys = details.get("ctx", {}).get("known") or sorted(_known_keys(model, location))
        listed = f"Known keys: {', '.join(known_keys)}" if known_keys else "Remove it"
        remedy = did_you_mean(str(location[-1]), known_keys, listed)
        return Problem(f"{where}: {key} is not a known key", remedy, parameter)
    if kind == "missing":
        return Problem(f"{where}: {key} is missing", f"Add `{location[-1]}:`", parameter)
    message, remedy = details["msg"].removeprefix("Value error, "), "Correct it"
    if kind == "value_error" and isinstance(mistake := details["ctx"]["error"], FieldMistake):
        parameter = ".".join(filter(None, (path, mistake.parameter))) or None
        remedy = mistake.remedy
    if kind == "value_error" and not location:  # a rule about several keys names them itself
        return Problem(f"{where}: {message}", remedy, parameter)
    message = f"{message[:1].lower()}{message[1:]}"
    return Problem(f"{where}: {key} is {shown(details['input'])}: {message}", remedy, parameter)


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterable[str]:
    """The keys allowed in place of the unknown one at `location`, as far as the models' fields show."""
    import typing

    current: Any = model
    for step in location[:-1]:
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            return []
        if isinstance(step, int) or step not in current.model_fields:
            continue
        current = current.model_fields[step].annotation
        stack = [current]
        while stack:  # look through list[...], unions and dict[...] for a model
            candidate = stack.pop()
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                current = candidate
                break
            stack.extend(typing.get_args(candidate))
    if isinstance(current, type) and issubclass(current, StrictModel):
        return current.known_keys()
    if isinstance(current, type) and issubclass(current, BaseModel):
        return [field.alias or name for name, field in current.model_fields.items()]
    return []
