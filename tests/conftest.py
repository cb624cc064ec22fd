"""Pico models and experts for all tests, created once per session. Nothing is downloaded."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hugging Face library is imported
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="adapterswap-tests-")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the references are computed on the CPU; `make gpu-check` compares the GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import font_subsets
import hypothesis
import jinja2
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiers import left_out
from transformers import AutoModelForCausalLM, PreTrainedModel

gc.disable()  # until the first test: importing the tests, a fifth of the time goes into the search for garbage
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
hypothesis.settings.register_profile("untimed", deadline=None)  # a slow test on a busy machine is not a failure
hypothesis.settings.load_profile("untimed")
transformers.utils.logging.disable_progress_bar()
# Outputs are synced to disk in case the power fails: milliseconds for each file, and no test cuts the power.
os.fsync = lambda descriptor: None
# Shells start background jobs with Ctrl-C ignored; the tests that raise SIGINT need the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# PEFT writes a card beside each adapter that it saves. Jinja would compile its template anew each time, for longer than
# it takes to save the weights of a pico model.
_from_string = jinja2.Environment.from_string
_compiled = lru_cache(_from_string)


def _compiled_once(
    environment: jinja2.Environment, source: Any, global_names: Any = None, template_class: Any = None
) -> jinja2.Template:
    compiled = _compiled if environment.shared and global_names is None else _from_string
    return compiled(environment, source, global_names, template_class)


jinja2.Environment.from_string = _compiled_once  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make numerics` runs: modules that use tests/tolerances.py. Leave out what is for `make test-all`."""
    for item in items:
        names = vars(item.module).values() if isinstance(item, pytest.Function) else ()
        if any(str(getattr(value, "__module__", None)).endswith("tolerances") for value in names):
            item.add_marker(pytest.mark.numerical)
    if out := {*left_out(items)}:
        config.hook.pytest_deselected(items=[*out])
        items[:] = [item for item in items if item not in out]


@cache
def freeze_imports(hundreds: int) -> None:
    """Each training run and each sweep collects garbage, and would search 0.3 s through all that was imported.

    Args:
        hundreds: of modules that are imported; with more, there is more to freeze.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    freeze_imports(len(sys.modules) // 100)
    font_subsets.keep()


LAYERS = 6
LLAMA_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}

# Architectures that differ where it matters: biases, transposed weights, fused projections, names of layers, a tied
# head, a mixture of experts, sizes. Each has its config and the modules that its experts adapt.
CONFIGS: dict[str, tuple[type, dict[str, Any], list[str]]] = {
    "llama": (transformers.LlamaConfig, SMALL, LLAMA_PROJECTIONS),
    "qwen2": (transformers.Qwen2Config, SMALL, LLAMA_PROJECTIONS),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, **ENDS},
        ["c_attn", "c_proj", "c_fc"],
    ),
    "neox": (
        transformers.GPTNeoXConfig,
        {key: size for key, size in SMALL.items() if key != "num_key_value_heads"} | ENDS,
        ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    ),
    "gemma": (
        transformers.GemmaConfig,
        {**SMALL, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        LLAMA_PROJECTIONS,
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {**SMALL, "num_local_experts": 2},
        ["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "wide": (
        transformers.LlamaConfig,
        {**SMALL, "num_hidden_layers": 1, "hidden_size": 288, "intermediate_size": 400},
        LLAMA_PROJECTIONS,
    ),
    "tiny": (
        transformers.LlamaConfig,
        {**SMALL, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8},
        LLAMA_PROJECTIONS,
    ),
}


def random_model(architecture: str) -> PreTrainedModel:
    config_class, options, _ = CONFIGS[architecture]
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_class(vocab_size=96, **options))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # biases start at zero, which would hide a mistake
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor of a checkpoint, in the order of its shards."""
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def save_like(folder: Path, like: Path, state: Mapping[str, torch.Tensor], *, shards: int = 1) -> Path:
    """A checkpoint with other weights: `like`'s small files, and `state` in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in like.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", {"format": "pt"})
        return folder
    names = list(state)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: state[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load_base(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`base("llama")` is the folder of a random pico model."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(f"base-{architecture}")
            random_model(architecture).save_pretrained(made[architecture])
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("gemma")` is a pico base with a tokenizer file; `checkpoint("gemma", seed=1)` a full fine-tune."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(
        architecture: str = "llama", seed: int = 0, *, dtype: torch.dtype = torch.float32, shards: int = 1
    ) -> Path:
        key = architecture, seed, dtype, shards
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            if key == (architecture, 0, torch.float32, 1):
                random_model(architecture).save_pretrained(made[key])
                (made[key] / "tokenizer.json").write_text('{"version": "1.0"}')
                (made[key] / "chat_template.jinja").write_text("{{ messages }}")
            else:
                generator = torch.Generator().manual_seed(seed)
                tuned = {
                    name: (tensor + 0.03 * torch.randn(tensor.shape, generator=generator) * bool(seed)).to(dtype)
                    for name, tensor in weights(make(architecture)).items()
                }
                save_like(made[key], make(architecture), tuned, shards=shards)
        return made[key]

    return make


@pytest.fixture(scope="session")
def expert(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`expert("llama", seed=1, r=8, …)` is the folder of a random LoRA, saved by PEFT; options are LoraConfig's."""
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", *, seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        key = repr((architecture, seed, dtype, sorted(options.items())))
        if key not in made:
            settings = {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": CONFIGS[architecture][2]}
            settings |= {"fan_in_fan_out": architecture == "gpt2", "task_type": "CAUSAL_LM"}
            model = get_peft_model(load_base(base(architecture)), LoraConfig(**(settings | options)))
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.05).to(dtype)
            made[key] = tmp_path_factory.mktemp(f"expert-{seed}")
            model.save_pretrained(made[key], save_embedding_layers=False)
        return made[key]

    return make


