"""Recipes: YAML read safely and within bounds, every mistake reported with its key, its value and its remedy."""

from __future__ import annotations

import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from adapterswap.core.planning.composition import Composition
from adapterswap.kit.errors import ArgumentError, FieldError, NotFoundError
from adapterswap.kit.files import yaml_text
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import field
from adapterswap.kit.files.yaml import apply_overrides, dump_yaml, load_yaml, parse_yaml, read_recipe


class Part(Declared):
    path: str
    weight: float = 1.0


class Recipe(Declared):
    """A model with every kind of field that recipes have."""

    name: str
    steps: int = field(default=1, ge=1)
    parts: tuple[Part, ...] = ()
    named: dict[str, Part] = field(default={})
    lambda_: float | None = field(default=None, alias="lambda")


def recipe(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return path


def error_of(path: Path) -> str:
    with pytest.raises(FieldError) as caught:
        read_recipe(path, Recipe)
    return str(caught.value).replace(f"{path}", "R")


def test_yaml_features(tmp_path: Path) -> None:
    text = """
    name: "Swahili na हिन्दी\\n"      # line ends and any script are text
    parts: [{path: a}, {path: b, weight: 0.5}]
    named: {x: &x {path: c}, y: {<<: *x, weight: 2}, z: {<<: [*x, {path: d, weight: 4}]}}
    lambda: 3
    """
    read = read_recipe(recipe(tmp_path, text), Recipe)
    assert read.name == "Swahili na हिन्दी\n"
    assert read.parts == (Part(path="a"), Part(path="b", weight=0.5))
    assert read.named == {"x": Part(path="c"), "y": Part(path="c", weight=2), "z": Part(path="c", weight=4)}
    assert read.lambda_ == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("[1e5, -2E+3, 5.e-08, .5]", [1e5, -2e3, 5e-8, 0.5]),
        ("[yes, No, ON, off, true, FALSE]", [True, False, True, False, True, False]),
        ("[y, n, yEs, 'yes', \"no\", !!str off]", ["y", "n", "yEs", "yes", "no", "off"]),
        ("[010, 0o10, 0x10, 1_000, 1:30]", [10, 8, 16, 1000, "1:30"]),
        ("[2026-11-22, 2026-11-22x, null, ~, '']", [date(2026, 11, 22), "2026-11-22x", None, None, ""]),
        ("{no: 1, 5: 2, 'on': 3}", {False: 1, 5: 2, "on": 3}),
    ],
)
def test_types_of_plain_values(text: str, value: Any) -> None:
    """YAML 1.2, with the booleans of 1.1."""
    read = parse_yaml(text)
    assert read == value
    assert repr(read) == repr(value)  # True is not 1
    assert parse_yaml(dump_yaml(value)) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False)
        | st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)) | st.sampled_from("\n\t #:-'\"{}[]&*!|>%@,"))
        | st.sampled_from(["yes", "No", "on", "3e-4", "010", "1:30", "~", "<<", "=", "2026-11-22", "null"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abné: #\n"), inner, max_size=3),
        max_leaves=8,
    )
)  # fmt: skip
def test_written_yaml_is_read_back(value: Any) -> None:
    assert parse_yaml(dump_yaml({"key": value})) == {"key": value}


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = "nmae: x\nsteps: 0\nparts: [{path: 1, wieght: 2}, {}]\nlamda: 2"
    assert error_of(recipe(tmp_path, text)).splitlines() == [
        "R: name is missing. Add `name:`.",
        "R: steps is 0, but must be 1 or more.",
        "R: parts.0.path is 1, but must be text.",
        "R: parts.0.wieght is not a known key. Did you mean 'weight'?",
        "R: parts.1.path is missing. Add `path:`.",
        "R: nmae is not a known key. Did you mean 'name'?",
        "R: lamda is not a known key. Did you mean 'lambda'?",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: [", "is not valid YAML: while parsing"),
        (b"name: \xff", "is not valid YAML: 'utf-8' codec"),
        ("name: a\nname: b", "the key 'name' appears twice"),
        ("name: a\nparts: [{path: a, path: b}]", "the key 'path' appears twice at line 2"),
        ("named:\n  x: {<<: {a: 1}, b: 1, b: 2}", "the key 'b' appears twice at line 2"),
        ("named:\n  x: {<<: {b: 1, b: 2}}", "the key 'b' appears twice at line 2"),
        ("1: a\n0x1: b", "the key 1 appears twice at line 2"),
        ("- a", "contains a list, not a mapping"),
        ("", "is empty. Write `key: value` lines"),
        ("name: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("name: !!python/name:os.system", "could not determine a constructor"),
        ("name: a\nsteps: !mine 1", "could not determine a constructor for the tag '!mine' at line 2"),
        ("name: !!set {a}", "could not determine a constructor"),
        ("name: !!binary YQ==", "could not determine a constructor"),
        ("name: !!omap [a: 1, a: 2]", "could not determine a constructor"),
        ("a: b\n[a]: b", "a key must be a plain value at line 2"),
        ("{{a: b}: b}", "a key must be a plain value"),
        ("!!map a: b", "a key must be a plain value"),
        ("name: a\nsteps: 2001-99-99", "'2001-99-99' is not a valid timestamp: month must be in 1..12 at line 2"),
        ("name: !!timestamp x", "failed to construct timestamp"),
        ("name: !!bool maybe", "'maybe' is not a valid bool"),
        ("name: !!int ''", "'' is not a valid int"),
        ("name: &a b\nsteps: &a 1", "found duplicate anchor 'a'"),
        ("%YAML 1.1\n---\nsteps: 1e5", "1e5"),
        ("name: " + "9" * 5000, "Exceeds the limit"),
        ("name: a\nsteps: 0x" + "f" * 100, "fff' is not a valid int: it is too large at line 2"),
        ("steps: 9223372036854775808", "it is too large"),
        ('name: "\\e[2J"', r"'\x1b[2J' is not a valid str: it contains the control character '\x1b'"),
        ('"\\x9b": a', r"contains the control character '\x9b'"),
        ('name: "\\ud800"', r"contains the control character '\ud800'"),
        ("name: a\0", "special characters are not allowed"),
        ("name: " + "[" * 3000, "maximum depth of data structure exceeded (41) at line 1"),
        ("name: " + "[" * 50 + "]" * 50, "maximum depth of data structure exceeded (41) at line 1"),
        ("a: &a [*a]", "it contains more than 20000 values or 40 levels at line 1"),
        ("a: &a {b: *a}", "it contains more than 20000 values or 40 levels at line 1"),
        ("named: {<<: {a: 1}, <<: {b: 2}}", "the key '<<' appears twice"),
        ("named: {<<: [{a: 1}, 2]}", "expected a mapping"),
        ("named: {<<: 1}", "expected a mapping"),
        ("name: " + "x" * 2**18, "is larger than 262,144 bytes"),
    ],
)
def test_invalid_yaml(text: str | bytes, reason: str, tmp_path: Path) -> None:
    output = error_of(recipe(tmp_path, text))
    assert reason in output
    assert len(output.splitlines()) == 1
    assert output.isprintable()


def aliases(each: str, levels: int, opening: str, closing: str) -> str:
    """Each level holds the one before it nine times over: 9**levels values in a few hundred bytes."""
    lines = [f"a: &a {each}"]
    for level in range(1, levels + 1):
        old, new = chr(96 + level), chr(97 + level)
        lines.append(f"{new}: &{new} {opening}{', '.join([f'*{old}'] * 9)}{closing}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        aliases("[x]", 12, "[", "]"),
        aliases("{k: 1}", 12, "{<<: [", "]}"),
        "a: &a {" + ", ".join(f"k{i}: 1" for i in range(1000)) + "}\nb:\n" + "- {<<: *a}\n" * 500,
        "a: [" + "[], " * 25_000 + "]",
        "\n".join(f"k{i}: {{}}" for i in range(9_000)),
    ],
    ids=["aliases", "merged lists", "merged mappings", "many values", "many keys"],
)
def test_recipes_whose_aliases_explode(text: str, tmp_path: Path) -> None:
    start = time.process_time()
    assert len(error_of(recipe(tmp_path, text))) < 25_000
    assert time.process_time() - start < 5


