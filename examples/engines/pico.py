"""A random pico Llama, two random experts and two tasks, so that the example runs offline.

    python examples/engines/pico.py FOLDER

Its answers are noise, but they change with the composition. You do not need this file with a real base.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCE = "habari nyumba maji mtoto shule kitabu moja mbili tatu nne sawa asante hello house water child school book"
WORDS = SENTENCE.split()
SPECIAL = ["<pad>", "<end>", "<unknown>"]
TASKS = {
    "words_generate": 'output_type: generate_until\ndoc_to_target: "maji"\n'
    "generation_kwargs: {until: [nne], do_sample: false, max_gen_toks: 24}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    "words_choose": "output_type: multiple_choice\ndoc_to_choice: [maji, nyumba, house, water]\ndoc_to_target: 0\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
}


def main(folder: Path, documents: int) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(SPECIAL + WORDS)}, unk_token="<unknown>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder / "base")
    config = LlamaConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=2, initializer_range=0.2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    for name in ("math", "swahili"):
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        lora = LoraConfig(r=4, lora_alpha=4, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, lora)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name)
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(4, 12)))} for _ in range(documents)]
    (tasks / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = "dataset_path: json\ndataset_kwargs: {data_files: {test: words.jsonl}}"
    for name, text in TASKS.items():
        shared = f'task: {name}\n{data}\ntest_split: test\nnum_fewshot: 0\ndoc_to_text: "{{{{text}}}}"\n'
        (tasks / f"{name}.yaml").write_text(shared + text + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=16)
    options = parser.parse_args()
    main(options.folder, options.documents)
