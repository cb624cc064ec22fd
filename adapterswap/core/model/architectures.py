"""What sets some architectures apart: one table by `model_type`; every other architecture has the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Architecture(NamedTuple):
    """How a type of model differs from most others.

    Attributes:
        has_conv1d: linear layers are transformers' Conv1D, whose weights are stored in×out.
        shares_blocks: several layers use one block, so that its modules have one weight under several names.
        extra_rows: the embedding's rows beyond `vocab_size`, for image tokens, or the config key that says how many.
        expert_width: the config key with the width of an expert, where PEFT is known to fuse LoRA on single experts.
        renamed_twice: PEFT 0.21 may lose modules: it renames LoRA's keys, which have their final names, by the rules
            of transformers for the keys of checkpoints, and these rules change such names again.
        rows_second: some layers see (positions, rows, width), so a batch's rows are not on the first axis.
    """

    has_conv1d: bool = False
    shares_blocks: bool = False
    extra_rows: int | str = 0
    expert_width: str | None = None
    renamed_twice: bool = False
    rows_second: bool = False


_ROWS = (
    ("clvp_decoder decision_transformer gpt-sw3 gpt2 imagegpt openai-gpt", Architecture(has_conv1d=True)),
    ("zamba zamba2", Architecture(shares_blocks=True)),
    ("mllama mllama_text_model", Architecture(extra_rows=8)),
    ("molmo2 molmo2_text", Architecture(extra_rows="additional_vocab_size")),
    ("fsmt led longformer xlnet", Architecture(rows_second=True)),
    ("olmoe", Architecture(expert_width="intermediate_size")),
    ("qwen3_moe", Architecture(expert_width="moe_intermediate_size")),
    (
        "inkling2 inkling2_text laguna mistral_large4 mistral_large4_text pi0 unlimited_ocr",
        Architecture(renamed_twice=True),
    ),
)
ARCHITECTURES = {model_type: row for types, row in _ROWS for model_type in types.split()}
_USUAL = Architecture()


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """What is special about a config.json's type of model, without the models nested in it."""
    return ARCHITECTURES.get(str(config.get("model_type")), _USUAL)


def architectures_in(config: Mapping[str, Any]) -> Iterator[Architecture]:
    """What is special about a config.json's type of model, and about those nested in it."""
    yield architecture_of(config)
    for nested in config.values():
        if isinstance(nested, Mapping):
            yield from architectures_in(nested)
