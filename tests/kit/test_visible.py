"""Control characters and directions of writing are written as their codes, and formulas in CSV files as text."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from adapterswap.kit.errors import visible
from adapterswap.kit.files.text import csv_text, read_json, write_json

HIDDEN = [
    "\x00",
    "\x1b[31m",
    "\x7f",
    "\x9b31m",
    "\u061c",
    "\u200e",
    "\u200f",
    "\u2028",
    "\u202e",
    "\u2066",
    "\ufeff",
    "\r",
]
SHOWN = ["plain", "ñ é 日本", "క్\u200cష", "tab\t", "line\nline", "🙂", "سلام"]


@pytest.mark.parametrize("text", HIDDEN)
def test_hidden_characters_are_written_as_codes(text: str, tmp_path: Path) -> None:
    shown = visible(f"a{text}b")
    assert shown.isprintable()
    assert json.loads(f'"{shown}"') == f"a{text}b"
    content = {text: ["x", {"y": text}], "z": "\ud800"}
    write_json(tmp_path / "a.json", content)
    raw = (tmp_path / "a.json").read_bytes().decode()
    assert [character for character in raw if not character.isprintable() and character != "\n"] == []
    assert read_json(tmp_path / "a.json") == content


@pytest.mark.parametrize("text", SHOWN)
def test_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize("start", ["", " ", "\n", "\t", "\r", "\u00a0", "\u3000", " \n "])
@pytest.mark.parametrize("sign", ["=1+1", "+1", "-1", "@SUM(A1)", "\uff1d1"])
def test_no_name_is_a_formula(start: str, sign: str) -> None:
    stream = io.StringIO()
    csv.writer(stream).writerow([csv_text(start + sign)])
    ((cell,),) = csv.reader(io.StringIO(stream.getvalue()))
    assert cell.startswith(("'", "\\u000d"))


def test_other_names_stay_as_they_are() -> None:
    for name in ("math+swahili@bottom=2", " spaced", "a=b", "日本", ""):
        assert csv_text(name) == name
    assert csv_text("a\u202eb") == "a\\u202eb"
