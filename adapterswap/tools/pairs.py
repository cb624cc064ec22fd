"""Match a full fine-tune with its base, also of another class, and find the weights that an adapter can hold.

A text-only model calls its layers `model.layers`, a multimodal one with the same decoder `model.language_model.layers`.
`Base.find` maps the names; here a name counts only if it maps back to itself. Only configs and headers are read, and of
tensors only heads and embeddings that the config ties. All reasons why two checkpoints are not a pair are reported
together.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from adapterswap.core.changes.kinds import Whole
from adapterswap.core.companions.config import ConfigDifferences, pads_only_to_generate
from adapterswap.core.experts.keys import TASK_HEADS
from adapterswap.core.experts.parts import compare_shapes
from adapterswap.core.model.base import Base, Weight
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor
from adapterswap.core.model.layers import (
    NO_LAYER,
    Depth,
    ModelConfig,
    ModuleName,
    check_one_list,
    format_layers,
    parse_layers,
)
from adapterswap.core.planning.rules import Rule
from adapterswap.core.writing.copies import Comparable
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    Problems,
    UnsupportedError,
)
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import open_files


@dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes:
        checkpoint: its files.
        base: its modules, as an adapter sees them.
        weights: the weights that LoRA can change, by parameter name; of tied weights only the first. A tie that the
            checkpoint breaks is none: transformers loads a stored head that is another weight.
        parameters: parameter name → the first name of the same parameter.
        is_of_its_own: whether the class is another than a causal language model; see `Base.class_of_its_own`.
    """

    checkpoint: Checkpoint
    base: Base
    weights: Mapping[str, Weight]
    parameters: Mapping[str, str]

    is_of_its_own: bool = False

    @property
    def is_tied(self) -> bool:
        """Whether a head is tied to an embedding."""
        return any(weight.tied for weight in self.weights.values())

    def name_of(self, key: str) -> str | None:
        """The parameter that holds exactly a checkpoint's key; None if there is none."""
        return self.parameters.get(self.base.rename(key) or "")

    def own_name(self, key: str) -> str | None:
        """The model's name for a checkpoint's key; for one expert of a mixture, its name inside the mixture."""
        name = self.name_of(key)
        if name is not None or self.base.rename(key) is not None:
            return name
        return self.base.find_parameter(key, self.checkpoint.container)


