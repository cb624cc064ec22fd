"""Do the experts have one base? By its name, by the weights that records name, and along chains of adapters.

Each check adds the mistakes that it finds to a `Problems`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint, open_checkpoint
from adapterswap.core.model.sources import CONFIG, PROVENANCE, WEIGHTS, Records, Reference, Source, same_base
from adapterswap.kit.errors import AdapterswapError, BaseModelError, ExpertError, Problems, UnsupportedError
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.text import expand

Expert = Adapter | Checkpoint

_Problem = tuple[str, str]  # the message and the remedy
_Identity = tuple[str | None, str]  # the SHA-256 of an adapter's config and weights

_RESAVED = (
    "If both hold the same weights in other files or dtypes, delete `fingerprints` from the record in {}'s folder"
)


def adapt_one_base(one: Adapter, other: Adapter) -> bool:
    """Whether two adapters have the same base: by its weights if both records name them, else by its name."""
    if one.base_fingerprints and other.base_fingerprints:
        return one.base_fingerprints == other.base_fingerprints
    return same_base(one.config.base_model, other.config.base_model)


def check_bases(
    experts: Mapping[str, Expert], declared: str | None, problems: Problems, *, by_weights: bool = True
) -> None:
    """Check that experts have one base: by the weights that their records name and, for adapters, by name.

    Args:
        experts: the experts by name.
        declared: the base that the user declared. Then adapters may call it differently, but not have another one.
        problems: collects the mistakes.
        by_weights: also compare weights, and look for chains. Records were checked when they were written.
    """
    adapters = {name: expert for name, expert in experts.items() if isinstance(expert, Adapter)}
    reported = set()

    # An adapter that was trained on top of another one needs that one, too.
    if by_weights:
        for name, adapter in adapters.items():
            if not is_on_top(adapter.base_fingerprints) or _holds(declared, adapter.base_fingerprints):
                continue
            below = [other for other, part in adapters.items() if _is_merged_into(part, adapter)]
            reported.add(name)
            problems.add(*_only_adds(name, *below[:1]), parameter="chains", kind=ExpertError)

    # Of two bases, each expert is reported once.
    others = {name: expert for name, expert in experts.items() if name not in reported}
    for (one, first), (two, second) in combinations(others.items(), 2):
        problem = None
        if by_weights:
            problem = _weights_differ(one, first, two, second)

        # Names are the weakest evidence, and a declared base says that they mean one thing.
        if isinstance(first, Adapter) and isinstance(second, Adapter):
            if problem is None and by_weights:
                problem = _chained(one, first, two, second)
            if problem is None and declared is None:
                problem = _names_differ(one, first, two, second)

        if problem is not None and two not in reported:
            reported.add(two)
            problems.add(*problem, kind=ExpertError)

    # The declared base may lack what is merged into the one that an adapter was trained on.
    if declared is None or reported or not by_weights:
        return
    for name, adapter in adapters.items():
        if same_base(adapter.config.base_model, declared):
            continue
        merged = _merged_into(adapter)
        if merged is not None and merged != _merged_into_base(declared):
            problems.add(
                f"{name} was trained on {adapter.config.base_model}, into which adapters are merged, and not on "
                f"{declared}",
                f"{_as_chain('FIRST', name)}. Or pass the base that it was trained on",
                parameter="base_model",
                kind=ExpertError,
            )


def check_base_weights(
    recorded: Mapping[str, Mapping[str, str]], base: Source | None, own: Mapping[str, str | None] | None = None
) -> None:
    """Check that a base is the one that experts were trained on; one on the Hub is not compared.

    Args:
        recorded: the fingerprints of each expert's base by the expert's own record; empty if that does not say.
        base: the base; None if it is not at hand.
        own: where each expert's config says that its base is. If that is still there, it shows whether both are one
            model in two dtypes.
    """
    folder = None
    if base is not None:
        folder = str(base.folder)

    for name, fingerprints in recorded.items():
        if is_on_top(fingerprints):
            if not _holds(folder, fingerprints):
                raise ExpertError(*_only_adds(name), parameter="chains")
            continue
        if base is None or not fingerprints:
            continue
        file = differing_weights(fingerprints, base.identity)
        if file is None:
            continue

        # If the base that it was trained on is here, both may be one model in two dtypes.
        place = (own or {}).get(name)
        trained_on = _checkpoint(place)
        what, rounded = "a base", None
        if trained_on is not None and trained_on.source.identity == fingerprints:
            what, rounded = "another model", _rounded(place, folder)
        if rounded is not None:
            raise BaseModelError(
                f"{name} was trained on the same model in another dtype: {rounded}",
                f"Pass the base that it was trained on as `base_model`, or declare that {base} may take its place: "
                f"delete `fingerprints` from the record in {name}'s folder",
                parameter="base_model",
            )
        raise BaseModelError(
            f"{name} was trained on {what} with other weights than {base}: {file} differs",
            f"Pass the base that it was trained on as `base_model`. {_RESAVED.format(name)}",
            parameter="base_model",
        )


def _rounded(first: str | None, second: str | None) -> str | None:
    """What says that two bases are one model in two dtypes; None if they are not, or cannot be compared."""
    one, other = _checkpoint(first), _checkpoint(second)
    if one is None or other is None:
        return None

    for narrow, precise in ((one, other), (other, one)):
        dtype = narrow.rounded_from(precise)
        if dtype is not None:
            folders = narrow.source.folder, precise.source.folder
            return f"the weights of {folders[0]} are those of {folders[1]}, rounded to {dtype}"
    return None


def _checkpoint(reference: str | None) -> Checkpoint | None:
    """The headers of a base on this machine; None if they are not here."""
    if reference is None:
        return None
    folder = Reference(reference).cached_folder
    if folder is None:
        return None

    with suppress(AdapterswapError):
        return open_checkpoint(folder)
    return None


def is_on_top(fingerprints: Mapping[str, str]) -> bool:
    """Whether the recorded base had another adapter merged in during training."""
    return WEIGHTS in fingerprints


def _holds(base: str | None, fingerprints: Mapping[str, str]) -> bool:
    """Whether the adapter that an expert was trained on top of is merged into a base, by the record beside that."""
    return base is not None and _merged_into_base(base) == [(fingerprints[CONFIG], fingerprints[WEIGHTS])]


def _only_adds(name: str, below: str = "FIRST") -> _Problem:
    """The problem of an adapter that needs another one, called `below`, under it."""
    message = f"{name} was trained on top of another adapter, and holds only what it adds to that"
    return message, _as_chain(below, name)


def _as_chain(first: str, second: str) -> str:
    """The remedy that makes one expert of two adapters."""
    return (
        f"Use both as one expert: `experts={{'{first}': PATH}}`, `experts={{'{second}': PATH}}`, "
        f"`chains={{'NAME': ['{first}', '{second}']}}` and a rule that gives layers to NAME"
    )


def unchecked_bases(experts: Mapping[str, Expert], declared: str | None) -> tuple[str, ...]:
    """A note if experts name a local base and it is not known by which weights, so that it could not be checked.

    Paths to one folder on this machine need no check.
    """
    places: dict[str, str] = {}
    for name, expert in experts.items():
        base = _base_name(expert)
        if base and not Reference(base).is_hub_id:
            places[name] = base

    # A declared base is one more to compare with, whose weights are known if it is here.
    without = [name for name in places if not experts[name].base_fingerprints]
    known = not without
    compared = list(places.values())
    if declared is not None:
        compared.append(declared)
        known = known and os.path.isdir(expand(declared))
    if known or len(compared) < 2:
        return ()

    # All may be paths to one folder that exists here, whatever the current folder is.
    folders = [expand(place) for place in compared]
    existing = all(folder.is_absolute() and os.path.isdir(folder) for folder in folders)
    if existing and len({folder.resolve() for folder in folders}) == 1:
        return ()

    listed = " and ".join(without or [str(declared)])
    called = _called(experts[next(iter(places))])
    what = f"the weights of the local base {called} are not known for {listed}"
    return (f"Not checked whether all have one base: {what}",)


def _base_name(expert: Expert) -> str | None:
    """The base that an adapter's config names; None if it names none, and for a full checkpoint."""
    if isinstance(expert, Adapter):
        return expert.config.base_model
    return None


