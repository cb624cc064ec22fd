"""Data with declared fields: values are read as pydantic reads them, and all mistakes are named at once."""

from __future__ import annotations

import importlib
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic import Field as PydanticField
from refusals import refused

import adapterswap
from adapterswap.core import Composition, Rule
from adapterswap.core.methods.registry import find_method, names_of
from adapterswap.core.planning.parameters import parameter_keys
from adapterswap.kit.errors import FieldError
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import (
    Field,
    FieldMistake,
    Mistakes,
    Source,
    field,
    read_as,
    read_fields,
    reader_of,
)

NUMBERS = (
    0, 1, 2, -1, 79, 80, 2**70, True, False, 0.0, -0.0, 0.5, 1.0, 1.5, 1e300, math.inf, math.nan, "0", "1", "-1", "01",
    "+1", "-0", "1.0", "0.5", ".5", "5.", "1e3", "1_0", "1__0", " 1", "1 ", "1\n", "nan", "inf", "٣", "³", "9" * 16,
)  # fmt: skip
WORDS = (
    "math", "sw", "base", "", " math", "layer_swap", "ties", "Ties", "linear", "language", "task", "average", "both",
    "A", "a", "none", "1-2", "0-3,5", "5-1", "math+sw", "org/name", "CAUSAL_LM", "attention", "all", "*", "magnitude",
    "encoder", "true", "Off", "y", "a\nb", None, Path("math"),
)  # fmt: skip
EXPERTS = {"experts": {"math": "m", "sw": "s"}}


def values() -> Iterator[Any]:
    atoms = (*NUMBERS, *WORDS)
    yield from atoms
    for atom in atoms:
        yield from (
            [],
            {},
            [atom],
            (atom,),
            [atom, "sw"],
            [atom, 1],
            {"math": atom},
            {"sw": [atom]},
            {"math": {"chain": [atom]}},
        )
        yield {atom: 1}


