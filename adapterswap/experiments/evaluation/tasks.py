"""Task names → lm-evaluation-harness tasks, and the hashes by which a resumed run notices that a task has changed.

MGSM is shipped: its tasks have the harness's names, need no network, take their shots in a fixed order and have one
more filter, `normalized`. FLORES, MGSM-Rev2 and MultiJail are read from files that the user downloads, and all other
tasks are the harness's own.

A hash covers a task's config with its includes, its documents, the rows for its shots, and the files next to it in
`include_path`. The location of the data does not count.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import inspect
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adapterswap.experiments.evaluation.downloaded import LOCAL_NAMES, build_local_task, local_folders, local_names
from adapterswap.experiments.evaluation.languages import check_languages, language_of
from adapterswap.experiments.evaluation.mgsm import (
    AFRIMGSM,
    LANGUAGES,
    MODES,
    mgsm_task_names,
    normalized_language,
    variant_of,
)
from adapterswap.experiments.evaluation.settings import Settings, files_in
from adapterswap.experiments.evaluation.stock_tasks import check_known, check_mentioned, load_stock, mentioned_names
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, FieldError, Problems
from adapterswap.kit.files.hashes import Stamps
from adapterswap.kit.files.text import expand

_PLACES = (
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
)  # the location of the documents, which are hashed themselves
_SOURCE = "config_source"  # the path of the task's file, which the harness adds to the metadata
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _json(value: Any) -> bytes:
    """A value for a hash. What JSON does not have is written as Python shows it, without addresses in memory."""
    return json.dumps(_plain(value), ensure_ascii=False, default=_unknown).encode("utf-8", errors="surrogatepass")


def _unknown(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def _plain(value: Any) -> Any:
    """A value of a task's config as plain data; functions and classes as their source, which may be the user's."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if not isinstance(value, str | bytes) and isinstance(value, Iterable) and not isinstance(value, type):
        return [_plain(item) for item in value]
    if callable(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return _unknown(value)
    return value


MAX_SHOTS = 8  # as many exemplars as MGSM has
_SHOTS = re.compile(r"(.+)@(\d{1,3})")
_FAMILIES: dict[str, list[str]] = {}
for _mode in MODES:
    _FAMILIES[f"mgsm_{_mode}"] = [f"mgsm_{_mode}_{code}" for code in LANGUAGES]
_OURS = (*mgsm_task_names(), *_FAMILIES, *LOCAL_NAMES)


@dataclass(frozen=True)
class LoadedTasks:
    """lm-evaluation-harness's tasks and groups, by name."""

    tasks: dict[str, Any]
    groups: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def known_names(start: str = "") -> list[str]:
        """The names of tasks that begin with `start`, for completion: ours, or if there are none, the harness's.

        The harness's names are searched for in its task files, as text, so the few that it builds in code are missing.
        """
        return [name for name in _OURS if name.startswith(start)] or mentioned_names(start)

    @staticmethod
    def check_names(names: Sequence[str], include_path: str | Path | None = None) -> None:
        """Refuse misspelt names before anything is loaded; see `load` for the names.

        Other names than those of shipped tasks are searched for in the harness's task files, as text. `load` is
        exact.
        """
        require("eval")
        if not names:
            raise ArgumentError(
                "`tasks` is empty", f"Pass task names, such as {', '.join(list(_FAMILIES)[:2])}", parameter="tasks"
            )
        resolved = _resolve([split_shots(name)[0] for name in names])
        if resolved.theirs:
            check_mentioned(resolved.theirs, include_path, others=_OURS)

    @staticmethod
    def load(names: Sequence[str] | LoadedTasks, settings: Settings | None = None) -> LoadedTasks:
        """The tasks of these names.

        They are loaded again if a file of the user changes that they were read from.

        Args:
            names: task names; `mgsm_direct`, `mgsm_native_cot`, `mgsm_en_cot` for all eleven languages; patterns such
                as `mgsm_*_sw`; those over downloaded files, such as `flores_eng_Latn-swh_Latn`; and the harness's
                tasks, groups and tags. `NAME@2` has 2 shots whatever the settings say, and keeps this name in all
                results. Or loaded tasks, which are returned as they are.
            settings: tasks depend on `num_fewshot`, `gen_kwargs`, `include_path`, `trust_task_code` and
                `confirm_run_unsafe_code`.
        """
        if isinstance(names, LoadedTasks):
            return names
        settings = settings or Settings()
        LoadedTasks.check_names(names, settings.include_path)

        by_shots: dict[str, list[str]] = {}
        for name in names:
            stem, shots = split_shots(name)
            suffix = "" if shots is None else f"@{shots}"
            by_shots.setdefault(suffix, []).append(stem)

        problems = Problems(ArgumentError)
        loaded = LoadedTasks({})
        for suffix, stems in by_shots.items():
            with problems.collect():
                alike = _load_alike(stems, settings, suffix)
                loaded.tasks.update(alike.tasks)
                loaded.groups.update(alike.groups)
        problems.raise_if_any()
        return loaded

    def only(self, names: Iterable[str]) -> LoadedTasks:
        """These tasks, without groups."""
        return LoadedTasks({name: self.tasks[name] for name in names})

    def fingerprint(self, name: str) -> str:
        """A hash of a task's config, its documents, and the rows for its shots."""
        task = self.tasks[name]
        config = {name: value for name, value in vars(task.config).items() if name not in _PLACES}
        metadata = config.get("metadata")
        if isinstance(metadata, Mapping):
            config["metadata"] = {key: value for key, value in metadata.items() if key != _SOURCE}
        digest = hashlib.sha256(_json(config))

        sampler = getattr(task, "sampler", None)
        shots = task.fewshot_docs() if sampler is None else sampler.df
        for rows in (task.eval_docs, shots or ()):
            digest.update(b"\n")
            for row in rows:
                digest.update(_json(row) + b"\n")
        return digest.hexdigest()

    def language(self, name: str) -> str | None:
        """The code of a task's language; see `language_of`."""
        return language_of(name)

    def check_languages(self) -> None:
        """Check that lingua is installed, and that the answers of some task are in a language that it knows."""
        check_languages(self.tasks)

    def check_own_settings(self, named: Collection[str], settings: Settings) -> None:
        """Refuse groups that change the settings of their tasks: a table's rows have the names of single tasks.

        Args:
            named: the tasks that a recipe names itself.
        """
        grouped = [name for name in self.tasks if name not in named]
        if not grouped:
            return

        problems = Problems(FieldError)
        alone = LoadedTasks.load(grouped, settings)
        for name in alone.tasks:
            if alone.fingerprint(name) != self.fingerprint(name):
                shots = self.tasks[name].get_config("num_fewshot")
                problems.add(
                    f"A group in the recipe changes the settings of its task {name}",
                    f"Name the task itself instead, with its shots ({split_shots(name)[0]}@{shots or 0}), or write a "
                    "task file for it (`include_path`)",
                    parameter="tasks",
                )
        problems.raise_if_any()


def split_shots(name: str) -> tuple[str, int | None]:
    """A task's name without its shots, and their number: mgsm_direct_sw@2 → (mgsm_direct_sw, 2)."""
    match = _SHOTS.fullmatch(name)
    if match is None:
        return name, None
    return match[1], int(match[2])


def _load_alike(names: Sequence[str], settings: Settings, suffix: str) -> LoadedTasks:
    """Tasks with the same number of shots: that of the suffix of their names, else that of the settings."""
    num_fewshot, parameter = settings.num_fewshot, "num_fewshot"
    if suffix:
        num_fewshot, parameter = int(suffix[1:]), "tasks"
    include_path = None
    if settings.include_path is not None:
        include_path = str(expand(settings.include_path))

    resolved = _resolve(names)
    problems = Problems(ArgumentError)
    if num_fewshot is not None:
        _check_shots(resolved, num_fewshot, problems, parameter=parameter)
    if resolved.theirs:
        with problems.collect():
            check_known(resolved.theirs, include_path, others=_OURS)
    local: dict[str, Path] = {}
    with problems.collect():
        local = local_folders(resolved.local)
    problems.raise_if_any()

    return _kept(
        _Requested(
            names=resolved,
            local=tuple(local.items()),
            num_fewshot=num_fewshot,
            suffix=suffix,
            generation=json.dumps(dict(settings.gen_kwargs), sort_keys=True),
            include_path=include_path,
            unsafe_code=settings.confirm_run_unsafe_code,
            trust_task_code=settings.trust_task_code,
        )
    )


class _TaskNames(NamedTuple):
    """Names by the source of their tasks, with patterns and families expanded."""

    mgsm: tuple[str, ...]
    local: tuple[str, ...]
    theirs: tuple[str, ...]


def _resolve(names: Sequence[str]) -> _TaskNames:
    """The names by their source, each once and in their order."""
    mgsm: dict[str, None] = {}
    local: dict[str, None] = {}
    theirs: dict[str, None] = {}
    for name in names:
        shipped = _FAMILIES.get(name) or fnmatch.filter(mgsm_task_names(), name)
        downloaded = local_names(name)
        if shipped:
            mgsm |= dict.fromkeys(shipped)
        elif downloaded:
            local |= dict.fromkeys(downloaded)
        else:
            theirs[name] = None
    return _TaskNames(tuple(mgsm), tuple(local), tuple(theirs))


def _check_shots(resolved: _TaskNames, num_fewshot: int, problems: Problems, *, parameter: str) -> None:
    """Report a number of shots that a task of ours does not have."""
    if num_fewshot < 0:
        problems.add(f"The number of shots is {num_fewshot}", "Pass 0 or more", parameter=parameter)

    limits = {}
    if resolved.mgsm or any(map(variant_of, resolved.local)):
        limits["MGSM"] = MAX_SHOTS
    if parameter == "tasks":  # `num_fewshot` passes over tasks that always have none
        for name in resolved.local:
            if name.startswith("multijail_"):
                limits[name] = 0
    for name, limit in limits.items():
        if num_fewshot > limit:
            problems.add(
                f"{num_fewshot} shots are too many: {name} has {limit}",
                f"Use 0 to {limit}" if limit else "Use 0",
                parameter=parameter,
            )


class _Requested(NamedTuple):
    """Tasks to load, and the settings on which they depend."""

    names: _TaskNames
    local: tuple[tuple[str, Path], ...]
    num_fewshot: int | None
    suffix: str
    generation: str
    include_path: str | None
    unsafe_code: bool
    trust_task_code: bool


class _Kept(NamedTuple):
    """Loaded tasks, with the stamps of the user's files that they were read from."""

    loaded: LoadedTasks
    tasks: Stamps
    data: Stamps


_KEPT: dict[_Requested, _Kept] = {}
_MOST_KEPT = 16


def _kept(requested: _Requested) -> LoadedTasks:
    """The tasks, loaded again only if the user's files changed.

    A loop over compositions needs the same tasks again and again, and the harness's data take seconds.
    """
    folders = {folder for _, folder in requested.local}
    if requested.include_path:
        folders.add(Path(requested.include_path))
    paths: list[Path] = []
    for folder in sorted(folders):
        paths += files_in(folder)
    now = Stamps.of(paths)

    kept = _KEPT.pop(requested, None)
    if kept is None or kept.tasks != now or kept.data != _data_stamps(kept.loaded):
        loaded = _load(requested)
        kept = _Kept(loaded, now, _data_stamps(loaded))
    _KEPT[requested] = kept
    if len(_KEPT) > _MOST_KEPT:
        del _KEPT[next(iter(_KEPT))]  # the one that was needed longest ago
    return kept.loaded


def _data_stamps(loaded: LoadedTasks) -> Stamps:
    """The stamps of the files on this machine that tasks name as their data."""
    paths: set[Path] = set()
    for task in loaded.tasks.values():
        options = task.config.dataset_kwargs or {}
        named = [task.config.dataset_path, options.get("data_files"), options.get("data_dir")]
        for value in named:  # grows while it is read
            if isinstance(value, Mapping):
                named += value.values()
            elif isinstance(value, list | tuple):
                named += value
            elif isinstance(value, str | Path):
                for place in glob.glob(str(value), recursive=True) or [str(value)]:
                    path = Path(place)
                    if path.is_dir():
                        paths.update(files_in(path))
                    elif path.is_file():
                        paths.add(path)
    return Stamps.of(sorted(paths))


def _load(requested: _Requested) -> LoadedTasks:
    """Build the shipped and local tasks, load those of the harness, and configure all of them."""
    from adapterswap.experiments.evaluation.harness import add_normalized, build_mgsm_task

    tasks: dict[str, Any] = {}
    for name in requested.names.mgsm:
        tasks[name] = build_mgsm_task(name)
    for name, folder in requested.local:
        tasks[name] = build_local_task(name, folder, requested.num_fewshot or 0)

    groups: dict[str, Any] = {}
    theirs = requested.names.theirs
    if theirs:
        loaded = load_stock(theirs, requested.include_path, requested.unsafe_code, requested.trust_task_code)
        clash = tasks.keys() & loaded["tasks"].keys()
        if clash:
            raise ArgumentError(
                f"{sorted(clash)[0]} is listed twice: as a shipped task and in a group of lm-evaluation-harness",
                "List the tasks of the group one by one",
                parameter="tasks",
            )
        for name, task in loaded["tasks"].items():
            language = normalized_language(name)
            if task.config.dataset_path == AFRIMGSM and language:
                add_normalized(task, language)
        tasks |= loaded["tasks"]
        groups = loaded["groups"]

    problems = Problems(ArgumentError)
    for name, task in tasks.items():
        with problems.collect():
            _configure(name, task, requested.num_fewshot, json.loads(requested.generation))
            _check_pool(name, task, parameter="tasks" if requested.suffix else "num_fewshot")
    problems.raise_if_any()

    # The suffix comes after every name, also in the groups.
    suffix = requested.suffix
    if suffix:
        for task in tasks.values():
            task.set_config("task", task.task_name + suffix)
        for group in groups.values():
            group.name += suffix
        for group in groups.values():
            for name in group.child_names:
                group.add(group.pop(name))
        tasks = {name + suffix: task for name, task in tasks.items()}
        groups = {name + suffix: group for name, group in groups.items()}
    return LoadedTasks(tasks, groups)


# The harness's names for one setting, of which it takes the first, and settings that it drops if `do_sample` is false.
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def _configure(name: str, task: Any, num_fewshot: int | None, gen_kwargs: dict[str, Any]) -> None:
    """Apply shots and generation settings by the harness's own rules: a task that sets 0 shots keeps them."""
    task_shots = task.get_config("num_fewshot")
    if num_fewshot is not None and task_shots != 0:
        task.set_config("num_fewshot", num_fewshot)
    elif task_shots is None:
        task.set_config("num_fewshot", 0)
    if not gen_kwargs or task.get_config("output_type") != "generate_until":
        return

    # A limit of the user takes the place of the task's, whatever they are called.
    limits = [key for key in _LIMITS if key in gen_kwargs]
    if len(limits) > 1:
        raise ArgumentError(
            f"`gen_kwargs` sets the longest output {len(limits)} times: {', '.join(limits)}",
            "Set only one of them",
            parameter="gen_kwargs",
        )
    merged = dict(task.get_config("generation_kwargs") or {})
    if limits:
        for key in _LIMITS:
            merged.pop(key, None)
    merged |= gen_kwargs

    # Every setting of the user has an effect.
    sampling = [key for key in _OF_SAMPLING if gen_kwargs.get(key)]
    if sampling and merged.get("do_sample") is False:
        raise ArgumentError(
            f"`gen_kwargs` sets {', '.join(sampling)}, which has no effect: {name} takes the likeliest tokens "
            "(do_sample is false)",
            "Add do_sample=true, or leave it out",
            parameter="gen_kwargs",
        )
    task.set_config("generation_kwargs", merged)


def _check_pool(name: str, task: Any, *, parameter: str) -> None:
    """Refuse more shots than the task has rows for, besides the current one."""
    shots = task.get_config("num_fewshot")
    sampler = getattr(task, "sampler", None)
    if not shots or sampler is None:  # tasks written in Python may have any shots
        return
    config = task.config
    is_left_out = config.test_split is not None and config.fewshot_config.split == config.test_split
    most = len(sampler.df) - is_left_out
    if shots > most:
        raise ArgumentError(f"{shots} shots are too many: {name} has {most}", f"Use 0 to {most}", parameter=parameter)
