"""Read a mergekit YAML as a composition of full checkpoints; keys that have no equivalent here are refused by name.

How mergekit 0.1.5 reads its keys: parameters are looked up in a source, its slice and the file, in this order; a list
is a gradient over the layers of a slice; a filter is a part of a tensor's name; tensors before the layers belong to the
first slice and those after them to the last, at the start of a gradient. This module was written from mergekit's
documentation and behaviour; it imports nothing from mergekit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from adapterswap.core.companions.tokenizer import Tokens, read_tokens, tokenizer_bytes
from adapterswap.core.experts.adapter import open_expert
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor
from adapterswap.core.model.layers import NO_LAYER, Depth, ModelConfig, ModuleName, format_layers
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.names import ExpertName
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.kit.errors import ExpertError, FieldError, Problems, UnsupportedError, check_type, did_you_mean
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import FieldMistake, field
from adapterswap.kit.files.text import expand
from adapterswap.kit.files.yaml import RecipeFile, read_recipe

_MARK = "merge_method"  # a key that every mergekit YAML has, and none of our recipes

Dtype = Literal["float32", "bfloat16", "float16"]

_SHARED = {
    "linear": ("normalize",),
    "passthrough": (),
    "task_arithmetic": ("normalize", "rescale", "int8_mask", "lambda"),
    "ties": ("normalize", "rescale", "int8_mask", "lambda"),
}
"""Method → the parameters of a slice or of the file."""
_OWN = {"linear": ("weight",), "passthrough": ("scale",), "task_arithmetic": ("weight",), "ties": ("weight", "density")}
"""Method → the parameters of a model; a slice or the file may set them for all models."""
_NORMALIZES = {"linear": True, "task_arithmetic": False, "ties": True}
_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")  # after the layers, as heads are


class _Model(Declared):
    model: str = field(description="A full checkpoint.")
    parameters: dict[str, Any] = field(default={}, description="weight, density, scale.")


class _Source(_Model):
    layer_range: tuple[int, int] = field(description="The first layer, and the layer after the last.")


class _Slice(Declared):
    sources: list[_Source] = field(min_length=1, description="The models that are merged in these layers.")
    parameters: dict[str, Any] = field(default={}, description="Parameters of all its sources.")


class _MergekitRecipe(Declared):
    merge_method: Literal["linear", "passthrough", "task_arithmetic", "ties"] = field(
        description="For other methods, write a recipe: see `adapterswap methods`."
    )
    slices: list[_Slice] | None = field(default=None, min_length=1)
    models: list[_Model] | None = field(default=None, min_length=1)
    base_model: str | None = None
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: str | None = None
    parameters: dict[str, Any] = field(default={})

    @property
    def written_dtype(self) -> Dtype | None:
        return self.out_dtype or self.dtype

    def check(self) -> None:
        if (self.slices is None) == (self.models is None):
            raise FieldMistake("exactly one of `slices` and `models` must be set", "models")
        if self.dtype in ("float16", "bfloat16") and self.out_dtype not in (None, self.dtype):
            raise FieldMistake(
                f"out_dtype {self.out_dtype} after dtype {self.dtype} would round twice; sums are rounded once here",
                "out_dtype",
                remedy="Remove `dtype` or `out_dtype`",
            )
        for place, settings in self._settings():
            for key, setting in settings.items():
                self._check_setting(place, key, setting)

    def _check_setting(self, place: str, key: str, setting: Any) -> None:
        allowed, level = _OWN[self.merge_method], "a model's parameter"
        if "sources" not in place and not place.startswith("models"):
            allowed, level = (*_SHARED[self.merge_method], *allowed), "a parameter"

        where = f"{place}.{key}"
        if key not in allowed:
            raise FieldMistake(
                f"{key!r} is not {level} of {self.merge_method}; mergekit would ignore it",
                where,
                remedy=did_you_mean(key, allowed, f"Use {', '.join(allowed) or 'none'}, or remove it"),
            )

        if key in ("normalize", "rescale", "int8_mask"):
            if not isinstance(setting, bool):
                raise FieldMistake(f"{key} must be true or false", where)
            if key == "rescale" and setting:
                raise FieldMistake("rescale: true (rescaling to the L1 norm) is not supported here", where)
        elif not _is_setting(setting):
            raise FieldMistake(f"{key} must be a number, a list of numbers, or a list of filters and values", where)

    def _settings(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Every `parameters` mapping, with its place in the file."""
        yield "parameters", self.parameters
        for number, model in enumerate(self.models or ()):
            yield f"models.{number}.parameters", model.parameters
        for number, part in enumerate(self.slices or ()):
            yield f"slices.{number}.parameters", part.parameters
            for index, source in enumerate(part.sources):
                yield f"slices.{number}.sources.{index}.parameters", source.parameters


