"""What each target can hold: one table of limits, which refuses compositions and is shown on docs/adapters.md.

A target is what a composition can become: a file, full weights, a running model, an engine. Limits read plans and
headers, but no tensors; what only a target's own room knows it passes as `Facts`. Limits that need tensors, the layers
of a running model or a trial in PEFT stay in their rooms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.keys import LORA, TASK_HEADS, TRAINABLE_TOKENS, ModuleKeys
from adapterswap.core.experts.parts import LoraModule, OpaqueModule
from adapterswap.core.planning.facts import LocalBase
from adapterswap.core.planning.fit import taken_for_experts
from adapterswap.core.planning.names import ExpertName
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.kit.errors import (
    AdapterswapError,
    BaseModelError,
    CompositionError,
    Problems,
    UnsupportedError,
    and_more,
)
from adapterswap.kit.files.numbers import Dtype


class Target(Flag):
    """What a composition can become. Limits of `PLAN` hold for all of them, and are checked when a plan is made."""

    ADAPTER = auto()
    PORTABLE = auto()
    WEIGHTS = auto()
    LIVE = auto()
    VLLM = auto()
    LLAMA = auto()
    GGUF = auto()
    DIFF = auto()
    ANALYZE = auto()
    PLAN = auto()

    @property
    def called(self) -> str:
        """What messages and docs/adapters.md call it."""
        if self not in _WORDS:  # `PLAN`, and combinations
            return ""
        return _WORDS[self][0]

    @property
    def otherwise(self) -> str:
        """What to do instead."""
        if self not in _WORDS:
            return ""
        return _WORDS[self][1]

    def check(self, plan: Plan, **facts: Any) -> None:
        """Raise if a plan has something that the target cannot hold; `facts` are fields of `Facts`."""
        problems = Problems()
        self.report(plan, problems, **facts)
        problems.raise_if_any()

    def report(self, plan: Plan, problems: Problems, *, name: str = "", **facts: Any) -> None:
        """Add what the target cannot hold. Faults of experts and slots hide those of the whole plan.

        `name` is what a server's client called the composition.
        """
        f = Facts(self, plan, **facts)

        faults: list[_Fault] = []
        for key, adapter in plan.adapters.items():
            faults += _faults("expert", adapter, replace(f, expert=key))
        faults += _faults_of_slots(plan, f)
        if not faults:
            faults = _faults("plan", plan, f)
        _add(faults, f, problems, name)

    def check_expert(self, adapter: Adapter, name: str, parameter: str | None = None) -> None:
        """Raise if the target cannot hold an expert, which messages call `name`."""
        problems = Problems()
        f = Facts(self, parameter=parameter, expert=name)
        _add(_faults("expert", adapter, f), f, problems)
        problems.raise_if_any()

    @staticmethod
    def why_not_served(config: Mapping[str, Any]) -> str | None:
        """Why vLLM and llama.cpp cannot read an adapter's folder; None if they can.

        Args:
            config: the content of its adapter_config.json.
        """
        if config.get("peft_type") != LORA or config.get("use_dora") or config.get("lora_bias"):
            return "only plain LoRA, without DoRA and biases"
        if config.get("modules_to_save") or config.get("bias", "none") != "none":
            return "only LoRA, and no biases or modules trained in full (`modules_to_save`)"
        if config.get("trainable_token_indices"):
            return "only LoRA, and no trained tokens (`trainable_token_indices`)"
        return None

    @staticmethod
    def has_one_scale(config: Mapping[str, Any]) -> bool:
        """Whether a LoRA folder has one rank and scale. vLLM applies one to all modules, SGLang refuses more."""
        return not config.get("rank_pattern") and not config.get("alpha_pattern")


_MERGE = "Merge the composition into full weights with `merge`"
_WORDS = {
    Target.ADAPTER: ("an adapter", _MERGE),
    Target.PORTABLE: ("a portable adapter", _MERGE),
    Target.WEIGHTS: ("full weights", ""),
    Target.LIVE: (
        "the live composer",
        "Write the composition with `compose` and load the result, or write full weights with `merge`",
    ),
    Target.VLLM: ("vLLM", "Merge it into full weights with `merge`, and serve those"),
    Target.LLAMA: ("llama.cpp", "Write it with `adapterswap export` and serve that file, or merge it first"),
    Target.GGUF: (
        "a LoRA in GGUF",
        "Merge the composition with `adapterswap merge` and convert the result with llama.cpp's convert_hf_to_gguf.py",
    ),
    Target.DIFF: ("`diff`", "Merge it into its base with `merge`"),
    Target.ANALYZE: ("`analyze`", "Merge it into its base with `merge`"),
}  # what it is called, and what to do instead

_FILES = Target.ADAPTER | Target.PORTABLE
_SERVERS = Target.VLLM | Target.LLAMA
_LOW_RANK = ~(Target.WEIGHTS | Target.PLAN)
_EVERY = Target.PLAN | Target.WEIGHTS | Target.GGUF  # for which every slot is reported, not only the first


@dataclass
class Facts:
    """What decides besides a slot or an expert.

    Attributes:
        target: what the composition is to become.
        plan: the plan; None while experts are opened one by one.
        parameter: the parameter at fault, where a limit has none of its own.
        max_rank, max_error: the bounds on the written rank.
        base_at_hand: whether the base's weights are available.
        expert: what messages call the expert that is looked at.
        most: the largest rank that a server takes.
        exports, tied: whether llama.cpp has a place for a module, and whether it ties the head to the embedding.
    """

    target: Target
    plan: Plan | None = None
    parameter: str | None = None
    max_rank: int | None = None
    max_error: float | None = None
    base_at_hand: bool = False
    expert: str = ""
    most: int | None = None
    exports: Callable[[Slot], bool] = lambda slot: True
    tied: bool = False

    @property
    def holder(self) -> str:
        """What messages call the target."""
        return self.target.called

    @property
    def otherwise(self) -> str:
        """What messages advise instead."""
        return self.target.otherwise

    def enters(self, module: str) -> bool:
        """Whether the expert takes part in a module of a file. A running model or a server holds all of its modules."""
        if self.plan is None or self.target is not Target.GGUF or module not in self.plan.slots:
            return True
        return any(term.expert == self.expert for term in self.plan.slots[module].terms)

    @cached_property
    def opaque(self) -> list[tuple[str, OpaqueModule]]:
        """The opaque changes that enter, with their experts."""
        opaque: list[tuple[str, OpaqueModule]] = []
        for slot in self.plan or ():
            opaque += [(term.expert, term.change.part) for term in slot.opaque]
        return opaque

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """The kind of each expert that is not LoRA."""
        kinds: dict[str, str] = {}
        if self.plan is None:
            return kinds

        for name, adapter in self.plan.adapters.items():
            if adapter.opaque:
                kinds[name] = adapter.config.title
        return kinds

    @property
    def tokens(self) -> list[Slot]:
        """The modules with trained tokens."""
        if self.plan is None:
            return []
        return list(self.plan.tokens.values())

    @cached_property
    def changed(self) -> list[Slot]:
        """The changed modules that are not held in full."""
        if self.plan is None:
            return []
        return [slot for slot in self.plan.modules.values() if slot.terms]

    @cached_property
    def fused(self) -> list[str]:
        """The changed modules that are one expert's projection in a mixture, which PEFT fuses on transformers 5."""
        return [slot.name for slot in self.changed if ModuleKeys(slot.name).is_fused]


