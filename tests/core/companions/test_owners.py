"""Whose companions a result takes: real tokenizers and generation settings, and what generation then does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_base
from peft import LoraConfig, PeftModel
from pico_models import trained
from refusals import refused
from transformers import AutoTokenizer, GenerationConfig

import adapterswap
from adapterswap.core.companions.generation import differing_settings, with_ids
from adapterswap.kit.errors import ArgumentError, CompositionError, UnsupportedError
from core.writing.vocabularies import resized, save_with_tokens, with_words

PLAIN = {"target_modules": ["q_proj", "v_proj"]}
ZONES = {"bottom": 1, "top": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama of 96 words whose texts end with w1, by its tokenizer, its config and its settings."""
    folder = with_words(tmp_path_factory.mktemp("base"))
    GenerationConfig(bos_token_id=0, eos_token_id=[1, 90], pad_token_id=2, do_sample=True, top_k=7).save_pretrained(
        folder
    )
    write(folder / "config.json", bos_token_id=0, eos_token_id=1)
    return folder


def write(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def expert(base: Path, folder: Path, seed: int, **special: str) -> Path:
    """An adapter whose tokenizer has other special tokens, such as `eos_token="w5"`."""
    save_with_tokens(base, folder, (), PLAIN, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    for role, token in special.items():
        setattr(tokenizer, role, token)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_merged_model_stops_at_the_experts_end(base: Path, tmp_path: Path) -> None:
    out = adapterswap.merge(expert(base, tmp_path / "x", 1, eos_token="w5", pad_token="w6"), out_path=tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).eos_token == "w5"
    settings, config = read(out / "generation_config.json"), read(out / "config.json")
    assert (settings["eos_token_id"], settings["pad_token_id"], settings["top_k"]) == ([5, 90], 6, 7)
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (5, 6, 0)
    model = load_base(out)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[5] = 1.0
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[5] = model.model(torch.tensor([[9, 9]])).last_hidden_state[0, -1]  # so that w5 comes next
    assert model.generate(torch.tensor([[9, 9]]), do_sample=False, max_new_tokens=8).tolist() == [[9, 9, 5]]


def test_the_bases_bytes_stay_where_tokenizers_do_the_same(base: Path, tmp_path: Path) -> None:
    out = adapterswap.merge(expert(base, tmp_path / "x", 1), out_path=tmp_path / "out")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert set(read(out / "adapterswap.json")["companions"].values()) == {"base"}


def test_experts_that_differ_are_reported_and_the_task_decides(
    base: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    task, language = expert(base, tmp_path / "math", 1, eos_token="w5"), expert(base, tmp_path / "swahili", 2)
    write(language / "preprocessor_config.json", size=[1, 2], processor_class="A")
    options = ["-t", task, "-l", language, "--bottom", 1, "--top", 1]
    shown = run("compose", *options, "-o", tmp_path / "out", exit_code=0)
    assert "tokenizer: math's (swahili's and the base's differ: eos" in shown.stderr
    assert read(tmp_path / "out" / "adapterswap.json")["companions"] == {
        "tokenizer": "math", "chat_template": "math", "processor": "swahili",
    }  # fmt: skip
    assert read(tmp_path / "out" / "preprocessor_config.json")["size"] == [1, 2]
    assert adapterswap.verify(tmp_path / "out", {"math": task, "swahili": language}, base_model=base).equal
    write(tmp_path / "out" / "preprocessor_config.json", size=[3, 4])
    differing = adapterswap.verify(tmp_path / "out", {"math": task, "swahili": language}, base_model=base).differing
    assert differing == ("preprocessor_config.json",)


def test_pooling_files_are_compared_and_copied(base: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    experts = [expert(base, tmp_path / name, seed) for seed, name in ((1, "math"), (2, "swahili"))]
    for place, mean in zip(experts, (True, False), strict=True):
        (place / "1_Pooling").mkdir()
        write(place / "1_Pooling" / "config.json", pooling_mode_mean_tokens=mean)
        write(place / "modules.json", modules=["pooling"])
    shown = run("compose", "-t", experts[0], "-l", experts[1], "--bottom", 1, "--top", 1, "-o", tmp_path / "out")
    assert "pooling: math's (swahili's differs: 1_Pooling/config.json: pooling_mode_mean_tokens)" in shown.stderr
    assert read(tmp_path / "out" / "1_Pooling" / "config.json") == {"pooling_mode_mean_tokens": True}


def test_extract_keeps_the_tokenizer(base: Path, tmp_path: Path) -> None:
    full = save_with_tokens(base, tmp_path / "full", (), None, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = "w5"
    tokenizer.save_pretrained(full)
    write(full / "config.json", bos_token_id=0, eos_token_id=1)
    out = tmp_path / "out"
    adapterswap.extract(full, base, out, rank=2)
    assert AutoTokenizer.from_pretrained(out).eos_token == "w5"
    assert read(out / "adapterswap.json")["companions"]["tokenizer"] == "full"
    assert adapterswap.verify(out, {"full": full}, base_model=base).equal
    write(out / "tokenizer_config.json", eos_token="w1")
    assert adapterswap.verify(out, {"full": full}, base_model=base).differing == ("tokenizer_config.json",)
    grown = save_with_tokens(base, tmp_path / "grown", ("<a>",), None, seed=3)
    write(grown / "config.json", bos_token_id=0, eos_token_id=1)
    adapterswap.extract(grown, base, tmp_path / "without", rank=2)
    assert not list((tmp_path / "without").glob("tokenizer*"))  # the base has no row for its last token


def test_verify_reads_the_files_of_somebodys_merge(base: Path, tmp_path: Path) -> None:
    adapter = expert(base, tmp_path / "x", 1, eos_token="w5")
    model = PeftModel.from_pretrained(load_base(base), adapter).merge_and_unload()
    model.save_pretrained(tmp_path / "theirs")
    for file in (*adapter.glob("tokenizer*"), *adapter.glob("*.jinja")):
        shutil.copy(file, tmp_path / "theirs")
    shutil.copy(base / "generation_config.json", tmp_path / "theirs")
    write(tmp_path / "theirs" / "generation_config.json", eos_token_id=[5, 90])
    assert adapterswap.verify(tmp_path / "theirs", {"x": adapter}, base_model=base).equal
    for file in base.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "theirs")
    verified = adapterswap.verify(tmp_path / "theirs", {"x": adapter}, base_model=base)
    assert verified.equal
    assert any("eos" in line for line in verified.notes)
    write(tmp_path / "theirs" / "generation_config.json", eos_token_id=77)
    verified = adapterswap.verify(tmp_path / "theirs", {"x": adapter}, base_model=base)
    assert verified.differing == ("generation",)
    assert "eos_token_id" in verified.answers[-1]


def shrunk(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """An adapter of the base without its last six tokens, as PEFT saves it."""
    settings: dict[str, Any] = {"r": 4, "task_type": "CAUSAL_LM", **PLAIN, **options}
    trained(resized(base, 90), LoraConfig(**settings), folder, seed=seed, save_embedding_layers=True)
    return folder


def test_shrunk_vocabularies(base: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    one, two = (shrunk(base, tmp_path / f"s{seed}", seed) for seed in (1, 2))
    plan = adapterswap.layer_swap(one, two, base_model=base, **ZONES)
    assert any("call model.resize_token_embeddings(90)" in note for note in plan.notes)
    out = plan.write(tmp_path / "out")
    PeftModel.from_pretrained(resized(base, 90), out)
    merged = adapterswap.merge(one, base, out_path=tmp_path / "merged")
    assert load_base(merged).config.vocab_size == 90
    shown = run("merge", one, "--base-model", base, "-o", tmp_path / "again", exit_code=0)
    assert "shrinks from 96 to 90 rows" in shown.stderr
    assert "resize_token_embeddings" not in shown.stderr
    factors = shrunk(base, tmp_path / "f", 4, target_modules=["q_proj", "lm_head"])
    with refused(UnsupportedError):
        adapterswap.merge(factors, base, out_path=tmp_path / "no")
    plain = expert(base, tmp_path / "plain", 3)
    for pair in ((one, plain), (plain, one)):
        with refused(UnsupportedError, parameter="outside"):
            adapterswap.layer_swap(*pair, base_model=base, **ZONES)


@pytest.mark.parametrize(
    ("current", "expected"),
    [(1, 5), ([1], [5]), ([1, 90], [5, 90]), ([90], [5, 90]), (90, [5, 90]), ([5, 1], [5, 1]), (None, 5)],
)
def test_the_end_follows_the_tokenizer(current: Any, expected: Any) -> None:
    assert with_ids({"eos_token_id": current}, {"eos_token_id": 5}, {"eos_token_id": 1})["eos_token_id"] == expected


def test_settings_differ_by_what_they_do() -> None:
    one = {"eos_token_id": [1, 2], "top_k": None, "transformers_version": "4.46.0"}
    assert differing_settings(one, {"eos_token_id": [2, 1], "transformers_version": "5.0.0"}) == ()
    assert differing_settings(one, {"eos_token_id": 1, "top_k": 5}) == ("eos_token_id", "top_k")


def test_the_functions_take_owners_by_keyword(base: Path, tmp_path: Path) -> None:
    """A side, an expert's name or `base`, in each function of two sides; and in `merge`, of a plan or an adapter."""
    task, language = expert(base, tmp_path / "math", 1, eos_token="w5"), expert(base, tmp_path / "swahili", 2)
    for owner, chosen in (("language", "swahili"), ("swahili", "swahili"), ("task", "math"), ("base", "base")):
        plans = [
            adapterswap.layer_swap(task, language, **ZONES, tokenizer=owner),
            adapterswap.soup(task, language, tokenizer=owner),
            adapterswap.slerp(task, language, tokenizer=owner),
            adapterswap.task_arithmetic(task, language, tokenizer=owner),
            adapterswap.ties(task, language, density=0.5, tokenizer=owner),
            adapterswap.dare(task, language, density=0.5, tokenizer=owner),
        ]
        assert {plan.composition.tokenizer for plan in plans} == {chosen}
        assert {plan.companions.record["tokenizer"] for plan in plans} == {chosen}
    plan = adapterswap.layer_swap(task, language, **ZONES)
    ends = {None: "w5", "swahili": "w1", "base": "w1"}
    for owner, end in ends.items():
        for number, out in enumerate(
            (
                adapterswap.merge(plan, out_path=tmp_path / f"{owner}-0", tokenizer=owner),
                plan.merge(tmp_path / f"{owner}-1", tokenizer=owner),
            )
        ):
            assert AutoTokenizer.from_pretrained(out).eos_token == end, number
            assert read(out / "adapterswap.json")["composition"].get("tokenizer") == owner
            assert adapterswap.verify(out, {"math": task, "swahili": language}, base_model=base).equal
    alone = adapterswap.merge(task, out_path=tmp_path / "alone", tokenizer="base")
    assert AutoTokenizer.from_pretrained(alone).eos_token == "w1"
    with refused(ArgumentError, "tokenizer"):
        adapterswap.merge(plan, out_path=tmp_path / "x", tokenizer="nobody")
    with refused(ArgumentError, "tokenizer"):
        adapterswap.merge(plan, out_path=tmp_path / "x", tokenizer=3)  # type: ignore[arg-type]
    with refused(CompositionError, "config_from"):
        adapterswap.merge(plan, out_path=tmp_path / "x", config_from="math")


def test_where_a_model_runs_the_line_is_shown_as_well(base: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    """In a plan's and a live composer's `repr`, in a notebook, and at the start of a server and of the studio."""
    from adapterswap.experiments.studio.workspace import Workspace

    experts = {
        "math": expert(base, tmp_path / "math", 1, eos_token="w5"),
        "swahili": expert(base, tmp_path / "swahili", 2),
    }
    line = "tokenizer: math's (swahili's"
    plan = adapterswap.layer_swap(experts["math"], experts["swahili"], **ZONES)
    assert line in repr(plan)
    assert line in plan._repr_html_().replace("&#x27;", "'")
    composer = adapterswap.LiveComposer.from_experts(load_base(base), experts)
    assert line not in repr(composer)
    with composer.use("math+swahili@bottom=1,top=1"):
        assert line in repr(composer)
    served = run("serve", "--base-model", base, "--experts", tmp_path, "--dry-run")
    assert served.stderr.count("the base's (math's differs: eos); the engine uses the base's") == 1, served.stderr
    assert "has another tokenizer" not in served.stderr
    workspace = Workspace.open(str(base), {name: str(place) for name, place in experts.items()}, device="cpu")
    assert [note.partition(" (")[0] for note in workspace.notes] == ["tokenizer: math's"]
    (experts["math"] / "tokenizer_config.json").write_text("{")
    assert "layer_swap" in repr(adapterswap.layer_swap(experts["math"], experts["swahili"], **ZONES))


def test_comparing_adapters_names_what_delta_w_does_not_show(
    base: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    one, other = expert(base, tmp_path / "math", 1, eos_token="w5"), expert(base, tmp_path / "swahili", 2)
    assert adapterswap.diff(one, one).remarks == ()
    (other / "chat_template.jinja").write_text("other {{ messages[0].content }}")
    (one / "chat_template.jinja").write_text("one {{ messages[0].content }}")
    shutil.copytree(base, tmp_path / "base")
    write(tmp_path / "base" / "config.json", rms_norm_eps=0.01)
    write(other / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    remarks = adapterswap.diff(one, other).remarks
    assert remarks[0] == f"the adapters name different bases, {base} and {tmp_path / 'base'}"
    assert remarks[1].startswith("the configs of their bases compute differently: rms_norm_eps is ")
    assert remarks[2:] == ("the adapters' tokenizers differ: eos", "the adapters' chat templates differ")
    assert "Warning: the adapters' chat templates differ" in run("diff", one, other, exit_code=0).stderr
    (other / "chat_template.jinja").unlink()
    (other / "chat_template.jinja").symlink_to("/etc/passwd")
    assert any("chat templates were not compared" in line for line in adapterswap.diff(one, other).remarks)


def test_inspecting_names_what_stands_beside_the_weights(base: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    folder = expert(base, tmp_path / "math", 1)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    write(folder / "preprocessor_config.json", size=[1, 2])
    (folder / "tokenization_math.py").write_text("raise SystemExit")
    shown = json.loads(run("inspect", folder, "--json", exit_code=0).stdout)["companions"]
    assert shown == {
        "tokenizer": ["tokenizer.json", "tokenizer_config.json"], "chat_template": ["default", "tool_use"],
        "processor": ["preprocessor_config.json"], "code": ["tokenization_math.py"],
    }  # fmt: skip
    model = run("inspect", base, exit_code=0).stdout
    assert "generation settings: " in model
    assert "eos_token_id" in model.partition("generation settings: ")[2]
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to("/dev/zero")
    (unreadable,) = adapterswap.inspect(folder).companions["unreadable"]
    assert "links to /dev/zero" in unreadable


def test_settings_of_generation_that_say_nothing_are_equal() -> None:
    """transformers 5 writes what is off, earlier versions leave it out; what is odd is compared all the same."""
    assert differing_settings({"output_scores": False, "top_k": None}, {"use_cache": None}) == ()
    assert differing_settings({"use_cache": False, "eos_token_id": [[1]]}, {"eos_token_id": "x"}) == (
        "eos_token_id", "use_cache",
    )  # fmt: skip
