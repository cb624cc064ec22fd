"""A fine-tune and a base whose classes differ but share a decoder: which parameters correspond.

A text-only model calls its layers `model.layers`, a multimodal one with the same decoder `model.language_model.layers`.
`experts.naming` maps the names; here a name counts only if it maps back to itself. Knows names; of tensors it reads
only heads and embeddings that the config ties.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adapterswap.changes.copies import is_one_weight, stored_weight
from adapterswap.experts.anatomy import AdaptableWeight, Anatomy, build_empty, read_anatomy
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.layers import before_layers, language_config, layer_of
from adapterswap.experts.naming import ModelNames
from adapterswap.files.dtypes import FLOATS
from adapterswap.files.numbers import open_files

__all__ = ["Side", "anatomy_as_stored", "counterpart", "expected_name", "have_one_decoder", "is_outside", "read_side"]


@dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes:
        checkpoint: its files.
        anatomy: its parameters.
        names: its modules.
    """

    checkpoint: Checkpoint
    anatomy: Anatomy
    names: ModelNames

    def own_name(self, key: str) -> str | None:
        """The model's name for a checkpoint's key; for one expert of a mixture, its name inside the mixture."""
        if (name := self.anatomy.name_of(key)) is not None or self.anatomy.rename(key) is not None:
            return name
        return _name_in(key, self.names, self.checkpoint.container)


def have_one_decoder(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether one is a language model of the type that the other contains, by their configs."""
    parts = [language_config(checkpoint.config) for checkpoint in (one, other)]
    alone = [part is checkpoint.config for part, checkpoint in zip(parts, (one, other), strict=True)]
    kinds = [part.get("model_type") for part in parts]
    return sum(alone) == 1 and kinds[0] is not None and kinds[0] == kinds[1]


def read_side(checkpoint: Checkpoint) -> Side:
    """Read a model's names.

    Raises:
        BaseModelError, ExpertError, UnsupportedError: see `read_anatomy`.
    """
    return Side(checkpoint, anatomy_as_stored(checkpoint), ModelNames(build_empty(checkpoint), checkpoint.name))


def anatomy_as_stored(checkpoint: Checkpoint) -> Anatomy:
    """The anatomy, without a tie that the checkpoint breaks: transformers loads a stored head that is another weight.

    Raises:
        BaseModelError, ExpertError, UnsupportedError: see `read_anatomy`.
    """
    anatomy = read_anatomy(checkpoint)
    stored = {anatomy.rename(key): parameter for key, parameter in checkpoint.parameters.items()}
    weights, parameters = dict(anatomy.weights), dict(anatomy.parameters)
    for name, weight in anatomy.weights.items():
        for head in weight.tied:
            both = [stored[key] for key in (name, f"{head}.weight") if key in stored]
            if len(both) < 2 or any(one.tensor.dtype not in FLOATS for one in both):
                continue
            with open_files(checkpoint.shards) as files:
                if is_one_weight(*(stored_weight(one.tensor, files[one.path]) for one in both)):
                    continue
            weights[name] = replace(weight, tied=())
            weights[f"{head}.weight"] = AdaptableWeight(
                head, weight.in_features, weight.out_features, embedding=False, transposed=False
            )
            parameters[f"{head}.weight"] = f"{head}.weight"
    return replace(anatomy, weights=weights, parameters=parameters)


def counterpart(name: str, ours: Side, theirs: Side) -> str | None:
    """Their name for our parameter `name`; None unless that name maps back to ours."""
    their_name = _name_in(name, theirs.names, ours.names.container)
    return (
        their_name
        if their_name is not None and _name_in(their_name, ours.names, theirs.names.container) == name
        else None
    )


def expected_name(name: str, ours: Side, theirs: Side) -> str:
    """The name that our parameter `name` would have in their model, whether or not they have it; for messages."""
    moved = theirs.names.exchange(name, ours.names.container, theirs.names.container)
    return counterpart(name, ours, theirs) or moved or name


def is_outside(name: str, ours: Side, theirs: Side) -> bool:
    """Whether our parameter `name` is certainly not the language model's, such as a vision tower's."""
    containers = (ours.checkpoint.container, ours.names.container)
    if any(layer_of(name, container) is not None for container in containers):
        return False
    if name not in ours.anatomy.parameters:  # transformers does not load it
        return _name_in(name, ours.names, ours.checkpoint.container) is None
    if not ours.names.is_multimodal or counterpart(name, ours, theirs) in theirs.anatomy.parameters:
        return False
    return not name.startswith(before_layers(ours.names.container or ""))


def _name_in(parameter: str, names: ModelNames, container: str | None) -> str | None:
    module, _, last = parameter.rpartition(".")
    own_module = names.find(module, container)
    return f"{own_module}.{last}" if own_module else None
