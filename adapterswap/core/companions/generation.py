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
    return read_json(path, _REMEDY) if os.path.exists(path) else None


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that differ. A setting that is null, or absent, has transformers' default, which is never true but
    for the cache's."""
    keys = sorted((one.keys() | other.keys()) - _NEUTRAL)
    return tuple(key for key in keys if _value(key, one.get(key)) != _value(key, other.get(key)))


def _value(key: str, value: Any) -> Any:
    """A setting to compare: of ends, which may be one number or several, the set of them."""
    if key == _END and value is not None:
        return {*map(repr, value)} if isinstance(value, list) else {repr(value)}
    return None if value is False and key != _CACHE else value


def with_ids(settings: Mapping[str, Any], ids: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, Any]:
    """Settings, or a config, whose ids are those of the result's tokenizer.

    Args:
        settings: the content of a generation_config.json or a config.json.
        ids: the result's tokenizer's: `eos_token_id` … → id.
        earlier: the same of the tokenizer to which the settings belong.
    """
    changed = dict(settings)
    if (end := ids.get(_END)) is not None and end != earlier.get(_END):
        changed[_END] = _ends(settings.get(_END), end, earlier.get(_END))
    for key in _SINGLE:
        if (new := ids.get(key)) is not None and new != earlier.get(key):
            changed[key] = new
    return changed


def config_with_ids(config: Mapping[str, Any], ids: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, Any]:
    """The same for a config.json, whose ids may be those of the models nested in it."""
    nested = {key: value for key, value in config.items() if isinstance(value, Mapping) and value.keys() & {*_IDS}}
    changed = dict(config) if nested and not config.keys() & {*_IDS} else with_ids(config, ids, earlier)
    return changed | {key: with_ids(value, ids, earlier) for key, value in nested.items()}


def _ends(current: Any, end: int, earlier: int | None) -> Any:
    """The ids at which generation stops: the tokenizer's own in place of the earlier one; others stay."""
    listed = current if isinstance(current, list) else [] if current is None else [current]
    if end in listed:
        return current
    others = [number for number in listed if number != earlier]
    return [end, *others] if others else [end] if isinstance(current, list) else end
