"""Where experts and bases come from: a local folder, or a Hub id `org/name@revision` through huggingface_hub.

An existing local path always wins. Downloads honour the Hub's cache, its tokens and HF_HUB_OFFLINE, and fetch only the
files asked for. An expert's note of its base, which a stranger may have written, leads to the reading of one
`config.json` there; of its safetensors too where full weights are requested without `base_model`; never to code.
Symlinks are followed in local folders, as everywhere; in the Hub's cache only inside the cache. Knows nothing of what
the files hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterswap.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    NotFoundError,
    OutputError,
    printable,
    reason_of,
)
from adapterswap.files.smallfiles import exists, expand, is_folder, read_json

__all__ = [
    "Source",
    "at_revision",
    "base_config",
    "cached_base_config",
    "find_source",
    "hub_remedy",
    "is_hub_id",
    "public_name",
    "publish",
    "same_base",
    "split_revision",
]

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>(?!/|.*\.\.)[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """A folder with the files, and a name that can be published.

    Attributes:
        folder: where the files lie on this machine.
        name: the Hub id, or the folder's own name: never a path of this machine.
        revision: the Hub's commit; None for a local folder.
    """

    folder: Path
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def find_source(reference: str | Path, files: Sequence[str], *, what: str, parameter: str | None = None) -> Source:
    """The folder that `reference` names, downloaded if it is a Hub id.

    Args:
        reference: a local folder or `org/name[@revision]`.
        files: what to fetch from the Hub: file names or patterns.
        what: "adapter" or "base model", for messages.
        parameter: the parameter at fault where there is no such folder; by default `base_model` for a base model.

    Raises:
        ArgumentError: the reference is empty, a file, or of another type.
        NotFoundError: no such folder, no such Hub repository or revision, or no way to reach the Hub.
        BaseModelError, ExpertError: a link in the Hub's cache leads out of it; by `what`.
    """
    parameter = parameter or ("base_model" if what == "base model" else None)
    if not isinstance(reference, str | Path):
        raise ArgumentError(
            f"the {what} is of type {type(reference).__name__}",
            "Pass a local folder or a Hub id such as org/name",
            parameter=parameter,
        )
    path = expand(reference)
    if reference == "":
        raise ArgumentError(
            f"the {what}'s path is empty",
            "Give a folder, or a Hub id such as org/name@revision",
            parameter=parameter,
        )
    if is_folder(path):
        return Source(path, printable(path.resolve().name))
    if exists(path):
        raise ArgumentError(
            f"{reference} is a file, and the {what} is a folder", "Give the folder that holds it", parameter=parameter
        )
    match = None if isinstance(reference, Path) else _HUB_ID.fullmatch(reference)
    if match is None:
        raise NotFoundError(
            f"the path {reference} does not exist",
            f"Give the {what}'s folder, or a Hub id such as org/name@revision",
            parameter=parameter,
        )
    return _download(match["repo"], match["revision"], files, what, parameter)


def _download(repo: str, revision: str | None, files: Sequence[str], what: str, parameter: str | None) -> Source:
    from huggingface_hub import snapshot_download

    named = f"{repo}@{revision}" if revision else repo
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the Hub's client, its transports and its storage each have errors of their own
        raise NotFoundError(
            f"The {what} {named} is not a local folder and could not be downloaded from the Hub: {reason_of(error)}",
            hub_remedy("Check the path or id; for a private repository log in with `hf auth login`"),
            parameter=parameter,
        ) from None
    _check_links(folder, named, BaseModelError if what == "base model" else ExpertError)
    return Source(folder, repo, folder.name)


def _check_links(snapshot: Path, named: str, kind: type[AdapterswapError]) -> None:
    """In the Hub's cache a snapshot's files are links to blobs; whoever filled the cache may have linked elsewhere."""
    repository, cache = snapshot.parents[1], snapshot.parents[2]
    homes = (repository.resolve(), cache.resolve())  # the first differs where the repository's folder is itself a link
    for path in (snapshot, *snapshot.iterdir()):
        target = path.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise kind(
                f"{named}: {path} links to {target}, outside the Hub's cache",
                "Delete it from the cache and download it again",
            )


def base_config(reference: str | Path) -> tuple[Source, Mapping[str, Any]]:
    """Where a base model lies, a local folder or the Hub's cache, and its config.json.

    Raises:
        NotFoundError, ArgumentError: see `find_source`.
        BaseModelError: its config.json is not a sound JSON object.
    """
    source = find_source(reference, ["config.json"], what="base model")
    remedy = "Give a base model's folder, one with a sound config.json"
    return source, read_json(source.folder / "config.json", remedy, kind=BaseModelError)


def cached_base_config(reference: str) -> Mapping[str, Any] | None:
    """The config.json of a base model where it is on this machine: in a local folder or the Hub's cache.

    The network is not used. None where there is none that can be read.
    """
    path = expand(reference)
    with suppress(ExpertError, BaseModelError):
        if is_folder(path):
            return read_json(path / "config.json")
        match = _HUB_ID.fullmatch(reference)
        if match is not None and not exists(path):
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(match["repo"], "config.json", revision=match["revision"])
            if isinstance(cached, str):
                _check_links(Path(cached).parent, reference, BaseModelError)
                return read_json(Path(cached))
    return None


def split_revision(reference: str) -> tuple[str, str | None]:
    """The repository and the revision of a Hub id `org/name@revision`; any other reference as it is."""
    match = _HUB_ID.fullmatch(reference)
    return (match["repo"], match["revision"]) if match and is_hub_id(reference) else (reference, None)


def at_revision(base: str, revision: str | None) -> str:
    """The Hub id with the revision, where the base is a Hub id that names none; any other reference as it is."""
    return f"{base}@{revision}" if revision and is_hub_id(base) and "@" not in base else base


def same_base(one: str | None, other: str | None) -> bool:
    """Whether two adapters' notes of their base mean the same: the same text, or paths to the same folder."""
    if one is None or other is None or one == other:
        return one == other
    return is_folder(expand(one)) and is_folder(expand(other)) and expand(one).samefile(expand(other))


def is_hub_id(reference: str) -> bool:
    """Whether `find_source` would look for this on the Hub: it has the form of an id, and is no path here."""
    return _HUB_ID.fullmatch(reference) is not None and not exists(Path(reference))


def public_name(base: str | None) -> str | None:
    """A base's Hub id as it stands, or the last part of a local path: what can be published."""
    if base is None or is_hub_id(base):
        return base
    return printable(Path(base).name)


def hub_remedy(
    online: str, *, offline: str = "This process is offline: unset HF_HUB_OFFLINE, or pass a local path"
) -> str:
    """What to do where the Hub did not answer: `offline` where this process may not ask it."""
    from huggingface_hub import is_offline_mode

    return offline if is_offline_mode() else online


def publish(folder: Path, repo: str) -> str:
    """Upload a folder to the Hub repository `repo` (made if need be, private if new), and return the commit's URL.

    Raises:
        OutputError: the id is invalid, the Hub cannot be reached, or you may not write there.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Add a composed adapter"))
    except Exception as error:  # as in `_download`
        raise OutputError(
            f"{folder} was written, but could not be uploaded to {repo}: {reason_of(error)}",
            hub_remedy(
                "Log in with `hf auth login`, then upload it with `hf upload`",
                offline="This process is offline: unset HF_HUB_OFFLINE, then upload it with `hf upload`",
            ),
            parameter="repo",
        ) from None
