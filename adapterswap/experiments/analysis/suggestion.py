"""Suggest a composition of two experts: measure how much each layer matters, by weights or on texts, then choose.

An importance is a share: how much of an expert's total effect comes from this layer (or its attention, or its MLP)? A
layer goes to the language expert if the language's share is larger than the task's, within the form of allocation that
you choose. The task is judged by task texts and the language by texts in the language; no task data in the target
language is needed.

On texts, one layer's attention or MLP of one expert is active at a time, and everything else is as in the base. The
effect of that part is KL(p_base ‖ p), summed over the tokens of the texts, in nats.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from adapterswap.core import BASE, Adapter, Composition, Plan, format_layers, make_plan, soup
from adapterswap.engines.live import LiveComposer, load_experts
from adapterswap.experiments.analysis.analysis import Bars, no_bars
from adapterswap.experiments.analysis.interference import Block, Changes, measure
from adapterswap.experiments.training.texts import common_readers
from adapterswap.kit.errors import ArgumentError, DataError, ExpertError, UnsupportedError, check_type
from adapterswap.kit.files.folders import FileKind
from adapterswap.kit.files.text import expand, json_lines, read_small
from adapterswap.kit.files.yaml import dump_yaml

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

PROPOSAL = FileKind(b"# Proposed by adapterswap suggest\n")
"""The recipes that `suggest` writes, by their first line."""

Form = Literal["zones", "modules"]


@dataclass(frozen=True)
class Importance:
    """Each expert's shares by layer and kind; the shares of an expert sum to 1.

    Attributes:
        measured: `weights` or `activations`.
        num_layers: the number of layers.
        task, language: block → share, for the blocks that the expert adapts.
    """

    measured: Literal["weights", "activations"]
    num_layers: int
    task: Mapping[Block, float]
    language: Mapping[Block, float]

    def of_layer(self, layer: int) -> tuple[float, float]:
        """(task, language): the shares of a whole layer."""
        task = sum(share for (where, _), share in self.task.items() if where == layer)
        language = sum(share for (where, _), share in self.language.items() if where == layer)
        return task, language


@dataclass(frozen=True)
class Suggestion:
    """A proposed composition.

    Attributes:
        form: `zones` (a bottom and a top), or `modules` for an owner of each layer's attention and MLP.
        composition: the fields of a `Composition`, without the experts.
        kept: (task, language): the share of each expert that the proposal keeps.
        reasons: why, as sentences.
        importance: the shares behind the proposal.
    """

    form: Form
    composition: Mapping[str, Any]
    kept: tuple[float, float]
    reasons: tuple[str, ...]
    importance: Importance

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data, as `adapterswap suggest --json` prints it."""
        layers = []
        for layer in range(self.importance.num_layers):
            task, language = self.importance.of_layer(layer)
            layers.append({"task": task, "language": language})

        return {
            "form": self.form,
            "measured": self.importance.measured,
            "composition": self.composition,
            "kept": {"task": self.kept[0], "language": self.kept[1]},
            "reasons": list(self.reasons),
            "layers": layers,
        }


def importance_of_weights(task: Changes, language: Changes, num_layers: int) -> Importance:
    """Shares of ‖ΔW‖² (Frobenius), which add up over matrices."""
    shares: list[dict[Block, float]] = []
    for changes in (task, language):
        squares = {block: square for block, (square, _) in changes.squares(per_kind=True).items()}
        total = sum(squares.values())
        if not total > 0:
            raise ExpertError("An expert changes nothing", "Check that these are the right expert, base and texts")
        shares.append({block: square / total for block, square in squares.items()})
    return Importance("weights", num_layers, *shares)


