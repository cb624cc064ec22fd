"""How long a text may be for a model, by its config: positions that it states, and rotary embeddings that stretch them.

transformers' models take any length that their code can compute, so the config decides. The rules are those of vLLM
(`_get_and_verify_max_len`), with one exception: where rotary embeddings differ between kinds of layers, the config
already states the stretched length (Gemma 3), unless they are YaRN's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# What configs call the number of positions. The smallest of those that a config has counts.
_STATED = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


class Lengths(NamedTuple):
    """The lengths that a config states, in tokens.

    Attributes:
        longest: the longest text with its answer; None for models without such a limit, as recurrent ones are.
        alike: up to this length, the frequencies of rotary embeddings do not depend on the length of the text, or on
            that of others in its batch; None if they never do.
    """

    longest: int | None
    alike: int | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> Lengths:
        """The lengths in the config of a language model, as transformers opens it."""
        numbers = [config.get(name) for name in _STATED]
        stated = min((number for number in numbers if isinstance(number, int)), default=None)
        if stated is None:
            return Lengths(None)

        # Kinds of layers may have rotary embeddings of their own: {"full_attention": {...}, "sliding_attention": ...}.
        rope = config.get("rope_parameters") or {}
        nested = [part for part in rope.values() if isinstance(part, Mapping)]
        parts = nested or [rope]

        # The longest text is that of the kind which reaches farthest; frequencies change with the first that changes.
        longest = max(_stretched(stated, part, stated_already=bool(nested)) for part in parts)
        changes = [_alike(stated, part) for part in parts]
        alike = min((length for length in changes if length is not None), default=None)
        return Lengths(longest, alike)


def _stretched(stated: int, rope: Mapping[str, Any], *, stated_already: bool) -> int:
    """The length that a rotary embedding can hold."""
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1.0
    if kind == "yarn":
        return int(rope.get("original_max_position_embeddings", stated) * factor)

    # LongRoPE's and Llama 3's configs state the stretched length.
    if kind in ("linear", "dynamic") and not stated_already:
        return int(stated * factor)
    return stated


def _alike(stated: int, rope: Mapping[str, Any]) -> int | None:
    """The length above which transformers takes other frequencies, for all rows of a batch."""
    kind = rope.get("rope_type")
    if kind == "longrope":
        return int(rope.get("original_max_position_embeddings", stated))
    if kind is not None and "dynamic" in kind:
        return stated
    return None
