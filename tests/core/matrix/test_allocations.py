"""Random allocations in YAML, against a small interpreter of docs/compose.md that works on dense ΔW.

The interpreter shares no code with the library: it reads the same YAML, matches layers and modules itself, and adds up
PEFT's ΔW of each expert. The library must refuse what the interpreter calls a mistake.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from click.testing import Result
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tolerances import tolerance
from transformers import PreTrainedModel

from core.matrix.architectures import ARCHITECTURES, LAYERS, build
from core.matrix.reference import Changes, changes_in, load_with_peft, parameters

Run = Callable[..., Result]

NAMES = ("math", "swahili", "code")

# By the names of modules, written out by hand: what is attention, and what is MLP.
KINDS = {
    "llama": {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")},
    "gpt2": {"attention": ("attn.c_attn", "attn.c_proj"), "mlp": ("mlp.c_fc", "mlp.c_proj")},
}
TARGETS = {
    "llama": (
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
        ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
        ["q_proj", "o_proj", "down_proj"],
    ),
    "gpt2": (["c_attn", "c_proj", "c_fc", "wte", "lm_head"], ["c_attn", "c_proj", "lm_head"], ["c_attn", "c_fc"]),
}
SELECTORS = {
    "llama": ("self_attn", "q_proj", "mlp.down_proj", "mlp", "lm_head", "o_proj", "layers.3", "proj"),
    "gpt2": ("attn", "c_proj", "mlp.c_fc", "attn.c_attn", "wte", "h.2", "c_"),
}


class Mistake(Exception):
    """An invalid allocation."""


class Experts(NamedTuple):
    """The base, the adapters' folders, their dense ΔW by parameter, and what PEFT says when it loads one of them."""

    base: PreTrainedModel
    folders: dict[str, Path]
    dense: dict[str, Changes]
    said: set[str]


