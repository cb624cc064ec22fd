"""Owners of modules outside the language model's layers: towers, heads, layers that predict further tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from conftest import load_base
from crafting import WEIGHTS, lora
from pico_models import deltas
from refusals import refused
from safetensors.numpy import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap.core.model.layers import layer_container
from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import CompositionError, ExpertError, FieldError, UnsupportedError

TEXT = [f"model.text_model.layers.{layer}.self_attn.q_proj" for layer in range(4)]
BESIDE = [
    "model.vision_model.encoder.layers.0.self_attn.q_proj", "model.vision_model.encoder.layers.3.mlp.fc1",
    "model.audio_tower.layers.1.self_attn.q_proj", "model.connector.modality_projection.proj", "lm_head",
    "mtp.layers.0.self_attn.q_proj", "model.mtp_layers.0.self_attn.q_proj",
]  # fmt: skip


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    """A base with towers of all kinds, whose class transformers does not have."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "custom", "text_config": {"num_hidden_layers": 4}}))
    return folder


@pytest.fixture
def make(tmp_path: Path, custom: Path) -> Callable[[str, int], Path]:
    shapes = dict.fromkeys((*TEXT, *BESIDE), (8, 4))
    return lambda name, seed: lora(tmp_path / name, shapes, base=custom, seed=seed)


def delta(folder: Path, module: str) -> np.ndarray:
    return deltas(folder)[module]


@pytest.mark.parametrize("outside", ["average", "task", "language"])
@pytest.mark.parametrize("zones", [{"bottom": 1, "top": 1}, {"partition": "B"}])
def test_towers_go_to_the_chosen_owner(
    outside: str, zones: dict[str, object], make: Callable[[str, int], Path], tmp_path: Path
) -> None:
    task, language = make("task", 1), make("language", 2)
    composition = adapterswap.Composition(task="task", language="language", outside=outside, **zones)
    plan = adapterswap.compose(composition, {"task": task, "language": language})
    out = plan.write(tmp_path / "out")
    share = {"average": 0.5, "task": 1.0, "language": 0.0}[outside]
    for module in BESIDE:
        assert plan.slots[module].layer is None
        expected = share * delta(task, module) + (1 - share) * delta(language, module)
        close(delta(out, module), expected)
    owners = [plan.slots[module].owner for module in TEXT]
    assert owners == ["language", "task", "task", "language"]
    assert adapterswap.verify(out, {"task": task, "language": language}).equal
    record = json.loads((out / "adapterswap.json").read_text())["composition"]
    assert record.get("outside", "average") == outside


def test_a_reset_of_the_layers_and_of_what_is_outside(make: Callable[[str, int], Path]) -> None:
    task = make("task", 1)

    def owner(**options: str) -> str | None:
        composition = adapterswap.Composition(task="task", language="base", bottom=1, top=1, **options)
        return adapterswap.compose(composition, {"task": task}).slots["lm_head"].owner

    assert owner() == owner(outside="average") == owner(outside="task") == "task"
    assert owner(outside="language") == "base"


def test_the_function_takes_it_too(make: Callable[[str, int], Path]) -> None:
    task, language = make("task", 1), make("language", 2)
    for outside, owner in (("average", None), ("task", "task"), ("language", "language")):
        plan = adapterswap.layer_swap(task, language, bottom=1, top=1, outside=outside)  # type: ignore[arg-type]
        assert plan.slots["lm_head"].owner == owner
    with refused(FieldError, "outside"):
        adapterswap.layer_swap(task, language, bottom=1, top=1, outside="base")  # type: ignore[arg-type]
    with refused(CompositionError, "stack"):  # not an encoder-decoder
        adapterswap.layer_swap(task, language, bottom=1, top=1, stack="decoder")


def test_outside_is_for_layer_swaps(
    make: Callable[[str, int], Path], run: Callable[..., Result], tmp_path: Path
) -> None:
    with refused(FieldError, "outside"):
        adapterswap.parse_composition("math+swahili@method=soup,outside=task")
    assert adapterswap.parse_composition("math+swahili@outside=task").outside == "task"
    experts = ("-t", make("task", 1), "-l", make("language", 2), "-o", tmp_path / "out")
    assert run("compose", *experts, "--method", "soup", "--outside", "task").exit_code == 2
    result = run("compose", *experts, "--bottom", 1, "--top", 1, "--outside", "language", exit_code=0)
    assert "lm_head: language" in result.stdout


