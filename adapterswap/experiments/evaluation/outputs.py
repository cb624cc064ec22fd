"""The answer in a generated output: what follows its reasoning, up to a text that ends it.

Both marks may be special tokens of the tokenizer. lm-evaluation-harness decodes an output without these, and looks for
the marks in what is left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class OutputReader:
    """Finds the answers in outputs.

    Args:
        tokenizer: the tokenizer, of transformers.
        think_end: what ends the reasoning, as text or a token's id; None for outputs without reasoning.
    """

    def __init__(self, tokenizer: Any, think_end: str | int | None) -> None:
        self._tokenizer, self._think_end = tokenizer, think_end
        added = tokenizer.added_tokens_decoder.values()
        self._special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)

    def reasons_after(self, prompt: Sequence[int]) -> bool:
        """Whether an output begins with reasoning. It does not if the prompt ends with the end of the reasoning."""
        if self._think_end is None:
            return False
        rest = self._after_reasoning(prompt)
        return rest is None or bool(self._decode(rest[1]).strip() or rest[0].strip())

    def answer(self, output: Sequence[int], stops: Sequence[str], *, reasons: bool) -> str:
        """The answer in an output, without special tokens; empty if the output ends inside its reasoning.

        Args:
            output: the tokens of an output.
            stops: the texts that end it. The answer ends before one that has a special token; others stay in it.
            reasons: whether the output begins with reasoning.
        """
        lead, tokens = "", output
        if reasons:
            rest = self._after_reasoning(output)
            if rest is None:
                return ""
            lead, tokens = rest

        written = self._decode(tokens)
        ends = []
        for stop in stops:
            if stop in written and any(token in stop for token in self._special):
                ends.append(written.index(stop))
        if not ends:
            return lead + self._without_special(tokens)
        size = bisect_left(range(len(tokens) + 1), min(ends), key=lambda size: len(self._decode(tokens[:size])))
        if len(self._decode(tokens[:size])) > min(ends):  # only a part of the token comes before the stop
            size -= 1
        part = written[len(self._decode(tokens[:size])) : min(ends)]
        return lead + self._without_special(tokens[:size]) + part

    def is_stopped(self, output: Sequence[int], stops: Sequence[str], *, reasons: bool) -> bool:
        """Whether an answer contains one of the texts that end an output."""
        lead, tokens = "", output
        if reasons:
            rest = self._after_reasoning(output)
            if rest is None:
                return False
            lead, tokens = rest
        return any(stop in lead + self._decode(tokens) for stop in stops)

    def _after_reasoning(self, tokens: Sequence[int]) -> tuple[str, Sequence[int]] | None:
        """What follows the last end of a reasoning: the rest of the token that it ends in, and the tokens after it."""
        if isinstance(self._think_end, int):
            places = [place for place, token in enumerate(tokens) if token == self._think_end]
            if not places:
                return None
            return "", tokens[places[-1] + 1 :]

        written = self._decode(tokens)
        if self._think_end is None or self._think_end not in written:
            return None
        end = written.rindex(self._think_end) + len(self._think_end)
        size = bisect_left(range(len(tokens) + 1), end, key=lambda size: len(self._decode(tokens[:size])))
        return self._decode(tokens[:size])[end:], tokens[size:]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _without_special(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
