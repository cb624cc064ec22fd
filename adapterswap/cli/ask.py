"""`adapterswap ask`: a question → the answers of a base, its experts and a composition, side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import click

from adapterswap.cli.composition_options import Requested, any_plan_from_options, named_experts
from adapterswap.cli.options import BaseDtype, Count, Device, Expert, ExpertPath, Json, Place, Share, Text, only_with
from adapterswap.cli.output import echo, note, print_errors, print_json, working
from adapterswap.cli.signature import declare
from adapterswap.kit.errors import AdapterswapError, ArgumentError, DataError, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adapterswap.core import Plan
    from adapterswap.experiments.evaluation.asking import Answer, Panel, Seated

_NARROW = 28  # characters of a column; narrower ones are shown one below the other


class _Words(ExpertPath):
    """A path and a prompt. A prompt that begins with ~ is no path."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value


@declare("ask")
def ask_command(
    words: Annotated[tuple[str, ...], _Words(or_recipe=True), "[PATH] [PROMPT]"] = (),
    *,
    request: Requested,
    base_model: Expert | None = None,
    prompts: Place | None = None,
    chat: bool = False,
    only: Annotated[str, "NAME,…"] | None = None,
    max_new_tokens: Count = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    sampling_seed: Annotated[int, click.IntRange(min=0), "N"] = 0,
    plain: bool = False,
    system_instruction: Text | None = None,
    enable_thinking: Annotated[bool, "--enable-thinking/--disable-thinking"] | None = None,
    chat_template_from: Annotated[str, "NAME"] | None = None,
    device: Device = "auto",
    dtype: BaseDtype = "auto",
    max_rank: Annotated[Count, "R"] | None = None,
    max_error: Share | None = None,
    as_json: Json = False,
) -> None:
    """Ask a base, its experts and a composition the same question.

    PATH is an adapter, such as one that `compose` wrote, or a recipe (YAML). Without PATH, the options say what to
    compose; nothing is written. The answers stream side by side. They are greedy, and prompts are put into the
    tokenizer's chat template if it has one. With PATH or instead of it, --expert NAME=PATH adds adapters to ask.

    Args:
        base_model: The base model. Without experts, only the base answers.  [default: the one that the experts name]
        prompts: Instead of PROMPT: a file with a prompt on each line, or with JSON lines that have `prompt` or
            `messages`; - reads them from the standard input. Prints a JSON line for each.
        chat: Instead of PROMPT: a conversation. /restart forgets it, /quit leaves.
        only: Who answers: base, experts by name, composition (of PATH the folder's name).  [default: all]
        max_new_tokens: Maximum length of an answer, in tokens.
        temperature: Draw answers instead of taking the most likely tokens.
        top_p: With --temperature: draw from the most likely tokens that make up this share.
        sampling_seed: Seed of --temperature.
        plain: Send the text unchanged, without a chat template.
        system_instruction: System message of every conversation.
        enable_thinking: Have the chat template turn reasoning on or off.  [default: as the template does]
        chat_template_from: Whose chat template prompts have: an expert's name or `base`.  [default: the experts' where
            they agree, else the task expert's]

    Examples:
        adapterswap ask math-swahili "How much is 7 + 5?"
        adapterswap ask -t experts/math -l experts/swahili --chat
    """
    path, prompt = _path_and_prompt(words, prompts, chat)
    only_with("--temperature", temperature, "top_p", "sampling_seed")
    plan, experts = _plan_or_experts(path, request, base_model)
    from adapterswap.experiments.evaluation.asking import AskSettings, Panel

    names = None
    if only is not None:
        names = [name for name in only.split(",") if name]
    settings = AskSettings(
        only=names,
        max_rank=max_rank,
        max_error=max_error,
        chat_template_from=chat_template_from,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        sampling_seed=sampling_seed,
        plain=plain,
        system_instruction=system_instruction,
        enable_thinking=enable_thinking,
    )
    composition: Plan | str | None = path
    if plan is not None:
        composition = plan
    with working("opening the experts"):
        panel = Panel.prepare(composition, settings, base_model=base_model, experts=experts)
    if plan is not None:
        for line in plan.strip.splitlines():
            note(line)
    for line in panel.companions.prompt_lines:
        note(line)

    with _seated(panel, device, dtype) as seated:
        if prompts is not None:
            for number, row in _rows(prompts):
                question: Any = row.get("prompt")
                if question is None:
                    question = row["messages"]
                try:
                    reply = seated.reply(question)
                except AdapterswapError as error:
                    raise error.within(f"line {number}") from None
                _print_line({**row, "answers": _as_json(reply.answers)})
        elif chat:
            _converse(seated, as_json)
        else:
            assert prompt is not None
            answers = _shown(seated, prompt, as_json)
            if as_json:
                print_json({"prompt": prompt, "answers": _as_json(answers)})


