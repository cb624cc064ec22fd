"""Gates of reading experts: what is checked of an adapter's config and of the keys of its tensors, beside the path.

They look at what was read and add problems; they change nothing. See also `planning.gates`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from adapterswap.kit.errors import Problems, UnsupportedError
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import TensorFile
from adapterswap.kit.files.text import shown

# Keys that, when set, make the adapter something other than W + s·B·A, and why.
REFUSED = {
    "alora_invocation_tokens": "an activated LoRA (aLoRA) applies only after its invocation tokens",
    "arrow_config": "Arrow routes between adapters at run time",
    "kasa_config": "KaSA changes the base's weights",
    "layer_replication": "layer_replication repeats layers, so that indices no longer name the base's",
    "megatron_config": "Megatron's parallel layers hold only parts of the weights",
    "monteclora_config": "MonteCLoRA samples its weights",
    "use_bdlora": "BD-LoRA's blocks are not plain A and B",
    "use_qalora": "QA-LoRA pools its inputs",
    "velora_config": "VeLoRA compresses activations",
}

# Settings of these kinds, of which PEFT uses even an empty one.
_OBJECTS = {"arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config"}

# Values of init_lora_weights that change the base's weights, in lower case because PEFT ignores the case of some.
CHANGING_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
# Values that leave the base's weights unchanged. PEFT ignores the case of the first two.
_PLAIN_INITS = ("gaussian", "mica", "eva", "orthogonal")

# Keys that PEFT has a default for, but that must not be null.
_NOT_NULL = ("alpha_pattern", "bias", "lora_alpha", "lora_dropout", "r", "rank_pattern")

# Keys of which PEFT loads only one.
_NOT_TOGETHER = (
    ("lora_bias", "use_dora"),
    ("target_parameters", "use_dora"),
    ("target_parameters", "lora_bias"),
    ("target_parameters", "lora_dropout"),
    ("target_parameters", "fan_in_fan_out"),
)

_RETRAIN = "Train it as a plain or rank-stabilized LoRA, or convert it with PEFT first"


class Settings(NamedTuple):
    """The content of an adapter_config.json of LoRA, and its name in messages."""

    content: Mapping[str, Any]
    where: str


def _refused_settings(settings: Settings, problems: Problems) -> None:
    """Report keys that make the adapter something else."""
    content, where = settings
    for key, reason in REFUSED.items():
        if content.get(key) or (key in _OBJECTS and content.get(key) is not None):
            problems.add(f"{where}: {key} is set: {reason}", _RETRAIN, kind=UnsupportedError)


def _changing_init(settings: Settings, problems: Problems) -> None:
    """Report an init that changed the base's weights. What an init did to A and B is in the tensors."""
    init, where = settings.content.get("init_lora_weights", True), settings.where
    text = ""
    if isinstance(init, str):
        text = init.lower()

    if text.startswith(CHANGING_INITS):
        problems.add(
            f"{where}: init_lora_weights is {shown(init)}, which changed the base's weights",
            "Save it with PEFT's path_initial_model_for_weight_conversion, which converts it to a plain LoRA",
            kind=UnsupportedError,
        )
    elif init and init is not True and init not in _PLAIN_INITS and text not in _PLAIN_INITS[:2]:
        problems.add(
            f"{where}: init_lora_weights is {shown(init)}, which PEFT does not know",
            f"Correct it: true, false or one of {', '.join(_PLAIN_INITS)}",
        )


def _nulls(settings: Settings, problems: Problems) -> None:
    """Report null where PEFT cannot load it."""
    content, where = settings
    for key in _NOT_NULL:
        if key in content and content[key] is None:
            problems.add(f"{where}: {key} is null, which PEFT cannot load", "Correct it, or save the adapter again")


def _combinations(settings: Settings, problems: Problems) -> None:
    """Report settings of LoRA that PEFT refuses to load together."""
    content, where = settings
    pairs = []
    for key, other in _NOT_TOGETHER:
        if content.get(key) and content.get(other):
            pairs.append(f"{key} and {other}")
    if content.get("lora_bias") and content.get("init_lora_weights", True) not in (True, False):
        pairs.append("lora_bias and this init_lora_weights")

    tokens = content.get("trainable_token_indices")
    saved = content.get("modules_to_save") or ()
    if isinstance(tokens, dict) and any(name in saved for name in tokens):
        pairs.append("modules_to_save and trainable_token_indices of one module")

    for pair in pairs:
        problems.add(
            f"{where}: {pair} are set, which PEFT cannot load together", "Correct it, or save the adapter again"
        )


class Keys(NamedTuple):
    """The tensors of an adapter's file, how often each key occurs, and the names of its modules."""

    file: TensorFile
    counts: Mapping[str, int]
    names: Iterable[str]


def _twice(keys: Keys, problems: Problems) -> None:
    twice = [key for key, count in keys.counts.items() if count > 1]
    if twice:
        problems.add(f"{twice[0]} is stored twice, under two names of the same module", "Save the adapter again")


def _names(keys: Keys, problems: Problems) -> None:
    """Report names with other characters: they are printed, and written as regexes into PEFT's configs."""
    for name in keys.names:
        if not re.fullmatch(r"[\w.-]+", name):
            problems.add(f"{name!r} is not a valid module name", "Save the adapter again with PEFT")


def _dtypes(keys: Keys, problems: Problems) -> None:
    """Report integers and floating-point numbers of 8 bits, once for each dtype."""
    odd: dict[str, list[str]] = {}
    for tensor in keys.file.tensors.values():
        if tensor.dtype not in Dtype.FLOATS:
            odd.setdefault(tensor.dtype, []).append(tensor.name)

    dtypes = ", ".join(Dtype.FLOATS)
    for dtype, (first, *others) in odd.items():
        if others:
            message = f"{first} and {len(others)} more tensors are {dtype}"
            problems.add(message, f"Save them as one of {dtypes}", kind=UnsupportedError)
        else:
            problems.add(f"{first} is {dtype}", f"Save it as one of {dtypes}", kind=UnsupportedError)


def check(read: object, problems: Problems) -> None:
    """Let every gate for this stage look at what was read."""
    for gate in GATES.get(type(read), ()):
        gate(read, problems)


GATES: Mapping[type, tuple[Callable[[Any, Problems], None], ...]] = {
    Settings: (_refused_settings, _changing_init, _nulls, _combinations),
    Keys: (_twice, _names, _dtypes),
}