def have_one_decoder(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether one is a language model of the type that the other contains, by their configs."""
    one_language, other_language = ModelConfig(one.config).language, ModelConfig(other.config).language
    one_is_alone, other_is_alone = one_language is one.config, other_language is other.config
    if one_is_alone == other_is_alone:
        return False
    model_type = one_language.get("model_type")
    return model_type is not None and model_type == other_language.get("model_type")


def read_side(checkpoint: Checkpoint, model_class: str | None = None) -> Side:
    """Read a model's names and ties, in a class of transformers; by default a causal language model's."""
    base = Base.at(checkpoint.source.folder, checkpoint.name, to_adapt=model_class is None, model_class=model_class)
    check_one_list(checkpoint.name, base, shared=True)
    stored = {base.rename(key): parameter for key, parameter in checkpoint.parameters.items()}
    weights, parameters = dict(base.by_parameter), dict(base.parameters)

    # A head that is stored, and is another weight than its embedding, is none that is tied.
    for name, weight in base.by_parameter.items():
        for head in weight.tied:
            head_name = f"{head}.weight"
            if name not in stored or head_name not in stored:
                continue
            own, of_head = stored[name], stored[head_name]
            if own.tensor.dtype not in Dtype.FLOATS or of_head.tensor.dtype not in Dtype.FLOATS:
                continue
            with open_files(checkpoint.shards) as files:
                own_numbers = Comparable.of(own.tensor, files[own.path])
                if own_numbers.is_one_with(Comparable.of(of_head.tensor, files[of_head.path])):
                    continue

            weights[name] = weight._replace(tied=())
            weights[head_name] = Weight(
                head, weight.in_features, weight.out_features, embedding=False, transposed=False
            )
            parameters[head_name] = head_name
    return Side(checkpoint, base, weights, parameters, is_of_its_own=model_class is not None)


def counterpart(name: str, ours: Side, theirs: Side) -> str | None:
    """Their name for our parameter `name`; None unless that name maps back to ours."""
    their_name = theirs.base.find_parameter(name, ours.base.container)
    if their_name is None or ours.base.find_parameter(their_name, theirs.base.container) != name:
        return None
    return their_name


def expected_name(name: str, ours: Side, theirs: Side) -> str:
    """The name that our parameter `name` would have in their model, whether or not they have it; for messages."""
    moved = theirs.base.exchange(name, ours.base.container, theirs.base.container)
    return counterpart(name, ours, theirs) or moved or name


def is_outside(name: str, ours: Side, theirs: Side) -> bool:
    """Whether our parameter `name` is certainly not the language model's, such as a vision tower's."""
    containers = (ours.checkpoint.container, ours.base.container)
    if any(ModuleName(name).layer(container) is not None for container in containers):
        return False
    if name not in ours.parameters:  # transformers does not load it
        return ours.base.find_parameter(name, ours.checkpoint.container) is None
    if not ours.base.is_multimodal or counterpart(name, ours, theirs) in theirs.parameters:
        return False
    return not name.startswith(ours.base.language)


# Why an adapter does not hold a parameter, in the words that users read.
Reason = Literal[
    "norms", "biases", "embeddings and heads", "towers", "vocabulary", "experts and routers", "not selected",
    "modules that PEFT cannot adapt", "not in the base", "other",
]  # fmt: skip

_REMEDY = "Pass the base that it was fine-tuned from"
_FUSED = {"experts", "router", "gate"}  # name parts in a mixture of experts whose weights are not in a Linear


@dataclass(frozen=True)
class Selection:
    """Which weights to extract.

    Attributes:
        layers: layers such as `0-4,30-31`, or `none`; all by default.
        modules: kinds (attention, mlp, other) or parts of names (self_attn, q_proj); all by default.
        embeddings: the matrices outside the layers too: embeddings, heads, vision and audio towers, projectors. Blocks
            that several layers share count as layers here.
    """

    layers: str | None = None
    modules: tuple[str, ...] = ()
    embeddings: bool = False

    def wants(self, weight: Weight) -> bool:
        if weight.layer is None and not (self.layers is None and ModuleName(weight.name).shared_list):
            return self.embeddings
        if self.layers is not None and weight.layer not in parse_layers(self.layers):
            return False
        return not self.modules or any(Rule.selects(module, weight.name, weight.kind) for module in self.modules)


@dataclass(frozen=True)
class WeightMatrix:
    """A weight whose ΔW the adapter will hold, and where both versions are stored."""

    weight: Weight
    full: Whole
    base: Whole

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), however it is stored."""
        rows, columns = self.full.tensor.shape
        if self.weight.transposed:
            return columns, rows
        return rows, columns


@dataclass(frozen=True)
class LeftOutWeight:
    """A parameter of the fine-tune that the adapter does not hold; `base` is None if the base lacks it too."""

    name: str
    reason: Reason
    full: Whole
    base: Whole | None


@dataclass(frozen=True)
class WeightPair:
    """A fine-tune and its base that belong together.

    Attributes:
        full, base: the checkpoints.
        model: the base in the class that the adapter is for.
        num_layers: the base's layers.
        matrices: the weights that the adapter will hold; those without a layer first, then by layer and name.
        in_full: the parameters that the adapter will hold whole, by name: those of a classifier's head, and of modules
            outside the layers that only the fine-tune's class has.
        task_type: PEFT's, for the class; None if it has none.
        left_out: everything else.
    """

    full: Checkpoint
    base: Checkpoint
    model: Base
    num_layers: int
    matrices: tuple[WeightMatrix, ...]
    in_full: Mapping[str, Whole]
    task_type: str | None
    left_out: tuple[LeftOutWeight, ...]

    @property
    def saved(self) -> list[str]:
        """The modules that the adapter will hold whole: the outermost ones of which it holds all parameters."""
        others = self.model.parameters.keys() - self.in_full.keys()
        modules: set[str] = set()
        for name in self.in_full:
            # Of the modules around the parameter, from the outermost one inwards
            parts = name.split(".")[:-1]
            held_whole: list[str] = []
            for count in range(1, len(parts) + 1):
                module = ".".join(parts[:count])
                if not any(other.startswith(f"{module}.") for other in others):
                    held_whole.append(module)
            modules.add(held_whole[0])
        return sorted(modules)


def pair(
    full: Checkpoint, base: Checkpoint, selection: Selection, *, config_from: Literal["base"] | None = None
) -> WeightPair:
    """Match the parameters of a fine-tune with its base's, under the base's names.

    One of the two may be multimodal and the other its language model alone: a tower of the base stays as it is, and one
    of the fine-tune is left out. With `config_from`, the fine-tune's config may compute differently: the adapter is
    used with the base's.
    """
    try:
        num_layers = ModelConfig(base.config).num_layers
    except AdapterswapError as error:
        raise error.recast(parameter="base_model") from None
    tuned_side, side = _sides(full, base)
    num_layers = Depth.known(num_layers, base.name, "Pass another base")

    # The stored tensors of both under the base's names
    problems = Problems(BaseModelError)
    towers: dict[str, StoredTensor] = {}
    labels: Mapping[str, str] = {}
    in_full: dict[str, Whole] = {}
    task_type = _task_of(side.base)
    if full.config.get("model_type") == base.config.get("model_type"):
        ours, theirs = dict(_by_name(full, side.name_of)), dict(_by_name(base, side.name_of))
        heads: Mapping[str, StoredTensor] = {}
        if side.is_of_its_own:
            heads = _heads(ours, theirs, side, task_type)
        in_full = {name: Whole.of(stored.path, stored.tensor) for name, stored in heads.items()}
        towers = _check_names(ours, theirs, full, base, side, problems, without=heads)
    else:
        ours, theirs, towers, labels = _reconciled(tuned_side, side, problems)
    _check_selection(selection, full, side, num_layers, problems)
    problems.raise_if_any()

    # What the adapter holds of them as LoRA
    matrices: list[WeightMatrix] = []
    left_out: list[LeftOutWeight] = []
    different_shapes: list[str] = []
    for name in sorted((ours.keys() & theirs.keys()) - in_full.keys()):
        tuned, original = ours[name], theirs[name]
        weight = side.weights.get(name)
        both = Whole.of(tuned.path, tuned.tensor), Whole.of(original.path, original.tensor)
        if not _check_numbers([(tuned, full, "full"), (original, base, "base_model")], problems):
            continue
        if tuned.tensor.shape != original.tensor.shape:
            shapes = (
                f"{name} is {list(tuned.tensor.shape)} in {full.name} and {list(original.tensor.shape)} in {base.name}"
            )
            if weight is None or weight.layer is not None or tuned.tensor.shape[1:] != original.tensor.shape[1:]:
                different_shapes.append(name)
            elif selection.embeddings:
                problems.add(
                    f"{shapes}: the vocabulary changed",
                    "Leave `embeddings` out, or keep the full checkpoint",
                    parameter="embeddings",
                    kind=UnsupportedError,
                )
            else:
                left_out.append(LeftOutWeight(name, "vocabulary", *both))
        elif weight is not None and selection.wants(weight):
            matrices.append(WeightMatrix(weight, *both))
        else:
            left_out.append(LeftOutWeight(name, _reason(name, weight, tuned, side), *both))
    for name, tower in towers.items():
        if _check_numbers([(tower, full, "full")], problems):
            left_out.append(LeftOutWeight(name, "not in the base", Whole.of(tower.path, tower.tensor), None))

    our_shapes: dict[str, str] = {}
    their_shapes: dict[str, str] = {}
    for name in different_shapes:
        label = labels.get(name, name)
        our_shapes[label] = "×".join(map(str, ours[name].tensor.shape))
        their_shapes[label] = "×".join(map(str, theirs[name].tensor.shape))
    compare_shapes(
        our_shapes,
        their_shapes,
        one=full.name,
        other=base.name,
        remedy=_REMEDY,
        problems=problems,
        parameter="base_model",
    )
    problems.raise_if_any()

    if config_from is None:
        labels_of_head: tuple[str, ...] = ()
        if in_full:
            labels_of_head = _LABELS
        _check_configs(full, base, labels_of_head)
    for matrix in matrices:
        _check_tying(matrix.weight)
    if not matrices:
        raise ArgumentError(
            "No matrix is selected, so there is nothing to extract",
            "Select `layers` or `embeddings`",
            parameter="layers",
        )

    def place(matrix: WeightMatrix) -> tuple[bool, int, str]:
        """Those without a layer first, then by layer and name."""
        return matrix.weight.layer is not None, matrix.weight.layer or 0, matrix.weight.name

    matrices.sort(key=place)
    return WeightPair(full, base, side.base, num_layers, tuple(matrices), in_full, task_type, tuple(left_out))


# The labels of a classifier's head in config.json, which say nothing of a base without this head.
_LABELS = ("id2label", "label2id", "num_labels")


def config_differences(full: Checkpoint, base: Checkpoint, ignoring: Iterable[str] = ()) -> ConfigDifferences:
    """Where the configs of two models with one decoder differ, apart from ties: of two classes, the decoder's."""
    ours, theirs = full.config, base.config
    if ours.get("model_type") != theirs.get("model_type"):
        ours, theirs = ModelConfig(ours).language, ModelConfig(theirs).language
    ignored = ["tie_word_embeddings", *ignoring]
    if pads_only_to_generate(full.config) and pads_only_to_generate(base.config):
        ignored.append("pad_token_id")
    return ConfigDifferences.between(ours, theirs, ignoring=ignored)


def _check_configs(full: Checkpoint, base: Checkpoint, ignoring: Iterable[str]) -> None:
    differences = config_differences(full, base, ignoring)
    if differences:
        raise BaseModelError(
            f"The configs of {full.name} and its base {base.name} compute differently, and an adapter holds no config: "
            f"{differences.text(full.name, base.name)}",
            f"{_REMEDY}. If the adapter is meant for the base's config, pass `config_from=base`",
            parameter="config_from",
        )


def _sides(full: Checkpoint, base: Checkpoint) -> tuple[Side, Side]:
    """Both models, which must have one decoder and agree whether it ties its head."""
    problems = Problems(BaseModelError)
    for checkpoint, parameter in ((full, "full"), (base, "base_model")):
        if checkpoint.quantization is not None:
            problems.add(
                f"{checkpoint.name} is quantized ({checkpoint.quantization.title})",
                "Pass a version with floating point weights",
                parameter=parameter,
                kind=UnsupportedError,
            )
    model_type, base_type = full.config.get("model_type"), base.config.get("model_type")
    if model_type != base_type and not have_one_decoder(full, base):
        problems.add(
            f"{full.name} is a {model_type} model, but the base {base.name} is a {base_type} model",
            _REMEDY,
            parameter="base_model",
        )
    problems.raise_if_any()

    model_class = None
    try:
        if model_type == base_type:
            with_class = base
            if full.config.get("architectures"):
                with_class = full
            model_class = Base.class_of_its_own(with_class.source.folder, with_class.name)
        tuned = read_side(full, model_class)
    except AdapterswapError as error:  # which names the base
        raise error.recast(parameter="full") from None

    original = read_side(base, model_class)
    if tuned.is_tied != original.is_tied:
        says = {True: "ties", False: "does not tie"}
        raise BaseModelError(
            f"{full.name} {says[tuned.is_tied]} its head to the embedding, but the base {base.name} "
            f"{says[original.is_tied]} its head",
            f"{_REMEDY}, or keep the full checkpoint",
            parameter="base_model",
        )
    return tuned, original


def _by_name(checkpoint: Checkpoint, name_of: Callable[[str], str | None]) -> Iterator[tuple[str, StoredTensor]]:
    """The stored tensors by the model's names, or by their own if the model has none for them.

    A tensor that is neither a parameter nor floating point is a buffer of an older version, such as a causal mask.
    """
    for key, parameter in checkpoint.parameters.items():
        name = name_of(key)
        if name is not None or parameter.tensor.dtype in Dtype.FLOATS:
            yield name or key, parameter


def _task_of(model: Base) -> str | None:
    """PEFT's task type for a model's class; None if there is none, or if PEFT would not find the head of its task."""
    children = {name.partition(".")[0] for name in model.parameters}
    heads = TASK_HEADS.get(model.task or "", ())
    if heads and not children.intersection(heads):
        return None
    return model.task


def _heads(
    ours: Mapping[str, StoredTensor], theirs: Container[str], side: Side, task_type: str | None
) -> dict[str, StoredTensor]:
    """The stored tensors that the adapter must hold whole, so that PEFT can load it: those of the head of its task, and
    of modules outside the layers that the fine-tune's class has and the base does not store, such as a pooler."""
    by_module: dict[str, list[str]] = {}
    for name in sorted(set(side.parameters.values())):
        if ModuleName(name).layer(side.base.container) is None:
            by_module.setdefault(name.rpartition(".")[0], []).append(name)

    heads: dict[str, StoredTensor] = {}
    for module, names in by_module.items():
        of_task = module.partition(".")[0] in TASK_HEADS.get(task_type or "", ())
        if all(name in ours and (of_task or name not in theirs) for name in names):
            heads |= {name: ours[name] for name in names}
    return heads


def _check_names(
    ours: Mapping[str, StoredTensor],
    theirs: Mapping[str, StoredTensor],
    full: Checkpoint,
    base: Checkpoint,
    side: Side,
    problems: Problems,
    *,
    without: Container[str] = (),
) -> dict[str, StoredTensor]:
    """Report what only one of the two stores. Modules that predict further tokens may be missing in either, because
    transformers does not load them, and the heads of another class in the fine-tune. The result is what only the
    fine-tune has."""
    parameter_names = set(side.parameters.values())
    ahead = {}
    for holder, lacking, has, lacks in ((ours, theirs, full, base), (theirs, ours, base, full)):
        for name in sorted(holder.keys() - lacking.keys()):
            if name in without:
                continue
            if name not in parameter_names and holder[name].name in has.ahead:
                ahead[name] = holder[name]
                continue
            is_of_another_class = side.is_of_its_own and has is base and holder[name].layer is None
            is_buffer = len(holder[name].tensor.shape) < 2  # which one version saved
            if name in parameter_names or not (is_of_another_class or is_buffer):
                problems.add(f"{has.name} holds {name}, but {lacks.name} does not", _REMEDY, parameter="base_model")
    _check_complete(side, ours, theirs, full, base, problems)
    return {name: stored for name, stored in ahead.items() if name in ours}


def _check_complete(
    side: Side,
    ours: Mapping[str, StoredTensor],
    theirs: Mapping[str, StoredTensor],
    full: Checkpoint,
    base: Checkpoint,
    problems: Problems,
) -> None:
    for name in sorted(side.weights.keys() - ours.keys() - theirs.keys()):
        if side.is_of_its_own and side.weights[name].layer is None:  # a pooler that neither uses
            continue
        problems.add(
            f"Neither {full.name} nor {base.name} holds {name}, which transformers has in such a model",
            "Save or download both again, with all their weights: transformers would fill this one with random numbers",
            parameter="full",
            kind=ExpertError,
        )


def _reconciled(
    full: Side, base: Side, problems: Problems
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], dict[str, StoredTensor], dict[str, str]]:
    """The stored tensors of two classes of model with one decoder, under the base's names."""
    own = dict(_by_name(full.checkpoint, full.own_name))
    theirs = dict(_by_name(base.checkpoint, base.own_name))

    # The fine-tune's tensors: those of the decoder that both have, and those of its towers
    ours: dict[str, StoredTensor] = {}
    towers: dict[str, StoredTensor] = {}
    labels: dict[str, str] = {}
    for name, stored in sorted(own.items()):
        base_name = counterpart(name, full, base)
        if base_name in theirs:
            ours[base_name] = stored
            labels[base_name] = base_name
            if base_name != name:
                labels[base_name] = f"{name} ({base_name} in {base.checkpoint.name})"
        elif is_outside(name, full, base):
            towers[name] = stored
        else:
            _check_buffer(name, stored, full, base, problems)

    # What only the base has
    for name in sorted(theirs.keys() - ours.keys()):
        if not is_outside(name, base, full):
            _check_buffer(name, theirs[name], base, full, problems)
    _check_complete(base, ours, theirs, full.checkpoint, base.checkpoint, problems)
    return ours, theirs, towers, labels


