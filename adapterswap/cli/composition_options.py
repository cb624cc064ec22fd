"""The options that say what to compose, shared by every command that composes: `compose`, `evaluate`.

Turns options or a recipe into a plan through the library. Prints only which name an expert was given where it is not
its folder's, and a note where `base` could mean two things.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from adapterswap.cli.paths import EXPERT
from adapterswap.cli.printing import note
from adapterswap.errors import ArgumentError
from adapterswap.methods.method import Parameter
from adapterswap.methods.registry import PARAMETERS, find_method, having, names_of
from adapterswap.processes import is_first

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from adapterswap.planning.allocation import Rule
    from adapterswap.planning.compositions import Composition
    from adapterswap.planning.mergekit import Dtype
    from adapterswap.planning.plan import Plan

__all__ = [
    "any_plan_from_options",
    "composition_from_options",
    "composition_options",
    "named_experts",
    "parsed_rules",
    "plan_from_options",
    "plan_of",
    "recipe_dtype",
]

_LISTED = 5  # methods in the help of a parameter

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _MethodName(click.ParamType[str]):
    """A method: one of ours, or one of an installed package, which is asked for only where it is named."""

    name = "method"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in names_of() and value not in names_of(packages=True):
            try:
                find_method(value)
            except ArgumentError as error:
                self.fail(str(error), param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in names_of(packages=True) if name.startswith(incomplete)]


def _parameter_option(parameter: Parameter) -> Callable[[_Function], _Function]:
    """The option of a method's parameter."""
    methods = having(parameter.name)
    of = ", ".join(methods if len(methods) <= _LISTED else [*methods[: _LISTED - 1], "…"])
    what = f"{parameter.description[0].upper()}{parameter.description[1:]} ({of})."
    default = "" if parameter.required else f"  [default: {_shown(parameter.default)}]"
    kinds: dict[type, Any] = {str: click.Choice(parameter.choices), bool: bool, int: int, float: float}
    return click.option(
        f"--{parameter.name.replace('_', '-')}",
        parameter.name,
        type=kinds[parameter.kind],
        metavar=None if parameter.choices else {bool: "BOOL", int: "N"}.get(parameter.kind, "X"),
        help=what + default,
    )


def _shown(default: float | bool | str) -> str:
    return str(default).lower() if isinstance(default, bool | str) else f"{default:g}"


_OPTIONS = (
    click.option(
        "-t",
        "--task-expert",
        type=EXPERT,
        multiple=True,
        metavar="PATH|ID",
        help="Task expert; repeat to average several.",
    ),
    click.option(
        "-l",
        "--language-expert",
        type=EXPERT,
        multiple=True,
        metavar="PATH|ID",
        help="Language expert; repeat to average several. `base` resets its layers to the base.",
    ),
    click.option(
        "--expert",
        "experts",
        type=EXPERT,
        multiple=True,
        metavar="NAME=PATH",
        help="Instead of -t and -l: an expert by the name that rules use; repeatable. Without rules, --method combines "
        "them all.",
    ),
    click.option(
        "--rule",
        "rules",
        multiple=True,
        metavar="RULE",
        help="Who owns which layers: 'swahili: 0-4,30-31', 'math*0.5 + swahili*0.5: 5', 'mlp of code: 6-9'; math alone "
        "is the rest. Repeatable; the first match wins.",
    ),
    click.option(
        "--method",
        type=_MethodName(),
        metavar="NAME",
        help="How experts are combined; `adapterswap methods` lists the names.  [default: layer_swap]",
    ),
    click.option(
        "--bottom", type=int, metavar="N", help="Bottom layers from the language.  [default: 5 of 32, scaled]"
    ),
    click.option("--top", type=int, metavar="N", help="Top layers from the language.  [default: 2 of 32, scaled]"),
    click.option(
        "--bottom-transition", type=int, metavar="N", help="Blended layers above the bottom ones.  [default: 0]"
    ),
    click.option("--top-transition", type=int, metavar="N", help="Blended layers below the top ones.  [default: 0]"),
    click.option("--task-weight", type=float, metavar="X", help="The task's weight in blends.  [default: 1]"),
    click.option("--language-weight", type=float, metavar="Y", help="The language's weight in blends.  [default: 1]"),
    click.option(
        "--weights",
        type=click.Choice(["equal", "magnitude"]),
        help="magnitude: weights are divided by each side's mean |ΔW|.  [default: equal]",
    ),
    *map(_parameter_option, PARAMETERS.values()),
    click.option(
        "--parameter",
        "more_parameters",
        multiple=True,
        metavar="NAME=VALUE",
        help="Of a method that an installed package adds.",
    ),
    click.option("--row-threshold", type=float, metavar="X", help="Rows of ΔW with a mean |ΔW| below X become zero."),
    click.option(
        "--partition", type=click.Choice(["A", "B", "C", "Z"]), help="Layers and modules of the second paper."
    ),
    click.option(
        "--num-layers", type=click.IntRange(min=1), metavar="L", help="The base's layers.  [default: its config]"
    ),
    click.option(
        "--norms",
        type=click.Choice(["average", "layer"]),
        help="Norms of full checkpoints: averaged, or with their layer.  [default: average]",
    ),
    click.option(
        "--stack",
        type=click.Choice(["both", "encoder", "decoder"]),
        help="Of a model with an encoder and a decoder: where zones and partitions apply.  [default: both]",
    ),
    click.option(
        "--outside",
        type=click.Choice(["average", "task", "language"]),
        help="Embeddings, heads and towers in a layer swap: averaged, or a side's.  [default: average]",
    ),
    click.option(
        "--task-type",
        type=click.Choice(
            ["CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"],
            case_sensitive=False,
        ),
        metavar="TYPE",
        help="PEFT's task type of the result, where the experts' is wrong, such as CAUSAL_LM.",
    ),
    click.option("--allow-negative", is_flag=True, help="Weights may be negative (unlearning)."),
)

