"""Read an adapterswap.json back: which expert every module of an adapter, or tensor of a model, came from.

The file may come from a stranger, so nothing in it is believed before it was checked.
Knows the file's form; knows nothing of how it was written.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from adapterswap.errors import AdapterswapError
from adapterswap.experts.layers import MAX_LAYERS
from adapterswap.experts.sources import is_hub_id
from adapterswap.files.smallfiles import read_json
from adapterswap.planning.allocation import BASE

__all__ = ["Record", "SourceRecord", "read_record"]


class SourceRecord(BaseModel):
    """Where an expert came from: a Hub id and its commit, or a folder's own name."""

    source: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.source}@{self.revision}" if self.revision else self.source

    @property
    def reference(self) -> str | None:
        """The Hub id with its commit; None for others: a path that a record names is never followed."""
        return str(self) if self.revision and is_hub_id(str(self)) else None


class RuleRecord(BaseModel):
    """What is shown of a rule: the average of several experts that owns its modules, if one does."""

    expert: str | None = None
    averages: dict[str, list[str]] = {}


class Record(BaseModel):
    """What an adapterswap.json says of the origin of an adapter or a merged model; other keys are left alone."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    experts: dict[str, SourceRecord]
    modules: dict[str, str | dict[str, float]] = Field(
        validation_alias=AliasChoices("modules", "tensors"),  # of an adapter, of a merged model
        description="The owner, or each expert's coefficient.",
    )
    rules: list[RuleRecord] = []

    @model_validator(mode="after")
    def _check(self) -> Record:
        known = {*self.experts, BASE}
        named = {name for what in self.modules.values() for name in ([what] if isinstance(what, str) else what)}
        if not named <= known:
            raise ValueError("a module names an expert that is not among the experts")
        return self

    def owner_of(self, module: str) -> str | dict[str, float] | None:
        """The expert, or the average of several, that owns a module; else its coefficients; None if it is not named."""
        made_of = self.modules.get(module)
        if not isinstance(made_of, dict):
            return made_of
        for rule in self.rules:
            members = rule.averages.get(rule.expert or "")
            if members and made_of == {name: 1 / len(members) for name in members if name != BASE}:
                return rule.expert
        return made_of


def read_record(path: Path) -> Record | None:
    """The record in an adapterswap.json; None if there is none, or it is none that can be understood."""
    try:
        return Record.model_validate(read_json(path))
    except (AdapterswapError, ValidationError):
        return None
