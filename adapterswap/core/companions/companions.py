"""The companions of a model's weights, such as config and tokenizer, and whose a result takes.

A folder's companions are read once and compared by what they do, not by their bytes. Whose companions a result takes is
decided here, for every command: the experts' where they agree; else the task expert's, which is the first one; the
base's where no expert has any, or theirs does the same. The config is the base's, unless the composition names another
owner, and the ids in it and in the generation settings are those of the result's tokenizer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from adapterswap.core.companions.config import ConfigDifferences
from adapterswap.core.companions.files import (
    COMPANION_FILES,
    GENERATION_CONFIG,
    LEGAL_FILES,
    MODEL_CONFIG,
    POOLING_FILES,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    code_in,
    copy_files,
    differing_files,
)
from adapterswap.core.companions.generation import config_with_ids, differing_settings, read_generation, with_ids
from adapterswap.core.companions.parts import TOKEN_PARTS, special_ids
from adapterswap.core.companions.templates import Templates, read_templates, write_templates
from adapterswap.core.companions.tokenizer import (
    BASE_FOLDER,
    United,
    has_tokenizer,
    tokenizer_differences,
    tokenizer_files,
    unite,
    write_united,
)
from adapterswap.kit.errors import AdapterswapError, ArgumentError
from adapterswap.kit.files.inside import files_inside
from adapterswap.kit.files.text import read_json, write_json

Kind = Literal["tokenizer", "chat_template", "generation", "processor", "pooling"]
_LABELS: dict[Kind, str] = {"chat_template": "chat template", "generation": "generation settings"}
_SUBJECTS: dict[Kind, str] = {
    "tokenizer": "tokenizers",
    "chat_template": "chat templates",
    "generation": "generation settings",
    "processor": "processors",
    "pooling": "pooling",
}
_OF_PROMPTS: tuple[Kind, Kind] = ("tokenizer", "chat_template")  # what prompts depend on
_REMEDY = "Use a folder with a valid config.json"


@dataclass(frozen=True)
class Companions:
    """The files beside the weights in one folder. Each is read when it is first needed, and once."""

    folder: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return read_json(self.folder / MODEL_CONFIG, _REMEDY)

    @cached_property
    def tokenizer(self) -> Sequence[Path]:
        """The files of the tokenizer and its chat templates."""
        return tokenizer_files(self.folder)

    @cached_property
    def templates(self) -> Templates | None:
        """The chat templates, by name."""
        return read_templates(self.folder)

    @cached_property
    def generation(self) -> Mapping[str, Any] | None:
        """The content of generation_config.json; None if there is none."""
        return read_generation(self.folder)

    @cached_property
    def processor(self) -> Sequence[Path]:
        return files_inside(self.folder, PROCESSOR_FILES)

    @cached_property
    def pooling(self) -> Sequence[Path]:
        """The files by which sentence-transformers makes a vector of a text."""
        return files_inside(self.folder, POOLING_FILES)

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of the tokenizer's special tokens: `eos_token_id` → id."""
        return special_ids(self.folder)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of companions that the folder has."""
        held: dict[Kind, object] = {
            "tokenizer": has_tokenizer(self.folder),
            "chat_template": self.templates,
            "generation": self.generation,
            "processor": self.processor,
            "pooling": self.pooling,
        }
        return tuple(kind for kind, content in held.items() if content)

    def has(self, kind: Kind) -> bool:
        """Whether the folder has companions of a kind."""
        return kind in self.kinds

    def contents(self) -> dict[str, list[str]]:
        """What the folder holds: each kind with the names of its files, templates or settings.

        Code counts as `code`; `unreadable` has the reasons why files could not be read.
        """
        readers: Mapping[str, Callable[[], Iterable[str]]] = {
            "tokenizer": lambda: self._names(TOKENIZER_FILES),
            "chat_template": lambda: self.templates or (),
            "generation": lambda: self.generation or (),
            "processor": lambda: self._names(PROCESSOR_FILES),
            "pooling": lambda: self._names(POOLING_FILES),
            "code": lambda: code_in(self.folder),
        }

        contents: dict[str, list[str]] = {}
        for kind, read in readers.items():
            try:
                names = list(read())
            except AdapterswapError as error:
                contents.setdefault("unreadable", []).append(error.problems[0].message)
                continue
            if names:
                contents[kind] = names
        return contents

    def copy(self, target: Path) -> None:
        """Copy them into the folder `target`, except the config and code."""
        copy_files(files_inside(self.folder, COMPANION_FILES), self.folder, target)

    def _names(self, patterns: Iterable[str]) -> list[str]:
        return [path.relative_to(self.folder).as_posix() for path in files_inside(self.folder, patterns)]

    def remarks(self, other: Companions) -> list[str]:
        """A line for each kind that both folders have and in which they differ, such as `tokenizers differ: eos`."""
        lines = []
        for kind in get_args(Kind):
            label = _SUBJECTS[kind]
            try:
                if not self.has(kind) or not other.has(kind):
                    continue
                parts = self.differences(other, kind)
            except AdapterswapError as error:
                lines.append(f"{label} were not compared: {error.problems[0].message}")
                continue

            if not parts:
                continue
            line = f"{label} differs" if kind == "pooling" else f"{label} differ"
            if kind != "chat_template":
                line += f": {', '.join(parts)}"
            lines.append(line)
        return lines

    def differences(self, other: Companions, kind: Kind) -> tuple[str, ...]:
        """In what another folder's companions of a kind, which both have, differ; empty if they do the same."""
        return _DIFFERENCES[kind](self, other)


