"""A plan as text and in a notebook: the strip of layers, its legend, and remarks on what is unusual.

The colours are Okabe and Ito's (2008), which colour-blind readers can tell apart. Every cell also holds its letter, so
nothing depends on the colours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple, get_args

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.layers import Depth, Kind, ModuleName, NumLayers, Stack, format_layers
from adapterswap.core.model.sources import Records, Reference, same_base
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.planning.slots import Slot, blend_text, mixture
from adapterswap.kit.errors import AdapterswapError, and_more, printable

_BLEND, _UNCHANGED, _NOTHING, _SEVERAL = "+", ".", " ", "*"
_SHOWN = 8  # experts in a summary
_LEGEND = 200  # characters of a summary's legend


class Mark(NamedTuple):
    """What the strip shows of one module: its place, and its owner or blend.

    The average of several experts counts as an owner. `stack` is set only for models with an encoder and a decoder.
    """

    layer: int
    kind: Kind
    owner: str | None
    blend: str = ""
    stack: Stack | None = None


class Composed(NamedTuple):
    """An expert that was composed itself, as its own record says.

    Where it is the only expert of a result, the strip shows its owners: its own name would say nothing.

    Attributes:
        name: the expert's.
        rules: those by which it was composed; the first that matches decides.
        experts: what it was composed of, in order.
    """

    name: str
    rules: tuple[Rule, ...]
    experts: tuple[str, ...]

    @staticmethod
    def of(records: Mapping[str, Mapping[str, Any]]) -> list[Composed]:
        """The only expert, if it was composed; then the only expert that this one was composed of, and so on.

        Args:
            records: the content of each expert's own record, as plain data; empty where there is none. It is not
                trusted: what cannot be read counts as not composed.
        """
        found: list[Composed] = []
        while len(records) == 1:
            [(name, content)] = records.items()
            experts = content.get("experts")
            if not isinstance(experts, Mapping) or not content.get("rules"):
                break

            try:
                rules = tuple(Rule.model_validate(rule) for rule in content["rules"])
            except (AdapterswapError, TypeError):
                break

            found.append(Composed(name, rules, tuple(map(str, experts))))
            # A record quotes those of its experts, so their folders are not needed.
            records = {}
            for inner, source in experts.items():
                origin = None
                if isinstance(source, Mapping):
                    origin = source.get("origin")
                if not isinstance(origin, Mapping):
                    origin = {}
                records[str(inner)] = origin
        return found

    def within(self, mark: Mark, name: str) -> Mark:
        """The mark with the owner or the blend that this expert has there; `name` is the module's or tensor's."""
        if mark.owner != self.name:
            return mark

        for rule in self.rules:
            if not rule.matches(name, mark.layer, mark.kind):
                continue
            blend = ""
            if not rule.expert:
                blend = mixture(rule, rule.side_weights(), rule.method)
            return mark._replace(owner=rule.expert, blend=blend)
        return mark


def picture(plan: Plan) -> Picture:
    """The strip of a plan."""
    records = {}
    for name, expert in plan.experts.items():
        records[name] = Records(expert.source.folder).provenance()
    composed = Composed.of(records)
    return draw(_marks(plan, composed), plan.depth, _named(plan.experts, composed))


def _named(experts: Iterable[str], composed: Sequence[Composed]) -> list[str]:
    """The experts that a strip may show, in their order: those that an only expert was composed of come first."""
    inner: list[str] = []
    for expert in reversed(composed):
        inner += expert.experts
    return list(dict.fromkeys([*inner, *experts]))


def _marks(plan: Plan, composed: Sequence[Composed]) -> list[Mark]:
    """A mark for each module in a layer.

    For full weights, an unchanged tensor is left out if another tensor of its kind in the same layer is changed.
    """
    slots = plan.modules.values()

    # The stack of each module, and the kinds in each layer of which an expert changes one
    stacks: dict[str, Stack | None] = {}
    for stack, names in plan.depth.by_stack(plan.modules).items():
        stacks |= dict.fromkeys(names, stack)
    changed = set()
    for slot in slots:
        if slot.terms:
            changed.add((stacks[slot.name], slot.layer, slot.kind))

    marks = []
    for slot in slots:
        stack = stacks[slot.name]
        if slot.layer is None:
            continue
        if plan.is_model and not slot.terms and (stack, slot.layer, slot.kind) in changed:
            continue

        owner = slot.owner_label
        blend = ""
        if not owner:
            blend = slot.blend
        mark = Mark(slot.layer, slot.kind, owner, blend, stack)

        # From the outside in: each expert's record says what its own modules were composed of.
        for expert in composed:
            mark = expert.within(mark, slot.matched_name)
        marks.append(mark)
    return marks


def headline(plan: Plan) -> str:
    """The method and the size of a plan: `layer_swap, 42 modules, 6 layers`."""
    composition = plan.composition
    method: str = composition.method
    if composition.partition:
        method = f"partition {composition.partition}"
    elif composition.allocation is not None:
        method = "allocation"

    unit = "tensors" if plan.is_model else "modules"
    return f"{method}, {len(plan.slots)} {unit}, {plan.depth} layers"


def summary(plan: Plan) -> str:
    """A plan in a few lines: its headline, experts, base and strip. Unprintable characters are escaped."""
    lines = [f"Plan: {plan.headline}"]
    for name, expert in list(plan.experts.items())[:_SHOWN]:
        lines.append(f"{name}: {expert!r}")

    more = len(plan.experts) - _SHOWN
    if more > 0:
        lines.append(f"and {more} more experts")
    if plan.base.weights:
        lines.append(f"base: {plan.base.weights!r}")

    *rows, legend = plan.strip.split("\n")
    if len(legend) > _LEGEND:
        legend = f"{legend[: _LEGEND - 1]}…"
    lines += [*rows, legend, *plan.companion_lines]
    return "\n".join(map(printable, lines))


class Picture(NamedTuple):
    """The strip of layers.

    Attributes:
        rows: the kind of module, or `layers` if all kinds agree → one character for each layer. For a model with two
            stacks, the key is a stack, or a stack and a kind such as `decoder mlp`.
        depth: the number of layers, or that of the deeper stack.
        legend: character → its meaning.
        owners: the characters that stand for experts or averages of several.
        marks: what it shows of each module in a layer.
    """

    rows: Mapping[str, str]
    depth: int
    legend: Mapping[str, str]
    owners: tuple[str, ...]
    marks: Sequence[Mark]

    @property
    def text(self) -> str:
        """The layers from left (bottom) to right (top), one character each, and the legend."""
        width = max(map(len, self.rows), default=0)
        margin = " " * width
        lines = []

        # The layers' numbers: the tens above, then the last digits
        if self.depth > 10:
            tens = "".join(f"{ten:<10}" for ten in range((self.depth - 1) // 10 + 1))
            lines.append(f"{margin}  {tens.rstrip()}")
        digits = "".join(str(layer % 10) for layer in range(self.depth))
        lines.append(f"{margin}  {digits}")

        for kind, row in self.rows.items():
            lines.append(f"{kind:{width}}  {row}".rstrip())
        meanings = ", ".join(f"{mark} {meaning}" for mark, meaning in self.legend.items())
        lines.append(f"{margin}  {meanings}")
        return "\n".join(lines)

    @property
    def zones(self) -> list[tuple[str, str]]:
        """Consecutive layers with the same origin, and that origin, in the order of the layers."""
        by_stack: dict[Stack | None, dict[int, dict[str, str]]] = {}
        for mark in self.marks:
            origin = mark.owner or mark.blend
            kinds = by_stack.setdefault(mark.stack, {}).setdefault(mark.layer, {})
            if kinds.setdefault(mark.kind, origin) != origin:
                kinds[mark.kind] = "differs by module"

        zones = []
        for stack in sorted(by_stack, key=str, reverse=True):
            for layers, text in _zones_of_stack(by_stack[stack]):
                zones.append((f"{_of_stack(stack)}{layers}", text))
        return zones


def _zones_of_stack(origins: Mapping[int, Mapping[str, str]]) -> list[tuple[str, str]]:
    """The zones of one stack; `origins` are those of each layer's kinds of modules."""
    zones: list[tuple[list[int], str]] = []
    for layer in sorted(origins):
        kinds = origins[layer]
        if len(set(kinds.values())) == 1:
            text = next(iter(kinds.values()))
        else:
            text = "; ".join(f"{kind}: {kinds[kind]}" for kind in sorted(kinds))

        if zones and zones[-1][1] == text and zones[-1][0][-1] == layer - 1:
            zones[-1][0].append(layer)
        else:
            zones.append(([layer], text))
    return [(format_layers(layers), text) for layers, text in zones]


