"""Recipes as YAML: read safely, and extended from shipped or local fragments.

Shipped recipes are in `recipes/` of a checkout, and inside the installed package. Those in `train/`, `compose/` and
`sweep/` are complete; the other folders hold fragments. A recipe extends fragments by a path relative to the file that
names them, or by the name of a shipped one, without suffix. Fragments are merged in the order listed, and the recipe
itself comes last: mappings are merged key by key, everything else is replaced (also by `null`).

`kit.files.declared` checks their content.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from adapterswap.kit.errors import ArgumentError, FieldError, NotFoundError, Problems, check_type, did_you_mean
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.text import expand, read_small, shown

_MAX_BYTES = 2**18  # of a recipe; ruamel.yaml takes some five seconds for the worst of this size

_Declared = TypeVar("_Declared", bound=Declared)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file."""
    path = Path(path)
    if not os.path.exists(path):
        raise NotFoundError(f"{path} does not exist", "Pass the path of a recipe (YAML)", parameter="recipe")

    raw = read_small(path, "Pass the path of a recipe (YAML)", limit=_MAX_BYTES, kind=FieldError)
    try:
        content = parse_yaml(raw.decode("utf-8"))
    except ValueError as error:
        raise FieldError(f"{path} is not valid YAML: {error}", "Correct the file there") from None

    if content is None:
        raise FieldError(f"{path} is empty", "Write `key: value` lines")
    if not isinstance(content, dict):
        raise FieldError(f"{path} contains a {type(content).__name__}, not a mapping", "Write `key: value` lines")
    return content


def parse_yaml(text: str) -> Any:
    """The value in a YAML text; a `ValueError` says why there is none."""
    from adapterswap.kit.files import yaml_text  # ruamel.yaml takes longer to import than composing

    return yaml_text.parse_yaml(text)


def dump_yaml(content: Any) -> str:
    """`content` as YAML, in the order of its keys."""
    plain = _as_plain_lines(content)
    if plain is not None:
        return plain

    from adapterswap.kit.files import yaml_text

    return yaml_text.dump_yaml(content)


# Words that every reader of YAML takes for text, and those among them that it does not.
_WORD = re.compile(r"[A-Za-z][\w.-]*(/[\w.-]+)?", re.ASCII)
_NO_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def _as_plain_lines(content: Any) -> str | None:
    """A mapping of words, and of lists of words, as YAML, such as the front matter of a card; None for other content.

    ruamel.yaml writes the same, but takes longer to import than composing.
    """
    if not isinstance(content, dict) or not content:
        return None

    lines, words = [], [*content]
    for key, value in content.items():
        if isinstance(value, list) and value:
            lines.append(f"{key}:")
            lines += [f"- {word}" for word in value]
            words += value
        else:
            lines.append(f"{key}: {value}")
            words.append(value)

    for word in words:
        if not isinstance(word, str) or not _WORD.fullmatch(word) or word.lower() in _NO_TEXT:
            return None
    return "\n".join(lines) + "\n"


def shipped_folder() -> Path:
    """The folder of the shipped recipes: in the package or, in a checkout, beside it."""
    package = Path(__file__).parents[2]
    installed = package / "shipped_recipes"
    if installed.is_dir():
        return installed
    return package.parent / "recipes"


def shipped_recipes(kind: str = "") -> dict[str, Path]:
    """The shipped recipes as name → file; with `kind`, only those in that folder, such as `train`."""
    folder = shipped_folder()
    recipes = sorted((folder / kind).rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in recipes}


MARKS = {"train": "datasets", "compose": "experts", "sweep": "task_experts"}
"""Kind of recipe → the key that every recipe of this kind has, and no recipe of another kind."""


def find_recipe(reference: str | Path, kind: str = "") -> Path:
    """The recipe's file: `reference` itself if it is a file, else the shipped recipe of that name."""
    path = expand(reference)
    if os.path.exists(path) and not path.is_dir():  # a pipe or a device is refused when it is read
        return path

    shipped = shipped_recipes(kind)
    if str(reference) in shipped:
        return shipped[str(reference)]
    if str(reference) in shipped_recipes():
        raise _other_kind(reference, str(reference).partition("/")[0], kind)

    remedy = f"Use a YAML file, or {_near_names(str(reference), kind)}"
    if os.path.exists(path / "adapter_config.json"):
        if kind == "compose":
            remedy = "Pass experts with `task_expert` and `language_expert`"
        raise ArgumentError(f"{reference} is an adapter, not a recipe", remedy, parameter="recipe")
    reason = "is a folder" if path.is_dir() else "is neither a file nor a shipped recipe"
    raise NotFoundError(f"The recipe {reference} {reason}", remedy, parameter="recipe")


def _near_names(name: str, kind: str = "") -> str:
    """What to use instead of `name`, as the end of a sentence: the most similar shipped names."""
    import difflib

    near = difflib.get_close_matches(name, shipped_recipes(kind), n=3, cutoff=0.4)
    if not near:
        return "a name that `adapterswap recipes ls` lists"
    return f"a name that `adapterswap recipes ls` lists, such as {', '.join(near)}"


