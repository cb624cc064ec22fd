"""Tasks of lm-evaluation-harness and of folders with task files; tasks that run code are refused unless allowed.

Tasks that run code which the model writes are marked `unsafe_code: true`. Loading one already downloads and runs a
metric from the Hub, so only their task files are read.

A task file can name functions (`!function utils.docs`), which the harness imports when it loads the task. Its keys are
passed on to several libraries, so only those in `permitted` may be set: a metric that the harness lacks would be run as
a script, and so would `generation_kwargs: {custom_generate: …}`. Its templates can reach all of Python unless they are
rendered in Jinja's sandbox. The harness's own task files are installed code, and trusted. A recipe cannot trust code,
because its author may also have written the code.
"""

from __future__ import annotations

import fnmatch
import glob
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from adapterswap.experiments.chat import bounded
from adapterswap.experiments.evaluation.settings import files_in
from adapterswap.experiments.permitted import foreign_in_task, uncounted
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    DataError,
    NotFoundError,
    Problems,
    UnsupportedError,
    did_you_mean,
    reason_of,
)
from adapterswap.kit.files.hashes import Stamps
from adapterswap.kit.files.text import read_small
from adapterswap.kit.hub import HubFailure

_VARIABLE = "HF_ALLOW_CODE_EVAL"  # the evaluate library's own permission, needed besides the harness's


def unsafe_tasks(names: Iterable[str], index: Mapping[str, Any]) -> list[str]:
    """Those of these tasks, and of the tasks in these groups and tags, that declare to run the model's code."""
    unsafe: dict[str, None] = {}
    waiting: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names]
    seen = set()
    for name, inline_config in waiting:  # grows while it is read
        entry = index.get(name)
        config: dict[str, Any] = {}
        if entry and entry.cfg:
            config = entry.cfg
        if inline_config.get("unsafe_code") or config.get("unsafe_code"):
            unsafe[name] = None
        if name in seen:
            continue
        seen.add(name)

        # A group's file names its members, or the group around it does; those of a tag are in the index.
        members: list[str | dict[str, Any]] = []
        for tasks in (inline_config.get("task"), config.get("task")):
            if isinstance(tasks, list):
                members += tasks
        if entry and entry.cfg is None:
            members += sorted(entry.tags)
        for member in members:
            if isinstance(member, str):
                waiting.append((member, {}))
            else:
                waiting.append((str(member.get("group") or member.get("task")), member))
    return list(unsafe)


@contextmanager
def code_allowed(allowed: bool) -> Iterator[None]:
    """Set the evaluate library's permission inside the block, if the user has confirmed that code may run."""
    before = os.environ.get(_VARIABLE)
    if allowed:
        os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if allowed and before is None:
            del os.environ[_VARIABLE]
        elif before is not None:
            os.environ[_VARIABLE] = before


_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PYTHON = "tag:yaml.org,2002:python/"  # PyYAML's own tags for Python objects
_MOST_BYTES, _MOST_VALUES, _MOST_DEPTH = 2**20, 200_000, 40  # of a task file; the harness's largest has 63 kB
_FOREIGN = "what a task file may not set, because a library could run code or open an address"
_REMEDY = "Review the code, and pass `trust_task_code=True` if you trust it"


