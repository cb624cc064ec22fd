"""Gates of writing: what is checked of a result before it is written, beside the path.

They look at plans and layouts, may read tensors or ask PEFT, and raise; they change nothing, so the same bytes are
written without them. See also `planning.gates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from adapterswap.core.companions.tokenizer import read_tokens
from adapterswap.core.experts.config import AdapterConfig
from adapterswap.core.experts.keys import LORA
from adapterswap.core.planning.plan import Plan
from adapterswap.core.writing.copies import Carried, check_base, check_one_base, check_tied_rows
from adapterswap.core.writing.loadable import check_form, check_fusing, check_renaming
from adapterswap.core.writing.outputs import Form, Layout
from adapterswap.kit.errors import ExpertError, UnsupportedError
from adapterswap.kit.files.tensorfile import Tensor

if TYPE_CHECKING:
    from adapterswap.core.writing.stream import ModelForm  # composing does not need it


class Requested(NamedTuple):
    """A plan, and the form in which it is to be written as an adapter."""

    plan: Plan
    form: Form


class LaidOut(NamedTuple):
    """A plan, and the tensors and the config of its adapter."""

    plan: Plan
    layout: Layout


class FullWeights(NamedTuple):
    """A plan of full weights with all numbers, and the form in which they are to be written."""

    plan: Plan
    form: ModelForm


def check(made: object) -> None:
    """Let every gate for this stage look at what was made. The first problem ends it: gates may read tensors."""
    for gate in GATES.get(type(made), ()):
        gate(made)


def _settings(laid_out: LaidOut) -> None:
    if laid_out.layout.config["peft_type"] == LORA:
        AdapterConfig.check_written(laid_out.layout.config)


def _copies_of_the_base(full: FullWeights) -> None:
    base = full.plan.base.weights
    if base is not None:
        remedy = "Pass the base that it was trained on as `base_model`"
        check_base(_copies(full.plan), base, effect="which PEFT would put in its place", remedy=remedy)


def _quantization(full: FullWeights) -> None:
    """Refuse what the quantization that the result keeps does not allow."""
    plan, base = full.plan, full.plan.base.weights
    if base is None or base.quantization is None:
        return

    remedy = "Pass `dequantize=True`, or the original base in floating point"
    if full.form.dtype is not None:
        raise UnsupportedError(
            f"The base {base.name} is quantized ({base.quantization.title}), and `dtype` would change its scales",
            f"Leave out `dtype`. Or: {remedy}",
            parameter="dtype",
        )
    if plan.untied:
        raise UnsupportedError(
            f"The experts change an embedding or its tied head, so that the result has to store both, but the base "
            f"{base.name} is quantized ({base.quantization.title}), and its config may apply that to the head",
            remedy,
            parameter="base_model",
        )


def _copies(plan: Plan) -> Iterator[Carried]:
    """The experts' copies of base weights whose LoRA takes part."""
    for slot in plan:
        if slot.base is None:
            continue
        copies: dict[str, Tensor | None] = {}  # of each expert one, though it may enter on several sides
        for part in (slot, *slot.spans):
            for term in part.terms:
                if term.change.lora is not None:
                    copies[term.expert] = term.change.copy

        for expert, copy in copies.items():
            if copy is not None:
                yield Carried(expert, plan.adapters[expert], slot.name, copy, slot.base)


def _tokens(full: FullWeights) -> None:
    """Check that the result's tokenizer has the tokens whose rows it has from their owners."""
    plan = full.plan
    united = plan.companions.united
    if united is None or not any(slot.spans for slot in plan):
        return

    # The tokens of the tokenizer that the result would have
    folders = {name: companions.folder for name, companions in plan.companions.folders.items()}
    tokens = dict(read_tokens(folders[united.owner]) or {})
    for row, folder in united.added.items():
        tokens[row] = (read_tokens(folder) or {})[row]

    for slot in plan:
        for span in slot.spans:
            if not span.is_new:
                continue
            expert = span.terms[0].expert
            theirs = read_tokens(folders[expert]) or {}
            for row in range(span.start, span.stop):
                if row in theirs and theirs[row] != tokens.get(row):
                    raise ExpertError(
                        f"Row {row} of {slot.name} is that of {theirs[row]!r} in {expert}, but the tokenizer of "
                        f"{united.owner}, which the result would have, cannot have that token",
                        "Use experts whose tokenizers agree, or save one tokenizer that has all tokens in each folder",
                    )


GATES: Mapping[type, tuple[Callable[[Any], None], ...]] = {
    Requested: (
        lambda made: check_form(made.plan, made.form),
        lambda made: check_one_base(made.plan.adapters),
        lambda made: check_tied_rows(made.plan.adapters),
        lambda made: check_fusing(made.plan),
    ),
    LaidOut: (_settings, lambda made: check_renaming(made.plan, made.layout)),
    FullWeights: (
        lambda made: check_tied_rows(made.plan.adapters),
        _quantization,
        _copies_of_the_base,
        _tokens,
    ),
}