def draw(drawn: Sequence[Mark], depth: Depth, experts: Collection[str]) -> Picture:
    """The strip of these marks: one row if attention and MLP agree in every layer, else a row for each kind."""
    # An owner that is no expert is an average of several, and has a letter of its own. A dict keeps their order.
    averages: dict[str, None] = {}
    others = {BASE, *experts}
    for mark in drawn:
        if mark.owner is not None and mark.owner not in others:
            averages[mark.owner] = None
    letters = _letters([*averages, *experts])

    rows: dict[str, str] = {}
    for stack in depth.stacks:
        in_stack = [mark for mark in drawn if mark.stack == stack]
        rows |= _rows(in_stack, stack, depth.of(stack), letters)

    # The meaning of each character that the rows have: the experts' letters first, in their order
    marks_used = "".join(rows.values())
    owners = tuple(letter for letter in letters.values() if letter in marks_used)
    blends = sorted({mark.blend for mark in drawn if mark.owner is None})
    meanings = {letter: name for name, letter in letters.items()}
    meanings |= {_BLEND: " or ".join(blends), _UNCHANGED: "base", _SEVERAL: "differs by module"}
    legend = {mark: meaning for mark, meaning in meanings.items() if mark in marks_used}
    return Picture(rows, depth.of(None), legend, owners, drawn)