class Culprit(NamedTuple):
    """What a limit found: the message, the remedy, and the parameter at fault if it is not the caller's."""

    message: str
    remedy: str
    parameter: str | None = None


Found = Iterator[Culprit]


@dataclass(eq=False)
class Limit:
    """Something that some targets cannot hold: decorates a function that finds culprits, and puts it into the table.

    Attributes:
        of: what is looked at: an expert, a slot or a whole plan.
        what: what it is, a row of docs/adapters.md; several limits may share one.
        targets: the targets.
        cells: what the page says, if not "no".
        kind: the class of the error.
    """

    of: str
    what: str
    targets: Target
    cells: Mapping[Target, str] = field(default_factory=dict)
    kind: type[AdapterswapError] = UnsupportedError

    def __call__(self, find: Callable[[Any, Facts], Found]) -> Limit:
        self.find = find
        LIMITS.append(self)
        return self


LIMITS: list[Limit] = []

_Fault = tuple[Limit, Culprit]


@cache
def _limits(of: str, target: Target) -> list[Limit]:
    return [limit for limit in LIMITS if limit.of == of and target in limit.targets]


def _faults(of: str, subject: Adapter | Plan, f: Facts) -> list[_Fault]:
    """The first culprit that each limit finds in an expert or a plan."""
    faults = []
    for limit in _limits(of, f.target):
        culprit = next(limit.find(subject, f), None)
        if culprit is not None:
            faults.append((limit, culprit))
    return faults


