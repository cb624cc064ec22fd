"""What a reader of a paper has to know of each picture of an analysis. Knows tables of numbers; draws nothing."""

from __future__ import annotations

from collections.abc import Sequence

from adapterswap.analysis.changes import FractionTable
from adapterswap.analysis.interference import Interference

__all__ = ["describe_fractions", "describe_interference", "describe_meetings", "describe_norms"]


def describe_fractions(tables: Sequence[FractionTable], *, one_scale: bool = True) -> str:
    """The caption of `draw_fractions`, with the threshold of every expert."""
    known = {table.expert: f"{table.threshold:.3g}" for table in tables if table.threshold is not None}
    if len(known) < len(tables):
        at = "The threshold is that of the source, which does not record it."
    elif len(set(known.values())) == 1:
        at = f"The threshold is {next(iter(known.values()))}" + (" for all experts." if len(known) > 1 else ".")
    else:
        at = f"Thresholds: {', '.join(f'{value} ({name})' for name, value in known.items())}."
    scale = "" if len(tables) == 1 else ", on one scale for all experts" if one_scale else ", each on its own scale"
    hatched = (
        ""
        if all(len(table.cells) == len(table.layers) * len(table.modules) for table in tables)
        else " Hatched: not adapted."
    )
    return (
        "The share of the rows of each weight matrix whose mean absolute change is above a threshold, by layer (the "
        f"last on top) and kind of matrix. {at} Darker: a larger share{scale}.{hatched}"
    )


def describe_norms(experts: int, *, relative: bool) -> str:
    """The caption of `draw_norms`."""
    of = "‖ΔW‖ / ‖W‖, relative to the base's weights" if relative else "‖ΔW‖"
    return (
        f"Frobenius norms of the changes of {_experts(experts)}, {of}, by layer; the attention and MLP matrices of a "
        "layer are taken together."
    )


def describe_meetings(pairs: int) -> str:
    """The caption of `draw_meetings`."""
    return (
        f"The cosine of ΔW for each of {pairs} pairs of experts, over all layers. Grey numbers lie where 95 % of "
        "cosines lie after the rows and columns of one expert's ΔW are shuffled. Each pair is compared by "
        "itself, without a correction for their number."
    )


def describe_interference(pair: Interference) -> str:
    """The caption of `draw_interference`."""
    layers = len(pair.by_layer())
    shared = ""
    if pair.shared_start is not None:
        shared = (
            " Both adapters were trained from the same initial A, so they read from similar subspaces whatever they "
            "learned."
        )
    return (
        f"{pair.experts[0]} and {pair.experts[1]}, layer by layer: the cosine of the two ΔW, the overlap of the "
        "subspaces that they write into and read from, and the share of elements whose signs differ. Grey: where 95 % "
        "of values lie after the rows and columns of one expert's ΔW are shuffled, for each of "
        f"{layers} layers by itself, without a correction for their number.{shared}"
    )


def _experts(number: int) -> str:
    return "one expert" if number == 1 else f"{number} experts"
