"""What a tokenizer does, read from its files part by part, so that two tokenizers can be compared.

Formatting, the order of keys, paths and versions are no part of it, and neither are chat templates. tokenizer.json is
JSON, so neither tokenizers nor transformers is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from adapterswap.core.companions.templates import SETTINGS, object_in
from adapterswap.kit.errors import ExpertError
from adapterswap.kit.files.hashes import Stamps
from adapterswap.kit.files.inside import files_inside, read_inside
from adapterswap.kit.files.text import shown

FAST, _ADDED, _SPECIAL = "tokenizer.json", "added_tokens.json", "special_tokens_map.json"
_REMEDY = "Save the tokenizer again, with tokenizer.save_pretrained(FOLDER)"

# Files that slow tokenizers are built from. Where both folders have a tokenizer.json, only those in both are compared.
_SLOW = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json", "*.spm")

# The words for parts; any other is called by its key.
_WORDS = {
    "vocab": "vocabulary", "pre_tokenizer": "pre-tokenizer", "post_processor": "post-processor",
    "added_tokens": "added tokens", "bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "unk_token": "unk",
    "special_tokens": "special tokens", "padding_side": "padding side", "truncation_side": "truncation side",
}  # fmt: skip

# Keys of tokenizer_config.json that say where a tokenizer came from, or that are compared elsewhere.
_NEUTRAL = frozenset({
    "name_or_path", "is_local", "local_files_only", "backend", "transformers_version", "tokenizer_file", "vocab_file",
    "merges_file", "special_tokens_map_file", "files_loaded", "device_map", "processor_class", "slow_tokenizer_class",
    "chat_template", "added_tokens_decoder",
})  # fmt: skip

# Keys that one version of transformers writes and another leaves out: they differ only where both files have them.
_WHERE_BOTH_SAY = frozenset({
    "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "legacy", "tokenizer_class", "use_fast",
})  # fmt: skip

_DEFAULTS: Mapping[str, Any] = {"padding_side": "right", "truncation_side": "right", "errors": "replace"}
_UNLIMITED = 10**18  # transformers writes 10**30 where a text may have any length
_SAME_CLASS = {"PreTrainedTokenizer": "TokenizersBackend"}  # the class of any fast tokenizer in transformers 4 and 5
_ALSO_SPECIAL = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

TOKEN_PARTS = frozenset({"vocabulary", "merges", "added tokens", "special tokens"})
"""The parts in which a tokenizer that has more tokens differs from one that has fewer."""


def differing_parts(one: Path, other: Path) -> tuple[str, ...]:
    """What differs between the tokenizers of two folders, in words such as `eos` and `added tokens`."""
    are_fast = os.path.exists(one / FAST) and os.path.exists(other / FAST)

    # Settings, without those that only one version of transformers writes
    ours, theirs = _settings(one), _settings(other)
    said_once = {key for key in _WHERE_BOTH_SAY if key not in ours or key not in theirs}
    names = _different(ours, theirs, but=said_once)

    # The files of slow tokenizers, which need not be there beside a fast one
    our_files, their_files = _slow_files(one), _slow_files(other)
    lacking = our_files.keys() ^ their_files.keys() if are_fast else frozenset[str]()
    names += _different(our_files, their_files, but=lacking)

    # The sections of tokenizer.json. Parsing a large vocabulary takes longer than composing adapters.
    our_added, their_added = _added_elsewhere(one), _added_elsewhere(other)
    if not are_fast or our_added != their_added or read_inside(one, FAST) != read_inside(other, FAST):
        our_sections, their_sections = dict(_sections(one)), dict(_sections(other))
        our_sections["added_tokens"] = {**our_sections.get("added_tokens", {}), **our_added}
        their_sections["added_tokens"] = {**their_sections.get("added_tokens", {}), **their_added}
        names += _different(our_sections, their_sections)
    return tuple(dict.fromkeys(_WORDS.get(name, name) for name in names))


def _different(one: Mapping[str, Any], other: Mapping[str, Any], *, but: Collection[str] = ()) -> list[str]:
    """The names under which two mappings differ, sorted, without those in `but`."""
    names = (one.keys() | other.keys()) - set(but)
    return sorted(name for name in names if one.get(name) != other.get(name))


def special_ids(folder: Path) -> dict[str, int]:
    """The ids of a tokenizer's special tokens, as `eos_token_id` → id, without those that it does not know."""
    settings = _settings(folder)
    named: dict[str, str] = {}
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(role)
        if isinstance(token, str):
            named[f"{role}_id"] = token

    # Other files than tokenizer.json name most of them
    ids: dict[str, int] = {token["content"]: number for number, token in _added_elsewhere(folder).items()}
    if any(token not in ids for token in named.values()):
        sections = _sections(folder)
        vocabulary = sections.get("vocab")
        if isinstance(vocabulary, list):  # Unigram's, with a score for each token
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        listed = {token["content"]: number for number, token in sections.get("added_tokens", {}).items()}
        ids = {**(vocabulary or {}), **listed, **ids}

    return {key: ids[token] for key, token in named.items() if token in ids}


