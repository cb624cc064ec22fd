"""Names and a layout that PEFT loads on transformers 5, for experts that were trained with transformers 4.

transformers 5 renamed the modules of multimodal models and fused the experts of most mixtures of experts into one
parameter per layer. PEFT converts such adapters when it loads them, but not the full names and the per-module patterns
that a composed config needs. Knows plans and names; reads no tensor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from adapterswap.arithmetic.outputs import Form
from adapterswap.arithmetic.peft_config import is_fused
from adapterswap.errors import AdapterswapError, Problems
from adapterswap.experts.adapters import FullModule, LoraModule
from adapterswap.experts.checkpoints import MODEL_CONFIG
from adapterswap.experts.sources import find_source
from adapterswap.planning.modules import ModulePlan
from adapterswap.planning.plan import Plan
from adapterswap.planning.plan_checks import TASK_HEADS

__all__ = ["check_heads", "loadable_form", "with_loadable_names"]

_Module = TypeVar("_Module", LoraModule, FullModule)

_OLD_PREFIX = "language_model."  # of multimodal models in transformers 4; a few audio models still have it

# The projections that PEFT takes for parts of fused experts, wherever they are in the model.
_FUSED = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"))  # fused into one parameter, gate_up_proj


def check_heads(plan: Plan) -> None:
    """Whether the adapter holds the modules that PEFT loads in full for its task type.

    Raises:
        AdapterswapError: an expert trained one, such as `score`, and the rules give it to the base. PEFT cannot load an
            adapter without it, and the base has no such head of its own.
    """
    problems = Problems()
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
        AdapterswapError: the experts have names of transformers 4, and the base is not at hand to match them with, or
            has no modules of these names.
    """
    names = [*plan.modules, *plan.saved]
    if not any(name.startswith(_OLD_PREFIX) for name in names):
        return plan
    reference = plan.base_reference
    if reference is None:
        raise AdapterswapError(
            f"The experts name their modules {names[-1]}, which may be a name of transformers 4, and no base model is "
            "named to match it with",
            "Pass `base_model`",
        )
    from adapterswap.bases import names_in_memory

    folder: Path = find_source(reference, [MODEL_CONFIG], what="base model").folder
    renamed = names_in_memory(folder, reference, names)
    return replace(
        plan,
        modules={renamed[name]: _renamed(module, renamed[name]) for name, module in plan.modules.items()},
        saved={renamed[name]: _renamed(module, renamed[name]) for name, module in plan.saved.items()},
    )


def _renamed(module: ModulePlan[_Module], name: str) -> ModulePlan[_Module]:
    terms = tuple(replace(term, module=replace(term.module, name=name)) for term in module.terms)
    return replace(module, name=name, terms=terms)


def loadable_form(plan: Plan, form: Form) -> Form:
    """The form in which PEFT loads the plan's adapter: the portable layout where it fuses experts.

    PEFT gives all fused experts one rank and one alpha, and ignores patterns on their old names.

    Raises:
        AdapterswapError: the plan has LoRA on a module that PEFT would take for a part of the fused experts, or on only
            some of the experts of a layer.
    """
    fused = [name for name in plan.modules if is_fused(name)]
    if not any(plan.modules[name].terms for name in fused):
        return form
    remedy = "Merge the composition into the base with `adapterswap merge`, which does not depend on PEFT"
    for module in plan:
        if module.terms and module.name.rpartition(".")[2] in _FUSED and not is_fused(module.name):
            raise AdapterswapError(
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
            raise AdapterswapError(
                f"No expert has LoRA on {start}.experts.{missing[0]}, and PEFT on transformers 5 loads the experts of "
                "a layer, fused into one parameter, all together or not at all",
                remedy,
            )
    return replace(form, layout="portable")
