"""A composition to use elsewhere: the command line, the Python lines and the YAML that reproduce it, and its files."""

from __future__ import annotations

import re
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterswap.core import Composition, ExpertName, compose, words_of, write_adapter
from adapterswap.engines.gguf.export import export
from adapterswap.experiments.studio.choice import FIELDS, by_rules
from adapterswap.experiments.studio.workspace import Workspace
from adapterswap.kit.files.folders import CARD
from adapterswap.kit.files.yaml import dump_yaml

FILES = {"adapter": "adapter (.zip)", "gguf": "GGUF for llama.cpp and Ollama", "card": "model card"}
_RECIPE = "composition.yaml"


@dataclass(frozen=True)
class Lines:
    """The lines that reproduce one composition.

    Attributes:
        command: a shell command; with `needs_recipe`, it reads `yaml` from the file composition.yaml.
        python: lines of a script.
        yaml: a recipe for `adapterswap compose`.
        needs_recipe: whether the command's options cannot express the composition.
    """

    command: str
    python: str
    yaml: str
    needs_recipe: bool


def lines(composition: Composition, num_layers: int, *, max_rank: int | None = None) -> Lines:
    """The lines for a composition whose `experts` and `base_model` are folders or Hub ids."""
    composition = _for_commands(composition, num_layers)
    content = _content(composition)
    out = file_name(composition)
    bounds = {} if max_rank is None else {"max_rank": max_rank}
    options = _options(composition, content)
    words = ["adapterswap", "compose", *(options or [_RECIPE])]
    words += [word for name, value in bounds.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    written = ", ".join([repr(out), *(f"{name}={value}" for name, value in bounds.items())])
    python = f"import adapterswap\n\nplan = adapterswap.compose(adapterswap.Composition({_arguments(content)}))\n"
    return Lines(
        shlex.join([*words, "-o", out]), f"{python}plan.write({written})\n", dump_yaml(content), options is None
    )


def file_name(composition: Composition) -> str:
    """A name for the composition's folder or file: `math+swahili`."""
    names = [re.sub(r"[^\w.-]+", "-", name) for name in composition.experts or composition.expert_names]
    return "+".join(names[:3]) or "base"


def write_file(
    workspace: Workspace, composition: Composition, kind: str, folder: Path, *, max_rank: int | None = None
) -> Path:
    """Write one of `FILES` into an empty folder, and return its path."""
    composition = _for_commands(composition, workspace.num_layers)
    plan = compose(composition, {name: workspace.experts[name] for name in composition.expert_names})
    name = file_name(composition)
    if kind == "gguf":
        path = folder / f"{name}.gguf"
        export(plan, path, max_rank=max_rank)
        return path
    adapter = write_adapter(plan, folder / name, max_rank=max_rank)
    if kind == "card":
        return adapter / CARD
    path = folder / f"{name}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(adapter.iterdir()):
            archive.write(file, f"{name}/{file.name}")
    return path


def _content(composition: Composition) -> dict[str, Any]:
    """The composition as plain data without defaults; its rules are lines of text."""
    content = composition.model_dump(mode="json", exclude_defaults=True)
    if composition.allocation is not None:
        experts = {name: place for name, place in composition.experts.items() if name in composition.expert_names}
        del content["allocation"]
        return {**content, "experts": experts, "rules": [rule.text for rule in composition.allocation]}
    sides = {"task": composition.task, "language": composition.language}
    named = {side: names[0] if len(names) == 1 else list(names) for side, names in sides.items()}
    places: dict[str, Any] = {key: content.pop(key) for key in ("experts", "base_model") if key in content}
    return {**places, **named, **{key: value for key, value in content.items() if key not in named}}


def _for_commands(composition: Composition, num_layers: int) -> Composition:
    """The composition as rules, if the options -t and -l cannot express it.

    They name experts by folder, and an expert on both sides would get two names.
    """
    experts = composition.experts
    renamed = any(ExpertName.of(place) != name for name, place in experts.items())
    if composition.allocation is None and (renamed or {*composition.task} & {*composition.language}):
        return by_rules(composition, num_layers)
    return composition


def _options(composition: Composition, content: Mapping[str, Any]) -> list[str] | None:
    """The composition as options of `compose`; None if only a recipe can express it."""
    words = _sides(composition) if composition.allocation is None else _rules(content)
    if words is None:
        return None
    words += ["--base-model", composition.base_model] if composition.base_model else []
    for key in FIELDS:
        if key == "allow_negative":
            words += ["--allow-negative"] if content.get(key) else []
        elif key in content:
            words += words_of(key, content[key])
    return words


def _sides(composition: Composition) -> list[str]:
    """The options -t and -l."""
    words: list[str] = []
    for option, names in (("-t", composition.task), ("-l", composition.language)):
        for name in names:
            words += [option, composition.experts.get(name, name)]
    return words


def _rules(content: Mapping[str, Any]) -> list[str] | None:
    """The options --expert and --rule; an expert name with '=' needs a recipe."""
    experts: Mapping[str, str] = content["experts"]
    if not experts or any("=" in name for name in experts):
        return None
    words = [word for name, place in experts.items() for word in ("--expert", f"{name}={place}")]
    return words + [word for rule in content["rules"] for word in ("--rule", rule)]


def _arguments(content: Mapping[str, Any]) -> str:
    written = []
    for key, value in content.items():
        if key == "rules":
            items = "".join(f"        {item!r},\n" for item in value)
            written.append(f"    {key}=[\n{items}    ],\n")
        else:
            written.append(f"    {key}={value!r},\n")
    return "\n" + "".join(written)