def harness_folder() -> Path | None:
    """The folder of the harness's own task files; None if the harness is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None:
        return None
    for place in spec.submodule_search_locations or ():
        return Path(place).resolve() / "tasks"
    return None


def refuse_task_code(names: Iterable[str], index: Mapping[str, Any], problems: Problems) -> None:
    """Find the code that would run if these tasks, groups and tags were loaded from the user's task files.

    The files are read with everything that they include, and nothing is imported.
    """
    waiting = list(names)
    seen = set()
    for name in waiting:  # grows while it is read
        entry = index.get(name)
        if entry is None or name in seen:
            continue
        seen.add(name)
        if entry.yaml_path is None:  # a tag
            waiting += sorted(entry.tags)
        elif _is_ours(entry.yaml_path):
            waiting += _members(entry.cfg or {})
        else:
            waiting += _members(_read(entry.yaml_path, problems, set()))


def _is_ours(path: Path) -> bool:
    folder = harness_folder()
    return folder is not None and path.expanduser().resolve().is_relative_to(folder)


def _members(config: Mapping[str, Any]) -> list[str]:
    """The names of a group's members, with those of groups inside it."""
    tasks = config.get("task")
    names: list[str] = []
    if not isinstance(tasks, list):
        return names
    for member in tasks:
        if isinstance(member, str):
            names.append(member)
        elif isinstance(member, dict):
            for key in ("group", "task"):
                name = member.get(key)
                if isinstance(name, str):
                    names.append(name)
            names += _members(member)
    return names


class _Function(str):
    """The name after `!function`, which is not imported here."""


def _read(path: Path, problems: Problems, seen: set[Path]) -> dict[str, Any]:
    """A task file joined with its includes, as in the harness; each place that runs code is a problem."""
    path = path.expanduser().resolve()
    if path in seen:
        return {}  # the harness refuses cycles
    seen.add(path)
    code_places: list[str] = []

    class Loader(_SAFE):  # type: ignore[misc]
        pass

    def function(loader: Any, node: Any) -> _Function:
        code_places.append(f"{path}, line {node.start_mark.line + 1}, runs Python code: !function {node.value}")
        return _Function(node.value)

    def python_object(loader: Any, suffix: str, node: Any) -> None:
        code_places.append(f"{path}, line {node.start_mark.line + 1}, runs Python code: !!python/{suffix}")

    Loader.add_constructor("!function", function)
    Loader.add_multi_constructor(_PYTHON, python_object)
    try:
        content = yaml.load(_checked_bytes(path), Loader=Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"{path} cannot be read: {reason_of(error)}", "Correct the task file", parameter="include_path"
        ) from None
    if not isinstance(content, dict):
        content = {}

    if not _is_ours(path):
        code_places += [f"{path} sets {_FOREIGN}: {name}" for name in foreign_in_task(content, _Function)]
        for problem in code_places:
            problems.add(problem, _REMEDY, parameter="trust_task_code", kind=ArgumentError)

    # What a file says itself has priority over what it includes.
    includes = content.pop("include", None) or []
    if not isinstance(includes, list):
        includes = [includes]
    merged: dict[str, Any] = {}
    for include in includes:
        merged |= _read(path.parent / str(include), problems, seen)
    return merged | content


@contextmanager
def bounded_filters(tasks: Mapping[str, Any], *, seconds: float = 60.0) -> Iterator[None]:
    """End filters and metrics of tasks of others inside the block that take too long: their regexes can.

    Args:
        tasks: the tasks by name.
        seconds: processor time for all answers of a task; a tenth of a second more for each document.
    """
    from jinja2 import TemplateError

    def ended(name: str, call: Callable[..., Any], most: float) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            try:
                return bounded(partial(call, *args, **kwargs), most)
            except TemplateError as error:
                raise DataError(
                    f"{name}: the answers cannot be filtered or scored: {reason_of(error)}",
                    "Correct filter_list and metric_list in the task file",
                    parameter="tasks",
                ) from None

        return within

    with ExitStack() as stack:
        for name, task in tasks.items():
            most = {"apply_filters": seconds + len(task.eval_docs) / 10, "process_results": seconds}
            for method, limit in most.items():
                # At the end, the instance has its own method again, or shows its class's.
                own = vars(task).get(method)
                setattr(task, method, ended(name, getattr(task, method), limit))
                if own:
                    stack.callback(setattr, task, method, own)
                else:
                    stack.callback(delattr, task, method)
        yield