@pytest.mark.parametrize(
    ("names", "container"),
    [
        (["thinker.model.layers.0.x", "thinker.audio_tower.layers.0.x", "thinker.visual.blocks.0.x",
          "talker.model.layers.0.x", "token2wav.dit.blocks.0.x"], "thinker.model.layers"),
        (["model.text_model.layers.0.x", "model.vision_model.encoder.layers.0.x"], "model.text_model.layers"),
        (["model.layers.0.x", "model.mtp_layers.0.x", "mtp.layers.0.x", "model.nextn.layers.0.x"], "model.layers"),
        (["audio_tower.layers.0.x", "language_model.model.layers.0.x"], "language_model.model.layers"),
    ],
)  # fmt: skip
def test_text_towers_under_other_names(names: list[str], container: str) -> None:
    assert layer_container(names) == container


LAYERS = tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(3))
AHEAD = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}


def checkpoint(folder: Path, seed: int, names: Sequence[str] = LAYERS, **settings: object) -> Path:
    """A model of two layers with a third one that predicts a further token."""
    random = np.random.default_rng(seed)
    folder.mkdir()
    weights = {f"{name}.weight": random.standard_normal((4, 4)).astype(np.float32) for name in names}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**AHEAD, **settings}))
    return folder


@pytest.mark.parametrize(("outside", "share"), [("average", 0.5), ("task", 1.0), ("language", 0.0)])
def test_layers_that_predict_further_tokens_are_outside(outside: str, share: float, tmp_path: Path) -> None:
    task, language = checkpoint(tmp_path / "task", 1), checkpoint(tmp_path / "language", 2)
    composition = adapterswap.Composition(task="task", language="language", bottom=1, top=0, outside=outside)
    out = adapterswap.compose(composition, {"task": task, "language": language}).merge(tmp_path / "out")
    ours, theirs, found = (load_file(folder / "model.safetensors") for folder in (task, language, out))
    key = "model.layers.{}.self_attn.q_proj.weight".format
    assert np.array_equal(found[key(0)], theirs[key(0)])
    assert np.array_equal(found[key(1)], ours[key(1)])
    close(found[key(2)], share * ours[key(2)] + (1 - share) * theirs[key(2)])


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "one full"])
@pytest.mark.parametrize(("outside", "share"), [("average", 0.5), ("task", 1.0), ("language", 0.0)])
@pytest.mark.parametrize("last", ["model.layers.2.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj"])
def test_adapters_of_layers_that_predict_further_tokens(
    last: str, outside: str, share: float, full: bool, tmp_path: Path
) -> None:
    names = (*LAYERS[:2], last)
    base = checkpoint(tmp_path / "base", 0, names)
    shapes = dict.fromkeys(names, (4, 4))
    experts = {"task": lora(tmp_path / "task", shapes, base=base, seed=1)}
    if full:
        experts["language"] = checkpoint(tmp_path / "full", 2, names)
    else:
        experts["language"] = lora(tmp_path / "language", shapes, base=base, seed=2)
    composition = adapterswap.Composition(task="task", language="language", bottom=1, top=0, outside=outside)
    if full:
        composition = composition.model_copy(update={"base_model": str(base)})
    plan = adapterswap.compose(composition, experts)
    out = plan.merge(tmp_path / "merged")
    own, found = (load_file(folder / "model.safetensors") for folder in (base, out))

    def change(expert: str, name: str) -> np.ndarray:
        if expert == "language" and full:
            weight: np.ndarray = load_file(experts[expert] / "model.safetensors")[f"{name}.weight"]
            return weight - own[f"{name}.weight"]
        return delta(experts[expert], name)

    for name, of_task in zip(names, (0.0, 1.0, share), strict=True):
        mixed = of_task * change("task", name) + (1 - of_task) * change("language", name)
        close(found[f"{name}.weight"], own[f"{name}.weight"] + mixed)
        if not full:
            assert plan.slots[name].layer == (None if name == last else int(name.split(".")[2]))
    if not full:
        written = plan.write(tmp_path / "out")
        for name, of_task in zip(names, (0.0, 1.0, share), strict=True):
            close(delta(written, name), of_task * change("task", name) + (1 - of_task) * change("language", name))
        assert adapterswap.verify(written, experts).equal
        kept = adapterswap.slice_layers(experts["task"], "0")
        assert {name for name, slot in kept.slots.items() if slot.terms} == {names[0], last}


