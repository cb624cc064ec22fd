"""Odd values in adapter_config.json: an expert holds what PEFT applies, and what PEFT cannot load is refused.

The reference is PEFT itself: it loads the folder into the real model, and its merged weights are compared with those of
the adapter that adapterswap composes from the folder. Every file has tensors for all linear modules, so that the config
alone decides.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import peft
import pytest
import torch
import transformers
from peft import LoraConfig
from pico_models import copied, merged_by_peft, trained
from tolerances import close

import adapterswap
from adapterswap import Composition
from adapterswap.kit.errors import AdapterswapError

DEPTH = 3
_DEEP = {"num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 24}

# Keys whose values select modules by name.
SELECTING = {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "alpha_pattern", "modules_to_save",
    "target_parameters",
}  # fmt: skip

# Keys that other kinds have as well.
OF_KINDS = {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "peft_version",
    "fan_in_fan_out", "inference_mode", "task_type", "an_unknown_key",
}  # fmt: skip

# Type of model → its class, its config, its linear modules (the ends of their names), an embedding, its list of layers.
MODELS: dict[str, tuple[Any, Any, list[str], str, str]] = {
    "llama": (
        transformers.AutoModelForCausalLM,
        transformers.LlamaConfig(vocab_size=48, hidden_size=16, tie_word_embeddings=False, **_DEEP),
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
        "embed_tokens",
        "layers",
    ),
    "gpt2": (
        transformers.AutoModelForCausalLM,
        transformers.GPT2Config(
            vocab_size=48, n_embd=16, n_layer=DEPTH, n_head=2, n_positions=32, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=0,
        ),
        ["c_attn", "c_proj", "c_fc", "lm_head"],
        "wte",
        "h",
    ),
    "t5": (
        transformers.AutoModelForSeq2SeqLM,
        transformers.T5Config(
            vocab_size=48, d_model=16, d_kv=8, d_ff=24, num_layers=DEPTH, num_heads=2, tie_word_embeddings=False
        ),
        ["q", "k", "v", "o", "wi", "wo"],
        "shared",
        "block",
    ),
    "bert": (
        transformers.AutoModelForMaskedLM,
        transformers.BertConfig(vocab_size=48, hidden_size=16, tie_word_embeddings=False, **_DEEP),
        ["query", "key", "value", "dense"],
        "word_embeddings",
        "layer",
    ),
}  # fmt: skip
TASKS = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}

KINDS: dict[str, Any] = {
    "LORA": lambda names: LoraConfig(r=4, lora_alpha=6, target_modules=names),
    "IA3": lambda names: peft.IA3Config(target_modules=names, feedforward_modules=names[-1:]),
    "OFT": lambda names: peft.OFTConfig(target_modules=names, oft_block_size=4),
    "BOFT": lambda names: peft.BOFTConfig(target_modules=names, boft_block_size=4),
    "LOHA": lambda names: peft.LoHaConfig(target_modules=names, r=2),
    "LOKR": lambda names: peft.LoKrConfig(target_modules=names, r=2),
    "VERA": lambda names: peft.VeraConfig(target_modules=names, r=2),
    "HRA": lambda names: peft.HRAConfig(target_modules=names, r=2),
    "MISS": lambda names: peft.MissConfig(target_modules=names, r=2),
    "HIRA": lambda names: peft.HiraConfig(target_modules=names, r=2),
    "ROAD": lambda names: peft.RoadConfig(target_modules=names, group_size=8),
}


class Refused(NamedTuple):
    """A value that PEFT loads, but that adapterswap refuses: only other tools or a hand could have written it."""

    value: Any


World = tuple[transformers.PreTrainedModel, Path]
Make = Callable[..., World]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`world("llama", "LORA")` is a base and the folder of an adapter with tensors for all its linear modules."""
    bases: dict[str, World] = {}
    made: dict[tuple[str, str], World] = {}

    def make(architecture: str, kind: str = "LORA") -> World:
        model_class, config, linear, embedding, _ = MODELS[architecture]
        if architecture not in bases:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(architecture)
            model_class.from_config(config).save_pretrained(folder)
            bases[architecture] = model_class.from_pretrained(folder).eval(), folder
        if (architecture, kind) not in made:
            model = copy.deepcopy(bases[architecture][0])
            names = [name for name in linear if name != "lm_head"]
            if kind == "LORA":
                names = [*linear, *([embedding] if embedding != "shared" else [])]
            options = KINDS[kind](names)
            options.task_type = TASKS.get(architecture)
            folder = tmp_path_factory.mktemp(f"{architecture}-{kind}")
            trained(model, options, folder, scale=0.2, save_embedding_layers=False)
            made[architecture, kind] = bases[architecture][0], folder
        return made[architecture, kind]

    return make