@contextmanager
def rendering(*, sandboxed: bool) -> Iterator[None]:
    """Render the tasks' templates inside the block; in Jinja's sandbox, where they cannot reach Python, if asked to."""
    from jinja2 import Template, TemplateError
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    class BoundedTemplate(Template):
        """A template with limits of time and length."""

        def render(self, *args: Any, **kwargs: Any) -> str:
            return bounded(partial(super().render, *args, **kwargs))

    before = utils.env
    if sandboxed:
        utils.env = SandboxedEnvironment(
            loader=before.loader, undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline
        )
        utils.env.filters = before.filters
        utils.env.template_class = BoundedTemplate
    try:
        yield
    except SecurityError as error:
        raise ArgumentError(
            f"A task's template runs Python code: {reason_of(error)}", _REMEDY, parameter="trust_task_code"
        ) from None
    except TemplateError as error:
        raise DataError(
            f"A task's template cannot be rendered: {reason_of(error)}",
            "Correct the template in the task file",
            parameter="tasks",
        ) from None
    finally:
        utils.env = before


@contextmanager
def from_source() -> Iterator[None]:
    """Import modules inside the block from their source: bytecode caches are neither read nor written.

    Python takes a cache for current if the source has the same size and the same second of change. A run could score
    with an edited file's old functions, and record the hash of the new ones.
    """
    before = sys.dont_write_bytecode, sys.pycache_prefix
    with TemporaryDirectory(prefix="adapterswap-") as empty:
        sys.dont_write_bytecode, sys.pycache_prefix = True, empty
        try:
            yield
        finally:
            sys.dont_write_bytecode, sys.pycache_prefix = before


# At the start of a line, also in files that are written as JSON, where keys are indented and quoted.
_NAMES = re.compile(rb"^[ \t{]*[\"']?(?:task|group|tag)[\"']?[ \t]*:[ \t]*[\"']?([\w.-]+)", re.MULTILINE)
_TASK = os.path.join("lm_eval", "api", "task.py")  # the harness's file that calls a task's templates and functions
_PATTERN = set("*?[")
_LISTED = "Run `lm_eval ls tasks` to list the tasks of lm-evaluation-harness"


def _manager(names: Iterable[str], include_path: str | None) -> Any:
    """The harness's manager of tasks, with an index of what these names need; of everything if one is a pattern."""
    files = Stamps()
    if include_path is not None:
        files = Stamps.of(files_in(Path(include_path)))
    return _indexed(include_path, files, frozenset(names))


