"""What a server may serve: the experts by name, the compositions allowed, and how many.

Read from a folder of adapter folders, or from `experts.yaml`. Nothing outside it can be reached by a request. Knows
nothing of what the experts hold, nor of servers.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from adapterswap.errors import AdapterswapError, Problems
from adapterswap.experts.adapters import CONFIG
from adapterswap.files.smallfiles import exists, expand, is_folder
from adapterswap.files.yamlfiles import StrictModel, read_recipe
from adapterswap.serving.names import check_expert_name, composition_of

__all__ = ["DEFAULT_LIMIT", "Manifest", "read_manifest"]

DEFAULT_LIMIT = 256


class Manifest(StrictModel):
    """The content of `experts.yaml`."""

    experts: dict[str, str] = Field(description="Name → folder (relative to this file) or Hub id org/name@revision.")
    allow: tuple[str, ...] | None = Field(
        default=None,
        description="The only names that are served, such as math+swahili, math. Absent: all there can be.",
    )
    max_compositions: int = Field(
        default=DEFAULT_LIMIT,
        ge=1,
        description="How many compositions one server serves; each takes an adapter's space.",
    )


def read_manifest(path: str | Path) -> Manifest:
    """Read `experts.yaml`, or list a folder: each folder in it that holds an adapter is an expert of that name.

    Raises:
        AdapterswapError: there is no such file or folder, or no expert in it; a name that cannot be used; an unknown
            key; an entry of `allow` that is malformed or names an expert that there is not. All are told at once.
    """
    path = expand(path)
    if not exists(path):
        raise AdapterswapError(f"{path} does not exist", "Give a folder of adapter folders, or experts.yaml")
    manifest = _from_folder(path) if is_folder(path) else _from_file(path)
    problems = Problems()
    for name in manifest.experts:
        with problems.collect():
            check_expert_name(name)
    for name in manifest.allow or ():
        with problems.collect():
            composition_of(name, manifest.experts)
    if not manifest.experts:
        problems.add(f"{path} names no expert", "Add `NAME: PATH` lines under `experts:`")
    if manifest.allow == ():
        problems.add(f"{path}: allow is empty, so nothing is served", "List names such as math+swahili, or remove it")
    problems.raise_if_any()
    return manifest


def _from_folder(path: Path) -> Manifest:
    if (path / CONFIG).exists():
        raise AdapterswapError(f"{path} is one adapter, not a folder of them", f"Give its parent, {path.parent}")
    found = {child.name: str(child) for child in sorted(path.absolute().iterdir()) if (child / CONFIG).is_file()}
    if not found:
        raise AdapterswapError(
            f"{path} holds no folder with an {CONFIG}", "Give the folder that holds the experts' folders"
        )
    return Manifest(experts=found)


def _from_file(path: Path) -> Manifest:
    manifest = read_recipe(path, Manifest)
    beside = path.absolute().parent
    experts = {
        name: str(beside / reference) if is_folder(beside / reference) else reference
        for name, reference in manifest.experts.items()
    }
    return manifest.model_copy(update={"experts": experts})
