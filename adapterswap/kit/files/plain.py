"""Objects with declared fields, for which pydantic is imported only if it has something to explain.

pydantic explains mistakes well, but importing it takes longer than composing. So a class here declares its fields once
and has two readers. The quick one takes content that is right as it stands. All else, be it wrong or only unusual, goes
to `model()`: a pydantic model of the same fields and validators, which has the last word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler, SerializationInfo

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REQUIRED: Any = object()
_VALIDATES = "_validates"  # the attribute of a validator that says which fields it is for, and when


@dataclass(frozen=True)
class Field:
    """A declared field; `kind` returns its type for pydantic, if that says more than the annotation."""

    default: Any
    description: str
    bounds: Mapping[str, float]
    alias: str | None
    kind: Callable[[], Any] | None
    validate_default: bool

    @property
    def is_required(self) -> bool:
        return self.default is _REQUIRED

    def check(self, value: Any) -> None:
        """Raise a `ValueError` if the value breaks a bound."""
        if value is None:
            return
        size = len(value) if "min_length" in self.bounds else value
        for name, bound in self.bounds.items():
            if not _WITHIN[name](size, bound):
                raise ValueError(name)


_WITHIN: dict[str, Callable[[Any, float], bool]] = {
    "ge": lambda value, bound: value >= bound,
    "gt": lambda value, bound: value > bound,
    "le": lambda value, bound: value <= bound,
    "min_length": lambda size, bound: size >= bound,
}


def field(
    default: Any = _REQUIRED,
    *,
    description: str = "",
    alias: str | None = None,
    kind: Callable[[], Any] | None = None,
    validate_default: bool = False,
    **bounds: float,
) -> Any:
    """Declare a field of a `Declared` class; `bounds` are pydantic's `ge`, `gt`, `le` and `min_length`."""
    return Field(default, description, bounds, alias, kind, validate_default)


def validates(*names: str, mode: Literal["before", "after"] = "before") -> Callable[[_Function], _Function]:
    """Mark a function of a class as the validator of these fields: it returns the value, or raises a `ValueError`."""

    def mark(function: _Function) -> _Function:
        setattr(function, _VALIDATES, (names, mode))
        return function

    return mark


