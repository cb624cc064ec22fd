"""The quick reader of declared objects accepts only what pydantic accepts, and makes the same of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapterswap.core import Composition, Rule
from adapterswap.core.methods.registry import names_of
from adapterswap.core.planning.parameters import parameter_keys
from adapterswap.kit.files.plain import Plain

NUMBERS = (
    0, 1, 2, -1, 79, 80, 2**70, True, False, 0.0, -0.0, 0.5, 1.0, 1.5, 1e300, math.inf, math.nan, "0", "1", "-1", "01",
    "+1", "-0", "1.0", "0.5", ".5", "5.", "1e3", "1_0", " 1", "1 ", "1\n", "nan", "inf", "٣", "³", "9" * 16, b"1",
)  # fmt: skip
WORDS = (
    "math", "sw", "base", "", " math", "layer_swap", "ties", "Ties", "linear", "language", "task", "average", "both",
    "A", "a", "none", "1-2", "0-3,5", "5-1", "math+sw", "org/name", "CAUSAL_LM", "attention", "all", "*", "magnitude",
    "encoder", "true", "a\nb", None, Path("math"), b"math",
)  # fmt: skip
EXPERTS = {"experts": {"math": "m", "sw": "s"}}


def values() -> Iterator[Any]:
    atoms = (*NUMBERS, *WORDS)
    yield from atoms
    for atom in atoms:
        yield from ([], {}, [atom], (atom,), [atom, "sw"], {"math": atom}, {"sw": [atom]}, {"math": {"chain": [atom]}})
        if not isinstance(atom, list | dict):
            yield {atom: 1}


def exact(value: Any) -> Any:
    """The value with its types: 1, 1.0 and True differ, and a NaN equals itself."""
    if isinstance(value, dict):
        return [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [exact(item) for item in value]
    return type(value).__name__, repr(value)


def agree(kind: type[Plain], content: dict[str, Any]) -> bool:
    """Whether the quick reader took it; what it takes is compared with what pydantic makes of it."""
    quick = kind.quickly(content)
    if quick is None:
        return False
    slow = kind.of_model(kind.model().model_validate(content))
    assert exact(quick.model_dump()) == exact(slow.model_dump()), content
    assert quick.model_fields_set == slow.model_fields_set, content
    assert quick == slow, content
    return True


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
def test_one_key_with_every_value(kind: type[Plain], around: dict[str, Any], at_least: int) -> None:
    keys = [*kind.model_fields, *kind.aliases(), *parameter_keys(in_rules=kind is Rule), "lambda_", "nonsense"]
    taken = sum(agree(kind, {**around, key: value}) for key in keys for value in values())
    assert taken >= at_least  # else little was compared


@pytest.mark.parametrize("method", sorted(names_of()))
def test_plain_content_needs_no_pydantic(method: str) -> None:
    """Of every method that needs no parameter; the others are refused by both readers."""
    content = {**EXPERTS, "task": "math", "language": "sw", "method": method}
    if Composition.quickly(content) is None:
        with pytest.raises(ValueError, match=method):
            Composition.model().model_validate(content)
