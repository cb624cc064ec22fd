"""Gates only look: without any of them, everything that is valid comes out as the same bytes."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from refusals import refused
from transformers import PreTrainedModel

import adapterswap
from adapterswap import LiveComposer, Plan
from adapterswap.core.experts import gates as of_experts
from adapterswap.core.planning import gates as of_planning
from adapterswap.core.writing import gates as of_writing
from adapterswap.kit.errors import CompositionError, UnsupportedError
from core.matrix.adapters import KINDS, Pair
from core.matrix.architectures import ARCHITECTURES, build
from core.matrix.reference import logits

TABLES = [of_experts, of_planning, of_writing]

# Architecture, kind of adapters → what can be made of them: plain LoRA, LoRA on embeddings, modules in full, a kind
# that only full weights blend, other names of the same modules.
ROWS = {
    ("llama", "linear"): "compose merge export live",
    ("qwen2", "embeddings"): "compose merge live",
    ("mistral", "linear"): "compose merge export live",
    ("gpt2", "modules_to_save"): "compose merge live",
    ("gemma", "dora"): "merge live",
    ("mixtral", "v4_beside_v5"): "compose merge",
}


def contents(folder: Path) -> dict[str, bytes]:
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}


def merged(plan: Plan, out: Path) -> Path:
    return adapterswap.merge(plan, out_path=out)


def exported(plan: Plan, out: Path) -> Path:
    return adapterswap.export(plan, out.with_suffix(".gguf")).files[0].path


WRITERS: dict[str, Callable[[Plan, Path], Path]] = {
    "compose": adapterswap.write_adapter,
    "merge": merged,
    "export": exported,
}


def outcomes(base: PreTrainedModel, pair: Pair, folder: Path, ways: str) -> dict[str, Mapping[str, bytes]]:
    """What is written of a swap and a soup, and what the model says after a live switch."""
    folder.mkdir()
    experts = {"task": pair.task.folder, "language": pair.language.folder}
    written: dict[str, Mapping[str, bytes]] = {}
    for name in ("task+language@bottom=1,top=1", "task+language@method=soup,language_weight=3"):
        for way in ways.split():
            if way not in WRITERS:
                continue
            path = WRITERS[way](adapterswap.compose(name, experts), folder / f"{way}-{len(written)}")
            written[f"{way} {name}"] = contents(path)
    if "live" in ways.split():
        composer = LiveComposer.from_experts(deepcopy(base), experts)
        with composer.use("task+language@bottom=1,top=1"), torch.no_grad():
            written["live"] = {"logits": logits(composer.model).numpy().tobytes()}
    return written


@pytest.mark.parametrize(("architecture", "kind"), ROWS)
def test_with_all_gates_open_the_bytes_are_the_same(
    architecture: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(ARCHITECTURES[architecture]).save_pretrained(tmp_path / "base")
    base = ARCHITECTURES[architecture].model_class.from_pretrained(tmp_path / "base").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, as in the matrix
        pair = KINDS[kind].make(ARCHITECTURES[architecture], base, tmp_path / kind)
        closed = outcomes(base, pair, tmp_path / "closed", ROWS[architecture, kind])
        for table in TABLES:
            monkeypatch.setattr(table, "GATES", {})
        assert outcomes(base, pair, tmp_path / "open", ROWS[architecture, kind]) == closed


def test_a_gate_refuses_what_passes_when_all_are_open(
    math: Path, swahili: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above would compare gates with gates."""
    experts: dict[str, Path] = {"math": math, "swahili": swahili}
    rules = [{"layers": "70", "expert": "math"}, {"layers": "0", "expert": "swahili"}, {"expert": "math"}]
    composition = adapterswap.Composition(allocation=rules)  # type: ignore[arg-type]
    with refused(CompositionError, "allocation"):
        adapterswap.compose(composition, experts)
    for table in TABLES:
        monkeypatch.setattr(table, "GATES", {})
    assert adapterswap.compose(composition, experts).num_layers == 6


def test_a_gate_of_experts_refuses_what_is_read_when_it_is_open(
    math: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(math, tmp_path / "copy")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_qalora": True}))
    with refused(UnsupportedError):
        adapterswap.open_adapter(folder)
    monkeypatch.setattr(of_experts, "GATES", {})
    assert len(adapterswap.open_adapter(folder).modules) == 42
