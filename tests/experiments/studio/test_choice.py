"""A visitor's choice as an address, a composition, a command and Python lines: nothing is lost."""

from __future__ import annotations

import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from adapterswap.cli import main
from adapterswap.core.model.layers import Kind
from adapterswap.core.planning.composition import Composition
from adapterswap.engines.live.streaming import Answers
from adapterswap.experiments.evaluation.answers import is_right
from adapterswap.experiments.studio import evaluations
from adapterswap.experiments.studio.choice import Choice, first_choice, from_address, paint
from adapterswap.experiments.studio.export import lines, write_file
from adapterswap.experiments.studio.html import Column, answers_html
from adapterswap.experiments.studio.workspace import Workspace
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    CompositionError,
    DataError,
    FieldError,
    NotFoundError,
    UnsupportedError,
)

from .conftest import random_expert

QUERIES = [
    "?task=math&language=language&bottom=2&top=1",
    "?task=math&language=language&bottom=1&top=1&bottom_transition=1&task_weight=0.5",
    "?task=math&language=base&bottom=1&top=0",
    "?task=math&language=language&partition=B",
    "?task=math&language=language&method=soup&task_weight=0.25",
    "?task=math&task=language&language=language&method=soup",
    "?task=math&language=language&method=task_arithmetic&scale=0.7",
    "?task=math&language=language&method=slerp",
    "?task=math&language=language&bottom=1&top=1&give=mlp.0,3=base&give=attention.5=math&give=mlp.5=math",
    "?task=math&language=language&bottom=1&top=1&bottom_transition=2&task_weight=0.3&give=mlp.1=base",
    "?task=math&language=language&method=task_arithmetic&scale=0.7&give=attention.0-2=language",
    "?task=math&language=language&method=soup&language_weight=-0.25&allow_negative=true&give=attention.2=math",
    "?task=math&language=language&method=soup&weights=magnitude&give=mlp.4=language",
    "?task=math&task=language&language=base&method=soup&give=attention.5=base",
    "?task=math&task=language&language=language&bottom=1&top=1&bottom_transition=2&task_weight=0.3",
    "?task=math&task=language&language=math&method=slerp",
]  # fmt: skip
RENAMED = [
    "?task=maths&language=my+swahili&bottom=2&top=1&top_transition=1&weights=magnitude",
    "?task=maths&task=english&language=my+swahili&language=maths&method=soup&task_weight=0.4",
    "?task=maths&task=english&language=base&bottom=1&top=2",
    "?task=maths&language=my+swahili&partition=A&outside=language",
    "?task=maths&language=my+swahili&language=english&method=adamergex&scale=0.5",
    "?task=maths&language=my+swahili&language=english&method=adamergex&scale=0.5&give=mlp.2=base",
    "?task=maths&language=my+swahili&method=task_arithmetic&scale=-0.5&allow_negative=true",
]


@pytest.fixture(scope="session")
def renamed(lab_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Experts whose names are not those of their folders."""
    third = random_expert(lab_run / "seed-0/base", tmp_path_factory.mktemp("renamed") / "third", 3)
    places = {"maths": "math", "my swahili": "language", "english": third, "a=b": third}
    named = {name: str(lab_run / "seed-0" / place) for name, place in places.items()}
    return Workspace.open(str(lab_run / "seed-0/base"), named, device="cpu")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("query", [*QUERIES, *RENAMED, "?task=a%3Db&language=maths&bottom=1&top=0"])
def test_the_command_the_lines_and_the_recipe_make_the_same_bytes(
    workspace: Workspace, renamed: Workspace, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page offers for download is what the copied command line writes, and the Python lines, byte for byte.

    Its weights are those of the composition itself; and only a name with '=' needs the recipe.
    """
    workspace = workspace if query in QUERIES else renamed
    choice = from_address(query, first_choice(list(workspace.experts)))
    composition = workspace.composition(choice)
    made = lines(composition, workspace.num_layers)
    downloads, by_command, by_python = (tmp_path / name for name in ("downloads", "command", "python"))
    for folder in (downloads, by_command, by_python):
        folder.mkdir()
    archive = write_file(workspace, composition, "adapter", downloads)
    monkeypatch.chdir(by_command)
    if made.needs_recipe:
        Path("composition.yaml").write_text(made.yaml, encoding="utf-8")
    assert made.needs_recipe == ("composition.yaml" in made.command) == ("a%3Db" in query)
    result = CliRunner().invoke(main, shlex.split(made.command)[1:])
    assert result.exit_code == 0, result.output
    monkeypatch.chdir(by_python)
    exec(made.python, {})
    written = {path.name: path.read_bytes() for path in next(p for p in by_command.iterdir() if p.is_dir()).iterdir()}
    assert written == {path.name: path.read_bytes() for path in next(by_python.iterdir()).iterdir()}
    with zipfile.ZipFile(archive) as opened:
        assert written == {Path(name).name: opened.read(name) for name in opened.namelist()}
    (tmp_path / "composition.yaml").write_text(made.yaml, encoding="utf-8")
    result = CliRunner().invoke(main, ["compose", str(tmp_path / "composition.yaml"), "-o", str(tmp_path / "recipe")])
    assert result.exit_code == 0, result.output
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "recipe").iterdir()}
    workspace.plan(composition).write(tmp_path / "itself")
    weights = "adapter_model.safetensors"
    assert written[weights] == (tmp_path / "itself" / weights).read_bytes()


