"""A small copy of a model has few layers, whatever its config calls their number."""

from __future__ import annotations

from transformers import NemotronHConfig

from adapterswap.experiments.training.small import LAYERS, smaller


def test_a_depth_that_only_the_kinds_of_layers_tell() -> None:
    """As a Nemotron-H within another model says it."""
    content = NemotronHConfig(layers_block_type=["mamba", "moe", "mamba", "attention"] * 13).to_dict()
    content.pop("num_hidden_layers", None)

    small = NemotronHConfig.from_dict(smaller(content))
    assert small.num_hidden_layers == LAYERS
    assert set(small.layers_block_type) == set(NemotronHConfig.from_dict(content).layers_block_type)
