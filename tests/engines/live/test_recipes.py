"""The code for PEFT and transformers in docs/adapters.md, run unchanged."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from tolerances import close
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedTokenizerFast

import adapterswap as asw

PAGE = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## PEFT and transformers\n")[2].partition("\n## ")[0]
RECIPES = dict(
    zip(("load_adapter", "pipeline", "hotswap"), re.findall(r"```python\n(.*?)```", SECTION, re.S), strict=True)
)


@pytest.fixture
def place(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with what the page names: the base with a tokenizer, and two compositions."""
    shutil.copytree(base("llama"), tmp_path / "org" / "base")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path / "org" / "base")
    monkeypatch.chdir(tmp_path)
    math = expert("llama", seed=1)
    for name, seed in (("swahili", 2), ("telugu", 3)):
        plan = asw.layer_swap(math, expert("llama", seed=seed, r=4), bottom=1, top=1, bottom_transition=1)
        adapter = asw.compose(plan.composition.model_copy(update={"base_model": "org/base"}), plan.experts)
        adapter.write(f"math-{name}", layout="portable")
    return tmp_path


def composed(name: str) -> PeftModel:
    """The composition as PEFT runs it."""
    return PeftModel.from_pretrained(load_base(Path("org/base")), name).eval()


def run_recipe(name: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    exec(compile(RECIPES[name], f"docs/adapters.md: {name}", "exec"), result)
    return result


@pytest.mark.usefixtures("place")
def test_transformers_loads_a_composition() -> None:
    model = run_recipe("load_adapter")["model"]
    close(logits(model.eval()), logits(composed("math-swahili")), depth=LAYERS)


@pytest.mark.usefixtures("place")
def test_a_pipeline_generates_with_it() -> None:
    answer = run_recipe("pipeline")["answer"]
    prompt = torch.tensor([[5, 9, 14]])
    tokens = composed("math-swahili").generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    assert answer[0]["generated_text"].removeprefix("w5 w9 w14").split() == [
        f"w{token}" for token in tokens[0, 3:].tolist()
    ]


@pytest.mark.usefixtures("place")
def test_a_compiled_model_is_swapped_without_compiling_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    result = run_recipe("hotswap")
    for called, name in (("first", "math-swahili"), ("second", "math-telugu")):
        with torch.no_grad():
            close(result[called], composed(name)(result["tokens"]).logits, depth=LAYERS)
    assert counter.frame_count == 1
    torch._dynamo.reset()
