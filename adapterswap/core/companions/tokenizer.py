"""The tokenizer of an expert or a base: its files, its tokens by id, and one tokenizer for several.

Trainers save the tokenizer in the adapter's folder. Its tokens say which expert the rows of an embedding belong to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from adapterswap.core.companions.files import TEMPLATE_FILES, TOKENIZER_FILES, VOCABULARY_FILES, copy_files
from adapterswap.core.companions.parts import FAST, TOKEN_PARTS, differing_parts
from adapterswap.kit.errors import ExpertError, UnsupportedError
from adapterswap.kit.files.hashes import Stamps
from adapterswap.kit.files.inside import files_inside, read_inside

Tokens = Mapping[int, str]

BASE_FOLDER = "base"  # no expert can have this name
_REMEDY = "Save the tokenizer beside the adapter again, with tokenizer.save_pretrained(FOLDER)"


class United(NamedTuple):
    """One tokenizer for several experts.

    Attributes:
        owner: the expert, or `base`, whose files are copied.
        added: tokens that the owner lacks: id → the folder of an expert that has it.
        others: the experts whose tokenizers clash with it, or have tokens of the base that it replaced.
    """

    owner: str
    added: Mapping[int, Path] = {}
    others: tuple[str, ...] = ()


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of the tokenizer and the chat template in a folder, sorted by name."""
    return files_inside(folder, (*TOKENIZER_FILES, *TEMPLATE_FILES))


def tokenizer_bytes(folder: Path) -> bytes | None:
    """The content of the tokenizer.json in a folder, to compare without parsing; None if it has none."""
    path = folder / FAST
    if not path.is_file():
        return None
    return path.read_bytes()


def read_tokens(folder: Path) -> Tokens | None:
    """The tokens of a folder's tokenizer.json, by id; None if there is none that the tokenizers library can read."""
    path = folder / FAST
    if not os.path.exists(path):
        return None
    return _read(path, Stamps.of([path]))


@lru_cache(maxsize=8)
def _read(path: Path, version: Stamps) -> Tokens | None:
    from tokenizers import Tokenizer

    content = read_inside(path.parent, path.name) or b""
    try:
        vocabulary = Tokenizer.from_str(content.decode()).get_vocab(with_added_tokens=True)
    except Exception:  # the library raises Exception itself
        return None
    return {number: token for token, number in vocabulary.items()}


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer, and not only chat templates."""
    return bool(files_inside(folder, TOKENIZER_FILES))


def has_vocabulary(folder: Path) -> bool:
    """Whether a folder has more of a tokenizer than its settings."""
    return bool(files_inside(folder, VOCABULARY_FILES))


def tokenizer_differences(one: Path, other: Path) -> tuple[str, ...]:
    """In what two folders' tokenizers differ, as words such as `eos` or `pre-tokenizer`; nothing if one has none."""
    if not (has_tokenizer(one) and has_tokenizer(other)):
        return ()
    if has_vocabulary(one) != has_vocabulary(other):
        return ("only settings",)
    return differing_parts(one, other)


def token_clashes(one: Path, other: Path) -> list[str]:
    """Where the tokens of two folders disagree, as `clashes`; nothing if one of them has no tokenizer.json."""
    ours, theirs = read_tokens(one), read_tokens(other)
    if not ours or not theirs:
        return []
    return clashes(ours, theirs)


def clashes(one: Tokens, other: Tokens) -> list[str]:
    """Where two tokenizers disagree, as text: ids with two different tokens, or else tokens with two ids."""
    clashing = []
    for number in sorted(one.keys() & other.keys()):
        if one[number] != other[number]:
            clashing.append(f"{number} is {one[number]!r} and {other[number]!r}")
    if clashing:
        return clashing

    ours = {token: number for number, token in one.items()}
    theirs = {token: number for number, token in other.items()}
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            clashing.append(f"{token!r} is {ours[token]} and {theirs[token]}")
    return clashing