@dataclass(frozen=True)
class MergekitMerge:
    """A mergekit YAML, translated.

    Attributes:
        composition: a composition of its checkpoints, with a rule for every tensor.
        dtype: the result's dtype; None if each tensor keeps its own.
    """

    composition: Composition
    dtype: Dtype | None

    @staticmethod
    def is_at(path: str | Path) -> bool:
        """Whether the YAML file at `path` is a mergekit YAML."""
        return _MARK in RecipeFile.read(path).content

    @staticmethod
    def dtype_in(path: str | Path) -> Dtype | None:
        """The dtype that a mergekit YAML sets for its result; None for other recipes, or if it sets none."""
        if not MergekitMerge.is_at(path):
            return None
        return read_recipe(path, _MergekitRecipe).written_dtype


def read_mergekit(path: str | Path) -> MergekitMerge:
    """Read a mergekit YAML. The headers of its checkpoints are read too, because filters match names of tensors.

    Relative paths of checkpoints may be relative to the file's folder.

    Raises:
        FieldError: a key or value is not supported, a filter matches no tensor, or a parameter is missing.
        UnsupportedError: the file moves layers, or a model is not a full checkpoint.
        AdapterswapError: see `open_expert`.
    """
    check_type(path, (str, Path), "path", "Pass a YAML file")
    return _Reading(read_recipe(path, _MergekitRecipe), Path(path)).merge()


class _Vocabulary(NamedTuple):
    """The rows of each embedding and head, and the tokens of these rows; None if no tokenizer.json says it."""

    rows: Mapping[str, int]
    tokens: Tokens | None


def _vocabulary(checkpoint: Checkpoint) -> _Vocabulary:
    rows = checkpoint.rows_of_tokens
    most = max(rows.values(), default=0)
    tokens = read_tokens(checkpoint.source.folder)
    if tokens is not None:
        tokens = {index: token for index, token in tokens.items() if index < most}
    return _Vocabulary(rows, tokens)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _or_one(value: float | None) -> float:
    """A factor, or 1 if there is none."""
    if value is None:
        return 1.0
    return value


def _is_setting(value: Any) -> bool:
    """A number, a gradient, or a list of {filter, value}."""
    if _is_number(value):
        return True
    if not isinstance(value, list) or not value:
        return False
    if all(map(_is_number, value)):
        return True

    for item in value:
        if not isinstance(item, dict) or not {"value"} <= item.keys() <= {"value", "filter"}:
            return False
        if not isinstance(item.get("filter", "*"), str | None) or not _is_setting(item["value"]):
            return False
    return True


