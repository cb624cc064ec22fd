"""The subject of an evaluation: a base alone, with one adapter, or with a composition.

Loads it from folders or the Hub, as safetensors and without running code of a repository, and describes it without
local paths. Knows nothing of tasks and scores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from adapterswap.bases import Base, choose_device, load_weights, quiet_peft
from adapterswap.errors import CompositionError, ExpertError, Problems, reason_of
from adapterswap.experts.adapters import CONFIG, WEIGHTS
from adapterswap.experts.base_identity import TRAINING_RECORD, identity_of, recorded_base
from adapterswap.experts.identity import sha256_of
from adapterswap.experts.layers import num_layers_in_config
from adapterswap.experts.patterns import is_plain
from adapterswap.experts.slices import PROVENANCE
from adapterswap.experts.sources import Source, find_source
from adapterswap.files.scratch import scratch_folder
from adapterswap.files.smallfiles import read_json
from adapterswap.files.tensorfile import read_header
from adapterswap.planning.one_base import check_base_weights
from adapterswap.planning.plan import Plan
from adapterswap.records.record import CompositionRecord, adapter_source, composition_record, read_record

__all__ = ["describe_subject", "find_adapter", "load_subject"]

_MADE_OF = ("num_layers", "composition", "experts", "rules", "output")  # fields of a record
_SECONDS = 10.0  # for the regexes of one key on all modules; ordinary ones take milliseconds
_PLAIN_NAMES = "Use module names instead of regexes"
_REGEXES = {  # as PEFT 0.21 builds them
    "target_modules": "%s",
    "exclude_modules": "%s",
    "layers_pattern": r"(?:^|.*?\.)%s\.(\d+)\..*",
    "modules_to_save": r"(?:^|.*\.)%s(?:$|\..*)",
    "rank_pattern": r"(.*\.)?(%s)$",
    "alpha_pattern": r"(.*\.)?(%s)$",
}
_TRY = """
import json, re, sys
regexes, names = json.load(sys.stdin)
for regex in regexes:
    for name in names:
        re.fullmatch(regex, name)
