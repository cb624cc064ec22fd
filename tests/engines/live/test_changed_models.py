"""What PEFT changes in loaded adapters, a composition takes over: scales, factors and ranks; or it says that it cannot.

References are full weights: the experts' files merged one by one by PEFT, and swapped as Algorithm 1 says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits, merged_weights
from core.merging.test_full_experts import algorithm_1
from peft import PeftModel
from peft.helpers import rescale_adapter_scale
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from refusals import refused
from tolerances import close

from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import UnsupportedError
from engines.live.conftest import state_of, written_files

SWAP = "math+swahili@bottom=2,top=1"
BLEND = "math+swahili@bottom=1,top=1,bottom_transition=2,top_transition=1"
ZONES = {
    SWAP: {"bottom": 2, "top": 1},
    BLEND: {"bottom": 1, "top": 1, "bottom_transition": 2, "top_transition": 1},
}

Composers = Callable[..., LiveComposer]
Experts = Callable[..., Path]


@pytest.fixture
def expected(base: Callable[[str], Path], expert: Experts) -> Callable[..., torch.Tensor]:
    """`expected(SWAP, math, swahili)` are the logits of full weights, swapped from these adapters' folders."""

    def compute(name: str, math: Path, swahili: Path) -> torch.Tensor:
        full = [merged_weights(base("llama"), folder) for folder in (math, swahili)]
        model = load_base(base("llama"))
        model.load_state_dict(algorithm_1(*full, **ZONES[name]))
        return logits(model)

    return compute


def lora_layers(composing: LiveComposer) -> list[Any]:
    return [module for module in composing.model.modules() if hasattr(module, "lora_A")]