def _check_buffer(name: str, stored: StoredTensor, has: Side, lacks: Side, problems: Problems) -> None:
    """Add a problem unless the tensor, which only one of the two holds, is a buffer that one version saved."""
    if name not in has.parameters and len(stored.tensor.shape) < 2:
        return
    expected = expected_name(name, has, lacks)
    problems.add(
        f"{has.checkpoint.name} holds {name}, but {lacks.checkpoint.name} does not hold {expected}",
        f"{_REMEDY}, or save both with the same model class",
        parameter="base_model",
    )


def _check_selection(selection: Selection, full: Checkpoint, side: Side, num_layers: int, problems: Problems) -> None:
    layers: frozenset[int] = frozenset()
    if selection.layers is not None:
        try:
            layers = parse_layers(selection.layers)
        except ValueError as error:
            problems.add(
                f"`layers`: {error}", "Pass for example `layers=0-4,30-31`", parameter="layers", kind=ArgumentError
            )
    if layers and max(layers) >= num_layers:
        beyond = format_layers(layer for layer in layers if layer >= num_layers)
        problems.add(
            f"`layers`: there is no layer {beyond}",
            f"Layers are 0 to {num_layers - 1}",
            parameter="layers",
            kind=ArgumentError,
        )
    elif full.kept_layers is not None:
        cut = [layer for layer in layers if not full.kept_layers.has(None, layer)]
        if cut:
            problems.add(
                f"`layers`: {full.name} is a slice with the {full.kept_layers}, without layer {format_layers(cut)}",
                "Choose from those that it has, or pass the whole fine-tune",
                parameter="layers",
                kind=ArgumentError,
            )

    inside = [weight for weight in side.weights.values() if weight.layer is not None]
    for module in selection.modules:
        is_in_layers = any(Rule.selects(module, weight.name, weight.kind) for weight in inside)
        if selection.layers == NO_LAYER or not is_in_layers:
            ends = sorted({weight.name.rpartition(".")[2] for weight in inside})
            problems.add(
                f"`modules` {module!r} matches nothing",
                f"Use attention, mlp, or {', '.join(ends)}",
                parameter="modules",
                kind=ArgumentError,
            )


