"""Commands from signatures: a function's parameters are a command's arguments and options, its `Args:` their help.

    @declare("slice")
    def command(expert: Expert, *, layers: Annotated[str, "LAYERS"], dry_run: bool = False) -> None:
        \"\"\"Cut an expert to some layers.

        Args:
            layers: Layers to keep, such as 0-4,30-31.

        Examples:
            adapterswap slice experts/math --layers 5-29 -o math-core
        \"\"\"

Positional parameters are arguments, the others options. A type says what a value may be: `bool` is a flag, `Literal` a
choice, `tuple[str, ...]` an option that can be repeated. `Annotated` adds click's own type, flags (texts that begin
with a dash), or the word that help shows for the value. `Options(make)` stands for all parameters of `make`, and the
command receives what it returns; its own `Args:` may explain them anew. `Examples:` end the help, and tests/pages runs
them. A dry run needs no --out-path: it says what would happen in a new folder `out`.

The functions are the commands', not the library's: help must not import numpy, a library's docstring speaks of Python
values, and most commands print what their function returns.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import click

# The groups of `-h`, in their order; all other options are in a group of the command's own.
GROUPS: dict[str, tuple[str, ...]] = {
    "Experts": (
        "task_expert", "language_expert", "experts", "chains", "base_model", "start", "adapter", "recipe", "num_layers",
        "task_type",
    ),
    "Layers": (
        "rules", "bottom", "top", "bottom_transition", "top_transition", "partition", "layers", "modules", "embeddings",
        "row_threshold", "norms", "outside", "stack",
    ),
    "Method": ("method", "task_weight", "language_weight", "weights", "more_parameters", "allow_negative"),
    "Options": (),
    "Output": (
        "out_path", "layout", "names", "tokenizer", "max_rank", "max_error", "max_shard_size", "dequantize", "outtype",
        "pieces", "by", "overwrite", "dry_run", "as_json",
    ),
    "Hub": ("push_to_hub", "private", "revision", "commit_message"),
    "General": ("quiet", "verbose", "--help"),
}  # fmt: skip
_FEW = 9  # options that need no groups
# The help of options that several commands have, unless their own `Args:` say more.
_HELP = {
    "base_model": "The base model.  [default: the one that the experts name]",
    "num_layers": "Number of the base's layers.  [default: from its config]",
    "experts_path": "A folder of adapter folders, or experts.yaml with names, allowed compositions and limits.",
    "device": "auto, cpu, cuda, cuda:N, mps.",
    "dtype": "Dtype of the base; auto: as stored.",
    "engine": "What computes the answers.  [default: transformers]",
    "engine_args": "With --engine vllm: its own settings, such as gpu_memory_utilization=0.8. Repeatable.",
    "confirm_run_unsafe_code": "Let tasks (MBPP) run the code that the model writes.",
    "out_path": "Folder to write.",
    "max_rank": "Truncate modules of a higher rank.",
    "max_error": "Truncate blends up to this relative error of ΔW.",
    "overwrite": "Replace what adapterswap wrote there before.",
    "dry_run": "Print the plan and write nothing.",
    "as_json": "Print JSON.",
}
_RULES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}


class Options:
    """In `Annotated`: this parameter is `make(…)`, whose keyword parameters are options of the command."""

    def __init__(self, make: Callable[..., Any], more: Iterable[click.Option] = ()) -> None:
        self.make, self.more = make, list(more)


class Option(click.Option):
    """An option whose mistakes are worded as the library words them.

    Attributes:
        rule: the values that it accepts, in words; empty if its type says so itself.
        listed: whether `-h` shows it.
        names_output: whether it is --out-path, and required except for a dry run.
    """

    rule = ""
    listed = True
    names_output = False

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().type_cast_value(ctx, value)
        except click.BadParameter:
            if not self.rule or ctx.resilient_parsing:
                raise
            raise click.UsageError(f"{max(self.opts, key=len)} is {value}, but must be {self.rule}.", ctx) from None


class Command(click.Command):
    """A command whose help lists options in groups, and which needs no --out-path for a dry run."""

    def invoke(self, ctx: click.Context) -> Any:
        output = next((param for param in self.params if isinstance(param, Option) and param.names_output), None)
        if output is not None and ctx.params["out_path"] is None:
            if not ctx.params["dry_run"]:
                raise click.MissingParameter(ctx=ctx, param=output)

            # A dry run names a path that does not exist: out, out1, out2 …
            name = "out"
            numbers = itertools.count(1)
            while os.path.lexists(name):
                name = f"out{next(numbers)}"
            ctx.params["out_path"] = name
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        homes: dict[str, str] = {}
        for title, names in GROUPS.items():
            homes |= dict.fromkeys(names, title)
        places = {name: place for place, name in enumerate(homes)}

        options: dict[str, click.Option] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                name = param.name or ""
                if "--help" in param.opts:
                    name = "--help"
                options[name] = param

        for name in sorted(options, key=lambda name: places.get(name, -1)):
            if not getattr(options[name], "listed", True):
                continue
            record = options[name].get_help_record(ctx)
            if record is not None:
                groups[homes.get(name, "Options")].append(record)
        if sum(map(len, groups.values())) <= _FEW:
            groups = {"Options": list(itertools.chain.from_iterable(groups.values()))}

        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_examples(self, formatter)


class Group(click.Group):
    """A group of commands whose help also ends with examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_examples(self, formatter)


