"""The parameters of methods as keys of compositions and rules: next to `method`, which checks them.

Keys come from the registry of methods, so no parameter is named here. `planning.models` does the same for pydantic.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from adapterswap.core.methods.method import Parameter
from adapterswap.core.methods.registry import PARAMETERS, find_method
from adapterswap.kit.files.plain import Plain, quick

if TYPE_CHECKING:
    from adapterswap.core.planning.models import MethodFields


def parameter_keys(*, in_rules: bool = False) -> list[str]:
    """The keys of the built-in methods' parameters in rules, or in compositions."""
    return [parameter.called(in_rules=in_rules) for parameter in PARAMETERS.values() if not parameter.shared]


def gathered(content: Any, fields: Collection[str]) -> Any:
    """The content with every key that is not a field in `parameters`, where the method checks it."""
    if not isinstance(content, Mapping):
        return content
    others = {_plain(key): value for key, value in content.items() if key not in fields}
    nested = content.get("parameters", {})
    if not others or not isinstance(nested, Mapping):
        return content
    declared = {key: value for key, value in content.items() if key in fields}
    return {**declared, "parameters": {**nested, **others}}


def _plain(key: Any) -> Any:
    """`lambda` for `lambda_`, which Python users have to write."""
    return key[:-1] if isinstance(key, str) and key.endswith("_") and keyword.iskeyword(key[:-1]) else key


def with_defaults(values: Mapping[str, Any], parameters: Mapping[str, Parameter], *, in_rules: bool) -> dict[str, Any]:
    """The values of a method's parameters by name; those that are absent have their defaults."""
    return {
        name: values.get(name, parameter.default)
        for name, parameter in parameters.items()
        if name in values or in_rules or not parameter.required
    }


class MethodPlain(Plain):
    """A `Plain` with a field `parameters`, whose items are read and written as keys of the object itself.

    Once read, they have the method's own names (`scale`), not those of rules (`lambda`).
    """

    in_rules: ClassVar[bool] = False

    @classmethod
    def _of_plain(cls, content: Mapping[str, Any]) -> Self:
        return super()._of_plain(gathered(content, {*cls.model_fields, *cls.aliases()}))

    def _complete(self) -> None:
        """Read the parameters; a `KeyError` if the method has no such parameter."""
        fields = self.__dict__
        own = {parameter.name: parameter for parameter in find_method(fields["method"]).own_parameters}
        called = {parameter.called(in_rules=self.in_rules): parameter for parameter in own.values()}
        given = {key: value for key, value in fields["parameters"].items() if value is not None}
        values = {called[key].name: _quick_parameter(called[key], value) for key, value in given.items()}
        fields["parameters"] = with_defaults(values, own, in_rules=self.in_rules)

    def _dumped(self, name: str, value: Any, *, without_defaults: bool) -> dict[str, Any]:
        if name != "parameters":
            return {name: value}
        return named(value, self.__dict__["method"], in_rules=self.in_rules, without_defaults=without_defaults)

    @classmethod
    def model_base(cls) -> type[MethodFields]:
        from adapterswap.core.planning.models import MethodFields, RuleFields

        return RuleFields if cls.in_rules else MethodFields


def _quick_parameter(parameter: Parameter, value: Any) -> Any:
    value = quick(Literal[parameter.choices] if parameter.choices else parameter.kind, value)
    bounds = (parameter.gt, parameter.ge, parameter.lt, parameter.le)
    if not isinstance(value, str | bool):
        gt, ge, lt, le = bounds
        inside = (gt is None or value > gt) and (ge is None or value >= ge)
        if not (inside and (lt is None or value < lt) and (le is None or value <= le)):
            raise ValueError(parameter.name)
    return value


def named(values: Mapping[str, Any], method: str, *, in_rules: bool, without_defaults: bool) -> dict[str, Any]:
    """The values by the keys that rules, or compositions, have for them."""
    own = {parameter.name: parameter for parameter in find_method(method).own_parameters}
    entries = {
        own[name].called(in_rules=in_rules): value
        for name, value in values.items()
        if not without_defaults or value != own[name].default or (own[name].required and not in_rules)
    }
    return dict(sorted(entries.items())) if in_rules else entries
