"""`adapterswap slice`: cut a shell or a core out of an expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from adapterswap.cli.options import Count, Expert, Result
from adapterswap.cli.printing import echo, human_bytes, note, rare_collections, working
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from adapterswap.experts.adapter import Adapter, FullModule, OpaqueModule


@declare("slice")
@rare_collections()
def command(
    expert: Expert,
    *,
    layers: Annotated[str, "LAYERS"],
    stack: Literal["encoder", "decoder"] | None = None,
    num_layers: Annotated[Count, "L"] | None = None,
    base_model: Expert | None = None,
    result: Result,
) -> None:
    """Cut an expert to some layers: a shell or a core.

    A shell holds only the outer layers of a language expert, a core only the middle of a task expert. Composing the two
    gives the same tensors and config as composing the whole experts. A composition that needs a layer that was cut away
    fails. Modules outside the layers are kept.

    Args:
        layers: Layers to keep, such as 0-4,30-31.
        stack: In a model with both stacks, keep the layers of this one only.  [default: both]
        base_model: The expert's base model, if it names none or another path.
    """
    from adapterswap.experts.adapter import open_adapter
    from adapterswap.files.folders import check_target
    from adapterswap.model.layers import format_depth
    from adapterswap.planning.composing import slice_layers
    from adapterswap.writing.adapter import COMPOSED, prepare, write_prepared
    from adapterswap.writing.outputs import Form

    adapter = open_adapter(expert)
    plan = slice_layers(adapter, layers, stack=stack, num_layers=num_layers, base_model=base_model)
    with working("reading the expert"):
        prepared = prepare(plan, Form())
    if result.dry_run:
        check_target(result.out_path, kind=COMPOSED, overwrite=result.overwrite, inputs=plan.inputs)
    else:
        with working("writing"):
            write_prepared(prepared, result.out_path, overwrite=result.overwrite)
    adapted, kept = sum(bool(slot.terms) for slot in plan.modules.values()), plan.rules[0].layers
    nbytes, share = prepared.layout.nbytes, prepared.layout.nbytes / _loaded_bytes(adapter)
    content: dict[str, Any] = {"layers": kept, "modules": adapted, **({"stack": stack} if stack else {})}
    content |= {"of_modules": len(plan.modules), "bytes": nbytes, "share": share}

    def show() -> None:
        of_stack, depth = f"{stack} " if stack else "", format_depth(plan.num_layers)
        echo(
            f"{of_stack}layers {kept} of {depth}: {adapted} of {len(plan.modules)} modules, {human_bytes(nbytes)}, "
            f"{share:.0%} of the whole expert"
        )
        for remark in plan.notes:
            note(remark)

    result.report(lambda: content, show)


def _loaded_bytes(adapter: Adapter) -> int:
    """The size in bytes of what PEFT loads: a file can hold modules that its config does not target."""
    lora = (tensor for module in adapter.modules.values() for tensor in (module.a, module.b))
    copies = (module.base for module in adapter.factors.values())
    others: list[OpaqueModule | FullModule] = [*adapter.opaque.values(), *adapter.saved.values()]
    tensors = (tensor for module in others for tensor in module.tensors.values())
    return sum(tensor.nbytes for tensor in (*lora, *copies, *tensors) if tensor is not None)
