"""The architectures that are exported to GGUF: which modules llama.cpp applies LoRA to, and how it orders their rows.

llama.cpp keeps a model's weights under its own names (`gguf` has the tables) and reorders the rows of some: Llama's
queries and keys, since it rotates neighbouring dimensions where transformers rotates halves, and the fused projections
of Falcon and GPT-NeoX, which it wants as all queries, all keys, all values. The same reordering of the rows of ΔW = B·A
is one of the rows of B. Knows configs and names; reads no tensor.

Every architecture here is compared with PEFT by tests that run llama.cpp. To add one, add its line and its row in
`tests/exporting/bases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from adapterswap.errors import BaseModelError, DependencyError, UnsupportedError
from adapterswap.experts.layers import language_config

__all__ = [
    "ARCHITECTURES",
    "MERGE_REMEDY",
    "Architecture",
    "ModelSizes",
    "Projection",
    "find_architecture",
    "load_gguf",
]

MERGE_REMEDY = (
    "Merge the composition with `adapterswap merge` and convert the result with llama.cpp's convert_hf_to_gguf.py"
)
"""What is left to do with what a LoRA in GGUF cannot hold."""

Rows = npt.NDArray[np.intp]
Size = Literal[
    "hidden", "queries", "keys", "fused", "feed_forward", "gate_up", "expert", "expert_gate_up", "vocabulary"
]


@dataclass(frozen=True)
class ModelSizes:
    """A base's dimensions, as far as its config states them.

    Attributes:
        hidden: the width of the model.
        heads, key_heads: heads of queries, and of keys and values.
        head: the width of one head; None where only the class of the config knows it.
        feed_forward: the width inside an MLP.
        vocabulary: rows of the embedding.
        expert: the width inside an expert of a mixture, and
        experts: how many there are.
    """

    hidden: int
    heads: int | None
    key_heads: int | None
    head: int | None
    feed_forward: int | None
    vocabulary: int | None
    expert: int | None = None
    experts: int | None = None

    def of(self, size: Size) -> int | None:
        """A size by name; None where the config does not state it."""
        if size == "hidden":
            return self.hidden
        if size == "vocabulary":
            return self.vocabulary
        if size in ("feed_forward", "gate_up"):
            return self.feed_forward and self.feed_forward * (2 if size == "gate_up" else 1)
        if size in ("expert", "expert_gate_up"):
            return self.expert and self.expert * (2 if size == "expert_gate_up" else 1)
        if self.head is None or self.heads is None or self.key_heads is None:
            return None
        counts = {"queries": self.heads, "keys": self.key_heads, "fused": self.heads + 2 * self.key_heads}
        return counts[size] * self.head


@dataclass(frozen=True)
class Projection:
    """A linear module: its sizes, and which rows of transformers' weight llama.cpp's has, in its order.

    Attributes:
        out, into: the sizes of ΔW.
        rows: the order of its rows; None for transformers' own.
        experts: of a mixture's parameter, which has a matrix for each expert: the projections whose rows lie one after
            the other in it, as older models name them. Empty for a module.
    """

    out: Size
    into: Size
    rows: Callable[[ModelSizes], Rows] | None = None
    experts: tuple[str, ...] = ()


def _rotated(heads: int | None, size: int | None) -> Rows:
    """From halves of each head, as transformers rotates them, to neighbouring dimensions."""
    assert heads is not None
    assert size is not None
    return np.arange(size).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _grouped(sizes: ModelSizes) -> Rows:
    """From groups of [queries of one key head, its key, its value] to all queries, all keys, all values."""
    assert sizes.heads is not None
    assert sizes.key_heads is not None
    assert sizes.head is not None
    queries = sizes.heads // sizes.key_heads
    groups = np.arange(sizes.of("fused") or 0).reshape(sizes.key_heads, queries + 2, sizes.head)
    return np.concatenate([groups[:, :queries].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)])


@dataclass(frozen=True)
class Architecture:
    """What is exported of one family of models.

    Attributes:
        name: as `gguf.MODEL_ARCH` has it.
        model_types: of the language model's config.json.
        container: the list of layers in transformers' model for text.
        layer: the modules in a layer that llama.cpp applies LoRA to, by their names in it.
        embedding, head: their full names.
        tied: whether the head is the embedding where the config does not say.
        always_tied: llama.cpp has no head apart from the embedding, whatever the config says.
        own_head_size: the config's class has a width of heads that does not follow from the model's width.
        wrappers: model types of multimodal models whose language model llama.cpp reads as this architecture.
    """

    name: str
    model_types: tuple[str, ...]
    container: str
    layer: Mapping[str, Projection]
    embedding: str
    head: str
    tied: bool = False
    always_tied: bool = False
    own_head_size: bool = False
    wrappers: tuple[str, ...] = ()

    @property
    def outside(self) -> Mapping[str, Projection]:
        """The modules outside the layers, by full name."""
        head = Projection("vocabulary", "hidden")
        return {
            self.embedding: Projection("hidden", "vocabulary"),  # as PEFT keeps its factors: B·A is in×out
            self.head: head,
            "lm_head": head,  # what transformers 5 calls every head in memory
        }

    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """The dimensions that the language model's part of a config.json states.

        Raises:
            BaseModelError: it states no width, or no number of heads.
        """

        def number(*keys: str) -> int | None:
            found = next((config[key] for key in keys if config.get(key) is not None), None)
            return found if type(found) is int and found > 0 else None

        hidden = number("hidden_size", "n_embd")
        heads = number("num_attention_heads", "n_head")
        key_heads = number("num_key_value_heads") or heads
        if self.name == "FALCON":
            grouped = config.get("new_decoder_architecture")
            key_heads = number("num_kv_heads", "n_head_kv") or heads if grouped else 1
            if not grouped and config.get("multi_query") is False:
                key_heads = heads
        if hidden is None or (heads is None and not self.own_head_size):
            raise BaseModelError(
                "the base's config.json states no hidden_size or no num_attention_heads",
                "Give the base's own folder with `base_model`",
                parameter="base_model",
            )
        head = number("head_dim") or (None if self.own_head_size or heads is None else hidden // heads)
        inner = {"FALCON": "ffn_hidden_size", "GPT2": "n_inner"}.get(self.name)
        feed_forward = number(inner or "intermediate_size") or (4 * hidden if inner else None)
        expert = number("moe_intermediate_size") or feed_forward
        experts = number("num_local_experts", "num_experts")
        return ModelSizes(hidden, heads, key_heads, head, feed_forward, number("vocab_size"), expert, experts)


def _separate(rotated: bool) -> dict[str, Projection]:
    """Attention with a projection each for queries, keys and values."""
    queries = (lambda sizes: _rotated(sizes.heads, sizes.of("queries"))) if rotated else None
    keys = (lambda sizes: _rotated(sizes.key_heads, sizes.of("keys"))) if rotated else None
    return {
        "self_attn.q_proj": Projection("queries", "hidden", queries),
        "self_attn.k_proj": Projection("keys", "hidden", keys),
        "self_attn.v_proj": Projection("keys", "hidden"),
        "self_attn.o_proj": Projection("hidden", "queries"),
    }


_GATED = {
    "mlp.gate_proj": Projection("feed_forward", "hidden"),
    "mlp.up_proj": Projection("feed_forward", "hidden"),
    "mlp.down_proj": Projection("hidden", "feed_forward"),
}


# In transformers 5 a mixture's experts are two parameters; PEFT adapts them by `target_parameters`.
_EXPERTS = {
    "mlp.experts.gate_up_proj": Projection(
        "expert_gate_up", "hidden", experts=("mlp.experts.gate_proj", "mlp.experts.up_proj")
    ),
    "mlp.experts.down_proj": Projection("hidden", "expert", experts=("mlp.experts.down_proj",)),
}


class _Names(TypedDict):
    container: str
    embedding: str
    head: str


_STANDARD: _Names = {"container": "model.layers", "embedding": "model.embed_tokens", "head": "lm_head"}

ARCHITECTURES = (
    Architecture("LLAMA", ("llama", "mistral"), layer=_separate(True) | _GATED, **_STANDARD),
    Architecture("LLAMA", ("mixtral",), layer=_separate(True) | _EXPERTS, **_STANDARD),
    Architecture("QWEN2", ("qwen2",), layer=_separate(False) | _GATED, **_STANDARD),
    Architecture("QWEN3", ("qwen3",), layer=_separate(False) | _GATED, own_head_size=True, **_STANDARD),
    Architecture("QWEN3MOE", ("qwen3_moe",), layer=_separate(False) | _EXPERTS, own_head_size=True, **_STANDARD),
    Architecture(
        "GEMMA2", ("gemma2",), layer=_separate(False) | _GATED, always_tied=True, own_head_size=True, **_STANDARD,
    ),
    Architecture(
        "GEMMA3", ("gemma3_text",), layer=_separate(False) | _GATED, always_tied=True, own_head_size=True,
        wrappers=("gemma3",), **_STANDARD,
    ),
    Architecture(
        "PHI3", ("phi3",),
        layer={
            "self_attn.qkv_proj": Projection("fused", "hidden"),
            "self_attn.o_proj": Projection("hidden", "queries"),
            "mlp.gate_up_proj": Projection("gate_up", "hidden"),
            "mlp.down_proj": Projection("hidden", "feed_forward"),
        },
        **_STANDARD,
    ),
    Architecture(
        "FALCON", ("falcon",),
        container="transformer.h",
        layer={
            "self_attention.query_key_value": Projection("fused", "hidden", _grouped),
            "self_attention.dense": Projection("hidden", "hidden"),
            "mlp.dense_h_to_4h": Projection("feed_forward", "hidden"),
            "mlp.dense_4h_to_h": Projection("hidden", "feed_forward"),
        },
        embedding="transformer.word_embeddings", head="lm_head", tied=True,
    ),
    Architecture(
        "GPT2", ("gpt2",),
        container="transformer.h",
        layer={
            "attn.c_attn": Projection("fused", "hidden"),
            "attn.c_proj": Projection("hidden", "hidden"),
            "mlp.c_fc": Projection("feed_forward", "hidden"),
            "mlp.c_proj": Projection("hidden", "feed_forward"),
        },
        embedding="transformer.wte", head="lm_head", tied=True,
    ),
    Architecture(
        "GPTNEOX", ("gpt_neox",),
        container="gpt_neox.layers",
        layer={
            "attention.query_key_value": Projection("fused", "hidden", _grouped),
            "attention.dense": Projection("hidden", "hidden"),
            "mlp.dense_h_to_4h": Projection("feed_forward", "hidden"),
            "mlp.dense_4h_to_h": Projection("hidden", "feed_forward"),
        },
        embedding="gpt_neox.embed_in", head="embed_out",
    ),
)  # fmt: skip
"""What is exported, and run by the tests."""


def find_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a base by its config.json; `where` is what messages call the base.

    Raises:
        UnsupportedError: it is not one of `ARCHITECTURES`, or a variant that llama.cpp does not read.
    """
    text = language_config(config)
    model_type, outer = text.get("model_type"), config.get("model_type")
    found = next((one for one in ARCHITECTURES if model_type in one.model_types), None)
    if found is None or (text is not config and outer not in found.wrappers):
        types = ", ".join(sorted(name for one in ARCHITECTURES for name in (*one.model_types, *one.wrappers)))
        raise UnsupportedError(
            f"{where} is of the type {outer if text is not config else model_type}, and adapters of {types} can be "
            "exported to GGUF",
            MERGE_REMEDY,
            parameter="base_model",
        )
    if found.name == "FALCON" and (text.get("alibi") or text.get("parallel_attn") is False):
        raise UnsupportedError(
            f"{where} is a Falcon with ALiBi or without parallel attention, which llama.cpp does not read",
            "Use another engine",
            parameter="base_model",
        )
    return found


def load_gguf() -> Any:
    """The package gguf.

    Raises:
        DependencyError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise DependencyError(
            "writing GGUF files needs the package gguf", "Install it with `pip install adapterswap[gguf]`"
        ) from None
    return gguf