@lru_cache(maxsize=4)
def _indexed(include_path: str | None, files: Stamps, names: frozenset[str]) -> Any:
    """The manager, with an index of the harness's tasks and of those in a folder with these files.

    The index of all of the harness's 14,000 files takes 6 processor seconds.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import TaskIndex

    if any(_PATTERN & set(name) for name in names):
        return _with_data_beside(TaskManager(include_path=include_path), include_path)
    own_folder = Path(include_path) if include_path else None
    folders = [folder for folder in (harness_folder(), own_folder) if folder]
    all_files = TaskIndex._iter_yaml_files

    # Files name further tasks, which are in further files, until there are none.
    wanted = set(names)
    while True:
        needed = {folder: _files_with(folder, wanted) for folder in folders}

        def files_needed(root: Path, needed: Mapping[Path, Sequence[Path]] = needed) -> Iterator[Path]:
            return iter(needed[Path(root)])

        # The harness's own reader, on the files that matter, in its own order: what stands twice is decided as by it.
        TaskIndex._iter_yaml_files = staticmethod(files_needed)
        try:
            manager = TaskManager(include_path=list(map(str, folders)), include_defaults=False)
        finally:
            TaskIndex._iter_yaml_files = staticmethod(all_files)

        # Of the members of groups and tags, those that files may define, or have as a tag, that were not read.
        index = manager.task_index
        more = set()
        for name in _named_by(index, wanted) - wanted:
            entry = index.get(name)
            if entry is None or entry.yaml_path is None:
                more.add(name)
        if not more:
            return _with_data_beside(manager, include_path)
        wanted |= more


def _with_data_beside(manager: Any, include_path: str | None) -> Any:
    """The manager, which looks up the data of the user's own tasks in the folder of the task file first.

    The harness looks in the current folder only, so a folder of tasks and data could not be moved.
    """
    if include_path is None:
        return manager
    root, load = Path(include_path).resolve(), manager._factory._load_full_config

    def load_beside(entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        config: dict[str, Any] = load(entry, overrides)
        options = config.get("dataset_kwargs")
        if entry.yaml_path is None or not isinstance(options, dict):
            return config

        folder = Path(entry.yaml_path).resolve().parent
        key = "data_dir" if options.get("data_dir") else "data_files"  # files are relative to data_dir
        if options.get(key) and folder.is_relative_to(root):
            found = _beside(folder, options[key])
            config["dataset_kwargs"] = options | {key: found}
            if _is_reader(config.get("dataset_path")):
                _check_files(found, entry.yaml_path)
        return config

    manager._factory._load_full_config = load_beside
    return manager


def _is_reader(path: Any) -> bool:
    """Whether a `dataset_path` is one of the readers of `datasets`, such as json, whose files are on this machine."""
    return str(path).isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{path}") is not None


def _check_files(value: Any, task_file: Path) -> None:
    """Refuse paths of data in `dataset_kwargs` that do not exist: the harness would look for them on the Hub."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_files(item, task_file)
    elif isinstance(value, str) and "://" not in value and not glob.glob(os.path.expanduser(value), recursive=True):
        raise DataError(
            f"{task_file} names the data {value}, which does not exist",
            "Correct the path: it is looked up beside the task file, then in the current folder",
            parameter="tasks",
        )


