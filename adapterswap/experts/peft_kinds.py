"""PEFT's kinds of adapters that change each module on its own: the tensors they store and the settings they read.

DoRA, (IA)³, OFT and similar kinds do not add a product of two factors to a weight, so they cannot be averaged without
the base. But each module's change depends only on its own tensors and the config, so it can be copied into another
adapter of the same kind. Knows names and PEFT 0.21's rules; reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "DORA",
    "KINDS",
    "LORA",
    "LORA_BIAS",
    "LORA_PARTS",
    "REFUSED_KINDS",
    "TASK_HEADS",
    "TRAINABLE_TOKENS",
    "TRAINED_ROWS",
    "TRAINED_TOKENS",
    "PeftKind",
]

LORA, DORA, LORA_BIAS = "LORA", "DoRA", "LoRA with lora_bias"
TRAINABLE_TOKENS = "TRAINABLE_TOKENS"

# The tensors that variants of LoRA store beside A and B → the variant's name.
LORA_PARTS = {"lora_magnitude_vector": DORA, "lora_B.bias": LORA_BIAS}

# PEFT's task types → the modules that it trains and loads in full for them, whatever modules_to_save says.
TASK_HEADS: dict[str, tuple[str, ...]] = {
    "CAUSAL_LM": (),
    "SEQ_2_SEQ_LM": (),
    "FEATURE_EXTRACTION": (),
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


@dataclass(frozen=True)
class PeftKind:
    """A `peft_type` whose modules can be copied one by one.

    Attributes:
        title: its usual name.
        parts: the ends of the keys of its tensors, after the module's name.
        patterns: settings that may differ between modules → the config key of their patterns, which PEFT matches like
            LoRA's.
        shared: the keys, after `base_model.`, of tensors that all modules use.
        inert: config keys that do not change what a trained adapter computes.
        forms: values of `init_weights` that decide the shapes and the formula, too.
        on_biases: whether it also changes the module's bias.
        ignored: keys that narrow the targets of other kinds; PEFT ignores them for this one.
        only_lists: whether PEFT refuses `layers_to_transform` and `layers_pattern` beside a regex in `target_modules`.
    """

    title: str
    parts: frozenset[str]
    patterns: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    inert: frozenset[str] = frozenset()
    forms: frozenset[str] = frozenset()
    on_biases: bool = False
    ignored: frozenset[str] = frozenset()
    only_lists: bool = False


_LAYER_KEYS = frozenset({"layers_to_transform", "layers_pattern"})
_RANKS = {"r": "rank_pattern", "alpha": "alpha_pattern"}
_LYCORIS = frozenset({"rank_dropout", "module_dropout", "rank_dropout_scale"})


def _kind(
    title: str,
    *parts: str,
    patterns: Mapping[str, str] | None = None,
    shared: tuple[str, ...] = (),
    inert: frozenset[str] = frozenset(),
    forms: frozenset[str] = frozenset(),
    on_biases: bool = False,
    ignored: frozenset[str] = frozenset(),
    only_lists: bool = False,
) -> PeftKind:
    return PeftKind(title, frozenset(parts), patterns or {}, shared, inert, forms, on_biases, ignored, only_lists)


KINDS: dict[str, PeftKind] = {
    "IA3": _kind(
        "(IA)³", "ia3_l", inert=frozenset({"init_ia3_weights", "feedforward_modules"}), on_biases=True,
        ignored=_LAYER_KEYS,
    ),
    "OFT": _kind("OFT", "oft_R.weight", inert=frozenset({"module_dropout"})),
    "BOFT": _kind("BOFT", "boft_R", "boft_s", inert=frozenset({"boft_dropout"})),
    "LOHA": _kind(
        "LoHa", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", patterns=_RANKS,
        inert=_LYCORIS,
    ),
    "LOKR": _kind(
        "LoKr", "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", patterns=_RANKS,
        inert=_LYCORIS,
    ),
    "VERA": _kind(
        "VeRA", "vera_lambda_b", "vera_lambda_d", shared=("vera_A", "vera_B"),
        inert=frozenset({"vera_dropout", "d_initial"}), ignored=frozenset({"exclude_modules"}),
    ),
    "HRA": _kind("HRA", "hra_u", only_lists=True),
    "MISS": _kind(
        "MiSS", "miss_block", inert=frozenset({"miss_dropout"}), forms=frozenset({"bat", "mini"}), only_lists=True
    ),
    # PEFT 0.21 gives all modules the rank `r`, whatever `rank_pattern` says.
    "HIRA": _kind("HiRA", "hira_A", "hira_B", inert=frozenset({"hira_dropout", "rank_pattern"}), only_lists=True),
    "ROAD": _kind("RoAd", "road_alpha", "road_theta", on_biases=True, ignored=_LAYER_KEYS | {"exclude_modules"}),
}  # fmt: skip
"""`peft_type` → the kinds besides LoRA that can be copied."""

TRAINED_ROWS = "trainable_tokens_delta"
TRAINED_TOKENS = _kind("trainable tokens", TRAINED_ROWS)
"""TRAINABLE_TOKENS: rows of embeddings and heads, without LoRA. They are blended row by row."""

_VIRTUAL = "it adds virtual tokens or states for the whole model, not for a module"

REFUSED_KINDS: dict[str, str] = {
    "PROMPT_TUNING": _VIRTUAL,
    "MULTITASK_PROMPT_TUNING": _VIRTUAL,
    "P_TUNING": _VIRTUAL,
    "PREFIX_TUNING": _VIRTUAL,
    "CPT": _VIRTUAL,
    "CARTRIDGE": _VIRTUAL,
    "ADAPTION_PROMPT": "its prompts and gates run through whole attention layers",
    "XLORA": "it routes between adapters at run time",
    "POLY": "it routes between skills by the id of a task",
    "ADALORA": "its ranks depend on a budget of the whole adapter",
    "VBLORA": "all its modules share one vector bank, trained together",
    "UNILORA": "all its modules share one vector, trained together",
    "OSF": "it holds parts of an SVD of the base's own weights",
}
"""`peft_type` → why this kind cannot be composed module by module."""
