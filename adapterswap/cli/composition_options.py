"""The options that say what to compose, shared by every command that composes.

Turns options or a recipe into a plan through the library. Prints a note only if an expert gets a name other than its
folder's, or if `base` could mean two things.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from adapterswap.cli.options import Count, Dtype, Expert, NamedExpert, name_and_path
from adapterswap.cli.output import note
from adapterswap.cli.signature import Option, Options
from adapterswap.core import Parameter, find_method, words_of
from adapterswap.core.methods.registry import PARAMETERS, names_of
from adapterswap.kit.errors import ArgumentError, CompositionError, FieldError, Problems
from adapterswap.kit.processes import Processes

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from adapterswap.cli.options import Dtype
    from adapterswap.core import Composition, Plan, Rule


RuleText = Annotated[str, "--rule", "RULE"]
_TASK_TYPES = click.Choice(
    ["CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"], case_sensitive=False
)


class MethodName(click.ParamType[str]):
    """A built-in method, or one of an installed package; packages are searched only if the name is not built in."""

    name = "method"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in names_of() and value not in names_of(packages=True):
            try:
                find_method(value)
            except ArgumentError as error:
                raise click.UsageError(str(error), ctx) from None
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in names_of(packages=True) if name.startswith(incomplete)]


def _parameter_option(parameter: Parameter) -> Option:
    """The option of a method's parameter. `adapterswap methods NAME` shows it instead of every command's help."""
    kind: Any = parameter.kind
    metavar: str | None = {bool: "BOOL", int: "N"}.get(parameter.kind, "X")
    if parameter.kind is str:
        kind = click.Choice(parameter.choices)
    if parameter.choices:
        metavar = None

    flag, _ = words_of(parameter.name, "")
    option = Option([flag, parameter.name], type=kind, help=parameter_text(parameter), metavar=metavar)
    option.rule, option.listed = parameter.allowed, False
    return option


def parameter_text(parameter: Parameter) -> str:
    """A parameter's description with its default."""
    if parameter.required:
        shown = "required"
    elif isinstance(parameter.default, bool | str):
        shown = f"default: {str(parameter.default).lower()}"
    else:
        shown = f"default: {parameter.default:g}"
    return f"{parameter.description[0].upper()}{parameter.description[1:]}.  [{shown}]"


