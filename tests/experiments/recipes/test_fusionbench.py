"""benchmarks/fusionbench.py on a small T5: made-up prompts and rows in the form of FusionBench's and GLUE's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from importing import loaded
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from adapterswap.core.methods.registry import BUILT_IN

from .standins import BYTES, SPECIAL, byte_tokenizer

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "fusionbench.py"
COLUMNS = {
    "cola": ("sentence",), "mnli": ("premise", "hypothesis"), "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"), "qqp": ("question1", "question2"), "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",), "stsb": ("sentence1", "sentence2"),
}  # fmt: skip
ROWS = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, an adapter for each task, rows, a recipe, and a package with prompts."""
    folder = tmp_path_factory.mktemp("fusion")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(SPECIAL + BYTES), d_model=16, d_ff=48, d_kv=4, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    for task in COLUMNS:
        lora = LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, lora_alpha=8, target_modules=["q", "v"])
        model = get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(folder / "base"), lora)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(folder / task)
    (folder / "rows").mkdir()
    for task, columns in COLUMNS.items():
        rows = [
            {**{column: f"{column} {number}" for column in columns}, "idx": number,
             "label": number * 0.8 if task == "stsb" else number % (3 if task == "mnli" else 2)}
            for number in range(ROWS)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rows" / f"{task}.jsonl").write_text(text, encoding="utf-8")
    experts = "".join(f"  {task}: {folder / task}\n" for task in COLUMNS)
    recipe = f"extends: compose/papers/fusion-bench\nbase_model: {folder / 'base'}\nexperts:\n{experts}"
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    prompts = {
        task: {
            "input_text": f"Is it {task}? " + " ".join(f"'{{{column}}}'" for column in columns),
            "target_text": "{:.1f}" if task == "stsb" else {"0": "no", "1": "yes", "2": "maybe"},
        }
        for task, columns in COLUMNS.items()
    }
    package = folder / "site" / "fusion_bench"
    module = package / "tasks" / "flan_t5_text_generation" / "glue_prompt_templates.py"
    module.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('lightning is not installed')", encoding="utf-8")
    module.write_text(f"glue_prompt_templates = {prompts!r}\n", encoding="utf-8")
    return folder


@pytest.fixture
def bench(world: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(world / "site"))
    return loaded(BENCHMARK)


def run(bench: Any, world: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    words = ["--recipe", str(world / "recipe.yaml"), "--rows", str(world / "rows"), *more]
    monkeypatch.setattr("sys.argv", ["fusionbench.py", *words])
    bench.main()


def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_length=10, do_sample=False)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def test_all_rows_of_the_table(
    bench: Any, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(bench, world, monkeypatch, str(tmp_path / "out"), "--limit", "4")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| | {' | '.join(COLUMNS)} | mean |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["pretrained", "individual", *bench.METHODS]
    assert all(line.count("|") == 11 for line in lines)
    monkeypatch.setattr(bench, "merge", None)
    run(bench, world, monkeypatch, str(tmp_path / "out"), "--limit", "4", "--only", "average")  # finished: not computed
    assert capsys.readouterr().out.splitlines()[2:] == [lines[2 + 2]]
    with pytest.raises(TypeError):
        run(bench, world, monkeypatch, str(tmp_path / "out"), "--limit", "5", "--only", "average")


def test_every_method_of_eight_experts_is_compared(bench: Any) -> None:
    eight = {
        name for name, method in BUILT_IN.items()
        if method.in_rules and method.sides[0] <= 8 <= (method.sides[1] or 8)
    }  # fmt: skip
    assert {fields["method"] for fields in bench.METHODS.values()} == eight


def test_scores_are_those_of_single_answers(bench: Any, world: Path) -> None:
    """With one prompt at a time, without padding; the right answer to some of them is what the model says."""
    model = AutoModelForSeq2SeqLM.from_pretrained(world / "base").eval()
    tokenizer = AutoTokenizer.from_pretrained(world / "base")
    prompts = tuple(f"{'long ' * (number % 5)}question {number}" for number in range(40))
    said = [answer(model, tokenizer, prompt) for prompt in prompts]
    wanted = tuple(text if number % 4 else "another" for number, text in enumerate(said))
    judge = bench.Judge(str(world / "base"), [bench.Task("cola", prompts, wanted)], "cpu")
    assert judge.scores(world / "base") == {"cola": 75.0}
    ratings = bench.Task("stsb", ("a", "b", "c", "d"), ("1.0", "2.0", "3.0", "4.0"))
    assert ratings.score(["0.1", "0.2", "x", "0.3"]) == pytest.approx(0.4)  # ranks 2 3 1 4 beside 1 2 3 4


def test_merged_weights_are_fusion_benchs(bench: Any, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its formulas, written out on the whole state: λ·Σ ΔW, and TIES over one vector of all parameters."""
    base = AutoModelForSeq2SeqLM.from_pretrained(world / "base").state_dict()
    changed = {}
    for task in COLUMNS:
        model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(world / "base"), world / task)
        changed[task] = model.merge_and_unload().state_dict()
    vectors = torch.stack(
        [torch.cat([(state[key] - base[key]).flatten() for key in base]) for state in changed.values()]
    )
    assert (vectors != 0).float().mean() < 0.2  # as for Flan-T5-base
    kept = round(0.2 * vectors.shape[1])
    threshold = vectors.abs().kthvalue(vectors.shape[1] - kept, dim=1, keepdim=True).values
    trimmed = vectors * (vectors.abs() >= threshold)
    agreeing = torch.where(trimmed * trimmed.sum(0).sign() > 0, trimmed, 0)
    wanted = {
        "average": vectors.mean(0),
        "task arithmetic": 0.3 * vectors.sum(0),
        "TIES as there": 0.3 * agreeing.sum(0),
    }
    found = {}

    def scores(self: Any, folder: Path, only: str | None = None) -> dict[str, float]:
        state = AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
        found["last"] = torch.cat([(state[key] - base[key]).flatten() for key in base])
        return {}

    monkeypatch.setattr(bench.Judge, "scores", scores)
    experts = {task: str(world / task) for task in COLUMNS}
    for name, compute in bench.rows_of(bench.Judge(str(world / "base"), [], "cpu"), experts):
        if name in wanted:
            compute()
            assert torch.allclose(found["last"], wanted[name], atol=1e-5), name
