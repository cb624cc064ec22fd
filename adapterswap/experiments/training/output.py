"""Write the expert's folder: PEFT's two files or a whole model, `training.json`, and a short model card.

The same inputs give the same files: no dates, no local paths, keys and lists in a fixed order.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.core import OpenedBase
from adapterswap.core.model.sources import CONFIG, TRAINING_RECORD, WEIGHTS
from adapterswap.experiments.training.recipe import ChainStart, TrainRecipe
from adapterswap.experiments.training.report import TrainReport
from adapterswap.experiments.training.start import Start
from adapterswap.experiments.training.targets import TrainingTargets
from adapterswap.kit.files.folders import CARD, OutputKind
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.text import expand, write_json

TRAINING_FORMAT = "adapterswap-training/1"

_LIBRARIES = ("datasets", "peft", "torch", "transformers", "trl")


EXPERT = OutputKind(TRAINING_RECORD, lambda record: record.get("format") == TRAINING_FORMAT)
"""The output of `train`."""


def write_expert(
    folder: Path,
    model: Any,
    recipe: TrainRecipe,
    base: OpenedBase,
    targets: TrainingTargets,
    report: TrainReport,
    *,
    start: Start | None = None,
    weights: dict[str, Any] | None = None,
) -> None:
    """Write the trained weights (see `write_weights`), the record and the model card into `folder`.

    Args:
        start: where the adapter started, whose tokenizer and chat templates are copied; None for zero.
        weights: the model's state dict, if its own parameters are not complete.
    """
    write_weights(folder, model, recipe, base, targets, weights=weights)
    if start:
        start.write_companions(folder)
    record = describe(recipe, base, targets, report, start)
    if start:
        record["sha256"] = {name: sha256_of(folder / name) for name in (CONFIG, WEIGHTS)}
    write_json(folder / TRAINING_RECORD, record, sort_keys=True, allow_nan=True)  # a loss may be NaN
    (folder / CARD).write_text(_card(recipe, base, targets, report, start), encoding="utf-8")


def write_weights(
    folder: Path,
    model: Any,
    recipe: TrainRecipe,
    base: OpenedBase,
    targets: TrainingTargets,
    *,
    weights: dict[str, Any] | None = None,
) -> None:
    """Write the adapter, or the whole model, into `folder`, in the dtype that the recipe says."""
    import torch
    from transformers import GenerationConfig

    # Round once: the model, and its separate state dict if there is one. An adapter keeps its dtype by default.
    adapted = recipe.adapter.method == "lora"
    dtype: Any = recipe.adapter.save_dtype or None
    if dtype is None and not adapted:
        dtype = base.config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if dtype is not None:
        model.to(dtype)
        if weights:
            for name in weights:
                weights[name] = weights[name].to(dtype)

    if adapted:
        # The adapter itself saves adapted embeddings; PEFT's check for more would use the network.
        model.save_pretrained(folder, save_embedding_layers=False, state_dict=weights)
        below = None
        if isinstance(recipe.start, ChainStart):
            below = Path(recipe.start.adapter).name
        _tidy_config(folder / "adapter_config.json", base, targets, below)
        (folder / CARD).unlink(missing_ok=True)  # PEFT's card, which contains the base's local path
    else:
        # With the base's own config and tokenizer, because trainers change them.
        untouched = OpenedBase.open(base.reference)
        model.config = untouched.config
        if (base.source.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(base.source.folder)
        model.save_pretrained(folder, state_dict=weights)
        untouched.tokenizer.save_pretrained(folder)

    # safetensors makes its files readable for their owner only.
    mode = next(folder.glob("*.json")).stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def describe(
    recipe: TrainRecipe, base: OpenedBase, targets: TrainingTargets, report: TrainReport, start: Start | None = None
) -> dict[str, Any]:
    """The content of training.json."""
    # The recipe, without the places of files on this machine.
    resolved = recipe.resolved()
    del resolved["out_path"]
    resolved["base_model"] = str(base.source)
    validation = resolved["validation"] or {}
    for source in [*resolved["datasets"], *(validation.get("datasets") or [])]:
        source["path"] = _public(source["path"])
    if resolved["hygiene"]:
        resolved["hygiene"]["overlap"] = [_public(name) for name in resolved["hygiene"]["overlap"]]
    if resolved["selection"] and resolved["selection"]["include_path"]:
        resolved["selection"]["include_path"] = _public(resolved["selection"]["include_path"])
    if start is None:
        del resolved["start"]
    elif isinstance(resolved["start"], str):
        resolved["start"] = _public(resolved["start"])
    elif start.on_top:
        resolved["start"]["adapter"] = _public(resolved["start"]["adapter"])
    else:
        experts = resolved["start"].get("experts", {})
        resolved["start"]["experts"] = {name: _public(place) for name, place in experts.items()}
    rows = asdict(report.rows)
    for counts in rows["sources"]:
        counts["source"] = _public(counts["source"])

    # Composing compares fingerprints: other bases may have this name, and one with the start in it is another base.
    fingerprints = dict(base.source.identity)
    if start and start.on_top:
        fingerprints |= start.record.sha256

    versions = {"adapterswap": __version__}
    for name in _LIBRARIES:
        versions[name] = version(name)
    if report.selection:
        versions["lm_eval"] = version("lm_eval")

    record = {
        "format": TRAINING_FORMAT,
        "recipe": resolved,
        "base": {"name": base.source.name, "revision": base.source.revision, "fingerprints": fingerprints},
        "target_modules": targets.ends,
        "layers": targets.layers,
        "trainable_parameters": report.trainable_parameters,
        "rows": rows,
        "steps": report.steps,
        "processes": report.processes,
        "tokens": report.tokens,
        "losses": {"train": report.train_losses, "eval": report.eval_losses},
        "selection": asdict(report.selection) if report.selection else None,
        "versions": versions,
    }
    if start:
        record |= {"start": start.record.content(), "companions": start.companions.prompt_record}
    if report.ladder:
        record["ladder"] = list(report.ladder)
    return record


def _public(path: str) -> str:
    """A path that may be published: an absolute one is cut to its file name."""
    if expand(path).is_absolute():
        return Path(path).name
    return path


def _tidy_config(path: Path, base: OpenedBase, targets: TrainingTargets, below: str | None) -> None:
    """Sort PEFT's lists, whose order changes from run to run, and replace the base's local path.

    PEFT also shortens module names to endings that mean the same in this model; the requested names are clearer. On top
    of the adapter `below`, the base has a name that PEFT does not find: without that adapter, the result is wrong.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = targets.names
    config["base_model_name_or_path"] = base.source.name
    config["revision"] = base.source.revision
    if below is not None:
        config["base_model_name_or_path"] = f"{base.source.name}+{below}"
        config["revision"] = None
    config["inference_mode"] = True
    for key, value in config.items():
        if isinstance(value, list):
            config[key] = sorted(value)
    write_json(path, config, sort_keys=True)


