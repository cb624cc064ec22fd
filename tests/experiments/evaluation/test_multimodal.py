"""Text tasks on multimodal bases, with a composition of adapters, beside plain torch with the adapter on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from pico_models import trained
from refusals import refused
from tolerances import near
from transformers import AutoModelForMultimodalLM

import adapterswap
from adapterswap.kit.errors import BaseModelError

from .conftest import byte_tokenizer

TEXT: dict[str, Any] = {
    "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 4, "hidden_size": 32}
QWEN_TOKENS = {"image_token_id": 270, "video_token_id": 271, "vision_start_token_id": 272, "vision_end_token_id": 273}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def qwen(**vision: Any) -> dict[str, Any]:
    return {"text_config": {**TEXT, "rope_parameters": ROPE}, "vision_config": {**QWEN_VISION, **vision}, **QWEN_TOKENS}


CONFIGS: dict[str, Callable[[], Any]] = {
    "LLaVA": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=270,
    ),
    "Qwen2-Audio": lambda: transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**TEXT).to_dict(),
        audio_config={"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
        audio_token_index=270,
    ),
    "Qwen2-VL": lambda: transformers.Qwen2VLConfig(**qwen(embed_dim=32)),
    "Qwen2.5-VL": lambda: transformers.Qwen2_5_VLConfig(
        **qwen(intermediate_size=48, out_hidden_size=32, fullatt_block_indexes=[1])
    ),
    "Qwen3-VL": lambda: transformers.Qwen3VLConfig(
        **qwen(intermediate_size=48, out_hidden_size=32, deepstack_visual_indexes=[0])
    ),
    "Idefics 3": lambda: transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**TEXT).to_dict(),
        vision_config=VISION,
        image_token_id=270,
        pad_token_id=0,
    ),
    "Mistral Small 3.1": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**TEXT, head_dim=8).to_dict(),
        vision_config={"model_type": "pixtral", "head_dim": 8, **VISION},
        image_token_index=270,
    ),
    "Gemma 3": lambda: transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**TEXT, head_dim=8).to_dict(),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=270,
        boi_token_index=271,
        eoi_token_index=272,
    ),
}
QUESTIONS, CHOICES = ["Maji", "Haba na haba hujaza kibaba"], ["ndiyo", "hapana kabisa"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"q": question}) + "\n" for question in QUESTIONS))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
    (folder / "write.yaml").write_text(
        head + 'task: pico_write\noutput_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: a\n'
        "generation_kwargs: {until: [], max_gen_toks: 5}\nmetric_list: [{metric: exact_match}]\n"
    )
    (folder / "choose.yaml").write_text(
        head + 'task: pico_choose\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_target: 0\n'
        f"doc_to_choice: {json.dumps(CHOICES)}\nmetric_list: [{{metric: acc}}]\n"
    )
    return folder


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    output: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0].double()
    return output


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_composition_answers_texts(name: str, tasks: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, tokenizer = tmp_path / "base", byte_tokenizer()
    model = AutoModelForMultimodalLM.from_config(CONFIGS[name]()).float()
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    layers = r".*(language_model|text_model).*layers\.\d+\.(self_attn\.[qv]_proj|mlp\.up_proj)"
    experts = []
    for seed, expert in enumerate(("math", "swahili")):
        options = LoraConfig(r=4, target_modules=layers, task_type="CAUSAL_LM")
        loaded = AutoModelForMultimodalLM.from_pretrained(base)
        experts.append(trained(loaded, options, tmp_path / expert, seed=seed, scale=0.2))

    plan = adapterswap.layer_swap(*experts, base_model=base, bottom=1, top=1)
    result = adapterswap.evaluate(base, ["pico_write", "pico_choose"], plan=plan, include_path=tasks)

    plan.write(tmp_path / "composed")
    peft_model = PeftModel.from_pretrained(AutoModelForMultimodalLM.from_pretrained(base), tmp_path / "composed").eval()
    for sample in result.samples:
        ids = tokenizer(sample.doc["q"])["input_ids"]
        if sample.task == "pico_write":
            written: list[int] = []
            while len(written) < 5 and written[-1:] != [tokenizer.eos_token_id]:
                written.append(int(logits(peft_model, ids + written)[-1].argmax()))
            assert sample.output == tokenizer.decode(written, skip_special_tokens=True)
            continue
        expected = []
        for choice in CHOICES:
            continuation = tokenizer(f" {choice}")["input_ids"]
            steps = logits(peft_model, ids + continuation)[len(ids) - 1 : -1].log_softmax(-1)
            expected.append(float(steps[torch.arange(len(continuation)), torch.tensor(continuation)].sum()))
        assert [number for number, _ in sample.output] == near(expected, depth=4)


def test_a_base_that_continues_no_texts_says_its_type(tasks: Path, tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=280, d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with refused(BaseModelError, "base_model", match="t5"):
        adapterswap.evaluate(tmp_path, ["pico_write"], include_path=tasks)
