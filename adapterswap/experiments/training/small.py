"""A small copy of a model: its class and its switches, a few narrow layers, random weights in float32.

What a class does with rows, with packed rows and with adapters follows from its code and its config's switches, and
hardly from its sizes. So a copy of some hundred thousand parameters shows it before any weights are read, and in a dry
run. Whatever the copy cannot show stays open: sizes that do not fit together once they are small, say.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

LAYERS, TOWER_LAYERS, WIDTH, TOKENS = 4, 2, 32, 96
POSITIONS = re.compile(
    r".*max_position_embeddings.*|n_positions|n_ctx|context_length|max_(source|target)_positions|max_seq_len"
)
"""Settings of how many positions a model has."""

# The largest value of each setting of a config, by its name; the first match counts.
SIZES: list[tuple[str, int | None]] = [
    (r"(task_)?type_vocab_size|num_labels|num_nextn_predict_layers|max_window_layers", None),
    (r"n_group|topk_group", 1),
    (r"codebook_size", 64),
    (r".*vocab_size.*|n_words|encoder_hash_byte_group_vocab|num_hash_buckets", TOKENS),
    (r"num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers|(encoder|decoder)_num_hidden_layers",
     LAYERS),
    (r"(?:encoder_|decoder_|cross_attention_|out_|backbone_|true_|audio_)?hidden_size|d_model|n_embd|dim|embed_dim"
     r"|embedding_(size|dim)|word_embed_proj_dim|(in|out)put_embedding_size|lru_width|entity_emb_size|d_latents"
     r"|emb_dim|intra_bottleneck_size|projector_(in|out)put_dim|vision_output_dim|output_dim|t2u_.*_dim", WIDTH),
    (r"(dense_|shared_)?intermediate_size(_mlp)?|((en|de)coder_)?ffn_dim|d_ff|dim_ff|dff|ffn_hidden_size|n_inner"
     r"|hidden_dim|feed_forward_size|mlp_dim", 48),
    (r".*moe.*intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size", 16),
    (r"num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups", 2),
    (r".*num_attention_heads|n_heads?|num_heads|((en|de)coder_)?attention_heads|index_n_heads|linear_num_.*_heads"
     r"|n_mamba_heads|mamba_num_heads|mamba_n_heads", 4),
    (r"mamba_d_head|mamba_headdim|qk_head_dim", 16),
    (r"head_dim|.*_head_dim|d_kv|dim_head|d_head|attention_head_size|rotary_dim|.*lora_rank|mamba_d_state|state_size"
     r"|d_state|time_step_rank|hidden_size_per_layer_input|router_hidden_size|xpath_unit_hidden_size|adapter_rank", 8),
    (r"sliding_window|attention_window.*|local_attention|block_size|mamba_chunk_size|chunk_size|index_topk"
     r"|(local|lsh)_attn_chunk_length", 8),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k", 2),
    (r"n_shared_experts|num_shared_experts|first_k_dense_replace|zero_expert_num", 1),
    (POSITIONS.pattern, 64),
    (r"image_size|crop_size", 16),
    (r"patch_size", 8),
]  # fmt: skip
LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config", "encoder", "decoder", "text_encoder")
_LARGEST = 20_000_000  # parameters: a copy that is still larger has sizes of unknown names


def smaller(config: dict[str, Any], layers: int = LAYERS, *, keep_positions: bool = False) -> dict[str, Any]:
    """The content of a config with its structure, but at most a few layers, experts, heads and tokens.

    Args:
        config: see `to_dict` of a transformers config.
        layers: the most layers; a tower beside the language model has fewer.
        keep_positions: leave the number of positions as it is.
    """
    depths = {config.get(name) for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")}
    for name in ("layer_types", "layers_block_type"):  # by which alone Nemotron-H says its depth
        kinds = config.get(name)
        if isinstance(kinds, list):
            depths.add(len(kinds))

    heads = config.get("num_attention_heads")
    small: dict[str, Any] = {}
    token = TOKENS
    for name, value in config.items():
        if name in ("id2label", "label2id", "per_layer_config"):
            continue

        limit = next((limit for names, limit in SIZES if re.fullmatch(names, name)), None)
        if isinstance(value, dict) and (name.endswith("_config") or name in LANGUAGE):
            depth = TOWER_LAYERS
            if name in LANGUAGE and layers == LAYERS:
                depth = LAYERS
            value = smaller(value, depth, keep_positions=keep_positions)
        elif name == "head_dim" and value is None and heads is not None:
            value = 8
        elif name == "num_key_value_heads" and value is not None and value == heads:
            value = min(value, 4)  # without groups of heads, as in multi-head latent attention
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
            value = {**value, "mrope_section": [1, 1, 2]}
        elif isinstance(value, list) and len(value) in depths:
            kinds = list(dict.fromkeys(map(json.dumps, value)))
            value = [json.loads(kind) for kind in (kinds * layers)[:layers]]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= TOKENS:
            value = token = token - 1
        elif keep_positions and POSITIONS.fullmatch(name):
            pass
        elif isinstance(value, int) and not isinstance(value, bool) and limit is not None:
            value = min(value, limit)
            if value and limit == LAYERS and "layer" in name:
                value = layers
        small[name] = value
    return small


def small_copy(model: Any, *, attention: str | None = None) -> Any | None:
    """A small model of the same class, in evaluation mode; None if none can be built from the settings of its config.

    Args:
        model: the model, which may be without weights.
        attention: transformers' name of the implementation of attention; None for its own choice.
    """
    import torch

    options: dict[str, Any] = {}
    if attention:
        options["attn_implementation"] = attention
    try:
        content = smaller(model.config.to_dict(), keep_positions=True)
        config = type(model.config).from_dict(content)
        with torch.device("meta"):
            without_weights = type(model)._from_config(copy.deepcopy(config))
        if sum(parameter.numel() for parameter in without_weights.parameters()) > _LARGEST:
            return None

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = type(model)._from_config(config, **options).float().eval()

            # Random weights that keep the size of what passes through them, so that each part counts.
            with torch.no_grad():
                for parameter in small.parameters():
                    if parameter.dim() >= 2:
                        parameter.normal_(0, parameter.shape[-1] ** -0.5)
                    else:
                        parameter.add_(torch.randn_like(parameter) * 0.1)
    except Exception:  # of any kind: the sizes do not fit together, or need a library that is not installed
        return None
    return small
