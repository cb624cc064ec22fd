"""mergekit's YAML: computed tensor by tensor, copied byte for byte, and unsupported keys refused.

`benchmarks/mergekit_yaml.py` runs mergekit itself on the same kinds of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from conftest import save_like, weights
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap.kit.errors import AdapterswapError, FieldError, UnsupportedError

MODELS = ("base", "math", "swahili")
EVERY = "- {model: math, parameters: {weight: %s}}\n- {model: swahili, parameters: {weight: %s}}\n"


@pytest.fixture(scope="module")
def folder(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and two fine-tunes of all of its weights: `math` and `swahili`."""
    place = tmp_path_factory.mktemp("mergekit")
    state = weights(base("llama"))
    for seed, name in enumerate(MODELS):
        generator = torch.Generator().manual_seed(seed)
        changed = {key: value + torch.randn(value.shape, generator=generator) * 0.02 for key, value in state.items()}
        save_like(place / name, base("llama"), state if name == "base" else changed)
    return place


def merged(run: Callable[..., Result], folder: Path, text: str, name: str = "out") -> dict[str, torch.Tensor]:
    (folder / "recipe.yaml").write_text(text)
    run("merge", folder / "recipe.yaml", "-o", folder / name, "--overwrite", exit_code=0)
    return weights(folder / name)


