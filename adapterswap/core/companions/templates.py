"""Chat templates: where they stand in a folder, whether two folders have the same ones, and writing them."""

from __future__ import annotations

from pathlib import Path

from adapterswap.kit.files.text import exists, read_json

JINJA = "chat_template.jinja"
_SETTINGS = "tokenizer_config.json"
_REMEDY = "Save the tokenizer again, with tokenizer.save_pretrained(FOLDER)"


def read_templates(folder: Path | None) -> str | None:
    """The chat template of the tokenizer in a folder; None if there is none."""
    if folder is None:
        return None
    if exists(folder / JINJA):
        return (folder / JINJA).read_text(encoding="utf-8")
    if not exists(folder / _SETTINGS):
        return None
    template = read_json(folder / _SETTINGS, _REMEDY).get("chat_template")
    return template if isinstance(template, str) else None


def write_templates(templates: str, target: Path) -> None:
    """Write the chat templates of another folder into `target`, in place of those that its tokenizer has."""
    if templates != read_templates(target):
        (target / JINJA).write_text(templates, encoding="utf-8")  # takes precedence over tokenizer_config.json
