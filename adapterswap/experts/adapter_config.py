"""PEFT's adapter_config.json: what it says of a LoRA's arithmetic, and a refusal of what adapterswap cannot do exactly.

Knows the meaning of the keys, as PEFT 0.21 resolves them. Knows nothing of tensors, nor of what is done with adapters.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from adapterswap.errors import ExpertError, Problems, UnsupportedError
from adapterswap.experts.patterns import Patterns
from adapterswap.experts.peft_kinds import DORA, KINDS, LORA, LORA_BIAS, REFUSED_KINDS
from adapterswap.experts.targets import Targets, read_targets
from adapterswap.files.smallfiles import parse_json, read_small, shown

__all__ = ["AdapterConfig", "check_written", "parse_adapter_config", "read_adapter_config", "scale"]

# Keys that do not change what a trained LoRA computes (or do so only where the tensors show it).
_HARMLESS = {
    "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip

# Keys read below, one by one.
_READ = {
    "alpha_pattern", "auto_mapping", "bias", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "modules_to_save", "r", "rank_pattern",
    "lora_bias", "target_modules", "target_parameters", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip

# Keys that, when set, make the adapter something else than W + s·B·A, and what they mean.
_REFUSED = {
    "alora_invocation_tokens": "an activated LoRA (aLoRA) applies only after its invocation tokens",
    "arrow_config": "Arrow routes between adapters at run time",
    "kasa_config": "KaSA changes the base's weights",
    "layer_replication": "layer_replication repeats layers, so that indices no longer name the base's",
    "monteclora_config": "MonteCLoRA samples its weights",
    "use_bdlora": "BD-LoRA's blocks are not plain A and B",
    "use_qalora": "QA-LoRA pools its inputs",
    "velora_config": "VeLoRA compresses activations",
}

# Keys of kinds other than LoRA that say what the adapter is for or how it was trained: not how a module computes. `r`
# and its like are among what a module reads; those in `PeftKind.patterns` may differ from module to module.
_NEUTRAL = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_weights",
    "layers_pattern", "layers_to_transform", "modules_to_save", "peft_type", "peft_version", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip

# Values of init_lora_weights by which PEFT begins with changed weights of the base, in lower case as PEFT reads some.
_CHANGING_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
# Texts that leave the base's weights as they were. PEFT reads the first two in any case.
_PLAIN_INITS = ("gaussian", "mica", "eva", "orthogonal")

# Keys for which PEFT has a default, and raises if they are null.
_NOT_NULL = ("alpha_pattern", "bias", "lora_alpha", "lora_dropout", "r", "rank_pattern")

_PEFT = (0, 21)  # the version whose keys these are

_SIMPLER = "Write the patterns as plain names of modules"
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
        tied: PEFT applies an embedding's LoRA to the head that is tied to it too (`ensure_weight_tying`).
        task_type: such as CAUSAL_LM, or None.
        auto_mapping: the classes that PEFT's AutoPeftModel needs where there is no task type, as PEFT wrote them.
        modules_to_save: modules trained in full, by the end of their name.
        targets: the modules that PEFT loads LoRA factors for.
        peft_type: LORA, or another kind of `peft_kinds.KINDS`.
        dora, lora_bias: the variants of LoRA that all its modules are.
        bias: `all` or `lora_only` where biases of the base were trained too; else `none`.
        settings: of another kind, what its modules read in the config, apart from those in `patterns`.
        values, patterns: of another kind, what may differ from module to module: globally, and by regex.
        target_parameters: parameters that have LoRA themselves, by their name or the end of it: fused experts.
        trained_tokens: the rows of embeddings or heads that were trained (`trainable_token_indices`), by the end of the
            module's name; under an empty name, those of the input embedding.
        peft_version: of PEFT, as it wrote the config; None where it did not.
        unknown: keys that PEFT does not know, and ignores with a warning.
        sha256: of the file's bytes as they were read, in hexadecimal.
    """

    base_model: str | None
    revision: str | None
    rank: int
    alpha: float
    rslora: bool
    fan_in_fan_out: bool
    task_type: str | None
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Patterns[int] = field(default_factory=Patterns)
    alpha_pattern: Patterns[float] = field(default_factory=Patterns)
    tied: bool = False
    auto_mapping: Mapping[str, Any] | None = None
    targets: Targets = field(default_factory=Targets)
    sha256: str = ""
    peft_type: str = LORA
    dora: bool = False
    lora_bias: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    patterns: Mapping[str, Patterns[Any]] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    trained_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    peft_version: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What people call this kind of adapter."""
        if self.peft_type != LORA:
            return KINDS[self.peft_type].title
        return DORA if self.dora else LORA_BIAS if self.lora_bias else "LoRA"

    def values_of(self, module: str) -> dict[str, Any]:
        """Of another kind than LoRA: what the module reads in the config that other modules may read otherwise."""
        return {key: self.patterns[key].get(module, value) for key, value in self.values.items()}

    def is_at_least(self, version: tuple[int, int]) -> bool:
        """Whether that version of PEFT, or a later one, wrote the config; not so where the config does not say."""
        match = re.match(r"(\d+)\.(\d+)", self.peft_version or "")
        return match is not None and (int(match[1]), int(match[2])) >= version

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """The trained rows of an embedding or head, by the first name that fits; empty if the config names none."""
        return next((rows for end, rows in self.trained_tokens.items() if module.endswith(end)), ())

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(module, self.rank)

    def alpha_of(self, module: str) -> float:
        return self.alpha_pattern.get(module, self.alpha)

    def check_patterns(self, modules: Collection[str]) -> None:
        """Call this before `rank_of` and `alpha_of`: the patterns are a stranger's, and may be made to run for ever.

        Raises:
            ExpertError: resolving the patterns for all these modules takes longer than ten seconds.
        """
        problems = Problems(ExpertError)
        named: dict[str, Patterns[Any]] = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        for key, patterns in {**named, **self.patterns}.items():
            try:
                patterns.check(modules)
            except ValueError as error:
                problems.add(f"{key} of the adapter for {self.base_model}: {error}", _SIMPLER)
        problems.raise_if_any()


def read_adapter_config(path: str | Path) -> AdapterConfig:
    """Read an adapter_config.json.

    Raises:
        ExpertError, UnsupportedError, AdapterswapError: the file is missing; see `parse_adapter_config`.
    """
    path = Path(path)
    return parse_adapter_config(read_small(path, "Give a PEFT adapter: a folder with adapter_config.json"), str(path))


def parse_adapter_config(raw: bytes, where: str) -> AdapterConfig:
    """Read the content of an adapter_config.json; messages call it `where`.

    Raises:
        ExpertError: it is not JSON, or a value has the wrong type.
        UnsupportedError: the adapter is not a LoRA, or is a variant of LoRA that cannot be composed exactly.
        AdapterswapError: both; all mistakes are reported together.
    """
    content = parse_json(raw, where, "Save or download the adapter again")
    problems = Problems(ExpertError)
    sha256 = hashlib.sha256(raw).hexdigest()
    if content.get("peft_type") in KINDS:
        config = _read_kind(content, where, sha256, problems)
    else:
        if content.get("peft_type") != LORA:
            _refuse_kind(content, where, problems)
            if not problems:
                problems.add(f"{where}: peft_type is {shown(content.get('peft_type'))}", "Give a PEFT adapter")
            problems.raise_if_any()  # another method's keys are not judged by LoRA's rules
        _refuse(content, where, problems)
        config = _read(content, where, sha256, problems)
    problems.raise_if_any()
    return config


def _refuse(content: dict[str, Any], where: str, problems: Problems) -> None:
    for key, reason in _REFUSED.items():
        if content.get(key):
            problems.add(f"{where}: {key} is set: {reason}", _RETRAIN, kind=UnsupportedError)
    _refuse_init(content.get("init_lora_weights", True), where, problems)
    for key in _NOT_NULL:
        if key in content and content[key] is None:
            problems.add(f"{where}: {key} is null, which PEFT cannot load", "Correct it, or save the adapter again")


def _refuse_kind(content: dict[str, Any], where: str, problems: Problems) -> None:
    """Whether the adapter's kind is made of modules at all."""
    kind = content.get("peft_type")
    if not isinstance(kind, str) or kind in (LORA, *KINDS):
        return
    if kind in REFUSED_KINDS:
        problems.add(
            f"{where}: peft_type is {kind}, which cannot be composed module by module: {REFUSED_KINDS[kind]}",
            f"Give LoRA adapters, or one of {', '.join(KINDS)}",
            kind=UnsupportedError,
        )
    else:
        problems.add(
            f"{where}: peft_type is {shown(kind)}, of which it is not known whether modules are independent of each "
            "other",
            f"Give LoRA adapters, or one of {', '.join(KINDS)}",
            kind=UnsupportedError,
        )


