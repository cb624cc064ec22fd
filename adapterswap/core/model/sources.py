"""Where experts and bases come from: a local folder or the Hub; which base a local one is.

A Hub id is `org/name[/subfolder][@revision]`: one repository may hold several experts in different folders. An existing
local path always wins, and anything that looks like a local path is never looked up on the Hub. Downloads honour the
Hub's cache, its tokens and HF_HUB_OFFLINE, and fetch only the needed files. The base that an expert's config names is
untrusted: only its `config.json` is read, and its safetensors if full weights are requested without `base_model`; code
is never run. Symlinks are followed in local folders, but in the Hub's cache only if they stay inside the cache. A link
to a folder is followed once: if it is pointed elsewhere meanwhile, everything still comes from one folder.

A base on the Hub has an id and a commit. A local base has the fingerprints of its weights, which `train` records; what
is made of the expert carries them on. Of what files hold, only the keys of these records are known here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from adapterswap.core.companions.files import COMPANION_FILES, MODEL_CONFIG
from adapterswap.core.model.layers import KeptLayers, ModuleName
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    NotFoundError,
    printable,
)
from adapterswap.kit.files.hashes import Stamps, fingerprint
from adapterswap.kit.files.text import expand, read_json, shown
from adapterswap.kit.hub import HubFailure

# The files by which adapters, full weights, training runs and results of adapterswap are known.
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_MLX_WEIGHTS = "adapters.safetensors"
MODEL_WEIGHTS = "model.safetensors"
PROVENANCE = "adapterswap.json"
FORMAT: Literal[1] = 1  # of that file
TRAINING_RECORD = "training.json"

_ADAPTER_FILES = [
    WEIGHTS,
    _MLX_WEIGHTS,
    CONFIG,
    PROVENANCE,
    TRAINING_RECORD,
    "adapter_model*.bin",
    "*.index.json",
    "README.md",
    *COMPANION_FILES,
]

_PREFIX = "models--"


def _home(repo: str) -> Path:
    """The folder of a model in the Hub's cache."""
    return Path(_cache(), _PREFIX + repo.replace("/", "--"))


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def cached_snapshot(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a model's revision in the Hub's cache; None if it was not downloaded. It may lack files.

    This follows the layout of the cache (refs/NAME holds a commit, snapshots/COMMIT its files): importing the Hub's
    client takes longer than composing.
    """
    home, commit = _home(repo), revision or "main"
    ref = home / "refs" / commit
    try:
        if ref.is_file():
            commit = ref.read_text(encoding="utf-8").strip()
    except PermissionError:  # another user's cache is no cache of ours
        return None

    # What the file holds goes into a path only if it looks like a commit.
    snapshot = home / "snapshots" / commit
    if re.fullmatch(r"\w+", commit) and os.path.isdir(snapshot):
        return snapshot
    return None


_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(/(?P<subfolder>\w[\w.-]*(/\w[\w.-]*)*))?"
    r"(@(?P<revision>(?!/|.*\.\.)[\w./-]+))?"
)


class HubId(NamedTuple):
    """The parts of `org/name[/subfolder][@revision]`."""

    repo: str
    subfolder: str | None
    revision: str | None

    @property
    def folder(self) -> str:
        """The id without its revision."""
        return f"{self.repo}/{self.subfolder}" if self.subfolder else self.repo

    def __str__(self) -> str:
        return f"{self.folder}@{self.revision}" if self.revision else self.folder


class Reference(str):
    """What names a base or an expert: a local folder, or a Hub id `org/name[/subfolder][@revision]`."""

    __slots__ = ()

    @staticmethod
    def cached_models() -> list[str]:
        """The ids of the models in the Hub's cache, sorted."""
        try:
            folders = sorted(os.listdir(_cache()))
        except OSError:
            return []

        models = []
        for name in folders:
            if name.startswith(_PREFIX):
                models.append(name.removeprefix(_PREFIX).replace("--", "/", 1))
        return models

    @property
    def hub_id(self) -> HubId | None:
        """The parts of a Hub id; None for a reference that is, or looks like, a local path.

        These are paths that exist, that begin with `.`, `/` or `~`, or whose first part is an existing folder: a
        mistyped `experts/swahli` is not looked up on the Hub if there is a folder `experts`.
        """
        match = _HUB_ID.fullmatch(self)
        if match is None or os.path.exists(Path(self)) or os.path.isdir(Path(self.partition("/")[0])):
            return None
        return HubId(match["repo"], match["subfolder"], match["revision"])

    def config(self) -> tuple[Source, Mapping[str, Any]]:
        """The source of a base model, a local folder or the Hub's cache, and the content of its config.json."""
        source = Source.of_base(self)
        remedy = "Pass a base model's folder with a valid config.json"
        return source, read_json(source.folder / MODEL_CONFIG, remedy, kind=BaseModelError)

    @property
    def cached_config(self) -> Mapping[str, Any] | None:
        """The config.json of a base model that is on this machine, in a local folder or the Hub's cache; else None.

        The network is not used. A config that cannot be read counts as missing.
        """
        folder = self.cached_folder
        if folder is None:
            return None
        with suppress(ExpertError):
            return read_json(folder / MODEL_CONFIG)
        return None

    @property
    def cached_folder(self) -> Path | None:
        """The folder of a base model that is on this machine; else None. See `cached_config`."""
        path = expand(self)
        if os.path.isdir(path):
            return path

        hub_id = self.hub_id
        if hub_id is None or hub_id.subfolder:
            return None
        snapshot = cached_snapshot(hub_id.repo, hub_id.revision)
        if snapshot is None or not os.path.exists(snapshot / MODEL_CONFIG):
            return None
        with suppress(BaseModelError):
            _check_links(snapshot, self, BaseModelError)
            return snapshot
        return None

    @property
    def parts(self) -> tuple[str, str | None]:
        """The repository and the revision of a Hub id `org/name@revision`; any other reference unchanged."""
        hub_id = self.hub_id
        if hub_id is None:
            return str(self), None
        return hub_id.folder, hub_id.revision

    @property
    def public_name(self) -> str:
        """A name of the base that can be published: its Hub id, or the last part of a local path."""
        match = _HUB_ID.fullmatch(self)
        if match and not match["subfolder"] and not os.path.exists(Path(self)):
            return str(self)
        return printable(Path(self).name)

    @classmethod
    def to_base(cls, named: str | None, remedy: str = "Pass `base_model`") -> Reference:
        """The reference to the base that experts adapt; an error if neither the experts nor the caller name one."""
        if named is None:
            raise BaseModelError("The experts do not say which base model they adapt", remedy, parameter="base_model")
        return cls(named)

    def at(self, revision: str | None) -> str:
        """The Hub id with the revision, if the base is a Hub id without one; any other reference unchanged."""
        if not revision or "@" in self or not self.is_hub_id:
            return str(self)
        return f"{self}@{revision}"

    @property
    def is_hub_id(self) -> bool:
        """Whether it is looked up on the Hub as a base: it has the form of an id, and is not a local path."""
        hub_id = self.hub_id
        return hub_id is not None and hub_id.subfolder is None


_BASE = "base model"


@dataclass(frozen=True)
class Source:
    """A folder with files, and a name for it that can be published.

    Attributes:
        folder: the folder on this machine.
        name: the Hub id with its subfolder, or the folder's own name; never a local path.
        revision: the Hub's commit; None for a local folder.
    """

    MLX_WEIGHTS: ClassVar = _MLX_WEIGHTS  # of mlx-lm, beside an adapter_config.json of its own

    folder: Path
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def identity(self) -> dict[str, str]:
        """The fingerprints of a local base; empty for one on the Hub, whose files may not all be here."""
        return {} if self.revision else base_fingerprints(self.folder)

    @property
    def recorded_base(self) -> dict[str, str]:
        """The fingerprints of the base that an expert's own record names; empty if it names none."""
        return Records(self.folder).base()

    def subfolders_with(self, file: str) -> list[str]:
        """References to the subfolders of a source that hold a file of this name, such as further adapters.

        For a source on the Hub, the repository's list of files is used if the Hub can be reached.
        """
        if self.revision is None:
            return sorted(str(path.parent) for path in self.folder.glob(f"*/{file}"))

        from huggingface_hub import HfApi, is_offline_mode

        hub_id = Reference(self.name).hub_id
        if hub_id is None or is_offline_mode():
            folders = sorted(str(path.parent.relative_to(self.folder)) for path in self.folder.glob(f"*/{file}"))
            return [f"{self.name}/{folder}" for folder in folders]

        with suppress(Exception):  # as in `_download`; the caller already has an error to report
            files = HfApi().list_repo_files(hub_id.repo, revision=self.revision)
            folders = []
            for name in files:
                if name.endswith(f"/{file}"):
                    folders.append(name.removesuffix(f"/{file}"))
            return [f"{hub_id.repo}/{folder}" for folder in sorted(folders)]
        return []

    @staticmethod
    def of_base(reference: str | Path) -> Source:
        """The folder of a base model; only its config.json is fetched from the Hub. Raises as `find`."""
        return Source.find(reference, [MODEL_CONFIG], what=_BASE)

    @staticmethod
    def of_adapter(reference: str | Path, *, what: str = "adapter", parameter: str | None = None) -> Source:
        """The folder of an adapter. If it has no weights, pickles or an index, which are fetched too, explain why.

        The arguments are those of `find`, which says what it raises.
        """
        return Source.find(reference, _ADAPTER_FILES, what=what, parameter=parameter)

    @staticmethod
    def of_expert(reference: str | Path) -> Source:
        """The folder of an adapter or a full checkpoint, whose weights are not fetched. Raises as `find`."""
        return Source.find(reference, [*_ADAPTER_FILES, MODEL_CONFIG], what="expert", parameter="reference")

    @staticmethod
    def find(reference: str | Path, files: Sequence[str], *, what: str, parameter: str | None = None) -> Source:
        """The folder that `reference` names, downloaded if it is a Hub id.

        Args:
            reference: a local folder or `org/name[/subfolder][@revision]`. A base model cannot be in a subfolder,
                because PEFT and transformers find it by the repository's id.
            files: the files to fetch from the Hub, as names or patterns.
            what: "adapter" or "base model", for messages.
            parameter: the parameter to blame if the folder is missing; by default `base_model` for a base model.
        """
        if parameter is None and what == _BASE:
            parameter = "base_model"
        if not isinstance(reference, str | Path):
            raise ArgumentError(
                f"The {what} is of type {type(reference).__name__}",
                "Pass a local folder or a Hub id such as org/name",
                parameter=parameter,
            )
        if reference == "":
            raise ArgumentError(
                f"The {what}'s path is empty",
                "Pass a folder, or a Hub id such as org/name@revision",
                parameter=parameter,
            )

        # A link to a folder is followed once, here. A path without links stays as it was written.
        path = expand(reference)
        if os.path.isdir(path):
            real = path.resolve()
            if real != Path(os.path.abspath(path)):
                path = real
            return Source(path, printable(real.name))

        how = f" as `{parameter}`" if what == _BASE else ""
        remedy = f"Pass the {what}'s folder{how}, or a Hub id such as org/name@revision"
        if os.path.exists(path):
            if path.suffix == ".gguf":
                remedy = "Pass the folder from which the GGUF file was made"
            elif any(os.path.exists(path.parent / name) for name in (CONFIG, MODEL_CONFIG)):
                remedy = "Pass the folder that holds it"
            raise ArgumentError(f"{reference} is a file, but the {what} must be a folder", remedy, parameter=parameter)

        hub_id = None
        if isinstance(reference, str):
            hub_id = Reference(reference).hub_id
        if hub_id is None or (hub_id.subfolder and what == _BASE):
            message = f"The path {reference} does not exist"
            first = str(reference).partition("/")[0]
            if isinstance(reference, str) and _HUB_ID.fullmatch(reference) and os.path.isdir(Path(first)):
                message += f", and is not looked up on the Hub because there is a folder {first} here"
            raise NotFoundError(message, remedy, parameter=parameter)
        return _download(hub_id, files, what, parameter)


def _download(hub_id: HubId, files: Sequence[str], role: str, parameter: str | None) -> Source:
    from huggingface_hub import constants

    repo, subfolder, revision = hub_id
    patterns = list(files)
    if subfolder:
        patterns = [f"{subfolder}/{file}" for file in files]

    try:
        snapshot = None
        if constants.HF_HUB_OFFLINE:
            snapshot = cached_snapshot(repo, revision)
            if snapshot is None and not os.path.isdir(_home(repo)):
                raise FileNotFoundError(repo)  # as the Hub's client would say, after a long import
        if snapshot is None:
            from huggingface_hub import snapshot_download

            snapshot = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the Hub's client, its transports and its storage raise different errors
        failure = HubFailure(error)
        raise NotFoundError(
            f"The {role} {hub_id} is not a local folder and could not be downloaded from the Hub: {failure.reason}",
            failure.remedy("Check the path or id; for a private repository log in with `hf auth login`"),
            parameter=parameter,
        ) from None

    folder = snapshot / (subfolder or "")
    kind = BaseModelError if role == _BASE else ExpertError
    _check_links(snapshot, str(hub_id), kind, folder)
    if not os.path.isdir(folder):
        raise NotFoundError(
            f"{hub_id}: the repository {repo} has no {role} in a folder {subfolder}",
            "Check the folder's name on the Hub; offline, only what was downloaded before can be read",
            parameter=parameter,
        )
    return Source(folder, hub_id.folder, snapshot.name)


def _check_links(snapshot: Path, named: str, kind: type[AdapterswapError], folder: Path | None = None) -> None:
    """Check that a snapshot's links stay in the Hub's cache. They should lead to blobs, but may be tampered with."""
    repository, cache = snapshot.parents[1], snapshot.parents[2]
    homes = (repository.resolve(), cache.resolve())  # the first differs where the repository's folder is itself a link

    folder = folder or snapshot
    read = [snapshot, folder]
    if os.path.isdir(folder):
        read += folder.iterdir()
    for path in read:
        target = path.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise kind(
                f"{named}: {path} links to {target}, outside the Hub's cache",
                "Delete it from the cache and download it again",
            )


def same_base(one: str | None, other: str | None) -> bool:
    """Whether two adapters name the same base: by the same text, or by paths to the same folder."""
    if one is None or other is None or one == other:
        return one == other
    one_path, other_path = expand(one), expand(other)
    return os.path.isdir(one_path) and os.path.isdir(other_path) and one_path.samefile(other_path)


_ALL_WEIGHTS = "model*.safetensors"


class Records(NamedTuple):
    """What the files of records beside an expert's weights say."""

    folder: Path

    def provenance(self) -> dict[str, Any]:
        """The content of adapterswap.json; empty if there is none or it cannot be read.

        Raises:
            ExpertError: another version of adapterswap wrote it, in a format that this one does not know.
        """
        content = _content(self.folder / PROVENANCE)
        check_format(content.get("format", FORMAT), self.folder / PROVENANCE)
        return content

    def kept_layers(self, parts: Iterable[tuple[str, int | None]] = ()) -> KeptLayers | None:
        """The layers of the slice in the folder; None if it is not a slice.

        Args:
            parts: the names and layers of an adapter's modules, if it is one.

        Raises:
            ExpertError: `parts` are in other layers: another program has replaced the weights since, and left the
                record.
        """
        record = self.provenance()
        try:
            kept = KeptLayers.of(record["slice"]["layers"], record["slice"].get("stack"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

        depth = record.get("num_layers")
        for name, layer in parts:
            # Layers that predict further tokens follow the depth, and count as outside the layers.
            if layer is None or (isinstance(depth, int) and layer >= depth):
                continue
            if not kept.has(ModuleName(name).stack, layer):
                raise ExpertError(
                    f"{self.folder / PROVENANCE} says that the adapter is a slice with the {kept}, but it has {name}: "
                    "the weights were replaced later",
                    f"Delete {PROVENANCE} there if the weights are right, or slice the expert again",
                )
        return kept

    def training(self) -> dict[str, Any]:
        """The training.json in the folder or, for another checkpoint of the same run, in the folder above it; empty if
        there is none or it cannot be read."""
        content = _content(self.folder / TRAINING_RECORD)
        if not content and self.folder.name.startswith("checkpoint-"):
            content = _content(self.folder.parent / TRAINING_RECORD)
        return content

    def base(self) -> dict[str, str]:
        """The fingerprints of the base that an expert's own record names; empty if it names none."""
        for content in (self.training(), self.provenance()):
            recorded = [_inside(content.get("base"), "fingerprints")]
            recorded.append(_inside(_inside(content, "extraction").get("base"), "fingerprints"))
            for expert in _inside(content, "experts").values():
                recorded.append(_inside(expert, "base_fingerprints"))

            for fingerprints in recorded:
                if fingerprints:
                    return {str(name): str(value) for name, value in fingerprints.items()}
        return {}


def check_format(value: object, place: object, *, parameter: str | None = None) -> None:
    """Raise ExpertError unless `value` is the format of records that this version reads; `place` holds the record."""
    if type(value) is not int or value != FORMAT:
        raise ExpertError(
            f"{place} has the format {shown(value)}, and this version of adapterswap reads format {FORMAT}",
            "Make it again with this version, or use the version that made it",
            parameter=parameter,
        )


def _content(record: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none or it cannot be read."""
    if not os.path.exists(record):
        return {}
    with suppress(AdapterswapError):
        return read_json(record)
    return {}


def _inside(content: Any, key: str) -> dict[str, Any]:
    """The mapping under a key of a record, which may be damaged; empty if there is none."""
    if not isinstance(content, Mapping):
        return {}
    value = content.get(key)
    if not isinstance(value, Mapping):
        return {}
    return dict(value)


def base_fingerprints(folder: Path) -> dict[str, str]:
    """The fingerprints of a base's weights, by file; read again only if a file changes.

    Shards beside a single file are left out: transformers does not load them.
    """
    single = folder / MODEL_WEIGHTS
    paths = [single]
    if not single.is_file():
        paths = [path for path in sorted(folder.glob(_ALL_WEIGHTS)) if path.is_file()]
    return dict(_fingerprints(Stamps.of(paths)))


@lru_cache(maxsize=16)
def _fingerprints(files: Stamps) -> dict[str, str]:
    """The fingerprints of files, by name."""
    return {path.name: fingerprint(path) for path, _ in files}
