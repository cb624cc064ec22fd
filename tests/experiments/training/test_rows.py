from __future__ import annotations

import csv
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from refusals import refused

from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.training.data import SourceCounts, load_rows
from adapterswap.experiments.training.recipe import DatasetSource
from adapterswap.experiments.training.texts import Example
from adapterswap.kit.errors import AdapterswapError, BaseModelError, DataError, FieldError, NotFoundError
from adapterswap.kit.files.yaml import RecipeFile

from .conftest import word_tokenizer, write_jsonl

ROWS = [
    {"question": "moja, na “mbili”?", "answer": "3", "kind": "a"},
    {"question": 'a "quoted", one\nand a line', "answer": "4", "kind": "b"},
    {"question": "tatu?", "answer": "5", "kind": "a"},
]
PAIR = {"prompt": "{question}", "completion": " {answer}"}


def load(
    folder: Path, *, seed: int = 0, chat: ChatTemplate | None = None, chat_prompts: bool = False, **source: Any
) -> tuple[SourceCounts, list[Example]]:
    [(counts, examples)] = load_rows([DatasetSource(**source)], folder, seed=seed, chat=chat, chat_prompts=chat_prompts)
    return counts, list(examples)


def load_rows_of(folder: Path, **source: Any) -> list[str]:
    return [example.text for example in load(folder, **source)[1]]


def _write(path: Path) -> None:
    if path.suffix == ".jsonl":
        write_jsonl(path, ROWS)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    _write(path)
    counts, examples = load(tmp_path, path=path.name, **PAIR)
    assert [example.text for example in examples] == [f"{row['question']} {row['answer']}" for row in ROWS]
    assert [example.trained for example in examples] == [
        ((len(row["question"]), len(example.text)),) for row, example in zip(ROWS, examples, strict=True)
    ]
    assert (counts.read, counts.kept, counts.empty) == (3, 3, 0)
    assert counts.files == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}


def test_a_changed_file_is_read_again_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = write_jsonl(tmp_path / "rows.jsonl", [{"t": "one"}])
    assert load_rows_of(tmp_path, path=path.name, text="{t}") == ["one"]
    write_jsonl(path, [{"t": "two"}])
    assert load_rows_of(tmp_path, path=path.name, text="{t}") == ["two"]
    assert not list((tmp_path / "tmp").iterdir())