def _called(expert: Expert) -> str:
    """What an expert calls its base."""
    name = _base_name(expert)
    return (name and Reference(name).public_name) or "one that it does not name"


def _weights_differ(one: str, first: Expert, two: str, second: Expert) -> _Problem | None:
    """The problem if the records of two experts name different weights of their bases."""
    if differing_weights(first.base_fingerprints, second.base_fingerprints) is None:
        return None

    remedy = f"Compose experts of one base. {_RESAVED.format(two)}"
    if isinstance(first, Adapter) and isinstance(second, Adapter):
        rounded = _rounded(first.config.base_reference, second.config.base_reference)
        if rounded is not None:
            return f"{one} and {two} adapt one model in two dtypes: {rounded}", remedy
    message = f"{one} and {two} adapt different bases: {_called(first)} and {_called(second)}, whose weights differ"
    return message, remedy


def _names_differ(one: str, first: Adapter, two: str, second: Adapter) -> _Problem | None:
    """The problem if two adapters name different bases, or different revisions of one."""
    ours, theirs = first.config, second.config
    if not adapt_one_base(first, second):
        message = f"{one} adapts the base {ours.base_model}, but {two} adapts {theirs.base_model}"
        return message, alias_remedy(ours.base_model, theirs.base_model)

    # An adapter that names no revision was trained on `main`.
    our_revision, their_revision = ours.revision or "main", theirs.revision or "main"
    if our_revision == their_revision:
        return None
    message = f"{one} adapts the revision {our_revision} of {ours.base_model}, but {two} adapts {their_revision}"
    return message, "Compose experts of one revision, or pass `base_model=org/name@revision` for the result"