@pytest.mark.sampled(5)  # an alpha in a swap, and a padded rank in a blend
@pytest.mark.parametrize("name", ZONES)
@pytest.mark.parametrize(
    ("options", "target_rank"),
    [({"lora_alpha": 48}, None), ({"r": 12, "lora_alpha": 5}, None), ({"r": 12, "lora_alpha": 5}, 16)],
    ids=["alpha", "rank", "padded"],
)
def test_a_hot_swap_brings_its_own_scale(
    name: str,
    options: dict[str, Any],
    target_rank: int | None,
    composer: Composers,
    folders: Callable[..., dict[str, Path]],
    expert: Experts,
    base: Callable[[str], Path],
    expected: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    composing, other = composer(), expert(seed=8, **options)
    if target_rank is not None:
        prepare_model_for_compiled_hotswap(composing.model, target_rank=target_rank)
    with composing.use(name):
        pass
    hotswap_adapter(composing.model, str(other), adapter_name="math")
    wanted = expected(name, other, folders()["swahili"])
    with composing.use(name):
        close(logits(composing.model), wanted, depth=LAYERS)
        composing.save(tmp_path / "saved")
    with composing.use_rows([name, name]):
        close(logits(composing.model), wanted, depth=LAYERS)
    saved = PeftModel.from_pretrained(load_base(base("llama")), tmp_path / "saved")
    close(logits(saved), wanted, depth=LAYERS)


def test_padded_factors_are_saved_as_they_were(composer: Composers, tmp_path: Path) -> None:
    composing = composer()
    with composing.use(BLEND):
        composing.save(tmp_path / "before")
    prepare_model_for_compiled_hotswap(composing.model, target_rank=16)
    with composing.use(BLEND):
        composing.save(tmp_path / "after")
    assert written_files(tmp_path / "after") == written_files(tmp_path / "before")


def test_a_padded_expert_without_a_file_is_saved(
    composer: Composers, folders: Callable[..., dict[str, Path]], base: Callable[[str], Path], tmp_path: Path
) -> None:
    """The composer did not load these adapters, so PEFT saves them first, with padded factors and the old ranks."""
    experts = folders()
    model = PeftModel.from_pretrained(load_base(base("llama")), experts["math"], adapter_name="math")
    model.load_adapter(experts["swahili"], adapter_name="swahili")
    prepare_model_for_compiled_hotswap(model, target_rank=16)
    composing = LiveComposer(model)
    with composing.use(BLEND):
        wanted = logits(model)
        composing.save(tmp_path / "saved")
    saved = PeftModel.from_pretrained(load_base(base("llama")), tmp_path / "saved")
    close(logits(saved), wanted, depth=LAYERS)


def set_scale(composing: LiveComposer) -> None:
    for layer in lora_layers(composing):
        layer.set_scale("math", 2.5)


def scale_layer(composing: LiveComposer) -> None:
    composing.model.set_adapter("math")
    for layer in lora_layers(composing):
        layer.scale_layer(5)
        layer.unscale_layer(2)


@pytest.mark.parametrize("change", [set_scale, scale_layer])
@pytest.mark.parametrize("name", ZONES)
def test_a_scale_that_was_set_counts(
    change: Callable[[LiveComposer], None],
    name: str,
    composer: Composers,
    folders: Callable[..., dict[str, Path]],
    expert: Experts,
    expected: Callable[..., torch.Tensor],
) -> None:
    composing = composer()
    composing.set(name)
    composing.reset()
    change(composing)
    scaled = expert(seed=1, lora_alpha=2.5 * composing.model.peft_config["math"].lora_alpha)
    wanted = expected(name, scaled, folders()["swahili"])
    with composing.use(name):
        close(logits(composing.model), wanted, depth=LAYERS)
    for layer in lora_layers(composing):
        layer.unscale_layer()
        layer.set_scale("math", 1)
    with composing.use(name):
        close(logits(composing.model), expected(name, folders()["math"], folders()["swahili"]), depth=LAYERS)


def test_scales_within_a_block_that_rescales(
    composer: Composers, expert: Experts, expected: Callable[..., torch.Tensor]
) -> None:
    composing = composer()
    before = state_of(composing.model)
    scaled = [
        expert(seed=1, lora_alpha=0.5 * composing.model.peft_config["math"].lora_alpha),
        expert(seed=2, r=4, lora_alpha=4),
    ]
    with rescale_adapter_scale(composing.model, 0.5), composing.use(BLEND):
        close(logits(composing.model), expected(BLEND, *scaled), depth=LAYERS)
    assert state_of(composing.model) == before


def test_a_hot_swap_inside_a_swap_is_kept_afterwards(
    composer: Composers,
    folders: Callable[..., dict[str, Path]],
    expert: Experts,
    expected: Callable[..., torch.Tensor],
) -> None:
    composing, other = composer(), expert(seed=8, lora_alpha=48)
    wanted = expected(SWAP, other, folders()["swahili"])
    for block in (composing.use(SWAP), composing.use_rows([SWAP, SWAP])):
        with block:
            hotswap_adapter(composing.model, str(folders()["math"]), adapter_name="math")
            hotswap_adapter(composing.model, str(other), adapter_name="math")
            close(logits(composing.model), wanted, depth=LAYERS)
    with composing.use(BLEND):
        close(logits(composing.model), expected(BLEND, other, folders()["swahili"]), depth=LAYERS)


def test_a_hot_swap_inside_a_blend_is_refused(
    composer: Composers,
    folders: Callable[..., dict[str, Path]],
    expert: Experts,
    expected: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    """PEFT gives the new adapter its whole scale, where the composition has a share of it."""
    composing, other = composer(), expert(seed=8, lora_alpha=48)
    wanted = expected(BLEND, other, folders()["swahili"])
    with refused(UnsupportedError, match="hotswap_adapter"), composing.use(BLEND):
        hotswap_adapter(composing.model, str(other), adapter_name="math")
    composing.set(BLEND)
    close(logits(composing.model), wanted, depth=LAYERS)
    for layer in lora_layers(composing):
        layer.scale_layer(3)
    with refused(UnsupportedError, match="hotswap_adapter"):
        composing.save(tmp_path / "saved")
    assert composing.plan is None


def test_pinned_experts_after_reset_and_after_a_hot_swap(
    composer: Composers,
    folders: Callable[..., dict[str, Path]],
    expert: Experts,
    expected: Callable[..., torch.Tensor],
) -> None:
    composing, other = composer(), expert(seed=8, lora_alpha=48)
    swahili = folders()["swahili"]
    before = state_of(composing.model)
    with composing.pinned():
        composing.set(BLEND)
        composing.reset()
        with composing.use(BLEND):
            close(logits(composing.model), expected(BLEND, folders()["math"], swahili), depth=LAYERS)
    assert state_of(composing.model) == before
    with refused(UnsupportedError, match="hotswap_adapter"), composing.pinned():
        hotswap_adapter(composing.model, str(other), adapter_name="math")
    with composing.pinned(), composing.use(BLEND):
        close(logits(composing.model), expected(BLEND, other, swahili), depth=LAYERS)


def test_an_adapter_loaded_again_under_its_name(
    composer: Composers,
    folders: Callable[..., dict[str, Path]],
    expert: Experts,
    expected: Callable[..., torch.Tensor],
) -> None:
    composing, other = composer(), expert(seed=8, r=3, lora_alpha=48)
    composing.set(BLEND)
    composing.reset()
    composing.model.set_adapter("swahili")
    composing.model.delete_adapter("math")
    composing.model.load_adapter(other, adapter_name="math")
    with composing.use(BLEND):
        close(logits(composing.model), expected(BLEND, other, folders()["swahili"]), depth=LAYERS)
    composing.model.delete_adapter("math")
    composing.model.add_weighted_adapter(["telugu"], [2.0], "math", combination_type="cat")
    telugu = expert(seed=3, r=6, lora_alpha=18, use_rslora=False)
    with composing.use(BLEND):
        close(logits(composing.model), expected(BLEND, telugu, folders()["swahili"]), depth=LAYERS)


def test_magnitudes_are_measured_again_after_writes_into_data(
    composer: Composers, folders: Callable[..., dict[str, Path]], expert: Experts
) -> None:
    """The same scale, the same tensors: only their numbers tell that the adapter is another."""
    composing, other, name = composer(), expert(seed=8), f"{BLEND},weights=magnitude"
    with composing.use(name):
        pass
    hotswap_adapter(composing.model, str(other), adapter_name="math")
    base = load_base(Path(composing.model.config._name_or_path))
    fresh = LiveComposer.from_experts(base, {"math": other, "swahili": folders()["swahili"]})
    with composing.use(name), fresh.use(name):
        close(logits(composing.model), logits(fresh.model), depth=LAYERS)


def test_two_composers_of_one_model(composer: Composers, expected: Any, folders: Any) -> None:
    """The second sees the adapters' own scales, not the shares that the first has set, and gives those back."""
    first = composer()
    first.set(BLEND)
    wanted = expected(BLEND, folders()["math"], folders()["swahili"])
    second = LiveComposer(first.model)
    with second.use("swahili"):
        pass
    close(logits(first.model), wanted, depth=LAYERS)
    with second.use(BLEND):
        close(logits(first.model), wanted, depth=LAYERS)
    close(logits(first.model), wanted, depth=LAYERS)
    first.reset()


@pytest.mark.parametrize("offload", ["cpu", "disk", "meta"])
def test_an_offloaded_base_is_refused(
    offload: str, folders: Callable[..., dict[str, Path]], base: Callable[[str], Path], tmp_path: Path
) -> None:
    """PEFT raises errors that name tensors, or loads adapters that compute something else."""
    accelerate = pytest.importorskip("accelerate")
    model = load_base(base("llama"))
    if offload == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif offload == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        model.to("meta")
    with refused(UnsupportedError, "model", match="offloading"):
        LiveComposer.from_experts(model, folders())


def test_a_model_that_is_offloaded_later(composer: Composers, tmp_path: Path) -> None:
    """It computes as before; what needs the factors themselves is refused."""
    accelerate = pytest.importorskip("accelerate")
    composing = composer()
    with composing.use(BLEND):
        wanted = logits(composing.model)
    accelerate.cpu_offload(composing.model.get_base_model(), execution_device=torch.device("cpu"))
    with composing.use(BLEND):
        close(logits(composing.model), wanted, depth=LAYERS)
        with refused(UnsupportedError, "model", match="offloading"):
            composing.save(tmp_path / "saved")
    with refused(UnsupportedError, "model", match="offloading"):
        LiveComposer(composing.model)
