"""One cause gives one message: experts of another base, Git LFS pointers. And the names that experts get."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from conftest import load_base
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap import AdapterswapError
from adapterswap.core.experts.parts import compare_shapes
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.core.planning.names import ExpertName
from adapterswap.engines.live import load_expert
from adapterswap.kit.errors import Problems

Run = Callable[..., Result]
WIDE = 48


@pytest.fixture(scope="module")
def wide_base(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' Llama base, 48 wide instead of 32."""
    config = transformers.AutoConfig.from_pretrained(base("llama"))
    config.hidden_size, config.head_dim = WIDE, WIDE // config.num_attention_heads
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide(wide_base: Path, base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expert of the wide base whose config names the other one."""
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(load_base(wide_base), LoraConfig(r=2, target_modules=projections, task_type="CAUSAL_LM"))
    folder = tmp_path_factory.mktemp("wide-expert")
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base("llama"))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def only_problem(call: Callable[[], Any]) -> str:
    with pytest.raises(AdapterswapError) as caught:
        call()
    (problem,) = caught.value.problems
    return problem.message


def test_experts_of_another_width(run: Run, math: Path, wide: Path, tmp_path: Path) -> None:
    message = only_problem(lambda: adapterswap.soup(math, wide, num_layers=6))
    assert "hidden size is 32" in message
    assert str(WIDE) in message
    result = run("compose", "-t", math, "-l", wide, "--num-layers", 6, "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert result.stderr.count("Error: ") == 1


def test_an_expert_with_a_base_of_another_width(wide_base: Path, math: Path, swahili: Path, tmp_path: Path) -> None:
    live = only_problem(lambda: load_expert(load_base(wide_base), math, "math"))
    merged = only_problem(lambda: adapterswap.merge(math, wide_base, out_path=tmp_path / "merged"))
    for message in (live, merged):
        assert "hidden size is 32" in message
        assert str(WIDE) in message
    assert not (tmp_path / "merged").exists()


def test_checkpoints_of_another_width(wide_base: Path, base: Callable[[str], Path], tmp_path: Path) -> None:
    message = only_problem(lambda: adapterswap.soup(base("llama"), wide_base))
    assert "hidden_size is 32" in message
    assert "hidden size is" in only_problem(
        lambda: adapterswap.extract(wide_base, base("llama"), tmp_path / "cut", rank=2)
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"q": "8×8", "k": "4×8"}, {"q": "8×8", "k": "4×8"}, None),
        ({"q": "8×8"}, {"k": "4×4"}, None),
        ({"q": "8×8", "k": "4×8"}, {"q": "16×16", "k": "4×16"}, "The hidden size is 8 in a, but 16 in b"),
        ({"q": "8×8"}, {"q": "16×16"}, "q is 8×8 in a, but 16×16 in b"),
        # Neither side, or only one, has a single width: name the first module and count the others
        ({"q": "8×4", "k": "8×4"}, {"q": "16×4", "k": "16×4"}, "q is 8×4 in a, but 16×4 in b; 1 more modules differ"),
        ({"q": "8×8", "k": "4×8"}, {"q": "9×8", "k": "5×8"}, "q is 8×8 in a, but 9×8 in b; 1 more modules differ"),
        (
            {"n": "weight 8", "m": "weight 8"},
            {"n": "weight 9", "m": "weight 9"},
            "n is weight 8 in a, but weight 9 in b; 1",
        ),
    ],
)
def test_a_difference_is_reported_once(ours: dict[str, str], theirs: dict[str, str], message: str | None) -> None:
    problems = Problems()
    compare_shapes(ours, theirs, one="a", other="b", remedy="Choose", problems=problems)
    found = [problem.message for problem in problems]
    assert found == [] if message is None else len(found) == 1 and found[0].startswith(message)


POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_pointer_of_git_lfs_in_an_adapter(run: Run, math: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(math, tmp_path / "math")
    (folder / name).write_text(POINTER)
    result = run("inspect", folder)
    assert result.exit_code == 3
    assert str(folder / name) in result.stderr
    assert "git lfs pull" in result.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pointer_of_git_lfs_in_a_base(base: Callable[[str], Path], math: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(base("llama"), tmp_path / "base")
    (folder / name).write_text(POINTER)
    for call in (
        lambda: OpenedBase.open(str(folder)),
        lambda: adapterswap.open_checkpoint(folder),
        lambda: adapterswap.merge(math, folder, out_path=tmp_path / "out"),
    ):
        with pytest.raises(AdapterswapError) as caught:
            call()
        assert str(folder / name) in caught.value.problems[0].message
        assert "Git LFS" in caught.value.problems[0].message


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("experts/math", "math"), ("experts/math/", "math"), ("experts/my math", "my math"),
        ("experts/math@2", "math@2"),
        ("experts/v1.5 (best)", "v1.5 (best)"), ("experts/कोश", "कोश"), ("org/math@v2", "math"), ("org/math", "math"),
        (Path("experts/../math"), "math"), ("a/base", "task"), ("experts/a[b]", "task"), ("experts/ a", "task"),
        ("experts/taken", "task"), ("/", "task"),
    ],
)  # fmt: skip
def test_an_expert_is_named_after_its_folder(
    reference: str | Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if str(reference).startswith("experts/"):
        Path(reference).mkdir(parents=True)
    assert ExpertName.choose(reference, {"taken": None}, "task") == name


def test_a_folder_with_a_space_keeps_its_name(run: Run, math: Path, swahili: Path, tmp_path: Path) -> None:
    first = shutil.copytree(math, tmp_path / "my math")
    twin = shutil.copytree(swahili, tmp_path / "other" / "my math")
    result = run("compose", "-t", first, "-l", swahili, "--bottom", 2, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert "my math" in json.loads(result.stdout)["experts"]
    assert "is called" not in result.stderr
    named = run("compose", "-t", first, "-l", twin, "--bottom", 2, "-o", tmp_path / "out2", "--json")
    assert named.exit_code == 0, named.stderr
    assert list(json.loads(named.stdout)["experts"]) == ["my math", "language"]
    assert f"using the name 'language' for {twin}" in named.stderr
    sources = ("--expert", f"my math={first}", "--expert", f"{swahili.name}={swahili}")
    assert run("verify", tmp_path / "out", *sources).exit_code == 0
