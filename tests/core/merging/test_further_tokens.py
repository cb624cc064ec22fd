"""A base with layers that predict further tokens (MTP), and fine-tunes without them, as transformers saves them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import weights
from pico_models import edit_json
from refusals import refused
from safetensors.torch import save_file
from tolerances import close

import adapterswap
from adapterswap.kit.errors import BaseModelError

# Whether the base's further layer follows the others in their list (DeepSeek, GLM) or is in one of its own (Qwen3.5).
LAYERS = {"in the list": "model.layers.6.", "apart": "mtp.layers.0."}


def with_a_further_layer(model: Path, out: Path, prefix: str) -> Path:
    """A copy of the model whose last layer stands there again, for further tokens."""
    shutil.copytree(model, out)
    state = weights(model)
    state |= {name.replace("model.layers.5.", prefix): t + 0.01 for name, t in state.items() if "layers.5." in name}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    edit_json(out / "config.json", num_nextn_predict_layers=1)
    return out


@pytest.mark.parametrize("where", LAYERS)
def test_fine_tunes_without_them(where: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """The sum of two fine-tunes over all that they have; the base's further layer stays, and that is reported."""
    base = with_a_further_layer(model("llama"), tmp_path / "base", LAYERS[where])
    experts = {}
    for seed, name in ((1, "math"), (2, "swahili")):
        experts[name] = shutil.copytree(model("llama", seed=seed), tmp_path / name)
        edit_json(experts[name] / "config.json", num_nextn_predict_layers=1)
    composition = adapterswap.Composition(
        task="math", language="swahili", method="task_arithmetic", base_model=str(base)
    )
    plan = adapterswap.compose(composition, experts)
    assert sum("further tokens" in note for note in plan.notes) == 2
    merged = weights(plan.merge(tmp_path / "merged"))
    original, math, swahili = (weights(folder) for folder in (base, experts["math"], experts["swahili"]))
    assert merged.keys() == original.keys()
    for name, tensor in original.items():
        if name in math:
            close(merged[name], math[name] + swahili[name] - tensor, name=name)
        else:
            assert torch.equal(merged[name], tensor)
    assert adapterswap.verify(tmp_path / "merged", experts, base_model=str(base)).equal


def test_an_expert_that_has_them_needs_the_base(model: Callable[..., Path], tmp_path: Path) -> None:
    """Half of its further layer is half of its own and half of the base's, which must be at hand."""
    further = with_a_further_layer(model("llama"), tmp_path / "math", LAYERS["apart"])
    swahili = shutil.copytree(model("llama", seed=2), tmp_path / "swahili")
    edit_json(swahili / "config.json", num_nextn_predict_layers=1)
    with refused(BaseModelError, "base_model", match=r"mtp\.layers\.0\."):
        adapterswap.soup(further, swahili)
    plan = adapterswap.soup(swahili, further)
    assert any(re.search(r"mtp\.layers\.0\..* not in the result", note) for note in plan.notes)
    assert weights(plan.merge(tmp_path / "merged")).keys() == weights(swahili).keys()