def test_files_that_are_not_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipe-folder").mkdir()
    with refused(NotFoundError, "recipe"):
        load_yaml(tmp_path / "none.yaml")
    with refused(FieldError):
        load_yaml(tmp_path / "recipe-folder")
    with refused(FieldError, match="is not a regular file"):
        load_yaml("/dev/zero")


@pytest.mark.parametrize(
    ("override", "content"),
    [
        ("a.b.1.c=3e-4", {"a": {"b": [1, {"c": 3e-4}]}}),
        ("a.b.0=[1e-4]", {"a": {"b": [[1e-4], {"c": 2}]}}),
        ("a.b.0=[x, y]", {"a": {"b": [["x", "y"], {"c": 2}]}}),
        ("d=true", {"a": {"b": [1, {"c": 2}]}, "d": True}),
        ("d.e.f=text: with a colon", {"a": {"b": [1, {"c": 2}]}, "d": {"e": {"f": {"text": "with a colon"}}}}),
        ("d=[not yaml", {"a": {"b": [1, {"c": 2}]}, "d": "[not yaml"}),
        ("d=2001-99-99", {"a": {"b": [1, {"c": 2}]}, "d": "2001-99-99"}),
        ("d=", {"a": {"b": [1, {"c": 2}]}, "d": None}),
    ],
)
def test_overrides(override: str, content: dict[str, Any]) -> None:
    before = {"a": {"b": [1, {"c": 2}]}}
    assert apply_overrides(before, [override]) == content
    assert before == {"a": {"b": [1, {"c": 2}]}}


@pytest.mark.parametrize("override", ["a", "=1", "a.b.2=1", "a.b.x=1", "a.b.²=1", "a.b.0.c=1", "a.b.-1=1"])
def test_overrides_without_a_target(override: str) -> None:
    with refused(ArgumentError, "overrides", match="`overrides`"):
        apply_overrides({"a": {"b": [1, {"c": 2}]}}, [override])


def test_overrides_are_texts() -> None:
    with refused(ArgumentError, "overrides"):
        apply_overrides({"a": 1}, b"a=2")


def test_values_are_shown_shortly(tmp_path: Path) -> None:
    deep: Any = "x" * 10_000
    for _ in range(30):
        deep = [deep] * 3
    with refused(FieldError, "name") as caught:
        Recipe.read_content({"name": deep}, where="here")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["experts: {math: m, no: n}\nmethod: soup", "task: m\nlanguage: no"])
def test_norwegian_without_quotes_gets_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(FieldError, match="is False") as caught:
        read_recipe(tmp_path / "recipe.yaml", Composition)
    assert "quote it" in caught.value.problems[0].remedy


WORDS = st.sampled_from(
    ["yes", "Off", "null", "~", "1e5", "e1", ".inf", "a b", "a-b", "org/base", "x.y_z", "a:", "é", ""]
)


@given(st.dictionaries(WORDS, WORDS | st.lists(WORDS, max_size=2) | st.none() | st.integers(), max_size=3))
def test_front_matter_is_written_as_ruamel_writes_it(content: dict[str, Any]) -> None:
    assert dump_yaml(content) == yaml_text.dump_yaml(content)
