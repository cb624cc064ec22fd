"""Full weights, recomputed from their sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import adapterswap
from adapterswap import AdapterswapError
from adapterswap.tools.verification import verify

Make = Callable[..., Path]


@pytest.fixture
def merged(model: Make, expert: Make, base: Make, tmp_path: Path) -> tuple[Path, dict[str, Path], Path]:
    """One expert of each kind, norms with their layers, in small shards."""
    sources = {"math": expert(seed=1), "swahili": model(seed=2)}
    composition = adapterswap.Composition(
        task="math", language="swahili", bottom=2, top=1, bottom_transition=1, norms="layer",
        base_model=str(base("llama")),
    )  # fmt: skip
    out = adapterswap.merge(adapterswap.compose(composition, sources), out_path=tmp_path / "out", max_shard_size="40KB")
    return out, sources, base("llama")


def test_merged_weights_equal_their_recomputation(merged: tuple[Path, dict[str, Path], Path]) -> None:
    out, sources, base = merged
    assert verify(out, sources, base_model=str(base)).equal


def test_changed_tensors_are_named(merged: tuple[Path, dict[str, Path], Path]) -> None:
    out, sources, base = merged
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.3.mlp.up_proj.weight"
    shard = out / index[name]
    raw = bytearray(shard.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    raw[8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0]] ^= 1
    shard.write_bytes(raw)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    result = verify(out, sources, base_model=str(base))
    assert result.differing == (name,)
    assert result.config_differs
    assert not result.changed_sources


def swap_owners(record: dict[str, Any]) -> None:
    other = {"math": "swahili", "swahili": "math"}
    record["tensors"] = {name: other.get(str(owner), owner) for name, owner in record["tensors"].items()}


@pytest.mark.parametrize(
    ("key", "lie"),
    [
        ("tensors", swap_owners),
        ("tensors", lambda record: record["tensors"].popitem()),
        ("rules", lambda record: record.update(rules=[])),
        ("base_model", lambda record: record.update(base_model="org/other")),
        ("base", lambda record: record["base"].update(license="mit")),
        ("base", lambda record: record["base"].update(origin={"experts": {}})),
        ("experts", lambda record: record["experts"]["math"].update(base_revision="R9")),
        ("files", lambda record: record["files"].pop()),
        ("magnitudes", lambda record: record.update(magnitudes={"math": 1.0})),
        (None, lambda record: record["experts"]["swahili"]["sha256"].update({"config.json": "0" * 64})),
    ],
)
def test_errors_in_the_record_are_named(
    key: str | None, lie: Callable[[dict[str, Any]], object], merged: tuple[Path, dict[str, Path], Path]
) -> None:
    out, sources, base = merged
    record = json.loads((out / "adapterswap.json").read_text())
    lie(record)
    (out / "adapterswap.json").write_text(json.dumps(record))
    result = verify(out, sources, base_model=str(base))
    assert result.record_differs == ((key,) if key else ())
    assert result.changed_sources == ({} if key else {"swahili": "config.json"})
    assert not result.equal
    assert not result.differing


def test_sources_that_changed_are_named(
    merged: tuple[Path, dict[str, Path], Path], expert: Make, model: Make, run: Callable[..., Result]
) -> None:
    out, sources, base = merged
    result = verify(out, {**sources, "math": expert(seed=3)}, base_model=str(base))
    assert result.changed_sources == {"math": "adapter_model.safetensors"}
    assert "model.layers.4.mlp.up_proj.weight" in result.differing
    result = verify(out, {**sources, "swahili": model(seed=4)}, base_model=str(base))
    assert result.changed_sources == {"swahili": "weights"}
    outcome = run("verify", out, "--expert", f"math={sources['math']}", "--expert", f"swahili={model(seed=4)}",
               "--base-model", base, exit_code=1)  # fmt: skip
    assert "source changed: swahili's weights" in outcome.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "The base came from a folder named"),
        ({"output": {"dtype": "int4"}}, "int4"),
        ({"output": {"layout": "exact"}}, "cannot read"),
        ({"base_model": 7}, "cannot read"),
    ],
)
def test_records_that_cannot_be_followed(
    change: dict[str, Any], message: str, merged: tuple[Path, dict[str, Path], Path]
) -> None:
    out, sources, base = merged
    record = json.loads((out / "adapterswap.json").read_text())
    (out / "adapterswap.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(AdapterswapError, match=message):
        verify(out, sources, base_model=str(base) if change else None)
