"""A random pico Llama, as transformers saves it and as GGUF, and two random experts, so that the example runs offline.

    python examples/on_device/pico.py FOLDER

Its words are noise, but they change with the composition. You do not need this file with a real base:
llama.cpp's convert_hf_to_gguf.py makes the GGUF file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = "habari nyumba maji mtoto shule kitabu moja mbili tatu nne hello house water child school book one two three"
SPECIAL = [("<unk>", gguf.TokenType.UNKNOWN), ("<s>", gguf.TokenType.CONTROL), ("</s>", gguf.TokenType.CONTROL)]
TOKENS = [
    *SPECIAL,
    *((f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256)),
    *((f"▁{word}", gguf.TokenType.NORMAL) for word in WORDS.split()),
]
HEADS = 4


def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=HEADS,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    base.lm_head.weight.data[: -len(WORDS.split())] = 0  # it speaks in words
    base.save_pretrained(folder / "base")
    write_gguf(base, folder / "base.gguf")
    for name in ("math", "swahili"):
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        lora = LoraConfig(
            r=4, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"
        )
        model = get_peft_model(base, lora)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / "experts" / name)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write a Llama in float32, as llama.cpp's converter does for any model."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in TOKENS])
    writer.add_token_scores([-float(place) for place in range(len(TOKENS))])
    writer.add_token_types([kind for _, kind in TOKENS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if key.endswith(("q_proj.weight", "k_proj.weight")):  # halves of each head become neighbours
            values = values.reshape(HEADS, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(str(names.get_name(key, try_suffixes=(".weight",))), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where base, base.gguf and experts go")
    main(parser.parse_args().folder)
