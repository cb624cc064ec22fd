"""Random chains of commands against full weights in torch: each step is exact, or refused where a cut layer is needed.

`CHAINS` in the environment sets how many are tried.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import Result
from conftest import LAYERS
from core.writing.test_blends import deltas
from safetensors.torch import load_file
from tolerances import close

from adapterswap.core.model.layers import format_layers

ALL = frozenset(range(LAYERS))
LENGTH = 4
# Refusals that do not concern slices: nothing would be written, or a rule or an expert has no effect.
OTHERS = (
    "matches no module", "No rule names", "contributes no module", "adapts none", "every module stays",
    "the same selected weights", "Every rule gives",
)  # fmt: skip

Weights = dict[str, torch.Tensor]
Coefficients = Mapping[str, float]


@dataclass(frozen=True)
class Value:
    """What a command wrote: the full weights that it stands for, and the layers that are left in it."""

    path: Path
    weights: Weights
    kept: frozenset[int] = ALL
    is_model: bool = False


@dataclass(frozen=True)
class Step:
    """A command, and what it should give: an expert's coefficient in each layer; or the value that it copies."""

    arguments: tuple[object, ...]
    experts: Mapping[str, Value]
    wanted: tuple[Coefficients, ...]
    is_slice: bool = False
    is_model: bool = False
    norms: bool = False  # norms of all layers are averaged


def layer_of(key: str) -> int | None:
    return int(key.split(".")[2]) if key.startswith("model.layers.") else None


def expected(step: Step, base: Weights) -> Value | None:
    """The step's result; None if it needs a layer that was cut away."""
    for layer, coefficients in enumerate(step.wanted):
        needed = {name for name, c in coefficients.items() if c} if not step.norms else set(step.experts)
        if any(layer not in step.experts[name].kept for name in needed):
            return None
    weights = {}
    for key, original in base.items():
        layer = layer_of(key)
        coefficients = {} if layer is None else step.wanted[layer]
        weights[key] = original + sum(c * (step.experts[n].weights[key] - original) for n, c in coefficients.items())
    left = frozenset.intersection(*(value.kept for value in step.experts.values()))
    given = {layer for layer in ALL if any(step.wanted[layer].values())}
    kept = frozenset(given) if step.is_slice else left | given
    return Value(Path(), weights, kept, step.is_model)


def pick(rng: random.Random, values: list[Value]) -> Value:
    """One of the values, more often a slice."""
    return rng.choices(values, [3 if value.kept < ALL else 1 for value in values])[0]


def zones(rng: random.Random, values: list[Value]) -> Step:
    """A layer swap, or a reset of one side to the base."""
    task, language = pick(rng, values), pick(rng, values)
    bottom, top, between = rng.randint(0, 3), rng.randint(0, 2), rng.randint(0, 1)
    sides = {"t": task, "l": language}
    if rng.random() < 0.4 or task is language:
        del sides[rng.choice("tl")]
    wanted: list[Coefficients] = []
    for layer in range(LAYERS):
        outer = layer < bottom or layer >= LAYERS - top
        mixed = bottom <= layer < bottom + between
        shares = {"t": 0.5, "l": 0.5} if mixed else {"l" if outer else "t": 1.0}
        wanted.append({side: share for side, share in shares.items() if side in sides})
    paths = {side: sides[side].path if side in sides else "base" for side in "tl"}
    is_model = any(value.is_model for value in sides.values()) or rng.random() < 0.2
    norms = any(value.is_model for value in sides.values()) and len(sides) == 2 and rng.random() < 0.3
    options: tuple[object, ...] = ("-t", paths["t"], "-l", paths["l"], "--bottom", bottom, "--top", top)
    options += ("--bottom-transition", between)
    if any(value.is_model for value in sides.values()) and not norms:
        options += ("--norms", "layer")
    return Step(options, sides, tuple(wanted), is_model=is_model, norms=norms)


def rules(rng: random.Random, values: list[Value]) -> Step:
    """One or two experts by rules; the last rule is for all layers that are left."""
    named = {name: pick(rng, values) for name in rng.choice(["a", "ab"])}
    texts: list[str] = []
    wanted: dict[int, Coefficients] = {}
    for _ in range(rng.randint(0, 2)):
        layers = set(rng.sample(range(1, LAYERS), rng.randint(1, 4))) - wanted.keys()
        if layers:
            text, coefficients = owner(rng, named)
            texts.append(f"{text}: {format_layers(layers)}")
            wanted |= dict.fromkeys(layers, coefficients)
    text, coefficients = owner(rng, named)
    texts.append(text)
    wanted = dict.fromkeys(ALL, coefficients) | wanted
    used = {name for coefficients in wanted.values() for name in coefficients} or {"a"}
    named = {name: value for name, value in named.items() if name in used}
    options = [part for name, value in named.items() for part in ("--expert", f"{name}={value.path}")]
    options += [part for text in texts for part in ("--rule", text)]
    is_model = any(value.is_model for value in named.values()) or rng.random() < 0.2
    return Step(tuple(options), named, tuple(wanted[layer] for layer in range(LAYERS)), is_model=is_model)


def owner(rng: random.Random, named: Mapping[str, Value]) -> tuple[str, Coefficients]:
    """The expert of a rule, the base, or a blend; with the coefficients."""
    choice = rng.choice([*named, *named, "base", "+"])
    if choice == "base":
        return "base", {}
    if choice == "+" and len(named) == 2:
        return "a*0.25 + b*0.75", {"a": 0.25, "b": 0.75}
    name = choice if choice in named else "a"
    return name, {name: 1.0}


