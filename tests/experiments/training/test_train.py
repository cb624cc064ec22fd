from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
import transformers
from conftest import LAYERS
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from safetensors.torch import load_file
from tolerances import close, close_after_adam, near
from transformers import AutoModelForCausalLM

from adapterswap.core.experts.adapter import open_adapter
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    DataError,
    FieldError,
    NotFoundError,
    OutputError,
    RunError,
)

from .conftest import echo_rows, word_tokenizer, write_jsonl

MakeRecipe = Callable[..., TrainRecipe]
TESTS = Path(__file__).parents[2]
PROJECTIONS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def described(folder: Path, name: str = "training.json") -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_an_expert_is_learned_and_peft_loads_it(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    recipe = make_recipe(rows=echo_rows(176), training={"epochs": 4}, validation={"rows": 16})
    report = train(recipe, out_path=tmp_path / "expert")
    assert report.steps == 4 * 160 // 8
    assert report.train_losses[-1][1] < 0.5 * report.train_losses[0][1]
    assert report.eval_losses[-1][1] < 0.6 * report.train_losses[0][1]
    assert (report.rows.train, report.rows.validation, report.rows.dropped) == (160, 16, 0)
    assert report.tokens == 4 * 160 * 7  # four words, a question mark, the answer, the end
    assert report.rows.trained_tokens == 160 * 2
    assert sorted(files(report.path)) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "training.json",
    ]

    config = described(report.path, "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, True)
    assert config["target_modules"] == PROJECTIONS
    assert config["base_model_name_or_path"] == "pico-llama"
    adapter = open_adapter(report.path)
    weights = (pico("llama") / "model.safetensors").read_bytes()
    identity = hashlib.sha256(str(len(weights)).encode() + weights).hexdigest()
    assert adapter.base_fingerprints == {"model.safetensors": identity}
    assert len(adapter.modules) == 6 * 7
    assert {module.scale for module in adapter.modules.values()} == {8 / 4**0.5}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # For every adapter, PEFT 0.21 uses a name that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pico("llama")), report.path)
    rows = echo_rows(16, seed=99)
    inputs = word_tokenizer()([row["question"] for row in rows], return_tensors="pt")
    inputs.pop("token_type_ids", None)
    answers = model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=1)[:, -2:]
    result = word_tokenizer().batch_decode(answers, skip_special_tokens=True)
    assert sum(answer.split()[:1] == [row["answer"]] for answer, row in zip(result, rows, strict=True)) >= 8


def test_a_step_matches_a_plain_loop(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    """One step on eight rows, against cross-entropy and AdamW written out."""
    recipe = make_recipe(rows=echo_rows(8), training={"schedule": "constant", "warmup": 0, "weight_decay": 0.1})
    report = train(recipe, out_path=tmp_path / "expert")

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        transformers.set_seed(0)
        config = LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(pico("llama")), config)
    tokenizer = word_tokenizer()
    rows = [tokenizer(f"{row['question']} {row['answer']} <eos>")["input_ids"] for row in echo_rows(8)]
    ids = torch.tensor(rows)
    logits = model(ids).logits[:, 4:-1]  # what the question mark and the answer predict
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten())
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    for p in trained.values():
        # AdamW's first step: with bias correction, the moments equal the gradient and its square.
        p.data -= 0.01 * (0.1 * p.data + p.grad / (p.grad.abs() + 1e-8))

    assert report.train_losses == [(1, near(loss.item(), depth=LAYERS))]
    saved = load_file(report.path / "adapter_model.safetensors")
    assert len(saved) == len(trained) == 6 * 7 * 2
    for name, p in trained.items():
        found = saved[name.replace(".default", "")]
        if "lora_A" in name:  # B was zero, so A has no gradient yet and only decays
            assert not p.grad.any()
            close(found, p.data)
        else:
            close_after_adam(found, p.data, learning_rate=0.01, steps=1, depth=2 * LAYERS, name=name)


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(training={"max_steps": 4}, validation={"fraction": 0.25})
    one, two = (train(recipe, out_path=tmp_path / name).path for name in ("one", "two"))
    assert files(one) == files(two)
    assert str(tmp_path) not in "".join(text.decode(errors="ignore") for text in files(one).values())
    changed = make_recipe(training={"max_steps": 4, "seed": 1}, validation={"fraction": 0.25})
    other = train(changed, out_path=tmp_path / "other").path
    assert files(other)["adapter_model.safetensors"] != files(one)["adapter_model.safetensors"]
    assert described(other)["rows"] == described(one)["rows"]
    assert one.joinpath("adapter_model.safetensors").stat().st_mode == one.joinpath("training.json").stat().st_mode


