"""Load one adapter of any kind that PEFT has, once nothing in its config can open or run anything else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from typing import Any

from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.model.sources import CONFIG, PROVENANCE, TRAINING_RECORD, WEIGHTS, Source
from adapterswap.engines.live.loader import check_copies_in_model, folder_without_copies
from adapterswap.kit.errors import ExpertError, UnsupportedError, reason_of
from adapterswap.kit.files.tensorfile import TensorFile
from adapterswap.kit.files.text import read_json, shown

_SECONDS = 10.0  # for the regexes of a config on all modules; ordinary ones take milliseconds
_PLAIN = re.compile(r"[\w.-]*")  # names: of their characters, only the dots are special in regexes
_PLAIN_NAMES = "Use module names instead of regexes"
_REGEXES = {  # as PEFT 0.21 builds them
    "target_modules": "%s",
    "exclude_modules": "%s",
    "layers_pattern": r"(?:^|.*?\.)%s\.(\d+)\..*",
    "modules_to_save": r"(?:^|.*\.)%s(?:$|\..*)",
    "rank_pattern": r"(.*\.)?(%s)$",
    "alpha_pattern": r"(.*\.)?(%s)$",
}
# Kinds of PEFT whose configs name nothing that is opened or run. PROMPT_TUNING names a tokenizer with its code; XLORA
# and SHADOW name other models.
_LOADED = {
    "LORA", "TRAINABLE_TOKENS", "IA3", "OFT", "BOFT", "LOHA", "LOKR", "VERA", "HRA", "MISS", "HIRA", "ROAD", "ADALORA",
    "VBLORA", "PREFIX_TUNING", "P_TUNING",
}  # fmt: skip
_TRY = """
import json, re, sys
regexes, names = json.load(sys.stdin)
for key in regexes:
    print(key, flush=True)
    for regex in regexes[key]:
        for name in names:
            re.fullmatch(regex, name)
"""


def find_adapter(reference: str) -> Source:
    """The folder of a PEFT adapter, or the one that a Hub id `org/name[@revision]` names."""
    source = Source.find(reference, [WEIGHTS, CONFIG, PROVENANCE, TRAINING_RECORD], what="adapter")
    for name in (WEIGHTS, CONFIG):
        if not (source.folder / name).is_file():
            raise ExpertError(
                f"{reference} has no {name}", "Pass an adapter that PEFT saved as safetensors", parameter="adapter"
            )

    config = read_json(source.folder / CONFIG)
    kind, megatron = config.get("peft_type"), config.get("megatron_config")
    if kind not in _LOADED or megatron is not None:
        what = "sets megatron_config"
        if kind not in _LOADED:
            what = f"is of the kind {shown(kind)}"
        raise UnsupportedError(
            f"{reference} {what}, for which PEFT would follow other settings in its config: paths, modules, addresses",
            f"Evaluate an adapter of these kinds: {', '.join(sorted(_LOADED))}",
            parameter="adapter",
        )
    return source


def with_adapter(model: Any, adapter: Source) -> Any:
    """`model` with one adapter. Every tensor of its file must find its place, except copies of the model's own.

    Raises:
        ExpertError: the adapter does not fit the model, or a regex in its config takes PEFT too long.
        UnsupportedError: it carries a copy of a weight that the model does not hold whole.
    """
    from peft import PeftModel, get_peft_model_state_dict

    file = TensorFile.read(adapter.folder / WEIGHTS)
    modules = dict(model.named_modules())
    _check_regexes(adapter, list(modules))
    check_copies_in_model(file, f"The adapter {adapter}", modules)
    try:
        with quiet_peft(), folder_without_copies(file) as folder:
            # Keys that the file lacks, or that PEFT renames so that it loses them (for laguna, among other types).
            warnings.filterwarnings("error", "Found missing adapter keys")
            model = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, KeyError, TypeError, UserWarning) as error:
        raise ExpertError(
            f"The adapter {adapter} does not fit the base model: {reason_of(error)}",
            "Use the base that the adapter was trained on. If it is, merge the adapter into it with `merge`",
            parameter="adapter",
        ) from None
    loaded = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    stored = {key for key in file.tensors if ".base_layer." not in key}
    if differing := sorted(loaded ^ stored):
        reason = "the base has no such module" if differing[0] in stored else "the file does not contain it"
        raise ExpertError(
            f"The adapter {adapter} does not fit the base model: {differing[0]}: {reason}",
            "Use the base that the adapter was trained on",
            parameter="adapter",
        )
    return model


def _check_regexes(adapter: Source, modules: list[str]) -> None:
    """Refuse regexes in an adapter's config that would take PEFT too long to match against all modules.

    PEFT uses `re`, which is slow for other patterns than `regex` and cannot be interrupted, so a process of its own
    tries them first.
    """
    config, regexes = read_json(adapter.folder / CONFIG), {}
    for key, in_peft in _REGEXES.items():
        value = config.get(key) or ()
        texts = value
        if isinstance(value, str):
            texts = [value]
        elif in_peft == "%s":
            texts = ()  # a list of targets has names
        regexes[key] = [in_peft % text for text in texts if isinstance(text, str) and not _PLAIN.fullmatch(text)]
    if not any(regexes.values()):
        return

    command, content = [sys.executable, "-I", "-c", _TRY], json.dumps([regexes, modules]).encode()
    try:
        subprocess.run(command, input=content, capture_output=True, check=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        tried, reason = error.stdout, "the regexes take too long to match"
    except subprocess.CalledProcessError as error:
        tried, said = error.stdout, error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = f"PEFT cannot match the regexes: {said}"
    else:
        return

    key = (tried or b"a key\n").decode().splitlines()[-1]  # the last that it began
    raise ExpertError(f"{key} of the adapter {adapter}: {reason}", _PLAIN_NAMES, parameter="adapter")
