"""Does the base have what the experts adapt, in the same widths? Is it quantized there?

The headers of a base on this machine decide if they can, and its config alone where the weights are not here. Whatever
they leave open, transformers decides, by building the model without weights, which takes a second or two: names of
another class or version, and the experts of a mixture. The network is not used. These are gates: they add problems, and
change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from adapterswap.core.changes.locations import Located
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.keys import TASK_HEADS, ModuleKeys
from adapterswap.core.experts.parts import FullModule, LoraModule, Part, compare_shapes
from adapterswap.core.experts.trial import try_in_peft
from adapterswap.core.model.base import Base, empty_model
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import ModelConfig, ModuleName, layer_container
from adapterswap.core.planning.facts import LocalBase
from adapterswap.kit.errors import AdapterswapError, BaseModelError, Problems, UnsupportedError, and_more
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import Tensor

_REMEDY = "Pass the base that the experts adapt as `base_model`"

# Types of models whose layers have these linear modules, each with the sides of its weight (out, in).
_PLAIN_TYPES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "cohere", "cohere2", "olmo2", "smollm3"}
)
_PLAIN = re.compile(r"model\.layers\.\d+\.(?:self_attn\.([qkvo])_proj|mlp\.(gate|up|down)_proj)")

_WHOLE = (*Dtype.FLOATS, "F8_E4M3", "F8_E5M2", "I8")  # dtypes of weights with one number in each element


class Pair(NamedTuple):
    """The shape of a weight in an expert and in the base."""

    name: str
    ours: tuple[object, ...]
    theirs: tuple[object, ...]


class Fit(NamedTuple):
    """What a base at hand has of what experts adapt; nothing if no base is at hand.

    Attributes:
        reference: the base.
        missing: by expert: modules that the base lacks.
        compared: by expert: the shapes of the others.
        unknown: by expert: modules that could not be looked up.
    """

    reference: str = ""
    missing: Mapping[str, list[Part]] = {}
    compared: Mapping[str, list[Pair]] = {}
    unknown: Mapping[str, list[Part]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what could not be looked up."""
        notes: list[str] = []
        for expert, parts in self.unknown.items():
            if parts:
                names = [part.name for part in parts]
                notes.append(
                    f"Not checked whether {self.reference} has {and_more(names)} of {expert}: its files have no such "
                    "name, and transformers cannot build the model here to compare others"
                )
        return tuple(notes)


def fit(experts: Mapping[str, Adapter], base: LocalBase) -> Fit:
    """Look up what experts adapt in their base, if that is on this machine."""
    config, checkpoint = base.config, base.headers
    if config is None or base.folder is None or base.reference is None:
        return Fit()

    missing: dict[str, list[Part]] = {}
    compared: dict[str, list[Pair]] = {}
    unknown: dict[str, list[Part]] = {}
    for name, adapter in experts.items():
        by_files = dict(_by_headers(adapter, checkpoint, config)) if checkpoint else _by_config(adapter, config)
        others = [part for part in adapter.parts.values() if part.name not in by_files and not _is_deep(part, config)]

        # Only what the files leave open is looked up in the model, which takes a second or two to build.
        model = None
        if others:
            model = _model(base.folder, base.reference, adapter.config.task_type)
        by_model: dict[str, list[Pair] | None] = {}
        if model is not None:
            by_model = {part.name: _in_model(part, adapter, model) for part in others}

        # A part is missing if the model was built and lacks it, and unknown if no model could be built.
        missing[name], unknown[name] = [], []
        for part in others:
            if part.name not in by_model:
                unknown[name].append(part)
            elif by_model[part.name] is None:
                missing[name].append(part)
        compared[name] = []
        for pairs in (*by_files.values(), *by_model.values()):
            compared[name] += pairs or ()
    return Fit(base.reference, missing, compared, unknown)