"""


def find_adapter(reference: str) -> Source:
    """The folder of a PEFT adapter, or the one that a Hub id `org/name[@revision]` names.

    Raises:
        NotFoundError: it is not there.
        ExpertError: its weights are not in one safetensors file.
    """
    source = find_source(reference, [WEIGHTS, CONFIG, PROVENANCE, TRAINING_RECORD], what="adapter")
    for name in (WEIGHTS, CONFIG):
        if not (source.folder / name).is_file():
            raise ExpertError(
                f"{reference} has no {name}", "Pass an adapter that PEFT saved as safetensors", parameter="adapter"
            )
    return source


@contextmanager
def load_subject(
    base: Base,
    *,
    adapter: Source | None = None,
    plan: Plan | None = None,
    max_rank: int | None = None,
    max_error: float | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> Iterator[Any]:
    """Yield the model: the base alone, with `adapter`, or with the composition of `plan`.

    If possible, a composition is made live: its experts are loaded side by side and no adapter is written. One that
    needs tensors of its own (see `why_not_live`) or a bound on its rank is written to a temporary folder first.

    Args:
        base: what `open_base` returned.
        adapter: a PEFT adapter, of any kind that PEFT can load.
        plan: a composition.
        max_rank, max_error: see `write_adapter`.
        device: see `choose_device`.
        dtype: of the base's weights: float32, bfloat16, float16, or auto for the one they are stored in.

    Raises:
        BaseModelError: the weights cannot be loaded.
        CompositionError: the composition is for another number of layers.
        ExpertError: an adapter does not fit the base, or carries a copy of another base's weight.
        AdapterswapError: the composition cannot be written (a nonlinear one without a bound on its rank).
    """
    from adapterswap.live import LiveComposer, load_experts, why_not_live
    from adapterswap.writing import write_adapter

    target = choose_device(device)
    depth = num_layers_in_config(base.config.to_dict())
    if plan is not None and depth not in (None, plan.num_layers):
        raise CompositionError(
            f"num_layers is {plan.num_layers}, but {base.reference} has {depth} layers",
            "Leave out `num_layers`",
            parameter="num_layers",
        )
    with ExitStack() as stack:
        if plan is not None and (max_rank is not None or max_error is not None or why_not_live(plan) is not None):
            folder = stack.enter_context(scratch_folder("evaluation")) / "composed"
            adapter = Source(write_adapter(plan, folder, max_rank=max_rank, max_error=max_error), folder.name)
            plan = None
        if adapter is not None:
            check_base_weights({str(adapter): recorded_base(adapter.folder)}, base.source)
        model = load_weights(base, dtype=dtype).to(target)
        if adapter is not None:
            model = _with_adapter(model, adapter)
        if plan is not None:
            model = load_experts(model, plan)
            stack.enter_context(LiveComposer(model).use(plan))
        yield model.eval()


def describe_subject(
    base: Base,
    *,
    adapter: Source | None = None,
    plan: Plan | None = None,
    max_rank: int | None = None,
    max_error: float | None = None,
) -> dict[str, Any]:
    """What `load_subject` loads, as plain data without local paths; adapters by their SHA-256."""
    named = {"source": base.source.name, "revision": base.source.revision}
    prints = identity_of(base.source)  # another local base may have the same name
    subject: dict[str, Any] = {"base_model": {**named, **({"fingerprints": prints} if prints else {})}}
    if adapter is not None:
        subject["adapter"] = _describe(adapter)
        if isinstance(record := read_record(adapter.folder), CompositionRecord):
            subject["composition"] = _made_of(record)
    if plan is not None:
        hashes = {name: sha256_of(expert.file.path) for name, expert in plan.adapters.items()}
        experts = {name: adapter_source(expert, hashes[name]) for name, expert in plan.adapters.items()}
        output = {"max_rank": max_rank, "max_error": max_error}
        record = composition_record(plan, experts, None, output=output, measured={})
        subject["composition"] = _made_of(record)
    return subject


def _describe(source: Source) -> dict[str, Any]:
    hashes = {name: sha256_of(source.folder / name) for name in (WEIGHTS, CONFIG)}
    return {"source": source.name, "revision": source.revision, "sha256": hashes}


def _with_adapter(model: Any, adapter: Source) -> Any:
    """`model` with one adapter. Every tensor of its file must find its place, except copies of the model's own."""
    from peft import PeftModel, get_peft_model_state_dict

    from adapterswap.live.copies import check_copies, folder_without_copies

    file = read_header(adapter.folder / WEIGHTS)
    modules = dict(model.named_modules())
    _check_regexes(adapter, list(modules))
    check_copies(file, f"the adapter {adapter}", modules)
    try:
        with quiet_peft(), folder_without_copies(file) as folder:
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # checked below, as an error
            model = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ExpertError(
            f"the adapter {adapter} does not fit the base model: {reason_of(error)}",
            "Use the base that the adapter was trained on",
            parameter="adapter",
        ) from None
    placed = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    stored = {key for key in file.tensors if ".base_layer." not in key}
    if odd := sorted(placed ^ stored):
        reason = "the base has no such module" if odd[0] in stored else "the file does not contain it"
        raise ExpertError(
            f"the adapter {adapter} does not fit the base model: {odd[0]}: {reason}",
            "Use the base that the adapter was trained on",
            parameter="adapter",
        )
    return model


def _check_regexes(adapter: Source, modules: list[str]) -> None:
    """Refuse regexes in an adapter's config that would take PEFT too long to match against all modules.

    PEFT uses `re`, which is slow for other patterns than `regex` and cannot be interrupted, so a process of its own
    tries them first.
    """
    config = read_json(adapter.folder / CONFIG)
    problems = Problems(ExpertError)
    for key, in_peft in _REGEXES.items():
        value = config.get(key) or ()
        texts = [value] if isinstance(value, str) else value if in_peft != "%s" else ()  # a list of targets has names
        regexes = [in_peft % text for text in texts if isinstance(text, str) and not is_plain(text)]
        if not regexes:
            continue
        command = [sys.executable, "-I", "-c", _TRY]
        content = json.dumps([regexes, modules])
        try:
            subprocess.run(command, input=content, text=True, capture_output=True, check=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            problems.add(
                f"{key} of the adapter {adapter}: the regexes take too long to match",
                _PLAIN_NAMES,
                parameter="adapter",
            )
        except subprocess.CalledProcessError as error:
            reason = error.stderr.strip().rpartition("\n")[2]
            problems.add(
                f"{key} of the adapter {adapter}: PEFT cannot match the regexes: {reason}",
                _PLAIN_NAMES,
                parameter="adapter",
            )
    problems.raise_if_any()


def _made_of(record: CompositionRecord) -> dict[str, Any]:
    """The part of a record that results include."""
    content = record.content()
    return {key: content[key] for key in _MADE_OF if key in content}
