"""What an adapter holds: the modules whose tensors PEFT would load from its file, each as a part.

The config says which these are (`Held.of`) or, if only the base can tell, a trial in PEFT. `Held.read` compares each
module's tensors with the config, which PEFT never does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from adapterswap.core.experts.config import AdapterConfig, Targets, is_plain, scale
from adapterswap.core.experts.keys import (
    KINDS,
    LORA_PARTS,
    TASK_HEADS,
    TOKENS,
    TRAINABLE_TOKENS,
    TRAINED_ROWS,
    FactorTensors,
    ModuleKeys,
    PartTensors,
    SortedKeys,
    misnamed,
)
from adapterswap.core.experts.parts import FullModule, LoraModule, OpaqueModule, Part
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
    and_more,
)
from adapterswap.kit.files.tensorfile import Tensor, TensorFile

if TYPE_CHECKING:
    from adapterswap.core.experts.trial import PeftTrial

_HIRA_RANK = 32  # PEFT's default

# A fused layer's two parameters in every model of transformers, in their order.
_FIRST_FUSED, _LAST_FUSED = "gate_up_proj", "down_proj"

_MISMATCH = "The file and its config do not belong together: save the adapter again"


@dataclass(frozen=True)
class Held:
    """What an adapter holds: the tensors in its file that PEFT loads.

    Attributes:
        config: the adapter's, with the targets that a trial in PEFT found, if there was one.
        parts, saved: as in `SortedKeys`.
        parameters: those of `parts` that are parameters, not modules.
        ignored: modules in the file that the config does not target.
        tied: for TRAINABLE_TOKENS, see `_tied_rows`.
    """

    config: AdapterConfig
    parts: Mapping[str, PartTensors]
    saved: Mapping[str, Mapping[str, Tensor]]
    parameters: Collection[str] = ()
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(keys: SortedKeys, config: AdapterConfig, file: TensorFile, folder: Path, problems: Problems) -> Held:
        """By the config or, if only the base can tell, by a trial in PEFT."""
        parts, parameters = keys.parts, set[str]()
        # With problems, the rest would be guesses.
        trial = None if problems else _try_in_base(config, parts, keys.saved, file, folder)
        with problems.collect():
            if trial is not None:
                config = replace(config, targets=Targets(modules=trial.adapted))
            if config.target_parameters:
                parts, parameters = _with_parameters(parts, config, trial, folder)
        ignored = _ignored([name for name in parts if name not in parameters], keys.saved, config, folder, problems)
        if config.peft_type == TRAINABLE_TOKENS:
            return Held._of_tokens(keys, config, ignored, folder, problems)
        parts = {name: tensors for name, tensors in parts.items() if name not in ignored}
        if config.peft_type == "IA3" and config.targets.feedforward is not None:
            _check_feedforward(_of_kind(parts), config, folder, problems)
        return Held(config, parts, keys.saved, parameters, ignored)

    @staticmethod
    def _of_tokens(
        keys: SortedKeys, config: AdapterConfig, ignored: tuple[str, ...], folder: Path, problems: Problems
    ) -> Held:
        """Of TRAINABLE_TOKENS, whose parts are rows of modules that are otherwise the base's."""
        rows = {name: tensors[TRAINED_ROWS] for name, tensors in _of_kind(keys.parts).items()}
        tied: dict[str, dict[str, Tensor]] = {}
        with problems.collect():
            tied = _tied_rows(rows, ignored, config, folder)
        ignored = tuple(name for name in ignored if not any(name in names for names in tied.values()))
        saved = keys.saved | {name: {**keys.saved.get(name, {}), TOKENS: rows[name]} for name in tied}
        return Held(config, {}, saved, ignored=ignored, tied=tied)

    def read(self, shared: Mapping[str, Tensor], container: str | None, folder: Path, problems: Problems) -> list[Part]:
        """The parts; `shared` as in `SortedKeys`, and `container` as in `Adapter`."""
        config, read = self.config, list[Part]()
        ranks, alphas = config.resolved(self.parts)
        for name, tensors in self.parts.items():
            try:
                if isinstance(tensors, FactorTensors):
                    given = ranks[name], alphas[name]
                    parameter = name in self.parameters
                    read.append(_lora(name, tensors, config, given, container, folder, parameter=parameter))
                else:
                    read.append(_opaque(name, tensors, shared, config, container, folder))
            except AdapterswapError as error:
                problems.keep(error)
        for name, own_tensors in self.saved.items():
            with problems.collect():
                if name in self.parts:
                    raise ExpertError(
                        f"{folder}: {name} has both LoRA factors and full weights", "Save the adapter again"
                    )
                layer = ModuleName(name).layer(container)
                rows = _trained_rows(name, layer, own_tensors, config, folder) if TOKENS in own_tensors else ()
                read.append(FullModule(name, layer, own_tensors, rows, self.tied.get(name, {})))
        if config.trained_tokens and not any(TOKENS in own_tensors for own_tensors in self.saved.values()):
            problems.add(f"{folder}: {CONFIG} has trainable_token_indices, but {WEIGHTS} has no such rows", _MISMATCH)
        return read


