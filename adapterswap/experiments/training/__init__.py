"""Training: from a recipe to an expert, a rank-stabilized LoRA adapter in a PEFT folder.

TRL's SFTTrainer does the training. This package reads recipes, loads and tokenises rows, reports which were dropped,
restores the process state that trainers change, and writes an output folder that records what it was made from. torch
is imported only when you call a function.
"""

from __future__ import annotations

from adapterswap.experiments.training.recipe import TrainRecipe
from adapterswap.experiments.training.report import TrainEstimate, TrainReport
from adapterswap.experiments.training.run import estimate, train

__all__ = ["TrainEstimate", "TrainRecipe", "TrainReport", "estimate", "train"]
