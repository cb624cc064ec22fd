"""The documentation is correct: generated pages, options, links. tests/pages runs the commands themselves."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from importing import loaded

from adapterswap.cli import COMMANDS, find_command, main
from adapterswap.core.methods.registry import BUILT_IN

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/README.md")]
)


def script_called(name: str) -> Any:
    return loaded(ROOT / "scripts" / f"{name}.py")


def test_the_command_reference_matches_help() -> None:
    script = script_called("command_reference")
    assert (ROOT / "docs" / "commands.md").read_text() == script.reference(), "run python scripts/command_reference.py"


def test_the_page_of_methods_matches_the_registry() -> None:
    script = script_called("methods_page")
    assert (ROOT / "docs" / "methods.md").read_text() == script.page(), "run python scripts/methods_page.py"


def test_the_advice_on_methods_quotes_their_table() -> None:
    """docs/choosing.md: its numbers, and the methods that do not clearly beat the task expert, are the table's."""
    advice = (ROOT / "docs" / "choosing.md").read_text().partition("## What the table of ten seeds says")[2]
    table = (ROOT / "docs" / "methods.md").read_text().partition("## What they are worth in the lab")[2]
    lines = {
        match[1]: match[0] for match in re.finditer(r"^\| \[?(\w+)(?:\]\S*)? \| \d+ \| .*", table, flags=re.MULTILINE)
    }
    for name, quoted in (("ties", "0.533"), ("ties", "[-0.008, +0.052]"), ("layer_swap", "0.511")):
        assert quoted in lines[name]
        assert quoted in advice
    against = {name: re.findall(r"\[([-+][\d.]+), ([-+][\d.]+)\]", line)[-1:] for name, line in lines.items()}
    assert "[{}, {}]".format(*against["layer_swap"][0]) in advice
    methods = BUILT_IN.keys() & against.keys()
    unclear = {name for name in methods for low, high in against[name] if float(low) <= 0 < float(high)}
    (sentence,) = re.findall(r"Some do not clearly beat the task expert\*\*: (.*)\. Model Stock", advice)
    assert {*re.findall(r"`(\w+)`", sentence)} == unclear


def test_every_row_of_a_table_has_the_cells_of_its_heading() -> None:
    """Markdown leaves out what has no heading, and a missing cell moves nothing but is easily overlooked."""
    uneven = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
            rows = [re.sub(r"`[^`\n]*`|\\\|", "", row).count("|") for row in table.splitlines()]
            uneven += [(page.name, table.splitlines()[rows.index(count)]) for count in set(rows) - {rows[0]}]
    assert uneven == []


def test_the_page_of_recipe_fields_matches_the_models() -> None:
    script = script_called("recipe_fields")
    assert (ROOT / "docs" / "fields.md").read_text() == script.page(), "run python scripts/recipe_fields.py"


def test_quoted_code_is_the_code() -> None:
    """Blocks that begin with the path of a file: each part between lines of dots stands in it, in this order."""
    quoted = 0
    for page in PAGES:
        blocks = re.findall(
            r"^ *```py\n *# (\S+\.py)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        for path, block in blocks:
            rest = _unindented((ROOT / path).read_text(encoding="utf-8"))
            for part in re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE):
                _, lines, rest = rest.partition(_unindented(part))
                assert lines, f"{page.name} quotes what {path} does not say: {part}"
                quoted += 1
    assert quoted >= 9


def _unindented(code: str) -> str:
    return re.sub(r"^ +", "", code, flags=re.MULTILINE)


def test_the_walks_through_the_code_name_what_exists() -> None:
    """docs/architecture.md, up to the odd cases: every function, method, class, file and part in backticks."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = page.partition("## How a compose works")[2].partition("## Odd cases")[0]
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "adapterswap").rglob("*.py")}
    defined = set(re.findall(r"^ *(?:def|class) (\w+)", "\n".join(sources.values()), re.MULTILINE))
    known = defined | {path.stem for path in sources} | {path.parent.name for path in sources}

    prose = re.sub(r"```.*?```", "", walks, flags=re.DOTALL)
    names = re.findall(r"`(\w[\w./]*)`", prose)
    unknown = {name for name in names if not known.issuperset(re.split(r"[./]", name.removesuffix(".py")))}
    assert len(names) > 30
    assert unknown == set()


def test_the_table_of_engines_matches_the_limits() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text()
    assert text == script_called("targets_page").page(text), "run python scripts/targets_page.py"


def test_the_status_is_that_of_its_file() -> None:
    """What was measured, on README and the first page, and the commands that install."""
    script = script_called("status_page")
    marks = 0
    for path in script.PAGES:
        text = path.read_text(encoding="utf-8")
        assert text == script.page(text), "run python scripts/status_page.py"
        marks += len(script._BLOCK.findall(text))
    assert marks == 4
    rows = json.loads(script.STATUS.read_text(encoding="utf-8"))
    assert all({"what", "number", "device", "date", "revision"} == row.keys() for row in rows)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d|–", row["date"]) for row in rows)


def test_the_install_lines_follow_one_setting() -> None:
    """On the day of the release one line changes, and every page names PyPI instead of a checkout."""
    script = script_called("status_page")
    pages_with_commands = 0
    for path in script.PAGES:
        text = path.read_text(encoding="utf-8")
        released, checkout = (script.page(text, released=state) for state in (True, False))
        assert script.page(released, released=False) == checkout
        assert "no release on PyPI" not in released

        commands = {"adapterswap": _sources_of(released), ".": _sources_of(checkout)}
        assert all(found == {source} for source, found in commands.items() if found), path.name
        pages_with_commands += bool(commands["."])

    assert pages_with_commands > 10


def test_the_page_on_installing_has_the_oldest_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (row,) = re.findall(r"^\| `models` \|.*", (ROOT / "docs" / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    needed = dict(requirement.split(">=") for requirement in project["optional-dependencies"]["models"])
    stated = {name.lower(): oldest for name, oldest in re.findall(r"(\w+) \(([\d.]+)", row)}
    assert stated == needed


def _sources_of(text: str) -> set[str]:
    """What the commands of a page install adapterswap from, except one that names a wheel, and an error's remedy."""
    elsewhere = r"--find-links wheels |Run `pip install "
    text = re.sub(rf"(?:{elsewhere})'adapterswap\[\w+\]'", "", text)
    return {*re.findall(r"pip (?:install|wheel) (?:[\w-]+ )*'?(\.|adapterswap)(?=\[|\s+#)", text)}