@pytest.fixture
def math(expert: Callable[..., Path]) -> Path:
    return expert(seed=1)


@pytest.fixture
def swahili(expert: Callable[..., Path]) -> Path:
    return expert(seed=2)


def merged_weights(base_folder: Path, adapter_folder: Path) -> dict[str, torch.Tensor]:
    """The full weights of base + adapter, merged by PEFT."""
    model = PeftModel.from_pretrained(load_base(base_folder), adapter_folder).merge_and_unload()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) * 7 % 96
    with torch.no_grad():
        return model(tokens).logits


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`run("compose", …)` runs the command line in this process and keeps stdout and stderr apart.

    With `exit_code`, the command must end with it.
    Steps that take longer than five seconds, on a busy machine, print no lines of progress.
    """
    from adapterswap.cli import main
    from adapterswap.kit import progress

    monkeypatch.setattr(progress, "FIRST_LINE_S", float("inf"))
    monkeypatch.setattr(progress, "LINE_EVERY_S", float("inf"))

    def call(*arguments: object, exit_code: int | None = None) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert exit_code in (None, result.exit_code), result.output
        return result

    return call


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`made_once("name", make)` is a folder of this name in which the first worker that asks has called `make`."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, complete = root / name, root / f"{name}.complete"
        with FileLock(root / f"{name}.lock"):
            if not complete.exists():
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def small_lab_run(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The folder that `adapterswap lab --seeds 1` writes, from fewer rows and problems."""

    def run(folder: Path) -> None:
        from dataclasses import replace

        from adapterswap.experiments.lab import SCENES, LabPlan, Sizes

        scene = replace(SCENES["gap"], math_rows=100, language_rows=100)
        LabPlan.of(scene, 1, folder / "lab-run", sizes=Sizes(development=20, test=20)).run()

    return made_once("small-lab", run) / "lab-run"


@pytest.fixture(scope="session")
def known_tasks(made_once: Callable[[str, Callable[[Path], object]], Path]) -> frozenset[str]:
    """Every task, group and tag of lm-evaluation-harness, and the tasks of MGSM that the package adds."""

    def read(folder: Path) -> None:
        from lm_eval.tasks import TaskManager  # which reads thousands of files

        from adapterswap.experiments.evaluation.mgsm import mgsm_task_names

        names = [*TaskManager().all_tasks, *mgsm_task_names()]
        (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")

    return frozenset(json.loads((made_once("known-tasks", read) / "names.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Chromium, shared by all tests of a process: one process cannot drive two.

    Its first context has a folder, in which it keeps the compiled scripts of a page: the studio's opens in half the
    time.
    """
    import shutil

    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"), executable_path=chromium, args=["--no-sandbox"]
        )
        yield context.browser
        context.close()