def _tied_rows(
    own_rows: Mapping[str, Tensor], ignored: Collection[str], config: AdapterConfig, folder: Path
) -> dict[str, dict[str, Tensor]]:
    """For TRAINABLE_TOKENS: each targeted module → the modules tied to it.

    If the base ties its head to its embedding, PEFT stores the rows under both names, but targets only the embedding.
    """
    tied: dict[str, dict[str, Tensor]] = {name: {} for name in own_rows if name not in ignored}
    if config.targets.modules is None and (len(tied) > 1 or any(ModuleName(name).is_head for name in tied)):
        raise ExpertError(
            f"{folder / CONFIG}: target_modules is null, and {WEIGHTS} has rows of {and_more(sorted(tied))}",
            "Name the embedding that was trained in target_modules",
        )
    embeddings = [name for name in tied if not ModuleName(name).is_head]
    for name in ignored if len(embeddings) == 1 else ():
        if own_rows[name].shape == own_rows[embeddings[0]].shape:
            tied[embeddings[0]][name] = own_rows[name]
    return tied


def _trained_rows(
    name: str, layer: int | None, tensors: Mapping[str, Tensor], config: AdapterConfig, folder: Path
) -> tuple[int, ...]:
    """The rows of the weight of an embedding or head that its trained tokens hold."""
    rows, shape = config.tokens_of(name), tensors[TOKENS].shape
    if layer is not None:
        raise UnsupportedError(
            f"{folder}: {name} has trained tokens, but it is a module of layer {layer}, whose rows are not tokens",
            "Train rows of the embedding or the head, and LoRA on the layers",
        )
    if len(tensors) > 1:
        raise ExpertError(f"{folder}: {name} has both trained tokens and full weights", "Save the adapter again")
    if len(shape) != 2 or shape[0] != len(rows):
        raise ExpertError(
            f"{folder}: {name} has trained tokens of shape {list(shape)}, but {CONFIG} names {len(rows)} tokens",
            _MISMATCH,
        )
    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        setting = "token_indices" if config.peft_type == TRAINABLE_TOKENS else "trainable_token_indices"
        raise UnsupportedError(
            f"{folder}: {setting} names the token {twice} twice, so it has two rows for {name}",
            "Remove one of them from the config and from the file",
        )
    return rows


