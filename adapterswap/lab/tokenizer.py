"""The lab's tokenizer, with a token per word, so that models need not learn spelling.

Knows the vocabulary and transformers' fast tokenizers; knows nothing of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapterswap.lab.lexicon import SPECIAL_TOKENS, VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["BOS", "EOS", "PAD", "build_tokenizer", "ids_of"]

PAD, BOS, EOS, _UNKNOWN = range(len(SPECIAL_TOKENS))
_IDS = {token: index for index, token in enumerate(VOCABULARY)}


def ids_of(text: str) -> list[int]:
    """The ids of the words of `text`, without special tokens, as `build_tokenizer` would give them.

    Raises:
        KeyError: a word is not in the vocabulary.
    """
    return [_IDS[token] for token in text.split()]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer that splits at spaces and puts `<s>` before a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos, unknown = SPECIAL_TOKENS
    tokenizer = Tokenizer(models.WordLevel(_IDS, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unknown
    )
