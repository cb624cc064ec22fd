"""What a sweep would take, before it is run: cells, requests, switches, and time where a cell has been measured.

Loads no weights. Knows prepared sweeps and what their folder holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from adapterswap.sweeps.cells import Cell
from adapterswap.sweeps.judging import way_of
from adapterswap.sweeps.preparing import PreparedSweep
from adapterswap.sweeps.search import expected
from adapterswap.sweeps.values import Findings

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """What is left to do.

    Attributes:
        cells: in all; of a family that is searched, as many as there are trials.
        finished: of them, in the folder already.
        given_up: of them, by a search that halves.
        families: row → its cells.
        left_out: compositions whose zones need more layers than there are.
        repeated: compositions that a family holds twice.
        documents: task → documents.
        requests: to the model, for the cells that are left, as if all were judged whole.
        switched: cells that are left and need a switch alone.
        reduced: cells that are left and are reduced to an adapter first.
        merged: cells that are left and are merged into full weights first.
        copied: cells that are left and equal another one, whose results they get.
        seconds: for the cells that are left, at the rate of the finished ones on whatever machine ran them; None where
            none is finished.
    """

    cells: int
    finished: int
    given_up: int
    families: dict[str, int]
    left_out: int
    repeated: int
    documents: dict[str, int]
    requests: int
    switched: int
    reduced: int
    merged: int
    copied: int
    seconds: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate(prepared: PreparedSweep, found: Findings | None = None) -> Estimate:
    """What `sweep` would do in a folder where so much is found; prompts are built, and must fit the model.

    Raises:
        AdapterswapError: see `preview`.
    """
    from adapterswap.evaluation.preview import preview

    grid, base, found = prepared.grid, prepared.base, found or Findings()
    previews = preview(base.tokenizer, base.config, list(prepared.tasks), prepared.settings)
    requests = {task.name: task.num_requests for task in previews}

    def asked(cell: Cell) -> int:
        return sum(requests[task] for task in cell.tasks)

    cells = expected(prepared, found.seen)
    pending = [cell for cell in cells if cell.cell not in found.seen]
    judged = {result.cell.identity for result in found.results.values()}
    new = {cell.identity: cell for cell in reversed(pending) if cell.identity not in judged}
    copied = len(pending) - len(new)
    pending = [cell for cell in pending if new.get(cell.identity) is cell]
    ways = Counter(way_of(prepared, cell) for cell in pending)
    measured = [result for result in found.results.values() if result.seconds["evaluate"] > 0]
    left = sum(map(asked, pending))
    seconds = None
    if measured:
        spent = sum(sum(result.seconds.values()) for result in measured)
        seconds = spent / sum(asked(result.cell) for result in measured) * left
    return Estimate(
        cells=len(cells),
        finished=len(found.results),
        given_up=len(found.seen) - len(found.results),
        families=dict(Counter(cell.family for cell in cells)),
        left_out=grid.left_out,
        repeated=grid.repeated,
        documents={name: info.num_docs for name, info in prepared.tasks.items()},
        requests=left,
        switched=ways["switched"],
        reduced=ways["reduced"],
        merged=ways["merged"],
        copied=copied,
        seconds=seconds,
    )
