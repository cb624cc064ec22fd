"""The site builds without a warning, fetches nothing, and has no dead links."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

import adapterswap
from tests.contrast import faint_texts

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a dead link, a missing anchor or a page outside the menu is an error.

    With `--quiet` mkdocs would not count its warnings, and the build would succeed.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = (site / "python.html").read_text()
    public = set(adapterswap.__all__) - {"__version__"}
    assert not {name for name in public if not re.search(rf'id="adapterswap\.(?:kit\.errors\.)?{name}"', reference)}


def test_labels_are_the_titles_of_the_pages() -> None:
    """The menu gives names only to groups; mkdocs takes a page's label from its heading."""
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert ".md" in menu
    assert not re.findall(r"- .+: .*\.md", menu)


def test_links_outside_docs_lead_to_pages_of_the_site(site: Path) -> None:
    assert 'href="examples.html#a-merge-method-of-your-own"' in (site / "compose.html").read_text()
    assert 'href="concepts.html"' in (site / "index.html").read_text()
    assert 'href="#where-would-it-go"' in (site / "contributing.html").read_text()
    assert 'id="a-merge-method-of-your-own"' in (site / "examples.html").read_text()


def test_copying_a_console_block_copies_only_the_command(site: Path, browser: Any) -> None:
    """The copy button reads the text of a block that is marked for copying."""
    page = browser.new_page()
    page.goto((site / "start.html").as_uri())
    block = page.locator("div.highlight code:has(.gp)").first
    block.evaluate("code => code.setAttribute('data-md-copying', '')")
    copied = block.inner_text().strip()
    page.close()
    assert copied.startswith("adapterswap compose -t lab-run/seed-0/math")
    assert len(copied.splitlines()) == 1


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site behind a server."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# No page twice in a row: until the page of a query is found, that of the one before it is shown.
FIRST_FOUND = {
    "unsloth": "own_adapters.html", "gguf": "gguf.html", "mlx": "own_adapters.html", "ollama": "gguf.html",
    "exit code": "commands.html", "offline": "install.html", "modules_to_save vllm": "troubleshooting.html",
    "install": "install.html", "new tokens": "adapters.html", "pre-registration": "sweep.html",
    "citation": "reproducing.html",
}  # fmt: skip


def test_the_search_finds_the_page_first(address: str, browser: Any) -> None:
    """In one tab, which loads the index once."""
    tab = browser.new_page()
    tab.goto(f"{address}/index.html?q=no+such+words")
    field = tab.locator("[data-md-component=search-query]")
    shown = ".md-search-result__item > .md-search-result__link"
    for query, page in FIRST_FOUND.items():
        field.fill(query)
        field.press("End")  # the search listens to keys
        tab.wait_for_function(
            "([shown, page]) => document.querySelector(shown)?.getAttribute('href').includes(page)", arg=[shown, page]
        )
    tab.close()


def test_the_site_works_from_its_folder_on_a_phone(site: Path, browser: Any) -> None:
    """Opened as files, without a server: the search answers, and no page is wider than the screen."""
    tab = browser.new_page(viewport={"width": 380, "height": 800})
    faults: list[str] = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.goto(f"{(site / 'index.html').as_uri()}?q=ollama")
    first = tab.locator(".md-search-result__item > .md-search-result__link").first
    first.wait_for(state="attached")
    assert "gguf.html" in str(first.get_attribute("href"))
    for page in sorted(site.glob("*.html")):
        tab.goto(page.as_uri(), wait_until="domcontentloaded")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 380, page.name
    tab.close()
    assert faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_read_in_any_scheme_and_by_keyboard(
    site: Path, browser: Any, scheme: Literal["light", "dark"]
) -> None:
    """Texts have contrast, links are not marked by color alone, wide tables take the focus, the search has a name."""
    tab = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})
    tab.goto((site / "methods.html").as_uri())
    assert faint_texts(tab) == []

    link = tab.locator(".md-typeset p > a:not(.headerlink)").first
    assert "underline" in link.evaluate("node => getComputedStyle(node).textDecorationLine")

    wide = tab.locator(".md-typeset__scrollwrap[tabindex='0']").first
    assert wide.evaluate("node => node.scrollWidth > node.clientWidth")
    wide.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function("document.activeElement.scrollLeft > 0")

    assert tab.locator("[role=dialog]").get_attribute("aria-label") == "Search"
    tab.close()


@pytest.mark.parametrize(
    ("question", "page", "section"),
    [
        ("compose my Unsloth adapters", "own_adapters.html", "two-names-for-one-base"),
        ("serve modules_to_save in vLLM", "troubleshooting.html", "17-modules_to_save-in-vllm"),
        ("compose experts with new tokens", "adapters.html", "new-tokens"),
        ("pre-register a sweep", "sweep.html", "pre-registration"),
        ("export to GGUF", "gguf.html", "ollama"),
        ("check exit codes in CI", "commands.html", "exit-codes"),
        ("install it with a GPU", "install.html", "with-and-without-a-gpu"),
        ("install it offline", "install.html", "offline"),
        ("choose layers", "choosing.html", "suggest"),
        ("ship only some layers", "compose.html", "shells-and-cores"),
        ("train on ten problems", "train.html", "ten-problems-in-your-language"),
        ("know when not to use it", "concepts.html", "when-not-to-use-it"),
        ("run it as a service", "serving.html", "stop"),
        ("know what is defended", "security.html", "not-defended"),
        ("understand an error", "troubleshooting.html", "opening-experts"),
        ("cite it", "reproducing.html", "cite"),
    ],
)
def test_questions_are_answered_in_two_clicks(site: Path, question: str, page: str, section: str) -> None:
    """From the first page's text or its tabs to a page, and from its table of contents to the section."""
    assert f'href="{page}"' in (site / "index.html").read_text(), question
    text = (site / page).read_text()
    assert f'href="#{section}"' in text, question
    assert f'id="{section}"' in text, question


def test_the_search_leaves_out_the_log(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    pages = {entry["location"].partition("#")[0] for entry in index}
    assert "compose.html" in pages
    assert not {page for page in pages if page.startswith(("log", "changelog"))}


def test_the_site_fetches_nothing(site: Path) -> None:
    """Fonts and scripts come with the pages."""
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert not re.findall(r"<(?:script|img)[^>]+src=\"https?://[^\"]+\"|<link[^>]+stylesheet[^>]+https?://", pages)
