"""What `import adapterswap` offers: names, types, reprs. And docs/python.md runs and type-checks unchanged."""

from __future__ import annotations

import html.parser
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import crafting
import pytest
import torch
from click.testing import Result
from conftest import LLAMA_PROJECTIONS
from experiments.evaluation.conftest import byte_tokenizer, pico_model
from peft import LoraConfig, get_peft_model

import adapterswap
from adapterswap import LiveComposer
from adapterswap.core.planning.describe import COLOURS
from adapterswap.core.planning.plan import Plan
from adapterswap.kit.errors import AdapterswapError

ROOT = Path(__file__).parent.parent
COMMANDS_AND_FUNCTIONS = {
    "compose", "layer_swap", "soup", "slerp", "task_arithmetic", "ties", "dare", "merge", "export", "slice_layers",
    "extract", "inspect", "verify", "diff", "analyze", "suggest", "train", "evaluate", "sweep", "report", "open_expert",
    "convert", "ask",
}  # fmt: skip


def page_as_script(base: str) -> str:
    """The Python blocks of docs/python.md in order, with the tests' base."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), flags=re.DOTALL)
    return "\n".join(blocks).replace("org/base", base)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pico base that reads bytes, two experts, and a recipe to train and one to sweep."""
    folder = tmp_path_factory.mktemp("face")
    pico_model().save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    for seed, name in enumerate(("math", "swahili")):
        lora = LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=LLAMA_PROJECTIONS, task_type="CAUSAL_LM")
        base = pico_model()
        base.name_or_path = str(folder / "base")
        model = get_peft_model(base, lora)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        model.save_pretrained(folder / "experts" / name, save_embedding_layers=False)
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {
        "base_model": "base",
        "adapter": {"r": 4, "alpha": 8},
        "datasets": [{"path": "rows.jsonl", "prompt": "{question}", "completion": " {answer}"}],
        "training": {"batch_size": 8, "gradient_accumulation": 1, "max_length": 64, "save_every_samples": None},
    }
    sweep = {
        "base_model": "base",
        "task_experts": {"math": "experts/math"},
        "language_experts": {"swahili": "experts/swahili"},
        "compositions": {"swap": {"bottom": [1, 2], "top": 1}},
        "tasks": ["mgsm_direct_sw"],
        "settings": {"limit": 4, "num_fewshot": 1, "max_gen_toks": 4},
    }
    for name, recipe in (("train.yaml", training), ("sweep.yaml", sweep)):
        (folder / name).write_text(json.dumps(recipe))  # JSON is YAML
    return folder


@pytest.mark.slow
def test_the_page_about_python_runs(world: Path) -> None:
    """Run in a separate process, as a user's script."""
    (world / "script.py").write_text(page_as_script(str(world / "base")))
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "script.py"], cwd=world, env={**environment, "PATH": "", "HOME": str(world)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "layers  ssmmms" in process.stdout
    written = [
        "math-swahili/adapter_model.safetensors", "merged/model.safetensors", "soup/adapter_config.json",
        "ties/adapter_config.json", "shell/adapter_model.safetensors", "extracted/adapter_model.safetensors",
        "analysis/changes.png", "suggested.yaml", "trained/adapter_model.safetensors", "runs/swahili/cells.jsonl",
        "runs/swahili-report/report.html",
    ]  # fmt: skip
    assert [name for name in written if not (world / name).exists()] == []


WRONG = """
import adapterswap as asw
plan: int = asw.layer_swap("a", "b")
asw.ties("a", "b")
asw.layer_swap("a", "b").write(out="c")
asw.diff("a", "b").totel
"""


@pytest.mark.full
@pytest.mark.slow
def test_user_scripts_can_be_type_checked(tmp_path: Path) -> None:
    """mypy --strict accepts the page, and sees the mistakes of a script that is wrong in every line."""
    (tmp_path / "right.py").write_text(page_as_script("base"))
    (tmp_path / "wrong.py").write_text(WRONG)
    config, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file", config]
    scripts = [tmp_path / "right.py", tmp_path / "wrong.py"]
    process = subprocess.run(
        [*mypy, "--cache-dir", cache, *scripts], cwd=ROOT, capture_output=True, text=True, check=False
    )  # fmt: skip
    lines = [line for line in process.stdout.splitlines() if ": error:" in line]
    assert [line for line in lines if "right.py" in line] == [], process.stderr
    assert {int(re.findall(r"wrong\.py:(\d+)", line)[0]) for line in lines} == {3, 4, 5, 6}


def test_the_package_is_marked_as_typed() -> None:
    """Without py.typed, type checkers treat everything in an installed package as Any."""
    assert (Path(adapterswap.__file__).parent / "py.typed").is_file()


def test_every_command_has_its_functions() -> None:
    assert set(dir(adapterswap)) >= COMMANDS_AND_FUNCTIONS
    assert dir(adapterswap) == sorted(adapterswap.__all__)


@pytest.mark.parametrize("name", [name for name in adapterswap.__all__ if name != "__version__"])
def test_public_names_are_documented_and_typed(name: str) -> None:
    result = getattr(adapterswap, name)
    assert result.__name__ == name
    assert inspect.getdoc(result)
    if inspect.isfunction(result):
        signature = inspect.signature(result)
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter}"


