"""Experts with added tokens, against weights that PEFT merges, transplanted row by row."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_base
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import adapterswap
from adapterswap.kit.errors import BaseModelError, CompositionError, ExpertError, UnsupportedError

from .vocabularies import (
    ends_in_peft,
    in_peft,
    merged_by_peft,
    plan_of,
    resized,
    row_by_row,
    save_with_tokens,
    with_words,
)

LAYERS, SIZE = 4, 96
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
TWO = ("<a>", "<aa>")
FACTORS = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}

# What PEFT is asked for; and the tokens that are added first.
EXPERTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "both": (BOTH, ()),
    "both+2": (BOTH, TWO),
    "both+3": (BOTH, (*TWO, "<a3>")),
    "embedding+2": ({"modules_to_save": ["embed_tokens"]}, TWO),  # and the head, as PEFT saves it by itself
    "frozen+2": ({}, TWO),  # likewise both
    "lora": (FACTORS, ()),
    "lora+2": (FACTORS, TWO),
    "lora+3": (FACTORS, (*TWO, "<a3>")),
    "lora embedding+2": ({"target_modules": ["q_proj", "embed_tokens"]}, TWO),
    "lora head+2": ({"target_modules": ["q_proj", "lm_head"]}, TWO),
    "lora together+2": ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, TWO),
    "bare+2": (FACTORS, TWO),  # without copies of the base's weights
    "dora+2": ({**FACTORS, "use_dora": True}, TWO),
    "dora embedding+2": ({"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}, TWO),
    "other+1": (BOTH, ("<b>",)),
    "embedding": ({"modules_to_save": ["embed_tokens"]}, ()),
    "together": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, ()),
    "together+2": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, TWO),
}
ENDS = ("model.embed_tokens.weight", "lm_head.weight")
SHARES = {"average": {"t": 0.5, "l": 0.5}, "task": {"t": 1.0, "l": 0.0}, "language": {"t": 0.0, "l": 1.0}}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """`bases(tied)`: a pico Llama with a tokenizer and a chat template."""
    return cache(lambda tied: with_words(tmp_path_factory.mktemp("base"), tied=tied))


@pytest.fixture(scope="module")
def trained(bases: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`trained("both+2", tied=True)`: a random expert, as PEFT saves it, with its tokenizer beside it."""
    made: dict[tuple[str, bool], Path] = {}

    def make(name: str, *, tied: bool = False) -> Path:
        if (name, tied) not in made:
            options, tokens = EXPERTS[name]
            copies = False if name.startswith("bare") else "auto"
            options = {"target_modules": ["q_proj", "v_proj"], **options}
            folder = tmp_path_factory.mktemp("expert")
            made[name, tied] = save_with_tokens(bases(tied), folder, tokens, options, seed=len(made), copies=copies)
        return made[name, tied]

    return make


def size_of(*names: str) -> int:
    return SIZE + max(len(EXPERTS[name][1]) for name in names)


def answers(model: Any, size: int) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20) * 7 % size).logits


def transplant(base: Path, task: Path, language: Path, sizes: tuple[int, int], outside: str) -> Any:
    """Composed by hand: layers 0 and 3 of the language, rows that both have by the rule, others as they are."""
    both = {
        side: merged_by_peft(base, adapter, size)
        for side, adapter, size in zip("tl", (task, language), sizes, strict=True)
    }
    new = {side: {*range(SIZE, size)} for side, size in zip("tl", sizes, strict=True)}
    weights = {}
    for key, own in load_base(base).state_dict().items():
        theirs = {side: state[key] for side, state in both.items()}
        if ".layers." in key:
            weights[key] = theirs["l" if key.split(".")[2] in ("0", "3") else "t"]
        elif key in ENDS:
            weights[key] = row_by_row(theirs, new, SHARES[outside], own)
        else:
            weights[key] = sum(SHARES[outside][side] * tensor for side, tensor in theirs.items())
    config = AutoConfig.from_pretrained(base, tie_word_embeddings=False, vocab_size=max(sizes))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(weights)
    return model


