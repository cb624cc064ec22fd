"""The tokenizer of an expert or a base: its files, its tokens by id, and one tokenizer for several.

Trainers save the tokenizer in the adapter's folder. Its tokens say which expert the rows of an embedding belong to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from adapterswap.core.companions.files import TEMPLATE_FILES, TOKENIZER_FILES, VOCABULARY_FILES, copy_files
from adapterswap.core.companions.parts import FAST, TOKEN_PARTS, differing_parts
from adapterswap.kit.errors import ExpertError, UnsupportedError
from adapterswap.kit.files.hashes import Stamps
from adapterswap.kit.files.inside import files_inside, read_inside

Tokens = Mapping[int, str]

BASE_FOLDER = "base"  # no expert can have this name
_REMEDY = "Save the tokenizer beside the adapter again, with tokenizer.save_pretrained(FOLDER)"


@dataclass(frozen=True)
class United:
    """One tokenizer for several experts.

    Attributes:
        owner: the expert, or `base`, whose files are copied.
        added: tokens that the owner lacks: id → the folder of an expert that has it.
        others: the experts whose tokenizers clash with it, or have tokens of the base that it replaced.
    """

    owner: str
    added: Mapping[int, Path] = field(default_factory=dict)
    others: tuple[str, ...] = ()


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of the tokenizer and the chat template in a folder, sorted by name."""
    return files_inside(folder, (*TOKENIZER_FILES, *TEMPLATE_FILES))


def tokenizer_bytes(folder: Path) -> bytes | None:
    """The content of the tokenizer.json in a folder, to compare without parsing; None if it has none."""
    path = folder / FAST
    return path.read_bytes() if path.is_file() else None


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
    return differing_parts(one, other) if has_vocabulary(one) == has_vocabulary(other) else ("only settings",)


def token_clashes(one: Path, other: Path) -> list[str]:
    """Where the tokens of two folders disagree, as `clashes`; nothing if one of them has no tokenizer.json."""
    ours, theirs = read_tokens(one), read_tokens(other)
    return clashes(ours, theirs) if ours and theirs else []


def clashes(one: Tokens, other: Tokens) -> list[str]:
    """Where two tokenizers disagree, as text: ids with two different tokens, or else tokens with two ids."""
    by_id = [f"{i} is {one[i]!r} and {other[i]!r}" for i in sorted(one.keys() & other.keys()) if one[i] != other[i]]
    if by_id:
        return by_id
    ids, others = ({token: i for i, token in tokens.items()} for tokens in (one, other))
    return [f"{t!r} is {ids[t]} and {others[t]}" for t in sorted(ids.keys() & others.keys()) if ids[t] != others[t]]


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
    folders = {**experts, **({} if base is None else {BASE_FOLDER: base})}
    holders = {name: folder for name, folder in folders.items() if has_tokenizer(folder)}
    if not holders:
        return None
    whole = {name: folder for name, folder in holders.items() if has_vocabulary(folder) or name == chosen}
    holders = whole or holders
    fast = {name: content for name, folder in holders.items() if (content := tokenizer_bytes(folder)) is not None}
    if len(set(fast.values())) < 2:  # reading a large vocabulary takes longer than composing adapters
        return United(chosen or next(iter(holders)))
    tokens = {name: read_tokens(holders[name]) or {} for name in fast}
    beyond = {name for name, own_tokens in tokens.items() if rows is not None and max(own_tokens, default=0) >= rows}
    within = [name for name in tokens if name not in beyond] or list(tokens)
    replaced, old = _replaced({name: tokens[name] for name in within}), tokens.get(BASE_FOLDER, {})
    wanted = {
        name: {i: token for i, token in own_tokens.items() if i not in replaced or token != old[i]}
        for name, own_tokens in tokens.items()
    }

    def fits(name: str) -> tuple[bool, bool]:
        """Whether a tokenizer has all tokens, and whether it has all that replace the base's."""
        has_all = all(tokens[name].items() >= wanted[other].items() for other in within)
        return has_all, tokens[name].items() >= replaced.items()

    first = chosen or next(name for name in holders if name in within or name not in fast)
    if chosen is None and first in tokens:
        alike = [name for name in within if TOKEN_PARTS.issuperset(differing_parts(holders[first], holders[name]))]
        first = max(alike, key=fits)
    added: dict[int, Path] = {}
    all_tokens, others = dict(tokens.get(first, {})), []
    for name, own_tokens in wanted.items():
        if name not in (first, BASE_FOLDER) and len(own_tokens) < len(tokens[name]):
            others.append(name)
        if (name in beyond and name != first) or clashes(all_tokens, own_tokens):
            others.append(name)
            continue
        if first in tokens:
            added |= dict.fromkeys(own_tokens.keys() - all_tokens.keys(), holders[name])
            all_tokens |= own_tokens
    return United(first, added, tuple(dict.fromkeys(others)))


def _replaced(tokens: Mapping[str, Tokens]) -> Tokens:
    """The tokens by which experts replaced tokens of the base, such as reserved ones."""
    base = tokens.get(BASE_FOLDER, {})
    return {i: token for own in tokens.values() for i, token in own.items() if base.get(i, token) != token}


def write_united(united: United, folders: Mapping[str, Path], target: Path) -> None:
    """Write the files of a united tokenizer into the folder `target`; `folders` maps experts to their folders."""
    owner = folders[united.owner]
    copy_files(tokenizer_files(owner), owner, target)
    if not united.added:
        return
    content = json.loads((target / FAST).read_text(encoding="utf-8"))
    entries = {entry["id"]: entry for entry in content["added_tokens"]}
    expected = dict(read_tokens(folders[united.owner]) or {})
    if not expected:
        raise ExpertError(f"{owner / FAST} cannot be read by the tokenizers library", _REMEDY)
    for number, folder in united.added.items():
        theirs = json.loads((folder / FAST).read_text(encoding="utf-8"))["added_tokens"]
        entries |= {entry["id"]: entry for entry in theirs if entry["id"] == number}
        expected[number] = (read_tokens(folder) or {})[number]
    content["added_tokens"] = [entries[number] for number in sorted(entries)]
    (target / FAST).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    if read_tokens(target) != expected:
        raise UnsupportedError(
            "The experts' added tokens leave gaps between their ids, which a tokenizer.json cannot hold",
            "Add the same tokens, in the same order, to each expert's tokenizer",
        )
