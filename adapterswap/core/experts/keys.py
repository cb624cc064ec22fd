"""The tensors of an adapter's file, by PEFT's kinds of adapters: which belong together; unknown keys are errors.

DoRA, (IA)³, OFT and similar kinds do not add a product of two factors to a weight, so they cannot be averaged without
the base. But each module's change depends only on its own tensors and the config, so it can be copied into another
adapter of the same kind. The rules are those of PEFT 0.21; no tensor is read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from adapterswap.core.experts.gates import Keys, check
from adapterswap.core.model.layers import ModuleName
from adapterswap.kit.errors import Problems, UnsupportedError
from adapterswap.kit.files.tensorfile import Tensor, TensorFile

LORA, DORA, LORA_BIAS = "LORA", "DoRA", "LoRA with lora_bias"
TRAINABLE_TOKENS = "TRAINABLE_TOKENS"

# The tensors that variants of LoRA store beside A and B → the variant's name.
LORA_PARTS = {"lora_magnitude_vector": DORA, "lora_B.bias": LORA_BIAS}

# PEFT's task types → the modules that it trains and loads in full for them, whatever modules_to_save says.
TASK_HEADS: dict[str, tuple[str, ...]] = {
    "CAUSAL_LM": (),
    "SEQ_2_SEQ_LM": (),
    "FEATURE_EXTRACTION": (),
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


class PeftKind(NamedTuple):
    """A `peft_type` whose modules can be copied one by one.

    Attributes:
        title: its usual name.
        parts: the ends of the keys of its tensors, after the module's name.
        patterns: settings that may differ between modules → the config key of their patterns, which PEFT matches like
            LoRA's.
        shared: the keys, after `base_model.`, of tensors that all modules use.
        inert: config keys that do not change what a trained adapter computes.
        forms: values of `init_weights` that also decide the shapes and the formula.
        on_biases: whether it also changes the module's bias.
        ignored: keys that narrow the targets of other kinds; PEFT ignores them for this one.
        only_lists: whether PEFT refuses `layers_to_transform` and `layers_pattern` beside a regex in `target_modules`.
    """

    title: str
    parts: frozenset[str]
    patterns: Mapping[str, str] = {}
    shared: tuple[str, ...] = ()
    inert: frozenset[str] = frozenset()
    forms: frozenset[str] = frozenset()
    on_biases: bool = False
    ignored: frozenset[str] = frozenset()
    only_lists: bool = False


_LAYER_KEYS = frozenset({"layers_to_transform", "layers_pattern"})
_RANKS = {"r": "rank_pattern", "alpha": "alpha_pattern"}
_LYCORIS = frozenset({"rank_dropout", "module_dropout", "rank_dropout_scale"})


def _kind(title: str, *parts: str, **facts: Any) -> PeftKind:
    return PeftKind(title, frozenset(parts), **facts)


KINDS: dict[str, PeftKind] = {
    "IA3": _kind(
        "(IA)³", "ia3_l", inert=frozenset({"init_ia3_weights", "feedforward_modules"}), on_biases=True,
        ignored=_LAYER_KEYS,
    ),
    "OFT": _kind("OFT", "oft_R.weight", inert=frozenset({"module_dropout"})),
    "BOFT": _kind("BOFT", "boft_R", "boft_s", inert=frozenset({"boft_dropout"})),
    "LOHA": _kind(
        "LoHa", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", patterns=_RANKS,
        inert=_LYCORIS,
    ),
    "LOKR": _kind(
        "LoKr", "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", patterns=_RANKS,
        inert=_LYCORIS,
    ),
    "VERA": _kind(
        "VeRA", "vera_lambda_b", "vera_lambda_d", shared=("vera_A", "vera_B"),
        inert=frozenset({"vera_dropout", "d_initial"}), ignored=frozenset({"exclude_modules"}),
    ),
    "HRA": _kind("HRA", "hra_u", only_lists=True),
    "MISS": _kind(
        "MiSS", "miss_block", inert=frozenset({"miss_dropout"}), forms=frozenset({"bat", "mini"}), only_lists=True
    ),
    # PEFT 0.21 gives all modules the rank `r`, whatever `rank_pattern` says.
    "HIRA": _kind("HiRA", "hira_A", "hira_B", inert=frozenset({"hira_dropout", "rank_pattern"}), only_lists=True),
    "ROAD": _kind("RoAd", "road_alpha", "road_theta", on_biases=True, ignored=_LAYER_KEYS | {"exclude_modules"}),
}  # fmt: skip
"""`peft_type` → the kinds besides LoRA that can be copied."""

TRAINED_ROWS = "trainable_tokens_delta"
TRAINED_TOKENS = _kind("trainable tokens", TRAINED_ROWS)
"""TRAINABLE_TOKENS: rows of embeddings and heads, without LoRA. They are blended row by row."""

MISMATCH = "The file and its config do not belong together: save the adapter again"
"""The remedy where tensors contradict the settings of their adapter."""

_VIRTUAL = "it adds virtual tokens or states for the whole model, not for a module"

REFUSED_KINDS: dict[str, str] = {
    "PROMPT_TUNING": _VIRTUAL,
    "MULTITASK_PROMPT_TUNING": _VIRTUAL,
    "P_TUNING": _VIRTUAL,
    "PREFIX_TUNING": _VIRTUAL,
    "CPT": _VIRTUAL,
    "CARTRIDGE": _VIRTUAL,
    "ADAPTION_PROMPT": "its prompts and gates run through whole attention layers",
    "XLORA": "it routes between adapters at run time",
    "POLY": "it routes between skills by the id of a task",
    "ADALORA": "its ranks depend on a budget of the whole adapter",
    "VBLORA": "all its modules share one vector bank, trained together",
    "UNILORA": "all its modules share one vector, trained together",
    "OSF": "it holds parts of an SVD of the base's own weights",
}
"""`peft_type` → why this kind cannot be composed module by module."""


_ROOT = "base_model."
_PREFIX = f"{_ROOT}model."
_COPY = "base_layer.weight"
_WRAPPED_BIAS = ".base_layer.bias"

TOKENS = "token_adapter.trainable_tokens_delta"  # the trained rows of an embedding or head, by their name within it

# Wrappers that torch.compile, FSDP and activation checkpointing add to modules, and DDP to the whole model.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_DISTRIBUTED = "module."
# A state dict that was not saved by PEFT still has the adapter's name in its keys.
_BARE = re.compile(rf"{re.escape(_PREFIX)}(?!{_DISTRIBUTED}|_)(?!.*(?:\._|\.default)).*")  # as nearly all keys are
_ADAPTER_NAME = re.compile(r"(\.lora_(?:embedding_)?[AB])\.default(?=\.weight$|$)")

# Other tensors that PEFT writes, by the end of the key, and why they are refused.
_REFUSED_KEYS = {
    "lora_A.bias": "a bias of lora_A",
    "trainable_tokens_delta": "trainable tokens, but the config names none",
    "base_layer.bias": "a trained bias of the base, but the config says that none was trained",
}

# Copies that `save_embedding_layers=True` and `bias="all"` add to modules trained in full, besides the tensors under
# their own names. PEFT leaves the adapter's name before inner modules: `classifier.modules_to_save.default.dense.bias`.
_DOUBLE = re.compile(r"(?P<module>.+?)\.(?:original_module|modules_to_save)\.(?P<end>.+)")

# What trainers that gather state dicts themselves leave of PEFT's wrapper around a module trained in full.
_WRAPPED = re.compile(r"(?P<module>.+?)\.modules_to_save\.(?:default\.)?(?P<end>[^.]+)")

_FACTOR_NAMES = ("A", "B", "embedding_A", "embedding_B")
_FACTOR = re.compile(
    rf"{re.escape(_PREFIX)}(?P<name>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(?P<weight>\.weight)?"
)

_OF_TOKENS = f".token_adapter.{_COPY}"  # the embedding or head whose rows were trained

_WITHOUT = "save_pretrained(PATH, save_embedding_layers=False)"


class FactorTensors(NamedTuple):
    """A module's A and B, whether they are an embedding's, a copy of the base's weight if there is one, and in `extras`
    the other tensors of a variant of LoRA, by the end of their keys."""

    a: Tensor
    b: Tensor
    embedding: bool
    base: Tensor | None
    extras: Mapping[str, Tensor]


PartTensors = FactorTensors | Mapping[str, Tensor]


class SortedKeys(NamedTuple):
    """The tensors of an adapter, by the names of their modules.

    Attributes:
        parts: the factors of LoRA; for another kind, tensors by the end of their keys.
        saved: modules in `modules_to_save`, and embeddings and heads that `save_embedding_layers` stores in full: their
            parameters by the name within the module. A trained bias of the base is listed under its full name, with the
            parameter `bias`; trained rows of an embedding or head have the parameter `TOKENS`.
        shared: for another kind than LoRA, tensors that all modules use, by their name.
        renamed: whether a key is not as PEFT writes it for the bare model.
    """

    parts: dict[str, PartTensors]
    saved: dict[str, dict[str, Tensor]]
    shared: dict[str, Tensor]
    renamed: bool


def canonical_key(key: str) -> str:
    """The key as PEFT writes it for the bare model: without wrappers around modules, and without the adapter's name."""
    key = _WRAPPERS.sub("", key).removeprefix(_DISTRIBUTED)
    if key.startswith(_PREFIX):
        key = _PREFIX + key.removeprefix(_PREFIX).removeprefix(_DISTRIBUTED)
    return _ADAPTER_NAME.sub(r"\1", key)


