"""Fixtures for the tests of recipes."""

from __future__ import annotations

from .standins import standin

__all__ = ["standin"]