_DIFFERENCES: Mapping[Kind, Callable[[Companions, Companions], tuple[str, ...]]] = {
    "tokenizer": lambda one, other: tokenizer_differences(one.folder, other.folder),
    "chat_template": lambda one, other: ("chat template",) if one.templates != other.templates else (),
    "generation": lambda one, other: differing_settings(one.generation or {}, other.generation or {}),
    "processor": lambda one, other: differing_files(one.folder, one.processor, other.folder, other.processor),
    "pooling": lambda one, other: differing_files(one.folder, one.pooling, other.folder, other.pooling),
}


class Ownership(NamedTuple):
    """Whose companions of one kind a result takes.

    Attributes:
        kind: such as `tokenizer`.
        owner: an expert, or `base`.
        differing: those whose own differ: an expert, or `base` → in what, such as `eos`.
    """

    kind: Kind
    owner: str
    differing: Mapping[str, tuple[str, ...]] = {}

    def __str__(self) -> str:
        """One line, such as `tokenizer: swahili's (math's and the base's differ: eos, chat template)`."""
        line = f"{_LABELS.get(self.kind, self.kind)}: {_whose(self.owner)}"
        if not self.differing:
            return line

        *others, last = (_whose(name) for name in self.differing)
        text = f"{last} differs"
        if others:
            text = f"{', '.join(others)} and {last} differ"

        parts: dict[str, None] = {}  # each once, in order
        for own_parts in self.differing.values():
            parts |= dict.fromkeys(own_parts)
        if parts:
            text += f": {', '.join(parts)}"
        return f"{line} ({text})"


def _whose(name: str) -> str:
    if name == BASE_FOLDER:
        return f"the {name}'s"
    return f"{name}'s"