def _unknown(content: Mapping[str, Any], where: str, problems: Problems) -> tuple[str, ...]:
    """The keys that PEFT's class does not have, and drops with a warning when it loads the config.

    Trainers write keys of their own (ms-swift, LLaMA-Factory). A later PEFT than the one whose keys are known here may
    have another meaning for them.
    """
    known = _HARMLESS | _READ | _REFUSED.keys()
    found = tuple(sorted(key for key in content.keys() - known if content[key]))
    version = re.match(r"(\d+)\.(\d+)", str(content.get("peft_version")))
    if version is not None and (int(version[1]), int(version[2])) > _PEFT:
        for key in found:
            problems.add(
                f"{where}: the key {shown(key)} is unknown here, and may change what the adapter computes in PEFT "
                f"{version[0]}",
                "Remove the key if it does not, or use a version of adapterswap that knows it",
                kind=UnsupportedError,
            )
    return found


def _refuse_init(init: Any, where: str, problems: Problems) -> None:
    """Whether training began with the base's own weights: what an init did to A and B shows in the tensors."""
    text = init.lower() if isinstance(init, str) else ""
    if text.startswith(_CHANGING_INITS):
        problems.add(
            f"{where}: init_lora_weights is {shown(init)}, which changed the base's weights",
            "Save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
            kind=UnsupportedError,
        )
    elif init and init is not True and init not in _PLAIN_INITS and text not in _PLAIN_INITS[:2]:
        problems.add(
            f"{where}: init_lora_weights is {shown(init)}, which PEFT does not know",
            f"Correct it: true, false or one of {', '.join(_PLAIN_INITS)}",
        )


