"""The architectures of GGUF: the modules to which llama.cpp applies LoRA, and their order of rows.

llama.cpp keeps a model's weights under its own names (`gguf` has the tables) and reorders some rows. It reorders
Llama's queries and keys, because it rotates neighbouring dimensions and transformers rotates halves, and the fused
projections of Falcon and GPT-NeoX, which it stores as all queries, all keys, all values. Reordering the rows of ΔW =
B·A means reordering the rows of B.

Every architecture here is compared with PEFT by tests that run llama.cpp. To add one, add its line and its row in
`tests/engines/exporting/bases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from adapterswap.core.model.layers import ModelConfig
from adapterswap.core.planning.targets import Target
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import BaseModelError, UnsupportedError

RowOrder = npt.NDArray[np.intp]
Size = Literal[
    "hidden", "queries", "keys", "fused", "feed_forward", "gate_up", "expert", "expert_gate_up", "vocabulary"
]


@dataclass(frozen=True)
class ModelSizes:
    """A base's dimensions, as far as its config states them.

    Attributes:
        hidden: the width of the model.
        heads, key_heads: the number of heads of queries, and of keys and values.
        head: the width of one head; None if only transformers' config class knows it.
        feed_forward: the width inside an MLP.
        vocabulary: the number of rows of the embedding.
        expert: the width inside an expert of a mixture.
        experts: the number of experts of a mixture.
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
        """A size by name; None if the config does not state it."""
        if size == "hidden":
            return self.hidden
        if size == "vocabulary":
            return self.vocabulary
        if size == "feed_forward":
            return self.feed_forward
        if size == "gate_up":
            return self.feed_forward and 2 * self.feed_forward
        if size == "expert":
            return self.expert
        if size == "expert_gate_up":
            return self.expert and 2 * self.expert

        # The others are numbers of heads, times the size of one.
        if self.head is None or self.heads is None or self.key_heads is None:
            return None
        counts = {"queries": self.heads, "keys": self.key_heads, "fused": self.heads + 2 * self.key_heads}
        return counts[size] * self.head


@dataclass(frozen=True)
class Projection:
    """A linear module: its sizes, and the order in which llama.cpp stores its rows.

    Attributes:
        out, into: the sizes of ΔW.
        rows: the order of its rows; None for transformers' order.
        experts: for a mixture's parameter, which has a matrix for each expert: the projections that are stacked in it,
            under the names of older models. Empty for a module.
    """

    out: Size
    into: Size
    rows: Callable[[ModelSizes], RowOrder] | None = None
    experts: tuple[str, ...] = ()


def _rotated(heads: int | None, size: int | None) -> RowOrder:
    """The order from transformers' halves of each head to llama.cpp's neighbouring dimensions."""
    assert heads is not None
    assert size is not None
    return np.arange(size).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _grouped(sizes: ModelSizes) -> RowOrder:
    """The order from groups of [queries of one key head, its key, its value] to all queries, all keys, all values."""
    assert sizes.heads is not None
    assert sizes.key_heads is not None
    assert sizes.head is not None
    queries = sizes.heads // sizes.key_heads
    groups = np.arange(sizes.of("fused") or 0).reshape(sizes.key_heads, queries + 2, sizes.head)
    return np.concatenate([groups[:, :queries].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)])