_LIKE_FUSED = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


class ModuleKeys(str):
    """The keys under which PEFT stores what belongs to a module, and what the module's name says.

    It is the module's name in the base or, for a trained bias of the base, the bias's own.
    """

    __slots__ = ()

    @property
    def is_bias(self) -> bool:
        """Whether it is a trained bias of the base, not a module."""
        return self.endswith(".bias")

    @property
    def is_fused(self) -> bool:
        """Whether it is one expert's projection in a mixture, which PEFT fuses with the others on transformers 5."""
        return re.search(r"\.experts\.\d+\.", self) is not None

    @property
    def is_like_fused(self) -> bool:
        """Whether its name ends like a part of fused experts, for which PEFT may take it anywhere in a mixture."""
        return self.rpartition(".")[2] in _LIKE_FUSED

    def factors(self, *, embedding: bool = False) -> tuple[str, str]:
        """The keys under which PEFT stores A and B of a module."""
        module = f"{_PREFIX}{self}"
        if embedding:
            return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    @property
    def base_copy(self) -> str:
        """The key under which PEFT stores the base's own weight of an embedding or head beside its LoRA."""
        return f"{_PREFIX}{self}.{_COPY}"

    def parameter_name(self, parameter: str) -> str:
        """The full name in the base of a parameter that an adapter holds in full; see `SortedKeys.saved`."""
        if self.is_bias:
            return str(self)
        return f"{self}.{parameter}"

    def parameter(self, parameter: str, *, wrapped: bool = False) -> str:
        """The key under which PEFT stores a parameter of a module in `modules_to_save`, or a trained bias of the base.

        `wrapped` means that the bias belongs to an adapted module, which PEFT's layer wraps.
        """
        name = self.parameter_name(parameter)
        if wrapped:
            return f"{_PREFIX}{name.removesuffix('.bias')}{_WRAPPED_BIAS}"
        return f"{_PREFIX}{name}"

    def part(self, part: str) -> str:
        """The key under which PEFT stores a tensor (`part`) of a module."""
        return f"{_PREFIX}{self}.{part}"

    @property
    def tokens(self) -> str:
        """The key under which PEFT stores trained rows of an embedding or head beside LoRA."""
        return self.part(TOKENS)

    @property
    def trained_rows(self) -> str:
        """The key under which PEFT stores them for TRAINABLE_TOKENS."""
        return self.part(TRAINED_ROWS)

    @staticmethod
    def shared(name: str) -> str:
        """The key under which PEFT stores a tensor that all modules use."""
        return f"{_ROOT}{name}"