def test_import_is_light() -> None:
    """Listing the names imports no heavy library."""
    script = (
        "import sys, adapterswap; dir(adapterswap); print(*sorted(name for name in sys.modules if '.' not in name))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "click", "peft", "transformers"} & set(process.stdout.split())


@pytest.fixture
def plan(math: Path, swahili: Path) -> Plan:
    return adapterswap.layer_swap(math, swahili, bottom=1, top=1, bottom_transition=1)


def test_a_plans_repr_is_a_few_lines(plan: Plan) -> None:
    assert "x+eeex" in repr(plan)
    assert len(repr(plan)) < 1000
    assert repr(plan).count("\n") < 8


def test_reprs_are_short(plan: Plan, math: Path, base: Callable[[str], Path]) -> None:
    adapter, checkpoint = adapterswap.open_adapter(math), adapterswap.open_checkpoint(base("llama"))
    for shown in (adapter, checkpoint, adapterswap.inspect(math), adapterswap.diff(math, math)):
        assert len(repr(shown)) < 300
    assert repr(adapter.name) in repr(adapter)
    assert "rank 8" in repr(adapter)
    assert f"{checkpoint.name!r}" in repr(checkpoint)


def test_a_live_composer_says_what_is_active(math: Path, swahili: Path, base: Callable[[str], Path]) -> None:
    from conftest import load_base

    composer = LiveComposer.from_experts(load_base(base("llama")), {"math": math, "swahili": swahili})
    assert "math, swahili; active: no composition" in repr(composer)
    with composer.use("math+swahili"):
        assert "active: layer_swap" in repr(composer)
    with composer.use("base"):
        assert "active: base" in repr(composer)
    with composer.use_rows(["math", "swahili"]):
        assert "each of 2 rows" in repr(composer)


class _Fragment(html.parser.HTMLParser):
    """Tags, attributes and text of a fragment; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "td":
            self.cells.append((dict(attrs)["style"] or "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["td"]:
            self.cells[-1] = (self.cells[-1][0], data)


def test_a_notebook_shows_the_strip_in_colours(plan: Plan) -> None:
    """The letters of the terminal, one colour per expert, and only a table."""
    shown = _Fragment(plan._repr_html_())
    assert "".join(letter for _, letter in shown.cells) == "x+eeex"
    colours = {letter: style.partition("background:")[2] for style, letter in shown.cells}
    assert len(set(colours.values())) == 3
    assert set(shown.tags) <= {"div", "table", "tr", "th", "td", "span"}
    assert shown.attributes <= {"style", "title", "scope"}


def test_names_are_escaped_in_a_notebook(tmp_path: Path) -> None:
    """A name cannot break out of the fragment or its line."""
    hostile = "<script>alert(1)</script>\" onmouseover='x"
    experts = {hostile: crafting.adapter(tmp_path / "one"), "b": crafting.adapter(tmp_path / "two")}
    composition = adapterswap.Composition(task=hostile, language="b", num_layers=4, bottom=1, top=1)
    plan = adapterswap.compose(composition, experts)
    shown = _Fragment(plan._repr_html_())
    assert "script" not in shown.tags
    assert "onmouseover" not in shown.attributes


def _luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("background", "text"), COLOURS)
def test_letters_are_readable_on_every_colour(background: str, text: str) -> None:
    """WCAG's contrast of 4.5, which holds in grayscale too."""
    low, high = sorted((_luminance(background), _luminance(text)))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_two_experts_differ_in_grayscale() -> None:
    one, other = (_luminance(background) for background, _ in COLOURS[:2])
    assert max(one, other) / min(one, other) > 2.5


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adapterswap.slerp, {}),
        (adapterswap.ties, {"density": 0.4, "scale": 0.7}),
        (adapterswap.dare, {"density": 0.4, "seed": 3}),
        (adapterswap.dare, {"density": 0.4, "seed": 3, "method": "dare_ties"}),
    ],
)
def test_plan_makers_equal_the_command(
    make: Callable[..., Plan],
    options: dict[str, object],
    run: Callable[..., Result],
    math: Path,
    swahili: Path,
    tmp_path: Path,
) -> None:
    """The same bytes as `adapterswap compose` with the options of the same names."""
    plan = make(math, swahili, task_weight=0.5, **options)
    plan.write(tmp_path / "python", max_rank=8)
    flags = [
        text for name, value in options.items() for text in ("--method-seed" if name == "seed" else f"--{name}", value)
    ]
    flags += [] if "method" in options else ["--method", {"dare": "dare_linear"}.get(make.__name__, make.__name__)]
    sides = ["-t", math, "-l", swahili, "--task-weight", 0.5]
    result = run("compose", *sides, *flags, "--max-rank", 8, "-o", tmp_path / "command")
    assert result.exit_code == 0, result.stderr
    one, other = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("python", "command"))
    assert one == other


