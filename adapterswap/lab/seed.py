"""One seed of the lab, from base to scores: a base, two experts, their compositions, a development set, a test set.

Experts are trained by `adapterswap.training` and composed by the library's plans and `LiveComposer`. The swap's b and u
and the tuned sum's scale λ are chosen on the development set; nothing is chosen on the test set. Knows nothing of other
seeds, tables or pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adapterswap.experts.adapters import open_adapter
from adapterswap.lab.bases import shipped_file, write_base
from adapterswap.lab.lexicon import LANGUAGES
from adapterswap.lab.pretraining import NUM_LAYERS
from adapterswap.lab.scenes import Scene, draw_problems, language_rows, math_rows
from adapterswap.lab.scoring import Questions, exact_match
from adapterswap.lab.tasks import LabRow
from adapterswap.live import LiveComposer, load_experts
from adapterswap.planning.allocation import BASE
from adapterswap.planning.composing import layer_swap, soup, task_arithmetic
from adapterswap.planning.plan import Plan
from adapterswap.writing import write_adapter

__all__ = ["LEARNING_RATES", "METHODS", "SCALES", "ZONES", "SeedResult", "Sizes", "run_seed", "train_expert"]

# In the order of the table, with descriptions.
METHODS = {
    "base": "the pretrained model",
    "math expert": "rsLoRA on English word problems",
    "language expert": "rsLoRA on generic xx tasks",
    "soup": "½ math + ½ language, in every layer",
    "sum": "math + language, in every layer",
    "tuned sum": "λ (math + language), with λ chosen on the development set",
    "layer swap": "bottom b and top u layers from language, the middle from math",
    "inverse swap": "the same b and u, with the experts exchanged",
    "reset": "the same b and u, with the outer layers reset to the base",
}

# (b, u). (0, 0) is the math expert alone: scored for comparison, but never chosen.
ZONES = tuple((bottom, top) for bottom in range(5) for top in range(3) if bottom + top < NUM_LAYERS)
SCALES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)

# Found on the development set: a minute of training, enough to learn the words without harming other skills.
_ADAPTER = {"r": 8, "alpha": 16, "rslora": True}
_TRAINING = {
    "batch_size": 32, "gradient_accumulation": 1, "schedule": "cosine", "warmup": 0.05,
    "adam_beta2": 0.99, "max_length": 128, "device": "cpu", "save_every_samples": None, "logging_steps": 50,
}  # fmt: skip

LEARNING_RATES = {"math": 1.5e-3, "language": 8e-4}

Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Sizes:
    """Numbers of problems."""

    development: int = 500
    test: int = 1500


DEFAULT_SIZES = Sizes()


@dataclass(frozen=True)
class SeedResult:
    """The results of one seed.

    Attributes:
        grid: accuracy on the xx development set by (b, u).
        scales: accuracy on the xx development set by λ.
        bottom, top, scale: the best of each there; among equals the fewest layers and the largest λ.
        right: method → language → whether each test problem was answered correctly (problems,).
        unfamiliar: per test problem, how many of its verbs and number words the base hardly knows in xx (problems,).
        losses: expert → its last training loss.
    """

    seed: int
    grid: dict[tuple[int, int], float]
    scales: dict[float, float]
    bottom: int
    top: int
    scale: float
    right: dict[str, dict[str, NDArray[np.bool_]]]
    unfamiliar: NDArray[np.int64]
    losses: dict[str, float]


def run_seed(
    scene: Scene,
    seed: int,
    folder: Path,
    *,
    rebuild_base: bool = False,
    sizes: Sizes = DEFAULT_SIZES,
    tell: Tell = lambda step, share: None,
) -> SeedResult:
    """Train and evaluate one seed; the base, the experts, the composed adapter and the training rows stay in `folder`.

    Args:
        folder: a missing or empty folder, for base/, math/, language/, math+language/, math.jsonl and language.jsonl.
        rebuild_base: pretrain the base even if it is shipped.
        sizes: numbers of problems.
        tell: called with the current step, and with the finished share of the seed.

    Raises:
        DependencyError: the `train` extra is not installed.
        AdapterswapError: training failed; see `adapterswap.training.train`.
    """
    from adapterswap.training.isolation import isolated

    pretrains = rebuild_base or not shipped_file(scene, seed).exists()
    # The share of a seed's time at which each part begins.
    math, language, compositions = (0.7, 0.72, 0.83) if pretrains else (0.0, 0.15, 0.65)
    folder.mkdir(parents=True, exist_ok=True)
    tell("base", 0.0)
    with isolated():
        write_base(
            scene, seed, folder / "base", rebuild=pretrains,
            progress=lambda step, steps: tell("pretraining the base", math * step / steps),
        )  # fmt: skip
    tell("math expert", math)
    losses = {"math": _train(folder, "math", math_rows(scene, seed), seed)}
    tell("language expert", language)
    losses["language"] = _train(folder, "language", language_rows(scene, seed), seed)
    tell("development set", compositions)
    with isolated():
        judge = _LoadedPair(folder)
        development = Questions(draw_problems(scene, "development", sizes.development), "xx")
        grid = {zone: judge.accuracy(judge.swap(*zone), development) for zone in ZONES}
        scales = {scale: judge.accuracy(judge.sum(scale), development) for scale in SCALES}
        bottom, top = max(ZONES[1:], key=lambda zone: (grid[zone], -sum(zone)))
        scale = max(scales, key=lambda scale: (scales[scale], scale))
        tell("test set", (1 + compositions) / 2)
        plans = judge.plans(bottom, top, scale)
        problems = draw_problems(scene, "test", sizes.test)
        tests = {language: Questions(problems, language) for language in LANGUAGES}
        right = {
            name: {language: judge.right(plan, questions) for language, questions in tests.items()}
            for name, plan in plans.items()
        }
    write_adapter(judge.swap(bottom, top), folder / "math+language")
    unfamiliar = np.array([len(problem.key_words & scene.unfamiliar) for problem in problems])
    return SeedResult(seed, grid, scales, bottom, top, scale, right, unfamiliar, losses)


def _train(folder: Path, name: str, rows: Iterable[LabRow], seed: int) -> float:
    """Train the expert `name` of the base in `folder`, and return its last training loss."""
    return train_expert(folder / "base", folder / name, rows, seed, learning_rate=LEARNING_RATES[name])


def train_expert(
    base: Path, out_path: Path, rows: Iterable[LabRow], seed: int, *, learning_rate: float, **options: object
) -> float:
    """Train an expert with the lab's options; its rows are kept next to it in NAME.jsonl.

    Args:
        base: the base's folder.
        out_path: the folder to write.
        options: `TrainingOptions` that override the lab's.

    Returns:
        The last training loss.

    Raises:
        AdapterswapError: see `adapterswap.training.train`.
    """
    from adapterswap.training import TrainRecipe, train

    path = out_path.with_name(f"{out_path.name}.jsonl")
    lines = (json.dumps({"prompt": row.prompt, "completion": row.completion}) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    recipe = TrainRecipe.model_validate(
        {
            "base_model": str(base),
            "adapter": _ADAPTER,
            "datasets": [{"path": str(path), "prompt": "{prompt}", "completion": " {completion}"}],
            "training": {**_TRAINING, "learning_rate": learning_rate, "seed": seed, "data_seed": seed, **options},
        }
    )
    return train(recipe, out_path=out_path, progress=False).train_losses[-1][1]


class _LoadedPair:
    """A base with both experts loaded, and the plans and scores of their compositions."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.math, self.language = open_adapter(folder / "math"), open_adapter(folder / "language")
        model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
        self.model = load_experts(model, self.sum(1.0))
        self.composer = LiveComposer(self.model)

    def swap(self, bottom: int, top: int) -> Plan:
        language = self.language if bottom + top else BASE
        return layer_swap(self.math, language, num_layers=NUM_LAYERS, bottom=bottom, top=top)

    def sum(self, scale: float) -> Plan:
        return task_arithmetic(self.math, self.language, num_layers=NUM_LAYERS, scale=scale)

    def plans(self, bottom: int, top: int, scale: float) -> dict[str, Plan | None]:
        """Method → plan; None is the base. An expert alone is a swap without any layer of the other."""
        return {
            "base": None,
            "math expert": self.swap(0, 0),
            "language expert": layer_swap(self.language, BASE, num_layers=NUM_LAYERS, bottom=0, top=0),
            "soup": soup(self.math, self.language, num_layers=NUM_LAYERS),
            "sum": self.sum(1.0),
            "tuned sum": self.sum(scale),
            "layer swap": self.swap(bottom, top),
            "inverse swap": layer_swap(self.language, self.math, num_layers=NUM_LAYERS, bottom=bottom, top=top),
            "reset": layer_swap(self.math, BASE, num_layers=NUM_LAYERS, bottom=bottom, top=top),
        }

    def right(self, plan: Plan | None, questions: Questions) -> NDArray[np.bool_]:
        if plan is None:
            with self.model.disable_adapter():
                return exact_match(self.model, questions)
        with self.composer.use(plan):
            return exact_match(self.model, questions)

    def accuracy(self, plan: Plan, questions: Questions) -> float:
        return float(self.right(plan, questions).mean())