def check_fit(seen: Fit, problems: Problems) -> None:
    """Report modules that the base lacks or has in another width."""
    for name, pairs in seen.compared.items():
        _report_missing(name, seen.missing[name], seen.reference, problems)

        # Writing shapes as text takes longer than comparing them, and nearly always all of them agree.
        if all(pair.ours == pair.theirs for pair in pairs):
            continue
        compare_shapes(
            {pair.name: _text(pair.ours) for pair in pairs},
            {pair.name: _text(pair.theirs) for pair in pairs},
            one=name,
            other=f"the base {seen.reference}",
            remedy=_REMEDY,
            problems=problems,
            parameter="base_model",
            kind=BaseModelError,
        )


class Heads(NamedTuple):
    """Adapters, and the full weights that they are merged into or composed with."""

    adapters: Mapping[str, Adapter]
    base: Checkpoint


class Placed(NamedTuple):
    """Where adapters change a base: by adapter, and by the name of the stored tensor."""

    located: Mapping[str, Mapping[str, Located]]
    base: Checkpoint


def check_quantized(experts: Mapping[str, Adapter], base: Checkpoint, problems: Problems) -> None:
    """Report experts that change weights which a quantized base does not store in floating point.

    The rest of such a base can be copied. Of a method whose layers are not known to be stored so, everything is
    reported.
    """
    quantization = base.quantization
    if quantization is None:
        return
    if not quantization.keeps_floats:
        problems.add(
            f"The base {base.name} is quantized (quantization_config: {quantization.title}), so ΔW cannot be added to "
            "its weights",
            quantization.remedy,
            parameter="base_model",
            kind=UnsupportedError,
        )
        return

    for name, adapter in experts.items():
        naming = _naming(adapter, base)
        odd = [part for part in adapter.parts if not base.modules.is_plain(naming(_holder(part)))]
        if odd:
            problems.add(*_quantized_there(name, odd, base), parameter="base_model", kind=UnsupportedError)


def check_heads(heads: Heads, problems: Problems) -> None:
    """Report heads of an adapter's task that a base of another class does not have, such as a causal language model."""
    base = heads.base
    classes = ""
    listed = base.config.get("architectures")
    if isinstance(listed, list):
        classes = " or ".join(map(str, listed))

    for name, adapter in heads.adapters.items():
        task = adapter.config.task_type or ""
        for part in adapter.saved.values():
            if not _is_on_head(part, adapter) or part.name in base.modules or ModuleName(part.name).is_head:
                continue

            # The head's weight has a row for each label. Two are the default of transformers.
            labels = 2
            for tensor in part.tensors.values():
                if len(tensor.shape) == 2:
                    labels = tensor.shape[0]
                    break

            problems.add(
                f"{name} is an adapter for the task {task} and holds its head {part.name}, but the base {base.name} is "
                f"{classes or 'a model'}, without such a head",
                f"Save the base with one, by {Base.class_for(task)}.from_pretrained(BASE, num_labels={labels})"
                ".save_pretrained(PATH), and pass `base_model=PATH`: the head's weights are the adapter's",
                parameter="base_model",
                kind=UnsupportedError,
            )


def check_placed(placed: Placed, problems: Problems) -> None:
    """Report the same for the stored tensors that were found, under whatever name."""
    if not placed.base.quantization:
        return

    stored = placed.base.parameters
    for name, places in placed.located.items():
        odd = []
        for key, place in places.items():
            if key in stored and stored[key].tensor.dtype not in Dtype.FLOATS:
                odd.append(place.module)
        if odd:
            problems.add(*_quantized_there(name, odd, placed.base), parameter="base_model", kind=UnsupportedError)


def _quantized_there(expert: str, modules: Sequence[str], base: Checkpoint) -> tuple[str, str]:
    """What to report of an expert that adapts modules which a base stores quantized, and the remedy."""
    assert base.quantization is not None
    how = f"quantization_config: {base.quantization.title}"
    return (
        f"{expert} adapts {and_more(modules)}, and the base {base.name} is quantized there ({how})",
        base.quantization.remedy,
    )


