"""The content of recipes, checked against pydantic models.

An unknown key is refused with the most similar known one, and each mistake is reported with the file that it is in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from adapterswap.kit.errors import AdapterswapError, FieldError, Problem, Problems, did_you_mean
from adapterswap.kit.files.plain import Plain
from adapterswap.kit.files.text import shown
from adapterswap.kit.files.yaml import MEMBER, FieldMistake, Location, RecipeFile, check_kind

_AnyModel = TypeVar("_AnyModel", bound=BaseModel | Plain)


class Numbers:
    """Marks a model, or a type in `Annotated`, whose numbers are not read from true and false: pydantic takes these for
    1 and 0."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return _without_booleans(handler(source))


def _without_booleans(schema: Any) -> Any:
    """The schema with a check before each number. pydantic's strict mode, the alternative, also refuses 5.0 and "5"."""
    if isinstance(schema, list):
        return [_without_booleans(item) for item in schema]
    if not isinstance(schema, dict) or schema.get("function") in _NO_BOOLEANS.values():
        return schema
    if isinstance(kind := schema.get("type"), str) and kind in _NO_BOOLEANS:
        return {"type": "function-before", "function": _NO_BOOLEANS[kind], "schema": schema}
    return {key: value if key in ("default", "metadata") else _without_booleans(value) for key, value in schema.items()}


def _not_boolean(value: Any, *, error: Literal["int_type", "float_type"]) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError(error)
    return value


_NO_BOOLEANS = {
    "int": {"type": "no-info", "function": partial(_not_boolean, error="int_type")},
    "float": {"type": "no-info", "function": partial(_not_boolean, error="float_type")},
}


_OVERRIDDEN = "overridden"  # of a validator's context: what `overrides` set, as a file would nest it


