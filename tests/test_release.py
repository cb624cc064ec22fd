"""The parts of a release: matching versions, the citation, continuous integration, a wheel that works by itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from importing import loaded

import adapterswap
from adapterswap.kit.files.yaml import parse_yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
SEMANTIC = r"\d+\.\d+\.\d+"
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def read(path: Path) -> Any:
    return parse_yaml(path.read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return content


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
        ("vendor.github-workflows", sorted(WORKFLOW.parent.glob("*.yml"))),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.github-issue-config", [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"]),
    ],
)
def test_metadata_files_follow_their_schemas(schema: str, files: list[Path]) -> None:
    pytest.importorskip("check_jsonschema")
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_page_on_citing_says_what_citation_cff_says() -> None:
    page = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
    citation = read(ROOT / "CITATION.cff")
    assert re.findall(r"version += \{(.*)\}", page) == [str(citation["version"])]
    for paper in (citation["preferred-citation"], *citation["references"]):
        assert f"{{{paper['title']}}}" in page
        authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
        assert f"{{{authors}}}" in page
        assert paper["identifiers"][0]["value"] in page


def test_the_workflow_on_the_page_of_commands_follows_its_schema(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (workflow,) = re.findall(r"```yaml\n(# \.github/workflows.*?)```", page, flags=re.DOTALL)
    (tmp_path / "compose.yml").write_text(workflow, encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    process = subprocess.run([*command, str(tmp_path / "compose.yml")], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_one_version() -> None:
    assert re.fullmatch(SEMANTIC, adapterswap.__version__)
    assert str(read(ROOT / "CITATION.cff")["version"]) == adapterswap.__version__
    (newest, *_) = re.findall(rf"^## ({SEMANTIC})", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest == adapterswap.__version__


def test_the_change_log_keeps_its_form() -> None:
    """Versions with a date or `unreleased`, newest first; every change in one of the sections of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(rf"{SEMANTIC} \((unreleased|\d{{4}}-\d\d-\d\d)\)", head) for head in heads), heads
    versions = [tuple(map(int, head.split()[0].split("."))) for head in heads]
    assert versions == sorted(versions, reverse=True)
    for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        before, *sections = re.split(r"^### (.*)$", part, flags=re.MULTILINE)
        assert not before.strip(), before[:200]
        assert set(sections[::2]) <= SECTIONS
        assert len(set(sections[::2])) == len(sections[::2])


def test_continuous_integration_runs_make_targets() -> None:
    jobs = read(WORKFLOW)["jobs"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    runs = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    assert runs == {"make lint", "make test", "make dist"}
    assert {line.removeprefix("make ") for line in runs} <= targets
    tested = jobs["test"]["strategy"]["matrix"]["python-version"]
    stated = [text.rpartition(" ")[2] for text in project()["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert tested == stated
    assert project()["requires-python"] == f">={tested[0]}"


def test_actions_are_pinned_by_commit() -> None:
    """A tag may be moved to another commit; the comment says which version the commit is."""
    paths = [*WORKFLOW.parent.glob("*.yml"), ROOT / "docs/commands.md"]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    used = [line for text in texts for line in re.findall(r"uses: (.*)", text)]
    assert len(used) > 10
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_a_release_is_published_by_a_person_without_a_stored_token() -> None:
    """Only the job that waits for an approval may ask PyPI for a token; it uploads what `make dist` made."""
    workflow = read(WORKFLOW.with_name("release.yml"))
    assert list(workflow[True]) == ["workflow_dispatch"]  # our YAML reads `on` as true
    jobs = workflow["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert jobs["publish"]["needs"] == "build"
    assert "make dist" in [step.get("run") for step in jobs["build"]["steps"]]
    assert "secrets." not in WORKFLOW.with_name("release.yml").read_text(encoding="utf-8")


def test_a_release_is_checked_before_it_is_built(tmp_path: Path) -> None:
    check = loaded(ROOT / "scripts" / "check_release.py").mistakes
    version = adapterswap.__version__
    ready = {
        "adapterswap/__init__.py": f'__version__ = "{version}"\n', "CITATION.cff": f"version: {version}\n",
        "CHANGELOG.md": f"# Changes\n\n## {version} (2026-11-27)\n", "scripts/status_page.py": "RELEASED = True\n",
    }  # fmt: skip
    for name, text in ready.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert check(f"v{version}", tmp_path) == []
    assert len(check("main", tmp_path)) == 1
    for name, text in ready.items():
        (tmp_path / name).write_text(text.replace(version, "9.9.9").replace("True", "False"))
        assert check(f"v{version}", tmp_path), name
        (tmp_path / name).write_text(text)
    assert all("RELEASED" in mistake for mistake in check(f"v{version}"))  # all else is ready in the checkout


def test_every_development_tool_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    wanted = {re.split(r"[>=\[]", name)[0].lower() for name in project()["optional-dependencies"]["dev"]}
    assert wanted - {"adapterswap"} <= pinned


@pytest.mark.slow
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling, which builds the wheel, is not installed")
def test_the_wheel_works_without_the_checkout(tmp_path: Path) -> None:
    """Run in a separate environment with this one's dependencies; `make dist` installs them as well."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    command = [sys.executable, str(ROOT / "scripts" / "check_dist.py"), str(wheel), "--borrow", sys.prefix]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"ok {adapterswap.__version__}" in process.stdout


def test_the_readme_of_a_package_leads_somewhere() -> None:
    """PyPI has no other file of the repository: links name the tag, or are gone."""
    pytest.importorskip("hatchling")
    packaged = loaded(ROOT / "scripts" / "package_readme.py").packaged
    text = "[a](docs/a.md#b), [c](https://c.org), [d](#d)\n![a picture](docs/p.png)\n"
    assert packaged(text, "https://host/org/name", "v1.2.3") == (
        "[a](https://host/org/name/blob/v1.2.3/docs/a.md#b), [c](https://c.org), [d](#d)\n"
        "![a picture](https://host/org/name/raw/v1.2.3/docs/p.png)\n"
    )
    assert packaged(text, None, "v1.2.3") == "a, [c](https://c.org), [d](#d)\n\n"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\(docs/", readme)
    for url in ("https://host/org/name", None):
        assert not re.search(r"\]\((?!https?:|#)", packaged(readme, url, "v1"))
