"""A cell is one thing that a sweep evaluates. Plain data that is written as JSON and read back.

Knows nothing of how cells are made or evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Assignment", "Cell"]


@dataclass(frozen=True)
class Cell:
    """The base, an expert alone, or a composition of a pair.

    Attributes:
        cell: the id: 12 hexadecimal digits of a SHA-256 of the other attributes.
        family: the name of its row in tables: base, task expert, language expert, layer_swap, soup, partition A, ….
        task_expert: the names of the experts on the task side. Several are averaged; empty if there is none.
        language_expert: the same for the language side; also empty for a reset to the base.
        other_experts: the experts of all other roles.
        composition: the fields of a `Composition` that are not its defaults; empty for the base.
        output: `max_rank` or `max_error` if the composition is first reduced to an adapter; `full_rank` if it is
            merged into full weights.
        short: the short name: `math1+sw1@bottom=3,top=1`; an expert's name; or `base`.
        default: whether it is the papers' default configuration of its family; see `defaults.default_of`.
        tasks: the tasks that it is evaluated on: target tasks, then retention.
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
        """The settings without the experts: `bottom=3,top=1`. Cells of one configuration differ only in their pair."""
        return self.short.partition("@")[2] if self.composition else ""

    @property
    def identity(self) -> str:
        """Equal for cells of different families that are the same composition: only one of them is evaluated."""
        return repr((sorted(self.composition.items()), sorted(self.output.items()), self.tasks))

    @property
    def is_reduced(self) -> bool:
        """Whether the rank is bounded, so that the evaluated adapter is an approximation."""
        return bool(self.output.keys() - {"full_rank"})

    def as_json(self) -> dict[str, Any]:
        """Plain data, in which a side is a name, a list of names that are averaged, or null."""
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
    """A cell to evaluate, on all documents or on those of a rung of successive halving.

    Attributes:
        cell: the cell.
        documents: target task → the documents to evaluate on, the same number for each task; None for all documents.
    """

    cell: Cell
    documents: Mapping[str, tuple[int, ...]] | None = None

    @property
    def rung(self) -> int | None:
        """The number of documents of each task; None for all."""
        return None if self.documents is None else len(next(iter(self.documents.values())))


def _side_as_json(names: tuple[str, ...]) -> str | list[str] | None:
    return list(names) if len(names) > 1 else names[0] if names else None


def _side(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())