def _faults_of_slots(plan: Plan, f: Facts) -> Iterator[_Fault]:
    """The first culprit in each slot; of several for one limit only the first, if that is enough for the target."""
    limits = _limits("slot", f.target)
    found = set[Limit]()
    for slot in plan:
        for limit in limits:
            culprit = next(limit.find(slot, f), None)
            if culprit is None:
                continue
            if limit not in found or f.target & _EVERY:
                yield limit, culprit
            found.add(limit)
            break


def _add(faults: Iterable[_Fault], f: Facts, problems: Problems, name: str = "") -> None:
    """Add faults to the problems, each with the class of its limit; `name` comes before the messages."""
    for limit, culprit in faults:
        message = culprit.message
        if name:
            message = f"{name}: {message}"
        problems.add(message, culprit.remedy, parameter=culprit.parameter or f.parameter, kind=limit.kind)


_of_expert = partial(Limit, "expert")
_of_slot = partial(Limit, "slot")
_of_plan = partial(Limit, "plan")

_OPAQUE = "DoRA, OFT, (IA)³ and other changes that are not s·B·A"
_AVERAGED = "averages of DoRA, OFT, (IA)³ …, and methods on them"
_TOKENS = "trained tokens (`trainable_token_indices`)"
_SAVED = "modules trained in full (`modules_to_save`)"
_TIED = "embeddings tied to the head (`ensure_weight_tying`, or by the base)"
_NONLINEAR = "methods that are not a weighted sum"
_NEW_ROWS = "tokens that the base or an expert lacks"
_THRESHOLD = "`row_threshold`"


@_of_expert(_OPAQUE, _SERVERS | Target.GGUF | Target.DIFF | Target.ANALYZE)
def _not_lora(adapter: Adapter, f: Facts) -> Found:
    for part in adapter.opaque.values():
        if not f.enters(part.name):
            continue
        remedy = f.otherwise
        if not part.is_linear:
            remedy = f"Convert it to rsLoRA with `convert`. Or: {remedy}"
        yield Culprit(
            f"{f.expert} is {part.method} ({part.name}), but {f.holder} needs changes of the form s·B·A", remedy
        )


@_of_expert(_OPAQUE, Target.LIVE, {Target.LIVE: "only DoRA and `lora_bias`"})
def no_variant_of_lora(adapter: Adapter, f: Facts) -> Found:
    if adapter.config.peft_type not in (LORA, TRAINABLE_TOKENS):
        yield Culprit(
            f"{f.expert} is {adapter.config.title}, and the live composer switches only LoRA and its variants",
            f"Convert it to rsLoRA with `convert`. Or: {f.otherwise}",
        )


@_of_expert(_TOKENS, _SERVERS | Target.LIVE | Target.GGUF)
def _with_tokens(adapter: Adapter, f: Facts) -> Found:
    # A config may name tokens of which the file has no rows.
    only_named = adapter.config.trained_tokens and not adapter.tokens
    if only_named or any(map(f.enters, adapter.tokens)):
        yield Culprit(
            f"{f.expert} has trained tokens (trainable_token_indices), which {f.holder} cannot use", f.otherwise
        )


@_of_expert(_TOKENS, Target.WEIGHTS, {Target.WEIGHTS: "not beside full checkpoints"})
def _tokens_beside_a_checkpoint(adapter: Adapter, f: Facts) -> Found:
    if f.plan is None or not f.plan.checkpoints:
        return
    for module in adapter.tokens:
        yield Culprit(
            f"{f.expert} trained single tokens of {module} (trainable_token_indices), but another expert is a full "
            "checkpoint",
            f"Merge {f.expert} into its base first with `merge`, and compose the two checkpoints",
        )


@_of_expert(_SAVED, _SERVERS | Target.GGUF)
def _with_saved(adapter: Adapter, f: Facts) -> Found:
    saved = [module for module in adapter.saved if module not in adapter.tokens and f.enters(module)]
    if saved:
        yield Culprit(
            f"{f.expert} holds {', '.join(saved)} trained in full (modules_to_save), which {f.holder} cannot use",
            "Convert them to LoRA with `adapterswap convert` and a `saved_rank`, or train them as LoRA",
        )


@_of_expert(_TIED, _SERVERS | Target.LIVE, {Target.LIVE: "as LoRA"})
def _tied_experts(adapter: Adapter, f: Facts) -> Found:
    if not adapter.config.tied:
        return

    if f.target is Target.LIVE:  # where PEFT ties LoRA itself
        tied = list(adapter.saved)
    else:
        tied = [module.name for module in adapter.modules.values() if module.embedding]
    for module in tied:
        yield Culprit(
            f"{f.expert} trained {module} together with what is tied to it (ensure_weight_tying), which {f.holder} "
            "does not support",
            f"Train it without ensure_weight_tying. Or: {f.otherwise}",
        )


