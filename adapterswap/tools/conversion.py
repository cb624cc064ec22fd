"""Convert an adapter: other names, layout or dtype, safetensors for a pickle, rsLoRA for other kinds, from and to MLX.

A LoRA is written again by a plan of one expert, so only rounding or truncation can lose anything. For other kinds PEFT
computes the dense ΔW, and the truncated SVD is its best approximation of that rank (Eckart & Young 1936).

PEFT before 0.19 always took the first axis of an expert's matrix for its inputs: A is (experts·rank × first) and B
(second × rank·experts). Since then A belongs to the inputs, which in most models are the second axis. The numbers are
the same, so A and B change places, transposed for each expert.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adapterswap.core.experts.adapter import Adapter, open_adapter
from adapterswap.core.experts.config import version_of
from adapterswap.core.experts.gates import CHANGING_INITS
from adapterswap.core.experts.keys import TRAINABLE_TOKENS, ModuleKeys
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.checkpoints import Checkpoint, open_checkpoint
from adapterswap.core.model.sources import CONFIG, WEIGHTS, Records, Reference, Source
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.depth import least_depth
from adapterswap.core.planning.names import ExpertName
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.writing.adapter import COMPOSED, prepare
from adapterswap.core.writing.outputs import Form
from adapterswap.core.writing.peft_config import Shape, adapter_config
from adapterswap.core.writing.records import CompositionRecord
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    NotFoundError,
    Problems,
    UnsupportedError,
    reason_of,
)
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.text import expand, read_json, shown, write_json
from adapterswap.tools import mlx
from adapterswap.tools.comparison import compare
from adapterswap.tools.deltas import CONVERTIBLE, Conversion, ConvertedModule, load_with_base, lower, write_lowered

PICKLED = "adapter_model.bin"

_CURRENT = "0.19.0"  # the first version of PEFT with today's layout


def _is_older(folder: Path) -> bool:
    """Whether the adapter in a folder has LoRA on parameters, and a config of PEFT before 0.19 or without a version."""
    config = read_json(folder / CONFIG)
    if not config.get("target_parameters") or config.get("peft_type") != "LORA":
        return False
    return version_of(config.get("peft_version")) < (0, 19)


def _write_current(folder: Path, out: Path, base: Checkpoint) -> bool:
    """Write an older adapter with today's layout into the empty folder `out`; whether A and B changed places."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    write_json(out / CONFIG, {**read_json(folder / CONFIG), "peft_version": _CURRENT})
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(tensors, out / WEIGHTS)
    adapter = Adapter.read(Source(out, str(folder)))
    fused = [module for module in adapter.modules.values() if module.experts > 1]
    if not _is_swapped(fused, adapter.container, base):
        return False

    for module in fused:
        a, b = tensors[module.a.name], tensors[module.b.name]
        count, rank = module.experts, module.rank
        # A of expert e is B's columns e, e + experts, … of the rank axis, transposed; and the other way round.
        first = b.reshape(-1, rank, count).permute(2, 1, 0).reshape(count * rank, -1)
        second = a.reshape(count, rank, -1).permute(2, 1, 0).reshape(-1, rank * count)
        tensors[module.a.name], tensors[module.b.name] = first.contiguous(), second.contiguous()
    save_file(tensors, out / WEIGHTS)
    return True


def _is_swapped(fused: list[LoraModule], container: str | None, base: Checkpoint) -> bool:
    """Whether A belongs to the outputs. A model's matrices have one layout, so one that is not square decides."""
    problems = Problems(BaseModelError)
    layouts: dict[bool, str] = {}  # whether A and B are swapped → the first module that shows it
    for module in fused:
        # Whether its sizes are those of the parameter as it is, and with A and B the other way round
        parameter = base.fused(module.name, container)
        sizes = (module.out_features, module.in_features)
        fits_as_it_is = fits_swapped = False
        if parameter is not None and parameter.shape[0] == module.experts:
            rows, columns = parameter.shape[1:]
            if parameter.transposed:
                fits_as_it_is = sizes == (columns, rows)
            else:
                fits_as_it_is = sizes == (rows, columns)
                fits_swapped = sizes == (columns, rows)

        if not (fits_as_it_is or fits_swapped):
            stored = "has no such parameter"
            if parameter is not None:
                stored = f"has it as {shown(parameter.shape)}"
            problems.add(
                f"{module.name} has factors of {module.experts} matrices, {module.in_features} and "
                f"{module.out_features} long, and {base.name} {stored}",
                "Give the base that the adapter was trained on with `base_model`",
                parameter="base_model",
            )
        elif fits_as_it_is != fits_swapped:
            layouts.setdefault(fits_swapped, module.name)
    problems.raise_if_any()

    if len(layouts) != 1 and fused:
        which = f"{fused[0].name} is square"
        if layouts:
            which = f"{layouts[True]} and {layouts[False]} differ"
        raise UnsupportedError(
            f"PEFT before 0.19 stored A and B of fused experts the other way round for some models, and {which}, so "
            "the shapes do not say whether it did here",
            "Merge the adapter into its base with the version of PEFT that made it",
            parameter="adapter",
        )
    return True in layouts