def in_peft(model: transformers.PreTrainedModel, folder: Path) -> dict[str, torch.Tensor] | None:
    """The weights of the model with the adapter, merged by PEFT; None if PEFT cannot load it."""
    try:
        return merged_by_peft(copy.deepcopy(model), folder)
    except Exception:  # PEFT has no class of errors for adapters that it cannot load
        return None


def agree(world: World, changes: dict[str, Any], tmp_path: Path, *, strict: bool = False) -> str:
    """Check an adapter with other values in its config (`...` removes a key) against PEFT; says how it went.

    `strict` means that adapterswap may also refuse what PEFT loads.
    """
    model, original = world
    folder = copied(original, tmp_path / "odd", **changes)
    expected = in_peft(model, folder)
    alone = Composition.model_validate({"allocation": [{"expert": "odd"}]})
    try:
        expert = adapterswap.open_adapter(folder)
        written = adapterswap.compose(alone, {"odd": expert}).write(tmp_path / "out")
    except AdapterswapError as error:
        if expected is not None and not strict and "regexes, which are not run" not in str(error):
            raise
        return "refused"
    assert expected is not None, "PEFT cannot load it"
    actual = in_peft(model, written)
    assert actual is not None, "PEFT cannot load the result"
    close(actual, expected, depth=4)
    before = model.state_dict()
    changed = {name for name in expected if not torch.equal(expected[name], before[name])}
    if not expert.saved and not any(name.endswith(".bias") for name in changed):
        assert {name.removesuffix(".weight") for name in expert.parts} == {
            name.removesuffix(".weight") for name in changed
        }
    return "exact"


def names_of(architecture: str) -> dict[str, Any]:
    """Names in a model, to write configs with."""
    _, _, linear, embedding, layers = MODELS[architecture]
    last = linear[-1] if linear[-1] != "lm_head" else linear[-2]
    return {"first": linear[0], "second": linear[1], "last": last, "embedding": embedding, "layers": layers}


FULL = {
    "llama": "model.layers.1.self_attn.q_proj",
    "gpt2": "transformer.h.1.attn.c_attn",
    "t5": "decoder.block.1.layer.0.SelfAttention.q",
    "bert": "bert.encoder.layer.1.attention.self.query",
}