def _read(content: dict[str, Any], where: str, sha256: str, problems: Problems) -> AdapterConfig:
    def value(key: str, default: Any, accept: Any, rule: str) -> Any:
        entry = content.get(key)
        if entry is None:
            return default
        if not accept(entry):
            problems.add(
                f"{where}: {key} is {shown(entry)}, and must be {rule}", "Correct it, or save the adapter again"
            )
            return default
        return entry

    def patterns(key: str, accept: Any, rule: str) -> Patterns[Any]:
        entries = value(key, {}, lambda v: isinstance(v, dict) and all(map(accept, v.values())), rule)
        try:
            return Patterns(entries)
        except ValueError as error:
            problems.add(f"{where}: {key}: {error}", _SIMPLER)
            return Patterns()

    return AdapterConfig(
        base_model=value("base_model_name_or_path", None, _is_text, "a printable where, a Hub id or null"),
        revision=value("revision", None, _is_text, "a revision or null"),
        rank=value("r", 8, _is_rank, _RANK),
        alpha=value("lora_alpha", 8, _is_alpha, _ALPHA),
        rslora=value("use_rslora", False, _is_bool, "true or false"),
        fan_in_fan_out=value("fan_in_fan_out", False, _is_bool, "true or false"),
        tied=value("ensure_weight_tying", False, _is_bool, "true or false"),
        task_type=value("task_type", None, _is_text, "a task type or null"),
        auto_mapping=value("auto_mapping", None, _is_auto_mapping, "a mapping from names to texts, or null"),
        modules_to_save=tuple(value("modules_to_save", [], _is_texts, "a list of names")),
        rank_pattern=patterns("rank_pattern", _is_rank, f"a mapping whose values are each {_RANK}"),
        alpha_pattern=patterns("alpha_pattern", _is_alpha, f"a mapping whose values are each {_ALPHA}"),
        targets=read_targets(content, where, problems),
        sha256=sha256,
        dora=value("use_dora", False, _is_bool, "true or false"),
        lora_bias=value("lora_bias", False, _is_bool, "true or false"),
        bias=value("bias", "none", lambda v: v in ("none", "all", "lora_only"), "none, all or lora_only"),
        target_parameters=tuple(value("target_parameters", [], _is_texts, "a list of names")),
        trained_tokens=_as_mapping(
            value("trainable_token_indices", {}, _are_tokens, "a list of token ids, or a mapping from names to such")
        ),
        peft_version=value("peft_version", None, _is_text, "a version or null"),
        unknown=_unknown(content, where, problems),
    )