def _path_and_prompt(words: tuple[str, ...], prompts: str | None, chat: bool) -> tuple[str | None, str | None]:
    """PATH and PROMPT: a prompt is the last word, unless prompts come from elsewhere."""
    if prompts is not None and chat:
        raise click.UsageError("Pass either --prompts or --chat, not both.")

    if prompts is not None or chat:
        if len(words) > 1:
            option = "--chat"
            if prompts is not None:
                option = "--prompts"
            raise click.UsageError(f"With {option}, pass only PATH: {words[1]!r} is one argument too many.")
        if words:
            return words[0], None
        return None, None

    if not words:
        raise click.UsageError("Pass a PROMPT, --prompts FILE or --chat.")
    if len(words) > 2:
        raise click.UsageError(
            f"Pass PATH and PROMPT; quote a prompt of several words: {words[2]!r} is one argument too many."
        )
    if len(words) == 2:
        return words[0], words[1]
    return None, words[0]


def _plan_or_experts(
    path: str | None, request: dict[str, Any], base_model: str | None
) -> tuple[Plan | None, dict[str, str]]:
    """The plan that a recipe or the options describe, and further adapters to ask."""
    passed = {name for name, value in request.items() if value not in (None, (), False)}
    is_recipe = path is not None and path.endswith((".yaml", ".yml"))
    if not is_recipe and passed <= {"experts"}:  # experts without rules are asked one by one
        if path is None and not passed and base_model is None:
            raise click.UsageError(
                "Pass whom to ask: PATH before the PROMPT, or --task-expert and --language-expert, or --base-model."
            )
        return None, named_experts(request["experts"])
    if path is not None and not is_recipe:
        name = sorted(passed - {"experts"})[0]
        raise ArgumentError(
            f"`{name}` only applies to a composition, not to the adapter {path}",
            "Leave out the option or the adapter",
            parameter=name,
        )

    recipe = path and os.path.expanduser(path)
    with working("opening the experts"):
        return any_plan_from_options(request, recipe=recipe, base_model=base_model), {}


