"""Write a plan as an adapter folder that PEFT loads: weights, config, record, card, tokenizer.

The folder appears complete or not at all, and the same inputs give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.sources import CONFIG, PROVENANCE, WEIGHTS
from adapterswap.core.planning.plan import Plan
from adapterswap.core.writing.cards import adapter_card
from adapterswap.core.writing.gates import LaidOut, Requested, check
from adapterswap.core.writing.layout import lay_out, written_keys
from adapterswap.core.writing.loadable import loadable_form, with_written_names
from adapterswap.core.writing.outputs import Form, Layout, Names, OutputTensor, Reduced
from adapterswap.core.writing.records import CompositionRecord, SourceRecord
from adapterswap.core.writing.reduction import reduce
from adapterswap.core.writing.resolution import Resolved
from adapterswap.core.writing.tensors import write_tensors
from adapterswap.kit.errors import check_type
from adapterswap.kit.files.folders import CARD, OutputKind
from adapterswap.kit.files.text import expand, write_json

COMPOSED = OutputKind(PROVENANCE, lambda record: record.keys() >= {"format", "adapterswap_version"})
"""The folders that `compose`, `slice`, `convert`, `merge` and `extract` write."""


@dataclass(frozen=True)
class Prepared:
    """An adapter that is ready to be written: the plan with its coefficients, the form and the tensors."""

    resolved: Resolved
    form: Form
    layout: Layout
    reduced: Mapping[str, Reduced]

    @staticmethod
    def of(plan: Plan, form: Form, progress: Callable[[str], None] = lambda name: None) -> Prepared:
        """As `prepare`, without checks, and with the names and the layout that the plan and the form have."""
        resolved = Resolved.of(plan)
        reduced = reduce(resolved, form, progress)
        return Prepared(resolved, form, lay_out(resolved, form, reduced), reduced)

    @property
    def plan(self) -> Plan:
        return self.resolved.plan

    @property
    def output(self) -> dict[str, Any]:
        """The form, for the record."""
        return asdict(self.form)

    @property
    def measured(self) -> dict[str, Any]:
        """Values measured on tensors, for the record: magnitudes, shares of kept rows, ranks, errors of truncation."""
        reduced = {}
        for name, module in self.reduced.items():
            reduced[name] = {"rank": module.rank, "relative_error": module.written_error}

        measured = {
            "magnitudes": dict(self.resolved.magnitudes),
            "kept_rows": self.resolved.kept_share(),
            "reduced": reduced,
        }
        return {key: values for key, values in measured.items() if values}

    @property
    def errors(self) -> dict[str, float]:
        """The relative error of ΔW of each truncated module, as written."""
        return {name: module.written_error for name, module in self.reduced.items()}

    def factors(self, lora: LoraModule) -> tuple[OutputTensor, OutputTensor]:
        """A and B of a module, as written."""
        a_key, b_key = written_keys(lora, self.plan)
        return self._by_key[a_key], self._by_key[b_key]

    @cached_property
    def _by_key(self) -> dict[str, OutputTensor]:
        return {tensor.key: tensor for tensor in self.layout.tensors}

    def write(
        self,
        out_path: str | Path,
        *,
        overwrite: bool = False,
        hashes: Mapping[str, str] | None = None,
        amend: Callable[[CompositionRecord, Path], CompositionRecord] = lambda record, folder: record,
        companions: bool = True,
    ) -> Path:
        """Write the adapter; see `write_adapter`.

        Args:
            out_path, overwrite: see `write_adapter`.
            hashes: the SHA-256 of the experts' files by name, if they were computed after the experts were opened. They
                are trusted: hashing takes most of a swap's time. The default trusts the names of files in the Hub's
                cache, which state their hashes; pass an empty mapping to compute all.
            amend: adds to the record; it is called with the record and the folder of the written files.
            companions: also write the experts' tokenizer and the like, if they have them.
        """
        out_path = expand(out_path)
        plan, base = self.plan, self.plan.base
        with COMPOSED.folder(out_path, overwrite=overwrite, inputs=plan.inputs) as folder:
            sha256 = write_tensors(plan, self.layout, folder / WEIGHTS, hashes)
            if companions:
                plan.companions.write(folder)

            experts = {name: SourceRecord.of_adapter(adapter, sha256[name]) for name, adapter in plan.adapters.items()}
            base_record = None
            if base.source is not None:
                base_record = SourceRecord.of_base(base.source, base.local.config_sha256)
            record = CompositionRecord.of(
                plan, experts, base_record, output=self.output, measured=self.measured, companions=companions
            )

            write_json(folder / CONFIG, self.layout.config)
            record = amend(record, folder)
            write_json(folder / PROVENANCE, record.content())
            card = adapter_card(plan, record, self.layout)
            (folder / CARD).write_text(card, encoding="utf-8")
        return out_path


def write_adapter(
    plan: Plan,
    out_path: str | Path,
    *,
    layout: Literal["exact", "portable"] = "exact",
    max_rank: int | None = None,
    max_error: float | None = None,
    names: Names | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the composed adapter to the folder `out_path`.

    The folder holds `adapter_model.safetensors`, `adapter_config.json`, `adapterswap.json` (where everything came
    from), a model card, and the tokenizer and chat template if an expert's folder has them. Modules with one owner are
    copied byte for byte. Blends are rank concatenations, computed in float32 and rounded once to the experts' dtype.

    Args:
        plan: the plan to write.
        out_path: the folder; it appears complete or not at all.
        layout: `exact`, or `portable` (one rank, plain LoRA, scale 1, which every engine reads).
        max_rank: truncate modules of a higher rank; nonlinear methods need this or `max_error`.
        max_error: truncate blends to the smallest rank with at most this relative error of ΔW (Frobenius norm).
        names: the modules' names: those in the file of the `task` or `language` expert, or those of `transformers4` or
            `transformers5`. By default the first expert's names, or transformers 5's if those are of transformers 4.
        overwrite: replace the folder if adapterswap wrote it.

    Returns:
        The folder's path.

    Raises:
        ArgumentError: an argument has the wrong type or value.
        OutputError: the folder exists (without `overwrite`), holds other files, overlaps an input, or cannot be
            written.
        ExpertError: an expert holds NaN or infinity, or changed since it was opened; two experts carry different copies
            of a weight of their base.
        CompositionError: every module stays as in the base, so there is nothing to write.
        UnsupportedError: an expert is a full checkpoint; a nonlinear method has neither `max_rank` nor `max_error`; a
            result overflows; PEFT could not load the result.
        BaseModelError: the base is needed to name the modules, but is unknown.
    """
    check_type(plan, Plan, "plan", "Pass a plan, as `compose` and `layer_swap` return it")
    check_type(out_path, (str, Path), "out_path", "Pass the path of the folder to write")

    form = Form(layout=layout, max_rank=max_rank, max_error=max_error, names=names)
    plan.check_adapter()
    COMPOSED.check(out_path, overwrite=overwrite, inputs=plan.inputs)  # before anything is computed
    return prepare(plan, form).write(out_path, overwrite=overwrite)


def prepare(plan: Plan, form: Form, progress: Callable[[str], None] = lambda name: None) -> Prepared:
    """Compute the plan's open coefficients, truncate modules, and lay the tensors out. Writes nothing.

    Args:
        plan: the plan to write.
        form: its layout, bounds on the rank, and names.
        progress: called with the name of each module after it was truncated.

    Raises:
        AdapterswapError: see `write_adapter`.
    """
    check(Requested(plan, form))

    form = loadable_form(plan, form)
    prepared = Prepared.of(with_written_names(plan, form.names), form, progress)
    check(LaidOut(plan, prepared.layout))
    return prepared
