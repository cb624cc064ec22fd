"""How much each layer of an expert changes the base's predictions on texts: importance by activations.

One layer's attention or MLP of one expert is active, and everything else is as in the base. The effect of that part is
KL(p_base ‖ p), summed over the tokens of the texts, in nats. Knows a running model and texts; decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.analysis.suggesting import Block, Importance
from adapterswap.errors import DataError
from adapterswap.files.smallfiles import expand, read_small
from adapterswap.live import LiveComposer
from adapterswap.planning.allocation import BASE
from adapterswap.planning.compositions import Composition
from adapterswap.planning.making import make_plan
from adapterswap.planning.plan import Plan
from adapterswap.training.recipe import DatasetSource
from adapterswap.training.rendering import Reader, choose_reader

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

__all__ = ["blocks_of", "importance_of_activations", "read_texts"]

MAX_TOKENS = 512  # per text; the rest is cut off
BATCH = 8  # texts per batch


def read_texts(path: str | Path, limit: int, *, parameter: str = "path") -> list[str]:
    """Read the first `limit` texts of a file: rows of a .jsonl file with the columns of common datasets, or lines.

    Args:
        path: the file.
        limit: how many texts to read.
        parameter: the public parameter that holds the path, for errors.

    Raises:
        DataError: the file has no text, or a row has other columns.
        AdapterswapError: the file cannot be read, or is larger than 16 MiB; see `read_small`.
    """
    path = expand(path)
    texts = []
    for number, line in enumerate(read_small(path, _FILES).decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if text and path.suffix == ".jsonl":
            text = _text_of_row(text, f"{path}, line {number}", parameter)
        if text:
            texts.append(text)
        if len(texts) == limit:
            break
    if not texts:
        raise DataError(f"{path} has no text", _FILES, parameter=parameter)
    return texts


def _readers() -> dict[tuple[str, ...], Reader]:
    """How to read a row, by the columns that it must have; the first match wins."""
    pairs = {
        ("prompt", "completion"): ("{prompt}", "{completion}"),
        ("question", "answer"): ("{question}", "{answer}"),  # GSM8K
        ("instruction", "input", "output"): ("{instruction}\n\n{input}", "{output}"),  # Alpaca
        ("instruction", "output"): ("{instruction}", "{output}"),
        ("inputs", "targets"): ("{inputs}", "{targets}"),  # Aya
    }
    sources: dict[tuple[str, ...], DatasetSource] = {("text",): DatasetSource(path="rows", text="{text}")}
    sources |= {
        columns: DatasetSource(path="rows", prompt=prompt, completion=completion)
        for columns, (prompt, completion) in pairs.items()
    }
    sources[("messages",)] = DatasetSource(path="rows", messages="messages")
    return {columns: choose_reader(source) for columns, source in sources.items()}


_READERS = _readers()
_FILES = (
    f"Pass a text file with one text per line, or a .jsonl file whose rows have one of these sets of columns: "
    f"{'; '.join(', '.join(columns) for columns in _READERS)}"
)


def _text_of_row(line: str, where: str, parameter: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}", _FILES, parameter=parameter) from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object", _FILES, parameter=parameter)
    for columns, reader in _READERS.items():
        if all(column in row for column in columns):
            return "\n".join(_joined(prompt, completion) for prompt, completion in reader(row))
    raise DataError(f"{where} has the columns {', '.join(row) or 'none'}", _FILES, parameter=parameter)


def _joined(prompt: str, completion: str) -> str:
    return (
        prompt + completion if prompt[-1:].isspace() or completion[:1].isspace() else f"{prompt} {completion}".strip()
    )


def blocks_of(plan: Plan, expert: str) -> list[Block]:
    """The layers and kinds of modules that an expert of the plan adapts, in order."""
    blocks = {(module.layer, module.kind) for module in plan.adapters[expert].modules.values()}
    return sorted((layer, kind) for layer, kind in blocks if layer is not None)


def importance_of_activations(
    model: PeftModel,
    tokenizer: Any,
    plan: Plan,
    *,
    sides: Mapping[str, str],
    texts: Mapping[str, Sequence[str]],
    progress: Callable[[], None] = lambda: None,
) -> Importance:
    """Measure each expert on its own texts.

    Args:
        model: the base with the plan's experts loaded under their names.
        tokenizer: the base's tokenizer.
        plan: any plan with the two experts.
        sides: `task` and `language` → the expert's name in the plan.
        texts: `task` and `language` → texts.
        progress: called after every batch of texts.

    Raises:
        DataError: an expert changes no prediction on its texts, or no text has two tokens.
    """
    composer = LiveComposer(model)
    shares = {}
    for side, expert in sides.items():
        alone = {block: _alone(plan, expert, block) for block in blocks_of(plan, expert)}
        effects = dict.fromkeys(alone, 0.0)
        for batch in _batches(tokenizer, texts[side], side, model.device):
            with composer.use(BASE):
                before = _predictions(model, batch)
            for block, only in alone.items():
                with composer.use(only):
                    effects[block] += _divergence(before, _predictions(model, batch), batch["attention_mask"])
            progress()
        total = sum(effects.values())
        if not total > 0:
            raise DataError(
                f"the expert {expert!r} changes no prediction on the {side} texts",
                "Use texts like those it was trained on",
                parameter=f"{side}_texts",
            )
        shares[side] = {block: value / total for block, value in effects.items()}
    return Importance("activations", plan.one_depth("`suggest`"), shares["task"], shares["language"])


def _alone(plan: Plan, expert: str, block: Block) -> Plan:
    """One layer's attention or MLP of one expert, everything else as in the base."""
    layer, kind = block
    rules = [{"layers": layer, "modules": kind, "expert": expert}, {"expert": BASE}]
    composition = Composition.model_validate({"allocation": rules, "num_layers": plan.num_layers})
    return make_plan(composition, plan.experts)


def _batches(tokenizer: Any, texts: Sequence[str], side: str, device: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of texts of similar length, padded on the right, where causal attention does not see the padding."""
    import torch

    encoded = [tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"] for text in texts]
    encoded = sorted((ids for ids in encoded if len(ids) > 1), key=len)
    if not encoded:
        raise DataError(f"no {side} text has at least two tokens", "Use longer texts", parameter=f"{side}_texts")
    for start in range(0, len(encoded), BATCH):
        rows = encoded[start : start + BATCH]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        yield {"input_ids": ids, "attention_mask": mask}


def _predictions(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the next token (rows, tokens, vocabulary)."""
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(**batch).logits
    return logits


def _divergence(before: torch.Tensor, now: torch.Tensor, mask: torch.Tensor) -> float:
    """KL(before ‖ now) summed over the batch's tokens; one row at a time, because vocabularies are large."""
    import torch

    total = 0.0
    with torch.inference_mode():
        for reference_logits, logits, kept in zip(before, now, mask, strict=True):
            base = reference_logits.float().log_softmax(-1)
            divergence = (base.exp() * (base - logits.float().log_softmax(-1))).sum(-1)
            total += float((divergence * kept).sum())
    return total
