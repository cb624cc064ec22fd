"""Owners by dominance: the criteria written out, sizes against full weights, and the resulting compositions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from conftest import load_base, merged_weights
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from tolerances import near

import adapterswap
from adapterswap.experiments.analysis.dominance import choose_owners
from adapterswap.kit.errors import ArgumentError, ExpertError

SIZES = st.integers(1, 6).flatmap(
    lambda layers: st.dictionaries(
        st.sampled_from(["math", "language", "culture", "safety"]),
        st.lists(st.floats(0.001, 1), min_size=layers, max_size=layers),
        min_size=2,
    )
)


@given(SIZES, st.one_of(st.tuples(st.just("margin"), st.floats(0, 1)), st.tuples(st.just("tie"), st.floats(0, 0.5))))
def test_every_layer_goes_to_the_experts_near_the_largest(
    sizes: dict[str, list[float]], criterion: tuple[str, float]
) -> None:
    name, bound = criterion
    blocks = {expert: {(layer, ""): size for layer, size in enumerate(row)} for expert, row in sizes.items()}
    rules = choose_owners(blocks, **{name: bound})
    for layer in range(len(next(iter(sizes.values())))):
        here = {expert: row[layer] for expert, row in sizes.items()}
        most = max(here.values())
        if name == "tie":
            wanted = {expert for expert, size in here.items() if size == most or most - size < bound}
        else:
            wanted = {expert for expert, size in here.items() if not most > (1 + bound) * size}
        rule = next(rule for rule in rules if rule.matches(f"layers.{layer}.mlp.up_proj", layer, "mlp"))
        assert rule.coefficients() == pytest.approx(dict.fromkeys(wanted, 1 / len(wanted)))


def test_sizes_match_full_weights(
    base: Callable[[str], Path], math: Path, swahili: Path, expert: Callable[..., Path], tmp_path: Path
) -> None:
    """‖W' - W‖ / ‖W‖ of PEFT's merged weights, for three experts."""
    experts = {"math": math, "swahili": swahili, "code": expert(seed=3, r=4)}
    result = adapterswap.suggest_owners(experts, base_model=base("llama"), per="module", tie=0.001)
    assert result is not None
    assert result.relative
    own = load_base(base("llama")).state_dict()
    for name, folder in experts.items():
        after = merged_weights(base("llama"), folder)
        for layer, kind in result.sizes[name]:
            part = "self_attn" if kind == "attention" else "mlp"
            keys = [key for key in own if f".layers.{layer}.{part}." in key]
            changed = sum(float(((after[key] - own[key]).double() ** 2).sum()) for key in keys)
            whole = sum(float((own[key].double() ** 2).sum()) for key in keys)
            assert result.sizes[name][layer, kind] == near((changed / whole) ** 0.5, scale=1.0)
    plan = adapterswap.compose(adapterswap.Composition(rules=result.rules), experts)
    plan.write(tmp_path / "out")


def test_the_command(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> None:
    named = ["--expert", f"safety={math}", "--expert", f"culture={swahili}"]
    result = run("suggest", *named, "--margin", "0", "-o", tmp_path / "recipe.yaml", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    composition = adapterswap.read_composition(tmp_path / "recipe.yaml")
    assert [rule.text for rule in composition.allocation or ()] == shown["rules"]
    for row in shown["sizes"]:
        owner = max(("safety", "culture"), key=lambda name, row=row: row[name])  # type: ignore[misc]
        rule = next(r for r in composition.allocation or () if r.matches("x.mlp.y", row["layer"], "mlp"))
        assert rule.expert == owner
    assert run("compose", tmp_path / "recipe.yaml", "-o", tmp_path / "out").exit_code == 0
    shown_text = run("suggest", *named)
    assert shown_text.exit_code == 0, shown_text.output
    assert "--rule" in shown_text.stdout
    assert run("suggest", *named, "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--expert", "a={m}", "-t", "{m}", "-l", "{m}"],
        ["-t", "{m}"],
        ["-t", "{m}", "-l", "{m}", "--tie", "1"],
        ["--expert", "a={m}", "--expert", "b={m}", "--form", "zones"],
    ],
)
def test_options_that_do_not_go_together(run: Callable[..., Result], math: Path, arguments: list[str]) -> None:
    assert run("suggest", *(argument.format(m=math) for argument in arguments)).exit_code == 2


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"per": "row"}, "per"),
        ({"margin": 0.1, "tie": 0.1}, "tie"),
        ({"margin": -1.0}, "margin"),
        ({"margin": float("nan")}, "margin"),
        ({"tie": 0.1}, "base_model"),
    ],
)
def test_invalid_input_is_refused(math: Path, swahili: Path, options: dict[str, Any], parameter: str) -> None:
    with refused(ArgumentError, parameter):
        adapterswap.suggest_owners({"math": math, "swahili": swahili}, **options)


def test_one_expert_or_one_without_effect_is_refused(math: Path, expert: Callable[..., Path], tmp_path: Path) -> None:
    with refused(ArgumentError, "experts"):
        adapterswap.suggest_owners({"math": math})
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(math, tmp_path / "nothing")
    file = tmp_path / "nothing" / "adapter_model.safetensors"
    save_file({key: 0 * value for key, value in load_file(math / file.name).items()}, file, {"format": "pt"})
    with refused(ExpertError):
        adapterswap.suggest_owners({"math": math, "nothing": tmp_path / "nothing"})
