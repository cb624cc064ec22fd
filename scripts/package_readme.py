"""README.md and the project's address in the metadata of a package, as PyPI shows them.

PyPI has only the text: a link to another file leads nowhere there. With ADAPTERSWAP_URL (the repository's address, set
by the release workflow) links become addresses of the version's tag. Without it their text stays, and pictures go.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def packaged(text: str, url: str | None, tag: str) -> str:
    """The text with its links to files of the repository at `url` written out, or taken out."""

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if url:
            return f"{picture}[{words}]({url.rstrip('/')}/{'raw' if picture else 'blob'}/{tag}/{target})"
        return "" if picture else words

    return _LINK.sub(link, text)


class ReadmeHook(MetadataHookInterface):
    """What hatchling asks for the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        url = os.environ.get("ADAPTERSWAP_URL")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        content = packaged(text, url, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": content}
        if url:
            metadata["urls"] = {"Source": url}
