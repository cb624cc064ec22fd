"""Which local base an expert was trained on: by the weights that its record names, not by the folder's name.

A base on the Hub has an id and a commit. A local base has the fingerprints of its weights, which `train` records; what
is made of the expert carries them on. Knows the keys of these records, and nothing of plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.experts.sources import Source
from adapterswap.files.smallfiles import read_json

__all__ = ["TRAINING_RECORD", "base_fingerprints", "differing_weights", "identity_of", "recorded_base"]

TRAINING_RECORD = "training.json"
_RECORD = "adapterswap.json"
_SINGLE, _WEIGHTS = "model.safetensors", "model*.safetensors"


def recorded_base(folder: Path) -> dict[str, str]:
    """The fingerprints of the base that an expert's own record names; empty if it names none."""
    training = folder.parent if folder.name.startswith("checkpoint-") else folder  # other checkpoints of the same run
    for place in (folder / TRAINING_RECORD, training / TRAINING_RECORD, folder / _RECORD):
        with suppress(AdapterswapError):
            content = read_json(place)
            sources = [content.get("base"), _inside(content, "extraction").get("base")]
            experts = _inside(content, "experts").values()
            recorded = [_inside(source, "fingerprints") for source in sources]
            recorded += [_inside(expert, "base_fingerprints") for expert in experts]
            if (found := next(filter(None, recorded), None)) is not None:
                return {str(name): str(value) for name, value in found.items()}
    return {}


def _inside(content: Any, key: str) -> dict[str, Any]:
    """The mapping under a key of a record, which may be damaged; empty if there is none."""
    value = content.get(key) if isinstance(content, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}


def identity_of(base: Source) -> dict[str, str]:
    """The fingerprints of a local base; empty for one on the Hub, whose files may not all be here."""
    return {} if base.revision else base_fingerprints(base.folder)


def base_fingerprints(folder: Path) -> dict[str, str]:
    """The fingerprints of a base's weights, by file; read again only if a file changes.

    Shards beside a single file are left out: transformers does not load them.
    """
    paths = [folder / _SINGLE] if (folder / _SINGLE).is_file() else sorted(folder.glob(_WEIGHTS))
    stats = [(path, path.stat()) for path in paths if path.is_file()]
    return dict(_fingerprints(tuple((path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for path, s in stats)))


@lru_cache(maxsize=16)
def _fingerprints(stamps: tuple[tuple[Path, int, int, int, int], ...]) -> dict[str, str]:
    """The fingerprints of files, by name; `stamps` tell whether they changed."""
    from adapterswap.experts.identity import fingerprint

    return {path.name: fingerprint(path) for path, *_ in stamps}


def differing_weights(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first file in which two bases differ; None if they are the same, or if one of them is unknown."""
    return min((name for name, _ in one.items() ^ other.items()), default=None) if one and other else None