_MISNAMED = (
    (
        r"^base_model\.model\.",
        "PEFT's prefix base_model.model. is there twice: save the adapter from the model that PEFT returned first, or "
        "remove one of the two from the names in its file",
    ),
    (
        r"(^|\.)unembed_tokens$",
        "Tinker calls the head unembed_tokens, which PEFT leaves out: rename it to lm_head in the adapter's file, as "
        "docs/own_adapters.md shows",
    ),
    (
        r"\.experts\.\d+\.",
        "Where a base stores all experts of a layer in one parameter, train LoRA on that (PEFT's `target_parameters`), "
        "or merge the adapter with the tool that trained it",
    ),
)


def misnamed(module: str) -> str | None:
    """What to do about a name that a base does not have, if it is known how such names come about."""
    return next((remedy for pattern, remedy in _MISNAMED if re.search(pattern, module)), None)


def copies_in(file: TensorFile) -> dict[str, Tensor]:
    """The copies of the base's weights in a PEFT adapter's file, by the names of their modules in the base."""
    copies: dict[str, Tensor] = {}
    for stored, tensor in file.tensors.items():
        key = canonical_key(stored)
        if key.startswith(_PREFIX) and key.endswith(f".{_COPY}"):
            copies[key.removeprefix(_PREFIX).removesuffix(f".{_COPY}")] = tensor
    return copies


