"""`adapterswap evaluate`, end to end on pico models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from peft import LoraConfig, get_peft_model
from refusals import refused
from transformers import AutoModelForCausalLM

from adapterswap.engines.live import peft_adapter
from adapterswap.experiments.evaluation.mgsm import mgsm_task
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import ArgumentError

from .conftest import pico_model

Run = Callable[..., Result]
FAST = ("--limit", "2", "--num-fewshot", "1", "--max-gen-toks", "8", "--device", "cpu")


@pytest.fixture
def evaluate_(run: Run, byte_base: Path) -> Run:
    """`evaluate_(…)` evaluates something on the pico base, fast."""

    def call(*arguments: object) -> Result:
        return run(
            "evaluate", "--base-model", byte_base, "--tasks", "mgsm_direct_sw,mgsm_native_cot_te", *FAST, *arguments
        )

    return call


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert isinstance(content, dict)
    return content


def error(result: Result) -> str:
    assert result.exit_code in (2, 3), result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.split("\n") if line.startswith("Error: ")]
    assert lines
    assert "Traceback" not in result.stderr
    return "\n".join(lines)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").rstrip("\n").split("\n")]


def test_the_base_alone_as_json(evaluate_: Run) -> None:
    content = document(evaluate_("--json"))
    assert [(task["name"], task["num_docs"]) for task in content["tasks"]] == [
        ("mgsm_direct_sw", 2),
        ("mgsm_native_cot_te", 2),
    ]
    filters = [[score["filter"] for score in task["scores"]] for task in content["tasks"]]
    assert filters[0] == ["remove_whitespace", "flexible-extract", "normalized"]
    assert filters[1] == ["strict-match", "flexible-extract", "normalized"]
    named = content["subject"]["base_model"]
    assert (named["source"], named["revision"], [*named["fingerprints"]]) == ("byte-base0", None, ["model.safetensors"])
    assert content["settings"]["max_gen_toks"] == 8
    assert (content["settings"]["dtype"], content["settings"]["device"]) == ("float32", "cpu")
    assert set(content["settings"]["versions"]) == {"lm_eval", "peft", "torch", "transformers"}


def test_a_misspelt_task_is_reported_before_anything_is_opened(run: Run, tmp_path: Path) -> None:
    error_message = error(
        run("evaluate", "--base-model", tmp_path / "absent", "--tasks", "mgsm_direct_sw,mgsm_direct_swa")
    )
    assert error_message.count("Error: ") == 1
    assert "'mgsm_direct_swa'" in error_message
    assert "Did you mean 'mgsm_direct_sw'" in error_message


def test_a_similar_name_in_a_folder_of_tasks_is_proposed(tmp_path: Path) -> None:
    """Also where a task file is JSON, as the lab's are."""
    (tmp_path / "one.yaml").write_text(json.dumps({"task": "word_problems_test_fr", "dataset_path": "json"}, indent=2))
    (tmp_path / "two.yaml").write_text("group: sums_test_fr\ntask:\n  - word_problems_test_fr\n")
    for name, known in (("word_problems_fr", "word_problems_test_fr"), ("sums_fr", "sums_test_fr")):
        with refused(ArgumentError, "tasks", match=f"Did you mean '{known}'"):
            LoadedTasks.check_names([name], tmp_path)


