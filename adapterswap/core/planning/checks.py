"""Checks of a plan: do the experts belong together, do the rules match anything?

Each function adds the mistakes that it finds to a `Problems`, so that all are reported at once. It does nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from adapterswap.core.companions.config import ConfigDifferences
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.parts import FullModule, LoraModule, Part, compare_shapes
from adapterswap.core.model.checkpoints import OTHER_NAMES, Checkpoint
from adapterswap.core.model.layers import NO_LAYER, Depth, ModuleName, NumLayers, Stack, format_layers, parse_layers
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rows import extra_rows
from adapterswap.core.planning.rules import BASE, Rule, place_of
from adapterswap.core.planning.slices import requested_by_layer
from adapterswap.core.planning.slots import Slot
from adapterswap.kit.errors import CompositionError, ExpertError, Problems, UnsupportedError, and_more, did_you_mean

_TYPE = "model_type"
_ONE_BASE = "Give checkpoints that were fine-tuned from one base"


def check_names(
    names: Sequence[str], known: Collection[str], problems: Problems, rules: Sequence[Rule] | None = None
) -> None:
    """Check that a composition names at least one expert and only known ones; `rules` are those of its allocation."""
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "none"
            problems.add(
                f"{_naming_rule(name, rules or ())}There is no expert {name!r} (experts: {listed})",
                did_you_mean(name, known, "Use one of these names, or add this expert"),
                parameter="experts",
                kind=CompositionError,
            )

    if not names:
        problems.add(
            "Every rule gives its modules to the base", "Use an expert in at least one rule", kind=CompositionError
        )


def _naming_rule(name: str, rules: Sequence[Rule]) -> str:
    """The first rule that names the expert, and the position of the name in its text."""
    for number, rule in enumerate(rules, 1):
        if name in rule.experts:
            return f"rule {number}, {rule.text!r}, at character {place_of(name, rule.text)}: "
    return ""


def check_experts(experts: Mapping[str, Adapter], composition: Composition, problems: Problems) -> None:
    """Check that the experts adapt their base in the same way; each is compared with the first."""
    if not experts:
        return

    first_name, first = next(iter(experts.items()))
    for name, adapter in experts.items():
        ours, theirs = first.config, adapter.config
        if first.ties_factors != adapter.ties_factors:
            tying, other = name, first_name
            if first.ties_factors:
                tying, other = first_name, name
            problems.add(
                f"{tying} ties the LoRA of its embedding to the head (ensure_weight_tying), but {other} does not",
                "Compose experts that treat the base's tied embeddings in the same way",
                kind=ExpertError,
            )

        # Without a task type, PEFT loads an adapter as it does for a causal language model.
        if composition.task_type is None and (ours.task_type or "CAUSAL_LM") != (theirs.task_type or "CAUSAL_LM"):
            problems.add(
                f"task_type is {ours.task_type} in {first_name}, but {theirs.task_type} in {name}",
                "Compose experts of one task type. If a config is wrong, pass the right one: `task_type=CAUSAL_LM`",
                parameter="task_type",
                kind=ExpertError,
            )


def check_shapes(experts: Mapping[str, Adapter], problems: Problems) -> None:
    """Check that modules of the same name have the same shape; each expert is compared with the first."""
    named = list(experts.items())
    for name, adapter in named[1:]:
        first_name, first = named[0]
        for ours, theirs in _comparable(first, adapter):
            compare_shapes(
                {module: part.shape for module, part in ours.items()},
                {module: part.shape for module, part in theirs.items()},
                one=first_name,
                other=name,
                remedy="Compose experts of one base model",
                problems=problems,
                kind=ExpertError,
            )
    _check_nesting(experts, problems)


def _comparable(first: Adapter, second: Adapter) -> Iterator[tuple[Mapping[str, Part], Mapping[str, Part]]]:
    """The parts of two adapters whose shapes must agree if both adapt one base.

    These are LoRA factors and weights held in full. The shapes of other kinds also depend on settings, so these parts
    are compared only if their settings agree.
    """
    # Embeddings and heads may have rows for other tokens; see `rows`.
    ours: dict[str, Part] = {}
    for name, lora in first.factors.items():
        twin = second.factors.get(name)
        is_end = lora.layer is None and ModuleName(name).is_vocabulary(None)
        if twin is None or not is_end or not _differ_in_rows(lora, twin):
            ours[name] = lora
    yield ours, second.factors

    in_full: dict[str, Part] = {}
    for name, part in first.saved.items():
        if name not in second.saved or not _is_resized(part, second.saved[name]):
            in_full[name] = part
    yield in_full, second.saved

    # `factors` above has those with LoRA's factors, such as DoRA.
    alike: dict[str, Part] = {}
    for name, opaque in first.opaque.items():
        other = second.opaque.get(name)
        if opaque.lora is not None or other is None:
            continue
        if (opaque.method, opaque.settings, opaque.values) == (other.method, other.settings, other.values):
            alike[name] = opaque
    yield alike, {name: second.opaque[name] for name in alike}


def _is_resized(first: FullModule, second: FullModule) -> bool:
    """Whether both are the same embedding or head with different numbers of rows; `vocabulary` compares these."""
    if first.rows or second.rows:  # single rows of it
        return first.width == second.width

    ours = {name: tensor.shape[1:] for name, tensor in first.tensors.items()}
    theirs = {name: tensor.shape[1:] for name, tensor in second.tensors.items()}
    return ModuleName(first.name).is_vocabulary(first.layer) and ours == theirs


def _differ_in_rows(first: LoraModule, second: LoraModule) -> bool:
    """Whether both have LoRA on the same embedding or head with different numbers of rows."""
    if first.embedding != second.embedding:
        return False
    if first.embedding:
        return first.out_features == second.out_features
    return first.in_features == second.in_features


def _check_nesting(experts: Mapping[str, Adapter], problems: Problems) -> None:
    """Check that no expert adapts a module inside one that another expert holds in full."""
    for name, adapter in experts.items():
        in_full = [module for module in adapter.saved if not ModuleKeys(module).is_bias]
        for other, theirs in experts.items():
            holder, inside = _first_inside(in_full, theirs.parts)
            is_own_bias = other == name and ModuleKeys(inside).is_bias
            if inside and not is_own_bias:
                problems.add(
                    f"{name} holds {holder} in full (modules_to_save), but {other} adapts {inside} inside it",
                    f"Merge {other} into its base with `merge`, and compose the full weights in its place",
                    kind=ExpertError,
                )
                return


def _first_inside(holders: Iterable[str], parts: Iterable[str]) -> tuple[str, str]:
    """The first of these modules with a part inside it, and that part; empty if there is none."""
    for holder in holders:
        for part in parts:
            if part.startswith(f"{holder}."):
                return holder, part
    return "", ""


def check_depth(
    experts: Mapping[str, Adapter], num_layers: NumLayers, problems: Problems, *, names_layers: bool = True
) -> None:
    """Check that the base has the layers that experts adapt; `names_layers` says whether the rules name any."""
    depth = Depth(num_layers)
    for name, adapter in experts.items():
        if isinstance(num_layers, int) and adapter.has_both_stacks:
            problems.add(
                f"{name} adapts an encoder and a decoder ({adapter.container}), but the base has one list of layers",
                "Check `num_layers` ({encoder: N, decoder: M} in a recipe) or `base_model`",
                kind=ExpertError,
            )
            continue

        highest: dict[Stack | None, int] = {}
        for part in adapter.parts.values():
            if part.layer is not None:
                stack = depth.stack_of(part.name)
                highest[stack] = max(part.layer, highest.get(stack, 0))

        if not isinstance(num_layers, int) and None in highest:
            if names_layers:  # else it does not matter which stack they are in
                problems.add(
                    f"{name} adapts layers ({adapter.container}) that are neither the encoder's nor the decoder's",
                    "Pass the base that the experts adapt as `base_model`",
                    parameter="base_model",
                    kind=ExpertError,
                )
            continue

        for stack, layer in highest.items():
            count = depth.of(stack)
            if layer < count:
                continue

            # Layers for multi-token prediction come after the others, and `num_layers` does not count them.
            remedy = "Check `num_layers` or `base_model`"
            if stack is None:
                where, base = "layer", "the base"
                remedy += (
                    ". Layers that predict further tokens (MTP) are accepted if the base is on this machine and its "
                    "config.json says how many there are (num_nextn_predict_layers)"
                )
            else:
                where, base = f"{stack} layer", f"the base's {stack}"
            problems.add(
                f"{name} adapts {where} {layer}, but {base} has {count} layers (0-{count - 1})",
                remedy,
                kind=ExpertError,
            )


def check_rules(rules: Sequence[Rule], num_layers: NumLayers, problems: Problems) -> None:
    """Check that the base has the stacks and the layers that rules name."""
    for rule in rules:
        if rule.stack is not None and isinstance(num_layers, int):
            problems.add(
                f"The rule `{rule}` is for the {rule.stack}, but the base does not have both an encoder and a decoder",
                "Remove `stack` from the rule",
                parameter="allocation",
                kind=CompositionError,
            )
            continue

        count = Depth(num_layers).of(rule.stack)
        outside = sorted(layer for layer in parse_layers(rule.layers or NO_LAYER) if layer >= count)
        if outside:
            base = "the base"
            if rule.stack:
                base = f"the base's {rule.stack}"
            problems.add(
                f"The rule `{rule}` names {_listed(outside)}, but {base} has {count} layers (0-{count - 1})",
                "Correct the rule's layers, or `num_layers`",
                parameter="allocation",
                kind=CompositionError,
            )


def _listed(layers: Sequence[int]) -> str:
    """Layers in words: `layer 8`, `layers 8 and 9`, `layers 8-12,20`."""
    if len(layers) == 2:
        return f"layers {layers[0]} and {layers[1]}"
    unit = "layers"
    if len(layers) == 1:
        unit = "layer"
    return f"{unit} {format_layers(layers)}"


def check_matches(
    rules: Sequence[Rule],
    slots: Sequence[Slot],
    experts: Mapping[str, Adapter | Checkpoint],
    num_layers: NumLayers,
    composition: Composition,
    problems: Problems,
    *,
    uncovered: Sequence[Slot] = (),
) -> None:
    """Report rules that match nothing, and rules that need a layer that a slice does not have.

    `uncovered` are slots that no rule matches.
    """
    depth = Depth(num_layers)
    parameter = None
    if composition.allocation is not None:
        parameter = "allocation"

    # By identity: an equal rule may stand further down, and matches nothing there.
    used = {id(slot.rule) for slot in slots}
    adapted = depth.by_stack(slot.name for slot in slots if slot.layer is not None)
    for rule in rules:
        if rule.optional or id(rule) in used:
            continue

        if parameter is None:  # the composition made the rules
            if rule.stack and composition.stack == "both" and adapted and rule.stack not in adapted:
                continue  # the experts adapt only the other stack
            if rule.expert == BASE:
                continue  # a slice may lack exactly the layers that are reset
        problems.add(
            f"The rule `{rule}` matches no module that earlier rules left",
            _explain(rule, [*slots, *uncovered]),
            parameter=parameter,
            kind=CompositionError,
        )

    slices = {name: expert.kept_layers for name, expert in experts.items() if expert.kept_layers is not None}
    if not slices:
        return

    requested = requested_by_layer(rules, slots, depth)
    for name, kept in slices.items():
        if any(rule.weights and name in rule.experts for rule in rules):
            problems.add(
                f"{name} is a slice, but magnitude weights need the magnitude of the whole expert",
                "Pass the whole expert, or explicit weights",
                parameter=parameter or "weights",
                kind=CompositionError,
            )

        needed: dict[Stack | None, list[int]] = {}
        for (stack, layer), names in requested.items():
            if name in names and not kept.has(stack, layer):
                needed.setdefault(stack, []).append(layer)
        for stack, layers in needed.items():
            missing = f"layer {layers[0]}"
            if len(layers) > 1:
                missing = f"layers {format_layers(layers)}"
            if stack:
                missing = f"{stack} {missing}"
            problems.add(
                f"{name} is a slice with the {kept}, but the composition needs its {missing}",
                "Pass the whole expert, or give these layers to another expert or to the base",
                parameter=parameter,
                kind=CompositionError,
            )


def _explain(rule: Rule, modules: Sequence[Slot]) -> str:
    """A remedy for a rule that matches none of these modules, or none that earlier rules left."""
    if any(rule.matches(module.matched_name, module.layer, module.kind) for module in modules):
        return "Earlier rules match all of its modules: move it before them, or remove it"

    ends = sorted({module.name.removesuffix(".weight").rpartition(".")[2] for module in modules})
    layers = {module.layer for module in modules if module.layer is not None}
    where = "no layer"
    if layers:
        where = f"layers {min(layers)}-{max(layers)}"
    return f"The experts adapt {', '.join(ends[:12])} in {where}: correct the rule, or set `optional: true` in it"


def silenced_experts(rules: Sequence[Rule]) -> set[str]:
    """The experts that a rule gives the weight 0, or whose weights on two sides cancel."""
    silenced = set[str]()
    for rule in rules:
        if rule.blend:
            silenced.update({*rule.experts} - rule.coefficients().keys())
    return silenced


def check_used(plan: Plan, names: Sequence[str], problems: Problems) -> None:
    """Report experts that contribute nothing, unless zones of 0 layers or a weight of 0 request that."""
    composition = plan.composition
    if composition.bottom is not None and composition.top is not None and composition.allocation is None:
        return

    # Modules in full outside the layers do not count, since compositions average them whatever else they do; unless an
    # expert has nothing else than trained tokens.
    parts = list(plan.modules.values())
    parts += [slot for slot in plan.saved.values() if slot.layer is not None]
    if not parts:
        return

    contributing = silenced_experts(plan.rules)
    for slot in parts:
        contributing.update(term.expert for term in slot.terms)
    for name, adapter in plan.adapters.items():
        if adapter.parts.keys() == adapter.tokens.keys():
            for slot in plan:
                if any(term.expert == name for term in slot.terms):
                    contributing.add(name)

    unit = "module"
    if plan.is_model:
        unit = "tensor"
    for name in names:
        if name in contributing:
            continue

        # The field that names it
        parameter = "language"
        if composition.allocation is not None:
            parameter = "allocation"
        elif name in composition.task:
            parameter = "task"
        problems.add(
            f"The expert {name!r} contributes no {unit} to the result",
            "Remove it, or give it layers and modules that it adapts",
            parameter=parameter,
            kind=CompositionError,
        )


def check_config_owner(composition: Composition, owners: Collection[str], problems: Problems) -> None:
    """Check that the requested owner of the config is one of `owners`, which have one."""
    if composition.config_from is not None and composition.config_from not in owners:
        problems.add(
            f"`config_from` is {composition.config_from!r}, which is neither the base nor a full checkpoint of this "
            "composition",
            did_you_mean(composition.config_from, owners, "Leave it out, or name one of them"),
            parameter="config_from",
            kind=CompositionError,
        )


def check_architecture(
    first_name: str,
    first: Checkpoint,
    name: str,
    other: Checkpoint,
    problems: Problems,
    *,
    config_from: str | None = None,
) -> None:
    """Check that two checkpoints have the same architecture and hold the same tensors in the same shapes.

    Embeddings and heads may differ in their numbers of rows; see `rows`. One of the two may lack tensors that predict
    further tokens; see `Checkpoint.ahead`. With `config_from`, the owner of the result's
    config, the configs may differ.
    """
    for who, checkpoint in ((first_name, first), (name, other)):
        if checkpoint.quantization is not None:
            problems.add(
                f"{who} is quantized (quantization_config: {checkpoint.quantization.title}), so its weights cannot be "
                "averaged",
                "Pass an unquantized checkpoint",
                kind=UnsupportedError,
            )

    differences = ConfigDifferences.between(first.config, other.config)
    if differences and (config_from is None or _TYPE in differences.values):
        remedy = _ONE_BASE
        parameter = None
        if _TYPE not in differences.values and _fit_one_config(first, other):
            remedy = f"{_ONE_BASE}. If one config is right for the result, name its owner: `config_from={name}`"
            parameter = "config_from"
        problems.add(
            f"The configs of {first_name} and {name} compute differently: {differences.text(first_name, name)}",
            remedy,
            parameter=parameter,
        )
        return  # what the tensors lack follows from these

    ours, theirs = first.parameters, other.parameters
    only_ours = sorted(ours.keys() - theirs.keys() - first.ahead)
    only_theirs = sorted(theirs.keys() - ours.keys() - other.ahead)
    for missing, has, lacks in ((only_ours, first_name, name), (only_theirs, name, first_name)):
        if missing:
            problems.add(f"{has} holds {and_more(missing)}, but {lacks} does not", f"{_ONE_BASE}{OTHER_NAMES}")

    # Tensors that differ only in their rows are compared as embeddings and heads, not by shape.
    resized = set()
    for key in sorted(ours.keys() & theirs.keys()):
        our_shape, their_shape = ours[key].tensor.shape, theirs[key].tensor.shape
        if our_shape == their_shape or ours[key].layer is not None or our_shape[1:] != their_shape[1:]:
            continue

        resized.add(key)
        if not ours[key].has_tokens:
            problems.add(
                f"{key} is {list(our_shape)} in {first_name}, but {list(their_shape)} in {name}, and it is not known "
                "as an embedding or head whose rows are tokens",
                "Resize one (resize_token_embeddings), or extract an adapter from one with `adapterswap extract`",
            )

    compare_shapes(
        {key: "×".join(map(str, ours[key].tensor.shape)) for key in ours if key not in resized},
        {key: "×".join(map(str, theirs[key].tensor.shape)) for key in theirs if key not in resized},
        one=first_name,
        other=name,
        remedy=_ONE_BASE,
        problems=problems,
    )


def _fit_one_config(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether one config could load both checkpoints: the same tensors in the same shapes, but for rows of tokens."""
    shapes = []
    for checkpoint in (one, other):
        inside = {}
        outside = {}
        for key, parameter in checkpoint.parameters.items():
            if parameter.layer is None:
                outside[key] = parameter.tensor.shape[1:]
            else:
                inside[key] = parameter.tensor.shape
        shapes.append((inside, outside))
    return shapes[0] == shapes[1]