@pytest.mark.parametrize("query", QUERIES)
def test_an_address_contains_the_whole_choice(workspace: Workspace, query: str) -> None:
    first = first_choice(list(workspace.experts))
    choice = from_address(query, first)
    again = from_address(choice.address(), first)
    assert again == choice
    assert workspace.composition(again) == workspace.composition(choice)


def test_a_seed_of_a_lab_names_the_folder_above(lab_run: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        Workspace.of_lab(lab_run / "seed-0")
    (problem,) = caught.value.problems
    assert (problem.parameter, problem.remedy) == ("lab", f"Pass the folder above it: `lab={lab_run}`")


@pytest.mark.parametrize(
    "query", ["?nonsense=1", "?give=mlp", "?give=mlp.x=math", "?give=mlp.9-1=math", "?prompt=" + "a" * 9000]
)
def test_an_invalid_address_is_refused(query: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        from_address(query, first_choice(["math"]))
    assert caught.value.parameter == "query"


@given(st.text(max_size=60))
def test_any_address_is_read_or_refused(text: str) -> None:
    try:
        choice = from_address("?" + text, first_choice(["math", "language"]))
        choice.composition(6)
    except AdapterswapError:
        pass


@given(
    painted=st.dictionaries(
        st.tuples(st.integers(0, 5), st.sampled_from(["attention", "mlp"])),
        st.sampled_from(["math", "language", "base"]),
    ),
    bottom=st.integers(0, 3),
    top=st.integers(0, 3),
)
def test_only_painted_layers_change_owners(painted: Any, bottom: int, top: int) -> None:
    """Each module belongs to the painted expert or to the composition's owner: compared rule by rule."""
    plain = Composition(task="math", language="language", bottom=bottom, top=top)
    rules = paint(plain, painted, 6).rules(6)
    for layer in range(6):
        kinds: dict[Kind, str] = {"attention": "self_attn.q_proj", "mlp": "mlp.up_proj"}
        for kind, name in kinds.items():
            module = f"model.layers.{layer}.{name}"
            (found, *_) = (rule.expert for rule in rules if rule.matches(module, layer, kind))
            by_zones = "language" if layer < bottom or layer >= 6 - top else "math"
            assert found == painted.get((layer, kind), by_zones)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6, 32])
def test_the_first_choice_can_be_planned_at_every_depth(num_layers: int) -> None:
    choice = first_choice(["math", "language"], num_layers)
    bottom, top, *_ = choice.composition(num_layers).zones(num_layers)
    assert 1 <= bottom + top <= num_layers
    assert (choice.fields == {"method": "layer_swap"}) == (num_layers > 3)


def test_a_layer_that_does_not_exist_cannot_be_painted() -> None:
    with pytest.raises(CompositionError) as caught:
        paint(Composition(), {(6, "mlp"): "base"}, 6)
    assert caught.value.parameter == "layers"


def test_mistakes_are_reported_by_the_plan(workspace: Workspace) -> None:
    first = first_choice(list(workspace.experts))
    with pytest.raises(CompositionError) as overlap:
        workspace.plan(workspace.composition(from_address("?bottom=5&top=5", first)))
    assert overlap.value.parameter == "bottom"
    with pytest.raises(FieldError):
        workspace.composition(from_address("?method=ties", first))
    with pytest.raises(FieldError):
        workspace.composition(Choice((), ("language",), {}))


