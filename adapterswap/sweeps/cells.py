"""A cell: one thing that a sweep judges, as plain data that is written in JSON and read back; and what is asked of it.

Knows nothing of how cells are made or judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Assignment", "Cell"]


@dataclass(frozen=True)
class Cell:
    """One thing that is judged: the base, an expert alone, or a composition of a pair.

    Attributes:
        cell: its id: 12 hexadecimal digits of the SHA-256 of all that it is.
        family: what its row of a table is called: base, task expert, language expert, layer_swap, soup, partition A, ….
        task_expert: the names of the task side, several where they are souped; empty where there is none.
        language_expert: likewise; empty for a reset to the base too.
        other_experts: those of all other roles.
        composition: the fields of a `Composition` that are not its defaults; empty for the base.
        output: `max_rank` or `max_error`, where the composition is reduced to an adapter before it is judged;
            `full_rank`, where it is merged into full weights.
        short: its short name: `math1+sw1@bottom=3,top=1`; an expert's name; `base`.
        default: whether it is the papers' default configuration of its family; see `defaults.default_of`.
        tasks: what it is judged on: target tasks, then retention.
    """

    cell: str
    family: str
    task_expert: tuple[str, ...]
    language_expert: tuple[str, ...]
    composition: Mapping[str, Any]
    output: Mapping[str, Any]
    short: str
    default: bool
    tasks: tuple[str, ...]
    other_experts: tuple[str, ...] = ()

    @property
    def configuration(self) -> str:
        """The cell without its experts: `bottom=3,top=1`; cells with the same one differ in their pair alone."""
        return self.short.partition("@")[2] if self.composition else ""

    @property
    def identity(self) -> str:
        """What cells of different families have in common that are the same, so that one of them is judged."""
        return repr((sorted(self.composition.items()), sorted(self.output.items()), self.tasks))

    @property
    def is_reduced(self) -> bool:
        """Whether a bound on the rank was asked for, so that what is judged is an approximation."""
        return bool(self.output.keys() - {"full_rank"})

    def as_json(self) -> dict[str, Any]:
        """A side is a name, a list of names where it is souped, or null."""
        return {
            "cell": self.cell,
            "family": self.family,
            "task_expert": _side_as_json(self.task_expert),
            "language_expert": _side_as_json(self.language_expert),
            **({"other_experts": list(self.other_experts)} if self.other_experts else {}),
            "composition": dict(self.composition),
            **({"output": dict(self.output)} if self.output else {}),
            "short": self.short,
            "default": self.default,
            "tasks": list(self.tasks),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Cell:
        return cls(
            cell=content["cell"],
            family=content["family"],
            task_expert=_side(content["task_expert"]),
            language_expert=_side(content["language_expert"]),
            composition=content["composition"],
            output=content.get("output", {}),
            short=content["short"],
            default=content["default"],
            tasks=tuple(content["tasks"]),
            other_experts=tuple(content.get("other_experts", ())),
        )


@dataclass(frozen=True)
class Assignment:
    """What a judge is given: a cell, on everything that it is judged on, or on a rung of a search that halves.

    Attributes:
        cell: the cell.
        documents: target task → the documents that are asked, equally many of each; None for all of all tasks.
    """

    cell: Cell
    documents: Mapping[str, tuple[int, ...]] | None = None

    @property
    def rung(self) -> int | None:
        """How many documents of each task there are; None for all."""
        return None if self.documents is None else len(next(iter(self.documents.values())))


def _side_as_json(names: tuple[str, ...]) -> str | list[str] | None:
    return list(names) if len(names) > 1 else names[0] if names else None


def _side(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())
