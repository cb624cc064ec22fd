"""The command line: `adapterswap COMMAND …`; commands that print alike share a file of this folder.

A command's file is imported when the command is used, so that `adapterswap -h` answers at once. Commands parse, call
the library and print; data goes to stdout, everything else to stderr. Nothing in the library imports this package.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from adapterswap import __version__
from adapterswap.cli.output import VERBOSE, print_errors, with_flags
from adapterswap.kit.dependencies import explained
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    CompositionError,
    DataError,
    DependencyError,
    ExpertError,
    FieldError,
    NotFoundError,
    OutputError,
    RunError,
    UnsupportedError,
    printable,
    visible,
)
from adapterswap.kit.processes import Processes, TerminationHandler

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["COMMANDS", "EXIT_CODES", "find_command", "main"]

WRONG_REQUEST, NOT_DONE, INTERRUPTED = 2, 3, 130  # 1 is the answer no, of `verify`, `diff` and `recipes check`

# The exit code of each class of errors. Of several problems the largest counts: no correction of the request alone
# would help. click's own errors of usage are wrong requests too.
EXIT_CODES: dict[type[AdapterswapError], int] = {
    ArgumentError: WRONG_REQUEST,
    FieldError: WRONG_REQUEST,
    CompositionError: WRONG_REQUEST,
    ExpertError: NOT_DONE,
    BaseModelError: NOT_DONE,
    DataError: NOT_DONE,
    NotFoundError: NOT_DONE,
    OutputError: NOT_DONE,
    UnsupportedError: NOT_DONE,
    DependencyError: NOT_DONE,
    RunError: NOT_DONE,
}

# name -> one line of help, in the order in which people need them. tests/test_cli.py checks the lines.
COMMANDS = {
    "compose": "Compose adapters by layer into a new adapter.",
    "ask": "Ask a base, its experts and a composition the same question.",
    "merge": "Merge an adapter or a composition into full weights.",
    "export": "Export an adapter or a composition as LoRA in GGUF.",
    "inspect": "Show what an adapter or a full checkpoint holds: ranks, scales, layers, owners.",
    "slice": "Cut an expert to some layers: a shell or a core.",
    "convert": "Convert an adapter: other names, layout or dtype, another kind to rsLoRA, from mlx-lm or for it.",
    "extract": "Cut an adapter out of a full fine-tune.",
    "verify": "Recompute an adapter or a model from its sources and compare.",
    "diff": "Compare two adapters: distance and cosine of their ΔW.",
    "analyze": "Show where experts changed their base, layer by layer.",
    "suggest": "Propose layers for two experts, with the reasons.",
    "methods": "List the methods that combine experts, with their parameters and references.",
    "train": "Train an expert from a recipe.",
    "recipes": "List, print, copy and check recipes.",
    "evaluate": "Evaluate a base, an adapter or a composition with lm-evaluation-harness.",
    "sweep": "Evaluate many compositions on one loaded base.",
    "report": "Write one HTML page, LaTeX and CSV of a sweep or a lab run.",
    "serve": "Serve compositions by name with vLLM or llama.cpp.",
    "studio": "Explore, try, compare and export compositions on a local page.",
    "lab": "Run the whole experiment: experts, compositions, a test, a report.",
}

_FILES = {
    **dict.fromkeys(("merge", "export"), "compose"),
    **dict.fromkeys(("inspect", "slice", "convert", "extract"), "adapters"),
    **dict.fromkeys(("verify", "diff"), "comparison"),
    **dict.fromkeys(("analyze", "suggest"), "analysis"),
}  # of other commands, the file has the command's name


def find_command(name: str) -> click.Command:
    """A command; its file is imported."""
    command = getattr(importlib.import_module(f"adapterswap.cli.{_FILES.get(name, name)}"), f"{name}_command")
    assert isinstance(command, click.Command)
    return command


_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")  # read when these libraries are imported


def _quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """The callback of --quiet."""
    if value:
        from adapterswap.cli.output import be_quiet

        be_quiet()


def _verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """The callback of --verbose."""
    ctx.meta[VERBOSE] = value


def _add_common_options(command: click.Command) -> None:
    """Add --quiet and --verbose, which every command has; only once per command."""
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            _add_common_options(subcommand)
    elif all(param.name != "quiet" for param in command.params):
        flags = (
            (["-q", "--quiet"], _quiet, "Print only results, warnings and errors."),
            (["-v", "--verbose"], _verbose, "Print more, and the traceback of an error."),
        )
        for names, callback, text in flags:
            option = click.Option(names, is_flag=True, expose_value=False, callback=callback, help=text)
            command.params.append(option)


def _skip_collection() -> None:
    """Spare the search for cycles at exit, 0.1 s of a command's 0.5 s. Triton would report what is left as leaks."""
    if "triton" not in sys.modules:
        gc.freeze()


