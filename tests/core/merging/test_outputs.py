"""The files next to the weights, the messages of the command line, and equal bytes from equal inputs."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import pytest
import yaml
from click.testing import Result
from conftest import save_like, weights
from crafting import snapshot
from safetensors import safe_open

import adapterswap
from core.merging.conftest import equal, loaded

Run = Callable[..., Result]

SMALL = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"]


def test_the_folder(run: Run, model: Callable[..., Path], tmp_path: Path) -> None:
    task, language = model(seed=1), model(seed=2)
    result = run("merge", "-t", task, "-l", language, "-o", tmp_path / "out", "--bottom", 2, "--top", 1, exit_code=0)
    assert f"config and tokenizer from {task.name}" in result.stderr
    assert result.stdout.splitlines()[0].strip() == "012345"
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {*SMALL, "model.safetensors", "adapterswap.json", "README.md"}
    for name in SMALL:
        assert (tmp_path / "out" / name).read_bytes() == (task / name).read_bytes()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"library_name": "transformers", "tags": ["adapterswap", "merge"]}
    everything = card + (tmp_path / "out" / "adapterswap.json").read_text()
    assert str(tmp_path) not in everything


def test_code_is_not_copied(model: Callable[..., Path], tmp_path: Path) -> None:
    """Loading the result with `trust_remote_code` would run it. The error names what the config refers to."""
    task, language = (shutil.copytree(model(seed=seed), tmp_path / name) for seed, name in ((1, "math"), (2, "sw")))
    for name in ("modeling_own.py", "tokenization_own.py"):
        (task / name).write_text("raise SystemExit")
    for code in (False, True):
        config = json.loads((task / "config.json").read_text())
        mapped = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}} if code else {}
        (task / "config.json").write_text(json.dumps(config | mapped))
        plan = adapterswap.layer_swap(task, language, bottom=2, top=1)
        out = adapterswap.merge(plan, out_path=tmp_path / f"out-{code}")
        assert [*out.glob("*.py")] == []
        assert [line for line in plan.companions.lines if "modeling_own.py" in line] == [ANY] * code
        experts = {path.name: path for path in (task, language)}
        assert adapterswap.verify(out, experts=experts).equal


def test_files_of_sentence_transformers_are_copied(model: Callable[..., Path], tmp_path: Path) -> None:
    task, language = (shutil.copytree(model(seed=seed), tmp_path / name) for seed, name in ((1, "math"), (2, "sw")))
    names = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/model.safetensors")
    for name in names:
        (task / name).parent.mkdir(exist_ok=True)
        (task / name).write_text(name)
    out = adapterswap.merge(adapterswap.layer_swap(task, language, bottom=2, top=1), out_path=tmp_path / "out")
    assert all((out / name).read_text() == name for name in names)
    assert adapterswap.verify(out, experts={path.name: path for path in (task, language)}).equal


def test_the_record_counts_and_hashes_the_inputs(model: Callable[..., Path], tmp_path: Path) -> None:
    """Per expert: what was copied, what was computed with, and nothing else."""
    task, language = model(seed=1), model(seed=2)
    out = adapterswap.merge(adapterswap.layer_swap(task, language, bottom=2, top=1), out_path=tmp_path / "out")
    record = json.loads((out / "adapterswap.json").read_text())
    entered = {name: expert["entered"] for name, expert in record["experts"].items()}
    for folder, (name, told) in zip((task, language), entered.items(), strict=True):
        own = sorted(weights(folder).items())
        copied = [tensor for key, tensor in own if record["tensors"][key] == name]
        computed = [(key, tensor) for key, tensor in own if isinstance(record["tensors"][key], dict)]
        assert copied
        assert computed
        digests = {key: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for key, tensor in computed}
        lines = [f"{key} F32 {list(tensor.shape)} {digests[key]}\n" for key, tensor in computed]
        assert told == {
            "copied": {"tensors": len(copied), "bytes": sum(tensor.nbytes for tensor in copied)},
            "computed": {
                "tensors": len(computed),
                "bytes": sum(tensor.nbytes for _, tensor in computed),
                "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
            },
        }


def test_the_same_inputs_give_the_same_bytes(
    model: Callable[..., Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    for name, experts in (("full", (model(seed=1), model(seed=2))), ("mixed", (expert(seed=1), model(seed=2)))):
        plan = adapterswap.layer_swap(*experts, bottom=2, top=1, bottom_transition=1)
        one = adapterswap.merge(plan, out_path=tmp_path / name / "one")
        two = adapterswap.merge(plan, out_path=tmp_path / name / "two")
        assert snapshot(one) == snapshot(two)


def test_compose_writes_full_weights_too(run: Run, model: Callable[..., Path], tmp_path: Path) -> None:
    options = ["-t", model(seed=1), "-l", model(seed=2), "--bottom", 2, "--top", 1, "--norms", "layer"]
    assert run("merge", *options, "-o", tmp_path / "merged").exit_code == 0
    assert run("compose", *options, "-o", tmp_path / "composed").exit_code == 0
    assert snapshot(tmp_path / "merged") == snapshot(tmp_path / "composed")
    run("compose", *options, "-o", tmp_path / "more", "--max-rank", 4, exit_code=2)


def test_a_recipe_and_json(run: Run, model: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tmp_path / "swap.yaml"
    recipe.write_text(
        f"experts: {{math: {model(seed=1)}, swahili: {model(seed=2)}}}\n"
        "allocation:\n  - {layers: 0-1, expert: swahili}\n  - {expert: math}\n"
    )
    result = run("merge", recipe, "-o", tmp_path / "out", "--json", "--dry-run", exit_code=0)
    output = json.loads(result.stdout)
    assert (output["written"], output["shards"]) == (False, ["model.safetensors"])
    for kind in ("config", "tokenizer", "chat_template", "generation"):
        assert output["companions"][kind]["from"] == "swahili"
    assert output["copied"] == len(output["tensors"])
    assert output["tensors"]["model.layers.1.input_layernorm.weight"] == "swahili"
    assert not (tmp_path / "out").exists()
    assert run("merge", recipe, "-o", tmp_path / "out").exit_code == 0
    one, two = weights(model(seed=1)), weights(model(seed=2))
    equal(
        weights(tmp_path / "out"),
        {name: (two if any(f"layers.{i}." in name for i in (0, 1)) else one)[name] for name in one},
    )


def test_an_adapter_by_its_path(
    run: Run, expert: Callable[..., Path], base: Callable[[str], Path], tmp_path: Path
) -> None:
    """The base is the one that the adapter names; unchanged tensors are copied from it byte for byte."""
    result = run("merge", expert(seed=1, target_modules=["q_proj"]), "-o", tmp_path / "out", exit_code=0)
    assert f"config and tokenizer from base ({base('llama').name})" in result.stderr
    original, merged = weights(base("llama")), weights(tmp_path / "out")
    rest = {name: tensor for name, tensor in original.items() if "q_proj" not in name}
    equal({name: merged[name] for name in rest}, rest)
    loaded(tmp_path / "out")
    again = run("merge", expert(seed=1), "-o", tmp_path / "out")
    assert (again.exit_code, "already exists" in again.stderr) == (3, True)
    assert run("merge", expert(seed=1), "-t", expert(seed=2), "-o", tmp_path / "x").exit_code == 2


def test_another_tokenizer_is_reported(run: Run, model: Callable[..., Path], tmp_path: Path) -> None:
    other = save_like(tmp_path / "other", model(), weights(model(seed=2)))
    (other / "tokenizer.json").write_text('{"normalizer": {"type": "NFC"}}')
    result = run(
        "merge", "-t", model(seed=1), "-l", other, "-o", tmp_path / "out", "--bottom", 2, "--top", 1, exit_code=0
    )
    assert f"tokenizer: {model(seed=1).name}'s (other's differs: normalizer)" in result.stderr


def test_copying_imports_no_torch(model: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tmp_path / "swap.yaml"
    recipe.write_text(
        f"experts: {{math: {model(seed=1)}, swahili: {model(seed=2)}}}\n"
        "allocation:\n  - {layers: 0-1, expert: swahili}\n  - {expert: math}\n"
    )
    script = (
        "import sys; from adapterswap.cli import main\n"
        f"try: main(['merge', {str(recipe)!r}, '-o', {str(tmp_path / 'out')!r}])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_full_disk(model: Callable[..., Path], tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: the message says so, and nothing is left behind."""

    def limit() -> None:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    command = [sys.executable, "-m", "adapterswap", "merge", "-t", str(model(seed=1)), "-l", str(model(seed=2))]
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    process = subprocess.run(
        [*command, "-o", str(outputs / "out"), "--bottom", "2", "--top", "1"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert process.returncode == 3
    assert "Free some space" in process.stderr
    assert "Traceback" not in process.stderr
    assert list(outputs.iterdir()) == []


def test_a_missing_device(run: Run, model: Callable[..., Path], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    options = ["-t", model(seed=1), "-l", model(seed=2), "-o", tmp_path / "out", "--bottom", 2, "--top", 1]
    result = run("merge", *options, "--device", "cuda")
    assert (result.exit_code, "cuda:N" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
