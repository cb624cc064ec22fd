"""The site: it builds without a warning, and the tour of its first page is true to the letter."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import adapterswap
from adapterswap.cli import main

ROOT = Path(__file__).parent.parent
START = ROOT / "docs" / "start.md"


@pytest.fixture
def inside(small_lab_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(small_lab_run, tmp_path / "lab-run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sessions() -> list[tuple[str, str]]:
    """Every command that the page shows with its output, and that output."""
    blocks = re.findall(r"```console\n(.*?)```", START.read_text(), flags=re.DOTALL)
    return [tuple(block.removeprefix("$ ").split("\n", 1)) for block in blocks]  # type: ignore[misc]


def run_sessions() -> None:
    for line, shown in sessions():
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert sorted(result.output.splitlines()) == sorted(shown.splitlines()), line


def test_what_the_first_page_shows_is_printed(inside: Path) -> None:
    """To the letter; only the order of standard output and remarks is the terminal's."""
    assert [shlex.split(line)[1] for line, _ in sessions()] == ["compose", "inspect", "verify"]
    run_sessions()


def test_the_first_pages_lines_of_python_run(inside: Path) -> None:
    run_sessions()
    code = re.search(r"```python\n(.*?)```", START.read_text(), flags=re.DOTALL)
    assert code is not None
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code[1]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["math", "language", "mine"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a dead link, a missing anchor or a page that no menu shows is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = (site / "api.html").read_text()
    public = set(adapterswap.__all__) - {"__version__"}
    assert not {name for name in public if not re.search(rf'id="adapterswap\.(?:errors\.)?{name}"', reference)}


def test_links_out_of_docs_lead_to_pages_of_the_site(site: Path) -> None:
    assert 'href="examples/plugin_method.html"' in (site / "compose.html").read_text()
    assert 'href="concepts.html"' in (site / "index.html").read_text()
    assert 'href="architecture.html"' in (site / "contributing.html").read_text()
    assert (site / "examples" / "plugin_method.html").is_file()


def test_the_site_fetches_nothing(site: Path) -> None:
    """Fonts and scripts come with the pages."""
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert not re.findall(r"<(?:script|img)[^>]+src=\"https?://[^\"]+\"|<link[^>]+stylesheet[^>]+https?://", pages)