def _composition(
    *,
    task_expert: Annotated[tuple[Expert, ...], "-t", "--task-expert"] = (),
    language_expert: Annotated[tuple[Expert, ...], "-l", "--language-expert"] = (),
    experts: tuple[NamedExpert, ...] = (),
    num_layers: Annotated[Count, "L"] | None = None,
    task_type: Annotated[str, _TASK_TYPES, "TYPE"] | None = None,
    tokenizer: Annotated[str, "NAME"] | None = None,
    config_from: Annotated[str, "NAME"] | None = None,
    chains: Annotated[tuple[str, ...], "--chain", "NAME=A,B"] = (),
    rules: tuple[RuleText, ...] = (),
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int | None = None,
    top_transition: int | None = None,
    partition: Literal["A", "B", "C", "Z"] | None = None,
    row_threshold: float | None = None,
    norms: Literal["average", "layer"] | None = None,
    outside: Literal["average", "task", "language"] | None = None,
    stack: Literal["both", "encoder", "decoder"] | None = None,
    method: Annotated[str, MethodName(), "NAME"] | None = None,
    task_weight: float | None = None,
    language_weight: Annotated[float, "Y"] | None = None,
    weights: Literal["equal", "magnitude"] | None = None,
    more_parameters: Annotated[tuple[str, ...], "--parameter", "NAME=VALUE"] = (),
    allow_negative: bool = False,
    **parameters: Any,
) -> dict[str, Any]:
    """The options by name, with those of the methods' parameters.

    Args:
        task_expert: Task expert; repeat to average several.
        language_expert: Language expert; repeat to average several. Use `base` to reset its layers to the base.
        experts: Instead of -t and -l: an expert, with the name that rules use; repeatable. Without rules, --method
            combines them all.
        rules: Which expert owns which layers: 'swahili: 0-4,30-31', 'math*0.5 + swahili*0.5: 5', 'mlp of code: 6-9';
            `math` without layers takes the rest. Repeatable; the first match wins.
        chains: With --expert: adapters that were trained one on top of another, the first on the base; rules then use
            NAME. Repeatable.
        method: How to combine experts; `adapterswap methods` lists all methods.  [default: layer_swap]
        bottom: Bottom layers from the language expert.  [default: 5 of 32, scaled]
        top: Top layers from the language expert.  [default: 2 of 32, scaled]
        bottom_transition: Blended layers above the bottom ones.  [default: 0]
        top_transition: Blended layers below the top ones.  [default: 0]
        task_weight: The task's weight in blends.  [default: 1]
        language_weight: The language's weight in blends.  [default: 1]
        weights: magnitude: divide weights by each side's mean |ΔW|.  [default: equal]
        more_parameters: A parameter of the method, such as boost=0.2; some have options of their own, such as
            --density 0.5. `adapterswap methods NAME` shows them. Repeatable.
        row_threshold: Set rows of ΔW with a mean |ΔW| below X to zero.
        partition: Divide layers and modules as in the second paper.
        norms: Norms of full checkpoints: averaged, or with their layer.  [default: average]
        stack: In a model with an encoder and a decoder: where zones and partitions apply.  [default: both]
        outside: Embeddings, heads and towers in a layer swap: averaged, or a side's.  [default: average]
        task_type: PEFT task type of the result, such as CAUSAL_LM, if the experts' is wrong.
        tokenizer: Whose tokenizer and chat templates the result takes: an expert's name, or `base`.  [default: the
            experts' where they agree, else the task expert's]
        config_from: Whose config full weights take, if those of full checkpoints compute differently: an expert's
            name or `base`.  [default: they must agree]
        allow_negative: Allow negative weights (unlearning).
    """
    options = dict(locals())
    return {**options.pop("parameters"), **options}


_WITH_OPTIONS = [parameter for parameter in PARAMETERS.values() if parameter.has_option]
Requested = Annotated[dict[str, Any], Options(_composition, map(_parameter_option, _WITH_OPTIONS))]
"""What to compose, unchanged, for `plan_from_options`."""


def plan_from_options(options: dict[str, Any], *, recipe: str | None = None, base_model: str | None = None) -> Plan:
    """The plan of adapters that the options, or a recipe, describe."""
    plan = any_plan_from_options(options, recipe=recipe, base_model=base_model)
    plan.check_adapter()
    return plan


def any_plan_from_options(options: dict[str, Any], *, recipe: str | None = None, base_model: str | None = None) -> Plan:
    """Like `plan_from_options`, but experts can be full checkpoints too."""
    from adapterswap.core import compose

    return compose(composition_from_options(options, recipe=recipe, base_model=base_model))


def plan_of(path: str | None, options: dict[str, Any], *, base_model: str | None = None) -> Plan:
    """The plan of the adapter at `path`, or of the composition that a recipe at `path` or the options describe."""
    from adapterswap.core.planning.functions import adapter_plan

    if path is None or path.endswith((".yaml", ".yml")):
        return any_plan_from_options(options, recipe=path, base_model=base_model)
    fitting = {"num_layers", "tokenizer"}
    used = [key for key, value in options.items() if key not in fitting and value not in (None, (), False)]
    if used:
        raise ArgumentError(
            f"`{used[0]}` only applies to a composition, not to the adapter {path}",
            "Leave out the option or the adapter",
            parameter=used[0],
        )
    return adapter_plan(path, base_model, options["num_layers"], tokenizer=options["tokenizer"])


