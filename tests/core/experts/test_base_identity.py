"""A local base is known by its weights: two bases may share a name, and one base may have two names."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pico_models import copied, in_peft
from refusals import refused
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.core.model.sources import Records, Source
from adapterswap.engines.live.loader import load_expert
from adapterswap.engines.serving.cache import Cache
from adapterswap.engines.serving.composer import NamedComposer
from adapterswap.engines.serving.names import Manifest
from adapterswap.experiments.evaluation.subjects import Subject
from adapterswap.kit.errors import BaseModelError, ExpertError


class World(NamedTuple):
    """Two bases, both called `base`, and copies of two experts that may record either."""

    folder: Path
    bases: dict[str, Path]
    experts: dict[str, Path]

    def expert(self, name: str, *, records: str | None, base: str | None = "base") -> Path:
        """A copy of an expert whose training.json holds the weights of a base, and whose config names `base`."""
        copy = self.folder / f"{name}-{records}-{str(base).replace('/', '-')}"
        copied(self.experts[name], copy, base_model_name_or_path=base)
        if records is not None:
            trained = {"name": "base", "revision": None, "fingerprints": prints(self.bases[records])}
            (copy / "training.json").write_text(json.dumps({"base": trained, "losses": [float("nan")]}))
        return copy


def prints(base: Path) -> dict[str, str]:
    """What identifies a base of one small file."""
    content = (base / "model.safetensors").read_bytes()
    return {"model.safetensors": hashlib.sha256(str(len(content)).encode() + content).hexdigest()}


@pytest.fixture
def world(base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path) -> World:
    bases = {name: tmp_path / name / "base" for name in ("a", "b")}
    for folder in bases.values():
        shutil.copytree(base("llama"), folder)
    raw = bytearray((bases["b"] / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (bases["b"] / "model.safetensors").write_bytes(raw)
    return World(tmp_path, bases, {"math": math, "swahili": swahili})


# What the task and the language expert record and name, and the declared base → refused, noted or fine.
@pytest.mark.parametrize(
    ("task", "language", "declared", "outcome"),
    [
        (("a", "base"), ("a", "base"), None, "fine"),
        (("a", "base"), ("b", "base"), None, ExpertError),
        (("a", "base"), ("b", "base"), "a", ExpertError),
        (("a", "base"), ("b", "other"), "a", ExpertError),
        (("a", "base"), ("a", "other"), None, "fine"),
        (("a", "org/base"), ("b", "org/base"), None, ExpertError),
        (("a", "base"), ("a", "base"), "a", "fine"),
        (("a", "base"), ("a", "base"), "b", BaseModelError),
        (("a", "base"), (None, "base"), "b", BaseModelError),
        (("a", "base"), (None, "base"), None, "noted"),
        ((None, "base"), (None, "base"), None, "noted"),
        ((None, "base"), (None, "other"), None, ExpertError),
        ((None, "base"), (None, "base"), "a", "noted"),
        ((None, "org/base"), (None, "org/base"), None, "fine"),
        ((None, "org/base"), (None, "org/base"), "a", "fine"),
        ((None, "{a}"), (None, "{a}"), None, "fine"),
        ((None, "{a}"), (None, "{a}"), "a", "fine"),
    ],
)
def test_two_experts_have_one_base(
    task: tuple[str | None, str],
    language: tuple[str | None, str],
    declared: str | None,
    outcome: Any,
    world: World,
) -> None:
    experts = [
        world.expert(name, records=records, base=base.format(**world.bases))
        for name, (records, base) in (("math", task), ("swahili", language))
    ]
    place = None if declared is None else world.bases[declared]
    if not isinstance(outcome, str):
        with refused(outcome, "base_model" if outcome is BaseModelError else None):
            adapterswap.layer_swap(*experts, num_layers=6, base_model=place)
        return
    plan = adapterswap.layer_swap(*experts, num_layers=6, base_model=place)
    assert any("have one base" in note for note in plan.notes) == (outcome == "noted")
    assert plan.base.name == task[1].format(**world.bases)


def full_model(world: World, name: str) -> Path:
    """A full fine-tune of the base `a` that records it."""
    folder = world.folder / f"full-{name}"
    in_peft(world.bases["a"], world.experts[name]).merge_and_unload().save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps({"base": {"fingerprints": prints(world.bases["a"])}}))
    return folder


Use = Callable[[World, Path, Path], object]


def use_live(world: World, base: Path, out: Path) -> object:
    return load_expert(AutoModelForCausalLM.from_pretrained(base), world.expert("math", records="a"), "math")


def evaluate(world: World, base: Path, out: Path) -> object:
    opened = OpenedBase(str(base), Source(base, base.name), AutoModelForCausalLM.from_pretrained(base).config, None)
    adapter = world.expert("math", records="a")
    with Subject(opened, adapter=Source(adapter, adapter.name)).loaded(device="cpu") as model:
        return model


COMMANDS: dict[str, Use] = {
    "compose": lambda w, base, out: adapterswap.layer_swap(
        w.expert("math", records="a"), w.expert("swahili", records=None), base_model=base
    ),
    "slice": lambda w, base, out: adapterswap.slice_layers(w.expert("math", records="a"), "0-1", base_model=base),
    "merge": lambda w, base, out: adapterswap.merge(w.expert("math", records="a"), base, out_path=out),
    "merge a plan": lambda w, base, out: adapterswap.merge(
        adapterswap.layer_swap(w.expert("math", records="a"), w.expert("swahili", records="a"), num_layers=6),
        base, out_path=out,
    ),
    "merge full weights": lambda w, base, out: adapterswap.merge(
        adapterswap.soup(full_model(w, "math"), full_model(w, "swahili"), base_model=base), out_path=out
    ),
    "convert": lambda w, base, out: adapterswap.convert(w.expert("math", records="a"), out, base_model=base),
    "export": lambda w, base, out: adapterswap.export(w.expert("math", records="a"), out, base_model=base),
    "extract": lambda w, base, out: adapterswap.extract(full_model(w, "math"), base, out, rank=2),
    "live": use_live,
    "evaluate": evaluate,
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_base_is_the_one_that_the_experts_record(command: str, world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with refused(ExpertError if command == "live" else BaseModelError, "expert" if command == "live" else "base_model"):
        COMMANDS[command](world, world.bases["b"], out)
    assert not out.exists()
    for folder in [*tmp_path.glob("math-*"), *tmp_path.glob("swahili-*"), *tmp_path.glob("full-*")]:
        shutil.rmtree(folder)
    COMMANDS[command](world, world.bases["a"], out)


def test_a_server_refuses_experts_of_another_base(world: World, tmp_path: Path) -> None:
    manifest = Manifest(experts={"math": str(world.expert("math", records="a", base="another"))})
    for name, other in (("a", False), ("b", True)):
        composer = NamedComposer(manifest, str(world.bases[name]), Cache(tmp_path / "cache"), None)
        if other:
            with refused(BaseModelError, "base_model"):
                composer.open("math")
        else:
            assert composer.other_bases({"math": composer.open("math")}) == []


def test_a_base_found_by_its_name_is_compared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that `train` wrote name only the folder, and the current folder may hold another one of this name."""
    experts = [world.expert(name, records="a") for name in ("math", "swahili")]
    monkeypatch.chdir(world.folder / "b")
    with refused(BaseModelError, "base_model"):
        adapterswap.layer_swap(*experts)
    assert adapterswap.layer_swap(*experts, num_layers=6).base.source is None  # not needed, so not looked at


