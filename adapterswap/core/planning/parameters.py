"""The parameters of methods as keys of compositions, rules and sweeps' families: next to `method`, which checks them.

Keys come from the registry of methods, so no parameter is named here.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from adapterswap.core.methods.method import Parameter
from adapterswap.core.methods.registry import BUILT_IN, PARAMETERS, find_method, having
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import Mistake, Mistakes, Source, field, reader_of

_KEY = "parameters"


def parameter_keys(*, in_rules: bool = False) -> list[str]:
    """The keys of the built-in methods' parameters in rules, or in compositions."""
    return [parameter.called(in_rules=in_rules) for parameter in PARAMETERS.values() if not parameter.shared]


class MethodFields(Declared):
    """Fields with a method, whose `parameters` are read and written as keys of the object itself.

    Once read, they have the method's own names (`scale`), not those of rules (`lambda`).
    """

    in_rules: ClassVar[bool] = False
    _rest: ClassVar[str] = _KEY

    @classmethod
    def known_keys(cls) -> list[str]:
        fields = [key for key in super().known_keys() if key != _KEY]
        return [*fields, *parameter_keys(in_rules=cls.in_rules)]

    @classmethod
    def _read_unknown(
        cls, unknown: Mapping[Any, Any], values: dict[str, Any], mistakes: list[Mistake], source: Source
    ) -> None:
        """Read every key that is not a field, and every key of `parameters`, as a parameter of the method."""
        if not unknown and not values.get(_KEY):
            return  # `_become` takes the defaults

        # What the object has, by its place in it, which messages name
        written: dict[tuple[Any, ...], Any] = {}
        for key, value in values.get(_KEY, {}).items():
            written[_KEY, key] = value
        for key, value in unknown.items():
            written[(_without_underscore(key),)] = value

        # What the method takes
        chosen = None
        if not any(mistake.location[0] == "method" for mistake in mistakes):
            chosen = values.get("method", cls.model_fields["method"].default)
        methods = cls._methods_of(chosen)
        parameters = _own_parameters(methods)
        called = {parameter.called(in_rules=cls.in_rules): parameter for parameter in parameters.values()}

        read: dict[str, Any] = {}
        for location, value in written.items():
            key = location[-1]
            if value is None:  # as if it were absent
                continue
            if key not in called:
                mistakes += cls._not_own(location, value, methods, called)
                continue
            try:
                read_value = _reader_of(cls, called[key])  # type: ignore[arg-type]  # a class, which can be hashed
                read[called[key].name] = read_value(value, source)
            except Mistakes as error:
                for mistake in error.mistakes:
                    mistakes.append(replace(mistake, location=(*location, *mistake.location)))
        values[_KEY] = cls._completed(read, parameters)

    @classmethod
    def _methods_of(cls, chosen: Any) -> list[str]:
        """The methods that may have a parameter; all of them if `method` is wrong, which is said already."""
        if chosen is None:
            return list(BUILT_IN)
        return [chosen]

    @classmethod
    def _completed(cls, values: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
        """The values of parameters by name; those that are absent have their defaults."""
        completed: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name in values:
                completed[name] = values[name]
            elif cls.in_rules or not parameter.required:
                completed[name] = parameter.default
        return completed

    def _become(self, values: Mapping[str, Any]) -> None:
        super()._become(values)
        if not values.get(_KEY):
            methods = self._methods_of(self.__dict__["method"])
            self.__dict__[_KEY] = self._completed({}, _own_parameters(methods))

    @classmethod
    def parameter_type(cls, parameter: Parameter) -> Any:
        """The type of a parameter's values, with its bounds."""
        if parameter.choices:
            return Literal[parameter.choices]

        bounds = {"gt": parameter.gt, "ge": parameter.ge, "lt": parameter.lt, "le": parameter.le}
        return Annotated[parameter.kind, field(**bounds)]

    @classmethod
    def _not_own(
        cls, location: tuple[Any, ...], value: Any, methods: list[str], called: Mapping[str, Parameter]
    ) -> list[Mistake]:
        """The mistake in a key that is not a parameter of these methods; none if it is another's, at its default."""
        key = location[-1]
        others = [parameter for parameter in PARAMETERS.values() if key == parameter.called(in_rules=cls.in_rules)]
        if not others:
            return [replace(Mistake.of_unknown_key(key, {*cls.known_keys(), *called}), location=location)]

        # At its default, another method's parameter asks for nothing.
        other = others[0]
        if value == other.default:
            return []
        if other.shared:
            predicate = f"belongs to the composition, not to a method in it: set `{other.name}` there"
        else:
            belongs = ", ".join(having(other.name, in_rules=cls.in_rules))
            predicate = f"only applies to {belongs}, not to {' or '.join(methods)}"
        return [Mistake(location, predicate=predicate)]

    def _dumped_rest(self, values: dict[str, Any], *, without_defaults: bool) -> dict[str, Any]:
        own = _own_parameters(self._methods_of(self.__dict__["method"]))
        entries: dict[str, Any] = {}
        for name, value in values.items():
            parameter = own[name]
            is_needed = value != parameter.default or (parameter.required and not self.in_rules)
            if is_needed or not without_defaults:
                entries[parameter.called(in_rules=self.in_rules)] = value
        if self.in_rules:
            return dict(sorted(entries.items()))
        return entries


def _own_parameters(methods: Iterable[str]) -> dict[str, Parameter]:
    """The parameters of these methods, by name."""
    parameters: dict[str, Parameter] = {}
    for name in methods:
        for parameter in find_method(name).own_parameters:
            parameters[parameter.name] = parameter
    return parameters


def _without_underscore(key: Any) -> Any:
    """`lambda` for `lambda_`, which Python users have to write."""
    if isinstance(key, str) and key.endswith("_") and keyword.iskeyword(key[:-1]):
        return key[:-1]
    return key


@cache
def _reader_of(cls: Any, parameter: Parameter) -> Callable[[Any, Source], Any]:
    return reader_of(cls.parameter_type(parameter), finite=True).read