@_of_expert("LoRA on fused mixture-of-experts layers (`target_parameters`)", _SERVERS)
def _of_a_mixture(adapter: Adapter, f: Facts) -> Found:
    fused = [module.name for module in adapter.modules.values() if module.parameter]
    if fused:
        yield Culprit(
            f"{f.expert} has LoRA on fused mixture-of-experts layers ({and_more(fused, 3)}, target_parameters), which "
            f"{f.holder} cannot serve by name",
            "Merge the composition into full weights with `merge`, or, for llama.cpp, write it with `export`",
        )


@_of_expert("trained biases, and whole weights outside `modules_to_save`", Target.LIVE)
def over_the_base(adapter: Adapter, f: Facts) -> Found:
    # Modules in `modules_to_save` are copies beside the base's own; other whole weights are loaded over these.
    ends = tuple(adapter.config.modules_to_save)
    over = []
    for module in adapter.saved:
        is_requested = bool(ends) and module.endswith(ends)
        if not ModuleKeys(module).is_bias and not is_requested:
            over.append(module)
    over += [key for key in adapter.file.tensors if key.endswith(".original_module.weight")]

    what = ""
    if adapter.config.bias != "none":
        what = f"bias: {adapter.config.bias}"
        if adapter.saved:
            what += f", such as {next(iter(adapter.saved))}"
        what = f"trained biases of the base ({what})"
    elif over:
        what = f"whole weights ({over[0]})"
    if what:
        yield Culprit(
            f"{f.expert} carries {what}, with which PEFT would overwrite the base's own for every expert", f.otherwise
        )


# Slots: of several limits, the first is reported


@_of_slot(_NEW_ROWS, _FILES | Target.GGUF | Target.LIVE, dict.fromkeys(_FILES | Target.GGUF, "only LoRA of one expert"))
def _different_rows(slot: Slot, f: Facts) -> Found:
    if not slot.spans:
        return

    expert = slot.factors_by_rows
    if expert is None and f.target is Target.LIVE:
        expert = "NAME"
    if expert is not None:
        yield Culprit(
            f"{slot.name} has other rows than the base, with different weights, but {f.holder} has one ΔW for all rows",
            f"Give it to one expert in its own rule: {{modules: [{slot.name}], expert: {expert}}}. Or: {f.otherwise}",
        )


@_of_slot(_AVERAGED, _FILES | Target.LIVE)
def averaged(slot: Slot, f: Facts) -> Found:
    for term in slot.opaque:
        if slot.owner is None and not term.change.part.is_linear:
            yield Culprit(
                f"{slot.name} is a blend, but {term.expert} is {term.change.method} there, which cannot be averaged "
                "without the base's weight",
                f"Give it to one expert, or convert {term.expert} to rsLoRA first with `convert`. Or: {f.otherwise}",
            )
        elif slot.method != "linear":
            yield Culprit(
                f"{slot.method} works on s·B·A, but {term.expert} is {term.change.method} at {slot.name}",
                f"Use a linear method such as `soup` or `task_arithmetic`. Or: {f.otherwise}",
                "method",
            )


@_of_slot("blends of LoRA on a module with the module in full", _FILES | Target.LIVE)
def _beside_a_copy(slot: Slot, f: Facts) -> Found:
    others = [term.expert for term in slot.low_rank]
    others += [term.expert for term in slot.opaque]
    if not others:
        return

    for term in slot.whole:
        yield Culprit(
            f"{slot.name} is a blend of {term.expert}, which holds it in full (modules_to_save), and "
            f"{others[0]}, which has LoRA on it",
            f"Give it to one of them in its own rule: {{modules: [{slot.name}], expert: {term.expert}}}. "
            f"Or: {f.otherwise}",
        )


@_of_slot("modules other than [these](gguf.md#which-bases)", Target.GGUF)
def _not_exported(slot: Slot, f: Facts) -> Found:
    if slot.terms and not slot.storage.in_full and not f.exports(slot):
        yield Culprit(f"{slot.name} cannot be exported for this architecture", f.otherwise)


@_of_slot(_TIED, Target.GGUF)
def _tied_to_another(slot: Slot, f: Facts) -> Found:
    if slot.terms and slot.layer is None and f.tied:
        yield Culprit(
            f"{slot.name} is tied to another module in the base. llama.cpp keeps both as one weight, but PEFT changes "
            "only one of them",
            f.otherwise,
        )


