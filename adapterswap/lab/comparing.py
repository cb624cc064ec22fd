"""One seed of the comparison of all methods: the configurations of each method, a development set, a test set.

They were fixed before the comparison was run, for two experts that both change every layer. The first of each list is
the method's default, if the list has it, and wins ties. Knows compositions' fields; knows nothing of models.

Every composition is written as full float32 weights by `merge`, so all methods are exact. A method's configurations
(`choices`) are evaluated on development problems in xx, and only the chosen ones on the test set, which shares no
problem with them. Knows nothing of other seeds, intervals and tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.analysis.dominance import suggest_owners
from adapterswap.errors import ArgumentError
from adapterswap.files.folders import scratch_folder
from adapterswap.files.text import exists, read_json, write_json
from adapterswap.lab.bases import NUM_LAYERS, write_base
from adapterswap.lab.scenes import Scene, draw_problems, language_rows, math_rows, source_rows
from adapterswap.lab.seed import LEARNING_RATES, Questions, exact_match, train_expert
from adapterswap.lab.tasks import LabRow
from adapterswap.methods.method import Method
from adapterswap.methods.registry import all_methods, find_method
from adapterswap.planning.composing import compose
from adapterswap.planning.composition import Composition
from adapterswap.planning.plan import Plan
from adapterswap.planning.rules import BASE

if TYPE_CHECKING:
    from adapterswap.lab.world import WordProblem

Fields = Mapping[str, Any]
"""Fields of a composition, apart from its experts and its method."""

BUDGET = 8


def _grid(**values: Sequence[Any]) -> tuple[Fields, ...]:
    return tuple(dict(zip(values, point, strict=True)) for point in product(*values.values()))


def _shares(*language: float) -> tuple[Fields, ...]:
    return tuple({"task_weight": round(1 - share, 2), "language_weight": share} for share in language)


ZONES = _grid(bottom=(3, 1, 2, 4), top=(0, 1))
SCALES = _grid(scale=(1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2))
_SHARES = _shares(0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8)
_DENSITIES = (0.3, 0.8)
_SUMS = _grid(density=_DENSITIES, scale=(1.0, 0.6, 0.8, 1.2))
_ELECTED = _grid(density=_DENSITIES, scale=(1.0, 0.8, 1.3, 1.6))  # entries of one expert alone keep their size

_CHOICES: dict[str, tuple[Fields, ...]] = {
    "layer_swap": ZONES,
    "soup": _SHARES,
    "task_arithmetic": SCALES,
    "ties": _ELECTED,
    "dare_linear": _SUMS,
    "dare_ties": _ELECTED,
    "slerp": _SHARES,
    "magnitude_prune": _SUMS,
    "adamergex": _grid(scale=(1.0, 0.2, 0.4, 0.6, 0.8, 1.2, 1.4, 1.6)),
    "della": _ELECTED,
    "della_linear": _SUMS,
    "breadcrumbs": _SUMS,
    "breadcrumbs_ties": _ELECTED,
    "sce": _grid(select_topk=(1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)),
    "nuslerp": tuple(
        {**share, "nuslerp_flatten": flatten} for share in _shares(0.5, 0.2, 0.35, 0.65) for flatten in (True, False)
    ),
    "multislerp": _SHARES,
    "model_stock": _grid(filter_wise=(False, True)),
    "nearswap": _grid(t=(1e-3, 1e-4, 3e-4, 3e-3, 1e-2, 2e-2, 5e-2, 1e-1)),
    "karcher": ({},),
    "arcee_fusion": ({},),
    "tsv": SCALES,
    "iso_c": _grid(scale=(1.0, 0.6, 0.8, 1.2, 1.4, 1.6, 2.0, 2.5)),
    "iso_cts": _grid(common_space_fraction=(0.8, 0.5), scale=(1.0, 0.7, 1.4, 2.0)),
    "knots_ties": _ELECTED,
    "knots_dare_ties": _ELECTED,
    "core_ties": _ELECTED,
    "core_dare_ties": _ELECTED,
}

SUGGESTED: Mapping[str, tuple[Fields, ...]] = {
    "dominance": (
        *_grid(margin=(0.15, 0.5), per=("layer", "module")),  # AraSwap's margin first
        *_grid(tie=(0.001, 0.05), per=("layer", "module")),  # arXiv:2601.22620's τ first
    ),
}
"""Rules that `suggest_owners` derives from the experts, compared like methods; the fields are its arguments."""


def choices(method: Method) -> tuple[Fields, ...]:
    """The configurations of a method. Without a list here, as for a package's, they are its defaults with shares."""
    if method.name in _CHOICES:
        return _CHOICES[method.name]
    required = {parameter.name: parameter.default for parameter in method.parameters if parameter.required}
    return tuple({**share, **required} for share in (_SHARES if method.weighted else ({},)))


