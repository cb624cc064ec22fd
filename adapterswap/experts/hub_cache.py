"""Which models are in the Hub's cache. Reads folder names only, since importing the Hub's client takes 0.15 s."""

from __future__ import annotations

import os

__all__ = ["cached_models", "is_cached"]

_PREFIX = "models--"


def cached_models() -> list[str]:
    """The ids of the models in the Hub's cache, sorted."""
    try:
        folders = sorted(os.listdir(_cache()))
    except OSError:
        return []
    return [name.removeprefix(_PREFIX).replace("--", "/", 1) for name in folders if name.startswith(_PREFIX)]


def is_cached(repo: str) -> bool:
    """Whether the Hub's cache has a folder for this model. It may lack files or revisions."""
    return os.path.isdir(os.path.join(_cache(), _PREFIX + repo.replace("/", "--")))


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
