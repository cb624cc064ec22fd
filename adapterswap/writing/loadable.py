"""Names and a layout that PEFT loads on transformers 5, for experts that were trained with transformers 4.

transformers 5 renamed the modules of multimodal models and fused the experts of most mixtures of experts into one
parameter per layer. PEFT converts such adapters when it loads them, but not the full names and the per-module patterns
that a composed config needs. Knows plans and names, and asks PEFT; reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adapterswap.arithmetic.outputs import Form
from adapterswap.arithmetic.peft_config import is_fused
from adapterswap.changes.kinds import LowRank
from adapterswap.errors import AdapterswapError, BaseModelError, Problems, UnsupportedError
from adapterswap.experts.adapter_keys import factor_key
from adapterswap.experts.anatomy import names_in_memory
from adapterswap.experts.checkpoints import MODEL_CONFIG
from adapterswap.experts.empty_models import empty_model_as_saved
from adapterswap.experts.layers import language_config
from adapterswap.experts.peft_trial import try_in_peft
from adapterswap.experts.sources import base_config, find_source
from adapterswap.planning.checks import TASK_HEADS
from adapterswap.planning.plan import Plan
from adapterswap.planning.slots import Slot, Term

__all__ = ["check_heads", "loadable_form", "with_loadable_names"]

_OLD_PREFIX = "language_model."  # of multimodal models in transformers 4; a few audio models still have it

_PARTS = re.compile(r"(^|\.)(language_model|text_model|model\.visual)\.")

# The projections that PEFT takes for parts of fused experts, wherever they are in the model.
_FUSED = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"))  # fused into one parameter, gate_up_proj


def check_heads(plan: Plan) -> None:
    """Whether the adapter holds the modules that PEFT loads in full for its task type.

    Raises:
        UnsupportedError: an expert trained one, such as `score`, and the rules give it to the base. PEFT cannot load an
            adapter without it, and the base has no such head of its own.
    """
    problems = Problems(UnsupportedError)
    for name, module in plan.saved.items():
        if not module.terms and name.rpartition(".")[2] in TASK_HEADS.get(plan.task_type or "", ()):
            problems.add(
                f"The rule `{module.rule}` gives {name} to the base, and PEFT cannot load an adapter for "
                f"{plan.task_type} without it",
                f"Give it to an expert, in a rule of its own: {{modules: [{name}], expert: NAME}}",
            )
    problems.raise_if_any()


def with_loadable_names(plan: Plan) -> Plan:
    """The plan under the names that the base's modules have in the installed transformers.

    Raises:
        BaseModelError: the experts have names of transformers 4, and no base is known to match them with, or it has no
            modules of these names.
        NotFoundError: the base does not exist, here or on the Hub.
    """
    names = list(plan.slots)
    reference = plan.base_reference
    old = any(name.startswith(_OLD_PREFIX) for name in names)
    if not old and not _may_be_old(names, reference):
        return plan
    if reference is None:
        raise BaseModelError(
            f"The experts name their modules {names[-1]}, which may be a name of transformers 4, and no base model is "
            "named to match it with",
            "Pass `base_model`",
            parameter="base_model",
        )
    folder: Path = find_source(reference, [MODEL_CONFIG], what="base model").folder
    try:
        renamed = names_in_memory(folder, reference, names)
    except BaseModelError:
        if old:
            raise
        return plan  # the names of the text-only model with the same decoder, which PEFT loads into that
    return replace(
        plan,
        slots={renamed[name]: _renamed(slot, renamed[name]) for name, slot in plan.slots.items()},
    )


def _may_be_old(names: Sequence[str], reference: str | None) -> bool:
    """Whether transformers may have other names for these modules now: it is asked, which takes seconds.

    In transformers 4 Qwen2-VL's modules were `model.layers.N` and `visual.blocks.N`, as if nothing else were in the
    model, and Nemotron-H's were `backbone.layers.N`, as Mamba's still are.
    """
    if reference is None or any(_PARTS.search(name) for name in names):
        return False
    try:
        _, config = base_config(reference)
    except AdapterswapError:  # it is not at hand, and nothing else needs it
        return False
    return language_config(config) is not config or any(name.startswith("backbone.") for name in names)


def _renamed(slot: Slot, name: str) -> Slot:
    def renamed(term: Term) -> Term:
        if not isinstance(term.change, LowRank):
            return term
        return replace(term, change=replace(term.change, lora=replace(term.change.lora, name=name)))

    return replace(slot, name=name, module=name, terms=tuple(map(renamed, slot.terms)))


def loadable_form(plan: Plan, form: Form) -> Form:
    """The form in which PEFT loads the plan's adapter: the portable layout where it fuses experts.

    PEFT gives all fused experts one rank and one alpha, and ignores patterns on their old names.

    Raises:
        UnsupportedError: the plan has LoRA on a module that PEFT would take for a part of the fused experts, or on only
            some of the experts of a layer; PEFT does not fuse the experts of this base.
        NotFoundError, BaseModelError: the base's config is needed, and not at hand or damaged.
    """
    modules = plan.modules
    fused = [name for name in modules if is_fused(name)]
    if not any(modules[name].terms for name in fused):
        return form
    remedy = "Merge the composition into the base with `merge`, which does not depend on PEFT"
    for module in modules.values():
        if module.terms and module.name.rpartition(".")[2] in _FUSED and not is_fused(module.name):
            raise UnsupportedError(
                f"{module.name} has LoRA beside LoRA on experts ({fused[0]}), and PEFT on transformers 5 takes it for "
                "one of the fused experts",
                remedy,
            )
    held: dict[str, set[str]] = {}  # by the list of experts, the names of what is in it
    for name in fused:
        start, _, within = name.rpartition(".experts.")
        held.setdefault(start, set()).add(within)
    every = set().union(*held.values())
    for pair in (_PAIRS, [(other, one) for one, other in _PAIRS]):
        every |= {f"{name.removesuffix(one)}{other}" for name in every for one, other in pair if name.endswith(one)}
    for start, names in held.items():
        if missing := sorted(every - names):
            raise UnsupportedError(
                f"No expert has LoRA on {start}.experts.{missing[0]}, and PEFT on transformers 5 loads the experts of "
                "a layer, fused into one parameter, all together or not at all",
                remedy,
            )
    _check_fusing(plan, next(name for name in fused if modules[name].terms), remedy)
    return replace(form, layout="portable")


def _check_fusing(plan: Plan, module: str, remedy: str) -> None:
    """Whether PEFT fuses LoRA on experts for this base: it does so for some types of models, and drops it for others.

    PEFT is asked: it loads factors of rank 1 for the layer of `module` into the model, built without weights.
    """
    reference = plan.base_reference
    if reference is None:
        raise BaseModelError(
            f"The experts have LoRA on {module}, which PEFT loads into some base models only, and no base model is "
            "named",
            "Pass `base_model`",
            parameter="base_model",
        )
    import torch
    from peft import LoraConfig

    model = empty_model_as_saved(find_source(reference, [MODEL_CONFIG], what="base model").folder, reference)
    layer = f"{module.partition('.experts.')[0]}.experts."
    held = {name: part for adapter in plan.adapters.values() for name, part in adapter.modules.items()}
    parts = [part for name, part in held.items() if name.startswith(layer)]
    tensors = {}
    for part in parts:
        tensors[factor_key(part.name, "A", embedding=False)] = torch.empty(1, part.in_features, device="meta")
        tensors[factor_key(part.name, "B", embedding=False)] = torch.empty(part.out_features, 1, device="meta")
    trial = try_in_peft(model, LoraConfig(r=1, target_modules=[part.name for part in parts]), tensors)
    if trial is None or trial.dropped:
        raise UnsupportedError(
            f"PEFT cannot load LoRA on {module} into {reference}: transformers 5 fuses the experts of a layer, and "
            "PEFT does not convert adapters for this type of model",
            remedy,
        )