def _beside(folder: Path, value: Any) -> Any:
    """The paths and patterns in a value of `dataset_kwargs`: in the folder if there is such a file, else unchanged."""
    if isinstance(value, dict):
        return {key: _beside(folder, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_beside(folder, item) for item in value]
    if isinstance(value, str) and glob.glob(str(folder / value), recursive=True):
        return str(folder / value)
    return value


def _named_by(index: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """The members of those groups and tags among `names`, and of those inside them."""
    named: set[str] = set()
    waiting = [name for name in names if name in index]
    for name in waiting:  # grows while it is read
        entry = index[name]
        members = set(_members(entry.cfg or {}))
        if entry.cfg is None:  # a tag
            members.update(entry.tags)
        waiting += [member for member in members - named if member in index]
        named |= members
    return named


_TEXTS = "*y*ml"  # task files, and what they include, whose names often end in `_yaml`
_INCLUDE = re.compile(rb"^include\s*:(.*(?:\n[ \t-].*)*)", re.MULTILINE)


def _files_with(folder: Path, names: Iterable[str]) -> list[Path]:
    """The task files (.yaml) in a folder that mention one of the names, or include a file that does."""
    texts = _texts(folder)
    includes = _kept_includes(folder) if folder == harness_folder() else _includes(texts)
    wanted = [name.encode("utf-8", "surrogatepass") for name in sorted(names)]
    mentions = re.compile(rb"(?<![\w.-])(?:%s)(?![\w.-])" % b"|".join(map(re.escape, wanted)))
    matching = set()
    for path, content in texts.items():
        # Most files have none of the names, which is found without the regex in a tenth of its time.
        if any(name in content for name in wanted) and mentions.search(content):
            matching.add(path)

    # Those that include them, those that include these, and so on.
    new = matching
    while new:
        included = [path.name.encode() for path in new]
        new = set()
        for path, text in includes.items():
            if path not in matching and any(name in text for name in included):
                new.add(path)
        matching |= new
    return sorted((path for path in matching if path.suffix == ".yaml"), key=lambda path: path.as_posix())


def _texts(folder: Path) -> dict[Path, bytes]:
    """The content of all task files in a folder and of what they include; the harness's own are read once."""
    return _kept_texts(folder) if folder == harness_folder() else _read_texts(folder)


def _read_texts(folder: Path) -> dict[Path, bytes]:
    """The content of all task files below a folder, in the order of their paths."""
    ignored = {"__pycache__", ".ipynb_checkpoints"}  # as the harness ignores them
    texts: dict[Path, bytes] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in ignored)
        for name in sorted(names):
            if fnmatch.fnmatch(name, _TEXTS):
                with open(os.path.join(place, name), "rb", buffering=0) as file:
                    texts[Path(place, name)] = file.read()
    return texts


_kept_texts = lru_cache(maxsize=1)(_read_texts)


def _includes(texts: Mapping[Path, bytes]) -> dict[Path, bytes]:
    """What those of the task files include that include others, as they write it."""
    includes = {}
    for path, content in texts.items():
        include = _INCLUDE.search(content)
        if include:
            includes[path] = include[1]
    return includes


@lru_cache(maxsize=1)
def _kept_includes(folder: Path) -> dict[Path, bytes]:
    return _includes(_texts(folder))


def _task_files(folder: Path | None) -> bytes:
    """The text of all task files in a folder, joined; none without a folder."""
    return b"" if folder is None else b"\n".join(_texts(folder).values())


def check_mentioned(names: Sequence[str], include_path: str | Path | None, *, others: Iterable[str]) -> None:
    """Refuse names that no task file of the harness or of `include_path` mentions.

    Searching the files as text takes a tenth of the time that the harness takes to index them, so a misspelt name is
    reported at once. Patterns pass; `check_known` is exact.
    """
    _check_folder(include_path)
    text = _task_files(harness_folder())
    if include_path is not None:
        text += _task_files(Path(include_path))

    problems = Problems(ArgumentError)
    for name in names:
        if not _PATTERN & set(name) and name.encode("utf-8", "surrogatepass") not in text:
            known = {*others, *(mentioned.decode() for mentioned in _NAMES.findall(text))}
            _add_unknown(name, sorted(known), problems)
    problems.raise_if_any()


def mentioned_names(start: str) -> list[str]:
    """The names in the harness's task files that begin with `start`; none if the harness is not installed."""
    known = {name.decode() for name in _NAMES.findall(_task_files(harness_folder()))}
    return sorted(name for name in known if name.startswith(start))


def _add_unknown(name: str, known: Sequence[str], problems: Problems) -> None:
    remedy = did_you_mean(name, known, _LISTED, at_most=3)
    problems.add(f"There is no task {name!r}", remedy, parameter="tasks")


def _check_folder(include_path: str | Path | None) -> None:
    """Refuse an `include_path` that is not a folder, or that holds a task file which cannot be read."""
    if include_path is None:
        return
    if not Path(include_path).is_dir():
        raise NotFoundError(
            f"`include_path` is {include_path}, which is not a folder",
            "Pass the folder that holds your task files (YAML)",
            parameter="include_path",
        )
    for path in sorted(Path(include_path).rglob("*.yaml")):
        if not path.is_dir():  # the harness opens each of them, also a pipe, for which it would wait
            _checked_bytes(path)


def _checked_bytes(path: Path) -> bytes:
    """The bytes of a task file, unless it is huge: in a few lines, aliases can make billions of values."""
    raw = read_small(path, "Correct the task file", limit=_MOST_BYTES, kind=DataError)
    try:
        waiting = [(yaml.compose(raw, Loader=_SAFE), 0)]
        count = 0
        while waiting:
            node, depth = waiting.pop()
            inner: list[Any] = []
            if isinstance(node, yaml.MappingNode):  # pairs of a key and a value
                for key_and_value in node.value:
                    inner += key_and_value
            elif isinstance(node, yaml.CollectionNode):
                inner = node.value
            count += len(inner)
            if count > _MOST_VALUES or depth > _MOST_DEPTH:
                raise ValueError(f"it has more than {_MOST_VALUES:,} values or {_MOST_DEPTH} levels")
            waiting += [(part, depth + 1) for part in inner]
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {reason_of(error)}", "Correct the task file", parameter="include_path"
        ) from None
    except yaml.YAMLError:
        pass  # reported, with its place, by those who use the file
    return raw


