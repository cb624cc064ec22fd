"""What an adapter holds: the modules whose tensors PEFT would load from its file, each as a part.

The config says which these are (`Held.of`) or, if only the base can tell, a trial in PEFT. `Held.read` compares each
module's tensors with the config, which PEFT never does. What differs between kinds of modules is in `lora`, `tokens`
and `others`.

Messages begin with the name of a module or of the config; the adapter's folder is put before them where they are
collected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from adapterswap.core.experts.config import AdapterConfig, Targets, is_plain
from adapterswap.core.experts.keys import (
    MISMATCH,
    TASK_HEADS,
    TOKENS,
    TRAINABLE_TOKENS,
    TRAINED_ROWS,
    FactorTensors,
    PartTensors,
    SortedKeys,
    misnamed,
)
from adapterswap.core.experts.lora import bare_name, parameter_names, read_lora
from adapterswap.core.experts.others import check_feedforward, read_other
from adapterswap.core.experts.parts import FullModule, Part
from adapterswap.core.experts.tokens import tied_rows, trained_rows
from adapterswap.core.model.layers import ModuleName
from adapterswap.core.model.sources import CONFIG, WEIGHTS, Reference
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    NotFoundError,
    Problems,
    UnsupportedError,
)
from adapterswap.kit.files.tensorfile import Tensor, TensorFile

if TYPE_CHECKING:
    from adapterswap.core.experts.trial import PeftTrial


class Held(NamedTuple):
    """What an adapter holds: the tensors in its file that PEFT loads.

    Attributes:
        config: the adapter's, with the targets that a trial in PEFT found, if there was one.
        parts, saved: as in `SortedKeys`.
        parameters: those of `parts` that are parameters, not modules.
        ignored: modules in the file that the config does not target.
        tied: for TRAINABLE_TOKENS, see `tokens.tied_rows`.
    """

    config: AdapterConfig
    parts: Mapping[str, PartTensors]
    saved: Mapping[str, Mapping[str, Tensor]]
    parameters: Collection[str] = ()
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, Mapping[str, Tensor]] = {}

    @staticmethod
    def of(keys: SortedKeys, config: AdapterConfig, file: TensorFile, folder: Path, problems: Problems) -> Held:
        """By the config or, if only the base can tell, by a trial in PEFT."""
        parts, parameters = keys.parts, set[str]()
        trial = None
        if not problems:  # otherwise the rest would be guesses
            try:
                trial = _try_in_base(config, parts, keys.saved, file, folder)
            except AdapterswapError as error:
                raise error.within(str(folder)) from None
        if trial is not None:
            config = replace(config, targets=Targets(modules=trial.adapted))

        # LoRA on a parameter goes under the parameter's own name.
        if config.target_parameters:
            with problems.collect():
                own_names = _own_names(parts, config, trial)
                parts = {own_names.get(name, name): tensors for name, tensors in parts.items()}
                parameters = set(own_names.values())

        ignored = _ignored([name for name in parts if name not in parameters], keys.saved, config, problems)
        if config.peft_type == TRAINABLE_TOKENS:
            return Held._of_tokens(keys, config, ignored, problems)

        parts = {name: tensors for name, tensors in parts.items() if name not in ignored}
        if config.targets.feedforward is not None:
            check_feedforward(_without_factors(parts), config, problems)
        return Held(config, parts, keys.saved, parameters, ignored)

    @staticmethod
    def _of_tokens(keys: SortedKeys, config: AdapterConfig, ignored: tuple[str, ...], problems: Problems) -> Held:
        """Of TRAINABLE_TOKENS, whose parts are rows of modules that are otherwise the base's."""
        rows = {name: tensors[TRAINED_ROWS] for name, tensors in _without_factors(keys.parts).items()}
        tied: dict[str, dict[str, Tensor]] = {}
        with problems.collect():
            tied = tied_rows(rows, ignored, config)

        saved = dict(keys.saved)
        repeated: set[str] = set()
        for name, heads in tied.items():
            saved[name] = {**saved.get(name, {}), TOKENS: rows[name]}
            repeated.update(heads)
        ignored = tuple(name for name in ignored if name not in repeated)
        return Held(config, {}, saved, ignored=ignored, tied=tied)

    def read(self, shared: Mapping[str, Tensor], container: str | None, problems: Problems) -> list[Part]:
        """The parts; `shared` as in `SortedKeys`, and `container` as in `Adapter`."""
        config = self.config
        read: list[Part] = []

        # Modules with factors, or of another kind than LoRA
        ranks, alphas = config.resolved(self.parts)
        for name, tensors in self.parts.items():
            layer = ModuleName(name).layer(container)
            try:
                if isinstance(tensors, FactorTensors):
                    is_parameter = name in self.parameters
                    read.append(
                        read_lora(name, layer, tensors, config, ranks[name], alphas[name], parameter=is_parameter)
                    )
                else:
                    read.append(read_other(name, layer, tensors, shared, config))
            except AdapterswapError as error:
                problems.keep(error.within(problems.where))

        # Modules trained in full, and embeddings and heads with trained rows
        for name, own_tensors in self.saved.items():
            with problems.collect():
                if name in self.parts:
                    raise ExpertError(f"{name} has both LoRA factors and full weights", "Save the adapter again")
                layer = ModuleName(name).layer(container)
                rows: tuple[int, ...] = ()
                if TOKENS in own_tensors:
                    rows = trained_rows(name, layer, own_tensors, config)
                read.append(FullModule(name, layer, own_tensors, rows, self.tied.get(name, {})))

        if config.trained_tokens and not any(TOKENS in own_tensors for own_tensors in self.saved.values()):
            problems.add(f"{CONFIG} has trainable_token_indices, but {WEIGHTS} has no such rows", MISMATCH)
        return read


