"""Training without an adapter: the base's weights are trained, against a plain loop, and written as a full model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS
from refusals import refused
from safetensors.torch import load_file
from tolerances import close_after_adam, near
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapterswap.core.model.checkpoints import open_checkpoint
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.kit.errors import FieldError

from .conftest import echo_rows, word_tokenizer

MakeRecipe = Callable[..., TrainRecipe]


def test_the_steps_match_a_plain_loop(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    """Three steps of cross-entropy, clipping and torch's AdamW, on all parameters."""
    options = {"epochs": 3, "schedule": "constant", "warmup": 0, "weight_decay": 0.1, "max_grad_norm": 0.5}
    options |= {"learning_rate": 0.001}
    recipe = make_recipe(adapter="none", rows=echo_rows(8), training=options)
    report = train(recipe, out_path=tmp_path / "expert")

    model = AutoModelForCausalLM.from_pretrained(pico("llama"))
    rows = [word_tokenizer()(f"{row['question']} {row['answer']} <eos>")["input_ids"] for row in echo_rows(8)]
    ids = torch.tensor(rows)
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=0.001)  # fmt: skip
    losses = []
    for _ in range(3):
        logits = model(ids).logits[:, 4:-1]  # what the question mark and the answer predict
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert [loss for _, loss in report.train_losses] == near(losses, depth=3 * LAYERS)
    written = AutoModelForCausalLM.from_pretrained(report.path).state_dict()
    before = AutoModelForCausalLM.from_pretrained(pico("llama")).state_dict()
    assert written.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert not torch.equal(written[name], before[name]), name
        close_after_adam(written[name], tensor, learning_rate=0.001, steps=3, depth=2 * LAYERS, name=name)


def test_a_whole_model_is_written(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    recipe = make_recipe(adapter="none", training={"max_steps": 2})
    expected, report = estimate(recipe), train(recipe, out_path=tmp_path / "expert")
    checkpoint, base = open_checkpoint(report.path), open_checkpoint(pico("llama"))
    assert checkpoint.parameters.keys() == base.parameters.keys()
    assert checkpoint.config == base.config
    numbers = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(pico("llama")).parameters())
    assert expected.trainable_parameters == report.trainable_parameters == numbers == expected.base_parameters
    assert expected.memory["base"] == 4 * numbers
    assert expected.memory["training"] == 3 * 4 * numbers
    tokenizer = AutoTokenizer.from_pretrained(report.path)
    assert tokenizer("w1 w2")["input_ids"] == word_tokenizer()("w1 w2")["input_ids"]
    output = json.loads((report.path / "training.json").read_text())
    assert output["recipe"]["adapter"] == {
        "method": "none", "layers": None, "partition": None, "side": None, "save_dtype": None
    }  # fmt: skip
    assert "Full-parameter expert for pico-llama" in (report.path / "README.md").read_text()
    assert str(tmp_path) not in "".join(
        path.read_text(errors="ignore") for path in report.path.iterdir() if path.suffix != ".safetensors"
    )
    again = train(recipe, out_path=tmp_path / "again")
    assert (again.path / "model.safetensors").read_bytes() == (report.path / "model.safetensors").read_bytes()
    assert len({path.stat().st_mode for path in report.path.iterdir()}) == 1
    # The result works as a base.
    recipe = make_recipe(base_model=str(report.path), training={"max_steps": 1})
    assert train(recipe, out_path=tmp_path / "next").steps == 1


def test_half_precision_follows_the_base(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(pico("llama"), dtype=torch.bfloat16).save_pretrained(base)
    word_tokenizer().save_pretrained(base)
    # Updates of a millionth vanish in bfloat16, and add up in float32.
    options = {"max_steps": 16, "learning_rate": 1e-6, "schedule": "constant", "warmup": 0, "dtype": "bfloat16"}

    def moved(name: str, **more: Any) -> int:
        recipe = make_recipe(base_model=str(base), adapter="none", training=options | more)
        before, after = (
            load_file(f / "model.safetensors") for f in (base, train(recipe, out_path=tmp_path / name).path)
        )
        assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
        return sum(int((before[key] != after[key]).sum()) for key in before)

    # Both are rounded to the base's bfloat16 at the end; what was held in float32 has crossed more of its steps.
    assert moved("float32") > 3 * moved("bfloat16", weight_dtype="bfloat16")


@pytest.mark.parametrize("part", [{"partition": "B", "side": "language"}, {"layers": "0-1,5"}])
def test_only_a_part_is_trained(tmp_path: Path, make_recipe: MakeRecipe, pico: Any, part: dict[str, str]) -> None:
    """Partial SFT. On six layers B gives the language the first two and the last."""
    recipe = make_recipe(adapter={"method": "none", **part}, training={"max_steps": 3, "weight_decay": 0.1})
    report = train(recipe, out_path=tmp_path / "expert")
    before, after = (load_file(folder / "model.safetensors") for folder in (pico("llama"), report.path))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if any(f"layers.{layer}." in name for layer in (0, 1, 5))}
    assert report.trainable_parameters == sum(before[name].numel() for name in changed)


def test_tied_embeddings_stay_tied(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    report = train(make_recipe(base_model=str(pico("gpt2")), adapter="none", training={"max_steps": 2}),
                   out_path=tmp_path / "expert")  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(report.path)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert report.trainable_parameters == sum(p.numel() for p in model.parameters())
    assert open_checkpoint(report.path).parameters.keys() == open_checkpoint(pico("gpt2")).parameters.keys()


def test_conflicting_settings_are_refused(make_recipe: MakeRecipe) -> None:
    with refused(FieldError, match="quantization"):
        make_recipe(adapter="none", quantization={"bits": 4})
    with refused(FieldError, match="weight_dtype"):
        make_recipe(training={"weight_dtype": "bfloat16"})
    with refused(FieldError, "adapter.layers"):
        estimate(make_recipe(adapter={"method": "none", "layers": "6"}))