def unite(
    experts: Mapping[str, Path], base: Path | None = None, *, rows: int | None = None, chosen: str | None = None
) -> United | None:
    """The tokenizer of a composition.

    It is that of the first expert that has one, or `chosen`, with the added tokens of the others. If it lacks such
    tokens, and another one that differs in nothing else has them all, it is that one. An expert may replace tokens of
    the base. A folder with only a tokenizer's settings counts as having one if no folder has a vocabulary.

    Args:
        experts: expert → its folder, in the order of the plan.
        base: the base's folder, for full weights.
        rows: the embedding's number of rows, if known: tokenizers with larger ids are not used.
        chosen: the expert, or `base`, whose tokenizer it is.

    Returns:
        The tokenizer; None if no folder holds one.
    """
    folders = dict(experts)
    if base is not None:
        folders[BASE_FOLDER] = base

    # Who has a tokenizer; only settings count if nobody has more
    holders = {name: folder for name, folder in folders.items() if has_tokenizer(folder)}
    if not holders:
        return None
    whole = {name: folder for name, folder in holders.items() if has_vocabulary(folder) or name == chosen}
    holders = whole or holders

    # Equal files need not be read: a large vocabulary takes longer than composing adapters.
    fast: dict[str, bytes] = {}
    for name, folder in holders.items():
        content = tokenizer_bytes(folder)
        if content is not None:
            fast[name] = content
    if len(set(fast.values())) < 2:
        return United(chosen or next(iter(holders)))

    # Whose ids are all rows of the embedding; all, if nobody's are
    tokens = {name: read_tokens(holders[name]) or {} for name in fast}
    beyond: set[str] = set()
    for name, own_tokens in tokens.items():
        if rows is not None and max(own_tokens, default=0) >= rows:
            beyond.add(name)
    within = [name for name in tokens if name not in beyond] or list(tokens)

    # The tokens that experts put in place of the base's
    base_tokens = tokens.get(BASE_FOLDER, {})
    replaced: dict[int, str] = {}
    if BASE_FOLDER in within:
        for name in within:
            for number, token in tokens[name].items():
                if base_tokens.get(number, token) != token:
                    replaced[number] = token

    # What each brings: its tokens without those of the base that another one replaced
    brought: dict[str, Tokens] = {}
    for name, own_tokens in tokens.items():
        kept = {}
        for number, token in own_tokens.items():
            if number not in replaced or token != base_tokens[number]:
                kept[number] = token
        brought[name] = kept

    def fits(name: str) -> tuple[bool, bool]:
        """Whether a tokenizer has all tokens, and whether it has all that replace the base's."""
        has_all = all(tokens[name].items() >= brought[other].items() for other in within)
        return has_all, tokens[name].items() >= replaced.items()

    # Whose it is: of those that differ only in tokens, the one that has most of them
    first = chosen or next(name for name in holders if name in within or name not in fast)
    if chosen is None and first in tokens:
        alike = []
        for name in within:
            if TOKEN_PARTS.issuperset(differing_parts(holders[first], holders[name])):
                alike.append(name)
        first = max(alike, key=fits)

    # What the others add to it, unless it clashes with what is there
    added: dict[int, Path] = {}
    all_tokens = dict(tokens.get(first, {}))
    others: list[str] = []
    for name, own_tokens in brought.items():
        if name not in (first, BASE_FOLDER) and len(own_tokens) < len(tokens[name]):
            others.append(name)
        if (name in beyond and name != first) or clashes(all_tokens, own_tokens):
            others.append(name)
            continue
        if first in tokens:
            added |= dict.fromkeys(own_tokens.keys() - all_tokens.keys(), holders[name])
            all_tokens |= own_tokens
    return United(first, added, tuple(dict.fromkeys(others)))


def write_united(united: United, folders: Mapping[str, Path], target: Path) -> None:
    """Write the files of a united tokenizer into the folder `target`; `folders` maps experts to their folders."""
    owner = folders[united.owner]
    copy_files(tokenizer_files(owner), owner, target)
    if not united.added:
        return

    # The added tokens of the owner and of the others, by their ids
    content = json.loads((target / FAST).read_text(encoding="utf-8"))
    entries = {entry["id"]: entry for entry in content["added_tokens"]}
    expected = dict(read_tokens(folders[united.owner]) or {})
    if not expected:
        raise ExpertError(f"{owner / FAST} cannot be read by the tokenizers library", _REMEDY)
    for number, folder in united.added.items():
        theirs = json.loads((folder / FAST).read_text(encoding="utf-8"))
        for entry in theirs["added_tokens"]:
            if entry["id"] == number:
                entries[number] = entry
        expected[number] = (read_tokens(folder) or {})[number]

    content["added_tokens"] = [entries[number] for number in sorted(entries)]
    (target / FAST).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    if read_tokens(target) != expected:
        raise UnsupportedError(
            "The experts' added tokens leave gaps between their ids, which a tokenizer.json cannot hold",
            "Add the same tokens, in the same order, to each expert's tokenizer",
        )