def _report_missing(expert: str, missing: list[Part], reference: str, problems: Problems) -> None:
    """Report modules that a base lacks, with what is known of names like theirs."""
    remedies: dict[str, list[str]] = {}
    for part in missing:
        remedies.setdefault(part.misnamed or _REMEDY, []).append(part.name)

    for remedy, modules in remedies.items():
        problems.add(
            f"{expert} adapts {and_more(modules)}, but the base {reference} has no such module",
            remedy,
            parameter="base_model",
            kind=BaseModelError,
        )


def _is_deep(part: Part, config: Mapping[str, Any]) -> bool:
    """Whether it is behind the layers of the language model, where transformers loads nothing; `checks` count them."""
    name = ModuleName(part.name)
    depth = ModelConfig(config).stacked_layers
    if isinstance(depth, Mapping):  # several stacks, such as an encoder and a decoder
        depth = depth.get(name.stack) if name.stack else None
    return name.is_ahead(part.layer, depth)


def _model(folder: Path, reference: str, task_type: str | None) -> Base | None:
    """The base as transformers builds it, in the class for the adapter's task; None if it cannot."""
    with suppress(AdapterswapError, ImportError):
        if task_type in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):
            return Base.at(folder, reference)
        return Base(empty_model(folder, reference, task_type=task_type))
    return None


def _by_headers(
    adapter: Adapter, checkpoint: Checkpoint, config: Mapping[str, Any]
) -> Iterator[tuple[str, list[Pair]]]:
    """The parts that a base's files have under the same names, and the shapes to compare."""
    naming = _naming(adapter, checkpoint)
    for name, part in adapter.parts.items():
        tensors = checkpoint.modules.of(naming(_holder(name)))
        if tensors and isinstance(part, FullModule):
            pairs = _in_full(part, tensors)
        elif tensors:
            pairs = _adapted(part, tensors)
        elif _is_on_head(part, adapter) or _is_numbered(part, checkpoint, naming(name)):
            pairs = []
        else:
            pairs = _tied(part, checkpoint, config)

        if pairs is not None:
            yield name, pairs


def _naming(adapter: Adapter, checkpoint: Checkpoint) -> Callable[[str], str]:
    """From an adapter's names of modules to those of a base's files, which may have another prefix."""
    modules = [name for name in adapter.parts if not ModuleKeys(name).is_bias]
    return checkpoint.modules.naming(modules, adapter.container)


def _holder(name: str) -> str:
    """The module itself, for the name of a module or of its bias."""
    if ModuleKeys(name).is_bias:
        return name.removesuffix(".bias")
    return name


def _is_on_head(part: Part, adapter: Adapter) -> bool:
    """Whether it is, or is in, a head for the adapter's task, which PEFT adds to the base's class."""
    heads = {*TASK_HEADS.get(adapter.config.task_type or "", ())}
    return part.layer is None and not heads.isdisjoint(part.name.split("."))


