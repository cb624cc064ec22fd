"""The recipe of an expert: what to train, on which rows, and how.

Each field has its own description; unknown keys are errors. Paths of data files are relative to the recipe file that
names them; `base_model` and `out_path` are relative to the current folder, as on the command line. Knows nothing of
torch or datasets.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from adapterswap.errors import FieldError
from adapterswap.files.smallfiles import expand, is_folder
from adapterswap.files.yamlfiles import FiniteModel, StrictModel, list_values, read_recipe
from adapterswap.planning.partitions import SIDES, Side
from adapterswap.training.options import (
    LORA_KEYS,
    AdapterOptions,
    Quantization,
    Simultaneous,
    TrainingOptions,
)
from adapterswap.training.selection import SelectionOptions
from adapterswap.training.templates import Template

__all__ = [
    "ROW_PATHS",
    "AdapterOptions",
    "DatasetSource",
    "Hygiene",
    "Quantization",
    "SelectionOptions",
    "Simultaneous",
    "TrainRecipe",
    "TrainingOptions",
    "Validation",
    "read_train_recipe",
]

ROW_PATHS = ("datasets.*.path", "validation.datasets.*.path", "hygiene.overlap.*", "selection.include_path")
"""Keys that may be local paths, relative to the recipe file that sets them."""

Scalar = str | int | float | bool


class DatasetSource(StrictModel):
    """Rows from the Hub or from files, with load_dataset's own argument names, and how a row becomes text.

    Set exactly one of these: `prompt` with `completion` (loss on the completion only), `text` (loss on all of it), or
    `messages` (loss on the assistant's turns).
    """

    path: str = Field(
        description="A Hub id, or a .json, .jsonl, .csv, .tsv or .parquet file (or a folder, with data_files)."
    )
    name: str | None = Field(default=None, description="Configuration of a Hub dataset, such as `main`.")
    split: str = Field(default="train", description="The split, also as a slice: train[:80%].")
    data_files: str | list[str] | None = Field(default=None, description="Files within the repository or folder.")
    data_dir: str | None = Field(default=None, description="Folder within the repository.")
    revision: str | None = Field(default=None, description="Commit, tag or branch of a Hub dataset.")
    prompt: str | None = Field(
        default=None, description="Template over columns, such as 'Question: {question}\\nAnswer:'."
    )
    completion: str | None = Field(default=None, description="Template over columns, such as ' {answer}'.")
    text: str | None = Field(default=None, description="Template over columns, for plain text.")
    messages: str | None = Field(
        default=None, description="A column with chat messages: {role, content} items, or [prompt, response] pairs."
    )
    filter: dict[str, Scalar | list[Scalar]] = Field(
        default={}, description="Column: the value, or values, of rows to keep."
    )
    samples: int | None = Field(default=None, ge=1, description="Most rows to use, drawn at random by data_seed.")
    side: Side | None = Field(
        default=None,
        description="The side that these rows belong to. `simultaneous` trains that side's modules on them; hygiene "
        "keeps the task's maths.",
    )
    streaming: bool = Field(
        default=False, description="Read only as much of the source as `samples` needs, drawn from a moving buffer."
    )

    def files(self, folder: Path) -> list[Path]:
        """The local files that this source may name; `path` is relative to `folder`."""
        local = folder / expand(self.path)
        listed = self.data_files if isinstance(self.data_files, list) else [self.data_files or ""]
        names = [expand(name) for name in listed]
        return [local / name for name in names] if is_folder(local) else [local, *(name for name in names if name.name)]

    @field_validator("prompt", "completion", "text")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                Template(text)
            except FieldError as error:
                raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _one_kind(self) -> DatasetSource:
        kinds = [self.prompt is not None or self.completion is not None, self.text is not None, bool(self.messages)]
        if sum(kinds) != 1 or (self.prompt is None) != (self.completion is None):
            raise ValueError(f"the dataset {self.path} needs `prompt` with `completion`, or `text`, or `messages`")
        if self.streaming and self.samples is None:
            raise ValueError(f"the dataset {self.path} is streamed, so it needs `samples`, the number of rows to read")
        return self


class Hygiene(StrictModel):
    """Rows to exclude: maths in a language's mixture, and the texts of evaluations."""

    exclude_math: bool = Field(
        default=False, description="Drop rows that look like maths, except in sources with `side: task`."
    )
    overlap: list[str] = Field(
        default=["mgsm", "gsm8k_test"],
        description="Evaluations with which no row may share 13 consecutive words: mgsm, gsm8k_test, or text files "
        "such as FLORES'.",
    )
    on_overlap: Literal["drop", "refuse"] = Field(default="drop", description="Drop such rows, or refuse to train.")


class Validation(FiniteModel):
    """Rows to hold out, as a share, a number, or from separate sources. Their loss is measured at the end.

    With `simultaneous`, each side has half of them.
    """

    fraction: float | None = Field(default=None, gt=0, lt=1, description="Share of the training rows to hold out.")
    rows: int | None = Field(default=None, ge=1, description="Number of training rows to hold out.")
    datasets: list[DatasetSource] | None = Field(default=None, min_length=1, description="Sources of validation rows.")
    every_samples: int | None = Field(
        default=None, ge=1, description="Also measure the loss each time this many rows were trained on."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Validation:
        if sum(value is not None for value in (self.fraction, self.rows, self.datasets)) != 1:
            raise ValueError("validation needs exactly one of `fraction`, `rows` and `datasets`")
        return self


class TrainRecipe(StrictModel):
    """The recipe of an expert: its base, its rows and its training."""

    base_model: str = Field(description="A local folder, or a Hub id: org/name@revision.")
    out_path: str | None = Field(default=None, description="The folder to write, unless you pass --out-path.")
    adapter: AdapterOptions = Field(default=AdapterOptions(), description="The adapter.")
    datasets: Annotated[list[DatasetSource], BeforeValidator(list_values)] = Field(
        min_length=1, description="Sources of rows, joined and shuffled: a list, or a mapping with your own names."
    )
    samples_per_side: int | None = Field(
        default=None,
        ge=1,
        description="Most rows for each side (or for all rows without a side), drawn from all its sources after "
        "hygiene; includes validation rows.",
    )
    hygiene: Hygiene | None = Field(default=None, description="Rows to keep out of training and validation.")
    chat_template: bool = Field(
        default=False,
        description="Render prompt and completion as a user's and an assistant's turn with the tokenizer's template.",
    )
    separator: str = Field(
        default="", description="Text between prompt and completion, if no chat template separates them."
    )
    validation: Validation | None = Field(default=None, description="Rows held out, to measure the loss on.")
    simultaneous: Simultaneous | None = Field(
        default=None, description="Train both sides of a partition in turns, each on its own datasets."
    )
    quantization: Quantization | None = Field(default=None, description="Keep the base in 4 or 8 bits (QLoRA).")
    training: TrainingOptions = Field(default=TrainingOptions(), description="How the expert is trained.")
    selection: SelectionOptions | None = Field(
        default=None, description="Evaluate checkpoints, and write the best one instead of the last."
    )

    _folder: Path = PrivateAttr(default=Path())

    @field_validator("adapter", mode="before")
    @classmethod
    def _no_adapter(cls, value: Any) -> Any:
        return {"method": "none"} if value == "none" else value

    @model_validator(mode="after")
    def _sides(self) -> TrainRecipe:
        sources = [("datasets", self.datasets), ("validation.datasets", (self.validation and self.validation.datasets))]
        for key, datasets in sources:
            sides = [source.side for source in datasets or []]
            if self.simultaneous and sides and (None in sides or set(sides) != set(SIDES)):
                raise ValueError(f"{key}: with `simultaneous`, set `side` for each, and use both task and language")
        return self

    @model_validator(mode="after")
    def _regime(self) -> TrainRecipe:
        adapter, options = self.adapter, self.training
        if self.simultaneous and adapter.partition:
            raise ValueError(
                "`simultaneous` trains both sides of its partition: remove adapter.partition and adapter.side"
            )
        if self.simultaneous and adapter.modules_to_save:
            raise ValueError("adapter.modules_to_save are outside the layers and belong to no side of `simultaneous`")
        if self.quantization and adapter.method == "none":
            raise ValueError("`quantization` freezes the base, but adapter: none trains it")
        if options.weight_dtype != "float32" and adapter.method != "none":
            raise ValueError("training.weight_dtype needs adapter: none; an adapter is trained in float32")
        if options.split_long and not any(source.text is not None for source in self.datasets):
            raise ValueError("training.split_long applies to `text`, but no dataset uses `text`")
        if self.selection and options.save_every_samples is None:
            raise ValueError("`selection` evaluates checkpoints, but training.save_every_samples is null")
        return self

    @property
    def folder(self) -> Path:
        """The folder that paths of data files are relative to: the recipe's, or the current one for a Python recipe."""
        return self._folder

    @property
    def inputs(self) -> list[str | Path | None]:
        """Everything that no output may overwrite: the base, data files, task files, the recipe and what it extends."""
        sources = [*self.datasets, *((self.validation and self.validation.datasets) or [])]
        include_path = self.selection.include_path if self.selection else None
        beside = [*(self.hygiene.overlap if self.hygiene else []), *([include_path] if include_path else [])]
        files = [file for source in sources for file in source.files(self.folder)]
        return [self.base_model, *files, *(self.folder / expand(name) for name in beside), *self.recipe_files]

    def resolved(self) -> dict[str, Any]:
        """All values, including defaults, as plain data that can be read back."""
        content = self.model_dump(mode="json")
        if self.adapter.method == "none":
            for key in LORA_KEYS:
                del content["adapter"][key]
        else:
            del content["training"]["weight_dtype"]
        return content


def read_train_recipe(path: str | Path, overrides: Iterable[str] = ()) -> TrainRecipe:
    """Read a recipe (YAML) and apply `key=value` overrides.

    Raises:
        NotFoundError: the file does not exist.
        FieldError: lists every mistake in the recipe.
    """
    recipe = read_recipe(path, TrainRecipe, overrides, paths=ROW_PATHS)
    recipe._folder = Path(path).parent
    return recipe
