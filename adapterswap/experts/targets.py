"""Which modules of an adapter's file PEFT loads: `target_modules` and the keys of adapter_config.json that narrow it.

PEFT creates LoRA layers by the config, then reads their tensors; other tensors in the file are ignored without a
warning. So only targeted modules belong to the expert. Knows names and PEFT 0.21's rules; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterswap.errors import Problems
from adapterswap.experts.layers import ends_of
from adapterswap.experts.patterns import Matcher
from adapterswap.files.smallfiles import shown

__all__ = ["Targets", "read_targets"]

_ALL_LINEAR = "all-linear"
# PEFT's own reading of `layers_to_transform`: the first numbered segment is the layer.
_ANY_LIST = r"[^.]*"


@dataclass(frozen=True)
class Targets:
    """The modules that an adapter's config targets, as PEFT's `check_target_module_exists` decides it.

    Attributes:
        modules: `target_modules`: names or ends of names, or one regex for whole names; None targets all.
        excluded: `exclude_modules`, in the same form; None excludes none.
        saved: `modules_to_save`: LoRA is never loaded on or inside these.
        layers: `layers_to_transform`; None for all. Modules named in full are loaded whatever their layer.
        containers: `layers_pattern`: regexes for the list of layers; empty for any list.
    """

    modules: frozenset[str] | str | None = None
    excluded: frozenset[str] | str | None = None
    saved: tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    containers: tuple[str, ...] = ()

    def loaded(self, names: Iterable[str]) -> set[str]:
        """The modules of `names` (full names) for which PEFT would load LoRA factors.

        Raises:
            ValueError: a regex is invalid, or takes more than ten seconds.
        """
        match = Matcher()
        return {name for name in names if self._loads(name, match)}

    def _loads(self, name: str, match: Matcher) -> bool:
        if self.excluded is not None and _selected(self.excluded, name, match):
            return False
        if any(match(rf"(?:^|.*\.){saved}(?:$|\..*)", name) for saved in self.saved):
            return False
        if self.modules is None or self.modules == _ALL_LINEAR:
            return True
        if isinstance(self.modules, str) or name in self.modules:  # PEFT checks layers only for ends of names
            return _selected(self.modules, name, match)
        return _selected(self.modules, name, match) and (self.layers is None or self._layer(name, match) in self.layers)

    def _layer(self, name: str, match: Matcher) -> int | None:
        """The number that PEFT takes for the layer of `name`."""
        for container in self.containers or (_ANY_LIST,):
            start = r".*?\." if container == _ANY_LIST else r"(?:^|.*?\.)"
            if layer_match := match(rf"{start}{container}\.(?P<layer>\d+)\..*", name):
                return int(layer_match["layer"])
        return None


def read_targets(content: Mapping[str, Any], where: str, problems: Problems) -> Targets:
    """The targets in the content of an adapter_config.json; values of a wrong type are reported."""

    def names(key: str) -> frozenset[str] | str | None:
        value = content.get(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return frozenset(value)
        problems.add(
            f"{where}: {key} is {shown(value)}, which is neither a list of names nor a regex", "Save the adapter again"
        )
        return None

    def numbers(key: str) -> frozenset[int] | None:
        value = content.get(key)
        if value is None or value == []:
            return None
        values = value if isinstance(value, list) else [value]
        if all(type(item) is int for item in values):
            return frozenset(values)
        problems.add(f"{where}: {key} is {shown(value)}, which is not a list of layers", "Save the adapter again")
        return None

    patterns = names("layers_pattern")
    saved = content.get("modules_to_save")
    return Targets(
        modules=names("target_modules"),
        excluded=names("exclude_modules"),
        saved=tuple(name for name in saved if isinstance(name, str)) if isinstance(saved, list) else (),
        layers=numbers("layers_to_transform"),
        containers=(patterns,) if isinstance(patterns, str) else tuple(sorted(patterns or ())),
    )


def _selected(selection: frozenset[str] | str, name: str, match: Matcher) -> bool:
    if isinstance(selection, str):
        return match(selection, name) is not None
    if name.rpartition(".")[2] in selection:  # as in nearly all configs
        return True
    return any(end in selection for end in ends_of(name))