def _is_numbered(part: Part, checkpoint: Checkpoint, name: str) -> bool:
    """Whether it is a mixture's fused parameter, and the files hold its rows expert by expert."""
    if not isinstance(part, LoraModule) or not part.parameter or part.experts == 1:
        return False

    # As many experts in the files as in the parameter
    holder, stored = name.rpartition(".")[0], checkpoint.modules
    if f"{holder}.{part.experts - 1}" not in stored or f"{holder}.{part.experts}" in stored:
        return False

    # The first one has a weight of the same shape, or two of half the rows each (gate and up).
    shapes = []
    for end, tensor in stored.of(f"{holder}.0").items():
        if end.endswith("weight"):
            shapes.append(tensor.shape)

    rows, columns = part.out_features, part.in_features
    if (rows, columns) in shapes:
        return True
    return rows % 2 == 0 and shapes.count((rows // 2, columns)) == 2


def _tied(part: Part, checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[Pair] | None:
    """A head's shapes, if it is not stored because the config ties it to the embedding; None for any other part."""
    if part.layer is not None or part.lora is None or not ModuleName(part.name).is_head:
        return None
    ties = [place.get("tie_word_embeddings") for place in (config, ModelConfig(config).language)]
    if True not in ties:
        return None

    for parameter in checkpoint.parameters.values():
        if parameter.has_tokens and len(parameter.tensor.shape) == 2:
            return _widths(part, parameter.tensor.shape)
    return None


def _adapted(part: Part, tensors: Mapping[str, Tensor]) -> list[Pair] | None:
    """The shapes of a weight with LoRA or another kind; None if the files do not have this weight alone."""
    lora = part.lora
    weight = tensors.get("" if part.parameter else "weight")
    if weight is None:
        return _if_quantized(tensors)

    # Packed weights have fewer elements than numbers, and of kinds without factors there is nothing to compare.
    if lora is None or weight.dtype not in _WHOLE:
        return []
    if lora.parameter and len(weight.shape) == 3:
        return [Pair(part.name, _axes((lora.experts, lora.out_features, lora.in_features)), _axes(weight.shape))]
    if len(weight.shape) != 2:
        return None

    # A Conv1D's weight is stored in×out, and its bias has an entry for each column.
    shape, bias = weight.shape, tensors.get("bias")
    if bias is not None and bias.shape == shape[1:] != shape[:1] and not lora.embedding:
        shape = shape[::-1]
    return _widths(part, shape)


def _if_quantized(tensors: Mapping[str, Tensor]) -> list[Pair] | None:
    """Nothing to compare if a module is stored quantized; None if it is not."""
    if any(tensor.dtype not in Dtype.FLOATS for tensor in tensors.values()):
        return []
    return None


def _axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the axes of a parameter, with those of its matrices in one order, since models differ in it."""
    return *shape[:-2], *sorted(shape[-2:])


def _widths(part: Part, stored: tuple[int, ...]) -> list[Pair]:
    """The shapes of a weight with factors; of an embedding or head only the width, since tokens may be added.

    `stored` is (out, in), or (tokens, width).
    """
    lora = part.lora
    assert lora is not None
    ours = (lora.out_features, lora.in_features)
    if lora.embedding:
        ours = ours[::-1]
    if part.layer is None and ModuleName(part.name).is_vocabulary(None):
        return [Pair(part.name, ("…", ours[1]), ("…", stored[1]))]
    return [Pair(part.name, ours, stored)]


def _in_full(part: FullModule, tensors: Mapping[str, Tensor]) -> list[Pair] | None:
    """The shapes of tensors that replace the base's; None if the files do not have one of them."""
    pairs: list[Pair] = []
    for end, tensor in part.tensors.items():
        own = tensors.get("weight" if part.rows else end)
        if own is None:
            return _if_quantized(tensors)
        if own.dtype not in _WHOLE:
            continue

        # Of embeddings and heads only the width: experts may hold other rows.
        rows = 0
        if part.rows or ModuleName(part.name).is_vocabulary(part.layer):
            rows = 1
        pairs.append(Pair(f"{part.name}.{end}", tensor.shape[rows:], own.shape[rows:]))
    return pairs


def _by_config(adapter: Adapter, config: Mapping[str, Any]) -> dict[str, list[Pair]]:
    """The linear modules of plain types of models that have the shapes that their config says."""
    if str(config.get("model_type")) not in _PLAIN_TYPES:
        return {}

    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = []
    for key in keys:
        size = config.get(key)
        sizes.append(size if isinstance(size, int) else 0)
    hidden, inner, heads, groups, width = sizes
    groups = groups or heads
    width = width or hidden // max(heads, 1)

    # The weights are out×in: q and o span all heads, k and v the groups that share them.
    across, grouped = (heads * width, hidden), (groups * width, hidden)
    sides = {"q": across, "k": grouped, "v": grouped, "o": across[::-1]}
    sides |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}

    found = {}
    for name in adapter.parts:
        match = _PLAIN.fullmatch(name)
        lora = adapter.factors.get(name)
        if match is None or lora is None or lora.embedding:
            continue

        ours, theirs = (lora.out_features, lora.in_features), sides[match[1] or match[2]]
        if ours == theirs:  # else transformers decides
            found[name] = [Pair(name, ours, theirs)]
    return found


def _in_model(part: Part, adapter: Adapter, model: Base) -> list[Pair] | None:
    """The shapes of a part in the model of transformers; None if the model does not have it."""
    lora = part.lora
    if _is_on_head(part, adapter):
        return []

    # By its name and shape, else by its name alone
    name = None
    if lora is not None:
        name = model.find(part.name, adapter.container, (lora.out_features, lora.in_features))
    if name is None:
        name = model.find(part.name, adapter.container)
    if name is None:
        return None
    if lora is None:
        return []

    weight, shape = model.get(name), model.parameter_shape(name)
    if weight is not None and weight.embedding:
        return _widths(part, (weight.in_features, weight.out_features))
    if weight is not None:
        return _widths(part, (weight.out_features, weight.in_features))

    # A parameter without a module: one matrix, or one for each expert of a mixture
    axes = 3 if lora.experts > 1 else 2
    if shape is None or len(shape) != axes:
        return []
    ours = _axes((lora.experts, lora.out_features, lora.in_features))
    return [Pair(part.name, ours[-axes:], _axes(shape))]


def _text(shape: tuple[object, ...]) -> str:
    return "×".join(map(str, shape))


def taken_for_experts(modules: Mapping[str, LoraModule], base: LocalBase, task_type: str | None) -> list[str]:
    """The modules beside a mixture's experts, such as shared experts and dense MLPs, whose LoRA PEFT would not load,
    because it takes them for parts of the experts. Only a base on this machine is tried, and only a mixture.

    Args:
        modules: those of an adapter by name, all with LoRA.
        base: the base.
        task_type: the adapter's.
    """
    # Only names that are like those of fused experts can be taken for them.
    risky = {}
    for name, part in modules.items():
        keys = ModuleKeys(name)
        if keys.is_like_fused and not keys.is_fused and not part.parameter:
            risky[name] = part
    if not risky or base.config is None or base.folder is None or not ModelConfig(base.config).is_mixture:
        return []
    model = _model(base.folder, str(base.reference), task_type)
    if model is None:  # then it cannot be tried
        return []

    # An expert may have other names for modules than the base, such as those of transformers 4.
    container = layer_container(modules)
    names = {}
    linear = []
    for name, part in risky.items():
        shape = part.out_features, part.in_features
        names[name] = model.find(name, container, shape) or name
        linear.append((names[name], *shape))

    adapted = _adapted_in_peft(base.folder, str(base.reference), task_type, tuple(linear))
    return [name for name in risky if names[name] not in adapted]


@lru_cache(maxsize=4)
def _adapted_in_peft(
    folder: Path, name: str, task_type: str | None, shapes: tuple[tuple[str, int, int], ...]
) -> frozenset[str]:
    """Of linear modules (name, out, in), those to which PEFT adds LoRA and whose factors it loads."""
    import torch
    from peft import LoraConfig

    # Factors of rank 1 without data: only their names and shapes matter.
    tensors: dict[str, Any] = {}
    for module, rows, columns in shapes:
        a_key, b_key = ModuleKeys(module).factors()
        tensors[a_key] = torch.empty(1, columns, device="meta")
        tensors[b_key] = torch.empty(rows, 1, device="meta")

    model = empty_model(folder, name, task_type=task_type)
    config = LoraConfig(r=1, target_modules=[module for module, _, _ in shapes])
    trial = try_in_peft(model, config, tensors)
    if trial is None:
        return frozenset()

    # PEFT drops factors that it finds no place for without an error.
    dropped = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in trial.dropped}
    return trial.adapted - dropped
