"""Two processes with gloo compute what one computes, and write it once."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import LAYERS
from launching import FORKED, TORCHRUN, launch
from refusals import refused
from safetensors.torch import load_file
from tiers import ALL
from tolerances import near

from adapterswap.core.experts.adapter import open_adapter
from adapterswap.experiments.training import TrainRecipe, train
from adapterswap.kit.errors import RunError

from .conftest import echo_rows, make_expert, two_sides
from .test_turns import is_language_in_a

MakeRecipe = Callable[..., TrainRecipe]
HERE = Path(__file__).parent


def check_the_failure(done: subprocess.CompletedProcess[str], folder: Path, recipe: TrainRecipe) -> None:
    """The error of one process ended both, and was reported once; checkpoints wait for the same two processes."""
    if ALL:  # torchrun itself ends with 1 whatever its processes say
        assert re.findall(r"exitcode *: (\d+)", done.stderr)[:1] == ["3"]
        assert done.returncode == 1
    else:
        assert done.returncode == 3
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert errors == ["Error: Process 1 fails. Correct it."]
    assert done.stdout == ""
    assert not (folder / "failing").exists()
    assert (folder / "failing.checkpoints" / "checkpoint-2" / "trainer_state.json").exists()
    with refused(RunError, "resume", match="processes"):
        train(recipe, out_path=folder / "failing", resume=True)


@pytest.mark.slow
def test_two_processes_compute_the_same_as_one(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    options = {
        "max_steps": 4, "batch_size": 2, "gradient_accumulation": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
        "gradient_checkpointing": True, "schedule": "constant",
    }  # fmt: skip
    recipes = {
        "plain": make_recipe(validation={"rows": 8}, training=options),
        "turns": make_recipe(datasets=two_sides(tmp_path), simultaneous={"partition": "A"}, training=options),
        "full": make_recipe(adapter="none", training=options | {"learning_rate": 0.001}),
    }
    if ALL:
        start = str(make_expert(pico("llama"), tmp_path / "expert"))
        recipes["start"] = make_recipe(start=start, adapter={"layers": "0-3"}, training=options)
        recipes["chain"] = make_recipe(start={"adapter": start, "mode": "chain"}, training=options)
    failing = make_recipe(training={"max_steps": 4, "save_every_samples": 16})
    alone = {}
    for name, recipe in recipes.items():
        twice = recipe.training.model_copy(update={"gradient_accumulation": 4})
        alone[name] = train(recipe.model_copy(update={"training": twice}), out_path=tmp_path / f"{name}-alone")
    recipes["failing"] = failing
    (tmp_path / "recipes.json").write_text(json.dumps({name: r.model_dump() for name, r in recipes.items()}))
    completed = launch(HERE / "in_processes.py", tmp_path, by=TORCHRUN if ALL else FORKED)
    assert (tmp_path / "found-1.json").exists(), completed.stderr
    check_the_failure(completed, tmp_path, failing)

    one, other = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1))
    for name, report in alone.items():
        for actual in (one[name], other[name]):
            assert actual["wrapper"] == "torch.nn.parallel.distributed.DistributedDataParallel"
            assert actual["processes"] == 2
            assert actual["losses"] == near([loss for _, loss in report.train_losses], depth=4 * LAYERS)
            assert actual["eval"] == near([loss for _, loss in report.eval_losses], depth=5 * LAYERS)
            assert actual["tokens"] == report.tokens
            assert actual["written"]  # no process returns before the output exists
        file = next(report.path.glob("*.safetensors")).name
        together, single = load_file(tmp_path / name / file), load_file(report.path / file)
        assert together.keys() == single.keys()
        for key, tensor in single.items():
            assert (together[key] - tensor).abs().max() < 0.02 * tensor.abs().max(), (name, key)
        # Each process saw its own half of the rows.
        mine, yours = (actual[name]["steps"][0]["tokens"] for actual in (one, other))
        assert mine != yours
    for actual in (one, other):
        for step, told in enumerate(actual["turns"]["steps"]):
            language = step % 2 == 1
            adapters = {key for key in told["still"] if "lora_" in key}
            inactive = {key for key in adapters if is_language_in_a(key) != language}
            assert len(inactive) == 2 * (27 if not language else 15)
            assert step < 2 or adapters == inactive
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "training.json",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.slow
def test_torchrun_runs_the_command(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(rows=echo_rows(32), training={"batch_size": 4}).model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    process = launch("-m", "adapterswap", "train", tmp_path / "recipe.yaml", "-o", tmp_path / "expert", "--json")
    assert process.returncode == 0, process.stderr
    output: dict[str, Any] = json.loads(process.stdout)
    assert (output["steps"], output["processes"], output["rows"]["train"]) == (4, 2, 32)
    assert len(open_adapter(tmp_path / "expert").modules) == 6 * 7