class StrictModel(Numbers, BaseModel):
    """A part of a recipe. Unknown keys are errors, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    _files: tuple[Path, ...] = PrivateAttr(default=())

    def __init__(self, /, **fields: Any) -> None:
        """Raise a `FieldError` with all mistakes."""
        try:
            self.__pydantic_validator__.validate_python(fields, self_instance=self)
        except ValidationError as error:
            raise _explained(error, fields, type(self), type(self).__name__, called=True) from None

    # pydantic does not call it for a model inside another, so that the outer one reports all mistakes at once
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def recipe_files(self) -> tuple[Path, ...]:
        """The files that this was read from: the recipe and what it extends. Empty if it was created in Python."""
        return self._files

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys that a recipe may have here."""
        return [name for names in map(_names_of, cls.model_fields.items()) for name in names]

    @staticmethod
    def from_files(value: Mapping[str, Any], location: Sequence[str], info: ValidationInfo) -> dict[str, Any]:
        """The part of a mapping that the files of a recipe set, and not its `overrides`; for validators.

        Args:
            value: the mapping.
            location: the keys that lead to it.
            info: of the validator. If Python made the model, nothing is from a file.
        """
        nested = (info.context or {}).get(_OVERRIDDEN)
        for step in location:
            nested = nested.get(step, {}) if isinstance(nested, dict) else None
        # None: not from a file, or replaced as a whole.
        return {} if nested is None else {key: item for key, item in value.items() if key not in nested}

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """See pydantic; raises a `FieldError`."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _explained(error, obj, cls, cls.__name__, called=True) from None


def _names_of(item: tuple[str, FieldInfo]) -> list[str]:
    """The keys under which a field can be read: its name, and its aliases."""
    name, field = item
    aliases = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else ()
    return list(dict.fromkeys([field.alias or name, *map(str, aliases)]))


def read_recipe(
    path: str | Path,
    model: type[_AnyModel],
    overrides: Iterable[str] = (),
    *,
    paths: Iterable[str] = (),
    kind: str | None = None,
) -> _AnyModel:
    """Read the YAML file at `path` and what it extends, apply `overrides`, and check the result against `model`.

    Args:
        path: the recipe.
        model: the model that checks it.
        overrides: see `apply_overrides`.
        paths: keys of local paths, such as `datasets.*.path`; see `RecipeFile.read`.
        kind: one of `MARKS`; a recipe of another kind is refused as such.
    """
    file = RecipeFile.read(path, overrides, paths=paths)
    if kind is not None:
        check_kind(file.content, kind, path)
    recipe = validate(file.content, model, where=str(path), file=file)
    if isinstance(recipe, StrictModel | Plain):
        recipe._files = file.files
    return recipe


def validate(content: Any, model: type[_AnyModel], *, where: str = "", file: RecipeFile | None = None) -> _AnyModel:
    """`content` as a `model`, or a `FieldError` that lists every mistake.

    `where` names the text or the file with the mistake, unless a part of `file` made it: then that file is named.
    Without it, `content` is arguments, so messages name parameters, which the command line prints as flags.
    """
    if issubclass(model, Plain):
        read = model.quickly(content)
        return read or model.of_model(validate(content, model.model(), where=where, file=file))
    assert issubclass(model, BaseModel)
    try:
        # The recipe's folder, for what a field lists on disk; and what `StrictModel.from_files` needs.
        context = {"folder": Path(where).parent, _OVERRIDDEN: file.layers[-1].content if file else None}
        return model.__pydantic_validator__.validate_python(content, context=context)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _explained(error, content, model, where, file) from None


def _explained(
    error: ValidationError,
    content: Any,
    model: type[BaseModel],
    where: str,
    file: RecipeFile | None = None,
    *,
    called: bool = False,
) -> AdapterswapError:
    """The error; `called` if Python made the model, so that messages name parameters and not keys."""
    problems = Problems(FieldError)
    for details in error.errors(include_url=False):
        file_location = _as_written(details["loc"], content)
        # A missing key is a mistake of the file that wrote the mapping around it.
        setting = file_location[:-1] if details["type"] == "missing" else file_location
        source = file.source_of(setting) if file else None
        problem = _explain(details, file_location, model)
        place, message = str(source or where), problem.message
        if file and file.is_overridden(setting):
            place = "`overrides`"  # --set on the command line
        if place:
            message = f"{place}: {message if called else _PARAMETER.sub(_as_key, message)}"
        problems.add(message, problem.remedy, parameter=problem.parameter)
    return problems.as_error(FieldError)


def _as_written(location: Location, content: Any) -> tuple[int | str, ...]:
    """`location` as written in the recipe, with the keys of mappings that validators turned into lists."""
    steps: list[int | str] = []
    for step in location:
        if isinstance(step, str) and (step.startswith(MEMBER) or step == "[key]"):
            continue
        if isinstance(content, dict) and isinstance(step, int) and step not in content:  # else YAML's key is a number
            step = [key for key, value in content.items() if value is not None][step]
        if step == "parameters" and isinstance(content, Mapping) and step not in content:
            continue  # the parameters of a method are next to it (`planning.parameters`)
        steps.append(step)
        try:
            content = content[step]
        except (KeyError, IndexError, TypeError):  # a missing key, or a step of pydantic's own
            content = None
    return tuple(steps)


_PARAMETER = re.compile(r"`(?P<name>[a-z][\w.]*)(=(?P<value>[^`]*))?`")


def _as_key(match: re.Match[str]) -> str:
    """A parameter in a message about a file: `method=ties` is written method: ties there; `x=True` is advice."""
    if match["value"] is None:
        return match["name"]
    return match[0] if match["value"] == "True" else f"{match['name']}: {match['value']}"


# The rules behind pydantic's kinds of mistakes; the braces are replaced by the limits that it names.
_RULES = {
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "literal_error": "{expected}",
    "finite_number": "a finite number",
    "string_type": "text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), "a mapping"),
}


def _explain(details: Any, file_location: Location, model: type[BaseModel]) -> Problem:
    """Turn one pydantic error into a problem that names the key, its value and what is allowed."""
    location, kind = details["loc"], details["type"]
    path = ".".join(str(part) for part in file_location)
    parameter, key = path or None, f"`{path}`" if path else "the recipe"
    if kind == "extra_forbidden":
        known_keys = details.get("ctx", {}).get("known") or sorted(_known_keys(model, location))
        listed = f"Known keys: {', '.join(known_keys)}" if known_keys else "Remove it"
        remedy = did_you_mean(str(location[-1]), known_keys, listed)
        return Problem(f"{key} is not a known key", remedy, parameter)
    if kind == "missing":
        return Problem(f"{key} is missing", f"Add `{location[-1]}:`", parameter)
    message, remedy = details["msg"].removeprefix("Value error, "), ""
    if kind == "value_error" and isinstance(mistake := details["ctx"]["error"], FieldMistake):
        parameter = ".".join(filter(None, (path, mistake.parameter))) or None
        remedy = mistake.remedy
    if kind == "value_error" and not location:  # a rule about several keys names them itself
        return Problem(message, remedy, parameter)
    if kind == "foreign_parameter":
        return Problem(f"{key} {message}", remedy, parameter)
    value = f"{number:g}" if isinstance(number := details["input"], float) else shown(number)
    if kind in _RULES:
        quoted = "If it is text, quote it: YAML reads no, yes, on and off as false and true"
        remedy = quoted if isinstance(number, bool) else ""
        rule = _RULES[kind].format(**details.get("ctx", {}))
        return Problem(f"{key} is {value}, but must be {rule}", remedy, parameter)
    return Problem(f"{key} is {value}: {message[:1].lower()}{message[1:]}", remedy, parameter)


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
            if isinstance(candidate, type) and issubclass(candidate, Plain):
                candidate = candidate.model()
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                current = candidate
                break
            stack.extend(typing.get_args(candidate))
    if isinstance(current, type) and issubclass(current, StrictModel):
        return current.known_keys()
    if isinstance(current, type) and issubclass(current, BaseModel):
        return [name for names in map(_names_of, current.model_fields.items()) for name in names]
    return []