@_of_slot("modules in full or tokens, by magnitude weights or methods on ΔW", Target.PLAN)
def in_full_by_a_method(slot: Slot, f: Facts) -> Found:
    if slot.storage.in_full and slot.rule is not None and slot.rule.combines_sides:
        yield Culprit(
            f"{slot.name} {slot.storage.value}, so it cannot be blended by magnitude or by a method on ΔW",
            f"Give it to one expert or explicit weights in its own rule: {{modules: [{slot.name}], expert: NAME}}",
        )


@_of_slot(
    "modules in full, averaged with an unchanged one", Target.PLAN, {Target.PLAN: "with `base_model`"}, BaseModelError
)
def _needs_the_base(slot: Slot, f: Facts) -> Found:
    is_averaged = slot.storage.in_full and slot.rule is not None and slot.terms
    if is_averaged and not f.base_at_hand and slot.needs_base:
        yield Culprit(
            f"Averaging {slot.name} with {' and '.join(slot.absent) or 'the base'} needs the base's own weights of "
            "this module",
            "Pass the base's folder as `base_model`",
            "base_model",
        )


@_of_slot("methods on LoRA's factors, magnitude weights and `row_threshold`, with other changes than LoRA", Target.PLAN)
def _without_factors(slot: Slot, f: Facts) -> Found:
    rule = slot.rule
    threshold = f.plan is not None and f.plan.composition.row_threshold is not None
    if rule is None or not (rule.needs_factors or rule.weights or threshold):
        return

    for name in slot.requested:
        if name not in f.kinds:  # it is LoRA
            continue
        kind = f.kinds[name]
        if threshold:
            message = f"row_threshold compares rows of s·B·A, but {name} is {kind}"
            yield Culprit(message, "Remove `row_threshold`", "row_threshold")
        if rule.needs_factors:
            remedy = f"Use another method, such as ties, or convert {name} to LoRA with `convert`"
            yield Culprit(f"{rule.method} works on LoRA's factors, but {name} is {kind}", remedy, "method")
        yield Culprit(f"{name} is {kind}, whose magnitude depends on the base's weights", "Use explicit weights")

    if not rule.needs_factors:
        return

    for term in slot.whole:
        yield Culprit(
            f"{rule.method} works on LoRA's factors, but {term.expert} holds whole weights",
            "Extract an adapter from the full checkpoint with `adapterswap extract`, or use another method",
            "method",
        )


@_of_slot("methods other than weighted sums, on mixture-of-experts layers stored fused", Target.WEIGHTS)
def _of_many_matrices(slot: Slot, f: Facts) -> Found:
    if slot.matrices > 1 and not slot.is_linear:
        yield Culprit(
            f"{slot.name} is one tensor with the matrices of {slot.matrices} experts, but {slot.method} is computed "
            "only on tensors that hold one matrix",
            "Use a weighted sum (layer_swap, soup or task_arithmetic), or a base whose files hold each matrix singly",
            "method",
        )


@_of_slot("blends of integers, and of numbers without arithmetic", Target.WEIGHTS)
def _not_numbers(slot: Slot, f: Facts) -> Found:
    if slot.copied is not None and slot.copied.tensor.dtype == slot.dtype:
        return

    dtypes = [whole.tensor.dtype for _, whole in slot.all_whole]
    dtypes.append(slot.dtype)
    if slot.base is not None:
        dtypes.append(slot.base.tensor.dtype)
    for dtype in dtypes:
        if dtype not in Dtype.FLOATS:
            yield Culprit(
                f"{slot.name} is {dtype}, but only {', '.join(Dtype.FLOATS)} can be blended or changed",
                "Give it to one expert of the same dtype in its own rule, or save the checkpoint in another dtype",
            )


@_of_plan("full checkpoints", _LOW_RANK)
def full_checkpoint(plan: Plan, f: Facts) -> Found:
    if plan.is_model:
        yield Culprit(
            f"{next(iter(plan.checkpoints))} is a full checkpoint, but only compositions of adapters can be written as "
            "an adapter, loaded or served",
            "Write full weights with `merge`, or extract an adapter from it first with `extract`",
        )


@_of_plan("compositions that change nothing", _FILES | Target.GGUF, kind=CompositionError)
def _nothing(plan: Plan, f: Facts) -> Found:
    if not f.changed and not f.tokens:
        yield Culprit(
            "every module stays as in the base, so there is nothing to write", "Give some layers to an expert"
        )


