"""A plan in words and characters: the strip of layers, its legend, and what is unusual.

Plain text only, for terminals, logs and model cards. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adapterswap.experts.adapters import Adapter, FullModule, LoraModule
from adapterswap.experts.layers import Kind, format_layers
from adapterswap.experts.sources import public_name, same_base
from adapterswap.planning.allocation import BASE, SPARSE_METHODS, BlendMethod, Rule
from adapterswap.planning.modules import ModulePlan
from adapterswap.planning.plan import Plan

__all__ = [
    "Mark",
    "absence_text",
    "blend_text",
    "differing_bases",
    "draw_strip",
    "error_text",
    "ignored_modules",
    "marks",
    "method_text",
    "owner_label",
    "strip",
    "unusual",
]

_BLEND, _UNCHANGED, _NOTHING, _SEVERAL = "+", ".", " ", "*"


@dataclass(frozen=True)
class Mark:
    """What the strip shows of one module: its place, and its owner or the blend that it holds.

    The average of several experts is an owner like one expert.
    """

    layer: int
    kind: Kind
    owner: str | None
    blend: str = ""


def marks(plan: Plan) -> list[Mark]:
    """A mark for each module that lies in a layer."""
    found = []
    for module in plan:
        owner = owner_label(module.owner, module.rule)
        if module.layer is not None:
            found.append(Mark(module.layer, module.kind, owner, "" if owner else blend_of(module)))
    return found


def owner_label(owner: str | None, rule: Rule | None) -> str | None:
    """What the strip calls the owner: an expert, `base`, or the average that the rule names; None for a blend."""
    return owner or (rule.average_owner if rule else None)


def strip(plan: Plan) -> str:
    """The layers from left (bottom) to right (top), a character each, and a legend."""
    return draw_strip(marks(plan), plan.num_layers, tuple(plan.experts))


def draw_strip(found: Sequence[Mark], num_layers: int, experts: Collection[str]) -> str:
    """See `strip`. One row where attention and MLP agree in every layer, else a row for each."""
    names = {mark.owner: None for mark in found if mark.owner not in (None, BASE)}
    averages = [name for name in names if name is not None and name not in set(experts)]
    letters = _letters([*averages, *experts])
    kinds: tuple[Kind, ...] = ("attention", "mlp", "other")
    rows = {str(kind): _row([mark for mark in found if mark.kind == kind], num_layers, letters) for kind in kinds}
    rows = {kind: row for kind, row in rows.items() if row.strip()}
    if len(set(rows.values())) == 1:
        rows = {"layers": next(iter(rows.values()))}
    width = max(map(len, rows), default=0)
    tens = "".join(str(i // 10) if i % 10 == 0 else " " for i in range(num_layers)).rstrip()
    lines = [f"{'':{width}}  {tens}"] if num_layers > 10 else []
    lines.append(f"{'':{width}}  {''.join(str(i % 10) for i in range(num_layers))}")
    lines += [f"{kind:{width}}  {row}".rstrip() for kind, row in rows.items()]
    lines.append(f"{'':{width}}  {_legend(found, ''.join(rows.values()), letters)}")
    return "\n".join(lines)


def unusual(plan: Plan) -> list[str]:
    """What a reader should know beside the strip: modules outside the layers, and experts that lack a module."""
    lines = [*differing_bases(plan.experts, plan.composition.base_model), *ignored_modules(plan.experts)]
    grouped: dict[tuple[str, str], list[int]] = {}
    for saved in plan.saved.values():
        what = _remark(saved) or owner_label(saved.owner, saved.rule) or blend_text(saved.weights)
        lines.append(f"{saved.name} (trained in full): {what}")
    for module in plan:
        remark = _remark(module)
        if module.layer is None:
            lines.append(f"{module.name}: {remark or owner_label(module.owner, module.rule) or blend_of(module)}")
        elif remark:
            within = module.name.partition(f".{module.layer}.")[2]
            grouped.setdefault((within, remark), []).append(module.layer)
    lines += [f"{name} in layers {format_layers(layers)}: {remark}" for (name, remark), layers in grouped.items()]
    empty = set(range(plan.num_layers)) - {module.layer for module in plan}
    if empty:
        lines.append(f"layers {format_layers(empty)}: no expert adapts them, so they stay as in the base")
    return lines


def ignored_modules(experts: Mapping[str, Adapter]) -> list[str]:
    """A line for each expert with modules in its file that PEFT would not load."""
    return [
        f"{name}: {len(adapter.ignored)} modules in its file are left out, since its config does not target them and "
        f"PEFT would not load them ({adapter.ignored[0]}{', …' * (len(adapter.ignored) > 1)})"
        for name, adapter in experts.items()
        if adapter.ignored
    ]


def differing_bases(experts: Mapping[str, Adapter], declared: str | None) -> list[str]:
    """A line where adapters name different bases, or revisions of one, and are composed since one base is declared."""
    configs = [adapter.config for adapter in experts.values()]
    if declared is None or all(
        same_base(config.base_model, configs[0].base_model) and config.revision == configs[0].revision
        for config in configs
    ):
        return []
    named = [
        f"{name}: {public_name(adapter.config.base_model) or 'none'}"
        + (f"@{adapter.config.revision}" if adapter.config.revision else "")
        for name, adapter in experts.items()
    ]
    return [f"Warning: the experts name different bases ({', '.join(named)}); base_model declares them to be one"]


def blend_text(coefficients: Mapping[str, float]) -> str:
    """A blend in words: `0.5·math + 0.5·swahili`."""
    return " + ".join(f"{factor:.4g}·{name}" for name, factor in coefficients.items()) or BASE


def blend_of(module: ModulePlan[LoraModule]) -> str:
    """A module's blend in words, with its method and what its weights wait for."""
    return method_text(module.rule, module.weights, module.rule.method)


