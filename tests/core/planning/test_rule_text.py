"""Rules as lines of text: they round-trip, mistakes name the character, and results equal a recipe's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import assume, given
from hypothesis import strategies as st
from refusals import refused
from ruamel.yaml import YAML
from safetensors.numpy import load_file

import adapterswap
from adapterswap.core.model.layers import format_layers
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.rules import Rule
from adapterswap.kit.errors import ArgumentError, CompositionError, FieldError

_NAMES = st.one_of(
    st.sampled_from(
        ["math", "swahili", "base", "of", "with", "mean", "0.5", "a-b", "a.b", 'a "b" \\c', "it's", "a: 5"]
    ),
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=8),
)
_WEIGHTS = st.one_of(st.integers(-3, 5), st.floats(-1e9, 1e9, allow_nan=False))
_SETTINGS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"weights": "magnitude"},
        {"normalize": False},
        {"method": "ties", "density": 0.5},
        {"method": "ties", "density": 1 / 3, "lambda": 2.5, "normalize": False},
        {"method": "dare_ties", "density": 0.1},
        {"method": "breadcrumbs", "density": 0.7, "gamma": 0.01},
        {"method": "tsv"},
        {"optional": True},
    ]
)


@st.composite
def _contents(draw: st.DrawFn) -> dict[str, Any]:
    """The keys of a rule; some are invalid."""
    names = draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True))
    content: dict[str, Any] = {}
    if draw(st.booleans()):
        content["layers"] = format_layers(draw(st.frozensets(st.integers(0, 99), max_size=6)))
    if draw(st.booleans()):
        content["modules"] = draw(st.lists(_NAMES, min_size=1, max_size=3))
    if len(names) == 1 and draw(st.booleans()):
        content["expert"] = names[0]
        content |= draw(st.sampled_from([{}, {"optional": True}]))
    else:
        content["blend"] = {name: draw(_WEIGHTS) for name in names}
        content |= draw(_SETTINGS)
    if draw(st.booleans()):
        members = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
        label = draw(st.sampled_from([names[0], f"mean({', '.join(sorted(members))})"]))
        if "expert" in content:
            content["expert"] = label
        else:
            content["blend"][label] = 1
        content["averages"] = {label: members}
    return content


@given(_contents())
def test_a_rule_round_trips_through_text(content: dict[str, Any]) -> None:
    try:
        rule = Rule.model_validate(content)
    except FieldError:
        assume(False)
        return
    assert Rule.from_text(rule.text) == rule
    assert Rule.from_text(rule.text).text == rule.text
    assert Composition(rules=[rule.text], allow_negative=True).allocation == (rule,) or "base" in content


@given(st.text(st.sampled_from("math base0.5*+-:,\"'()=ofwit\\ \n"), max_size=30))
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    try:
        rule = Rule.from_text(text)
    except FieldError:
        return
    assert Rule.from_text(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("swahili: 0-4,30-31", {"layers": "0-4,30-31", "expert": "swahili"}),
        ("math*0.5 + swahili*0.5: 5", {"layers": 5, "blend": {"math": 0.5, "swahili": 0.5}}),
        ("math+swahili:5", {"layers": 5, "blend": {"math": 1, "swahili": 1}}),
        ("mlp of code: 6-9", {"layers": "6-9", "modules": ["mlp"], "expert": "code"}),
        ("q_proj, mlp.down_proj of code", {"modules": ["q_proj", "mlp.down_proj"], "expert": "code"}),
        ("math", {"expert": "math"}),
        ("base: none", {"layers": "none", "expert": "base"}),
        ("\"my math\"*2 + 'x'*1", {"blend": {"my math": 2, "x": 1}}),
        ("mean(a, b) + c", {"blend": {"mean(a, b)": 1, "c": 1}, "averages": {"mean(a, b)": ["a", "b"]}}),
        ("r = mean(a, b): 3", {"layers": 3, "expert": "r", "averages": {"r": ["a", "b"]}}),
        (
            "math*2 + code: 6-9 with method=ties, density=0.5, lambda=1.5",
            {"layers": "6-9", "blend": {"math": 2, "code": 1}, "method": "ties", "density": 0.5, "lambda": 1.5},
        ),
    ],
)
def test_meaning_of_rule_texts(text: str, content: dict[str, Any]) -> None:
    assert Rule.from_text(text) == Rule.model_validate(content)


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("", 1),
        ("math*0,5 + x: 5", 7),
        ("0.5*math", 1),
        ("math - x", 6),
        ("math: 4-2", 7),
        ("math: x", 7),
        ("math: 0–4", 8),
        ("math, code: 5", 5),
        ("math writh optional=true", 6),
        ("math with optional", 11),
        ("math with optional=", 20),
        ("math with expert=x", 11),
        ("math with optional=true, optional=true", 26),
        ("math + math", 8),
        ("mean(a, a)", 9),
        ("mean(a b)", 8),
        ("x = y", 5),
        ('"math: 3', 1),
        ("of: 5", 1),
        ("math*x", 6),
        ("math + : 5", 8),
        ("math: 5 mlp", 9),
    ],
)
def test_mistakes_name_the_character(text: str, character: int) -> None:
    with refused(FieldError, match=f"at character {character}:"):
        Rule.from_text(text)


def test_other_refusals() -> None:
    with refused(ArgumentError, "text"):
        Rule.from_text(5)  # type: ignore[arg-type]
    with refused(FieldError, "rules.0"):
        Composition(rules=["math: x"])
    with refused(FieldError, "rules.1.method"):
        Composition(rules=["math: 3", "math + x with method=tis"])
    with refused(FieldError, "rules"):
        Composition(rules=["math"], allocation=[{"expert": "math"}])
    with refused(FieldError, "bottom"):
        Composition(rules=["math"], bottom=1)
    with refused(FieldError, "experts"):
        Composition(experts={"base": "x"}, rules=["math"])


def test_yaml_needs_no_quotes(tmp_path: Path) -> None:
    """`- swahili: 0-4` is a mapping to YAML."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "experts: {math: m, swahili: s}\n"
        "rules:\n- swahili: 0-1\n- math*2 + swahili: 5\n- mlp of math: 2,3\n- swahili: none\n"
        "- math with optional=true\n"
    )
    composition = adapterswap.read_composition(recipe)
    texts = ["swahili: 0-1", "math*2 + swahili: 5", "mlp of math: 2-3", "swahili: none", "math with optional=true"]
    assert [rule.text for rule in composition.allocation or ()] == texts
    recipe.write_text("experts: {math: m}\nrules:\n- expart: math\n")
    with refused(FieldError, "rules.0.expart"):
        adapterswap.read_composition(recipe)