def check_known(names: Sequence[str], include_path: str | Path | None, *, others: Iterable[str]) -> None:
    """Refuse names and patterns that match no task, group or tag."""
    problems = Problems(ArgumentError)
    _check_folder(include_path)
    folder = str(include_path) if include_path else None
    manager = _manager(names, folder)
    for name in names:
        if not manager.match_tasks([name]):
            known = {*others, *_manager(["*"], folder).all_tasks}
            _add_unknown(name, sorted(known), problems)
    problems.raise_if_any()


def load_stock(names: Sequence[str], include_path: str | None, unsafe_code: bool, trust_task_code: bool) -> Any:
    """The tasks and groups of these names, as the harness loads them."""
    from datasets.exceptions import DatasetsError

    manager = _manager(names, include_path)
    matched = manager.match_tasks(list(names))

    # What can be seen in the files, before anything in them runs.
    is_untrusted = include_path is not None and not trust_task_code
    problems = Problems(ArgumentError)
    if is_untrusted:
        refuse_task_code(matched, manager.task_index, problems)
    if not unsafe_code:
        with problems.collect():
            _refuse_code(unsafe_tasks(matched, manager.task_index))
    problems.raise_if_any()

    try:
        with (
            code_allowed(unsafe_code),
            rendering(sandboxed=is_untrusted),
            from_source() if include_path is not None else nullcontext(),
            uncounted(),
        ):
            loaded = manager.load(matched)
    except AdapterswapError:
        raise
    except UnicodeError as error:
        raise DataError(
            f"lm-evaluation-harness cannot load {', '.join(names)}: {reason_of(error)}",
            "Save the task's files and data as UTF-8 text, without unpaired surrogates such as \\ud800",
            parameter="tasks",
        ) from None
    except DatasetsError as error:
        raise DataError(
            f"The data of {', '.join(names)} cannot be read: {reason_of(error.__cause__ or error)}",
            "Correct the data file that the task names, or download it again",
            parameter="tasks",
        ) from None
    except Exception as error:  # a task's data loader and its own code may raise anything
        raise DataError(
            f"lm-evaluation-harness cannot load {', '.join(names)}: {HubFailure(error).reason}",
            "Its data comes from the Hub: check the network and HF_HUB_OFFLINE, and install the packages that the task "
            "needs. For your own task, check its files and data",
            parameter="tasks",
        ) from error

    # Tasks written in Python declare what they need only once they are loaded.
    tasks = loaded["tasks"]
    for name, task in tasks.items():
        if getattr(task, "MULTIMODAL", False):
            raise UnsupportedError(
                f"The task {name} needs images or audio", "Run it with lm_eval instead", parameter="tasks"
            )
    if not unsafe_code:
        _refuse_code([name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)])
    return loaded


@contextmanager
def explained_task_errors(names: Iterable[str]) -> Iterator[None]:
    """Turn errors raised inside a task into `DataError`: its templates or its code may not fit its data."""
    from jinja2 import TemplateError

    try:
        yield
    except (AdapterswapError, TemplateError):  # `rendering` explains errors of templates
        raise
    except Exception as error:
        if not any(frame.filename.endswith(_TASK) for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise DataError(
            f"A document of {', '.join(names)} cannot be evaluated: {reason_of(error)}",
            "Correct the task's files or its data",
            parameter="tasks",
        ) from error


def _refuse_code(names: Sequence[str]) -> None:
    """Refuse tasks that run code which the model wrote."""
    if names:
        raise ArgumentError(
            f"{', '.join(names)} would run code written by the model on this machine, with your permissions",
            "Use a container or another isolated machine, and pass `confirm_run_unsafe_code=True`",
            parameter="confirm_run_unsafe_code",
        )
