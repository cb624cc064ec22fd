"""Small answers that are slow to compute, stored in a JSON file: the hashes of large files, the shapes of a base.

Several processes may use one file. Each replaces it whole, and the last one wins. Lost answers are computed again, and
so are all answers if the file was altered. Knows nothing of what it stores.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.experts.adapters import Adapter
from adapterswap.files.folders import replacing
from adapterswap.files.sealing import is_sealed, sealed
from adapterswap.files.smallfiles import read_json
from adapterswap.files.tensorfile import open_tensors

__all__ = ["Memo", "content_hash"]

_MOST = 2000  # answers; the oldest go first


class Memo:
    """A mapping of text to JSON values in the file `path`. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        with suppress(AdapterswapError):  # missing or damaged: everything can be computed again
            content = read_json(path)
            self._known = content["known"] if is_sealed(content) else {}

    def get(self, key: str) -> Any:
        """The value stored for `key`, or None."""
        with self._lock:
            return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store `value`. A disk that cannot be written to is not an error."""
        with self._lock:
            self._known[key] = value
            for oldest in list(self._known)[:-_MOST]:
                del self._known[oldest]
            with suppress(OSError), replacing(self._path, self._path.with_name(f"{self._path.name}.tmp")) as building:
                building.write_text(json.dumps(sealed({"known": self._known})), encoding="utf-8")


def content_hash(adapter: Adapter, memo: Memo) -> str:
    """SHA-256 of an adapter's safetensors file, in hexadecimal. The file is read again only if its stamp is new.

    Raises:
        ExpertError: the file changed since the adapter was opened.
    """
    file = adapter.file
    key = f"sha256 {os.path.realpath(file.path)} {file.stamp}"
    weights = memo.get(key)
    if not isinstance(weights, str):
        with open_tensors(file) as opened:
            weights = hashlib.file_digest(opened, "sha256").hexdigest()
        memo.put(key, weights)
    return weights