def choose_layers(importance: Importance, *, form: Form = "zones") -> Suggestion:
    """Choose the allocation that keeps the largest shares: the language's in its layers, the task's in the others.

    Args:
        form: `zones` for a bottom and a top of whole layers, from one layer to half of them (shares sum to 1, so
            without this limit the complement of a bad choice would look good); `modules` to choose freely for each
            layer's attention and MLP.
    """
    if form == "modules":
        return _by_modules(importance)
    layers = importance.num_layers
    if layers < 2:
        raise UnsupportedError("The model has only one layer, so no layers can be swapped", "Use `method=soup`")

    gains = []
    for layer in range(layers):
        task, language = importance.of_layer(layer)
        gains.append(language - task)

    # The zones with the largest gain; ties go to the fewest layers taken from the task, then to the larger bottom.
    best = (-math.inf, 0, 0)
    bottom = top = 0
    for low in range(layers):
        for high in range(layers - low):
            if not 0 < low + high <= layers / 2:
                continue
            rank = (sum(gains[:low]) + sum(gains[layers - high :]), -(low + high), low)
            if rank > best:
                best = rank
                bottom, top = low, high

    # What they keep, and what speaks against them
    outer = {*range(bottom), *range(layers - top, layers)}
    shares = [importance.of_layer(layer) for layer in sorted(outer)]
    task = sum(share for share, _ in shares)
    language = sum(share for _, share in shares)
    held = f"layers {format_layers(outer)} hold"
    if len(outer) == 1:
        held = f"layer {min(outer)} holds"
    reasons = [
        f"{held} {language:.0%} of the language expert's effect in the layers, "
        f"and {task:.0%} of the task expert's, measured by {importance.measured}"
    ]
    if sum(gains[layer] for layer in outer) <= 0:
        reasons.append("no outer layer matters more to the language than to the task; this takes the least harmful one")
    inside = [layer for layer in range(layers) if layer not in outer and gains[layer] > 0]
    if len(inside) == 1:
        reasons.append(
            f"layer {inside[0]} also matters more to the language but lies inside; only an owner for each module "
            "(--form modules) reaches it"
        )
    elif inside:
        reasons.append(
            f"layers {format_layers(inside)} also matter more to the language but lie inside; only an owner for each "
            "module (--form modules) reaches them"
        )

    of_language = {block for block in {*importance.task, *importance.language} if block[0] in outer}
    zones = {"bottom": bottom, "top": top}
    return Suggestion("zones", zones, _kept(importance, of_language), tuple(reasons), importance)


def _by_modules(importance: Importance) -> Suggestion:
    """Each layer's attention and MLP go to the expert with the larger share."""
    blocks = sorted({*importance.task, *importance.language})
    owned = set()
    for block in blocks:
        if importance.language.get(block, 0.0) > importance.task.get(block, 0.0):
            owned.add(block)

    remedy = "Check that the experts and their texts differ"
    if not owned:
        raise ExpertError("Everything would go to the task expert", remedy)
    if len(owned) == len(blocks):
        raise ExpertError("Everything would go to the language expert", remedy)

    # A rule for all layers of a kind that the language expert owns; the task expert owns what is left.
    rules, reasons = [], []
    for kind in dict.fromkeys(kind for _, kind in blocks):
        layers = [layer for layer, own_kind in owned if own_kind == kind]
        if layers:
            text = format_layers(layers)
            rules.append({"layers": text, "modules": kind, "expert": "language"})
            reasons.append(f"{kind} of layers {text}: a larger share for the language than for the task")
    blend = {"layers": "none", "blend": {"task": 1, "language": 1}, "optional": True}
    allocation = [*rules, blend, {"expert": "task"}]
    return Suggestion("modules", {"allocation": allocation}, _kept(importance, owned), tuple(reasons), importance)


def _kept(importance: Importance, language_owns: set[Block]) -> tuple[float, float]:
    """(task, language): the share of each expert that is in the blocks it owns."""
    task = sum(share for block, share in importance.task.items() if block not in language_owns)
    language = sum(share for block, share in importance.language.items() if block in language_owns)
    return task, language


Expert = Adapter | str | Path


class Prepared(NamedTuple):
    """What a suggestion starts from.

    Attributes:
        plan: any plan with the two experts.
        texts: those of each side; without texts, weights are measured.
        inputs: paths that the proposal must not overlap.
    """

    plan: Plan
    texts: dict[str, list[str]]
    inputs: list[str]


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
    files = {"task": task_texts, "language": language_texts}
    plan, texts, inputs = prepare(
        task_expert, language_expert, base_model, num_layers, files, limit, out_path, overwrite=overwrite
    )
    importance = _by_texts(plan, str(base_model), texts, device, bars) if texts else _by_weights(plan, bars)
    suggestion = choose_layers(importance, form=form)
    if out_path is None:
        return suggestion

    # The recipe: the reasons as comments, then what `compose` reads, with paths from the recipe's folder.
    experts = {
        "task": from_recipe(expert_place(task_expert), out_path),
        "language": from_recipe(expert_place(language_expert), out_path),
    }
    content: dict[str, Any] = {"experts": experts}
    if base_model is not None:
        content["base_model"] = from_recipe(str(base_model), out_path)
    content |= suggestion.composition
    comments = "".join(f"# {reason}\n" for reason in suggestion.reasons)
    with PROPOSAL.file(out_path, overwrite=overwrite, inputs=[*inputs, *plan.inputs]) as file:
        file.write_text(PROPOSAL.start.decode() + comments + dump_yaml(content), encoding="utf-8")
    return suggestion