def test_what_is_made_of_an_expert_carries_its_base_on(world: World, tmp_path: Path) -> None:
    math, swahili = (world.expert(name, records="a") for name in ("math", "swahili"))
    base, other = world.bases["a"], world.expert("swahili", records="b")
    swap = adapterswap.layer_swap(math, swahili, num_layers=6).write(tmp_path / "swap")
    adapterswap.convert(swap, tmp_path / "converted", dtype="bfloat16")
    adapterswap.convert(world.expert("math", records="a", base=None), tmp_path / "with-base", base_model=base)
    adapterswap.extract(full_model(world, "math"), base, tmp_path / "extracted", rank=2)
    made = {
        "swap": swap,
        "swap of it": adapterswap.layer_swap(swap, swahili, num_layers=6).write(tmp_path / "again"),
        "slice": adapterswap.slice_layers(swap, "0-2", num_layers=6).write(tmp_path / "slice"),
        "converted": tmp_path / "converted",
        "extracted": tmp_path / "extracted",
        "merged": adapterswap.merge(math, base, out_path=tmp_path / "merged"),
        "a checkpoint of the run": tmp_path / "run" / "checkpoint-8",
    }
    shutil.copytree(math, tmp_path / "run")
    shutil.copytree(world.experts["math"], tmp_path / "run" / "checkpoint-8")
    assert {name: Records(folder).base() for name, folder in made.items()} == dict.fromkeys(made, prints(base))
    for name in ("swap", "swap of it", "converted", "extracted", "a checkpoint of the run"):
        with refused(ExpertError):
            adapterswap.soup(made[name], other, num_layers=6)


@pytest.mark.parametrize(
    "record", ["[", "{}", '{"base": 3}', '{"base": {"fingerprints": ["x"]}}', '{"experts": {"a": 1}}']
)
def test_a_damaged_record_names_no_base(record: str, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(record)
    (tmp_path / "adapterswap.json").write_text(record)
    assert Records(tmp_path).base() == {}


def test_a_chain_is_refused_whatever_base_is_declared(world: World, tmp_path: Path) -> None:
    """The second expert was trained on a base into which the first is merged."""
    first = world.expert("math", records=None, base=str(world.bases["a"]))
    merged = adapterswap.merge(first, world.bases["a"], out_path=tmp_path / "merged")
    on_top = world.expert("swahili", records=None, base=str(merged))
    beside = copied(on_top, tmp_path / "beside", base_model_name_or_path=str(world.bases["b"]))
    for pair in ((first, on_top), (on_top, first)):
        for base in (None, world.bases["a"], merged):
            with refused(ExpertError, match="on top of"):
                adapterswap.soup(*pair, base_model=base)
    adapterswap.soup(first, beside, base_model=world.bases["a"])  # other names may mean the same base
