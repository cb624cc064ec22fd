"""Tokenizers are compared by what they do, and the result's is the experts' or the one that was chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.core.companions.parts import special_ids
from adapterswap.core.companions.templates import read_templates, write_templates
from adapterswap.core.companions.tokenizer import tokenizer_differences
from adapterswap.kit.errors import ArgumentError, ExpertError

TEXT = "Ab c  é 12\n"


def build(**changes: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with every section of tokenizer.json in use."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2}
    for sign in (*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "12"):
        vocab[sign] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("1", "2")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>", **changes},
    )


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save("x", …)`: the folder of a tokenizer."""

    def make(name: str, *, template: Any = None, extra: tuple[str, ...] = (), **changes: Any) -> Path:
        tokenizer = build(**changes)
        if extra:
            tokenizer.add_special_tokens({"additional_special_tokens": list(extra)})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def edited(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "tokenizer.json") -> Path:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


def drop_merge(content: dict[str, Any]) -> None:
    content["model"]["merges"] = content["model"]["merges"][:1]


def swap_ids(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["ab"], vocab["12"] = vocab["12"], vocab["ab"]


SECTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "vocabulary": swap_ids,
    "merges": drop_merge,
    "model": lambda content: content["model"].update(fuse_unk=True),
    "normalizer": lambda content: content.update(normalizer={"type": "NFC"}),
    "pre-tokenizer": lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
    "post-processor": lambda content: content.update(post_processor=None),
    "decoder": lambda content: content.update(decoder={"type": "Fuse"}),
    "added tokens": lambda content: content["added_tokens"][0].update(lstrip=True),
    "truncation": lambda content: content.update(
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    ),
    "padding": lambda content: content.update(
        padding={"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<s>"}
    ),
    "a new section": lambda content: content.update({"a new section": {"type": "New"}}),
}  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_of_tokenizer_json_is_compared(save: Callable[..., Path], section: str) -> None:
    one, other = save("one"), edited(save("other"), SECTIONS[section])
    assert tokenizer_differences(one, other) == (section,)
    assert tokenizer_differences(other, one) == (section,)
    assert tokenizer_differences(one, save("same")) == ()


BEHAVIOUR = ["vocabulary", "merges", "normalizer", "pre-tokenizer", "post-processor", "added tokens"]


@pytest.mark.parametrize("section", BEHAVIOUR)
def test_a_merged_tokenizer_gives_the_experts_tokens(save: Callable[..., Path], tmp_path: Path, section: str) -> None:
    base, expert = save("base"), edited(save("expert"), SECTIONS[section])
    plan = CompanionPlan.decide({"math": expert}, base)
    assert plan.owner("tokenizer") == "math"
    (out := tmp_path / "out").mkdir()
    plan.write(out)
    wanted, ours = AutoTokenizer.from_pretrained(expert), AutoTokenizer.from_pretrained(base)
    texts = [TEXT, TEXT.upper(), "a <s> b"]
    assert AutoTokenizer.from_pretrained(out)(texts)["input_ids"] == wanted(texts)["input_ids"]
    assert wanted(texts)["input_ids"] != ours(texts)["input_ids"]


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def joined_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]


def added_tokens(folder: Path) -> dict[str, Any]:
    """The added tokens as transformers 4 also writes them into tokenizer_config.json."""
    return {
        str(token.pop("id")): token for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }


SAME: dict[str, Callable[[Path], object]] = {
    "order of keys": lambda folder: (folder / "tokenizer.json").write_text(
        json.dumps(reordered(json.loads((folder / "tokenizer.json").read_text())), indent=4, ensure_ascii=True)
    ),
    "merges as text": lambda folder: edited(folder, joined_merges),
    "defaults unsaid": lambda folder: edited(folder, lambda content: content["pre_tokenizer"].pop("use_regex")),
    "model's defaults unsaid": lambda folder: edited(
        folder, lambda content: [content["model"].pop(key) for key in ("dropout", "fuse_unk", "byte_fallback")]
    ),
    "version": lambda folder: edited(folder, lambda content: content.update(version="2.0")),
    "names and classes": lambda folder: edited(
        folder,
        lambda content: content.update(
            name_or_path="/elsewhere", is_local=False, tokenizer_class="PreTrainedTokenizerFast", padding_side="right",
            add_bos_token=True, model_max_length=10**30, clean_up_tokenization_spaces=True,
        ),
        "tokenizer_config.json",
    ),
    "transformers 4": lambda folder: edited(
        folder,
        lambda content: content.update(
            added_tokens_decoder=added_tokens(folder),
            additional_special_tokens=[],
            eos_token={"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True},
        ),
        "tokenizer_config.json",
    ),
    "special_tokens_map.json": lambda folder: (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>"})
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", SAME)
def test_other_files_that_do_the_same_are_equal(save: Callable[..., Path], way: str) -> None:
    one, other = save("one"), save("other")
    SAME[way](other)
    assert tokenizer_differences(one, other) == tokenizer_differences(other, one) == ()
    assert CompanionPlan.decide({"math": other}, one).owner("tokenizer") == "base"


SETTINGS: dict[str, dict[str, Any]] = {
    "eos": {"eos_token": "<unk>"},
    "bos": {"bos_token": None},
    "pad": {"pad_token": "<unk>"},
    "unk": {"unk_token": None},
    "padding side": {"padding_side": "left"},
    "truncation side": {"truncation_side": "left"},
    "model_max_length": {"model_max_length": 512},
    "special tokens": {"extra": ("<|im_end|>",)},
}


@pytest.mark.parametrize("part", SETTINGS)
def test_settings_are_compared(save: Callable[..., Path], part: str) -> None:
    one, other = save("one"), save("other", **SETTINGS[part])
    assert part in tokenizer_differences(one, other)


def test_classes_and_unknown_settings_differ_where_both_say_them(save: Callable[..., Path]) -> None:
    one, other = save("one"), save("other")
    edited(other, lambda content: content.update(tokenizer_class="LlamaTokenizer", new_key=3), "tokenizer_config.json")
    assert tokenizer_differences(one, other) == ("new_key", "tokenizer_class")


def test_slow_tokenizers_are_compared_by_their_files(save: Callable[..., Path]) -> None:
    folders = []
    for name in ("one", "other"):
        folder = save(name)
        content = json.loads((folder / "tokenizer.json").read_text())
        (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
        (folder / "merges.txt").write_text("#version: 0.2\na b\n1 2\n")
        (folder / "added_tokens.json").write_text('{"<|x|>": 261}')
        (folder / "tokenizer.json").unlink()
        folders.append(folder)
    one, other = folders
    (other / "merges.txt").write_text("a b\n1 2\n")
    (other / "vocab.json").write_text(json.dumps(json.loads((one / "vocab.json").read_text()), indent=2))
    assert tokenizer_differences(one, other) == ()
    (other / "added_tokens.json").write_text('{"<|y|>": 261}')
    assert tokenizer_differences(one, other) == ("added tokens",)
    (other / "merges.txt").write_text("1 2\na b\n")
    assert tokenizer_differences(one, other) == ("merges.txt", "added tokens")


def test_ids_are_those_of_transformers(save: Callable[..., Path]) -> None:
    for folder in (save("one"), save("other", eos_token="<|im_end|>", extra=("<|im_end|>",))):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        assert special_ids(folder) == {name: getattr(tokenizer, name) for name in names}


CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
PLAIN = "### {{ messages[0].content }}\n"


def test_the_result_takes_the_experts_tokenizer_where_they_agree(save: Callable[..., Path]) -> None:
    base = save("base", template=CHATML)
    math, swahili = (save(name, template=PLAIN, eos_token="<unk>") for name in ("math", "swahili"))
    plan = CompanionPlan.decide({"math": math, "swahili": swahili}, base)
    assert (plan.owner("tokenizer"), plan.owner("chat_template")) == ("math", "math")
    assert plan.owners["tokenizer"].differing == {"base": ("eos",)}


def test_the_task_experts_is_taken_where_they_differ(save: Callable[..., Path]) -> None:
    base, math = save("base"), save("math", eos_token="<unk>", template=PLAIN)
    swahili = save("swahili", padding_side="left", template=CHATML, extra=("<sw>",))
    plan = CompanionPlan.decide({"math": math, "swahili": swahili}, base)
    assert plan.owner("tokenizer") == "math"
    assert plan.owners["tokenizer"].differing == {"swahili": ("eos", "padding side"), "base": ("eos",)}
    assert plan.owners["chat_template"].differing == {"swahili": ("chat template",)}
    assert plan.united is not None
    assert plan.united.added.keys() == {261}  # a token of the other expert, whose row the result may have


@pytest.mark.parametrize(("chosen", "eos"), [("swahili", 1), ("base", 1), ("math", 2)])
def test_another_can_be_chosen(save: Callable[..., Path], tmp_path: Path, chosen: str, eos: int) -> None:
    folders = {
        "math": save("math", eos_token="<unk>", template=PLAIN),
        "swahili": save("swahili", padding_side="left", template={"default": CHATML, "tool_use": "T" + CHATML}),
    }
    plan = CompanionPlan.decide(folders, save("base", template="base {{ messages }}"), tokenizer=chosen)
    assert {plan.owner("tokenizer"), plan.owner("chat_template"), *plan.record.values()} == {chosen}
    (out := tmp_path / "out").mkdir()
    plan.write(out)
    expected = AutoTokenizer.from_pretrained({**folders, "base": tmp_path / "base"}[chosen])
    written = AutoTokenizer.from_pretrained(out)
    assert written.chat_template == expected.chat_template
    assert (written.eos_token_id, written.padding_side) == (eos, expected.padding_side)


def test_an_adapter_with_the_bases_tokenizer_carries_none(save: Callable[..., Path], tmp_path: Path) -> None:
    plan = CompanionPlan.decide(
        {"math": save("math", template=PLAIN)}, beside=save("base", eos_token="<unk>"), tokenizer="base"
    )
    (out := tmp_path / "out").mkdir()
    plan.write(out)
    assert not list(out.iterdir())
    assert plan.record == {"tokenizer": "base"}
    assert plan.owners["tokenizer"].differing == {"math": ("eos",)}


@pytest.mark.parametrize("chosen", ["code", "swahili"])
def test_who_has_no_tokenizer_cannot_be_chosen(save: Callable[..., Path], tmp_path: Path, chosen: str) -> None:
    (empty := tmp_path / "empty").mkdir()
    with refused(ArgumentError, "tokenizer"):
        CompanionPlan.decide({"math": save("math"), "swahili": empty}, save("base"), tokenizer=chosen)
    with refused(ArgumentError, "chat_template_from"):
        CompanionPlan.decide({"math": save("math"), "swahili": empty}, save("base"), template=chosen)


def test_settings_without_a_vocabulary_are_no_tokenizer_where_another_is(save: Callable[..., Path]) -> None:
    base, math, swahili = save("base"), save("math", eos_token="<unk>"), save("swahili")
    (math / "tokenizer.json").unlink()
    plan = CompanionPlan.decide({"math": math}, base)
    assert plan.owner("tokenizer") == "base"
    assert plan.owners["tokenizer"].differing == {"math": ("only settings",)}
    assert CompanionPlan.decide({"math": math, "swahili": swahili}).owner("tokenizer") == "swahili"
    assert CompanionPlan.decide({"math": math}).owner("tokenizer") == "math"
    assert CompanionPlan.decide({"math": math}, base, tokenizer="math").owner("tokenizer") == "math"


@pytest.mark.parametrize(("score", "expected"), [(-2.0, ()), (-3.0, ("vocabulary",))])
def test_a_vocabulary_with_scores(score: float, expected: tuple[str, ...], tmp_path: Path) -> None:
    """Unigram models, as of T5 and Gemma's kin, store pairs of a token and its score."""
    for name, last in (("one", -2.0), ("other", score)):
        model = models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", last)], unk_id=0)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>")
        tokenizer.save_pretrained(tmp_path / name)
    assert tokenizer_differences(tmp_path / "one", tmp_path / "other") == expected


def put(folder: Path, place: str, text: str) -> None:
    """A chat template in one of the places of a folder."""
    folder.mkdir(exist_ok=True)
    if place == "additional":
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T" + text)
        (folder / "chat_template.jinja").write_text(text)
    elif place == "jinja":
        (folder / "chat_template.jinja").write_text(text)
    elif place == "legacy":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    else:
        listed = [{"name": "default", "template": text}, {"name": "tool_use", "template": "T" + text}]
        edited(folder, lambda content: content.update(chat_template=listed if place == "list" else text),
               "tokenizer_config.json")  # fmt: skip


PLACES = ["text", "list", "jinja", "additional", "legacy"]


@pytest.mark.parametrize("ours", PLACES)
@pytest.mark.parametrize("theirs", PLACES)
def test_templates_follow_from_and_into_every_place(
    save: Callable[..., Path], tmp_path: Path, ours: str, theirs: str
) -> None:
    """Whatever the base has in other places, the result renders as transformers does with the expert's folder."""
    base, expert = save("base"), save("expert", eos_token="<unk>")
    put(base, ours, CHATML)
    put(expert, theirs, PLAIN)
    (out := tmp_path / "out").mkdir()
    for file in base.rglob("*"):  # as if the base's had been copied first
        if file.is_file():
            (out / file.relative_to(base)).parent.mkdir(exist_ok=True)
            (out / file.relative_to(base)).write_bytes(file.read_bytes())
    CompanionPlan.decide({"math": expert}, base).write(out)
    several = theirs in ("list", "additional")
    assert read_templates(out) == {"default": PLAIN, **({"tool_use": "T" + PLAIN} if several else {})}
    if theirs == "legacy":  # which transformers reads for processors only
        put(expert, "jinja", PLAIN)
    wanted, written = AutoTokenizer.from_pretrained(expert), AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "q"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        assert written.apply_chat_template(messages, tools=tools, tokenize=False) == wanted.apply_chat_template(
            messages, tools=tools, tokenize=False
        )


@pytest.mark.parametrize("place", ["text", "jinja"])
def test_one_text_in_two_places_is_one_template(save: Callable[..., Path], place: str) -> None:
    one, other = save("one"), save("other")
    put(one, "text", PLAIN)
    put(other, place, PLAIN.replace("\n", "\r\n"))
    assert read_templates(one) == read_templates(other)


def test_a_processors_other_template_is_kept(save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save("one", template=CHATML)
    put(folder, "legacy", PLAIN)
    templates = read_templates(folder)
    assert templates is not None
    assert sorted(templates.values()) == sorted([CHATML, PLAIN])
    write_templates(templates, out := save("out", template="x"))
    assert read_templates(out) == templates


def test_settings_without_their_template_are_as_transformers_writes_them(save: Callable[..., Path]) -> None:
    plain, folder = save("plain"), save("one")
    put(folder, "text", CHATML)
    write_templates({"default": PLAIN}, folder)
    settings = "tokenizer_config.json"
    assert (folder / settings).read_bytes() == (plain / settings).read_bytes()


@pytest.mark.parametrize("listed", [[{"name": "../x", "template": "a"}], [{"template": "a"}], ["a"], 3])
def test_templates_without_a_name_are_refused(save: Callable[..., Path], listed: Any) -> None:
    folder = edited(save("one"), lambda content: content.update(chat_template=listed), "tokenizer_config.json")
    with refused(ExpertError):
        read_templates(folder)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "model": ("tokenizer.json", lambda content: content.update(model=[])),
    "vocabulary": ("tokenizer.json", lambda content: content["model"].update(vocab=3)),
    "unigram": ("tokenizer.json", lambda content: content["model"].update(vocab=["a", 5])),
    "merges": ("tokenizer.json", lambda content: content["model"].update(merges=3)),
    "added tokens": ("tokenizer.json", lambda content: content.update(added_tokens="x")),
    "an id of text": ("tokenizer.json", lambda content: content["added_tokens"][0].update(id="x")),
    "special tokens": ("tokenizer_config.json", lambda content: content.update(additional_special_tokens=5)),
}


@pytest.mark.parametrize("part", DAMAGE)
def test_a_damaged_tokenizer_is_named(save: Callable[..., Path], part: str) -> None:
    name, change = DAMAGE[part]
    one, other = save("one"), edited(save("other"), change, name)
    for compare in (
        lambda: tokenizer_differences(one, other),
        lambda: CompanionPlan.decide({"one": one, "other": other}),
    ):
        with refused(ExpertError, match="other/"):
            compare()


def test_odd_settings_are_no_traceback(save: Callable[..., Path]) -> None:
    """An id with more digits than Python reads, or a number in place of a special token."""
    one, other = save("one"), save("other")
    edited(
        other,
        lambda content: content.update(added_tokens_decoder={"9" * 5000: {"content": "x"}}),
        "tokenizer_config.json",
    )
    edited(other, lambda content: content.update(eos_token=5, pad_token={"a": 1}), "tokenizer_config.json")
    assert {"eos", "pad"} <= {*tokenizer_differences(one, other)}
    assert special_ids(other).keys() == {"bos_token_id", "unk_token_id"}
