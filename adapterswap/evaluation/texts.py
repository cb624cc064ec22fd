"""Texts for a tokenizer or a results file: halves of surrogate pairs are refused before the model runs.

JSON can hold `"\\ud800"`, which Python reads as a character, but tokenizers and UTF-8 files cannot. Knows the harness's
tasks and requests; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adapterswap.errors import DataError, Problems

__all__ = ["broken_texts", "check_texts"]

_AROUND = 30  # characters shown on either side


def broken_texts(content: Any) -> Iterator[str]:
    """The text around the first half of a surrogate pair in each text of plain data, keys of mappings included."""
    if isinstance(content, str):
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            yield content[max(0, error.start - _AROUND) : error.start + _AROUND]
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from broken_texts(key)
            yield from broken_texts(value)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from broken_texts(item)


def check_texts(tasks: Mapping[str, Any]) -> None:
    """Refuse tasks with a text that cannot be tokenized or written.

    Args:
        tasks: name → task with its requests.

    Raises:
        DataError: lists every such document by its number, with the part that holds the text.
    """
    problems = Problems(DataError)
    for name, task in tasks.items():
        seen = set()
        for request in task.instances or ():
            parts = {"prompt": request.args}
            if request.doc_id not in seen:
                parts |= {"row": request.doc, "target": task.doc_to_target(request.doc)}
            seen.add(request.doc_id)
            for part, content in parts.items():
                if (text := next(broken_texts(content), None)) is not None:
                    problems.add(
                        f"{name}: the {part} of document {request.doc_id} contains an unpaired surrogate, which is "
                        f"not a character: {text!r}",
                        "Correct it in the task's file or data, in the shots, or in the chat template",
                        parameter="tasks",
                    )
    problems.raise_if_any()