def _as_safetensors(pickled: Path, folder: Path) -> None:
    """Write a pickle's tensors as safetensors. `weights_only=True` builds only tensors and plain containers."""
    import torch
    from safetensors.torch import save_file

    remedy = "Save the adapter again with PEFT, which writes safetensors"
    try:
        content: Any = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no single class for these errors
        raise ExpertError(f"{pickled} cannot be read without running code: {reason_of(error)}", remedy) from None

    if not isinstance(content, dict):
        raise ExpertError(f"{pickled} holds a {type(content).__name__} instead of named tensors", remedy)
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise ExpertError(f"{pickled}: {key!r} is not a dense tensor with a name", remedy)
    tensors = {key: content[key].detach().clone().contiguous() for key in sorted(content)}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


# With LoRA, trained tokens are copied. PEFT merges modules of other kinds, which would lose the tokens' rows.
_TOKENS = "trainable_token_indices"
# Settings with which a LoRA is more than s·B·A, or something else.
_VARIANTS = ("use_dora", "lora_bias", "use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "velora_config")
_RESOLUTION = 5e-8  # of errors that are computed from inner products


def convert(
    adapter: str | Path,
    out_path: str | Path,
    *,
    names: Literal["transformers4", "transformers5"] | None = None,
    layout: Literal["exact", "portable"] = "exact",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    rank: int | None = None,
    max_error: float | None = None,
    saved_rank: int | None = None,
    format: Literal["peft", "mlx"] = "peft",
    base_model: str | Path | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Convert an adapter: other module names, another layout or dtype, safetensors, rsLoRA, from MLX or for MLX.

    A LoRA keeps its ΔW, up to the rounding to `dtype` and to `rank`. LoRA on fused experts (`target_parameters`) that
    PEFT before 0.19 saved gets today's layout. For other kinds (DoRA, LoHa, LoKr, OFT, (IA)³, …) PEFT computes each
    module's ΔW on its base, and ΔW ≈ B·A is its truncated SVD, with lora_alpha = √rank, so that rsLoRA's scale is 1.
    LoRA that mlx-lm trained (`adapters.safetensors`) is read as it is: A = lora_aᵀ, B = lora_bᵀ, with mlx-lm's scale.

    Args:
        adapter: a folder or Hub id.
        out_path: the folder to write; it appears whole or not at all.
        names: write the module names of `transformers4` or `transformers5`; see `write_adapter`.
        layout: `exact`, or `portable` (one rank, plain LoRA, scale 1).
        dtype: the dtype of the tensors; by default the adapter's own, or float32 if ΔW is computed.
        rank: the highest rank of a module; kinds other than LoRA need this or `max_error`.
        max_error: refuse the conversion if any module has a larger relative error of ΔW, rounding included. For kinds
            other than LoRA, each module gets the smallest rank that is enough, up to `rank`.
        saved_rank: turn every module trained in full (`modules_to_save`) into LoRA of at most this rank, by the
            truncated SVD of W - W_base, for engines that serve only LoRA. By default these modules stay as they are.
        format: `peft`, or `mlx` for a folder that mlx-lm loads, with one rank and scale 1 (the portable layout).
        base_model: the adapter's base, if it names none or another path. DoRA, other kinds than LoRA, fused experts of
            PEFT before 0.19 and `saved_rank` need its weights.
        allow_pickle: read `adapter_model.bin` too, only with `torch.load(weights_only=True)`.
        overwrite: replace the folder, if `convert` or a similar command wrote it.
        dry_run: compute and report everything, and write nothing.
        progress: called after each module of another kind, with the number of finished modules and the total.

    Returns:
        The kind before the conversion, and each module's rank and relative error.

    Raises:
        ArgumentError: an argument has the wrong type or value, or an adapter of another kind than LoRA was passed
            without `rank` and `max_error`.
        NotFoundError: there is no such adapter.
        ExpertError: it is damaged, changes nothing, or lacks tensors that PEFT would fill with random numbers.
        BaseModelError: its base is needed, but is not known or cannot be loaded.
        UnsupportedError: it is a pickle and `allow_pickle` is False; PEFT has no ΔW for its kind; an error is above
            `max_error`; with `saved_rank`, a module trained in full is a vector, such as a norm; mlx-lm has another
            form or other names for what it changes.
        OutputError: the folder exists (without `overwrite`), holds other files, overlaps the input, or cannot be
            written.
    """
    _check_arguments(names, dtype, saved_rank, format)
    if format == "mlx":
        layout = "portable"
    form = Form(layout=layout, max_rank=rank, max_error=max_error, names=names, dtype=dtype and Dtype.NAMES[dtype])
    if base_model is not None:
        base_model = str(base_model)
    COMPOSED.check(out_path, overwrite=overwrite, inputs=[adapter, base_model])
    source = Source.of_adapter(adapter, parameter="adapter")
    with scratch_folder("convert") as place, _asking_for_the_base(base_model):
        folder, pickled = _safetensors(source, place, allow_pickle=allow_pickle)
        is_mlx = not pickled and not os.path.exists(folder / WEIGHTS) and os.path.exists(folder / Source.MLX_WEIGHTS)
        own_weights = WEIGHTS
        if pickled:
            own_weights = PICKLED
        elif is_mlx:
            own_weights, folder = Source.MLX_WEIGHTS, _made(place / "peft")
            mlx.write_as_peft(source.folder, folder, base_model)

        lora = _as_lora(replace(source, folder=folder), str(adapter), place, form, base_model, progress)
        if saved_rank is not None:
            lora = _lowered(lora, place, form, base_model, saved_rank)

        # A plan of this one adapter, with what its own folder says of it
        parts = lora.adapter.parts.values()
        kept = Records(source.folder).kept_layers((part.name, part.layer) for part in parts)
        opened = replace(lora.adapter, source=source, base_fingerprints=source.recorded_base, kept_layers=kept)
        plan = _plan_of(opened, ExpertName.choose(adapter, {}, "expert"), base_model)
        if is_mlx:
            mlx.check_depth(source.folder, opened, plan.num_layers)
        if format == "mlx":
            mlx.check_writable(opened)
        bounds = form
        if lora.kind != "LORA":  # it has been cut
            bounds = replace(form, max_rank=None, max_error=None)
        prepared = prepare(plan, bounds)
        original = {file: sha256_of(source.folder / file) for file in (own_weights, CONFIG)}

        modules: list[ConvertedModule] = []

        def amend(record: CompositionRecord, written: Path) -> CompositionRecord:
            # Errors are measured on the files before these take their place: if one is too large, no output appears.
            modules.extend(_measured(opened, open_adapter(written), prepared.plan.slots, lora.approximated))
            _check_errors(modules, max_error)
            if not (pickled or is_mlx or lora.is_made):
                return record
            return _amended(record, written, lora, original, form)

        # mlx-lm's form is made of PEFT's.
        trial = dry_run or format == "mlx"
        target = out_path
        if trial:
            target = place / "written"
        written = prepared.write(target, overwrite=overwrite and not trial, amend=amend)
        if format == "mlx" and not dry_run:
            with COMPOSED.folder(out_path, overwrite=overwrite, inputs=[adapter, base_model]) as out:
                mlx.write_from_peft(written, open_adapter(written), out)
    return Conversion(expand(out_path), lora.kind, pickled, tuple(modules))


def _check_arguments(names: str | None, dtype: str | None, saved_rank: int | None, format: str) -> None:
    if format not in ("peft", "mlx"):
        raise ArgumentError(f"`format` is {format!r}", "Pass peft or mlx", parameter="format")
    if names not in (None, "transformers4", "transformers5"):
        raise ArgumentError(f"`names` is {names!r}", "Pass transformers4 or transformers5", parameter="names")
    if dtype is not None and dtype not in Dtype.NAMES:
        raise ArgumentError(f"`dtype` is {dtype!r}", f"Choose from {', '.join(Dtype.NAMES)}", parameter="dtype")
    if saved_rank is not None and (type(saved_rank) is not int or saved_rank < 1):
        raise ArgumentError(f"`saved_rank` is {saved_rank!r}", "Pass a whole number above 0", parameter="saved_rank")


@dataclass(frozen=True)
class _Lora:
    """An adapter as plain LoRA, before it is written again.

    Attributes:
        adapter: the LoRA.
        kind: what it was; see `Conversion`.
        is_made: whether its factors are not those of the adapter's own files.
        approximated: the modules whose ΔW was cut to a rank.
        saved_rank: the rank of the modules that were trained in full, if they were cut too.
    """

    adapter: Adapter
    kind: str
    is_made: bool
    approximated: dict[str, ConvertedModule] = field(default_factory=dict)
    saved_rank: int | None = None


def _as_lora(
    source: Source,
    reference: str,
    place: Path,
    form: Form,
    base_model: str | None,
    progress: Callable[[int, int], None],
) -> _Lora:
    """The adapter as LoRA: as it is, in today's layout, or cut to the rank and error of `form` for another kind.

    Args:
        source: the adapter's folder, with safetensors.
        reference: the adapter, for messages.
        place: an empty temporary folder.
    """
    kind, is_older = _kind(source.folder), _is_older(source.folder)
    if is_older:
        current = _made(place / "current")
        _write_current(source.folder, current, open_checkpoint(_recorded_base(source.folder, base_model)))
        source = replace(source, folder=current)

    if kind == "LORA":
        try:
            return _Lora(Adapter.read(source), kind, is_made=is_older)
        except AdapterswapError as error:
            raise error.recast(parameter="adapter") from None

    if form.max_rank is None and form.max_error is None:
        raise ArgumentError(
            f"{reference} is {kind}, which LoRA can only approximate",
            "Pass `rank=16`, or `max_error=0.1` for the smallest rank with that error",
            parameter="rank",
        )
    cut = _made(place / "cut")
    approximated = _cut(_under_current_names(source, place / "named", base_model), cut, form, base_model, progress)
    return _Lora(Adapter.read(replace(source, folder=cut)), kind, is_made=True, approximated=approximated)


def _lowered(lora: _Lora, place: Path, form: Form, base_model: str | None, saved_rank: int) -> _Lora:
    """The adapter with LoRA of at most `saved_rank` in place of modules trained in full; itself if it has none."""
    opened = lora.adapter
    if opened.tokens:
        raise UnsupportedError(
            f"{next(iter(opened.tokens))} has trained tokens ({_TOKENS}), which stay as they are",
            "Leave out `saved_rank`, or merge the adapter into its base with `merge`",
            parameter="saved_rank",
        )
    if not opened.saved:
        return lora

    lowered = _made(place / "lowered")
    base = open_checkpoint(_base_of(opened.config.base_model, opened.config.revision, base_model))
    rank = min(saved_rank, form.max_rank or saved_rank)
    approximated = write_lowered(opened, base, lowered, rank=rank, error=form.max_error, dtype=form.dtype)
    adapter = Adapter.read(replace(opened.source, folder=lowered))
    return _Lora(adapter, lora.kind, True, lora.approximated | approximated, saved_rank)


def _amended(
    record: CompositionRecord, written: Path, lora: _Lora, original: Mapping[str, str], form: Form
) -> CompositionRecord:
    """The record of what was written, with the conversion and the hashes of the adapter's own files."""
    modules: dict[str, dict[str, Any]] = {}
    for module in lora.approximated.values():
        modules[module.name] = {"rank": module.rank, "relative_error": module.error, "norm": module.norm}
    fields: dict[str, Any] = {
        "peft_type": lora.kind,
        "pickled": PICKLED in original,
        "rank": form.max_rank,
        "max_error": form.max_error,
        "sha256": {file: sha256_of(written / file) for file in (WEIGHTS, CONFIG)},
        "modules": modules,
    }

    if lora.approximated:
        approximated = tuple(lora.approximated.values())
        fields["relative_error"] = Conversion(written, lora.kind, False, approximated).relative_error
    if lora.saved_rank is not None:
        fields["saved_rank"] = lora.saved_rank
    return record.converted(original, **fields)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _safetensors(source: Source, place: Path, *, allow_pickle: bool) -> tuple[Path, bool]:
    """A folder with the adapter's config and safetensors, and whether they were a pickle."""
    if os.path.exists(source.folder / WEIGHTS) or not os.path.exists(source.folder / PICKLED):
        return source.folder, False
    if not allow_pickle:
        raise UnsupportedError(
            f"{source.folder} holds a pickled adapter ({PICKLED}), which can run code when loaded",
            "Pass `allow_pickle=True` to read its tensors with torch's restricted unpickler, which runs none",
            parameter="allow_pickle",
        )
    folder = _made(place / "safetensors")
    _as_safetensors(source.folder / PICKLED, folder)
    shutil.copyfile(source.folder / CONFIG, folder / CONFIG)
    return folder, True


def _kind(folder: Path) -> str:
    """The adapter's kind: LORA if ΔW is s·B·A, DORA and so on for its variants, else PEFT's name."""
    config = read_json(folder / CONFIG, "Pass the folder of a PEFT adapter")
    kind = config.get("peft_type")
    init = config.get("init_lora_weights")

    # Kinds without a ΔW
    if kind == TRAINABLE_TOKENS:
        raise UnsupportedError(
            "Trained tokens are rows that replace the base's, and LoRA can only add to them",
            "Merge them into the base with `merge`",
            parameter="adapter",
        )
    if kind not in CONVERTIBLE:
        raise UnsupportedError(
            f"Adapters of the kind {shown(kind)} cannot be converted: their ΔW from PEFT is not tested",
            f"Convert one of {', '.join(CONVERTIBLE)}",
            parameter="adapter",
        )

    # Settings with which it means something else
    if isinstance(init, str) and init.lower().startswith(CHANGING_INITS):
        raise UnsupportedError(
            f"init_lora_weights is {shown(init)}, which changed the base's weights",
            "Save it with PEFT's path_initial_model_for_weight_conversion, which turns it into a plain LoRA",
            parameter="adapter",
        )
    if kind == "LORA" and config.get("use_dora") and config.get(_TOKENS):
        raise UnsupportedError(
            f"{_TOKENS} is set beside DoRA, and only the tokens of plain LoRA are carried over",
            "Merge it into its base with `merge`",
            parameter="adapter",
        )
    if config.get("layer_replication"):
        raise UnsupportedError(
            f"layer_replication is {shown(config['layer_replication'])}: it repeats layers, so that indices no longer "
            "name the base's",
            "Train it without layer_replication",
            parameter="adapter",
        )

    if kind == "LORA" and config.get("use_dora"):
        return "DORA"
    variant = next((key for key in _VARIANTS if config.get(key)), None)
    if kind == "LORA" and variant is not None:
        raise UnsupportedError(
            f"{variant} is set, and such a LoRA cannot be converted", "Retrain it", parameter="adapter"
        )
    return str(kind)


@contextmanager
def _asking_for_the_base(base_model: str | None) -> Iterator[None]:
    """If the base that the adapter names cannot be opened, the remedy is to pass it."""
    try:
        yield
    except NotFoundError as error:
        if base_model is not None or error.parameter not in (None, "base_model"):
            raise
        message = error.problems[0].message
        raise NotFoundError(message, "Pass `base_model` with the base's folder", parameter="base_model") from None


def _under_current_names(source: Source, out: Path, base_model: str | None) -> Path:
    """The adapter's folder, or a copy in `out` with the base's names if its own are older, which PEFT may not know."""
    try:
        plan = _plan_of(Adapter.read(source), "expert", base_model)
        prepared = prepare(plan, Form())
        if prepared.plan is not plan:
            return prepared.write(out)
    except AdapterswapError:  # of a kind that cannot be composed, or without a base to compare names with
        pass
    return source.folder


def _cut(
    folder: Path, out: Path, form: Form, base_model: str | None, progress: Callable[[int, int], None]
) -> dict[str, ConvertedModule]:
    """Write an rsLoRA into `out` that approximates the adapter of another kind in `folder`; return its modules."""
    from safetensors.numpy import save_file

    config, reference = read_json(folder / CONFIG), _recorded_base(folder, base_model)
    base = Checkpoint.find(reference)
    loaded = load_with_base(folder, base.folder, reference)

    tensors: dict[str, Any] = {}
    modules: dict[str, ConvertedModule] = {}
    shapes: dict[str, Shape] = {}
    dtype = form.dtype or "F32"
    for change in loaded.changes(progress):
        if not np.isfinite(change.delta).all():
            raise ExpertError(f"ΔW of {change.name} holds NaN or infinity", "Train the adapter again")
        if not change.delta.any():
            continue
        made, shape, factors = lower(change.name, change.delta, True, dtype, rank=form.max_rank, error=form.max_error)
        modules[change.name], shapes[change.name] = made, shape
        tensors |= zip(ModuleKeys(change.name).factors(), factors, strict=True)

    if not modules:
        raise ExpertError("The adapter changes no weight of its base", "Train it first", parameter="adapter")
    for name, tensor in loaded.saved.items():
        module, _, parameter = name.rpartition(".")
        tensors[ModuleKeys(module).parameter(parameter, wrapped=module in modules)] = tensor.float().numpy()
    save_file(tensors, out / WEIGHTS)

    variant = None
    if config.get("bias", "none") != "none":
        variant = {"bias": "all"}
    content = adapter_config(
        shapes,
        rslora=True,
        base_model=config.get("base_model_name_or_path") or reference,
        revision=config.get("revision"),
        task_type=config.get("task_type"),
        fan_in_fan_out=bool(config.get("fan_in_fan_out")),
        tied=False,
        saved=config.get("modules_to_save") or (),
        auto_mapping=config.get("auto_mapping"),
        variant=variant,
    )
    write_json(out / CONFIG, content)
    return modules


def _base_of(base_name: object, revision: str | None, base_model: str | None) -> str:
    """The base that the caller passed, or else the one that the adapter names."""
    if not base_model and isinstance(base_name, str):
        base_model = Reference(base_name).at(revision)
    return Reference.to_base(base_model or None)


def _recorded_base(folder: Path, base_model: str | None) -> str:
    """The base that the caller passed, or else the one that the config of the adapter in `folder` names."""
    config = read_json(folder / CONFIG)
    return _base_of(config.get("base_model_name_or_path"), config.get("revision"), base_model)


def _plan_of(adapter: Adapter, expert: str, base_model: str | None) -> Plan:
    """The plan that gives every module to one expert. Without the base, the least possible depth is enough."""
    composition = Composition.of_one(expert, adapter, base_model=base_model)
    try:
        return make_plan(composition, {expert: adapter})
    except (NotFoundError, BaseModelError):
        least = least_depth({expert: adapter})
        return make_plan(composition.model_copy(update={"num_layers": least}), {expert: adapter})


def _measured(
    before: Adapter, after: Adapter, slots: Mapping[str, Any], own: Mapping[str, ConvertedModule]
) -> tuple[ConvertedModule, ...]:
    """The modules with their errors: those in `own` as they are, the others compared with their factors before."""
    names = {slot.module: name for name, slot in slots.items()}
    own_modules = [replace(module, name=names.get(name, name)) for name, module in own.items()]
    if own.keys() >= before.modules.keys():
        return tuple(own_modules)

    new_names = {name: names.get(name, name) for name in before.parts}
    renamed = before.with_names(new_names, "", after.container)
    own_names = {module.name for module in own_modules}
    compared: list[ConvertedModule] = []
    for difference in compare(renamed, after):
        name, norm, error = difference.name, difference.norms[0], difference.distance
        if name not in after.modules or name in own_names:
            continue
        is_seen = norm and error > _RESOLUTION
        if not is_seen:
            error = 0.0
        compared.append(ConvertedModule(name, after.modules[name].rank, norm, error))
    return (*compared, *own_modules)


def _check_errors(modules: Iterable[ConvertedModule], max_error: float | None) -> None:
    if max_error is None:
        return
    problems = Problems(UnsupportedError)
    for module in modules:
        if module.error > max_error * (1 + 1e-6) + 1e-7:
            problems.add(
                f"The relative error of {module.name} is {module.error:.3g} at rank {module.rank}, above {max_error:g}",
                "Pass a larger `rank`, a larger `max_error`, or `dtype=float32`",
                parameter="max_error",
            )
    problems.raise_if_any()