def test_a_folder_with_several_files_and_a_slice(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("one", "two"):
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", [{"t": f"{name} {i}"} for i in range(4)])
    source = {"path": "data", "data_files": ["one.jsonl", "two.jsonl"], "text": "{t}"}
    assert load_rows_of(tmp_path, **source) == [f"{name} {i}" for name in ("one", "two") for i in range(4)]
    assert load_rows_of(tmp_path, split="train[:50%]", **source) == [f"one {i}" for i in range(4)]


def test_filter_keeps_the_rows_with_these_values(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    source = {"path": "rows.jsonl", "text": "{answer}"}
    assert load_rows_of(tmp_path, filter={"kind": "a"}, **source) == ["3", "5"]
    assert load_rows_of(tmp_path, filter={"kind": ["a", "b"], "answer": ["4", "5"]}, **source) == ["4", "5"]


def test_cells_of_a_csv_are_unchanged_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\ufeffid,t\n1,007\n2,NA\n3,1.50\n4,\n", encoding="utf-8")
    assert load_rows_of(tmp_path, path="rows.csv", text="{t}") == ["007", "NA", "1.50"]
    assert load_rows_of(tmp_path, path="rows.csv", text="{t}", filter={"id": [2, 3]}) == ["NA", "1.50"]


@pytest.mark.parametrize("streamed", [{}, {"streaming": True, "samples": 9}])
@pytest.mark.parametrize(
    ("names", "content", "named"),
    [
        (["rows.csv"], "t,u\na,b,c\nd,e,f\n", "line 2 has 3 fields"),  # pandas takes the first for row names
        (["rows.csv"], "t,u\na,b\n\nc\n", "line 4 has 1 fields"),
        (["rows.csv"], "t,t\na,b\n", "'t' twice"),
        (["rows.csv"], 't\n"a\n', "unexpected end"),
        (["rows.csv"], "t\n", "no rows"),
        (["rows.csv", "rows.tsv"], "t\na,b\n", "csv, tsv"),
    ],
)
def test_a_table_whose_cells_have_no_certain_column_is_refused(
    tmp_path: Path, names: list[str], content: str, named: str, streamed: dict[str, Any]
) -> None:
    for name in names:
        (tmp_path / name).write_text(content)
    with refused(DataError, "datasets", match=named):
        load(tmp_path, path=".", data_files=names, text="{t}", **streamed)


@pytest.mark.parametrize("names", ["rows.csv", "*.csv"])
def test_a_kind_for_path_reads_local_files_as_their_names_do(tmp_path: Path, names: str) -> None:
    (tmp_path / "rows.csv").write_text("t\n007\nNA\n")
    counts, examples = load(tmp_path, path="csv", data_files=names, text="{t}")
    assert [example.text for example in examples] == ["007", "NA"]
    assert counts.files.keys() == {"rows.csv"}


def test_numbers_that_a_table_lacks_are_no_text(tmp_path: Path) -> None:
    table = pyarrow.table({"t": [1.5, float("nan"), None]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    counts, examples = load(tmp_path, path="rows.parquet", text="{t}")
    assert ([example.text for example in examples], counts.empty) == (["1.5"], 2)


def test_a_cell_may_hold_lines_and_be_long(tmp_path: Path) -> None:
    text = "one\r\ntwo, " + "x" * 200_000
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["t"], [text]])
    assert load_rows_of(tmp_path, path="rows.csv", text="{t}") == [text]


def test_samples_are_drawn_by_the_seed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"t": str(i)} for i in range(100)])
    source = {"path": "rows.jsonl", "text": "{t}", "samples": 10}
    drawn = load_rows_of(tmp_path, seed=1, **source)
    assert len(set(drawn)) == 10
    assert drawn == load_rows_of(tmp_path, seed=1, **source)
    assert drawn != load_rows_of(tmp_path, seed=2, **source)
    assert len(load_rows_of(tmp_path, **{**source, "samples": 1000})) == 100


def test_rows_without_a_value_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"q": "a", "a": "b"},
        {"q": "a", "a": None},
        {"q": "a", "a": "  "},
        {"q": None, "a": "b"},
        {"q": "", "a": "b"},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    counts, examples = load(tmp_path, path="rows.jsonl", prompt="{q}", completion="{a}")
    assert [example.text for example in examples] == ["ab", "b"]
    assert counts.empty == 3


_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"


