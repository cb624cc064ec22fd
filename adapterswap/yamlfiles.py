"""Read a YAML recipe into a pydantic model, and report every mistake in it at once.

Safe YAML only (no object construction), duplicate keys refused, unknown keys refused with the nearest known one. Knows
nothing of what recipes mean: the models say that.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from adapterswap.errors import AdapterswapError, Problem

__all__ = ["StrictModel", "apply_overrides", "load_yaml", "read_recipe", "validate"]

_Model = TypeVar("_Model", bound=BaseModel)


class StrictModel(BaseModel):
    """A piece of a recipe: unknown keys are errors, and a value once read is not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML says that keys are unique; PyYAML keeps the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *shared` may be overridden, that is its point
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        AdapterswapError: the file cannot be read, is not UTF-8, not YAML, holds a key twice, or is not a mapping.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise AdapterswapError(f"{path} does not exist", "Give the path of a recipe (YAML)") from None
    except OSError as error:
        raise AdapterswapError(f"{path} cannot be read: {error.strerror}", "Give the path of a recipe (YAML)") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise AdapterswapError(f"{path} is not valid YAML: {reason}", "Correct the file there") from None
    if not isinstance(content, dict):
        raise AdapterswapError(
            f"{path} holds {type(content).__name__}, not keys with values", "Write `key: value` lines"
        )
    return content


def apply_overrides(content: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`content` with each `key=value` of `overrides` put in its place; `a.b.0.c` reaches into mappings and lists.

    Values are read as YAML (`3e-4`, `true`, `[a, b]`). The input is left as it was.

    Raises:
        AdapterswapError: an override without `=`, or whose path leads through a plain value or off a list.
    """
    import copy

    content = copy.deepcopy(content)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise AdapterswapError(f"--set {override!r} is not key=value", "Write for instance --set training.seed=1")
        try:
            value = yaml.load(text, Loader=_UniqueKeyLoader)
        except yaml.YAMLError:
            value = text
        if isinstance(value, str):
            value = _number(value)
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


def _number(text: str) -> Any:
    """YAML 1.1 reads `3e-4` as text; everyone who types it means the number."""
    try:
        return float(text) if "e" in text.lower() else text
    except ValueError:
        return text


def _item(place: Any, step: str, override: str) -> Any:
    if not isinstance(place, list) or not step.isdigit() or int(step) >= len(place):
        raise AdapterswapError(
            f"--set {override!r}: {step!r} leads nowhere", "Name keys of the recipe, and positions of lists from 0"
        )
    return place[int(step)]


def read_recipe(path: str | Path, model: type[_Model], overrides: Iterable[str] = ()) -> _Model:
    """Read the YAML file at `path`, apply `overrides`, and check it against `model`.

    Raises:
        AdapterswapError: with every mistake: its key, its value and what is allowed there.
    """
    return validate(apply_overrides(load_yaml(path), overrides), model, where=str(path))


def validate(content: dict[str, Any], model: type[_Model], *, where: str) -> _Model:
    """`content` as a `model`, or an `AdapterswapError` that lists every mistake; `where` names the source."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [_explain(details, content, model, where) for details in error.errors(include_url=False)]
    raise AdapterswapError(problems)


def _explain(details: Any, content: Any, model: type[BaseModel], where: str) -> Problem:
    """One pydantic error as key, value and allowed values."""
    location, kind = details["loc"], details["type"]
    key = ".".join(str(part) for part in location) or "the recipe"
    if kind == "extra_forbidden":
        known = sorted(_known_keys(model, location))
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        mend = f"Did you mean {near[0]!r}" if near else (f"Known keys: {', '.join(known)}" if known else "Remove it")
        return Problem(f"{where}: {key} is not a known key", mend)
    if kind == "missing":
        return Problem(f"{where}: {key} is missing", f"Add `{location[-1]}:`")
    message = details["msg"].removeprefix("Value error, ")
    if kind == "value_error" and not location:  # a rule about several keys names them itself
        return Problem(f"{where}: {message}", "Correct it")
    return Problem(f"{where}: {key} is {_short(details['input'])}: {message[:1].lower()}{message[1:]}", "Correct it")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterable[str]:
    """The keys allowed beside the unknown one at `location`, as far as the models' fields tell."""
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
    if isinstance(current, type) and issubclass(current, BaseModel):
        return [field.alias or name for name, field in current.model_fields.items()]
    return []
