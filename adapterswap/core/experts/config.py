"""PEFT's adapter_config.json: the settings that decide what an adapter computes, and which modules PEFT loads.

PEFT 0.21 creates layers by the config, then reads their tensors; other tensors in the file are ignored without a
warning. So only targeted modules belong to the expert. What only the base can tell is left to `trial`.

The regular expressions in a downloaded config may be malicious: one could run for years, which `re` cannot interrupt.
So `regex` runs them with a time limit, after a check that `re` and `regex` read them in the same way.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from adapterswap.core.experts.gates import REFUSED, Settings, check
from adapterswap.core.experts.keys import (
    DORA,
    KINDS,
    LORA,
    LORA_BIAS,
    REFUSED_KINDS,
    TASK_HEADS,
    TRAINABLE_TOKENS,
    TRAINED_TOKENS,
    PeftKind,
)
from adapterswap.core.model.layers import ModuleName
from adapterswap.core.model.sources import Reference
from adapterswap.kit.errors import AdapterswapError, ExpertError, Problems, UnsupportedError
from adapterswap.kit.files.text import parse_json, read_small, shown

_SECONDS = 10.0  # for all regexes of a config key on all modules of an adapter; real ones take milliseconds
_MAX_LENGTH = 1000  # characters of a key
_MAX_REGEXES = 2000  # keys that are not plain names
_MAX_CHARACTERS = 100_000  # of all regexes together; compiling takes up to 20 microseconds per character
_MAX_PAIRS = 20_000_000  # pairs of a key and a module; a pair takes half a microsecond

_PLAIN = re.compile(r"[\w.-]*")
_NO_REPEAT = re.compile(r"\{(?!(\d+(,\d*)?|,\d*)\})")  # text for `re`, but `a{e<=1}` is a fuzzy match for `regex`

_Value = TypeVar("_Value")


def is_plain(pattern: str) -> bool:
    """Whether a regex is a name, in which only the dots are special."""
    return _PLAIN.fullmatch(pattern) is not None


class Matcher:
    """Matches regexes against names as `re` does, with a time limit for all calls together."""

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = time.monotonic() + (_SECONDS if seconds is None else seconds)
        self._compiled: dict[str, Any] = {}

    def __call__(self, pattern: str, name: str, *, whole: bool = True) -> Any:
        """The match of `pattern` with all of `name` (`re.fullmatch`) or with its start (`re.match`), or None."""
        import regex  # here, because most adapters name their modules plainly

        try:
            if pattern not in self._compiled:
                _check(pattern)
                self._compiled[pattern] = regex.compile(pattern)

            compiled = self._compiled[pattern]
            seconds_left = self._deadline - time.monotonic()
            if seconds_left > 0:
                match = compiled.fullmatch if whole else compiled.match
                return match(name, timeout=seconds_left)
        except regex.error as error:
            raise ValueError(f"{shown(pattern)} is not a valid regex: {error}") from None
        except TimeoutError:
            pass
        raise ValueError(f"the regex {shown(pattern)} takes too long to match")


def _check(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `re` warns about regexes that a later Python will read differently
            re.compile(pattern)
        if _NO_REPEAT.search(pattern):
            raise re.error("a brace that does not begin a repeat")
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise ValueError(f"{shown(pattern)} is not a valid regex: {error}") from None


@dataclass(frozen=True)
class Patterns(Generic[_Value]):
    """Values by regex (`rank_pattern`, `alpha_pattern`): PEFT takes the first key for which `(.*\\.)?(key)$` matches.

    Attributes:
        values: regex → value, as in adapter_config.json.
    """

    values: Mapping[str, _Value] = field(default_factory=dict)
    _resolved: dict[str, str | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise a ValueError for a key that is not a valid regex, alone or where PEFT inserts it."""
        regexes = [key for key in self.values if not is_plain(key)]
        size = sum(map(len, regexes))
        if len(regexes) > _MAX_REGEXES or size > _MAX_CHARACTERS:
            bounds = f"{_MAX_REGEXES} of {_MAX_CHARACTERS} characters"
            raise ValueError(f"it holds {len(regexes)} regexes of {size} characters; at most {bounds} are allowed")

        for key in self.values:
            if len(key) > _MAX_LENGTH:
                raise ValueError(f"the key {shown(key)} is longer than {_MAX_LENGTH} characters")

        # Alone, and then where PEFT inserts it: `a)(b` is valid only there.
        for key in regexes:
            _check(key)
            _check(_in_peft(key))

    def get(self, name: str, default: _Value) -> _Value:
        """The value of the first key that matches the module `name`, else `default`; raises as `check` does."""
        if name not in self._resolved:
            self.check([name])
        key = self._resolved.get(name)
        return default if key is None else self.values[key]

    def of(self, names: Collection[str], default: _Value) -> dict[str, _Value]:
        """The value of each of these modules; see `get`."""
        if not self.values:
            return dict.fromkeys(names, default)
        return {name: self.get(name, default) for name in names}

    def check(self, names: Collection[str]) -> None:
        """Resolve all these names, or raise a ValueError if that takes longer than ten seconds."""
        if not self.values:
            return
        if len(self.values) * len(names) > _MAX_PAIRS:
            raise ValueError(f"its {len(self.values)} keys take too long to match with {len(names)} modules")

        match = Matcher()
        for name in names:
            if name not in self._resolved:
                self._resolved[name] = next((key for key in self.values if _matches(key, name, match)), None)