def check_vocabulary(
    slots: Sequence[Slot],
    skeleton: Checkpoint,
    full: Mapping[str, Checkpoint],
    rules: Sequence[Rule],
    problems: Problems,
) -> None:
    """Report what cannot be computed row by row if full checkpoints have rows that the base or another expert lacks."""
    ends = {slot.name: slot for slot in slots if slot.has_tokens}

    # A tensor as large as the vocabulary needs rows for the new tokens as well, but which ones is not known.
    sizes = {slot.shape[0] for slot in ends.values()}
    if any(slot.spans for slot in ends.values()):
        for slot in slots:
            may_have_tokens = slot.layer is None and (len(slot.shape) > 1 or slot.name.endswith("bias"))
            if may_have_tokens and slot.name not in ends and sizes.intersection(slot.shape):
                problems.add(
                    f"An expert has tokens that the base or another expert lacks, and {slot.name} is "
                    f"{list(slot.shape)}, as large as the vocabulary, but it is not known as an embedding or head",
                    "Compose experts with one vocabulary, or extract adapters with `adapterswap extract`",
                    kind=UnsupportedError,
                )

    # Some embeddings have rows beyond the vocabulary, such as for images, so a longer one may not have more tokens.
    for slot in ends.values():
        extra = extra_rows(skeleton.config, slot.module)
        for expert, change in slot.all_whole:
            if extra and change.tensor.shape != slot.shape:
                problems.add(
                    f"{expert} has {change.tensor.shape[0]} rows of {slot.name}, of which the last {extra} are not "
                    f"tokens of the vocabulary, and {skeleton.name} has {slot.shape[0]}",
                    "Compose experts with one vocabulary, or extract adapters with `adapterswap extract`",
                    kind=UnsupportedError,
                )
                break

    if not any(rule.weights for rule in rules):
        return
    for name, checkpoint in full.items():
        for key in ends.keys() & checkpoint.parameters.keys() & skeleton.parameters.keys():
            rows = checkpoint.parameters[key].tensor.shape[0]
            rows_of_base = skeleton.parameters[key].tensor.shape[0]
            if rows != rows_of_base:
                problems.add(
                    f"{name} has {rows} rows of {key} and the base {rows_of_base}, so the magnitude of its ΔW is not "
                    "defined",
                    "Use explicit weights",
                    parameter="weights",
                    kind=UnsupportedError,
                )
                break