@functools.cache
def experts(name: str) -> Experts:
    """The base, and three adapters by PEFT that differ in rank, scale and modules."""
    folder = Path(tempfile.mkdtemp(prefix="allocations-"))
    architecture = ARCHITECTURES[name]
    build(architecture).save_pretrained(folder / "base")
    base = architecture.model_class.from_pretrained(folder / "base").eval()
    options: tuple[dict[str, Any], ...] = (
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 3, "lora_alpha": 7},
        {"r": 2, "lora_alpha": 4, "layers_to_transform": [0, 1, 3, 4]},
    )
    made = Experts(base, {}, {}, set())
    for seed, (expert, targets) in enumerate(zip(NAMES, TARGETS[name], strict=True)):
        config = LoraConfig(
            task_type="CAUSAL_LM", target_modules=targets, fan_in_fan_out=name == "gpt2", **options[seed]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns about tied embeddings
            model = get_peft_model(architecture.model_class.from_pretrained(folder / "base"), config)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        model.save_pretrained(folder / expert, save_embedding_layers=False)
        made.folders[expert] = folder / expert
        loaded, said = load_with_peft(base, folder / expert)
        made.dense[expert] = changes_in(loaded)
        made.said.update(said)
    return made


# The interpreter


def layers_in(value: Any) -> set[int] | None:
    """The layers that `layers:` selects; None for `none`, the modules outside the layers."""
    if value == "none":
        return None
    chosen: set[int] = set()
    for item in value if isinstance(value, list) else str(value).split(","):
        first, _, last = str(item).partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    return chosen


def matches(rule: Mapping[str, Any], architecture: str, module: str) -> bool:
    layer = ARCHITECTURES[architecture].layer_of(f"{module}.weight")
    if "layers" in rule:
        chosen = layers_in(rule["layers"])
        if (layer is not None) if chosen is None else (layer not in chosen):
            return False
    if "modules" not in rule:
        return True
    kinds = KINDS[architecture]
    for entry in [rule["modules"]] if isinstance(rule["modules"], str) else rule["modules"]:
        if entry in kinds:
            result = any(module.endswith(f".{leaf}") for leaf in kinds[entry])
        elif entry == "other":
            result = not any(module.endswith(f".{leaf}") for leaves in kinds.values() for leaf in leaves)
        else:  # parts of the name, in a row and whole
            result = f".{entry}." in f".{module}."
        if result:
            return True
    return False


def shares_of(rule: Mapping[str, Any]) -> dict[str, float]:
    """Each expert's factor by the rule; the base has none, since its ΔW is zero."""
    if "expert" in rule:
        return {rule["expert"]: 1.0}
    weights = rule["blend"]
    if not any(weights.values()):
        raise Mistake("all weights are 0")
    if rule.get("normalize", True):
        total = sum(weights.values())
        if abs(total) < 1e-12:
            raise Mistake("the weights sum to 0")
        weights = {name: weight / total for name, weight in weights.items()}
    return dict(weights)


def interpret(content: Mapping[str, Any], architecture: str, dense: Mapping[str, Changes]) -> Changes:
    """The ΔW of every module that a named expert adapts, by parameter.

    Raises:
        Mistake: the allocation breaks a rule of the documentation.
    """
    rules = content["allocation"]
    named = {name for rule in rules for name in (rule.get("blend") or [rule["expert"]])} - {"base"}
    if not named:
        raise Mistake("no expert")
    shares = [shares_of(rule) for rule in rules]
    for rule in rules:
        if max(layers_in(rule.get("layers", "none")) or {0}) >= LAYERS:
            raise Mistake("no such layer")
    result: Changes = {}
    used: set[int] = set()
    giving = {name for rule in rules for name, weight in (rule.get("blend") or {}).items() if weight == 0}
    for parameter in sorted({parameter for name in named for parameter in dense[name]}):
        module = parameter.removesuffix(".weight")
        index = next((i for i, rule in enumerate(rules) if matches(rule, architecture, module)), None)
        if index is None:
            raise Mistake(f"no rule covers {module}")
        used.add(index)
        held = {name: share for name, share in shares[index].items() if parameter in dense.get(name, {}) and share}
        giving |= held.keys()
        change = torch.zeros(())
        for name, share in held.items():
            change = change + share * dense[name][parameter]
        result[parameter] = change
    for index, rule in enumerate(rules):
        if index not in used and not rule.get("optional", False):
            raise Mistake("a rule matches nothing")
    if named - giving:
        raise Mistake("an expert gives nothing")
    return result


# Random allocations

weights = st.sampled_from([0, 0.5, 1, 1, 2, 3.25, -0.5])


@st.composite
def layers(draw: st.DrawFn) -> Any:
    first = draw(st.integers(0, LAYERS))  # sometimes one more than exists
    last = draw(st.integers(first, LAYERS - 1)) if first < LAYERS else first
    more = draw(st.integers(0, LAYERS - 1))
    return draw(
        st.sampled_from([first, f"{first}-{last}", f"{first}-{last}, {more}", [more, f"{first}-{last}"], "none"])
    )


@st.composite
def rule(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    where = draw(st.sampled_from(["layers", "layers", "modules", "both"]))
    if where != "modules":
        content["layers"] = draw(layers())
    if where != "layers":
        selectors = st.sampled_from([*KINDS[architecture], "other", *SELECTORS[architecture]])
        content["modules"] = draw(st.one_of(selectors, st.lists(selectors, min_size=1, max_size=3)))
    if draw(st.integers(0, 3)):
        content["optional"] = True
    return content | draw(given_to())


@st.composite
def given_to(draw: st.DrawFn) -> dict[str, Any]:
    """The expert or experts that get a rule's modules."""
    names = st.sampled_from([*NAMES, "base"])
    if draw(st.booleans()):
        return {"expert": draw(names)}
    content: dict[str, Any] = {"blend": draw(st.dictionaries(names, weights, min_size=1, max_size=4))}
    if draw(st.booleans()):
        content["normalize"] = draw(st.booleans())
    return content


@st.composite
def allocation(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    rules = draw(st.lists(rule(architecture), max_size=4))
    if draw(st.integers(0, 9)):  # sometimes no rule covers the rest
        rules.append({**draw(given_to()), "optional": True})
    if not rules:
        rules = [{"expert": "math"}]
    return {"allocation": rules, "allow_negative": True}


FORMS = [("compose", "--layout", "exact"), ("compose", "--layout", "portable"), ("merge",)]


def differences(base: PreTrainedModel, folder: Path) -> Changes:
    """W' − W of the parameters that a merged model changes, in float64."""
    own = parameters(base)
    merged = parameters(type(base).from_pretrained(folder)).items()
    changes = {name: weight.detach().double() - own[name].detach().double() for name, weight in merged}
    return {name: change for name, change in changes.items() if change.any()}


@pytest.mark.parametrize("architecture", KINDS)
def test_any_allocation_is_exact_or_refused(architecture: str, run: Run, tmp_path: Path) -> None:
    base, folders, dense, known = experts(architecture)
    exact: list[bool] = []

    @settings(derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(content=allocation(architecture), form=st.sampled_from(FORMS))
    def check(content: dict[str, Any], form: tuple[str, ...]) -> None:
        named = {name for rule in content["allocation"] for name in (rule.get("blend") or [rule["expert"]])}
        content = content | {"experts": {name: str(folder) for name, folder in folders.items() if name in named}}
        recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
        recipe.write_text(yaml.safe_dump(content))
        result = run(form[0], recipe, "-o", out, *form[1:], "--overwrite")
        expected = mistake = None
        try:
            expected = interpret(yaml.safe_load(recipe.read_text()), architecture, dense)
        except Mistake as found:
            mistake = str(found).partition(" covers")[0]
        if expected is None:
            event(str(mistake))
            assert result.exit_code in (2, 3), f"{mistake}, and the library composes it"
            return
        assert result.exit_code == 0, result.stderr
        exact.append(True)
        event("exact")
        if form[0] == "merge":
            changes = differences(base, out)
        else:
            model, said = load_with_peft(base, out)
            assert said <= known
            changes = changes_in(model)
        for parameter in expected.keys() | changes.keys():
            zero = torch.zeros_like(base.get_parameter(parameter), dtype=torch.float64)
            size = 4 * max(float(one[parameter].abs().max()) for one in dense.values() if parameter in one)
            if form[0] == "merge":  # W + ΔW is rounded to float32
                size += float(base.get_parameter(parameter).detach().abs().max())
            error = float((expected.get(parameter, zero) - changes.get(parameter, zero)).abs().max())
            assert error <= tolerance(zero, scale=size), parameter

    check()
    assert len(exact) >= 10  # not all examples are mistakes
