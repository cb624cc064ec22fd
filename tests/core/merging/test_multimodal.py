"""Full weights of multimodal models, whose files have other names than the model in memory."""

from __future__ import annotations

import re
from pathlib import Path

from pico_models import noisy
from refusals import refused
from safetensors.torch import save_file
from tolerances import close

import adapterswap
from adapterswap.kit.errors import BaseModelError, ExpertError
from core.matrix.architectures import ARCHITECTURES, build


def test_full_checkpoints_with_names_of_two_versions(tmp_path: Path) -> None:
    """They are refused, and the remedy works: transformers saves all of them under its own names."""
    models = {name: noisy(build(ARCHITECTURES["llava"]), seed) for seed, name in enumerate(("base", "one", "other"))}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    model_class = type(models["base"])
    weights = {key: tensor.clone() for key, tensor in models["one"].state_dict().items()}
    save_file(weights, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    experts = {"mm": tmp_path / "one", "sw": tmp_path / "other"}

    def merged(base: Path) -> Path:
        composition = adapterswap.Composition(
            task=("mm",), language=("sw",), bottom=1, top=0, norms="layer", base_model=str(base)
        )
        return adapterswap.merge(adapterswap.compose(composition, experts), base, out_path=tmp_path / "out")

    with refused(ExpertError, match="save_original_format=False"):
        merged(tmp_path / "base")
    with refused(BaseModelError, "base_model", match="save_original_format=False"):
        adapterswap.analyze(experts, base_model=tmp_path / "base")
    for name in models:
        model_class.from_pretrained(tmp_path / name).save_pretrained(
            tmp_path / f"{name}-again", save_original_format=False
        )
    experts = {"mm": tmp_path / "one-again", "sw": tmp_path / "other-again"}
    result = model_class.from_pretrained(merged(tmp_path / "base-again")).state_dict()
    for name, tensor in models["one"].state_dict().items():
        layer = re.search(r"language_model\.layers\.(\d)\.", name)
        other = models["other"].state_dict()[name]
        close(result[name], (tensor + other) / 2 if layer is None else other if layer[1] == "0" else tensor, name=name)
    assert len(adapterswap.analyze(experts, base_model=tmp_path / "base-again").changes) == 2
