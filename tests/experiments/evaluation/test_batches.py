"""Answers in batches, beside plain torch for each row alone, and prompts that a model cannot read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from refusals import refused
from tolerances import near
from transformers import AutoModelForCausalLM

from adapterswap.experiments.evaluation import EvaluationResult, Settings, evaluate_model
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.kit.errors import ArgumentError, BaseModelError, RunError

from .conftest import byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}

CONFIGS: dict[str, Any] = {
    "Llama": transformers.LlamaConfig(**SIZES),
    "Mamba": transformers.MambaConfig(**SIZES, state_size=4),
    "RWKV": transformers.RwkvConfig(**SIZES, attention_hidden_size=32),
    "MiniMax": transformers.MiniMaxConfig(**SIZES, **MIXTURE, layer_types=["linear_attention", "full_attention"]),
    "LongRoPE": transformers.Phi3Config(
        **SIZES, num_key_value_heads=2, original_max_position_embeddings=24, rope_parameters=LONGROPE
    ),
    "dynamic": transformers.LlamaConfig(
        **SIZES | {"max_position_embeddings": 24},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}
ONE_BY_ONE = {"RWKV": ["generate_until"], "MiniMax": ["generate_until"]}

QUESTIONS = [
    "Maji",
    "Haba na haba hujaza kibaba",
    "Asiyesikia",
    "Ng'ombe wa maskini hazai, na akizaa",
    "a",
    "Pole pole ya",
]
CHOICES = ["ndiyo", "hapana kabisa"]


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task that generates and one that compares choices, over the same questions."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"q": question}) + "\n" for question in QUESTIONS))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
    (folder / "write.yaml").write_text(
        head + 'task: pico_write\noutput_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: a\n'
        "generation_kwargs: {until: [], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]\n"
    )
    (folder / "choose.yaml").write_text(
        head + 'task: pico_choose\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_target: 0\n'
        f"doc_to_choice: {json.dumps(CHOICES)}\nmetric_list: [{{metric: acc}}]\n"
    )
    return folder


@torch.no_grad()
def written(model: Any, ids: list[int], tokens: int) -> str:
    """What the model generates for one prompt alone."""
    row = torch.tensor([ids])
    answer = model.generate(
        input_ids=row, attention_mask=torch.ones_like(row), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return str(byte_tokenizer().decode(answer[0, len(ids) :], skip_special_tokens=True))


@torch.no_grad()
def likelihood(model: Any, ids: list[int], continuation: list[int]) -> float:
    """The log-likelihood of a continuation, of one row alone."""
    logits = model(input_ids=torch.tensor([ids + continuation[:-1]])).logits[0, len(ids) - 1 :].double()
    return float(logits.log_softmax(-1)[torch.arange(len(continuation)), torch.tensor(continuation)].sum())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["RWKV", "Llama", "LongRoPE", "dynamic", "MiniMax", "Mamba"])
def test_answers_do_not_depend_on_the_batch(name: str, tasks: Path) -> None:
    model, tokenizer = model_of(CONFIGS[name]), byte_tokenizer()
    result = evaluate_model(model, tokenizer, ["pico_write", "pico_choose"], Settings(include_path=tasks, batch_size=8))

    for sample in result.samples:
        ids = tokenizer(sample.doc["q"])["input_ids"]
        alone = model_of(CONFIGS[name])  # whose rotary embeddings have read nothing longer
        if sample.task == "pico_write":
            assert sample.output == written(alone, ids, 6)
            continue
        expected = [likelihood(alone, ids, tokenizer(f" {choice}")["input_ids"]) for choice in CHOICES]
        assert [number for number, _ in sample.output] == near(expected, depth=2, scale=max(map(abs, expected)))

    assert result.settings.get("one_by_one", []) == ONE_BY_ONE.get(name, [])


def test_an_encoder_scores_no_texts(tasks: Path) -> None:
    model = model_of(transformers.BertConfig(**SIZES))
    with refused(BaseModelError, "base_model"):
        evaluate_model(model, byte_tokenizer(), ["pico_choose"], Settings(include_path=tasks))


LIMITED: dict[str, tuple[Any, int]] = {
    "MPT, whose ALiBi is a table": (
        transformers.MptConfig(vocab_size=259, d_model=32, n_heads=4, n_layers=2, max_seq_len=32),
        32,
    ),
    "OPT, whose table begins at 2": (
        transformers.OPTConfig(**SIZES | {"max_position_embeddings": 32}, ffn_dim=48, word_embed_proj_dim=32),
        32,
    ),
    "GPT-2": (transformers.GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=32), 32),
    "a multimodal base": (
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**SIZES | {"max_position_embeddings": 32}),
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28,
                patch_size=14,
            ),
            image_token_index=258,
        ),
        32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.parametrize("task", ["pico_write", "pico_choose"])
def test_a_prompt_that_does_not_fit_is_refused_before_it_is_asked(name: str, task: str, tasks: Path) -> None:
    config, longest = LIMITED[name]
    kind = transformers.AutoModelForMultimodalLM if name == "a multimodal base" else AutoModelForCausalLM
    model = kind.from_config(config).eval()
    asked: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    parameter = "max_gen_toks" if task == "pico_write" else "num_fewshot"

    with refused(ArgumentError, parameter, match=f"{longest} tokens"):
        evaluate_model(model, byte_tokenizer(), [task], Settings(include_path=tasks))
    assert max(width for _, width in asked) <= 24 if asked else True


def test_a_recurrent_model_reads_any_length(tasks: Path) -> None:
    model, tokenizer = model_of(CONFIGS["RWKV"]), byte_tokenizer()
    (row,) = preview(tokenizer, model.config, ["pico_write"], Settings(include_path=tasks))
    assert row.room is None
    result = evaluate_model(
        model, tokenizer, ["pico_write"], Settings(include_path=tasks, system_instruction="x" * 3000)
    )
    assert len(result.samples[0].prompt) > 3000


def evaluated(tasks: Path) -> Callable[..., EvaluationResult]:
    def run(model: Any, task: str = "pico_write", **options: Any) -> EvaluationResult:
        return evaluate_model(model, byte_tokenizer(), [task], Settings(include_path=tasks, **options))

    return run


def test_max_length_replaces_what_the_config_states(tasks: Path) -> None:
    run = evaluated(tasks)
    model = model_of(CONFIGS["Llama"])
    with refused(ArgumentError, "max_gen_toks", match="20 tokens"):
        run(model, max_length=20)

    long = {"system_instruction": "x" * 100}  # the config states 64
    with refused(ArgumentError, "max_gen_toks"):
        run(model, **long)
    result = run(model, **long, max_length=200)
    assert result.settings["max_length"] == 200
    ids = byte_tokenizer()(result.samples[0].prompt)["input_ids"]
    assert result.samples[0].output == written(model, ids, 6)


def test_max_length_cannot_exceed_what_the_code_reads(tasks: Path) -> None:
    run, long = evaluated(tasks), {"system_instruction": "x" * 100, "max_length": 200}
    with refused(ArgumentError, "max_length"):
        run(model_of(LIMITED["OPT, whose table begins at 2"][0]), **long)
    with refused(RunError, "max_length"):
        run(model_of(LIMITED["MPT, whose ALiBi is a table"][0]), **long)
    with refused(ArgumentError, "max_length"):
        run(model_of(CONFIGS["Llama"]), max_length=1)
