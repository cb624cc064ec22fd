"""lm-evaluation-harness asks our server for compositions by name, and scores them as `adapterswap evaluate` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from experiments.sweeps.test_engines import make_world

from adapterswap import evaluate, layer_swap

from .environment import needs_vllm
from .server import serving

pytestmark = [needs_vllm, pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("vllm")]

NAME = "math1+sw1@bottom=4,top=1"
TASKS = "own_write_sw,own_choice_sw"


@pytest.mark.skipif(find_spec("tenacity") is None, reason="needs `pip install 'lm_eval[api]'`")
@pytest.mark.full  # `make test` asks vLLM in test_vllm_server.py
def test_lm_eval_evaluates_a_composition_by_its_name(tmp_path: Path) -> None:
    world = make_world(tmp_path, "llama")
    experts = tmp_path / "experts"
    experts.mkdir()
    for name in ("math1", "sw1"):
        (world / name).rename(experts / name)
    with serving(world / "base", experts, tmp_path, "--max-lora-rank", "8") as server:
        arguments = {"model": NAME, "base_url": f"{server.url}/v1/completions", "tokenizer": str(world / "base")}
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", json.dumps(arguments),
            "--tasks", TASKS, "--include_path", str(world / "tasks"), "--output_path", str(tmp_path / "theirs"),
            "--log_samples",
        ]  # fmt: skip
        offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-3000:]
        assert NAME in {model["id"] for model in server.get("/v1/models")[1]["data"]}
    plan = layer_swap(experts / "math1", experts / "sw1", bottom=4, top=1, num_layers=12)
    ours = evaluate(world / "base", TASKS, plan=plan, include_path=world / "tasks", device="cpu", dtype="float32")
    for task in TASKS.split(","):
        (file,) = (tmp_path / "theirs").rglob(f"samples_{task}_*.jsonl")
        theirs = {row["doc_id"]: row for row in map(json.loads, file.read_text().splitlines())}
        for sample in (one for one in ours.samples if one.task == task):
            answers = [answer[0] for answer in theirs[sample.doc_id]["resps"]]
            if isinstance(sample.output, str):
                # The server holds back a character whose bytes are incomplete when the answer ends.
                assert [answer.rstrip("\ufffd") for answer in answers] == [sample.output.rstrip("\ufffd")]
            else:
                assert [float(value) for value, _ in answers] == pytest.approx(
                    [one for one, _ in sample.output], abs=1e-3
                )