def prepare(
    task_expert: Expert, language_expert: Expert, base_model: str | Path | None, num_layers: int | None,
    files: Mapping[str, str | Path | None], limit: int, out_path: str | Path | None, *, overwrite: bool,
) -> Prepared:  # fmt: skip
    """Check everything, open the experts and read the texts (`files` by side), but no tensors; see `suggest`."""
    inputs = [expert_place(task_expert), expert_place(language_expert)]
    for path in (base_model, *files.values()):
        if path is not None:
            inputs.append(str(path))
    if out_path is not None:
        PROPOSAL.check(out_path, overwrite=overwrite, inputs=inputs)
    check_type(base_model, (str, Path, type(None)), "base_model", "Pass a local folder or a Hub id such as org/name")

    # Texts for both experts and a base, or neither.
    missing = [side for side, path in files.items() if path is None]
    if len(missing) == 1:
        raise ArgumentError(
            "Texts are given for one expert only; both are needed to compare them",
            "Pass both `task_texts` and `language_texts`",
            parameter=f"{missing[0]}_texts",
        )
    if not missing and base_model is None:
        raise ArgumentError("Measuring texts needs a base model", "Pass `base_model`", parameter="base_model")
    if limit < 1:
        raise ArgumentError(f"`limit` is {limit}; at least one text is needed", "Pass 1 or more", parameter="limit")

    for parameter, expert in (("task_expert", task_expert), ("language_expert", language_expert)):
        if expert == BASE:
            raise ArgumentError(
                f"`{BASE}` means the unchanged base model; suggest compares two experts",
                f"Pass two adapters; for a folder of that name, write ./{BASE}",
                parameter=parameter,
            )
    base = None
    if base_model is not None:
        base = str(base_model)
    plan = soup(task_expert, language_expert, num_layers=num_layers, base_model=base)
    plan.check_adapter()
    plan.one_depth("`suggest`")

    texts = {}
    for side, path in files.items():
        if path is not None:
            texts[side] = read_texts(path, limit, parameter=f"{side}_texts")
    return Prepared(plan, texts, inputs)


def expert_place(expert: Expert) -> str:
    """The folder or Hub id from which an expert can be opened again."""
    if not isinstance(expert, Adapter):
        return str(expert)
    if expert.source.revision:
        return str(expert.source)
    return str(expert.source.folder)


def from_recipe(place: str, recipe: str | Path) -> str:
    """How a recipe at `recipe` names the folder that `place` is from here; Hub ids and absolute paths stay."""
    here = os.path.realpath(expand(recipe).parent)
    if here == os.path.realpath(os.curdir) or not os.path.isdir(Path(place)) or os.path.isabs(place):
        return place
    relative = os.path.relpath(os.path.abspath(place), here)
    if relative.startswith(os.pardir):
        return relative
    return os.path.join(os.curdir, relative)


def _by_weights(plan: Plan, bars: Bars) -> Importance:
    """Shares of ‖ΔW‖² of the plan's two experts."""
    changes = []
    matrices = sum(len(adapter.modules) for adapter in plan.adapters.values())
    with bars("matrices", matrices) as step:
        for name, adapter in plan.experts.items():
            changes.append(measure(adapter, name=name, progress=step, norms_only=True))
    task, language = changes
    return importance_of_weights(task, language, plan.one_depth("`suggest`"))


def _by_texts(plan: Plan, base_model: str, texts: dict[str, list[str]], device: str, bars: Bars) -> Importance:
    """Shares of each expert's effect on its own texts."""
    from adapterswap.core import OpenedBase, choose_device

    target = choose_device(device)
    base = OpenedBase.open(base_model)
    model = load_experts(base.load_weights().to(target), plan).eval()

    sides = dict(zip(("task", "language"), plan.experts, strict=True))
    batches = sum(math.ceil(len(rows) / BATCH) for rows in texts.values())
    with bars("batches of texts", batches) as step:
        return importance_of_activations(model, base.tokenizer, plan, sides=sides, texts=texts, progress=step)


MAX_TOKENS = 512  # per text; the rest is cut off
BATCH = 8  # texts per batch