@dataclass
class _Reading:
    """A mergekit YAML that is being translated."""

    recipe: _MergekitRecipe
    path: Path
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reference → the expert's name."""
    opened: dict[str, Checkpoint] = dataclasses.field(default_factory=dict)
    filters: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Filter → whether it matched a tensor."""

    def merge(self) -> MergekitMerge:
        recipe = self.recipe
        problems = Problems(FieldError)
        for reference in dict.fromkeys(self._references()):
            with problems.collect():
                self._open(reference)
        problems.raise_if_any()

        first = recipe.base_model or self._references()[0]
        skeleton = self.opened[first]
        in_config = ModelConfig(skeleton.config).num_layers
        num_layers = Depth.known(in_config, first, "Complete its config", parameter=None, kind=UnsupportedError)
        slices = self._slices(num_layers)
        self._check_tokenizers(first)
        self._check_vocabularies(first)

        outcomes = {tensor: self._outcome(tensor, slices) for tensor in skeleton.parameters.values()}
        unmatched = [text for text, matched in self.filters.items() if not matched]
        if unmatched:
            raise FieldError(
                f"{self.path}: the filter {unmatched[0]!r} matches no tensor's name; mergekit would ignore it",
                "Write a part of a tensor's name, such as self_attn or mlp",
                parameter="parameters",
            )

        # Without a base, the config and the tokenizer come from the first expert of the first rule.
        compressed = _compressed(outcomes)
        first_name = self.names[first]
        rules = [rule for rule in compressed if rule.experts[:1] == (first_name,)]
        rules += [rule for rule in compressed if rule.experts[:1] != (first_name,)]

        used: set[str] = set()
        for rule in rules:
            used.update(rule.experts)
        experts = {}
        for reference, name in self.names.items():
            if name in used:
                experts[name] = self._place(reference)
        base_model = None
        if recipe.base_model:
            base_model = self._place(recipe.base_model)
        composition = Composition(
            experts=experts,
            base_model=base_model,
            num_layers=num_layers,
            allocation=tuple(rules),
            allow_negative=True,
        )
        return MergekitMerge(composition, recipe.written_dtype)

    def _references(self) -> list[str]:
        recipe = self.recipe
        models = [model.model for model in recipe.models or ()]
        for part in recipe.slices or ():
            models += [source.model for source in part.sources]
        if recipe.base_model:
            models.append(recipe.base_model)
        return models

    def _place(self, reference: str) -> str:
        sibling = self.path.parent / expand(reference)
        if os.path.isdir(sibling):
            return str(sibling)
        return reference

    def _open(self, reference: str) -> None:
        place = self._place(reference)
        if "+" in reference and not os.path.isdir(expand(place)):
            raise UnsupportedError(
                f"{self.path}: {reference} is a base with LoRA, which mergekit would merge first",
                "Write an adapterswap recipe with the adapters as `experts`; it does not need the base's weights",
                parameter="model",
            )

        checkpoint = open_expert(place)
        if not isinstance(checkpoint, Checkpoint):
            raise UnsupportedError(
                f"{self.path}: {reference} is an adapter, but mergekit merges full checkpoints",
                "Write an adapterswap recipe with `experts` and `rules`",
                parameter="model",
            )
        self.opened[reference] = checkpoint
        self.names[reference] = ExpertName.choose(checkpoint, self.names.values(), "model")

    def _slices(self, num_layers: int) -> list[_Slice]:
        """The slices from the first layer to the last; if the file has none, one slice with all models."""
        recipe, base = self.recipe, self.recipe.base_model
        if recipe.slices is None:
            whole = (0, num_layers)
            sources: list[_Source] = []
            for model in recipe.models or ():
                sources.append(_Source(model=model.model, parameters=model.parameters, layer_range=whole))
            if base and base not in [source.model for source in sources]:
                if recipe.merge_method in ("linear", "passthrough"):
                    raise FieldError(
                        f"{self.path}: base_model is not in `models`, so {recipe.merge_method} has no weight for it",
                        "Remove `base_model`, or add it to `models` with a weight",
                        parameter="base_model",
                    )
                sources.append(_Source(model=base, layer_range=whole))
            return [_Slice(sources=sources)]

        # Each slice begins where the one before it ended, in all of its sources.
        at = 0
        for number, part in enumerate(recipe.slices):
            for index, source in enumerate(part.sources):
                begin, end = source.layer_range
                key = f"slices.{number}.sources.{index}.layer_range"
                if begin != at or end <= begin or end > num_layers or end != part.sources[0].layer_range[1]:
                    raise UnsupportedError(
                        f"{self.path}: {key} is [{begin}, {end}], but layers cannot be moved or dropped here",
                        f"Write [{at}, END] with END at most {num_layers}, the same in all sources of the slice",
                        parameter=key,
                    )
            at = part.sources[0].layer_range[1]
        if at != num_layers:
            raise UnsupportedError(
                f"{self.path}: the slices end at layer {at}, but the models have {num_layers} layers",
                "Add a slice for the other layers",
                parameter="slices",
            )
        if len(recipe.slices[0].sources) != len(recipe.slices[-1].sources):
            raise UnsupportedError(
                f"{self.path}: the first and the last slice have different numbers of sources, and mergekit would drop "
                "some of them for the head and the last norm",
                "List the same models in both slices, with a weight of 0 for those that should not take part",
                parameter="slices",
            )
        return list(recipe.slices)

    def _check_tokenizers(self, first: str) -> None:
        """Accept `tokenizer_source` only if all tokenizers are equal: mergekit reorders embeddings by it."""
        source = self.recipe.tokenizer_source
        if source is None:
            return
        tokenizer_of = source
        if source == "base" and self.recipe.base_model:
            tokenizer_of = first
        contents = {tokenizer_bytes(checkpoint.source.folder) for checkpoint in self.opened.values()}
        if tokenizer_of != first or len(contents) != 1:
            raise UnsupportedError(
                f"{self.path}: tokenizer_source is {source}, but the result has the tokenizer of {first}, and "
                "embeddings are not reordered here",
                "Remove it, or use checkpoints that share one tokenizer",
                parameter="tokenizer_source",
            )

    def _check_vocabularies(self, first: str) -> None:
        """Refuse checkpoints with different tokens: mergekit averages their rows, and cuts off those that one lacks."""
        ours = _vocabulary(self.opened[first])
        for name, checkpoint in self.opened.items():
            theirs = _vocabulary(checkpoint)
            if ours.rows != theirs.rows or (None not in (ours.tokens, theirs.tokens) and ours.tokens != theirs.tokens):
                raise UnsupportedError(
                    f"{self.path}: {first} and {name} have different tokens, whose rows mergekit would average or cut "
                    "off",
                    "Write an adapterswap recipe, in which a new token's row is its owner's",
                    parameter="model",
                )

    def _outcome(self, tensor: StoredTensor, slices: Sequence[_Slice]) -> Rule:
        """The rule for a tensor, without layers and modules."""
        if tensor.layer is not None:
            part = next(part for part in slices if tensor.layer < part.sources[0].layer_range[1])
            begin, end = part.sources[0].layer_range
            t = 1.0
            if end - begin > 1:
                t = (tensor.layer - begin) / (end - begin - 1)
            return self._merged(tensor.name, part, t)

        # Outside the layers: of the first slice, or of the last
        before = self._merged(tensor.name, slices[0], 0.0)
        after = self._merged(tensor.name, slices[-1], 0.0)
        if before == after:
            return before
        module = ModuleName(tensor.module)
        if module.is_embedding:
            return before
        if module.is_head or module.rpartition(".")[2] in _NORMS:
            return after
        raise UnsupportedError(
            f"{self.path}: {tensor.name} is outside the layers, and the first and the last slice treat it differently",
            "Use the same models and weights in both",
            parameter="slices",
        )

    def _merged(self, tensor: str, part: _Slice, t: float) -> Rule:
        """The rule for a tensor by a slice's sources; `t` is its place in a gradient, from 0 to 1."""
        recipe, base = self.recipe, self.recipe.base_model
        method = recipe.merge_method
        scopes = [part.parameters, recipe.parameters]

        if method == "passthrough":
            scale = self._value("scale", tensor, t, [part.sources[0].parameters, *scopes])
            if len(part.sources) != 1 or scale not in (None, 1):
                raise UnsupportedError(
                    f"{self.path}: passthrough needs one source in each slice, and cannot scale it here",
                    "Use `linear` for several sources, and remove `scale`",
                    parameter="slices",
                )
            return Rule(expert=self.names[part.sources[0].model])

        is_linear = method == "linear"
        if not is_linear and (base is None or base not in [source.model for source in part.sources]):
            where = ""
            if base:
                where = " in the sources of every slice"
            raise FieldError(
                f"{self.path}: {method} needs the base model, which is not named{where}",
                "Set `base_model`, and add it to `sources`",
                parameter="base_model",
            )

        weights: dict[str, float] = {}
        densities: dict[str, float] = {}
        for source in part.sources:
            if not is_linear and source.model == base:
                continue
            nearest_first = [source.parameters, *scopes]
            weight = self._value("weight", tensor, t, nearest_first)
            if weight is None:
                raise FieldError(
                    f"{self.path}: {source.model} has no weight for {tensor}", "Set `weight`", parameter="weight"
                )
            name = self.names[source.model]
            if name in weights:
                raise FieldError(
                    f"{self.path}: {source.model} is listed twice", "List each model once", parameter="model"
                )
            weights[name] = weight
            density = None
            if method == "ties":
                density = self._value("density", tensor, t, nearest_first)
            densities[name] = _or_one(density)

        # Of the slice, before the file's
        normalize = _NORMALIZES[method]
        for scope in reversed(scopes):
            normalize = scope.get("normalize", normalize)
        factor = None
        if not is_linear:
            factor = self._value("lambda", tensor, t, scopes)
        return self._rule(tensor, weights, densities, normalize=normalize, factor=_or_one(factor))

    def _rule(
        self, tensor: str, weights: dict[str, float], densities: dict[str, float], *, normalize: bool, factor: float
    ) -> Rule:
        method, total = self.recipe.merge_method, sum(weights.values())
        if normalize and abs(total) < 1e-8:
            raise FieldError(
                f"{self.path}: the weights for {tensor} sum to 0, so they cannot be divided by their sum",
                "Change them, or set normalize: false",
                parameter="weight",
            )
        if method == "linear" and not normalize and abs(total - 1) > 1e-6:
            raise UnsupportedError(
                f"{self.path}: the weights for {tensor} sum to {total:g}, which would scale the base's own weights",
                "Set normalize: true, or weights that sum to 1",
                parameter="normalize",
            )

        nonzero = {name: weight for name, weight in weights.items() if weight != 0}
        if not nonzero or factor == 0:
            return Rule(expert=BASE)
        if method == "ties":
            if len(set(densities.values())) > 1:
                raise UnsupportedError(
                    f"{self.path}: the models have different densities for {tensor}, but TIES takes one density here",
                    "Set the same `density` for all models",
                    parameter="density",
                )
            parameters = {"density": next(iter(densities.values())), "lambda": factor}
            return Rule(blend=weights, method="ties", normalize=normalize, **parameters)

        divisor = 1.0
        if normalize:
            divisor = total
        shares = {name: factor * weight / divisor for name, weight in nonzero.items()}
        if len(shares) == 1 and abs(next(iter(shares.values())) - 1) < 1e-12:
            return Rule(expert=next(iter(shares)))
        return Rule(blend=shares, normalize=False)

    def _value(self, key: str, tensor: str, t: float, scopes: Sequence[Mapping[str, Any]]) -> float | None:
        """A parameter's value for a tensor, from the first scope that has one."""
        for scope in scopes:
            if key in scope:
                value = self._evaluated(scope[key], tensor, t)
                if value is not None:
                    return value
        return None

    def _evaluated(self, setting: Any, tensor: str, t: float) -> float | None:
        if _is_number(setting):
            return float(setting)

        # A gradient: numbers at equal distances, and between two of them their weighted mean
        if _is_number(setting[0]):
            place = t * (len(setting) - 1)
            before = int(place)
            after = min(len(setting) - 1, before + 1)
            share = place - before
            return float((1 - share) * setting[before] + share * setting[after])

        # The first filter that is in the tensor's name
        for item in setting:
            text = item.get("filter")
            if text not in (None, "*"):
                self.filters[text] = self.filters.get(text, False) or text in tensor
            if text in (None, "*") or text in tensor:
                return self._evaluated(item["value"], tensor, t)
        return None