def chosen_methods(names: str | Iterable[str]) -> tuple[str, ...]:
    """`all`, or names separated by commas: methods that two or three experts can be composed with, and `SUGGESTED`."""
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if listed == ["all"]:
        return (*(name for name, method in all_methods().items() if method.as_composition), *SUGGESTED)
    chosen = []
    for name in listed:
        if name in SUGGESTED:
            chosen.append(name)
            continue
        method = find_method(name)
        if not method.as_composition:
            raise ArgumentError(
                f"{name!r} can only be used in rules",
                "Leave it out, since `soup` gives the same result",
                parameter="methods",
            )
        chosen.append(method.name)
    return tuple(dict.fromkeys(chosen))


REFERENCE = "layer_swap"

FEW = (10, 30, 100)
"""Numbers of problems in xx on which to choose, or on which to train instead."""


def trained(number: int) -> str:
    """The name of the control that trains on this number of problems in xx."""
    return f"trained on {number}"


CONTROLS = {
    "base": "the pretrained model",
    "math expert": "rsLoRA on English word problems",
    "language expert": "rsLoRA on generic xx tasks",
    "inverse swap": "the layer swap's b and u, with the experts exchanged",
    "reset": "the outer layers reset to the base; b and u chosen for it",
    "random swap": "the layer swap with a random expert of the language expert's norms; b and u chosen for it",
    "random sum": "task arithmetic with the random expert; λ chosen for it",
    **{
        trained(number): f"the math expert, trained further on {number} worked problems in xx; steps and rate tuned"
        for number in FEW
    },
}
"""Rows that are not methods, with a description; they have as many configurations as a method, or none."""

_TRAININGS: tuple[Fields, ...] = tuple(
    {"learning_rate": rate, "max_steps": steps} for rate, steps in product((1.5e-3, 5e-4), (40, 10, 20, 80))
)
_BATCH = 10

Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class ComparisonSizes:
    """Numbers of problems.

    Attributes:
        development: in xx, on which configurations are chosen; the `FEW` are further ones.
        test: in xx.
        english: the number of test problems that are also scored in English.
    """

    development: int = 300
    test: int = 1000
    english: int = 300


DEFAULT_SIZES = ComparisonSizes()


def compare_seed(
    scene: Scene,
    methods: Sequence[str],
    folder: Path,
    rebuild_base: bool,
    sizes: ComparisonSizes,
    seed: int,
    tell: Tell = lambda step, share: None,
) -> dict[str, Any]:
    """Train what is missing in `folder`/seed-N, evaluate everything, and write seed-N.json; read it if it exists.

    Args:
        methods: see `chosen_methods`.
        folder: the folder of all seeds.
        rebuild_base: pretrain the base even if it is shipped.
        sizes: numbers of problems.
        tell: called with the current step, and with the finished share of the seed.

    Returns:
        The content of seed-N.json: `rows`, by method and control. A row has its `configurations`; `development`, the
        accuracy of each; `chosen`, the index of the best, on all development problems (`all`) and on few; `xx`, by
        index, and `en`: a character per test problem, 1 for a right answer.
    """
    record = folder / f"seed-{seed}.json"
    if exists(record):
        return read_json(record)
    place = folder / f"seed-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    _experts(scene, seed, place, rebuild_base, tell)
    few = draw_problems(scene, "development", sizes.development + max(FEW))[sizes.development :]
    _trainings(few, seed, place, tell)
    problem_sets = _ProblemSets(scene, few, sizes)
    rows: dict[str, Any] = {}
    jobs = _jobs(methods, place)
    from adapterswap.training.run import isolated

    with isolated(), scratch_folder("lab") as scratch:
        judge = _Judge(place / "base", scratch / "merged")
        for number, (name, configurations) in enumerate(jobs.items()):
            tell("compositions", 0.5 + 0.5 * number / len(jobs))
            if name == "inverse swap":  # choosing would be unfair: inverse(b, 0) is swap(0, L - b)
                swap = rows[REFERENCE]
                configurations = [configurations[swap["chosen"]["all"]]]
            rows[name] = problem_sets.row(judge, configurations, choose_on_few=not name.startswith("trained"))
    result = {"seed": seed, "rows": rows}
    building = record.with_suffix(".part")
    write_json(building, result)
    building.rename(record)
    return result