@dataclass(frozen=True)
class GgufArchitecture:
    """One family of models that can be exported.

    Attributes:
        name: its name in `gguf.MODEL_ARCH`.
        model_types: the language model's `model_type` in config.json.
        container: the list of layers in transformers' text model.
        layer: the modules of a layer to which llama.cpp applies LoRA, by their names within the layer.
        embedding, head: their full names.
        tied: whether the head is tied to the embedding if the config does not say.
        always_tied: llama.cpp has no separate head, whatever the config says.
        own_head_size: the width of heads does not follow from the model's width.
        wrappers: types of multimodal models whose language model llama.cpp reads as this architecture.
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
            self.embedding: Projection("hidden", "vocabulary"),  # PEFT's factors of an embedding: B·A is in×out
            self.head: head,
            "lm_head": head,  # transformers 5's name of every head in memory
        }

    def sizes(self, config: Mapping[str, Any]) -> ModelSizes:
        """The dimensions in the language model's part of a config.json."""

        def number(*keys: str) -> int | None:
            """The first of these entries that is set, if it is a whole number above 0."""
            for key in keys:
                value = config.get(key)
                if value is not None:
                    return value if type(value) is int and value > 0 else None
            return None

        hidden = number("hidden_size", "n_embd")
        heads = number("num_attention_heads", "n_head")
        key_heads = number("num_key_value_heads") or heads
        if self.name == "FALCON":
            key_heads = 1
            if config.get("new_decoder_architecture"):
                key_heads = number("num_kv_heads", "n_head_kv") or heads
            elif config.get("multi_query") is False:
                key_heads = heads

        if hidden is None or (heads is None and not self.own_head_size):
            raise BaseModelError(
                "The base's config.json lacks hidden_size or num_attention_heads",
                "Pass the base's own folder as `base_model`",
                parameter="base_model",
            )

        head = number("head_dim")
        if head is None and heads is not None and not self.own_head_size:
            head = hidden // heads
        inner = {"FALCON": "ffn_hidden_size", "GPT2": "n_inner"}.get(self.name)
        feed_forward = number(inner or "intermediate_size")
        if feed_forward is None and inner:
            feed_forward = 4 * hidden
        expert = number("moe_intermediate_size") or feed_forward
        experts = number("num_local_experts", "num_experts")
        return ModelSizes(hidden, heads, key_heads, head, feed_forward, number("vocab_size"), expert, experts)


def _separate(rotated: bool) -> dict[str, Projection]:
    """Attention with separate projections for queries, keys and values."""
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


# In transformers 5, a mixture's experts are two parameters, which PEFT adapts with `target_parameters`.
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
    GgufArchitecture("LLAMA", ("llama", "mistral"), layer=_separate(True) | _GATED, **_STANDARD),
    GgufArchitecture("LLAMA", ("mixtral",), layer=_separate(True) | _EXPERTS, **_STANDARD),
    GgufArchitecture("QWEN2", ("qwen2",), layer=_separate(False) | _GATED, **_STANDARD),
    GgufArchitecture("QWEN3", ("qwen3",), layer=_separate(False) | _GATED, own_head_size=True, **_STANDARD),
    GgufArchitecture("QWEN3MOE", ("qwen3_moe",), layer=_separate(False) | _EXPERTS, own_head_size=True, **_STANDARD),
    GgufArchitecture(
        "GEMMA2", ("gemma2",), layer=_separate(False) | _GATED, always_tied=True, own_head_size=True, **_STANDARD,
    ),
    GgufArchitecture(
        "GEMMA3", ("gemma3_text",), layer=_separate(False) | _GATED, always_tied=True, own_head_size=True,
        wrappers=("gemma3",), **_STANDARD,
    ),
    GgufArchitecture(
        "PHI3", ("phi3",),
        layer={
            "self_attn.qkv_proj": Projection("fused", "hidden"),
            "self_attn.o_proj": Projection("hidden", "queries"),
            "mlp.gate_up_proj": Projection("gate_up", "hidden"),
            "mlp.down_proj": Projection("hidden", "feed_forward"),
        },
        **_STANDARD,
    ),
    GgufArchitecture(
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
    GgufArchitecture(
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
    GgufArchitecture(
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
"""The architectures that can be exported; the tests run each of them."""


def find_architecture(config: Mapping[str, Any], where: str) -> GgufArchitecture:
    """The architecture of a base, from its config.json; `where` is the base's name in messages."""
    text = ModelConfig(config).language
    model_type, outer = text.get("model_type"), config.get("model_type")
    architecture = next((candidate for candidate in ARCHITECTURES if model_type in candidate.model_types), None)
    if architecture is None or (text is not config and outer not in architecture.wrappers):
        types: list[str] = []
        for candidate in ARCHITECTURES:
            types += (*candidate.model_types, *candidate.wrappers)
        raise UnsupportedError(
            f"{where} has the type {outer}, but only adapters of {', '.join(sorted(types))} can be exported to GGUF",
            Target.GGUF.otherwise,
            parameter="base_model",
        )

    if architecture.name == "FALCON" and (text.get("alibi") or text.get("parallel_attn") is False):
        raise UnsupportedError(
            f"{where} is a Falcon with ALiBi or without parallel attention, which llama.cpp cannot read",
            "Use another engine",
            parameter="base_model",
        )
    return architecture


def load_gguf() -> Any:
    """Import the package gguf."""
    require("gguf", "gguf")
    import gguf

    return gguf
