"""PEFT's adapter_config.json: what it says of a LoRA's arithmetic, and a refusal of what adapterswap cannot do exactly.

Knows the meaning of the keys, as PEFT 0.21 resolves them. Knows nothing of tensors, nor of what is done with adapters.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError, Problems

__all__ = ["AdapterConfig", "read_adapter_config", "scale"]

# Keys that do not change what a trained LoRA computes (or do so only where the tensors show it).
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip

# Keys read below, one by one.
_READ = {
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "modules_to_save", "r",
    "rank_pattern", "use_rslora",
}  # fmt: skip

# Keys that, when set, make the adapter something else than W + s·B·A, and what they mean.
_REFUSED = {
    "alora_invocation_tokens": "an activated LoRA (aLoRA) applies only after its invocation tokens",
    "arrow_config": "Arrow routes between adapters at run time",
    "kasa_config": "KaSA changes the base's weights",
    "layer_replication": "layer_replication repeats layers, so that indices no longer name the base's",
    "lora_bias": "lora_bias adds biases that a composition of ΔW leaves out",
    "monteclora_config": "MonteCLoRA samples its weights",
    "target_parameters": "target_parameters adapts fused parameters, which is not exact here yet",
    "trainable_token_indices": "trainable tokens are no low-rank change",
    "use_bdlora": "BD-LoRA's blocks are not plain A and B",
    "use_dora": "DoRA's ΔW depends on the base's weights, so it cannot be composed without them",
    "use_qalora": "QA-LoRA pools its inputs",
    "velora_config": "VeLoRA compresses activations",
}

# Values of init_lora_weights that leave the base's weights as they were.
_PLAIN_INITS = {True, False, "gaussian", "eva", "orthogonal"}

_RETRAIN = "Train it as a plain or rank-stabilized LoRA, or convert it with PEFT first"


def scale(rank: int, alpha: float, rslora: bool) -> float:
    """The factor s of ΔW = s·B·A: α/√r for rank-stabilized LoRA (arXiv:2312.03732), α/r for plain LoRA."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says that matters for ΔW.

    Attributes:
        base_model, revision: the base that the adapter was trained on, as PEFT wrote it.
        rank, alpha, rslora: the global values.
        rank_pattern, alpha_pattern: per module, by regex; see `rank_of` and `alpha_of`.
        fan_in_fan_out: the base stores its weights transposed (GPT-2's Conv1D).
        task_type: such as CAUSAL_LM, or None.
        modules_to_save: modules trained in full, by the last part of their name.
    """

    base_model: str | None
    revision: str | None
    rank: int
    alpha: float
    rslora: bool
    fan_in_fan_out: bool
    task_type: str | None
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.rank)

    def alpha_of(self, module: str) -> float:
        return self.alpha_pattern.get(_pattern_key(self.alpha_pattern, module), self.alpha)


def _pattern_key(patterns: dict[str, Any], module: str) -> str:
    """PEFT's rule: the first key that, as a regex, matches the module's name from some dot on."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def read_adapter_config(path: str | Path) -> AdapterConfig:
    """Read an adapter_config.json.

    Raises:
        AdapterswapError: the file is missing or not JSON, a value has the wrong type, the adapter is no LoRA, or it is
            a variant of LoRA that cannot be composed exactly. All mistakes are told together.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterswapError(
            f"{path} cannot be read: {error.strerror}", "Give a PEFT adapter: a folder with adapter_config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise AdapterswapError(f"{path} is not JSON in UTF-8: {error}", "Save or download the adapter again") from None
    if not isinstance(content, dict):
        raise AdapterswapError(f"{path} is not a JSON object", "Save or download the adapter again")
    problems = Problems()
    _refuse(content, path, problems)
    config = _read(content, path, problems)
    problems.raise_if_any()
    assert config is not None
    return config


def _refuse(content: dict[str, Any], path: Path, problems: Problems) -> None:
    if content.get("peft_type") != "LORA":
        problems.add(f"{path}: peft_type is {content.get('peft_type')!r}, not LORA", "Give a LoRA adapter")
        return  # another method's keys are not judged by LoRA's rules
    for key, reason in _REFUSED.items():
        if content.get(key):
            problems.add(f"{path}: {key} is set: {reason}", _RETRAIN)
    if content.get("bias", "none") != "none":
        problems.add(f"{path}: bias is {content['bias']!r}, and trained biases are not part of ΔW", _RETRAIN)
    init = content.get("init_lora_weights", True)
    if not (init is None or (isinstance(init, bool | str) and init in _PLAIN_INITS)):
        problems.add(
            f"{path}: init_lora_weights is {init!r}, which changed the base's weights",
            "Save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
        )
    for key in sorted(content.keys() - _HARMLESS - _READ - _REFUSED.keys()):
        if content[key]:
            problems.add(
                f"{path}: the key {key!r} is unknown here, and may change what the adapter computes",
                "Remove the key if it does not, or use a version of adapterswap that knows it",
            )


def _read(content: dict[str, Any], path: Path, problems: Problems) -> AdapterConfig | None:
    def value(key: str, default: Any, accept: Any, rule: str) -> Any:
        found = content.get(key, default)
        if found is None:
            found = default
        if not accept(found):
            problems.add(
                f"{path}: {key} is {found!r}, and must be {rule}"[:400], "Correct it, or save the adapter again"
            )
            return default
        return found

    def pattern(key: str, accept: Any, rule: str) -> dict[str, Any]:
        found: dict[str, Any] = value(key, {}, lambda v: isinstance(v, dict) and all(map(accept, v.values())), rule)
        for regex in found:
            try:
                re.compile(regex)
            except (re.error, RecursionError):
                problems.add(f"{path}: {key} has the key {regex!r}, which is no regex", "Correct it")
                return {}
        return found

    def is_rank(v: Any) -> bool:
        return type(v) is int and 0 < v <= 2**20

    def is_alpha(v: Any) -> bool:
        return type(v) in (int, float) and math.isfinite(v) and v != 0

    def is_text(v: Any) -> bool:
        return v is None or isinstance(v, str)

    saved = value("modules_to_save", [], lambda v: isinstance(v, list) and all(map(is_text, v)), "a list of names")
    return AdapterConfig(
        base_model=value("base_model_name_or_path", None, is_text, "a path, a Hub id or null"),
        revision=value("revision", None, is_text, "a revision or null"),
        rank=value("r", 8, is_rank, "a positive whole number"),
        alpha=value("lora_alpha", 8, is_alpha, "a finite number other than 0"),
        rslora=value("use_rslora", False, lambda v: isinstance(v, bool), "true or false"),
        fan_in_fan_out=value("fan_in_fan_out", False, lambda v: isinstance(v, bool), "true or false"),
        task_type=value("task_type", None, is_text, "a task type or null"),
        modules_to_save=tuple(saved),
        rank_pattern=pattern("rank_pattern", is_rank, "a mapping to positive whole numbers"),
        alpha_pattern=pattern("alpha_pattern", is_alpha, "a mapping to finite numbers other than 0"),
    )