def _experts(scene: Scene, seed: int, place: Path, rebuild_base: bool, tell: Tell) -> None:
    """Make the base and the experts that are missing."""
    from adapterswap.lab.bases import shipped_file
    from adapterswap.training.run import isolated

    if not exists(place / "base"):
        rebuild = rebuild_base or not shipped_file(scene, seed).exists()
        with isolated(), _complete_folder(place / "base") as folder:
            write_base(
                scene, seed, folder, rebuild=rebuild,
                progress=lambda step, steps: tell("pretraining the base", 0.3 * step / steps),
            )  # fmt: skip
    for share, (name, rows) in enumerate({"math": math_rows, "language": language_rows, "source": source_rows}.items()):
        if not exists(place / name):
            tell(f"{name} expert", 0.3 + 0.03 * share)
            rate = LEARNING_RATES["math" if name == "math" else "language"]
            train_expert(place / "base", place / name, rows(scene, seed), seed, learning_rate=rate)
    if not exists(place / "random"):
        with _complete_folder(place / "random") as folder:
            _write_random(place / "language", folder, seed)


def _trainings(few: Sequence[WordProblem], seed: int, place: Path, tell: Tell) -> None:
    """Merge the math expert into the base, and train rsLoRA on top of it on problems in xx."""
    from adapterswap.writing.weights import merge

    if not exists(place / "math-merged"):
        merge(place / "math", place / "base", out_path=place / "math-merged")
    for number, options in product(FEW, _TRAININGS):
        path = place / _training(number, options)
        if not exists(path):
            tell(f"training on {number}", 0.42)
            rows = [LabRow(problem.prompt("xx"), problem.answer) for problem in few[:number]]
            train_expert(place / "math-merged", path, rows, seed, batch_size=_BATCH, **options)


def _training(number: int, options: Fields) -> str:
    return f"trained-{number}-{options['learning_rate']:g}-{options['max_steps']}"


