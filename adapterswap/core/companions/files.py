"""The files beside the weights, by what they are for: names, and how they are found and copied.

Patterns are relative to the folder. A kind is copied as a whole: half of a tokenizer is none. Only regular files that
stand inside the folder are copied, and no code: see `kit.files.inside`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from adapterswap.kit.errors import AdapterswapError
from adapterswap.kit.files.hashes import fingerprint
from adapterswap.kit.files.inside import copy_inside
from adapterswap.kit.files.text import read_json

MODEL_CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

_LABELS = frozenset({"transformers_version", "processor_class", "__version__"})  # keys of JSON files that do nothing
_REMEDY = "Save the model again, or remove the file"

VOCABULARY_FILES = (
    "tokenizer.json", "tekken.json", "*.model", "tokenizer.model.v*", "*.tiktoken", "vocab.json", "vocab.txt",
    "vocab.bpe",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
)
TEMPLATE_FILES = ("*.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
PROCESSOR_FILES = ("*processor_config.json",)
POOLING_FILES = (  # sentence-transformers
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/*",
)
LEGAL_FILES = ("LICENSE*", "NOTICE*")

COMPANION_FILES = (
    GENERATION_CONFIG,
    *TOKENIZER_FILES,
    *TEMPLATE_FILES,
    *PROCESSOR_FILES,
    *POOLING_FILES,
    *LEGAL_FILES,
)
"""Everything that a model or an adapter may need besides its config and weights."""


def code_in(folder: Path) -> list[str]:
    """The names of the Python files in a folder, which are never copied."""
    return sorted(path.name for path in folder.glob("*.py"))


def copy_files(paths: Iterable[Path], folder: Path, target: Path) -> None:
    """Copy files of `folder` to the same places in `target`."""
    for path in paths:
        place = target / path.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        copy_inside(folder, path.relative_to(folder).as_posix(), place)


def differing_files(one: Path, our_files: Sequence[Path], other: Path, their_files: Sequence[Path]) -> tuple[str, ...]:
    """In what the files of two folders differ, such as `preprocessor_config.json: size`; the name if one lacks it."""
    ours = {path.relative_to(one).as_posix(): path for path in our_files}
    theirs = {path.relative_to(other).as_posix(): path for path in their_files}

    differing = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            differing.append(name)
            continue

        first, second = _content(ours[name]), _content(theirs[name])
        if isinstance(first, dict) and isinstance(second, dict):
            for key in sorted((first.keys() | second.keys()) - _LABELS):
                if first.get(key) != second.get(key):
                    differing.append(f"{name}: {key}")
        elif first != second:
            differing.append(name)
    return tuple(differing)


def _content(path: Path) -> dict[str, Any] | str:
    """The object in a JSON file; of any other file, its fingerprint."""
    if path.suffix == ".json":
        with suppress(AdapterswapError):
            return read_json(path, _REMEDY)
    return fingerprint(path)
