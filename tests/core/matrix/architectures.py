"""The architectures of the matrix: pico models of transformers 5, 32 wide and five layers deep.

Every entry also says by hand, for the reference, what the library has to find out by itself: which modules are
attention, and where the language model's layers are. Nothing here is taken from the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

__all__ = ["ARCHITECTURES", "LAYERS", "NOTHING", "VOCABULARY", "Architecture", "build"]

LAYERS, WIDTH, VOCABULARY = 5, 32, 64

_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **_TOKENS,
}  # fmt: skip
_MOE = {**_LLAMA, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_CLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A pico model, and what the reference has to know of it.

    Attributes:
        family: dense, conv1d, moe, hybrid or multimodal.
        config: makes the config.
        layers: regex of a module in one of the language model's layers; its first group is the layer's number.
        attention: regex of the modules that are attention; all others in the layers are not.
        model_class: the auto class that builds it.
        linear: LoRA targets of an adapter on all linear layers, as a user would name them for PEFT.
        v4: what transformers 4 called the modules: (regex of today's name, replacement), the first match counts.
        v4_experts: what it called one projection of one expert: (layer, expert) to the names of gate, up and down.
        text_only: what the same decoder's layers are called in its text-only model, likewise.
    """

    family: str
    config: Callable[[], Any]
    layers: str = r"model\.layers\.(\d+)\."
    attention: str = r"\.self_attn\."
    model_class: Any = transformers.AutoModelForCausalLM
    linear: str | tuple[str, ...] = "all-linear"
    v4: tuple[tuple[str, str], ...] = ()
    v4_experts: Callable[[int, int], tuple[str, str, str]] | None = None
    text_only: tuple[str, str] | None = None

    def layer_of(self, module: str) -> int | None:
        """The language model's layer that holds the module; None outside the layers."""
        match = re.match(self.layers, module)
        return int(match[1]) if match else None

    def is_attention(self, module: str) -> bool:
        return re.search(self.attention, module) is not None


def _text(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**{**_LLAMA, **changes})


def _moe(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**{**_MOE, **changes})


def _own(name: str, **options: Any) -> Callable[[], Any]:
    """For configs with field names of their own."""
    return lambda: getattr(transformers, f"{name}Config")(**options)


def _experts(block: str) -> Callable[[int, int], tuple[str, str, str]]:
    return lambda layer, expert: (
        f"model.layers.{layer}.{block}.experts.{expert}.gate_proj",
        f"model.layers.{layer}.{block}.experts.{expert}.up_proj",
        f"model.layers.{layer}.{block}.experts.{expert}.down_proj",
    )


def _mixtral_experts(layer: int, expert: int) -> tuple[str, str, str]:
    stem = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
    return f"{stem}.w1", f"{stem}.w3", f"{stem}.w2"


_V4_LANGUAGE = ((r"^model\.language_model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head"))
_V4_LLAVA = (*_V4_LANGUAGE, (r"^model\.vision_tower\.", "vision_tower.vision_model."), (r"^model\.", ""))
_V4_MISTRAL3 = (*_V4_LANGUAGE, (r"^model\.", ""))
_V4_QWEN_VL = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
_TEXT_ONLY = (r"^model\.language_model\.", "model.")
NOTHING = r"(?!)"  # a regex that matches nothing: state-space blocks are not attention
_JAMBA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj", "x_proj", "out_proj")
_NEMOTRON = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj")

_VISION = transformers.AutoModelForImageTextToText
_LANGUAGE = r"model\.language_model\.layers\.(\d+)\."