def test_a_layer_beyond_the_configs_last(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", 0, LAYERS[:2], num_nextn_predict_layers=0)
    shapes = dict.fromkeys(LAYERS, (4, 4))
    task, language = (lora(tmp_path / name, shapes, base=base, seed=len(name)) for name in ("task", "language"))
    with refused(ExpertError, match="task adapts layer 2, but the base has 2 layers"):
        adapterswap.compose("task+language@bottom=1,top=0", {"task": task, "language": language})
    unnamed = {name: lora(tmp_path / f"unnamed-{name}", shapes) for name in ("task", "language")}
    with refused(ExpertError, match="num_nextn_predict_layers"):
        adapterswap.compose(adapterswap.Composition(task="task", language="language", num_layers=2), unnamed)


def test_layers_that_predict_further_tokens_are_not_live_nor_extracted(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """Refused live with the modules' names, and reported with its size when an adapter is extracted."""
    trained, first = expert(seed=1), "model.layers.0.self_attn.q_proj"
    for ahead in ("mtp.layers.0.self_attn.q_proj", "model.layers.6.self_attn.q_proj"):
        odd = tmp_path / ahead
        shutil.copytree(trained, odd)
        held = load_file(odd / WEIGHTS)
        held |= {key.replace(first, ahead): value for key, value in held.items() if first in key}
        save_file(held, odd / WEIGHTS, {"format": "pt"})
        with refused(ExpertError, "expert", match=ahead) as error:
            LiveComposer.from_experts(load_base(base("llama")), {"math": odd})
        assert "`merge`" in str(error.value)
    weights = load_file(base("llama") / "model.safetensors")
    made = []
    for seed in (0, 1):
        random = np.random.default_rng(seed)
        made.append(shutil.copytree(base("llama"), tmp_path / f"{seed}"))
        held = dict(weights)
        for name in ("mtp.layers.0.self_attn.q_proj.weight", f"{first}.weight"):
            held[name] = weights[f"{first}.weight"] + seed * random.standard_normal((32, 32)).astype(np.float32)
        save_file(held, made[-1] / "model.safetensors", {"format": "pt"})
    result = adapterswap.extract(made[1], base_model=made[0], rank=32, out_path=tmp_path / "out")
    assert {module.name for module in result.modules if module.rank} == {first}
    assert [lost.name for lost in result.lost] == ["mtp.layers.0.self_attn.q_proj.weight"]


def test_blocks_that_layers_share(tmp_path: Path) -> None:
    """ALBERT's groups are no layers: whatever names layers is refused, and a soup averages the blocks."""
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query"
    experts = {expert: lora(tmp_path / expert, {name: (4, 4)}, seed=len(expert)) for expert in ("math", "swahili")}
    swap = adapterswap.Composition(task="math", language="swahili", bottom=1, top=1, num_layers=12)
    for refusing in (
        lambda: adapterswap.compose(swap, experts),
        lambda: adapterswap.slice_layers(experts["math"], "0"),
        lambda: adapterswap.suggest(experts["math"], experts["swahili"], num_layers=12),
    ):
        with refused(UnsupportedError, match="several layers share"):
            refusing()
    soup = adapterswap.Composition(task="math", language="swahili", method="soup", num_layers=12)
    plan = adapterswap.compose(soup, experts)
    assert plan.slots[name].layer is None
    assert not any("no expert adapts them" in line for line in plan.remarks)
    assert any("albert.encoder.albert_layer_groups" in line for line in plan.remarks if name not in line)
    written = plan.write(tmp_path / "out")
    close(delta(written, name), sum(delta(expert, name) for expert in experts.values()) / 2)
