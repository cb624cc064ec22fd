"""What a config.json makes a model compute, and where two configs differ in it.

Every key computes unless it is on a short list of neutral ones, at every depth. Versions of transformers write one
number under different names (`rope_theta`, `rope_scaling` and `rope_parameters`); these are compared under one name.
Where two configs differ, the model's class decides, if transformers is installed: it knows the values of keys that one
of them lacks, and which keys it ignores. Otherwise these keys are reported as not compared.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from adapterswap.kit.files.text import shown

# Names, paths, versions and dtypes.
_LABELS = {
    "_name_or_path", "name_or_path", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype",
    "_commit_hash", "unsloth_version", "unsloth_fixed",
}  # fmt: skip
# How a library runs the model, with the same result.
_RUNNING = {
    "use_cache", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "torchscript",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_return_dict",
    "gradient_checkpointing", "use_bfloat16", "chunk_size_feed_forward",
}  # fmt: skip
# What only training uses: first values, dropout, losses.
_TRAINING = {
    "initializer_range", "initializer_factor", "init_std", "router_aux_loss_coef", "aux_loss_alpha", "problem_type",
    "attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "embedding_dropout", "residual_dropout", "resid_dropout", "attn_dropout", "ffn_dropout", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "classifier_dropout", "summary_first_dropout", "layerdrop", "encoder_layerdrop",
    "decoder_layerdrop", "router_jitter_noise", "input_jitter_noise", "dropout_rate",
}  # fmt: skip
# What only generation uses, as transformers 4 kept it in config.json. It is compared with generation_config.json.
_GENERATION = {
    "bos_token_id", "eos_token_id", "do_sample", "top_k", "top_p", "typical_p", "min_length", "num_beams",
    "num_beam_groups", "num_return_sequences", "repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "diversity_penalty", "output_scores", "return_dict_in_generate",
    "remove_invalid_values", "exponential_decay_length_penalty", "task_specific_params",
}  # fmt: skip
NEUTRAL = frozenset(_LABELS | _RUNNING | _TRAINING | _GENERATION)
"""The keys of a config.json that do not change what a model computes."""

_ELSEWHERE = frozenset({"vocab_size"})  # compared row by row, with the weights
_QUANTIZATION = "quantization_config"  # null: none
_PAD, _ROPE, _LENGTH = "pad_token_id", "rope_parameters", "max_position_embeddings"
_OF_ANY_LENGTH = ("default", "linear", "llama3")  # kinds of rotary positions that do not depend on the longest text
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # classes that read pad only to generate


class _Missing:
    def __repr__(self) -> str:
        return "not set"


MISSING = _Missing()


class ConfigDifferences(NamedTuple):
    """Where two configs differ.

    Attributes:
        values: key, such as `text_config.hidden_act` → its two values.
        not_compared: keys that only one config has, whose default is not known here.
    """

    values: Mapping[str, tuple[Any, Any]]
    not_compared: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.values)

    def text(self, one: str, other: str) -> str:
        """What differs, such as `rms_norm_eps is 1e-06 in math and 1e-05 in swahili`."""
        texts = []
        for key, (first, second) in self.values.items():
            texts.append(f"{key} is {_short(first)} in {one} and {_short(second)} in {other}")
        return "; ".join(texts)

    def unknown(self, whose: str) -> str:
        """A sentence about the keys that were not compared with `whose` config."""
        return (
            f"only one of it and {whose} has {', '.join(self.not_compared)}, whose default is not known here, so that "
            "was not compared"
        )

    @staticmethod
    def between(
        one: Mapping[str, Any], other: Mapping[str, Any], *, ignoring: Collection[str] = ()
    ) -> ConfigDifferences:
        """Compare what two configs make a model compute.

        Args:
            one, other: the contents of two config.json.
            ignoring: keys that the caller compares in another way.
        """
        if pads_only_to_generate(one) and pads_only_to_generate(other):
            ignoring = (*ignoring, _PAD)
        values = _differing(_computing(one, ignoring), _computing(other, ignoring))
        if not values:
            return ConfigDifferences({})

        # The class in transformers knows the defaults.
        if one.get("model_type") == other.get("model_type"):
            ours, theirs = _by_class(one), _by_class(other)
            if ours is not None and theirs is not None:
                return ConfigDifferences(_differing(_computing(ours, ignoring), _computing(theirs, ignoring)))

        # A value in place of an object, or the reverse, is no default that could be unknown.
        replaced: set[str] = set()
        for key in values:
            if any(inner.startswith(f"{key}.") for inner in values):
                replaced.add(key)
        for outer in list(replaced):
            replaced.update(key for key in values if key.startswith(f"{outer}."))

        known: dict[str, tuple[Any, Any]] = {}
        unknown: list[str] = []
        for key, pair in values.items():
            if MISSING in pair and key not in replaced:
                unknown.append(key)
            else:
                known[key] = pair
        return ConfigDifferences(known, tuple(unknown))


def _short(value: Any) -> str:
    return repr(value) if value is MISSING else shown(value)


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    differing = {}
    for key in {**ours, **theirs}:
        first, second = ours.get(key, MISSING), theirs.get(key, MISSING)
        if first is MISSING or first != second:
            differing[key] = (first, second)
    return differing


def _computing(config: Mapping[str, Any], ignoring: Collection[str]) -> dict[str, Any]:
    """The computing part of a config, flat: `text_config.rope_parameters.rope_theta` → value."""
    return dict(_flat(config, {*NEUTRAL, *_ELSEWHERE, *ignoring}, ""))


def _flat(config: Mapping[str, Any], left_out: Collection[str], prefix: str) -> Iterator[tuple[str, Any]]:
    """The values of a config or of a part of it, whose keys follow `prefix`, without those to be left out."""
    content = config
    if _ROPE not in prefix.split("."):
        content = _with_one_rope(config)
    only_a_limit = _is_of_any_length(content.get(_ROPE))

    for key, value in content.items():
        if key in left_out:
            continue
        if (key == _QUANTIZATION and value is None) or (key == _LENGTH and only_a_limit):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, left_out, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_of_any_length(rope: Any) -> bool:
    """Whether a model with these rotary settings computes the same whatever its `max_position_embeddings`."""
    if not isinstance(rope, Mapping):
        return False
    nested = [part for part in rope.values() if isinstance(part, Mapping)]  # one for each kind of layers
    return all(part.get("rope_type") in _OF_ANY_LENGTH for part in nested or [rope])


def pads_only_to_generate(config: Mapping[str, Any]) -> bool:
    """Whether the model ignores its padding token, except to generate: a classifier finds a text's end by it."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return False
    return all(isinstance(name, str) and name.endswith(_GENERATING) for name in classes)


