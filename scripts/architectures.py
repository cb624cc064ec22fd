"""Compose and merge LoRA on every text model of transformers that can be built at pico size, and compare with PEFT.

    python scripts/architectures.py [--only REGEX] [--results FILE] [--seconds 120] [--kind lora|bias|parameters]

Takes every causal, sequence-to-sequence and classification class. For each, PEFT makes two random adapters
(`all-linear`), whose soup, swap with a transition zone, and merge are compared with PEFT's own ΔW, added up in torch.
An operation is exact, refused, wrong (also: PEFT or transformers cannot load the result) or a crash; each reason to
refuse is shown with what it is about: where it says that the base lacks something or that PEFT would not load
something, base and PEFT are asked. Finished architectures are kept in FILE, and are not done again.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parent))

import examining
import torch
import transformers
from core.matrix.reference import Changes, changes_in, load_with_peft, untied
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from tolerances import tolerance
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

import adapterswap
from adapterswap.experiments.training.small import LAYERS, TOKENS, WIDTH, smaller
from adapterswap.kit.errors import AdapterswapError

LARGEST = 8_000_000  # parameters: a model that is still larger has sizes of unknown names

LINEAR = (torch.nn.Linear, Conv1D)

TASKS: dict[str, Mapping[str, str | tuple[str, ...]]] = {
    "CAUSAL_LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_2_SEQ_LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}

# What the names do not tell.
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "dots1": {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1},
    "esm": {"vocab_size": TOKENS, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "is_decoder": False},
    "squeezebert": {"embedding_size": WIDTH},
    "xlstm": {"num_blocks": LAYERS},
}


def pico_config(model_type: str) -> Any:
    """The config of a model type with its default structure, but at most a few layers, experts, heads and tokens."""
    config = CONFIG_MAPPING[model_type]
    return config.from_dict({**smaller(config().to_dict()), **SPECIAL.get(model_type, {})})


def attend_to_all(config: Any) -> None:
    """Let sparse attention choose all tokens of a row: of equal scores, any may be among the first few."""
    for part in (config, config.get_text_config()):
        if getattr(part, "index_topk", None):
            part.index_topk = 64  # more than a row has tokens


def build(task: str, model_type: str, folder: Path) -> PreTrainedModel:
    """Save the pico model, with random weights."""
    names = TASKS[task][model_type]
    kind = getattr(transformers, names if isinstance(names, str) else names[0])
    config = pico_config(model_type)
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"still has {size:,} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.float().save_pretrained(folder)
    return model


def random_adapter(base: PreTrainedModel, task: str, kind: str, out: Path, *, seed: int, **options: Any) -> Changes:
    """Save an adapter with PEFT, with random numbers in all that it trains; its ΔW as PEFT computes it."""
    config = LoraConfig(task_type=task, use_rslora=True, **KINDS[kind], **options)
    if task in ("TOKEN_CLS", "QUESTION_ANS"):  # whose heads PEFT trains in full
        heads = re.compile(r"(classifier|score|qa_outputs)(\.|$)")
        config.exclude_modules = {name for name, _ in base.named_modules() if heads.search(name)}
    try:
        model = get_peft_model(copy.deepcopy(base), config)
    except (TypeError, ValueError) as error:
        if not re.search("Mamba|modules_to_save cannot be applied", str(error)):
            raise
        # "all-linear" includes modules that state-space blocks do not call, and heads that PEFT trains in full.
        linear = {name.rpartition(".")[2] for name, module in base.named_modules() if type(module) in LINEAR}
        head = base.get_output_embeddings()
        odd = {name.rpartition(".")[2] for name, module in base.named_modules() if module is head}
        odd |= {name for name in linear if name.endswith(("classifier", "score", "qa_outputs"))}
        config.target_modules = linear - odd - ({"out_proj", "dt_proj"} if "Mamba" in str(error) else set())
        model = get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.05
    model.save_pretrained(out)
    return changes_in(model.eval(), base)


def layers_of(base: PreTrainedModel) -> Callable[[str], int | None]:
    """Which layer a parameter is in: those of the outermost list with as many modules as the pico config has layers."""
    lists = {name: len(module) for name, module in base.named_modules() if isinstance(module, torch.nn.ModuleList)}

    def layer(parameter: str) -> int | None:
        parts = parameter.split(".")
        stems = (".".join(parts[:end]) for end in range(1, len(parts)))
        outermost = next((stem for stem in stems if stem in lists), None)
        return int(parts[outermost.count(".") + 1]) if outermost and lists[outermost] == LAYERS else None

    return layer


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "bias": {"target_modules": "all-linear", "bias": "all"},
    "parameters": {"target_parameters": ["router.weight", "experts.gate_up_proj", "experts.down_proj"]},
}
SWAP = {"bottom": 1, "top": 1, "bottom_transition": 1, "task_weight": 1, "language_weight": 3}
_SHARES = {None: (0.25, 0.75), 0: (0, 1), 1: (0.25, 0.75), 2: (1, 0), 3: (0, 1)}


def added_up(task: Changes, language: Changes, layer: Callable[[str], int | None] | None) -> Changes:
    """The expected ΔW of the soup or, with `layer`, of the swap."""
    total: Changes = {}
    for name in sorted(task.keys() | language.keys()):
        shares = zip(_SHARES[layer(name) if layer else None], (task, language), strict=True)
        total[name] = torch.stack([share * side[name] for share, side in shares if name in side]).sum(dim=0)
    return total


class Wrong(Exception):
    """The library gave a result that is not the expected one."""


def compare(actual: Changes, expected: Changes, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Compare ΔW by parameter; `weights` are the base's if they are differences of full weights, rounded as these."""
    for name in sorted(actual.keys() | expected.keys()):
        zero = torch.zeros_like(actual.get(name, expected.get(name)))
        one, other = (tensor.squeeze() for tensor in (actual.get(name, zero), expected.get(name, zero)))
        if one.shape != other.shape:
            raise Wrong(f"{name} has the shape {list(one.shape)}, expected {list(other.shape)}")
        scale = max((tensor.abs().max().item() for tensor in (other, weights[name] if weights else other)), default=0)
        apart = (one.double() - other.double()).abs().max().item()
        if not apart <= max(tolerance(other, scale=2 * scale), 1e-7):
            raise Wrong(f"{name} is off by {apart:.1e} of {scale:.1e}")


