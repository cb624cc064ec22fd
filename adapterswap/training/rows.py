"""Rows of text from the recipe's sources: loaded, filtered, sampled and rendered through their templates.

Loading is `datasets.load_dataset`'s. A rendered row is an `Example`: its whole text, and the prefixes of it between
which the loss is taken. Knows nothing of tokens; of a tokenizer it uses the chat template only.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError, Problems
from adapterswap.training.recipe import DatasetSource
from adapterswap.training.templates import Template

__all__ = ["Example", "SourceCounts", "load_rows"]

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_BATCH = 1000  # rows held as Python objects at once


@dataclass(frozen=True, slots=True)
class Example:
    """A row as text.

    Attributes:
        text: all of it.
        trained: pairs of prefixes of `text`; the loss is taken on what lies after the first and not after the second
            (None: to the end).
        chat: rendered by a chat template, which writes the special tokens itself.
    """

    text: str
    trained: tuple[tuple[str, str | None], ...]
    chat: bool = False


@dataclass
class SourceCounts:
    """What became of the rows of one source.

    Attributes:
        source: the recipe's path of it.
        read: rows in the split.
        kept: rows after filter and samples.
        empty: of these, rows without a value, or with nothing to train on.
        files: of local files, name → sha256.
    """

    source: str
    read: int = 0
    kept: int = 0
    empty: int = 0
    files: dict[str, str] = field(default_factory=dict)


def load_rows(
    sources: Sequence[DatasetSource], folder: Path, *, seed: int, chat: Callable[..., str] | None, chat_prompts: bool
) -> Iterator[tuple[SourceCounts, Iterator[Example]]]:
    """The rows of every source, source by source; the counts are complete when a source's rows are used up.

    Args:
        sources: what to load.
        folder: what local paths are relative to.
        seed: of `samples`.
        chat: the tokenizer's `apply_chat_template`, where it has a template.
        chat_prompts: render prompts and completions as chat turns.

    Raises:
        AdapterswapError: a source that cannot be loaded, an unknown column (each with the columns that there are), a
            value that is no text, or no rows left after the filter.
    """
    for source in sources:
        counts = SourceCounts(source.path)
        table = _load(source, folder, counts)
        counts.read = len(table)
        _check_columns(source, table.column_names)
        table = _keep(source, table, seed)
        counts.kept = len(table)
        render = _renderer(source, chat, chat_prompts)
        yield counts, _examples(table, render, source, counts)


def _load(source: DatasetSource, folder: Path, counts: SourceCounts) -> Any:
    """The split of `source` as a datasets.Dataset."""
    import datasets

    local = (folder / Path(source.path).expanduser()).resolve()
    arguments: dict[str, Any] = {"split": source.split}
    if local.is_file() or (local.is_dir() and source.data_files):
        files = [local] if local.is_file() else [local / name for name in _as_list(source.data_files)]
        builder = _builder(files)
        for file in files:
            counts.files[file.name] = _sha256(file)
        if builder == "csv" and files[0].suffix == ".tsv":
            arguments["sep"] = "\t"
        # A folder of our own: the user's cache is for what was downloaded.
        with tempfile.TemporaryDirectory(prefix="adapterswap-") as cache:
            return _attempt(source, datasets.load_dataset, builder, data_files=[str(f) for f in files],
                            cache_dir=cache, keep_in_memory=True, **arguments)  # fmt: skip
    if Path(source.path).suffix in _BUILDERS or local.is_dir() or source.path.startswith((".", "/", "~")):
        mend = "Correct the path; it is relative to the recipe's folder"
        if local.is_dir():
            raise AdapterswapError(f"the dataset {source.path} is a folder", "Name its files in `data_files`")
        raise AdapterswapError(f"the dataset file {source.path} does not exist", mend)
    for key in ("name", "data_files", "data_dir", "revision"):
        if getattr(source, key) is not None:
            arguments[key] = getattr(source, key)
    return _attempt(source, datasets.load_dataset, source.path, **arguments)


def _attempt(source: DatasetSource, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`load(...)`, with what can go wrong there (the network, the Hub, the files' contents) told as our error."""
    import datasets

    try:
        return load(*args, **kwargs)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        raise AdapterswapError(
            f"the dataset {source.path} is no file here, and cannot be had from the Hub: {_short(error)}",
            "Check the path or id; for a gated dataset log in with `hf auth login`",
        ) from None
    except (ValueError, RuntimeError, OSError, datasets.exceptions.DatasetsError) as error:
        mend = "Check split, name, data_files and the files themselves"
        if "script" in str(error):
            mend = "Datasets made by a script are no longer run: name its files in data_files, or a converted revision"
        raise AdapterswapError(f"the dataset {source.path} cannot be loaded: {_short(error)}", mend) from None


def _builder(files: Sequence[Path]) -> str:
    problems, builders = Problems(), set()
    for file in files:
        if not file.is_file():
            problems.add(f"the dataset file {file.name} does not exist", "Correct `path` or `data_files`")
        elif not file.stat().st_size:
            problems.add(f"the dataset file {file.name} is empty", "Give a file with rows")
        elif file.suffix not in _BUILDERS:
            problems.add(f"the dataset file {file.name} has an unknown suffix", f"Known: {', '.join(_BUILDERS)}")
        else:
            builders.add(_BUILDERS[file.suffix])
    if len(builders) > 1:
        problems.add(f"the dataset's files are of several kinds: {', '.join(sorted(builders))}", "List them apart")
    problems.raise_if_any()
    return builders.pop()


