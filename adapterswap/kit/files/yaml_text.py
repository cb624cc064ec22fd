"""YAML 1.2 by ruamel.yaml, with bounds that also hold after aliases are followed.

Control characters are refused, and only plain keys are accepted, each once, even next to a `<<`.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Hashable
from itertools import chain
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError, YAMLWarning
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.reader import Reader
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from adapterswap.kit.files.text import shown

_MAX_VALUES = 20_000  # keys, values and items of a recipe once its aliases are followed
_MAX_DEPTH = 40
_PREFIX = "tag:yaml.org,2002:"


class _Resolver(VersionedResolver):
    """Reads `yes` and `no` as booleans. They are text in YAML 1.2, but `do_sample: no` is meant as false."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0] and re.fullmatch("yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", value):
            return Tag(suffix=f"{_PREFIX}bool")
        return super().resolve(kind, value, implicit)


class _Constructor(SafeConstructor):
    """Stricter than the library, and reports the line and column of an invalid value."""

    def construct_document(self, node: Node) -> Any:
        """Follow aliases first: the library counts what is written, and a few lines can become billions of copies."""
        stack, count = [(node, 1)], 1
        while stack:
            part, depth = stack.pop()
            if isinstance(part, ScalarNode):
                continue

            inner = part.value
            if isinstance(part, MappingNode):
                self._check_keys(part)
                inner = list(chain.from_iterable(inner))

            count += len(inner)
            if count > _MAX_VALUES or (inner and depth == _MAX_DEPTH):
                raise _refusal(f"it contains more than {_MAX_VALUES} values or {_MAX_DEPTH} levels", part)
            stack += [(item, depth + 1) for item in inner]
        return super().construct_document(node)

    def _check_keys(self, mapping: MappingNode) -> None:
        """Refuse lists as keys and repeated keys next to a `<<`, both of which the library accepts."""
        names: set[Any] = set()
        for key, _ in mapping.value:
            name = key.value if key.tag == f"{_PREFIX}merge" else self.construct_object(key)
            if not isinstance(name, Hashable):
                raise _refusal("a key must be a plain value", key)
            if name in names:
                raise _refusal(f"the key {shown(name)} appears twice", key)
            names.add(name)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str) and (odd := Reader.NON_PRINTABLE.search(value)):
                raise ValueError(f"it contains the control character {odd[0]!r}")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise ValueError("it is too large")
            return value
        except (ValueError, LookupError, ArithmeticError) as error:  # the library raises them for `2001-99-99` as well
            raise _refusal(
                f"{shown(node.value)} is not a valid {str(node.tag).rpartition(':')[2]}: {error}", node
            ) from None


for _tag in ("binary", "omap", "pairs", "set"):
    _Constructor.add_constructor(_PREFIX + _tag, SafeConstructor.construct_undefined)


class _Representer(RoundTripRepresenter):
    """Writes `null` in full: a key without a value looks like an oversight."""


_Representer.add_representer(type(None), lambda writer, _: writer.represent_scalar(f"{_PREFIX}null", "null"))


def parse_yaml(text: str) -> Any:
    """The value in a YAML text."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Constructor, yaml.max_depth = _Resolver, _Constructor, _MAX_DEPTH
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", YAMLWarning)  # an anchor that is defined twice
            return yaml.load(text)
    except (YAMLError, YAMLWarning) as error:
        # Leave out advice for programmers, and carets that point into a line shown above.
        reason = re.sub(r", if necessary increase .*|\^ \(line: \d+\)", "", str(error))
        raise ValueError(" ".join(reason.split()).replace('in "<unicode string>", ', "at ")) from None


def round_trip() -> YAML:
    """A reader and writer that keeps comments, for editing YAML; it writes plain data in block style."""
    yaml = YAML()
    yaml.Resolver, yaml.Representer = _Resolver, _Representer
    yaml.preserve_quotes, yaml.width = True, 10**6
    return yaml


def dump_yaml(content: Any) -> str:
    """`content` as YAML, in the order of its keys."""
    stream = io.StringIO()
    round_trip().dump(content, stream)
    return stream.getvalue()


def _refusal(problem: str, node: Node) -> YAMLError:
    return YAMLError(f"{problem} at line {node.start_mark.line + 1}, column {node.start_mark.column + 1}")
