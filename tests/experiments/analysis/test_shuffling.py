"""The bands of shuffled experts, against all permutations of small matrices, and against shuffles of dense ΔW."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from pictures import check_figure
from tolerances import near

from adapterswap.core.experts.adapter import open_adapter, open_expert
from adapterswap.core.model.checkpoints import open_checkpoint
from adapterswap.experiments.analysis.analysis import analyze
from adapterswap.experiments.analysis.interference import Interference
from adapterswap.experiments.analysis.pictures import draw_interference, draw_meetings
from adapterswap.experiments.analysis.survey import Marginals, shuffled_overlap, shuffled_product
from adapterswap.kit.style import STYLE

from .test_analyze import compare, deltas, full_expert


def marginals(matrix: np.ndarray) -> Marginals:
    return Marginals(matrix.sum(axis=1), matrix.sum(axis=0), float(np.sum(matrix**2)))


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (1, 5), (5, 1), (1, 1)])
def test_the_product_of_all_permutations(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.3, 1, shape), rng.normal(-0.2, 1, shape) + rng.normal(0, 1, (shape[0], 1))
    products = [
        np.sum(one * other[np.ix_(rows, columns)])
        for rows in permutations(range(shape[0]))
        for columns in permutations(range(shape[1]))
    ]
    null = shuffled_product(marginals(one), marginals(other))
    assert (null.mean, null.variance) == near((float(np.mean(products)), float(np.var(products))), scale=10)


def test_the_overlap_of_subspaces() -> None:
    """The variance is at least that of random subspaces; the mean is that of the shuffles with the same seed."""
    rng = np.random.default_rng(1)
    n, p, q = 40, 3, 6
    bases = [np.linalg.qr(rng.normal(size=(n, rank)))[0] for rank in (p, q)]
    null = shuffled_overlap(*bases, "model.layers.0", 8)
    assert null == shuffled_overlap(*bases, "model.layers.0", 8) != shuffled_overlap(*bases, "model.layers.1", 8)
    drawn = [np.linalg.norm(bases[0].T @ np.linalg.qr(rng.normal(size=(n, q)))[0]) ** 2 / p for _ in range(4000)]
    assert abs(null.mean - q / n) < 4 * np.std(drawn) / np.sqrt(8)
    assert null.variance >= np.var(drawn) * 0.9
    assert null.variance < np.var(drawn) * 4
    assert shuffled_overlap(bases[0], bases[1][:, :0], "x", 8).mean == 0


def test_the_bands_contain_shuffled_dense_changes(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    folder, first, second = base("llama"), expert("llama", seed=1), expert("llama", seed=2, r=4)
    x, y = deltas(folder, first), deltas(folder, second)
    full = open_expert(full_expert(folder, second, tmp_path / "full"))
    pairs = [
        compare({"x": open_adapter(first), "y": open_adapter(second)}),
        compare({"x": open_adapter(first), "y": full}, open_checkpoint(folder)),
    ]
    rng = np.random.default_rng(2)
    for pair in pairs:
        assert pair.shuffled_by_layer().keys() == pair.by_layer().keys()
        layer = {module.matrix.name for module in pair.modules if module.matrix.layer == 1}
        norms = [np.sqrt(sum(np.sum(matrices[name] ** 2) for name in layer)) for matrices in (x, y)]
        cosines, conflicts = [], []
        for _ in range(400):
            shuffled = {
                name: y[name][np.ix_(rng.permutation(y[name].shape[0]), rng.permutation(y[name].shape[1]))]
                for name in layer
            }
            cosines.append(sum(np.sum(x[name] * shuffled[name]) for name in layer) / norms[0] / norms[1])
            differ = sum(np.sum(np.sign(x[name]) * np.sign(shuffled[name]) < 0) for name in layer)
            conflicts.append(differ / sum(x[name].size for name in layer))
        for key, values in (("cosine", cosines), ("sign_conflicts", conflicts)):
            band = pair.shuffled_by_layer()[1][key]
            assert band is not None
            spread = float(np.std(values))
            assert abs((band[0] + band[1]) / 2 - np.mean(values)) < 5 * spread / 20
            assert (band[1] - band[0]) / 3.92 == pytest.approx(spread, rel=0.2)
            inside = np.mean([band[0] <= value <= band[1] for value in values])
            assert inside > 0.9
        written = pair.shuffled_by_layer()[1]["written"]
        assert written is not None
        assert 0 <= written[0] < written[1] <= 1


def test_signs_of_a_mostly_zero_change(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """Rows of zeros have no sign and do not count: most weights of a full checkpoint may equal the base's."""
    import torch
    from safetensors.torch import load_file, save_file

    folder, one = base("llama"), expert("llama", seed=1)
    whole = full_expert(folder, one, tmp_path / "full")
    own = load_file(folder / "model.safetensors")
    weights = load_file(whole / "model.safetensors")
    half = {name: torch.where(torch.arange(len(w)).reshape(-1, *[1] * (w.dim() - 1)) % 2 == 0, w, own[name])
            for name, w in weights.items()}  # fmt: skip
    save_file(half, whole / "model.safetensors", metadata={"format": "pt"})
    pair = compare({"x": open_adapter(one), "y": open_expert(whole)}, open_checkpoint(folder))
    for layer, bands in pair.shuffled_by_layer().items():
        band = bands["sign_conflicts"]
        assert band is not None
        assert band[0] < 0.5 < band[1]
        conflicts = pair.by_layer()[layer]["sign_conflicts"]
        assert conflicts is not None
        assert conflicts < 0.01  # except numbers within rounding of zero


@pytest.fixture(scope="module")
def several(expert: Callable[..., Path]) -> tuple[Interference, ...]:
    places = {"math1": expert(seed=1), "math2": expert(seed=1, r=8), "sw1": expert(seed=3), "sw2": expert(seed=4)}
    return analyze(places).pairs


@pytest.mark.parametrize("width", [3.25, 6.75])
def test_the_band_is_drawn(several: tuple[Interference, ...], width: float) -> None:
    pair = several[1]
    with STYLE.applied():
        figure = draw_interference(pair, width)
    check_figure(figure, width)
    cosine, overlap, signs = figure.axes[:3]
    for axes, key, place in ((cosine, "cosine", 0), (overlap, "written", 0), (overlap, "read", 1),
                             (signs, "sign_conflicts", 0)):  # fmt: skip
        box = axes.collections[place].get_datalim(axes.transData)
        bands = [band[key] for band in pair.shuffled_by_layer().values() if band[key] is not None]
        assert (box.y0, box.y1) == near(
            (min(band[0] for band in bands if band), max(band[1] for band in bands if band))
        )
        low, high = axes.get_ylim()
        assert low <= box.y0 < box.y1 <= high


@pytest.mark.parametrize("width", [3.25, 6.75])
def test_every_pair_of_experts_in_one_picture(several: tuple[Interference, ...], width: float) -> None:
    with STYLE.applied():
        figure = draw_meetings(several, width)
    check_figure(figure, width)
    (image,) = figure.axes[0].images
    values = np.asarray(np.ma.filled(image.get_array(), np.nan), float)
    names = ["math1", "math2", "sw1", "sw2"]
    for pair in several:
        one, other = (names.index(name) for name in pair.experts)
        assert values[other - 1, one] == pair.cosine
    assert np.isnan(values[0, 1])
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert f"{several[0].cosine:.2f}" in texts
