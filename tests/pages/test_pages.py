"""Every command and snippet of the pages runs unchanged, or is listed here with the reason."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapterswap.core import open_adapter

from .blocks import ROOT, Reader, Step, changed, check_shown, steps_of
from .worlds import SETUPS, make_world, names_for

os.environ["HF_DATASETS_OFFLINE"] = "1"

# Pages whose every block another test runs. docs/log.md is a diary.
ELSEWHERE = {
    "docs/log.md": "a diary",
    "docs/python.md": "tests/test_public_face.py",
    "docs/reproducing.md": "tests/experiments/recipes/test_reproducing.py",
    "examples/fusionbench/README.md": "tests/experiments/recipes/test_fusionbench.py",
    "examples/engines/README.md": "tests/examples/test_two_engines.py",
    "examples/smollm2/README.md": "tests/real/test_page.py",
    "examples/plugin_method/README.md": "tests/examples/test_plugin_method.py",
    "examples/which_layers/README.md": "tests/examples/test_which_layers.py",
}

# What does not run here: a page (* is every page), a pattern that a step matches, and why.
NOT_RUN: list[tuple[str, str, str]] = [
    ("*", r"^pip (install|wheel)|^python3 -m venv|^\. \.venv|^jupyter", "installs packages: `make dist` does too"),
    ("*", r"^make ", "makes an environment: continuous integration runs it"),
    ("*", r"--push-to-hub", "needs the Hub: tests/core/experts/test_hub.py uploads to a small server"),
    (
        "*",
        r"torchrun|accelerate launch|compute_environment",
        "needs several GPUs: tests/experiments/training/test_processes.py",
    ),
    (
        "*",
        r"--engine vllm|--compare-engines",
        "needs vLLM: tests/experiments/sweeps/test_engines.py",
    ),
    (
        "docs/recipes.md",
        r"lightonai/",
        "needs the Hub: tests/experiments/recipes/test_sweeps.py finds the layers of a stand-in",
    ),
    (
        "docs/sweep.md",
        r"^task_experts: \{math: \{ladder",
        "lines of a recipe: tests/experiments/sweeps/test_grid.py reads them",
    ),
    ("*", r"--ray", "needs a Ray cluster: tests/experiments/sweeps/test_cluster.py"),
    ("*", r"^curl |\n *curl ", "needs a server: tests/engines/serving asks running ones"),
    (
        "*",
        r"^adapterswap (serve|studio) (?!.*--dry-run)|^llama-server|sglang|lorax-",
        "starts a server: tests/engines/serving, tests/experiments/studio",
    ),
    ("*", r"^adapterswap lab", "trains for minutes: tests/experiments/lab trains for less"),
    ("*", r"^adapterswap train train/", "needs data from the Hub: tests/experiments/recipes trains on rows like them"),
    (
        "docs/methods.md",
        r"^python benchmarks",
        "trains for an hour: tests/experiments/lab/test_methods_lab.py trains a little",
    ),
    ("README.md", r"smollm2/experts", "in a checkout, not beside another `base`: test_the_readme_runs_in_a_checkout"),
    ("docs/adapters.md", r"^allocation:\n", "a fragment: tests/core/planning has encoder-decoders"),
    (
        "docs/adapters.md",
        r"from transformers import|hotswap",
        "tests/engines/live/test_recipes.py compares it with PEFT",
    ),
    (
        "docs/evaluate.md",
        r"flores|FLORES",
        "needs FLORES's sentences, which are not shipped: tests/experiments/evaluation/test_flores.py",
    ),
    (
        "docs/evaluate.md",
        r"^include:",
        "another folder: tests/experiments/evaluation/test_language_tasks.py runs such a file",
    ),
    (
        "docs/evaluate.md",
        r"mgsm_rev2|MGSM_REV2|mgsm_symbolic|afrimgsm|multijail|MULTIJAIL",
        "needs data that are not shipped: tests/experiments/evaluation/test_downloaded_tasks.py",
    ),
    ("docs/evaluate.md", r"to\(\"cuda\"\)", "needs a GPU: tests/experiments/evaluation/test_processes.py"),
    ("docs/live.md", r"pinned", "compiles: tests/engines/live/test_compiled.py"),
    (
        "docs/recipes.md",
        r"^hygiene:|^extends:",
        "needs data from the Hub: tests/experiments/training/test_recipe.py reads such fragments",
    ),
    (
        "docs/sweep.md",
        r"^search:|norms: \[average, layer\]",
        "tests/experiments/sweeps/test_search.py and test_full_weights.py",
    ),
    ("docs/sweep.md", r"^settings:", "tests/experiments/sweeps/test_engines.py"),
    ("*", r"local-completions|inspect eval", "needs a server: tests/engines/serving/test_vllm_evaluators.py"),
    (
        "docs/sweep.md",
        r"^adapterswap report|import sweep|recipe\.yaml",
        "evaluates for hours: tests/experiments/sweeps evaluates a little",
    ),
    ("docs/serving.md", r"^(sudo|journalctl|docker) ", "needs root, systemd or a container engine"),
    ("docs/serving.md", r"^# experts\.yaml", "tests/engines/serving/test_manifest.py"),
    ("*", r"convert_hf_to_gguf|^ollama ", "needs llama.cpp's sources or Ollama: tests/engines/exporting has llama.cpp"),
    ("docs/commands.md", r"_COMPLETE=", "changes the shell: tests/test_completion.py"),
    ("docs/commands.md", r"^# \.github", "a workflow file: a test below reads it"),
    ("docs/train.md", r"^selection:", "evaluates during training: tests/experiments/training has smaller runs"),
    (
        "docs/train.md",
        r"^(base_model|datasets|start):",
        "fragments: tests/experiments/training/test_recipe.py and test_start.py",
    ),
    ("examples/space/README.md", r"space/app", "starts a server: tests/real/test_space.py opens it in a browser"),
    ("examples/space/README.md", r"^mkdir|^cp ", "tests/real/test_space.py copies these files"),
    ("examples/live/README.md", r"chat\.py", "talks with its user: tests/engines/live/test_example.py"),
]

# Output that depends on training, and so on the processor: the step runs, but the numbers are not compared.
NOT_COMPARED = {("docs/compose.md", "diff math mine")}

# A page, a text in a step, and its replacement.
CHANGED: list[tuple[str, str, str]] = [
    # The same run with fewer problems.
    ("docs/evaluate.md", "--tasks", "--limit 1 --max-gen-toks 4 --tasks"),
    ("docs/evaluate.md", "limit=20", "limit=1, max_gen_toks=4"),
    ("docs/evaluate.md", "num_fewshot=2, batch_size=16", "num_fewshot=2, limit=1, max_gen_toks=4"),
    ("docs/live.md", "max_new_tokens=200", "max_new_tokens=2"),
    ("docs/sweep.md", "--out-path runs/swahili    ", "--out-path runs/swahili --dry-run"),
    # Alternatives that would write to one folder.
    ("docs/gguf.md", 'plan.export("math-swahili.gguf"', 'plan.export("math-swahili-python.gguf"'),
]

# YAML that is written to a file, found by its first words, and a command that reads it if the page has none.
FILES: dict[tuple[str, str], tuple[str, str | None]] = {
    ("docs/compose.md", "experts:"): ("recipe.yaml", None),
    ("docs/concepts.md", "experts:"): ("recipe.yaml", "adapterswap compose recipe.yaml -o composed"),
    ("docs/train.md", "extends:"): ("yoruba.yaml", "adapterswap train yoruba.yaml --dry-run"),
    ("docs/sweep.md", "base_model:"): ("swahili.yaml", "adapterswap recipes validate swahili.yaml"),
}  # fmt: skip

SIX_LAYERS = {"README.md", "docs/choosing.md"}
LAB = {"docs/compose.md", "docs/constructed.md", "docs/report.md", "docs/start.md"}


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if name not in ELSEWHERE and steps_of(name)]


def excuse(step: Step) -> int | None:
    """The number of the entry of NOT_RUN that a step matches."""
    numbers = (
        i for i, (page, pattern, _) in enumerate(NOT_RUN) if page in ("*", step.page) and re.search(pattern, step.text)
    )
    return next(numbers, None)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`worlds(32)` is a folder with a base of 32 layers and its experts."""
    made: dict[int, Path] = {}

    def world(layers: int) -> Path:
        if layers not in made:
            made[layers] = make_world(tmp_path_factory.mktemp(f"world-{layers}"), layers)
        return made[layers]

    return world


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, worlds: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The current folder, with the files that the page names."""
    page, here = request.getfixturevalue("page"), tmp_path / "here"
    shutil.copytree(worlds(6 if page in SIX_LAYERS else 32), here, symlinks=True)
    if page in LAB:
        shutil.copytree(request.getfixturevalue("small_lab_run"), here / "lab-run")
    monkeypatch.chdir(here)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    SETUPS.get(page, lambda: None)()
    return here


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", pages())
def test_a_page_runs_unchanged(page: str) -> None:
    reader = Reader(names_for(page))
    for step in steps_of(page):
        if excuse(step) is not None:
            continue
        follow(reader, changed(step, CHANGED)[0])


def test_the_readme_runs_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python code composes the experts that a clone has, without any model."""
    (step,) = (step for step in steps_of("README.md") if step.language == "python")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    Reader(names).follow(step)
    assert names["plan"].strip.splitlines()[2].split()[1] == 8 * "f" + 22 * "m"
    assert open_adapter("math-french").modules