def _in_peft(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _matches(key: str, name: str, match: Matcher) -> bool:
    if not is_plain(key):
        return match(_in_peft(key), name) is not None

    # A plain key is the end of the name, from the beginning of a segment on.
    start = len(name) - len(key)
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return False
    # It is still a regex: its dots match any character.
    return all(expected in (char, ".") for expected, char in zip(key, name[start:], strict=True))


_ALL_LINEAR = "all-linear"
_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."  # the first numbered segment

# PEFT shortens a longer list of names to ends that no other module of the base has; `layers_to_transform` then applies
# to them, but not to full names.
_MOST_NAMES = 19


class Targets(NamedTuple):
    """The modules that an adapter's config targets, as PEFT's `check_target_module_exists` decides it.

    Attributes:
        modules: `target_modules`: names or ends of names, or one regex for whole names; None for PEFT's default, which
            depends on the base.
        excluded: `exclude_modules`, in the same form; None excludes none.
        saved: `modules_to_save`: LoRA is never loaded on or inside these.
        layers: `layers_to_transform`; None for all. Modules named in full are loaded whatever their layer.
        containers: `layers_pattern`: regexes for the list of layers, of which the first that matches counts; empty for
            any list.
        feedforward: for (IA)³, `feedforward_modules`, whose inputs it scales: ends of names, or one regex; None for
            PEFT's default.
    """

    modules: frozenset[str] | str | None = None
    excluded: frozenset[str] | str | None = None
    saved: tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    containers: tuple[str, ...] = ()
    feedforward: frozenset[str] | str | None = None

    @property
    def depend_on_base(self) -> bool:
        """Whether the targets depend on the other modules or the type of the base."""
        if self.modules is None:
            return True
        if isinstance(self.modules, str):
            return self.modules.lower() == _ALL_LINEAR
        return self.layers is not None and len(self.modules) > _MOST_NAMES

    def loaded(self, names: Iterable[str]) -> set[str]:
        """The modules of `names` (full names) for which PEFT would load LoRA factors."""
        # Nearly all configs list the last segments of names, and no more.
        ends = self.modules
        restricted = self.excluded is not None or self.saved or self.layers is not None
        if isinstance(ends, frozenset) and not restricted and not any("." in end for end in ends):
            return {name for name in names if name.rpartition(".")[2] in ends}

        match = Matcher()
        return {name for name in names if self._loads(name, match)}

    def are_feedforward(self, names: Iterable[str]) -> set[str]:
        """The modules of `names` whose inputs (IA)³ scales; raises as `loaded` does."""
        ends = self.feedforward or ()
        if isinstance(ends, str):
            match = Matcher()
            return {name for name in names if match(ends, name)}
        return {name for name in names if name.endswith(tuple(ends))}

    def _loads(self, name: str, match: Matcher) -> bool:
        if self.excluded is not None and _selected(self.excluded, name, match):
            return False
        if any(match(rf"(^|.*\.){saved}($|\..*)", name, whole=False) for saved in self.saved):
            return False
        if self.modules is None:
            return True
        if not _selected(self.modules, name, match):
            return False

        # PEFT checks layers only for ends of names.
        if self.layers is None or isinstance(self.modules, str) or name in self.modules:
            return True
        return self._layer(name, match) in self.layers

    def _layer(self, name: str, match: Matcher) -> int | None:
        """The number that PEFT takes for the layer of `name`."""
        patterns = [rf"(?:^|.*?\.){container}\.(?P<idx>\d+)\." for container in self.containers] or [_ANY_LAYER]
        for pattern in patterns:
            layer_match = match(pattern, name, whole=False)
            if layer_match:
                number = layer_match["idx"]  # None if the container is itself a regex, such as `a|b`
                return None if number is None else int(number)
        return None


def read_targets(content: Mapping[str, Any], where: str, problems: Problems, kind: PeftKind | None = None) -> Targets:
    """The targets in the content of an adapter_config.json; values that PEFT cannot load are reported.

    `kind` is the kind of the adapter; None for LoRA.
    """
    if kind is not None:
        content = {key: value for key, value in content.items() if key not in kind.ignored}

    def names(key: str) -> frozenset[str] | str | None:
        value = content.get(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return frozenset(value)
        problems.add(
            f"{where}: {key} is {shown(value)}, which is neither a list of names nor a regex", "Save the adapter again"
        )
        return None

    def numbers(key: str) -> frozenset[int] | None:
        value = content.get(key)
        if value is None or value == []:
            return None
        values = value if isinstance(value, list) else [value]
        if all(type(item) is int for item in values):
            return frozenset(values)
        problems.add(f"{where}: {key} is {shown(value)}, which is not a list of layers", "Save the adapter again")
        return None

    # The set of names says that the value is one; the first that matches counts, so their order is taken from the file.
    containers: tuple[str, ...] = ()
    if names("layers_pattern"):
        pattern = content["layers_pattern"]
        containers = (pattern,) if isinstance(pattern, str) else tuple(pattern)

    modules = names("target_modules")
    excluded = names("exclude_modules")
    layers = numbers("layers_to_transform")
    feedforward = None
    if kind is not None and "feedforward_modules" in kind.inert:
        feedforward = names("feedforward_modules")

    # Another value than a list is reported where `modules_to_save` itself is read.
    saved = content.get("modules_to_save")
    saved_names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    saved_names += TASK_HEADS.get(str(content.get("task_type")), ())

    targets = Targets(modules, excluded, tuple(saved_names), layers, containers, feedforward)
    layer_keys = [key for key in ("layers_to_transform", "layers_pattern") if content.get(key) is not None]
    _check_targets(targets, layer_keys, where, problems, kind)
    return targets


def _check_targets(
    targets: Targets, layer_keys: list[str], where: str, problems: Problems, kind: PeftKind | None
) -> None:
    """Report targets that contradict each other; `layer_keys` are the keys of layers that the config sets."""
    modules, feedforward = targets.modules, targets.feedforward
    if isinstance(modules, frozenset) and isinstance(feedforward, frozenset) and not feedforward <= modules:
        problems.add(f"{where}: feedforward_modules has names that target_modules lacks", "Save the adapter again")

    only_lists = kind is None or kind.only_lists
    if only_lists and layer_keys and isinstance(modules, str):
        problems.add(
            f"{where}: {layer_keys[0]} is set beside a regex in target_modules, which PEFT cannot load",
            "Name the modules in a list, or leave the layers to the regex",
        )
    elif targets.containers and "layers_to_transform" not in layer_keys:
        problems.add(
            f"{where}: layers_pattern is set without layers_to_transform, which PEFT cannot load",
            "Remove it, or name the layers in layers_to_transform",
        )


def _selected(selection: frozenset[str] | str, name: str, match: Matcher) -> bool:
    if isinstance(selection, str):
        return match(selection, name) is not None
    if name.rpartition(".")[2] in selection:  # as in nearly all configs
        return True
    return any(end in selection for end in ModuleName(name).ends())


# Keys that do not change what a trained LoRA computes (or only in ways that its tensors show).
_HARMLESS = {
    "base_model_name_or_path", "inference_mode", "loftq_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip

# Keys read below, one by one.
_READ = {
    "alpha_pattern", "auto_mapping", "bias", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "corda_config", "eva_config", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_bias", "lora_dropout", "lora_ga_config", "modules_to_save", "r", "rank_pattern", "target_modules",
    "target_parameters", "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip

_KNOWN = _HARMLESS | _READ | REFUSED.keys()

# Keys of other kinds than LoRA that say what the adapter is for or how it was trained, not what a module computes.
# Settings such as `r` belong to a module; those in `PeftKind.patterns` may differ between modules.
_NEUTRAL = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "feedforward_modules",
    "inference_mode", "init_weights", "layers_pattern", "layers_to_transform", "modules_to_save", "peft_type",
    "peft_version", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip

# The keys of PEFT's TrainableTokensConfig.
_OF_TOKENS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_weights", "peft_type", "peft_version",
    "revision", "runtime_config", "target_modules", "task_type", "token_indices",
}  # fmt: skip

_PEFT = (0, 21)  # the version that these keys belong to

_SIMPLER = "Write the patterns as plain module names"


def version_of(text: Any) -> tuple[int, int]:
    """The first two numbers of PEFT's version; 0.0 if a config does not say it."""
    match = re.match(r"(\d+)\.(\d+)", str(text))
    if match is None:
        return (0, 0)
    return (int(match[1]), int(match[2]))


def scale(rank: int, alpha: float, rslora: bool) -> float:
    """The factor s of ΔW = s·B·A: α/√r for rank-stabilized LoRA (arXiv:2312.03732), α/r for plain LoRA."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


@dataclass(frozen=True)
class AdapterConfig:
    """The settings in adapter_config.json that decide what the adapter computes.

    Attributes:
        base_model, revision: the base that the adapter was trained on, as PEFT wrote it.
        rank, alpha, rslora: the global values.
        rank_pattern, alpha_pattern: values by module, as regexes; see `resolved`.
        fan_in_fan_out: whether the base stores its weights transposed (GPT-2's Conv1D).
        tied: whether PEFT also applies an embedding's LoRA to the head that is tied to it (`ensure_weight_tying`).
        task_type: for example CAUSAL_LM, or None.
        auto_mapping: the classes that PEFT's AutoPeftModel needs if there is no task type, as PEFT wrote them.
        modules_to_save: modules trained in full, by the end of their name.
        targets: the modules for which PEFT loads LoRA factors.
        peft_type: LORA, TRAINABLE_TOKENS, or another kind of `keys.KINDS`.
        kind: what is known of this kind; None for LoRA.
        dora, lora_bias: whether its modules are these variants of LoRA.
        bias: `all` or `lora_only` if biases of the base were trained too; else `none`.
        settings: for another kind than LoRA, the settings that its modules read, except those in `patterns`.
        values, patterns: for another kind than LoRA, settings that may differ between modules: globally, and by regex.
        target_parameters: parameters with LoRA (fused experts), by their name or the end of it.
        trained_tokens: the rows of embeddings or heads that were trained (`trainable_token_indices`), by the end of the
            module's name; under an empty name, those of the input embedding or, for TRAINABLE_TOKENS, of all targets.
        peft_version: the version of PEFT that wrote the config; None if it does not say.
        unknown: keys that PEFT does not know and ignores with a warning.
        sha256: the hash of the file's bytes, in hexadecimal.
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
    kind: PeftKind | None = None
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
    def base_reference(self) -> str | None:
        """Where to find the base: what it names, at its revision."""
        if self.base_model is None:
            return None
        return Reference(self.base_model).at(self.revision)

    @property
    def title(self) -> str:
        """The usual name of this kind of adapter."""
        if self.kind is not None:
            return self.kind.title
        if self.dora:
            return DORA
        return LORA_BIAS if self.lora_bias else "LoRA"

    def values_of(self, module: str) -> dict[str, Any]:
        """For another kind than LoRA: the module's values of the settings that may differ between modules."""
        return {key: self.patterns[key].get(module, value) for key, value in self.values.items()}

    def is_at_least(self, version: tuple[int, int]) -> bool:
        """Whether this version of PEFT, or a later one, wrote the config; False if the config does not say."""
        return version_of(self.peft_version) >= version

    @property
    def holds_regexes(self) -> bool:
        """Whether it holds other regexes than plain names, which PEFT would run without a time limit."""
        targets = self.targets
        texts = [*targets.saved, *targets.containers]
        for selection in (targets.modules, targets.excluded, targets.feedforward):
            if isinstance(selection, str):
                texts.append(selection)
        patterns: list[Patterns[Any]] = [self.rank_pattern, self.alpha_pattern, *self.patterns.values()]
        for pattern in patterns:
            texts += pattern.values
        return not all(map(is_plain, texts))

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """The trained rows of an embedding or head, by the first matching name; empty if the config names none."""
        return next((rows for end, rows in self.trained_tokens.items() if module.endswith(end)), ())

    def resolved(self, modules: Collection[str]) -> tuple[dict[str, int], dict[str, float]]:
        """The rank and the alpha of each of these modules. Patterns have a time limit, since they are untrusted."""
        problems = Problems(ExpertError)
        named: dict[str, Patterns[Any]] = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        for key, patterns in {**named, **self.patterns}.items():
            try:
                patterns.check(modules)
            except ValueError as error:
                problems.add(f"{key} of the adapter for {self.base_model}: {error}", _SIMPLER)
        problems.raise_if_any()

        return self.rank_pattern.of(modules, self.rank), self.alpha_pattern.of(modules, self.alpha)

    @staticmethod
    def check_written(config: Mapping[str, Any]) -> None:
        """Check that `read` would accept the ranks and alphas of a config that is about to be written."""
        bounded = (
            ("r", "rank_pattern", _is_rank, _RANK),
            ("lora_alpha", "alpha_pattern", _is_alpha, _ALPHA),
        )
        for key, pattern, fits, bounds in bounded:
            for value in (config[key], *config[pattern].values()):
                if not fits(value):
                    raise UnsupportedError(
                        f"The result would have the {key} {value:g}, but an adapter's {key} must be {bounds}",
                        "Pass `layout=portable`, which scales the weights instead, or use experts with usual scales",
                        parameter="layout",
                    )

    @staticmethod
    def parse(raw: bytes, where: str) -> AdapterConfig:
        """Parse the content of an adapter_config.json; `where` is its name in messages."""
        content = parse_json(raw, where, "Save or download the adapter again")
        sha256 = hashlib.sha256(raw).hexdigest()
        problems = Problems(ExpertError)

        kind = content.get("peft_type")
        if kind == LORA:
            check(Settings(content, where), problems)
            config = _read(content, where, sha256, problems)
        elif kind == TRAINABLE_TOKENS:
            config = _read_tokens(content, where, sha256, problems)
        elif isinstance(kind, str) and kind in KINDS:
            config = _read_kind(content, where, sha256, problems)
        else:
            raise _refused_kind(kind, where)

        problems.raise_if_any()
        return config

    @staticmethod
    def read(path: str | Path) -> AdapterConfig:
        """Read an adapter_config.json."""
        path = Path(path)
        raw = read_small(path, "Pass a PEFT adapter: a folder with adapter_config.json")
        return AdapterConfig.parse(raw, str(path))


def _refused_kind(kind: Any, where: str) -> AdapterswapError:
    """The error for a kind of adapter that cannot be composed module by module."""
    if not isinstance(kind, str):
        return ExpertError(f"{where}: peft_type is {shown(kind)}", "Pass a PEFT adapter")

    reason = f"{shown(kind)}, and it is unknown whether its modules are independent of each other"
    if kind in REFUSED_KINDS:
        reason = f"{kind}, which cannot be composed module by module: {REFUSED_KINDS[kind]}"
    return UnsupportedError(f"{where}: peft_type is {reason}", f"Use LoRA adapters, or one of {', '.join(KINDS)}")


def _unknown(
    content: Mapping[str, Any], where: str, problems: Problems, known_keys: Collection[str] = _KNOWN
) -> tuple[str, ...]:
    """The keys that PEFT does not know, and ignores with a warning when it loads the config.

    Trainers such as ms-swift and LLaMA-Factory write such keys. In a config of a later PEFT than 0.21 they are refused,
    because that version may give them a meaning.
    """
    unknown = tuple(sorted(key for key in content.keys() - known_keys if content[key]))
    version = version_of(content.get("peft_version"))
    if version <= _PEFT:
        return unknown

    for key in unknown:
        problems.add(
            f"{where}: the key {shown(key)} is unknown here, but may change what the adapter computes in PEFT "
            f"{version[0]}.{version[1]}",
            "Remove the key if it does not, or use a version of adapterswap that knows it",
            kind=UnsupportedError,
        )
    return unknown


def _read(
    content: dict[str, Any], where: str, sha256: str, problems: Problems, kind: PeftKind | None = None
) -> AdapterConfig:
    """The keys that are read one by one; each value that is not as it must be is reported, and counts as missing.

    `kind` is the kind of the adapter; None for LoRA.
    """

    def value(key: str, default: Any, accept: Any, rule: str) -> Any:
        entry = content.get(key)
        if entry is None:
            return default
        if not accept(entry):
            problems.add(
                f"{where}: {key} is {shown(entry)}, but must be {rule}", "Correct it, or save the adapter again"
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

    # These change nothing in a trained adapter, but PEFT does not load other values.
    value("lora_dropout", 0, lambda v: type(v) in (int, float) and 0 <= v <= 1, "a number from 0 to 1")
    for key in ("corda_config", "eva_config", "lora_ga_config"):
        value(key, {}, lambda v: isinstance(v, dict), "an object or null")

    return AdapterConfig(
        base_model=value("base_model_name_or_path", None, _is_text, "a printable path, a Hub id or null"),
        revision=value("revision", None, _is_text, "a revision or null"),
        rank=value("r", 8, _is_rank, _RANK),
        alpha=value("lora_alpha", 8, _is_alpha, _ALPHA),
        rslora=value("use_rslora", False, _is_bool, "true or false"),
        fan_in_fan_out=value("fan_in_fan_out", False, _is_bool, "true or false"),
        tied=value("ensure_weight_tying", False, _is_bool, "true or false"),
        task_type=value(
            "task_type", None, lambda v: _is_text(v) and v in TASK_HEADS, f"one of {', '.join(TASK_HEADS)}, or null"
        ),
        auto_mapping=value("auto_mapping", None, _is_auto_mapping, "a mapping from names to texts, or null"),
        modules_to_save=tuple(value("modules_to_save", [], lambda v: _is_texts(v) and all(v), "a list of names")),
        rank_pattern=patterns("rank_pattern", _is_rank, f"a mapping whose values are each {_RANK}"),
        alpha_pattern=patterns("alpha_pattern", _is_alpha, f"a mapping whose values are each {_ALPHA}"),
        targets=read_targets(content, where, problems, kind),
        sha256=sha256,
        kind=kind,
        dora=value("use_dora", False, _is_bool, "true or false"),
        lora_bias=value("lora_bias", False, _is_bool, "true or false"),
        bias=value("bias", "none", lambda v: v in ("none", "all", "lora_only"), "none, all or lora_only"),
        target_parameters=tuple(value("target_parameters", [], _is_texts, "a list of names")),
        trained_tokens=_as_mapping(
            value("trainable_token_indices", {}, _are_tokens, "a list of token ids, or a mapping from names to lists")
        ),
        peft_version=value("peft_version", None, _is_text, "a version or null"),
        unknown=() if kind else _unknown(content, where, problems),
    )


def _refuse_settings(content: Mapping[str, Any], where: str, problems: Problems) -> None:
    """Report settings of another kind that PEFT refuses."""
    remedy = "Train the adapter again with this version of PEFT"
    if content["peft_type"] == "OFT":
        if "oft_block_size" not in content:
            problems.add(f"{where}: there is no oft_block_size: PEFT cannot load OFT of versions before 0.14", remedy)
        elif bool(content.get("r", 0)) == bool(content["oft_block_size"]):
            problems.add(f"{where}: exactly one of r and oft_block_size must be other than 0", "Correct it")

        if content.get("use_cayley_neumann") and version_of(content.get("peft_version")) < (0, 18):
            problems.add(f"{where}: PEFT cannot load OFT with use_cayley_neumann of versions before 0.18", remedy)

    if content["peft_type"] == "BOFT":
        size, number = content.get("boft_block_size", 4), content.get("boft_block_num", 0)
        if bool(size) == bool(number):
            problems.add(
                f"{where}: exactly one of boft_block_size and boft_block_num must be other than 0", "Correct it"
            )


def _read_kind(content: dict[str, Any], where: str, sha256: str, problems: Problems) -> AdapterConfig:
    """The config of another kind than LoRA: the keys that all kinds have, and those that its modules read."""
    kind = KINDS[content["peft_type"]]
    shared = {key: content[key] for key in _NEUTRAL if key in content}
    config = _read({**shared, "init_lora_weights": True}, where, sha256, problems, kind)
    _refuse_settings(content, where, problems)

    bias = content.get("bias", "none")
    if bias != "none":
        problems.add(
            f"{where}: bias is {shown(bias)}, but biases trained with {kind.title} cannot be composed",
            "Train it without them (bias: none)",
            kind=UnsupportedError,
        )

    patterns = {}
    for key, pattern in kind.patterns.items():
        by_regex = content.get(pattern) or {}
        try:
            if not isinstance(by_regex, dict):
                raise ValueError(f"{shown(by_regex)} is not a mapping")
            patterns[key] = Patterns(by_regex)
        except ValueError as error:
            problems.add(f"{where}: {pattern}: {error}", _SIMPLER)

    # What is left is read by the modules. How an adapter was initialized is a setting only if its form follows from it.
    read_above = {"bias", "init_weights", *kind.patterns, *kind.patterns.values()}
    setting_keys = content.keys() - _NEUTRAL - kind.inert - read_above
    if content.get("init_weights") in kind.forms:
        setting_keys |= {"init_weights"}

    return replace(
        config,
        peft_type=content["peft_type"],
        settings={key: content[key] for key in sorted(setting_keys)},
        values={key: content[key] for key in kind.patterns if key in content},
        patterns=patterns,
    )


def _read_tokens(content: dict[str, Any], where: str, sha256: str, problems: Problems) -> AdapterConfig:
    """The config of TRAINABLE_TOKENS: PEFT reads only these keys, and one list of tokens for all targets."""
    known = {key: content[key] for key in _OF_TOKENS & content.keys()}
    config = _read(known, where, sha256, problems, TRAINED_TOKENS)

    tokens = content.get("token_indices")
    if not isinstance(tokens, list) or not tokens or not _are_tokens(tokens):
        problems.add(
            f"{where}: token_indices is {shown(tokens)}, but must be a list of token ids",
            "Correct it, or save the adapter again",
        )
        tokens = []

    return replace(
        config,
        peft_type=TRAINABLE_TOKENS,
        trained_tokens=_as_mapping(tokens),
        unknown=_unknown(content, where, problems, _OF_TOKENS),
    )


# The bounds are far beyond practical values; within them no sum or quotient of scales overflows or underflows.
_RANK, _ALPHA = "a whole number from 1 to 65536", "a number from 1e-9 to 1e9 in size"


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= 2**16


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 1e-9 <= abs(value) <= 1e9


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= 1000


def _is_auto_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, bool) or _is_text(item) for item in value.values())


def _are_tokens(value: Any) -> bool:
    lists = list(value.values()) if isinstance(value, dict) else [value]
    for ids in lists:
        if not isinstance(ids, list) or not ids:
            return False
        if not all(type(token) is int and token >= 0 for token in ids):
            return False
    return True


def _as_mapping(tokens: dict[str, list[int]] | list[int]) -> dict[str, tuple[int, ...]]:
    named = tokens if isinstance(tokens, dict) else {"": tokens}
    return {name: tuple(ids) for name, ids in named.items()}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))