@pytest.fixture
def code(expert: Callable[..., Path]) -> Path:
    return expert(seed=3, r=4)


_TEXTS = [
    "swahili: 0,5",
    "math*0.25 + swahili*0.5 + code*0.25: 1",
    "mlp of code: 2-3",
    "attention of base: 3",
    "math",
]
_ALLOCATION = [
    {"layers": "0,5", "expert": "swahili"},
    {"layers": 1, "blend": {"math": 0.25, "swahili": 0.5, "code": 0.25}},
    {"layers": "2-3", "modules": ["mlp"], "expert": "code"},
    {"layers": 3, "modules": ["attention"], "expert": "base"},
    {"expert": "math"},
]


def _contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_options_recipes_and_python_give_the_same_bytes(
    run: Callable[..., Result], math: Path, swahili: Path, code: Path, tmp_path: Path
) -> None:
    experts = {"math": str(math), "swahili": str(swahili), "code": str(code)}
    named = [part for name, place in experts.items() for part in ("--expert", f"{name}={place}")]
    rules = [part for text in _TEXTS for part in ("--rule", text)]
    assert (result := run("compose", *named, *rules, "-o", tmp_path / "options")).exit_code == 0, result.output
    for name, content in {"recipe": {"allocation": _ALLOCATION}, "texts": {"rules": _TEXTS}}.items():
        with (tmp_path / f"{name}.yaml").open("w") as file:
            YAML().dump({"experts": experts, **content}, file)
        result = run("compose", tmp_path / f"{name}.yaml", "-o", tmp_path / name, exit_code=0)
    adapterswap.compose(Composition(rules=_TEXTS), experts).write(tmp_path / "python")
    written = _contents_of(tmp_path / "options")
    assert "adapter_model.safetensors" in written
    for name in ("recipe", "texts", "python"):
        assert _contents_of(tmp_path / name) == written

    tensors = load_file(tmp_path / "options" / "adapter_model.safetensors")
    sources = {name: load_file(Path(place) / "adapter_model.safetensors") for name, place in experts.items()}
    at = "base_model.model.model.layers.{}.{}.lora_A.weight"
    for layer, module, owner in ((0, "mlp.up_proj", "swahili"), (2, "mlp.up_proj", "code"), (4, "mlp.up_proj", "math"),
                                 (2, "self_attn.q_proj", "math")):  # fmt: skip
        key = at.format(layer, module)
        assert tensors[key].tobytes() == sources[owner][key].tobytes()
    assert at.format(3, "self_attn.q_proj") not in tensors


