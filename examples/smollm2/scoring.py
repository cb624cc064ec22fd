"""How the fifth plan scores a model: log-likelihoods of choices, and a greedy answer, for documents of its tests.

A batch has prompts of similar length, padded on the left, and a prompt is read once for all its choices.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NEW_TOKENS = 8  # of a greedy answer
SIZE = 32  # documents of a batch, on a CPU; on a GPU four times as many


@dataclass(frozen=True)
class Document:
    """A prompt with choices.

    Attributes:
        choices: all texts that may follow, each once.
        sets: name of a set of choices → (their places in `choices`, the place of the right one).
        answer: the right answer as text, if an answer is generated; empty if not.
        template: what the document shares with others.
    """

    prompt: str
    choices: tuple[str, ...]
    sets: Mapping[str, tuple[tuple[int, ...], int]]
    answer: str = ""
    template: str = ""

    @staticmethod
    def of(row: Mapping[str, Any], heading: str) -> Document:
        """The document of a line of data/: a word problem, or a sentence in the language `heading`."""
        named = {"usual": (row["choices"], row["label"])}
        if "equal_choices" in row:
            named["equal"] = (row["equal_choices"], row["equal_label"])

        choices = tuple(dict.fromkeys(choice for texts, _ in named.values() for choice in texts))
        places = {text: place for place, text in enumerate(choices)}
        sets = {}
        for name, (texts, label) in named.items():
            sets[name] = tuple(places[text] for text in texts), places[texts[label]]

        if "sentence" in row:
            return Document(f"{heading}: {row['sentence']}\nEnglish:", choices, sets)
        prompt = f"Question: {row['question']}\nAnswer:"
        return Document(prompt, choices, sets, answer=row["choices"][row["label"]], template=row["template"])


@dataclass(frozen=True)
class Scores:
    """What a model makes of a document.

    Attributes:
        sums: the log-likelihood of each choice after a space.
        ends: the same with the end of the text after it.
        text: the greedy answer; empty if none was asked for.
    """

    sums: tuple[float, ...]
    ends: tuple[float, ...]
    text: str = ""


def score(model: Any, tokenizer: Any, documents: Sequence[Document]) -> list[Scores]:
    """The scores of documents, in their order."""
    size = SIZE if model.device.type == "cpu" else 4 * SIZE
    prompts = [tokenizer(document.prompt)["input_ids"] for document in documents]
    order = sorted(range(len(documents)), key=lambda place: len(prompts[place]))
    scored: dict[int, Scores] = {}

    for start in range(0, len(order), size):
        batch = order[start : start + size]
        read = _Read.of(model, tokenizer, [prompts[place] for place in batch])
        chosen = [documents[place] for place in batch]
        scored |= zip(batch, _score_batch(model, tokenizer, read, chosen), strict=True)

    return [scored[place] for place in range(len(documents))]


@dataclass
class _Read:
    """Prompts that a model has read.

    Attributes:
        first: the log-probabilities of the next token (prompts, vocabulary).
        cache: keys and values.
        mask: which tokens are no padding (prompts, tokens).
    """

    first: torch.Tensor
    cache: Any
    mask: torch.Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> _Read:
        """Read prompts, padded on the left."""
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[tokenizer.eos_token_id] * more + list(prompt) for more, prompt in zip(padding, prompts, strict=True)]
        ids = torch.tensor(rows, device=model.device)
        mask = (torch.arange(longest)[None] >= torch.tensor(padding)[:, None]).long().to(model.device)

        output = model(
            input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=True, logits_to_keep=1
        )
        return _Read(output.logits[:, -1].float().log_softmax(-1), output.past_key_values, mask)

    def rows(self, owner: torch.Tensor) -> _Read:
        """The prompts of `owner` (rows,), each with a copy of its keys and values."""
        cache = copy.deepcopy(self.cache)
        cache.batch_select_indices(owner)
        return _Read(self.first[owner], cache, self.mask[owner])

    @torch.no_grad()
    def go_on(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """The logits (prompts, tokens, vocabulary) after more tokens of each prompt, which are then read too."""
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], dim=1)
        positions = _positions(self.mask)[:, -ids.shape[1] :]
        output = model(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        self.cache = output.past_key_values
        return output.logits


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """The position of each token; that of padding does not matter."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _score_batch(model: Any, tokenizer: Any, read: _Read, documents: Sequence[Document]) -> list[Scores]:
    """The scores of documents whose prompts have been read."""
    end = tokenizer.eos_token_id

    # Every choice of every document is a row that continues its document's prompt.
    rows = [(place, choice) for place, document in enumerate(documents) for choice in document.choices]
    tokens = [continuation(tokenizer, documents[place].prompt, choice) for place, choice in rows]
    longest = max(len(one) for one in tokens)
    padded = torch.tensor([[*one, *[end] * (longest - len(one))] for one in tokens], device=model.device)
    owner = torch.tensor([place for place, _ in rows], device=model.device)
    after = read.rows(owner).go_on(model, padded).float().log_softmax(-1)

    # The last token's logits are those of the end of the text, or of what is after padding, which is not read.
    following = torch.cat([padded[:, 1:], torch.full_like(padded[:, :1], end)], dim=1)
    later = after.gather(2, following[..., None])[..., 0].double().cpu()
    at_first = read.first[owner].gather(1, padded[:, :1])[:, 0].double().cpu()

    sums: list[list[float]] = [[] for _ in documents]
    ends: list[list[float]] = [[] for _ in documents]

    for row, (place, _) in enumerate(rows):
        number = len(tokens[row])
        value = at_first[row].item() + later[row, : number - 1].sum().item()
        sums[place].append(value)
        ends[place].append(value + later[row, number - 1].item())

    texts = [""] * len(documents)
    if any(document.answer for document in documents):
        texts = _answers(model, tokenizer, read)

    return [Scores(tuple(a), tuple(b), text) for a, b, text in zip(sums, ends, texts, strict=True)]