# Option → key of a Composition, where they differ; the experts are named on the way.
_KEYS = (
    "method", "bottom", "top", "bottom_transition", "top_transition", "task_weight", "language_weight", *PARAMETERS,
    "weights", "row_threshold", "partition", "num_layers", "norms", "stack", "outside",
    "task_type",
)  # fmt: skip


def composition_options(function: _Function) -> _Function:
    """Add the options to a command; it hands them on, as they came, to `plan_from_options`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def plan_from_options(options: dict[str, Any], *, recipe: str | None = None, base_model: str | None = None) -> Plan:
    """The plan of adapters that the options of `composition_options`, or a recipe, ask for.

    Raises:
        click.UsageError: neither or both of options and recipe are given.
        AdapterswapError: the experts cannot be composed as requested, or one is a full checkpoint.
    """
    plan = any_plan_from_options(options, recipe=recipe, base_model=base_model)
    plan.check_adapter()
    return plan


def any_plan_from_options(options: dict[str, Any], *, recipe: str | None = None, base_model: str | None = None) -> Plan:
    """As `plan_from_options`, where experts may be full checkpoints too."""
    from adapterswap.planning.composing import compose

    return compose(composition_from_options(options, recipe=recipe, base_model=base_model))


def plan_of(path: str | None, options: dict[str, Any], *, base_model: str | None = None) -> Plan:
    """The plan of the adapter at `path` alone, or of what a recipe at `path` or the options say to compose.

    Raises:
        click.UsageError: an adapter and options are given, or neither, or both options and a recipe.
        AdapterswapError: see `adapter_plan` and `compose`.
    """
    from adapterswap.planning.composing import adapter_plan

    if path is None or path.endswith((".yaml", ".yml")):
        return any_plan_from_options(options, recipe=path, base_model=base_model)
    if any(value not in (None, (), False) for value in options.values()):
        raise click.UsageError("Give an adapter alone, or options that say what to compose.")
    return adapter_plan(path, base_model)


def composition_from_options(
    options: dict[str, Any], *, recipe: str | None = None, base_model: str | None = None
) -> Composition:
    """The composition itself; see `plan_from_options`."""
    from adapterswap.files.yamlfiles import validate
    from adapterswap.planning.compositions import Composition

    given = {key: options[key] for key in _KEYS if options.get(key) is not None}
    given |= _more_parameters(options.get("more_parameters", ()), given)
    given |= {"base_model": base_model} if base_model else {}
    given |= {"allow_negative": True} if options.get("allow_negative") else {}
    tasks, languages = options["task_expert"], options["language_expert"]
    experts, rules = options.get("experts", ()), options.get("rules", ())
    if recipe:
        if (
            tasks
            or languages
            or experts
            or rules
            or given.keys() - {"base_model", "num_layers", "allow_negative", "task_type"}
        ):
            raise click.UsageError("A recipe says what to compose: give it alone, or options without it.")
        return _from_recipe(recipe).model_copy(update=given)
    if experts or rules:
        if tasks or languages:
            raise click.UsageError("Name experts with --expert, or with --task-expert and --language-expert: not both.")
        return _by_rules(named_experts(experts), rules, given)
    if not tasks or not languages:
        raise click.UsageError("Give --task-expert and --language-expert, or a recipe; or --expert and --rule.")
    return validate({**given, **_name_experts(tasks, languages)}, Composition, where="the options")


def _from_recipe(recipe: str) -> Composition:
    """A recipe's composition. What a mergekit YAML says of the dtype, `recipe_dtype` hands on."""
    from adapterswap.planning.composing import read_composition
    from adapterswap.planning.mergekit import is_mergekit, read_mergekit
    from adapterswap.shipped import find_recipe

    path = find_recipe(recipe, "compose")
    return read_mergekit(path).composition if is_mergekit(path) else read_composition(path)