def _without_factors(parts: Mapping[str, PartTensors]) -> dict[str, Mapping[str, Tensor]]:
    """The parts of another kind than LoRA."""
    return {name: tensors for name, tensors in parts.items() if not isinstance(tensors, FactorTensors)}


def _try_in_base(
    config: AdapterConfig, names: Collection[str], saved: Collection[str], file: TensorFile, folder: Path
) -> PeftTrial | None:
    """How PEFT loads the adapter, if only the base can tell which modules PEFT loads, or whether it can; else None."""
    base = config.base_reference
    reason = _reason_for_base(config, names, saved)
    depends = f"{CONFIG}: {reason}, and what PEFT makes of it depends on the base"
    if reason is None:
        is_usual = _is_usual(config, names, saved)
        if is_usual or config.holds_regexes or base is None or Reference(base).cached_folder is None:
            return None
    else:
        odd_heads = [name for name in names if name.endswith("unembed_tokens")]  # no base has a module of this name
        if odd_heads:
            raise ExpertError(f"{odd_heads[0]} is not a name that PEFT gives", misnamed(odd_heads[0]) or "")
        remedy = "Name all modules in target_modules, and only those in modules_to_save that have tensors"
        if base is None:
            raise UnsupportedError(f"{depends}, but the config names none", remedy)
        if config.holds_regexes:
            raise UnsupportedError(f"{depends}, but the config also holds regexes, which are not run in PEFT", remedy)

    # PEFT and torch take seconds to import. PEFT itself writes configs without this need.
    from adapterswap.core.experts.trial import load_into_base

    try:
        return load_into_base(folder, base, config.task_type, file, names)
    except (ArgumentError, BaseModelError, NotFoundError, UnsupportedError) as error:
        if reason is None:
            return None
        raise error.within(depends) from None


