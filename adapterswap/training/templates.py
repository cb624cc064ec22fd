"""Templates such as `Question: {question}\\nAnswer:`, filled from the columns of a row.

The syntax is that of str.format with column names only (`{{` and `}}` stand for braces). Attributes, indices,
conversions and format specs are refused, so a template can read nothing but the row. Knows nothing of datasets.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from adapterswap.errors import DataError, FieldError

__all__ = ["Template"]


class Template:
    """A template, parsed once and filled many times.

    Attributes:
        text: the template.
        fields: the columns that it names, in order, without repetitions.

    Raises:
        FieldError: the braces are unbalanced, or contain something other than a column's name.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces: list[tuple[str, str | None]] = []
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise FieldError(
                f"the template {text!r} has unbalanced braces ({error})", "Write {column}, and {{ or }} for a brace"
            ) from None
        for literal, field, spec, conversion in parsed:
            if field is not None and (not field or spec or conversion or set(field) & set(".[]{}")):
                raise FieldError(
                    f"the template {text!r} has a field that is not just a column's name: {field!r}",
                    "Write {column}, and {{ or }} for a brace",
                )
            self._pieces.append((literal, field))
        self.fields = tuple(dict.fromkeys(field for _, field in self._pieces if field is not None))

    def fill(self, row: Mapping[str, Any]) -> str | None:
        """The text for `row`; None if one of the columns is null.

        Raises:
            DataError: a value is not text, a number or a boolean.
        """
        parts: list[str] = []
        for literal, field in self._pieces:
            parts.append(literal)
            if field is None:
                continue
            value = row[field]
            if value is None:
                return None
            if not isinstance(value, str | int | float):
                raise DataError(
                    f"the column {field!r} holds a {type(value).__name__}, not text or a number",
                    "Name a column of plain values, or use `messages:` for a column of chat messages",
                    parameter="datasets",
                )
            parts.append(str(value))
        return "".join(parts)
