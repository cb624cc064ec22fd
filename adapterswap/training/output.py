"""The expert's folder: PEFT's two files, `training.json`, and a short model card.

What is written follows from the inputs alone: no clock, no path of this machine, keys and lists in order. Knows nothing
of how the adapter came about beyond what it is told.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.bases import Base
from adapterswap.training.base import Targets
from adapterswap.training.recipe import TrainRecipe
from adapterswap.training.report import TrainReport

__all__ = ["describe", "write_expert"]

_LIBRARIES = ("datasets", "peft", "torch", "transformers", "trl")


def write_expert(
    folder: Path, model: Any, recipe: TrainRecipe, base: Base, targets: Targets, report: TrainReport
) -> None:
    """Write the adapter of `model`, a trained PeftModel, into the empty `folder`."""
    import torch

    if recipe.adapter.save_dtype == "bfloat16":
        model.to(torch.bfloat16)
    # Embeddings that were adapted are saved by the adapter itself; PEFT's own guess at more would ask the network.
    model.save_pretrained(folder, save_embedding_layers=False)
    _tidy_config(folder / "adapter_config.json", base)
    config_mode = (folder / "adapter_config.json").stat().st_mode
    (folder / "adapter_model.safetensors").chmod(config_mode)  # safetensors gives it to its owner alone
    _write_json(folder / "training.json", describe(recipe, base, targets, report))
    (folder / "README.md").write_text(_card(recipe, base, report), encoding="utf-8")


def describe(recipe: TrainRecipe, base: Base, targets: Targets, report: TrainReport) -> dict[str, Any]:
    """The content of training.json."""
    resolved = recipe.resolved()
    del resolved["out_path"]
    resolved["base_model"] = str(base.source)
    for source in [*resolved["datasets"], *((resolved["validation"] or {}).get("datasets") or [])]:
        source["path"] = _public(source["path"])
    rows = asdict(report.rows)
    for counts in rows["sources"]:
        counts["source"] = _public(counts["source"])
    return {
        "format": "adapterswap-training/1",
        "recipe": resolved,
        "base": {"name": base.source.name, "revision": base.source.revision},
        "target_modules": targets.names,
        "layers": targets.layers,
        "trainable_parameters": report.trainable_parameters,
        "rows": rows,
        "steps": report.steps,
        "tokens": report.tokens,
        "losses": {"train": report.train_losses, "eval": report.eval_losses},
        "versions": {"adapterswap": __version__, **{name: version(name) for name in _LIBRARIES}},
    }


def _public(path: str) -> str:
    """A path that may be told: an absolute one is cut to its file name."""
    return Path(path).name if Path(path).expanduser().is_absolute() else path


def _tidy_config(path: Path, base: Base) -> None:
    """PEFT writes sets as lists, in an order that changes from run to run, and the base's path on this machine."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base.source.name
    config["revision"] = base.source.revision
    config["inference_mode"] = True
    for key, value in config.items():
        if isinstance(value, list):
            config[key] = sorted(value)
    _write_json(path, config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _card(recipe: TrainRecipe, base: Base, report: TrainReport) -> str:
    adapter, rows = recipe.adapter, report.rows
    kind = "rsLoRA" if adapter.rslora else "LoRA"
    hub = base.source.revision is not None
    lines = [
        "---",
        "library_name: peft",
        *([f"base_model: {base.source.name}"] if hub else []),
        "tags: [lora, adapterswap]",
        "---",
        "",
        f"# {kind} expert for {base.source.name}",
        "",
        f"Trained by adapterswap {__version__} on {base.source}: rank {adapter.r}, alpha {adapter.alpha:g}, "
        f"{report.trainable_parameters:,} parameters, {report.steps:,} steps, {report.tokens:,} tokens.",
        "",
        "| source | rows read | rows kept |",
        "|---|---:|---:|",
        *(f"| {_public(counts['source'])} | {counts['read']:,} | {counts['kept']:,} |" for counts in rows.sources),
        "",
        f"{rows.train:,} rows were trained on, {rows.validation:,} held out, {rows.dropped:,} dropped.",
    ]
    if report.train_losses:
        lines.append(
            f"Training loss: {report.train_losses[0][1]:.3f} at first, {report.train_losses[-1][1]:.3f} at last."
        )
    if report.eval_losses:
        lines.append(f"Validation loss: {report.eval_losses[-1][1]:.3f}.")
    lines += ["", "`training.json` holds the whole recipe, the rows used and dropped, the losses and the versions.", ""]
    return "\n".join(lines)
