"""Pages of the site that are not one file of docs/: the examples, the changes, how to contribute."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
_SHORT_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<]{1,32})</code>")
_FENCE = re.compile(r"^(```.*?^```)", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LOG = "docs/log.md"  # the developers' own, and no page
_CODE = ROOT / "docs" / "architecture.md"
_EXAMPLES = """# Examples

Each is a folder of `examples/` in the checkout. Run the commands from the top of the checkout.
"""


def pages_elsewhere() -> dict[str, str]:
    """Files that are not pages under their own names, each with its place on the site: a page, or a section of one."""
    slug = slugify(case="lower")
    places = dict(_PAGES)
    for file, page in [(_CODE, "contributing.md"), *((example, "examples.md") for example in _examples())]:
        title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        places[file.relative_to(ROOT).as_posix()] = f"{page}#{slug(title, '-')}"
    return places


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    contents = {place: [_text(ROOT / source, place)] for source, place in _PAGES.items()}
    contents["contributing.md"].append(_section(_CODE, "contributing.md"))
    contents["examples.md"] = [_EXAMPLES, *(_section(page, "examples.md") for page in _examples())]
    for place, parts in contents.items():
        files.append(File.generated(config, place, content="\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files into links between pages; keep what has changed out of the search."""
    here = page.file.src_uri
    if here.startswith("changelog"):
        page.meta["search"] = {"exclude": True}
    return relinked(markdown, source=f"docs/{here}", here=here)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep short inline code on one line: browsers would break `--max-rank` after a hyphen. Mark errors, which wrap."""
    html = html.replace('<span class="go">Error:', '<span class="go error">Error:')
    return _SHORT_CODE.sub(r'<code class="whole">\1</code>', html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Give the theme's search dialog a name, which screen readers say when it opens."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def relinked(markdown: str, *, source: str, here: str) -> str:
    """The text of the repository's file `source` on the page `here`; links to what is not a page become plain text."""
    elsewhere = pages_elsewhere()

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = normpath(join(dirname(source), target))
        is_page = file.startswith("docs/") and file != _LOG
        place = elsewhere.get(file, file.removeprefix("docs/") if is_page else None)
        if place is None:
            return text if f"`{file}`" in text or text.startswith("`") else f"{text} (`{file}`)"
        path, _, section = place.partition("#")
        anchor = anchor or (f"#{section}" if section else "")
        return f"{picture}[{text}]({relpath(path, dirname(here) or '.')}{anchor})"

    return _LINK.sub(link, markdown)


def _examples() -> list[Path]:
    """The page of each example."""
    return sorted(ROOT.glob("examples/*/README.md"))


def _section(file: Path, here: str) -> str:
    """A file as a section of the page `here`: its headings one level lower."""
    parts = _FENCE.split(_text(file, here))
    parts[::2] = [re.sub(r"^#", "##", part, flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)


def _text(file: Path, here: str) -> str:
    """The text of a file, with its links as on the page `here`."""
    return relinked(file.read_text(encoding="utf-8"), source=file.relative_to(ROOT).as_posix(), here=here)
