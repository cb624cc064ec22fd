"""The lab: layer swapping on pico models in a constructed bilingual world, offline, in minutes.

For each seed, a math expert (English) and a language expert (the constructed language `xx`, without math) are trained
on a base model by the library's own training, composed by its own composer, and scored on held-out word problems. This
demonstrates a mechanism; it does not reproduce the papers' numbers. Importing it does not import torch.
"""

from __future__ import annotations

from adapterswap.experiments.lab.run import LabPlan, plan_lab, run_lab
from adapterswap.experiments.lab.scenes import SCENES, Scene
from adapterswap.experiments.lab.seed import SeedResult, Sizes
from adapterswap.experiments.lab.study import Study

__all__ = ["SCENES", "LabPlan", "Scene", "SeedResult", "Sizes", "Study", "plan_lab", "run_lab"]