def output_of(model: Any) -> torch.Tensor | None:
    """The first output for a few tokens; None if the model needs other inputs."""
    tokens = torch.arange(24).reshape(2, 12) * 7 % 60 + 3
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    if plain.config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(plain.forward).parameters:
        inputs["decoder_input_ids"] = tokens
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            output = model(**inputs)
    except Exception:
        return None
    return next((value for value in output.to_tuple() if isinstance(value, torch.Tensor) and value.dim() > 0), None)


def loaded(out: Path, base: PreTrainedModel) -> tuple[PreTrainedModel, Changes]:
    """Full weights as transformers loads them, and their difference to the base's."""
    reports = []
    for folder in (out, base.name_or_path):
        model, info = type(base).from_pretrained(folder, output_loading_info=True)
        reports.append((model.eval(), {what: sorted(map(str, keys)) for what, keys in info.items() if keys}))
    (model, odd), (_, before) = reports
    if odd != before:
        raise Wrong(f"transformers reports {odd}")
    weights, own = dict(untied(base).named_parameters()), dict(untied(model).named_parameters())
    return model, {name: (own[name].double() - weights[name].double()).detach() for name in weights}


class Subject:
    """The operations on one pair of adapters, each of which raises `Wrong`, or whatever the library raises."""

    def __init__(self, base: PreTrainedModel, task: str, kind: str, folder: Path) -> None:
        self.base, self.folder, self.experts = base, folder, (folder / "task", folder / "language")
        self.changes = [
            random_adapter(base, task, kind, out, seed=rank, r=rank, lora_alpha=rank + 2)
            for out, rank in zip(self.experts, (4, 3), strict=True)
        ]
        if not any(change.any() for change in self.changes[0].values()):
            raise ValueError("the adapter changes nothing")
        self.loads = True
        self.plans: dict[str, tuple[Any, Changes]] = {}
        self.composed: Any = None

    def load(self) -> None:
        """PEFT loads what it has saved."""
        for expert, changes in zip(self.experts, self.changes, strict=True):
            compare(changes_in(load_with_peft(self.base, expert)[0], self.base), changes)

    def soup(self) -> str:
        plan = adapterswap.soup(*self.experts, task_weight=1, language_weight=3)
        return self._compose("soup", plan, added_up(*self.changes, None))

    def swap(self) -> str:
        plan = adapterswap.layer_swap(*self.experts, **SWAP)
        return self._compose("swap", plan, added_up(*self.changes, layers_of(self.base)))

    def _compose(self, name: str, plan: Any, expected: Changes) -> str:
        self.plans[name] = plan, expected
        out = adapterswap.write_adapter(plan, self.folder / name)
        if not self.loads:
            return "PEFT loses"
        with _failing("PEFT cannot load it"):
            self.composed, _ = load_with_peft(self.base, out)
            actual = changes_in(self.composed, self.base)
        compare(actual, expected)
        return "exact"

    def merge(self) -> str:
        """The swap as full weights, or the soup of a model without one; loaded, and run beside the adapter."""
        plan, expected = self.plans.get("swap") or self.plans["soup"]
        out = adapterswap.merge(plan, out_path=self.folder / "merged")
        with _failing("transformers cannot load it"):
            model, actual = loaded(out, self.base)
        compare(actual, expected, dict(untied(self.base).named_parameters()))
        if self.composed is None:
            return "exact"

        ours = output_of(model)
        of_adapter = output_of(self.composed)
        if ours is None or of_adapter is None or not torch.isfinite(of_adapter).all() or _alike(ours, of_adapter):
            return "exact"

        # LongCat's router reads a module's weight and never calls the module: LoRA on it has no effect until PEFT, too,
        # merges it.
        of_peft = output_of(self.composed.merge_and_unload())
        if of_peft is None or not _alike(ours, of_peft):
            apart = (ours - of_adapter).abs().max().item()
            raise Wrong(f"the output is off by {apart:.1e} of {of_adapter.abs().max().item():.1e}")
        return "exact"