def read_texts(path: str | Path, limit: int, *, parameter: str = "path") -> list[str]:
    """Read the first `limit` texts of a file: rows of a .jsonl file with the columns of common datasets, or lines."""
    path = expand(path)
    try:
        content = read_small(path, _FILES, kind=DataError).decode("utf-8-sig")
    except DataError as error:
        raise error.recast(parameter=parameter) from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8", _FILES, parameter=parameter) from None

    lines = content.split("\n")  # `splitlines` would cut JSON at U+2028
    rows: Iterable[str] = (line.strip() for line in lines)
    if path.suffix == ".jsonl":
        rows = json_lines(lines, _text_of_row)
    try:
        texts = list(islice(filter(None, rows), limit))
    except ValueError as error:
        raise DataError(f"{path}: {error}", _FILES, parameter=parameter) from None
    if not texts:
        raise DataError(f"{path} has no text", _FILES, parameter=parameter)
    return texts


_READERS = common_readers()
_FILES = (
    f"Pass a text file with one text per line, or a .jsonl file whose rows have one of these sets of columns: "
    f"{'; '.join(', '.join(columns) for columns in _READERS)}"
)


def _text_of_row(row: Mapping[str, Any]) -> str:
    """The text of a row of a .jsonl file: its prompts and completions, one below the other."""
    for columns, reader in _READERS.items():
        if not all(column in row for column in columns):
            continue
        texts = []
        for prompt, completion in reader(row):
            if prompt[-1:].isspace() or completion[:1].isspace():
                texts.append(prompt + completion)
            else:
                texts.append(f"{prompt} {completion}".strip())
        return "\n".join(texts)
    raise ValueError(f"it has the columns {', '.join(row) or 'none'}")


def importance_of_activations(
    model: PeftModel,
    tokenizer: Any,
    plan: Plan,
    *,
    sides: Mapping[str, str],
    texts: Mapping[str, Sequence[str]],
    progress: Callable[[], None] = lambda: None,
) -> Importance:
    """Measure each expert on its own texts."""
    composer = LiveComposer(model)
    shares = {}
    for side, expert in sides.items():
        blocks = set()
        for module in plan.adapters[expert].modules.values():
            if module.layer is not None:
                blocks.add((module.layer, module.kind))

        # For each block a plan with only this block of the expert, and everything else as in the base.
        alone: dict[Block, Plan] = {}
        for layer, kind in sorted(blocks):
            rules = [{"layers": layer, "modules": kind, "expert": expert}, {"expert": BASE}]
            composition = Composition.model_validate({"allocation": rules, "num_layers": plan.num_layers})
            alone[layer, kind] = make_plan(composition, plan.experts)

        effects = dict.fromkeys(alone, 0.0)
        for batch in _batches(tokenizer, texts[side], side, model.device):
            with composer.use(BASE):
                before = _predictions(model, batch)
            for block, only in alone.items():
                with composer.use(only):
                    effects[block] += _divergence(before, _predictions(model, batch), batch["attention_mask"])
            progress()

        total = sum(effects.values())
        if not total > 0:
            raise DataError(
                f"The expert {expert!r} changes no prediction on the {side} texts",
                "Use texts like those it was trained on",
                parameter=f"{side}_texts",
            )
        shares[side] = {block: value / total for block, value in effects.items()}
    return Importance("activations", plan.one_depth("`suggest`"), shares["task"], shares["language"])


def _batches(tokenizer: Any, texts: Sequence[str], side: str, device: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of texts of similar length, padded on the right, where causal attention does not see the padding."""
    import torch

    encoded = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        if len(ids) > 1:
            encoded.append(ids)
    if not encoded:
        raise DataError(f"No {side} text has at least two tokens", "Use longer texts", parameter=f"{side}_texts")
    encoded.sort(key=len)

    for start in range(0, len(encoded), BATCH):
        batch = encoded[start : start + BATCH]
        longest = len(batch[-1])
        rows: list[list[int]] = []
        masks: list[list[int]] = []
        for ids in batch:
            padding = [0] * (longest - len(ids))
            rows.append(ids + padding)
            masks.append([1] * len(ids) + padding)
        yield {
            "input_ids": torch.tensor(rows, device=device),
            "attention_mask": torch.tensor(masks, device=device),
        }


def _predictions(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the next token (rows, tokens, vocabulary)."""
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(**batch).logits
    return logits


def _divergence(before: torch.Tensor, now: torch.Tensor, mask: torch.Tensor) -> float:
    """KL(before ‖ now) summed over the batch's tokens; one row at a time, because vocabularies are large."""
    import torch

    total = 0.0
    with torch.inference_mode():
        for reference_logits, logits, kept in zip(before, now, mask, strict=True):
            base = reference_logits.float().log_softmax(-1)
            divergence = (base.exp() * (base - logits.float().log_softmax(-1))).sum(-1)
            total += float((divergence * kept).sum())
    return total
