"""Sweeps in vLLM give the answers of transformers, cell by cell, and survive kills and failing steps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines.serving.environment import environment, needs_vllm, vllm_python
from peft import LoraConfig, get_peft_model
from refusals import refused
from tiers import ALL
from transformers import AutoModelForCausalLM

from adapterswap import evaluate
from adapterswap.experiments.sweeps import SweepRecipe, prepare, sweep
from adapterswap.experiments.sweeps.run import Estimate
from adapterswap.kit.errors import ArgumentError, DependencyError, FieldError, RunError, UnsupportedError
from experiments.evaluation.conftest import byte_tokenizer

from .conftest import PROJECTIONS, plain

HERE = Path(__file__).parent
CONFIGS = {"llama": (transformers.LlamaConfig, 12), "qwen2": (transformers.Qwen2Config, 6)}
EXPERTS: dict[str, dict[str, Any]] = {
    "math1": {"r": 4},
    "sw1": {"r": 2},
    "sw2": {"r": 4, "use_dora": True},
    "head": {"r": 2, "target_modules": ["q_proj", "lm_head"]},
    "wide": {"r": 300, "target_modules": ["v_proj"]},
    "later": {"r": 3, "target_modules": ["v_proj", "down_proj"]},
}
ROWS = ["Maji ni uhai. Haraka haraka haina baraka.", "Haba na haba", "Asiyesikia la mkuu"]
TASKS = {
    "own_write_sw": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["."], do_sample: false, max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "own_choice_sw": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["ndiyo", "hapana kabisa"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "own_rolling_sw": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}
COMPOSITIONS = [
    {"bottom": 1, "top": 1, "top_transition": [0, 1]},
    {"name": "soup", "method": "soup"},
    {"name": "ties", "method": "ties", "density": 0.5, "max_rank": 4},
    {"name": "full", "method": "dare_linear", "density": 0.5, "full_rank": True},
]


def make_world(folder: Path, architecture: str) -> Path:
    """A base with clear preferences, so that rounding decides nothing, three experts (one is DoRA), and tasks."""
    torch.manual_seed(0)
    kind, layers = CONFIGS[architecture]
    config = kind(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data *= 10
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    for seed, (name, options) in enumerate(EXPERTS.items()):
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        settings = {"lora_alpha": 8, "use_rslora": True, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}
        model = get_peft_model(base, LoraConfig(**{**settings, **options}))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora_A" in key or "lora_B" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
        model.save_pretrained(folder / name, save_embedding_layers=False)
    (folder / "tasks").mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    data = f"{{data_files: {{test: {folder / 'rows.jsonl'}}}}}"
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\n"
        (folder / "tasks" / f"{name}.yaml").write_text(head + text)
    return folder


def sweep_of(world: Path, **changes: Any) -> dict[str, Any]:
    content = {
        "base_model": str(world / "base"),
        "task_experts": {"math1": str(world / "math1")},
        "language_experts": {"sw1": str(world / "sw1")},
        "tasks": ["own_write_sw", "own_choice_sw"],
        "retention": ["own_rolling_sw"],
        "compositions": COMPOSITIONS,
        **changes,
    }
    settings = {"num_fewshot": 0, "include_path": str(world / "tasks"), **changes.get("settings", {})}
    return {**content, "settings": settings}


def in_vllm(*steps: dict[str, Any]) -> list[Any]:
    """What came of steps in one process; see `in_vllm.py`. None if the process was killed."""
    variables = {"PYTHONPATH": str(HERE.parents[2]), "HF_DATASETS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.run(
        [vllm_python(), str(HERE / "in_vllm.py"), json.dumps(steps)],
        env=environment(variables), capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    if process.returncode == -9:
        return []
    assert process.returncode == 0, process.stderr[-5000:]
    results: list[Any] = json.loads(process.stdout.partition("RESULTS")[2])
    return results


def compare(ours: Path, reference: Path) -> None:
    """Assert that two sweeps gave the same texts, and log-likelihoods within 1e-3, or 1e-5 of one of a whole text."""
    names = sorted(path.name for path in (reference / "samples").iterdir())
    assert names == sorted(path.name for path in (ours / "samples").iterdir())
    for name in names:
        lines = [(folder / "samples" / name).read_text().splitlines() for folder in (ours, reference)]
        in_order = [sorted(map(json.loads, rows), key=lambda row: (row["task"], row["doc_id"])) for rows in lines]
        for one, other in zip(*in_order, strict=True):
            assert [one[key] for key in ("task", "doc_id", "target")] == [
                other[key] for key in ("task", "doc_id", "target")
            ]
            if isinstance(one["output"], str):
                assert one["output"] == other["output"]
            else:
                rolling = 1e-5 if one["task"] == "own_rolling_sw" else 0
                assert _flat(one["output"]) == pytest.approx(_flat(other["output"]), abs=1e-3, rel=rolling)


def _flat(value: Any) -> list[float]:
    return [number for part in value for number in _flat(part)] if isinstance(value, list) else [float(value)]


@needs_vllm
@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_every_cell_is_answered_as_by_transformers(architecture: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, architecture)
    experts = {name: str(world / name) for name in ("sw1", "sw2")}
    content = sweep_of(world, language_experts=experts, baselines=["base", "task", "language"], compositions=[])
    chain = {"chain": [str(world / "sw1"), str(world / "later")]}
    full = sweep_of(world, language_experts={"sw1": chain})
    reference = [
        sweep(SweepRecipe.model_validate(one), tmp_path / f"reference-{number}", device="cpu", dtype="float32")
        for number, one in enumerate((full, content) if ALL else (full,))
    ]
    by_kind = {"generate": "vllm", "loglikelihood": "transformers"}
    settings = {"engine": "vllm", "in_flight": 3}, {"engine": by_kind, "in_flight": 2}
    pairs = (full, settings[0]), (content, settings[0]), (content, settings[1])
    steps = [
        {"sweep": sweep_of(world, **{**one, "settings": engines}), "out": str(tmp_path / f"vllm-{number}")}
        for number, (one, engines) in enumerate(pairs if ALL else pairs[:1])
    ]
    evaluated = {"base_model": str(world / "base"), "adapter": str(world / "math1"), "tasks": "own_write_sw"}
    evaluated |= {"engine": "vllm", "include_path": str(world / "tasks")}
    runs = in_vllm(*steps, *([{"evaluate": evaluated}] if ALL else ()))
    alone = runs.pop() if ALL else None
    split = {"loglikelihood": "transformers"}
    for number, (run, other, more) in enumerate(zip(runs, (0, 1, 1), ({}, {}, split), strict=ALL)):
        assert run.get("cells") == len(reference[other].results), run
        compare(tmp_path / f"vllm-{number}", tmp_path / f"reference-{other}")
        assert run["settings"]["engine"] == {"name": "vllm", "arguments": {}, **more}
        assert run["settings"]["repeats"] == "up to the engine's rounding"
    if ALL:
        cells = {result.cell.short: result.cell.cell for result in reference[0].results}
        lines = (tmp_path / "reference-0" / "samples" / f"{cells['math1']}.jsonl").read_text().splitlines()
        outputs = [sample["output"] for sample in map(json.loads, lines) if sample["task"] == "own_write_sw"]
        assert alone == outputs
    assert len({path.read_text() for path in (tmp_path / "vllm-0" / "samples").iterdir()}) == len(reference[0].results)


@needs_vllm
@pytest.mark.full  # starts an engine for each of ten evaluations
@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_what_vllm_cannot_do_is_an_error_with_its_reason(tmp_path: Path) -> None:
    for architecture in CONFIGS:
        (tmp_path / architecture).mkdir()
        make_world(tmp_path / architecture, architecture)

    def of(architecture: str, tasks: str, adapter: str | None = "math1", **more: Any) -> dict[str, Any]:
        world = tmp_path / architecture
        place = {} if adapter is None else {"adapter": str(world / adapter)}
        include = {"include_path": str(world / "tasks"), "tasks": tasks}
        return {"base_model": str(world / "base"), **include, **place, **more}

    write, choose = "own_write_sw", "own_choice_sw"
    sampled = {"gen_kwargs": {"do_sample": True, "temperature": 1.5, "top_k": 0}}
    answered = [of("llama", write, "head"), of("qwen2", write)]
    refused_steps = [
        (of("llama", choose, "head"), "UnsupportedError", "engine", "lm_head"),
        (of("qwen2", write, "head"), "UnsupportedError", "engine", "LoRA on these modules"),
        (of("qwen2", write, engine_args={"max_num_seqs": 0}), "RunError", "engine", "max_num_batched_tokens"),
        (of("qwen2", write, engine_args={"max_model_len": 50}), "ArgumentError", "engine_args", "53 tokens"),
        (of("qwen2", write, engine_args={"num_beams": 8}), "ArgumentError", "engine_args", "not a setting"),
        (of("qwen2", write, gen_kwargs={"num_beams": 2}), "UnsupportedError", "gen_kwargs", "num_beams"),
    ]
    engine = {"engine": "vllm"}
    steps = [*answered, of("qwen2", write, **sampled), of("qwen2", write, **sampled, batch_size=1)]
    steps += [step for step, *_ in refused_steps]
    results = in_vllm(*({"evaluate": {**one, **engine}} for one in steps))
    for arguments, result in zip(answered, results, strict=False):
        reference = evaluate(**arguments, device="cpu", dtype="float32")
        assert result == [sample.output for sample in reference.samples]
    greedy, one, other = results[1:4]
    assert one == other != greedy
    for result, (_, kind, parameter, words) in zip(results[4:], refused_steps, strict=True):
        assert (result["error"], result["parameter"]) == (kind, parameter), result
        assert words in result["message"]


@needs_vllm
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_engines_are_compared_by_a_command_that_prints_nothing_else(tmp_path: Path) -> None:
    world = make_world(tmp_path, "llama")
    variables = {"PYTHONPATH": str(HERE.parents[2]), "HF_DATASETS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    options = ["--base-model", world / "base", "--adapter", world / "math1", "--include-path", world / "tasks"]
    command = [
        vllm_python(),
        "-m",
        "adapterswap",
        "evaluate",
        *options,
        "--tasks",
        ",".join(TASKS),
        "--compare-engines",
    ]
    process = subprocess.run(
        [*command, "--dtype", "float32", "--json"],
        env=environment(variables), capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-5000:]
    rows = {row["task"]: row for row in json.loads(process.stdout)}
    assert rows.keys() == TASKS.keys()
    for task, row in rows.items():
        assert (row["documents"], row["equal"]) == (len(ROWS), len(ROWS))
        assert (row["stderr"] is None) is (task == "own_rolling_sw")
        assert row["vllm"] == pytest.approx(row["transformers"], rel=1e-4)
    assert "leaked" not in process.stderr
    assert "INFO" not in process.stderr


@needs_vllm
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_kills_and_failing_steps_change_nothing(tmp_path: Path) -> None:
    world = make_world(tmp_path, "qwen2")
    content = sweep_of(world, compositions=COMPOSITIONS[:2], settings={"engine": "vllm", "in_flight": 1})
    peace, killed, failing, full, out = (
        str(tmp_path / name) for name in ("peace", "killed", "failing", "full", "memory")
    )
    assert in_vllm({"sweep": content, "out": killed, "kill": 2}) == []
    assert len((tmp_path / "killed" / "cells.jsonl").read_text().splitlines()) == 2
    refused_engine = {**content, "settings": {**content["settings"], "engine": "transformers"}}
    with refused(RunError, "out_path"):
        sweep(SweepRecipe.model_validate(refused_engine), killed, device="cpu", dtype="float32")
    once, twice, thrice = (
        {"sweep": content, "out": failing + str(n), "fail": list(range(3, 3 + n))} for n in (1, 2, 3)
    )
    resumed, undisturbed, *others = in_vllm(
        {"sweep": content, "out": killed}, {"sweep": content, "out": peace}, once, twice, thrice
    )
    filled, again, short, once_more = in_vllm(
        {"sweep": content, "out": full, "full": 2}, {"sweep": content, "out": full},
        {"sweep": content, "out": out, "fail": [3], "memory": True}, {"sweep": content, "out": out},
    )  # fmt: skip
    assert (filled["error"], short["error"], short["parameter"]) == ("OutputError", "RunError", "engine")
    assert "TMPDIR" in filled["message"]
    assert "max_num_seqs" in short["message"]
    assert again["cells"] == once_more["cells"] == undisturbed["cells"]
    for name in ("killed", "full", "memory"):
        assert plain(tmp_path / name) == plain(tmp_path / "peace"), name
    assert resumed["cells"] == undisturbed["cells"]
    assert [one.get("engines") for one in others] == [1, 2, None]
    assert (others[2]["error"], others[2]["parameter"]) == ("RunError", "engine")
    assert "a step that fails" in others[2]["message"]
    for number in (1, 2):
        compare(tmp_path / f"failing{number}", tmp_path / "peace")


def test_a_rank_that_vllm_does_not_take_is_found_before_it_starts(tmp_path: Path) -> None:
    world = make_world(tmp_path, "qwen2")
    experts = {"task_experts": {"wide1": str(world / "wide")}, "language_experts": {"wide2": str(world / "wide")}}
    content = sweep_of(world, **experts, compositions=[{"method": "soup"}], settings={"engine": "vllm"})
    prepared = prepare(SweepRecipe.model_validate(content))
    with refused(UnsupportedError, "engine", match="rank 600"):
        Estimate.of(prepared)


def test_an_engine_is_not_mixed_with_another(world: Path, tmp_path: Path, recipe: Callable[..., SweepRecipe]) -> None:
    run = tmp_path / "run"
    sweep(recipe(baselines=["base"], compositions=[]), run, device="cpu")
    settings = json.loads((run / "sweep.json").read_text())["settings"]
    assert "engine" not in settings
    with refused(RunError, "out_path"):
        sweep(recipe(settings={"num_fewshot": 1, "limit": 3, "engine": "vllm"}), run, device="cpu")


@pytest.mark.parametrize(
    ("settings", "kind", "parameter"),
    [
        ({"engine_args": {"max_num_seqs": 4}}, ArgumentError, "engine_args"),
        ({"engine": "vllm"}, DependencyError, None),
        ({"engine": {"generate": "vllm", "loglikelihood": "transformers"}}, FieldError, "settings.engine"),
    ],
)
def test_refusals_without_vllm(
    settings: dict[str, Any], kind: Any, parameter: str | None, tmp_path: Path, content: Callable[..., dict[str, Any]]
) -> None:
    given = SweepRecipe.model_validate(content(settings={**content()["settings"], **settings}))
    with refused(kind, parameter):
        sweep(given, tmp_path / "run", device="cpu")