@_of_plan("compositions without the head of a `task_type`", _FILES)
def _lost_head(plan: Plan, f: Facts) -> Found:
    heads = TASK_HEADS.get(plan.task_type or "", ())
    for name, slot in plan.saved.items():
        if not slot.terms and name.rpartition(".")[2] in heads:
            yield Culprit(
                f"The rule `{slot.rule}` gives {name} to the base, but PEFT cannot load an adapter for "
                f"{plan.task_type} without it",
                f"Give it to an expert in its own rule: {{modules: [{name}], expert: NAME}}",
            )


@_of_plan("tokens beside other kinds than LoRA or, without LoRA, of two modules or with modules in full", _FILES)
def _unloadable_tokens(plan: Plan, f: Facts) -> Found:
    if not f.tokens:
        return

    first = f.tokens[0]
    beside = []
    for expert, part in f.opaque:
        if part.lora is None:
            beside.append(f"{expert} is {part.method}")
    if not f.changed:
        for name, slot in plan.saved.items():
            if slot.terms and name not in plan.tokens:
                beside.append(f"{name} in full")
        for slot in f.tokens:
            if slot.tokens != first.tokens:
                beside.append(f"other ones of {slot.name}")
    if beside:
        yield Culprit(
            f"the result has trained tokens of {first.name} and {beside[0]}, but PEFT loads the two together "
            "only beside LoRA",
            f"Give {first.name} to the base, or some modules with LoRA to an expert. Or: {f.otherwise}",
        )


@_of_plan("experts of several kinds, or with different settings", _FILES)
def _mixed(plan: Plan, f: Facts) -> Found:
    if not f.opaque:
        return

    expert, first = f.opaque[0]
    remedy = f"Give all modules to experts of one kind. Or: {f.otherwise}"
    lora = []
    for slot in f.changed:
        lora += [(slot.name, term) for term in slot.low_rank]

    # Beside LoRA: of the variants with factors, only DoRA needs more than LoRA has.
    if lora and (first.lora is None or first.settings.get("use_dora")):
        name, term = lora[0]
        what = f"{expert} is {first.method} and {term.expert} is LoRA ({name}), but an adapter holds only one kind"
        if first.lora is not None:
            what += ". Writing LoRA as DoRA would need the norms of the base's weights"
        yield Culprit(what, remedy)

    if first.settings.get("lora_bias"):
        for name, term in lora:
            if term.lora.embedding or term.lora.parameter:
                yield Culprit(
                    f"{expert} has biases (lora_bias) and {term.expert} has LoRA on {name}, an embedding or a "
                    "parameter, for which PEFT supports no such biases",
                    f"Give {name} to an expert without LoRA on it. Or: {f.otherwise}",
                )

    # Beside each other
    for other, part in f.opaque:
        if part.method != first.method:
            what = f"{expert} is {first.method} and {other} is {part.method}"
            yield Culprit(f"{what}, but an adapter holds only one kind", remedy)
        elif part.settings != first.settings:
            listed = _differing(first, part)
            if listed:
                what = f"{expert} and {other} are {part.method}"
                yield Culprit(f"{what} with settings that one adapter cannot hold: {listed}", remedy)


def _differing(first: OpaqueModule, second: OpaqueModule) -> str:
    """The settings in which two modules differ, as PEFT reads them: absent keys have PEFT's defaults."""
    from peft import PeftConfig

    ours = PeftConfig.from_peft_type(peft_type=first.peft_type, **first.settings).to_dict()
    theirs = PeftConfig.from_peft_type(peft_type=second.peft_type, **second.settings).to_dict()

    differing = []
    for key in sorted({*first.settings, *second.settings} & ours.keys()):
        if ours[key] != theirs[key]:
            differing.append(f"{key} is {ours[key]!r} and {theirs[key]!r}")
    return "; ".join(differing)


@_of_plan(_OPAQUE, Target.PORTABLE)
def not_plain(plan: Plan, f: Facts) -> Found:
    what = [f"{expert} is {part.method} at {part.name}" for expert, part in f.opaque]
    if f.tokens and not f.changed:
        what.append("the result has only trained tokens")
    for found in what:
        yield Culprit(f"the portable layout is plain LoRA, but {found}", "Pass `layout=exact`", "layout")


@_of_plan("DoRA above `max_rank`", _FILES)
def _too_high(plan: Plan, f: Facts) -> Found:
    if not f.max_rank:
        return
    for expert, part in f.opaque:
        if part.lora is not None and not part.is_linear and part.lora.rank > f.max_rank:
            yield Culprit(
                f"{part.name} has rank {part.lora.rank}, but {expert} is {part.method}, which cannot be truncated",
                f"Pass `max_rank={part.lora.rank}` or more, or leave it out",
                "max_rank",
            )


