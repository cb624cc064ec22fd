"""Which cells of the matrix are refused, and why; every other cell must be exact.

A refusal counts only if its message gives the reason listed here for the cell. No cell may be wrong. The reason, the
class and the operations come from the table of limits, the kinds of adapters and the words from here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from adapterswap.core.planning import targets
from adapterswap.core.planning.targets import Limit, Target
from adapterswap.kit.errors import AdapterswapError, CompositionError, UnsupportedError
from core.matrix.adapters import KINDS, OPAQUE
from core.matrix.architectures import ARCHITECTURES
from core.matrix.methods import METHODS
from core.matrix.operations import OPERATIONS

__all__ = ["CELLS", "NONLINEAR", "QUICK", "REFUSALS", "SAMPLE", "Cell", "reason_of"]


@dataclass(frozen=True)
class Cell:
    architecture: str
    kind: str
    operation: str

    def __str__(self) -> str:
        return f"{self.architecture}-{self.kind}-{self.operation}"


@dataclass(frozen=True)
class Refusal:
    """A reason to refuse, the class and a regex of one of the problems, and the cells that may give it: those in every
    list given."""

    reason: str
    kind: type[AdapterswapError]
    words: str
    architectures: Collection[str] = tuple(ARCHITECTURES)
    kinds: Collection[str] = tuple(KINDS)
    operations: Collection[str] = tuple(OPERATIONS)

    def may_be(self, cell: Cell) -> bool:
        return cell.architecture in self.architectures and cell.kind in self.kinds and cell.operation in self.operations


_TARGETS = {
    **dict.fromkeys(OPERATIONS, Target.ADAPTER), **dict.fromkeys(("merge", *METHODS), Target.WEIGHTS),
    "portable": Target.PORTABLE, "live": Target.LIVE, "live_copied": Target.LIVE,
}  # fmt: skip


def _by(limit: Limit, words: str, kinds: Collection[str], operations: Collection[str] = tuple(OPERATIONS)) -> Refusal:
    """The refusal that follows from a limit, for the operations whose target has it."""
    limited = [one for one in operations if (_TARGETS[one] | Target.PLAN) & limit.targets]
    return Refusal(limit.what, limit.kind, words, kinds=kinds, operations=limited)


_V4 = ("v4", "v4_beside_v5")
_MOE = [name for name, architecture in ARCHITECTURES.items() if architecture.v4_experts is not None]
_HYBRID = [name for name, architecture in ARCHITECTURES.items() if architecture.family == "hybrid"]

# PEFT 0.21 fuses the experts of these to `target_parameters` whenever all linear layers are asked for.
_FUSED = ("deepseek_v3", "mixtral", "olmoe", "qwen3_moe", "qwen3_next")

NONLINEAR = OPAQUE.keys() - {"lora_bias"}

REFUSALS = [
    Refusal("fused experts (target_parameters)", UnsupportedError, "is a fused parameter", _FUSED, ["linear"],
            ["multislerp"]),
    # Experts of attention alone leave the task nothing in partition A, and some hybrids have no attention in a zone.
    Refusal("a side or a zone has no module", CompositionError, "contributes no module", operations=["partition_a"]),
    Refusal("a side or a zone has no module", CompositionError, "contributes no mod", _HYBRID, ["mixed"], ["copied"]),
    Refusal("a side or a zone has no module", CompositionError, "matches no module", _HYBRID),
    # In memory the experts of a layer are one module.
    Refusal("the running model lacks the names", AdapterswapError, "does not have", _MOE, _V4, ["live"]),
    _by(targets.averaged, "is a blend", NONLINEAR, ["swap", "soup", "partition_a", "portable"]),
    _by(targets.averaged, "is a blend", ["dora"], ["live"]),
    _by(targets.not_plain, "portable layout", OPAQUE),
    _by(targets.no_variant_of_lora, "the live composer", NONLINEAR - {"dora"}),
    _by(targets.over_the_base, "trained biases", ["biases"]),
    Refusal("no bias to add to", UnsupportedError, "stores none to add", kinds=["lora_bias"],
            operations=["merge", *METHODS]),
    Refusal("PEFT fuses no experts of this model", UnsupportedError, "PEFT cannot load", ["qwen2_moe", "jamba"], _V4),
    _by(targets.in_full_by_a_method, "is trained in full", ["modules_to_save", "biases", "composite"], METHODS),
    Refusal("a bias beside the head's LoRA", UnsupportedError, r"base_layer\.bias", ["phi", "gptj"],
            ["embeddings", "composite"]),
]  # fmt: skip


def reason_of(cell: Cell, error: AdapterswapError) -> str | None:
    """The expected reason that the error gives for this cell; None if it is unexpected."""
    for one in REFUSALS:
        fitting = (problem for problem in error.problems if issubclass(problem.kind, one.kind))
        if one.may_be(cell) and any(re.search(one.words, str(problem)) for problem in fitting):
            return one.reason
    return None


# MiSS repeats its numbers, so which of them a method keeps that trims by magnitude is decided by rounding.
_TRIMMING = ("breadcrumbs", "breadcrumbs_ties", "sce", "knots_ties")

_LIVE_COPIES = {*OPAQUE, "modules_to_save", "composite", "biases"}

CELLS = [
    Cell(name, kind, operation)
    for name, architecture in ARCHITECTURES.items()
    for kind, made in KINDS.items()
    if made.applies(architecture)
    for operation in OPERATIONS
    if operation != "live_copied" or kind in _LIVE_COPIES  # the blends of the others give the same reason
    if not (kind == "miss" and operation in _TRIMMING)
    if (name, kind) != ("deepseek_v3", "oft")  # PEFT's OFT fails if an expert gets no tokens
]

# All kinds for an architecture of each family; for the others linear layers, and one more kind in turn. GPT-2, whose
# weights are stored the other way round, has the copies of every kind that PEFT has for it. Mllama's embedding has more
# rows than its vocabulary. Methods: a few.
_THOROUGHLY = ("llama", "qwen3_moe", "nemotron_h", "gemma3")
_BY_METHODS = {("llama", "dora"), ("gpt2", "linear"), ("qwen3_moe", "v4"), ("gemma3", "embeddings")}
_COPIES = ("copied", "merge", "live_copied")
_LIKE_A_SWAP = ("soup", "partition_a", "portable")  # refused alike, where a kind cannot be averaged
# What these make of a module depends on the names that a swap has shown to be read: one of them in turn is enough.
_IN_TURN = ("soup", "copied", "portable")
SAMPLE = [
    cell
    for index, name in enumerate(ARCHITECTURES)
    for cell in CELLS
    if cell.architecture == name
    and (cell.operation not in METHODS or (name, cell.kind) in _BY_METHODS)
    and (
        (name in _THOROUGHLY and not (cell.kind in NONLINEAR and cell.operation in _LIKE_A_SWAP))
        or cell.kind in ("linear", list(KINDS)[1 + index % (len(KINDS) - 1)])
        or (name == "gpt2" and cell.kind in _LIVE_COPIES and cell.operation in _COPIES)
        or (name == "mllama" and cell.kind == "embeddings")
    )
    and (name in (*_THOROUGHLY, "gpt2") or cell.operation not in _IN_TURN or cell.operation == _IN_TURN[index % 3])
]

# `make test` takes less still. Kinds beside LoRA: Llama has all of them, and the other thorough architectures have them
# in turn. Where modules are named as Llama's: one kind, in three operations. Each method twice: for GPT-2, and for
# Llama, a mixture or an embedding in turn.
_NAMED_LIKE_LLAMA = (
    "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "stablelm", "cohere", "cohere2", "olmo2", "granite",
)  # fmt: skip


def _is_quick(cell: Cell) -> bool:
    if cell.architecture in _NAMED_LIKE_LLAMA:
        kinds = {one.kind for one in SAMPLE if one.architecture == cell.architecture}
        is_chosen = cell.kind != "linear" or kinds == {"linear"}
        return is_chosen and cell.operation in ("swap", "merge", "live")
    if cell.operation in METHODS:
        in_turn = ("llama", "qwen3_moe", "gemma3")[list(METHODS).index(cell.operation) % 3]
        return cell.architecture in ("gpt2", in_turn)
    if cell.architecture in _THOROUGHLY[1:] and cell.kind in NONLINEAR:
        return cell.architecture == _THOROUGHLY[1 + sorted(NONLINEAR).index(cell.kind) % 3]
    return True


QUICK = [cell for cell in SAMPLE if _is_quick(cell)]