def _settings(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json and special_tokens_map.json say, alike for every version of transformers."""
    plain: dict[str, Any] = {}
    special: set[str] = set()
    for key, value in {**object_in(folder, _SPECIAL), **object_in(folder, SETTINGS)}.items():
        if key not in _ALSO_SPECIAL:
            if key not in _NEUTRAL:
                plain[key] = _text(value)
        elif isinstance(value, dict):
            plain |= {name: _text(token) for name, token in value.items()}
        elif isinstance(value, list | None):
            special |= {str(_text(token)) for token in value or ()}
        else:
            raise ExpertError(f"{folder / SETTINGS}: {key} is {shown(value)}, but must be a list", _REMEDY)
    plain["special_tokens"] = sorted(special)

    # One name for the classes that any fast tokenizer has, and no length where a text may have any
    class_name = plain.get("tokenizer_class")
    if isinstance(class_name, str):
        class_name = class_name.removesuffix("Fast")
        plain["tokenizer_class"] = _SAME_CLASS.get(class_name, class_name)
    longest = plain.get("model_max_length")
    if isinstance(longest, int | float) and longest >= _UNLIMITED:
        del plain["model_max_length"]
    return {key: value for key, value in plain.items() if not _is_default(key, value)}


def _text(token: Any) -> Any:
    """A token as text: files hold it as text, or as an object with its flags. Other values stay."""
    if isinstance(token, dict) and isinstance(token.get("content"), str):
        return token["content"]
    return token


def _is_default(key: str, value: Any) -> bool:
    """Whether a setting says what its absence says."""
    if key in _WHERE_BOTH_SAY:
        return value is None
    if key in _DEFAULTS:
        return bool(value == _DEFAULTS[key])
    return not value


def _added_elsewhere(folder: Path) -> dict[int, dict[str, Any]]:
    """The added tokens that other files than tokenizer.json list: id → the token and its flags."""
    decoder = object_in(folder, SETTINGS).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        is_readable = all(_is_id(key) and isinstance(token, dict) for key, token in decoder.items())
        if is_readable:
            return {int(key): _flagged(token) for key, token in decoder.items()}

    if os.path.exists(folder / FAST):
        return {}
    added: dict[int, dict[str, Any]] = {}
    for text, number in object_in(folder, _ADDED).items():
        if isinstance(number, int):
            added[number] = _flagged({"content": text})
    return added


def _is_id(key: str) -> bool:
    return key.isdecimal() and len(key) < len(str(_UNLIMITED))


def _flagged(token: Mapping[str, Any]) -> dict[str, Any]:
    """An added token: its text, and each of its flags, which are false where a file leaves them out."""
    flags = {flag: bool(token.get(flag)) for flag in _FLAGS}
    return {"content": str(token.get("content")), **flags}


def _slow_files(folder: Path) -> dict[str, Any]:
    """The files of slow tokenizers, by name: JSON and lines by what they hold, others by their hashes."""
    files: dict[str, Any] = {}
    for path in files_inside(folder, _SLOW):
        content = read_inside(folder, path.name)
        if content is None:
            continue
        if path.suffix == ".json":
            files[path.name] = _parsed(content, path.name)
        elif path.suffix == ".txt":
            files[path.name] = [line for line in content.splitlines() if not line.startswith(b"#version")]
        else:
            files[path.name] = hashlib.sha256(content).hexdigest()
    return files


def _parsed(content: bytes, where: str) -> Any:
    """JSON of any size: a vocabulary has more lists than a config may have."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ExpertError(f"{where} is not JSON in UTF-8: {str(error)[:200]}", _REMEDY) from None


def _sections(folder: Path) -> Mapping[str, Any]:
    """The sections of tokenizer.json, the model's own among them; nothing if there is no such file."""
    path = folder / FAST
    if not os.path.exists(path):
        return {}
    return _read_sections(path, Stamps.of([path]))


@lru_cache(maxsize=4)
def _read_sections(path: Path, version: Stamps) -> Mapping[str, Any]:
    content = _parsed(read_inside(path.parent, FAST) or b"", str(path))
    if not isinstance(content, dict):
        raise ExpertError(f"{path} is not a JSON object", _REMEDY)
    _check(content, path)

    sections = {}
    for key, value in content.items():
        if key not in ("version", "model", "added_tokens"):
            sections[key] = _plain(value)

    # The model's vocabulary and merges are sections of their own. A setting that is null or false says nothing.
    model = dict(content.get("model") or {})
    sections["vocab"] = model.pop("vocab", None)
    merges = []
    for pair in model.pop("merges", None) or ():
        merges.append(pair.split(" ") if isinstance(pair, str) else pair)
    sections["merges"] = merges
    sections["model"] = {key: value for key, value in model.items() if value is not None and value is not False}

    sections["added_tokens"] = {token["id"]: _flagged(token) for token in content.get("added_tokens") or ()}
    return sections


def _check(content: Mapping[str, Any], path: Path) -> None:
    """Refuse a tokenizer.json whose sections are of other types than tokenizers reads."""

    def refuse_unless(is_right: bool, name: str) -> None:
        if not is_right:
            raise ExpertError(f"{path}: {name} is not what a tokenizer.json has there", _REMEDY)

    model = content.get("model")
    if model is not None:
        refuse_unless(isinstance(model, dict), "model")
        vocabulary = model.get("vocab") or {}
        refuse_unless(isinstance(vocabulary, dict | list), "model.vocab")
        if isinstance(vocabulary, list):  # Unigram's, with a score for each token
            for pair in vocabulary:
                is_scored = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
                refuse_unless(is_scored, "model.vocab")
        refuse_unless(isinstance(model.get("merges"), list | None), "model.merges")

    added = content.get("added_tokens") or []
    refuse_unless(isinstance(added, list), "added_tokens")
    for token in added:
        refuse_unless(isinstance(token, dict) and isinstance(token.get("id"), int), "added_tokens")


def _plain(section: Any) -> Any:
    """A section with what it means where it is silent: ByteLevel splits by its regex unless it says otherwise."""
    if isinstance(section, list):
        return [_plain(item) for item in section]
    if not isinstance(section, dict):
        return section
    plain = {key: _plain(value) for key, value in section.items()}
    if section.get("type") == "ByteLevel":
        plain.setdefault("use_regex", True)
    return plain
