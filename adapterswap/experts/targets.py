"""Which modules of an adapter's file PEFT loads: `target_modules` and the keys of adapter_config.json that narrow it.

PEFT creates LoRA layers by the config, then reads their tensors; other tensors in the file are ignored without a
warning. So only targeted modules belong to the expert. What only the base can tell is left to `peft_trial`. Knows names
and PEFT 0.21's rules; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterswap.errors import Problems
from adapterswap.experts.layers import ends_of
from adapterswap.experts.patterns import Matcher
from adapterswap.experts.peft_kinds import TASK_HEADS, PeftKind
from adapterswap.files.smallfiles import shown

__all__ = ["Targets", "read_targets"]

_ALL_LINEAR = "all-linear"
_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."  # the first numbered segment

# PEFT shortens a longer list of names to ends that no other module of the base has; `layers_to_transform` then applies
# to them, but not to full names.
_MOST_NAMES = 19


@dataclass(frozen=True)
class Targets:
    """The modules that an adapter's config targets, as PEFT's `check_target_module_exists` decides it.

    Attributes:
        modules: `target_modules`: names or ends of names, or one regex for whole names; None for PEFT's default, which
            depends on the base.
        excluded: `exclude_modules`, in the same form; None excludes none.
        saved: `modules_to_save`: LoRA is never loaded on or inside these.
        layers: `layers_to_transform`; None for all. Modules named in full are loaded whatever their layer.
        containers: `layers_pattern`: regexes for the list of layers, of which the first that matches counts; empty for
            any list.
        feedforward: for (IA)³, `feedforward_modules`, whose inputs it scales: ends of names, or one regex; None for
            PEFT's default.
    """

    modules: frozenset[str] | str | None = None
    excluded: frozenset[str] | str | None = None
    saved: tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    containers: tuple[str, ...] = ()
    feedforward: frozenset[str] | str | None = None

    @property
    def depend_on_base(self) -> bool:
        """Whether the targets depend on the other modules or the type of the base."""
        if self.modules is None or isinstance(self.modules, str):
            return self.modules is None or self.modules.lower() == _ALL_LINEAR
        return self.layers is not None and len(self.modules) > _MOST_NAMES

    def loaded(self, names: Iterable[str]) -> set[str]:
        """The modules of `names` (full names) for which PEFT would load LoRA factors.

        Raises:
            ValueError: a regex is invalid, or takes more than ten seconds.
        """
        match = Matcher()
        return {name for name in names if self._loads(name, match)}

    def are_feedforward(self, names: Iterable[str]) -> set[str]:
        """The modules of `names` whose inputs (IA)³ scales; raises as `loaded` does."""
        match, ends = Matcher(), self.feedforward or ()
        if isinstance(ends, str):
            return {name for name in names if match(ends, name)}
        return {name for name in names if name.endswith(tuple(ends))}

    def _loads(self, name: str, match: Matcher) -> bool:
        if self.excluded is not None and _selected(self.excluded, name, match):
            return False
        if any(match(rf"(^|.*\.){saved}($|\..*)", name, whole=False) for saved in self.saved):
            return False
        if self.modules is None:
            return True
        if isinstance(self.modules, str) or name in self.modules:  # PEFT checks layers only for ends of names
            return _selected(self.modules, name, match)
        return _selected(self.modules, name, match) and (self.layers is None or self._layer(name, match) in self.layers)

    def _layer(self, name: str, match: Matcher) -> int | None:
        """The number that PEFT takes for the layer of `name`."""
        patterns = [rf"(?:^|.*?\.){container}\.(?P<idx>\d+)\." for container in self.containers] or [_ANY_LAYER]
        for pattern in patterns:
            if layer_match := match(pattern, name, whole=False):
                return None if layer_match["idx"] is None else int(layer_match["idx"])
        return None


def read_targets(content: Mapping[str, Any], where: str, problems: Problems, kind: PeftKind | None = None) -> Targets:
    """The targets in the content of an adapter_config.json; values that PEFT cannot load are reported.

    `kind` is the kind of the adapter; None for LoRA.
    """
    content = {key: value for key, value in content.items() if kind is None or key not in kind.ignored}

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

    saved, lists = content.get("modules_to_save"), content.get("layers_pattern") or ()
    ordered = names("layers_pattern") and ((lists,) if isinstance(lists, str) else tuple(lists))
    targets = Targets(
        modules=names("target_modules"),
        excluded=names("exclude_modules"),
        saved=(
            *(name for name in (saved if isinstance(saved, list) else ()) if isinstance(name, str)),
            *TASK_HEADS.get(str(content.get("task_type")), ()),
        ),
        layers=numbers("layers_to_transform"),
        containers=ordered or (),
        feedforward=names("feedforward_modules") if kind and "feedforward_modules" in kind.inert else None,
    )
    if (
        isinstance(targets.modules, frozenset)
        and isinstance(targets.feedforward, frozenset)
        and not targets.feedforward <= targets.modules
    ):
        problems.add(f"{where}: feedforward_modules has names that target_modules lacks", "Save the adapter again")
    layer_keys = [key for key in ("layers_to_transform", "layers_pattern") if content.get(key) is not None]
    if isinstance(targets.modules, str) and layer_keys and (kind is None or kind.only_lists):
        problems.add(
            f"{where}: {layer_keys[0]} is set beside a regex in target_modules, which PEFT cannot load",
            "Name the modules in a list, or leave the layers to the regex",
        )
    elif targets.containers and "layers_to_transform" not in layer_keys:
        problems.add(
            f"{where}: layers_pattern is set without layers_to_transform, which PEFT cannot load",
            "Remove it, or name the layers in layers_to_transform",
        )
    return targets


def _selected(selection: frozenset[str] | str, name: str, match: Matcher) -> bool:
    if isinstance(selection, str):
        return match(selection, name) is not None
    if name.rpartition(".")[2] in selection:  # as in nearly all configs
        return True
    return any(end in selection for end in ends_of(name))