_MAX_FRAGMENTS = 8  # fragments that extend fragments
_MAX_FILES = 64  # in total, counting a fragment each time it is named

Location = Sequence[int | str]
"""The keys and list positions that lead to a value."""


@dataclass(frozen=True)
class Layer:
    """The content of one file, without its `extends`."""

    path: Path
    content: dict[str, Any]


@dataclass(frozen=True)
class RecipeFile:
    """A recipe as plain data, and the files that it consists of.

    Attributes:
        content: what the files and the overrides say together.
        layers: the files in the order in which they are merged, the recipe itself, and then the keys of overrides.
    """

    content: dict[str, Any]
    layers: Sequence[Layer]

    @staticmethod
    def read(path: str | Path, overrides: Iterable[str] = (), *, paths: Iterable[str] = ()) -> RecipeFile:
        """Read a recipe.

        Args:
            path: the recipe.
            overrides: see `apply_overrides`.
            paths: keys whose values may be local paths; `*` matches any one key or position. If a fragment sets such a
                path and it exists relative to the fragment, it is made relative to the recipe's folder.
        """
        layers: list[Layer] = []
        _collect(Path(path), (), layers)
        content: Any = merge_layers(layers)
        for pattern in paths:
            content = _relocated(content, pattern.split("."), (), layers)
        overrides = list(overrides)
        return RecipeFile(apply_overrides(content, overrides), [*layers, Layer(Path(path), _overridden(overrides))])

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, each once."""
        return tuple(dict.fromkeys(layer.path for layer in self.layers))

    @property
    def kind(self) -> str:
        """Its kind: train, compose or sweep.

        Raises:
            FieldError: it has the mark of none, or of several.
        """
        kinds = [name for name, mark in MARKS.items() if mark in self.content]
        if len(kinds) == 1:
            return kinds[0]

        remedy = ""
        if not kinds:
            remedies = [did_you_mean(key, MARKS.values(), "") for key in sorted(self.content)]
            remedy = next(filter(None, remedies), "")

        number = "several" if kinds else "none"
        marks = ", ".join(f"`{mark}` ({name})" for name, mark in MARKS.items())
        raise FieldError(
            f"{self.layers[-1].path} must have exactly one of these keys, but has {number}: {marks}",
            remedy or "Pass a whole recipe; to check a fragment, check a recipe that extends it",
            parameter="path",
        )

    def with_names(self, name_of: Callable[[Path], str]) -> str:
        """The recipe's own text, comments included, with `name_of` each file that it extends in its `extends`."""
        from adapterswap.kit.files import yaml_text

        yaml, text, file = yaml_text.round_trip(), io.StringIO(), self.layers[-1].path
        content = yaml.load(file.read_text(encoding="utf-8"))
        if "extends" in content:
            content["extends"] = [name_of(_find_fragment(name, file)) for name in _take_names(dict(content), file)]
        yaml.default_flow_style = None  # the new list goes on one line; the rest keeps its style
        yaml.dump(content, text)
        return text.getvalue()

    def is_overridden(self, location: Location) -> bool:
        """Whether the overrides set the value at `location`, or a value above it as a whole."""
        return bool(location) and _sets(self.layers[-1].content, location)

    def source_of(self, location: Location) -> Path | None:
        """The file that set the value at `location`, or a value above it as a whole; None if no file did."""
        return _source_of(location, self.layers)


def _source_of(location: Location, layers: Sequence[Layer]) -> Path | None:
    for layer in reversed(layers):
        if _sets(layer.content, location):
            return layer.path
    return None


def _collect(path: Path, chain: tuple[Path, ...], layers: list[Layer]) -> None:
    """Append to `layers` what `path` extends, then its own content; `chain` is the files that led to it."""
    route = " → ".join(map(str, (*chain, path)))
    if path.resolve() in (earlier.resolve() for earlier in chain):
        raise FieldError(
            f"Recipes extend each other in a circle: {route}", "Remove one of these `extends`", parameter="extends"
        )
    if len(chain) > _MAX_FRAGMENTS:
        raise FieldError(
            f"Recipes extend each other more than {_MAX_FRAGMENTS} deep: {route}",
            "Use fewer levels",
            parameter="extends",
        )

    content = load_yaml(path)
    problems = Problems(FieldError)
    for name in _take_names(content, path):
        with problems.collect():
            _collect(_find_fragment(name, path), (*chain, path), layers)
    problems.raise_if_any()

    if len(layers) == _MAX_FILES:
        raise FieldError(
            f"The recipe extends more than {_MAX_FILES} files: {route}", "Extend fewer files", parameter="extends"
        )
    layers.append(Layer(path, content))


def _take_names(content: dict[str, Any], path: Path) -> list[str]:
    """The fragments that the recipe at `path` extends. Removes the `extends` key from `content`."""
    value = content.pop("extends", None)
    if value is None:
        return []

    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise FieldError(
            f"{path}: extends is {shown(value)}, but must be a name or a list of names",
            "Name files relative to this one, or shipped fragments such as data/swahili",
            parameter="extends",
        )
    return names


