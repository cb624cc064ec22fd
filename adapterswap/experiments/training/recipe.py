"""The recipe of an expert: what to train, on which rows, with which templates, and how.

Each field has its own description; unknown keys are errors. Paths of data files are relative to the recipe file that
names them; `base_model`, `start` and `out_path` are relative to the current folder, as on the command line. Neither
torch nor datasets is imported.

A template has the syntax of str.format with column names only (`{{` and `}}` stand for braces). Attributes, indices,
conversions and format specs are refused, so a template can read nothing but the row.
"""

from __future__ import annotations

import math
import os
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from adapterswap.core import Composition, Partition, format_layers, parse_layers
from adapterswap.experiments.chat import as_date
from adapterswap.experiments.permitted import foreign_source
from adapterswap.experiments.training.selection import SelectionOptions
from adapterswap.kit.errors import DataError, FieldError
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import Source, field
from adapterswap.kit.files.text import expand
from adapterswap.kit.files.yaml import read_recipe


class Template:
    """A template, parsed once and filled many times.

    Attributes:
        text: the template.
        fields: the columns that it names, in order, without repetitions.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces: list[tuple[str, str | None]] = []
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise FieldError(
                f"The template {text!r} has unbalanced braces ({error})", "Write {column}, and {{ or }} for a brace"
            ) from None
        for literal, column, spec, conversion in parsed:
            if column is not None and (not column or spec or conversion or set(column) & set(".[]{}")):
                raise FieldError(
                    f"The template {text!r} has a field that is not just a column's name: {column!r}",
                    "Write {column}, and {{ or }} for a brace",
                )
            self._pieces.append((literal, column))
        self.fields = tuple(dict.fromkeys(column for _, column in self._pieces if column is not None))

    def fill(self, row: Mapping[str, Any]) -> str | None:
        """The text for `row`; None if one of the columns is null, or NaN, which stands for a missing number."""
        parts: list[str] = []
        for literal, column in self._pieces:
            parts.append(literal)
            if column is None:
                continue
            value = row[column]
            if value is None or (isinstance(value, float) and math.isnan(value)):
                return None
            if not isinstance(value, str | int | float):
                raise DataError(
                    f"The column {column!r} holds a {type(value).__name__}, not text or a number",
                    "Name a column of plain values, or use `messages:` for a column of chat messages",
                    parameter="datasets",
                )
            parts.append(str(value))
        return "".join(parts)


Side = Literal["task", "language"]
SIDES: tuple[Side, Side] = ("task", "language")
"""The two sides of a partition; each takes or trains the modules that the partition gives to it."""

LORA_KEYS = ("r", "alpha", "rslora", "dropout", "target_modules", "modules_to_save")


def _canonical(value: Any) -> Any:
    """Layers as `format_layers` writes them."""
    if value is None or isinstance(value, bool):
        return value

    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    layers = parse_layers(text)
    if not layers:
        raise ValueError("it names no layer")
    return format_layers(layers)


class AdapterOptions(Declared, finite=True):
    """The adapter: rank-stabilized LoRA on attention and MLPs, as in the second paper, with our choice of rank and α.

    `adapter: none`, short for `adapter: {method: none}`, trains the weights themselves.
    """

    method: Literal["lora", "none"] = field(
        default="lora", description="none: no adapter; the base's own weights are trained and a whole model is written."
    )
    r: int = field(
        default=64,
        ge=1,
        description="Rank of every adapted module. With `start`, modules that it adapts keep its ranks and scales.",
    )
    alpha: float = field(
        default=16, gt=0, description="LoRA's α. The scale is α/√r with rsLoRA (2 with the defaults), else α/r."
    )
    rslora: bool = field(default=True, description="Rank-stabilized LoRA (arXiv:2312.03732): scale α/√r, not α/r.")
    dropout: float = field(default=0.0, ge=0, lt=1, description="Dropout on the adapters' inputs while training.")
    target_modules: list[str] | None = field(
        default=None,
        min_length=1,
        description="Names of modules, such as q_proj. Default: all attention and MLP projections; with `start`, the "
        "modules that it adapts.",
    )
    layers: str | None = field(
        default=None,
        before=_canonical,
        description="Layers to train: 5, 0-4, 0-4,30-31 or [0, 1]. Default: all.",
    )
    partition: Partition | None = field(
        default=None, description="Train only the modules that this partition of the second paper gives to `side`."
    )
    side: Side | None = field(default=None, description="The side of `partition` that is trained.")
    modules_to_save: list[str] = field(
        default=[], description="Modules trained and saved in full, such as lm_head (as large as they are in the base)."
    )
    save_dtype: Literal["float32", "bfloat16"] | None = field(
        default=None,
        description="The dtype to save in. Default: float32 for an adapter, the base's own for full weights.",
    )

    def check(self) -> None:
        if (self.partition is None) != (self.side is None):
            raise ValueError("`partition` and `side` must be set together: `side` is the side to train")
        if self.partition and self.layers is not None:
            raise ValueError("`layers` cannot be combined with `partition`, which chooses the layers")
        extra = [key for key in LORA_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if self.method == "none" and extra:
            raise ValueError(f"{', '.join(extra)} can only be set for an adapter, but `method` is none")


class Simultaneous(Declared, finite=True):
    """Train both sides of a partition in one run, in turns, each on its own rows (the second paper, section 4.5).

    Each step takes its rows from one side and changes only that side's modules. The other side's modules, and their
    AdamW moments, stay unchanged.
    """

    partition: Partition = field(description="A, B, C or Z of the second paper.")
    steps_per_switch: int = field(default=1, ge=1, description="Steps on one side before the other's turn.")


class Quantization(Declared, finite=True):
    """Keep the base in 4 or 8 bits, for adapters only (QLoRA, arXiv:2305.14314). Needs bitsandbytes."""

    bits: Literal[4, 8] = field(default=4, description="Bits per weight.")
    quant_type: Literal["nf4", "fp4"] = field(default="nf4", description="With 4 bits: the data type.")
    double_quant: bool = field(default=True, description="With 4 bits: quantize the quantization constants too.")


class TrainingOptions(Declared, finite=True):
    """How the expert is trained. A step is one update of the weights, on batch_size × gradient_accumulation × processes
    rows.
    """

    epochs: float = field(default=1.0, gt=0, description="Passes over the rows (ignored if max_steps is set).")
    max_steps: int | None = field(default=None, ge=1, description="Number of steps, instead of epochs.")
    batch_size: int = field(default=8, ge=1, description="Rows per device at a time.")
    gradient_accumulation: int = field(default=4, ge=1, description="Batches per step.")
    learning_rate: float = field(default=1e-4, gt=0, description="Peak of the learning rate (AdamW).")
    optimizer: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"] = (
        field(
            default="adamw_torch_fused",
            description="A variant of AdamW, by its name in transformers; 8bit and paged ones need bitsandbytes.",
        )
    )
    schedule: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = field(
        default="linear", description="The learning rate after the warmup; constant stays at the peak."
    )
    warmup: float = field(
        default=0.03, ge=0, description="Steps until the peak: below 1 a share of all steps, else a number of steps."
    )
    decay: float = field(
        default=0.2,
        ge=0,
        description="For warmup_stable_decay: the last steps, in which the rate falls to 0; in the form of warmup.",
    )
    weight_decay: float = field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    adam_beta1: float = field(default=0.9, ge=0, lt=1, description="AdamW's β₁.")
    adam_beta2: float = field(default=0.999, ge=0, lt=1, description="AdamW's β₂.")
    max_grad_norm: float = field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    max_length: int = field(
        default=1024, ge=2, description="Most tokens per row; the rest is cut off, counted and reported."
    )
    packing: bool = field(
        default=False,
        description="Pack several rows into sequences of max_length tokens; rows do not see each other. An error where "
        "they would, as in OPT or Mamba.",
    )
    group_by_length: bool = field(
        default=False, description="Take rows of similar length together, so that batches need less padding."
    )
    padding_free: bool = field(
        default=False,
        description="Join the rows of a batch instead of padding them. Faster with FlashAttention only.",
    )
    split_long: bool = field(
        default=False,
        description="For `text`: split rows longer than max_length into several, instead of cutting the rest off.",
    )
    gradient_checkpointing: bool = field(
        default=False, description="Recompute activations in the backward pass: less memory, slower."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", description="For the base's weights and the computation; auto: bfloat16 on CUDA, else float32."
    )
    weight_dtype: Literal["float32", "bfloat16"] = field(
        default="float32",
        description="With adapter: none: the dtype in which weights are updated. bfloat16 halves memory, but loses "
        "updates smaller than 1/256 of a weight.",
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = field(
        default="auto",
        description="In bfloat16, auto is flash_attention_2 on CUDA if flash_attn is installed and the model has it, "
        "and eager on a CPU if max_length is at most 256; else transformers chooses (sdpa if the model has it).",
    )
    torch_compile: bool = field(default=False, description="Compile the model: a slow start, then faster steps.")
    kernels: bool = field(
        default=False, description="Use the faster kernels that transformers finds on the Hub for the model's layers."
    )
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", description="auto: CUDA if available, else the CPU.")
    seed: int = field(default=0, ge=0, lt=2**32, description="Seed of the adapters' first values and of dropout.")
    data_seed: int = field(
        default=0, ge=0, lt=2**32, description="Seed of samples, the validation split and the order of rows."
    )
    save_every_samples: int | None = field(
        default=5000,
        ge=1,
        description="Save a checkpoint each time this many rows were trained on; null: none, and no resuming.",
    )
    keep_checkpoints: bool = field(default=False, description="Keep the last two checkpoints when training ends.")
    logging_steps: int = field(default=10, ge=1, description="Record the loss once per this many steps.")
    report_to: list[str] = field(
        default=[], description="Trackers to report to, by their names in transformers: [wandb] or [tensorboard]."
    )


Scalar = str | int | float | bool


class ChainStart(Declared):
    """A new adapter on top of another, which stays as it is. It composes only together with that: see `chains`."""

    adapter: str = field(description="A folder or Hub id of an adapter.")
    mode: Literal["chain"] = field(description="chain: what is trained is added to it.")


Start = str | Composition | ChainStart


def _readable(text: str | None) -> str | None:
    """A template that can be filled."""
    if text is not None:
        try:
            Template(text)
        except FieldError as error:
            raise ValueError(str(error)) from None
    return text


class DatasetSource(Declared):
    """Rows from the Hub or from files, with load_dataset's own argument names, and how a row becomes text.

    Set exactly one of these: `prompt` with `completion` (loss on the completion only), `text` (loss on all of it), or
    `messages` (loss on the assistant's turns).
    """

    path: str = field(
        description="A Hub id, or a .json, .jsonl, .csv, .tsv or .parquet file (or a folder, with data_files)."
    )
    name: str | None = field(default=None, description="Configuration of a Hub dataset, such as `main`.")
    split: str = field(default="train", description="The split, also as a slice: train[:80%].")
    data_files: str | list[str] | None = field(default=None, description="Files within the repository or folder.")
    data_dir: str | None = field(default=None, description="Folder within the repository.")
    revision: str | None = field(default=None, description="Commit, tag or branch of a Hub dataset.")
    prompt: str | None = field(
        default=None, after=_readable, description="Template over columns, such as 'Question: {question}\\nAnswer:'."
    )
    completion: str | None = field(
        default=None, after=_readable, description="Template over columns, such as ' {answer}'."
    )
    text: str | None = field(default=None, after=_readable, description="Template over columns, for plain text.")
    messages: str | None = field(
        default=None, description="A column with chat messages: {role, content} items, or [prompt, response] pairs."
    )
    filter: dict[str, Scalar | list[Scalar]] = field(
        default={}, description="Column: the value, or values, of rows to keep."
    )
    samples: int | None = field(default=None, ge=1, description="Most rows to use, drawn at random by data_seed.")
    side: Side | None = field(
        default=None,
        description="The side that these rows belong to. `simultaneous` trains that side's modules on them; hygiene "
        "keeps the task's math.",
    )
    streaming: bool = field(
        default=False, description="Read only as much of the source as `samples` needs, drawn from a moving buffer."
    )

    def files(self, folder: Path) -> list[Path]:
        """The local files that this source may name; `path` is relative to `folder`."""
        local = folder / expand(self.path)
        listed = self.data_files
        if not isinstance(listed, list):
            listed = [listed or ""]
        names = [expand(name) for name in listed]
        if os.path.isdir(local):
            return [local / name for name in names]
        return [local, *(name for name in names if name.name)]

    def check(self) -> None:
        kinds = [self.prompt is not None or self.completion is not None, self.text is not None, bool(self.messages)]
        if sum(kinds) != 1 or (self.prompt is None) != (self.completion is None):
            raise ValueError(f"the dataset {self.path} needs `prompt` with `completion`, or `text`, or `messages`")
        if self.streaming and self.samples is None:
            raise ValueError(f"the dataset {self.path} is streamed, so it needs `samples`, the number of rows to read")

    def check_origin(self, source: Source) -> None:
        """Refuse what is neither a file nor a dataset on the Hub: `datasets` also runs queries and opens addresses."""
        if source.overridden is None:
            return  # made in Python

        nearby = os.path.exists(source.folder / self.path)
        is_local = self.path.startswith((".", "/", "~")) or Path(self.path).suffix or nearby
        reason = foreign_source(self.path, self.data_files, self.data_dir, known=bool(is_local))
        if reason is not None:
            raise ValueError(f"the dataset {reason}")


class Hygiene(Declared):
    """Rows to exclude: math in a language's mixture, and the texts of evaluations."""

    exclude_math: bool = field(
        default=False, description="Drop rows that look like math, except in sources with `side: task`."
    )
    overlap: list[str] = field(
        default=["mgsm", "gsm8k_test"],
        description="Evaluations with which no row may share 13 consecutive words: mgsm, gsm8k_test, or text files "
        "such as FLORES'.",
    )
    on_overlap: Literal["drop", "refuse"] = field(default="drop", description="Drop such rows, or refuse to train.")


class Validation(Declared, finite=True):
    """Rows to hold out, as a share, a number, or from separate sources. Their loss is measured at the end.

    With `simultaneous`, each side has half of them.
    """

    fraction: float | None = field(default=None, gt=0, lt=1, description="Share of the training rows to hold out.")
    rows: int | None = field(default=None, ge=1, description="Number of training rows to hold out.")
    datasets: list[DatasetSource] | None = field(default=None, min_length=1, description="Sources of validation rows.")
    every_samples: int | None = field(
        default=None, ge=1, description="Also measure the loss each time this many rows were trained on."
    )

    early_stopping: int | None = field(
        default=None,
        ge=1,
        description="Stop when the loss has not improved this many times in a row, and write the best weights.",
    )

    def check(self) -> None:
        if sum(value is not None for value in (self.fraction, self.rows, self.datasets)) != 1:
            raise ValueError("validation needs exactly one of `fraction`, `rows` and `datasets`")
        if self.early_stopping and self.every_samples is None:
            raise ValueError("validation.early_stopping needs `every_samples`, how often the loss is measured")


def _list_values(value: Any) -> Any:
    """A mapping's values that are not null, as a list; for list fields that a recipe may write as a mapping.

    The keys let fragments add an item, change one or remove one (with null); a plain list is replaced as a whole.
    """
    if not isinstance(value, dict):
        return value
    return [item for item in value.values() if item is not None]


def _as_options(value: Any) -> Any:
    if value == "none":
        return {"method": "none"}
    return value


class TrainRecipe(Declared):
    """The recipe of an expert: its base, its rows and its training."""

    PATHS: ClassVar[tuple[str, ...]] = (
        "datasets.*.path",
        "validation.datasets.*.path",
        "hygiene.overlap.*",
        "selection.include_path",
    )
    """Keys that may be local paths, relative to the recipe file that sets them."""

    base_model: str = field(description="A local folder, or a Hub id: org/name@revision.")
    out_path: str | None = field(default=None, description="The folder to write, unless you pass --out-path.")
    start: Start | None = field(
        default=None,
        description="Where the adapter starts, instead of at zero: a folder or Hub id of an adapter, the recipe of a "
        "composition (a .yaml file), or a composition: {experts: …, task: …, language: …}. With {adapter: …, mode: "
        "chain}, a new adapter is trained on top of it.",
    )
    adapter: AdapterOptions = field(default=AdapterOptions(), before=_as_options, description="The adapter.")
    datasets: list[DatasetSource] = field(
        before=_list_values,
        min_length=1,
        description="Sources of rows, joined and shuffled: a list, or a mapping with your own names.",
    )
    samples_per_side: int | None = field(
        default=None,
        ge=1,
        description="Most rows for each side (or for all rows without a side), drawn from all its sources after "
        "hygiene; includes validation rows.",
    )
    hygiene: Hygiene | None = field(default=None, description="Rows to keep out of training and validation.")
    chat_template: bool = field(
        default=False,
        description="Render prompt and completion as a user's and an assistant's turn with the tokenizer's template.",
    )
    date: str | None = field(
        default=None,
        before=as_date,
        description="What a chat template takes for today, such as '2026-11-27'. Default: the real date.",
    )
    separator: str = field(
        default="", description="Text between prompt and completion, if no chat template separates them."
    )
    validation: Validation | None = field(default=None, description="Rows held out, to measure the loss on.")
    simultaneous: Simultaneous | None = field(
        default=None, description="Train both sides of a partition in turns, each on its own datasets."
    )
    quantization: Quantization | None = field(default=None, description="Keep the base in 4 or 8 bits (QLoRA).")
    training: TrainingOptions = field(default=TrainingOptions(), description="How the expert is trained.")
    selection: SelectionOptions | None = field(
        default=None, description="Evaluate checkpoints and write the best one, or keep a ladder of them."
    )

    _folder: Path = Path()

    def check(self) -> None:
        self._check_sides()
        self._check_regime()

    def _check_sides(self) -> None:
        """Refuse datasets without a side where both sides are trained."""
        if not self.simultaneous:
            return
        for key, datasets in (("datasets", self.datasets), ("validation.datasets", self._validation_datasets)):
            sides = {source.side for source in datasets}
            if datasets and sides != set(SIDES):
                raise ValueError(f"{key}: with `simultaneous`, set `side` for each, and use both task and language")

    def _check_regime(self) -> None:
        """Refuse options that exclude each other."""
        adapter, options = self.adapter, self.training

        # What is trained
        if self.simultaneous and adapter.partition:
            raise ValueError(
                "`simultaneous` trains both sides of its partition: remove adapter.partition and adapter.side"
            )
        if self.simultaneous and adapter.modules_to_save:
            raise ValueError("adapter.modules_to_save are outside the layers and belong to no side of `simultaneous`")
        if self.start is not None and adapter.method == "none":
            raise ValueError("`start` is an adapter, but adapter: none has none: name the start as `base_model`")
        if isinstance(self.start, ChainStart) and adapter.modules_to_save:
            raise ValueError("adapter.modules_to_save cannot be on top of an adapter, as in mode: chain")
        if self.quantization and adapter.method == "none":
            raise ValueError("`quantization` freezes the base, but adapter: none trains it")
        if options.weight_dtype != "float32" and adapter.method != "none":
            raise ValueError("training.weight_dtype needs adapter: none; an adapter is trained in float32")

        # How rows are batched
        if options.split_long and not any(source.text is not None for source in self.datasets):
            raise ValueError("training.split_long applies to `text`, but no dataset uses `text`")
        if options.packing and (options.group_by_length or options.padding_free):
            raise ValueError("training.packing leaves no padding: remove group_by_length and padding_free")
        if self.simultaneous and options.group_by_length:
            raise ValueError("training.group_by_length cannot be combined with `simultaneous`, which orders the rows")

        # What becomes of checkpoints
        if self.stops_early and options.save_every_samples is not None:
            raise ValueError("validation.early_stopping is for short runs: set training.save_every_samples to null")
        if self.selection and options.save_every_samples is None:
            raise ValueError("`selection` evaluates or keeps checkpoints, but training.save_every_samples is null")
        if self.selection and self.selection.ladder and adapter.method == "none":
            raise ValueError("selection.ladder keeps adapters, but adapter: none trains whole models")

    @property
    def stops_early(self) -> int | None:
        """After how many measurements of the validation loss that are no better the run ends; None for never."""
        if self.validation is None:
            return None
        return self.validation.early_stopping

    @property
    def judged_by(self) -> SelectionOptions | None:
        """How checkpoints are evaluated; None if they are not."""
        if self.selection is None or not self.selection.tasks:
            return None
        return self.selection

    @property
    def folder(self) -> Path:
        """The folder that paths of data files are relative to: the recipe's, or the current one for a Python recipe."""
        return self._folder

    @property
    def _validation_datasets(self) -> list[DatasetSource]:
        if self.validation is None:
            return []
        return self.validation.datasets or []

    @property
    def inputs(self) -> list[str | Path | None]:
        """Everything that no output may overwrite: the base, data files, task files, the recipe and what it extends."""
        inputs: list[str | Path | None] = [self.base_model]
        if isinstance(self.start, ChainStart):
            inputs.append(self.start.adapter)
        elif isinstance(self.start, Composition):
            inputs += self.start.experts.values()
        else:
            inputs.append(self.start)

        for source in (*self.datasets, *self._validation_datasets):
            inputs += source.files(self.folder)
        others = []
        if self.hygiene:
            others += self.hygiene.overlap
        if self.selection and self.selection.include_path:
            others.append(self.selection.include_path)
        inputs += [self.folder / expand(name) for name in others]
        return [*inputs, *self.recipe_files]

    def resolved(self) -> dict[str, Any]:
        """All values, including defaults, as plain data that can be read back."""
        content = self.model_dump(mode="json")
        if isinstance(self.start, Composition):
            content["start"] = self.start.model_dump(mode="json", exclude_unset=True)
        if self.adapter.method == "none":
            for key in LORA_KEYS:
                del content["adapter"][key]
        else:
            del content["training"]["weight_dtype"]
        return content

    @staticmethod
    def read(path: str | Path, overrides: Iterable[str] = ()) -> TrainRecipe:
        """Read a recipe (YAML) and apply `key=value` overrides.

        Raises:
            NotFoundError: the file does not exist.
            FieldError: lists every mistake in the recipe.
        """
        recipe = read_recipe(path, TrainRecipe, overrides, paths=TrainRecipe.PATHS, kind="train")
        recipe._folder = Path(path).parent
        return recipe
