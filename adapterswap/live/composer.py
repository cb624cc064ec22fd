"""Compose on a loaded PeftModel: each LoRA layer gets its own active adapters and scalings, no tensor changes.

An executor of plans beside `writing`, and the way in for users. Knows what can be asked for; how layers are set
(`switching`), put back (`session`) and split by rows (`batching`) it leaves to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adapterswap.errors import ArgumentError, UnsupportedError
from adapterswap.experts.adapters import Adapter, open_adapter
from adapterswap.files.folders import check_place
from adapterswap.files.smallfiles import expand
from adapterswap.live.batching import Rows, pad_left
from adapterswap.live.catalogue import Catalogue, Composable
from adapterswap.live.loading import as_in_model, layers_taken, load_expert, slice_of
from adapterswap.live.saving import plan_on_disk
from adapterswap.live.session import Session
from adapterswap.live.switching import Switch
from adapterswap.planning.compositions import Composition
from adapterswap.planning.describe import headline
from adapterswap.planning.names import expert_name
from adapterswap.planning.plan import Plan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["LiveComposer"]


class LiveComposer:
    """Switches a PeftModel between compositions of the adapters loaded in it.

    A composition is a `Plan`, a `Composition`, or a name: `math+swahili`, `math+swahili@bottom=4,top=1`, a loaded
    adapter alone (`math`), or `base`. A module's active adapters become the plan's terms, each with its scale
    multiplied by its coefficient, so that the forward pass computes W·x + Σ c_i s_i B_i A_i x. Everything is set
    through PEFT's own calls; adapters stay frozen; leaving puts back what was before.

    While a composition is active the model generates, merges (`merge_and_unload`), disables its adapters and loads
    others as always; `set_adapter` and `delete_adapter` are refused. PEFT's `active_adapter` is one name, and goes on
    naming the adapter that was active before; `save_pretrained` writes the experts (`save` here writes the
    composition). Use one composer for a model, from one thread at a time.

    Args:
        model: with the experts loaded under the names that compositions use.

    Attributes:
        model: the PeftModel.

    Raises:
        ArgumentError: the model is not a PeftModel, or has no LoRA layers.
    """

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self._catalogue = Catalogue(model)
        self._session = Session(model, self._catalogue)

    @classmethod
    def from_experts(cls, model: PreTrainedModel, experts: Mapping[str, Adapter | str | Path]) -> LiveComposer:
        """Load experts into a base model, each a folder, a Hub id or an opened adapter, and compose on it.

        Raises:
            ArgumentError, ExpertError, UnsupportedError: see `load_expert`.
        """
        loaded: Any = model
        opened = {name: e if isinstance(e, Adapter) else open_adapter(e) for name, e in experts.items()}
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
        return f"<LiveComposer on {name!r}, experts: {', '.join(self.names)}; active: {self._described()}>"

    def _described(self) -> str:
        """What is computed now, in a few words."""
        active = self._session.active
        if active is None:
            return "no composition"
        if isinstance(active, Rows):
            return f"a composition for each of {len(active.switches)} rows"
        return "base" if active.plan is None else f"{headline(active.plan)} of {' and '.join(active.plan.experts)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that are loaded."""
        return tuple(self.model.peft_config)

    @property
    def plan(self) -> Plan | None:
        """The active plan; None without a composition, for the base, and for rows."""
        active = self._session.active
        return active.plan if isinstance(active, Switch) else None

    def set(self, composition: Composable) -> None:
        """Compute with `composition` until `reset` or the next `set`; None is the base.

        Raises:
            CompositionError: its experts are not loaded, or not as the plan says.
            UnsupportedError: it cannot be computed live, or adapters are merged.
        """
        self._session.set(self._catalogue.switch(composition))

    def reset(self) -> None:
        """Leave the composition: everything is as it was before the first `set` or `use`.

        Adapters that were merged meanwhile are unmerged first, by PEFT, whose rounding that leaves in the base.
        """
        self._session.reset()

    @contextmanager
    def use(self, composition: Composable) -> Iterator[None]:
        """Compute with `composition` inside the block; afterwards, also after an exception, everything is as before.

        Blocks can be nested; errors as for `set`.
        """
        with self._session.using(self._catalogue.switch(composition)):
            yield

    @contextmanager
    def use_rows(self, compositions: Sequence[Composable], *, repeat: int = 1) -> Iterator[None]:
        """Inside the block, compute every row of a batch with a composition of its own; None and `base` are the base.

        Rows that share an expert in a layer are computed together. Equal to one row at a time up to rounding.

        Args:
            compositions: one for each row.
            repeat: how often each row is repeated by `model.generate` (num_beams, num_return_sequences).

        Raises:
            CompositionError: as for `set`.
            UnsupportedError: as for `set`; a layer that does not see rows (a mixture of experts); experts are pinned;
                in the forward pass, a model in training mode.
            ArgumentError: in the forward pass, a batch of another size.
        """
        if self._session.pin is not None:
            raise UnsupportedError("experts are pinned for one graph", "Leave composer.pinned(…) for a mixed batch")
        with self._session.using(Rows([self._catalogue.switch(composition) for composition in compositions], repeat)):
            yield

    def generate(self, *, compositions: Sequence[Composable] | Composable = None, **batch: Any) -> Any:
        """The model's own `generate`, with one composition, or one for each row of the batch.

        Prompts padded on the right are moved to the right end first, since generation goes on there.

        Args:
            compositions: one for all rows, or a sequence with one for each. None leaves the model as it is.
            batch: what the tokenizer returned, and all options of `generate`.

        Raises:
            CompositionError, UnsupportedError, ArgumentError: see `set` and `use_rows`.
        """
        batch = pad_left(batch)
        if compositions is None:
            return self.model.generate(**batch)
        if isinstance(compositions, str | Composition | Plan):
            with self.use(compositions):
                return self.model.generate(**batch)
        config = batch.get("generation_config") or self.model.generation_config
        counts = (batch.get(key, getattr(config, key, None)) or 1 for key in ("num_beams", "num_return_sequences"))
        with self.use_rows(compositions, repeat=max(counts)):
            return self.model.generate(**batch)

    @contextmanager
    def pinned(self, experts: Sequence[str] | None = None) -> Iterator[None]:
        """Inside the block, switching changes numbers in tensors only, so that a compiled model is not recompiled.

        The experts are active in every layer, those that a composition does not use with the factor 0: each costs
        its time everywhere. Compile inside the block: `composer.model.get_base_model().compile()`.

        Args:
            experts: their names; by default all that are loaded.

        Raises:
            ArgumentError: an expert is not loaded.
            UnsupportedError: a composition is active, or adapters are merged.
        """
        names = self.names if experts is None else tuple(experts)
        if missing := [name for name in names if name not in self.names]:
            raise ArgumentError(
                f"the adapter {missing[0]!r} is not loaded ({', '.join(self.names)} are)",
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
        """Write the active composition as an adapter; arguments and errors as for `write_adapter`.

        Where the experts' files still hold the numbers that the model computes with, the result is what
        `write_adapter` makes of these files, byte for byte. Otherwise (PEFT held an expert in another dtype, it was
        loaded without this composer, it was trained since) it is made of the tensors in the model.

        Raises:
            UnsupportedError: no composition with experts is active; see also `write_adapter`.
        """
        from adapterswap.writing import write_adapter

        if self.plan is None:
            raise UnsupportedError("no composition with experts is active", "Call save inside `with composer.use(…)`")
        files = [adapter.file.path for adapter in self.plan.adapters.values()]
        check_place(expand(out_path), [path.parent for path in files if path.is_file()])  # read or not
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
        """Load another expert from disk, and return its name. An active composition stays active.

        Args:
            expert: a folder, a Hub id or an opened adapter.
            name: what compositions call it; by default the folder's or repository's own name.
            layers: only these of its layers, such as `0-4,30-31`; see `live.load_expert`.
            compositions: instead of `layers`: only the layers that these compositions take from it.
            autocast_adapter_dtype: PEFT's: hold float16 and bfloat16 experts in float32.

        Raises:
            ArgumentError: both `layers` and `compositions` are passed; see also `live.load_expert`.
            CompositionError: the compositions take nothing from it.
            ExpertError, UnsupportedError: see `live.load_expert`.
        """
        adapter = expert if isinstance(expert, Adapter) else open_adapter(expert)
        name = name or expert_name(adapter, self.model.peft_config, "expert")
        adapter = as_in_model(adapter, name, self.model)
        if compositions:
            if layers is not None:
                raise ArgumentError(
                    "both `layers` and `compositions` were passed", "Pass one of them", parameter="layers"
                )
            layers = layers_taken(adapter, name, compositions, self._catalogue.inventory.num_layers)
        load_expert(self.model, adapter, name, layers=layers, autocast_adapter_dtype=autocast_adapter_dtype)
        kept = adapter if layers is None else slice_of(adapter, layers, self._catalogue.inventory.num_layers)
        self._catalogue.add(name, kept)
        return name
