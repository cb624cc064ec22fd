"""The lab: the whole experiment, on a pretrained model in French, and on pico models in a constructed language.

`french` has the scene on the pretrained model: a sweep and a report like any user's. The other scenes run offline: for
each seed, a math expert (English) and a language expert (the constructed language `xx`, without math) are trained on a
base model by the library's own training, composed by its own composer, and scored on held-out word problems. They
demonstrate a mechanism and do not reproduce the papers' numbers. Importing this does not import torch.
"""

from __future__ import annotations

from adapterswap.experiments.lab.run import LabPlan
from adapterswap.experiments.lab.scenes import SCENES, Scene
from adapterswap.experiments.lab.seed import SeedResult, Sizes
from adapterswap.experiments.lab.study import Study

__all__ = ["SCENES", "LabPlan", "Scene", "SeedResult", "Sizes", "Study"]
