"""Read a YAML recipe into a pydantic model, and report every mistake in it at once.

Safe YAML only (no object construction), duplicate keys refused, unknown keys refused with the nearest known one. A
recipe may come from a stranger: its size, also after aliases are followed, is bounded. Knows nothing of what recipes
mean: the models say that.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from adapterswap.errors import AdapterswapError, Problem, Problems
from adapterswap.files.smallfiles import exists, read_small, shown

__all__ = ["StrictModel", "apply_overrides", "load_yaml", "read_recipe", "validate"]

_Model = TypeVar("_Model", bound=BaseModel)


class StrictModel(BaseModel):
    """A piece of a recipe: unknown keys are errors, and a value once read is not changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)


_MAX_BYTES = 2**18  # of a recipe; PyYAML takes about ten seconds for a megabyte
_MAX_VALUES = 20_000  # keys, values and items of a recipe once its aliases are followed
_MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """YAML says that keys are unique; PyYAML keeps the last one in silence."""

    merged = 0

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *shared` may be overridden, that is its point
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {shown(key)} stands twice", node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Carry out `<<`, which copies; a few lines of YAML can ask for billions of copies."""
        merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        if len(merges) > 1 or any(isinstance(value, yaml.SequenceNode) for value in merges):
            raise yaml.constructor.ConstructorError(None, None, "`<<` takes one mapping", node.start_mark)
        super().flatten_mapping(node)
        self.merged += len(node.value) if merges else 0
        if self.merged > _MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, "`<<` copies too much", node.start_mark)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        AdapterswapError: the file cannot be read, is no regular file, larger than 256 KiB, not UTF-8, not YAML, or no
            mapping; it holds a key twice, a control character, or more than 20,000 values once aliases are followed.
    """
    path = Path(path)
    if not exists(path):
        raise AdapterswapError(f"{path} does not exist", "Give the path of a recipe (YAML)")
    raw = read_small(path, "Give the path of a recipe (YAML)", limit=_MAX_BYTES)
    try:
        content = _parse(raw.decode("utf-8"))
    except ValueError as error:
        raise AdapterswapError(f"{path} is not valid YAML: {error}", "Correct the file there") from None
    if not isinstance(content, dict):
        raise AdapterswapError(
            f"{path} holds {type(content).__name__}, not keys with values", "Write `key: value` lines"
        )
    return content


def _parse(text: str) -> Any:
    """The value in a YAML text; ValueError with the reason where there is none that is sound."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split()).replace('in "<unicode string>", ', "at ")) from None
    _check_values(content)
    return content


def _check_values(content: Any) -> None:
    """Aliases share a value in memory, but whoever walks through the content meets it anew each time."""
    stack = [(content, 1)]
    for _ in range(_MAX_VALUES):
        if not stack:
            return
        value, depth = stack.pop()
        inner: list[Any] = []
        if isinstance(value, dict):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            inner = list(value)
        elif isinstance(value, str) and (odd := next((c for c in value if _is_control(c)), None)):
            raise ValueError(f"{shown(value)} holds the control character {odd!r}")
        elif isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{shown(value)} is too large a number")
        if inner and depth == _MAX_DEPTH:
            raise ValueError(f"it nests more than {_MAX_DEPTH} deep")
        stack += [(item, depth + 1) for item in inner]
    raise ValueError(f"it holds more than {_MAX_VALUES} values")


def _is_control(character: str) -> bool:
    """What can steer a terminal or is no character at all; line ends and tabs are text."""
    return unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t\r"


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
            value = _parse(text)
        except ValueError:
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
    if not isinstance(place, list) or not step.isdecimal() or int(step) >= len(place):
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
    problems = Problems()
    try:
        return model.model_validate(content)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            problem = _explain(details, content, model, where)
            problems.add(problem.what, problem.mend)
    raise problems.as_error()


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
    return Problem(f"{where}: {key} is {shown(details['input'])}: {message[:1].lower()}{message[1:]}", "Correct it")


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