def _compressed(outcomes: Mapping[StoredTensor, Rule]) -> tuple[Rule, ...]:
    """A short list of rules that give each tensor its outcome."""
    by_rule: dict[str, list[StoredTensor]] = {}
    rules: dict[str, Rule] = {}
    everything: dict[int | None, set[str]] = {}
    for tensor, rule in outcomes.items():
        rules[rule.text] = rule
        by_rule.setdefault(rule.text, []).append(tensor)
        everything.setdefault(tensor.layer, set()).add(_within(tensor))
    if len(rules) == 1:
        return tuple(rules.values())

    # Of each rule: the layers in which it has the same tensors, and these tensors, unless they are all of the layer's
    compressed: list[Rule] = []
    for text, tensors in by_rule.items():
        names: dict[int | None, set[str]] = {}
        for tensor in tensors:
            names.setdefault(tensor.layer, set()).add(_within(tensor))
        places: dict[tuple[str, ...] | None, list[int | None]] = {}
        for layer, within in names.items():
            modules = None
            if within != everything[layer]:
                modules = tuple(sorted(within))
            places.setdefault(modules, []).append(layer)

        for modules, layers in places.items():
            selections: list[str] = []
            inside = [layer for layer in layers if layer is not None]
            if inside:
                selections.append(format_layers(inside))
            if None in layers:
                selections.append(NO_LAYER)
            for selection in selections:
                compressed.append(rules[text].model_copy(update={"layers": selection, "modules": modules}))

    for tensor, rule in outcomes.items():
        first = next((one for one in compressed if one.matches(tensor.name, tensor.layer, tensor.kind)), None)
        if first is None or first.model_copy(update={"layers": None, "modules": None}) != rule:
            raise ExpertError(f"No rule can match only the tensor {tensor.name}", "Write an adapterswap recipe instead")
    return tuple(compressed)


def _within(tensor: StoredTensor) -> str:
    """A tensor's name within its layer, as a rule's `modules` selects it."""
    if tensor.layer is None:
        return tensor.name
    return tensor.name.partition(f".{tensor.layer}.")[2]