def test_a_broken_expert_is_named_and_the_others_go_on(lab_run: Path, tmp_path: Path) -> None:
    good = random_expert(lab_run / "seed-0/base", tmp_path / "good", 5)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "adapter_config.json").write_text("{")
    workspace = Workspace.open(str(lab_run / "seed-0/base"), tmp_path, device="cpu")
    assert list(workspace.experts) == [good.name]
    assert list(workspace.faults) == [bad.name]
    with pytest.raises(AdapterswapError, match="bad"):
        workspace.plan(workspace.composition(Choice(("good",), ("bad",), {"bottom": 1, "top": 0})))


def test_a_chain_of_a_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experts.yaml").write_text("experts: {math: {chain: [sft, dpo]}}")
    with refused(UnsupportedError, "experts"):
        Workspace.open("nowhere", tmp_path / "experts.yaml", device="cpu")


def test_experts_are_added_by_path_only_where_that_is_allowed(lab_run: Path, tmp_path: Path) -> None:
    third = random_expert(lab_run / "seed-0/base", tmp_path / "third", 7)
    closed = Workspace.of_lab(lab_run, device="cpu")
    with pytest.raises(ArgumentError):
        closed.add(str(third))
    opened = Workspace.of_lab(lab_run, device="cpu", allow_paths=True)
    assert opened.add(str(third)) == "third"
    assert opened.plan(opened.composition(Choice(("math",), ("third",), {"bottom": 1, "top": 0}))).num_layers == 6
    with pytest.raises(ArgumentError):
        opened.add(str(third))


def test_a_folder_that_is_not_a_lab_run(tmp_path: Path, lab_run: Path) -> None:
    with pytest.raises(NotFoundError):
        Workspace.of_lab(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(DataError):
        Workspace.of_lab(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        Workspace.of_lab(lab_run, 3)
    assert caught.value.parameter == "lab_seed"


def test_stored_browser_state_is_checked() -> None:
    row = {"composition": "=1+1", "address": "?task=math", "task": "lab", "right": 3, "of": 4, "low": 0.1, "high": 0.9}
    kept = [row, {**row, "of": 0}, {**row, "address": "javascript:alert(1)"}, {"right": 1}, 7, {**row, "low": "x"}]
    kept += [{**row, "composition": ["a"]}, {**row, "right": 10**400}, {**row, "of": 10**400}, {**row, "high": 1e999}]
    assert [found.right for found in evaluations.as_rows(kept)] == [3]
    assert evaluations.as_rows("nonsense") == []
    assert "\n'=1+1,lab,3,4,0.75" in evaluations.as_csv(evaluations.as_rows(kept))


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "1", '{"prompt": "a"}', '{"prompt": " ", "answer": "b"}', "\ufffd", "[" * 100_000,
        " " * 1_000_001,
        *(f'{{"prompt": "a", "answer": {answer}}}' for answer in ("null", "NaN", "[1]", "true", '"\\ud800"')),
        '{"prompt": {"a": 1}, "answer": "b"}', '{"prompt": "a", "answer": 1}\n' * 501,
    ],
)  # fmt: skip
def test_a_file_of_rows_is_read_or_refused(content: str) -> None:
    row = '{"prompt": "a b", "answer": 4}'
    assert evaluations.read_rows(f"\n{row}\r\n") == [("a b", "4")]
    with pytest.raises(DataError):
        evaluations.read_rows(content)


@pytest.mark.parametrize(
    ("written", "answer", "right"),
    [
        ("She has 2 + 2 = 4 eggs.", "4", True), ("It costs $1,000.", "1000.0", True), ("-3", "−3", True),
        ("It is 70 thousand.", "70k", True), (" A 12\n", "A 12", True), ("The answer is 5.", "4", False),
        ("Mombasa, 2020", "Nairobi, 2020", False), ("B12", "A12", False), ("Two", "2", False),
    ],
)  # fmt: skip
def test_a_number_is_compared_as_a_number_only_if_it_is_the_whole_answer(
    written: str, answer: str, right: bool
) -> None:
    assert is_right(written, answer) == right


@pytest.mark.parametrize(("written", "shown"), [(" 12 apples\n", "12 apples"), ("\n\na\nb", "a<br>b"), (" \n", None)])
def test_answers_are_shown_without_the_space_after_the_prompt(written: str, shown: str | None) -> None:
    page = answers_html([Column("base", "base", None)], Answers((written,), (4,), (True,)), [])
    assert f'dir="auto">{shown or "<i>(nothing)</i>"}</div>' in page