def exact(value: Any) -> Any:
    """The value with its types: 1, 1.0 and True differ, and a NaN equals itself."""
    if isinstance(value, dict):
        return [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [exact(item) for item in value]
    return type(value).__name__, repr(value)


def holds_truth(value: Any) -> bool:
    """Whether a value is, or holds, true or false, which pydantic reads as 1 and 0."""
    if isinstance(value, Mapping):
        return any(map(holds_truth, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return any(map(holds_truth, value))
    return isinstance(value, bool)


Stack = Literal["encoder", "decoder"]
KINDS: tuple[Any, ...] = (
    str, int, float, bool, Any, Literal["ties", "both"], Literal[1, 2], int | None, float | None, str | None,
    tuple[str, ...], list[int], list[float] | None, tuple[int, int], dict[str, float], dict[str, tuple[str, ...]],
    dict[Stack, int], str | list[str], int | dict[Stack, int], str | dict[str, float], str | int | float | bool,
    dict[str, str | int | float | bool | list[str]], dict[str, dict[str, int | str]], Mapping[str, Any],
)  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_read_as_pydantic_reads_them(kind: Any, strict: bool) -> None:
    """Records are read strictly. The reference takes true for a number, and so it is not asked about that."""
    if strict and kind in (tuple[int, int], Literal[1, 2]):
        pytest.skip("pydantic takes true for 1 even here, and records have no tuples")
    reader, reference = reader_of(kind, strict=strict), TypeAdapter(kind, config=ConfigDict(strict=strict))
    taken = 0
    for value in values():
        if holds_truth(value) and not strict and "bool" not in str(kind):
            continue
        try:
            expected = exact(reference.validate_python(value))
        except ValidationError:
            with pytest.raises(Mistakes):
                reader.read(value, Source())
        else:
            assert exact(reader.read(value, Source())) == expected, value
            taken += 1
    assert taken


@pytest.mark.parametrize(
    "bounds",
    [{"ge": 1}, {"gt": 0, "lt": 1}, {"le": 79}, {"ge": 0, "le": 1}, {"min_length": 1}, {"max_length": 1}],
    ids=str,
)
def test_bounds_are_those_of_pydantic(bounds: dict[str, Any]) -> None:
    kind: Any = list[str] if "min_length" in bounds or "max_length" in bounds else float
    reader, reference = (
        reader_of(Annotated[kind, field(**bounds)]),
        TypeAdapter(Annotated[kind, PydanticField(**bounds)]),
    )
    for value in values():
        if holds_truth(value):
            continue
        try:
            expected = exact(reference.validate_python(value))
        except ValidationError:
            with pytest.raises(Mistakes):
                reader.read(value, Source())
        else:
            assert exact(reader.read(value, Source())) == expected, value


@pytest.mark.parametrize("kind", [int, float, int | None, list[float], dict[str, int], str | int])
def test_true_is_not_a_number(kind: Any) -> None:
    for value in (True, False, [True], {"a": True}):
        with pytest.raises(Mistakes):
            reader_of(kind).read(value, Source())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", 10**400])
def test_numbers_are_finite_where_they_must_be(value: Any) -> None:
    with pytest.raises(Mistakes):
        reader_of(float, finite=True).read(value, Source())


def test_numbers_of_numpy_are_numbers() -> None:
    for number in (np.float32(5), np.float64(5), np.int64(5), np.uint8(5)):
        assert exact(reader_of(int).read(number, Source())) == exact(5)
        assert exact(reader_of(float).read(number, Source())) == exact(5.0)
    for other in (np.bool_(True), np.float32(5.5), np.array([5])):
        with pytest.raises(Mistakes):
            reader_of(int).read(other, Source())


class Part(Declared):
    path: str
    weight: float = field(default=1.0, gt=0)


def _no_spaces(name: str) -> str:
    if " " in name:
        raise FieldMistake("it has a space", "within", remedy="Remove the space")
    return name


class Whole(Declared):
    """A class with every kind of field."""

    name: Annotated[str, field(after=_no_spaces)]
    parts: tuple[Part, ...] = ()
    one: str | Part = ""
    either: Part | str | list[str] = field(default={})
    rules: list[str] | None = field(default=None, alias="lines", before=lambda value: value or None)
    _private: int = 3

    def check(self) -> None:
        if self.name == "wrong":
            raise FieldMistake("the name is wrong", "name", remedy="Write another")


MISTAKES: list[tuple[Any, list[tuple[str | None, str]]]] = [
    ([], [(None, "the recipe is [], but must be a mapping")]),
    ({}, [("name", "`name` is missing")]),
    ({"name": 1, "nmae": 2}, [("name", "`name` is 1, but must be text"), ("nmae", "`nmae` is not a known key")]),
    ({"name": "wrong"}, [("name", "the name is wrong")]),
    ({"name": "a b"}, [("name.within", "`name` is 'a b': it has a space")]),
    (
        {"parts": [{"path": 1, "weight": 0}, 3, {}]},
        [
            ("name", "`name` is missing"),
            ("parts.0.path", "`parts.0.path` is 1, but must be text"),
            ("parts.0.weight", "`parts.0.weight` is 0, but must be more than 0"),
            ("parts.1", "`parts.1` is 3, but must be a mapping"),
            ("parts.2.path", "`parts.2.path` is missing"),
        ],
    ),
    ({"name": "n", "one": {"weight": 2}}, [("one.path", "`one.path` is missing")]),
    ({"name": "n", "one": 5}, [("one", "`one` is 5, but must be text or a mapping")]),
    ({"name": "n", "one": [5]}, [("one", "`one` is [5], but must be text or a mapping")]),
    ({"name": "n", "either": [5]}, [("either.0", "`either.0` is 5, but must be text")]),
    ({"name": "n", "either": None}, [("either", "`either` is None, but must be a mapping or text or a list")]),
    ({"name": "n", "rules": [], "lines": ["x"]}, [("lines", "`lines` is another name for `rules`, and both are set")]),
    ({"name": "n", "lines": [1]}, [("lines.0", "`lines.0` is 1, but must be text")]),
    ({"name": "n", "_private": 1}, [("_private", "`_private` is not a known key")]),
    ({"name": "n", 5: 1, None: 2}, [("5", "`5` is not a known key"), ("None", "`None` is not a known key")]),
]


@pytest.mark.parametrize(("content", "mistakes"), MISTAKES)
def test_every_mistake_is_named_with_its_place(content: Any, mistakes: list[tuple[str | None, str]]) -> None:
    with pytest.raises(FieldError) as caught:
        Whole.read_content(content)
    found = caught.value.problems
    assert [problem.parameter for problem in found] == [parameter for parameter, _ in mistakes]
    for problem, (_, message) in zip(found, mistakes, strict=True):
        assert problem.message.startswith(message)
    with pytest.raises(FieldError, match=r"^here: "):
        Whole.read_content(content, where="here")


def test_an_object_is_data_that_cannot_be_changed() -> None:
    made = Whole(name="n", parts=[{"path": "a"}, Part(path="b", weight=2)], lines=["x"])
    assert made == Whole.model_validate(
        {"rules": ["x"], "name": "n", "parts": ({"path": "a"}, {"path": "b", "weight": "2"})}
    )
    assert made != made.model_copy(update={"name": "m"})
    assert made.model_fields_set == {"name", "parts", "rules"}
    assert made.model_dump(exclude_unset=True) == {
        "name": "n",
        "parts": ({"path": "a"}, {"path": "b", "weight": 2.0}),
        "rules": ["x"],
    }
    assert made.model_dump(mode="json", exclude_defaults=True)["parts"] == [{"path": "a"}, {"path": "b", "weight": 2.0}]
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(AttributeError, match="model_copy"):
        made.name = "m"
    made.either["x"] = 1  # type: ignore[index,call-overload]  # a default is nobody else's
    assert Whole(name="n").either == {}


class Record(Declared, strict=True, finite=True, checked=False, unknown="ignore"):
    rank: int
    error: float = 0.0


class Kept(Record, unknown="keep"):
    """A record whose other keys are kept."""


def test_records_are_read_strictly_and_written_unchecked() -> None:
    assert Record(rank="5").model_dump() == {"rank": "5", "error": 0.0}
    assert Record.read_content({"rank": 5, "error": 1, "other": 2}).model_dump() == {"rank": 5, "error": 1.0}
    assert Kept.read_content({"other": [2], "rank": 5}).model_dump(exclude_unset=True) == {"rank": 5, "other": [2]}
    for wrong in ({"rank": "5"}, {"rank": 5.0}, {"rank": True}, {"rank": 5, "error": math.nan}, {"error": 1}):
        with pytest.raises(FieldError):
            Record.read_content(wrong)


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked(Point):
    def __post_init__(self) -> None:
        read_fields(self)


def test_dataclasses_are_read_too() -> None:
    assert read_as(Point, {"x": 1, "names": ["a"], "other": 2}) == Point(1.0, ("a",))
    with refused(FieldError, "x"):
        read_as(Point, {"names": ["a"]})
    with refused(FieldError, "names.0"):
        read_as(Point, {"x": 1, "names": [3]})
    assert exact(Checked("2", ["a"]).x) == exact(2.0)  # type: ignore[arg-type]
    with refused(FieldError, "x"):
        Checked(math.nan)


def test_a_type_without_a_reader_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="complex"):
        reader_of(complex)
    assert Field().required


def descendants(cls: type[Declared]) -> Iterator[type[Declared]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_field_of_the_package_has_a_reader() -> None:
    """Readers are made when a field is first set, so a type without one would be found late."""
    package = Path(adapterswap.__file__).parent
    for file in package.rglob("*.py"):
        if "import Declared" in file.read_text(encoding="utf-8"):
            importlib.import_module(".".join(file.relative_to(package.parent).with_suffix("").parts))

    own = [cls for cls in descendants(Declared) if cls.__module__.startswith("adapterswap.")]
    for cls in own:
        for name in cls.model_fields:
            assert callable(cls._form().reads[name])
    assert len(own) > 30


@pytest.mark.parametrize(
    ("kind", "around", "at_least"),
    [
        (Composition, {**EXPERTS, "task": "math", "language": "sw"}, 100),
        (Composition, {**EXPERTS, "task": "math", "language": "sw", "method": "ties", "density": 0.5}, 100),
        (Composition, {**EXPERTS, "rules": [{"expert": "math"}]}, 50),
        (Rule, {"layers": "0-3", "blend": {"math": 1.0, "sw": 0.5}}, 50),
        (Rule, {"expert": "math"}, 50),
        (Rule, {"blend": {"math": 1, "sw": 1}, "method": "ties", "density": 0.5}, 50),
    ],
)
def test_one_key_of_a_request_with_every_value(
    kind: type[Composition | Rule], around: dict[str, Any], at_least: int
) -> None:
    """It is read, and what is written of it is read as the same; or it is refused with that key or its rule."""
    keys = [*kind.known_keys(), *parameter_keys(in_rules=kind is Rule), "parameters", "lambda_", "nonsense"]
    taken = 0
    for key in dict.fromkeys(keys):
        for value in values():
            try:
                read = kind.model_validate({**around, key: value})
            except FieldError:
                continue
            written = read.model_dump(exclude_defaults=True)
            again = kind.model_validate(written)
            assert exact(again.model_dump()) == exact(read.model_dump()), (key, value)
            assert kind.model_validate(read.model_dump(mode="json", exclude_unset=True)) == read
            taken += 1
    assert taken >= at_least  # else little was compared


def needing_density() -> list[str]:
    return [name for name in names_of() if any(parameter.required for parameter in find_method(name).parameters)]


@pytest.mark.parametrize("method", sorted(names_of()))
def test_a_method_is_read_or_names_the_parameter_that_it_lacks(method: str) -> None:
    content = {**EXPERTS, "task": "math", "language": "sw", "method": method}
    lacking = {"adamergex": "language"} | dict.fromkeys(needing_density(), "density")
    if method in lacking:
        with refused(FieldError, lacking[method]):
            Composition.model_validate(content)
    else:
        assert Composition.model_validate(content).method == method
