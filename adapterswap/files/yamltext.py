"""YAML that may come from a stranger: safe, bounded, and sound.

No object construction, no key twice, no control characters; the size is bounded, also after aliases are followed. Knows
nothing of what the values mean.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from adapterswap.errors import AdapterswapError
from adapterswap.files.smallfiles import exists, read_small, shown

__all__ = ["load_yaml", "parse_yaml"]

_MAX_BYTES = 2**18  # of a recipe; PyYAML takes about ten seconds for a megabyte
_MAX_VALUES = 20_000  # keys, values and items of a recipe once its aliases are followed
_MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """YAML says that keys are unique; PyYAML keeps the last one in silence."""

    merged = 0

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *shared` may be overridden, that is its point
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {shown(key)} stands twice", node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Carry out `<<`, which copies; a few lines of YAML can ask for billions of copies."""
        merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        if len(merges) > 1 or any(isinstance(value, yaml.SequenceNode) for value in merges):
            raise yaml.constructor.ConstructorError(None, None, "`<<` takes one mapping", node.start_mark)
        super().flatten_mapping(node)
        self.merged += len(node.value) if merges else 0
        if self.merged > _MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, "`<<` copies too much", node.start_mark)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        AdapterswapError: the file cannot be read, is no regular file, larger than 256 KiB, not UTF-8, not YAML, or no
            mapping; it holds a key twice, a control character, or more than 20,000 values once aliases are followed.
    """
    path = Path(path)
    if not exists(path):
        raise AdapterswapError(f"{path} does not exist", "Give the path of a recipe (YAML)")
    raw = read_small(path, "Give the path of a recipe (YAML)", limit=_MAX_BYTES)
    try:
        content = parse_yaml(raw.decode("utf-8"))
    except ValueError as error:
        raise AdapterswapError(f"{path} is not valid YAML: {error}", "Correct the file there") from None
    if content is None:
        raise AdapterswapError(f"{path} is empty", "Write `key: value` lines")
    if not isinstance(content, dict):
        raise AdapterswapError(
            f"{path} holds {type(content).__name__}, not keys with values", "Write `key: value` lines"
        )
    return content


def parse_yaml(text: str) -> Any:
    """The value in a YAML text.

    Raises:
        ValueError: with the reason why there is none that is sound.
    """
    try:
        content = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split()).replace('in "<unicode string>", ', "at ")) from None
    _check_values(content)
    return content


def _check_values(content: Any) -> None:
    """Aliases share a value in memory, but whoever walks through the content meets it anew each time."""
    stack = [(content, 1)]
    for _ in range(_MAX_VALUES):
        if not stack:
            return
        value, depth = stack.pop()
        inner: list[Any] = []
        if isinstance(value, dict):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            inner = list(value)
        elif isinstance(value, str) and (odd := next((c for c in value if _is_control(c)), None)):
            raise ValueError(f"{shown(value)} holds the control character {odd!r}")
        elif isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{shown(value)} is too large a number")
        if inner and depth == _MAX_DEPTH:
            raise ValueError(f"it nests more than {_MAX_DEPTH} deep")
        stack += [(item, depth + 1) for item in inner]
    raise ValueError(f"it holds more than {_MAX_VALUES} values")


def _is_control(character: str) -> bool:
    """What can steer a terminal or is no character at all; line ends and tabs are text."""
    return unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t\r"
