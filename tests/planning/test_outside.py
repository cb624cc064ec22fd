"""What lies outside the language model's layers: towers, heads, layers that predict further tokens; whose they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from crafting import PREFIX, WEIGHTS, adapter, config
from refusals import refused
from safetensors.numpy import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap.errors import FieldError
from adapterswap.experts.layers import layer_container

TEXT = [f"model.text_model.layers.{layer}.self_attn.q_proj" for layer in range(4)]
BESIDE = [
    "model.vision_model.encoder.layers.0.self_attn.q_proj", "model.vision_model.encoder.layers.3.mlp.fc1",
    "model.audio_tower.layers.1.self_attn.q_proj", "model.connector.modality_projection.proj", "lm_head",
    "mtp.layers.0.self_attn.q_proj", "model.mtp_layers.0.self_attn.q_proj",
]  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "smolvlm", "text_config": {"num_hidden_layers": 4}}))
    return folder


@pytest.fixture
def make(tmp_path: Path, base: Path) -> Callable[[str, int], Path]:
    def made(name: str, seed: int) -> Path:
        random, content = np.random.default_rng(seed), {}
        for module in (*TEXT, *BESIDE):
            for factor, shape in (("A", (2, 4)), ("B", (8, 2))):
                data = random.standard_normal(shape).astype(np.float32).tobytes()
                content[f"{PREFIX}{module}.lora_{factor}.weight"] = ("F32", shape, data)
        targets = sorted({module.rpartition(".")[2] for module in (*TEXT, *BESIDE)})
        return adapter(tmp_path / name, content, config(base_model_name_or_path=str(base), target_modules=targets))

    return made


def delta(folder: Path, module: str) -> np.ndarray:
    tensors = load_file(folder / WEIGHTS)
    opened = adapterswap.open_adapter(folder).modules[module]
    a, b = (tensors[f"{PREFIX}{module}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
    return opened.scale * b @ a


@pytest.mark.parametrize("outside", ["average", "task", "language"])
@pytest.mark.parametrize("zones", [{"bottom": 1, "top": 1}, {"partition": "B"}])
def test_towers_go_where_they_are_sent(
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


def test_outside_is_for_layer_swaps(
    make: Callable[[str, int], Path], run: Callable[..., Result], tmp_path: Path
) -> None:
    with refused(FieldError, "outside"):
        adapterswap.parse_composition("math+swahili@method=soup,outside=task")
    assert adapterswap.parse_composition("math+swahili@outside=task").outside == "task"
    experts = ("-t", make("task", 1), "-l", make("language", 2), "-o", tmp_path / "out")
    assert run("compose", *experts, "--method", "soup", "--outside", "task").exit_code == 1
    result = run("compose", *experts, "--bottom", 1, "--top", 1, "--outside", "language")
    assert result.exit_code == 0, result.stderr
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


def checkpoint(folder: Path, seed: int) -> Path:
    """A model of two layers, and a third one that predicts a further token."""
    random = np.random.default_rng(seed)
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    folder.mkdir()
    save_file({name: random.standard_normal((4, 4)).astype(np.float32) for name in names}, folder / "model.safetensors")
    content = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(content))
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
