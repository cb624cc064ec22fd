"""`adapterswap methods`: the registry of methods."""

from __future__ import annotations

from typing import Annotated, Any

from adapterswap.cli.composition_options import MethodName, parameter_text
from adapterswap.cli.options import Json
from adapterswap.cli.output import echo, print_json, print_rows
from adapterswap.cli.signature import declare
from adapterswap.core import Method, find_method, words_of
from adapterswap.core.methods.registry import all_methods


@declare("methods")
def methods_command(name: Annotated[str, MethodName()] | None = None, *, as_json: Json = False) -> None:
    """List the methods that combine experts, with their parameters and references.

    With NAME, show one method: its formula, its parameters with their options and defaults, and its reference.

    Some methods are exact in an adapter. The results of others are reduced to a rank there (--max-rank, --max-error).
    Methods on whole weights need full weights (adapterswap merge), where every method is exact. Installed packages can
    add methods.

    Args:
        as_json: Print JSON, with formulas.

    Examples:
        adapterswap methods
        adapterswap methods ties
    """
    # One method
    if name is not None:
        method = find_method(name)
        if as_json:
            print_json({name: _as_json(method)})
        else:
            _print(method)
        return

    # All of them
    methods = all_methods()
    if as_json:
        print_json({key: _as_json(each) for key, each in methods.items()})
        return
    rows: list[tuple[str, ...]] = []
    for key, each in methods.items():
        parameters = ", ".join(parameter.name for parameter in each.parameters)
        rows.append((key, each.in_adapters, parameters or "–", each.reference))
    print_rows("method", "in an adapter", "parameters", "reference", rows=rows, left=4)
    echo("")
    for key, each in methods.items():
        echo(f"{key}: {each.formula}")


def _as_json(method: Method) -> dict[str, Any]:
    """A method as plain data."""
    defaults: dict[str, Any] = {}
    for parameter in method.parameters:
        defaults[parameter.name] = None
        if not parameter.required:
            defaults[parameter.name] = parameter.default

    return {
        "formula": method.formula,
        "parameters": [parameter.name for parameter in method.parameters],
        "defaults": defaults,
        "linear": method.linear,
        "in_adapters": method.in_adapters,
        "acts_on": method.acts_on,
        "weighted": method.weighted,
        "experts": list(method.sides),
        "notes": method.notes,
        "normalizes": method.normalizes,
        "in_rules": method.in_rules,
        "as_composition": method.as_composition,
        "reference": method.reference,
        "built_in": method.is_built_in,
    }


def _print(method: Method) -> None:
    """Print one method, with the options of its parameters."""
    echo(f"{method.name}: {method.formula}")
    if method.notes:
        echo(method.notes)
    echo(f"in an adapter: {method.in_adapters}", f"reference: {method.reference}")
    for parameter in method.parameters:
        flag = f"--parameter {parameter.name}="
        if method.is_built_in and parameter.has_option:
            flag, _ = words_of(parameter.name, "")
        echo(f"{flag:<25}{parameter_text(parameter)}  ({parameter.allowed})")
