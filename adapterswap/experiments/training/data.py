"""Turn a recipe's sources into training rows and validation rows, and count the rest.

Tables are loaded with `datasets.load_dataset`, whole or as a stream. Local files are read into memory and leave nothing
in your cache; Hub datasets use it, or are streamed. For a stream, `datasets` shuffles the order of the shards with the
seed, and the rows within a moving buffer. So the rows come from the beginning of some shards; they are not a sample of
the whole. All sources are joined, shuffled with the data seed, and the validation rows split off.
"""

from __future__ import annotations

import datetime
import glob
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from adapterswap.core import OpenedBase
from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.permitted import uncounted
from adapterswap.experiments.training.hygiene import MATH, Screen
from adapterswap.experiments.training.recipe import SIDES, DatasetSource, Template, TrainingOptions, TrainRecipe
from adapterswap.experiments.training.report import RowCounts
from adapterswap.experiments.training.texts import (
    SEPARATORS,
    TEMPLATE_COLUMNS,
    Example,
    Renderer,
    Row,
    choose_reader,
    choose_renderer,
    is_chat,
    store_value,
    template_columns,
)
from adapterswap.experiments.training.tokens import TokenCounts, Tokens, tokenize
from adapterswap.kit.errors import BaseModelError, DataError, NotFoundError, Problems, reason_of
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.text import csv_rows, expand, json_lines, loads, shown
from adapterswap.kit.hub import HubFailure

_BUFFER = 10_000  # rows


def draw_rows(
    stream: Any,
    columns: Sequence[str],
    allowed: Mapping[str, set[Any]],
    *,
    samples: int,
    seed: int,
    for_chat: Collection[str | None] = (),
) -> tuple[Any, int]:
    """The first matching rows of the shuffled stream, as a Dataset in memory, and how many rows were read.

    Columns `for_chat` hold lists and objects for a chat template.
    """
    drawn: dict[str, list[Any]] = {column: [] for column in columns}
    shuffled = iter(stream.shuffle(seed=seed, buffer_size=_BUFFER))
    rows_read = rows_drawn = 0

    # A stream may be endless, or slow: no row is read after the last one that is wanted.
    while rows_drawn < samples:
        row = next(shuffled, None)
        if row is None:
            break
        rows_read += 1

        if all(row.get(column) in values for column, values in allowed.items()):
            rows_drawn += 1
            for column, cells in drawn.items():
                cells.append(row.get(column))

    return _as_dataset(drawn, for_chat), rows_read


_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}


@dataclass
class SourceCounts:
    """Counts of the rows of one source.

    Attributes:
        source: its path in the recipe.
        read: rows in the split; of a stream, rows read.
        kept: rows left after filter and samples.
        empty: of `kept`, rows dropped because a value is missing or there is nothing to train on.
        math: of `kept`, rows dropped by hygiene as math.
        overlap: of `kept`, rows dropped because they share text with an evaluation, by the evaluation's name.
        unread: columns, and keys in the rows' messages, that neither the recipe nor the chat template reads.
        remarks: what the chat template does to rows that a user should know → to how many, and an example.
        files: for local files, name → sha256.
    """

    source: str
    read: int = 0
    kept: int = 0
    empty: int = 0
    math: int = 0
    overlap: dict[str, int] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def load_table(
    source: DatasetSource, folder: Path, *, seed: int, chat: ChatTemplate | None = None
) -> tuple[Any, SourceCounts]:
    """Load the rows of `source` as a datasets.Dataset, filtered and sampled, with their counts.

    With the template that renders them, `chat`, the columns that it reads are loaded too.
    """
    # Local files without a name of their own (`path: json`) are called by their own names.
    name = source.path
    if _is_kind(source.path) and source.data_files:
        files = _as_list(source.data_files)
        name = ", ".join(file if "://" in file else Path(file).name for file in files)

    counts = SourceCounts(name)
    table = _load(source, folder, counts)
    if source.streaming:
        table = _draw(source, table, counts, chat, seed=seed)
        counts.kept = len(table)
        return table, counts

    counts.read = len(table)
    if not len(table):
        raise DataError(
            f"The dataset {source.path} has no rows in the split {source.split}",
            "Correct `path` or `split`",
            parameter="datasets",
        )
    _check_columns(source, table.column_names)
    columns = _columns_to_read(source, table.column_names, chat)
    counts.unread += [name for name in table.column_names if name not in columns]

    if source.filter:
        table = _filter(source, table)
    if source.samples is not None and source.samples < len(table):
        chosen = np.random.default_rng(seed).permutation(len(table))[: source.samples]
        table = table.select(sorted(chosen.tolist()))
    counts.kept = len(table)
    return table, counts


