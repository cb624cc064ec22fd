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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler, SerializationInfo

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Field:
    """A declared field.

    Attributes:
        default: what it is if it is not set.
        description: what it means.
        ge, gt, le, min_length: bounds, as pydantic has them.
        alias: another key under which it is read.
        kind: returns its type for pydantic, if that says more than the annotation.
        before, after: change the value before, or after, it is read as the field's type; or raise a `ValueError`.
        validate_default: whether pydantic validates the default.
    """

    default: Any = _REQUIRED
    description: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None
    alias: str | None = None
    kind: Callable[[], Any] | None = None
    before: Callable[[Any], Any] | None = None
    after: Callable[[Any], Any] | None = None
    validate_default: bool = False

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by pydantic's names."""
        bounds = {"ge": self.ge, "gt": self.gt, "le": self.le, "min_length": self.min_length}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def check(self, value: Any) -> None:
        """Raise a `ValueError` if the value breaks a bound."""
        for name, bound in self.bounds.items() if value is not None else ():
            if not _WITHIN[name](len(value) if name == "min_length" else value, bound):
                raise ValueError(name)


_WITHIN: dict[str, Callable[[Any, float], bool]] = {
    "ge": lambda value, bound: value >= bound,
    "gt": lambda value, bound: value > bound,
    "le": lambda value, bound: value <= bound,
    "min_length": lambda size, bound: size >= bound,
}


field: Any = Field
"""Declares a field of a `Declared` class."""


class Declared:
    """An immutable object with declared fields. Its methods are named as pydantic's, and do the same."""

    model_fields: ClassVar[Mapping[str, Field]] = MappingProxyType({})
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
        for name in fields:
            if name in own:
                delattr(cls, name)

    def __init__(self, **fields: Any) -> None:
        self._become(fields)

    def _become(self, values: Mapping[str, Any]) -> None:
        """Take the values of the fields that are set, and the defaults of the others."""
        for name, declared in self.model_fields.items():
            if name in values or declared.default is not _REQUIRED:
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
        compared = {*self.__dict__, *other.__dict__} - {"_set", "_files"}
        return all(getattr(self, name) == getattr(other, name) for name in compared)

    __hash__ = None  # type: ignore[assignment]

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

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: set[str] | None = None,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """The fields as plain data; the arguments are pydantic's."""
        content: dict[str, Any] = {}
        flags = {"exclude_unset": exclude_unset, "exclude_defaults": exclude_defaults, "exclude_none": exclude_none}
        for name, value in self.__dict__.items():
            declared = self.model_fields.get(name)
            if (
                name[0] == "_"
                or not (include is None or name in include)
                or (exclude_unset and name not in self._set)
                or (exclude_none and value is None)
                or (exclude_defaults and declared is not None and value == declared.default)
            ):
                continue
            plain = value if type(value) in _SCALARS else _data(value, mode, flags)
            content |= self._dumped(name, plain, without_defaults=exclude_defaults)
        return content

    def _dumped(self, name: str, value: Any, *, without_defaults: bool) -> dict[str, Any]:
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
        declared = cls.model_fields[name]
        value = quick(cls._hints()[name], declared.before(value) if declared.before else value)
        declared.check(value)
        return declared.after(value) if declared.after else value

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


def _data(value: Any, mode: str, flags: Mapping[str, Any]) -> Any:
    if isinstance(value, Declared):
        return value.model_dump(mode=mode, **flags)
    if isinstance(value, dict):
        return {key: item if type(item) in _SCALARS else _data(item, mode, flags) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [item if type(item) in _SCALARS else _data(item, mode, flags) for item in value]
        return items if mode == "json" or isinstance(value, list) else tuple(items)
    return value


_SCALARS = frozenset({str, int, float, bool, NoneType})


@cache
def _hints_of(cls: type[Declared]) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _model_of(cls: type[Declared]) -> type[BaseModel]:
    from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, create_model, model_validator

    fields: dict[str, Any] = {}
    for name, declared in cls.model_fields.items():
        options: dict[str, Any] = {"description": declared.description or None, **declared.bounds}
        options |= {"validation_alias": AliasChoices(name, declared.alias)} if declared.alias else {}
        options |= {} if declared.default is _REQUIRED else {"default": declared.default}
        options |= {"validate_default": True} if declared.validate_default else {}
        kind = declared.kind() if declared.kind else cls._hints()[name]
        kind = Annotated[kind, AfterValidator(declared.after)] if declared.after else kind
        kind = Annotated[kind, BeforeValidator(declared.before)] if declared.before else kind
        fields[name] = (kind, Field(**options))

    def prepared(model: Any, content: Any) -> Any:
        return cls.prepared(content)

    def checked(read: Any) -> Any:
        cls.of_model(read).check()
        return read

    validators: dict[str, Any] = {
        "prepared": model_validator(mode="before")(classmethod(prepared)),  # type: ignore[arg-type]
        "checked": model_validator(mode="after")(checked),
    }
    options = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__validators__": validators}
    made: type[BaseModel] = create_model(cls.__name__, __base__=cls.model_base(), **options, **fields)
    return made
