"""Plan the active composition with experts on disk, so that it can be written.

An expert is read from its own file if the file still holds the numbers in the model. A composition saved live then has
the same bytes as one composed from files. Otherwise PEFT saves the expert first. Knows inventories and plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adapterswap.errors import AdapterswapError
from adapterswap.experts.adapters import Adapter, LoraModule, OpaqueModule, Part, open_adapter
from adapterswap.experts.peft_kinds import LORA_PARTS
from adapterswap.files.numbers import open_files, read_numbers
from adapterswap.files.scratch import scratch_folder
from adapterswap.files.tensorfile import Tensor
from adapterswap.live.inventory import Inventory, beside, factors
from adapterswap.planning.making import make_plan
from adapterswap.planning.plan import Plan

if TYPE_CHECKING:
    import torch

__all__ = ["plan_on_disk"]


@contextmanager
def plan_on_disk(plan: Plan, inventory: Inventory) -> Iterator[Plan]:
    """The same plan, made with experts that are on disk until the block ends.

    Args:
        plan: a plan of loaded experts.
        inventory: what is loaded.

    Raises:
        AdapterswapError: of the classes that `open_adapter` and `make_plan` raise.
    """
    with ExitStack() as stack:
        experts = {}
        for name, file in plan.adapters.items():
            if _holds(file, name, inventory):
                experts[name] = file
            else:
                saved = stack.enter_context(_saved(name, inventory))
                experts[name] = replace(saved, kept_layers=file.kept_layers)
        composition = plan.composition
        bases = {(adapter.config.base_model, adapter.config.revision): None for adapter in experts.values()}
        if len(bases) > 1 and composition.base_model is None:  # they are loaded in one model, so they have one base
            declared = next(name for name, _ in bases if name)
            composition = composition.model_copy(update={"base_model": declared})
        yield make_plan(composition, experts, num_layers=plan.num_layers)


def _holds(file: Adapter, name: str, inventory: Inventory) -> bool:
    """Whether a file holds exactly the numbers of a loaded expert."""
    loaded = {module: layer for module, layer in inventory.layers.items() if name in layer.r}
    saved = {module: wrapper for module, wrapper in inventory.in_full.items() if name in wrapper.modules_to_save}
    if loaded.keys() != file.factors.keys() or saved.keys() != file.saved.keys():
        return False
    for module, layer in loaded.items():
        part = file.factors[module]
        if (part.rank, part.alpha, part.rslora) != (layer.r[name], layer.lora_alpha[name], layer.use_rslora[name]):
            return False
    try:
        with open_files([file.file]) as files:
            handle = files[file.file.path]
            pairs = [pair for module, layer in loaded.items() for pair in _tensors(file.parts[module], layer, name)]
            for module, wrapper in saved.items():
                state = wrapper.modules_to_save[name].state_dict()
                pairs += [(place, state.get(key)) for key, place in file.saved[module].tensors.items()]
            return all(_equal(name, handle, place, tensor) for place, tensor in pairs)
    except AdapterswapError:  # the file is gone or was replaced
        return False


def _tensors(part: Part, layer: Any, name: str) -> list[tuple[Tensor, Any]]:
    """The tensors of an adapted module in the file, each with its tensor in the model; None if there is none."""
    lora = part.lora if isinstance(part, OpaqueModule) else part
    assert isinstance(lora, LoraModule)
    loaded = factors(layer, name)
    pairs: list[tuple[Tensor, Any]] = [(lora.a, loaded and loaded.a), (lora.b, loaded and loaded.b)]
    if isinstance(part, OpaqueModule):
        extra = beside(layer, name)
        pairs += [(place, extra.get(key)) for key, place in part.tensors.items() if key in LORA_PARTS]
    return pairs


def _equal(name: str, handle: int, place: Tensor, tensor: torch.Tensor | None) -> bool:
    import torch

    return tensor is not None and torch.equal(
        torch.from_numpy(read_numbers(name, handle, place)).reshape(tensor.shape), tensor.detach().float().cpu()
    )


@contextmanager
def _saved(name: str, inventory: Inventory) -> Iterator[Adapter]:
    """A loaded expert as PEFT saves it, in a temporary folder."""
    with scratch_folder("live") as place:
        with warnings.catch_warnings():
            # PEFT mistakes the biases of `lora_bias` for factors that ZeRO-3 left empty.
            warnings.filterwarnings("ignore", r"Adapter .* LoRA tensor\(s\) have invalid shape")
            inventory.model.save_pretrained(place, selected_adapters=[name], save_embedding_layers=False)
        folder = place / name
        yield open_adapter(folder if folder.is_dir() else place)