class CompanionPlan(NamedTuple):
    """Whose companions a result takes.

    Attributes:
        folders: the companions of the experts, by name, and of the `base`, if its may be taken.
        config: the owner of a model's config: `base` or a full expert; None if the result is an adapter.
        other_configs: where the configs of the base and of full experts differ from the owner's, by name.
        owners: kind → its owner; without kinds that nobody has.
        united: the tokenizer, with the tokens that other experts add to it; None if nobody has one.
        rows: the embedding's number of rows, if known.
    """

    folders: Mapping[str, Companions]
    config: str | None
    other_configs: Mapping[str, ConfigDifferences]
    owners: Mapping[Kind, Ownership]
    united: United | None
    rows: int | None = None

    def owner(self, kind: Kind) -> str | None:
        """Whose companions of a kind the result takes: an expert's name or `base`; None if nobody has any."""
        ownership = self.owners.get(kind)
        if ownership is None:
            return None
        return ownership.owner

    @property
    def lines(self) -> list[str]:
        """A line for each kind in which experts or the base differ, and for code that the config refers to; a tokenizer
        and its templates share one."""
        # Configs that are not the result's, or that could not be compared completely
        lines = []
        config_owner = _whose(str(self.config))
        for name, differences in self.other_configs.items():
            if differences:
                keys = ", ".join(differences.values)
                lines.append(f"config: {config_owner} ({_whose(name)} differs: {keys})")
            else:
                lines.append(f"config: {config_owner}; {differences.unknown(_whose(name))}")

        # A tokenizer's own templates are named with it.
        owners = dict(self.owners)
        tokenizer, template = owners.get("tokenizer"), owners.get("chat_template")
        if tokenizer and template and template.differing and tokenizer.owner == template.owner:
            both = {}
            for name in {**tokenizer.differing, **template.differing}:
                both[name] = (*tokenizer.differing.get(name, ()), *template.differing.get(name, ()))
            owners["tokenizer"] = tokenizer._replace(differing=both)
            del owners["chat_template"]
        for ownership in owners.values():
            if ownership.differing:
                lines.append(str(ownership))

        # Code that the config refers to, which is not copied
        config_folder = self.folders.get(self.config or "")
        if config_folder is not None and "auto_map" in config_folder.config:
            code = code_in(config_folder.folder)
            if code:
                lines.append(f"code: not copied ({', '.join(code)}); copy it yourself if you trust it")
        return lines

    @property
    def generation(self) -> Mapping[str, Any] | None:
        """The result's generation settings, with the ids of its tokenizer; None if nobody has any."""
        owner = self.owner("generation")
        if owner is None:
            return None
        return with_ids(self.folders[owner].generation or {}, *self._ids(owner))

    def differences(self, folder: Companions, kind: Kind) -> tuple[str, ...]:
        """In what a folder's companions of a kind differ from those that the result would have."""
        if kind == "generation":
            return differing_settings(folder.generation or {}, self.generation or {})
        parts = folder.differences(self.folders[self.owners[kind].owner], kind)
        if kind == "tokenizer" and self.united is not None and self.united.added:
            return tuple(part for part in parts if part != "added tokens")
        return parts

    @property
    def prompt_record(self) -> dict[str, str]:
        """Whose tokenizer and chat templates are taken, for records; without those that nobody has."""
        return {kind: self.owners[kind].owner for kind in _OF_PROMPTS if kind in self.owners}

    @property
    def prompts_of_experts(self) -> dict[str, str]:
        """`prompt_record` without what is the base's; empty if prompts are the base's own."""
        return {kind: owner for kind, owner in self.prompt_record.items() if owner != BASE_FOLDER}

    @property
    def prompt_lines(self) -> list[str]:
        """The lines on what prompts depend on."""
        lines = []
        for kind in _OF_PROMPTS:
            if kind in self.owners and self.owners[kind].differing:
                lines.append(str(self.owners[kind]))
        return lines

    @property
    def record(self) -> dict[str, str]:
        """The owners by kind, for adapterswap.json."""
        owners: dict[str, str] = {}
        if self.config is not None:
            owners["config"] = self.config
        for kind, ownership in self.owners.items():
            owners[kind] = ownership.owner
        return owners

    def without_tokenizer(self) -> CompanionPlan:
        """The same for a result that cannot have this tokenizer, and so neither its templates nor its settings."""
        left_out = ("tokenizer", "chat_template", "generation")
        owners = {kind: ownership for kind, ownership in self.owners.items() if kind not in left_out}
        return self._replace(owners=owners, united=None)

    def as_json(self) -> dict[str, Any]:
        """Each kind's owner, and who differs in what, as plain data."""
        content: dict[str, Any] = {}
        if self.config is not None:
            keys = {}
            for name, differences in self.other_configs.items():
                if differences:
                    keys[name] = list(differences.values)
            content["config"] = {"from": self.config, "differing": keys}
        for kind, ownership in self.owners.items():
            parts = {name: list(own_parts) for name, own_parts in ownership.differing.items()}
            content[kind] = {"from": ownership.owner, "differing": parts}
        return content

    def write(self, target: Path) -> None:
        """Write everything that goes beside an adapter into the folder `target`."""
        if self.united is not None:
            folders = {name: companions.folder for name, companions in self.folders.items()}
            write_united(self.united, folders, target)
        template = self.owner("chat_template")
        if template is not None:
            write_templates(self.folders[template].templates or {}, target)

        processor, pooling = self.owner("processor"), self.owner("pooling")
        if processor is not None:
            copy_files(self.folders[processor].processor, self.folders[processor].folder, target)
        if pooling is not None:
            copy_files(self.folders[pooling].pooling, self.folders[pooling].folder, target)

        generation = self.owner("generation")
        if generation is not None:
            source = self.folders[generation]
            if self.generation != source.generation:
                write_json(target / GENERATION_CONFIG, self.generation or {})
            else:
                copy_files([source.folder / GENERATION_CONFIG], source.folder, target)

    def write_model(self, target: Path, config: Mapping[str, Any]) -> None:
        """Write everything that goes beside full weights into the folder `target`.

        Args:
            target: the folder.
            config: the content of config.json, from its owner's and with the result's sizes.
        """
        assert self.config is not None
        owner = self.folders[self.config]
        copy_files(files_inside(owner.folder, LEGAL_FILES), owner.folder, target)
        self.write(target)

        changed = config_with_ids(config, *self._ids(self.config))
        if changed == owner.config:  # the same bytes; it may be a link, since it was read as this config before
            shutil.copyfile(owner.folder / MODEL_CONFIG, target / MODEL_CONFIG)
        else:
            write_json(target / MODEL_CONFIG, changed, allow_nan=True)  # Mamba's configs hold Infinity

    def _ids(self, owner: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The special tokens' ids in the result's tokenizer, if it is another one than the owner's, and in the
        owner's. An id without a row in the embedding is left out."""
        tokenizer = self.owner("tokenizer")
        if tokenizer is None or tokenizer == owner or tokenizer not in self.folders:
            return {}, {}
        ids = self.folders[tokenizer].special_ids
        if self.rows is not None:
            ids = {key: number for key, number in ids.items() if number < self.rows}
        return ids, self.folders[owner].special_ids

    @staticmethod
    def decide(
        experts: Mapping[str, Path],
        base: Path | None = None,
        *,
        beside: Path | None = None,
        rows: int | None = None,
        config: str | None = None,
        tokenizer: str | None = None,
        template: str | None = None,
        models: Iterable[str] = (),
    ) -> CompanionPlan:
        """Decide whose companions a result takes.

        Args:
            experts: expert → its folder, in the order of the plan: the task expert first.
            base: the base's folder, if the result is full weights.
            beside: the base's folder, if it is only compared.
            rows: the embedding's number of rows, if known: tokenizers with larger ids are not used.
            config: the owner of the config, for full weights.
            tokenizer: whose tokenizer and chat templates are taken: an expert's or the `base`'s; by default see above.
            template: whose chat templates are taken, if not those beside the tokenizer.
            models: the experts that are full checkpoints, whose configs are compared with the owner's.

        Raises:
            ArgumentError: there is no such expert, or it has no tokenizer or no chat template.
        """
        folders = {name: Companions(folder) for name, folder in experts.items()}
        if base is not None:
            folders[BASE_FOLDER] = Companions(base)
        compared = dict(folders)
        if base is None and beside is not None:
            compared[BASE_FOLDER] = Companions(beside)

        # The tokenizer: the chosen one's, or one for all experts
        owners: dict[Kind, Ownership] = {}
        united = None
        if tokenizer == BASE_FOLDER and base is None:  # an adapter without a tokenizer has that of its base
            differing: Mapping[str, tuple[str, ...]] = {}
            if BASE_FOLDER in compared:
                differing = _differing("tokenizer", BASE_FOLDER, compared)
            owners["tokenizer"] = Ownership("tokenizer", BASE_FOLDER, differing)
            _check_chosen("chat_template", template, folders)
        else:
            _check_chosen("tokenizer", tokenizer, folders)
            _check_chosen("chat_template", template, folders)
            united = unite(experts, base, rows=rows, chosen=tokenizer)
            if united is not None:
                if tokenizer is None and not united.added:
                    united = united._replace(owner=_plainest("tokenizer", united.owner, folders))
                owners["tokenizer"] = _tokenizer(united, compared)

        # Every other kind: the first one's that has any
        for kind in get_args(Kind)[1:]:
            holders = [name for name, companions in folders.items() if companions.has(kind)]
            owner = None
            if kind == "chat_template" and (tokenizer or template):
                # An expert that is chosen but has no template was trained with the base's, if any.
                owner = next((name for name in (template, tokenizer, BASE_FOLDER) if name in holders), None)
            elif holders:
                owner = _plainest(kind, holders[0], folders)
            if owner is not None:
                owners[kind] = Ownership(kind, owner, _differing(kind, owner, compared))

        # The other configs, where they differ from the owner's
        other_configs: dict[str, ConfigDifferences] = {}
        if config is not None:
            others = [*models]
            if base is not None:
                others.append(BASE_FOLDER)
            for name in others:
                if name == config:
                    continue
                differences = ConfigDifferences.between(folders[config].config, folders[name].config)
                if differences or differences.not_compared:
                    other_configs[name] = differences
        return CompanionPlan(folders, config, other_configs, owners, united, rows)

    @staticmethod
    def decide_prompts(
        experts: Mapping[str, Path],
        base: Path,
        *,
        rows: int | None = None,
        tokenizer: str | None = None,
        template: str | None = None,
    ) -> CompanionPlan:
        """Decide whose tokenizer and chat templates prompts have, as full weights would; the arguments are `decide`'s.

        The base's files are only read if an expert has some of its own.
        """
        chosen = tokenizer is not None or template is not None
        if not chosen and not any(tokenizer_files(folder) for folder in experts.values()):
            return CompanionPlan({}, None, {}, {}, None, rows)
        return CompanionPlan.decide(experts, base, rows=rows, tokenizer=tokenizer, template=template)

    @staticmethod
    def on_the_base(experts: Mapping[str, Path], base: Path | None) -> list[str]:
        """A line for the tokenizer, and for the templates, where experts differ from the base that an engine runs."""
        if base is None:
            return []
        folders = {BASE_FOLDER: Companions(base)}
        for name, folder in experts.items():
            folders[name] = Companions(folder)

        lines = []
        for kind in _OF_PROMPTS:
            if not folders[BASE_FOLDER].has(kind):
                continue
            ownership = Ownership(kind, BASE_FOLDER, _differing(kind, BASE_FOLDER, folders))
            if ownership.differing:
                lines.append(f"{ownership}; the engine uses the base's")
        return lines


_CHOICES: Mapping[Kind, str] = {"tokenizer": "tokenizer", "chat_template": "chat_template_from"}  # their parameters


def _check_chosen(kind: Kind, name: str | None, folders: Mapping[str, Companions]) -> None:
    """Refuse the choice of somebody who takes no part, or has no companions of this kind; None chooses nobody."""
    if name is None:
        return

    parameter = _CHOICES[kind]
    if name not in folders:
        known = dict.fromkeys((*folders, BASE_FOLDER))
        raise ArgumentError(
            f"`{parameter}` is {name!r}, which is not an expert here",
            f"Choose from {', '.join(known)}",
            parameter=parameter,
        )
    if not folders[name].has(kind):
        raise ArgumentError(
            f"`{parameter}` is {name!r}, whose folder has no {_LABELS.get(kind, kind)}",
            "Save it there with tokenizer.save_pretrained(FOLDER), or choose another",
            parameter=parameter,
        )


def _plainest(kind: Kind, owner: str, folders: Mapping[str, Companions]) -> str:
    """The base, if its companions of a kind do the same as the owner's; else the owner."""
    base = folders.get(BASE_FOLDER)
    if base is None or not base.has(kind) or folders[owner].differences(base, kind):
        return owner
    return BASE_FOLDER


def _differing(kind: Kind, owner: str, folders: Mapping[str, Companions]) -> dict[str, tuple[str, ...]]:
    """Those whose companions of a kind differ from the owner's: name → in what."""
    differing = {}
    for name, companions in folders.items():
        if name == owner or not companions.has(kind):
            continue
        parts = folders[owner].differences(companions, kind)
        if parts:
            differing[name] = parts
    return differing


def _tokenizer(united: United, folders: Mapping[str, Companions]) -> Ownership:
    """The ownership of the tokenizer. One whose tokens are all in the result's does not differ by having fewer."""
    differing: dict[str, tuple[str, ...]] = {}
    for name, parts in _differing("tokenizer", united.owner, folders).items():
        if name not in united.others:
            parts = tuple(part for part in parts if part not in TOKEN_PARTS)
        if parts:
            differing[name] = parts
    for name in united.others:
        differing.setdefault(name, ())
    return Ownership("tokenizer", united.owner, differing)
