"""The registry of methods: built-in ones, and those that installed packages add.

A package adds a method with an entry point in the group `adapterswap.methods` that names a subclass of
`NonlinearMethod`, `SpanMethod` or `CoreMethod`:

    [project.entry-points."adapterswap.methods"]
    keep_positive = "my_package:KeepPositive"

The class declares its parameters, which may be new ones. Packages are loaded only for a name that is not built in, or
for the whole list.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from adapterswap.core.methods.linear import AdaMergeX, LayerSwap, Linear, Soup, TaskArithmetic
from adapterswap.core.methods.method import SEED, Method, NonlinearMethod, Parameter, SpanMethod
from adapterswap.core.methods.sparse import (
    ArceeFusion,
    Breadcrumbs,
    BreadcrumbsTies,
    DareLinear,
    DareTies,
    Della,
    DellaLinear,
    MagMax,
    MagnitudePrune,
    NearSwap,
    Ram,
    RamPlus,
    Sce,
    Ties,
)
from adapterswap.core.methods.spectral import (
    Cart,
    CoreDareTies,
    CoreMethod,
    CoreTies,
    IsoC,
    IsoCts,
    KnotsDareTies,
    KnotsTies,
    Tsv,
    Wudi,
)
from adapterswap.core.methods.spherical import Karcher, ModelStock, MultiSlerp, NuSlerp, Slerp
from adapterswap.kit.errors import ArgumentError, DependencyError, did_you_mean, reason_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


GROUP = "adapterswap.methods"

BUILT_IN: dict[str, Method] = {
    method.name: method
    for method in (
        LayerSwap(), Soup(), TaskArithmetic(), Ties(), DareLinear(), DareTies(), Slerp(), MagnitudePrune(), Linear(),
        AdaMergeX(), Della(), DellaLinear(), Breadcrumbs(), BreadcrumbsTies(), Sce(), NuSlerp(), MultiSlerp(),
        ModelStock(), NearSwap(), Karcher(), ArceeFusion(), Tsv(), IsoC(), IsoCts(), KnotsTies(), KnotsDareTies(),
        CoreTies(), CoreDareTies(), Ram(), RamPlus(), MagMax(), Cart(), Wudi(),
    )
}  # fmt: skip

ALIASES = {"cat": "task_arithmetic"}
"""Other names of built-in methods: CAT (arXiv:2410.13025) with fixed weights is a weighted sum of ΔW."""

PARAMETERS: dict[str, Parameter] = {}
"""The parameters of all built-in methods by name. A name has one meaning in all of them; its default may differ."""
for _method in BUILT_IN.values():
    for _parameter in _method.parameters:
        PARAMETERS.setdefault(_parameter.name, _parameter)


def words_of(field: str, value: object) -> tuple[str, str]:
    """The option of a composition's field and its value, as the command line takes them.

    `--seed` is the seed of a training, so a method's seed is --method-seed. A method's parameter without an option of
    its own is a value of --parameter.
    """
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()

    parameter = PARAMETERS.get(field)
    if parameter is not None and not parameter.has_option:
        return "--parameter", f"{field}={text}"
    if field == SEED.name:
        return "--method-seed", text
    return f"--{field.replace('_', '-')}", text


RESERVED = frozenset(
    {
        "allocation", "allow_negative", "averages", "base_model", "blend", "bottom", "bottom_transition", "chains",
        "config_from", "expert", "experts", "full_rank", "language", "language_weight",
        "layers", "max_error", "max_rank", "method", "modules", "name",
        "norms", "normalize", "num_layers", "optional", "outside", "parameters", "partition", "row_threshold", "rules",
        "stack", "task", "task_type", "task_weight", "top", "tokenizer", "top_transition", "weights",
    }
)  # fmt: skip
"""Names with another meaning in compositions, rules or sweeps, which no parameter may have."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def find_method(name: str) -> Method:
    """The method with this name or alias."""
    name = ALIASES.get(name, name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    added = _added()
    if name not in added:
        known = [*BUILT_IN, *ALIASES, *added]
        otherwise = f"Choose among {', '.join(known)}"
        containing = [other for other in known if name and name in other]  # `swap` of layer_swap, which is not near
        if 1 <= len(containing) <= 3:
            otherwise = f"Did you mean {' or '.join(map(repr, containing))}?"
        remedy = did_you_mean(name, known, otherwise)
        raise ArgumentError(f"There is no method {name!r}", remedy, parameter="method")
    return _loaded(name)


def check_name(name: str, *, in_rules: bool) -> str:
    """The method's own name, after a check that rules, or whole compositions, may use it."""
    try:
        method = find_method(name)
    except (ArgumentError, DependencyError) as error:
        texts = [f"{problem.message}. {problem.remedy}" for problem in error.problems]
        raise ValueError("; ".join(texts)) from None

    scope, is_allowed = "whole compositions", method.as_composition
    if in_rules:
        scope, is_allowed = "rules", method.in_rules
    if not is_allowed:
        raise ValueError(f"{name!r} is not a method of {scope}: choose among {', '.join(names_of(in_rules=in_rules))}")
    return method.name


def all_methods() -> dict[str, Method]:
    """All methods by name: built-in ones, then those of installed packages."""
    return BUILT_IN | {name: _loaded(name) for name in sorted(_added())}


def names_of(*, in_rules: bool = False, packages: bool = False) -> list[str]:
    """The names of methods that compositions may use or, with `in_rules`, blends of rules.

    `packages` adds aliases and the names from installed packages, without loading them.
    """
    if in_rules:
        names = [name for name, method in BUILT_IN.items() if method.in_rules]
    else:
        names = [name for name, method in BUILT_IN.items() if method.as_composition]
    if packages:
        names += [*ALIASES, *sorted(_added())]
    return names


def having(parameter: str, *, in_rules: bool = False) -> list[str]:
    """The built-in methods that have a parameter of this name."""
    names = []
    for name in names_of(in_rules=in_rules):
        if any(parameter == declared.name for declared in BUILT_IN[name].parameters):
            names.append(name)
    return names


@cache
def _added() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # here, because `adapterswap compose -h` does not need it

    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


@cache
def _loaded(name: str) -> Method:
    entry = _added()[name]
    entry_point = f"The entry point {name} = {entry.value!r} of {GROUP}"
    remedy = "Correct or uninstall the package that adds it"

    try:
        kind = entry.load()
    except Exception as error:  # whatever a package's own code raises
        raise DependencyError(f"{entry_point} cannot be loaded: {reason_of(error)}", remedy) from error
    if not (isinstance(kind, type) and issubclass(kind, NonlinearMethod | SpanMethod | CoreMethod)):
        raise DependencyError(f"{entry_point} is not a subclass of NonlinearMethod, SpanMethod or CoreMethod", remedy)
    if getattr(kind, "name", None) != name or not _NAME.fullmatch(name):
        raise DependencyError(
            f"{entry_point} has the name {getattr(kind, 'name', None)!r}",
            "Use the same name for the class and the entry point, with lower-case letters, digits and _",
        )

    # What the class declares
    for field in ("title", "reference", "formula"):
        if not isinstance(getattr(kind, field, None), str):
            raise DependencyError(f"{entry_point} has no `{field}`", remedy)
    for parameter in kind.parameters:
        fault = _fault(parameter)
        if fault is not None:
            raise DependencyError(f"{entry_point} has the parameter {fault}", remedy)

    try:
        return kind()
    except TypeError as error:  # `combine` is not defined, or the class wants arguments
        raise DependencyError(f"{entry_point} cannot be used: {reason_of(error)}", remedy) from error


def _fault(parameter: object) -> str | None:
    """What is wrong with a parameter that a package declares; None if it is valid."""
    if not isinstance(parameter, Parameter):
        return f"{parameter!r}, which is not a Parameter"

    name = parameter.name
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(parameter.called(in_rules=True)):
        return f"{name!r}; use lower-case letters, digits and _"
    if {name, parameter.called(in_rules=True)} & RESERVED:
        return f"{name!r}, a name that compositions use for something else"

    # Parameters of one name are one option on the command line.
    namesake = PARAMETERS.get(name)
    if namesake is not None:
        known = (namesake.kind, namesake.rule_name, namesake.shared)
        if (parameter.kind, parameter.rule_name, parameter.shared) != known:
            return (
                f"{name!r}, which other methods declare with another type: import it from "
                "adapterswap.core.methods.method"
            )

    if parameter.kind not in (float, int, bool, str) or bool(parameter.choices) != (parameter.kind is str):
        return f"{name!r} of {parameter.default!r}: give it a float, int or bool, or a str with its choices"
    return None
