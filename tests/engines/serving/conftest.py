"""A pico base that vLLM can serve, experts for it, and answers of full weights, the reference of all serving tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import tolerance
from transformers import AutoModelForCausalLM

LAYERS, VOCABULARY = 6, 96
CONFIGS = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Mixed ranks, some modules only, plain LoRA beside rank-stabilized, and embeddings and head.
EXPERTS: dict[str, dict[str, Any]] = {
    "math": {"r": 8},
    "swahili": {"r": 8},
    "telugu": {"r": 4, "use_rslora": False, "target_modules": PROJECTIONS[:4]},
    "code": {"r": 16, "target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"]},
}


def make_expert(base: Path, folder: Path, *, seed: int, **options: Any) -> Path:
    settings = {"r": 8, "use_rslora": True, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"} | options
    settings.setdefault("lora_alpha", 2 * settings["r"])
    model = get_peft_model(load(base), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def served_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`served_base("llama")`, or with attention heads 16 wide "llama-16".

    A random pico model with a head of clear preferences, and a tokenizer of 96 words.
    """
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            torch.manual_seed(0)
            kind, _, head_dim = architecture.partition("-")
            config = CONFIGS[kind](
                vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
                num_attention_heads=64 // int(head_dim or 32), num_key_value_heads=1, max_position_embeddings=128,
                bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_config(config)
            model.lm_head.weight.data *= 20  # in a random model the best tokens are nearly tied, and rounding decides
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
            made[architecture] = tmp_path_factory.mktemp(f"served-{architecture}")
            model.save_pretrained(made[architecture])
            _save_tokenizer(made[architecture])
        return made[architecture]

    return make


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.fixture(scope="session")
def pristine(served_base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`pristine("llama")`: a folder of the experts, made once; tests that change experts use `experts`."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(f"experts-{architecture}")
            for seed, (name, options) in enumerate(EXPERTS.items()):
                make_expert(served_base(architecture), made[architecture] / name, seed=seed, **options)
        return made[architecture]

    return make


@pytest.fixture
def experts(pristine: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the Llama experts that a test may change."""
    return shutil.copytree(pristine("llama"), tmp_path / "experts")


class Reference:
    """Answers of full weights: layers of models merged by PEFT, put together in plain torch."""

    def __init__(self, base: Path, experts: Path) -> None:
        self._base = base
        self._model = load(base)
        self._weights = {"base": _clone(self._model)}
        for folder in sorted(experts.iterdir()):
            self._weights[folder.name] = _clone(PeftModel.from_pretrained(load(base), folder).merge_and_unload())

    def answer(
        self, zones: tuple[Any, ...], prompt: list[int], length: int
    ) -> tuple[list[int], list[dict[int, float]]]:
        """The greedy tokens and all log-probabilities of each step, for (task, language, b, u, t_b, t_u)."""
        self._model.load_state_dict(self._swap(*zones))
        tokens, steps = list(prompt), []
        for _ in range(length):
            with torch.no_grad():
                logits = self._model(torch.tensor([tokens])).logits[0, -1]
            best = torch.topk(logits, 2)
            # Twice the tolerance of log-probabilities: within it the order cannot turn.
            margin = 2 * tolerance(logits, depth=LAYERS)
            assert best.values[0] - best.values[1] > margin, "this prompt's best tokens are nearly tied: choose another"
            steps.append(dict(enumerate(torch.log_softmax(logits, -1).tolist())))
            tokens.append(int(best.indices[0]))
        return tokens[len(prompt) :], steps

    def _swap(
        self, task: str, language: str, bottom: int, top: int, bottom_transition: int = 0, top_transition: int = 0
    ) -> dict[str, torch.Tensor]:
        """Algorithm 1 on full weights; weights outside the layers are averaged."""
        mixed = {}
        for name, ours in self._weights[task].items():
            theirs = self._weights[language][name]
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
            if layer is None:
                mixed[name] = (ours + theirs) / 2
            elif layer < bottom or layer > LAYERS - 1 - top:
                mixed[name] = theirs
            elif layer < bottom + bottom_transition or layer > LAYERS - 1 - top - top_transition:
                mixed[name] = (ours + theirs) / 2
            else:
                mixed[name] = ours
        return mixed


def _clone(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
