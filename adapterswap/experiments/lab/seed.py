"""One seed of the lab, from base to scores: a base, two experts, their compositions, exact match of greedy answers.

Experts are trained by `adapterswap.experiments.training` and composed by the library's plans and `LiveComposer`. The
swap's b and u and the tuned sum's scale λ are chosen on the development set; nothing is chosen on the test set.

The greedy answer is right exactly if each token of the right answer is the most likely one after the right tokens
before it. So all positions are compared at once, with the right answer as input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.core import BASE, Plan, layer_swap, open_adapter, soup, task_arithmetic, write_adapter
from adapterswap.engines.live import LiveComposer, load_experts
from adapterswap.experiments.lab.bases import BOS, EOS, NUM_LAYERS, PAD, ids_of, padded, shipped_file, write_base
from adapterswap.experiments.lab.scenes import Scene, draw_problems, language_rows, math_rows
from adapterswap.experiments.lab.tasks import LabRow
from adapterswap.experiments.lab.world import LANGUAGES

if TYPE_CHECKING:
    from adapterswap.experiments.lab.world import WordProblem

_BATCH = 250


class Questions:
    """Problems in one language, tokenised and batched once for many models.

    Attributes:
        number: how many problems.
        batches: per batch the indices of its problems, the ids (problems, tokens), and a mask (problems, tokens - 1) of
            the answers' tokens with the end of sequence, shifted by one like the model's predictions.
    """

    def __init__(self, problems: Sequence[WordProblem], language: str) -> None:
        self._batch(
            [[BOS, *ids_of(problem.prompt(language))] for problem in problems],
            [[*ids_of(problem.answer), EOS] for problem in problems],
        )

    @classmethod
    def of_tokens(cls, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Questions:
        """Questions whose prompts and answers are tokens already; an answer ends with the end of sequence."""
        questions = cls.__new__(cls)
        questions._batch(prompts, answers)
        return questions

    def _batch(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Batch the problems by length, so that little is padded."""
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
        self.number = len(prompts)
        self.batches: list[tuple[list[int], Any, Any]] = []
        for start in range(0, self.number, _BATCH):
            chosen = by_length[start : start + _BATCH]
            ids, masks = [], []
            for i in chosen:
                ids.append(prompts[i] + answers[i])
                # A model predicts the next token, so the mask begins one place before the answer.
                masks.append([0] * (len(prompts[i]) - 1) + [1] * len(answers[i]))
            self.batches.append((chosen, padded(ids, PAD), padded(masks, 0).bool()))

    def exact_match(self, model: Any) -> NDArray[np.bool_]:
        """Whether the model's greedy answer to each problem is right in every token (problems,)."""
        import torch

        right = np.zeros(self.number, bool)
        with torch.inference_mode():
            for chosen, ids, in_answer in self.batches:
                likeliest = model(input_ids=ids).logits[:, :-1].argmax(-1)
                right[chosen] = ((likeliest == ids[:, 1:]) | ~in_answer).all(-1).numpy()
        return right


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
ZONES = tuple(zone for zone in product(range(5), range(3)) if sum(zone) < NUM_LAYERS)
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

    def to_json(self) -> dict[str, Any]:
        """The results as plain data, except the single answers."""
        test: dict[str, dict[str, float]] = {}
        for method, by_language in self.right.items():
            test[method] = {language: float(right.mean()) for language, right in by_language.items()}

        grid = [{"bottom": b, "top": u, "xx": value} for (b, u), value in self.grid.items()]
        scales = [{"scale": scale, "xx": value} for scale, value in self.scales.items()]
        return {
            "seed": self.seed,
            "bottom": self.bottom,
            "top": self.top,
            "scale": self.scale,
            "development": {"grid": grid, "scales": scales},
            "test": test,
            "training_losses": self.losses,
        }


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
    """
    from adapterswap.experiments.training.run import isolated

    folder.mkdir(parents=True, exist_ok=True)
    pretrains = rebuild_base or not shipped_file(scene, seed).exists()

    # The shares of a seed's time at which its parts begin
    math_begins, language_begins, development_begins = 0.0, 0.15, 0.65
    if pretrains:
        math_begins, language_begins, development_begins = 0.7, 0.72, 0.83
    test_begins = (1 + development_begins) / 2

    tell("base", 0.0)
    with isolated():
        pretraining = _part(tell, "pretraining the base", 0.0, math_begins)
        write_base(scene, seed, folder / "base", rebuild=pretrains, progress=pretraining)

    losses = {}
    for name, rows, begin, end in (
        ("math", math_rows(scene, seed), math_begins, language_begins),
        ("language", language_rows(scene, seed), language_begins, development_begins),
    ):
        tell(f"{name} expert", begin)
        losses[name] = train_expert(
            folder / "base",
            folder / name,
            rows,
            seed,
            learning_rate=LEARNING_RATES[name],
            progress=_part(tell, f"{name} expert", begin, end),
        )

    with isolated():
        pair = _LoadedPair(folder)

        # Choose b, u and λ on the development set; among equals the fewest layers and the largest λ.
        tell("development set", development_begins)
        development = Questions(draw_problems(scene, "development", sizes.development), "xx")
        advance = _part(tell, "development set", development_begins, test_begins)
        scored = count(1)

        def accuracy(plan: Plan) -> float:
            """A composition's share of right answers on the development set."""
            share = float(pair.right(plan, development).mean())
            advance(next(scored), len(ZONES) + len(SCALES))
            return share

        grid = {zone: accuracy(pair.swap(*zone)) for zone in ZONES}
        scales = {scale: accuracy(pair.sum(scale)) for scale in SCALES}
        bottom, top = max(ZONES[1:], key=lambda zone: (grid[zone], -sum(zone)))
        scale = max(scales, key=lambda scale: (scales[scale], scale))

        # Score every method on the test set, in both languages.
        tell("test set", test_begins)
        problems = draw_problems(scene, "test", sizes.test)
        tests = {language: Questions(problems, language) for language in LANGUAGES}
        plans = pair.plans(bottom, top, scale)
        advance = _part(tell, "test set", test_begins, 1.0)
        scored = count(1)
        right: dict[str, dict[str, NDArray[np.bool_]]] = {}
        for method, plan in plans.items():
            right[method] = {}
            for language, questions in tests.items():
                right[method][language] = pair.right(plan, questions)
                advance(next(scored), len(plans) * len(tests))

    write_adapter(pair.swap(bottom, top), folder / "math+language")
    unfamiliar = np.array([len(problem.key_words & scene.unfamiliar) for problem in problems])
    return SeedResult(seed, grid, scales, bottom, top, scale, right, unfamiliar, losses)


