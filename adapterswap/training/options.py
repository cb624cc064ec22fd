"""How an expert is trained: its adapter, partitions in turns, the base's bits, and the training itself.

Every field is documented where it stands. Parts of a recipe; knows nothing of rows, torch or libraries.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from adapterswap.experts.layers import format_layers, parse_layers
from adapterswap.files.yamlfiles import FiniteModel
from adapterswap.planning.compositions import Partition
from adapterswap.planning.partitions import Side

__all__ = ["LORA_KEYS", "AdapterOptions", "Quantization", "Simultaneous", "TrainingOptions"]


LORA_KEYS = ("r", "alpha", "rslora", "dropout", "target_modules", "modules_to_save")


class AdapterOptions(FiniteModel):
    """The adapter: rank-stabilized LoRA on attention and MLPs, as in the second paper; rank and α are our choice.

    `adapter: none`, short for `adapter: {method: none}`, trains the weights themselves.
    """

    method: Literal["lora", "none"] = Field(
        default="lora", description="none: no adapter, the base's own weights are trained and a whole model is written."
    )
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
    layers: str | None = Field(default=None, description="Layers to train: 5, 0-4, 0-4,30-31 or [0, 1]. Default: all.")
    partition: Partition | None = Field(
        default=None, description="Train only what this partition of the second paper gives to `side`."
    )
    side: Side | None = Field(default=None, description="The side of `partition` that is trained.")
    modules_to_save: list[str] = Field(
        default=[], description="Modules trained and saved in full, such as lm_head (as large as they are in the base)."
    )
    save_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Rounded once to it when saved. Default: float32 for an adapter, the base's own for full weights.",
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

    @model_validator(mode="after")
    def _fits_together(self) -> AdapterOptions:
        if (self.partition is None) != (self.side is None):
            raise ValueError("`partition` and `side` go together: say which side's modules are trained")
        if self.partition and self.layers is not None:
            raise ValueError("`partition` chooses the layers, so `layers` cannot be given beside it")
        extra = [key for key in LORA_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if self.method == "none" and extra:
            raise ValueError(f"{', '.join(extra)} belong to an adapter, and `method` is none")
        return self


class Simultaneous(FiniteModel):
    """Two partitions trained in one run, each on its own rows, in turns (the second paper, section 4.5).

    Each step takes its rows from one side, and changes only that side's modules; the other's, and their AdamW moments,
    stay as they are.
    """

    partition: Partition = Field(description="A, B, C or Z of the second paper.")
    steps_per_switch: int = Field(default=1, ge=1, description="Steps on one side before the other's turn.")


class Quantization(FiniteModel):
    """The base held in few bits, for adapters only (QLoRA, arXiv:2305.14314). Needs bitsandbytes."""

    bits: Literal[4, 8] = Field(default=4, description="Bits to a weight.")
    quant_type: Literal["nf4", "fp4"] = Field(
        default="nf4", description="With 4 bits: the numbers that they stand for."
    )
    double_quant: bool = Field(default=True, description="With 4 bits: quantize the quantization's constants too.")


class TrainingOptions(FiniteModel):
    """How it is trained. A step is one update of the weights, on batch_size × gradient_accumulation × processes
    rows.
    """

    epochs: float = Field(default=1.0, gt=0, description="Passes over the rows (ignored where max_steps is given).")
    max_steps: int | None = Field(default=None, ge=1, description="Number of steps, instead of epochs.")
    batch_size: int = Field(default=8, ge=1, description="Rows on a device at once.")
    gradient_accumulation: int = Field(default=4, ge=1, description="Batches to a step.")
    learning_rate: float = Field(default=1e-4, gt=0, description="Peak of the learning rate (AdamW).")
    optimizer: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"] = (
        Field(
            default="adamw_torch_fused",
            description="AdamW, by transformers' names; 8bit and paged ones need bitsandbytes.",
        )
    )
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
    split_long: bool = Field(
        default=False,
        description="For `text`: make rows longer than max_length several rows, instead of cutting the rest off.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, slower."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of the base's weights and the arithmetic; auto: bfloat16 on CUDA, else float32."
    )
    weight_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="With adapter: none: of the weights as they are updated. bfloat16 halves memory, and loses updates "
        "smaller than 1/256 of a weight.",
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="auto: flash_attention_2 on CUDA in bfloat16 where flash_attn is installed, else transformers' own "
        "choice (sdpa where the model has it).",
    )
    torch_compile: bool = Field(default=False, description="Compile the model: a slow start, then faster steps.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA if there is one.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Of the adapters' first values and of dropout.")
    data_seed: int = Field(
        default=0, ge=0, lt=2**32, description="Of samples, the validation split and the order of rows."
    )
    save_every_samples: int | None = Field(
        default=5000,
        ge=1,
        description="A checkpoint each time so many rows were trained on; null: none, and no resuming.",
    )
    keep_checkpoints: bool = Field(default=False, description="Keep the last two checkpoints when training is done.")
    logging_steps: int = Field(default=10, ge=1, description="Record the loss every so many steps.")
    report_to: list[str] = Field(
        default=[], description="Trackers to tell, by transformers' names, such as [wandb] or [tensorboard]."
    )
