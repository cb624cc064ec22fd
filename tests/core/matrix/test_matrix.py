"""Every architecture × every kind of adapters × every operation: exact against plain torch, or refused as expected.

`make test` runs cells of `QUICK` that have each pair, `make matrix` and `make test-all` all of them (TESTS=all).
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tiers import ALL
from tolerances import tolerance
from transformers import PreTrainedModel

from adapterswap import AdapterswapError
from core.matrix.adapters import KINDS, Pair
from core.matrix.architectures import ARCHITECTURES, LAYERS, build
from core.matrix.expectations import CELLS, QUICK, Cell, reason_of
from core.matrix.methods import METHODS
from core.matrix.operations import OPERATIONS, Result, Subject
from core.matrix.reference import Changes, expected, expert_changes, logits, parameters, rounded_otherwise, with_changes

_FALSE_ALARM = re.compile(
    r"The following (?:alpha|rank)_pattern keys did not match any targeted module and were ignored: "
    r"\[(?:'[^']*\.(?:experts\.\w+|gate\.weight)'(?:, )?)+\]\."
)


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Cells in which any two of an architecture, a kind and an operation meet that meet in some cell.

    First those that bring three new pairs, then two, then one: fewer cells than in their order.
    """
    pairs = {cell: {*itertools.combinations((cell.architecture, cell.kind, cell.operation), 2)} for cell in cells}
    seen: set[tuple[str, str]] = set()
    chosen = set()
    for new in (3, 2, 1):
        for cell in cells:
            if len(pairs[cell] - seen) >= new:
                chosen.add(cell)
                seen |= pairs[cell]
    return [cell for cell in cells if cell in chosen]


CHOSEN = CELLS if ALL else pairwise(QUICK)


class Prepared(NamedTuple):
    """A pair of experts with their ΔW, by PEFT and torch alone."""

    base: PreTrainedModel
    pair: Pair
    task: Changes
    language: Changes
    said: set[str]


class Workshop:
    """Creates each base and each pair of experts once; the cells are sorted by them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bases: dict[str, PreTrainedModel] = {}
        self._prepared: dict[tuple[str, str], Prepared] = {}

    def base(self, name: str) -> PreTrainedModel:
        if name not in self._bases:
            self._bases = {}
            architecture, folder = ARCHITECTURES[name], self._folder / name / "base"
            build(architecture).save_pretrained(folder)
            self._bases[name] = architecture.model_class.from_pretrained(folder).eval()
        return self._bases[name]

    def prepare(self, name: str, kind: str) -> Prepared:
        if (name, kind) not in self._prepared:
            self._prepared = {}
            base = self.base(name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pair = KINDS[kind].make(ARCHITECTURES[name], base, self._folder / name / kind)
                (task, said), (language, more) = (expert_changes(base, one) for one in (pair.task, pair.language))
            self._prepared[name, kind] = Prepared(base, pair, task, language, said | more)
        return self._prepared[name, kind]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=pytest.mark.xdist_group(cell.architecture)) for cell in CHOSEN]
)
def test_exact_or_refused(
    cell: Cell, workshop: Workshop, tmp_path: Path, record_property: Callable[[str, str], None]
) -> None:
    prepared = workshop.prepare(cell.architecture, cell.kind)
    outcome = _outcome(cell, prepared, tmp_path / "out")
    record_property("outcome", outcome if len(outcome) <= 300 else f"{outcome[:300]}…")  # for the table at the end
    assert not outcome.startswith("failed"), outcome


def _outcome(cell: Cell, prepared: Prepared, out: Path) -> str:
    """`exact`, `refused: REASON` or `failed: WHAT`."""
    architecture, operation = ARCHITECTURES[cell.architecture], OPERATIONS[cell.operation]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's own; those of loading are in `result.said`
            result = operation.run(Subject(architecture, prepared.base, prepared.pair, out))
    except AdapterswapError as error:
        reason = reason_of(cell, error)
        return f"failed: refused unexpectedly: {error}" if reason is None else f"refused: {reason}"
    except Exception as error:  # from PEFT or transformers, which could not load the result, or from the library
        return f"failed: {type(error).__name__}: {error}"
    changes = expected(architecture, operation.composition, prepared.task, prepared.language, prepared.base)
    wrong = differences(prepared, changes, result, [])
    if wrong and cell.operation in METHODS:
        others = []
        for seed in range(0, 16, 2):  # not the same for both: many methods look at the difference of two experts
            experts = (
                rounded_otherwise(prepared.base, one, seed + place)
                for place, one in enumerate((prepared.task, prepared.language))
            )
            others.append(expected(architecture, operation.composition, *experts, prepared.base))
        wrong = differences(prepared, changes, result, others)
    return f"failed: {'; '.join(wrong)}" if wrong else "exact"


def differences(prepared: Prepared, changes: Changes, result: Result, others: Sequence[Changes]) -> list[str]:
    """What is wrong with a result: warnings that its experts did not cause, a ΔW, the logits.

    Some methods amplify rounding: they divide by 1 + cos or by a small singular value, say. `others` are
    results for ΔW that float32 cannot tell from the first. Twice as far as these are from it, no number is determined.
    """
    # PEFT warns that it does not find patterns for parameters, although it uses them, as ΔW shows.
    said = {text for text in result.said - prepared.said if not _FALSE_ALARM.fullmatch(text)}
    found = [f"loading it says: {text}" for text in sorted(said)]
    weights: dict[str, torch.Tensor] = dict(parameters(prepared.base))
    for name in sorted(changes.keys() | result.changes.keys()):
        if name not in weights:  # a bias that the base does not have
            weights[name] = torch.zeros_like(changes[name])
        zero = torch.zeros_like(weights[name], dtype=torch.float64)
        terms = [one[name] for one in (prepared.task, prepared.language) if name in one]
        size = max(float(term.abs().max()) for term in [weights[name].detach(), *terms])
        own = changes.get(name, zero)
        open_by = _spread(own, [other.get(name, zero) for other in others])
        error = float(((own - result.changes.get(name, zero)).abs() - open_by).max())
        if not error <= tolerance(zero, scale=size):
            found.append(f"ΔW of {name} is wrong by {error:.2g}")
    reference = logits(with_changes(prepared.base, changes))
    open_by = _spread(reference, [logits(with_changes(prepared.base, other)) for other in others])
    error = float(((reference - result.logits).abs() - open_by).max())
    if not error <= tolerance(reference, depth=LAYERS):
        found.append(f"logits are wrong by {error:.2g} of {float(reference.abs().max()):.2g}")
    return found


def _spread(value: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    differences = [(other - value).abs() for other in others]
    return 2 * torch.stack(differences).amax(dim=0) if differences else torch.zeros_like(value)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "nemotron_h", "gemma3"])
def test_the_matrix_would_notice_a_mistake(name: str, workshop: Workshop) -> None:
    """Experts, compositions and the base differ by thousands of tolerances: a mistake cannot hide in one."""
    prepared = workshop.prepare(name, "attention")
    compositions = {operation.composition for operation in OPERATIONS.values()}
    results = {
        composition: logits(
            with_changes(
                prepared.base,
                expected(ARCHITECTURES[name], composition, prepared.task, prepared.language, prepared.base),
            )
        )
        for composition in compositions
    }
    results |= {"task": logits(with_changes(prepared.base, prepared.task)), "base": logits(prepared.base)}
    for one in results:
        for other in results.keys() - {one}:
            error = float((results[one] - results[other]).abs().max())
            assert error > 100 * tolerance(results[one], depth=LAYERS), (one, other)