def _try_in_base(
    config: AdapterConfig, names: Collection[str], saved: Collection[str], file: TensorFile, folder: Path
) -> PeftTrial | None:
    """How PEFT loads the adapter, if only the base can tell which modules PEFT loads, or whether it can; else None."""
    base = config.base_reference
    reason = _reason_for_base(config, names, saved, folder)
    if reason is None:
        heads = TASK_HEADS.get(config.task_type or "", ())
        parameters: Collection[str] = ()
        with suppress(UnsupportedError):  # raised again if the base is not at hand
            parameters = _parameters(names, config, folder).values() if config.target_parameters else ()
        is_usual = all(
            end in saved or end in heads or ("." not in end and ModuleName(end).is_vocabulary(None))
            for end in config.modules_to_save
        ) and all(any(f".{name}".endswith(f".{end}") for name in parameters) for end in config.target_parameters)
        if is_usual or config.holds_regexes or base is None or Reference(base).cached_folder is None:
            return None
    elif odd := [name for name in names if name.endswith("unembed_tokens")]:  # of which no base has such a module
        raise ExpertError(f"{folder}: {odd[0]} is not a name that PEFT gives", misnamed(odd[0]) or "")
    elif base is None or config.holds_regexes:
        raise UnsupportedError(
            f"{folder / CONFIG}: {reason}, and what PEFT makes of it depends on the base, but the config "
            f"{'names none' if base is None else 'also holds regexes, which are not run in PEFT'}",
            "Name all modules in target_modules, and only those in modules_to_save that have tensors",
        )
    # PEFT and torch take seconds to import. PEFT itself writes configs without this need.
    from adapterswap.core.experts.trial import load_into_base

    try:
        return load_into_base(folder, base, config.task_type, file, names)
    except (ArgumentError, BaseModelError, NotFoundError, UnsupportedError) as error:
        if reason is None:
            return None
        raise error.within(f"{folder / CONFIG}: {reason}, and what PEFT makes of it depends on the base") from None


def _reason_for_base(config: AdapterConfig, names: Collection[str], saved: Collection[str], folder: Path) -> str | None:
    """What in a config can only be read beside the base; None if nothing is."""
    targets = config.targets
    modules = targets.modules
    only_experts = config.target_parameters and all(re.search(r"\.experts(\.base_layer)*$", name) for name in names)
    if targets.depend_on_base and config.peft_type != TRAINABLE_TOKENS and not (only_experts and modules is None):
        return (
            f"target_modules is {modules}" if isinstance(modules, str | None) else "target_modules has 20 names or more"
        )
    if config.target_parameters:
        weights = {f".{name}.weight" for name in _loaded(config, names, folder)}
        if twice := [end for end in config.target_parameters if any(name.endswith(f".{end}") for name in weights)]:
            return f"target_parameters names {twice[0]}, of a module in target_modules"
    if config.peft_type == "IA3" and targets.feedforward is None:
        return "feedforward_modules is null"
    shares = config.peft_type in KINDS and KINDS[config.peft_type].shared
    if shares and len(_loaded(config, names, folder)) < len(names):
        return "it targets only some of the modules in the file, which share tensors as large as the largest"
    heads = TASK_HEADS.get(config.task_type or "", ())
    ends = [end for end in config.modules_to_save if is_plain(end) and end not in heads]
    empty = [end for end in ends if not any(name.endswith(end) for name in saved)]
    return f"modules_to_save names {empty[0]}, which has no tensors" if empty else None


def _loaded(config: AdapterConfig, names: Collection[str], folder: Path) -> set[str]:
    """The modules of `names` that the config targets; an `ExpertError` if its regexes are invalid or too slow."""
    try:
        return config.targets.loaded(names)
    except ValueError as error:
        raise ExpertError(f"{folder / CONFIG}: {error}", "Use plain module names in target_modules") from None


def _check_feedforward(
    parts: Mapping[str, Mapping[str, Tensor]], config: AdapterConfig, folder: Path, problems: Problems
) -> None:
    """Check that (IA)³ scales the inputs of the modules in `feedforward_modules`, and the outputs of the others."""
    try:
        feedforward = config.targets.are_feedforward(parts)
    except ValueError as error:
        problems.add(f"{folder / CONFIG}: {error}", "Use plain module names in feedforward_modules")
        return
    for name, tensors in parts.items():
        shape = tensors["ia3_l"].shape
        if (shape[0] == 1) != (name in feedforward) and shape != (1, 1):
            side, says = ("output", "is") if name in feedforward else ("input", "is not")
            problems.add(f"{folder}: {name} scales its {side}, but {CONFIG} says that it {says} feedforward", _MISMATCH)