def composition_from_options(
    options: dict[str, Any], *, recipe: str | None = None, base_model: str | None = None
) -> Composition:
    """The composition itself; see `plan_from_options`."""
    from adapterswap.core import Composition

    # The fields of a composition that were passed
    known = {*Composition.model_fields, *PARAMETERS}
    fields = {key: value for key, value in options.items() if key in known and value not in (None, ())}
    if not fields.get("allow_negative"):
        fields.pop("allow_negative", None)
    experts, rules = fields.pop("experts", ()), options.get("rules", ())
    fields |= _more_parameters(options.get("more_parameters", ()), fields)
    if base_model:
        fields["base_model"] = base_model
    chains = _chains(fields.pop("chains", ()))
    if chains:
        fields["chains"] = chains
    tasks, languages = options["task_expert"], options["language_expert"]

    # A recipe, which a few options may complete
    if recipe:
        completing = {"base_model", "num_layers", "allow_negative", "task_type", "tokenizer", "config_from"}
        if tasks or languages or experts or rules or fields.keys() - completing:
            raise click.UsageError("A recipe says what to compose: pass either a recipe or these options, not both.")
        return _from_recipe(recipe).model_copy(update=fields)

    # Experts by name
    if experts or rules:
        if rules and (tasks or languages) and not experts:
            raise click.UsageError("--rule needs names: pass --expert NAME=PATH instead of -t and -l.")
        if tasks or languages:
            raise click.UsageError(
                "Pass experts with either --expert or --task-expert and --language-expert, not both."
            )
        return _by_rules(named_experts(experts), rules, fields)

    # Two sides
    if chains:
        raise click.UsageError("--chain requires the adapters that it names: pass --expert NAME=PATH.")
    if not tasks or not languages:
        raise click.UsageError("Pass --task-expert and --language-expert, or --expert and --rule, or a recipe.")
    return Composition.read_content({**fields, **_name_experts(tasks, languages)})


def _from_recipe(recipe: str) -> Composition:
    """A recipe's composition. `recipe_dtype` returns the dtype of a mergekit YAML."""
    from adapterswap.kit.files.yaml import find_recipe
    from adapterswap.tools.mergekit import MergekitMerge, read_mergekit
    from adapterswap.tools.recipes import read_composition

    path = find_recipe(recipe, "compose")
    if MergekitMerge.is_at(path):
        return read_mergekit(path).composition
    return read_composition(path)


def recipe_dtype(path: str | None, requested: Dtype | None = None) -> Dtype | None:
    """The dtype of full weights: from the option, or from a mergekit YAML at `path`."""
    from adapterswap.kit.files.yaml import find_recipe
    from adapterswap.tools.mergekit import MergekitMerge

    if path is None or not path.endswith((".yaml", ".yml")):
        return requested
    recipe_value = MergekitMerge.dtype_in(find_recipe(path, "compose"))
    if requested is not None and recipe_value not in (None, requested):
        raise click.UsageError(
            f"The recipe sets the dtype {recipe_value}: remove it there, or leave out --dtype {requested}."
        )
    return requested or recipe_value


def named_experts(options: tuple[str, ...]) -> dict[str, str]:
    """The paths of `--expert NAME=PATH`, by name."""
    experts: dict[str, str] = {}
    for option in options:
        name, place = name_and_path(option)
        if name in experts:
            raise click.UsageError(f"--expert {name} was passed twice.")
        experts[name] = os.path.expanduser(place)
    return experts


def _chains(options: tuple[str, ...]) -> dict[str, list[str]]:
    """The adapters of `--chain NAME=A,B`, by the chain's name."""
    chains: dict[str, list[str]] = {}
    for option in options:
        name, _, parts = option.partition("=")
        if not name or not parts:
            raise click.UsageError(f"--chain {option!r} is not NAME=A,B.")
        if name in chains:
            raise click.UsageError(f"--chain {name} was passed twice.")
        chains[name] = parts.split(",")
    return chains