@contextmanager
def _complete_folder(target: Path) -> Iterator[Path]:
    """A folder that receives its name when it is complete."""
    building = target.with_name(f"{target.name}.part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    yield building
    building.rename(target)


def _write_random(expert: Path, out_path: Path, seed: int) -> None:
    """Write an adapter like `expert` with random factors; each module's ΔW has the same norm."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(expert / "adapter_model.safetensors")
    rng = np.random.default_rng(seed)
    drawn: dict[str, NDArray[np.float32]] = {}
    for name in sorted(tensors):
        if "lora_A" not in name:
            continue
        partner = name.replace("lora_A", "lora_B")
        a, b = (rng.standard_normal(tensors[key].shape).astype(np.float32) for key in (name, partner))
        factor = np.linalg.norm(tensors[partner] @ tensors[name]) / np.linalg.norm(b @ a)
        drawn[name], drawn[partner] = a, (b * factor).astype(np.float32)
    save_file(drawn, out_path / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copy(expert / "adapter_config.json", out_path)


@dataclass(frozen=True)
class _Job:
    """A configuration: its fields and its plan. None means the base, a path an adapter on math-merged."""

    fields: Fields
    plan: Plan | Path | None


def _jobs(methods: Sequence[str], place: Path) -> dict[str, list[_Job]]:
    """The configurations of every row. The layer swap comes before its inverse."""

    def composed(method: str, fields: Fields, task: str = "math", language: str | list[str] = "language") -> _Job:
        names = [name for name in (task, *([language] if isinstance(language, str) else language)) if name != BASE]
        composition = Composition(
            experts={name: str(place / name) for name in names}, base_model=str(place / "base"), num_layers=NUM_LAYERS,
            method=method, task=task, language=language, **fields,
        )  # fmt: skip
        return _Job(fields, compose(composition))

    def suggested(fields: Fields) -> _Job:
        places = {name: str(place / name) for name in ("math", "language")}
        proposal = suggest_owners(places, base_model=place / "base", **fields)
        assert proposal is not None  # not a dry run
        composition = Composition(
            experts={name: path for name, path in places.items() if name not in proposal.unused},
            base_model=str(place / "base"), num_layers=NUM_LAYERS, rules=proposal.rules,
        )  # fmt: skip
        return _Job(fields, compose(composition))

    jobs: dict[str, list[_Job]] = {}
    for name in dict.fromkeys((REFERENCE, *methods)):
        if name in SUGGESTED:
            jobs[name] = [suggested(fields) for fields in SUGGESTED[name]]
            continue
        method = find_method(name)
        language: str | list[str] = ["language", "source"] if method.sides[0] == 3 else "language"
        jobs[name] = [composed(name, fields, language=language) for fields in choices(method)]
    no_zones = {"bottom": 0, "top": 0}
    jobs["base"] = [_Job({}, None)]
    jobs["math expert"] = [composed(REFERENCE, no_zones, "math", BASE)]
    jobs["language expert"] = [composed(REFERENCE, no_zones, "language", BASE)]
    jobs["inverse swap"] = [composed(REFERENCE, zones, "language", "math") for zones in ZONES]
    jobs["reset"] = [composed(REFERENCE, zones, "math", BASE) for zones in ZONES]
    jobs["random swap"] = [composed(REFERENCE, zones, "math", "random") for zones in ZONES]
    jobs["random sum"] = [composed("task_arithmetic", fields, "math", "random") for fields in SCALES]
    for number in FEW:
        jobs[trained(number)] = [_Job(options, place / _training(number, options)) for options in _TRAININGS]
    return jobs


class _Judge:
    """A base model that takes the weights of one composition after another."""

    def __init__(self, base: Path, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._base, self._scratch = base, scratch
        self._model = AutoModelForCausalLM.from_pretrained(base).eval()

    @contextmanager
    def holding(self, plan: Plan | Path | None) -> Iterator[Any]:
        """The model with a composition's weights."""
        from safetensors.torch import load_file

        from adapterswap.writing.weights import merge

        folder = self._base
        if plan is not None:
            base = plan.with_name("math-merged") if isinstance(plan, Path) else self._base
            folder = merge(plan, base, out_path=self._scratch)
        state = load_file(folder / "model.safetensors")
        missing = self._model.load_state_dict(state, strict=False).missing_keys
        assert missing in ([], ["lm_head.weight"]), missing  # the head is tied to the embeddings
        yield self._model
        shutil.rmtree(self._scratch, ignore_errors=True)


class _ProblemSets:
    """The problems of a scene, and the scores of a row on them."""

    def __init__(self, scene: Scene, few_problems: Sequence[WordProblem], sizes: ComparisonSizes) -> None:
        test = draw_problems(scene, "test", sizes.test)
        self._development = Questions(draw_problems(scene, "development", sizes.development), "xx")
        self._few = Questions(few_problems, "xx")
        self._test = Questions(test, "xx")
        self._english = Questions(test[: sizes.english], "en")

    def row(self, judge: _Judge, jobs: Sequence[_Job], *, choose_on_few: bool) -> dict[str, Any]:
        """Evaluate a row's configurations, choose the best, and score these on the test set."""
        chosen, accuracies = {"all": 0}, []
        if len(jobs) > 1:
            on_few = []
            for job in jobs:
                with judge.holding(job.plan) as model:
                    accuracies.append(float(exact_match(model, self._development).mean()))
                    on_few.append(exact_match(model, self._few) if choose_on_few else np.zeros(0, bool))
            chosen["all"] = int(np.argmax(accuracies))  # the first of equals
            if choose_on_few:
                chosen |= {str(n): int(np.argmax([right[:n].sum() for right in on_few])) for n in FEW}
        elif choose_on_few:
            chosen |= {str(n): 0 for n in FEW}
        xx, english = {}, ""
        for place in sorted(set(chosen.values())):
            with judge.holding(jobs[place].plan) as model:
                xx[str(place)] = _marks(exact_match(model, self._test))
                if place == chosen["all"]:
                    english = _marks(exact_match(model, self._english))
        configurations: list[Mapping[str, Any]] = [dict(job.fields) for job in jobs]
        return {
            "configurations": configurations,
            "development": accuracies,
            "chosen": chosen,
            "xx": xx,
            "en": english,
        }


def _marks(right: NDArray[np.bool_]) -> str:
    return "".join("01"[int(value)] for value in right)
