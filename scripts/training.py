"""Train every causal model of transformers that can be built at pico size for a step, and compare with plain torch.

    python scripts/training.py [--only REGEX] [--results FILE] [--seconds 240] [--rows plain completions chats packed]

For each class, rows are trained on in four ways: plain text, completions only, chats, and plain text packed into
sequences. The loss of the first step and the norm of its gradient are compared with a loop in torch that passes one row
at a time through the model and takes its own logits. The adapter is the recipe's default, with random numbers to start
from. A way is equal, refused (with an error of ours, whose statement about the model is confirmed in torch where it can
be), WRONG, or a crash; and a dry run has to say the same. Finished models are kept in FILE, and are not done again.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import re
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import examining
import torch
from architectures import LARGEST, attend_to_all, pico_config
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from adapterswap.core.model.base import language_model_class
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.kit.errors import AdapterswapError

CAUSAL = sorted(
    {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
)
WAYS = ("plain", "completions", "chats", "packed")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TEXTS = ["".join(LETTERS[(5 * row + 7 * place) % 36] for place in range(3 + 2 * row)) for row in range(4)]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}x{{ message['content'] }}y"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)
MUCH = 5e-4  # of the loss and of the norm: some three times what rounding moves in the models where it moves most


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter, whatever a class of transformers makes of the text before."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, **{letter: 3 + place for place, letter in enumerate(LETTERS)}}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE, model_max_length=512
    )


def build(model_type: str, folder: Path) -> Any:
    """Save the pico model with random weights, without dropout, noise and a loss of its routers."""
    config = pico_config(model_type)
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    if model_type.startswith("qwen") and "_vl" in model_type and isinstance(rope, dict):
        rope["mrope_section"] = [1, 1, 2]  # of the half of a head's 8 dimensions
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and re.search("drop(out)?($|_)|pdrop|layerdrop|jitter", name):
                setattr(part, name, 0.0)
        if getattr(part, "router_aux_loss_coef", None):
            part.router_aux_loss_coef = 0.0
    attend_to_all(config)
    auto = language_model_class(config, model_type)
    kind = auto._model_mapping[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = config.get_text_config()
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"still has {size:,} parameters")
    torch.manual_seed(0)
    model = kind(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return auto.from_pretrained(folder).eval()


def rows_of(way: str) -> tuple[dict[str, str], list[dict[str, Any]], list[tuple[list[int], list[int]]]]:
    """The source's templates, its rows, and what is expected of them: ids and labels."""
    known = tokenizer().get_vocab()
    if way in ("plain", "packed"):
        rows = [{"text": text} for text in TEXTS]
        tokens = [[*(known[letter] for letter in text), 1] for text in TEXTS]
        return {"text": "{text}"}, rows, [(row, row) for row in tokens]

    expected, rows = [], []
    for text in TEXTS:
        prompt, answer = text[:-2], text[-2:]
        before = prompt
        if way == "completions":
            rows.append({"prompt": prompt, "completion": answer})
        else:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            rows.append({"messages": turns})
            before = f"x{prompt}y"
        after = [*(known[letter] for letter in answer), 1]
        ids = [known[letter] for letter in before]
        expected.append((ids + after, [-100] * len(ids) + after))
    if way == "completions":
        return {"prompt": "{prompt}", "completion": "{completion}"}, rows, expected
    return {"messages": "messages"}, rows, expected


def recipe(base: Path, folder: Path, way: str) -> TrainRecipe:
    """One step on all rows, with the adapter's defaults except for its size."""
    templates, rows, _ = rows_of(way)
    data = folder / f"{way}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return TrainRecipe.model_validate(
        {
            "base_model": str(base),
            "adapter": {"r": 4, "alpha": 8},
            "datasets": [{"path": str(data), **templates}],
            "training": {
                "max_steps": 1,
                "batch_size": 2,
                "gradient_accumulation": 2 if way != "packed" else 1,
                "learning_rate": 1e-12,
                "max_grad_norm": 1e9,
                "max_length": 48,
                "packing": way == "packed",
                "save_every_samples": None,
                "logging_steps": 1,
            },
        }
    )


def by_hand(model: Any, expected: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """The mean loss of the labels, one row after the other, by the model's own logits."""
    total: Any = 0.0
    count = 0
    for ids, labels in expected:
        row = torch.tensor([ids])
        logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0, :-1].double()
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        count += sum(label != -100 for label in labels[1:])
    return torch.as_tensor(total / count)