class Declared:
    """An immutable object with declared fields. Its methods are named as pydantic's, and do the same."""

    model_fields: ClassVar[Mapping[str, Field]] = MappingProxyType({})
    _validators: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    _set: frozenset[str]
    _files: tuple[Path, ...] = ()

    def __init_subclass__(cls) -> None:
        own = cls.__dict__
        declared = {name: own.get(name, _REQUIRED) for name in own.get("__annotations__", {}) if name[0] != "_"}
        fields = {
            name: value if isinstance(value, Field) else field(value)
            for name, value in declared.items()
            if "ClassVar" not in str(own["__annotations__"][name])
        }
        cls.model_fields = {**cls.model_fields, **fields}
        cls._validators = {**cls._validators, **{name: f for name, f in own.items() if hasattr(f, _VALIDATES)}}
        for name in fields:
            if name in own:
                delattr(cls, name)

    def __init__(self, **fields: Any) -> None:
        self._become(fields)

    def _become(self, values: Mapping[str, Any]) -> None:
        """Take the values of the fields that are set, and the defaults of the others."""
        for name, declared in self.model_fields.items():
            if name in values or not declared.is_required:
                self.__dict__[name] = values[name] if name in values else copy(declared.default)
        self.__dict__.update(values, _set=frozenset(values))

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        made = object.__new__(cls)
        made._become(values)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__}.{name} cannot be changed: use `model_copy(update=…)`")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == other.__dict__[name] for name in self._compared)

    __hash__ = None  # type: ignore[assignment]

    @property
    def _compared(self) -> list[str]:
        return [name for name in self.__dict__ if name not in ("_set", "_files")]

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in self.__dict__.items() if name[0] != "_")
        return f"{type(self).__name__}({', '.join(fields)})"

    @property
    def model_fields_set(self) -> frozenset[str]:
        return self._set

    @property
    def recipe_files(self) -> tuple[Path, ...]:
        """The files that this was read from: the recipe and what it extends. Empty if it was created in Python."""
        return self._files

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy; the values of `update` are not checked."""
        made = copy(self)
        made.__dict__.update(update or {}, _set=self._set | (update or {}).keys())
        return made

    def model_dump(self, *, mode: str = "python", include: set[str] | None = None, **options: Any) -> dict[str, Any]:
        """The fields as plain data; see pydantic for `exclude_unset`, `exclude_defaults` and `exclude_none`."""
        content: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            if name[0] == "_" or not (include is None or name in include) or self._is_left_out(name, value, **options):
                continue
            content |= self._dumped(name, _data(value, mode, options), **options)
        return content

    def _is_left_out(
        self, name: str, value: Any, *, exclude_unset: bool = False, exclude_defaults: bool = False,
        exclude_none: bool = False, by_alias: bool = False,
    ) -> bool:  # fmt: skip
        declared = self.model_fields.get(name)
        is_default = exclude_defaults and declared is not None and value == declared.default
        return is_default or (exclude_unset and name not in self._set) or (exclude_none and value is None)

    def _dumped(self, name: str, value: Any, **options: Any) -> dict[str, Any]:
        """What stands for a field in the dump."""
        return {name: value}

    def model_dump_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def model_validate(cls, content: Any) -> Self:
        """Read content of any origin.

        Raises:
            ValidationError: pydantic's, with all mistakes.
        """
        return content if isinstance(content, cls) else cls.of_model(cls.model().model_validate(content))

    @classmethod
    def _hints(cls) -> dict[str, Any]:
        hints: dict[str, Any] = _hints_of(cls)  # type: ignore[arg-type]  # a class, which can be hashed
        return hints

    @classmethod
    def model(cls) -> type[BaseModel]:
        """The pydantic model of the same fields and validators."""
        model: type[BaseModel] = _model_of(cls)  # type: ignore[arg-type]
        return model

    @classmethod
    def model_base(cls) -> type[BaseModel]:
        """The class that the pydantic model extends."""
        from pydantic import BaseModel

        return BaseModel

    @classmethod
    def of_model(cls, read: BaseModel) -> Self:
        names = [*type(read).model_fields, *(read.model_extra or {})]
        made = cls._of({name: getattr(read, name) for name in names})
        made._set = frozenset(read.model_fields_set)
        return made

    @classmethod
    def prepared(cls, content: Any) -> Any:
        """The content before any field is read; raises a `ValueError` for mistakes of several fields."""
        return content

    def check(self) -> None:
        """Raise a `ValueError` if fields do not go together."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """As a field of a pydantic model: an object of this class, or what `model` reads."""
        from pydantic_core import core_schema

        def read(value: Any, inner: Callable[[Any], Any]) -> Any:
            return value if isinstance(value, cls) else cls.of_model(inner(value))

        def write(value: Any, info: SerializationInfo) -> Any:
            options = {name: getattr(info, name) for name in ("exclude_unset", "exclude_defaults", "exclude_none")}
            return value.model_dump(mode=info.mode, **options)

        serialization = core_schema.plain_serializer_function_ser_schema(write, info_arg=True)
        schema = handler.generate_schema(cls.model())
        return core_schema.no_info_wrap_validator_function(read, schema, serialization=serialization)


class Plain(Declared):
    """A part of a recipe, checked when it is made: by the quick reader, or else by pydantic."""

    def __init__(self, **fields: Any) -> None:
        read = self.quickly(fields)
        self.__dict__.update((read or self.of_model(self.model()(**fields))).__dict__)

    @classmethod
    def model_validate(cls, content: Any) -> Self:
        """Read content of any origin.

        Raises:
            FieldError: with all mistakes.
        """
        return cls.quickly(content) or super().model_validate(content)

    @classmethod
    def read(cls, content: Any, *, where: str = "") -> Self:
        """Like `model_validate`; messages name `where`, or parameters if `content` is arguments."""
        if (read := cls.quickly(content)) is not None:
            return read
        from adapterswap.kit.files.models import validate

        return cls.of_model(validate(content, cls.model(), where=where))

    @classmethod
    def quickly(cls, content: Any) -> Self | None:
        """The object, if the content is right as it stands; None if pydantic has to look at it."""
        if isinstance(content, cls):
            return content
        try:
            return cls._of_plain(cls.prepared(content))
        except Exception:  # whatever it is: pydantic meets it again, and reports it with all other mistakes
            return None

    @classmethod
    def aliases(cls) -> dict[str, str]:
        """Other keys of fields → the field."""
        return {declared.alias: name for name, declared in cls.model_fields.items() if declared.alias}

    @classmethod
    def _of_plain(cls, content: Mapping[str, Any]) -> Self:
        names = {name: name for name in cls.model_fields} | cls.aliases()
        values: dict[str, Any] = {}
        for key, value in content.items():
            name = names[key]
            if name in values:
                raise ValueError(key)
            values[name] = cls._value(name, value)
        made = cls._of(values)
        made._complete()
        made.check()
        return made

    def _complete(self) -> None:
        """Fill in what depends on several fields."""

    @classmethod
    def _value(cls, name: str, value: Any) -> Any:
        validators: list[Any] = [(f, getattr(f, _VALIDATES)) for f in cls._validators.values()]
        for function, (names, mode) in validators:
            value = function(cls, value) if name in names and mode == "before" else value
        value = quick(cls._hints()[name], value)
        cls.model_fields[name].check(value)
        for function, (names, mode) in validators:
            value = function(cls, value) if name in names and mode == "after" else value
        return value

    @classmethod
    def model_base(cls) -> type[BaseModel]:
        from adapterswap.kit.files.models import StrictModel

        return StrictModel


_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,14}")
_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")


def quick(kind: Any, value: Any) -> Any:
    """`value` as this type, if there is nothing to explain about it; else a `ValueError`."""
    if kind is Any or (type(value) is kind and kind in (str, int, bool)):
        return value
    if kind is int and type(value) is str and _WHOLE.fullmatch(value):
        return int(value)
    if kind is float and (type(value) in (int, float) or (type(value) is str and _NUMBER.fullmatch(value))):
        if math.isfinite(number := float(value)):
            return number
    elif isinstance(kind, type) and issubclass(kind, Plain):
        if (read := kind.quickly(value)) is not None:
            return read
    elif origin := get_origin(kind):
        return _quick_generic(origin, get_args(kind), value)
    raise ValueError(kind)


def _quick_generic(origin: Any, parts: tuple[Any, ...], value: Any) -> Any:
    if origin is Literal and value in parts and type(value) is str:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        of_mappings = isinstance(value, Mapping)
        return quick(next(part for part in parts if (get_origin(part) is dict) == of_mappings), value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(quick(parts[0], item) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {quick(parts[0], key): quick(parts[1], item) for key, item in value.items()}
    raise ValueError(origin)


def _data(value: Any, mode: str, options: Mapping[str, Any]) -> Any:
    if isinstance(value, Declared):
        return value.model_dump(mode=mode, **options)
    if isinstance(value, Mapping):
        return {key: _data(item, mode, options) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_data(item, mode, options) for item in value]
        return items if mode == "json" or isinstance(value, list) else tuple(items)
    return value


@cache
def _hints_of(cls: type[Declared]) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _model_of(cls: type[Declared]) -> type[BaseModel]:
    from pydantic import AliasChoices, Field, create_model, field_validator, model_validator

    fields: dict[str, Any] = {}
    for name, declared in cls.model_fields.items():
        options: dict[str, Any] = {"description": declared.description or None, **declared.bounds}
        options |= {"validation_alias": AliasChoices(name, declared.alias)} if declared.alias else {}
        options |= {} if declared.is_required else {"default": declared.default}
        options |= {"validate_default": True} if declared.validate_default else {}
        fields[name] = (declared.kind() if declared.kind else cls._hints()[name], Field(**options))
    validators: dict[str, Any] = {}
    for name, function in cls._validators.items():
        names, mode = getattr(function, _VALIDATES)
        mark: Any = field_validator(*names, mode=mode)
        validators[name] = mark(classmethod(function))

    def prepared(model: Any, content: Any) -> Any:
        return cls.prepared(content)

    def checked(read: Any) -> Any:
        cls.of_model(read).check()
        return read

    validators |= {
        "prepared": model_validator(mode="before")(classmethod(prepared)),  # type: ignore[arg-type]
        "checked": model_validator(mode="after")(checked),
    }
    options = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__validators__": validators}
    made: type[BaseModel] = create_model(cls.__name__, __base__=cls.model_base(), **options, **fields)
    return made