def _is_kind(path: str) -> bool:
    """Whether a source's path says only how its files are read, such as `path: json`."""
    return f".{path}" in _BUILDERS


def _columns_to_read(source: DatasetSource, columns: Sequence[str], chat: ChatTemplate | None) -> list[str]:
    """The columns of a table that the recipe names, and those that the template reads."""
    names = [name for _, name in _named_columns(source)]
    if chat is not None:
        names += template_columns(columns, chat)
    return list(dict.fromkeys(names))


def _draw(source: DatasetSource, stream: Any, counts: SourceCounts, chat: ChatTemplate | None, *, seed: int) -> Any:
    """`samples` rows of a stream, as a datasets.Dataset."""

    def draw() -> tuple[Any, int]:
        # A stream that does not know its columns has those of its first rows; without rows there are none to check.
        seen: dict[str, None] = dict.fromkeys(stream.column_names or ())
        if not seen:
            for row in stream.take(_BATCH):
                seen |= dict.fromkeys(row)
        columns = list(seen)
        if columns:
            _check_columns(source, columns)

        allowed_values = {column: _values(allowed) for column, allowed in source.filter.items()}
        read = _columns_to_read(source, columns, chat)
        counts.unread += [name for name in columns if name not in read]
        for_chat = source.messages, *TEMPLATE_COLUMNS
        return draw_rows(stream, read, allowed_values, samples=source.samples or 0, seed=seed, for_chat=for_chat)

    table, counts.read = _attempt(source, draw)
    if not len(table):
        filtered = ""
        if source.filter:
            filtered = f" that `filter` keeps, among {counts.read:,} rows"
        raise DataError(
            f"The dataset {source.path} has no rows{filtered} in the split {source.split}",
            "Correct `path` or `split`",
            parameter="datasets",
        )
    return table


def _load(source: DatasetSource, folder: Path, counts: SourceCounts) -> Any:
    """The split of `source` as a datasets.Dataset, or as a datasets.IterableDataset if it is streamed."""
    import datasets

    # With `path: json` and the like, the files are named from the recipe's folder.
    local = (folder / expand(source.path)).resolve()
    names = _as_list(source.data_files or [])
    in_recipe_folder = bool(names) and not any("://" in name for name in names)
    if _is_kind(source.path) and in_recipe_folder and not local.exists():
        local = folder.resolve()

    if local.is_file() or (local.is_dir() and names):
        files = [local]
        if not local.is_file():
            files = []
            for name in names:
                path = local / expand(name)
                matches: list[str] = []
                if glob.has_magic(name) and not path.exists():  # such as `*.jsonl`
                    matches = sorted(glob.glob(str(path), recursive=True))
                files += map(Path, matches or [str(path)])
        counts.files = {file.name: sha256_of(file) for file in files if file.is_file()}
        return _attempt(source, lambda: _read(files, source))

    if local.is_dir():
        raise DataError(
            f"The dataset {source.path} is a folder", "Name its files in `data_files`", parameter="datasets"
        )
    if Path(source.path).suffix in _BUILDERS or source.path.startswith((".", "/", "~")):
        raise NotFoundError(
            f"The dataset file {source.path} does not exist",
            "Correct the path; it is relative to the recipe's folder",
            parameter="datasets",
        )

    # Neither a file nor a folder: an id on the Hub.
    arguments: dict[str, Any] = {}
    for key in ("name", "data_files", "data_dir", "revision"):
        value = getattr(source, key)
        if value is not None:
            arguments[key] = value
    if source.streaming:
        arguments["streaming"] = True
    return _attempt(source, lambda: datasets.load_dataset(source.path, split=source.split, **arguments))