def _ignored(
    pairs: Collection[str],
    saved: Collection[str],
    config: AdapterConfig,
    folder: Path,
    problems: Problems,
) -> tuple[str, ...]:
    """The modules with LoRA factors that the config does not target."""
    selections: list[set[str]] = []
    with problems.collect():
        parents = {name[: dot.start()] for name in pairs for dot in re.finditer(r"\.", name)} - {*pairs}
        is_decided = config.targets.modules is not None  # otherwise everything in the file counts
        selections = [_loaded(config, pairs, folder), _loaded(config, parents if is_decided else (), folder)]
    if not selections:
        return ()
    loaded, too_much = selections
    if too_much:
        problems.add(
            f"{folder / CONFIG} targets {min(too_much)}, which has modules in it, so PEFT cannot load it",
            "Correct target_modules, or save the adapter again",
        )
    if config.tied:  # PEFT also applies an embedding's LoRA to the head, which the config may not name
        loaded |= {name for name in pairs if not any(segment.isdecimal() for segment in name.split("."))}
    ignored = tuple(name for name in pairs if name not in loaded and name not in saved)
    if ignored and not loaded and not config.target_parameters:
        problems.add(
            f"{folder / CONFIG} targets no module in {WEIGHTS} (such as {ignored[0]}), so PEFT would load none",
            "Correct target_modules, layers_to_transform or exclude_modules, or save the adapter again",
        )
    return ignored


def _with_parameters(
    pairs: Mapping[str, PartTensors], config: AdapterConfig, trial: PeftTrial | None, folder: Path
) -> tuple[dict[str, PartTensors], set[str]]:
    """The factors, with those of parameters under the parameters' own names, and these names."""
    if trial is None:
        own_names = _parameters(pairs, config, folder)
    else:
        own_names = {name: f"{_bare(name)}.{last}" for name, last in trial.parameters.items() if name in pairs}
    return {own_names.get(name, name): factors for name, factors in pairs.items()}, set(own_names.values())


def _parameters(names: Collection[str], config: AdapterConfig, folder: Path) -> dict[str, str]:
    """The names of modules with LoRA on a parameter → the parameter's own name.

    PEFT wraps the module once for each of its parameters, in the order of the parameters; the keys of inner layers
    contain `base_layer`.
    """
    # If the default for null were not empty, PEFT would have written its names.
    adapted = set() if config.targets.modules is None else _loaded(config, names, folder)
    ends = [target.rpartition(".") for target in config.target_parameters]
    chains: dict[str, list[str]] = {}
    for name in sorted(names, key=len, reverse=True):
        module = _bare(name)
        if module != name or name not in adapted:
            chains.setdefault(module, []).append(name)  # the innermost first
    parameters: dict[str, str] = {}
    for module, chain in chains.items():
        inside = [last for start, _, last in ends if start and f".{module}".endswith(f".{start}")]
        anywhere = [last for start, _, last in ends if not start]
        found = inside if len(inside) == len(chain) else [*inside, *anywhere]
        found = sorted(set(found), key=lambda name: name != _FIRST_FUSED)
        if len(found) != len(chain) or (len(found) > 1 and set(found) != {_FIRST_FUSED, _LAST_FUSED}):
            raise UnsupportedError(
                f"{folder}: {module} has LoRA on {len(chain)} of its parameters, but target_parameters does not say "
                f"which ({', '.join(config.target_parameters)})",
                "Name the parameters with their module in the config, such as mlp.experts.down_proj",
            )
        parameters |= {name: f"{module}.{parameter}" for name, parameter in zip(chain, found, strict=True)}
    return parameters


def _bare(name: str) -> str:
    """The module that PEFT wrapped, for the name of a layer that it nested in another."""
    return re.sub(r"(\.base_layer)+$", "", name)


def _of_kind(parts: Mapping[str, PartTensors]) -> dict[str, Mapping[str, Tensor]]:
    """The parts of another kind than LoRA."""
    return {name: tensors for name, tensors in parts.items() if not isinstance(tensors, FactorTensors)}


def _check_not_empty(name: str, tensors: Mapping[str, Tensor], folder: Path) -> None:
    for part, tensor in tensors.items():
        if 0 in tensor.shape:
            raise ExpertError(
                f"{folder}: {name}: {part} is empty ({list(tensor.shape)}), as DeepSpeed ZeRO-3 leaves it",
                "Gather the weights before saving (stage3_gather_16bit_weights_on_model_save), and save again",
            )