def sort_keys(
    file: TensorFile,
    modules_to_save: Collection[str],
    problems: Problems,
    *,
    kind: PeftKind | None = None,
    biases: bool = False,
    tokens: bool = False,
) -> SortedKeys:
    """Sort the tensors by what their keys mean; unknown keys are reported, and names and dtypes that cannot be used.

    Args:
        file: the header.
        modules_to_save: the ends of the names of modules that were trained in full.
        problems: collects mistakes, whose messages begin with a key or the name of a module.
        kind: the kind of the adapter; None for LoRA.
        biases: whether biases of the base were trained.
        tokens: whether rows of embeddings or heads were trained (`trainable_token_indices`).
    """
    canonical: dict[str, str] = {}
    for stored in file.tensors:
        is_bare = _BARE.fullmatch(stored) is not None
        canonical[stored] = stored if is_bare else canonical_key(stored)
    keys = Counter(canonical.values())

    # What each tensor is, by its module and its name within that
    rules = _Rules(keys, tuple(modules_to_save), kind, biases, tokens)
    tensors: dict[str, dict[str, dict[str, Tensor]]] = {"part": {}, "saved": {}, "shared": {}, "double": {}}
    unknown = []
    for stored, tensor in file.tensors.items():
        key = canonical[stored]

        # A factor, as nearly all are: an embedding's has no `.weight` at its end, a module's has.
        factor = None
        if kind is None:
            factor = _FACTOR.fullmatch(key)
        if factor and bool(factor["embedding"]) != bool(factor["weight"]):
            name = (factor["embedding"] or "") + factor["factor"]
            tensors["part"].setdefault(factor["name"], {})[name] = tensor
            continue

        place = rules.place(key)
        if place is None:
            unknown.append(key)
        else:
            use, module, name = place
            tensors[use].setdefault(module, {})[name] = tensor
    if unknown:
        _refuse_unknown(unknown, keys, kind, tuple(modules_to_save), problems)

    # A and B come in pairs; tensors of other kinds stay as they are.
    parts: dict[str, PartTensors] = {}
    for name, own in tensors["part"].items():
        factors = [part for part in _FACTOR_NAMES if part in own]
        if _COPY in own and not factors:
            _refuse_copy(f"{name}.{_COPY}", problems)
            continue
        if kind is not None:
            parts[name] = own
            continue

        a, b = _FACTOR_NAMES[:2]
        if factors and factors[-1] in _FACTOR_NAMES[2:]:
            a, b = _FACTOR_NAMES[2:]
        if factors == [a, b]:
            extras = {part: tensor for part, tensor in own.items() if part in LORA_PARTS}
            parts[name] = FactorTensors(own[a], own[b], a != "A", own.get(_COPY), extras)
        else:
            absent = [f"lora_{factor}" for factor in (a, b) if factor not in own]
            missing = " and ".join(absent) or "one pair of factors"
            problems.add(f"{name} has no {missing}", "Save the adapter again: A and B come in pairs")

    saved = tensors["saved"]
    names = [*parts]
    for module, parameters in saved.items():
        names += [f"{module}.{parameter}" for parameter in parameters]
    check(Keys(file, keys, names), problems)

    renamed = any(stored != key for stored, key in canonical.items())
    return SortedKeys(parts, saved, tensors["shared"].get("", {}), renamed)


class _Rules(NamedTuple):
    """What the keys of an adapter's tensors mean; the attributes are those of `sort_keys`, and `keys` all keys."""

    keys: Collection[str]
    saved: tuple[str, ...]
    kind: PeftKind | None
    biases: bool
    tokens: bool

    def place(self, key: str) -> tuple[Literal["part", "saved", "shared", "double"], str, str] | None:
        """What a tensor other than a factor is, its module, and its name within the module; None if it is unknown or
        refused.
        """
        kind, name = self.kind, key.removeprefix(_PREFIX)
        if name == key:
            shared = key.removeprefix(_ROOT)
            if kind is None or shared not in kind.shared:
                return None
            return "shared", "", shared

        # A tensor that PEFT's layers hold
        if self.tokens and name.endswith(f".{TOKENS}"):
            return "saved", name.removesuffix(f".{TOKENS}"), TOKENS
        own_parts = LORA_PARTS if kind is None else kind.parts
        for part in (*own_parts, _COPY):
            if name.endswith(f".{part}"):
                return "part", name.removesuffix(f".{part}"), part

        # A copy, of which PEFT loads the tensor under the module's own name
        double = _DOUBLE.fullmatch(key)
        if double:
            ends = (double["end"], double["end"].partition(".")[2])
            if any(f"{double['module']}.{end}" in self.keys for end in ends):
                return "double", "", key
            return None

        # A weight or bias of the base's, trained in full
        module, _, parameter = name.rpartition(".")
        holder = _saved_module(module, self.saved)
        if holder:
            return "saved", holder, name.removeprefix(f"{holder}.")
        if self.biases and parameter == "bias" and ".lora_" not in name:
            return "saved", f"{module.removesuffix('.base_layer')}.bias", "bias"
        if parameter == "weight" and ModuleName(module).is_vocabulary(None):
            return "saved", module, parameter  # save_embedding_layers: PEFT replaces the base's weight with it
        return None


