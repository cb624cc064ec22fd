"""What a server may serve, and the names that a client may request.

Experts are listed by a folder of adapter folders or by `experts.yaml`. A requested name is untrusted text. It selects
among these experts, and is never part of a path, so requests cannot reach anything else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from adapterswap.core.model.sources import CONFIG
from adapterswap.core.planning.composition import Composition, parse_composition
from adapterswap.core.planning.names import ExpertName
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.engines.serving.places import Place, Places
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    CompositionError,
    FieldError,
    NotFoundError,
    Problems,
)
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import field
from adapterswap.kit.files.text import expand, shown
from adapterswap.kit.files.yaml import read_recipe

_LONGEST = 300  # characters; a composition with every setting written out has fewer
_SHOWN = 30  # experts named in a message


class UnknownNameError(CompositionError):
    """A name that this server does not know. It is answered with 404, and every other `AdapterswapError` with 400."""


def composition_of(
    name: str, experts: Collection[str], chains: Mapping[str, tuple[str, ...]] | None = None
) -> Composition:
    """The composition that `name` means: an expert as it is, TASK+LANGUAGE, or TASK+LANGUAGE@key=value,…

    Args:
        name: the name in the client's request.
        experts: the names of all experts.
        chains: those of them that are chains → their adapters.
    """
    if name in experts:
        return _chained(Composition(allocation=(Rule(expert=name),)), chains or {})

    # What is neither an expert nor a composition of some
    listed = ", ".join(sorted(experts)[:_SHOWN])
    if len(experts) > _SHOWN:
        listed += ", …"
    remedy = f"The experts here are: {listed or 'none'}. Request one of them, or TASK+LANGUAGE"
    if "+" not in name and "@" not in name:
        raise UnknownNameError(f"There is no expert {shown(name)}", remedy, parameter="name")
    if len(name) > _LONGEST:
        raise CompositionError(
            f"The name {shown(name)} is longer than {_LONGEST} characters", "Use a shorter one", parameter="name"
        )

    composition = parse_composition(name)
    unknown = [expert for expert in composition.expert_names if expert not in experts]
    if unknown:
        raise UnknownNameError(
            f"{shown(name)}: there is no expert {' or '.join(map(shown, unknown))}", remedy, parameter="name"
        )
    return _chained(composition, chains or {})


def _chained(composition: Composition, chains: Mapping[str, tuple[str, ...]]) -> Composition:
    """The composition with the chains of experts that it names."""
    used = {name: chains[name] for name in composition.expert_names if name in chains}
    if not used:
        return composition
    return composition.model_copy(update={"chains": used})


DEFAULT_LIMIT = 256


class Manifest(Declared):
    """The content of `experts.yaml`."""

    experts: dict[str, Place] = field(
        description="Name → folder (relative to this file) or Hub id org/name@revision; or {chain: [FIRST, SECOND]}."
    )
    allow: tuple[str, ...] | None = field(
        default=None,
        description="The only names that are served, such as math+swahili, math. Absent: all possible names.",
    )
    max_compositions: int = field(
        default=DEFAULT_LIMIT,
        ge=1,
        description="How many compositions one server serves. Each takes as much disk as an adapter.",
    )
    base_model: str | None = field(
        default=None,
        description="The base of all experts: a folder (relative to this file) or a Hub id; --base-model overrides it.",
    )
    engine: dict[str, Any] = field(
        default={},
        description="Options of the engine's own server, as after `--`, which overrides them: {port: 8001, "
        "enforce-eager: true}.",
    )

    _skipped: tuple[str, ...] = ()

    @property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Each chain among the experts → the names of its adapters."""
        return Places(self.experts).chains

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters of all experts, by name."""
        return Places(self.experts).adapters

    @property
    def skipped(self) -> tuple[str, ...]:
        """The adapters of the folder that are called like compositions (`math+swahili`); a server makes those."""
        return self._skipped

    @property
    def stacked(self) -> frozenset[str]:
        """The adapters that were trained on top of another one, in a chain."""
        stacked: set[str] = set()
        for parts in self.chains.values():
            stacked.update(parts[1:])
        return frozenset(stacked)

    @property
    def engine_args(self) -> tuple[str, ...]:
        """The engine's options as arguments: true is a flag alone, a list several values, a mapping JSON."""
        arguments: list[str] = []
        for key, value in self.engine.items():
            arguments.append("--" + key.replace("_", "-"))
            if isinstance(value, list):
                arguments += map(str, value)
            elif isinstance(value, Mapping):
                arguments.append(json.dumps(value))
            elif value is not True:
                arguments.append(str(value))
        return tuple(arguments)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a server lists: those in `allow` or, without it, the experts."""
        if self.allow is not None:
            return self.allow
        return tuple(self.experts)

    @staticmethod
    def read(path: str | Path) -> Manifest:
        """Read `experts.yaml`, or a folder, in which each folder with an adapter is an expert of that name.

        Adapters that are called like compositions (`math+swahili`) are left out, see `skipped`.

        Raises:
            NotFoundError: the file or folder does not exist.
            ArgumentError: the folder is an adapter itself, or has none in it.
            FieldError: `experts.yaml` has an unknown key or no experts; a name cannot be used; an entry of `allow` is
                malformed or names an expert that does not exist. All mistakes are reported together.
        """
        path = expand(path)
        if not os.path.exists(path):
            raise NotFoundError(
                f"{path} does not exist", "Pass a folder of adapter folders, or experts.yaml", parameter="path"
            )
        manifest = _from_folder(path) if os.path.isdir(path) else _from_file(path)
        problems = Problems(FieldError)
        for name in manifest.experts:
            with problems.collect():
                Manifest.check_name(name)
        if (shared := Places(manifest.experts).shared_name) is not None:
            problems.add(
                f"{path}: {shared!r} is an expert and an adapter of a chain", "Rename the expert", parameter="experts"
            )
        for name in manifest.allow or ():
            try:
                composition_of(name, manifest.experts)
            except AdapterswapError as error:  # here the file is at fault, not a request
                for problem in error.found:
                    problems.add(problem.message, problem.remedy, parameter="allow")
        for key, value in manifest.engine.items():
            if re.fullmatch(r"[A-Za-z][\w-]*", key) is None:
                problems.add(
                    f"{path}: {shown(key)} is not an option of a server",
                    "Write it without dashes in front, as in `port: 8001`",
                    parameter="engine",
                )
            elif value is None or value is False:
                problems.add(
                    f"{path}: the option {key} is {json.dumps(value)}, which no server can be told",
                    "Remove it, or write the option that switches it off, such as `no-enable-prefix-caching: true`",
                    parameter="engine",
                )
        if not manifest.experts:
            problems.add(f"{path} lists no experts", "Add `NAME: PATH` lines under `experts:`", parameter="experts")
        if manifest.allow == ():
            problems.add(
                f"{path}: `allow` is empty, so nothing would be served",
                "List names such as math+swahili, or remove `allow`",
                parameter="allow",
            )
        problems.raise_if_any()
        return manifest

    @staticmethod
    def check_name(name: str) -> None:
        """Raise if an expert cannot have this name."""
        if name == BASE:
            raise FieldError(
                f"The expert name {BASE!r} is reserved for the unchanged base", "Rename the expert", parameter="experts"
            )
        if not ExpertName(name).fits_short_names or len(name) > _LONGEST:
            raise FieldError(
                f"{shown(name)} cannot be the name of an expert",
                "Use letters, digits, `_`, `-` and `.`, as in swahili-v2",
                parameter="experts",
            )


def _from_folder(path: Path) -> Manifest:
    """The manifest of a folder whose subfolders are adapters."""
    if (path / CONFIG).exists():
        raise ArgumentError(
            f"{path} is an adapter, not a folder of adapters", f"Pass its parent, {path.parent}", parameter="path"
        )
    experts = {}
    for child in sorted(path.absolute().iterdir()):
        if (child / CONFIG).is_file():
            experts[child.name] = str(child)
    if not experts:
        raise ArgumentError(
            f"{path} has no folder with an {CONFIG} in it",
            "Pass the folder that holds the experts' folders",
            parameter="path",
        )

    skipped = [name for name in experts if {"+", "@"} & {*name}]
    manifest = Manifest(experts={name: place for name, place in experts.items() if name not in skipped})
    manifest._skipped = tuple(skipped)
    return manifest


def _from_file(path: Path) -> Manifest:
    """The manifest in a YAML file; its relative paths start at the file's folder."""
    manifest = read_recipe(path, Manifest)
    folder = path.absolute().parent

    def resolve(reference: str) -> str:
        if os.path.isdir(folder / reference):
            return str(folder / reference)
        return reference

    update: dict[str, Any] = {"experts": Places(manifest.experts).placed(resolve)}
    if manifest.base_model is not None:
        update["base_model"] = resolve(manifest.base_model)
    return manifest.model_copy(update=update)
