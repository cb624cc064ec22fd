"""JSON files have the same bytes on every machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from adapterswap.kit.errors import DataError
from adapterswap.kit.files.text import json_lines, read_json, write_json

CONTENT = {"sources": ["de", "日本語"], "r": 8, "layers": {"b": None, "a": True}, "none": [], "loss": 0.1}


def test_keys_keep_their_order(tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", CONTENT)
    assert (tmp_path / "out.json").read_bytes() == (
        b'{\n  "sources": [\n    "de",\n    "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e"\n  ],\n  "r": 8,\n'
        b'  "layers": {\n    "b": null,\n    "a": true\n  },\n  "none": [],\n  "loss": 0.1\n}\n'
    )


def test_with_sorted_keys(tmp_path: Path) -> None:
    """At every depth; lists keep their order. An existing file is replaced."""
    (tmp_path / "out.json").write_text("x" * 1000)
    write_json(tmp_path / "out.json", CONTENT, sort_keys=True)
    assert (tmp_path / "out.json").read_bytes() == (
        b'{\n  "layers": {\n    "a": true,\n    "b": null\n  },\n  "loss": 0.1,\n  "none": [],\n  "r": 8,\n'
        b'  "sources": [\n    "de",\n    "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e"\n  ]\n}\n'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_cannot_represent(value: float, tmp_path: Path) -> None:
    """Refused before the file is touched, or written as Python itself writes and reads it."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "out.json", {"losses": [value]})
    assert not (tmp_path / "out.json").exists()
    write_json(tmp_path / "out.json", {"losses": [value]}, allow_nan=True)
    text = (tmp_path / "out.json").read_text()
    assert text == f'{{\n  "losses": [\n    {str(value).replace("nan", "NaN").replace("inf", "Infinity")}\n  ]\n}}\n'
    assert str(read_json(tmp_path / "out.json")["losses"][0]) == str(value)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
contents = st.dictionaries(
    st.text(), st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents, st.booleans())
def test_written_json_is_read_back(tmp_path: Path, content: dict[str, Any], sort_keys: bool) -> None:
    path = tmp_path / "out.json"
    write_json(path, content, sort_keys=sort_keys)
    assert read_json(path) == content
    keys = list(read_json(path))
    assert keys == (sorted(content) if sort_keys else list(content))


def test_a_lone_surrogate_is_read_back(tmp_path: Path) -> None:
    content = {"a\ud800": ["\udfff\ud83d", "\U0001f600"]}
    write_json(tmp_path / "out.json", content)
    assert read_json(tmp_path / "out.json") == content
    assert "\U0001f600" in (tmp_path / "out.json").read_text(encoding="utf-8")


def test_json_lines_are_read() -> None:
    lines = ['{"a": 1}\r\n', "\n", ' {"a": "\u2028é"}'.encode(), b'{"a": NaN}']
    assert [*json_lines(lines, dict, parse_constant=str)] == [{"a": 1}, {"a": "\u2028é"}, {"a": "NaN"}]
    assert [*json_lines(["[3]", "null"], repr, any_value=True)] == ["[3]", "None"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": }', "Expecting value at column 7"),
        (b'{"a": "\xff"}', "'utf-8' codec"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "same key twice: 'c'"),
        ("[" * 100_000, "too deeply"),
        ("[1]", r"\[1\] is not an object"),
        ('{"b": 1}', "no 'a'"),
        ('{"a": []}', "list indices"),
    ],
)
def test_json_lines_that_cannot_be_read_are_numbered(line: str | bytes, reason: str) -> None:
    rows = json_lines(['{"a": {"a": 1}}', "", line], lambda row: row["a"]["a"])
    next(rows)
    with pytest.raises(ValueError, match=f"^line 3 .*{reason}"):
        next(rows)


def test_an_error_of_ours_keeps_its_class_and_parameter() -> None:
    def refuse(value: object) -> None:
        raise DataError("no", "Correct it", parameter="datasets")

    with refused(DataError, "datasets", match="line 1: no"):
        next(json_lines(["{}"], refuse))