def _card(
    recipe: TrainRecipe, base: OpenedBase, targets: TrainingTargets, report: TrainReport, start: Start | None
) -> str:
    """The model card."""
    library, tags, kind = "peft", "lora, adapterswap", "LoRA"
    if recipe.adapter.method == "none":
        library, tags, kind = "transformers", "adapterswap", "Full-parameter"
    elif targets.rslora:
        kind = "rsLoRA"

    # The head, and how it was trained
    lines = ["---", f"library_name: {library}"]
    if base.source.revision is not None:  # from the Hub
        lines.append(f"base_model: {base.source.name}")
    lines += [
        f"tags: [{tags}]",
        "---",
        "",
        f"# {kind} expert for {base.source.name}",
        "",
        f"Trained by adapterswap {__version__} on {base.source}: {_adapter_summary(recipe, start)}"
        f"{report.trainable_parameters:,} parameters, {report.steps:,} steps, {report.tokens:,} tokens.",
    ]
    if start and start.record.origin:
        lines.append(f"\nThe start {start.record.origin}.")

    # The rows
    rows = report.rows
    lines += ["", "| source | rows read | after filter and samples |", "|---|---:|---:|"]
    for counts in rows.sources:
        lines.append(f"| {_public(counts['source'])} | {counts['read']:,} | {counts['kept']:,} |")
    used = f"{rows.train:,} rows were trained on, {rows.validation:,} held out, {rows.dropped:,} dropped"
    if rows.surplus:
        used += f", {rows.surplus:,} left out beyond samples_per_side"
    if rows.split:
        used += f"; {rows.split:,} long texts became several rows"
    lines += ["", f"{used}."]

    # The losses, and which weights these are
    if report.train_losses:
        lines.append(f"Training loss: {report.losses_text(3)}.")
    if report.selection:
        lines += [
            "",
            f"These are the weights after step {report.selection.chosen.step:,}, the best of the checkpoints by "
            f"{' and '.join(report.selection.metrics)}:",
            "",
            *report.selection.markdown(),
        ]
    elif recipe.stops_early and report.eval_losses:
        step, loss = min(report.eval_losses, key=lambda measured: measured[1])
        lines.append(f"These are the weights after step {step:,}, with the lowest validation loss: {loss:.3f}.")
    elif report.eval_losses:
        lines.append(f"Validation loss: {report.eval_losses[-1][1]:.3f}.")
    lines += ["", "`training.json` has the whole recipe, the rows used and dropped, the losses and the versions.", ""]
    return "\n".join(lines)


def _adapter_summary(recipe: TrainRecipe, start: Start | None) -> str:
    """The adapter, and the part of the model that was trained if it was not all of it."""
    adapter = recipe.adapter
    parts = []
    if adapter.method == "lora" and (start is None or start.on_top):
        parts.append(f"rank {adapter.r}, alpha {adapter.alpha:g}")
    if start and start.on_top:
        parts.append(f"on top of {start.record}")
    elif start:
        parts.append(f"started from {start.record}")

    if adapter.partition:
        parts.append(f"the {adapter.side} side of partition {adapter.partition}")
    if adapter.layers:
        parts.append(f"layers {adapter.layers}")
    if recipe.simultaneous:
        parts.append(f"both sides of partition {recipe.simultaneous.partition} in turns")
    if recipe.quantization:
        parts.append(f"a base in {recipe.quantization.bits} bits")
    return "".join(f"{part}, " for part in parts)
