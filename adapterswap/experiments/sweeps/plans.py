"""The plans of a sweep's cells, checked before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adapterswap.core import Adapter, Checkpoint, Form, Plan, make_plan
from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.experiments.sweeps.recipe import SweepRecipe
from adapterswap.kit.errors import AdapterswapError, Problems, UnsupportedError

Expert = Adapter | Checkpoint

_MOST_KEPT = 200_000  # slots of all plans in memory, which take about 1.4 kB each: 900 plans of a base with 32 layers


class Plans(Mapping[str, "Plan | None"]):
    """Cell → its plan; None for the base. A plan is made once, when it is checked or read, unless they hold very many
    slots: then only the first ones and the latest are kept.

    Args:
        recipe, experts, num_layers: see `PreparedSweep`.
        stored: the base's weights, if a cell is merged into them.
        cells: all cells.
    """

    def __init__(
        self,
        recipe: SweepRecipe,
        experts: Mapping[str, Expert],
        num_layers: int,
        stored: Checkpoint | None,
        cells: Sequence[Cell],
    ) -> None:
        self._recipe = recipe
        self._experts = experts
        self._num_layers = num_layers
        self._stored = stored
        self._cells = {cell.cell: cell for cell in cells}
        self._kept: dict[str, Plan | None] = {}
        self._slots = 0  # of the kept plans

        self._regular = {name for name, expert in experts.items() if _is_regular(expert, num_layers)}
        self._live: dict[str, bool] = {}
        self._zones: dict[str, set[Any]] = {}
        self.checked: list[Cell] = []

    def __getitem__(self, cell: str) -> Plan | None:
        if cell not in self._kept:
            while self._slots > _MOST_KEPT:
                self._slots -= _size(self._kept.popitem()[1])  # the latest
            self._kept[cell] = self._plan(self._cells[cell])
            self._slots += _size(self._kept[cell])
        return self._kept[cell]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def check(self, problems: Problems) -> None:
        """Plan the cells that can show a mistake, or need a rank, that no cell before them does.

        What happens to a layer depends only on the rule that it gets. If every layer of the experts has the same
        modules, cells that differ only in their zones are therefore checked by those of them in which a layer gets
        a rule for the first time.
        """
        for cell in self._cells.values():
            settings, checks = self._checks(cell)
            seen = self._zones.setdefault(settings, set())
            if checks is not None and checks <= seen:
                continue
            with problems.collect():
                plan = self[cell.cell]
                seen |= checks or set()
                self._live[settings] = self._live.get(settings, True) and _is_live(plan)
            self.checked.append(cell)

    def is_live(self, cell: Cell) -> bool:
        """Whether a cell is evaluated by switching adapters on and off."""
        settings, checks = self._checks(cell)
        return self._live[settings] or (checks is not None and _is_live(self[cell.cell]))

    def _checks(self, cell: Cell) -> tuple[str, set[Any] | None]:
        """A cell's settings without its zones, and what its plan would check; None if no other plan checks it too.

        What a plan checks: each layer with the rule that it gets, the rules in their order, and the rules that get any
        layer at all.
        """
        composition = cell.parsed
        if (
            composition is None
            or not composition.has_zones
            or composition.bottom is None
            or composition.top is None
            or cell.output.get("full_rank")
            or not self._regular.issuperset(composition.expert_names)
        ):
            return cell.cell, None

        # The rules, whatever layers they are for
        rules = composition.rules(self._num_layers)
        without_layers = []
        for rule in rules:
            content = rule.model_dump(exclude_defaults=True)
            without_layers.append(repr({**content, "layers": None}))

        # The first that matches each layer
        matching: list[str | None] = [None] * self._num_layers
        for layer in range(self._num_layers):
            for rule, text in zip(rules, without_layers, strict=True):
                if rule.matches("", layer, "other"):
                    matching[layer] = text
                    break

        settings = {key: value for key, value in cell.composition.items() if key not in _ZONES}
        checks = {*enumerate(matching), tuple(without_layers), frozenset(matching)}
        return repr((settings, cell.output)), checks

    def _plan(self, cell: Cell) -> Plan | None:
        """The plan of a cell, checked."""
        from adapterswap.core.writing.loadable import check_form

        composition, stored = cell.parsed, self._stored
        if composition is None:
            return None

        # The folder, so that a base on the Hub is not looked up again for every cell
        base_model = self._recipe.base_model
        experts = [self._experts[name] for name in composition.expert_names]
        if stored is not None and any(isinstance(expert, Checkpoint) for expert in experts):
            base_model = str(stored.source.folder)

        try:
            declared = composition.model_copy(update={"base_model": base_model})
            plan = make_plan(declared, self._experts, num_layers=self._num_layers)
            if plan.is_model:
                _check_vocabulary(plan)
            elif cell.output.get("full_rank"):
                if stored is not None:
                    _check_vocabulary(plan.merged_into(stored))  # reports mistakes before anything is evaluated
            elif cell.output or not _is_live(plan):  # reduced to an adapter
                check_form(plan, Form(**cell.output))
            return plan
        except AdapterswapError as error:
            raise error.within(cell.short) from None


_ZONES = ("bottom", "top", "bottom_transition", "top_transition")


def _size(plan: Plan | None) -> int:
    if plan is None:
        return 0
    return len(plan.slots)


def _is_live(plan: Plan | None) -> bool:
    """Whether a plan can be computed by switching adapters on and off."""
    from adapterswap.engines.live import why_not_live

    return plan is None or why_not_live(plan) is None


def _is_regular(expert: Expert, num_layers: int) -> bool:
    """Whether an expert is an adapter that adapts the same modules in every layer."""
    if not isinstance(expert, Adapter) or expert.kept_layers is not None:
        return False

    # Layer → its modules, without the layer's number
    layers: dict[int | None, set[str]] = {layer: set() for layer in range(num_layers)}
    for name, part in expert.parts.items():
        if part.layer in layers:
            layers[part.layer].add(name.replace(f".{part.layer}.", ".", 1))
    return all(names == layers[0] for names in layers.values())


def _check_vocabulary(plan: Plan) -> None:
    """Refuse full weights with rows for tokens that the base lacks, because all cells have one vocabulary."""
    for slot in plan:
        if slot.spans or (slot.base is not None and slot.shape != slot.base.tensor.shape):
            raise UnsupportedError(
                f"{slot.name} has rows for tokens that the base lacks, but all cells of a sweep have one vocabulary",
                "Write the composition with `adapterswap merge`, and evaluate the result with `adapterswap evaluate`",
            )
