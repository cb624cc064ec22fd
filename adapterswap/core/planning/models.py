"""For pydantic: the parameters of methods as keys of recipes, and the names of methods.

The models of compositions and rules, and the families of a sweep, are `MethodFields`. Composing does not import this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Discriminator,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from adapterswap.core.methods.method import Parameter
from adapterswap.core.methods.registry import BUILT_IN, PARAMETERS, find_method, having
from adapterswap.core.model.layers import MAX_LAYERS, Stack
from adapterswap.core.planning.parameters import gathered, named, parameter_keys, with_defaults
from adapterswap.kit.files.models import Numbers, StrictModel
from adapterswap.kit.files.yaml import MEMBER

_Depth = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Depths = Annotated[  # the discriminator picks one form, so that a mistake is reported once
    Annotated[_Depth, Tag(f"{MEMBER}one")] | Annotated[dict[Stack, _Depth], Tag(f"{MEMBER}stacks")],
    Discriminator(lambda value: MEMBER + ("stacks" if isinstance(value, Mapping) else "one")),
]


class MethodFields(StrictModel):
    """A model with a field `parameters`, whose items are read and written as keys of the model itself.

    Once read, they have the method's own names (`scale`), not those of rules (`lambda`).
    """

    in_rules: ClassVar[bool] = False
    as_lists: ClassVar[bool] = False
    """Each parameter that is set has a list of values; the others have no default."""

    @classmethod
    def known_keys(cls) -> list[str]:
        fields = [key for key in super().known_keys() if key != "parameters"]
        return [*fields, *parameter_keys(in_rules=cls.in_rules)]

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, content: Any) -> Any:
        """Move every key that is not a field to `parameters`, where the method checks it."""
        return gathered(content, super().known_keys())

    @field_validator("parameters", mode="before", check_fields=False)
    @classmethod
    def _check_parameters(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "method" not in info.data:  # the method is invalid and reported itself, so accept any method's keys
            return cls._checked(value, list(BUILT_IN))
        method = info.data["method"]
        if cls.as_lists:  # each composition checks whether its values go together
            return cls._checked(value, [*BUILT_IN, *method])
        return cls._checked(value, [method])

    @classmethod
    def _checked(cls, content: Mapping[Any, Any], methods: list[str]) -> dict[str, Any]:
        """The checked values by name, with defaults for those that are absent."""
        parameters = {p.name: p for method in methods for p in find_method(method).own_parameters}
        names = {p.called(in_rules=cls.in_rules): p.name for p in parameters.values()}
        values: dict[str, Any] = {}
        mistakes: list[InitErrorDetails] = []
        for key, value in content.items():
            if value is None:
                continue
            if key not in names:
                if (mistake := cls._not_own(key, value, methods, parameters)) is not None:
                    mistakes.append({"type": mistake, "loc": (key,), "input": value})
                continue
            try:
                values[names[key]] = cls._read(parameters[names[key]], value)
            except ValidationError as error:
                mistakes += [
                    {
                        "type": detail["type"],
                        "loc": (key, *detail["loc"]),
                        "input": detail["input"],
                        "ctx": detail.get("ctx", {}),
                    }
                    for detail in error.errors(include_url=False)
                ]
        if mistakes:
            raise ValidationError.from_exception_data(cls.__name__, mistakes)
        if cls.as_lists:
            return {name: values[name] for name in parameters if name in values}
        return with_defaults(values, parameters, in_rules=cls.in_rules)

    @classmethod
    def _read(cls, parameter: Parameter, value: Any) -> Any:
        """The checked value; raises a ValidationError if the parameter does not allow it."""
        return _adapter_of(cls, parameter).validate_python(value)

    @classmethod
    def kind_of(cls, parameter: Parameter) -> Any:
        """The type of a parameter's values with its bounds, for pydantic."""
        bounds: dict[str, Any] = {"gt": parameter.gt, "ge": parameter.ge, "lt": parameter.lt, "le": parameter.le}
        if parameter.choices:
            return Literal[parameter.choices]
        if parameter.kind is float:
            return Annotated[float, Field(**bounds, allow_inf_nan=False), Numbers]
        return Annotated[int, Field(**bounds), Numbers] if parameter.kind is int else parameter.kind

    @classmethod
    def _not_own(
        cls, key: Any, value: Any, methods: list[str], parameters: Mapping[str, Parameter]
    ) -> PydanticCustomError | None:
        """The mistake in a key that is not a parameter of these methods; None if it is another's, at its default."""
        other = next((p for p in PARAMETERS.values() if key == p.called(in_rules=cls.in_rules)), None)
        if other is None:
            keys = [*cls.known_keys(), *(p.called(in_rules=cls.in_rules) for p in parameters.values())]
            return PydanticCustomError("extra_forbidden", "not a known key", {"known": sorted({*keys})})
        if value == other.default:
            return None
        if other.shared:
            message = f"belongs to the composition, not to a method in it: set `{other.name}` there"
            return PydanticCustomError("foreign_parameter", message)
        belongs = ", ".join(having(other.name, in_rules=cls.in_rules))
        return PydanticCustomError("foreign_parameter", f"only applies to {belongs}, not to {' or '.join(methods)}")

    @model_serializer(mode="wrap")
    def _spread(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Write the parameters as keys of the model, in place of the field."""
        content: dict[str, Any] = {}
        for key, value in handler(self).items():
            if key == "parameters":
                content |= self._named(value, without_defaults=info.exclude_defaults)
            else:
                content[key] = value
        return content

    def _named(self, values: Mapping[str, Any], *, without_defaults: bool) -> dict[str, Any]:
        if self.as_lists:
            return dict(values)
        method: str = self.method  # type: ignore[attr-defined]
        return named(values, method, in_rules=self.in_rules, without_defaults=without_defaults)


class RuleFields(MethodFields):
    """The same in rules."""

    in_rules: ClassVar[bool] = True


@cache
def _adapter_of(model: type[MethodFields], parameter: Parameter) -> TypeAdapter[Any]:
    return TypeAdapter(model.kind_of(parameter))