def _write_examples(command: click.Command, formatter: click.HelpFormatter) -> None:
    """Write the lines of `epilog` as they stand, so that they can be copied."""
    if not command.epilog:
        return
    with formatter.section("Examples"):
        for line in command.epilog.splitlines():
            formatter.write(f"  {line}\n")


def declare(
    name: str, *, cls: type[Command] = Command, group: click.Group | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Turn a function into a command, as this module's docstring describes; with `group`, into one of its commands."""

    def make(function: Callable[..., None]) -> click.Command:
        params, call = _parameters(function, {})
        built = cls(
            name,
            params=params,
            callback=call,
            help=_description(function),
            epilog=_lines(_EXAMPLES, function),
            context_settings=_CONTEXT,
        )
        if group is not None:
            group.add_command(built)
        return built

    return make


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Form(NamedTuple):
    """What an annotation says."""

    kind: Any
    types: list[click.ParamType[Any]]
    flags: list[str]
    metavar: str | None
    options: Options | None
    multiple: bool


def _form(hint: Any) -> _Form:
    """What an annotation says about an option: its kind, click's types, its flags, and whether it is repeated."""
    more: list[Any] = []
    metavar, multiple = None, False

    # From the outside to the kind of one value
    while (origin := get_origin(hint)) in (Annotated, Union, types.UnionType, tuple):
        if origin is Annotated:
            more += hint.__metadata__
            words = [item for item in hint.__metadata__ if isinstance(item, str) and not item.startswith("-")]
            if words:
                metavar = metavar or words[-1]
            hint = hint.__origin__
        elif origin is tuple:
            hint, multiple = get_args(hint)[0], True
        else:
            hint = next(part for part in get_args(hint) if part is not type(None))

    # What was beside it: types of click, flags, or options of its own
    param_types: list[click.ParamType[Any]] = []
    flags: list[str] = []
    options: Options | None = None
    for item in more:
        if isinstance(item, click.ParamType):
            param_types.append(item)
        elif isinstance(item, str) and item.startswith("-"):
            flags.append(item)
        elif isinstance(item, Options) and options is None:
            options = item
    return _Form(hint, param_types, flags, metavar, options, multiple)


def _parameters(
    function: Callable[..., Any], texts: Mapping[str, str]
) -> tuple[list[click.Parameter], Callable[..., Any]]:
    """A function's parameters, and what calls it with their values; `texts` go before its own `Args:`."""
    hints = get_type_hints(function, include_extras=True)
    texts = {**_args(function), **texts}
    params: list[click.Parameter] = []
    bundles: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        form = _form(hints[name])

        # click takes a default of None for a value, so a required parameter must have none at all.
        required = parameter.default is parameter.empty
        default: dict[str, Any] = {}
        if not required and not form.multiple:
            default["default"] = parameter.default

        if form.options is not None:
            inner, make = _parameters(form.options.make, texts)
            inner += form.options.more
            bundles[name] = make, [param.name or "" for param in inner]
            params += inner
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            argument = click.Argument([name], type=_type(form), required=required, **default)
            if form.multiple:
                argument = click.Argument([name], type=_type(form), required=required, nargs=-1, metavar=form.metavar)
            params.append(argument)
        else:
            text = texts.get(name, _HELP.get(name, ""))
            params.append(_option(name, form, default, text, required=required))

    def call(**values: Any) -> Any:
        for name, (make, names) in bundles.items():
            values[name] = make(**{key: values.pop(key) for key in names})
        return function(**values)

    return params, call


def _option(name: str, form: _Form, default: dict[str, Any], text: str, *, required: bool) -> Option:
    """The click option of a parameter."""
    # The output is required only if something is written; `Command.invoke` checks it.
    names_output = required and name == "out_path"
    if names_output:
        text += "  [required, except with --dry-run]"

    # Not False otherwise: click would then take an option without its value for one whose value is None.
    is_flag = None
    kind, metavar = _type(form), form.metavar
    if form.kind is bool and not form.types and not form.metavar:
        is_flag, kind = True, None
    elif not form.types:
        metavar = metavar or {int: "N", float: "X"}.get(form.kind)

    flags = form.flags or [f"--{name.replace('_', '-')}"]
    shown_default = default.get("default")
    option = Option(
        [*flags, name],
        type=kind,
        is_flag=is_flag,
        multiple=form.multiple,
        show_default=shown_default is not None and shown_default is not False,
        required=required and not names_output,
        metavar=metavar,
        help=text,
        **default,
    )
    option.rule, option.names_output = _rule(form, option.type), names_output
    return option


def _type(form: _Form) -> click.ParamType[Any] | Any:
    """The click type of an option's values."""
    if form.types:
        return form.types[0]
    if get_origin(form.kind) is Literal:
        return click.Choice(get_args(form.kind))
    return form.kind


def _rule(form: _Form, kind: click.ParamType[Any]) -> str:
    """The values that a type accepts, in words."""
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))}"
    if isinstance(kind, click.IntRange) and kind.min is not None:
        if kind.max is None:
            return f"{kind.min} or more"
        return f"{kind.min} to {kind.max}"
    if form.types:
        return ""
    return _RULES.get(form.kind, "")


# Sections of a docstring: their indented lines.
_INDENTED = r"(?P<lines>(?:[ \t]+.*\n?|\n)*)"
_ARGS = re.compile(rf"^Args:\n{_INDENTED}", flags=re.MULTILINE)
_EXAMPLES = re.compile(rf"^Examples:\n{_INDENTED}", flags=re.MULTILINE)


def _lines(section: re.Pattern[str], function: Callable[..., Any]) -> str:
    """The lines of a section; empty if there is none."""
    found = section.search(inspect.getdoc(function) or "")
    if found is None:
        return ""
    return textwrap.dedent(found["lines"]).strip()


def _args(function: Callable[..., Any]) -> dict[str, str]:
    """The texts of `Args:` by parameter, each on one line."""
    entries = re.findall(r"^(\w+): (.*(?:\n[ \t]+.*)*)", _lines(_ARGS, function), flags=re.MULTILINE)
    return {name: re.sub(r"\n\s+", " ", text) for name, text in entries}


def _description(function: Callable[..., Any]) -> str:
    """The docstring without its sections."""
    text = inspect.getdoc(function) or ""
    for section in (_ARGS, _EXAMPLES):
        text = section.sub("", text)
    return text.strip()