def recorded_strip(
    owners: Collection[tuple[str, int | None, Kind, str | Mapping[str, float] | None]],
    num_layers: NumLayers,
    experts: Mapping[str, Mapping[str, Any]],
) -> str:
    """The strip of a result, from what its record says of its modules; see `Plan.strip`.

    Args:
        owners: the name, layer and kind of each module, and its owner or each expert's coefficient; None for a module
            that the record does not name. `base` is left out if others of the same kind and layer were changed.
        num_layers: the base's number of layers, or that of each of its stacks.
        experts: the experts in their order, each with the content of its own record; see `Composed.of`.
    """
    composed, depth = Composed.of(experts), Depth(num_layers)
    drawn = []
    for name, layer, kind, owner in owners:
        stack = depth.stack_of(name)
        if layer is None or layer >= depth.of(stack) or owner is None:
            continue

        if isinstance(owner, str):
            mark = Mark(layer, kind, owner, "", stack)
        else:
            mark = Mark(layer, kind, None, blend_text(owner), stack)
        for expert in composed:
            mark = expert.within(mark, name)
        drawn.append(mark)

    changed = {(mark.stack, mark.layer, mark.kind) for mark in drawn if mark.owner != BASE}
    shown = []
    for mark in drawn:
        if mark.owner == BASE and (mark.stack, mark.layer, mark.kind) in changed:
            continue
        shown.append(mark)
    return draw(shown, depth, _named(experts, composed)).text


def unusual(plan: Plan) -> list[str]:
    """Remarks that go with the strip: modules outside the layers, experts that lack modules, warnings."""
    lines = [
        *differing_bases(plan.adapters, plan.composition.base_model),
        *ignored_modules(plan.adapters),
        *unknown_keys(plan.adapters),
    ]

    # Modules that experts hold in full, or single rows of them
    for slot in plan.saved.values():
        contents = ""
        if slot.name in plan.tokens:
            contents = _tokens(slot)
        if not contents:
            contents = _remark(slot) or slot.owner_label or blend_text(slot.weights)

        holder = next(adapter for adapter in plan.adapters.values() if slot.module in adapter.saved)
        lines.append(f"{slot.name} ({holder.saved[slot.module].words}): {contents}")

    # Adapted modules: those outside the layers, and what the strip does not say of the others
    depth = plan.depth
    grouped: dict[tuple[str, str, str], list[int]] = {}
    for slot in plan.modules.values():
        if slot.rule is None:
            continue
        remark = _remark(slot)
        if slot.layer is None:
            lines.append(f"{slot.name}: {remark or slot.label}")
        elif remark and not (plan.is_model and slot.kind == "other"):
            name = ModuleName(slot.name).within(slot.layer)
            where = _of_stack(depth.stack_of(slot.name))
            grouped.setdefault((name, where, remark), []).append(slot.layer)
    for (name, where, remark), layers in grouped.items():
        lines.append(f"{name} in {where}layers {format_layers(layers)}: {remark}")

    # Layers without modules; blocks that several layers share are in no layer
    shared = None
    for slot in plan.modules.values():
        if slot.layer is None:
            shared = shared or ModuleName(slot.name).shared_list
    if shared:
        lines.append(f"several layers share each block of {shared}, so its modules are outside the layers")
    elif not plan.is_model:
        names_in = depth.by_stack(plan.modules)
        for stack in depth.stacks:
            adapted = {plan.modules[name].layer for name in names_in.get(stack, ())}
            empty = set(range(depth.of(stack))) - adapted
            if empty:
                where = f"{_of_stack(stack)}layers {format_layers(empty)}"
                lines.append(f"{where}: no expert adapts them, so they stay as in the base")

    if plan.untied:
        lines.append("the result stores a head and an embedding that differ: tie_word_embeddings becomes false")
    return lines