_BARE = ("Got unexpected", "No such command")


def _usage(error: click.UsageError) -> str:
    """click's message; where neither it nor a similar name says what to do, with the command that shows help."""
    message = printable(error.format_message())
    if error.ctx is None:
        return message

    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        flags: list[str] = []
        for param in error.ctx.command.params:
            flags += [flag for flag in param.opts if flag.startswith("--")]

        # Those that have the mistyped name as a word, else those that are like it
        word = name.lstrip("-")
        near = [flag for flag in flags if word in flag[2:].split("-")]
        if not near:
            near = _most_like(word, flags)
        message = f"No such option {name!r}.{_did_you_mean(near)}"
    elif not isinstance(error, click.MissingParameter | click.BadOptionUsage) and not message.startswith(_BARE):
        return message

    if "Did you mean" in message:
        return message
    return f"{message.rstrip('.')}. See `{error.ctx.command_path} -h`."


def _did_you_mean(names: Sequence[str]) -> str:
    """The end of a message that names what may have been meant; empty if nothing is near."""
    if not names:
        return ""
    return f" Did you mean {' or '.join(names)}?"


def _most_like(word: str, flags: list[str]) -> list[str]:
    """The flag that a mistyped one is most like, and those that are as like; `word` is without its dashes."""
    from difflib import SequenceMatcher

    ratios = {flag: SequenceMatcher(None, word, flag.lstrip("-")).ratio() for flag in flags}
    best = max(ratios.values(), default=0.0)
    return [flag for flag, ratio in ratios.items() if ratio >= max(best - 0.05, 0.6)]


def _open_standard_streams() -> None:
    """Open those that are closed, as after `>&-`: else the next file that is opened would get what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


class _Commands(click.Group):
    """A click group that imports a command when you use it."""

    def main(self, *args: Any, **options: Any) -> Any:
        """See click."""
        _open_standard_streams()
        return super().main(*args, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = find_command(cmd_name)
        _add_common_options(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = [repr(command) for command in get_close_matches(name, COMMANDS)]
            raise click.UsageError(f"No such command {name!r}.{_did_you_mean(near)}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and their help, without importing them as click does."""
        from click.shell_completion import CompletionItem

        items: list[CompletionItem] = []
        for name, text in COMMANDS.items():
            if name.startswith(incomplete):
                items.append(CompletionItem(name, help=text))
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # no traceback for characters that a terminal cannot show

        if threading.current_thread() is threading.main_thread():
            leave = partial(sys.exit, 128 + signal.SIGTERM)  # removes temporary folders
            signal.signal(signal.SIGTERM, TerminationHandler(leave))
        atexit.register(_skip_collection)
        if not (sys.stderr.isatty() and Processes.is_first()):  # progress bars of libraries are for terminals only
            os.environ.update(dict.fromkeys(_BARS, "1"))

        exit_code = NOT_DONE
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            click.echo("\nAborted!", err=True)  # the empty line ends the terminal's ^C
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is not None and interruption.args:
                click.echo(with_flags(str(interruption), command), err=True)
            sys.exit(INTERRUPTED)
        except AdapterswapError as error:
            problems = error.problems
            exit_code = max(EXIT_CODES.get(problem.kind, NOT_DONE) for problem in error.found)
            if error.signal is not None:
                exit_code = 128 + error.signal
            if ctx.meta.get(VERBOSE):
                import traceback

                click.echo(visible("".join(traceback.format_exception(error))), err=True, nl=False)
        except ModuleNotFoundError as error:
            if (missing := explained(error)) is None:
                raise
            problems = missing.problems
        except click.exceptions.NoArgsIsHelpError:  # its message is the help
            raise
        except click.UsageError as error:
            click.echo(f"Error: {_usage(error)}", err=True)
            sys.exit(WRONG_REQUEST)
        except MemoryError:
            problems = AdapterswapError("Out of memory", "Use smaller models or a machine with more memory").problems
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of the pipe has closed it; click handles that
                raise
            reason = f"{error.strerror or error}"
            if error.filename:
                reason += f" ({error.filename})"
            problems = AdapterswapError(reason, "Check the path and the disk").problems

        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        print_errors(problems, command)
        sys.exit(exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="adapterswap")
def main() -> None:
    """Compose LoRA adapters by layer: reasoning from one expert, a language from another."""
