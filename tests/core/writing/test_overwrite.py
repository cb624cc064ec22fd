"""`--overwrite` replaces what adapterswap wrote and nothing else; no command writes over what it reads."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from crafting import adapter, config, snapshot, tensors
from refusals import refused
from safetensors.numpy import load_file, save_file

import adapterswap
from adapterswap.experiments.evaluation.results import EvaluationResult, write_result
from adapterswap.kit.errors import OutputError
from adapterswap.kit.files.folders import FileKind, OutputKind
from core.merging.test_kill import checkpoint

Run = Callable[..., Result]
LAYERS = ["--num-layers", "4", "--bottom", "1", "--top", "1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Callable[[str], Path]) -> Path:
    """The current folder, with adapters, full checkpoints, a fine-tune with its base, and a home of its own."""
    place = tmp_path / "here"
    place.mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    adapter(Path("math"))
    adapter(Path("swahili"), tensors(seed=1))
    for seed, name in enumerate(("full-math", "full-swahili")):
        checkpoint(Path(name), seed)
        shutil.copyfile("math/adapter_config.json", Path(name, "tokenizer_config.json"))  # a companion to copy
    for name in ("tuned", "untuned"):
        shutil.copytree(base("llama"), name)
    weights = load_file("tuned/model.safetensors")
    save_file({key: value + 0.1 * (value.ndim == 2) for key, value in weights.items()}, "tuned/model.safetensors")
    return place


COMPOSE = ["compose", "-t", "math", "-l", "swahili", *LAYERS]
COMMANDS = {
    "compose": (COMPOSE, "adapterswap.json"),
    "compose full": (["compose", "-t", "full-math", "-l", "full-swahili", *LAYERS], "adapterswap.json"),
    "merge": (["merge", "-t", "full-math", "-l", "full-swahili", *LAYERS], "adapterswap.json"),
    "slice": (["slice", "math", "--layers", "0-1", "--num-layers", "4"], "adapterswap.json"),
    "extract": (["extract", "tuned", "--base-model", "untuned", "--rank", "1"], "adapterswap.json"),
    "analyze": (["analyze", "math"], "analysis.json"),
    "recipes": (["recipes", "cp", "compose/llama-3.1-8b/swahili"], None),
}


def arguments(command: str, out: str = "out") -> list[str]:
    words, _ = COMMANDS[command]
    return [*words, out] if command == "recipes" else [*words, "-o", out]


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    if request.param == "analyze":
        pytest.importorskip("matplotlib")
    return str(request.param)


def test_an_output_is_replaced_by_the_same_command(command: str, here: Path, run: Run) -> None:
    run(*arguments(command), exit_code=0)
    first = snapshot(here / "out")
    record = COMMANDS[command][1]
    if record is not None:
        listed = json.loads((here / "out" / record).read_text())["files"]
        assert listed == sorted(name for name, what in first.items() if what != "folder")
    assert run(*arguments(command)).exit_code == 3
    assert run(*arguments(command), "--overwrite").exit_code == 0
    assert snapshot(here / "out") == first
    files = [path for path in sorted((here / "out").rglob("*")) if path.is_file()]
    edited = next(path for path in files if path.name not in (record, "README.md"))
    edited.write_text("edited by hand")
    assert run(*arguments(command), "--overwrite").exit_code == 0
    assert snapshot(here / "out") == first


def test_weights_that_were_trained_in_place_and_edited_cards_are_kept(here: Path, run: Run) -> None:
    for command, (_, record) in COMMANDS.items():
        if record not in ("adapterswap.json", "training.json"):
            continue
        assert run(*arguments(command, command)).exit_code == 0
        for file in (min((here / command).glob("*.safetensors")), here / command / "README.md"):
            written = file.read_bytes()
            file.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
            before = snapshot(here)
            result = run(*arguments(command, command), "--overwrite")
            assert (result.exit_code, f"did not write: {file.name}" in result.stderr) == (3, True), command
            assert snapshot(here) == before
            file.write_bytes(written)
        assert run(*arguments(command, command), "--overwrite").exit_code == 0


def test_a_folder_whose_record_lists_no_files_is_kept(here: Path, run: Run) -> None:
    for command, (_, record) in COMMANDS.items():
        if record == "adapterswap.json":
            assert run(*arguments(command, command)).exit_code == 0
            content = json.loads((here / command / record).read_text())
            del content["files"]
            (here / command / record).write_text(json.dumps(content))
            before = snapshot(here)
            result = run(*arguments(command, command), "--overwrite")
            assert (result.exit_code, "did not write: " in result.stderr) == (3, True), command
            assert snapshot(here) == before


def test_other_files_are_named_and_kept(command: str, here: Path, run: Run) -> None:
    assert run(*arguments(command)).exit_code == 0
    out = here / "out"
    for make, named in (
        (lambda: (out / "thesis.tex").write_text("years of work"), "thesis.tex"),
        (lambda: (out / ".git").mkdir(), ".git/"),
        (lambda: (out / "link").symlink_to(here / "math"), "link"),
    ):
        make()
        before = snapshot(here)
        for options in (["--overwrite"], ["--overwrite", "--dry-run"]):
            result = run(*arguments(command), *options, exit_code=3)
            assert f"did not write: {named}." in result.stderr
            assert "--overwrite" in result.stderr
            assert snapshot(here) == before
        path = out / named
        path.rmdir() if named == ".git/" else path.unlink()
    for number in range(5):
        (out / f"notes{number}").touch()
    assert "notes0, notes1, notes2 and 2 more" in run(*arguments(command), "--overwrite").stderr


def test_folders_that_no_command_wrote(command: str, here: Path, run: Run) -> None:
    """A repository, an adapter that PEFT trained, a base model, another command's output, a record of others."""
    (here / "repository" / ".git").mkdir(parents=True)
    (here / "repository" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    adapter(here / "trained", tensors(seed=2))
    checkpoint(here / "base-model", 2)
    write_result(EvaluationResult({}, (), {}), here / "evaluation")
    (here / "foreign").mkdir()
    for record in {record for _, record in COMMANDS.values() if record}:
        (here / "foreign" / record).write_text('{"files": ["thesis.tex"]}')
    (here / "foreign" / "thesis.tex").write_text("years of work")
    before = snapshot(here)
    for folder in ("repository", "trained", "base-model", "evaluation", "foreign"):
        result = run(*arguments(command, folder), "--overwrite", exit_code=3)
        assert "did not write" in result.stderr
        assert snapshot(here) == before


def test_an_empty_folder_is_treated_as_absent(command: str, here: Path, run: Run) -> None:
    (here / "out").mkdir(mode=0o700)
    run(*arguments(command), exit_code=0)
    assert any((here / "out").iterdir())
    assert (here / "out").stat().st_mode & 0o777 == 0o700


def test_home_is_expanded(command: str, here: Path, run: Run) -> None:
    run(*arguments(command, "~/made/out"), exit_code=0)
    assert any((here.parent / "home" / "made" / "out").iterdir())
    assert not (here / "~").exists()


def test_home_is_expanded_in_python(here: Path) -> None:
    for path in ("~/made", Path("~/made")):
        plan = adapterswap.layer_swap("math", "swahili", num_layers=4)
        made = adapterswap.write_adapter(plan, path, overwrite=True)
        assert made == here.parent / "home" / "made"
    assert (here.parent / "home" / "made" / "adapter_config.json").is_file()
    assert not (here / "~").exists()


def test_home_is_expanded_in_inputs_and_what_is_written_of_them(here: Path, run: Run) -> None:
    """PEFT does not expand `~`, so a config that names the base has the whole path."""
    home = here.parent / "home"
    adapter(home / "math", settings=config(base_model_name_or_path=None))
    checkpoint(home / "base-model", 3)
    (here / "recipe.yaml").write_text(
        "experts: {task: ~/math, language: swahili}\nbase_model: ~/base-model\nbottom: 1\ntop: 1\n"
    )
    run("compose", "recipe.yaml", "-o", "out", exit_code=0)
    written = json.loads((here / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(home / "base-model")
    run("slice", "~/math", "--layers=0", "--base-model=~/base-model", "--out-path=~/sliced", exit_code=0)
    assert (home / "sliced").is_dir()


def test_no_output_over_an_input(here: Path, run: Run) -> None:
    """Outputs of ours that are inputs now: experts, the base that is given, the base that an expert names."""
    for name in ("composed", "other"):
        assert run(*COMPOSE, "-o", name).exit_code == 0
    assert run(*arguments("merge", "base-model")).exit_code == 0
    adapter(here / "trained", settings=config(base_model_name_or_path="base-model"))
    before = snapshot(here)
    for words, out in (
        (["compose", "-t", "composed", "-l", "math", *LAYERS], "composed"),
        (["compose", "-t", "composed", "-l", "math", *LAYERS], "composed/deeper"),
        (["slice", "composed", "--layers", "0", "--num-layers", "4"], "composed"),
        (["compose", "-t", "trained", "-l", "trained", *LAYERS], "base-model"),
        (["slice", "trained", "--layers", "0", "--num-layers", "4"], "base-model"),
        (["analyze", "trained"], "base-model/analysis"),
        (["compose", "-t", "math", "-l", "swahili", *LAYERS, "--base-model", "base-model"], "base-model"),
        (["extract", "tuned", "--base-model", "base-model", "--rank", "1"], "base-model"),
        (["merge", "-t", "base-model", "-l", "full-math", *LAYERS], "base-model"),
        (["merge", "-t", "full-math", "-l", "full-swahili", *LAYERS, "--base-model", "base-model"], "base-model"),
    ):
        for options in (["--overwrite"], ["--overwrite", "--dry-run"]):
            result = run(*words, "-o", out, *options)
            assert (result.exit_code, "overlaps the input" in result.stderr) == (3, True), (words, out, result.stderr)
            assert snapshot(here) == before


def test_links_in_an_input_lead_to_inputs(here: Path, run: Run) -> None:
    assert run(*COMPOSE, "-o", "composed").exit_code == 0
    (here / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (here / "linked" / name).symlink_to(here / "composed" / name)
    (here / "alias").symlink_to(here / "composed")
    before = snapshot(here)
    for expert in ("linked", "alias"):
        result = run(
            "slice", expert, "--layers", "0", "--num-layers", "4", "-o", "composed", "--overwrite", exit_code=3
        )
        assert "overlaps the input" in result.stderr
        result = run(
            "slice", "composed", "--layers", "0", "--num-layers", "4", "-o", "alias", "--overwrite", exit_code=3
        )
        assert "overlaps the input" in result.stderr
    assert snapshot(here) == before


def test_no_output_over_the_recipe_or_what_it_extends(here: Path, run: Run) -> None:
    assert run(*COMPOSE, "-o", "out").exit_code == 0
    record = json.loads((here / "out" / "adapterswap.json").read_text())
    (here / "out" / "part.yaml").write_text("bottom: 1\ntop: 1\nnum_layers: 4\n")
    (here / "out" / "recipe.yaml").write_text("experts: {task: ../math, language: ../swahili}\nextends: part.yaml\n")
    (here / "recipe.yaml").write_text("experts: {task: math, language: swahili}\nextends: out/part.yaml\n")
    record["files"] += ["part.yaml", "recipe.yaml"]  # even if the record takes them for ours
    (here / "out" / "adapterswap.json").write_text(json.dumps(record))
    before = snapshot(here)
    for recipe in ("recipe.yaml", "out/recipe.yaml"):
        for options in (["--overwrite"], ["--overwrite", "--dry-run"]):
            result = run("compose", recipe, "-o", "out", *options)
            assert (result.exit_code, "overlaps the input" in result.stderr) == (3, True), result.stderr
            assert snapshot(here) == before


def test_no_analysis_over_the_table_that_it_draws(here: Path, run: Run) -> None:
    pytest.importorskip("matplotlib")
    assert run(*arguments("analyze")).exit_code == 0
    before = snapshot(here)
    result = run("analyze", "--from-csv", "out/changes.csv", "-o", "out", "--overwrite")
    assert (result.exit_code, "overlaps the input" in result.stderr) == (3, True)
    assert snapshot(here) == before


def test_no_copies_over_the_shipped_recipes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adapterswap.kit.files import yaml as shipped

    shutil.copytree(shipped.shipped_folder(), tmp_path / "recipes")
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path / "recipes")
    before = snapshot(tmp_path)
    result = run("recipes", "cp", "compose/llama-3.1-8b/swahili", tmp_path / "recipes", "--overwrite")
    assert (result.exit_code, "overlaps the input" in result.stderr) == (3, True)
    assert snapshot(tmp_path) == before


def test_a_suggested_recipe_replaces_a_file_when_asked_and_never_an_input(here: Path, run: Run) -> None:
    (here / "recipe.yaml").write_text("mine")
    (here / "texts.txt").write_text("one two\n")
    words = ["suggest", "-t", "math", "-l", "swahili", "--num-layers", "4"]
    for options in ([], ["--overwrite"], ["--overwrite", "--dry-run"]):
        assert run(*words, "-o", "recipe.yaml", *options).exit_code == 3
        assert (here / "recipe.yaml").read_text() == "mine"
    (here / "recipe.yaml").unlink()
    assert run(*words, "-o", "recipe.yaml").exit_code == 0
    before = snapshot(here)
    for out in ("math/adapter_config.json", "swahili/recipe.yaml", "math"):
        outcome = run(*words, "-o", out, "--overwrite", exit_code=3)
        assert "overlaps the input" in outcome.stderr or "is a folder" in outcome.stderr
    texts = ["--task-texts", "texts.txt", "--language-texts", "texts.txt", "--base-model", "full-math"]
    for out in ("texts.txt", "full-math/config.json"):
        outcome = run(*words, *texts, "-o", out, "--overwrite", "--dry-run")
        assert (outcome.exit_code, "overlaps the input" in outcome.stderr) == (3, True), outcome.stderr
    assert snapshot(here) == before
    run(*words, "-o", "recipe.yaml", "--overwrite", exit_code=0)
    assert run("recipes", "validate", "recipe.yaml").exit_code == 0
    assert {path.name for path in here.iterdir()} == {name.split("/")[0] for name in before}
    assert run(*words, "-o", "~/recipe.yaml").exit_code == 0
    assert (here.parent / "home" / "recipe.yaml").is_file()


def test_an_export_replaces_only_what_export_wrote(here: Path, run: Run) -> None:
    """Neither a base in GGUF nor a thesis, whatever its name or the link to it; a link to an export is followed."""
    gguf = pytest.importorskip("gguf")
    words = ["export", "math", "--base-model", "small", "--overwrite", "-o"]
    sizes = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 4, "vocab_size": 16}
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4, **sizes}))
    writer = gguf.GGUFWriter("base.gguf", "llama")
    writer.add_string("general.name", "adapterswap.version is not a key here")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    Path("thesis.gguf").write_text("years of work: adapterswap.version")
    Path("empty.gguf").touch()
    Path("pieces").mkdir()
    shutil.copy("thesis.gguf", "pieces/layer-00.gguf")
    for name in ("base", "thesis"):
        Path(f"to-{name}.gguf").symlink_to(f"{name}.gguf")
    before = snapshot(here)
    for name in ("base.gguf", "thesis.gguf", "empty.gguf", "to-base.gguf", "to-thesis.gguf"):
        assert run(*words, name).exit_code == 3
        assert run(*words, name, "--dry-run").exit_code == 3
    assert run(*words, "pieces", "--pieces").exit_code == 3
    assert snapshot(here) == before
    assert run(*words, "out.gguf").exit_code == 0
    Path("to-out.gguf").symlink_to("out.gguf")
    Path(".out.gguf.0123456789ab.tmp").write_text("of a killed run")
    exported = Path("out.gguf").read_bytes()
    run(*words, "to-out.gguf", "--outtype", "f16", exit_code=0)
    assert Path("to-out.gguf").is_symlink()
    assert Path("out.gguf").read_bytes() != exported
    assert [path.name for path in here.glob(".*")] == []


