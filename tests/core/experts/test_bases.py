"""The base that experts name: its depth and revision are checked, or a note says that they could not be."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import Result
from pico_models import copied, edit_json
from refusals import refused

import adapterswap
from adapterswap import Composition
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.core.model.sources import Source
from adapterswap.engines.serving.composer import other_base
from adapterswap.experiments.evaluation.subjects import Subject
from adapterswap.kit.errors import CompositionError, ExpertError
from adapterswap.tools.verification import verify

CONFIG, RECORD = "adapter_config.json", "adapterswap.json"


@pytest.fixture
def hub_base(
    base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, str], None]:
    """`hub_base(6, "main")` puts the experts' base, as a config of 6 layers, into an empty Hub cache, as `org/base`."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def make(layers: int, revision: str) -> None:
        repository = cache / "models--org--base"
        commit = f"{layers:040d}"
        (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        config = {**json.loads((base("llama") / "config.json").read_text()), "num_hidden_layers": layers}
        (repository / "snapshots" / commit / "config.json").write_text(json.dumps(config))

    return make


def naming(base: str, expert: Path, copy: Path, **changes: Any) -> Path:
    """A copy of an adapter whose config names another base."""
    return copied(expert, copy, base_model_name_or_path=base, **changes)


def commands(math: Path, swahili: Path, out: Path) -> dict[str, list[object]]:
    base = json.loads((math / CONFIG).read_text())["base_model_name_or_path"]
    pair = ["-t", math, "-l", swahili, "--num-layers", 32]
    return {
        "compose": ["compose", *pair, "-o", out],
        "merge": ["merge", *pair, "-o", out],
        "slice": ["slice", math, "--layers", "0-1", "--num-layers", 32, "-o", out],
        "evaluate": ["evaluate", "--tasks", "mgsm_native_cot_sw", "--base-model", base, *pair],
        "suggest": ["suggest", "-t", math, "-l", swahili, "--num-layers", 32],
    }


@pytest.mark.parametrize("name", ["compose", "merge", "slice", "suggest", "evaluate"])
def test_a_depth_other_than_the_bases_is_refused(
    name: str, run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path
) -> None:
    result = run(*commands(math, swahili, tmp_path / "out")[name], exit_code=2)
    assert "32" in result.stderr
    assert "--num-layers" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_depth_other_than_the_bases_is_refused_in_python(
    math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    with refused(CompositionError, "num_layers"):
        adapterswap.layer_swap(math, swahili, num_layers=32, bottom=5, top=2)
    with refused(CompositionError, "num_layers"):
        adapterswap.soup(math, swahili, num_layers=32, base_model=str(base("llama")))
    experts = {"math": adapterswap.open_adapter(math), "swahili": adapterswap.open_adapter(swahili)}
    composition = Composition(task="math", language="swahili", num_layers=5)
    with refused(CompositionError, "num_layers"):
        adapterswap.make_plan(composition, experts, num_layers=6)
    out = adapterswap.write_adapter(adapterswap.layer_swap(math, swahili, num_layers=6), tmp_path / "out")
    edit_json(out / RECORD, num_layers=7)
    with refused(CompositionError, "num_layers"):
        verify(out, {expert.name: expert for expert in (math, swahili)})


def test_the_declared_base_decides_the_depth(
    math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    away = [naming("org/base", expert, tmp_path / expert.name) for expert in (math, swahili)]
    with refused(CompositionError, "num_layers"):
        adapterswap.layer_swap(*away, num_layers=7, base_model=str(base("llama")))
    plan = adapterswap.layer_swap(*away, num_layers=6, base_model=str(base("llama")))
    assert plan.notes == ()


@pytest.mark.parametrize("revision", [None, "v2"])
def test_a_base_in_the_hub_cache_is_read_offline(
    revision: str | None, hub_base: Callable[[int, str], None], math: Path, swahili: Path, tmp_path: Path
) -> None:
    """The config is read at the revision that the experts name."""
    hub_base(9, "v2" if revision is None else "main")
    away = [naming("org/base", expert, tmp_path / expert.name, revision=revision) for expert in (math, swahili)]
    assert len(adapterswap.layer_swap(*away, num_layers=8).notes) == 1
    hub_base(6, revision or "main")
    with refused(CompositionError, "num_layers"):
        adapterswap.layer_swap(*away, num_layers=8)
    assert adapterswap.layer_swap(*away, num_layers=6).notes == ()
    assert adapterswap.layer_swap(*away).num_layers == 6


def test_a_depth_that_cannot_be_checked_is_noted(
    run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path
) -> None:
    away = [naming("org/base", expert, tmp_path / name) for name, expert in (("math", math), ("swahili", swahili))]
    pair = ["-t", away[0], "-l", away[1]]
    for command in (["compose", *pair], ["slice", away[0], "--layers", "0-1"]):
        result = run(*command, "--num-layers", 8, "-o", tmp_path / command[0], exit_code=0)
        assert "could not be checked" in result.stderr
        assert "could not be checked" not in (tmp_path / command[0] / "README.md").read_text()
    result = run("compose", *pair, "--num-layers", 8, "-o", tmp_path / "again", "--json")
    assert "org/base" in json.loads(result.stdout)["notes"][0]
    assert run("compose", *pair, "--num-layers", 5, "-o", tmp_path / "shallow").exit_code == 3  # layer 5 is adapted


def test_two_revisions_of_the_base_are_an_error(math: Path, swahili: Path, tmp_path: Path) -> None:
    one = naming("org/base", math, tmp_path / "math", revision="a1")
    other = naming("org/base", swahili, tmp_path / "swahili", revision="b2")
    default = naming("org/base", swahili, tmp_path / "default", revision=None)
    main = naming("org/base", math, tmp_path / "main", revision="main")
    for pair in ((one, other), (one, default)):
        with refused(ExpertError, match="revision"):
            adapterswap.layer_swap(*pair, num_layers=6)
    adapterswap.layer_swap(main, default, num_layers=6)  # the default revision, named or not


@pytest.mark.parametrize(
    ("declared", "written"), [("org/base", None), ("org/base@b2", "b2"), ("org/base@refs/pr/3", "refs/pr/3")]
)
def test_a_declared_revision_is_written_and_the_experts_revisions_are_recorded(
    declared: str, written: str | None, math: Path, swahili: Path, tmp_path: Path
) -> None:
    experts = {
        "math": naming("org/base", math, tmp_path / "math", revision="a1"),
        "swahili": naming("org/base", swahili, tmp_path / "swahili", revision="b2"),
    }
    plan = adapterswap.layer_swap(*experts.values(), num_layers=6, base_model=declared)
    out = adapterswap.write_adapter(plan, tmp_path / "out")
    config, record = (json.loads((out / name).read_text()) for name in (CONFIG, RECORD))
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", written)
    assert (record["base_model"], record["base_revision"]) == ("org/base", written)
    assert {name: each["base_revision"] for name, each in record["experts"].items()} == {"math": "a1", "swahili": "b2"}
    assert "math: org/base@a1" in (out / "README.md").read_text()
    assert verify(out, experts).equal


def test_experts_of_two_bases_are_recorded_with_a_warning(
    run: Callable[..., Result], math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    experts = {
        "math": naming("org/base", math, tmp_path / "math", revision="a1"),
        "swahili": naming("org/base-instruct", swahili, tmp_path / "swahili", revision="a1"),
    }
    pair = ["-t", experts["math"], "-l", experts["swahili"]]
    assert run("compose", *pair, "--num-layers", 6, "-o", tmp_path / "refused").exit_code == 3
    result = run("compose", *pair, "--base-model", base("llama"), "-o", tmp_path / "out", exit_code=0)
    for name in ("math: org/base@a1", "swahili: org/base-instruct@a1"):
        assert name in result.output
        assert name in (tmp_path / "out" / "README.md").read_text()
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    named = {name: each["base_model"] for name, each in record["experts"].items()}
    assert named == {"math": "org/base", "swahili": "org/base-instruct"}
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(base("llama")), None)
    run("merge", *pair, "--base-model", base("llama"), "-o", tmp_path / "merged", exit_code=0)
    record = json.loads((tmp_path / "merged" / RECORD).read_text())
    assert {name: each["base_model"] for name, each in record["experts"].items()} == named
    assert "swahili: org/base-instruct@a1" in (tmp_path / "merged" / "README.md").read_text()


def test_a_merge_opens_the_base_at_the_experts_revision(
    hub_base: Callable[[int, str], None], math: Path, tmp_path: Path
) -> None:
    away = naming("org/base", math, tmp_path / "math", revision="v2")
    hub_base(6, "v2")
    plan = adapterswap.soup(away, away, num_layers=6)
    assert isinstance(plan, adapterswap.Plan)
    assert plan.base.reference == "org/base@v2"


def test_one_base_folder_under_two_names_is_one_base(
    math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "link"
    other.symlink_to(base("llama"))
    away = naming(str(other), swahili, tmp_path / "swahili")
    out = adapterswap.write_adapter(adapterswap.layer_swap(math, away), tmp_path / "out")
    assert json.loads((out / CONFIG).read_text())["base_model_name_or_path"] == str(base("llama"))


def test_full_checkpoints_without_a_depth_in_their_config(base: Callable[[str], Path], tmp_path: Path) -> None:
    folders = []
    for name in ("math", "swahili"):
        folders.append(shutil.copytree(base("llama"), tmp_path / name))
        edit_json(folders[-1] / "config.json", num_hidden_layers=...)
    adapterswap.layer_swap(*folders, num_layers=6)
    for depth in (5, 32):
        with refused(CompositionError, "num_layers"):
            adapterswap.layer_swap(*folders, num_layers=depth)


def test_evaluate_compares_the_depth_with_the_base_that_it_loads(
    math: Path, swahili: Path, base: Callable[[str], Path]
) -> None:
    """The base was not available locally when the composition was planned."""
    source = Source(base("llama"), "llama")
    opened = OpenedBase("org/base", source, transformers.AutoConfig.from_pretrained(base("llama")), None)
    plan = adapterswap.layer_swap(math, swahili)
    assert isinstance(plan, adapterswap.Plan)
    with (
        refused(CompositionError, "num_layers"),
        Subject(opened, plan=dataclasses.replace(plan, num_layers=7)).loaded(device="cpu"),
    ):
        pass


@pytest.mark.parametrize(
    ("served", "own", "remarks"),
    [
        ("org/base", "v1", 0),
        ("org/base@v1", "v1", 0),
        ("org/base@v1", None, 0),
        ("org/base@v1", "v2", 1),
        ("org/b", "v1", 1),
    ],
)
def test_serve_says_when_an_expert_names_another_revision(
    served: str, own: str | None, remarks: int, math: Path, tmp_path: Path
) -> None:
    expert = adapterswap.open_adapter(naming("org/base", math, tmp_path / "math", revision=own))
    assert (other_base(expert, "math", served) is not None) == bool(remarks)