def follow(reader: Reader, step: Step) -> None:
    """Run a step, or write its file; compare what it prints with what the page shows."""
    if step.language == "yaml":
        places = [place for (page, start), place in FILES.items() if page == step.page and step.text.startswith(start)]
        assert places, f"{step}\nName its file in FILES, or list it in NOT_RUN."
        name, command = places[0]
        Path(name).write_text(step.text, encoding="utf-8")
        if command:
            reader.follow(Step(step.page, step.line, "bash", command))
        return
    printed = reader.follow(step)
    if step.shown is not None and (step.page, step.text.removeprefix("adapterswap ")) not in NOT_COMPARED:
        check_shown(step, printed)


def test_every_exception_is_needed() -> None:
    """An entry that no step matches is stale."""
    steps = [step for page in pages() for step in steps_of(page)]
    assert set(range(len(NOT_RUN))) == {excuse(step) for step in steps} - {None}
    run = [step for step in steps if excuse(step) is None]
    assert set(range(len(CHANGED))) == set().union(*(changed(step, CHANGED)[1] for step in run))
    shown = {(step.page, step.text.removeprefix("adapterswap ")) for step in run if step.shown is not None}
    assert shown >= NOT_COMPARED


def test_the_tests_of_other_pages_exist() -> None:
    for page, test in ELSEWHERE.items():
        assert (ROOT / page).is_file()
        assert not test.startswith("tests/") or (ROOT / test).is_file(), page
