"""Write what a model computes with as adapters on disk: the experts, and from them the active composition.

An expert whose file still holds what the model computes with is read from there, so that a composition saved live has
the bytes of one composed from files; any other is saved by PEFT first. Knows inventories, plans and writing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.experts.adapters import Adapter, LoraModule, open_adapter
from adapterswap.files.numbers import open_files, read_numbers
from adapterswap.live.inventory import Inventory, factors
from adapterswap.planning.making import make_plan
from adapterswap.planning.plan import Plan

__all__ = ["plan_on_disk"]


@contextmanager
def plan_on_disk(plan: Plan, inventory: Inventory) -> Iterator[Plan]:
    """The same plan made of experts that lie on disk, at least until the block ends.

    Args:
        plan: over experts that are loaded.
        inventory: what is loaded.

    Raises:
        AdapterswapError: of the classes that `open_adapter` and `make_plan` raise.
    """
    with ExitStack() as stack:
        experts = {}
        for name, file in plan.adapters.items():
            experts[name] = file if _holds(file, name, inventory) else stack.enter_context(_saved(name, inventory))
        composition = plan.composition
        bases = {(adapter.config.base_model, adapter.config.revision): None for adapter in experts.values()}
        if len(bases) > 1 and composition.base_model is None:  # they sit in one model, so they are of one base
            declared = next(name for name, _ in bases if name)
            composition = composition.model_copy(update={"base_model": declared})
        yield make_plan(composition, experts, num_layers=plan.num_layers)


def _holds(file: Adapter, name: str, inventory: Inventory) -> bool:
    """Whether a file holds exactly the numbers of a loaded expert."""
    loaded = {module: layer for module, layer in inventory.layers.items() if name in layer.r}
    if loaded.keys() != file.modules.keys() or file.saved:
        return False
    for module, layer in loaded.items():
        part = file.modules[module]
        if (part.rank, part.alpha, part.rslora) != (layer.r[name], layer.lora_alpha[name], layer.use_rslora[name]):
            return False
    try:
        with open_files([file.file]) as files:
            handle = files[file.file.path]
            return all(_equal(handle, file.modules[module], layer, name) for module, layer in loaded.items())
    except AdapterswapError:  # the file is gone, or another one
        return False


def _equal(handle: int, part: LoraModule, layer: Any, name: str) -> bool:
    import torch

    tensors = factors(layer, name)
    pairs = [] if tensors is None else [(part.a, tensors.a), (part.b, tensors.b)]
    return bool(pairs) and all(
        torch.equal(torch.from_numpy(read_numbers(name, handle, place)), tensor.detach().float().cpu())
        for place, tensor in pairs
    )


@contextmanager
def _saved(name: str, inventory: Inventory) -> Iterator[Adapter]:
    """A loaded expert as PEFT saves it, in a temporary folder."""
    with TemporaryDirectory() as place:
        inventory.model.save_pretrained(place, selected_adapters=[name], save_embedding_layers=False)
        folder = Path(place) / name
        yield open_adapter(folder if folder.is_dir() else place)
