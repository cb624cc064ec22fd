"""What must hold before full weights are planned: checkpoints of one architecture, tensors that can be computed with.

Each function adds the mistakes that it finds to a `Problems`, so that all are told at once. Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from adapterswap.errors import Problems
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.shapes import and_more, compare_shapes
from adapterswap.files.tensorfile import FLOATS
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.compositions import Composition
from adapterswap.planning.parameters import ParameterPlan
from adapterswap.planning.plan_checks import silenced_experts

__all__ = ["check_architecture", "check_model_used", "check_numbers"]

# What two checkpoints of one architecture cannot differ in, where both configs say it.
_ARCHITECTURE = (
    "model_type", "hidden_size", "n_embd", "intermediate_size", "num_attention_heads", "n_head", "num_key_value_heads",
    "head_dim", "num_hidden_layers", "n_layer", "num_local_experts", "num_experts", "tie_word_embeddings", "rope_theta",
    "hidden_act", "sliding_window",
)  # fmt: skip

_ONE_BASE = "Give checkpoints that were fine-tuned from one base"


def check_architecture(first_name: str, first: Checkpoint, name: str, other: Checkpoint, problems: Problems) -> None:
    """Whether two checkpoints hold the same tensors, in the same shapes, for the same architecture."""
    for who, checkpoint in ((first_name, first), (name, other)):
        if checkpoint.config.get("quantization_config"):
            problems.add(
                f"{who} is quantised (quantization_config), and its numbers cannot be averaged",
                "Give the checkpoint in floating point numbers",
            )
    odd = [
        key
        for key in _ARCHITECTURE
        if key in first.config and key in other.config and first.config[key] != other.config[key]
    ]
    if odd:  # which tensors differ follows from it
        sizes = "; ".join(f"{key} is {first.config[key]} and {other.config[key]}" for key in odd)
        problems.add(f"The configs of {first_name} and {name} differ: {sizes}", _ONE_BASE)
        return
    ours, theirs = first.parameters, other.parameters
    for missing, has, lacks in (
        (sorted(ours.keys() - theirs.keys()), first_name, name),
        (sorted(theirs.keys() - ours.keys()), name, first_name),
    ):
        if missing:
            problems.add(f"{has} holds {and_more(missing)}, and {lacks} does not", _ONE_BASE)
    vocabulary = set()
    for key in sorted(ours.keys() & theirs.keys()):
        one_shape, two_shape = ours[key].tensor.shape, theirs[key].tensor.shape
        if one_shape != two_shape and ours[key].layer is None and one_shape[1:] == two_shape[1:]:
            vocabulary.add(key)
            problems.add(
                f"{key} is {list(one_shape)} in {first_name}, and {list(two_shape)} in {name}: their "
                "vocabularies differ in size",
                "Give both the same vocabulary first (resize_token_embeddings), or an adapter cut out of one",
            )
    words = (
        {key: "×".join(map(str, held[key].tensor.shape)) for key in held if key not in vocabulary}
        for held in (ours, theirs)
    )
    compare_shapes(*words, one=first_name, other=name, remedy=_ONE_BASE, problems=problems)


def check_numbers(parameters: Mapping[str, ParameterPlan], problems: Problems) -> None:
    """Only floating point numbers can be added up; a shape must be a matrix for a product of factors."""
    for parameter in parameters.values():
        if parameter.copied is not None and parameter.copied.tensor.dtype == parameter.dtype:
            continue
        entering = [term.stored.tensor.dtype for term in parameter.whole]
        entering += [parameter.dtype] + ([parameter.base.tensor.dtype] if parameter.base else [])
        odd = next((dtype for dtype in entering if dtype not in FLOATS), None)
        if odd is not None:
            problems.add(
                f"{parameter.name} is {odd}, and only {', '.join(FLOATS)} can be blended or changed",
                "Give it to one expert of the same dtype by a rule of its own, or save the checkpoint in another dtype",
            )


def check_model_used(
    names: Sequence[str],
    rules: Sequence[Rule],
    parameters: Collection[ParameterPlan],
    composition: Composition,
    problems: Problems,
) -> None:
    """An expert that gives nothing is a mistake, unless zones of 0 layers or a weight of 0 ask for just that."""
    if composition.bottom is not None and composition.top is not None and composition.allocation is None:
        return
    used = {term.expert for parameter in parameters for term in parameter.terms}
    silenced = silenced_experts(rules)
    for name in names:
        if name != BASE and name not in used | silenced:
            problems.add(
                f"the expert {name!r} gives no tensor to the result",
                "Leave it out, or give it layers and modules that it has",
            )