def test_a_plan_merges_as_the_function_does(plan: Plan, tmp_path: Path) -> None:
    plan.merge(tmp_path / "method", dtype="float16")
    adapterswap.merge(plan, out_path=tmp_path / "function", dtype="float16")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("method", "function"))
    assert one == other


REFUSED: dict[str, tuple[str, Callable[[SimpleNamespace], object]]] = {
    "dare": ("`method`", lambda at: adapterswap.dare(at.math, at.math, density=0.5, method="ties")),  # type: ignore[arg-type]
    "slice": ("`adapter`", lambda at: adapterswap.slice_layers(5, "0-1")),  # type: ignore[arg-type]
    "slice layers": ("`layers`", lambda at: adapterswap.slice_layers(at.math, 3)),  # type: ignore[arg-type]
    "inspect": ("`path`", lambda at: adapterswap.inspect(5)),  # type: ignore[arg-type]
    "verify": ("`experts`", lambda at: adapterswap.verify(at.math, "math")),  # type: ignore[arg-type]
    "diff": ("`other`", lambda at: adapterswap.diff(at.math, None)),  # type: ignore[arg-type]
    "diff base": ("full checkpoint", lambda at: adapterswap.diff(at.math, at.base)),
    "analyze": ("`experts`", lambda at: adapterswap.analyze([at.math])),  # type: ignore[arg-type]
    "analyze none": ("`experts`", lambda at: adapterswap.analyze({})),
    "analyze name": ("'../x'", lambda at: adapterswap.analyze({"../x": at.math})),
    "analyze threshold": ("`threshold`", lambda at: adapterswap.analyze({"a": at.math}, threshold=float("nan"))),
    "suggest form": ("`form`", lambda at: adapterswap.suggest(at.math, at.math, form="layers")),  # type: ignore[arg-type]
    "suggest texts": ("`language_texts`", lambda at: adapterswap.suggest(at.math, at.math, task_texts="x")),
    "suggest base": ("`base`", lambda at: adapterswap.suggest(at.math, "base")),
    "evaluate both": (
        "`plan`", lambda at: adapterswap.evaluate(at.base, ["mgsm_direct_sw"], adapter=at.math, plan=at.plan),
    ),
    "evaluate rank": ("`plan`", lambda at: adapterswap.evaluate(at.base, "mgsm_direct_sw", max_rank=2)),
    "evaluate base": ("`base_model`", lambda at: adapterswap.evaluate(None, "mgsm_direct_sw")),  # type: ignore[arg-type]
    "sweep": ("`recipe`", lambda at: adapterswap.sweep(5, "out")),  # type: ignore[arg-type]
    "train": ("`recipe`", lambda at: adapterswap.train(5)),  # type: ignore[arg-type]
    "report": ("`run`", lambda at: adapterswap.report(5)),  # type: ignore[arg-type]
    "read_composition": ("`recipe`", lambda at: adapterswap.read_composition(None)),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_are_refused_by_name(case: str, plan: Plan, math: Path, base: Callable[[str], Path]) -> None:
    parameter, call = REFUSED[case]
    with pytest.raises(AdapterswapError, match=re.escape(parameter)):
        call(SimpleNamespace(math=math, base=base("llama"), plan=plan))


def test_overrides_without_a_file_are_refused(tmp_path: Path) -> None:
    recipe = adapterswap.TrainRecipe.model_validate(
        {"base_model": "org/base", "datasets": [{"path": "rows", "text": "{text}"}]}
    )
    with pytest.raises(AdapterswapError, match="`overrides`"):
        adapterswap.train(recipe, overrides=["training.seed=1"], out_path=tmp_path / "out")


def test_a_recipes_experts_are_relative_to_it(math: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `adapterswap compose recipe.yaml`."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "math").symlink_to(math)
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.write_text("experts: {math: math}\ntask: math\nlanguage: base\nbottom: 1\ntop: 1\n")
    monkeypatch.chdir(tmp_path)
    assert list(adapterswap.compose(adapterswap.read_composition(recipe)).experts) == ["math"]