def _check_tying(weight: Weight) -> None:
    """PEFT 0.21 applies an embedding's LoRA to the head that is tied to it only if it knows the embedding's name."""
    if weight.tied and weight.name.rpartition(".")[2] != "embed_tokens":
        raise UnsupportedError(
            f"{', '.join(weight.tied)} is tied to {weight.name}, and PEFT keeps them together only where the embedding "
            "is called embed_tokens",
            "Leave `embeddings` out",
            parameter="embeddings",
        )


def _check_numbers(weights: Sequence[tuple[StoredTensor, Checkpoint, str]], problems: Problems) -> bool:
    """Whether all weights are floating point. Each has its checkpoint and the name of its argument in `extract`."""
    are_numbers = True
    for weight, checkpoint, parameter in weights:
        if weight.tensor.dtype not in Dtype.FLOATS:
            are_numbers = False
            problems.add(
                f"{weight.name} is {weight.tensor.dtype} in {checkpoint.name}",
                f"Save it as {', '.join(Dtype.FLOATS)}",
                parameter=parameter,
                kind=UnsupportedError,
            )
    return are_numbers


def _reason(name: str, weight: Weight | None, parameter: StoredTensor, side: Side) -> Reason:
    if weight is not None and weight.layer is not None:
        return "not selected"
    if weight is not None and side.base.is_in_tower(weight.name):
        return "towers"
    if weight is not None:
        return "embeddings and heads"
    if name.endswith("bias"):
        return "biases"
    if _FUSED & set(name.split(".")):
        return "experts and routers"
    if len(parameter.tensor.shape) == 1:
        return "norms"
    return "other"
