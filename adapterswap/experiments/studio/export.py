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
from adapterswap.kit.files.folders import CARD, FileKind
from adapterswap.kit.files.yaml import dump_yaml

FILES = {"adapter": "adapter (.zip)", "gguf": "GGUF for llama.cpp and Ollama", "card": "model card"}
_RECIPE = "composition.yaml"
_ZIP = FileKind(b"PK")


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

    options = _options(composition, content)
    words = ["adapterswap", "compose", *(options or [_RECIPE])]
    written = repr(out)
    if max_rank is not None:
        words += ["--max-rank", str(max_rank)]
        written += f", max_rank={max_rank}"

    arguments = "\n"
    for key, value in content.items():
        shown = repr(value)
        if key == "rules":
            items = "".join(f"        {item!r},\n" for item in value)
            shown = f"[\n{items}    ]"
        arguments += f"    {key}={shown},\n"
    python = f"import adapterswap\n\nplan = adapterswap.compose(adapterswap.Composition({arguments}))\n"
    return Lines(
        command=shlex.join([*words, "-o", out]),
        python=f"{python}plan.write({written})\n",
        yaml=dump_yaml(content),
        needs_recipe=options is None,
    )


def file_name(composition: Composition) -> str:
    """A name for the composition's folder or file: `math+swahili`."""
    names = [re.sub(r"[^\w.-]+", "-", name) for name in composition.experts or composition.expert_names]
    return "+".join(names[:3]) or "base"


def write_file(
    workspace: Workspace, composition: Composition, kind: str, folder: Path, *, max_rank: int | None = None
) -> Path:
    """Write one of `FILES` into an empty folder, and return its path.

    Raises:
        OutputError: the disk is full, or the file cannot be written for another reason.
        AdapterswapError: as `compose`, `write_adapter` or `export`.
    """
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
    with _ZIP.file(path) as building, zipfile.ZipFile(building, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(adapter.iterdir()):
            archive.write(file, f"{name}/{file.name}")
    return path


def _content(composition: Composition) -> dict[str, Any]:
    """The composition as plain data without defaults; its rules are lines of text."""
    content: dict[str, Any] = composition.model_dump(mode="json", exclude_defaults=True)
    if composition.allocation is not None:
        experts = {name: place for name, place in composition.experts.items() if name in composition.expert_names}
        del content["allocation"]
        return {**content, "experts": experts, "rules": [rule.text for rule in composition.allocation]}

    # Where the experts are comes first, then the sides, a single name as text, and the rest in its order.
    ordered: dict[str, Any] = {}
    for key in ("experts", "base_model"):
        if key in content:
            ordered[key] = content[key]
    for side, names in (("task", composition.task), ("language", composition.language)):
        ordered[side] = names[0] if len(names) == 1 else list(names)
    for key, value in content.items():
        ordered.setdefault(key, value)
    return ordered


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
    words: list[str] = []
    if composition.allocation is None:
        for option, names in (("-t", composition.task), ("-l", composition.language)):
            for name in names:
                words += [option, composition.experts.get(name, name)]
    else:
        experts: Mapping[str, str] = content["experts"]
        if not experts or any("=" in name for name in experts):  # `--expert NAME=PLACE` would be cut at the wrong place
            return None
        for name, place in experts.items():
            words += ["--expert", f"{name}={place}"]
        for rule in content["rules"]:
            words += ["--rule", rule]

    if composition.base_model:
        words += ["--base-model", composition.base_model]
    for key in FIELDS:
        if key == "allow_negative":
            if content.get(key):
                words.append("--allow-negative")
        elif key in content:
            words += words_of(key, content[key])
    return words