def chat_of(template: str) -> ChatTemplate:
    """A template of a tokenizer."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer)


_template = chat_of(_TURNS + _PROMPT)


def test_prompts_become_chat_turns(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    _, examples = load(tmp_path, path="rows.jsonl", **PAIR, chat=_template, chat_prompts=True)
    assert examples[2] == Example("<user>tatu?</><assistant> 5</>", ((25, 30),), chat=True)


def test_messages_train_on_every_turn_of_the_assistant(tmp_path: Path) -> None:
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    rows = [{"m": [{"role": role, "content": text} for role, text in turns]}, {"m": []}, {"m": None}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    counts, examples = load(tmp_path, path="rows.jsonl", messages="m", chat=_template)
    first = "<system>S</><user>a</><assistant>"
    second = f"{first}b</><user>c</><assistant>"
    spans = (len(first), len(first) + 4), (len(second), len(second) + 4)
    assert examples == [Example(f"{second}d</>", spans, chat=True)]
    assert counts.empty == 2


# Like Qwen3's template, which writes the reasoning of the last turn only.
_reasoning = chat_of(
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}</>{% endfor %}" + _PROMPT
)


def test_every_turn_is_trained_on_if_a_template_writes_the_last_one_otherwise(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "<think>hm</think>b"), ("user", "c"), ("assistant", "d")]
    write_jsonl(tmp_path / "rows.jsonl", [{"m": [{"role": role, "content": text} for role, text in turns]}])
    _, [example] = load(tmp_path, path="rows.jsonl", messages="m", chat=_reasoning)
    first = "<user>a</><assistant>"
    second = f"{first}b</><user>c</><assistant>"
    assert example.text == f"{second}<think></think>d</>"
    assert example.trained == ((len(first), len(first) + 4), (len(second), len(example.text)))
    assert example.remarks == {"the chat template leaves out a part of assistant turns": "'<think>hm</think>'"}


def test_a_template_that_leaves_out_what_the_assistant_says_is_refused(tmp_path: Path) -> None:
    """Templates of some vision models take lists of parts, and write nothing of plain text."""
    parts = chat_of("{% for m in messages %}<{{ m.role }}></>{% endfor %}" + _PROMPT)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with refused(DataError, "datasets", match="row 0 .*does not write .*' 3'"):
        load(tmp_path, path="rows.jsonl", **PAIR, chat=parts, chat_prompts=True)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"prompt": "{q}", "completion": "{nope}"}, "`prompt` .*'q'.*question, answer, kind"),
        ({"text": "{answer}", "filter": {"lang": "sw"}}, "`filter` .*'lang'.*question, answer, kind"),
        ({"messages": "turns", "chat": _template}, "`messages` .*'turns'"),
        ({"text": "{answer}", "filter": {"kind": "z"}}, r"kind in \['z'\].*'a', 'b'"),
        ({"text": "{answer}", "split": "test"}, "rows.jsonl"),
    ],
)
def test_settings_that_do_not_fit_the_rows_are_refused(tmp_path: Path, source: dict[str, Any], named: str) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with refused(DataError, "datasets", match=named):
        load(tmp_path, path="rows.jsonl", **source)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with refused(BaseModelError, "base_model", match="rows.jsonl"):
        load(tmp_path, path="rows.jsonl", messages="kind")


def test_both_unknown_columns_are_reported_at_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with refused(DataError, "datasets") as caught:
        load(tmp_path, path="rows.jsonl", prompt="{q}", completion="{nope}")
    assert len(caught.value.problems) == 2


def test_a_value_that_is_not_text_names_its_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"t": ["a"]}])
    with refused(DataError, "datasets", match="rows.jsonl, row 0 .*'t' holds a list"):
        load(tmp_path, path="rows.jsonl", text="{t}")
    with refused(DataError, "datasets", match="row 0 .*'t'"):
        load(tmp_path, path="rows.jsonl", messages="t", chat=_template)
    with refused(DataError, "datasets", match="`filter` names t"):
        load(tmp_path, path="rows.jsonl", text="{t}", filter={"t": "a"})


def test_messages_that_the_template_refuses_name_their_row(tmp_path: Path) -> None:
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    strict = chat_of(refusal + _TURNS + _PROMPT)
    rows = [
        {"m": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]} for role in ("user", "system")
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with refused(DataError, "datasets", match="row 1 .*Conversation roles"):
        load(tmp_path, path="rows.jsonl", messages="m", chat=strict)


@pytest.mark.parametrize(
    ("path", "kind", "named"),
    [
        ("none.jsonl", NotFoundError, "none.jsonl"),
        ("../none", NotFoundError, "../none"),
        ("rows.txt", DataError, "rows.txt .*suffix"),
        (".", DataError, "data_files"),
        ("broken.jsonl", DataError, "broken.jsonl"),
        ("latin.csv", DataError, "latin.csv"),
        ("empty.jsonl", DataError, "empty.jsonl"),
        ("org/no-such-dataset", NotFoundError, "org/no-such-dataset"),
    ],
)
def test_sources_that_cannot_be_loaded(tmp_path: Path, path: str, kind: type[AdapterswapError], named: str) -> None:
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "broken.jsonl").write_text('{"t": "a"}\n{"t": ')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "latin.csv").write_bytes("t\né\n".encode("latin-1"))
    with refused(kind, "datasets", match=named):
        load(tmp_path, path=path, text="{t}")


@pytest.mark.parametrize("content", ['{"t": "a"}\n{"t": "b", "t": "c"}\n', '[{"t": "b", "t": "c"}]'])
@pytest.mark.parametrize("streamed", [{}, {"streaming": True, "samples": 1}], ids=["read", "streamed"])
def test_a_row_with_the_same_key_twice_is_refused(tmp_path: Path, content: str, streamed: dict[str, object]) -> None:
    (tmp_path / "rows.json").write_text(content)
    with refused(DataError, "datasets", match="rows.json: .*same key twice: 't'"):
        load(tmp_path, path="rows.json", text="{t}", **streamed)


def test_missing_files_and_mixed_kinds(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.csv").write_text("t\nx\n")
    with refused(DataError, "datasets", match="csv, json"):
        load(tmp_path, path=".", data_files=["a.jsonl", "b.csv"], text="{t}")
    with refused(NotFoundError, "datasets", match=r"c\.csv"):
        load(tmp_path, path=".", data_files=["a.jsonl", "c.csv"], text="{t}")


def test_pairs_of_prompt_and_answer_are_a_conversation(tmp_path: Path) -> None:
    rows = [{"turns": [["a", "b"], ["c", "d"]]}, {"turns": []}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    counts, [example] = load(tmp_path, path="rows.jsonl", messages="turns", chat=_template)
    assert example.text == "<user>a</><assistant>b</><user>c</><assistant>d</>"
    assert counts.empty == 1


def test_a_separator_joins_prompt_and_completion_without_a_chat(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    source = DatasetSource(path="rows.jsonl", prompt="{question}", completion="{answer}")
    found = {}
    for chat in (False, True):
        [(_, examples)] = load_rows(
            [source], tmp_path, seed=0, chat=_template, chat_prompts=chat, separator="\n\n"
        )  # fmt: skip
        found[chat] = list(examples)[2]
    assert found[False] == Example("tatu?\n\n5", ((7, 8),))
    assert "\n\n" not in found[True].text


def _stream(folder: Path, *, seed: int = 0, **changes: Any) -> tuple[SourceCounts, list[str]]:
    source = {"path": "data", "data_files": ["0.jsonl", "1.jsonl"], "text": "{t}", "samples": 10, "streaming": True}
    counts, examples = load(folder, seed=seed, **(source | changes))
    return counts, [example.text for example in examples]


def test_a_stream_is_sampled_by_the_seed_and_read_only_as_far_as_needed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for shard in range(2):
        rows = [{"t": f"{shard} {i}", "kind": "ab"[i % 2], "other": i} for i in range(40)]
        write_jsonl(tmp_path / "data" / f"{shard}.jsonl", rows)
    every = {f"{shard} {i}" for shard in range(2) for i in range(40)}
    counts, drawn = _stream(tmp_path, seed=1)
    assert (counts.read, counts.kept) == (10, 10)
    assert set(drawn) < every
    assert _stream(tmp_path, seed=1)[1] == drawn
    assert _stream(tmp_path, seed=2)[1] != drawn
    counts, drawn = _stream(tmp_path, samples=1000)
    assert (counts.read, counts.kept, set(drawn)) == (80, 80, every)
    counts, drawn = _stream(tmp_path, filter={"kind": "a", "other": [0, 2, 4]}, samples=1000)
    assert (counts.read, counts.kept) == (80, 6)
    assert set(drawn) == {f"{shard} {i}" for shard in range(2) for i in (0, 2, 4)}


@pytest.mark.parametrize("suffix", [".json", ".csv", ".tsv", ".parquet"])
def test_every_file_format_can_be_streamed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    _write(path)
    _, examples = load(tmp_path, path=path.name, **PAIR, streaming=True, samples=5)
    assert {example.text for example in examples} == {f"{row['question']} {row['answer']}" for row in ROWS}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"text": "{u}"}, "`text` .*'u'.* t"),
        ({"filter": {"t": "z"}}, "`filter` keeps, among 4 rows"),
        ({"split": "test"}, "data"),
        ({"split": "train[:2]"}, "data"),
    ],
)
def test_streams_without_rows(tmp_path: Path, source: dict[str, Any], named: str) -> None:
    (tmp_path / "data").mkdir()
    for shard in range(2):
        write_jsonl(tmp_path / "data" / f"{shard}.jsonl", [{"t": "a"}, {"t": "b"}])
    with refused(DataError, "datasets", match=named):
        _stream(tmp_path, **source)


def test_files_elsewhere_keep_their_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    [(counts, _)] = load_rows(
        [DatasetSource(path="json", data_files=str(tmp_path / "rows.jsonl"), text="{answer}")],
        tmp_path, seed=0, chat=None, chat_prompts=False,
    )  # fmt: skip
    assert counts.source == "rows.jsonl"
    with pytest.raises(FieldError, match="`samples`"):
        DatasetSource(path="a", text="{t}", streaming=True)


@pytest.mark.parametrize("streamed", [False, True])
def test_texts_and_numbers_of_json_are_trained_on_as_they_are_written(tmp_path: Path, streamed: bool) -> None:
    """Whatever else is in the column: `datasets` would read 18.0, 7, 1.5 and a time."""
    columns = {
        "int beside float": ([18, 3.5, None], ["18", "3.5"]),
        "text beside int": (["007", 5, "1.50"], ["007", "5", "1.50"]),
        "dates": (["2020-01-01", "2020-01-02T10:00:00", "2020"], ["2020-01-01", "2020-01-02T10:00:00", "2020"]),
        "large": ([2**70, 9007199254740993, 0.5], [str(2**70), "9007199254740993", "0.5"]),
        "missing": ([float("nan"), 2.5, 1], ["2.5", "1"]),  # as pandas writes it
    }
    for name, (values, expected) in columns.items():
        path = write_jsonl(tmp_path / f"{name}.jsonl", [{"value": value, "other": [name]} for value in values])
        options = {"streaming": True, "samples": 5} if streamed else {}
        assert sorted(load_rows_of(tmp_path, path=path.name, text="{value}", **options)) == sorted(expected)
    path = write_jsonl(
        tmp_path / "scored.jsonl", [{"t": str(i), "score": score} for i, score in enumerate([1, 1.0, 2.5])]
    )
    assert load_rows_of(tmp_path, path=path.name, text="{t}", filter={"score": [1]}) == ["0", "1"]
    for odd in ([{"t": "a"}, {"t": ["b"]}], [{"t": [1, "b"]}]):
        write_jsonl(tmp_path / "odd.jsonl", odd)
        with refused(DataError, "datasets", match="odd.jsonl"):
            load_rows_of(tmp_path, path="odd.jsonl", text="{t}", **options)
    (tmp_path / "odd.jsonl").write_text("[1, 2]")
    with refused(DataError, "datasets", match="odd.jsonl: row 1 is 1, not an object"):
        load_rows_of(tmp_path, path="odd.jsonl", text="{t}")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_filter_takes_norwegian_for_no(tmp_path: Path, streamed: bool) -> None:
    """YAML reads `[no, sv]` as false and text, and the Norwegian rows were left out."""
    rows = [{"text": f"{lang} {i}", "lang": lang} for i in range(3) for lang in ("no", "sv", "da")]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {"streaming": True, "samples": 9} if streamed else {}
    (tmp_path / "source.yaml").write_text("lang: [no, sv]")
    read = RecipeFile.read(tmp_path / "source.yaml").content
    texts = load_rows_of(tmp_path, path="rows.jsonl", text="{text}", filter=read, **options)
    assert sorted(texts) == sorted(row["text"] for row in rows if row["lang"] in ("no", "sv"))


def test_a_filter_with_a_value_that_no_row_has_is_refused(tmp_path: Path) -> None:
    rows = [{"text": "a", "lang": "sw", "kind": 1}, {"text": "b", "lang": "te", "kind": 2}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with refused(DataError, "datasets", match="no row has lang in \\['swh'\\]"):
        load_rows_of(tmp_path, path="rows.jsonl", text="{text}", filter={"lang": ["sw", "swh"]})
    kept = load_rows_of(tmp_path, path="rows.jsonl", text="{text}", filter={"lang": ["sw"], "kind": [1, 2]})
    assert kept == ["a"]  # some row has kind 2
    with refused(DataError, "datasets", match="no row has kind in \\[2\\].*such as '1'[^,]*$"):
        load_rows_of(tmp_path, path="rows.jsonl", text="{text}", filter={"lang": "sw", "kind": 2})