def _check_columns(source: DatasetSource, columns: Sequence[str]) -> None:
    problems = Problems()
    mend = f"Its columns are: {', '.join(columns)}"
    for key in ("prompt", "completion", "text"):
        if (template := getattr(source, key)) is not None:
            for name in Template(template).missing(columns):
                problems.add(f"the dataset {source.path}: `{key}` names the column {name!r}, which is not there", mend)
    named = [("filter", name) for name in source.filter] + ([("messages", source.messages)] if source.messages else [])
    for key, name in named:
        if name not in columns:
            problems.add(f"the dataset {source.path}: `{key}` names the column {name!r}, which is not there", mend)
    problems.raise_if_any()


def _keep(source: DatasetSource, table: Any, seed: int) -> Any:
    """Filter, then sample."""
    if not len(table):
        raise AdapterswapError(f"the dataset {source.path} has no rows in {source.split}", "Correct path or split")
    for column, allowed in source.filter.items():
        values = set(_as_list(allowed))
        found = table[column][:]
        keep = [index for index, value in enumerate(found) if value in values]
        if not keep:
            seen = ", ".join(repr(value) for value in sorted(set(map(str, found)))[:8])
            raise AdapterswapError(
                f"the dataset {source.path}: no row has {column} in {sorted(map(str, values))}",
                f"Values that occur there: {seen}",
            )
        table = table.select(keep)
    if source.samples is not None and source.samples < len(table):
        import numpy

        chosen = numpy.random.default_rng(seed).permutation(len(table))[: source.samples]
        table = table.select(sorted(chosen.tolist()))
    return table


def _examples(
    table: Any, render: Callable[[Mapping[str, Any]], Example | None], source: DatasetSource, counts: SourceCounts
) -> Iterator[Example]:
    for start in range(0, len(table), _BATCH):
        batch = table[start : start + _BATCH]
        names = list(batch)
        for offset, values in enumerate(zip(*batch.values(), strict=True)):
            try:
                example = render(dict(zip(names, values, strict=True)))
            except AdapterswapError as error:
                problem = error.problems[0]
                raise AdapterswapError(
                    f"the dataset {source.path}, row {start + offset} of those kept: {problem.what}", problem.mend
                ) from None
            if example is None:
                counts.empty += 1
            else:
                yield example


def _renderer(
    source: DatasetSource, chat: Callable[..., str] | None, chat_prompts: bool
) -> Callable[[Mapping[str, Any]], Example | None]:
    """How a row of `source` becomes an Example; None for a row with nothing to train on."""
    if source.messages or (chat_prompts and source.text is None):
        if chat is None:
            raise AdapterswapError(
                f"the dataset {source.path} is to be rendered as chat, and the tokenizer has no chat template",
                "Use the instruct model's tokenizer, or prompt and completion with chat_template: false",
            )
        return _chat_renderer(source, chat)
    if source.text is not None:
        template = Template(source.text)

        def text(row: Mapping[str, Any]) -> Example | None:
            filled = template.fill(row)
            return Example(filled, (("", None),)) if filled and filled.strip() else None

        return text
    assert source.prompt is not None
    assert source.completion is not None
    prompts, completions = Template(source.prompt), Template(source.completion)

    def pair(row: Mapping[str, Any]) -> Example | None:
        prompt, completion = prompts.fill(row), completions.fill(row)
        if prompt is None or completion is None or not completion.strip():
            return None
        return Example(prompt + completion, ((prompt, None),))

    return pair


def _chat_renderer(source: DatasetSource, chat: Callable[..., str]) -> Callable[[Mapping[str, Any]], Example | None]:
    prompts = Template(source.prompt) if source.prompt is not None else None
    completions = Template(source.completion) if source.completion is not None else None

    def conversation(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        if source.messages:
            messages = row[source.messages]
            if messages is not None and not _are_messages(messages):
                raise AdapterswapError(
                    f"the column {source.messages!r} does not hold chat messages",
                    "A conversation is a list of {role: system, user or assistant, content: text}",
                )
            return messages  # type: ignore[no-any-return]
        assert prompts is not None
        assert completions is not None
        prompt, completion = prompts.fill(row), completions.fill(row)
        if prompt is None or completion is None or not completion.strip():
            return None
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]

    def render(row: Mapping[str, Any]) -> Example | None:
        messages = conversation(row)
        if not messages:
            return None
        trained = tuple(
            (
                chat(messages[:turn], tokenize=False, add_generation_prompt=True),
                None if turn == len(messages) - 1 else chat(messages[: turn + 1], tokenize=False),
            )
            for turn, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        return Example(chat(messages, tokenize=False), trained, chat=True) if trained else None

    return render


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short(error: BaseException) -> str:
    return " ".join(str(error).split()).removesuffix(".")[:200]