@_of_plan("VeRA without the widest module that shares its projections", _FILES)
def _lost_width(plan: Plan, f: Facts) -> Found:
    sharing = {}
    for expert, part in f.opaque:
        if part.shares_tensors:
            sharing[expert] = part
    if not sharing:
        return

    result = {_leaf(slot) for slot in plan if slot.opaque}
    for expert, part in sharing.items():
        own = {_leaf(module) for module in plan.adapters[expert].opaque.values()}
        for lost in sorted(own - result):
            yield Culprit(
                f"the result has no module like {lost} of {expert}, but the widest module decides the width of the "
                f"projections that {part.method} shares",
                f"Keep one such module. Or: {f.otherwise}",
            )


def _leaf(module: Slot | OpaqueModule) -> str:
    """A module's name without its layer's number; modules that share it have the same shape in nearly all models."""
    if module.layer is None:
        return module.name
    return module.name.replace(f".{module.layer}.", ".", 1)


@_of_plan("(IA)³ on inputs and outputs of modules whose names end alike", _FILES)
def _indistinct(plan: Plan, f: Facts) -> Found:
    if not f.opaque or f.opaque[0][1].peft_type != "IA3":
        return

    inputs = {}
    for slot in plan:
        if slot.opaque:
            inputs[slot.name] = any(not term.change.part.on_bias for term in slot.opaque)

    # PEFT matches `feedforward_modules` against the ends of names.
    ends = tuple(name for name, scales in inputs.items() if scales)
    for name, scales in inputs.items():
        if ends and not scales and name.endswith(ends):
            yield Culprit(
                f"(IA)³ scales the outputs of {name} but the inputs of a module whose name ends in the same way, and "
                "PEFT cannot distinguish them",
                f.otherwise,
            )


# A projection → the one with which it is fused into one parameter, gate_up_proj
_FUSED_WITH = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


@_of_plan("LoRA on single experts of mixture-of-experts layers (transformers 4) that PEFT cannot fuse", _FILES)
def _unfused(plan: Plan, f: Facts) -> Found:
    if not f.fused:
        return

    # Modules that the composition leaves to the base are counted as well.
    fused = [name for name in plan.modules if ModuleKeys(name).is_fused]

    reasons = []
    for slot in f.changed:
        keys = ModuleKeys(slot.name)
        if slot.low_rank and slot.low_rank[0].lora.parameter:
            reasons.append(f"{fused[0]} has LoRA on one expert, but {slot.name} on all experts as one parameter")
        elif slot.opaque and keys.is_fused:
            reasons.append(f"{slot.name} is not plain LoRA")
        elif keys.is_like_fused and not keys.is_fused:
            reasons.append(f"{slot.name} and experts ({fused[0]}) both have LoRA, and PEFT would take it for one")

    # Every expert of a list needs what any of them has, and both of two modules that become one parameter.
    names_within = dict[str, set[str]]()
    for name in fused:
        start, _, within = name.rpartition(".experts.")
        names_within.setdefault(start, set()).add(within)
    required = set().union(*names_within.values())  # the names with the expert's number, such as `3.up_proj`
    for name in sorted(required):
        for end, other in _FUSED_WITH.items():
            if name.endswith(end):
                required.add(f"{name.removesuffix(end)}{other}")
    for start, names in names_within.items():
        reasons += [f"No expert has LoRA on {start}.experts.{missing}" for missing in sorted(required - names)]

    for reason in reasons:
        yield Culprit(
            f"{reason}: PEFT on transformers 5 fuses plain LoRA on all experts of a layer, or none", f.otherwise
        )


_BESIDE_EXPERTS = "LoRA on shared experts and dense MLPs of mixtures, where PEFT takes it for the experts'"


@_of_expert(_BESIDE_EXPERTS, Target.LIVE)
def _loaded_beside_experts(adapter: Adapter, f: Facts) -> Found:
    if f.plan is None:  # while it is loaded, not at every switch
        base = LocalBase(adapter.config.base_reference)
        yield from _lost_beside_experts(adapter.modules, base, adapter.config.task_type)


@_of_plan(_BESIDE_EXPERTS, _FILES | Target.VLLM)
def _beside_experts(plan: Plan, f: Facts) -> Found:
    modules = {slot.name: slot.low_rank[0].lora for slot in f.changed if slot.low_rank}
    if modules.keys().isdisjoint(f.fused):  # `_unfused` knows these
        yield from _lost_beside_experts(modules, plan.base.local, plan.task_type)


