"""Merge methods against their reference on full weights (`dense_methods`), and edge cases."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap import Composition, Rule
from adapterswap.core.methods.dense import drop_mask
from adapterswap.core.methods.method import DENSITY
from adapterswap.core.methods.method import SEED as SEED_PARAMETER
from adapterswap.core.methods.registry import BUILT_IN, find_method, names_of
from adapterswap.kit.errors import ExpertError, FieldError, UnsupportedError
from core.methods import dense_methods
from core.writing.test_blends import deltas, handmade

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "della": ("della", {"density": 0.5, "scale": 0.7}),
    "della by chance": ("della", {"density": 0.6, "epsilon": 0.3, "rescale": "probability"}),
    "della_linear": ("della_linear", {"density": 0.4, "epsilon": 0.1}),
    "della_linear as it is": ("della_linear", {"density": 0.4, "rescale": "none"}),
    "della of all": ("della", {"density": 1}),
    "breadcrumbs": ("breadcrumbs", {"density": 0.5, "gamma": 0.1, "scale": 1.5}),
    "breadcrumbs of most": ("breadcrumbs", {"density": 0.95, "gamma": 0.2}),
    "breadcrumbs_ties": ("breadcrumbs_ties", {"density": 0.5, "gamma": 0.1}),
    "sce": ("sce", {}),
    "sce of some": ("sce", {"select_topk": 0.3}),
    "nuslerp": ("nuslerp", {}),
    "nuslerp by rows": ("nuslerp", {"nuslerp_flatten": False}),
    "nuslerp by columns": ("nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": True}),
    "multislerp": ("multislerp", {}),
    "karcher": ("karcher", {}),
    "karcher in one step": ("karcher", {"max_iter": 1}),
    "model_stock": ("model_stock", {}),
    "model_stock by rows": ("model_stock", {"filter_wise": True}),
    "nearswap": ("nearswap", {"t": 0.3}),
    "nearswap of little": ("nearswap", {"t": 1e-3}),
    "arcee_fusion": ("arcee_fusion", {}),
    "tsv": ("tsv", {}),
    "tsv scaled": ("tsv", {"scale": 0.5}),
    "iso_c": ("iso_c", {}),
    "iso_c scaled": ("iso_c", {"scale": 1.5}),
    "iso_cts": ("iso_cts", {}),
    "iso_cts of less": ("iso_cts", {"common_space_fraction": 0.4, "scale": 0.8}),
    "knots_ties": ("knots_ties", {"density": 0.6, "scale": 0.7}),
    "knots_ties of all": ("knots_ties", {"density": 1.0}),
    "knots_dare_ties": ("knots_dare_ties", {"density": 0.5}),
    "magmax": ("magmax", {}),
    "magmax scaled": ("magmax", {"scale": 0.5}),
    "cart": ("cart", {"rank_fraction": 0.3}),
    "cart of the first direction": ("cart", {"own_scale": 0.4}),
    "wudi": ("wudi", {}),
    "wudi in large steps": ("wudi", {"max_iter": 20, "learning_rate": 0.03}),
    "ram": ("ram", {}),
    "ram of large changes": ("ram", {"threshold": 0.4}),
    "ramplus_tl": ("ramplus_tl", {"threshold": 0.6, "boost": 0.5, "boost_limit": 0.3}),
    "ramplus_tl without a limit": ("ramplus_tl", {"threshold": 0.3, "boost": 0.1, "boost_limit": 100.0}),
}
NAMES = ("a", "b", "c")
SEED, MODULE = 3, "m"


def own_choice(names: tuple[str, ...], module: str = MODULE) -> dense_methods.Chooser:
    """The masks that the library draws, for probabilities that the reference computes."""

    def chosen(expert: int, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        return drop_mask(chances.shape, np.float32(chances), seed=SEED, expert=names[expert], module=module)

    return chosen


def seed_of(method: str) -> dict[str, int]:
    """The seed as an option of the methods that have one."""
    return {"seed": SEED} if find_method(method).has(SEED_PARAMETER) else {}


def rule_of(method: str, values: dict[str, Any], weights: dict[str, float]) -> Rule:
    given = {parameter.called(in_rules=True): values[parameter.name]
             for parameter in find_method(method).parameters if parameter.name in values}  # fmt: skip
    return Rule.model_validate({"blend": weights, "method": method, **given})


def weights_of(method: str, names: tuple[str, ...]) -> dict[str, float]:
    return dict(zip(names, (1.0, 0.6, 0.8) if find_method(method).weighted else (1.0, 1.0, 1.0), strict=False))


def computed(case: str, base: npt.NDArray[np.float32], experts: dict[str, npt.NDArray[np.float32]]) -> Any:
    """Full weights by the library: (ours, the reference's)."""
    method, values = CASES[case]
    weights = weights_of(method, tuple(experts))
    rule = rule_of(method, values, weights)
    entering = {name: np.float32(tensor - base * (not rule.acts_on_weights)) for name, tensor in experts.items()}
    ours = rule.combine(entering, weights, seed=SEED, module=MODULE) + base * (not rule.acts_on_weights)
    exact = [entering[name].astype(np.float64) + base * (not rule.acts_on_weights) for name in experts]
    chosen = own_choice(tuple(experts))
    return ours, dense_methods.merged(method, base, exact, list(weights.values()), chosen, **values)


@pytest.mark.parametrize("shape", [(24, 16), (7,), (3, 5, 6), (9, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_methods_on_full_weights(case: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(case))
    most = find_method(CASES[case][0]).sides[1] or 3
    base = random.standard_normal(shape).astype(np.float32)
    experts = {name: np.float32(base + 0.5 * random.standard_normal(shape)) for name in NAMES[:most]}
    ours, expected = computed(case, base, experts)
    assert ours.dtype == np.float32
    close(ours, expected, depth=4)
    assert np.abs(ours - expected).max() < 1e-6


@pytest.mark.parametrize("what", ["identical", "no change", "one without change", "opposite", "one expert"])
@pytest.mark.parametrize("case", CASES)
def test_edges(case: str, what: str) -> None:
    """Finite and equal to the reference: zero angle, zero norm, zero variance, directions that cancel."""
    random = np.random.default_rng(0)
    least, most = find_method(CASES[case][0]).sides
    base = random.standard_normal((6, 5)).astype(np.float32)
    other = np.float32(base + 0.5 * random.standard_normal((6, 5)))
    pair = {
        "identical": (other, other),
        "no change": (base, base),
        "one without change": (other, base),
        "opposite": (other, 2 * base - other),
        "one expert": (other,),
    }[what]
    if not least <= len(pair) <= (most or 3):
        with pytest.raises(FieldError):
            rule_of(*CASES[case], weights_of(CASES[case][0], NAMES[: len(pair)]))
        return
    ours, expected = computed(case, base, dict(zip(NAMES, pair, strict=False)))
    assert np.isfinite(ours).all()
    close(ours, expected, depth=4, scale=4)
    if what == "identical" and case in ("nuslerp", "multislerp", "karcher", "sce", "nearswap", "arcee_fusion"):
        close(ours, other, depth=4)


def test_model_stock_of_identical_experts_is_theirs() -> None:
    base, other = (np.random.default_rng(seed).standard_normal((6, 5)).astype(np.float32) for seed in (1, 2))
    ours, _ = computed("model_stock", base, {"a": other, "b": other, "c": other})
    close(ours, other, depth=4)


def test_directions_that_cancel_are_refused() -> None:
    one = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    rule = rule_of("multislerp", {}, {"a": 1, "b": 1, "c": 2})
    with pytest.raises(UnsupportedError) as caught:
        rule.combine({"a": one, "b": one, "c": -one}, {"a": 1, "b": 1, "c": 2}, seed=0, module="layers.3.q_proj")
    assert "layers.3.q_proj" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), count=st.integers(2, 5), rows=st.integers(3, 6), width=st.integers(3, 6))
def test_karcher_and_similar_methods_for_any_number_of_experts(seed: int, count: int, rows: int, width: int) -> None:
    random = np.random.default_rng(seed)
    base = random.standard_normal((rows, width)).astype(np.float32)
    experts = {f"e{i}": np.float32(base + random.standard_normal((rows, width))) for i in range(count)}
    for method in ("karcher", "multislerp", "model_stock"):
        blend = dict.fromkeys(experts, 1.0)
        rule = rule_of(method, {}, blend)
        entering = {name: tensor if rule.acts_on_weights else tensor - base for name, tensor in experts.items()}
        expected = dense_methods.merged(method, base, list(experts.values()), [1.0] * count, own_choice(()))
        ours = rule.combine(entering, blend, seed=0, module=MODULE) + base * (not rule.acts_on_weights)
        close(ours, expected, depth=4, scale=float(max(1, np.abs(expected).max())) * 20)


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [
        handmade(tmp_path / "math", layers=3, rank=3, alpha=8, rslora=True, seed=1),
        handmade(tmp_path / "swahili", layers=3, rank=2, alpha=5, rslora=False, seed=2),
    ]


def planned(pair: list[Path], method: str, values: dict[str, Any], **options: Any) -> adapterswap.Plan:
    composition = Composition(
        task="math", language="swahili", num_layers=3, method=method, **seed_of(method), **values, **options
    )
    return adapterswap.compose(composition, dict(zip(("math", "swahili"), pair, strict=True)))


@pytest.mark.parametrize("case", [case for case, (method, _) in CASES.items() if BUILT_IN[method].acts_on == "delta"])
def test_methods_in_adapters(case: str, pair: list[Path], tmp_path: Path) -> None:
    """Methods that are linear in ΔW are exact at any rank, others at full rank."""
    method, values = CASES[case]
    exact = find_method(method).exact_in_adapters(
        Composition(method=method, task="a", language="b", **values).parameters
    )
    weights = {"language_weight": 0.6} if find_method(method).weighted else {}
    plan = planned(pair, method, values, **weights)
    out = adapterswap.write_adapter(plan, tmp_path / "out", max_rank=None if exact else 12)
    sources = [deltas(folder) for folder in pair]
    chosen = {"task": "math", "language": "swahili"}
    for name, written in deltas(out).items():
        both = [np.float32(source[name]) for source in sources]
        base = np.zeros_like(both[0])
        each = [1.0, 0.6 if weights else 1.0]
        expected = dense_methods.merged(
            method, base, both, each, own_choice(tuple(chosen.values()), name), **values
        )  # fmt: skip
        close(written, expected, depth=4)
    record = json.loads((out / "adapterswap.json").read_text())["composition"]
    assert {key: record[key] for key in values} == values
    assert adapterswap.verify(out, experts=dict(zip(("math", "swahili"), map(str, pair), strict=True))).equal


@pytest.mark.parametrize("method", [name for name, method in BUILT_IN.items() if method.acts_on == "weights"])
def test_methods_on_whole_weights_are_refused_in_adapters(method: str, pair: list[Path], tmp_path: Path) -> None:
    plan = planned(pair, method, {})
    for rank in (None, 12):
        with pytest.raises(UnsupportedError) as caught:
            adapterswap.write_adapter(plan, tmp_path / "out", max_rank=rank)
        assert caught.value.parameter == "method"
    assert not (tmp_path / "out").exists()


def test_adamergex_adds_what_a_language_changes(tmp_path: Path) -> None:
    names = ("task", "target", "source")
    folders = {name: handmade(tmp_path / name, layers=3, rank=2, alpha=3 + i, rslora=False, seed=i)
               for i, name in enumerate(names)}  # fmt: skip
    composition = Composition(
        task="task", language=("target", "source"), method="adamergex", scale=0.7, task_weight=0.9, num_layers=3
    )
    out = adapterswap.write_adapter(adapterswap.compose(composition, folders), tmp_path / "out")
    task, target, source = (deltas(folders[name]) for name in names)
    for name, written in deltas(out).items():
        close(written, 0.9 * task[name] + 0.7 * (target[name] - source[name]))
    for language in ("target", ("target",), ("target", "source", "other"), ("target", "task"), ("target", "base")):
        with pytest.raises(FieldError):
            Composition(task="task", language=language, method="adamergex")


def test_cat_is_task_arithmetic(pair: list[Path], tmp_path: Path) -> None:
    written = [
        deltas(adapterswap.write_adapter(planned(pair, method, {"scale": 0.5}), tmp_path / method))
        for method in ("cat", "task_arithmetic")
    ]
    for name, delta in written[0].items():
        np.testing.assert_array_equal(delta, written[1][name])
    assert adapterswap.parse_composition("a+b@method=cat").method == "task_arithmetic"


@pytest.mark.parametrize(
    "content",
    [
        {"method": "della", "density": 0.9},
        {"method": "della", "density": 0.1},
        {"method": "sce", "task_weight": 2},
        {"method": "karcher", "language_weight": 0.5},
        {"method": "nearswap", "t": 0},
        {"method": "nuslerp", "language": "base"},
        {"method": "model_stock", "language": "base"},
        {"method": "breadcrumbs"},
        {"method": "della", "density": 0.5, "rescale": "l2"},
    ],
)
def test_invalid_parameters_of_methods(content: dict[str, Any]) -> None:
    with pytest.raises(FieldError):
        Composition(**{"task": "a", "language": "b", **content})


def test_an_expert_that_lacks_a_module_counts_as_no_change(tmp_path: Path) -> None:
    """The mean of two experts, of which one adapts half of the layers."""
    long = handmade(tmp_path / "math", layers=3, rank=3, alpha=8, rslora=True, seed=1)
    short = handmade(tmp_path / "swahili", layers=1, rank=2, alpha=5, rslora=False, seed=2)
    for case, max_rank in itertools.product(("sce", "nuslerp", "multislerp", "model_stock", "nearswap"), (12,)):
        method, values = CASES[case]
        plan = planned([long, short], method, values)
        written = deltas(adapterswap.write_adapter(plan, tmp_path / case, max_rank=max_rank))
        for name, delta in deltas(long).items():
            absent = np.zeros_like(delta)
            other = deltas(short).get(name, absent)
            expected = dense_methods.merged(method, absent, [delta, other], [1.0, 1.0], own_choice(()), **values)
            close(written.get(name, absent), expected, depth=4, scale=float(np.abs(delta).max()))


@pytest.mark.parametrize("method", ["core_ties", "core_dare_ties"])
def test_core_space_is_built_from_the_factors(method: str, tmp_path: Path) -> None:
    """The bases are the singular vectors of all B and of all A, as the authors take them, with λ·s as part of B."""
    names = ("math", "swahili")
    folders = [
        handmade(tmp_path / name, layers=2, rank=2, alpha=3 + i, rslora=False, seed=i) for i, name in enumerate(names)
    ]
    composition = Composition(
        task="math",
        language="swahili",
        num_layers=2,
        method=method,
        density=0.6,
        scale=0.9,
        language_weight=0.6,
        **seed_of(method),
    )
    plan = adapterswap.compose(composition, dict(zip(names, folders, strict=True)))
    out = adapterswap.write_adapter(plan, tmp_path / "out")
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    for name, written in deltas(out).items():
        key = f"base_model.model.{name}."
        a = [held[f"{key}lora_A.weight"].double().numpy() for held in tensors]
        b = [held[f"{key}lora_B.weight"].double().numpy() * (3 + i) / 2 for i, held in enumerate(tensors)]
        left = np.linalg.svd(np.hstack(b), full_matrices=False)[0]
        right = np.linalg.svd(np.vstack(a), full_matrices=False)[2]
        cores = [left.T @ factor @ other @ right.T for factor, other in zip(b, a, strict=True)]
        if method == "core_ties":
            kept = [dense_methods.trimmed(core, 0.6) for core in cores]
        else:
            chosen = own_choice(names, name)
            kept = [core * chosen(i, np.full(core.shape, 0.6)) / 0.6 for i, core in enumerate(cores)]
        close(written, left @ dense_methods.elected(kept, [1.0, 0.6], 0.9) @ right, depth=4)
    assert len(deltas(out)) == 4


def test_low_rank_methods_keep_the_rank_of_the_experts_together(pair: list[Path], tmp_path: Path) -> None:
    for method in ("tsv", "iso_c", "iso_cts", "knots_ties", "core_ties"):
        values = {"density": 0.5} if find_method(method).has(DENSITY) else {}
        exact = deltas(adapterswap.write_adapter(planned(pair, method, values), tmp_path / method))
        reduced = deltas(adapterswap.write_adapter(planned(pair, method, values), tmp_path / f"{method}-2", max_rank=2))
        for name, delta in exact.items():
            sigma = np.linalg.svd(delta, compute_uv=False)
            assert np.all(sigma[5:] < 1e-5 * sigma[0])
            close(np.linalg.norm(delta - reduced[name]), np.linalg.norm(sigma[2:]), scale=float(sigma[0]), depth=4)


def with_b(folder: Path, value: float) -> Path:
    """The adapter with one value in all of B: zero as before training, or not finite."""
    place = folder / "adapter_model.safetensors"
    tensors = {key: tensor * 0 + value if "lora_B" in key else tensor for key, tensor in load_file(place).items()}
    save_file(tensors, place, {"format": "pt"})
    return folder


DELTA = [name for name in names_of() if BUILT_IN[name].acts_on == "delta" and name not in ("layer_swap", "adamergex")]


@pytest.mark.parametrize("method", DELTA)
def test_experts_that_change_nothing_or_hold_nan(method: str, pair: list[Path], tmp_path: Path) -> None:
    values = {"density": 0.5} if find_method(method).has(DENSITY) else {}
    with_b(pair[1], 0.0)
    half = deltas(adapterswap.write_adapter(planned(pair, method, values), tmp_path / "half", max_rank=12))
    assert all(np.isfinite(delta).all() for delta in half.values())
    with_b(pair[0], 0.0)
    none = deltas(adapterswap.write_adapter(planned(pair, method, values), tmp_path / "none", max_rank=12))
    assert none
    assert not any(delta.any() for delta in none.values())
    with_b(pair[0], float("nan"))
    with pytest.raises(ExpertError):
        adapterswap.write_adapter(planned(pair, method, values), tmp_path / "nan", max_rank=12)
    assert not (tmp_path / "nan").exists()