@contextmanager
def _seated(panel: Panel, device: str, dtype: str) -> Iterator[Seated]:
    """The loaded panel; progress is shown only while it is loaded."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        with working(f"loading {panel.base.reference}"):
            seated = stack.enter_context(panel.seated(device=device, dtype=dtype))
        yield seated


def _rows(file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The prompts of a file, with their lines; the standard input is read as far as it is answered."""
    try:
        with click.open_file(os.path.expanduser(file), encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _row(line.strip(), f"{file}, line {number}")
    except OSError as error:
        raise ArgumentError(
            f"{file} cannot be read: {error.strerror}", "Pass a file with prompts, or -", parameter="prompts"
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text", "Save it as UTF-8", parameter="prompts") from None


def _row(line: str, where: str) -> dict[str, Any]:
    """A line: a prompt, or a JSON object with `prompt` or `messages` and anything else, which is kept."""
    if not line.startswith("{"):
        return {"prompt": line}

    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where}: a line that begins with {{ is JSON, and this is not valid: {error}",
            'Write {"prompt": "…"}',
            parameter="prompts",
        ) from None

    if ("prompt" in row) == ("messages" in row) or "answers" in row:
        raise DataError(
            f"{where}: a row has either `prompt` or `messages`, and no `answers`",
            "Rename or remove the others",
            parameter="prompts",
        )
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise DataError(f"{where}: `prompt` is not text", 'Write {"prompt": "…"}', parameter="prompts")
    return dict(row)


def _print_line(content: Mapping[str, Any]) -> None:
    """Print a JSON document on one line."""
    is_utf8 = "utf" in (sys.stdout.encoding or "").lower()
    click.echo(visible(json.dumps(content, ensure_ascii=not is_utf8, allow_nan=False)))


def _as_json(answers: Mapping[str, Answer]) -> dict[str, Any]:
    from dataclasses import asdict

    return {name: asdict(answer) for name, answer in answers.items()}


def _converse(seated: Seated, as_json: bool) -> None:
    """Answer the lines of the standard input; every subject remembers its own answers."""
    histories: dict[str, list[dict[str, str]]] = {name: [] for name in seated.panel.subjects}
    if sys.stdin.isatty():
        note("/restart forgets the conversation, /quit leaves")
    for line in _turns():
        if line == "/quit":
            return
        if line == "/restart":
            for history in histories.values():
                history.clear()
            continue
        question = {"role": "user", "content": line}
        conversations = {name: [*history, question] for name, history in histories.items()}
        try:
            answers = _shown(seated, conversations, as_json)
        except AdapterswapError as error:  # for example, a turn that is too long: the conversation continues without it
            print_errors(error.problems, click.get_current_context().command)
            continue
        for name, answer in answers.items():
            histories[name] += [question, {"role": "assistant", "content": answer.text}]
        if as_json:
            _print_line({"prompt": line, "answers": _as_json(answers)})


def _turns() -> Iterator[str]:
    """What the user types, without empty lines."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                yield line.strip()
        return

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def _shown(seated: Seated, prompt: Any, as_json: bool) -> Mapping[str, Answer]:
    """The answers, shown while they are written if there is a terminal, and else at the end."""
    answers: Mapping[str, Answer] = {}
    if as_json:
        *_, answers = seated.stream(prompt)
    elif sys.stdout.isatty():
        with _live(list(seated.panel.subjects)) as update:
            for answers in seated.stream(prompt):
                update(answers)
    else:
        *_, answers = seated.stream(prompt)

        # A line for each answer, with its subject in front; further lines of an answer are indented.
        width = max(map(len, answers), default=0)
        for name, answer in answers.items():
            first, *others = answer.text.strip().split("\n")
            echo(f"{name:{width}}  {first}".rstrip())
            for line in others:
                echo(f"{'':{width}}  {line}".rstrip())

    cut = [name for name, answer in answers.items() if not answer.ended]
    if cut and not as_json:
        most = seated.panel.settings.max_new_tokens
        note(f"cut at --max-new-tokens {most}, or where the model's context ends: {', '.join(cut)}")
    return answers


@contextmanager
def _live(names: list[str]) -> Iterator[Callable[[Mapping[str, Answer]], None]]:
    """Show answers side by side while they are written; at the end they stay, whole."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stdout)
    last: Mapping[str, Answer] = {}
    with Live(console=console, transient=True, refresh_per_second=12) as live:

        def update(answers: Mapping[str, Answer]) -> None:
            nonlocal last
            last = answers
            live.update(_columns(console.width, names, answers, most=max(console.height - 3, 3)))

        yield update
    console.print(_columns(console.width, names, last, most=None))


def _columns(width: int, names: list[str], answers: Mapping[str, Answer], *, most: int | None) -> RenderableType:
    """Answers in columns, or one below the other where columns would be narrow.

    Args:
        width: of the terminal.
        names: the subjects.
        answers: their answers so far.
        most: show only the last lines, as many as fit; None for all of them.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    across = width // len(names) >= _NARROW
    room = width // len(names) - 2
    if not across:
        room = width
        if most is not None:
            most = max(most // len(names) - 1, 1)

    measure = Console(width=width)
    texts: list[Text] = []
    for name in names:
        text = Text("…")
        if name in answers:
            text = Text(visible(answers[name].text.strip()))
        lines = list(text.wrap(measure, room))
        if most is not None:
            lines = lines[-most:]
        texts.append(Text("\n").join(lines))

    if across:
        table = Table(box=None, expand=True, header_style="bold", padding=(0, 1))
        for name in names:
            table.add_column(Text(visible(name)), ratio=1, overflow="fold")
        table.add_row(*texts)
        return table
    below = Table.grid()
    for name, text in zip(names, texts, strict=True):
        below.add_row(Text(visible(name), style="bold"))
        below.add_row(text)
    return below
