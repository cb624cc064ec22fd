"""The command line: help, what it imports, streams, exit codes, JSON."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result
from conftest import LAYERS

from adapterswap.cli import COMMANDS, find_command
from adapterswap.kit.processes import TerminationHandler

HEAVY = ("torch", "transformers", "peft", "datasets", "trl", "lm_eval", "matplotlib", "accelerate")


def modules_after(*arguments: object) -> set[str]:
    """The heavy libraries that the command line imports, run in a separate process."""
    script = (
        "import sys; from adapterswap.cli import main\n"
        f"try: main({[str(argument) for argument in arguments]!r})\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "print('IMPORTED', *sorted(name for name in sys.modules if '.' not in name))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(process.stdout.rpartition("IMPORTED")[2].split())


def test_help_imports_nothing_heavy() -> None:
    """One process is started, and forks for each command."""
    script = """
import json, os, sys
from adapterswap.cli import COMMANDS, main
for arguments in (["-h"], ["--version"], *([name, "-h"] for name in COMMANDS)):
    if os.fork() == 0:
        try: main(arguments)
        except SystemExit as stop: assert not stop.code, stop.code
        print("IMPORTED", *arguments, *sorted(name for name in sys.modules if "." not in name), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = [line.split()[1:] for line in process.stdout.splitlines() if line.startswith("IMPORTED ")]
    assert [words[0] for words in found] == ["-h", "--version", *COMMANDS]
    for words in found:
        assert not {*words[1:]} & {*HEAVY, "numpy", "pydantic", "rich", "jinja2"}, words[0]


def test_composing_and_inspecting_import_no_torch(math: Path, swahili: Path, tmp_path: Path) -> None:
    compose = ["compose", "-t", math, "-l", swahili, "-o", tmp_path / "out", "--bottom-transition", "1"]
    assert not modules_after(*compose) & {*HEAVY, "huggingface_hub"}
    assert not modules_after("inspect", tmp_path / "out") & {*HEAVY, "huggingface_hub"}


ODD = "a\x1b[31m\x07\x9b\u202eb\nError: c"  # a colour, a bell, a direction, another line


@pytest.mark.parametrize(
    "arguments",
    [
        ["compose", "-t", "{}", "-l", "swahili", "-o", "out"],
        ["compose", "-t", "swahili", "-l", "swahili", "-o", "{} out"],
        ["compose", "-t", "swahili", "-l", "swahili", "--bottom", "{}", "-o", "out"],
        ["compose", "swahili", "swahili", "{}"],
        ["slice", "{}", "--layers", "0-1", "-o", "{} out"],
        ["export", "{}", "-o", "{}.gguf"],
        ["export", "{}", "--pieces", "-o", "{} out"],
        ["inspect", "{}"],
        ["inspect", "{} none"],
        ["verify", "{}"],
        ["diff", "{}", "swahili"],
        ["suggest", "-t", "{}", "-l", "swahili", "-o", "{}.yaml"],
        ["recipes", "cp", "compose/llama-3.1-8b/swahili", "{} out"],
        ["recipes", "cat", "{} recipe.yaml"],
        ["recipes", "validate", "{} recipe.yaml"],
        ["{}"],
    ],
    ids=" ".join,
)
def test_control_characters_do_not_reach_the_terminal(
    arguments: list[str], run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Names of folders are printed with the codes of such characters, and on one line."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(math, ODD)
    shutil.copytree(swahili, "swahili")
    Path(f"{ODD} recipe.yaml").write_text("# \x1b[31m \x07 text\ntask: x\n")
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda stream, color: False)  # as at a terminal
    result = run(*(argument.replace("{}", ODD) for argument in arguments))
    printed = result.stdout + result.stderr
    assert printed
    assert [character for character in printed if not character.isprintable() and character != "\n"] == []
    assert not [line for line in printed.splitlines() if line.startswith("Error: c")], printed


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_without_its_value_is_refused(name: str) -> None:
    found = find_command(name)
    commands = [found]
    if isinstance(found, click.Group):
        commands = list(found.commands.values())
    for command in commands:
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag:
                with pytest.raises(click.BadOptionUsage, match="requires an argument"):
                    command.make_context(name, [option.opts[0]])


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_matches_the_commands(name: str, run: Callable[..., Result]) -> None:
    command = find_command(name)
    assert command.name == name
    assert (command.help or "").splitlines()[0] == COMMANDS[name]
    assert run(name, "-h").exit_code == 0


def test_compose_writes_and_reports(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> None:
    result = run("compose", "-t", math, "-l", swahili, "-o", tmp_path / "out")
    assert result.exit_code == 0
    strip = result.stdout.splitlines()
    assert strip[:2] == ["        012345", "layers  " + strip[1][8] + 5 * strip[1][9]]
    assert "bottom 1, top 0: the paper's default, in proportion" in result.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    again = run("compose", "-t", math, "-l", swahili, "-o", tmp_path / "out")
    assert again.exit_code == 3
    assert again.stdout == ""
    assert "--overwrite" in again.stderr
    assert run("compose", "-t", math, "-l", swahili, "-o", tmp_path / "out", "--overwrite").exit_code == 0


def test_requests_that_mix_two_ways_to_ask_say_which_to_leave_out(
    run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path
) -> None:
    pair, out = ["-t", math, "-l", swahili], ["-o", tmp_path / "out"]
    ties = ["--method", "ties", "--density", 0.5, "--parameter", "density=0.3", "--max-rank", 8]
    for words, message in (
        (
            ["compose", math, *out],
            "is an adapter, not a recipe. Pass experts with --task-expert and",
        ),
        (["train", math, *out], "is an adapter, not a recipe. Use a YAML file"),
        (["merge", math, *out, "--bottom", 1], "--bottom only applies to a composition, not to the adapter"),
        (["compose", *pair, *out, *ties], "density was passed both by --density and by --parameter."),
        (["inspect", math / "adapter_model.safetensors"], "must be a folder. Pass the folder that holds it."),
    ):
        result = run(*words)
        assert (result.exit_code, result.stderr.count("Error: ")) == (2, 1)
        assert message in result.stderr


def test_an_adapter_is_merged_with_a_depth_that_is_passed(
    run: Callable[..., Result], math: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ["merge", math, "--base-model", base("llama"), "-o", tmp_path / "out", "--dry-run"]
    assert run(*words, "--num-layers", LAYERS).exit_code == 0
    refused = run(*words, "--num-layers", LAYERS + 1)
    assert (refused.exit_code, "--num-layers" in refused.stderr) == (2, True)


def test_one_folder_under_two_names_is_reported(run: Callable[..., Result], math: Path, tmp_path: Path) -> None:
    words = ["compose", "-t", math, "-l", math, "-o", tmp_path / "out", "--dry-run"]
    result = run(*words)
    assert result.exit_code == 0
    assert "are the same folder\n" in result.stderr
    as_json = run(*words, "--json")
    assert json.loads(as_json.stdout)["written"] is False
    warnings = [line for line in result.stderr.splitlines() if line.startswith("Warning: ")]
    assert as_json.stderr.splitlines()[1:] == warnings  # after a remark on the name of an expert


def test_a_dry_run_writes_nothing(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> None:
    options = ["-t", math, "-l", swahili, "-o", tmp_path / "out", "--bottom", 2, "--top", 1, "--json"]
    dry = run("compose", *options, "--dry-run")
    assert dry.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    output = json.loads(dry.stdout)
    assert output["written"] is False
    real = json.loads(run("compose", *options).stdout)
    assert real == output | {"written": True}
    header = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()[:8]
    size = (tmp_path / "out" / "adapter_model.safetensors").stat().st_size
    assert real["bytes"] == size - 8 - int.from_bytes(header, "little")
    owners = {name.split(".")[2]: owner for name, owner in real["modules"].items()}
    assert owners == {**dict.fromkeys("015", swahili.name), **dict.fromkeys("234", math.name)}


def test_a_recipe_equals_the_options(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> None:
    (tmp_path / "experts").mkdir()
    for name, folder in (("math", math), ("swahili", swahili)):
        (tmp_path / "experts" / name).symlink_to(folder)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "experts: {math: experts/math, swahili: experts/swahili}\n"
        "method: layer_swap\n"
        "allocation:\n"
        "  - {layers: 0-1, expert: swahili}\n"
        "  - {layers: 2, blend: {math: 1, swahili: 1}}\n"
        "  - {layers: 5, modules: [self_attn, mlp], expert: swahili}\n"
        "  - {expert: math}\n"
    )
    assert run("compose", recipe, "-o", tmp_path / "one").exit_code == 0
    zones = ["--bottom", 2, "--top", 1, "--bottom-transition", 1]
    experts = ["-t", tmp_path / "experts" / "math", "-l", tmp_path / "experts" / "swahili"]
    assert run("compose", *experts, *zones, "-o", tmp_path / "two").exit_code == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compose", "-o", "x"], "Pass --task-expert and --language-expert"),
        (["compose", "-t", "a", "-l", "b"], "Missing option '-o'"),
        (["compose", "r.yaml", "-t", "a", "-o", "x"], "pass either a recipe or these options"),
        (
            ["compose", "-t", "a", "-l", "b", "-o", "x", "--bottom", "many"],
            "--bottom is many, but must be a whole",
        ),
        (["compose", "-t", "a", "-l", "b", "--rule", "a", "-o", "x"], "--rule needs names: pass --expert NAME=PATH"),
        (["compose", "-t", "a", "--expert", "b=b", "-o", "x"], "Pass experts with either --expert or"),
        (["swap"], "No such command 'swap'. Did you mean 'sweep'?"),
        (["compse"], "No such command 'compse'. Did you mean 'compose'?"),
        (["recipes", "validat"], "Did you mean 'validate'?"),
        (["compose", "--metod", "ties"], "No such option '--metod'. Did you mean --method?\n"),
        (["sweep", "r.yaml", "--resume"], "No such option '--resume'. See `"),
        (["train", "sweep/llama-3.1-8b/swahili"], "is a recipe for `adapterswap sweep`, not for `adapterswap train`"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], message: str, run: Callable[..., Result]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-t", "./nowhere", "-l", "base"], "Error: The path ./nowhere does not exist"),
        (
            ["-t", "org/nowhere", "-l", "base"],
            "org/nowhere is not a local folder and could not be downloaded",
        ),
        (["-t", "./a/b/c", "-l", "base"], "Error: The path ./a/b/c does not exist"),
        (["-t", "x", "-l", "y", "--task-weight", "nan"], "not a finite number"),
    ],
)
def test_errors_exit_1_with_a_remedy(
    options: list[str], message: str, run: Callable[..., Result], tmp_path: Path
) -> None:
    result = run("compose", *options, "-o", tmp_path / "out")
    assert result.exit_code in (2, 3)
    assert result.stdout == ""
    assert message in result.stderr
    assert all(line.startswith("Error: ") for line in result.stderr.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_inspect_shows_modules_and_owners(
    run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path
) -> None:
    output = json.loads(run("inspect", math, "--json").stdout)
    assert len(output["modules"]) == 42
    first = output["modules"][0]
    assert first["name"] == "model.layers.0.mlp.down_proj"
    assert (first["layer"], first["kind"], first["rank"], first["alpha"]) == (0, "mlp", 8, 16)
    assert first["scale"] == pytest.approx(16 / 8**0.5)
    run("compose", "-t", math, "-l", swahili, "-o", tmp_path / "out", "--bottom", 1, "--top-transition", 2, "--top", 1)
    shown = run("inspect", tmp_path / "out")
    assert shown.exit_code == 0
    letters = shown.stdout.splitlines()[-2].removeprefix("layers  ")
    assert letters[0] == letters[5] != letters[1] == letters[2]
    assert letters[3:5] == "++"
    owners = {m["layer"]: m["owner"] for m in json.loads(run("inspect", tmp_path / "out", "--json").stdout)["modules"]}
    assert owners[1] == math.name
    assert owners[3] == {math.name: 0.5, swahili.name: 0.5}


def test_the_checkouts_script_and_the_module_are_the_command_line() -> None:
    script = Path(__file__).parent.parent / "cli.py"
    for command in ([sys.executable, str(script)], [sys.executable, "-m", "adapterswap"]):
        process = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert process.stdout.startswith("adapterswap, version ")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(math: Path, swahili: Path, tmp_path: Path, closed: str) -> None:
    """Without them, the next file that is opened would get what is printed."""
    command = f"{sys.executable} -m adapterswap"
    subprocess.run(f"{command} inspect {math} {closed}", shell=True, check=True)
    written = [tmp_path / name for name in ("open", "closed")]
    for folder, how in zip(written, ("", closed), strict=True):
        script = f"{command} compose -t {math} -l {swahili} -o {folder} --bottom 1 --top 1 {how}"
        subprocess.run(script, shell=True, check=True, capture_output=not how)
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in written)
    assert one == other


def test_a_process_that_a_library_forks_ends_on_sigterm(run: Callable[..., Result]) -> None:
    """With a handler of ours it could miss the signal, and the library's pool would wait for its end forever."""
    run("methods")
    assert isinstance(signal.getsignal(signal.SIGTERM), TerminationHandler)
    code = """
import os, signal
from adapterswap.kit.processes import TerminationHandler
signal.signal(signal.SIGTERM, handler := TerminationHandler(lambda: None))
if (child := os.fork()) == 0:
    os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
assert os.waitpid(child, 0)[1] == 0 and signal.getsignal(signal.SIGTERM) is handler
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_forked_process_ends_on_a_sigterm_that_precedes_its_first_instruction() -> None:
    """On one core it has not run yet when the signal comes; a pool that has no more work ends its processes so."""
    code = """
import os, signal, time
from adapterswap.kit.processes import TerminationHandler
signal.signal(signal.SIGTERM, TerminationHandler(lambda: None))
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
for _ in range(20):
    if (child := os.fork()) == 0:
        time.sleep(10)
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
