"""Evaluate every model of transformers that continues texts, at pico size, and compare with plain torch row by row.

    python scripts/answering.py [--only REGEX] [--results FILE] [--seconds 120]

Takes every causal class and every multimodal class whose language model is a decoder. Prompts of different lengths are
answered, and choices are scored, in batches of eight. The references are a greedy loop and sums of log-probabilities in
torch, for each row alone. A way is equal, equal one by one (the model is not asked in batches, with a note), refused
(with an error whose statement is confirmed in torch), WRONG, or a crash. Finished types are kept in FILE.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import examining
import torch
from architectures import LARGEST, LAYERS, attend_to_all, pico_config
from tokenizers import Tokenizer, decoders, models
from tolerances import tolerance
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from adapterswap.core.model.base import language_model_class
from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.harness import OfflineTask
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import AdapterswapError

TYPES = sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})
# What a pico config needs to run, besides what it needs to be composed.
RUNNING: dict[str, dict[str, Any]] = {
    "rwkv": {"attention_hidden_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "dots1": {"num_experts_per_tok": 2},
}
WAYS = ("pico_write", "pico_choose")
LETTERS = [chr(0x4E00 + place) for place in range(93)]  # none of which is a space or a mark
QUESTIONS = ["".join(LETTERS[(5 * row + 7 * place) % 80] for place in range(2 + 5 * row)) for row in range(6)]
CHOICES = ["".join(LETTERS[10:13]), "".join(LETTERS[20:21]), "".join(LETTERS[30:35])]
STEPS = 6


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, **{letter: 3 + place for place, letter in enumerate(LETTERS)}}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", unk_token="<unk>")


def tasks() -> LoadedTasks:
    """A task that generates, and one that compares choices of different lengths."""
    rows = [{"q": question} for question in QUESTIONS]
    shared = {"test_split": "test", "doc_to_text": "{{q}}", "target_delimiter": "", "num_fewshot": 0}
    write = {
        "output_type": "generate_until",
        "doc_to_target": "a",
        "generation_kwargs": {"until": [], "max_gen_toks": STEPS},
        "metric_list": [{"metric": "exact_match"}],
    }
    choose = {
        "output_type": "multiple_choice",
        "doc_to_target": 0,
        "doc_to_choice": CHOICES,
        "metric_list": [{"metric": "acc"}],
    }
    return LoadedTasks(
        {
            name: OfflineTask({"test": rows}, {"task": name, **shared, **own})
            for name, own in zip(WAYS, (write, choose), strict=True)
        }
    )


def build(model_type: str) -> Any:
    """The pico model, with random weights that make each token depend on those before it."""
    config = pico_config(model_type)
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    if "_vl" in model_type and isinstance(rope, dict):
        rope["mrope_section"] = [1, 1, 2]  # of the half of a head's eight dimensions
    for name, value in RUNNING.get(model_type, {}).items():
        setattr(config, name, value)
    attend_to_all(config)
    if getattr(config.get_text_config(), "n_group", None):
        config.get_text_config().n_group = config.get_text_config().topk_group = 1  # of four experts
    auto = language_model_class(config, model_type)
    kind = auto._model_mapping[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"still has {size:,} parameters")

    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Of one row alone, in float64."""
    output: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0].double()
    return output


def ends_of(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return {1, *([ends] if isinstance(ends, int) else ends or [])}


def greedy(model: Any, ids: list[int]) -> list[int]:
    """The most likely tokens, one after another, without a cache."""
    answer: list[int] = []
    while len(answer) < STEPS and not ends_of(model).intersection(answer[-1:]):
        answer.append(int(logits(model, ids + answer)[-1].argmax()))
    return answer


@torch.no_grad()
def generated(model: Any, ids: list[int]) -> list[int]:
    """What the model's own `generate` answers to one row; its cache may compute otherwise than the row as a whole."""
    row = torch.tensor([ids])
    options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "num_beams": 1, "pad_token_id": 1}
    answer = model.generate(
        input_ids=row, attention_mask=torch.ones_like(row), eos_token_id=sorted(ends_of(model)), **options
    )
    return [int(token) for token in answer[0, len(ids) :]]


