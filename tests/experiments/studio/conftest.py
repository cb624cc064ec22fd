"""Pico models of the lab with random experts, a studio over them, and its page in headless Chromium."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from adapterswap.experiments.lab.bases import write_base
from adapterswap.experiments.lab.scenes import SCENES
from adapterswap.experiments.lab.study import LAB_FORMAT
from adapterswap.experiments.studio.workspace import Workspace

HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


def random_expert(base: Path, folder: Path, seed: int, size: float = 0.08) -> Path:
    """A random LoRA of the lab's base."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * size
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="session")
def lab_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of an `adapterswap lab` run, with random experts."""
    place = tmp_path_factory.mktemp("studio") / "lab-run"
    seed = place / "seed-0"
    seed.mkdir(parents=True)
    write_base(SCENES["gap"], 0, seed / "base")
    for number, name in enumerate(("math", "language"), 1):
        random_expert(seed / "base", seed / name, number)
    (place / "results.json").write_text(json.dumps({"format": LAB_FORMAT, "scene": {"name": "gap"}}))
    return place


@pytest.fixture(scope="session")
def workspace(lab_run: Path) -> Workspace:
    return Workspace.of_lab(lab_run, device="cpu")


@dataclass(frozen=True)
class Served:
    url: str
    workspace: Workspace


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Workspace], str]]:
    """`serve(workspace)` is the address of its page, until the tests end."""
    pytest.importorskip("gradio")
    from adapterswap.experiments.studio.server import serve_page

    urls: list[str] = []
    ends = []

    def start(workspace: Workspace) -> str:
        ends.append(serve_page(workspace, on_ready=urls.append, wait=False))
        return urls[-1]

    yield start
    for end in ends:
        end()


@pytest.fixture(scope="session")
def served(serve: Callable[[Workspace], str], workspace: Workspace) -> Served:
    return Served(serve(workspace), workspace)


Visit = Callable[..., Any]


@pytest.fixture(scope="session")
def context(browser: Any) -> Iterator[Any]:
    """One for all tests, which keeps the page's scripts."""
    context = browser.contexts[0]
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield context
    context.clear_permissions()


@pytest.fixture
def visit(context: Any, served: Served) -> Iterator[Visit]:
    """`visit("?bottom=2")` is the studio's page once it has loaded; requests to other hosts fail the test."""
    said: list[str] = []
    pages = []

    def opened(query: str = "", *, url: str = served.url, width: int = 1280, scheme: str = "light") -> Any:
        page = context.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on(
            "request",
            lambda request: None if request.url.startswith((url, "blob:", "data:")) else said.append(request.url),
        )
        page.goto(url + query)
        ends = (
            "#written .answers[aria-busy=false] .answer",
            "#written .problem",
            "#written .timing",
            "#problem .problem",
        )
        page.locator(", ".join(f"{end}:visible" for end in ends)).first.wait_for()
        return page

    yield opened
    for page in pages:
        if not page.is_closed():
            page.evaluate("localStorage.clear()")
            page.close()
    # Messages of Gradio's page about streams that a reload interrupted.
    assert [line for line in said if "AbortError" not in line and "errored out" not in line] == []
