"""Check that experts belong to one base: by its name and revision, by the weights that their records name, by chains.

Each check adds the mistakes that it finds to a `Problems`. Knows opened experts; knows nothing of rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import combinations

from adapterswap.errors import AdapterswapError, BaseModelError, ExpertError, Problems
from adapterswap.experts.adapters import CONFIG, WEIGHTS, Adapter
from adapterswap.experts.base_identity import differing_weights, identity_of
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.identity import sha256_of
from adapterswap.experts.slices import PROVENANCE
from adapterswap.experts.sources import (
    Source,
    alias_remedy,
    at_revision,
    cached_base_folder,
    is_hub_id,
    public_name,
    same_base,
)
from adapterswap.files.smallfiles import expand, is_folder, read_json

__all__ = ["adapt_one_base", "check_base_weights", "check_bases", "unchecked_bases"]

Expert = Adapter | Checkpoint
_Problem = tuple[str, str]  # the message and the remedy

_RESAVED = "If both hold the same weights in different files, delete `fingerprints` from the record in {}'s folder"


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
    reported = set()
    for (one, first), (two, second) in combinations(experts.items(), 2):
        problem = _weights_differ(one, first, two, second) if by_weights else None
        if isinstance(first, Adapter) and isinstance(second, Adapter) and problem is None:
            problem = _chained(one, first, two, second) if by_weights else None
            if declared is None:
                problem = problem or _names_differ(one, first, two, second)
        if problem is not None and two not in reported:
            reported.add(two)
            problems.add(*problem, kind=ExpertError)


def check_base_weights(recorded: Mapping[str, Mapping[str, str]], base: Source | None) -> None:
    """Check that a base is the one that experts were trained on; one on the Hub is not compared.

    Args:
        recorded: the fingerprints of each expert's base by the expert's own record; empty if that does not say.
        base: the base; None if it is not at hand.

    Raises:
        BaseModelError: an expert was trained on another one.
    """
    for name, fingerprints in recorded.items():
        file = differing_weights(fingerprints, identity_of(base)) if base is not None and fingerprints else None
        if base is not None and file is not None:
            raise BaseModelError(
                f"{name} was trained on a base with other weights than {base}: {file} differs",
                f"Pass the base that it was trained on as `base_model`. {_RESAVED.format(name)}",
                parameter="base_model",
            )


def unchecked_bases(experts: Mapping[str, Expert], declared: str | None) -> tuple[str, ...]:
    """A note if experts name a local base and it is not known by which weights, so that it could not be checked.

    Paths to one folder on this machine need no check.
    """
    places = {
        name: expert.config.base_model
        for name, expert in experts.items()
        if isinstance(expert, Adapter) and expert.config.base_model and not is_hub_id(expert.config.base_model)
    }
    sides = {*places.values(), *([declared] if declared is not None else [])}
    recorded = all(experts[name].base_fingerprints for name in places)
    known = recorded and (declared is None or is_folder(expand(declared)))
    if known or len(places) + (declared is not None) < 2 or _one_folder(sides):
        return ()
    without = [name for name in places if not experts[name].base_fingerprints] or [str(declared)]
    base = _called(experts[next(iter(places))])
    what = f"the weights of the local base {base} are not known for {' and '.join(without)}"
    return (f"Not checked whether all have one base: {what}",)


def _one_folder(places: Collection[str]) -> bool:
    """Whether all are paths to one folder that exists here, whatever the current folder is."""
    folders = [expand(place) for place in places]
    existing = all(folder.is_absolute() and is_folder(folder) for folder in folders)
    return existing and len({folder.resolve() for folder in folders}) == 1


def _called(expert: Expert) -> str:
    """What an expert calls its base."""
    name = public_name(expert.config.base_model) if isinstance(expert, Adapter) else None
    return name or "one that it does not name"


def _weights_differ(one: str, first: Expert, two: str, second: Expert) -> _Problem | None:
    """The problem if the records of two experts name different weights of their bases."""
    if differing_weights(first.base_fingerprints, second.base_fingerprints) is None:
        return None
    message = f"{one} and {two} adapt different bases: {_called(first)} and {_called(second)}, whose weights differ"
    return message, f"Compose experts of one base. {_RESAVED.format(two)}"


def _names_differ(one: str, first: Adapter, two: str, second: Adapter) -> _Problem | None:
    """The problem if two adapters name different bases, or different revisions of one."""
    ours, theirs = first.config, second.config
    if not adapt_one_base(first, second):
        message = f"{one} adapts the base {ours.base_model}, but {two} adapts {theirs.base_model}"
        return message, alias_remedy(ours.base_model, theirs.base_model)
    if (ours.revision or "main") == (theirs.revision or "main"):
        return None
    message = (
        f"{one} adapts the revision {ours.revision or 'main'} of {ours.base_model}, but {two} adapts "
        f"{theirs.revision or 'main'}"
    )
    return message, "Compose experts of one revision, or pass `base_model=org/name@revision` for the result"


def _chained(one: str, first: Adapter, two: str, second: Adapter) -> _Problem | None:
    """The problem if one adapter was trained on a base into which the other is merged, by our record in its folder."""
    if same_base(first.config.base_model, second.config.base_model):
        return None
    for name, part, later, on_top in ((one, first, two, second), (two, second, one, first)):
        if _is_merged_into(part, on_top):
            message = f"{later} was trained on top of {name}, which is merged into its base {on_top.config.base_model}"
            return message, f"Compose adapters that were trained on one base: {later} alone holds only what it adds"
    return None


def _is_merged_into(part: Adapter, on_top: Adapter) -> bool:
    """Whether the base of `on_top` is on this machine, and its record names `part` among the merged experts."""
    named = on_top.config.base_model
    folder = None if named is None else cached_base_folder(at_revision(named, on_top.config.revision))
    with suppress(AdapterswapError, AttributeError, KeyError, TypeError):
        for merged in read_json(folder / PROVENANCE)["experts"].values() if folder else ():
            hashes = merged["sha256"]
            if hashes.get(CONFIG) == part.config.sha256 and hashes.get(WEIGHTS) == sha256_of(part.file.path):
                return True
    return False