ARCHITECTURES: dict[str, Architecture] = {
    # Dense
    "llama": Architecture("dense", _text("Llama")),
    "mistral": Architecture("dense", _text("Mistral")),
    "qwen2": Architecture("dense", _text("Qwen2", tie_word_embeddings=True)),
    "qwen3": Architecture("dense", _text("Qwen3", head_dim=8)),
    "gemma": Architecture("dense", _text("Gemma", head_dim=8)),
    "gemma2": Architecture("dense", _text("Gemma2", head_dim=8)),
    "gemma3_text": Architecture("dense", _text("Gemma3Text", head_dim=8)),
    "phi": Architecture("dense", _text("Phi")),
    "phi3": Architecture("dense", _text("Phi3")),
    "falcon": Architecture(
        "dense",
        _own("Falcon", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
             new_decoder_architecture=True, num_kv_heads=2, **_TOKENS),
        layers=r"transformer\.h\.(\d+)\.", attention=r"\.self_attention\.",
    ),
    "gpt_neox": Architecture(
        "dense", _text("GPTNeoX"), layers=r"gpt_neox\.layers\.(\d+)\.", attention=r"\.attention\."
    ),
    "gptj": Architecture(
        "dense", _own("GPTJ", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, rotary_dim=4,
                      n_positions=64, **_TOKENS),
        layers=r"transformer\.h\.(\d+)\.", attention=r"\.attn\.",
    ),
    "opt": Architecture(
        "dense", _own("OPT", vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=48, num_hidden_layers=LAYERS,
                      num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=WIDTH, **_TOKENS),
        layers=r"model\.decoder\.layers\.(\d+)\.",
    ),
    "bloom": Architecture(
        "dense", _own("Bloom", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=4, **_TOKENS),
        layers=r"transformer\.h\.(\d+)\.", attention=r"\.self_attention\.",
    ),
    "mpt": Architecture(
        "dense", _own("Mpt", vocab_size=VOCABULARY, d_model=WIDTH, n_layers=LAYERS, n_heads=4, max_seq_len=64,
                      expansion_ratio=2),
        layers=r"transformer\.blocks\.(\d+)\.", attention=r"\.attn\.",
    ),
    "stablelm": Architecture("dense", _text("StableLm")),
    "cohere": Architecture("dense", _text("Cohere")),
    "cohere2": Architecture("dense", _text("Cohere2")),
    "olmo2": Architecture("dense", _text("Olmo2")),
    "granite": Architecture("dense", _text("Granite")),
    "starcoder2": Architecture("dense", _text("Starcoder2")),
    # Conv1D: weights stored in×out
    "gpt2": Architecture(
        "conv1d", _own("GPT2", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64,
                       **_TOKENS),
        layers=r"transformer\.h\.(\d+)\.", attention=r"\.attn\.",
    ),
    "openai_gpt": Architecture(
        "conv1d", _own("OpenAIGPT", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64),
        layers=r"transformer\.h\.(\d+)\.", attention=r"\.attn\.",
    ),
    # Mixtures of experts
    "mixtral": Architecture("moe", _moe("Mixtral"), v4_experts=_mixtral_experts),
    "qwen2_moe": Architecture("moe", _moe("Qwen2Moe", shared_expert_intermediate_size=24), v4_experts=_experts("mlp")),
    "qwen3_moe": Architecture("moe", _moe("Qwen3Moe", head_dim=8, decoder_sparse_step=1), v4_experts=_experts("mlp")),
    "olmoe": Architecture("moe", _moe("Olmoe"), v4_experts=_experts("mlp")),
    "granitemoe": Architecture("moe", _moe("GraniteMoe")),
    "deepseek_v3": Architecture(
        "moe", _moe("DeepseekV3", num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, n_group=2,
                    topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4,
                    qk_nope_head_dim=4,
                    v_head_dim=8), v4_experts=_experts("mlp")),
    # Hybrids and state-space models
    "mamba": Architecture(
        "hybrid", _own("Mamba", vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=LAYERS,
                       conv_kernel=4, time_step_rank=4, **_TOKENS),
        layers=r"backbone\.layers\.(\d+)\.", attention=NOTHING, linear=("in_proj", "x_proj")),
    "falcon_mamba": Architecture(
        "hybrid", _own("FalconMamba", vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=LAYERS,
                       conv_kernel=4, time_step_rank=4, **_TOKENS),
        layers=r"backbone\.layers\.(\d+)\.", attention=NOTHING, linear=("in_proj", "x_proj")),
    "jamba": Architecture(
        "hybrid", _moe("Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                       mamba_d_state=4, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4),
        linear=_JAMBA, v4_experts=_experts("feed_forward")),
    "bamba": Architecture(
        "hybrid", _text("Bamba", attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1,
                        mamba_d_state=4, mamba_d_conv=4, mamba_expand=2),
    ),
    "nemotron_h": Architecture(
        "hybrid", _text("NemotronH", layers_block_type=["mamba", "attention", "mlp", "mamba", "attention"], head_dim=8,
                        mamba_num_heads=8, mamba_head_dim=8, n_groups=1, ssm_state_size=4, conv_kernel=4, expand=2),
        layers=r"(?:backbone|model)\.layers\.(\d+)\.", attention=r"\.mixer\.[qkvo]_proj", linear=_NEMOTRON,
        v4=((r"^model\.", "backbone."),)),
    "qwen3_next": Architecture(
        "hybrid", _moe("Qwen3Next", head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
                       linear_value_head_dim=8, linear_conv_kernel_dim=4, shared_expert_intermediate_size=24,
                       layer_types=["linear_attention", "full_attention"] * 2 + ["linear_attention"]),
        attention=r"\.(self_attn|linear_attn)\.", v4_experts=_experts("mlp")),
    "qwen3_5": Architecture(
        "hybrid", lambda: transformers.Qwen3_5TextConfig(
            **{**_LLAMA, "head_dim": 8}, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_conv_kernel_dim=4,
            layer_types=["linear_attention", "full_attention"] * 2 + ["linear_attention"]),
        attention=r"\.(self_attn|linear_attn)\.",
    ),
    # Multimodal
    "gemma3": Architecture(
        "multimodal", lambda: transformers.Gemma3Config(
            text_config={**_LLAMA, "head_dim": 8}, vision_config={**_CLIP, "vision_use_head": False},
            mm_tokens_per_image=4, image_token_index=63, boi_token_index=62, eoi_token_index=61),
        layers=_LANGUAGE, model_class=_VISION, v4=_V4_LLAVA, text_only=_TEXT_ONLY),
    "llava": Architecture(
        "multimodal", lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**_LLAMA), vision_config=transformers.CLIPVisionConfig(**_CLIP),
            image_token_index=63),
        layers=_LANGUAGE, model_class=_VISION, v4=_V4_LLAVA, text_only=_TEXT_ONLY),
    "mistral3": Architecture(
        "multimodal", lambda: transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**{**_LLAMA, "head_dim": 8}),
            vision_config=transformers.PixtralVisionConfig(**{**_CLIP, "head_dim": 8}), image_token_index=63),
        layers=_LANGUAGE, model_class=_VISION, v4=_V4_MISTRAL3, text_only=_TEXT_ONLY),
    "qwen2_vl": Architecture(
        "multimodal", lambda: transformers.Qwen2VLConfig(
            text_config={**_LLAMA, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
            vision_config={"depth": 2, "embed_dim": 16, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2,
                           "patch_size": 4, "spatial_merge_size": 2},
            image_token_id=63, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60),
        layers=_LANGUAGE, model_class=_VISION, v4=_V4_QWEN_VL, text_only=_TEXT_ONLY),
    "qwen2_5_vl": Architecture(
        "multimodal", lambda: transformers.Qwen2_5_VLConfig(
            text_config={**_LLAMA, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
            vision_config={"depth": 2, "hidden_size": 16, "out_hidden_size": WIDTH, "num_heads": 2,
                           "intermediate_size": 24, "patch_size": 4, "spatial_merge_size": 2, "window_size": 16,
                           "fullatt_block_indexes": [1]},
            image_token_id=63, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60),
        layers=_LANGUAGE, model_class=_VISION, v4=_V4_QWEN_VL, text_only=_TEXT_ONLY),
    "smolvlm": Architecture(
        "multimodal", lambda: transformers.SmolVLMConfig(
            text_config=transformers.LlamaConfig(**_LLAMA), vision_config=_CLIP, scale_factor=2, image_token_id=63,
            pad_token_id=0),
        layers=r"model\.text_model\.layers\.(\d+)\.", model_class=_VISION,
        text_only=(r"^model\.text_model\.", "model.")),
    "mllama": Architecture(
        "multimodal", lambda: transformers.MllamaConfig(
            text_config={**_LLAMA, "cross_attention_layers": [1, 3],
                         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            vision_config={**_CLIP, "attention_heads": 2, "num_global_layers": 1, "max_num_tiles": 2,
                           "intermediate_layers_indices": [0], "vision_output_dim": 32,
                           "supported_aspect_ratios": [[1, 1], [1, 2]]},
            image_token_index=63),
        layers=_LANGUAGE, attention=r"\.(self_attn|cross_attn)\.", model_class=_VISION, v4=_V4_MISTRAL3),
    # Parameters that are single numbers
    "apertus": Architecture("dense", _text("Apertus", rope_parameters=_ROPE)),
}  # fmt: skip


def build(architecture: Architecture) -> PreTrainedModel:
    """The pico model, with random weights large enough for logits that any mistake would change."""
    torch.manual_seed(0)
    model: PreTrainedModel = architecture.model_class.from_config(architecture.config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start at zero, which would hide a mistake
                parameter.normal_(std=0.1)
    return model.eval()
