"""Compose on a loaded PeftModel: activate one composition after another, guarded against PEFT's own calls.

PEFT resets every layer when an adapter is added, and makes adapters trainable when `disable_adapter` ends. Setting or
deleting an adapter changes layers whose settings a composition relies on. These methods are replaced on this one model
and restored when the composition ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adapterswap.core.experts.adapter import Adapter, open_adapter
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.names import ExpertName
from adapterswap.core.planning.plan import Plan
from adapterswap.engines.live.batch import RowSwitches, check_batch, pad_left
from adapterswap.engines.live.catalogue import Catalogue, Composable, plan_on_disk
from adapterswap.engines.live.inventory import is_unloaded
from adapterswap.engines.live.loader import as_in_model, layers_taken, load_expert, slice_of
from adapterswap.engines.live.switch import InitialState, Pin, Switch, apply_switch, unmerge
from adapterswap.kit.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class Guard:
    """Guards a PeftModel until `remove`.

    * After `add_adapter`, which `load_adapter` calls, `changed` is called, whether it succeeded or not.
    * After `enable_adapter_layers`, which `disable_adapter` calls at its end, `enabled` is called.
    * `set_adapter` and `delete_adapter` are refused.

    Args:
        model: the PeftModel.
        changed: restores the composition after the model's adapters changed.
        enabled: freezes the adapters again.
    """

    def __init__(self, model: Any, changed: Callable[[], None], enabled: Callable[[], None]) -> None:
        guarded = [
            (model, "add_adapter", _followed(model.add_adapter, changed)),
            (model.base_model, "enable_adapter_layers", _followed(model.base_model.enable_adapter_layers, enabled)),
            (model, "set_adapter", _refused("set_adapter")),
            (model, "delete_adapter", _refused("delete_adapter")),
        ]
        self._before = [(owner, name, vars(owner).get(name)) for owner, name, _ in guarded]
        for owner, name, method in guarded:
            setattr(owner, name, method)

    def remove(self) -> None:
        for owner, name, method in self._before:
            delattr(owner, name)  # the class's own method is visible again
            if method is not None:
                setattr(owner, name, method)


def _followed(method: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    """The method, with a call of `after` when it has ended, also by an error."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            after()

    return call