UNTIED = [
    ("both+2", "both+2"), ("both+2", "both+3"), ("both+3", "plain"), ("plain", "both+2"), ("both", "both+2"),
    ("embedding+2", "plain"), ("frozen+2", "both+2"), ("frozen+2", "plain"),
]  # fmt: skip
TIED = [
    ("embedding", "plain"), ("together", "plain"), ("together", "embedding"), ("together+2", "plain"),
    ("together", "together+2"), ("together", "embedding+2"), ("plain", "embedding+2"), ("both", "plain"),
    ("frozen+2", "together"),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outside", ["average", "task", "language"])
@pytest.mark.parametrize(
    ("task", "language", "tied"), [(*pair, False) for pair in UNTIED] + [(*pair, True) for pair in TIED]
)
def test_the_result_is_the_transplant(
    task: str, language: str, outside: Any, tied: bool, trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    base, one, two = bases(tied), trained(task, tied=tied), trained(language, tied=tied)
    sizes = size_of(task), size_of(language)
    try:
        plan = plan_of(one, two, base, outside=outside)
    except CompositionError:  # the head or the embedding goes to an expert that has none, and new tokens have no row
        assert outside != "average"
        assert size_of(task if outside == "task" else language) < max(sizes)
        return
    expected = answers(transplant(base, one, two, sizes, outside), max(sizes))
    out = plan.write(tmp_path / "out")
    close(answers(in_peft(base, out, max(sizes)), max(sizes)), expected, depth=LAYERS)
    merged = load_base(plan.merge(tmp_path / "merged"))
    assert merged.config.vocab_size == max(sizes)
    close(answers(merged, max(sizes)), expected, depth=LAYERS)
    tokens = {token for name in (task, language) for token in EXPERTS[name][1]}
    for folder in (out, tmp_path / "merged"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == SIZE + len(tokens)
        assert tokenizer.chat_template is not None
        assert adapterswap.verify(folder, {"t": one, "l": two}, base_model=base).equal


def test_inspect_shows_owners_of_new_rows(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path, run: Callable[..., Any]
) -> None:
    plan = plan_of(trained("both+2"), trained("plain"), bases(False))
    assert "call model.resize_token_embeddings(98)" in plan.notes[-1]
    before = gc.get_threshold()
    shown = run("inspect", plan.write(tmp_path / "out"), "--json")
    assert gc.get_threshold() == before  # which the command changes while it runs
    saved = {module["name"]: module for module in json.loads(shown.stdout)["saved"]}
    assert saved["lm_head"]["rows"] == {"0-95": {"t": 0.5}, "96-97": "t"}


def test_the_live_composer_does_not_let_peft_change_the_base(trained: Make, bases: Callable[[bool], Path]) -> None:
    for name in ("frozen+2", "both+2"):
        with refused(UnsupportedError, match="overwrite the base's own"):
            adapterswap.LiveComposer.from_experts(load_base(bases(False)), {"t": trained(name)})


def test_a_clash_names_the_ids_and_the_tokens(trained: Make, bases: Callable[[bool], Path]) -> None:
    with refused(ExpertError, match=r"96 is '<a>' and '<b>'"):
        plan_of(trained("both+2"), trained("other+1"), bases(False))


def test_new_rows_need_an_owner(trained: Make, bases: Callable[[bool], Path]) -> None:
    with refused(CompositionError, match="to the base, which has no row for the new tokens of t"):
        plan_of(trained("both+2"), trained("plain"), bases(False), outside="language")


def test_the_bases_rows_are_needed_for_an_average_with_them(trained: Make) -> None:
    with refused(BaseModelError, parameter="base_model"):
        plan_of(trained("both+2"), trained("plain"), None)


def test_without_a_tokenizer_two_owners_of_a_row_are_refused(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    for name in ("both+2", "frozen+2"):
        shutil.copytree(trained(name), tmp_path / name)
        for path in (tmp_path / name).glob("tokenizer*"):
            path.unlink()
    with refused(ExpertError, match="no tokenizer.json"):
        plan_of(tmp_path / "both+2", tmp_path / "frozen+2", bases(False))
    plan = plan_of(tmp_path / "both+2", trained("plain"), bases(False))  # one owner: its rows are known by their place
    assert [rows.made_of for rows in plan.slots["lm_head"].spans if rows.is_new] == ["t"]


def test_lora_on_a_resized_embedding_is_copied_and_not_blended(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Half of ΔW would make half of a new token's row."""
    base, lora = bases(False), trained("lora+2")
    with refused(UnsupportedError):
        plan_of(lora, trained("plain"), base).write(tmp_path / "blend")
    out = plan_of(lora, trained("plain"), base, outside="task").write(tmp_path / "out")
    expected = transplant(base, lora, trained("plain"), (98, 96), "task")
    close(answers(in_peft(base, out, 98), 98), answers(expected, 98), depth=LAYERS)
    merged = load_base(adapterswap.merge(out, base, out_path=tmp_path / "merged"))
    close(answers(merged, 98), answers(expected, 98), depth=LAYERS)


FACTORS_UNTIED = [
    ("lora+2", "plain"), ("plain", "lora+2"), ("lora+2", "lora"), ("lora", "lora+2"), ("lora+2", "lora+2"),
    ("lora+2", "lora+3"), ("lora+2", "both"), ("both+2", "lora"), ("lora+2", "both+2"), ("both+2", "lora+3"),
]  # fmt: skip
FACTORS_TIED = [
    ("lora embedding+2", "plain"), ("lora head+2", "plain"), ("lora together+2", "lora together+2"),
    ("lora+2", "plain"), ("plain", "lora+2"),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outside", ["average", "task", "language"])
@pytest.mark.parametrize(
    ("task", "language", "tied"),
    [(*pair, False) for pair in FACTORS_UNTIED] + [(*pair, True) for pair in FACTORS_TIED],
)
def test_lora_on_resized_embeddings_is_merged_by_rows(
    task: str, language: str, outside: Any, tied: bool, trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    """The base's rows follow the rule, W + Σ c·(W_i - W); a new row is its owner's, from the copy that it carries."""
    base, names = bases(tied), {"t": task, "l": language}
    folders = {side: trained(name, tied=tied) for side, name in names.items()}
    own = {side: ends_in_peft(base, folders[side], size_of(name)) for side, name in names.items()}
    new = {side: {*range(SIZE, size_of(name))} for side, name in names.items()}
    try:
        plan = plan_of(folders["t"], folders["l"], base, outside=outside)
    except CompositionError:  # the new tokens would have no row
        assert SHARES[outside]["t" if task == "plain" else "l"] == 1
        return
    merged, before = load_base(plan.merge(tmp_path / "merged")), load_base(base).state_dict()
    assert merged.config.vocab_size == size_of(task, language)
    for key in ENDS:
        theirs = {side: state[key] for side, state in own.items()}
        close(merged.state_dict()[key], row_by_row(theirs, new, SHARES[outside], before[key]), name=key)
    assert adapterswap.verify(tmp_path / "merged", folders, base_model=base).equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_new_rows_in_half_precision(
    dtype: torch.dtype, trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    """A new row has its owner's bits, and a computed one is rounded once."""
    base = shutil.copytree(bases(False), tmp_path / "base")
    load_base(bases(False)).to(dtype).save_pretrained(base)
    folders = {name: shutil.copytree(trained(name), tmp_path / name) for name in ("both+2", "lora+2", "plain")}
    own = {}
    for name, folder in folders.items():
        path = folder / "adapter_model.safetensors"
        own[name] = {key.removeprefix("base_model.model."): t.to(dtype) for key, t in load_file(path).items()}
        save_file({f"base_model.model.{key}": tensor for key, tensor in own[name].items()}, path)
    before = load_file(base / "model.safetensors")
    plan = plan_of(folders["both+2"], folders["plain"], base)
    written = load_file(plan.write(tmp_path / "out") / "adapter_model.safetensors")
    merged = load_file(plan.merge(tmp_path / "merged") / "model.safetensors")
    for key in ENDS:
        shared = ((own["both+2"][key][:SIZE].float() + before[key].float()) / 2).to(dtype)
        expected = torch.cat([shared, own["both+2"][key][SIZE:]])
        for result in (written[f"base_model.model.{key}"], merged[key]):
            assert result.dtype == dtype
            assert torch.equal(result, expected)
    plan = plan_of(folders["lora+2"], folders["plain"], base)
    merged = load_file(plan.merge(tmp_path / "merged lora") / "model.safetensors")
    head = {part: own["lora+2"][f"lm_head.{part}.weight"].double() for part in ("lora_A", "lora_B", "base_layer")}
    scale = torch.where(torch.arange(SIZE + 2) < SIZE, 0.5, 1.0)[:, None] * 8 / 4**0.5
    expected = head["base_layer"] + scale * (head["lora_B"] @ head["lora_A"])
    assert merged["lm_head.weight"].dtype == dtype
    close(merged["lm_head.weight"].double(), expected, dtype=dtype)


def test_live_and_gguf_refuse_lora_on_a_resized_embedding(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    base, lora = bases(False), trained("lora+2")
    with refused(ExpertError, "expert", match="lm_head is 98×32"):
        adapterswap.LiveComposer.from_experts(load_base(base), {"t": lora})
    with refused(ExpertError, "expert"):  # its new rows are other ones
        adapterswap.LiveComposer.from_experts(resized(base, 98), {"t": lora})
    with refused(ExpertError, "base_model", match="lm_head is 98×32"):
        plan_of(lora, trained("plain"), base, outside="task").export(tmp_path / "out.gguf")
    with refused(UnsupportedError, match="one ΔW for all rows"):
        plan_of(lora, trained("plain"), base).export(tmp_path / "out.gguf")


def test_one_expert_with_lora_on_a_resized_embedding_merges_as_in_peft(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    for number, (name, tied) in enumerate([("lora+2", False), ("lora+2", True), ("lora embedding+2", True)]):
        base, expert = bases(tied), trained(name, tied=tied)
        merged = load_base(adapterswap.merge(expert, base, out_path=tmp_path / f"{number}"))
        close(answers(merged, 98), answers(in_peft(base, expert, 98), 98), depth=LAYERS)


def test_rows_that_no_copy_holds_are_refused(trained: Make, bases: Callable[[bool], Path], tmp_path: Path) -> None:
    with refused(BaseModelError, "base_model"):  # PEFT would draw them at random
        adapterswap.merge(trained("bare+2"), bases(False), out_path=tmp_path / "merged")
    with refused(UnsupportedError):  # the head's rows
        adapterswap.merge(trained("lora embedding+2"), bases(False), out_path=tmp_path / "merged")
    resized(bases(False), 98).save_pretrained(tmp_path / "resized")
    merged = load_base(adapterswap.merge(trained("bare+2"), tmp_path / "resized", out_path=tmp_path / "merged"))
    close(answers(merged, 98), answers(in_peft(tmp_path / "resized", trained("bare+2")), 98), depth=LAYERS)


def test_a_method_that_is_no_sum_needs_an_adapter_first(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    one, base = trained("lora+2"), bases(False)
    with refused(UnsupportedError):
        adapterswap.ties(one, trained("lora"), density=0.5, base_model=str(base))
    with refused(UnsupportedError, "method"):
        adapterswap.ties(one, one, density=0.5, base_model=str(base)).merge(tmp_path / "merged")


def test_dora_on_a_resized_embedding_is_merged_if_one_expert_owns_it(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    """The embedding's norms run along the vocabulary, so PEFT needs the whole of the copy."""
    for tied in (False, True):
        base, dora, plain = bases(tied), trained("dora+2", tied=tied), trained("plain", tied=tied)
        merged = load_base(adapterswap.merge(dora, base, out_path=tmp_path / f"alone {tied}"))
        assert (merged.config.vocab_size, merged.config.tie_word_embeddings) == (98, False)
        close(answers(merged, 98), answers(in_peft(base, dora, 98), 98), depth=LAYERS)
        plan = plan_of(dora, plain, base, outside="task")
        result = load_base(plan.merge(tmp_path / f"swap {tied}"))
        weights = merged.state_dict() | {
            key: value
            for key, value in merged_by_peft(base, plain).items()
            if ".layers.0." in key or ".layers.3." in key
        }
        close(result.state_dict(), weights)
        assert adapterswap.verify(tmp_path / f"swap {tied}", {"t": dora, "l": plain}, base_model=base).equal
        with refused(UnsupportedError):
            plan_of(dora, plain, base)
    embedding = trained("dora embedding+2", tied=True)
    merged = load_base(adapterswap.merge(embedding, bases(True), out_path=tmp_path / "embedding"))
    close(answers(merged, 98), answers(in_peft(bases(True), embedding, 98), 98), depth=LAYERS)
    bare = without_copies(trained("dora+2"), tmp_path / "bare")
    with refused(BaseModelError, "base_model"):
        adapterswap.merge(bare, bases(False), out_path=tmp_path / "merged")


def without_copies(expert: Path, out: Path) -> Path:
    """The expert without its copies of the base's weights."""
    shutil.copytree(expert, out)
    path = out / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "base_layer" not in key}, path)
    return out


def test_a_resized_embedding_without_its_head_is_refused(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    """PEFT would draw the head's new rows at random."""
    shutil.copytree(trained("embedding+2"), tmp_path / "torn")
    path = tmp_path / "torn" / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "lm_head" not in key}, path)
    with refused(UnsupportedError, match="would have 98 rows"):
        plan_of(tmp_path / "torn", trained("both"), bases(False))
    with refused(UnsupportedError, match="would have 98 rows"):
        adapterswap.merge(tmp_path / "torn", bases(False), out_path=tmp_path / "merged")


def test_another_chat_template_is_reported_and_tokens_without_rows_are_not_followed(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path, run: Callable[..., Any]
) -> None:
    base = bases(False)
    shutil.copytree(trained("plain"), tmp_path / "chatty")
    (tmp_path / "chatty" / "chat_template.jinja").write_text("{{ messages }}")
    zones = ("--bottom", 1, "--top", 1)
    result = run(
        "compose", "-t", tmp_path / "chatty", "-l", trained("plain"), "-o", tmp_path / "out", *zones, exit_code=0
    )
    assert "tokenizer: chatty's (" in result.stderr
    assert "differ: chat template)" in result.stderr
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    shutil.copyfile(trained("both+2") / "tokenizer.json", tmp_path / "chatty" / "tokenizer.json")
    result = run("merge", tmp_path / "chatty", "-o", tmp_path / "merged", exit_code=0)
    assert "tokenizer: the base's (chatty's differs: " in result.stderr
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("first", ["two", "third"])
def test_added_tokens_of_both_experts_are_united(
    first: str, trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    """One has new tokens that the other lacks, and the other way round, under different ids."""
    base, two = bases(False), trained("both+2")
    third = shutil.copytree(trained("both+3"), tmp_path / "third")
    content = json.loads((third / "tokenizer.json").read_text())
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["id"] == SIZE + 2]
    content["model"]["vocab"]["<a3>"] = SIZE + 2  # else the library would give it the first free id
    (third / "tokenizer.json").write_text(json.dumps(content))
    folders = {"two": two, "third": third}
    one, other = folders.values() if first == "two" else reversed(folders.values())
    plan = plan_of(one, other, base)
    owner = "t" if first == "two" else "l"
    rows = {range(row.start, row.stop): row.made_of for row in plan.slots["lm_head"].spans}
    assert rows == {
        range(SIZE): {"t": 0.5, "l": 0.5}, range(SIZE, SIZE + 2): owner, range(SIZE + 2, SIZE + 3): "tl".strip(owner),
    }  # fmt: skip
    if first == "third":  # whose tokenizer has a gap that the library does not fill
        with refused(UnsupportedError, match="gaps"):
            plan.write(tmp_path / "out")
        return
    out = plan.write(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("w7 <a> <aa> <a3>")["input_ids"] == [7, SIZE, SIZE + 1, SIZE + 2]
    ours, theirs, composed = (
        merged_by_peft(base, folder, size) for folder, size in ((two, 98), (third, 99), (out, 99))
    )
    for key in ENDS:
        average = (ours[key][:SIZE] + theirs[key][:SIZE]) / 2
        close(composed[key], torch.cat([average, ours[key][SIZE:], theirs[key][SIZE + 2 :]]))