def _with_one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, or a part of one, with its rotary settings as transformers 5 reads them, under its name."""
    if not config.keys() & {"rope_theta", "rope_scaling", _ROPE, "rope_local_base_freq"}:
        return dict(config)

    result = dict(config)
    scaling = result.pop("rope_scaling", None)
    parameters = result.pop(_ROPE, None)
    theta = result.pop("rope_theta", None)
    local_theta = result.pop("rope_local_base_freq", None)
    rope = scaling or parameters or {}
    if not isinstance(rope, Mapping):
        return dict(config)

    if rope and all(isinstance(part, Mapping) for part in rope.values()):  # one for each kind of layers
        result[_ROPE] = {kind: _rope(part, None) for kind, part in rope.items()}
    elif local_theta is not None:
        result[_ROPE] = {
            "full_attention": _rope(rope, theta),
            "sliding_attention": _rope({}, local_theta),
        }
    else:
        result[_ROPE] = _rope(rope, theta)
    return result


def _rope(parameters: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """The rotary settings of one kind of layers, with their type and, unless it is None, their base θ."""
    rope = dict(parameters)
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    return rope


def _by_class(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config as its class in transformers reads it, with every default; None if there is no such class here."""
    if find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        made = CONFIG_MAPPING[str(config.get("model_type"))].from_dict(copy.deepcopy(dict(config)))
        content: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    except Exception:  # an unknown type; with an untested config, a class can raise anything
        return None
    finally:
        logging.set_verbosity(verbosity)
    return content