KILLED = """
import json
import sys
from pathlib import Path
from killing import hold, on_touch
from adapterswap.experiments.training import TrainRecipe, train
on_touch(sys.argv[2] + ".checkpoints/checkpoint-15", hold)
train(TrainRecipe.model_validate(json.loads(Path(sys.argv[1]).read_text())), out_path=sys.argv[2], progress=False)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    options = {"epochs": 3, "save_every_samples": 40, "logging_steps": 7, "schedule": "warmup_stable_decay"}
    recipe = make_recipe(training=options, adapter={"dropout": 0.1})
    unbroken = train(recipe, out_path=tmp_path / "unbroken")
    assert unbroken.steps == 3 * 8
    assert not (tmp_path / "unbroken.checkpoints").exists()

    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "recipe.json"), str(tmp_path / "broken")]
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert "held\n" in iter(process.stdout.readline, "")
        process.kill()
    checkpoints = tmp_path / "broken.checkpoints"
    assert not (tmp_path / "broken").exists()

    with refused(RunError, "resume", match="broken.checkpoints"):
        train(recipe, out_path=tmp_path / "broken")
    changed = make_recipe(training=options, adapter={"dropout": 0.2})
    with refused(RunError, "resume", match=": adapter"):
        train(changed, out_path=tmp_path / "broken", resume=True)
    (checkpoints / "checkpoint-99999").mkdir()  # a checkpoint that was being written when the run was killed
    resumed = train(recipe, out_path=tmp_path / "broken", resume=True)
    assert resumed.resumed_from == 10  # in the second pass
    assert files(resumed.path) == files(unbroken.path)
    assert not checkpoints.exists()


def test_checkpoints_can_be_kept(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(training={"max_steps": 4, "save_every_samples": 8, "keep_checkpoints": True})
    train(recipe, out_path=tmp_path / "expert")
    kept = sorted(path.name for path in (tmp_path / "expert.checkpoints").iterdir())
    assert kept == ["checkpoint-3", "checkpoint-4", "run.json"]


def test_dropped_rows_are_counted_and_written_down(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    rows = [*echo_rows(16), *echo_rows(3, words=40), {"question": "w1 ?", "answer": None}]
    report = train(make_recipe(rows=rows, training={"max_steps": 1}), out_path=tmp_path / "expert")
    assert (report.rows.train, report.rows.cut_off, report.rows.empty, report.rows.longest) == (16, 3, 1, 43)
    assert len(report.rows.notes()) == 2
    result = described(report.path)
    assert result["rows"]["cut_off"] == 3
    assert result["rows"]["sources"][0]["read"] == 20
    assert result["recipe"]["datasets"][0]["path"] == "rows.jsonl"


def test_packing_computes_the_same_loss(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    """Rows of a packed sequence do not see each other."""
    rows = [*echo_rows(4), *echo_rows(3, words=7)]
    source = {"path": str(tmp_path / "rows.jsonl"), "prompt": "{question}", "completion": " {answer}"}
    held_out = {"datasets": [source]}
    plain = train(make_recipe(rows=rows, validation=held_out), out_path=tmp_path / "plain")
    changes = {"packing": True, "batch_size": 1, "max_length": 64}
    recipe = make_recipe(rows=rows, validation={"datasets": [source]}, training=changes)
    packed = train(recipe, out_path=tmp_path / "packed")
    assert packed.steps == estimate(recipe).steps == 1
    assert packed.train_losses == [(1, near(plain.train_losses[0][1], depth=LAYERS))]
    assert packed.eval_losses == [(1, near(plain.eval_losses[0][1], depth=2 * LAYERS))]
    assert packed.tokens == plain.tokens == 4 * 7 + 3 * 10


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    plain, frugal = (
        train(make_recipe(training={"max_steps": 3, "gradient_checkpointing": on}), out_path=tmp_path / str(on))
        for on in (False, True)
    )
    assert [loss for _, loss in frugal.train_losses] == near([loss for _, loss in plain.train_losses], depth=3 * LAYERS)


def test_bfloat16(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    options = {"epochs": 2, "dtype": "bfloat16"}
    report = train(make_recipe(training=options), out_path=tmp_path / "expert")
    assert report.train_losses[-1][1] < 0.7 * report.train_losses[0][1]
    # The base computes in bfloat16; what is trained stays in float32.
    assert {t.dtype for t in load_file(report.path / "adapter_model.safetensors").values()} == {torch.float32}


def test_validation_rows_of_their_own(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    source = {"path": str(tmp_path / "rows.jsonl"), "text": "{answer}", "samples": 5}
    validation = {"datasets": [source], "every_samples": 16}
    report = train(make_recipe(training={"max_steps": 5}, validation=validation), out_path=tmp_path / "expert")
    assert (report.rows.train, report.rows.validation) == (64, 5)
    assert [step for step, _ in report.eval_losses] == [2, 4, 5]


def test_chosen_modules_and_layers(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    options = {
        "target_modules": ["q_proj", "mlp.down_proj"], "layers": [1, 4, 5], "modules_to_save": ["lm_head"],
        "rslora": False, "save_dtype": "bfloat16",
    }  # fmt: skip
    recipe = make_recipe(adapter=options, training={"max_steps": 2})
    report = train(recipe, out_path=tmp_path / "expert")
    saved = load_file(report.path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in saved.values()) == report.trainable_parameters
    assert report.trainable_parameters == estimate(recipe).trainable_parameters
    assert {name.split("layers.")[1] for name in saved if "layers." in name} == {
        f"{layer}.{module}.lora_{factor}.weight"
        for layer in (1, 4, 5) for module in ("self_attn.q_proj", "mlp.down_proj") for factor in "AB"
    }  # fmt: skip
    adapter = open_adapter(report.path)
    assert {module.scale for module in adapter.modules.values()} == {2.0}
    assert list(adapter.saved) == ["lm_head"]


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("gpt2", ["c_attn", "c_fc", "c_proj"]),
        ("neox", ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]),
        ("qwen2", PROJECTIONS),
    ],
)
def test_projections_are_found_in_other_architectures(
    tmp_path: Path, make_recipe: MakeRecipe, pico: Any, architecture: str, names: list[str]
) -> None:
    recipe = make_recipe(base_model=str(pico(architecture)), training={"max_steps": 2})
    expected = estimate(recipe)
    assert expected.target_modules == names
    report = train(recipe, out_path=tmp_path / "expert")
    adapter = open_adapter(report.path)
    assert len(adapter.modules) == expected.trained_modules
    assert adapter.config.fan_in_fan_out == (architecture == "gpt2")
    assert {module.layer for module in adapter.modules.values()} == set(range(6))
    saved = load_file(report.path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == expected.trainable_parameters


def test_the_estimate_agrees_with_the_run(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    rows = [*echo_rows(37), *echo_rows(5, words=40)]
    recipe = make_recipe(rows=rows, training={"epochs": 3, "gradient_accumulation": 2}, validation={"rows": 4})
    expected, report = estimate(recipe), train(recipe, out_path=tmp_path / "expert")
    assert expected.steps == report.steps == 9
    assert expected.rows == report.rows
    assert expected.tokens == report.tokens == 3 * report.rows.tokens
    assert expected.trainable_parameters == report.trainable_parameters
    model = AutoModelForCausalLM.from_pretrained(recipe.base_model)
    assert expected.base_parameters == sum(p.numel() for p in model.parameters())
    memory = expected.memory
    assert memory["base"] == 4 * expected.base_parameters
    assert memory["training"] == 16 * expected.trainable_parameters
    assert memory["total"] == memory["base"] + memory["training"] + memory["activations"] + memory["process"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_of_activations_is_near_what_autograd_keeps(make_recipe: MakeRecipe, checkpointing: bool) -> None:
    from adapterswap.experiments.training.report import memory

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    if checkpointing:
        model.enable_input_require_grads()
        model.base_model.model.model.activation_checkpointing_enable()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model.model.model(input_ids=torch.zeros(4, 64, dtype=torch.long), use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    recipe = make_recipe(training={"batch_size": 4, "gradient_checkpointing": checkpointing})
    result = memory(config, recipe, 0, 0, dtype="float32", longest=64)["activations"]
    # With checkpointing the estimate holds one layer recomputed in the backward pass, which the hook does not see.
    layer = 4 * 64 * 4 * (8 * 256 + 4 * 688) if checkpointing else 0
    assert result == pytest.approx(measured + layer, rel=0.15)


def test_a_run_leaves_the_process_unchanged(tmp_path: Path, make_recipe: MakeRecipe, capfd: Any) -> None:
    def state() -> tuple[Any, ...]:
        numbers = numpy.random.get_state()
        logger = transformers.utils.logging
        return (
            random.getstate(), (numbers[0], numbers[1].tolist(), *numbers[2:]), torch.get_rng_state().tolist(),
            dict(os.environ), logger.get_verbosity(), logger.is_progress_bar_enabled(),
            datasets.are_progress_bars_disabled(), torch.is_grad_enabled(), torch.get_default_dtype(),
            list(warnings.filters),
        )  # fmt: skip

    transformers.utils.logging.set_verbosity_info()
    before = state()
    recipe = make_recipe(training={"max_steps": 2, "save_every_samples": 8}, validation={"rows": 4})
    train(recipe, out_path=tmp_path / "expert")
    assert state() == before
    with pytest.raises(AdapterswapError):
        train(recipe, out_path=tmp_path / "expert")
    assert state() == before
    transformers.utils.logging.set_verbosity_warning()
    assert capfd.readouterr().out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"expert", "rows.jsonl"}


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    good = train(make_recipe(training={"max_steps": 1}), out_path=tmp_path / "expert")
    before = files(good.path)
    options = {"learning_rate": 1e35, "max_steps": 9, "schedule": "constant", "warmup": 0, "save_every_samples": 8}
    with refused(RunError, "training.learning_rate", match=r"(nan|inf) in step \d"):
        train(make_recipe(training=options), out_path=tmp_path / "expert", overwrite=True)
    assert files(good.path) == before
    assert (tmp_path / "expert.checkpoints" / "checkpoint-1" / "trainer_state.json").exists()


def test_checkpoints_that_cannot_be_written_are_reported(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(training={"max_steps": 3, "save_every_samples": 8})
    (tmp_path / "expert.checkpoints").mkdir()
    (tmp_path / "expert.checkpoints" / "checkpoint-1").write_text("in the way")
    with refused(OutputError, "out_path", match="expert.checkpoints: File exists"):
        train(recipe, out_path=tmp_path / "expert", resume=True)
    assert files(tmp_path / "expert.checkpoints") == {"checkpoint-1": b"in the way"}
    with refused(OutputError, "out_path"):
        train(recipe, out_path=tmp_path / "expert")
    (tmp_path / "expert.checkpoints" / "checkpoint-1").unlink()
    assert train(recipe, out_path=tmp_path / "expert").steps == 3


@pytest.mark.parametrize(
    ("changes", "kind", "parameter", "named"),
    [
        (
            {"adapter": {"target_modules": ["q_proj", "qproj"]}},
            FieldError,
            "adapter.target_modules",
            "'qproj' .*down_proj",
        ),
        ({"adapter": {"target_modules": ["lm_head"]}}, FieldError, "adapter.target_modules", "'lm_head'"),
        ({"adapter": {"modules_to_save": ["head"]}}, FieldError, "adapter.modules_to_save", "'head'"),
        ({"training": {"warmup": 9}}, FieldError, "training.warmup", "9 steps .* 8 steps"),
        ({"adapter": {"layers": "4-6"}}, FieldError, "adapter.layers", "4-6 .* 0 to 5"),
        (
            {"adapter": {"layers": "1", "target_modules": ["embed_tokens"]}},
            FieldError,
            "adapter.target_modules",
            "'embed_tokens'",
        ),
        ({"training": {"max_length": 4}}, DataError, "training.max_length", "all 64 rows.*longest row has 7"),
        ({"rows": [{"question": "w1", "answer": ""}]}, DataError, "datasets", "1 rows"),
        ({"validation": {"rows": 64}}, DataError, "validation", "64 rows.* 64"),
        ({"chat_template": True}, BaseModelError, "base_model", "rows.jsonl"),
    ],
)
def test_untrainable_recipes_are_refused(
    tmp_path: Path,
    make_recipe: MakeRecipe,
    changes: dict[str, Any],
    kind: type[AdapterswapError],
    parameter: str,
    named: str,
) -> None:
    recipe = make_recipe(**changes)
    for attempt in (lambda: train(recipe, out_path=tmp_path / "expert"), lambda: estimate(recipe)):
        with refused(kind, parameter, match=named):
            attempt()
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.jsonl"}


@pytest.mark.parametrize("base_model", ["no/such-base", "./nowhere"])
def test_a_base_that_does_not_exist(tmp_path: Path, make_recipe: MakeRecipe, base_model: str) -> None:
    recipe = make_recipe(base_model=base_model)
    for attempt in (lambda: train(recipe, out_path=tmp_path / "expert"), lambda: estimate(recipe)):
        with refused(NotFoundError, "base_model"):
            attempt()
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.jsonl"}


def test_an_error_before_the_first_checkpoint_leaves_nothing(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    options = {"learning_rate": 1e35, "schedule": "constant", "warmup": 0, "save_every_samples": 5000}
    with refused(RunError, "training.learning_rate"):
        train(make_recipe(training=options), out_path=tmp_path / "expert")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}


def test_bases_that_cannot_be_used(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    (tmp_path / "empty").mkdir()
    bare = shutil.copytree(pico("llama"), tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    small = shutil.copytree(pico("llama"), tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 6}))
    deep = shutil.copytree(pico("llama"), tmp_path / "deep")
    (deep / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    endless = shutil.copytree(pico("llama"), tmp_path / "endless")
    settings = json.loads((endless / "tokenizer_config.json").read_text())
    (endless / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "eos_token"}))
    for name in ("empty", "bare", "deep"):
        with pytest.raises(AdapterswapError, match=name):
            train(make_recipe(base_model=str(tmp_path / name)), out_path=tmp_path / "expert")
    for name in ("small", "endless"):
        with refused(BaseModelError, "base_model", match=name):
            train(make_recipe(base_model=str(tmp_path / name)), out_path=tmp_path / "expert")
    assert not (tmp_path / "expert").exists()


def test_output_paths(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    recipe = make_recipe(training={"max_steps": 1})
    with refused(ArgumentError, "out_path"):
        train(recipe)
    with refused(OutputError, "out_path"):
        train(recipe, out_path=pico("llama") / "expert")
    with refused(OutputError, "out_path", match=r"rows\.jsonl"):  # the data file is there
        train(recipe, out_path=tmp_path, overwrite=True)
    (tmp_path / "taken").mkdir()
    assert train(recipe, out_path=tmp_path / "taken").path == tmp_path / "taken"
    with refused(OutputError, "out_path"):
        train(recipe, out_path=tmp_path / "taken")
    for name in ("thesis.txt", "checkpoint-1"):
        (tmp_path / "taken" / name).touch()
        with refused(OutputError, "out_path", match=name):
            train(recipe, out_path=tmp_path / "taken", overwrite=True)
        (tmp_path / "taken" / name).unlink()
    assert train(recipe, out_path=tmp_path / "taken", overwrite=True).path == tmp_path / "taken"


@pytest.mark.parametrize("save_every_samples", [None, 8])
def test_checkpoints_do_not_replace_other_files(
    save_every_samples: int | None, tmp_path: Path, make_recipe: MakeRecipe, pico: Any
) -> None:
    """The folder next to the output may belong to the user, or contain the base itself."""
    recipe = make_recipe(training={"max_steps": 2, "save_every_samples": save_every_samples})
    theirs = tmp_path / "expert.checkpoints"
    shutil.copytree(pico("llama"), theirs / "checkpoint-7")
    (theirs / "thesis.txt").write_text("years of work")
    for options in ({}, {"overwrite": True}):
        with refused(OutputError, "out_path", match=r"checkpoint-7/, thesis\.txt"):
            train(recipe, out_path=tmp_path / "expert", **options)
    of_theirs = recipe.model_copy(update={"base_model": str(theirs / "checkpoint-7")})
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with refused(OutputError, "out_path", match="checkpoint-7"):
            train(of_theirs, out_path=tmp_path / "expert", **options)
    shutil.rmtree(theirs / "checkpoint-7")
    assert train(recipe, out_path=tmp_path / "expert", resume=True).steps == 2
    assert files(theirs) == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("start", [False, True])
def test_a_rising_loss_on_held_out_rows_ends_the_run(tmp_path: Path, make_recipe: MakeRecipe, start: bool) -> None:
    """The weights written are those of the lowest loss: the same bytes as of a run that ends there."""
    changes: dict[str, Any] = (
        {"start": str(train(make_recipe(training={"max_steps": 2}), out_path=tmp_path / "start").path)} if start else {}
    )
    held_out = write_jsonl(tmp_path / "others.jsonl", echo_rows(16, seed=9))
    source = {"path": str(held_out), "prompt": "{question}", "completion": " {answer}"}
    options = {"schedule": "constant", "warmup": 0, "learning_rate": 0.03}
    validation = {"datasets": [source], "every_samples": 16, "early_stopping": 2}
    recipe = make_recipe(rows=echo_rows(16), validation=validation, training=options | {"max_steps": 100}, **changes)
    report = train(recipe, out_path=tmp_path / "stopped")
    losses = [loss for _, loss in report.eval_losses]
    best = losses.index(min(losses))
    assert report.steps == report.eval_losses[-1][0] < 100
    assert len(losses) == best + 3
    step = report.eval_losses[best][0]
    again = train(
        make_recipe(rows=echo_rows(16), training=options | {"max_steps": step}, **changes), out_path=tmp_path / "again"
    )
    name = "adapter_model.safetensors"
    assert (report.path / name).read_bytes() == (again.path / name).read_bytes()
    assert f"after step {step}," in (report.path / "README.md").read_text(encoding="utf-8")
    with refused(FieldError, None, match="early_stopping"):
        make_recipe(validation=validation, training={"save_every_samples": 16})
    with refused(FieldError, "validation", match="early_stopping"):
        make_recipe(validation=validation | {"every_samples": None})
