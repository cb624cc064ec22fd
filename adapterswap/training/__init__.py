"""Training: from a recipe to an expert, a rank-stabilized LoRA adapter in a PEFT folder.

TRL's SFTTrainer trains; this package reads recipes, loads and tokenises rows, tells what was dropped, guards the
process against what trainers leave behind, and writes an output folder that says what it was made from. It knows
nothing of compositions. Importing it imports no torch: the functions do, when they are called.
"""

from __future__ import annotations

from adapterswap.training.recipe import TrainRecipe, read_train_recipe
from adapterswap.training.report import TrainEstimate, TrainReport
from adapterswap.training.run import estimate, train

__all__ = ["TrainEstimate", "TrainRecipe", "TrainReport", "estimate", "read_train_recipe", "train"]
