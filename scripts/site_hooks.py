"""Pages of the site from outside docs/: the examples, the change log, how to contribute. Used by mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_SHORT_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<]{1,32})</code>")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def pages_elsewhere() -> dict[str, str]:
    """Pages outside docs/, each with its path on the site."""
    pages = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    for page in sorted(ROOT.glob("examples/*/README.md")):
        pages[page.relative_to(ROOT).as_posix()] = f"examples/{page.parent.name}.md"
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    for source, place in pages_elsewhere().items():
        if source != "README.md":  # the site has its own first page
            files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between the repository's files into links between pages; links to other files become plain text."""
    elsewhere = pages_elsewhere()
    here = page.file.src_uri
    places = {place: source for source, place in elsewhere.items() if source != "README.md"}
    source = places.get(here, f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = normpath(join(dirname(source), target))
        place = elsewhere.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
        if place is None:
            return text if f"`{file}`" in text or text.startswith("`") else f"{text} (`{file}`)"
        return f"{picture}[{text}]({relpath(place, dirname(here) or '.')}{anchor or ''})"

    return _LINK.sub(link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep short inline code on one line: browsers would break `--max-rank` after a hyphen."""
    return _SHORT_CODE.sub(r'<code class="whole">\1</code>', html)
