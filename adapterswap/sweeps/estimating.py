"""Estimate a sweep before it runs: cells, requests, switches, and the time if a cell was already evaluated.

Loads no weights. Knows prepared sweeps and the results in their folder.
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
    """The size of a sweep. All attributes but `families`, `documents` and `seconds` are counts.

    Attributes:
        cells: all cells; for a searched family as many as the search will try.
        finished: cells with results in the folder.
        given_up: cells that successive halving gave up.
        families: row → the number of its cells.
        left_out: compositions that are skipped because their zones need more layers than the base has.
        repeated: duplicates within families.
        documents: task → the number of its documents.
        requests: requests to the model for the remaining cells, if all were evaluated on all documents.
        switched: remaining cells that only switch LoRA layers.
        reduced: remaining cells that are first reduced to an adapter.
        merged: remaining cells that are first merged into full weights.
        copied: remaining cells that equal another cell and get its results.
        seconds: the time for the remaining cells, at the rate of the finished ones (on the machine that evaluated
            them); None if none is finished.
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


def estimate(prepared: PreparedSweep, findings: Findings | None = None) -> Estimate:
    """What `sweep` would do. Builds the prompts, which must fit the model.

    Args:
        prepared: the sweep.
        findings: the results in its folder.

    Raises:
        AdapterswapError: see `preview`.
    """
    from adapterswap.evaluation.preview import preview

    grid, base, findings = prepared.grid, prepared.base, findings or Findings()
    previews = preview(base.tokenizer, base.config, list(prepared.tasks), prepared.settings)
    requests = {task.name: task.num_requests for task in previews}

    def requests_of(cell: Cell) -> int:
        return sum(requests[task] for task in cell.tasks)

    cells = expected(prepared, findings.seen)
    pending = [cell for cell in cells if cell.cell not in findings.seen]
    evaluated = {result.cell.identity for result in findings.results.values()}
    new = {cell.identity: cell for cell in reversed(pending) if cell.identity not in evaluated}
    copied = len(pending) - len(new)
    pending = [cell for cell in pending if new.get(cell.identity) is cell]
    ways = Counter(way_of(prepared, cell) for cell in pending)
    measured = [result for result in findings.results.values() if result.seconds["evaluate"] > 0]
    remaining_requests = sum(map(requests_of, pending))
    seconds = None
    if measured:
        spent = sum(sum(result.seconds.values()) for result in measured)
        seconds = spent / sum(requests_of(result.cell) for result in measured) * remaining_requests
    return Estimate(
        cells=len(cells),
        finished=len(findings.results),
        given_up=len(findings.seen) - len(findings.results),
        families=dict(Counter(cell.family for cell in cells)),
        left_out=grid.left_out,
        repeated=grid.repeated,
        documents={name: info.num_docs for name, info in prepared.tasks.items()},
        requests=remaining_requests,
        switched=ways["switched"],
        reduced=ways["reduced"],
        merged=ways["merged"],
        copied=copied,
        seconds=seconds,
    )