def _chained(one: str, first: Adapter, two: str, second: Adapter) -> _Problem | None:
    """The problem if one adapter was trained on a base into which the other is merged, by our record in its folder."""
    if same_base(first.config.base_model, second.config.base_model):
        return None

    for name, part, later, on_top in ((one, first, two, second), (two, second, one, first)):
        if _is_merged_into(part, on_top):
            message = f"{later} was trained on top of {name}, which is merged into its base {on_top.config.base_model}"
            return message, _as_chain(name, later)
    return None


def _is_merged_into(part: Adapter, on_top: Adapter) -> bool:
    """Whether the base of `on_top` is on this machine, and its record names `part` among the merged experts."""
    for config, weights in _merged_into(on_top) or ():
        # Weights take long to hash, so the small config is compared first.
        if config == part.config.sha256 and weights == sha256_of(part.file.path):
            return True
    return False


def _merged_into(adapter: Adapter) -> list[_Identity] | None:
    """The adapters that are merged into an adapter's base, by its own record or the base's; None if not known."""
    below = adapter.base_fingerprints
    if is_on_top(below):
        return [(below[CONFIG], below[WEIGHTS])]
    return _merged_into_base(adapter.config.base_reference)


def _folder_with_record(base: str | None) -> Path | None:
    """The folder of a base that is on this machine and has a record of how it was made; else None."""
    if base is None:
        return None
    folder = Reference(base).cached_folder
    if folder is None or not os.path.exists(folder / PROVENANCE):
        return None
    return folder


def _merged_into_base(base: str | None) -> list[_Identity] | None:
    """The adapters that are merged into a base, by the record beside it; None if that is not known."""
    folder = _folder_with_record(base)
    if folder is None:
        return None

    # A record that lacks these entries, or is damaged, says nothing of it.
    with suppress(AdapterswapError, AttributeError, KeyError, TypeError):
        merged = [expert["sha256"] for expert in Records(folder).provenance()["experts"].values()]
        return [(hashes[CONFIG], hashes[WEIGHTS]) for hashes in merged] or None
    return None


def _merged_whole(base: str | None, parts: Sequence[Adapter]) -> bool:
    """Whether adapters are merged into a base with all their layers and their whole ΔW, by the record beside it."""
    folder = _folder_with_record(base)
    if folder is None:
        return False

    # A record that lacks these entries, or is damaged, proves nothing.
    with suppress(AdapterswapError, AttributeError, KeyError, TypeError):
        record = Records(folder).provenance()
        if "kept_rows" in record:
            return False
        for owner in record["tensors"].values():
            if isinstance(owner, Mapping) and any(share != 1 for share in owner.values()):
                return False

        kept = Records(folder).kept_layers()
        if kept is not None:
            return kept == parts[-1].kept_layers

        # One rule without layers or modules is for all of them.
        rules = record["rules"]
        return len(rules) == 1 and rules[0].keys() <= {"expert", "blend", "normalize"}
    return False


def with_chains(
    experts: Mapping[str, Expert], chains: Mapping[str, Sequence[str]], problems: Problems, *, recorded: bool
) -> tuple[dict[str, Expert], tuple[str, ...]]:
    """The experts, with all adapters of a chain on the base of its first, and what could not be checked of them.

    Args:
        experts: by name.
        chains: by name: the adapters, each trained on top of those before it.
        problems: collects experts that cannot be on top of others, and those that are not by the record of their base.
        recorded: the chains come from a record, and were checked when it was written.
    """
    based, notes = dict(experts), list[str]()
    for parts in chains.values():
        before: list[Adapter] = []
        for name in parts:
            if name not in experts:
                continue

            adapter, lower = experts[name], parts[max(0, len(before) - 1)]
            if not isinstance(adapter, Adapter) or (before and (adapter.opaque or adapter.saved)):
                what = "not only plain LoRA"
                if isinstance(adapter, Checkpoint):
                    what = "a full checkpoint"
                rule = "a chain begins with an adapter"
                if before:
                    rule = f"only plain LoRA can be added on top of {lower} in a chain"
                problems.add(
                    f"{name} is {what}, but {rule}",
                    "Merge them one after another with `merge`",
                    parameter="chains",
                    kind=UnsupportedError,
                )
                break

            # The first one stays as it is: its base is that of the chain.
            if not before:
                before.append(adapter)
                continue

            copied = _copied_from_below(adapter, before)
            if copied is not None:
                problems.add(
                    f"{name} carries a copy of {copied} with {lower} merged into it, which PEFT would put in "
                    "the place of the base's own",
                    f"Load {name} with PEFT, and save it with save_pretrained(PATH, save_embedding_layers=False)",
                    parameter="chains",
                    kind=UnsupportedError,
                )
            if not recorded:
                with problems.collect():
                    notes += _check_on_top(name, adapter, lower, before)

            # Its base is the first one's; `trained_on` keeps what its own config says.
            first = before[0]
            config = replace(adapter.config, base_model=first.config.base_model, revision=first.config.revision)
            based[name] = replace(
                adapter,
                config=config,
                base_fingerprints=first.base_fingerprints,
                trained_on=adapter.config.base_model,
            )
            before.append(adapter)
    return based, tuple(notes)