def test_names_of_tasks_are_checked_without_the_harness() -> None:
    script = (
        "import sys\nimport adapterswap.experiments.evaluation.subjects\nfrom adapterswap import AdapterswapError\n"
        "from adapterswap.experiments.evaluation.tasks import LoadedTasks\n"
        "LoadedTasks.check_names(['mgsm_direct_sw', 'tydiqa_goldp_sw', 'arc_easy', 'mgsm_*_te'])\n"
        "try:\n    LoadedTasks.check_names(['arc_eazy'])\nexcept AdapterswapError as error:\n    print(error)\n"
        "assert not {'torch', 'transformers', 'datasets', 'lm_eval', 'peft'} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "Did you mean 'arc_easy'" in process.stdout


def test_long_phases_are_announced(evaluate_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal: a line at the start of each, and progress now and then (here after every request)."""
    monkeypatch.setattr("adapterswap.kit.progress.LINE_EVERY_S", 0)
    result = evaluate_()
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    places = [
        next(number for number, line in enumerate(lines) if line.startswith(begin))
        for begin in (
            "reading the tasks",
            "loading ",
            "building the prompts",
            "answering 4 requests",
            "requests: 1 of 4",
        )
    ]
    assert places == sorted(places)
    assert any(line.startswith("requests: 4 of 4, ") for line in lines)


def test_the_table(evaluate_: Run) -> None:
    result = evaluate_()
    assert result.exit_code == 0, result.output
    lines = result.stdout.split("\n")
    (row,) = [line for line in lines if line.startswith(" mgsm_native_cot_te")]
    assert row.split() == ["mgsm_native_cot_te", "1", "2", *["0.000", "±", "0.000"] * 3]
    for head in ("strict-match", "flexible-extract", "normalized", "exact_match"):
        assert head in result.stdout
    assert "mgsm_direct_sw: 2 of 2 outputs were cut at --max-gen-toks 8" in result.stderr


def test_base_adapter_and_composition_live_and_from_disk(
    evaluate_: Run, run: Run, byte_base: Path, byte_expert: Callable[[str], Path], tmp_path: Path
) -> None:
    math, swahili = byte_expert("math"), byte_expert("swahili")
    composing = ("-t", math, "-l", swahili, "--bottom", 2, "--top", 1, "--top-transition", 1)
    composed = run("compose", *composing, "--base-model", byte_base, "-o", tmp_path / "composed")
    assert composed.exit_code == 0, composed.output
    subjects = {
        "base": (),
        "math": ("--adapter", math),
        "live": composing,
        "disk": ("--adapter", tmp_path / "composed"),
    }
    contents = {
        name: document(evaluate_(*options, "--json", "-o", tmp_path / name)) for name, options in subjects.items()
    }
    outputs = {name: tuple(row["output"] for row in rows(tmp_path / name)) for name in subjects}
    assert outputs["live"] == outputs["disk"]
    assert len(set(outputs.values())) == 3
    live, disk = contents["live"]["subject"]["composition"], contents["disk"]["subject"]["composition"]
    assert live["experts"] == disk["experts"]
    assert live["rules"] == disk["rules"]
    assert (tmp_path / "live" / "samples.jsonl").read_bytes() == (tmp_path / "disk" / "samples.jsonl").read_bytes()
    kept = json.loads((tmp_path / "live" / "results.json").read_text("utf-8"))
    assert kept["subject"] == contents["live"]["subject"]
    assert str(tmp_path) not in (tmp_path / "live" / "results.json").read_text("utf-8")


def test_a_composition_that_needs_tensors_of_its_own(
    evaluate_: Run, run: Run, byte_base: Path, byte_expert: Callable[[str], Path], tmp_path: Path
) -> None:
    composing = ("-t", byte_expert("math"), "-l", byte_expert("swahili"), "--method", "ties", "--density", 0.5)
    bound = ("--max-rank", 4)
    composed = run("compose", *composing, *bound, "--base-model", byte_base, "-o", tmp_path / "composed")
    assert composed.exit_code == 0, composed.output
    requested = document(evaluate_(*composing, *bound, "--json", "-o", tmp_path / "asked"))["subject"]["composition"]
    written = document(evaluate_("--adapter", tmp_path / "composed", "--json", "-o", tmp_path / "written"))
    assert rows(tmp_path / "asked") == rows(tmp_path / "written")
    assert requested["output"] == {"max_rank": 4}
    assert requested["composition"] == written["subject"]["composition"]["composition"]
    assert "--max-rank or --max-error" in error(evaluate_(*composing))
    assert evaluate_("--max-rank", 4).exit_code == 2


def test_a_recipe(evaluate_: Run, byte_base: Path, byte_expert: Callable[[str], Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    experts = {"math": str(byte_expert("math")), "swahili": str(byte_expert("swahili"))}
    rules = [{"layers": "0-1", "expert": "swahili"}, {"expert": "math"}]
    recipe.write_text(json.dumps({"experts": experts, "allocation": rules}), encoding="utf-8")
    options = ("-t", experts["math"], "-l", experts["swahili"], "--bottom", 2, "--top", 0)
    assert document(evaluate_("--recipe", recipe, "--json", "-o", tmp_path / "a"))["subject"]["composition"]
    document(evaluate_(*options, "--json", "-o", tmp_path / "b"))
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_a_dry_run_needs_no_weights_and_writes_nothing(
    run: Run, byte_base: Path, byte_expert: Callable[[str], Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(byte_base, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    command = ("evaluate", "--base-model", bare, "--tasks", "mgsm_native_cot_sw", "--limit", 5, "--dry-run")
    result = run(*command, "-t", byte_expert("math"), "-l", byte_expert("swahili"), "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    task = mgsm_task("mgsm_native_cot_sw")
    assert result.stdout.rstrip("\n").endswith(task.prompt(task.language.questions[0][0]))
    assert "s swahili" in result.stdout
    assert "nothing evaluated" in result.stderr
    assert not (tmp_path / "out").exists()
    content = document(run(*command, "--json"))
    assert content["tasks"][0]["num_fewshot"] == 8
    assert content["tasks"][0]["num_docs"] == 5
    assert content["evaluated"] is False


def test_a_dry_run_reports_prompts_that_do_not_fit(run: Run, tmp_path: Path, byte_base: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(byte_base, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((bare / "config.json").read_text("utf-8")) | {"max_position_embeddings": 1000}
    (bare / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = run("evaluate", "--base-model", bare, "--tasks", "mgsm_direct_te", "--limit", 1, "--dry-run")
    assert "of 512 output tokens" in result.stderr
    few = run(
        "evaluate", "--base-model", bare, "--tasks", "mgsm_direct_te", "--limit", 1, "--dry-run", "--num-fewshot", 0,
        "--gen-kwargs", "max_new_tokens=4",
    )  # fmt: skip
    assert "output tokens" not in few.stderr


def test_the_limit_at_which_outputs_were_cut_is_reported(evaluate_: Run) -> None:
    """Not at --max-gen-toks if the task or --gen-kwargs has its own limit."""
    result = evaluate_("--gen-kwargs", "max_new_tokens=3")
    assert "mgsm_direct_sw: 2 of 2 outputs were cut at 3 tokens" in result.stderr
    assert "--max-gen-toks 8" not in result.stderr


def test_gen_kwargs(evaluate_: Run, tmp_path: Path) -> None:
    document(evaluate_("--json", "--gen-kwargs", "do_sample=true,temperature=2.0", "-o", tmp_path / "sampled"))
    document(evaluate_("--json", "-o", tmp_path / "greedy"))
    assert rows(tmp_path / "sampled") != rows(tmp_path / "greedy")
    assert evaluate_("--gen-kwargs", "do_sample").exit_code == 2


def test_mistakes(
    evaluate_: Run, run: Run, byte_base: Path, byte_expert: Callable[[str], Path], tmp_path: Path
) -> None:
    math = byte_expert("math")
    assert "does not exist" in error(evaluate_("--adapter", tmp_path / "absent"))
    assert "has no adapter_model.safetensors" in error(evaluate_("--adapter", byte_base))
    assert "neither a whole number of documents" in error(evaluate_("--limit", "0"))
    assert "The device 'qpu' cannot be used" in error(evaluate_("--device", "qpu"))
    assert "does not exist" in error(evaluate_("-t", math, "-l", tmp_path / "absent"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "results.json").write_text("{}")
    assert "already exists" in error(evaluate_("-o", tmp_path / "taken"))
    assert "overlaps the input" in error(evaluate_("--adapter", math, "-o", math / "scores"))
    assert "The path" in error(run("evaluate", "--base-model", tmp_path / "absent", "--tasks", "mgsm_direct_sw"))
    for usage in (("--adapter", math, "-t", math, "-l", math), ("-t", math), ("--bottom", 3), ("--bottom", 0)):
        assert evaluate_(*usage).exit_code == 2
    assert run("evaluate", "--base-model", byte_base).exit_code == 2
    assert (tmp_path / "taken" / "results.json").read_text() == "{}"


def test_an_output_is_replaced_when_asked(evaluate_: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    document(evaluate_("--json", "-o", tmp_path / "out", "--overwrite"))
    assert (tmp_path / "out" / "results.json").is_file()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", list(peft_adapter._REGEXES))
def test_an_adapter_whose_regexes_would_never_finish(
    key: str,
    run: Run,
    tmp_path: Path,
    byte_base: Path,
    byte_expert: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PEFT would try them on every module."""
    monkeypatch.setattr("adapterswap.engines.live.peft_adapter._SECONDS", 2)
    shutil.copytree(byte_expert("math"), tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "adapter_config.json").read_text())
    endless = r"(?:[\w.]+[\w.]+)+!"
    config[key] = {"layers_pattern": [endless], "modules_to_save": [endless]}.get(
        key, {endless: 4} if key.endswith("pattern") else endless
    )
    (tmp_path / "odd" / "adapter_config.json").write_text(json.dumps(config))
    result = run("evaluate", "--base-model", byte_base, "--adapter", tmp_path / "odd", "--tasks", "mgsm_direct_sw")
    assert f"{key} of the adapter odd: the regexes take too long" in error(result)


def test_an_adapter_of_another_base(run: Run, tmp_path: Path, byte_base: Path) -> None:
    def expert(name: str, **options: Any) -> Path:
        model = get_peft_model(pico_model(**options), LoraConfig(target_modules=["q_proj"], r=2))
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    command = ("evaluate", "--base-model", byte_base, "--tasks", "mgsm_direct_sw", *FAST, "--adapter")
    deeper = error(run(*command, expert("deeper", layers=8)))
    assert "adapts layer 7, but the base has 6 layers" in deeper
    shallower = error(run(*command, expert("shallower", layers=4)))
    assert "missing adapter keys" in shallower
    assert "layers.4.self_attn.q_proj.lora_A" in shallower
    wider = AutoModelForCausalLM.from_pretrained(byte_base).config
    wider.hidden_size = 64
    model = get_peft_model(AutoModelForCausalLM.from_config(wider), LoraConfig(target_modules=["q_proj"], r=2))
    model.save_pretrained(tmp_path / "wider")
    assert "is 32×64 in adapter, but 32×32 in the base" in error(run(*command, tmp_path / "wider"))


def test_a_base_without_all_its_weights(run: Run, tmp_path: Path, byte_base: Path) -> None:
    shutil.copytree(byte_base, tmp_path / "base")
    model = pico_model(layers=5)
    torch.manual_seed(0)
    model.save_pretrained(tmp_path / "five")
    shutil.copy(tmp_path / "five" / "model.safetensors", tmp_path / "base" / "model.safetensors")
    error_message = error(run("evaluate", "--base-model", tmp_path / "base", "--tasks", "mgsm_direct_sw", *FAST))
    assert "is missing weights: model.layers.5." in error_message


def test_a_base_with_another_models_config(byte_base: Path, tmp_path: Path) -> None:
    """In a separate process without a terminal: one line after transformers' report, and no bar."""
    shutil.copytree(byte_base, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    command = [sys.executable, "-m", "adapterswap", "evaluate", "--tasks", "mgsm_direct_sw", *map(str, FAST)]
    process = subprocess.run(
        [*command, "--base-model", str(tmp_path / "base")], capture_output=True, text=True, check=False
    )
    assert process.returncode == 3
    line = process.stderr.splitlines()[-1]
    assert "Loading weights" not in process.stderr
    assert "do not match its config: model.layers.0.mlp.down_proj.weight is " in line
    assert "32×40" in line