def _read_kind(content: dict[str, Any], where: str, sha256: str, problems: Problems) -> AdapterConfig:
    """The config of another kind than LoRA: what all kinds have, and what the kind's modules read."""
    kind = KINDS[content["peft_type"]]
    shared = {key: content[key] for key in _NEUTRAL if key in content}
    config = _read({**shared, "init_lora_weights": True}, where, sha256, problems)
    bias = content.get("bias", "none")
    if bias != "none":
        problems.add(
            f"{where}: bias is {shown(bias)}, and biases trained beside {kind.title} are not composed",
            "Train it without them (bias: none)",
            kind=UnsupportedError,
        )
    patterns = {}
    for key, pattern in kind.patterns.items():
        found = content.get(pattern) or {}
        try:
            if not isinstance(found, dict):
                raise ValueError(f"{shown(found)} is not a mapping")
            patterns[key] = Patterns(found)
        except ValueError as error:
            problems.add(f"{where}: {pattern}: {error}", _SIMPLER)
    own = content.keys() - _NEUTRAL - kind.inert - {"bias", "init_weights", *kind.patterns, *kind.patterns.values()}
    return replace(
        config,
        peft_type=content["peft_type"],
        settings={key: content[key] for key in sorted(own)},
        values={key: content[key] for key in kind.patterns if key in content},
        patterns=patterns,
        unknown=(),
    )


# The bounds are far beyond any use; within them no sum or quotient of scales overflows or vanishes.
_RANK, _ALPHA = "a whole number from 1 to 65536", "a number from 1e-9 to 1e9 in size"


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= 2**16


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 1e-9 <= abs(value) <= 1e9


def check_written(config: Mapping[str, Any]) -> None:
    """Check that the ranks and alphas of a config to be written are those that `read_adapter_config` accepts.

    Raises:
        UnsupportedError: one is out of bounds.
    """
    for key, pattern, fits, bounds in (
        ("r", "rank_pattern", _is_rank, _RANK),
        ("lora_alpha", "alpha_pattern", _is_alpha, _ALPHA),
    ):
        for value in (config[key], *config[pattern].values()):
            if not fits(value):
                raise UnsupportedError(
                    f"The result would have the {key} {value:g}, but an adapter's {key} must be {bounds}",
                    "Pass `layout=portable`, which scales the weights instead, or use experts with usual scales",
                    parameter="layout",
                )


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= 1000


def _is_auto_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, bool) or _is_text(each) for each in value.values())


def _are_tokens(value: Any) -> bool:
    lists = list(value.values()) if isinstance(value, dict) else [value]
    return all(isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) for ids in lists)


def _as_mapping(tokens: dict[str, list[int]] | list[int]) -> dict[str, tuple[int, ...]]:
    named = tokens if isinstance(tokens, dict) else {"": tokens}
    return {name: tuple(ids) for name, ids in named.items() if ids}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))
