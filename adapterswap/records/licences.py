"""The licences that experts' model cards state, and whether they agree.

Reads the front matter of an expert's README.md. The file is untrusted: a licence that cannot be read counts as not
stated. This compares what is written and gives no legal advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError, printable
from adapterswap.files.smallfiles import exists, read_small
from adapterswap.files.yamltext import parse_yaml
from adapterswap.planning.plan import Plan

__all__ = ["Licence", "common_licence", "licence_of", "licence_warning", "licences"]

_CARD = "README.md"
_MAX_BYTES = 2**20
_MAX_NAME = 200  # characters of a name or a link


@dataclass(frozen=True)
class Licence:
    """A licence as the Hub's cards state it: `license`, and for `other` also `license_name` and `license_link`."""

    license: str
    name: str = ""
    link: str = ""

    def __str__(self) -> str:
        return self.name or self.license

    def front(self) -> dict[str, str]:
        """The keys of a card's front matter."""
        fields = {"license": self.license, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in fields.items() if value}


def licence_of(folder: Path) -> Licence | None:
    """The licence that the card in an expert's folder states; None if there is no card or it states no licence."""
    path = folder / _CARD
    if not exists(path):
        return None
    try:
        text = read_small(path, "", limit=_MAX_BYTES).decode("utf-8")
    except (AdapterswapError, UnicodeDecodeError):
        return None
    parts = text.replace("\r\n", "\n").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip("\ufeff \n") or "license" not in parts[1]:  # reading YAML takes milliseconds
        return None
    try:
        front = parse_yaml(parts[1])
    except ValueError:
        return None
    return _read(front) if isinstance(front, dict) else None


def _read(front: Mapping[str, Any]) -> Licence | None:
    stated = front.get("license")
    stated = ", ".join(stated) if isinstance(stated, list) and all(isinstance(s, str) for s in stated) else stated
    fields = [stated, front.get("license_name"), front.get("license_link")]
    values = [printable(value.strip())[:_MAX_NAME] if isinstance(value, str) else "" for value in fields]
    return Licence(values[0].lower(), values[1], values[2]) if values[0] else None


def licences(plan: Plan) -> dict[str, Licence | None]:
    """The licence that each expert's card states, by the expert's name."""
    return {name: licence_of(expert.source.folder) for name, expert in plan.experts.items()}


def common_licence(stated: Mapping[str, Licence | None]) -> Licence | None:
    """The licence that all experts state; None if one states no licence or they differ."""
    distinct = set(stated.values())
    return next(iter(distinct)) if len(distinct) == 1 else None


def licence_warning(stated: Mapping[str, Licence | None]) -> str | None:
    """A warning if experts state different licences; else None."""
    named = {name: licence for name, licence in stated.items() if licence is not None}
    if len(set(named.values())) < 2:
        return None
    listed = ", ".join(f"{name}: {licence}" for name, licence in named.items())
    return f"the experts' licences differ ({listed}): check whether you may share the result, and under which terms"