def _lost_beside_experts(modules: Mapping[str, LoraModule], base: LocalBase, task_type: str | None) -> Found:
    lost = taken_for_experts(modules, base, task_type)
    if lost:
        yield Culprit(
            f"PEFT would not load LoRA on {and_more(lost)} into {base.reference}: with transformers 5 it takes these "
            "modules for parts of the mixture's fused experts",
            "Write full weights with `merge`, which does not depend on PEFT, or give these modules to the base in a "
            "rule of their own",
        )


@_of_plan("methods on whole weights", _LOW_RANK)
def _on_weights(plan: Plan, f: Facts) -> Found:
    for slot in f.changed:
        if slot.rule is not None and slot.rule.acts_on_weights:
            yield Culprit(
                f"{slot.method} combines whole weights, including the base's, but {f.holder} holds only ΔW",
                "Write full weights with `adapterswap merge`, or use a method on ΔW (`adapterswap methods` lists them)",
                f.parameter or "method",
            )


@_of_plan(_NONLINEAR, _FILES | Target.GGUF, dict.fromkeys(_FILES | Target.GGUF, "with `max_rank`"))
def _of_full_rank(plan: Plan, f: Facts) -> Found:
    if f.max_rank is not None or f.max_error is not None:
        return
    for slot in f.changed:
        if not slot.has_low_rank:
            message = f"{slot.method} gives {slot.name} a ΔW of full rank, and {f.holder} has a low one"
            yield Culprit(message, "Pass `max_rank` or `max_error`", "max_rank")


@_of_plan(_NONLINEAR, _SERVERS | Target.LIVE)
def _not_a_sum(plan: Plan, f: Facts) -> Found:
    for slot in f.changed:
        if not slot.is_linear:
            yield Culprit(
                f"{slot.method} is not a weighted sum of the experts' ΔW, so {f.holder} cannot compute it as it runs",
                "Write it first with `adapterswap compose` and a `max_rank`, and load or serve the result",
            )


@_of_plan(_THRESHOLD, Target.LIVE | Target.LLAMA)
def _threshold(plan: Plan, f: Facts) -> Found:
    if plan.composition.row_threshold is not None:
        yield Culprit(
            f"row_threshold sets rows of ΔW to zero, but {f.holder} can only scale whole modules", f.otherwise
        )


@_of_plan(_THRESHOLD, Target.WEIGHTS, {Target.WEIGHTS: "not beside full checkpoints"}, CompositionError)
def _threshold_of_a_checkpoint(plan: Plan, f: Facts) -> Found:
    if plan.composition.row_threshold and plan.checkpoints:
        message = "row_threshold applies to rows of adapters' ΔW, but an expert is a full checkpoint"
        yield Culprit(message, "Remove it", "row_threshold")


@_of_plan("a module that one expert holds in full and another adapts", Target.LIVE)
def _clashing(plan: Plan, f: Facts) -> Found:
    odd = clash({name: (adapter.saved, adapter.parts) for name, adapter in plan.adapters.items()})
    if odd is not None:
        yield Culprit(odd, f.otherwise)


def clash(experts: Mapping[str, tuple[Collection[str], Collection[str]]]) -> str | None:
    """Why PEFT cannot hold experts side by side: one holds a module in full that another adapts.

    Args:
        experts: the modules that each holds in full, and all that it changes.
    """
    for expert, (in_full, _) in experts.items():
        for name in in_full:
            for second, (in_full_there, changed) in experts.items():
                for part in changed:
                    # Two experts may both hold a module in full; PEFT keeps a copy for each.
                    is_adapted = part == name and name not in in_full_there
                    if is_adapted or part.startswith(f"{name}."):
                        return (
                            f"{expert} holds {name} in full and {second} adapts {part}, which PEFT cannot hold side "
                            "by side"
                        )
    return None


@_of_plan("names with dots, or inside `lora_`", Target.LIVE)
def _unfit_names(plan: Plan, f: Facts) -> Found:
    for name in plan.experts:
        if not ExpertName(name).fits_peft:
            yield Culprit(f"PEFT cannot hold an adapter under the name {name!r}", f.otherwise)


@_of_plan("ranks above the server's `max_lora_rank`", Target.VLLM)
def _above_the_server(plan: Plan, f: Facts) -> Found:
    if f.most is not None and plan.largest_rank > f.most:
        yield Culprit(
            f"it has rank {plan.largest_rank}, and this server takes up to {f.most}",
            "Request one without transition zones, or start the server with a higher `max_lora_rank`",
            "max_lora_rank",
        )