def test_base_is_the_base_and_dot_slash_base_a_folder(here: Path, run: Run) -> None:
    words = ["compose", "-t", "math", "--num-layers", "4", "--dry-run", "--json", "-o", "out"]
    result = run(*words, "-l", "base")
    assert (result.exit_code, result.stderr) == (0, "")
    adapter(here / "base", tensors(seed=2))
    reset = run(*words, "-l", "base")
    assert "pass ./base for the folder" in reset.stderr
    assert json.loads(reset.stdout)["experts"] == {"math": "math"}
    for folder in ("./base", "base/", str(here / "base")):
        named = run(*words, "-l", folder)
        assert "unchanged base" not in named.stderr
        assert json.loads(named.stdout)["experts"] == {"math": "math", "language": "base"}
    swapped = run("compose", "-t", "base", "-l", "math", *words[3:])
    assert "pass ./base for the folder" in swapped.stderr
    assert json.loads(swapped.stdout)["experts"] == {"math": "math"}
    assert set(adapterswap.layer_swap("math", "base", num_layers=4).experts) == {"math"}
    for path in (Path("base"), "./base"):
        assert set(adapterswap.layer_swap("math", path, num_layers=4).experts) == {"math", "language"}
    refused = run("suggest", "-t", "math", "-l", "base", "--num-layers", "4")
    assert (refused.exit_code, "two experts" in refused.stderr) == (2, True)
    (here / "recipe.yaml").write_text("experts: {task: math, x: base}\nlanguage: x\nnum_layers: 4\n")
    named = run("compose", "recipe.yaml", "--dry-run", "--json", "-o", "out")
    assert json.loads(named.stdout)["experts"] == {"task": "math", "x": "base"}