def method_text(rule: Rule | None, weights: Mapping[str, float], method: BlendMethod) -> str:
    """A blend of a rule's sides in words, with its method and what its weights wait for."""
    text = blend_text(weights)
    if rule is None:
        return text
    if method != "linear":
        kept = f" at density {rule.density:g}" if method in SPARSE_METHODS else ""
        text = f"{method}({text}){kept}"
    return f"{text}, weighted by magnitude" if rule.weights else text


def error_text(error: float) -> str:
    """A relative error with three decimals, or `< 0.001` where these would hide it."""
    return "< 0.001" if 0 < error < 0.0005 else f"{error:.3f}"


def absence_text(weights: Mapping[str, float], absent: Sequence[str], *, stays: bool) -> str:
    """What a rule asked for, and the experts that do not adapt the module; `stays` says that none does."""
    asked = blend_text(weights) if len(weights) > 1 else next(iter(weights))
    rest = "it stays as in the base" if stays else "its ΔW counts as zero"
    return f"{asked}, but {' and '.join(absent)} does not adapt it: {rest}"


def _remark(module: ModulePlan[LoraModule] | ModulePlan[FullModule]) -> str:
    return absence_text(module.weights, module.absent, stays=not module.terms) if module.absent else ""


def _letters(names: Iterable[str]) -> dict[str, str]:
    """A letter for each expert, from its own name as long as one is free."""
    letters: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix("mean(")  # as compositions call the average of a side
        candidates = [*plain.lower(), *plain.upper(), *"0123456789abcdefghijklmnopqrstuvwxyz"]
        free = (c for c in candidates if c.isalnum() and c.isascii() and c not in letters.values())
        letters[name] = next(free, "?")
    return letters


def _mark(mark: Mark, letters: Mapping[str, str]) -> str:
    if mark.owner is None:
        return _BLEND
    return _UNCHANGED if mark.owner == BASE else letters[mark.owner]


def _row(found: Sequence[Mark], num_layers: int, letters: Mapping[str, str]) -> str:
    cells: list[set[str]] = [set() for _ in range(num_layers)]
    for mark in found:
        cells[mark.layer].add(_mark(mark, letters))
    return "".join(_SEVERAL if len(cell) > 1 else next(iter(cell), _NOTHING) for cell in cells)


def _legend(found: Sequence[Mark], used: str, letters: Mapping[str, str]) -> str:
    blends = sorted({mark.blend for mark in found if mark.owner is None})
    entries = [f"{letter} {name}" for name, letter in letters.items() if letter in used]
    entries += [f"{_BLEND} {' or '.join(blends)}"] if _BLEND in used else []
    entries += [f"{_UNCHANGED} base"] if _UNCHANGED in used else []
    entries += [f"{_SEVERAL} differs by module"] if _SEVERAL in used else []
    return ", ".join(entries)