class Watched:
    """The loss and the gradient's norm of the steps of a training, from the trainer's own log."""

    def __enter__(self) -> Watched:
        from adapterswap.experiments.training.trainer import ExpertTrainer

        self.kind, self.log, self.made = ExpertTrainer, ExpertTrainer.log, ExpertTrainer.train
        self.logs: list[dict[str, float]] = []
        watched = self

        def log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            watched.logs.append(dict(logs))
            watched.log(trainer, logs, *args, **kwargs)

        def begin(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            # An adapter begins at zero, where half of its gradients are zero too.
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            watched.model = copy.deepcopy(trainer.model)
            for part in watched.model.modules():
                part.__dict__.pop("forward", None)  # TRL's head
            return watched.made(trainer, *args, **kwargs)

        ExpertTrainer.log, ExpertTrainer.train = log, begin  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self.kind.log, self.kind.train = self.log, self.made  # type: ignore[method-assign]


def examine(model_type: str, ways: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """What became of each way for one class."""
    try:
        base = build(model_type, folder / "base")
        plain = by_hand(base, rows_of("plain")[2])
        if not torch.isfinite(plain):
            raise ValueError("its logits are not finite")
    except Exception as error:
        yield {"way": "all", "outcome": "not built", "reason": short(error)}
        return
    for way in ways:
        run = recipe(folder / "base", folder, way)
        said = outcome(run, way, folder / way, base)
        if way == "plain" or said["outcome"] == "refused":
            dry = dry_run(run)
            if said["outcome"] != "crash" and dry != said.get("error", ""):
                reason = f"{said['reason']} | dry run: {dry or 'exit 0'}"
                said = {**said, "outcome": "DRY RUN DIFFERS", "reason": reason}
        yield {"way": way, "class": type(base).__name__, **said}


def dry_run(run: TrainRecipe) -> str:
    """The error of a dry run; empty if there is none."""
    try:
        estimate(run)
    except AdapterswapError as error:
        return str(error)
    except Exception as error:
        return short(error)
    return ""


def outcome(run: TrainRecipe, way: str, out: Path, base: Any) -> dict[str, Any]:
    """The first step compared with torch."""
    expected = rows_of(way)[2]
    try:
        with Watched() as watched:
            train(run, out_path=out, progress=False)
    except AdapterswapError as error:
        reason = f"{error.problems[0].kind.__name__}: {error.problems[0].message}"
        return {"outcome": "refused", "reason": reason, "error": str(error), "true": is_true(error, way, base)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"outcome": "crash", "reason": f"{short(error)} ({Path(where.filename).name}:{where.lineno})"}

    model = watched.model.train()
    try:
        loss = by_hand(model.double(), expected)
    except (RuntimeError, ValueError):  # some models mix float32 into it
        loss = by_hand(model.float(), expected)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    logged = next(entry for entry in watched.logs if "loss" in entry)
    apart = {
        "loss": (logged["loss"], loss.item()),
        "norm of the gradient": (logged["grad_norm"], norm),
    }
    for name, (ours, theirs) in apart.items():
        if not abs(ours - theirs) <= MUCH * abs(theirs):
            return {"outcome": "WRONG", "reason": f"the {name} is {ours:.6f}, in torch {theirs:.6f}"}
    return {"outcome": "equal", "reason": ""}


def is_true(error: AdapterswapError, way: str, base: Any) -> str:
    """Whether a refusal's statement about the model holds in torch; `-` if it makes none that is checked here."""
    row = torch.tensor([rows_of("plain")[2][3][0]])
    first, second = row[:, :4], row[:, 4:]

    def logits(ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(base(input_ids=ids, **inputs).logits)

    if error.parameter == "base_model" and "reads the tokens" in str(error):
        other = row.clone()
        other[0, -1] = 5 if row[0, -1] != 5 else 6
        apart = (logits(row)[:, :-1] - logits(other)[:, :-1]).abs().max().item()
        return "true" if apart > 1e-4 else "UNTRUE"
    if error.parameter == "training.packing":
        positions = torch.cat([torch.arange(first.shape[1]), torch.arange(second.shape[1])])[None]
        try:
            packed = logits(row, position_ids=positions, use_cache=False)[:, first.shape[1] :]
        except Exception:
            return "true"
        return "true" if (packed - logits(second)).abs().max().item() > 1e-4 else "UNTRUE"
    return "-"


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}".replace("\n", " ")


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The tally by outcome, and by reason."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    reasons: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        counts[row["outcome"], row["way"]] += 1
        if row["outcome"] != "equal":
            reason = re.sub(r"\b[A-Z]\w+For\w+|\S*/\S+", "…", row["reason"])
            reasons[row["outcome"], re.sub(r"\d+(\.\d+)?", "N", reason)[:170], row.get("true", "-")].append(
                f"{row['model']} {row['way']}"
            )
    for (kind, reason, truth), where in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"\n{kind} ×{len(where)}, {truth}: {reason}\n    {', '.join(where[:12])}{', …' * (len(where) > 12)}")
    print(f"\n{len({row['model'] for row in rows})} models tried\noutcome          way          count")
    for (kind, way), count in sorted(counts.items()):
        print(f"{kind:16} {way:12} {count}")


def main() -> int:
    parser = examining.parser(__doc__, results="training.jsonl", seconds=240)
    parser.add_argument("--rows", nargs="*", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    examining.quiet()
    with tempfile.TemporaryDirectory() as place:
        list(examine("llama", ["plain"], Path(place)))  # imports what each process would import for itself
    gc.freeze()

    rows = examining.examined(
        {model: {"model": model} for model in CAUSAL},
        options,
        lambda case, folder: list(examine(case["model"], options.rows, folder)),
        summary=lambda found: ", ".join(f"{row['way']} {row['outcome']}" for row in found),
        crashed=lambda reason: {"way": "all", "outcome": "crash", "reason": reason},
    )
    report(rows)
    return int(any(row["outcome"] not in ("equal", "refused", "not built") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