def _answers(model: Any, tokenizer: Any, read: _Read) -> list[str]:
    """Greedy answers of up to `NEW_TOKENS` tokens, after prompts that have been read."""
    token = read.first.argmax(-1, keepdim=True)
    written = [token]
    ended = token == tokenizer.eos_token_id

    for _ in range(NEW_TOKENS - 1):
        if ended.all():
            break

        token = read.go_on(model, token)[:, -1].argmax(-1, keepdim=True)
        written.append(token)
        ended |= token == tokenizer.eos_token_id

    texts = []
    for ids in torch.cat(written, dim=1).tolist():
        kept = ids[: ids.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ids else ids
        texts.append(tokenizer.decode(kept))

    return texts


def continuation(tokenizer: Any, prompt: str, choice: str) -> list[int]:
    """The tokens of a choice after a prompt and a space."""
    before = tokenizer(prompt)["input_ids"]
    whole = tokenizer(f"{prompt} {choice}")["input_ids"]
    assert whole[: len(before)] == before, (prompt, choice)

    return list(whole[len(before) :])


def marks_of(documents: Sequence[Document], scores: Sequence[Scores]) -> dict[str, str]:
    """Metric → for each document 1 if its best choice, or its greedy answer, is right, else 0.

    `usual` and `equal` are sums over the tokens of a choice, `… with end` those with the end of the text, `usual by
    character` sums divided by the choice's characters (`acc_norm`; by digit, if choices are numbers). Of equals the
    first counts.
    """
    marks: dict[str, list[bool]] = {}

    for document, one in zip(documents, scores, strict=True):
        by_character = [value / len(choice) for value, choice in zip(one.sums, document.choices, strict=True)]
        kinds = {"": one.sums, " with end": one.ends, " by character": by_character}

        for name, (places, right) in document.sets.items():
            for kind, values in kinds.items():
                best = max(places, key=lambda place: values[place])
                marks.setdefault(f"{name}{kind}", []).append(best == right)

        if document.answer:
            number = re.search(r"\d+", one.text)
            marks.setdefault("generated", []).append(number is not None and number[0] == document.answer)

    return {metric: "".join(str(int(mark)) for mark in values) for metric, values in marks.items()}
