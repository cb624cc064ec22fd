"""Compositions as an engine of evaluations takes them: what an adapter can hold, how large, and written for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapterswap.errors import OutputError, UnsupportedError
from adapterswap.evaluation.asking import FullWeights, Likelihood, Request, Subject
from adapterswap.evaluation.vllm_engine import Needs, longest_of
from adapterswap.experts.adapter import Adapter
from adapterswap.files.folders import scratch_folder
from adapterswap.model.base import base_at
from adapterswap.model.loading import OpenedBase
from adapterswap.planning.plan import Plan
from adapterswap.serving.composer import check_fits, for_any_engine, largest_rank
from adapterswap.serving.vllm import RANKS
from adapterswap.writing.adapter import write_prepared
from adapterswap.writing.outputs import Form

Output = Mapping[str, Any]
"""How a composition is reduced: `max_rank`, `max_error`, or `full_rank` for full weights; empty if it is not."""


def shapes_of(base: OpenedBase) -> dict[str, str]:
    """Each module of the base that LoRA can adapt, with its shape in the format of `LoraModule.shape`."""
    weights = base_at(base.source.folder, f"the base {base.reference}")
    return {name: weight.shape for name, weight in weights.items()}


def fits_vllm(adapter: Adapter, name: str, shapes: Mapping[str, str]) -> bool:
    """Whether vLLM can hold an expert's changes as LoRA; otherwise its compositions are full weights."""
    try:
        check_fits(adapter, shapes, name)
    except UnsupportedError:
        return False
    return True


def rank_of(plan: Plan, output: Output) -> int:
    """The highest rank that the adapter of a composition may have."""
    return min(largest_rank(plan), output.get("max_rank") or largest_rank(plan))


def needs_of(
    adapters: Mapping[str, tuple[Plan, Output]], requests: Iterable[Request], in_flight: int, shapes: Mapping[str, str]
) -> Needs:
    """What vLLM must hold for compositions as adapters."""
    ranks = {name: rank_of(plan, output) for name, (plan, output) in adapters.items()}
    highest = max(ranks, key=lambda name: ranks[name], default=None)
    if highest is not None and ranks[highest] > RANKS[-1]:
        raise UnsupportedError(
            f"{highest} has rank {ranks[highest]}, and vLLM supports at most {RANKS[-1]}",
            "Reduce it with `max_rank`, or use `engine=transformers`",
            parameter="engine",
        )
    names = {module.name for plan, _ in adapters.values() for module in plan.modules.values() if module.terms}
    modules = tuple(sorted({name.rpartition(".")[2] for name in names}))
    requests = tuple(requests)
    widths = (shapes[name].split()[0].split("×") for name in shapes if name.rpartition(".")[2] in modules)
    return Needs(
        rank=max(ranks.values(), default=0),
        modules=modules,
        zeros=_zeros(plan for plan, _ in adapters.values()),
        width=sum(sum(map(int, pair)) for pair in widths),
        longest=longest_of(requests),
        likelihoods=any(isinstance(one, Likelihood) for one in requests),
        in_flight=in_flight,
    )


def _zeros(plans: Iterable[Plan]) -> dict[str, tuple[int, int]]:
    """The keys of the factors of one adapted module of each kind, with their shapes at rank 1."""
    adapted = (module for plan in plans for adapter in plan.adapters.values() for module in adapter.modules.values())
    kinds = {module.name.rpartition(".")[2]: module for module in adapted if not module.parameter}
    return {
        name: shape
        for module in kinds.values()
        for name, shape in ((module.a.name, (1, module.in_features)), (module.b.name, (module.out_features, 1)))
    }


@contextmanager
def written(
    plan: Plan | None,
    output: Output,
    *,
    full: bool,
    base_model: str,
    hashes: Mapping[str, str] | None = None,
    tell: Callable[[float], None] = lambda error: None,
) -> Iterator[Subject]:
    """Write a composition to a temporary folder, which exists inside the block.

    Args:
        plan: the composition; None for the base, which needs no folder.
        hashes: see `write_prepared`.
        tell: called with the largest relative error of a module if the composition is reduced.
    """
    if plan is None:
        yield None
        return
    with scratch_folder("composition") as place:
        try:
            if full:
                subject: Subject = FullWeights(_merged(plan, place / "merged", base_model))
            else:
                prepared = for_any_engine(plan, Form("portable", **output))
                if output:
                    tell(max((reduced.written_error for reduced in prepared.reduced.values()), default=0.0))
                subject = write_prepared(prepared, place / "composed", hashes=hashes, tokenizer=False)
        except OutputError as error:
            raise OutputError(
                error.problems[0].message,
                "Set TMPDIR to a folder on a disk with enough free space for the base model"
                if full
                else "Set TMPDIR to a folder on a disk with enough free space",
            ) from error
        yield subject


def _merged(plan: Plan, folder: Path, base_model: str) -> Path:
    from adapterswap.writing.streaming import ModelForm
    from adapterswap.writing.weights import prepare_model, write_model

    return write_model(prepare_model(plan, ModelForm(), None if plan.is_model else base_model), folder)