def test_the_strip_is_shown(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> None:
    arguments = ["--expert", f"math={math}", "--expert", f"swahili={swahili}", "--rule", "swahili: 0,5", "--rule",
                 "math + swahili: 1", "--rule", "math", "-o", tmp_path / "out", "--dry-run"]  # fmt: skip
    for command in ("compose", "merge"):
        result = run(command, *arguments, exit_code=0)
        assert "s+mmms" in result.stdout
        assert not (tmp_path / "out").exists()
    shown = json.loads(run("compose", *arguments, "--json").stdout)
    assert [*shown["experts"]] == ["swahili", "math"]


def test_methods_combine_named_experts_one_by_one(
    run: Callable[..., Result], math: Path, swahili: Path, code: Path, tmp_path: Path
) -> None:
    experts = {"math": str(math), "swahili": str(swahili), "code": str(code)}
    named = [part for name, place in experts.items() for part in ("--expert", f"{name}={place}")]
    blend = {"math": 1.0, "swahili": 1.0, "code": 1.0}
    for options, rule in (
        (["--method", "soup"], {}),
        (["--method", "soup", "--weights", "magnitude"], {"weights": "magnitude"}),
        (["--method", "task_arithmetic", "--scale", "0.5"], {"blend": dict.fromkeys(blend, 0.5), "normalize": False}),
        (["--method", "ties", "--density", "0.5", "--max-rank", "64"], {"method": "ties", "density": 0.5}),
    ):
        run("compose", *named, *options, "-o", tmp_path / "options", "--overwrite", exit_code=0)
        plan = adapterswap.compose(Composition(rules=[{"blend": blend, **rule}]), experts)
        plan.write(tmp_path / "rule", max_rank=64, overwrite=True)
        one, other = (tmp_path / name / "adapter_model.safetensors" for name in ("options", "rule"))
        assert one.read_bytes() == other.read_bytes(), options


def test_unknown_and_unused_experts(math: Path, swahili: Path) -> None:
    with refused(
        CompositionError, "experts", match=r"rule 2, 'mlp of mathh: 3', at character 8: .*Did you mean 'math'"
    ):
        adapterswap.compose(
            Composition(rules=["math: 0", "mlp of mathh: 3", "swahili"]), {"math": math, "swahili": swahili}
        )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--rule", "math"], 2, "--expert NAME=PATH"),
        (["--expert", "math"], 2, "NAME=PATH"),
        (["--expert", "math={math}"], 2, "--rule"),
        (["--expert", "math={math}", "--expert", "math={math}", "--rule", "math"], 2, "twice"),
        (["--expert", "math={math}", "--rule", "math", "-t", "{math}", "-l", "{math}"], 2, "not both"),
        (["--expert", "math={math}", "--rule", "mathh: 0-2", "--rule", "math"], 2, "Did you mean 'math'"),
        (["--expert", "math={math}", "--expert", "x={math}", "--rule", "math"], 2, "No rule names the expert 'x'"),
        (["--expert", "base={math}", "--rule", "math"], 2, "reserved"),
        (["--expert", "math={math}", "--rule", "math: x", "--rule", "math *"], 2, "at character 7"),
        (["--expert", "math={math}", "--rule", "math: 9"], 2, "9"),
        (["--expert", "math={math}", "--rule", "math", "--rule", "math: 3"], 2, "matches no module"),
    ],
)
def test_mistakes_on_the_command_line(
    run: Callable[..., Result], math: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    result = run("compose", *(argument.format(math=math) for argument in arguments), "-o", tmp_path / "out")
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert not (tmp_path / "out").exists()
