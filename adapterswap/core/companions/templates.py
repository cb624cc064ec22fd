"""Chat templates, as one set wherever they stand in a folder: read, compared and written.

transformers looks in `chat_template.jinja` with `additional_chat_templates/*.jinja`, and only if there are none in
`tokenizer_config.json`, where they are one text or a list with names. Older processors have a `chat_template.json`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterswap.kit.errors import ExpertError
from adapterswap.kit.files.inside import files_inside, read_inside
from adapterswap.kit.files.text import parse_json

JINJA, MORE, LEGACY = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
SETTINGS = "tokenizer_config.json"
_KEY, _DEFAULT, _PROCESSOR = "chat_template", "default", "processor's"
_MOST = 2**20  # bytes of a template; real ones have some 10 kB
_REMEDY = "Save the tokenizer again, with tokenizer.save_pretrained(FOLDER)"

Templates = Mapping[str, str]
"""A set of chat templates: name → text. The one that is used unless another is chosen is the `default`."""


def read_templates(folder: Path | None) -> Templates | None:
    """The chat templates in a folder, which transformers would read; None if there is none."""
    if folder is None:
        return None
    templates = _files(folder)
    if not templates:
        templates = _entries(object_in(folder, SETTINGS).get(_KEY), folder / SETTINGS)
    legacy = _entries(object_in(folder, LEGACY).get(_KEY), folder / LEGACY)
    if not templates:
        return legacy or None
    if legacy.get(_DEFAULT, templates.get(_DEFAULT)) != templates.get(_DEFAULT):
        templates = {**templates, _PROCESSOR: legacy[_DEFAULT]}
    return templates


def write_templates(templates: Templates, target: Path) -> None:
    """Write chat templates into the folder `target`, in place of all that stand there."""
    only_for_processors = os.path.exists(target / LEGACY) and _PROCESSOR not in templates
    if templates == (read_templates(target) or {}) and not only_for_processors:
        return
    settings = object_in(target, SETTINGS)

    # Everything that stands there goes.
    if settings.pop(_KEY, None) is not None:
        (target / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in (JINJA, LEGACY):
        (target / name).unlink(missing_ok=True)
    shutil.rmtree(target / MORE, ignore_errors=True)

    for name, text in templates.items():
        if name == _PROCESSOR:
            (target / LEGACY).write_text(json.dumps({_KEY: text}, ensure_ascii=False) + "\n", encoding="utf-8")
            continue
        place = target / JINJA if name == _DEFAULT else target / MORE / f"{name}.jinja"
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8", newline="")


def _files(folder: Path) -> dict[str, str]:
    """The templates that are files of their own."""
    places = {_DEFAULT: JINJA}
    for path in files_inside(folder, [f"{MORE}/*.jinja"]):
        places[path.stem] = f"{MORE}/{path.name}"

    templates: dict[str, str] = {}
    for name, place in places.items():
        content = read_inside(folder, place, limit=_MOST)
        if content is None:
            continue
        try:
            templates[name] = _one_newline(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ExpertError(f"{folder / place} is not UTF-8 text: {error.reason}", "Save it as UTF-8") from None
    return templates


def _entries(value: Any, path: Path) -> dict[str, str]:
    """The templates in a JSON file: one text, or a list or an object with names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: _one_newline(value)}

    named: list[tuple[Any, Any]] = [(None, None)]
    if isinstance(value, dict):
        named = list(value.items())
    elif isinstance(value, list):
        named = []
        for entry in value:
            fields = entry if isinstance(entry, dict) else {}
            named.append((fields.get("name"), fields.get("template")))

    templates: dict[str, str] = {}
    for name, text in named:
        if not isinstance(name, str) or not isinstance(text, str) or not re.fullmatch(r"[\w-][\w. -]{0,99}", name):
            raise ExpertError(f"{path} has a chat template without a name or a text", _REMEDY)
        templates[name] = _one_newline(text)
    return templates


def _one_newline(text: str) -> str:
    """A template as Jinja reads it, for which every kind of newline is the same."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def object_in(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a folder; an empty object if there is none."""
    content = read_inside(folder, name)
    if content is None:
        return {}
    return parse_json(content, str(folder / name), _REMEDY)
