"""Full checkpoints with added tokens or other numbers of rows, against weights computed row by row with torch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_like, weights
from refusals import refused
from tolerances import close
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import adapterswap
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.plan import Plan
from adapterswap.kit.errors import AdapterswapError, CompositionError, ExpertError, UnsupportedError
from core.matrix.architectures import ARCHITECTURES
from core.merging.conftest import loaded
from core.writing.vocabularies import ends_in_peft, merged_by_peft, row_by_row, save_with_tokens, with_words

LAYERS, SIZE = 3, 96
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TWO = ("<a>", "<aa>")

# The added tokens and the number of rows of full checkpoints; `padded` has rows without tokens.
FULL: dict[str, tuple[tuple[str, ...], int]] = {
    "plain": ((), SIZE),
    "plain2": ((), SIZE),
    "two": (TWO, 98),
    "other two": (TWO, 98),
    "three": ((*TWO, "<a3>"), 99),
    "padded": (TWO, 104),
    "wide": ((), 104),
    "b": (("<b>",), 97),
}
# The options and the added tokens of adapters.
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
ADAPTERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "lora": ({}, ()),
    "lora ends": ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, ()),
    "lora ends+2": ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, TWO),
    "saved+2": (BOTH, TWO),
    "saved+3": (BOTH, (*TWO, "<a3>")),
    "saved": (BOTH, ()),
    "together+2": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, TWO),
    "dora ends+2": ({"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True}, TWO),
    "dora ends": ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, ()),
}
State = dict[str, torch.Tensor]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`base_of(tied=True, rows=104)`: a pico Llama with a tokenizer of 96 tokens and a chat template."""

    @cache
    def create(tied: bool, rows: int) -> Path:
        return with_words(tmp_path_factory.mktemp("base"), tied=tied, rows=rows, layers=LAYERS)

    return lambda *, tied=False, rows=SIZE: create(tied, rows)


@pytest.fixture(scope="module")
def expert_of(base_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`expert_of("two", tied=True)`: a full fine-tune, or an adapter as PEFT saves it, with its tokenizer."""
    made: dict[tuple[str, bool, int], Path] = {}

    def make(name: str, *, tied: bool = False, rows: int = SIZE) -> Path:
        if (name, tied, rows) not in made:
            made[name, tied, rows] = folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            base = base_of(tied=tied, rows=rows)
            tokens, size = FULL[name] if name in FULL else (ADAPTERS[name][1], SIZE + len(ADAPTERS[name][1]))
            options = None if name in FULL else {"target_modules": ["q_proj"], **ADAPTERS[name][0]}
            save_with_tokens(base, folder, tokens, options, size=size, seed=len(made))
        return made[name, tied, rows]

    return make


def tokens_in(name: str) -> set[int]:
    """The ids of an expert's new tokens, which all begin behind the base's."""
    added = (FULL[name] if name in FULL else ADAPTERS[name][::-1])[0]
    return {SIZE + i for i in range(len(added))}


def plan_of(task: Path, language: Path, base: Path | None, **options: Any) -> Plan:
    zones = {} if "method" in options else {"bottom": 1, "top": 1}
    composition = Composition(task="t", language="l", base_model=base and str(base), **zones, **options)
    return adapterswap.compose(composition, {"t": task, "l": language})


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20) * 7 % model.config.vocab_size).logits


def model_of(base: Path, state: Mapping[str, torch.Tensor], *, tied: bool) -> Any:
    config = AutoConfig.from_pretrained(base, tie_word_embeddings=tied, vocab_size=len(state[EMBEDDING]))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(dict(state), strict=not tied)
    return model


def own_weights(base: Path, expert: Path, name: str) -> State:
    """All weights of one expert alone: a checkpoint's, or what PEFT computes with."""
    if name in FULL:
        own = weights(expert)
        return own if HEAD in own else {**own, HEAD: own[EMBEDDING]}
    size = SIZE + len(ADAPTERS[name][1])
    ends = {} if name.startswith("dora") else ends_in_peft(base, expert, size)  # which adds ΔW alone
    return {**merged_by_peft(base, expert, size), **ends}


PAIRS = [
    ("plain", "two"), ("two", "plain"), ("two", "other two"), ("two", "three"), ("padded", "plain"),
    ("padded", "three"), ("wide", "two"), ("wide", "plain"), ("padded", "wide"),
]  # fmt: skip


OUTSIDES = ("average", "task", "language")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("task", "language", "outside", "tied", "with_base"),
    [(*pair, outside, False, with_base) for pair in PAIRS for outside in OUTSIDES for with_base in (True, False)]
    + [(*pair, outside, True, number % 2 == 0) for number, pair in enumerate(PAIRS) for outside in OUTSIDES],
)
def test_full_checkpoints(
    task: str, language: str, outside: str, tied: bool, with_base: bool, base_of: Any, expert_of: Make, tmp_path: Path
) -> None:
    base, folders = base_of(tied=tied), {name: expert_of(name, tied=tied) for name in (task, language)}
    shares = dict(zip(folders, {"average": (0.5, 0.5), "task": (1, 0), "language": (0, 1)}[outside], strict=True))
    out = plan_of(folders[task], folders[language], base if with_base else None, outside=outside, norms="layer").merge(
        tmp_path / "out"
    )
    own = {name: weights(folder) for name, folder in folders.items()}
    expected, result = {}, weights(out)
    assert result.keys() == weights(base).keys()
    for key in result:
        if ".layers." in key:
            expected[key] = own[language if key.split(".")[2] in ("0", "2") else task][key]
            assert torch.equal(result[key], expected[key])
        elif key in (EMBEDDING, HEAD):
            parts = {name: state[key] for name, state in own.items()}
            expected[key] = row_by_row(parts, {name: tokens_in(name) for name in own}, shares, weights(base)[key])
            close(result[key], expected[key], name=key)
            for row in {*tokens_in(task) ^ tokens_in(language)}:
                owner = task if row in tokens_in(task) else language
                assert torch.equal(result[key][row], own[owner][key][row])
        else:
            expected[key] = result[key]
    model = loaded(out)
    assert model.config.vocab_size == len(expected[EMBEDDING]) == json.loads((out / "config.json").read_text())[
        "vocab_size"
    ]  # fmt: skip
    close(answers(model), answers(model_of(base, expected, tied=tied)), depth=LAYERS)
    assert len(AutoTokenizer.from_pretrained(out)) == SIZE + len(tokens_in(task) | tokens_in(language))
    sources = {"t": folders[task], "l": folders[language]}
    assert adapterswap.verify(out, sources, base_model=base if with_base else None).equal


