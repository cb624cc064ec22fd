"""Generation settings: generation_config.json, and the ids of special tokens, which follow the result's tokenizer.

A model stops at the ids that its settings name, whatever its tokenizer says. So where a result takes another tokenizer
than the model whose settings it has, the ids of the end, the padding and the beginning are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterswap.core.companions.files import GENERATION_CONFIG
from adapterswap.kit.files.text import read_json

_REMEDY = "Save the model again, or remove the file"
_NEUTRAL = {"transformers_version", "_from_model_config", "_commit_hash"}
_CACHE = "use_cache"
_END, _SINGLE = "eos_token_id", ("bos_token_id", "pad_token_id")
_IDS = (_END, *_SINGLE)


def read_generation(folder: Path) -> dict[str, Any] | None:
    """The content of a folder's generation_config.json; None if there is none."""
    path = folder / GENERATION_CONFIG
    if not os.path.exists(path):
        return None
    return read_json(path, _REMEDY)


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that differ. A setting that is null, or absent, has transformers' default, which is never true but
    for the cache's."""
    keys = sorted((one.keys() | other.keys()) - _NEUTRAL)
    return tuple(key for key in keys if _value(key, one.get(key)) != _value(key, other.get(key)))


def _value(key: str, value: Any) -> Any:
    """A setting to compare: of ends, which may be one number or several, the set of them."""
    if key == _END and value is not None:
        ends = value if isinstance(value, list) else [value]
        return set(map(repr, ends))
    if value is False and key != _CACHE:
        return None
    return value


def with_ids(settings: Mapping[str, Any], ids: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, Any]:
    """Settings, or a config, whose ids are those of the result's tokenizer.

    Args:
        settings: the content of a generation_config.json or a config.json.
        ids: the result's tokenizer's: `eos_token_id` … → id.
        earlier: the same of the tokenizer to which the settings belong.
    """
    changed = dict(settings)
    for key in _IDS:
        new = ids.get(key)
        if new is None or new == earlier.get(key):
            continue
        if key == _END:
            changed[key] = _ends(settings.get(key), new, earlier.get(key))
        else:
            changed[key] = new
    return changed


def config_with_ids(config: Mapping[str, Any], ids: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, Any]:
    """The same for a config.json, whose ids may be those of the models nested in it."""
    nested = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value.keys() & {*_IDS}:
            nested[key] = with_ids(value, ids, earlier)

    has_some_itself = bool(config.keys() & {*_IDS})
    changed = dict(config)
    if has_some_itself or not nested:
        changed = with_ids(config, ids, earlier)
    return changed | nested


def _ends(current: Any, end: int, earlier: int | None) -> Any:
    """The ids at which generation stops: the tokenizer's own in place of the earlier one; others stay."""
    if current is None:
        return end
    listed = current if isinstance(current, list) else [current]
    if end in listed:
        return current
    ends = [end, *(number for number in listed if number != earlier)]
    if len(ends) == 1 and not isinstance(current, list):
        return end
    return ends
