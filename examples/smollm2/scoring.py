"""How the fifth plan scores a model: log-likelihoods of choices, and a greedy answer, for documents of its tests.

Documents whose prompts have equally many tokens are one batch, so nothing is padded on the left, and a prompt is read
once for all its choices.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NEW_TOKENS = 8  # of a greedy answer
SIZE = 32  # documents of a batch, on a CPU; on a GPU eight times as many


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
    results: list[Scores | None] = [None] * len(documents)
    size = SIZE if model.device.type == "cpu" else 8 * SIZE
    prompts = [tokenizer(document.prompt)["input_ids"] for document in documents]

    for batch in _batches(prompts, size):
        chosen = [documents[place] for place in batch]
        scored = _score_batch(model, tokenizer, [prompts[place] for place in batch], chosen)
        for place, one in zip(batch, scored, strict=True):
            results[place] = one

    return [one for one in results if one is not None]


def _batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """The places of prompts with equally many tokens, up to `size` at a time."""
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(place)

    for _, places in sorted(by_length.items()):
        for start in range(0, len(places), size):
            yield places[start : start + size]


@torch.no_grad()
def _score_batch(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], documents: Sequence[Document]
) -> list[Scores]:
    """The scores of documents with equally long prompts."""
    device, end = model.device, tokenizer.eos_token_id
    output = model(input_ids=torch.tensor(prompts, device=device), use_cache=True)
    first = output.logits[:, -1].float().log_softmax(-1)

    # Every choice of every document is a row that continues its document's prompt.
    rows = [(place, choice) for place, document in enumerate(documents) for choice in document.choices]
    tokens = [continuation(tokenizer, documents[place].prompt, choice) for place, choice in rows]
    longest = max(len(one) for one in tokens)
    padded = torch.tensor([[*one, *[end] * (longest - len(one))] for one in tokens], device=device)
    owner = torch.tensor([place for place, _ in rows], device=device)

    cache = copy.deepcopy(output.past_key_values)
    cache.batch_select_indices(owner)
    after = model(input_ids=padded, past_key_values=cache, use_cache=True).logits.float().log_softmax(-1)

    sums: list[list[float]] = [[] for _ in documents]
    ends: list[list[float]] = [[] for _ in documents]

    for row, (place, _) in enumerate(rows):
        ids = tokens[row]
        value = first[place, ids[0]].item()
        value += sum(after[row, at, token].item() for at, token in enumerate(ids[1:]))
        sums[place].append(value)
        ends[place].append(value + after[row, len(ids) - 1, end].item())

    texts = [""] * len(documents)
    if any(document.answer for document in documents):
        texts = _answers(model, tokenizer, first, output.past_key_values)

    return [Scores(tuple(a), tuple(b), text) for a, b, text in zip(sums, ends, texts, strict=True)]


def _answers(model: Any, tokenizer: Any, first: torch.Tensor, cache: Any) -> list[str]:
    """Greedy answers of up to `NEW_TOKENS` tokens, after prompts that have been read."""
    token = first.argmax(-1, keepdim=True)
    written = [token]
    ended = token == tokenizer.eos_token_id

    for _ in range(NEW_TOKENS - 1):
        if ended.all():
            break

        output = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = output.logits[:, -1].argmax(-1, keepdim=True)
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
