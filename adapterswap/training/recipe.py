"""The recipe of an expert: what is trained, on which rows, and how.

Every field is documented where it stands; unknown keys are errors. Paths of data files are relative to the file that
says them, `base_model` and `out_path` to the current one, as on the command line. Knows nothing of torch or datasets.
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
"""Keys that may be local paths, relative to the file that says them."""

Scalar = str | int | float | bool


class DatasetSource(StrictModel):
    """Rows from the Hub or from files, by load_dataset's own argument names, and how a row becomes text.

    Exactly one of these: `prompt` with `completion` (loss on the completion only), `text` (loss on all of it), or
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
    samples: int | None = Field(default=None, ge=1, description="At most so many rows, drawn at random by data_seed.")
    side: Side | None = Field(
        default=None,
        description="Whose rows these are. `simultaneous` trains that side's partition on them; hygiene leaves the "
        "task's maths alone.",
    )
    streaming: bool = Field(
        default=False, description="Read no more of the source than `samples` asks for; drawn from a moving buffer."
    )

    def files(self, folder: Path) -> list[Path]:
        """The local files that this may name; `folder` is what `path` is relative to."""
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
            raise ValueError(f"the dataset {self.path} is streamed, and needs `samples`: how many rows to read")
        return self


class Hygiene(StrictModel):
    """What rows may not hold: maths in a language's mixture, and the texts of evaluations."""

    exclude_math: bool = Field(
        default=False, description="Drop rows that look like maths, but for sources with `side: task`."
    )
    overlap: list[str] = Field(
        default=["mgsm", "gsm8k_test"],
        description="Evaluations that no row may share 13 words in a row with: mgsm, gsm8k_test, or text files such as "
        "FLORES'.",
    )
    on_overlap: Literal["drop", "refuse"] = Field(default="drop", description="Drop such rows, or refuse to train.")


class Validation(FiniteModel):
    """Rows held out, by share or number, or from sources of their own; their loss is measured at the end.

    With `simultaneous`, half of them are of either side.
    """

    fraction: float | None = Field(default=None, gt=0, lt=1, description="Share of the training rows to hold out.")
    rows: int | None = Field(default=None, ge=1, description="Number of training rows to hold out.")
    datasets: list[DatasetSource] | None = Field(default=None, min_length=1, description="Sources of validation rows.")
    every_samples: int | None = Field(
        default=None, ge=1, description="Measure the loss on them also each time so many rows were trained on."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Validation:
        if sum(value is not None for value in (self.fraction, self.rows, self.datasets)) != 1:
            raise ValueError("validation needs exactly one of fraction, rows and datasets")
        return self


class TrainRecipe(StrictModel):
    """An expert, from base to rows to training."""

    base_model: str = Field(description="A local folder, or a Hub id: org/name@revision.")
    out_path: str | None = Field(default=None, description="The folder to write (else --out-path).")
    adapter: AdapterOptions = Field(default=AdapterOptions(), description="The adapter.")
    datasets: Annotated[list[DatasetSource], BeforeValidator(list_values)] = Field(
        min_length=1, description="Sources of rows, joined and shuffled: a list, or a mapping from names of your own."
    )
    samples_per_side: int | None = Field(
        default=None,
        ge=1,
        description="At most so many rows of each side (of all rows without one), drawn from its sources together once "
        "hygiene is done; validation rows are among them.",
    )
    hygiene: Hygiene | None = Field(default=None, description="Rows to keep out of training and validation.")
    chat_template: bool = Field(
        default=False,
        description="Render prompt and completion as a user's and an assistant's turn, by the tokenizer's template.",
    )
    separator: str = Field(default="", description="Between prompt and completion, where no chat template parts them.")
    validation: Validation | None = Field(default=None, description="Rows held out, to measure the loss on.")
    simultaneous: Simultaneous | None = Field(
        default=None, description="Train two partitions in turns, each on its side's datasets."
    )
    quantization: Quantization | None = Field(default=None, description="Hold the base in few bits (QLoRA).")
    training: TrainingOptions = Field(default=TrainingOptions(), description="How it is trained.")
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
        for key, given in sources:
            sides = [source.side for source in given or []]
            if self.simultaneous and sides and (None in sides or set(sides) != set(SIDES)):
                raise ValueError(f"{key}: `simultaneous` needs a `side` at each, and both task and language among them")
        return self

    @model_validator(mode="after")
    def _regime(self) -> TrainRecipe:
        adapter, options = self.adapter, self.training
        if self.simultaneous and adapter.partition:
            raise ValueError("`simultaneous` trains both sides of its partition: remove adapter.partition and side")
        if self.simultaneous and adapter.modules_to_save:
            raise ValueError("adapter.modules_to_save lie outside the layers, and belong to no side of `simultaneous`")
        if self.quantization and adapter.method == "none":
            raise ValueError("`quantization` freezes the base, and adapter: none trains it")
        if options.weight_dtype != "float32" and adapter.method != "none":
            raise ValueError("training.weight_dtype belongs to adapter: none; an adapter is trained in float32")
        if options.split_long and not any(source.text is not None for source in self.datasets):
            raise ValueError("training.split_long is for `text`, and no dataset has it")
        if self.selection and options.save_every_samples is None:
            raise ValueError("`selection` evaluates checkpoints, and training.save_every_samples is null")
        return self

    @property
    def folder(self) -> Path:
        """What paths of data files are relative to: the recipe's folder; the current one, if it was made in Python."""
        return self._folder

    @property
    def inputs(self) -> list[str | Path | None]:
        """What no output may touch: the base, data files, task files, the recipe and what it extends."""
        sources = [*self.datasets, *((self.validation and self.validation.datasets) or [])]
        include_path = self.selection.include_path if self.selection else None
        beside = [*(self.hygiene.overlap if self.hygiene else []), *([include_path] if include_path else [])]
        files = [file for source in sources for file in source.files(self.folder)]
        return [self.base_model, *files, *(self.folder / expand(name) for name in beside), *self.recipe_files]

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults filled in, as plain data that can be read back."""
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
        NotFoundError: there is no such file.
        FieldError: with every mistake in it.
    """
    recipe = read_recipe(path, TrainRecipe, overrides, paths=ROW_PATHS)
    recipe._folder = Path(path).parent
    return recipe