def expected(folder: Path, weight: Callable[[str, int | None], Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Σ w W / Σ w in float64, with the weights for each tensor's name and layer."""
    states = {name: {key: value.double().numpy() for key, value in weights(folder / name).items()} for name in MODELS}
    result = {}
    for key in states["math"]:
        layer = int(key.split(".")[2]) if ".layers." in key else None
        shares = weight(key, layer)
        result[key] = sum(share * states[name][key] for name, share in shares.items()) / sum(shares.values())
    return result


def check(
    folder: Path, actual: Mapping[str, torch.Tensor], weight: Callable[[str, int | None], Mapping[str, float]]
) -> None:
    """As `expected`; and where one model has all the weight, its bytes are copied."""
    wanted = expected(folder, weight)
    assert actual.keys() == wanted.keys()
    states = {name: weights(folder / name) for name in MODELS}
    copies = 0
    for key, tensor in actual.items():
        layer = int(key.split(".")[2]) if ".layers." in key else None
        owners = [name for name, share in weight(key, layer).items() if share]
        if len(owners) == 1:
            copies += 1
            assert torch.equal(tensor, states[owners[0]][key]), key
        close(tensor, wanted[key], name=key)
    assert copies


def test_slices(run: Callable[..., Result], folder: Path) -> None:
    """A layer swap with a transition; the embedding goes with the first slice, norm and head with the last."""
    parts = ((0, 2, 0, 1), (2, 5, 1, 0), (5, 6, 1, 3))
    text = "merge_method: linear\nslices:\n" + "".join(
        f"- sources:\n  - {{model: math, layer_range: [{a}, {b}], parameters: {{weight: {m}}}}}\n"
        f"  - {{model: swahili, layer_range: [{a}, {b}], parameters: {{weight: {s}}}}}\n"
        for a, b, m, s in parts
    )

    def weight(key: str, layer: int | None) -> Mapping[str, float]:
        place = layer if layer is not None else 0 if "embed" in key else 5
        m, s = next((m, s) for a, b, m, s in parts if a <= place < b)
        return {"math": m, "swahili": s}

    check(folder, merged(run, folder, text), weight)


def test_passthrough_copies(run: Callable[..., Result], folder: Path) -> None:
    text = (
        "merge_method: passthrough\nslices:\n- sources: [{model: swahili, layer_range: [0, 2]}]\n"
        "- sources: [{model: math, layer_range: [2, 6]}]\n"
    )

    def weight(key: str, layer: int | None) -> Mapping[str, float]:
        return {"swahili" if "embed" in key or (layer is not None and layer < 2) else "math": 1}

    check(folder, merged(run, folder, text), weight)
    run("compose", folder / "recipe.yaml", "-o", folder / "composed", "--overwrite", exit_code=0)
    found, again = weights(folder / "out"), weights(folder / "composed")
    assert found.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in found.items())


def test_gradients_and_filters(run: Callable[..., Result], folder: Path) -> None:
    """A gradient of two for the attention, one model for the MLPs, and one value for all the rest."""
    text = "merge_method: linear\nmodels:\n" + EVERY % (
        "[{filter: self_attn, value: [0, 1]}, {filter: mlp, value: 1}, {value: 0.5}]",
        "[{filter: mlp, value: 0}, {value: 0.5}]",
    )

    def weight(key: str, layer: int | None) -> Mapping[str, float]:
        if "self_attn" in key:
            assert layer is not None
            return {"math": layer / 5, "swahili": 0.5}
        return {"math": 1, "swahili": 0} if "mlp" in key else {"math": 0.5, "swahili": 0.5}

    check(folder, merged(run, folder, text), weight)


def test_a_gradient_is_interpolated_over_a_slice(run: Callable[..., Result], folder: Path) -> None:
    text = "merge_method: linear\nmodels:\n" + EVERY % ("[0, 0, 1]", "[1, 1, 0]")

    def weight(key: str, layer: int | None) -> Mapping[str, float]:
        m = 0.0 if layer is None else max(0.0, 2 * layer / 5 - 1)
        return {"math": m, "swahili": 1 - m}

    check(folder, merged(run, folder, text), weight)


def test_task_arithmetic(run: Callable[..., Result], folder: Path) -> None:
    text = (
        "merge_method: task_arithmetic\nbase_model: base\nparameters: {lambda: 0.7}\ndtype: float32\nmodels:\n"
        + EVERY % (1, "[0.2, -0.9]")
    )
    result = merged(run, folder, text)
    base, math, swahili = ({key: v.double() for key, v in weights(folder / name).items()} for name in MODELS)
    for key, tensor in result.items():
        w = 0.2 - 1.1 * int(key.split(".")[2]) / 5 if ".layers." in key else 0.2
        wanted = base[key] + 0.7 * (math[key] - base[key] + w * (swahili[key] - base[key]))
        close(tensor, wanted.numpy(), name=key)


def test_ties(run: Callable[..., Result], folder: Path) -> None:
    """Trim, elect by weighted sums, and divide by the weights that agree: mergekit's TIES, written out."""
    text = "merge_method: ties\nbase_model: base\nparameters: {density: 0.4, lambda: 0.9}\nmodels:\n" + EVERY % (1, 0.6)
    result = merged(run, folder, text)
    base, *others = ({key: value.double() for key, value in weights(folder / name).items()} for name in MODELS)
    for key, tensor in result.items():
        trimmed = []
        for state, weight in zip(others, (1, 0.6), strict=True):
            delta = state[key] - base[key]
            kept = max(1, int(0.4 * delta.numel()))
            least = delta.abs().flatten().sort(descending=True).values[kept - 1]
            trimmed.append((weight, torch.where(delta.abs() >= least, delta, 0)))
        sign = sum(weight * delta for weight, delta in trimmed).sign()
        agree = [(weight, delta, (delta.sign() == sign) & (delta != 0)) for weight, delta in trimmed]
        total = sum(weight * mask for weight, _, mask in agree)
        summed = sum(weight * delta * mask for weight, delta, mask in agree)
        wanted = base[key] + 0.9 * torch.where(total == 0, 0, summed / total.clamp(min=1e-9))
        close(tensor, wanted.numpy(), name=key)


def test_dtypes(run: Callable[..., Result], folder: Path) -> None:
    text = "merge_method: passthrough\nmodels: [{model: math}]\ndtype: bfloat16\n"
    outcome = merged(run, folder, text)
    assert all(torch.equal(outcome[key], value.bfloat16()) for key, value in weights(folder / "math").items())
    run("merge", folder / "recipe.yaml", "-o", folder / "out", "--overwrite", "--dtype", "float16", exit_code=2)
    assert adapterswap.read_mergekit(folder / "recipe.yaml").dtype == "bfloat16"
    with refused(UnsupportedError, "dtype"):
        adapterswap.read_composition(folder / "recipe.yaml")


def test_python_reads_mergekit_files(run: Callable[..., Result], folder: Path, tmp_path: Path) -> None:
    text = "merge_method: linear\nmodels:\n" + EVERY % ("[1, 0]", "[0, 1]")
    result = merged(run, folder, text)
    composition = adapterswap.read_composition(folder / "recipe.yaml")
    adapterswap.merge(adapterswap.compose(composition), out_path=tmp_path / "out")
    assert all(torch.equal(result[key], value) for key, value in weights(tmp_path / "out").items())


SLICE = "merge_method: linear\nslices:\n- sources: [{model: math, layer_range: [%s], parameters: {weight: 1}}]\n"


@pytest.mark.parametrize(
    ("text", "kind", "parameter"),
    [
        ("merge_method: slerp\nmodels: [{model: math}]\n", FieldError, "merge_method"),
        ("merge_method: linear\n", FieldError, "models"),
        ("merge_method: linear\nmodels: [{model: math}]\n", FieldError, "weight"),
        ("merge_method: linear\nmodels: [{model: math, parameters: {wieght: 1}}]\n", FieldError,
         "models.0.parameters.wieght"),
        ("merge_method: linear\nmodels: [{model: math, parameters: {weight: high}}]\n", FieldError,
         "models.0.parameters.weight"),
        ("merge_method: linear\nmodels: [{model: math, parameters: {weight: [{filter: selfattn, value: 1}, {value: 2}]}"
         "}]\n", FieldError, "parameters"),
        ("merge_method: linear\nchat_template: auto\nmodels: [{model: math, parameters: {weight: 1}}]\n", FieldError,
         "chat_template"),
        ("merge_method: linear\nmodules: {}\nmodels: [{model: math, parameters: {weight: 1}}]\n", FieldError,
         "modules"),
        ("merge_method: linear\ntokenizer_source: union\nmodels: [{model: math, parameters: {weight: 1}}]\n",
         UnsupportedError, "tokenizer_source"),
        ("merge_method: linear\nbase_model: base\nmodels: [{model: math, parameters: {weight: 1}}]\n", FieldError,
         "base_model"),
        ("merge_method: linear\nparameters: {normalize: false}\nmodels: [{model: math, parameters: {weight: 2}}]\n",
         UnsupportedError, "normalize"),
        ("merge_method: linear\nmodels: [{model: math, parameters: {weight: 0}}]\n", FieldError, "weight"),
        ("merge_method: ties\nmodels: [{model: math, parameters: {weight: 1}}]\n", FieldError, "base_model"),
        ("merge_method: ties\nbase_model: base\nmodels: [{model: math, parameters: {weight: 1, lambda: 1}}]\n",
         FieldError, "models.0.parameters.lambda"),
        ("merge_method: ties\nbase_model: base\nparameters: {rescale: true}\nmodels: [{model: math}]\n", FieldError,
         "parameters.rescale"),
        ("merge_method: ties\nbase_model: base\nmodels:\n- {model: math, parameters: {weight: 1, density: 0.5}}\n"
         "- {model: swahili, parameters: {weight: 1}}\n", UnsupportedError, "density"),
        (SLICE % "0, 5", UnsupportedError, "slices"),
        (SLICE % "1, 6", UnsupportedError, "slices.0.sources.0.layer_range"),
        (SLICE % "0, 9", UnsupportedError, "slices.0.sources.0.layer_range"),
        ("merge_method: passthrough\nmodels: [{model: math}, {model: swahili}]\n", UnsupportedError, "slices"),
        ("merge_method: passthrough\nmodels: [{model: math, parameters: {scale: 2}}]\n", UnsupportedError, "slices"),
        ("merge_method: passthrough\nmodels: [{model: base+lora}]\n", UnsupportedError, "model"),
        ("merge_method: passthrough\ndtype: bfloat16\nout_dtype: float32\nmodels: [{model: math}]\n", FieldError,
         "out_dtype"),
    ],
)  # fmt: skip
def test_unsupported_keys_are_refused(folder: Path, text: str, kind: type[AdapterswapError], parameter: str) -> None:
    (folder / "refused.yaml").write_text(text)
    with refused(kind, parameter):
        adapterswap.read_mergekit(folder / "refused.yaml")


def test_vocabularies_of_other_sizes_are_refused(folder: Path, tmp_path: Path) -> None:
    """mergekit cuts off the rows that one model lacks."""
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    grown = {
        key: torch.cat([value, value[:2]]) if key in ends else value for key, value in weights(folder / "math").items()
    }
    save_like(tmp_path / "grown", folder / "math", grown)
    (folder / "refused.yaml").write_text(
        "merge_method: linear\nmodels:\n" + EVERY.replace("math", str(tmp_path / "grown")) % (1, 1)
    )
    with refused(UnsupportedError, "model"):
        adapterswap.read_mergekit(folder / "refused.yaml")


def test_adapters_are_refused(folder: Path, math: Path) -> None:
    (folder / "refused.yaml").write_text(f"merge_method: passthrough\nmodels: [{{model: {math}}}]\n")
    with refused(UnsupportedError, "model"):
        adapterswap.read_mergekit(folder / "refused.yaml")