def odd_values(architecture: str) -> dict[str, list[Any]]:
    """Key of the config → odd values."""
    n, full = names_of(architecture), FULL[architecture]
    first, second, last, layers = n["first"], n["second"], n["last"], n["layers"]
    return {
        "target_modules": [
            None, "all-linear", "ALL-Linear", "", [], rf".*\.{first}", f"{first}", rf"(?i).*\.{first.upper()}$",
            [first], [first, last], [full], [full, second], [f"1.{full.rpartition('1.')[2]}"],
            [n["embedding"], first], ["nonsense", first], ["nonsense"], [first, ""], ".*", ...,
            f".*({first}|{second})", Refused({first: 1}), 3, [3],
            Refused("dummy-target-modules"), ["norm"], [first, "lm_head"],
        ],
        "exclude_modules": [
            None, "", [], [first], [full], r".*\.1\..*", ["nonsense"], f".*{second}", full, ".*",
            [n["embedding"], "lm_head"], ["(", second], "(", ...,
        ],
        "layers_to_transform": [None, [], 0, 1, [1], [0, 2], [7], "1", Refused([True]), Refused([1.0]), ..., -1],
        "layers_pattern": [
            None, "", [], layers, [layers], ["nonsense", layers], [layers, "layer"], ["layer", layers], "nonsense",
            [""], f"{layers}|x", f"({layers})", [layers, "("], "[^.]*", ..., 3,
        ],
        "rank_pattern": [
            {}, None, ..., {first: 4}, {f"^{full}": 4}, {"nonsense": 9}, {first: 3}, {first: 0}, {".*": 4},
        ],
        "alpha_pattern": [
            {}, None, ..., {first: 3}, {f"^{full}": 3, first: 5}, {first: 5, f"^{full}": 3},
            {full: 2.5, rf".*\.{second}": 1}, {"nonsense": 2}, {f"{first}|{second}": 7},
            {".*": 1e-3}, {"^": 3}, {rf"1\..*{first}": 2}, {f"{first}$": 9},
            {first: -2}, {first: "x"}, {"(": 3},
        ],
        "modules_to_save": [
            None, [], ["nonsense"], ["mlp"], [first], ["lm_head"], [""], ["norm"], "lm_head", ["score"], [full],
            [n["embedding"]], [f"{first}|{second}"], ...,
        ],
        "target_parameters": [
            None, [], ["nonsense"], [f"{first}.weight"], [f"{full}.weight"], ["norm.weight"], f"{first}.weight", ...,
            ["lm_head.weight"],
        ],
        "lora_alpha": [1, 2.5, None, Refused(0), -3, "x", 1e-6, ...],
        "r": [4, 8, 0, None, 4.0, -4, True, ...],
        "use_rslora": [True, False, None, ...],
        "init_lora_weights": [
            True, False, None, 0, 1, "", "gaussian", "GAUSSIAN", "eva", "EVA", "orthogonal", "nonsense", "mica", "MiCA",
            *map(Refused, ("olora", "OLORA", "pissa", "pissa_niter_4", "corda", "loftq", "lora_ga")), ...,
        ],
        "bias": ["none", "all", "lora_only", None, "nonsense", ...],
        "fan_in_fan_out": [True, False, None, ...],
        "lora_dropout": [0, 0.5, 1, 2, None, "x", ...],
        "task_type": ["CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", None, "nonsense", ...],
        "trainable_token_indices": [None, {}, [], [1], {n["embedding"]: [1]}, ...],
        "use_dora": [False, None, Refused(True), ...],
        "lora_bias": [False, None, True, ...],
        "ensure_weight_tying": [False, True, None, ...],
        "peft_version": [None, "0.4.0", "0.21.2", "0.22.0", "nonsense", ...],
        "eva_config": [None, {}, {"rho": 1.5}, 3],
        "loftq_config": [None, {}, {"loftq_bits": 4}, ...],
        "kasa_config": [None, {}, False, ...],
        "use_bdlora": [None, {}, False, ...],
        "monteclora_config": [None, Refused({}), ...],
        "velora_config": [None, Refused({}), ...],
        "arrow_config": [None, {}, ...],
        "alora_invocation_tokens": [None, [], [1]],
        "megatron_config": [None, {}, {"a": 1}],
        "layer_replication": [None, [], Refused([[0, 2]])],
        "use_qalora": [False, None, Refused(True)],
        "revision": [None, ...],
        "inference_mode": [True, False, None, ...],
        "an_unknown_key": [None, 1, {"a": []}],
        "runtime_config": [None, {}, {"ephemeral_gpu_offload": True}],
        "auto_mapping": [None, {}, ...],
    }  # fmt: skip


