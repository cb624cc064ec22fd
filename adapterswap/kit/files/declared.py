"""Data with declared fields: requests, rules, recipes and records, all read in one way.

A class declares its fields as annotations with a default, a description and bounds:

    class Part(Declared):
        path: str = field(description="A folder.")
        weight: float = field(default=1.0, gt=0, description="Its share.")

`Part(path="a")` and `Part.read_content({"path": "a"}, where="recipe.yaml")` read the values as the annotations say, or
raise a `FieldError` that lists every mistake at once; see `kit.files.readers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, get_type_hints

from adapterswap.kit.files.readers import (
    IN_PYTHON,
    REQUIRED,
    Field,
    Mistake,
    Mistakes,
    Read,
    Source,
    explained,
    must_be,
    reader_of,
    with_field,
)

if TYPE_CHECKING:
    from adapterswap.kit.files.yaml import RecipeFile


class Declared:
    """An immutable object with declared fields; see the module.

    Options of a class, which classes that extend it share:

    * `finite`: refuse NaN and infinities.
    * `strict`: take values of exactly the declared types.
    * `checked`: read the arguments when Python makes an object. What a program writes itself is not checked.
    * `unknown`: `refuse` unknown keys, `ignore` them, or `keep` them unread.
    """

    model_fields: ClassVar[Mapping[str, Field]] = MappingProxyType({})
    _finite: ClassVar[bool] = False
    _strict: ClassVar[bool] = False
    _checked: ClassVar[bool] = True
    _unknown: ClassVar[Literal["refuse", "ignore", "keep"]] = "refuse"
    _rest: ClassVar[str] = ""
    """The field that unknown keys belong to, if one holds them."""
    _made_form: ClassVar[_Form]
    _set: frozenset[str]
    _files: tuple[Path, ...] = ()

    def __init_subclass__(
        cls,
        *,
        finite: bool | None = None,
        strict: bool | None = None,
        checked: bool | None = None,
        unknown: Literal["refuse", "ignore", "keep"] | None = None,
    ) -> None:
        options = {"_finite": finite, "_strict": strict, "_checked": checked, "_unknown": unknown}
        for option, value in options.items():
            if value is not None:
                setattr(cls, option, value)

        fields: dict[str, Field] = {}
        own = cls.__dict__
        for name, annotation in own.get("__annotations__", {}).items():
            if name.startswith("_") or "ClassVar" in str(annotation):
                continue
            value = own.get(name, Field())
            fields[name] = value if isinstance(value, Field) else Field(value)
        cls.model_fields = {**cls.model_fields, **fields}

        # An object has its own value of every field, and what has none shall raise an AttributeError.
        for name in fields:
            if name in own:
                delattr(cls, name)

    def __init__(self, **fields: Any) -> None:
        """Raise a `FieldError` with all mistakes."""
        if not self._checked:
            self._become(fields)
            return
        self.__dict__.update(self._explained(fields, type(self).__name__, called=True).__dict__)

    # Reading

    @classmethod
    def model_validate(cls, content: Any) -> Self:
        """Read content that Python made.

        Raises:
            FieldError: lists every mistake.
        """
        return cls._explained(content, cls.__name__, called=True)

    @classmethod
    def read_content(cls, content: Any, *, where: str = "", file: RecipeFile | None = None) -> Self:
        """Read content of any origin.

        Args:
            content: a mapping, or an object of this class.
            where: names the text or the file in messages, unless a part of `file` made the mistake: then that file is
                named. Without it, `content` is arguments, so messages name parameters, which the command line prints
                as flags.
            file: the recipe that the content is from.

        Raises:
            FieldError: lists every mistake.
        """
        return cls._explained(content, where, file)

    @classmethod
    def _explained(cls, content: Any, where: str, file: RecipeFile | None = None, *, called: bool = False) -> Self:
        source = IN_PYTHON
        if where and not called:
            overridden = file.layers[-1].content if file else None
            source = Source(Path(where).parent, overridden)
        try:
            return cls.read_part(content, source)
        except Mistakes as error:
            raise explained(error.mistakes, content, where, file, called=called) from None

    @classmethod
    def read_part(cls, content: Any, source: Source) -> Self:
        """Read content that may be a part of something larger.

        Raises:
            Mistakes: all of them, with their places within the content.
        """
        if isinstance(content, cls):
            return content
        written = content
        try:
            content = cls.prepared(content)
        except ValueError as error:
            raise Mistakes(Mistake.of(error, written)) from None
        if not isinstance(content, Mapping):
            must_be(written, "a mapping")

        # The fields, each under one of its keys
        form = cls._form()
        values: dict[str, Any] = {}
        unknown: dict[Any, Any] = {}
        seen: set[str] = set()
        mistakes: list[Mistake] = []
        for key, value in content.items():
            name = form.names.get(key)
            if name is None:
                unknown[key] = value
                continue
            if name in seen:
                twice = f"is another name for `{name}`, and both are set: remove one"
                mistakes.append(Mistake((cls.model_fields[name].alias,), predicate=twice))
                continue
            seen.add(name)
            try:
                values[name] = form.reads[name](value, source)
            except Mistakes as error:
                mistakes += error.at(key)

        # Those that are missing, and keys that are no field's
        for name in form.required:
            if name not in seen:
                mistakes.append(Mistake.of_missing_key(name))
        cls._read_unknown(unknown, values, mistakes, source)
        if mistakes:
            raise Mistakes(*sorted(mistakes, key=form.place_of))

        # The whole, of which each field is right
        made = cls._of(values)
        try:
            made.check()
            made.check_origin(source)
        except ValueError as error:
            raise Mistakes(Mistake.of(error, written)) from None
        return made

    @classmethod
    def _form(cls) -> _Form:
        """What reading needs of the class, made when it is read for the first time."""
        if "_made_form" not in cls.__dict__:
            cls._made_form = _form_of(cls)
        return cls._made_form

    @classmethod
    def prepared(cls, content: Any) -> Any:
        """The content before any field is read, or a `ValueError`."""
        return content

    @classmethod
    def _read_unknown(
        cls, unknown: Mapping[Any, Any], values: dict[str, Any], mistakes: list[Mistake], source: Source
    ) -> None:
        """Add what is under keys that are not fields to the values, or to the mistakes."""
        if cls._unknown == "keep":
            values.update(unknown)
        elif cls._unknown == "refuse":
            mistakes.extend(Mistake.of_unknown_key(key, cls.known_keys()) for key in unknown)

    @classmethod
    def known_keys(cls) -> list[str]:
        """The keys that content may have."""
        return [*cls._form().names]

    def check(self) -> None:
        """Raise a `ValueError` if fields do not go together."""

    def check_origin(self, source: Source) -> None:
        """Raise a `ValueError` if this may not be written there."""

    # Writing

    def _become(self, values: Mapping[str, Any]) -> None:
        """Take the values of the fields that are set, and the defaults of the others."""
        for name, declared in self.model_fields.items():
            if name in values:
                self.__dict__[name] = values[name]
            elif declared.default is not REQUIRED:
                default = declared.default
                self.__dict__[name] = copy(default) if isinstance(default, dict | list) else default
        self.__dict__.update(values, _set=frozenset(values))

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        made = object.__new__(cls)
        made._become(values)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__}.{name} cannot be changed: use `model_copy(update=…)`")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        compared = {*self.__dict__, *other.__dict__} - {"_set", "_files"}
        return all(getattr(self, name) == getattr(other, name) for name in compared)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = []
        for name, value in self.__dict__.items():
            if not name.startswith("_"):
                fields.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(fields)})"

    @property
    def model_fields_set(self) -> frozenset[str]:
        return self._set

    @property
    def recipe_files(self) -> tuple[Path, ...]:
        """The files that this was read from: the recipe and what it extends. Empty if it was created in Python."""
        return self._files

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy; the values of `update` are not checked."""
        made = copy(self)
        made.__dict__.update(update or {}, _set=self._set | (update or {}).keys())
        return made

    def model_dump(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        include: set[str] | None = None,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """The fields as plain data, also inside lists, mappings and other objects with declared fields.

        Args:
            mode: json writes tuples as lists.
            include: only these fields.
            exclude_unset: without fields that were not set.
            exclude_defaults: without fields that have their default.
            exclude_none: without fields that are None.
        """
        content: dict[str, Any] = {}
        flags = {"exclude_unset": exclude_unset, "exclude_defaults": exclude_defaults, "exclude_none": exclude_none}
        for name, value in self.__dict__.items():
            if name[0] == "_" or (include is not None and name not in include):
                continue
            if exclude_unset and name not in self._set:
                continue
            if exclude_none and value is None:
                continue
            declared = self.model_fields.get(name)
            if exclude_defaults and declared is not None and value == declared.default:
                continue

            plain = value if type(value) in _SCALARS else _data(value, mode, flags)
            if name == self._rest:
                content |= self._dumped_rest(plain, without_defaults=exclude_defaults)
            else:
                content[name] = plain
        return content

    def _dumped_rest(self, values: dict[str, Any], *, without_defaults: bool) -> dict[str, Any]:
        """The keys in the dump for the field that unknown keys belong to."""
        return values

    def model_dump_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"))


class _Reads(dict[str, Read]):
    """Field → how it is read. A reader is made when its field is first set: most fields of a request never are."""

    def __init__(self, cls: type[Declared]) -> None:
        self._cls = cls
        self._hints = types_of(cls)

    def __missing__(self, name: str) -> Read:
        reader = reader_of(self._hints[name], strict=self._cls._strict, finite=self._cls._finite)
        self[name] = with_field(reader.read, self._cls.model_fields[name])
        return self[name]


class _Form(NamedTuple):
    """What reading needs of a class.

    Attributes:
        names: key → field; a field may have two keys.
        reads: field → its reader.
        required: the fields that must be set.
        order: field → its place among the fields.
        rest: the field that unknown keys belong to.
    """

    names: dict[Any, str]
    reads: _Reads
    required: tuple[str, ...]
    order: dict[str, int]
    rest: str

    def place_of(self, mistake: Mistake) -> int:
        """The place of a mistake: fields as they are declared, and unknown keys after them."""
        name = self.names.get(mistake.location[0], self.rest)
        return self.order.get(name, len(self.order))


def _form_of(cls: type[Declared]) -> _Form:
    fields = cls.model_fields
    names: dict[Any, str] = {name: name for name in fields}
    required = []
    for name, declared in fields.items():
        if declared.alias:
            names[declared.alias] = name
        if declared.default is REQUIRED:
            required.append(name)
    order = {name: place for place, name in enumerate(fields)}
    return _Form(names, _Reads(cls), tuple(required), order, cls._rest)


def types_of(cls: type[Declared]) -> dict[str, Any]:
    """The annotated type of each field, with what `Annotated` adds."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.model_fields}


def _data(value: Any, mode: Literal["python", "json"], flags: Mapping[str, Any]) -> Any:
    if isinstance(value, Declared):
        return value.model_dump(mode=mode, **flags)
    if isinstance(value, dict):
        return {key: item if type(item) in _SCALARS else _data(item, mode, flags) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [item if type(item) in _SCALARS else _data(item, mode, flags) for item in value]
        if mode == "json" or isinstance(value, list):
            return items
        return tuple(items)
    return value


_SCALARS = frozenset({str, int, float, bool, NoneType})
