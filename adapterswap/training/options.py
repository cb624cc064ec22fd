"""Parts of a recipe that say how an expert is trained: adapter, partitions, quantization and training options.

Each field has its own description. Knows nothing of rows, torch or libraries.
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
    """The adapter: rank-stabilized LoRA on attention and MLPs, as in the second paper, with our choice of rank and α.

    `adapter: none`, short for `adapter: {method: none}`, trains the weights themselves.
    """

    method: Literal["lora", "none"] = Field(
        default="lora", description="none: no adapter; the base's own weights are trained and a whole model is written."
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
        default=None, description="Train only the modules that this partition of the second paper gives to `side`."
    )
    side: Side | None = Field(default=None, description="The side of `partition` that is trained.")
    modules_to_save: list[str] = Field(
        default=[], description="Modules trained and saved in full, such as lm_head (as large as they are in the base)."
    )
    save_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="The dtype to save in. Default: float32 for an adapter, the base's own for full weights.",
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
            raise ValueError("`partition` and `side` must be set together: `side` is the side to train")
        if self.partition and self.layers is not None:
            raise ValueError("`layers` cannot be combined with `partition`, which chooses the layers")
        extra = [key for key in LORA_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if self.method == "none" and extra:
            raise ValueError(f"{', '.join(extra)} can only be set for an adapter, but `method` is none")
        return self


class Simultaneous(FiniteModel):
    """Train both sides of a partition in one run, in turns, each on its own rows (the second paper, section 4.5).

    Each step takes its rows from one side and changes only that side's modules. The other side's modules, and their
    AdamW moments, stay unchanged.
    """

    partition: Partition = Field(description="A, B, C or Z of the second paper.")
    steps_per_switch: int = Field(default=1, ge=1, description="Steps on one side before the other's turn.")


class Quantization(FiniteModel):
    """Keep the base in 4 or 8 bits, for adapters only (QLoRA, arXiv:2305.14314). Needs bitsandbytes."""

    bits: Literal[4, 8] = Field(default=4, description="Bits per weight.")
    quant_type: Literal["nf4", "fp4"] = Field(default="nf4", description="With 4 bits: the data type.")
    double_quant: bool = Field(default=True, description="With 4 bits: quantize the quantization constants too.")


class TrainingOptions(FiniteModel):
    """How the expert is trained. A step is one update of the weights, on batch_size × gradient_accumulation × processes
    rows.
    """

    epochs: float = Field(default=1.0, gt=0, description="Passes over the rows (ignored if max_steps is set).")
    max_steps: int | None = Field(default=None, ge=1, description="Number of steps, instead of epochs.")
    batch_size: int = Field(default=8, ge=1, description="Rows per device at a time.")
    gradient_accumulation: int = Field(default=4, ge=1, description="Batches per step.")
    learning_rate: float = Field(default=1e-4, gt=0, description="Peak of the learning rate (AdamW).")
    optimizer: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"] = (
        Field(
            default="adamw_torch_fused",
            description="A variant of AdamW, by its name in transformers; 8bit and paged ones need bitsandbytes.",
        )
    )
    schedule: Literal["linear", "cosine", "constant", "warmup_stable_decay"] = Field(
        default="linear", description="The learning rate after the warmup; constant stays at the peak."
    )
    warmup: float = Field(
        default=0.03, ge=0, description="Steps until the peak: below 1 a share of all steps, else a number of steps."
    )
    decay: float = Field(
        default=0.2,
        ge=0,
        description="For warmup_stable_decay: the last steps, in which the rate falls to 0; in the form of warmup.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's β₁.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's β₂.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    max_length: int = Field(
        default=1024, ge=2, description="Most tokens per row; the rest is cut off, counted and reported."
    )
    packing: bool = Field(
        default=False, description="Pack several rows into sequences of max_length tokens; rows do not see each other."
    )
    split_long: bool = Field(
        default=False,
        description="For `text`: split rows longer than max_length into several, instead of cutting the rest off.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, slower."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="For the base's weights and the computation; auto: bfloat16 on CUDA, else float32."
    )
    weight_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="With adapter: none: the dtype in which weights are updated. bfloat16 halves memory, but loses "
        "updates smaller than 1/256 of a weight.",
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="auto: flash_attention_2 on CUDA in bfloat16 if flash_attn is installed, else transformers' own "
        "choice (sdpa if the model supports it).",
    )
    torch_compile: bool = Field(default=False, description="Compile the model: a slow start, then faster steps.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA if available, else the CPU.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the adapters' first values and of dropout.")
    data_seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of samples, the validation split and the order of rows."
    )
    save_every_samples: int | None = Field(
        default=5000,
        ge=1,
        description="Save a checkpoint each time this many rows were trained on; null: none, and no resuming.",
    )
    keep_checkpoints: bool = Field(default=False, description="Keep the last two checkpoints when training ends.")
    logging_steps: int = Field(default=10, ge=1, description="Record the loss once per this many steps.")
    report_to: list[str] = Field(
        default=[], description="Trackers to report to, by their names in transformers: [wandb] or [tensorboard]."
    )