KIND = OutputKind("record.json", lambda record: "ours" in record, lambda: ["record.json", "weights", "deep/*.json"])


def test_strangers_by_list_by_names_and_by_subtrees(tmp_path: Path) -> None:
    def have(**files: str) -> list[str]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for name, text in files.items():
            path = tmp_path / "out" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return KIND.strangers(tmp_path / "out")

    assert have(**{"record.json": '{"ours": 1}', "weights": "", "deep__a.json": "", "deep__b.txt": ""}) == [
        "deep/b.txt"
    ]
    assert have(**{"record.json": '{"ours": 1, "files": ["[x]*"]}', "[x]*": "", "xa": ""}) == ["record.json", "xa"]
    assert have(**{"record.json": "{}", "weights": ""}) == ["record.json", "weights"]
    assert have(**{"record.json": "[", "weights": ""}) == ["record.json", "weights"]
    assert have(**{"record.json": '{"ours": 1, "files": [1]}', "weights": ""}) == []
    assert have(weights="") == ["weights"]
    assert OutputKind(None, names=lambda: ["weights"]).strangers(tmp_path / "out") == []
    assert have(tree__a__b="", tree__c="", tr="") == ["tr", "tree/"]
    assert OutputKind(None, names=lambda: ["tree/a/**"]).strangers(tmp_path / "out") == ["tr", "tree/c"]


