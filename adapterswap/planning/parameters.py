"""The parameters of methods as keys of recipes: they are next to `method`, and their method says what they may be.

Compositions, rules and the families of a sweep are `MethodFields`. The registry (`methods`) is the table that their
keys come from, so no parameter is named here. Knows nothing of what parameters mean.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from adapterswap.files.yamlfiles import StrictModel
from adapterswap.methods.method import Parameter
from adapterswap.methods.registry import BUILT_IN, PARAMETERS, having, own_parameters

__all__ = ["MethodFields", "kind_of", "parameter_keys"]


def parameter_keys(*, in_rules: bool = False) -> list[str]:
    """The keys that our own methods' parameters have in rules, or in compositions."""
    return [parameter.called(in_rules=in_rules) for parameter in PARAMETERS.values() if not parameter.shared]


class MethodFields(StrictModel):
    """A model with a field `parameters`, whose items are read and written as keys of the model itself.

    Once read, they have the names that the method gives them, whatever rules call them.
    """

    in_rules: ClassVar[bool] = False
    as_lists: ClassVar[bool] = False
    """Each parameter that is given has a list of values, and the others have no default."""

    @classmethod
    def known_keys(cls) -> list[str]:
        own = [key for key in super().known_keys() if key != "parameters"]
        return [*own, *parameter_keys(in_rules=cls.in_rules)]

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, content: Any) -> Any:
        """Every key that is no field is a parameter until its method says otherwise."""
        if not isinstance(content, Mapping):
            return content
        fields = {key for name, field in cls.model_fields.items() for key in (name, *_aliases(field))}
        beside = {_plain(key): value for key, value in content.items() if key not in fields}
        nested = content.get("parameters", {})
        if not beside or not isinstance(nested, Mapping):
            return content
        kept = {key: value for key, value in content.items() if key in fields}
        return {**kept, "parameters": {**nested, **beside}}

    @field_validator("parameters", mode="before", check_fields=False)
    @classmethod
    def _check_parameters(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "method" not in info.data:  # it is reported itself; any method's keys may be meant
            return cls._checked(value, list(BUILT_IN))
        named = info.data["method"]
        if cls.as_lists:  # whether all go together is a question of each composition
            return cls._checked(value, [*BUILT_IN, *named])
        return cls._checked(value, [named])

    @classmethod
    def _checked(cls, given: Mapping[Any, Any], methods: list[str]) -> dict[str, Any]:
        """The values by name, checked; with defaults for those that are not given."""
        own = {p.name: p for method in methods for p in own_parameters(method)}
        names = {p.called(in_rules=cls.in_rules): p.name for p in own.values()}
        found: dict[str, Any] = {}
        mistakes: list[InitErrorDetails] = []
        for key, value in given.items():
            if value is None:
                continue
            if key not in names:
                if (mistake := cls._not_own(key, value, methods, own)) is not None:
                    mistakes.append({"type": mistake, "loc": (key,), "input": value})
                continue
            try:
                found[names[key]] = cls._read(own[names[key]], value)
            except ValidationError as error:
                mistakes += [
                    {"type": one["type"], "loc": (key, *one["loc"]), "input": one["input"], "ctx": one.get("ctx", {})}
                    for one in error.errors(include_url=False)
                ]
        if mistakes:
            raise ValidationError.from_exception_data(cls.__name__, mistakes)
        if cls.as_lists:
            return {name: found[name] for name in own if name in found}
        return {
            name: found.get(name, parameter.default)
            for name, parameter in own.items()
            if name in found or cls.in_rules or not parameter.required
        }

    @classmethod
    def _read(cls, parameter: Parameter, value: Any) -> Any:
        """The value, if the parameter may have it; raises a ValidationError that says why not."""
        return _one(parameter).validate_python(value)

    @classmethod
    def _not_own(
        cls, key: Any, value: Any, methods: list[str], own: Mapping[str, Parameter]
    ) -> PydanticCustomError | None:
        """What is wrong with a key that is no parameter of the methods; None for another's default, which is vain."""
        other = next((p for p in PARAMETERS.values() if key == p.called(in_rules=cls.in_rules)), None)
        if other is None:
            keys = [*cls.known_keys(), *(p.called(in_rules=cls.in_rules) for p in own.values())]
            return PydanticCustomError("extra_forbidden", "not a known key", {"known": sorted({*keys})})
        if value == other.default:
            return None
        belongs = ", ".join(having(other.name, in_rules=cls.in_rules))
        return PydanticCustomError("foreign_parameter", f"it belongs to {belongs}, not to {' or '.join(methods)}")

    @model_serializer(mode="wrap")
    def _beside(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The parameters as keys of their own, in the place of the field."""
        written: dict[str, Any] = {}
        for key, value in handler(self).items():
            if key == "parameters":
                written |= self._named(value, without_defaults=info.exclude_defaults)
            else:
                written[key] = value
        return written

    def _named(self, values: Mapping[str, Any], *, without_defaults: bool) -> dict[str, Any]:
        if self.as_lists:
            return dict(values)
        own = {parameter.name: parameter for parameter in own_parameters(self.method)}  # type: ignore[attr-defined]
        kept = {
            own[name].called(in_rules=self.in_rules): value
            for name, value in values.items()
            if not without_defaults or value != own[name].default or (own[name].required and not self.in_rules)
        }
        return dict(sorted(kept.items())) if self.in_rules else kept


def _aliases(field: FieldInfo) -> Iterable[Any]:
    """The other names under which a field is read."""
    alias = field.validation_alias
    return alias.choices if isinstance(alias, AliasChoices) else [alias]


def _plain(key: Any) -> Any:
    """`lambda_`, as Python has to write it, is `lambda`."""
    return key[:-1] if isinstance(key, str) and key.endswith("_") and keyword.iskeyword(key[:-1]) else key


def kind_of(parameter: Parameter) -> Any:
    """The type of a parameter's values, with their bounds, as pydantic reads it."""
    bounds: dict[str, Any] = {"gt": parameter.gt, "ge": parameter.ge, "lt": parameter.lt, "le": parameter.le}
    if parameter.choices:
        return Literal[parameter.choices]
    if parameter.kind is float:
        return Annotated[float, Field(**bounds, allow_inf_nan=False)]
    return Annotated[int, Field(**bounds)] if parameter.kind is int else parameter.kind


@cache
def _one(parameter: Parameter) -> TypeAdapter[Any]:
    return TypeAdapter(kind_of(parameter))
