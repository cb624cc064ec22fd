"""The recipe of an expert: what is trained, on which rows, and how.

Every field is documented where it stands; unknown keys are errors. Paths of data files are relative to the recipe's own
folder, `base_model` and `out_path` to the current one, as on the command line. Knows nothing of torch or datasets.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from adapterswap.errors import AdapterswapError
from adapterswap.experts.layers import format_layers, parse_layers
from adapterswap.files.yamlfiles import StrictModel, read_recipe
from adapterswap.training.templates import Template

__all__ = ["AdapterOptions", "DatasetSource", "TrainRecipe", "TrainingOptions", "Validation", "read_train_recipe"]

Scalar = str | int | float | bool


class _Options(StrictModel):
    """Numbers are finite: `.inf` is valid YAML, and no rate, rank or norm."""

    model_config = ConfigDict(allow_inf_nan=False)


class AdapterOptions(_Options):
    """The adapter: rank-stabilized LoRA on attention and MLPs, as in the second paper; rank and α are our choice."""

    r: int = Field(default=64, ge=1, description="Rank of every adapted module.")
    alpha: float = Field(
        default=16, gt=0, description="LoRA's α. The scale is α/√r with rsLoRA (2 with the defaults), else α/r."
    )
    rslora: bool = Field(default=True, description="Rank-stabilized LoRA (arXiv:2312.03732): scale α/√r, not α/r.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapters' inputs while training.")
    target_modules: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Names of modules, such as q_proj. Default: all attention and MLP projections.",
    )
    layers: str | None = Field(default=None, description="Layers to adapt: 5, 0-4, 0-4,30-31 or [0, 1]. Default: all.")
    modules_to_save: list[str] = Field(
        default=[], description="Modules trained and saved in full, such as lm_head (as large as they are in the base)."
    )
    save_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Saved as trained (float32), or rounded once to half the size (bfloat16)."
    )

    @field_validator("layers", mode="before")
    @classmethod
    def _canonical(cls, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        layers = parse_layers(",".join(map(str, value)) if isinstance(value, list) else str(value))
        if not layers:
            raise ValueError("it names no layer")
        return format_layers(layers)


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
    messages: str | None = Field(default=None, description="A column with chat messages (role, content).")
    filter: dict[str, Scalar | list[Scalar]] = Field(
        default={}, description="Column: the value, or values, of rows to keep."
    )
    samples: int | None = Field(default=None, ge=1, description="At most so many rows, drawn at random by data_seed.")

    @field_validator("prompt", "completion", "text")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                Template(text)
            except AdapterswapError as error:
                raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _one_kind(self) -> DatasetSource:
        kinds = [self.prompt is not None or self.completion is not None, self.text is not None, bool(self.messages)]
        if sum(kinds) != 1 or (self.prompt is None) != (self.completion is None):
            raise ValueError(f"the dataset {self.path} needs `prompt` with `completion`, or `text`, or `messages`")
        return self


class Validation(_Options):
    """Rows held out, by share or number, or from sources of their own; their loss is measured at the end."""

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


class TrainingOptions(_Options):
    """How it is trained. A step is one update of the weights, on batch_size × gradient_accumulation rows."""

    epochs: float = Field(default=1.0, gt=0, description="Passes over the rows (ignored where max_steps is given).")
    max_steps: int | None = Field(default=None, ge=1, description="Number of steps, instead of epochs.")
    batch_size: int = Field(default=8, ge=1, description="Rows on the device at once.")
    gradient_accumulation: int = Field(default=4, ge=1, description="Batches to a step.")
    learning_rate: float = Field(default=1e-4, gt=0, description="Peak of the learning rate (AdamW).")
    schedule: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = Field(
        default="linear", description="What the learning rate does after the warmup; constant stays at the peak."
    )
    warmup: float = Field(
        default=0.03, ge=0, description="Steps until the peak: a share of all steps below 1, else a number."
    )
    decay: float = Field(
        default=0.2,
        ge=0,
        description="For warmup_stable_decay: the last steps, over which the rate falls to 0; as warmup.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's β₁.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's β₂.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    max_length: int = Field(
        default=1024, ge=2, description="Tokens to a row; the rest is cut off, counted and reported."
    )
    packing: bool = Field(
        default=False, description="Pack several rows into sequences of max_length tokens, kept apart."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, slower."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of the base's weights and the arithmetic; auto: bfloat16 on CUDA, else float32."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA if there is one.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Of the adapters' first values and of dropout.")
    data_seed: int = Field(
        default=0, ge=0, lt=2**32, description="Of samples, the validation split and the order of rows."
    )
    save_every_samples: int | None = Field(
        default=5000,
        ge=1,
        description="A checkpoint each time so many rows were trained on; null: none, and no --resume.",
    )
    keep_checkpoints: bool = Field(default=False, description="Keep the last two checkpoints when training is done.")
    logging_steps: int = Field(default=10, ge=1, description="Record the loss every so many steps.")


class TrainRecipe(StrictModel):
    """An expert, from base to rows to training."""

    base_model: str = Field(description="A local folder, or a Hub id: org/name@revision.")
    out_path: str | None = Field(default=None, description="The folder to write (else --out-path).")
    adapter: AdapterOptions = Field(default=AdapterOptions(), description="The adapter.")
    datasets: list[DatasetSource] = Field(min_length=1, description="Sources of rows, joined and shuffled.")
    chat_template: bool = Field(
        default=False,
        description="Render prompt and completion as a user's and an assistant's turn, by the tokenizer's template.",
    )
    validation: Validation | None = Field(default=None, description="Rows held out, to measure the loss on.")
    training: TrainingOptions = Field(default=TrainingOptions(), description="How it is trained.")

    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """What paths of data files are relative to: the recipe's folder; the current one, if it was made in Python."""
        return self._folder

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults filled in, as plain data."""
        return self.model_dump(mode="json")


def read_train_recipe(path: str | Path, overrides: Iterable[str] = ()) -> TrainRecipe:
    """Read a recipe (YAML) and apply `key=value` overrides.

    Raises:
        AdapterswapError: with every mistake in it.
    """
    recipe = read_recipe(path, TrainRecipe, overrides)
    recipe._folder = Path(path).parent
    return recipe