def cases() -> list[Any]:
    """Each odd value of each key, with the other keys that make it matter; those that select modules on each model."""
    found = []
    for architecture in MODELS:
        for key, values in odd_values(architecture).items():
            for at, value in enumerate(values if architecture == "llama" or key in SELECTING else ()):
                strict = isinstance(value, Refused)
                changes = {key: value.value if strict else value}
                if key == "layers_pattern":
                    changes["layers_to_transform"] = [1]
                if value == "eva":
                    changes["eva_config"] = {}
                marks = [pytest.mark.full] if architecture != "llama" and at % 7 else []
                found.append(pytest.param(architecture, changes, strict, id=f"{architecture}-{key}-{at}", marks=marks))
    # PEFT shortens a list of 20 names or more, and only then do the layers count.
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    names = [f"model.layers.{layer}.{part}" for layer in range(DEPTH) for part in parts]
    for count in (len(names), len(names) + 2):
        changes = {"target_modules": [*names, "lm_head", "nonsense"][:count], "layers_to_transform": [1]}
        found.append(pytest.param("llama", changes, False, id=f"{count} full names of some layers"))
    return found


def test_every_init_that_peft_lists_is_an_odd_value() -> None:
    _, listed = get_args(get_type_hints(LoraConfig)["init_lora_weights"])
    values = [
        value.value if isinstance(value, Refused) else value for value in odd_values("llama")["init_lora_weights"]
    ]
    assert {name.partition("_niter_")[0] for name in get_args(listed)} <= {*values}


@pytest.mark.parametrize(("architecture", "changes", "strict"), cases())
def test_each_value_means_what_it_means_to_peft(
    architecture: str, changes: dict[str, Any], strict: bool, world: Make, tmp_path: Path
) -> None:
    outcome = agree(world(architecture), changes, tmp_path, strict=strict)
    assert outcome == "refused" or not strict


def odd_config(architecture: str, kind: str, seed: int) -> dict[str, Any]:
    """A random config with odd values of several keys, as they may come together."""
    rng, embedding = random.Random(f"{architecture} {kind} {seed}"), MODELS[architecture][3]
    values = {key: list(odd) for key, odd in odd_values(architecture).items() if kind == "LORA" or key in OF_KINDS}
    if kind != "LORA":
        values["target_modules"] = [
            value for value in values["target_modules"] if value != [3] and embedding not in str(value)
        ]
        values["feedforward_modules"] = [None, [], ..., "", "nonsense"]
    if architecture == "bert":
        del values["task_type"]  # others than None need other classes of the model
    chosen = [key for key in values if rng.random() < (0.35 if key in SELECTING else 0.06)]
    changes = {key: rng.choice(values[key]) for key in chosen}
    if changes.get("layers_pattern") and rng.random() < 0.8:
        changes["layers_to_transform"] = rng.choice([[1], [0, 2], 2])
    return changes


def draws(seeds: int) -> list[tuple[str, str, int]]:
    """Models and kinds of adapters in turn, with a seed."""
    worlds = [*((architecture, "LORA") for architecture in MODELS), *(("llama", kind) for kind in KINDS)]
    worlds += [("gpt2", "IA3"), ("t5", "IA3"), ("bert", "OFT")]
    return [(*worlds[seed % len(worlds)], seed) for seed in range(seeds)]


@pytest.mark.parametrize(("architecture", "kind", "seed"), draws(int(os.environ.get("ODD_CONFIGS", 54))))
def test_random_configs_mean_what_they_mean_to_peft(
    architecture: str, kind: str, seed: int, world: Make, tmp_path: Path
) -> None:
    changes = odd_config(architecture, kind, seed)
    strict = any(isinstance(value, Refused) for value in changes.values())
    strict |= kind in ("MISS", "HIRA") and changes.get("layers_to_transform") in (None, ...)  # a pattern without layers
    values = {key: value.value if isinstance(value, Refused) else value for key, value in changes.items()}
    agree(world(architecture, kind), values, tmp_path, strict=strict)