def alone(command: str, value: Value, layers: frozenset[int], *options: object) -> Step:
    """A command that takes `layers` of one value, and nothing else."""
    wanted = tuple({"it": 1.0} if layer in layers else {} for layer in range(LAYERS))
    return Step((command, value.path, *options), {"it": value}, wanted, is_slice=True, is_model=command == "merge")


def next_step(rng: random.Random, number: int, values: list[Value], base: Path) -> Step:
    adapters = [value for value in values if not value.is_model]
    models = [value for value in values if value.is_model]
    some = frozenset(rng.sample(range(LAYERS), rng.randint(1, 5)))
    kinds = ["slice", "slice", "zones", "zones", "rules", "rules", "convert", "export", "merge", "extract"]
    kind = "slice" if number == 0 and rng.random() < 0.7 else rng.choice(kinds)
    if kind == "extract" and models:
        value = pick(rng, models)
        chosen = some if rng.random() < 0.3 else value.kept
        only = ("--layers", format_layers(chosen)) if chosen is some else ()
        return alone("extract", value, chosen, "--base-model", base, "--rank", 48, "--dtype", "float32", *only)
    if kind in ("zones", "rules", "extract"):
        step = (rules if kind == "rules" else zones)(rng, rng.choice([values, adapters]))
        options = ("--base-model", base) if step.is_model else ()
        return replace(step, arguments=("merge" if step.is_model else "compose", *step.arguments, *options))
    value = pick(rng, adapters)
    if kind == "slice":
        return alone("slice", value, some, "--layers", format_layers(some))
    options = {"convert": ("--layout", rng.choice(["exact", "portable"])), "merge": ("--base-model", base)}
    return alone(kind, value, value.kept, *options.get(kind, ()))


def exported(path: Path) -> Weights:
    """ΔW of the modules in a GGUF file whose rows llama.cpp does not permute, by its formula."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    alpha = float(reader.fields["adapter.lora.alpha"].contents())
    tensors = {tensor.name: torch.tensor(tensor.data).double() for tensor in reader.tensors}
    names = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    changes = {}
    for name, a in tensors.items():
        _, layer, module, *_ = name.split(".")
        if name.endswith(".lora_a") and module in names:
            b = tensors[name.removesuffix("a") + "b"]
            changes[f"model.layers.{layer}.{names[module]}.weight"] = alpha / a.shape[0] * (b @ a)
    return changes


def check(value: Value, base: Weights, out: Path, command: str) -> None:
    """Compare what was written with the full weights, in float64."""
    scale = max(weight.abs().max().item() for weight in value.weights.values())
    if command == "merge":
        written = {key: weight.double() for key, weight in load_file(out / "model.safetensors").items()}
        close(written, value.weights, depth=LENGTH, scale=scale)
        return
    if command == "export":
        changes = exported(out)
        keys = {
            key for key in base if layer_of(key) is not None and not key.endswith(("q_proj.weight", "k_proj.weight"))
        }
    else:
        changes = {f"{name}.weight": torch.from_numpy(delta) for name, delta in deltas(out).items()}
        keys = set(base)
    assert changes.keys() <= base.keys()
    for key in keys:
        change = value.weights[key] - base[key]
        close(changes.get(key, torch.zeros_like(change)), change, depth=LENGTH, scale=scale, name=key)


def chain(seed: int, first: list[Value], base: Path, run: Callable[..., Result], folder: Path) -> Iterator[str]:
    """The outcomes of a random chain of commands."""
    rng, values = random.Random(seed), list(first)
    original = {key: weight.double() for key, weight in load_file(base / "model.safetensors").items()}
    for number in range(LENGTH):
        step = next_step(rng, number, values, base)
        command = str(step.arguments[0])
        out = folder / f"{seed}-{number}{'.gguf' if command == 'export' else ''}"
        result = run(*step.arguments, "-o", out)
        about = f"seed {seed}: {' '.join(map(str, step.arguments))}\n{result.stdout}{result.stderr}"
        value = expected(step, original)
        if value is None:
            assert result.exit_code, about
            assert any(reason in result.stderr for reason in ("is a slice with", *OTHERS)), about
            assert not out.exists(), about
            yield "refused"
        elif result.exit_code:
            assert any(reason in result.stderr for reason in OTHERS), about
            yield "other"
        else:
            try:
                check(value, original, out, command)
            except AssertionError as error:
                raise AssertionError(about) from error
            if command != "export":
                values.append(replace(value, path=out))
                rng.shuffle(values)
            yield "exact" if value.kept == ALL else "exact slice"


def test_chains_of_commands(
    run: Callable[..., Result], expert: Callable[..., Path], base: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = base("llama")
    original = {key: weight.double() for key, weight in load_file(folder / "model.safetensors").items()}
    experts = []
    for seed, targets in enumerate((["q_proj", "v_proj", "down_proj"], ["v_proj", "o_proj", "up_proj"]), 1):
        path = expert(seed=seed, r=4, target_modules=targets)
        changes = {f"{name}.weight": torch.from_numpy(change) for name, change in deltas(path).items()}
        experts.append(Value(path, {key: weight + changes.get(key, 0) for key, weight in original.items()}))
    outcomes: Counter[str] = Counter()
    for seed in range(int(os.environ.get("CHAINS", "20"))):
        outcomes.update(chain(seed, experts, folder, run, tmp_path))
    print(outcomes)
    assert min(outcomes[name] for name in ("exact", "exact slice", "refused")) >= 3, outcomes
    assert outcomes["other"] < sum(outcomes.values()) / 3, outcomes