MIXED = [
    ("lora", "two", False), ("two", "lora", False), ("lora ends", "two", False), ("lora ends+2", "plain", False),
    ("lora ends+2", "two", False), ("saved+2", "plain", False), ("saved+3", "two", False), ("saved", "padded", False),
    ("saved+2", "wide", False), ("lora", "two", True), ("saved+2", "three", True), ("saved", "two", True),
    ("together+2", "three", True), ("dora ends+2", "plain", False), ("dora ends+2", "two", False),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outside", OUTSIDES)
@pytest.mark.parametrize(("task", "language", "tied"), MIXED)
def test_an_adapter_and_a_full_checkpoint(
    task: str, language: str, tied: bool, outside: str, base_of: Any, expert_of: Make, tmp_path: Path
) -> None:
    base, folders = base_of(tied=tied), {name: expert_of(name, tied=tied) for name in (task, language)}
    shares = dict(zip(folders, {"average": (0.5, 0.5), "task": (1, 0), "language": (0, 1)}[outside], strict=True))
    own = {name: own_weights(base, folder, name) for name, folder in folders.items()}
    before = own_weights(base, base, "plain")
    try:
        plan = plan_of(folders[task], folders[language], None, outside=outside, norms="layer")
    except CompositionError:  # the rule gives the ends to plain LoRA, which leaves them to the base
        assert shares["lora"] == 1
        return
    except AdapterswapError:  # DoRA is computed from the whole weight
        assert task.startswith("dora")
        assert shares[task] != 1
        return
    out = plan.merge(tmp_path / "out")
    result = weights(out)
    expected: State = {}
    new = {name: tokens_in(name) for name in own}
    for key in own[task]:
        if ".layers." in key:
            expected[key] = own[language if key.split(".")[2] in ("0", "2") else task][key]
        elif key in (EMBEDDING, HEAD):
            parts = {name: state[key] for name, state in own.items()}
            expected[key] = row_by_row(parts, new, shares, before[key])
        else:
            expected[key] = sum(shares[name] * state[key] for name, state in own.items())
    stays_tied = tied and HEAD not in result
    for key, tensor in result.items():
        close(tensor, expected[key], name=key)
    close(answers(loaded(out)), answers(model_of(base, expected, tied=stays_tied)), depth=LAYERS)
    assert adapterswap.verify(out, {"t": folders[task], "l": folders[language]}, base_model=base).equal


@pytest.mark.parametrize("pair", [("two", "plain"), ("two", "wide"), ("plain", "wide")], ids=str)
@pytest.mark.parametrize("with_base", [True, False])
def test_a_base_with_rows_without_tokens(
    pair: tuple[str, str], with_base: bool, base_of: Any, expert_of: Make, tmp_path: Path
) -> None:
    """Resizing to the tokenizer removes the padding of the base's vocabulary."""
    base, folders = base_of(rows=104), {name: expert_of(name, rows=104) for name in pair}
    plan = plan_of(*folders.values(), base if with_base else None)
    assert [note.partition(" (")[0] for note in plan.notes] == ["the vocabulary has new tokens"] * ("two" in pair)
    out = plan.merge(tmp_path / "out")
    own, result = {name: weights(folder) for name, folder in folders.items()}, weights(out)
    new, shares = {name: tokens_in(name) for name in pair}, dict.fromkeys(pair, 0.5)
    for key in (EMBEDDING, HEAD):
        expected = row_by_row({name: state[key] for name, state in own.items()}, new, shares, weights(base)[key])
        close(result[key], expected, name=key)
        assert len(result[key]) == max(FULL[name][1] for name in pair)
    assert loaded(out).config.vocab_size == len(result[HEAD])
    sources = {"t": folders[pair[0]], "l": folders[pair[1]]}
    assert adapterswap.verify(out, sources, base_model=base if with_base else None).equal


def test_dora_on_the_head_needs_its_rows_alone(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    with refused(UnsupportedError, match="t has DoRA on lm_head"):
        plan_of(expert_of("dora ends"), expert_of("two"), None)
    out = plan_of(expert_of("dora ends"), expert_of("two"), None, outside="language").merge(tmp_path / "out")
    assert torch.equal(weights(out)[HEAD], weights(expert_of("two"))[HEAD])


def test_new_tokens_in_the_bases_padding(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    """All checkpoints have 104 rows; only the tokenizers say that one of them has two tokens more."""
    base, padded, wide = base_of(rows=104), expert_of("padded", rows=104), expert_of("wide", rows=104)
    plan = plan_of(padded, wide, base)
    assert plan.notes == ("the vocabulary has new tokens ('<a>' and 1 more of t)",)
    result = weights(plan.merge(tmp_path / "out"))
    for key in (EMBEDDING, HEAD):
        one, two = weights(padded)[key], weights(wide)[key]
        assert torch.equal(result[key][96:98], one[96:98])
        close(result[key][:96], (one[:96] + two[:96]) / 2)
        close(result[key][98:], (one[98:] + two[98:]) / 2)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 98
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_sums_on_a_base(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    """Task arithmetic and three experts: the base's rows are added up, and a new row is that of its owners."""
    base, names = base_of(), ("two", "plain", "three")
    folders = {name: expert_of(name) for name in names}
    own = {name: weights(folder) for name, folder in folders.items()}
    for method, options, shares in (
        ("task_arithmetic", {"task_weight": 0.75, "language_weight": 0.5}, {"two": 0.75, "plain": 0.5}),
        ("soup", {}, {"two": 0.25, "plain": 0.25, "three": 0.5}),
    ):
        composition = Composition(
            task=[name for name in shares if name != "three"] if method == "soup" else ["two"],
            language=["three"] if method == "soup" else ["plain"], method=method, base_model=str(base), **options,
        )  # fmt: skip
        out = adapterswap.compose(composition, folders).merge(tmp_path / method)
        result, new = weights(out), {name: tokens_in(name) for name in shares}
        for key in (EMBEDDING, HEAD):
            parts = {name: own[name][key] for name in shares}
            close(result[key], row_by_row(parts, new, shares, weights(base)[key]), name=key)
        sources = {name: folders[name] for name in shares}
        assert adapterswap.verify(out, sources, base_model=base).equal


def test_nonlinear_methods_need_rules_for_the_ends(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    base, folders = base_of(), {"t": expert_of("two"), "l": expert_of("plain")}
    for options in ({"method": "ties", "density": 0.5}, {"method": "slerp"}, {"method": "dare_ties", "density": 0.5}):
        with refused(UnsupportedError, "method"):
            plan_of(folders["t"], folders["l"], base, **options)
    with pytest.raises(AdapterswapError, match="magnitude"):
        plan_of(folders["t"], folders["l"], base, method="soup", weights="magnitude")
    ends = {"modules": ["embed_tokens", "lm_head"], "expert": "t"}
    rest = {"blend": {"t": 1, "l": 1}, "method": "ties", "density": 0.5}
    composition = Composition(allocation=[ends, rest], base_model=str(base))
    plan = adapterswap.compose(composition, folders)
    assert (plan.slots[EMBEDDING].copied, plan.slots[HEAD].spans) != (None, ())
    result, owner = weights(plan.merge(tmp_path / "out")), weights(folders["t"])
    for key in (EMBEDDING, HEAD):
        assert torch.equal(result[key], owner[key])
    loaded(tmp_path / "out")
    with refused(UnsupportedError, "weights"):
        adapterswap.compose(
            Composition(allocation=[ends, {"blend": {"t": 1, "l": 1}, "weights": "magnitude"}], base_model=str(base)),
            folders,
        )


def test_refusals(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    base = base_of()
    for place in (base, None):
        with refused(ExpertError, match=r"96 is '<a>' and '<b>'"):
            plan_of(expert_of("two"), expert_of("b"), place)
    with refused(CompositionError, match="new tokens of t"):  # the base has no row for them
        adapterswap.compose(
            Composition(
                allocation=[{"modules": ["embed_tokens"], "expert": "base"}, {"expert": "t"}], base_model=str(base)
            ),
            {"t": expert_of("two")},
        )
    for name in ("two", "plain"):
        shutil.copytree(expert_of(name), tmp_path / name)
        (tmp_path / name / "tokenizer.json").unlink()
    with refused(ExpertError, "base_model", match="no tokenizer.json"):
        plan_of(tmp_path / "two", expert_of("plain"), None)
    plan = plan_of(tmp_path / "two", tmp_path / "plain", base)  # one owner: its rows are known by their place
    assert [rows.made_of for rows in plan.slots[HEAD].spans if rows.is_new] == ["t"]
    with refused(ExpertError, match="no tokenizer.json"):  # rows 96 and 97 may be those of other tokens
        plan_of(tmp_path / "two", expert_of("three"), base)


def test_a_tensor_as_large_as_the_vocabulary_is_not_ignored(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    places = []
    for name, folder in (("base", base_of(rows=104)), ("t", expert_of("padded", rows=104)), ("l", expert_of("wide"))):
        state = {**weights(folder), "model.shared.weight": torch.zeros(104, 32)}
        places.append(save_like(tmp_path / name, folder, state))
    with refused(UnsupportedError, match=r"model\.shared\.weight"):
        plan_of(places[1], places[2], places[0])
    state = {**weights(places[1]), "model.shared.weight": torch.zeros(105, 32)}
    save_like(tmp_path / "larger", places[1], state)
    with refused(ExpertError, match="not known as an embedding"):
        plan_of(tmp_path / "larger", places[2], None)


def test_copies_dtypes_and_shards(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    """One owner's rows are its bytes, in 16 bits too; shards follow the new sizes."""
    two, three = (
        save_like(tmp_path / name, expert_of(name), {k: v.bfloat16() for k, v in weights(expert_of(name)).items()})
        for name in ("two", "three")
    )
    plan = plan_of(two, three, base_of())
    out = plan.merge(tmp_path / "out", max_shard_size="7KB", dtype="bfloat16")
    result = weights(out)
    assert torch.equal(result[HEAD][98].view(torch.int16), weights(three)[HEAD][98].view(torch.int16))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in result.values())
    loaded(out)
    assert adapterswap.verify(out, {"t": two, "l": three}, base_model=base_of()).equal
    alone = plan_of(two, three, None, outside="language")
    assert alone.slots[HEAD].copied is not None
    copied = weights(alone.merge(tmp_path / "alone"))
    assert torch.equal(copied[HEAD].view(torch.int16), weights(three)[HEAD].view(torch.int16))


def test_the_record_hashes_whole_tensors(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    """Also those with rows that the result does not use, of experts and of the base."""
    folders = {"t": expert_of("three", rows=104), "l": expert_of("two", rows=104)}
    base = base_of(rows=104)
    composition = Composition(
        allocation=[{"modules": ["lm_head"], "blend": {"t": 0.5, "base": 0.5}}, {"expert": "l"}], base_model=str(base)
    )
    out = adapterswap.compose(composition, folders).merge(tmp_path / "out")
    record = json.loads((out / "adapterswap.json").read_text())
    assert record["rows"][HEAD] == {"0-95": {"t": 0.5}, "96-98": "t"}
    for name, folder in (("t", folders["t"]), ("base", base)):
        entered = (record["base"] if name == "base" else record["experts"][name])["entered"]["computed"]
        keys = [HEAD] if name == "base" else [EMBEDDING, HEAD]
        lines = []
        for key in sorted(keys):
            tensor = weights(folder)[key]
            lines.append(f"{key} F32 {list(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}\n")
        assert entered["sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()
        assert entered["tensors"] == len(keys)
    changed = weights(folders["t"])
    changed[EMBEDDING][0] += 1  # a row that the result does not use
    save_like(tmp_path / "changed", folders["t"], changed)
    verified = adapterswap.verify(out, {"t": tmp_path / "changed", "l": folders["l"]}, base_model=base)
    assert (verified.changed_sources, verified.differing) == ({"t": "weights"}, ())


def test_the_command_line(base_of: Any, expert_of: Make, tmp_path: Path, run: Callable[..., Any]) -> None:
    chatty = shutil.copytree(expert_of("two"), tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("{{ messages }}")
    options = ["-t", chatty, "-l", expert_of("plain"), "--base-model", base_of(), "--bottom", 1, "--top", 1]
    shown = run("merge", *options, "-o", tmp_path / "out", "--dry-run", exit_code=0)
    assert "the vocabulary grows from 96 to 98 rows ('<a>' and 1 more of chatty)" in shown.stderr
    assert "resize_token_embeddings" not in shown.stderr
    assert f"config from base ({base_of().name}), tokenizer from chatty" in shown.stderr
    assert "tokenizer: chatty's (plain" in shown.stderr
    assert "differ: chat template)" in shown.stderr  # and not in its added tokens
    assert run("compose", *options, "-o", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w7 <aa>")["input_ids"] == [7, 97]
    inspected = json.loads(run("inspect", tmp_path / "out", "--json").stdout)
    rows = {tensor["name"]: tensor.get("rows") for tensor in inspected["tensors"]}
    assert (rows[HEAD].keys(), rows[HEAD]["96-97"]) == ({"0-95", "96-97"}, "chatty")
    with refused(UnsupportedError):
        plan_of(chatty, expert_of("plain"), base_of()).write(tmp_path / "adapter")


def test_an_expert_replaces_tokens_of_the_base(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    """As trainers do with reserved tokens: the row and the token are the expert's."""
    base, folders = base_of(), {}
    for name, number in (("plain", 90), ("plain2", 91)):
        folders[name] = shutil.copytree(expert_of(name), tmp_path / name)
        text = (folders[name] / "tokenizer.json").read_text()
        (folders[name] / "tokenizer.json").write_text(text.replace(f'"w{number}"', '"imstart"'))
    for task, language in (("plain", None), (None, "plain")):
        sides = [folders["plain"] if side else expert_of("plain2") for side in (task, language)]
        out = plan_of(*sides, base).merge(tmp_path / f"out-{task}")
        assert AutoTokenizer.from_pretrained(out)("w7 imstart")["input_ids"] == [7, 90]
        result, one, two = weights(out), weights(folders["plain"]), weights(expert_of("plain2"))
        for key in (EMBEDDING, HEAD):
            assert torch.equal(result[key][90], one[key][90])
            close(result[key][:90], (one[key][:90] + two[key][:90]) / 2)
    with refused(ExpertError):  # one token under two ids
        plan_of(folders["plain"], folders["plain2"], base)
    out = plan_of(expert_of("two"), folders["plain"], base).merge(tmp_path / "united")  # one adds, the other replaces
    assert AutoTokenizer.from_pretrained(out)("w7 imstart <aa>")["input_ids"] == [7, 90, 97]
    assert torch.equal(weights(out)[HEAD][90], weights(folders["plain"])[HEAD][90])
    path = folders["plain2"] / "tokenizer.json"
    path.write_text(path.read_text().replace("imstart", "start"))
    with refused(ExpertError, match="cannot have that token"):  # one tokenizer.json cannot hold both
        plan_of(folders["plain"], folders["plain2"], base).merge(tmp_path / "both")


def test_rows_beyond_the_vocabulary_stay_last(base_of: Any, expert_of: Make, tmp_path: Path) -> None:
    """Mllama's embedding ends with eight rows for image tokens, which move when it is resized."""
    folders = {}
    for name in ("base", "two", "plain"):
        folder = base_of() if name == "base" else expert_of(name)
        state = weights(folder)
        state[EMBEDDING] = torch.cat([state[EMBEDDING], torch.ones(8, 32)])
        folders[name] = save_like(tmp_path / name, folder, state)
        config = json.loads((folders[name] / "config.json").read_text())
        (folders[name] / "config.json").write_text(json.dumps({**config, "model_type": "mllama_text_model"}))
    with refused(UnsupportedError, match="last 8 are not tokens"):
        plan_of(folders["two"], folders["plain"], folders["base"])
    (folders["plain"] / "tokenizer.json").write_text(
        json.dumps(json.loads((folders["plain"] / "tokenizer.json").read_text()), indent=1)
    )
    plan = plan_of(folders["plain"], folders["base"], None)
    assert [slot.spans for slot in plan if slot.spans] == []


def grown(folder: Path, source: Path, sizes: Mapping[int, int], tokenizer: Path) -> Path:
    """A checkpoint with more rows, and with `vocab_size` 98, wherever its config says it."""
    state = {}
    generator = torch.Generator().manual_seed(sum(map(ord, folder.name)))
    for key, tensor in weights(source).items():
        more = sizes.get(tensor.shape[0], 0) if any(end in key for end in ENDS) else 0
        longer = torch.cat([tensor, torch.zeros(more, *tensor.shape[1:])])
        state[key] = longer + 0.05 * torch.randn(longer.shape, generator=generator)
    save_like(folder, source, state)
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"vocab_size": 96', '"vocab_size": 98'))
    return folder


ENDS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


@pytest.mark.parametrize("architecture", ["gpt2", "neox", "gemma", "mixtral"])
def test_other_architectures(architecture: str, model: Callable[..., Path], expert_of: Make, tmp_path: Path) -> None:
    """Tied and untied ends under other names, on a base whose tokenizer.json cannot be read."""
    two = grown(tmp_path / "two", model(architecture), {96: 2}, expert_of("two"))
    plain = grown(tmp_path / "plain", model(architecture), {}, expert_of("plain"))
    (plain / "config.json").write_bytes((model(architecture) / "config.json").read_bytes())
    out = plan_of(plain, two, None).merge(tmp_path / "out")
    result, one, other = weights(out), weights(plain), weights(two)
    ends = [key for key in result if any(end in key for end in ENDS)]
    assert ends
    for key in ends:
        close(result[key][:96], (one[key] + other[key][:96]) / 2)
        assert torch.equal(result[key][96:], other[key][96:])
    assert loaded(out).config.vocab_size == 98
    assert adapterswap.verify(out, {"t": plain, "l": two}).equal


def test_a_multimodal_checkpoint(expert_of: Make, tmp_path: Path) -> None:
    """The nested config of the language model follows."""
    torch.manual_seed(0)
    config = ARCHITECTURES["gemma3"].config()
    config.text_config.vocab_size = SIZE
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path / "base")
    two = grown(tmp_path / "two", tmp_path / "base", {96: 2}, expert_of("two"))
    plain = grown(tmp_path / "plain", tmp_path / "base", {}, expert_of("plain"))
    (plain / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    out = plan_of(plain, two, tmp_path / "base").merge(tmp_path / "out")
    made = type(model).from_pretrained(out, dtype=torch.float32)
    assert made.config.text_config.vocab_size == 98
    (key,) = (key for key in weights(out) if "embed_tokens" in key)
    close(weights(out)[key][:96], (weights(plain)[key] + weights(two)[key][:96]) / 2)
    assert torch.equal(weights(out)[key][96:], weights(two)[key][96:])