def _read(files: Sequence[Path], source: DatasetSource) -> Any:
    """The rows of local files of one kind."""
    import datasets

    kind = _kind_of(files)
    split = source.split
    names = [str(file) for file in files]

    if kind == "parquet":
        if source.streaming:
            return datasets.load_dataset(kind, data_files=names, split=split, streaming=True)
        # A temporary cache, removed once the rows are in memory: the user's own cache is for downloads.
        with scratch_folder("rows") as cache:
            return datasets.load_dataset(kind, data_files=names, split=split, cache_dir=str(cache), keep_in_memory=True)

    if not source.streaming:
        return _table(names, split, source)
    if split != "train":
        raise ValueError(f"a stream of local files has only the split train, not {split}")
    return datasets.IterableDataset.from_generator(_rows, gen_kwargs={"names": names})


def _rows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of JSON, CSV or TSV files.

    `datasets` infers types in JSON: 18 beside 3.5 becomes 18.0, "007" beside 5 becomes 7, and a date becomes a time. Of
    tables with text it takes the first column for row names if rows have a field more than the header.
    """
    for name in names:
        with open(name, encoding="utf-8-sig", newline="") as file:
            try:
                separator = SEPARATORS.get(Path(name).suffix)
                if separator is None:
                    yield from _json_rows(file)
                else:
                    yield from csv_rows(file, separator)
            except ValueError as error:
                raise ValueError(f"{Path(name).name}: {error}") from None


def _json_rows(file: TextIO) -> Iterator[dict[str, Any]]:
    """The rows of a JSON file, which holds a list or a row in each line; NaN, which JSON lacks, is a missing value."""
    begins = file.read(1)
    file.seek(0)
    if begins != "[":
        yield from json_lines(file, dict, parse_constant=lambda _: None)
        return
    for number, row in enumerate(loads(file.read(), lambda _: None), 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {shown(row)}, not an object with columns")
        yield row


def _table(names: Sequence[str], split: str, source: DatasetSource) -> Any:
    """The rows of files as a datasets.Dataset; columns that nothing reads are empty."""
    import datasets

    named = _named_columns(source)
    needed = {*(name for _, name in named), *TEMPLATE_COLUMNS}

    columns: dict[str, list[Any]] = {}
    number = 0
    for row in _rows(names):
        # A column that begins in a later row has no values in those before it.
        for key in row:
            if key not in columns:
                columns[key] = [None] * number
        for key, values in columns.items():
            value = None
            if key in needed:
                value = row.get(key)
            values.append(value)
        number += 1

    filtered = {name for key, name in named if key == "filter"}
    rendered = {name for key, name in named if key != "filter"}
    table = _as_dataset(columns, (source.messages, *TEMPLATE_COLUMNS), filtered - rendered)

    # The split may name parts, such as `train[:10%]+train[50:]`.
    rows: list[int] = []
    for part in datasets.ReadInstruction.from_spec(split).to_absolute({"train": number}):
        rows += range(part.from_, part.to)
    return table.select(rows)


def _as_dataset(
    columns: Mapping[str, list[Any]], for_chat: Collection[str | None], compared: Collection[str] = ()
) -> Any:
    """Columns as a datasets.Dataset. Texts and numbers of several types, or beyond 64 bits, become text.

    So do lists and objects in columns for chat templates, to which a table would add each other's keys; `read_value`
    reads them. In columns that are only compared, whole numbers and fractions stay numbers.
    """
    import datasets

    alike = {}
    for name, values in columns.items():
        if name in for_chat:
            values = [store_value(value) for value in values]

        kinds = {type(value) for value in values if value is not None}
        huge = int in kinds and any(type(value) is int and abs(value) >= 2**63 for value in values)
        mixed = len(kinds) > 1 and not (name in compared and kinds == {int, float})
        if mixed and not kinds <= {str, int, float, bool}:
            raise ValueError(f"the column {name!r} mixes {' and '.join(sorted(kind.__name__ for kind in kinds))}")

        if huge or mixed:
            values = [None if value is None else str(value) for value in values]
        alike[name] = values

    try:
        return datasets.Dataset.from_dict(alike)
    except (TypeError, OverflowError) as error:  # pyarrow's, of lists and objects with values of several types
        raise ValueError(str(error)) from None


def _attempt(source: DatasetSource, load: Callable[[], Any]) -> Any:
    """Call `load()`, and turn its errors (the network, the Hub, the files' contents) into ours."""
    import datasets

    try:
        with uncounted():
            return load()
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        failure = HubFailure(error)
        raise NotFoundError(
            f"The dataset {source.path} is not a local file and could not be downloaded from the Hub: {failure.reason}",
            failure.remedy("Check the path or id; for a gated dataset log in with `hf auth login`"),
            parameter="datasets",
        ) from None
    except (ValueError, RuntimeError, OSError, KeyError, datasets.exceptions.DatasetsError) as error:
        # Of a failure while a table was made, the library's own error only says that there was one.
        cause: BaseException = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
            cause = error.__cause__
        remedy = "Check `split`, `name`, `data_files` and the files themselves"
        if "script" in str(error):
            remedy = (
                "Dataset scripts are no longer supported: read the files directly with path: json (or csv, parquet) "
                f"and data_files: hf://datasets/{source.path}/…, or use a converted revision"
            )
        raise DataError(
            f"The dataset {source.path} cannot be loaded: {reason_of(cause)}", remedy, parameter="datasets"
        ) from None


def _kind_of(files: Sequence[Path]) -> str:
    """The one kind of these files, by their suffixes; raises if one is missing, empty or of another kind."""
    problems = Problems(DataError)
    builders = set()
    for file in files:
        if not file.is_file():
            problems.add(
                f"The dataset file {file.name} does not exist",
                "Correct `path` or `data_files`",
                parameter="datasets",
                kind=NotFoundError,
            )
        elif not file.stat().st_size:
            problems.add(f"The dataset file {file.name} is empty", "Name a file with rows", parameter="datasets")
        elif file.suffix not in _BUILDERS:
            problems.add(
                f"The dataset file {file.name} has an unknown suffix",
                f"Known: {', '.join(_BUILDERS)}",
                parameter="datasets",
            )
        else:
            builders.add(_BUILDERS[file.suffix])

    if len(builders) > 1:
        problems.add(
            f"The dataset's files have different formats: {', '.join(sorted(builders))}",
            "List them as separate datasets",
            parameter="datasets",
        )
    problems.raise_if_any()
    return builders.pop()


def _check_columns(source: DatasetSource, columns: Sequence[str]) -> None:
    """Refuse columns that the recipe names and the dataset does not have."""
    problems = Problems(DataError)
    remedy = f"Its columns are: {', '.join(columns)}"
    for key, name in _named_columns(source):
        if name not in columns:
            problems.add(
                f"The dataset {source.path}: `{key}` names the column {name!r}, which does not exist",
                remedy,
                parameter="datasets",
            )
    problems.raise_if_any()


def _named_columns(source: DatasetSource) -> list[tuple[str, str]]:
    """Each key of the recipe that names a column, and the column."""
    named = []
    for key in ("prompt", "completion", "text"):
        template = getattr(source, key)
        if template:
            named += [(key, name) for name in Template(template).fields]
    named += [("filter", name) for name in source.filter]
    if source.messages:
        named.append(("messages", source.messages))
    return named


def _filter(source: DatasetSource, table: Any) -> Any:
    """The rows that `filter` keeps. A value that no row has is refused: it is a slip that would leave rows out."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.compute  # type: ignore[import-untyped]

    keep = np.full(len(table), True)
    for column, allowed in source.filter.items():
        cells = table.with_format("arrow")[column][:]
        if pyarrow.types.is_nested(cells.type):
            raise DataError(
                f"The dataset {source.path}: `filter` names {column}, which does not contain plain values",
                "Filter another column",
                parameter="datasets",
            )

        # A source may have millions of rows, but few distinct values in this column.
        distinct = cells.unique().to_pylist()
        for value in _as_list(allowed):
            if _values(value).isdisjoint(distinct):
                raise _no_row(source, column, [value], distinct)

        values = _values(allowed)
        matching = pyarrow.array([value for value in distinct if value in values], cells.type)
        kept_before = keep
        keep = keep & np.asarray(pyarrow.compute.is_in(cells, value_set=matching))
        if not keep.any():
            # The filters before this one kept rows, and these are the values in them.
            left = cells.filter(pyarrow.array(kept_before)).unique().to_pylist()
            raise _no_row(source, column, _as_list(allowed), left)

    return table.select(np.flatnonzero(keep))


def _no_row(source: DatasetSource, column: str, allowed: list[Any], values: Iterable[Any]) -> DataError:
    """The error for a filter that no row passes."""
    examples = ", ".join(repr(value) for value in sorted(set(map(str, values)))[:8])
    return DataError(
        f"The dataset {source.path}: no row has {column} in {allowed}",
        f"Use values of that column, such as {examples}",
        parameter="datasets",
    )


def _values(allowed: Any) -> set[Any]:
    """The allowed values, also as text: a number in the recipe may be text in a file, and YAML reads `no` as false."""
    values: set[Any] = set()
    for value in _as_list(allowed):
        values |= {value, str(value)}
        if isinstance(value, bool):
            for word in _WORDS[value]:
                values |= {word, word.title(), word.upper()}
    return values


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_WORDS = {True: ("true", "yes", "on"), False: ("false", "no", "off")}
_BATCH = 1000  # rows held as Python objects at once


def load_rows(
    sources: Sequence[DatasetSource],
    folder: Path,
    *,
    seed: int,
    chat: ChatTemplate | None,
    chat_prompts: bool,
    separator: str = "",
    screen: Screen | None = None,
) -> Iterator[tuple[SourceCounts, Iterator[Example]]]:
    """The rows of every source. The counts of a source are complete once its rows have been read.

    Args:
        chat: the tokenizer's chat template; None if it has none.
        chat_prompts: render prompts and completions as chat turns.
        separator: the text between prompt and completion if they are not chat turns.
        screen: decides which rows to drop; dropped rows are counted.
    """
    for source in sources:
        unread: dict[str, None] = {}
        render = choose_renderer(source, chat, chat_prompts=chat_prompts, separator=separator, unread=unread)
        used_chat = chat if is_chat(source, chat_prompts=chat_prompts) else None
        table, counts = load_table(source, folder, seed=seed, chat=used_chat)
        yield counts, _examples(table, render, _row_filter(source, screen, counts), counts, unread)


def _row_filter(source: DatasetSource, screen: Screen | None, counts: SourceCounts) -> Callable[[Row], bool]:
    """A function that says whether the screen keeps a row, and counts the rows that it drops."""
    if screen is None:
        return lambda row: True
    read_text = choose_reader(source)

    def keeps(row: Row) -> bool:
        reason = screen.judge(read_text(row), is_task=source.side == "task")
        if reason is None:
            return True

        # Math of the language side is dropped; for text of an evaluation, `reason` is the evaluation's name.
        if reason == MATH:
            counts.math += 1
        elif screen.refuses:
            raise DataError(
                f"A row shares 13 words in a row, or a whole line, with {reason}: {shown(read_text(row))}",
                "Remove such rows from the data, or set hygiene.on_overlap: drop",
                parameter="datasets",
            )
        else:
            counts.overlap[reason] = counts.overlap.get(reason, 0) + 1
        return False

    return keeps


def _examples(
    table: Any, render: Renderer, keeps: Callable[[Row], bool], counts: SourceCounts, unread: Mapping[str, None]
) -> Iterator[Example]:
    """The rows of a table that are not empty and that are kept, rendered. At the end, `counts` are complete."""
    for start in range(0, len(table), _BATCH):
        batch = table[start : start + _BATCH]
        for offset, values in enumerate(zip(*batch.values(), strict=True)):
            row = dict(zip(batch, values, strict=True))
            try:
                example = render(row)
                is_kept = example is not None and keeps(row)
            except DataError as error:
                raise error.within(f"the dataset {counts.source}, row {start + offset} of those kept") from None

            if example is None:
                counts.empty += 1
            elif is_kept:
                for remark, shown_part in example.remarks.items():
                    count, first = counts.remarks.get(remark, (0, shown_part))
                    counts.remarks[remark] = count + 1, first
                yield example

    # The renderer learns which keys the template does not read while it renders.
    counts.unread += unread


@dataclass(frozen=True)
class Data:
    """Tokenised rows to train on and to hold out, with their counts.

    Attributes:
        train: rows to train on; with `simultaneous`, first the task's, then the language's.
        parts: how many rows of `train` each side has, in this order; without sides, one number.
        validation: rows held out, or None.
        rows: the counts of rows used and dropped.
    """

    train: Tokens
    parts: tuple[int, ...]
    validation: Tokens | None
    rows: RowCounts


def load_data(recipe: TrainRecipe, base: OpenedBase) -> Data:
    """Load, tokenise, shuffle and split the recipe's rows."""
    read = _read_rows(recipe.datasets, recipe, base)
    chance = np.random.default_rng(recipe.training.data_seed)

    # The rows to use: `samples_per_side` of each side, drawn at random, or all. Then each group is shuffled.
    used_rows = np.arange(len(read.sides))
    if recipe.samples_per_side is not None:
        drawn = []
        for side in np.unique(read.sides):
            rows_of_side = np.flatnonzero(read.sides == side)
            drawn.append(chance.permutation(rows_of_side)[: recipe.samples_per_side])
        used_rows = np.sort(np.concatenate(drawn))
    groups = [chance.permutation(group) for group in _groups(read.sides, used_rows, recipe)]

    # Validation rows: from datasets of their own, or the first ones of each group.
    validation = recipe.validation
    held_out = None
    if validation and validation.datasets:
        of_validation = _read_rows(validation.datasets, recipe, base)
        held_out = of_validation.tokens
        if recipe.simultaneous:
            both = _groups(of_validation.sides, np.arange(len(held_out)), recipe)
            share = min(map(len, both))
            held_out = held_out.take(np.concatenate([chance.permutation(group)[:share] for group in both]))
    elif validation:
        total = validation.rows or max(1, round((validation.fraction or 0) * len(used_rows)))
        share = math.ceil(total / len(groups))  # of each side as many
        if share >= min(map(len, groups)):
            side = " of each side" if recipe.simultaneous else ""
            raise DataError(
                f"Validation would take {share} rows{side}, but there are only {min(map(len, groups))}",
                "Hold out fewer rows, or add more",
                parameter="validation",
            )
        held_out = read.tokens.take(np.concatenate([group[:share] for group in groups]))
        groups = [group[share:] for group in groups]

    def count_used(marks: Sequence[bool]) -> int:
        """How many of the used rows are marked."""
        return int(np.sum(np.array(marks)[used_rows]))

    train = read.tokens.take(np.concatenate(groups))
    nothing_before = train.trained[train.starts[:-1]]  # first tokens of rows, which nothing predicts
    counts = read.counts
    rows = RowCounts(
        sources=[asdict(source) for source in read.sources],
        train=len(train),
        validation=len(held_out) if held_out else 0,
        empty=sum(source.empty for source in read.sources),
        math=sum(source.math for source in read.sources),
        overlap=sum(sum(source.overlap.values()) for source in read.sources),
        cut_off=counts.cut_off,
        surplus=len(read.tokens) - len(used_rows),
        truncated=count_used(counts.truncated),
        split=counts.split,
        boundary_moved=count_used(counts.boundary_moved),
        without_end=count_used(counts.without_end),
        longest=counts.longest,
        date=counts.date,
        tokens=len(train.ids),
        trained_tokens=int(train.trained.sum() - nothing_before.sum()),
        sha256=train.sha256(),
    )
    return Data(train, tuple(map(len, groups)), held_out, rows)


def _groups(sides: NDArray[np.str_], used_rows: NDArray[np.int64], recipe: TrainRecipe) -> list[NDArray[np.int64]]:
    """The rows of `used_rows` by group: with `simultaneous` one group for each side, else a single group."""
    if not recipe.simultaneous:
        return [used_rows]
    return [used_rows[sides[used_rows] == side] for side in SIDES]


@dataclass(frozen=True)
class _ReadRows:
    """The rows of all sources, one after the other.

    Attributes:
        tokens: the rows, in tokens.
        sides: the side of each row, empty without sides (rows,).
        sources: what was read of each source, and left out.
        counts: what became of the rows when they were tokenised.
    """

    tokens: Tokens
    sides: NDArray[np.str_]
    sources: list[SourceCounts]
    counts: TokenCounts


def _read_rows(datasets: Sequence[DatasetSource], recipe: TrainRecipe, base: OpenedBase) -> _ReadRows:
    """Read and tokenise the rows of all sources."""
    options = recipe.training
    chat = None
    if base.tokenizer.chat_template:
        day = None if recipe.date is None else datetime.date.fromisoformat(recipe.date)
        chat = ChatTemplate(base.tokenizer, date=day)
    loaded = load_rows(
        datasets,
        recipe.folder,
        seed=options.data_seed,
        chat=chat,
        chat_prompts=recipe.chat_template,
        separator=recipe.separator,
        screen=Screen(recipe.hygiene, recipe.folder) if recipe.hygiene else None,
    )

    # Reading is lazy: a source's rows are read, rendered and tokenised here, one source after the other.
    ends = end_tokens(base)
    parts, sources, total = [], [], TokenCounts()
    for source, examples in loaded:
        part, counts = tokenize(
            examples, base.tokenizer, max_length=options.max_length, split_long=options.split_long, ends=ends
        )
        if not len(part):
            raise _nothing_left(source, counts, options.max_length)
        parts.append(part)
        sources.append(source)
        total = total + counts
    if chat and chat.asked_date:
        total = replace(total, date=chat.today.isoformat())

    joined = Tokens.join(parts)
    vocabulary = base.config.get_text_config().vocab_size
    if joined.ids.max() >= vocabulary:
        raise BaseModelError(
            f"The tokenizer of {base.reference} produces the token {joined.ids.max()}, but the model's vocabulary has "
            f"{vocabulary} tokens",
            "Use a folder whose tokenizer belongs to its model",
            parameter="base_model",
        )
    sides = np.repeat([source.side or "" for source in datasets], [len(part) for part in parts])
    return _ReadRows(joined, sides, sources, total)


def end_tokens(base: OpenedBase) -> frozenset[int]:
    """The tokens at which the model stops: the tokenizer's, and those of its generation settings."""
    chosen = base.generation_config().eos_token_id
    if isinstance(chosen, int):
        chosen = [chosen]
    return frozenset([base.tokenizer.eos_token_id, *(chosen or ())])


def _nothing_left(source: SourceCounts, counts: TokenCounts, max_length: int) -> DataError:
    """The error for a source of which no row can be trained on, by what took its rows."""
    if counts.cut_off:
        return DataError(
            f"The dataset {source.source}: max_length {max_length} cuts off the completion of all {counts.cut_off} "
            "rows",
            f"Raise training.max_length (the longest row has {counts.longest} tokens) or shorten the prompt",
            parameter="training.max_length",
        )

    screened = source.math + sum(source.overlap.values())
    if screened:
        return DataError(
            f"The dataset {source.source}: hygiene drops {screened} of {source.kept} rows, and the rest are empty",
            "Choose a source without math and evaluation texts; if it is the task's own math, set `side: task`",
            parameter="datasets",
        )

    return DataError(
        f"The dataset {source.source}: all {source.kept} rows are empty",
        "Check the templates and the values in the columns",
        parameter="datasets",
    )


def sequences(data: Data, options: TrainingOptions) -> tuple[Any, tuple[int, ...]]:
    """The dataset to train on, packed if the options say so, and how many sequences each side has.

    A packed sequence has up to max_length tokens from several whole rows of one side (best-fit decreasing).
    """
    if not options.packing:
        return data.train.dataset(), data.parts
    import datasets
    from trl import pack_dataset

    starts = np.cumsum([0, *data.parts])
    parts = []
    for begin, end in pairwise(starts):
        side = data.train.take(np.arange(begin, end))
        parts.append(pack_dataset(side.dataset(), options.max_length, "bfd"))
    return datasets.concatenate_datasets(parts), tuple(map(len, parts))


def row_lengths(rows: Any) -> NDArray[np.int64]:
    """Tokens of each row of a dataset from `sequences`."""
    import pyarrow.compute

    lengths = pyarrow.compute.list_value_length(rows.with_format("arrow")["input_ids"][:])
    return np.asarray(lengths, np.int64)