def prose_of(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


PROSE = [page for page in PAGES if page.name != "log.md"]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_numbers_have_one_style(page: Path) -> None:
    """0.43 and 32.4 %, in prose and in tables. (`train[:80%]` is a name for rows.)"""
    assert re.findall(r".*(?<![\w.\d/*])\.\d.*|.*\d%(?!\]).*", prose_of(page)) == []


def test_pages_have_american_spelling() -> None:
    pytest.importorskip("codespell_lib")
    command = [sys.executable, "-m", "codespell_lib", "--builtin", "en-GB_to_en-US", *map(str, PROSE)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    own = r"(?i)\b(?:learnt|licences?|whilst|colour|behaviour)\b"  # not in that list
    assert [(page.name, word) for page in PROSE for word in re.findall(own, prose_of(page))] == []


def test_pages_count_the_methods() -> None:
    """All but the layer swap, in README.md."""
    (number,) = re.findall(r"there are (\d+) \[merge methods\]", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(number) == len(BUILT_IN) - 1


def commands_shown() -> list[tuple[str, str]]:
    """Every `adapterswap …` line of a shell block in a page, continued lines joined."""
    result = []
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = line.strip().removeprefix("$ ").split("  #")[0]
                if line.startswith("adapterswap "):
                    result.append((page.name, line))
    return result


@pytest.mark.parametrize(("page", "line"), commands_shown(), ids=lambda value: value[:60])
def test_options_that_pages_show_exist(page: str, line: str) -> None:
    """Every option shown on a page exists in its command."""
    words = shlex.split(line)
    if words[1].startswith("-"):
        return
    assert words[1] in COMMANDS, line
    command = find_command(words[1])
    below = words[2:3] if isinstance(command, click.Group) else []
    shown = CliRunner().invoke(main, [words[1], *below, "--help"], terminal_width=300).output
    if "--method" in words:  # its own parameters are options that `methods` shows
        shown += CliRunner().invoke(main, ["methods", words[words.index("--method") + 1]]).output
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    for option in (word.split("=")[0] for word in own if re.match(r"--?[a-z]", word)):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", shown), f"{page}: {option} in {line}"


def test_pages_show_commands() -> None:
    """The test above would pass on pages without any command."""
    shown = {line.split()[1] for _, line in commands_shown()}
    assert shown >= {"compose", "inspect", "slice", "verify", "diff", "train", "evaluate", "lab"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_page_on_security_lists_what_may_be_passed() -> None:
    """Each row names exactly what the code permits."""
    pytest.importorskip("starlette")
    from adapterswap.engines.serving.llama_requests import PASSED
    from adapterswap.experiments import permitted

    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.count("|") == 5]
    listed = {(file, key): {*re.findall(r"`(\w+)`", names)} for file, key, _, names in rows}
    for (file, key), names in {
        ("recipe of a sweep", "`settings.gen_kwargs`"): permitted.GENERATION,
        ("recipe of a sweep", "`settings.engine_args`"): permitted.ENGINE,
        ("recipe of training", "`datasets.*.path`, `data_files`, `data_dir`"): permitted.READERS,
        ("task file", "its keys, and those of groups' members"): permitted.TASK,
        ("task file", "`dataset_kwargs`"): permitted.READING,
        ("task file", "`metadata`"): permitted.METADATA,
        ("task file", "`fewshot_config`"): permitted.SHOTS,
        ("task file", "`metric_list`"): permitted.METRIC,
        ("task file", "`filter_list`"): permitted.FILTERS | permitted.FILTER,
        ("request", "parameters"): frozenset().union(*PASSED.values()),
    }.items():
        assert listed[file, key] == names, (file, key)
