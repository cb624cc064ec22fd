"""What a task file may pass on to other libraries: everything else is refused before anything runs."""

from __future__ import annotations

import json
import os
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused

from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.stock_tasks import harness_folder
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.experiments.permitted import ENGINE, GENERATION, READERS, foreign_in_task, foreign_source
from adapterswap.experiments.training.data import load_table
from adapterswap.experiments.training.recipe import DatasetSource
from adapterswap.kit.errors import ArgumentError, DataError

ATTACKS: dict[str, dict[str, Any]] = {
    "custom_generate": {"generation_kwargs": {"custom_generate": "SCRIPT", "trust_remote_code": True}},
    "assistant_model": {"generation_kwargs": {"until": ["."], "assistant_model": "org/name"}},
    "penalty_alpha": {"generation_kwargs": {"until": ["."], "penalty_alpha": 0.6, "top_k": 4}},  # a script on the Hub
    "dataset_path": {"dataset_path": "SCRIPT/rows.py"},
    "pandas": {"dataset_path": "pandas", "dataset_kwargs": {"data_files": "rows.pkl"}},
    "sql": {"dataset_path": "sql", "dataset_kwargs": {"sql": "delete from rows", "con": "sqlite:///rows.db"}},
    "iceberg": {"dataset_path": "iceberg", "dataset_kwargs": {"catalog": {"py-catalog-impl": "os.system"}}},
    "cache_dir": {"dataset_kwargs": {"data_files": "DATA", "cache_dir": "/etc"}},
    "storage_options": {"dataset_kwargs": {"data_files": "DATA", "storage_options": {"http": {}}}},
    "token": {"dataset_kwargs": {"data_files": "DATA", "token": True}},
    "data_files": {"dataset_kwargs": {"data_files": {"test": ["DATA", "http://169.254.169.254/latest"]}}},
    "chained": {"dataset_kwargs": {"data_files": "zip://rows.json::https://example.com/rows.zip"}},
    "custom_dataset": {"custom_dataset": "own_code.rows"},
    "class": {"class": "own_code.Own"},
    "use_prompt": {"use_prompt": "SCRIPT/prompts.yaml:own"},
    "metadata": {"metadata": {"version": 1, "pretrained": "SCRIPT"}},  # some tasks load its tokenizer with its code
    "metric": {"metric_list": [{"metric": "org/metric", "aggregation": "mean"}]},
    "hf_evaluate": {"metric_list": [{"metric": "f1", "hf_evaluate": True}]},
    "metric_option": {"metric_list": [{"metric": "acc", "module_type": "SCRIPT"}]},
    "filter": {"filter_list": [{"name": "own", "filter": [{"function": "custom", "filter_fn": "print"}]}]},
    "filter_path": {"filter_list": [{"name": "own", "filter": [{"function": "decontaminate", "path": "SCRIPT"}]}]},
    "shots": {"fewshot_config": {"sampler": "first_n", "process_docs": "own_code.docs"}},
}
MEMBERS = {  # settings that a group has for tasks of the harness
    "member": {"task": [{"task": "niah_single_1", "metadata": {"pretrained": "SCRIPT"}}]},
    "inner": {"task": [{"group": "own_in", "task": [{"task": "gsm8k", "generation_kwargs": {"custom_generate": ""}}]}]},
    "group_wide": {"task": ["gsm8k"], "generation_kwargs": {"custom_generate": "SCRIPT"}},
}  # fmt: skip
PLAIN = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "DATA"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{text}}",
}
USUAL: dict[str, Any] = {
    "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 8, "num_beams": 1},
    "metric_list": [
        {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
         "ignore_punctuation": False, "regexes_to_ignore": [","]},
    ],
    "filter_list": [
        {"name": "strict", "filter": [{"function": "regex", "regex_pattern": "(.*)", "group_select": 0},
                                      {"function": "take_first"}]},
    ],
    "fewshot_config": {"sampler": "first_n", "samples": [{"text": "a", "anything": {"custom_generate": "data"}}]},
    "metadata": {"version": 1.0, "description": "one"},
    "num_fewshot": 0, "repeats": 1, "target_delimiter": " ", "fewshot_delimiter": "\n\n", "description": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task for each attack, whose scripts write a marker when they run."""
    place = tmp_path_factory.mktemp("tasks")
    script, data = place / "script", place / "rows.json"
    (script / "custom_generate").mkdir(parents=True)
    for path in (script / "rows.py", script / "custom_generate/generate.py"):
        path.write_text(f"open({str(place / 'marker')!r}, 'w')\n")
    data.write_text(json.dumps({"text": "a b"}))
    tasks = place / "files"
    tasks.mkdir()
    for name, content in {**ATTACKS, "usual": USUAL}.items():
        written = yaml.safe_dump({"task": f"own_{name}", **PLAIN, **content})
        (tasks / f"{name}.yaml").write_text(written.replace("SCRIPT", str(script)).replace("DATA", str(data)))
    for name, content in MEMBERS.items():
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump({"group": f"own_{name}", **content}))
    return place


@pytest.mark.parametrize("name", [*ATTACKS, *MEMBERS])
def test_what_is_not_listed_is_refused(folder: Path, name: str) -> None:
    with refused(ArgumentError, "trust_task_code") as result:
        LoadedTasks.load([f"own_{name}"], Settings(include_path=folder / "files"))
    content = yaml.safe_load((folder / "files" / f"{name}.yaml").read_text())
    problems = [problem.message for problem in result.value.problems]
    assert all(str(folder / "files" / f"{name}.yaml") in problem for problem in problems)
    assert any(problem.partition("address: ")[2].split(":")[0] in str(content) for problem in problems)
    assert not (folder / "marker").exists()


def test_usual_tasks_need_no_trust(folder: Path) -> None:
    (task,) = LoadedTasks.load(["own_usual"], Settings(include_path=folder / "files")).tasks.values()
    assert task.config.generation_kwargs["max_gen_toks"] == 8


def test_local_files_need_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would tell a server of each load."""
    hosts: list[str] = []

    def look_up(host: str, *_: object, **__: object) -> None:
        hosts.append(host)
        raise socket.gaierror

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("adapterswap.experiments.evaluation.tasks._KEPT", {})
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    LoadedTasks.load(["own_usual"], Settings(include_path=folder / "files"))
    (folder / "rows.csv").write_text("text\na\n")
    for name, more in (("rows.json", {}), ("rows.csv", {}), ("rows.csv", {"streaming": True, "samples": 1})):
        load_table(DatasetSource(path=str(folder / name), text="{text}", **more), folder, seed=0)
    assert hosts == []


def test_most_tasks_of_the_harness_would_need_no_trust() -> None:
    """The tables are wide enough: of its files without functions, those of every tenth folder."""
    place = harness_folder()
    assert place is not None

    class Loader(yaml.CSafeLoader):
        pass

    def function(loader: Any, suffix: str, node: Any) -> None:
        raise yaml.YAMLError

    Loader.add_multi_constructor("!", function)
    found: dict[str, list[str]] = {}
    count = 0
    for folder in sorted(path for path in place.iterdir() if path.is_dir())[::10]:
        for path in folder.rglob("*.yaml"):
            try:
                content = yaml.load(path.read_bytes(), Loader=Loader)
            except yaml.YAMLError:
                continue
            count += 1
            if problems := [*foreign_in_task(content, type(None))]:
                found[str(path.relative_to(place))] = problems
    assert count > 300
    assert len(found) < count / 50, found


def test_names_of_data(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    permitted = [None, *READERS, "org/name", "openai/gsm8k", str(tmp_path / "rows")]
    assert [path for path in permitted if foreign_source(path) is not None] == []
    others = [
        "pandas",
        "sql",
        "generator",
        "org/rows.py",
        "rows.py",
        "../rows",
        "https://example.com/x",
        "a/b/c",
        "",
        1,
    ]
    assert [path for path in others if foreign_source(path) is None] == []
    for harmless in ("rows.json", ["a", {"test": "hf://datasets/org/name/x.json"}], None, "C:/rows.json"):
        assert foreign_source(None, harmless) is None
    for address in ("http://a/x", "https://a/x", "s3://a", "ssh://a", "hf://a::http://b", "memory://a", "file:///etc"):
        assert address in str(foreign_source("json", {"test": ["rows.json", address]}))


def test_the_tables_hold_no_name_that_runs_code() -> None:
    """Names that are known to run code, or to open an address, in transformers and vLLM."""
    code = {
        "custom_generate", "trust_remote_code", "assistant_model", "logits_processor", "stopping_criteria", "token",
        "reasoning_parser_plugin", "tool_parser_plugin", "scheduler_cls", "worker_cls", "worker_extension_cls",
        "distributed_executor_backend", "logits_processors", "kv_transfer_config", "compilation_config", "hf_overrides",
        "speculative_config", "download_dir", "load_format", "model_loader_extra_config", "otlp_traces_endpoint",
        "allowed_local_media_path", "hf_token", "code_revision", "tokenizer_mode", "generation_config", "model",
    }  # fmt: skip
    assert not code & (GENERATION | ENGINE)


def test_task_files_are_regular_and_small(tmp_path: Path) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghi")) + "task: own_bomb\n"
    texts = {
        "bomb": bomb,
        "deep": "task: own_deep\nx: " + "[" * 60 + "]" * 60,
        "large": f"task: own_large\nx: {'y' * 2**20}",
    }
    for name, text in texts.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.yaml").write_text(text)
    for name, make in (("pipe", os.mkfifo), ("device", lambda path: path.symlink_to("/dev/zero"))):
        folder = tmp_path / name
        folder.mkdir()
        make(folder / "own.yaml")
    for name in (*texts, "pipe", "device"):
        with pytest.raises(DataError):
            LoadedTasks.check_names(["own_task"], tmp_path / name)