def _refused(name: str) -> Callable[..., None]:
    """A method that only raises: it would change adapters under an active composition."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"{name} was called while a composition is active",
            "Leave the composition first: call composer.reset() or leave the `with` block",
        )

    return refuse


class Session:
    """Tracks the active composition of a model.

    Attributes:
        active: what the model computes now; None if no composition is active.
        pin: the experts that stay active for a compiled graph, if any.
    """

    def __init__(self, model: PeftModel, catalogue: Catalogue) -> None:
        self.active: Switch | RowSwitches | None = None
        self.pin: Pin | None = None
        self._model = model
        self._catalogue = catalogue
        self._baseline: InitialState | None = None
        self._guard: Guard | None = None

    def set(self, wanted: Switch | RowSwitches) -> None:
        """Compute `wanted` from now on. If that fails, restore what was computed before."""
        self.refresh()
        if any(layer.merged for layer in self._catalogue.inventory.layers.values()):
            raise UnsupportedError("Adapters are merged into the model's weights", "Call unmerge_adapter() first")
        if self.pin is not None and isinstance(wanted, Switch):
            self.pin.check(wanted)

        before = self.active
        if self._baseline is None:
            self._baseline = InitialState(self._catalogue.inventory)
            self._guard = Guard(self._model, self._reapply, self._baseline.freeze)
        try:
            self._apply(wanted)
        except BaseException:
            if before is None:
                self.reset()
            else:
                self._apply(before)
            raise

    def refresh(self) -> None:
        """Take over what has changed in the model since; leave the composition if something disturbed it.

        Raises:
            UnsupportedError: a scale was changed where it is not known what that means; see `Scales`.
        """
        self._catalogue.refresh()
        try:
            self._catalogue.scales.check()
        except UnsupportedError:
            self.reset()
            raise

    def reset(self) -> None:
        """Restore the state before any composition. A model without its LoRA layers is not changed.

        Raises:
            UnsupportedError: as for `refresh`, after the state was restored.
        """
        # Whatever fails below, no composition is active afterwards.
        baseline, guard = self._baseline, self._guard
        self._baseline = self._guard = None
        if isinstance(self.active, RowSwitches):
            self.active.withdraw()
        self.active = None
        if guard is not None:
            guard.remove()
        if baseline is None or is_unloaded(self._model):
            return

        self._catalogue.refresh()
        scales = self._catalogue.scales
        if self.pin is not None:
            self.pin.release(scales)
        baseline.restore(scales)
        scales.check()

    @contextmanager
    def using(self, wanted: Switch | RowSwitches) -> Iterator[None]:
        """Compute `wanted` inside the block, and restore what was computed before; raises the errors of `set`."""
        before = self.active
        self.set(wanted)
        try:
            yield
        finally:
            self._return_to(before)

    @contextmanager
    def pinned(self, experts: Sequence[str]) -> Iterator[None]:
        """Keep the experts active inside the block, where compositions only change numbers in tensors; see `Pin`."""
        if self.active is not None:
            raise UnsupportedError("A composition is active", "Leave it first: call pinned() before use() or set()")
        self.pin = Pin(experts)
        try:
            self.set(Switch())
            yield
        finally:
            self.reset()
            self.pin = None

    def _return_to(self, before: Switch | RowSwitches | None) -> None:
        """Set what was active before a `with` block; after an error, nothing is active."""
        if before is None or is_unloaded(self._model):
            self.reset()
            return
        try:
            unmerge(self._catalogue.inventory.layers.values())
            self.set(before)
        except BaseException:
            self.reset()
            raise

    def _apply(self, wanted: Switch | RowSwitches) -> None:
        """Make a switch the active one, in place of the one before."""
        inventory = self._catalogue.inventory
        if isinstance(self.active, RowSwitches):
            self.active.withdraw()
        if isinstance(wanted, RowSwitches):
            wanted.apply(inventory)
        elif self.pin is not None:
            self.pin.apply(wanted, inventory)
        else:
            apply_switch(wanted, inventory)
        self.active = wanted

    def _reapply(self) -> None:
        """Restore the composition after PEFT reset all layers to add an adapter."""
        if self._baseline is not None and self.active is not None:
            self._catalogue.refresh()
            self._baseline.extend(self._catalogue.inventory)
            self._apply(self.active)


class LiveComposer:
    """Switches a PeftModel between compositions of the adapters loaded in it.

    A composition is a `Plan`, a `Composition`, or a name: `math+swahili`, `math+swahili@bottom=4,top=1`, a loaded
    adapter alone (`math`), or `base`. Each module activates the adapters of the plan's terms and multiplies their
    scales by the coefficients, so the forward pass computes W·x + Σ c_i s_i B_i A_i x. Everything is set through
    PEFT's own calls. Adapters stay frozen, and leaving a composition restores the previous state.

    While a composition is active, generating, merging (`merge_and_unload`), disabling adapters and loading others work
    as usual; `set_adapter` and `delete_adapter` are refused. PEFT's `active_adapter` still names the adapter that was
    active before. `save_pretrained` writes the experts; `save` writes the composition. Use one composer per model, from
    one thread at a time.

    What PEFT changes in a loaded adapter counts in the next composition: factors, and the scale in `layer.scaling`
    (`hotswap_adapter`, `set_scale`, `scale_layer`). Magnitude weights are measured again. While a composition is
    active, such a change counts at once where the composition uses the whole adapter. Where it uses a share of it,
    the next call, or the end of the block, raises `UnsupportedError`.

    Args:
        model: a PeftModel with the experts loaded under the names that compositions use.

    Attributes:
        model: the PeftModel.

    Raises:
        ArgumentError: the model is not a PeftModel, or has no LoRA layers.
        UnsupportedError: weights of the model are not in memory (offloaded).
    """

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self._catalogue = Catalogue(model)
        self._session = Session(model, self._catalogue)

    @classmethod
    def from_experts(cls, model: PreTrainedModel, experts: Mapping[str, Adapter | str | Path]) -> LiveComposer:
        """Load experts into a base model and return a composer for it. Each is a folder, a Hub id or an opened adapter.

        Raises:
            ArgumentError, ExpertError, UnsupportedError: see `load_expert`.
        """
        loaded: Any = model
        opened: dict[str, Adapter] = {}
        for name, expert in experts.items():
            opened[name] = expert if isinstance(expert, Adapter) else open_adapter(expert)
        opened = {name: as_in_model(adapter, name, model) for name, adapter in opened.items()}
        for name, adapter in opened.items():
            loaded = load_expert(loaded, adapter, name)
        composer = cls(loaded)
        for name, adapter in opened.items():
            composer._catalogue.add(name, adapter)
        return composer

    def __repr__(self) -> str:
        base = self.model.get_base_model()
        name = getattr(base.config, "_name_or_path", "") or type(base).__name__
        lines = [f"LiveComposer on {name!r}, experts: {', '.join(self.names)}; active: {self._described()}"]
        if self.plan is not None:
            lines += self.plan.companion_lines  # the user holds the tokenizer
        return "<" + "\n".join(lines) + ">"

    def _described(self) -> str:
        """A short description of the active composition."""
        active = self._session.active
        if active is None:
            return "no composition"
        if isinstance(active, RowSwitches):
            return f"a composition for each of {len(active.switches)} rows"
        if active.plan is None:
            return "base"
        return f"{active.plan.headline} of {' and '.join(active.plan.experts)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return tuple(self.model.peft_config)

    @property
    def plan(self) -> Plan | None:
        """The active plan; None if no composition, the base, or one composition per row is active."""
        active = self._session.active
        return active.plan if isinstance(active, Switch) else None

    def set(self, composition: Composable) -> None:
        """Compute with `composition` until `reset` or the next `set`; None is the base.

        Raises:
            ArgumentError, FieldError: it is of another type, or a name that cannot be parsed.
            CompositionError: its experts are not loaded, or differ from the plan's.
            UnsupportedError: it cannot be computed live, or adapters are merged.
            BaseModelError: the model's number of layers is not known.
        """
        self._session.set(self._catalogue.switch(composition))

    def reset(self) -> None:
        """Leave the composition and restore the state before the first `set` or `use`.

        Adapters merged in the meantime are unmerged first; PEFT's rounding stays in the base's weights.
        """
        self._session.reset()

    @contextmanager
    def use(self, composition: Composable) -> Iterator[None]:
        """Compute with `composition` inside the block, and restore the previous state at its end, also on an exception.

        Blocks can be nested. Raises the errors of `set`.
        """
        with self._session.using(self._catalogue.switch(composition)):
            yield

    @contextmanager
    def use_rows(self, compositions: Sequence[Composable], *, repeat: int = 1) -> Iterator[None]:
        """Compute each row of a batch with its own composition inside the block; None and `base` are the base.

        Rows that share an expert in a layer are computed together. The results equal those of one row at a time, up to
        rounding.

        Args:
            compositions: one for each row.
            repeat: how many times `model.generate` repeats each row (num_beams, num_return_sequences).

        Raises:
            CompositionError: as for `set`.
            UnsupportedError: as for `set`; a layer does not see rows (a mixture of experts); experts are pinned; or,
                in the forward pass, the model is in training mode, images or audio go through experts that differ, or
                the model mixes the rows of a batch, or reads padding as text.
            ArgumentError: in the forward pass, the batch has another size.
        """
        if self._session.pin is not None:
            raise UnsupportedError(
                "use_rows cannot be used while experts are pinned", "Leave the composer.pinned(…) block first"
            )
        with self._session.using(
            RowSwitches([self._catalogue.switch(composition) for composition in compositions], repeat)
        ):
            yield

    def generate(self, *, compositions: Sequence[Composable] | Composable = None, **batch: Any) -> Any:
        """Call the model's own `generate` with one composition, or with one for each row of the batch.

        Prompts padded on the right are padded on the left instead, because generation continues at the right end; not
        an encoder's, whose positions padding on the left would move.

        Args:
            compositions: one for all rows, or a sequence with one for each. None leaves the model as it is.
            batch: the tokenizer's output and any options of `generate`.

        Raises:
            CompositionError, UnsupportedError, ArgumentError: see `set` and `use_rows`.
            UnsupportedError: the model mixes the rows of a batch, or rows have different lengths and it reads padding.
        """
        if not getattr(self.model.config, "is_encoder_decoder", False):
            batch = pad_left(batch)
        several = False
        for name in ("input_ids", "inputs_embeds"):
            if batch.get(name) is not None and len(batch[name]) > 1:
                several = True
        if several and not isinstance(self._session.active, RowSwitches):  # which check it themselves
            check_batch(self.model, batch)
        if compositions is None:
            return self.model.generate(**batch)
        if isinstance(compositions, str | Composition | Plan):
            with self.use(compositions):
                return self.model.generate(**batch)

        # generate() repeats each row for its beams, or for its answers.
        config = batch.get("generation_config") or self.model.generation_config
        repeat = 1
        for key in ("num_beams", "num_return_sequences"):
            repeat = max(repeat, batch.get(key, getattr(config, key, None)) or 1)
        with self.use_rows(compositions, repeat=repeat):
            return self.model.generate(**batch)

    @contextmanager
    def pinned(self, experts: Sequence[str] | None = None) -> Iterator[None]:
        """Switch without recompiling a compiled model: inside the block, switching only changes numbers in tensors.

        Every pinned expert is computed in every layer, with the factor 0 where a composition does not use it. Compile
        inside the block: `composer.model.get_base_model().compile()`.

        Args:
            experts: their names; by default all loaded experts.

        Raises:
            ArgumentError: an expert is not loaded.
            UnsupportedError: a composition is active, or adapters are merged.
        """
        names = self.names if experts is None else tuple(experts)
        if missing := [name for name in names if name not in self.names]:
            raise ArgumentError(
                f"The adapter {missing[0]!r} is not loaded ({', '.join(self.names)} are)",
                "Load it first",
                parameter="experts",
            )
        with self._session.pinned(names):
            yield

    def save(
        self,
        out_path: str | Path,
        *,
        layout: Literal["exact", "portable"] = "exact",
        max_rank: int | None = None,
        max_error: float | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the active composition as an adapter, with the arguments and errors of `write_adapter`.

        If the experts' files still hold the numbers that the model computes with, the result is byte for byte what
        `write_adapter` writes from these files. If PEFT converted an expert to another dtype, if it was loaded without
        this composer or trained since, the result is written from the tensors in the model.

        Raises:
            UnsupportedError: no composition with experts is active; see also `write_adapter`.
        """
        from adapterswap.core.writing.adapter import COMPOSED, write_adapter

        if self.plan is None:
            raise UnsupportedError("No composition with experts is active", "Call save inside `with composer.use(…)`")
        files = [adapter.file.path for adapter in self.plan.adapters.values()]
        inputs = [path.parent for path in files if path.is_file()]  # whether they are read or not
        COMPOSED.check(out_path, overwrite=overwrite, inputs=inputs)
        self._session.refresh()
        with plan_on_disk(self.plan, self._catalogue.inventory) as plan:
            return write_adapter(
                plan, out_path, layout=layout, max_rank=max_rank, max_error=max_error, overwrite=overwrite
            )

    def load_expert(
        self,
        expert: Adapter | str | Path,
        name: str | None = None,
        *,
        layers: str | None = None,
        compositions: Sequence[str | Composition] = (),
        autocast_adapter_dtype: bool = True,
    ) -> str:
        """Load another expert from disk and return its name. An active composition stays active.

        Args:
            expert: a folder, a Hub id or an opened adapter.
            name: what compositions call it; by default the folder's or repository's own name.
            layers: load only these layers, such as `0-4,30-31`; see `live.load_expert`.
            compositions: load only the layers that these compositions take from it, instead of `layers`.
            autocast_adapter_dtype: PEFT's option of this name: hold float16 and bfloat16 experts in float32.

        Raises:
            ArgumentError: both `layers` and `compositions` are passed; see also `live.load_expert`.
            CompositionError: the compositions take nothing from it.
            ExpertError, UnsupportedError: see `live.load_expert`.
        """
        adapter = expert if isinstance(expert, Adapter) else open_adapter(expert)
        name = name or ExpertName.choose(adapter, self.model.peft_config, "expert")
        adapter = as_in_model(adapter, name, self.model)
        if compositions:
            if layers is not None:
                raise ArgumentError(
                    "Both `layers` and `compositions` were passed", "Pass one of them", parameter="layers"
                )
            layers = layers_taken(adapter, name, compositions, self._catalogue.inventory.num_layers)
        load_expert(self.model, adapter, name, layers=layers, autocast_adapter_dtype=autocast_adapter_dtype)
        loaded_part = adapter if layers is None else slice_of(adapter, layers, self._catalogue.inventory.num_layers)
        self._catalogue.add(name, loaded_part)
        return name