def _lora(
    name: str,
    factors: FactorTensors,
    config: AdapterConfig,
    given: tuple[int, float],
    container: str | None,
    folder: Path,
    *,
    parameter: bool = False,
) -> LoraModule | OpaqueModule:
    """A module of LoRA, or of a variant; `given` are its rank and alpha in the config."""
    (a, b), (rank, alpha) = (factors.a, factors.b), given
    if 0 in a.shape or 0 in b.shape:
        _check_not_empty(name, {"lora_A": a, "lora_B": b}, folder)
    for factor, tensor in (("A", a), ("B", b)):
        if len(tensor.shape) != 2:
            raise UnsupportedError(
                f"{folder}: {name}: lora_{factor} has the shape {list(tensor.shape)}, but must be a matrix",
                "Only linear and embedding modules can be composed, not convolutions",
            )
    if a.shape[0] != b.shape[1]:
        raise ExpertError(f"{folder}: {name}: lora_A has rank {a.shape[0]}, but lora_B has {b.shape[1]}", _MISMATCH)
    experts = a.shape[0] // rank if parameter and a.shape[0] % rank == 0 else 1
    if experts > 1 and not config.is_at_least((0, 19)):
        raise UnsupportedError(
            f"{folder}: {name} is a fused parameter with LoRA in the layout of PEFT before 0.19, which exchanges "
            "inputs and outputs for most models. Later versions of PEFT misread it or refuse it",
            "Convert it with `adapterswap convert`, which compares it with its base",
        )
    if a.shape[0] != rank * experts:
        raise ExpertError(f"{folder}: {name} has rank {a.shape[0]}, but {CONFIG} says {rank}", _MISMATCH)
    module = LoraModule(
        name,
        ModuleName(name).layer(container),
        rank,
        alpha,
        config.rslora,
        scale(rank, alpha, config.rslora),
        a,
        b,
        factors.embedding,
        factors.base,
        parameter,
        experts,
    )
    return _variant(module, factors, config, folder) if config.dora or config.lora_bias or factors.extras else module


def _variant(module: LoraModule, factors: FactorTensors, config: AdapterConfig, folder: Path) -> OpaqueModule:
    """A module of DoRA, or of LoRA with biases."""
    expected = {part for part, setting in zip(LORA_PARTS, (config.dora, config.lora_bias), strict=True) if setting}
    if odd := sorted(expected ^ factors.extras.keys()):
        holds, says = ("has", "it should not") if odd[0] in factors.extras else ("has no", "it should")
        raise ExpertError(f"{folder}: {module.name} {holds} {odd[0]}, but {CONFIG} says that {says}", _MISMATCH)
    for part, tensor in factors.extras.items():
        if prod(tensor.shape) != module.out_features:
            raise ExpertError(
                f"{folder}: {module.name}: {part} has the shape {list(tensor.shape)}, but B has {module.out_features} "
                "rows",
                _MISMATCH,
            )
    stem = ModuleKeys(module.name).part("")
    tensors = {key.removeprefix(stem): tensor for key, tensor in zip(module.keys, (module.a, module.b), strict=True)}
    settings = {"use_dora": config.dora, "lora_bias": config.lora_bias}
    return OpaqueModule(
        module.name, module.layer, config.title, config.peft_type, {**tensors, **factors.extras}, settings, lora=module
    )


def _opaque(
    name: str,
    tensors: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    config: AdapterConfig,
    container: str | None,
    folder: Path,
) -> OpaqueModule:
    """A module of another kind than LoRA."""
    _check_not_empty(name, tensors, folder)
    rank = config.settings.get("r", _HIRA_RANK)
    if config.peft_type == "HIRA" and "hira_A" in tensors and tensors["hira_A"].shape[0] != rank:
        raise UnsupportedError(
            f"{folder}: {name}: hira_A has the rank {tensors['hira_A'].shape[0]}, but {CONFIG} says r: {rank}, which "
            "PEFT 0.21 gives every module",
            "Train it without `rank_pattern`",
        )
    return OpaqueModule(
        name,
        ModuleName(name).layer(container),
        config.title,
        config.peft_type,
        tensors,
        config.settings,
        config.values_of(name),
        shared,
    )
