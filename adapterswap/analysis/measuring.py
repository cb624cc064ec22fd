"""Suggest a composition of two experts: measure how much each layer matters, by weights or on texts, then choose.

Combines `changes` or `effects` with `suggesting`, and writes the recipe. Prints nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from adapterswap.analysis.analyzing import Bars, no_bars
from adapterswap.analysis.changes import measure
from adapterswap.analysis.suggesting import PROPOSAL, Importance, Suggestion, choose_layers, importance_of_weights
from adapterswap.errors import ArgumentError, check_type
from adapterswap.experts.adapters import Adapter
from adapterswap.files.folders import atomic_file, check_file
from adapterswap.files.yamltext import dump_yaml
from adapterswap.planning.allocation import BASE
from adapterswap.planning.composing import soup
from adapterswap.planning.plan import Plan

__all__ = ["Measured", "expert_place", "read_measured", "suggest"]

Expert = Adapter | str | Path


class Measured(NamedTuple):
    """The input of a suggestion: the experts, and the texts of each side; without texts, weights are measured."""

    plan: Plan
    texts: dict[str, list[str]]


def suggest(
    task_expert: Expert,
    language_expert: Expert,
    *,
    base_model: str | Path | None = None,
    num_layers: int | None = None,
    task_texts: str | Path | None = None,
    language_texts: str | Path | None = None,
    limit: int = 200,
    form: Literal["zones", "modules"] = "zones",
    device: str = "auto",
    out_path: str | Path | None = None,
    overwrite: bool = False,
    bars: Bars = no_bars,
) -> Suggestion:
    """Propose which layers to take from which of two adapters, with reasons.

    A layer goes to the language expert if its share of that expert's effect is larger than its share of the task
    expert's effect. The effect is the size of ΔW or, with texts for both experts, the change in the base's predictions.

    Args:
        task_expert, language_expert: opened adapters, folders or Hub ids.
        base_model: the experts' base. Required for texts.
        num_layers: the number of layers; by default from the base's config.
        task_texts, language_texts: files with texts for each expert, both or neither; see `read_texts`.
        limit: how many texts to read from each file.
        form: `zones`, or `modules` for an owner of each layer's attention and MLP.
        device: where torch runs the model on the texts: auto, cpu, cuda, cuda:N or mps.
        out_path: a file for the proposal, as a recipe for `adapterswap compose`; nothing is written by default.
        overwrite: replace `out_path`, if `suggest` wrote it.
        bars: shows progress.

    Returns:
        The proposal; its `composition` holds fields of a `Composition`.

    Raises:
        ArgumentError: an expert is the base, texts are given for one expert only or without a base, `form` is unknown,
            or `limit` is below 1.
        DataError: the texts cannot be read, or an expert changes no prediction on them.
        ExpertError: an expert changes nothing; one expert would own everything.
        OutputError: the file exists (without `overwrite`) or cannot be written.
        UnsupportedError: the model has one layer.
        AdapterswapError: an expert cannot be opened, or is a full checkpoint; see also `make_plan`, `choose_device` and
            `load_weights`.
    """
    if form not in ("zones", "modules"):
        raise ArgumentError(f"`form` is {form!r}", "Pass zones or modules", parameter="form")
    inputs: list[str | None] = [expert_place(expert) for expert in (task_expert, language_expert)]
    inputs += [None if path is None else str(path) for path in (base_model, task_texts, language_texts)]
    if out_path is not None:
        check_file(out_path, kind=PROPOSAL, overwrite=overwrite, inputs=inputs)
    plan, texts = read_measured(
        task_expert, language_expert, base_model=base_model, num_layers=num_layers, task_texts=task_texts,
        language_texts=language_texts, limit=limit,
    )  # fmt: skip
    importance = _by_texts(plan, str(base_model), texts, device, bars) if texts else _by_weights(plan, bars)
    suggestion = choose_layers(importance, form=form)
    if out_path is not None:
        experts = {"task": expert_place(task_expert), "language": expert_place(language_expert)}
        content: dict[str, Any] = {"experts": experts}
        content |= {} if base_model is None else {"base_model": str(base_model)}
        text = PROPOSAL.start.decode() + "".join(f"# {reason}\n" for reason in suggestion.reasons)
        text += dump_yaml(content | dict(suggestion.composition))
        with atomic_file(out_path, kind=PROPOSAL, overwrite=overwrite, inputs=[*inputs, *plan.inputs]) as file:
            file.write_text(text, encoding="utf-8")
    return suggestion


def read_measured(
    task_expert: Expert,
    language_expert: Expert,
    *,
    base_model: str | Path | None = None,
    num_layers: int | None = None,
    task_texts: str | Path | None = None,
    language_texts: str | Path | None = None,
    limit: int = 200,
) -> Measured:
    """Open the experts and read the texts, but no tensors. Arguments and errors are those of `suggest`."""
    from adapterswap.analysis.effects import read_texts

    check_type(base_model, (str, Path, type(None)), "base_model", "Pass a local folder or a Hub id such as org/name")
    if (task_texts is None) != (language_texts is None):
        raise ArgumentError(
            "texts are given for one expert only; both are needed to compare them",
            "Pass both `task_texts` and `language_texts`",
            parameter="task_texts" if task_texts is None else "language_texts",
        )
    if task_texts is not None and base_model is None:
        raise ArgumentError("texts need a base model to read them", "Pass `base_model`", parameter="base_model")
    if limit < 1:
        raise ArgumentError(f"`limit` is {limit}; at least one text is needed", "Pass 1 or more", parameter="limit")
    if BASE in (task_expert, language_expert):
        raise ArgumentError(
            f"`{BASE}` means the unchanged base model; suggest compares two experts",
            f"Pass two adapters; for a folder of that name, write ./{BASE}",
            parameter="task_expert" if task_expert == BASE else "language_expert",
        )
    base = None if base_model is None else str(base_model)
    plan = soup(task_expert, language_expert, num_layers=num_layers, base_model=base)
    plan.check_adapter()
    plan.one_depth("`suggest`")
    files = {"task": task_texts, "language": language_texts}
    return Measured(
        plan,
        {side: read_texts(path, limit, parameter=f"{side}_texts") for side, path in files.items() if path is not None},
    )


def expert_place(expert: Expert) -> str:
    """The folder or Hub id from which an expert can be opened again."""
    if not isinstance(expert, Adapter):
        return str(expert)
    return str(expert.source if expert.source.revision else expert.source.folder)


def _by_weights(plan: Plan, bars: Bars) -> Importance:
    with bars("matrices", sum(len(adapter.modules) for adapter in plan.adapters.values())) as step:
        task, language = (measure(adapter, name=name, progress=step) for name, adapter in plan.experts.items())
    return importance_of_weights(task, language, plan.one_depth("`suggest`"))


def _by_texts(plan: Plan, base_model: str, texts: dict[str, list[str]], device: str, bars: Bars) -> Importance:
    from adapterswap.analysis.effects import BATCH, importance_of_activations
    from adapterswap.bases import choose_device, load_weights, open_base
    from adapterswap.live import load_experts

    target = choose_device(device)
    base = open_base(base_model)
    model = load_experts(load_weights(base).to(target), plan).eval()
    sides = dict(zip(("task", "language"), plan.experts, strict=True))
    batches = sum(-(-len(rows) // BATCH) for rows in texts.values())
    with bars("batches of texts", batches) as step:
        return importance_of_activations(model, base.tokenizer, plan, sides=sides, texts=texts, progress=step)
