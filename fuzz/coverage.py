"""Fuzz the readers, guided by coverage: pip install atheris, then fuzz/coverage.py CORPUS -max_total_time=600.

The first byte decides what the others are: a whole safetensors file, a header with valid data, an
adapter_config.json, an adapterswap.json, a recipe, or a key of a rank pattern. Only AdapterswapError may be raised.
The options are libFuzzer's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from crafting import CONFIG, WEIGHTS, adapter, config, file_bytes, parts, tensors

with atheris.instrument_imports(include=["adapterswap", "json", "re", "ruamel"]):
    from adapterswap.core.experts.adapter import open_adapter
    from adapterswap.core.experts.config import Patterns
    from adapterswap.core.planning.composition import Composition
    from adapterswap.core.writing.records import read_record
    from adapterswap.kit.errors import AdapterswapError
    from adapterswap.kit.files.yaml import read_recipe

FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
HEADER, DATA = parts(tensors())
SOUND = {WEIGHTS: file_bytes(HEADER, DATA), CONFIG: json.dumps(config(rank_pattern={r".*\.(0|1)\..*": 2})).encode()}
NAMES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(40)]
RECIPE = b"experts: {math: a, swahili: b}\nallocation: [{layers: 0-1, blend: {math: 1, swahili: 2}}, {expert: math}]\n"
RECORD = b'{"num_layers": 4, "experts": {"a": {"source": "a"}}, "modules": {"m": "a", "n": {"a": 0.5}}}'


def check(data: bytes) -> None:
    if not data:
        return
    kind, data = data[0] % 6, data[1:]
    try:
        if kind < 3:
            file = CONFIG if kind == 2 else WEIGHTS
            (FOLDER / file).write_bytes(file_bytes(data, DATA) if kind == 1 else data)
            open_adapter(FOLDER)
        elif kind == 3:
            (FOLDER / "record").write_bytes(data)
            read_record(FOLDER / "record")
        elif kind == 4:
            (FOLDER / "recipe").write_bytes(data)
            read_recipe(FOLDER / "recipe", Composition)
        else:
            _resolve(data.decode("utf-8", "surrogateescape"))
    except AdapterswapError as error:
        if not str(error).replace("\n", "").isprintable():
            raise AssertionError(f"something unprintable is printed: {error!r}") from error
    finally:
        if kind < 3:
            (FOLDER / (CONFIG if kind == 2 else WEIGHTS)).write_bytes(SOUND[CONFIG if kind == 2 else WEIGHTS])


def _resolve(key: str) -> None:
    try:
        patterns = Patterns({key: 1})
        patterns.check(NAMES)
    except ValueError:
        return
    for name in NAMES:
        patterns.get(name, 0)


def main() -> None:
    warnings.simplefilter("error")
    adapter(FOLDER)
    for file, content in SOUND.items():
        (FOLDER / file).write_bytes(content)
    corpus = next((Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if corpus is not None:
        corpus.mkdir(exist_ok=True)
        seeds = [SOUND[WEIGHTS], json.dumps(HEADER).encode(), SOUND[CONFIG], RECORD, RECIPE, rb"layers\.(\d|1\d)\..*"]
        for kind, seed in enumerate(seeds):
            (corpus / f"seed-{kind}").write_bytes(bytes([kind]) + seed)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