def parsed_rules(texts: tuple[str, ...]) -> list[Rule]:
    """The rules of `--rule`; the mistakes in all of them are reported together."""
    from adapterswap.core import Rule

    problems = Problems(FieldError)
    rules: list[Rule] = []
    for text in texts:
        with problems.collect():
            rules.append(Rule.from_text(text))
    if problems:
        raise problems.as_error(FieldError).recast(parameter="rules")
    return rules


def _by_rules(experts: dict[str, str], texts: tuple[str, ...], fields: dict[str, Any]) -> Composition:
    """The composition of `--expert` and `--rule`; without rules, of a method that combines all experts."""
    from adapterswap.core import Composition

    if not experts:
        raise click.UsageError("--rule requires the experts that it names: pass --expert NAME=PATH.")
    if not texts:
        return Composition.read_content({**_all_combined(experts, fields), "experts": experts})
    rules = parsed_rules(texts)
    composition = Composition.read_content({**fields, "experts": experts, "rules": rules})
    named = set(composition.expert_names)
    if named < experts.keys():  # an unknown name in a rule is reported elsewhere, with the nearest expert
        unused = next(name for name in experts if name not in named)
        raise CompositionError(
            f"No rule names the expert {unused!r}", "Remove it, or give it layers", parameter="experts"
        )
    return composition


def _all_combined(experts: dict[str, str], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a composition whose method combines all experts."""
    from adapterswap.core import BASE

    if fields.get("method", "layer_swap") == "layer_swap":
        raise click.UsageError("Pass a --rule for the experts, or a --method that combines them all.")
    if fields.keys() & {"task_weight", "language_weight"}:
        raise click.UsageError("Put weights into a rule: --rule 'math*2 + swahili'.")

    # A chain counts as one, in place of its adapters.
    chains = fields.get("chains", {})
    in_chains = set(itertools.chain.from_iterable(chains.values()))
    names = [*chains, *(name for name in experts if name not in in_chains)]
    if fields["method"] != "soup":
        return {**fields, "task": names, "language": [BASE]}

    # A soup with the base on the other side would be half of the experts' average.
    others = {key: value for key, value in fields.items() if key not in ("method", "weights")}
    rule: dict[str, Any] = {"blend": dict.fromkeys(names, 1)}
    if fields.get("weights") == "magnitude":
        rule["weights"] = "magnitude"
    return {**others, "rules": [rule]}


def _more_parameters(settings: tuple[str, ...], fields: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The values of `--parameter`, which the composition checks."""
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name or not value:
            raise click.UsageError(f"--parameter {setting!r} is not NAME=VALUE.")
        if name in values:
            raise click.UsageError(f"{name} was passed twice by --parameter.")
        if name in fields:
            raise click.UsageError(f"{name} was passed both by {words_of(name, '')[0]} and by --parameter.")
        values[name] = value

    if not values:
        return {}
    return {"parameters": values}


def _name_experts(tasks: tuple[str, ...], languages: tuple[str, ...]) -> dict[str, Any]:
    """The experts of both sides by name, and the names of each side; a note says which name is not the folder's."""
    from adapterswap.core import BASE, ExpertName

    if BASE in (*tasks, *languages) and os.path.isdir(BASE) and Processes.is_first():
        note(f"note: `{BASE}` means the unchanged base model; pass ./{BASE} for the folder")

    experts: dict[str, str] = {}
    sides: dict[str, list[str]] = {"task": [], "language": []}
    for side, references in (("task", tasks), ("language", languages)):
        for reference in references:
            if reference == BASE:
                sides[side].append(BASE)
                continue
            name = ExpertName.choose(reference, experts, side)
            if name != ExpertName.of(reference):
                note(f"using the name {name!r} for {reference}")
            sides[side].append(name)
            experts[name] = reference
    return {"experts": experts, **sides}