def likelihood(model: Any, ids: list[int], continuation: list[int]) -> float:
    steps = logits(model, ids + continuation[:-1])[len(ids) - 1 :].log_softmax(-1)
    return float(steps[torch.arange(len(continuation)), torch.tensor(continuation)].sum())


def compare(way: str, model: Any, result: Any) -> str:
    """What the answers are, beside the references."""
    text, outcome = tokenizer(), "equal"
    for sample in result.samples:
        ids = text(sample.doc["q"])["input_ids"]
        if way == "pico_write":
            if sample.output == text.decode(greedy(model, ids), skip_special_tokens=True):
                continue
            alone = text.decode(generated(model, ids), skip_special_tokens=True)
            if sample.output != alone:
                return f"WRONG: row {sample.doc_id} is {sample.output!r}, alone {alone!r}"
            outcome = "equal to generate alone, which differs without its cache"
            continue
        expected = [likelihood(model, ids, text(choice)["input_ids"]) for choice in CHOICES]
        found = [number for number, _ in sample.output]
        apart = max(abs(one - other) for one, other in zip(found, expected, strict=True))
        if not apart <= tolerance(expected, depth=2 * LAYERS):
            return f"WRONG: row {sample.doc_id} is off by {apart:.1e} of {max(map(abs, expected)):.1e}"
    return outcome + (" one by one" if "one_by_one" in result.settings else "")


def is_true(message: str, model: Any) -> bool:
    """Whether what a refusal says of the model holds."""
    ids = tokenizer()(QUESTIONS[2])["input_ids"]
    if "both directions" in message:
        before, after = logits(model, ids[:-1]), logits(model, ids)[:-1]
        return float((before - after).abs().max()) > 100 * tolerance(before, depth=LAYERS)
    for question in (lambda: logits(model, ids), lambda: generated(model, ids)):
        try:
            question()
        except Exception:
            return "cannot read a text alone" in message
    return False


def examine(model_type: str) -> dict[str, str]:
    """The outcome for each way."""
    try:
        model = build(model_type)
    except AdapterswapError as error:
        return {"built": f"refused: {error.problems[0].message}"}
    except Exception as error:
        return {"built": f"not built: {_short(error)}"}

    outcomes = {}
    for way in WAYS:
        try:
            fresh = copy.deepcopy(model)
            result = evaluate_model(fresh, tokenizer(), tasks().only([way]), Settings(batch_size=8))
            outcomes[way] = compare(way, model, result)
        except AdapterswapError as error:
            truth = "true" if is_true(str(error), model) else "UNTRUE"
            outcomes[way] = f"refused, {truth}: {error.problems[0].message}"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcomes[way] = f"crash: {_short(error)} ({Path(where.filename).name}:{where.lineno})"
    return outcomes


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}".replace("\n", " ")


def kind_of(outcome: str) -> str:
    """An outcome without what is special to one type."""
    return outcome.partition(":")[0]


def main() -> int:
    options = examining.parser(__doc__, results="answering.jsonl", seconds=120).parse_args()
    examining.quiet()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    rows = examining.examined(
        {model_type: {"model": model_type} for model_type in TYPES},
        options,
        lambda case, folder: [examine(case["model"])],
        summary=lambda found: "; ".join(f"{way} {outcome}" for way, outcome in outcomes_in(found)),
        crashed=lambda reason: {"built": f"crash: {reason}"},
    )
    counts = Counter((way, kind_of(outcome)) for way, outcome in outcomes_in(rows))
    for (way, kind), count in sorted(counts.items()):
        print(f"{way:12} {kind:60} {count}")
    return int(any(kind.startswith(("WRONG", "crash")) or "UNTRUE" in kind for _, kind in counts))


def outcomes_in(rows: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    """Each way and what came of it."""
    outcomes: list[tuple[str, str]] = []
    for row in rows:
        outcomes += [(way, outcome) for way, outcome in row.items() if way != "model"]
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
