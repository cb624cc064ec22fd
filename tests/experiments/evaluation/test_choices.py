"""Contexts that are read once for all of their continuations, compared with a plain forward pass of every text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pico_models import noisy
from tolerances import near
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config, LlamaConfig, MambaConfig, MistralConfig

from adapterswap.experiments.evaluation.choices import SharedContexts, answer_shared, shared_contexts

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.4,
}  # fmt: skip
PLAIN = {
    "llama": LlamaConfig(**SIZES),
    "gemma": GemmaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4),
}
OTHER = {
    "sliding window": MistralConfig(**SIZES, sliding_window=4),
    "no keys and values": MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4),
}
REQUESTS = [
    ((3, 4, 5, 6, 7), (8, 9)), ((3, 4, 5, 6, 7), (8,)), ((3, 4, 5, 6, 7), (10, 11, 12)), ((9, 3, 4, 4, 2), (7, 7)),
    ((9, 3, 4, 4, 2), (8,)), ((5, 6), (1, 2, 3, 4)), ((5, 6), (1, 3, 3, 4)), ((7, 8, 9), (1,)), ((7, 8, 9), (2,)),
]  # fmt: skip


def model_of(config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def answered(model: Any, size: int = 2) -> dict[int, tuple[float, bool]]:
    """What `answer_shared` gives; empty if it left everything to the harness."""
    answers: dict[int, tuple[float, bool]] = {}
    with torch.no_grad():
        shared = shared_contexts(REQUESTS, 100)
        finished = answer_shared(SharedContexts(model), REQUESTS, shared, size=size, on_answer=answers.__setitem__)
    assert finished == bool(answers)
    return answers


@torch.no_grad()
def read_whole(model: Any, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
    logits = model(input_ids=torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    tokens = torch.tensor(continuation)
    likelihood = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].sum().item()
    return likelihood, bool((logits.argmax(-1) == tokens).all())


@pytest.mark.parametrize("kind", PLAIN)
def test_the_answers_are_those_of_whole_texts(kind: str) -> None:
    model = model_of(PLAIN[kind])
    answers = answered(model)
    # The last two differ in their last token only: the harness reads them together already.
    assert sorted(answers) == list(range(7))
    for index, (likelihood, greedy) in answers.items():
        expected, expected_greedy = read_whole(model, *REQUESTS[index])
        assert likelihood == near(expected, depth=8)
        assert greedy == expected_greedy


def test_a_likelihood_in_bfloat16_is_as_fine_as_its_logits() -> None:
    model = model_of(PLAIN["llama"]).bfloat16()
    context, continuation = REQUESTS[1]
    with torch.no_grad():
        read = SharedContexts(model).read([context])
    assert read is not None
    expected = read[1][0].float().log_softmax(-1)[continuation[0]].item()
    assert answered(model, size=1)[1][0] == near(expected)
    assert torch.tensor(expected).bfloat16().item() != near(expected)


def test_an_adapter_on_top_takes_part() -> None:
    model = get_peft_model(model_of(PLAIN["llama"]), LoraConfig(target_modules="all-linear", r=2))
    noisy(model, 1, scale=0.5)
    with model.disable_adapter():
        without = answered(model)
    answers = answered(model)
    for index, (likelihood, greedy) in answers.items():
        expected, expected_greedy = read_whole(model, *REQUESTS[index])
        assert likelihood == near(expected, depth=8)
        assert greedy == expected_greedy
        assert abs(likelihood - without[index][0]) > 0.01


@pytest.mark.parametrize("kind", OTHER)
def test_other_caches_are_left_to_the_harness(kind: str) -> None:
    assert answered(model_of(OTHER[kind])) == {}


def test_contexts_that_do_not_fit_are_left_to_the_harness() -> None:
    assert set(shared_contexts(REQUESTS, 7)) == {(9, 3, 4, 4, 2), (5, 6)}
    assert set(shared_contexts(REQUESTS, 5)) == set()