def _reason_for_base(config: AdapterConfig, names: Collection[str], saved: Collection[str]) -> str | None:
    """What in a config can only be read beside the base; None if nothing is.

    Args:
        config: the adapter's.
        names: its modules, without those trained in full.
        saved: the modules trained in full.
    """
    # Targets that PEFT looks up in the base: its default, "all-linear", and lists that it shortens. PEFT's default adds
    # nothing to LoRA on the parameters of experts.
    modules = config.targets.modules
    if config.targets.depend_on_base and config.peft_type != TRAINABLE_TOKENS:
        are_experts = config.target_parameters and all(re.search(r"\.experts(\.base_layer)*$", name) for name in names)
        if isinstance(modules, frozenset):
            return "target_modules has 20 names or more"
        if modules is not None or not are_experts:
            return f"target_modules is {modules}"

    # A weight that both target_modules and target_parameters name
    if config.target_parameters:
        weights = [f".{name}.weight" for name in _loaded(config, names)]
        for parameter in config.target_parameters:
            if any(weight.endswith(f".{parameter}") for weight in weights):
                return f"target_parameters names {parameter}, of a module in target_modules"

    if config.peft_type == "IA3" and config.targets.feedforward is None:
        return "feedforward_modules is null"

    kind = config.kind
    if kind is not None and kind.shared and len(_loaded(config, names)) < len(names):
        return "it targets only some of the modules in the file, which share tensors as large as the largest"

    heads = TASK_HEADS.get(config.task_type or "", ())
    for end in config.modules_to_save:
        is_expected = is_plain(end) and end not in heads
        if is_expected and not any(name.endswith(end) for name in saved):
            return f"modules_to_save names {end}, which has no tensors"
    return None


def _is_usual(config: AdapterConfig, names: Collection[str], saved: Collection[str]) -> bool:
    """Whether all modules and parameters that the config names are heads, embeddings, or in the file under that name.

    The arguments are those of `_reason_for_base`.
    """
    heads = TASK_HEADS.get(config.task_type or "", ())
    for end in config.modules_to_save:
        is_vocabulary = "." not in end and ModuleName(end).is_vocabulary(None)
        if end not in saved and end not in heads and not is_vocabulary:
            return False

    if not config.target_parameters:
        return True
    parameters: Collection[str] = ()
    with suppress(UnsupportedError):  # raised again if the base is not at hand
        parameters = _own_names(names, config, None).values()
    known = [f".{name}" for name in parameters]
    return all(any(name.endswith(f".{end}") for name in known) for end in config.target_parameters)


def _loaded(config: AdapterConfig, names: Collection[str]) -> set[str]:
    """The modules of `names` that the config targets; an `ExpertError` if its regexes are invalid or too slow."""
    try:
        return config.targets.loaded(names)
    except ValueError as error:
        raise _bad_regex(error) from None


def _own_names(names: Collection[str], config: AdapterConfig, trial: PeftTrial | None) -> dict[str, str]:
    """The names of modules with LoRA on a parameter → the parameter's own name, by the trial or by the config."""
    if trial is not None:
        return {name: f"{bare_name(name)}.{last}" for name, last in trial.parameters.items() if name in names}
    try:
        return parameter_names(names, config)
    except ValueError as error:
        raise _bad_regex(error) from None


def _bad_regex(error: ValueError) -> ExpertError:
    return ExpertError(f"{CONFIG}: {error}", "Use plain module names in target_modules")


def _ignored(
    names: Collection[str], saved: Collection[str], config: AdapterConfig, problems: Problems
) -> tuple[str, ...]:
    """The modules of `names` that the config does not target; `saved` are those trained in full."""
    # PEFT cannot adapt a module that holds others. Without targets in the config, everything in the file counts.
    parents: set[str] = set()
    if config.targets.modules is not None:
        for name in names:
            parents.update(name[: dot.start()] for dot in re.finditer(r"\.", name))
        parents.difference_update(names)

    try:
        loaded, loaded_parents = _loaded(config, names), _loaded(config, parents)
    except ExpertError as error:
        problems.keep(error.within(problems.where))
        return ()
    if loaded_parents:
        problems.add(
            f"{CONFIG} targets {min(loaded_parents)}, which has modules in it, so PEFT cannot load it",
            "Correct target_modules, or save the adapter again",
        )

    # PEFT also applies an embedding's LoRA to the head, which the config may not name.
    if config.tied:
        for name in names:
            if not any(segment.isdecimal() for segment in name.split(".")):
                loaded.add(name)

    ignored = tuple(name for name in names if name not in loaded and name not in saved)
    if ignored and not loaded and not config.target_parameters:
        problems.add(
            f"{CONFIG} targets no module in {WEIGHTS} (such as {ignored[0]}), so PEFT would load none",
            "Correct target_modules, layers_to_transform or exclude_modules, or save the adapter again",
        )
    return ignored