def _of_stack(stack: Stack | None) -> str:
    """A stack before the word `layers`; empty for a model with one."""
    if not stack:
        return ""
    return f"{stack} "


def ignored_modules(experts: Mapping[str, Adapter]) -> list[str]:
    """A line for each expert with modules in its file that PEFT would not load."""
    lines = []
    for name, adapter in experts.items():
        ignored = adapter.ignored
        if not ignored:
            continue
        more = ""
        if len(ignored) > 1:
            more = ", …"
        lines.append(
            f"{name}: {len(ignored)} modules in its file are left out, because its config does not target them and "
            f"PEFT would not load them ({ignored[0]}{more})"
        )
    return lines


def unknown_keys(experts: Mapping[str, Adapter]) -> list[str]:
    """A line for each expert whose config has keys that PEFT does not know."""
    lines = []
    for name, adapter in experts.items():
        unknown = adapter.config.unknown
        if unknown:
            lines.append(
                f"Warning: {name}: adapter_config.json has {printable(', '.join(unknown))}, which PEFT does "
                "not know; PEFT ignores it, and so does the result"
            )
    return lines


def differing_bases(experts: Mapping[str, Adapter], declared: str | None) -> list[str]:
    """A warning if the adapters name different bases or revisions, and `base_model` declares that they share one."""
    if declared is None or not experts:
        return []

    configs = [adapter.config for adapter in experts.values()]
    first = configs[0]
    if all(same_base(other.base_model, first.base_model) and other.revision == first.revision for other in configs):
        return []

    named = []
    for name, config in zip(experts, configs, strict=True):
        base = config.base_model and Reference(config.base_model).public_name
        text = f"{name}: {base or 'none'}"
        if config.revision:
            text += f"@{config.revision}"
        named.append(text)
    return [f"Warning: the experts name different bases ({', '.join(named)}), declared to be the same model"]


def error_text(error: float) -> str:
    """A relative error with three decimals, or `< 0.001` if it would be rounded to 0."""
    if 0 < error < 0.0005:
        return "< 0.001"
    return f"{error:.3f}"


def _remark(slot: Slot) -> str:
    """What the rule requests, if some of its experts do not change the slot; else an empty string."""
    if not slot.absent:
        return ""

    requested = next(iter(slot.weights))
    if len(slot.weights) > 1:
        requested = blend_text(slot.weights)
    verb = "do"
    if len(slot.absent) == 1:
        verb = "does"
    rest = "it stays as in the base"
    if slot.terms:
        rest = "its ΔW counts as zero"
    return f"{requested}, but {' and '.join(slot.absent)} {verb} not adapt it: {rest}"


def _tokens(slot: Slot) -> str:
    """The tokens of each owner or blend: `3, 7 from math; 9 from 0.5·math + 0.5·swahili`; empty if it has no terms."""
    tokens: dict[str, list[str]] = {}
    for span in slot.spans:
        origin = span.made_of
        if not isinstance(origin, str):
            origin = blend_text(origin)
        tokens.setdefault(origin, []).extend(map(str, range(span.start, span.stop)))
    return "; ".join(f"{and_more(ids, 8)} from {origin}" for origin, ids in tokens.items())


def _letters(names: Iterable[str]) -> dict[str, str]:
    """A letter for each expert, taken from its name if one of those is free."""
    letters: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix("mean(")  # as compositions call the average of a side
        taken = set(letters.values())
        letter = "?"
        for candidate in f"{plain.lower()}{plain.upper()}0123456789abcdefghijklmnopqrstuvwxyz":
            if candidate.isalnum() and candidate.isascii() and candidate not in taken:
                letter = candidate
                break
        letters[name] = letter
    return letters