def _saved_module(name: str, ends: tuple[str, ...]) -> str | None:
    """The module in `modules_to_save` that `name` is or is inside of; the outermost one, which PEFT stores in full."""
    if not ends:
        return None
    if not name.endswith(ends) and not any(end in name for end in ends):
        return None
    for dot in re.finditer(r"\.|$", name):
        start = name[: dot.start()]
        if start.endswith(ends):
            return start
    return None


def _refuse_unknown(
    unknown: Iterable[str],
    keys: Collection[str],
    kind: PeftKind | None,
    modules_to_save: tuple[str, ...],
    problems: Problems,
) -> None:
    """Report tensors whose keys mean nothing, or nothing that can be composed; `keys` are all keys."""
    whole = []
    for key in unknown:
        is_inside = key.startswith(_PREFIX)
        name = key.removeprefix(_PREFIX)
        refused = next((reason for end, reason in _REFUSED_KEYS.items() if key.endswith(end)), None)
        wrapped = _WRAPPED.fullmatch(key)

        if key.endswith(_WRAPPED_BIAS) and f"{key.removesuffix(_WRAPPED_BIAS)}.{_COPY}" in keys:
            problems.add(
                f"{key} is a copy of the base's bias, which PEFT saves beside LoRA on a head and loads into the base",
                "Load it with PEFT and save it with save_embedding_layers=False",
                kind=UnsupportedError,
            )
        elif refused:
            problems.add(
                f"{key} is {refused}, which is not part of s·B·A",
                "Train it as a plain or rsLoRA",
                kind=UnsupportedError,
            )
        elif is_inside and wrapped:
            remedy = f"Rename the tensor to {wrapped['module']}.{wrapped['end']}, as docs/own_adapters.md shows"
            if not wrapped["module"].endswith(modules_to_save):
                remedy += ", and name its module in modules_to_save"
            problems.add(
                f"{key} is a module trained in full under a name that PEFT does not write and cannot load", remedy
            )
        elif is_inside and _DOUBLE.fullmatch(key):
            _refuse_copy(name, problems)
        elif is_inside and key.endswith(".weight") and ".lora_" not in key:
            whole.append(name)
        else:
            expected = f"a LoRA factor as PEFT names it ({_PREFIX}MODULE.lora_A.weight)"
            if kind is not None:
                expected = f"a tensor of {kind.title} as PEFT names it ({_PREFIX}MODULE.{min(kind.parts)})"
            problems.add(f"{key} is neither {expected} nor in modules_to_save", "Save the adapter again with PEFT")

    # The adapter does not say whether whole weights are the base's own, and PEFT would load them.
    if whole:
        are = "are whole weights" if len(whole) > 1 else "is a whole weight"
        problems.add(
            f"{', '.join(sorted(whole))} {are}, as PEFT saves embeddings and heads with save_embedding_layers. "
            "PEFT would replace the base's weights with it",
            f"If it is the base's own, load the adapter with PEFT and save it with {_WITHOUT}. "
            "If it was trained, name its module in modules_to_save of adapter_config.json",
            kind=UnsupportedError,
        )


def _refuse_copy(key: str, problems: Problems) -> None:
    if key.endswith(_OF_TOKENS):
        problems.add(
            f"{key} is the whole embedding, which PEFT saves beside trained tokens if the vocabulary was resized",
            "Merge the adapter with PEFT's merge_and_unload and compose the full weights. If it has no new tokens, "
            f"load it with PEFT and save it with {_WITHOUT}",
            kind=UnsupportedError,
        )
        return
    problems.add(
        f"{key} is a copy of a module without LoRA, as PEFT saves it with save_embedding_layers",
        f"Load the adapter with PEFT, and save it with {_WITHOUT}",
        kind=UnsupportedError,
    )