def _alike(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether two outputs differ by no more than rounding through all layers."""
    return (ours - reference).abs().max().item() <= tolerance(reference, depth=4 * LAYERS)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{what}: {_short(error)}") from error


def examine(task: str, model_type: str, kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What became of each operation for one architecture."""
    try:
        model_class = type(build(task, model_type, folder / "base"))
        base = model_class.from_pretrained(folder / "base").eval()
    except Exception as error:
        yield {"operation": "all", "outcome": "not built", "reason": _short(error)}
        return
    try:
        subject = Subject(base, task, kind, folder)
    except Exception as error:
        yield {"operation": "all", "outcome": "PEFT cannot", "reason": _short(error)}
        return
    try:
        subject.load()
    except Exception as error:
        yield {"operation": "all", "outcome": "PEFT loses", "reason": _short(error)}
        subject.loads = False
    yield {"operation": "soup", **_outcome(subject.soup, subject)}
    yield {"operation": "swap", **_outcome(subject.swap, subject)}
    if subject.plans:
        yield {"operation": "merge", **_outcome(subject.merge, subject)}


def _outcome(operation: Callable[[], str], subject: Subject) -> dict[str, Any]:
    try:
        return {"outcome": operation(), "reason": ""}
    except AdapterswapError as error:
        reason = f"{error.problems[0].kind.__name__}: {error.problems[0].message}"
        return {"outcome": "refused", "reason": reason, "true": is_true(str(error), subject)}
    except Wrong as error:
        return {"outcome": "WRONG", "reason": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"outcome": "crash", "reason": f"{_short(error)} ({Path(where.filename).name}:{where.lineno})"}


def is_true(message: str, subject: Subject) -> str:
    """Whether a refusal's statement about the base or PEFT holds; `-` if it makes none that can be checked."""
    base = subject.base
    names = set(re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", message))
    if re.search("no such (weight|parameter|tensor)", message):
        there = [name for name in names if {name, f"{name}.weight"} & base.state_dict().keys()]
        return f"UNTRUE ({there[0]})" if there else "true"
    if "transformers computes from other tensors" in message:
        with safe_open(Path(base.name_or_path) / "model.safetensors", "pt") as file:
            stored = set(file.keys())
        there = [name for name in names if f"{name}.weight" in base.state_dict() and f"{name}.weight" not in stored]
        return "true" if there else "UNTRUE"
    if match := re.search("several lists of layers: (.*?)\\.(?= |$)", message, re.MULTILINE):
        lists = [base.get_submodule(name) for name in match[1].split(", ")]
        return "true" if all(isinstance(one, torch.nn.ModuleList) for one in lists) else "UNTRUE"
    if "does not say how many layers" in message:
        return "UNTRUE" if "num_hidden_layers" in base.config.to_dict() else "true"
    if "matches no module that earlier rules left" in message:  # the adapters have nothing in layers of their own
        layer = layers_of(base)
        return "UNTRUE" if any(layer(name) is not None for name in subject.changes[0]) else "true"
    if "PEFT would lose" in message:
        return "UNTRUE (PEFT loads both experts)" if subject.loads else "true"
    if re.search("PEFT (would|does|can)( ?not| load none)", message):
        return "UNTRUE (PEFT loads both experts)"
    return "-"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}".replace("\n", " ")


def report(rows: list[dict[str, Any]]) -> None:
    """The tally by outcome, and by reason."""
    print("\noutcome        operation  count")
    counts: dict[tuple[str, str], int] = defaultdict(int)
    reasons: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        counts[row["outcome"], row["operation"]] += 1
        if row["outcome"] != "exact":
            reason = re.sub(r"(?<!\w)[\w/-]*[./][\w./-]*\w", "…", row["reason"])
            truth = row.get("true", "-").partition(" ")[0]
            key = row["outcome"], re.sub(r"\d+", "N", reason)[:170], truth
            reasons[key].append(f"{row['task']} {row['model']} {row['operation']}")
    for (outcome, operation), count in sorted(counts.items()):
        print(f"{outcome:14} {operation:10} {count}")
    for (outcome, reason, truth), where in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"\n{outcome} ×{len(where)}, {truth}: {reason}\n    {', '.join(where[:8])}{', …' * (len(where) > 8)}")


def main() -> int:
    parser = examining.parser(__doc__, results="architectures.jsonl", seconds=120)
    parser.add_argument("--kind", choices=KINDS, default="lora")
    options = parser.parse_args()
    examining.quiet()

    cases: dict[str, examining.Case] = {}
    pairs = [(task, model) for task, models in TASKS.items() for model in models]
    for task, model in sorted(pairs, key=lambda pair: pair[1]):
        cases[f"{task} {model}"] = {"task": task, "model": model, "kind": options.kind}

    rows = examining.examined(
        cases,
        options,
        lambda case, folder: list(examine(case["task"], case["model"], case["kind"], folder)),
        summary=lambda found: ", ".join(f"{row['operation']} {row['outcome']}" for row in found),
        crashed=lambda reason: {"operation": "all", "outcome": "crash", "reason": reason},
    )
    report(rows)
    return int(any(row["outcome"] in ("WRONG", "crash") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