def _copied_from_below(adapter: Adapter, before: Sequence[Adapter]) -> str | None:
    """The first module of which an adapter has a copy, although those before it changed it; None if there is none."""
    for lora in adapter.factors.values():
        if lora.base and any(lora.name in part.factors for part in before):
            return lora.name
    return None


def _check_on_top(name: str, adapter: Adapter, lower: str, before: Sequence[Adapter]) -> Iterator[str]:
    """Check that an adapter was trained on top of those `before` it, the last of which is called `lower`; a note if it
    cannot be known."""
    # A record names all of them, or only the last one, if that was merged into a base that has the others already.
    merged = _merged_into(adapter)
    others = False
    if merged is not None:
        identities = [(part.config.sha256, sha256_of(part.file.path)) for part in before]
        others = merged not in (identities[-1:], identities)
    if others or any(_is_merged_into(adapter, part) for part in before):
        raise ExpertError(
            f"{name} was not trained on top of {lower}, by the records of what is merged into their bases",
            "Name the adapters of the chain in the order in which they were trained",
            parameter="chains",
        )

    by_base = merged is not None and not is_on_top(adapter.base_fingerprints)
    if by_base and not _merged_whole(adapter.config.base_reference, before):
        raise ExpertError(
            f"{name} was trained on {adapter.config.base_model}, into which only some layers or a share of "
            f"{lower} are merged, by the record there",
            f"Merge {name} into that base with `merge`, and compose the full checkpoints",
            parameter="chains",
        )
    if merged is None:
        yield f"Not checked whether {name} was trained on top of {lower}: no record says what is merged into its base"


# What publishers add to a model's name for a copy in another number format: suffixes, and prefixes.
_COPIES = re.compile(
    r"(-(unsloth|bnb|4bit|8bit|awq|gptq|int4|int8|fp8|nf4|gguf|hf|bf16|fp16|quantized|w4a16|w8a8|dynamic))+$"
)
_MAKERS = re.compile(r"^(meta|google|mistralai|microsoft)-")


def alias_remedy(one: str | None, other: str | None) -> str:
    """The remedy for experts that name different bases, since different names may mean the same weights.

    `unsloth/X`, its 4-bit copy `unsloth/X-bnb-4bit`, `meta-llama/X` and a local folder `X` probably are the same model,
    but no name can prove it, so the user has to declare it. A LoRA that was trained on a 4-bit copy is usually applied
    to the original.
    """
    if one is None or other is None or _plain_name(one) != _plain_name(other):
        return (
            "Compose experts of one base. If both names mean the same weights, pass `base_model`; if one base is the "
            "other with adapters merged into it, the experts cannot be composed"
        )

    original = min((one, other), key=lambda name: (_is_copy(name), name.startswith("unsloth/")))
    if not Reference(original).is_hub_id:
        original = "PATH"
    return f"If both are copies of the same model, as their names suggest, pass `base_model={original}` to declare it"


def published_name(names: Iterable[str | None]) -> str | None:
    """The Hub id among the names that experts have for one base, and not that of a quantized copy.

    None if an expert names no base, or if the names are not those of one model and its copies: then nobody knows which
    of them was meant.
    """
    named = list(names)
    known = [name for name in named if name is not None]
    if len(known) < len(named) or len({_plain_name(name) for name in known}) > 1:
        return None

    for name in known:
        if Reference(name).is_hub_id and not _is_copy(name):
            return name
    return None


def _is_copy(base: str) -> bool:
    """Whether a base's name, without its revision, is that of a copy in another number format."""
    return _COPIES.search(Reference(base).parts[0].lower()) is not None


def _plain_name(base: str) -> str:
    """A base's own name, without its publisher and number format."""
    name = Reference(base).parts[0].rstrip("/").rpartition("/")[2].lower()
    return _MAKERS.sub("", _COPIES.sub("", name))


def differing_weights(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first file in which two bases differ; None if they are the same, or if one of them is unknown."""
    if not one or not other:
        return None
    return min((name for name, _ in one.items() ^ other.items()), default=None)