def recipe_dtype(path: str | None, requested: Dtype | None = None) -> Dtype | None:
    """The dtype of full weights: the one that an option requests, or that a mergekit YAML at `path` says."""
    from adapterswap.planning.mergekit import mergekit_dtype
    from adapterswap.shipped import find_recipe

    if path is None or not path.endswith((".yaml", ".yml")):
        return requested
    said = mergekit_dtype(find_recipe(path, "compose"))
    if requested is not None and said not in (None, requested):
        raise click.UsageError(f"The recipe says {said}: leave --dtype {requested} out, or the recipe's dtype.")
    return requested or said


def named_experts(options: tuple[str, ...]) -> dict[str, str]:
    """The experts of `--expert NAME=PATH`, by name."""
    from adapterswap.files.smallfiles import expand_text

    experts: dict[str, str] = {}
    for option in options:
        name, equals, place = option.partition("=")
        if not equals or not name or not place:
            raise click.UsageError(f"--expert {option!r} is not NAME=PATH.")
        if name in experts:
            raise click.UsageError(f"--expert {name} is given twice.")
        experts[name] = expand_text(place)
    return experts


def parsed_rules(texts: tuple[str, ...]) -> list[Rule]:
    """The rules of `--rule`; the mistakes in all of them are reported together."""
    from adapterswap.errors import FieldError, Problems
    from adapterswap.planning.allocation import Rule

    problems = Problems(FieldError)
    rules: list[Rule] = []
    for text in texts:
        with problems.collect():
            rules.append(Rule.from_text(text))
    if problems:
        raise problems.as_error(FieldError).recast(parameter="rules")
    return rules


def _by_rules(experts: dict[str, str], texts: tuple[str, ...], given: dict[str, Any]) -> Composition:
    """What `--expert` and `--rule` ask for; without rules, a method that combines the experts one by one."""
    from adapterswap.errors import CompositionError
    from adapterswap.files.yamlfiles import validate
    from adapterswap.planning.compositions import Composition

    if not experts:
        raise click.UsageError("--rule needs the experts that it names: --expert NAME=PATH.")
    if not texts:
        return validate({**_all_combined(experts, given), "experts": experts}, Composition, where="the options")
    rules = parsed_rules(texts)
    composition = validate({**given, "experts": experts, "rules": rules}, Composition, where="the options")
    named = set(composition.expert_names)
    if named < experts.keys():  # where rules name others too, these are misspelt, which is reported with the nearest
        unused = next(name for name in experts if name not in named)
        raise CompositionError(
            f"no rule names the expert {unused!r}", "Leave it out, or give it layers", parameter="experts"
        )
    return composition


def _all_combined(experts: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a composition by a method that combines all experts, one by one."""
    from adapterswap.planning.allocation import BASE

    if given.get("method", "layer_swap") == "layer_swap":
        raise click.UsageError("Give a --rule for the experts, or a --method that combines them all.")
    if given.keys() & {"task_weight", "language_weight"}:
        raise click.UsageError("Give weights in a rule: --rule 'math*2 + swahili'.")
    if given["method"] != "soup":
        return {**given, "task": list(experts), "language": [BASE]}
    # A soup with the base on the other side is one half of the experts' average.
    kept = {key: value for key, value in given.items() if key not in ("method", "weights")}
    rule: dict[str, Any] = {"blend": dict.fromkeys(experts, 1)}
    return {**kept, "rules": [{**rule, "weights": "magnitude"} if given.get("weights") == "magnitude" else rule]}


def _more_parameters(settings: tuple[str, ...], given: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The values of `--parameter`, which the composition checks."""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name or not value:
            raise click.UsageError(f"--parameter {setting!r} is not NAME=VALUE.")
        if name in found or name in given:
            raise click.UsageError(f"--parameter {name} is given twice.")
        found[name] = value
    return {"parameters": found} if found else {}


def _name_experts(tasks: tuple[str, ...], languages: tuple[str, ...]) -> dict[str, Any]:
    from adapterswap.files.smallfiles import is_folder
    from adapterswap.planning.allocation import BASE
    from adapterswap.planning.names import expert_name, own_name

    if BASE in (*tasks, *languages) and is_folder(Path(BASE)) and is_first():
        note(f"note: `{BASE}` means the unchanged base model; pass ./{BASE} for the folder")
    experts: dict[str, str] = {}
    sides: dict[str, list[str]] = {"task": [], "language": []}
    for side, references in (("task", tasks), ("language", languages)):
        for reference in references:
            name = BASE if reference == BASE else expert_name(reference, experts, side)
            sides[side].append(name)
            if name != BASE:
                experts[name] = reference
                if name != own_name(reference):
                    note(f"{reference} is called {name!r} here")
    return {"experts": experts, **sides}