def test_a_stranger_that_appears_during_the_work_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for overwrite in (False, True):
        with KIND.folder(out, overwrite=overwrite) as folder:
            (folder / "record.json").write_text('{"ours": 1}')
    before = (out / "record.json").read_bytes()

    def write() -> None:
        with KIND.folder(out, overwrite=True) as folder:
            (folder / "record.json").write_text('{"ours": 2}')
            (out / "thesis").write_text("years of work")

    with refused(OutputError, "out_path"):
        write()
    assert (out / "record.json").read_bytes() == before
    assert {path.name for path in out.iterdir()} == {"record.json", "thesis"}


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "recipe.yaml"
    target.write_text("old")

    def fail() -> None:
        with FileKind(b"o").file(target, overwrite=True) as file:
            file.write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert snapshot(tmp_path).keys() == {"recipe.yaml"}
    assert target.read_text() == "old"
    with FileKind(b"o").file(target, overwrite=True) as file:
        file.write_text("new")
    assert target.read_text() == "new"


@pytest.mark.parametrize("seed", range(40))
def test_other_files_are_never_lost(seed: int, here: Path, run: Run) -> None:
    """Random folders of our files and other files, as targets of random commands, failing or not."""
    chance = random.Random(seed)
    assert run(*COMPOSE, "-o", "ours").exit_code == 0
    places = [here / "ours", here / "target", here / "ours" / "inner"]
    target = chance.choice(places)
    if chance.random() < 0.5 and not target.exists():
        shutil.copytree(here / "ours", target)
    stranger_names = ["thesis.tex", ".git/HEAD", "inner/adapter_config.json", "adapter_config.json.bak", "deep/er/x"]
    others: dict[Path, bytes] = {}
    for name in chance.sample(stranger_names, chance.randrange(3)):
        path = target / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(chance.randbytes(8))
    experts = [chance.choice(["math", "ours", "target", "linked", "alias"]) for _ in range(2)]
    (here / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (here / "linked" / name).symlink_to(chance.choice(places[:2]) / name)
    (here / "alias").symlink_to(chance.choice(places))
    out = chance.choice([target, here / "alias", here / "out"])
    mine = {"README.md", "adapter_config.json", "adapter_model.safetensors", "adapterswap.json"}
    for path in here.rglob("*"):
        ours = path.name in mine and path.parent in (here / "ours", here / "target")
        if path.is_file() and not path.is_symlink() and not ours:
            others[path] = path.read_bytes()
    # An input is never lost either, even if it is ours.
    inputs = {place.resolve() for name in experts for place in [here / name, *(here / name).glob("adapter_*")]}
    held = {
        path: path.read_bytes()
        for path in here.rglob("*")
        if path.is_file() and any(path.resolve().is_relative_to(one) for one in inputs)
    }
    links = {path: path.readlink() for path in here.rglob("*") if path.is_symlink()}
    command = chance.choice(["compose", "slice"])
    words = ["compose", "-t", experts[0], "-l", experts[1], *LAYERS]
    words = words if command == "compose" else ["slice", experts[0], "--layers", "0-1", "--num-layers", "4"]
    if command == "slice":
        held = {
            path: data for path, data in held.items() if path.resolve().is_relative_to((here / experts[0]).resolve())
        }
    options = ["--overwrite"] if chance.random() < 0.8 else []
    result = run(*words, "-o", str(out), *options)
    assert result.exit_code in (0, 3)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    for path, data in {**others, **held}.items():
        assert path.read_bytes() == data, (result.stdout, result.stderr)
    assert {path: path.readlink() for path in links} == links
    assert not any(path.name.endswith((".tmp", ".lock")) for path in here.rglob("*"))
