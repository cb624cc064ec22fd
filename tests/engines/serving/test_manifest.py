"""The experts that an operator lists, and the names that clients may use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from refusals import refused

from adapterswap import AdapterswapError, parse_composition
from adapterswap.engines.serving import Manifest, UnknownNameError
from adapterswap.engines.serving.names import composition_of
from adapterswap.kit.errors import ArgumentError, FieldError, NotFoundError

EXPERTS = {"math", "swahili", "v1.2-b"}


@pytest.mark.parametrize("name", ["math+swahili", "v1.2-b+math@bottom=4,top=1", "math+swahili@method=soup"])
def test_short_names_mean_the_same_as_elsewhere(name: str) -> None:
    assert composition_of(name, EXPERTS) == parse_composition(name)


def test_a_bare_name_is_the_expert_itself() -> None:
    (rule,) = composition_of("math", EXPERTS).rules(6)
    assert rule.expert == "math"
    assert rule.layers is None


@pytest.mark.parametrize(
    "name", ["nosuch", "", "base", "Math", "math ", "../math", "/etc/passwd", "math+nosuch", "nosuch+x@top=1", "\0"]
)
def test_unknown_names_are_answered_with_the_known_ones(name: str) -> None:
    with refused(UnknownNameError, "name", match=r"math, swahili, v1\.2-b"):
        composition_of(name, EXPERTS)


@pytest.mark.parametrize(
    "name",
    [
        "math+", "+swahili", "math+swahili@", "math+swahili@bottom", "math+swahili@bottom=", "math+swahili@bottom=x",
        "math+swahili@bottom=1,bottom=1", "math+swahili@experts=/etc", "math+swahili@base_model=/etc", "math@bottom=1",
        "math+swahili+math", "math+../swahili", "math+swahili@bottom=1\n", "math+swahili@task_weight=1e999",
        "math+swahili@method=ties", "math+swahili@task_weight=-1", "math+" + "x" * 300,
    ],
)  # fmt: skip
def test_malformed_names_are_not_called_unknown(name: str) -> None:
    with pytest.raises(AdapterswapError) as caught:
        composition_of(name, EXPERTS)
    assert not isinstance(caught.value, UnknownNameError)
    assert len(str(caught.value)) < 1000


def test_a_folder_of_adapters_is_a_manifest(experts: Path) -> None:
    (experts / "notes").mkdir()
    (experts / "README.md").write_text("not an adapter")
    manifest = Manifest.read(experts)
    assert manifest.experts == {name: str(experts / name) for name in ("code", "math", "swahili", "telugu")}
    assert manifest.allow is None


def test_compositions_in_a_folder_are_left_out(experts: Path) -> None:
    """As in a lab's folder: a server makes them itself, and no expert can have such a name."""
    before = Manifest.read(experts)
    shutil.copytree(experts / "math", experts / "math+swahili")
    manifest = Manifest.read(experts)
    assert (manifest.experts, manifest.skipped) == (before.experts, ("math+swahili",))
    assert before.skipped == ()


def test_paths_in_a_manifest_are_relative_to_it(experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experts.yaml").write_text(
        "experts: {math: experts/math, far: org/name@main}\nallow: [math, math+far@top=1]\nmax_compositions: 3\n"
    )
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "experts.yaml", Path("experts.yaml")):
        manifest = Manifest.read(path)
        assert manifest.experts == {"math": str(experts / "math"), "far": "org/name@main"}
        assert manifest.allow == ("math", "math+far@top=1")
        assert manifest.max_compositions == 3


def test_all_mistakes_of_a_manifest_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "experts.yaml"
    path.write_text("experts: {base: a, 'a+b': b, ok: c}\nallow: [nosuch, ok+ok@x=1]\n")
    with refused(FieldError, "experts") as caught:
        Manifest.read(path)
    parameters_and_values = [("experts", "'base'"), ("experts", "'a+b'"), ("allow", "'nosuch'"), ("allow", "x=1")]
    for problem, (parameter, value) in zip(caught.value.problems, parameters_and_values, strict=True):
        assert problem.parameter == parameter
        assert value in problem.message


def test_a_missing_manifest(tmp_path: Path) -> None:
    with refused(NotFoundError, "path", match="nope"):
        Manifest.read(tmp_path / "nope")


@pytest.mark.parametrize(
    ("content", "parameter"),
    [
        ("experts: {}", "experts"),
        ("experts: {a: b}\nallow: []", "allow"),
        ("experts: {a: b}\nmax_compositions: 0", "max_compositions"),
        ("experts: {a: b}\nallowed: [a]", "allowed"),
        ("allow: [a]", "experts"),
        ("experts: {a: b, a: c}", None),
        ("experts: {a: {chain: [b]}}", "experts.a.chain"),
        ("experts: {a: {chain: [b, c]}, a-2: d}", "experts"),
    ],
)
def test_a_manifest_is_read_strictly(tmp_path: Path, content: str, parameter: str | None) -> None:
    path = tmp_path / "experts.yaml"
    path.write_text(content)
    with refused(FieldError, parameter):
        Manifest.read(path)


def test_what_is_not_a_manifest_is_refused(experts: Path, tmp_path: Path) -> None:
    with refused(ArgumentError, "path", match=str(experts)):
        Manifest.read(experts / "math")
    shutil.rmtree(experts)
    experts.mkdir()
    with refused(ArgumentError, "path"):
        Manifest.read(experts)


def test_the_example_is_valid() -> None:
    manifest = Manifest.read(Path(__file__).parents[3] / "examples" / "serving" / "experts.yaml")
    assert manifest.allow is not None
    assert set(manifest.experts) == {"math", "swahili", "telugu"}
