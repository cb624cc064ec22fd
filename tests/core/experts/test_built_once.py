"""transformers builds a base at most once for a command, and only where the headers do not decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import LoraConfig
from pico_models import trained

import adapterswap
from adapterswap.core.model.base import _built
from adapterswap.engines.live import LiveComposer
from adapterswap.engines.serving import Cache, Manifest, NamedComposer
from core.matrix.architectures import ARCHITECTURES, build

from .test_naming import World, older, renamed

SWAP = {"bottom": 1, "top": 1}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The classes of the models that transformers builds from configs; a model within a model is not counted."""
    names: list[str] = []
    depth = 0
    original = transformers.PreTrainedModel._from_config.__func__  # type: ignore[attr-defined]

    def counted(cls: type, *arguments: Any, **options: Any) -> Any:
        nonlocal depth
        names.extend([cls.__name__] * (depth == 0))
        depth += 1
        try:
            return original(cls, *arguments, **options)
        finally:
            depth -= 1

    monkeypatch.setattr(transformers.PreTrainedModel, "_from_config", classmethod(counted))
    _built.cache_clear()
    yield names
    _built.cache_clear()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Path]]]:
    """`pair("gpt2", ["c_attn"])` is a saved pico base and two LoRA on it."""

    def make(architecture: str, targets: list[str], **options: Any) -> tuple[Path, dict[str, Path]]:
        folder = tmp_path_factory.mktemp(architecture)
        build(ARCHITECTURES[architecture]).save_pretrained(folder / "base")
        for name in ("math", "swahili"):
            options |= {"fan_in_fan_out": architecture == "gpt2", "task_type": "CAUSAL_LM"}
            trained(folder / "base", LoraConfig(target_modules=targets, r=2, **options), folder / name, seed=len(name))
        return folder / "base", {name: folder / name for name in ("math", "swahili")}

    return make


def swapped(experts: dict[str, Path]) -> adapterswap.Plan:
    composition = adapterswap.Composition(task="math", language="swahili", **SWAP)
    return adapterswap.compose(composition, experts)


def test_headers_decide(built: list[str], pair: Any, tmp_path: Path) -> None:
    _, experts = pair("llama", ["q_proj", "down_proj"])
    built.clear()
    swapped(experts).write(tmp_path / "adapter")
    swapped(experts).merge(tmp_path / "merged")
    adapterswap.convert(experts["math"], tmp_path / "converted", rank=1)
    assert built == []


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3"])
def test_merging_into_a_tied_base(architecture: str, built: list[str], pair: Any, tmp_path: Path) -> None:
    """It is planned twice, and the copies that PEFT stored beside the embedding's LoRA are compared with the base."""
    ends = {"gpt2": ["c_attn", "wte"], "gemma3": ["q_proj", "embed_tokens"]}[architecture]
    _, experts = pair(architecture, ends)
    built.clear()
    swapped(experts).merge(tmp_path / "merged")
    assert len(built) == 1


def test_converting_modules_that_were_trained_in_full(built: list[str], pair: Any, tmp_path: Path) -> None:
    _, experts = pair("gpt2", ["c_attn"], modules_to_save=["lm_head"])
    built.clear()
    adapterswap.convert(experts["math"], tmp_path / "converted", saved_rank=2)
    assert len(built) == 1


def test_experts_with_names_of_two_versions(built: list[str], tmp_path: Path) -> None:
    """Planned under one name, and written under another."""
    world = World("gemma3", tmp_path)
    language = renamed(world, older("gemma3"), tmp_path / "older")
    built.clear()
    _built.cache_clear()
    plan = adapterswap.soup(world.task, language)
    plan.write(tmp_path / "written")
    plan.write(tmp_path / "as-before", names="transformers4")
    assert len(built) == 1


def test_a_running_model_is_its_own_base(built: list[str], pair: Any) -> None:
    base, experts = pair("gemma3", ["q_proj"])
    model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    built.clear()
    composing = LiveComposer.from_experts(model, experts)
    with composing.use("math+swahili@bottom=1,top=1"):
        pass
    assert built == []


def test_serving_by_name(built: list[str], pair: Any, tmp_path: Path) -> None:
    """The shapes of the base and the tie of a copied embedding; another server with this cache needs neither."""
    base, experts = pair("gemma3", ["q_proj", "embed_tokens"])
    manifest = Manifest(experts={name: str(folder) for name, folder in experts.items()})
    built.clear()
    for _ in range(2):
        NamedComposer(manifest, str(base), Cache(tmp_path / "cache"), None).folder("math+swahili@bottom=1,top=1")
    assert len(built) == 1