def _part(tell: Tell, step: str, begin: float, end: float) -> Callable[[int, int], None]:
    """A function that reports how much of a step is finished, as a share of the seed between `begin` and `end`."""

    def advance(finished: int, total: int) -> None:
        tell(step, begin + (end - begin) * finished / total)

    return advance


def train_expert(
    base: Path,
    out_path: Path,
    rows: Iterable[LabRow],
    seed: int,
    *,
    learning_rate: float,
    progress: bool | Callable[[int, int], None] = False,
    fields: Mapping[str, object] = {},
    **options: object,
) -> float:
    """Train an expert with the lab's options; its rows are kept next to it in NAME.jsonl.

    Args:
        base: the base's folder.
        out_path: the folder to write.
        progress: see `train`.
        fields: further fields of the recipe, such as `start`.
        options: `TrainingOptions` that override the lab's.

    Returns:
        The last training loss.
    """
    from adapterswap.experiments.training import TrainRecipe, train

    path = out_path.with_name(f"{out_path.name}.jsonl")
    lines = [json.dumps({"prompt": row.prompt, "completion": row.completion}) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")

    recipe = TrainRecipe.model_validate(
        {
            "base_model": str(base),
            "adapter": _ADAPTER,
            "datasets": [{"path": str(path), "prompt": "{prompt}", "completion": " {completion}"}],
            "training": {**_TRAINING, "learning_rate": learning_rate, "seed": seed, "data_seed": seed, **options},
            **fields,
        }
    )
    report = train(recipe, out_path=out_path, progress=progress)
    _, last_loss = report.train_losses[-1]
    return last_loss


class _LoadedPair:
    """A base with both experts loaded, and the plans and answers of their compositions."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.math, self.language = open_adapter(folder / "math"), open_adapter(folder / "language")
        model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
        self.model = load_experts(model, self.sum(1.0))
        self.composer = LiveComposer(self.model)

    def swap(self, bottom: int, top: int) -> Plan:
        """The layer swap; without any layer of the language expert, the math expert alone."""
        language = self.language if bottom + top else BASE
        return layer_swap(self.math, language, num_layers=NUM_LAYERS, bottom=bottom, top=top)

    def sum(self, scale: float) -> Plan:
        """λ (math + language)."""
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
        """Whether each answer is right (problems,); None is the base."""
        if plan is None:
            with self.model.disable_adapter():
                return questions.exact_match(self.model)
        with self.composer.use(plan):
            return questions.exact_match(self.model)
