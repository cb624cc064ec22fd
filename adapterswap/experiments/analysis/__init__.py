"""Where experts changed their base, and where their changes conflict. Reads experts; writes no model."""

from __future__ import annotations

from adapterswap.experiments.analysis.interference import (
    Changes,
    FractionTable,
    Interference,
    choose_threshold,
    measure,
    read_fractions,
)

__all__ = ["Changes", "FractionTable", "Interference", "choose_threshold", "measure", "read_fractions"]