def _find_fragment(name: str, path: Path) -> Path:
    """The file to which `name` refers in the recipe at `path`."""
    local = path.parent / expand(name)
    if os.path.exists(local) and local.is_file():
        return local
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    raise FieldError(
        f"{path}: extends names {shown(name)}, which is neither a file nor a shipped recipe",
        f"Use a path relative to this file, or {_near_names(name)}",
        parameter="extends",
    )


def merge_layers(layers: Sequence[Layer]) -> dict[str, Any]:
    """Merge the contents of the files; later files override earlier ones."""
    return reduce(_merge, (layer.content for layer in layers), {})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = below | above
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merge(below[key], value)
    return merged


def _sets(content: Any, location: Location) -> bool:
    for step in location:
        if not isinstance(content, dict):
            return True  # a plain value or a list is set as a whole
        if step not in content:
            return False
        content = content[step]
    return True


def apply_overrides(content: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return `content` with each `key=value` of `overrides` applied; `a.b.0.c` reaches into mappings and lists.

    Values are read as YAML (`3e-4`, `true`, `[a, b]`). `content` itself is not changed.
    """
    import copy

    content = copy.deepcopy(content)
    for override in overrides:
        check_type(override, str, "overrides", "Pass texts such as training.seed=1")
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ArgumentError(
                f"`overrides`: {override!r} is not key=value",
                "Write it like training.seed=1",
                parameter="overrides",
            )
        try:
            value = parse_yaml(text)
        except ValueError:
            value = text

        place: Any = content
        *parents, last = path.split(".")
        for step in parents:
            place = place.setdefault(step, {}) if isinstance(place, dict) else _item(place, step, override)

        if isinstance(place, dict):
            place[last] = value
        else:
            _item(place, last, override)
            place[int(last)] = value
    return content


def _item(place: Any, step: str, override: str) -> Any:
    if not isinstance(place, list) or not step.isdecimal() or int(step) >= len(place):
        raise ArgumentError(
            f"`overrides`: {override!r}: there is nothing at {step!r}",
            "Use keys of the recipe, and list positions counted from 0",
            parameter="overrides",
        )
    return place[int(step)]


def check_kind(content: Mapping[str, Any], kind: str, path: str | Path) -> None:
    other = next((name for name, mark in MARKS.items() if mark in content), kind)
    if other != kind and MARKS[kind] not in content:
        raise _other_kind(path, other, kind)


def _other_kind(reference: str | Path, other: str, kind: str) -> FieldError:
    if other not in MARKS:
        return FieldError(
            f"{reference} is a part of recipes, not a whole one",
            f"Name it in `extends:` of a recipe for `{kind}`",
            parameter="recipe",
        )
    return FieldError(
        f"{reference} is a recipe for `adapterswap {other}`, not for `adapterswap {kind}`",
        f"Run `adapterswap {other} {reference}`, or pass a recipe with `{MARKS[kind]}:`",
        parameter="recipe",
    )


def _relocated(value: Any, steps: Sequence[str], location: tuple[int | str, ...], layers: Sequence[Layer]) -> Any:
    """`value` with the local paths at `steps` below it made relative to the recipe's folder."""
    if steps:
        moved: Any
        if isinstance(value, dict):
            moved, items = dict(value), list(value.items())
        elif isinstance(value, list):
            moved, items = list(value), list(enumerate(value))
        else:
            return value

        for key, item in items:
            if steps[0] in ("*", key):
                moved[key] = _relocated(item, steps[1:], (*location, key), layers)
        return moved

    recipe, source = layers[-1].path, _source_of(location, layers)
    if not isinstance(value, str) or source in (None, recipe) or not os.path.exists(source.parent / value):
        return value
    return os.path.relpath(source.parent / value, recipe.parent)


def _overridden(overrides: Iterable[str]) -> dict[str, Any]:
    """The keys that `overrides` name, as a file would nest them."""
    nested: dict[Any, Any] = {}
    for override in overrides:
        steps: list[int | str] = []
        for text in override.partition("=")[0].split("."):
            steps.append(int(text) if text.isdecimal() else text)

        *parents, last = steps
        place = nested
        for step in parents:
            place = place.setdefault(step, {})
            if not isinstance(place, dict):  # replaced as a whole by an earlier override
                break
        else:
            place[last] = None
    return nested


def read_recipe(
    path: str | Path,
    declared: type[_Declared],
    overrides: Iterable[str] = (),
    *,
    paths: Iterable[str] = (),
    kind: str | None = None,
) -> _Declared:
    """Read the YAML file at `path` and what it extends, apply `overrides`, and check the result.

    Args:
        path: the recipe.
        declared: the class with its fields.
        overrides: see `apply_overrides`.
        paths: keys of local paths, such as `datasets.*.path`; see `RecipeFile.read`.
        kind: one of `MARKS`; a recipe of another kind is refused as such.

    Raises:
        NotFoundError: the file does not exist.
        FieldError: lists every mistake in the recipe.
    """
    file = RecipeFile.read(path, overrides, paths=paths)
    if kind is not None:
        check_kind(file.content, kind, path)
    recipe = declared.read_content(file.content, where=str(path), file=file)
    recipe._files = file.files
    return recipe
