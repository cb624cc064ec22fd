"""Several compositions in one batch, one for each row.

PEFT's layers compute the base for all rows at once, and a hook on each layer adds the experts. Rows that share an
expert are computed together, so a layer that all compositions take from one expert costs as much as one adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterswap.core.model.layers import ModelConfig
from adapterswap.engines.live.inventory import Inventory, factors, other_tensors, parameter_of
from adapterswap.engines.live.reading import Reading
from adapterswap.engines.live.switch import Switch, apply_switch, check_loaded
from adapterswap.kit.errors import ArgumentError, Problems, UnsupportedError

if TYPE_CHECKING:
    import torch

# Inputs of a forward pass with a row for each sequence. A decoder called after its encoder has only the last two.
_INPUTS = ("input_ids", "inputs_embeds", "input_features", "decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class _Share:
    """One expert's part in a layer: its factors and the rows that use it.

    Attributes:
        a, b: the factors, A (rank×in; for an embedding rank×vocabulary) and B (out×rank).
        rows: the rows: None for all of them, a slice if they are consecutive.
        factor: c·s; a tensor (rows, 1, 1) if it differs between rows.
        bias: the bias of B (out values), if it has one: the expert then adds c·s·(B·A·x + bias).
    """

    a: torch.Tensor
    b: torch.Tensor
    embedding: bool
    rows: slice | torch.Tensor | None
    factor: float | torch.Tensor
    bias: torch.Tensor | None = None


class RowSwitches:
    """Compositions for the rows of a batch.

    Args:
        switches: one for each row.
        repeat: how many times generation repeats each row (beams, returned sequences).
    """

    def __init__(self, switches: Sequence[Switch], repeat: int = 1) -> None:
        self.switches: tuple[Switch, ...] = ()
        for switch in switches:
            self.switches += (switch,) * repeat
        self._handles: list[Any] = []
        self._adders: dict[str, _Adder] = {}
        self._inventory: Inventory | None = None
        self._changes = 0
        self._was_checked = False

    def apply(self, inventory: Inventory) -> None:
        """Switch all adapters off in PEFT's layers, and add hooks that compute each row's experts."""
        self.withdraw()
        for switch in self.switches:
            check_loaded(switch, inventory)
        self._inventory, self._changes = inventory, inventory.scales.changes
        shares = {name: self._shares(name, layer, inventory) for name, layer in inventory.layers.items()}
        _check(inventory, shares, self.switches)
        apply_switch(Switch(in_full=self._in_full(inventory)), inventory)

        # A part that sees images or audio has as many rows as there are of those.
        for name in inventory.layers:
            if shares[name]:
                count = None if name in inventory.other_parts else len(self.switches)
                self._adders[name] = _Adder(name, shares[name], count)
        self._add_hooks(inventory)

    def _add_hooks(self, inventory: Inventory) -> None:
        """Hook the model, to check its inputs, and the layers, to add what each row's experts compute."""
        base = inventory.model.get_base_model()
        self._handles.append(base.register_forward_pre_hook(self._check_batch, with_kwargs=True))
        for name, adder in self._adders.items():
            self._handles.append(inventory.layers[name].register_forward_hook(adder))

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def withdraw(self) -> None:
        self._remove_hooks()
        self._adders.clear()

    def _in_full(self, inventory: Inventory) -> Mapping[str, Mapping[str, float]]:
        """The modules trained in full, which must be the same for all rows."""
        if not self.switches:
            return {}
        first, *others = self.switches
        for name in inventory.in_full:
            if any(switch.in_full.get(name) != first.in_full.get(name) for switch in others):
                raise UnsupportedError(
                    f"{name} is trained in full (modules_to_save), and the rows would need different weights for it",
                    "Use one composition for the whole batch",
                    parameter="compositions",
                )
        return first.in_full

    def _shares(self, name: str, layer: Any, inventory: Inventory) -> list[_Share]:
        """What each expert adds to a layer, for the rows that use it."""
        by_expert: dict[str, dict[int, float]] = {}
        for row, switch in enumerate(self.switches):
            for expert, coefficient in switch.terms.get(name, {}).items():
                by_expert.setdefault(expert, {})[row] = coefficient

        shares = []
        for expert, coefficients in by_expert.items():
            scale = inventory.scales.of(layer, expert)
            shares.append(_share(layer, expert, scale, coefficients, len(self.switches)))
        return shares

    def _check_batch(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a batch before the forward pass, and use scales that changed since the last one."""
        inputs = [*args, *map(kwargs.get, _INPUTS)]
        batch = next(len(tensor) for tensor in inputs if tensor is not None)
        if model.training:
            raise UnsupportedError("The model is in training mode", "Call model.eval() first")
        if batch != len(self.switches):
            raise ArgumentError(
                f"The batch has {batch} rows, but there are compositions for {len(self.switches)}",
                "Pass one composition for each row, and `repeat` if generation repeats rows",
                parameter="compositions",
            )

        # A hot swap, or another call of PEFT's, may have changed scales since.
        inventory = self._inventory
        if inventory is None:
            return
        inventory.scales.read(inventory.layers, inventory.model.peft_config)
        if inventory.scales.changes != self._changes:
            self._changes = inventory.scales.changes
            for name, adder in self._adders.items():
                adder.shares = self._shares(name, inventory.layers[name], inventory)

        if batch > 1:
            self._check_inputs(inventory, kwargs)

    def _check_inputs(self, inventory: Inventory, kwargs: Mapping[str, Any]) -> None:
        """Refuse inputs with which rows affect each other."""
        if self._was_checked:
            check_batch(inventory.model, kwargs)
            return

        # The model itself may have to be measured first, by other batches than these hooks allow.
        self._was_checked = True
        self._remove_hooks()
        try:
            check_batch(inventory.model, kwargs)
        finally:
            self._add_hooks(inventory)


def check_batch(model: Any, batch: Mapping[str, Any]) -> None:
    """Refuse several rows in a batch, if the answers to some would depend on the others or on padding.

    Args:
        model: the PeftModel.
        batch: the inputs of `generate` or of a forward pass.

    Raises:
        UnsupportedError: the model mixes rows, reads padding on the left, or takes other rotary frequencies for the
            whole batch because of its longest row.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return
    kind, reading = model.config.model_type, Reading.of(model)
    if not reading.even:
        raise UnsupportedError(f"Rows that a {kind} answers together change each other", "Pass one row at a time")

    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2 or bool(mask.all()):
        return
    remedy = "Pass rows of one length, or one row at a time"
    if not bool(mask[:, 0].all()) and not reading.left:
        raise UnsupportedError(f"Rows have different lengths, and a {kind} reads the padding as text", remedy)
    if reading.alike is not None and mask.shape[1] > reading.alike:
        raise UnsupportedError(
            f"A row of more than {reading.alike} tokens changes the rotary embeddings of all rows", remedy
        )


def _share(layer: Any, expert: str, scale: float, coefficients: Mapping[int, float], count: int) -> _Share:
    """What an expert adds to a layer's output in the rows that use it; `count` is the number of all rows."""
    import torch

    tensors = factors(layer, expert)
    assert tensors is not None  # the switch was made from the loaded adapters

    # Gemma's embeddings are multiplied by a constant, and so is what LoRA adds to them.
    if tensors.embedding:
        embed_scale = getattr(layer.get_base_layer(), "embed_scale", None)
        if embed_scale is not None:
            scale *= float(embed_scale)

    rows = sorted(coefficients)
    index: slice | torch.Tensor | None = None
    if len(rows) < count:
        index = slice(rows[0], rows[-1] + 1)
        if len(rows) < index.stop - index.start:  # not one after the other
            index = torch.tensor(rows, device=tensors.b.device)

    values = [coefficients[row] * scale for row in rows]
    factor: float | torch.Tensor = values[0]
    if len(set(values)) > 1:
        factor = torch.tensor(values, device=tensors.b.device, dtype=tensors.b.dtype).reshape(-1, 1, 1)

    bias = other_tensors(layer, expert).get("lora_B.bias")
    return _Share(tensors.a, tensors.b, tensors.embedding, index, factor, bias)


def _check(inventory: Inventory, shares: Mapping[str, Sequence[_Share]], switches: Sequence[Switch]) -> None:
    """Refuse layers at which rows of a batch cannot have different compositions."""
    from peft.tuners.lora.layer import MultiheadAttention

    problems = Problems(UnsupportedError)
    remedy = "Use one composition for the whole batch"
    model_type = inventory.model.get_base_model().config.model_type
    if ModelConfig({"model_type": model_type}).architecture.rows_second:
        problems.add(f"A layer of {model_type} sees positions first, and rows second", remedy)

    for name, layer in inventory.layers.items():
        if not shares[name]:
            continue
        if layer.merged:
            problems.add("Adapters are merged into the model's weights", "Call unmerge_adapter() first")

        experts: set[str] = set()
        for switch in switches:
            experts.update(switch.terms.get(name, ()))
        if experts.intersection(layer.lora_variant):
            problems.add(f"{name} is DoRA, which is computed with the base's own output", remedy)
        if "experts" in name.split(".") or parameter_of(layer) is not None:
            problems.add(f"{name} is part of a mixture of experts, which sees tokens instead of rows", remedy)
        if isinstance(layer, MultiheadAttention):
            problems.add(f"{name} is a MultiheadAttention, whose projections are not separate layers", remedy)
        if getattr(layer.get_base_layer(), "max_norm", None) is not None:
            problems.add(f"{name} is an embedding with max_norm, which rescales what LoRA adds", remedy)
        if any(share.a.is_meta or share.b.is_meta for share in shares[name]):
            problems.add(f"The adapters at {name} are offloaded", "Load the model without offloading")

        if problems:  # one such layer is enough
            break
    problems.raise_if_any()


class _Adder:
    """A forward hook that adds Σ c·s·B·A·x to each row of a LoRA layer's output.

    `count` is the number of rows; None in a part of the model that sees images or audio, however many each row has.
    """

    def __init__(self, name: str, shares: Sequence[_Share], count: int | None) -> None:
        self.name, self.shares, self.count = name, shares, count
        self.rows_differ = any(share.rows is not None or not isinstance(share.factor, float) for share in shares)

    def __call__(self, layer: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        import torch

        if layer.disable_adapters:
            return None
        if self.count is None and self.rows_differ:
            raise UnsupportedError(
                f"{self.name} sees images or audio instead of rows, and the rows would need different experts in it",
                "Use one composition for the whole batch, or compositions with the same experts there (`outside`)",
            )

        # Like PEFT, sum in the adapters' precision if it is higher.
        x, dtype = args[0], output.dtype
        result = output.to(torch.promote_types(dtype, self.shares[0].b.dtype)).contiguous()
        shape = result.shape

        # Some models flatten rows and positions before their feed-forward layers.
        if self.count is not None and len(result) != self.count:
            if len(result) % self.count or result.dim() != 2:
                raise UnsupportedError(
                    f"{self.name} receives {len(result)} rows, and the batch has {self.count}",
                    "Use one composition for the whole batch",
                )
            result = result.view(self.count, -1, shape[-1])
            x = x.reshape(self.count, -1, x.shape[-1])

        for share in self.shares:
            _add(share, x, result)
        return result.view(shape).to(dtype)


def _add(share: _Share, x: torch.Tensor, result: torch.Tensor) -> None:
    """Add c·s·(B·A·x + bias) to those rows of a layer's output that use the expert."""
    from torch.nn.functional import embedding, linear

    # A·x of the rows that use the expert
    part = x
    if share.rows is not None:
        part = x[share.rows]
    low = embedding(part, share.a.T) if share.embedding else linear(part.to(share.a.dtype), share.a)

    # One factor for all rows goes into the product with B; factors that differ are for the first axis.
    factor = share.factor
    alpha = 1.0
    if isinstance(factor, float):
        alpha = factor
    else:
        other_axes = (1,) * (low.dim() - 1)
        factor = factor.reshape(-1, *other_axes)
        low = low * factor

    # B·(A·x). Rows that are not consecutive have no view into which the product could be written.
    if share.rows is None or isinstance(share.rows, slice):
        target = result
        if share.rows is not None:
            target = result[share.rows]
        flat = low.reshape(-1, low.shape[-1]).to(result.dtype)
        target.view(-1, result.shape[-1]).addmm_(flat, share.b.T, alpha=alpha)
    else:
        result.index_add_(0, share.rows, linear(low, share.b).to(result.dtype), alpha=alpha)

    if share.bias is not None:
        rows = ... if share.rows is None else share.rows
        result[rows] += (factor * share.bias).to(result.dtype)


def pad_left(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with each row's tokens moved to its right end, where generation continues.

    Every tensor of the attention mask's shape (batch, length) is reordered in the same way. Tokens keep their order.
    """
    import torch

    mask = batch.get("attention_mask")
    if mask is None or bool(mask[:, -1].all()):
        return dict(batch)

    order = mask.bool().to(torch.uint8).argsort(dim=1, stable=True)
    moved = dict(batch)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
            moved[key] = value.gather(1, order)
    return moved