def _rows(drawn: Sequence[Mark], stack: Stack | None, num_layers: int, letters: Mapping[str, str]) -> dict[str, str]:
    """One row if attention and MLP agree in every layer, else a row for each kind."""
    rows: dict[str, str] = {}
    for kind in get_args(Kind):
        of_kind = [mark for mark in drawn if mark.kind == kind]
        row = _row(of_kind, num_layers, letters)
        if row.strip():
            rows[f"{_of_stack(stack)}{kind}"] = row

    if len(set(rows.values())) == 1:
        return {stack or "layers": next(iter(rows.values()))}
    return rows


def _row(drawn: Sequence[Mark], num_layers: int, letters: Mapping[str, str]) -> str:
    """One character for each layer: what its marks agree on, or that they differ."""
    cells: list[set[str]] = [set() for _ in range(num_layers)]
    for mark in drawn:
        if mark.owner is None:
            cells[mark.layer].add(_BLEND)
        elif mark.owner == BASE:
            cells[mark.layer].add(_UNCHANGED)
        else:
            cells[mark.layer].add(letters[mark.owner])

    row = ""
    for cell in cells:
        if len(cell) > 1:
            row += _SEVERAL
        else:
            row += next(iter(cell), _NOTHING)
    return row


# (background, text), in the order of the experts; the first two also differ in grey. Only experts have colours.
COLOURS = (
    ("#0072B2", "#FFFFFF"), ("#E69F00", "#000000"), ("#009E73", "#000000"), ("#F0E442", "#000000"),
    ("#56B4E9", "#000000"), ("#D55E00", "#000000"), ("#CC79A7", "#000000"),
)  # fmt: skip
_PLAIN = ("#FFFFFF", "#000000")
_CELL = "text-align:center;min-width:1.5em;padding:1px 2px;border:1px solid #888888"
_REMARKS = 5  # lines below the strip
_HEAD = "font-weight:normal;font-size:75%;text-align:center;padding:1px 2px"


def plan_html(plan: Plan) -> str:
    """The plan as a fragment of HTML. Names are escaped."""
    picture = plan.picture
    colours = dict(zip(picture.owners, cycle(COLOURS), strict=False))  # beyond the last, they start again

    # The table: the layers' numbers above, then the strip's rows
    head = "".join(f'<th scope="col" style="{_HEAD}">{layer}</th>' for layer in range(picture.depth))
    rows = [f"<tr><th></th>{head}</tr>"]
    for kind, row in picture.rows.items():
        cells = ""
        for layer, mark in enumerate(row):
            title = _text(f"layer {layer}: {picture.legend.get(mark, 'no expert adapts it')}")  # where the mouse points
            style = f"{_CELL};{_colour(colours.get(mark, _PLAIN))}"
            cells += f'<td style="{style}" title="{title}">{_text(mark)}</td>'
        rows.append(f'<tr><th scope="row" style="{_HEAD}">{_text(kind)}</th>{cells}</tr>')

    meanings = []
    for mark, meaning in picture.legend.items():
        style = f"{_CELL};{_colour(colours.get(mark, _PLAIN))}"
        meanings.append(f'<span style="{style}">{_text(mark)}</span> {_text(meaning)}')
    legend = " &nbsp; ".join(meanings)

    lines = [*plan.remarks[:_REMARKS], *plan.companion_lines]
    remarks = "".join(f"<div>{_text(line)}</div>" for line in lines)
    return (
        f'<div style="overflow-x:auto"><div>{_text(f"Plan: {plan.headline}")}</div>'
        f'<table style="border-collapse:collapse">{"".join(rows)}</table><div>{legend}</div>{remarks}</div>'
    )


def _colour(pair: tuple[str, str]) -> str:
    return f"background:{pair[0]};color:{pair[1]}"


def _text(text: str) -> str:
    from html import escape  # only notebooks need it

    return escape(printable(text))


def zones_of(plan: Plan, stack: Stack | None) -> str:
    """The zones of a layer swap in one list of layers, and which of them are the paper's defaults."""
    composition = plan.composition
    count = plan.depth.of(stack)
    bottom, top, bottom_transition, top_transition = composition.zones(plan.num_layers, stack)
    text = f"zones of {count} {_of_stack(stack)}layers: bottom {bottom} and top {top} "
    text += f"from {' and '.join(composition.language)}, transitions {bottom_transition} and {top_transition}"

    # The paper gives zones for one depth; where the request leaves one out, it is scaled to this model's.
    scaled = []
    if composition.bottom is None:
        scaled.append(f"bottom {bottom}")
    if composition.top is None:
        scaled.append(f"top {top}")
    if scaled:
        text += f" ({', '.join(scaled)}: the paper's default, in proportion)"
    return text
