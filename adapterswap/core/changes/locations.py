"""Find the stored tensors that an adapter's modules change, and whether they are stored out×in or in×out.

PEFT names modules as they are in memory. Files may leave out the outermost prefix (GPT-2 on the Hub stores
`h.0.attn.c_attn.weight`), store a weight in×out (Conv1D, embeddings), or hold one tensor for an embedding and its tied
head.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from adapterswap.core.changes.kinds import Change, LowRank, Whole, change_of
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.parts import FullModule, LoraModule, compare_shapes
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor, open_checkpoint
from adapterswap.core.model.layers import ModelConfig, ModuleName
from adapterswap.kit.errors import AdapterswapError, BaseModelError, Problems, UnsupportedError, and_more
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import Tensor

_REMEDY = "Pass the base that the experts adapt as `base_model`"
_MERGE_WITH_PEFT = "Compose it into an adapter with `compose`, and merge that with PEFT's merge_and_unload"


class Located(NamedTuple):
    """An adapter's change of one stored tensor; `module` is the module's name in PEFT."""

    module: str
    change: Change


class TiedHead(NamedTuple):
    """The names of an embedding and of the head that the config ties to it.

    At least one of them is stored. If both are, transformers loads both: they may differ.
    """

    head: str
    embedding: str

    def absent(self, stored: Container[str]) -> str | None:
        """The one that is not stored; None if both are."""
        if self.head not in stored:
            return self.head
        if self.embedding not in stored:
            return self.embedding
        return None

    def source(self, key: str, stored: Container[str]) -> str:
        """The stored tensor from which transformers loads `key`: for the one that is absent, the other."""
        if key != self.absent(stored):
            return key
        return self.embedding if key == self.head else self.head


def find_tied_head(skeleton: Checkpoint, adapters: Mapping[str, Adapter]) -> TiedHead | None:
    """The tied head, if an adapter changes it or its embedding, so that both must be stored; otherwise None.

    PEFT changes the module that it adapts but not the one tied to it, so full weights must hold both.
    """
    tied = skeleton.config.get("tie_word_embeddings")
    if tied is False or not any(_changes_an_end(adapter, skeleton) for adapter in adapters.values()):
        return None
    try:
        keys = skeleton.tied_keys
    except BaseModelError:
        keys = _tied_by_name(skeleton, adapters)
        if keys is None:
            raise
    if not keys:
        return None
    embedding, head = keys
    return TiedHead(head, embedding)


def _changes_an_end(adapter: Adapter, skeleton: Checkpoint) -> bool:
    """Whether an adapter may change an embedding or a head: a weight outside the layers with one row per token."""
    if adapter.vocabulary:
        return True
    if any(part.layer is None and part.lora is None for part in adapter.opaque.values()):
        return True  # its tensors do not say how large the weight is

    shapes: list[tuple[int, ...]] = []
    for saved in adapter.saved.values():
        if saved.layer is None:
            shapes += [tensor.shape for tensor in saved.tensors.values()]
    for module in adapter.factors.values():
        if module.layer is None:
            shapes.append((module.height, 1))

    vocabulary = ModelConfig(skeleton.config).language.get("vocab_size")
    return any(len(shape) == 2 and vocabulary in (None, shape[0]) for shape in shapes)


def _tied_by_name(skeleton: Checkpoint, adapters: Mapping[str, Adapter]) -> tuple[str, str] | None:
    """The keys of a tied embedding and head with the usual names, if the config says that they are tied."""
    if skeleton.config.get("tie_word_embeddings") is not True:
        return None

    # By the last part of the module's name, without layers that predict further tokens, which may hold copies of both
    outside: dict[ModuleName, str] = {}
    for parameter in skeleton.parameters.values():
        if ModuleName(parameter.name).layer(skeleton.container) is None:
            outside[ModuleName(parameter.module.rpartition(".")[2])] = parameter.name
    embedding = next((name for end, name in outside.items() if end.is_embedding), None)
    head = next((name for end, name in outside.items() if end.is_head), None)
    if embedding is None:
        return None
    if head is not None:
        return embedding, head

    # A head that is not stored has the name that the experts know.
    ends: set[str] = set()
    for adapter in adapters.values():
        ends.update(name.rpartition(".")[2] for name in adapter.parts)
    heads = [end for end in ends if ModuleName(end).is_head]
    return embedding, f"{min(heads, default='lm_head')}.weight"


def with_head(parameters: Mapping[str, StoredTensor], tied: TiedHead | None) -> dict[str, StoredTensor]:
    """The stored tensors, with the absent one of a tied head and its embedding added after the other."""
    absent = tied and tied.absent(parameters)
    if not tied or not absent:
        return dict(parameters)
    with_tied: dict[str, StoredTensor] = {}
    for name, parameter in parameters.items():
        with_tied[name] = parameter
        if name == tied.source(absent, parameters):
            with_tied[absent] = parameter._replace(name=absent, module=absent.rpartition(".")[0])
    return with_tied


class Places(NamedTuple):
    """Where adapters change a model.

    Attributes:
        stored: its tensors, with the absent one of a tied head and its embedding; see `with_head`.
        located: by adapter, and by the name of the stored tensor.
        tied: the tied head, if an adapter changes it or its embedding.
    """

    stored: Mapping[str, StoredTensor]
    located: Mapping[str, Mapping[str, Located]]
    tied: TiedHead | None


def locate_all(
    adapters: Mapping[str, Adapter],
    model: Checkpoint,
    problems: Problems,
    *,
    where: str = "the base",
    resized: bool = False,
) -> Places:
    """Each adapter's changes of a model's stored tensors; for `where` and `resized` see `_Search`."""
    tied = find_tied_head(model, adapters)
    stored = with_head(model.parameters, tied)
    located = {}
    for name, adapter in adapters.items():
        with problems.collect():
            _check_shared(name, adapter, model)
            _check_bias_of_head(name, adapter, stored, model)
            located[name] = _Search(name, where, adapter, stored, model, problems, resized).changes()
    return Places(stored, located, tied)


def _check_shared(expert: str, adapter: Adapter, model: Checkpoint) -> None:
    """Refuse an adapter that changes one of several modules with one weight: an encoder-decoder's shared embeddings,
    or blocks that layers share."""
    if ModelConfig(model.config).architecture.shares_blocks:
        for part in adapter.parts.values():
            if part.layer is None:
                continue
            weight = model.base.get(model.base.find(part.name, adapter.container) or "")
            if weight is not None and weight.tied:
                raise _shared(expert, weight.name, weight.tied, model)

    if not model.has_both_stacks or not _changes_an_end(adapter, model):
        return
    for name, others in model.base.shared_embeddings.items():
        for part in adapter.parts.values():
            if part.layer is not None or not f".{name}".endswith(f".{part.name}"):
                continue
            changes_all = isinstance(part, FullModule) and part.tied.keys() >= set(others)
            if not changes_all:
                raise _shared(expert, name, others, model)


def _shared(expert: str, name: str, others: Sequence[str], model: Checkpoint) -> UnsupportedError:
    return UnsupportedError(
        f"{expert} changes {name}, which {model.name} ties to {and_more(others)}: PEFT changes only that one, but full "
        "weights cannot",
        "Compose it into an adapter with `compose`",
    )


def _check_bias_of_head(
    expert: str, adapter: Adapter, parameters: Mapping[str, StoredTensor], model: Checkpoint
) -> None:
    """Refuse trained tokens of a head with a bias: PEFT's running model leaves the bias out, and its merge keeps it."""
    if not adapter.tokens:
        return
    heads = [*adapter.tokens]
    tied = find_tied_head(model, {expert: adapter})
    if tied is not None:
        heads.append(tied.head.removesuffix(".weight"))

    for head in heads:
        if f"{head}.bias" in parameters:
            raise UnsupportedError(
                f"{expert} trained tokens that {head} of {model.name} has, too, and PEFT computes such a head without "
                "its bias, but merges it with the bias",
                "Compose it into an adapter with `compose`, or give the embedding and the head to other experts",
            )


def _finder(
    adapter: Adapter, parameters: Mapping[str, StoredTensor], model: Checkpoint
) -> Callable[[str, str], str | None]:
    """A function from a module and a parameter, as an adapter calls them, to the stored tensor's name: by the names
    alone or, failing that, by transformers' names of the stored tensors in memory. None if there is none."""
    by_name = _stored_names(adapter, parameters)

    def find(module: str, parameter: str) -> str | None:
        key = by_name(module, parameter)
        if key is None:
            with suppress(BaseModelError):  # not a transformers model
                key = model.stored_key(f"{module}.{parameter}", adapter.container)
        return key

    return find


@dataclass
class _Search:
    """Finds the stored tensors that an adapter changes.

    Attributes:
        expert, where: the names of the adapter and the model in messages.
        adapter: the adapter.
        parameters: the model's stored tensors.
        model: the model.
        problems: collects modules that the model lacks or has in another shape.
        resized: allow other numbers of rows in embeddings and heads that are stored in full, and more in those with
            LoRA.
    """

    expert: str
    where: str
    adapter: Adapter
    parameters: Mapping[str, StoredTensor]
    model: Checkpoint
    problems: Problems
    resized: bool = False

    def __post_init__(self) -> None:
        self._find = _finder(self.adapter, self.parameters, self.model)

    def key(self, module: str, parameter: str = "weight") -> str | None:
        """The stored tensor's name; None if there is none."""
        return self._find(module, parameter)

    def changes(self) -> dict[str, Located]:
        """The changes that the adapter makes, by the name of the stored tensor."""
        self._check_biases()
        changes: dict[str, Located] = {}
        for module in self.adapter.modules.values():
            if module.parameter:
                with self.problems.collect():
                    changes |= self._parameter(module)

        changes |= self._adapted()

        for saved in self.adapter.saved.values():
            if saved.rows:
                changes |= self._rows(saved)
            else:
                changes |= self._in_full(saved)
        return changes

    def _check_biases(self) -> None:
        lacking: list[str] = []
        for part in self.adapter.opaque.values():
            is_stored = "lora_B.bias" in part.tensors and self.key(part.name) is not None
            if is_stored and self.key(part.name, "bias") is None:
                lacking.append(part.name)
        if lacking:
            self.problems.add(
                f"{self.expert} trained biases (lora_bias) for {and_more(lacking)}, but {self.where} stores none to "
                "add them to",
                "Compose it into an adapter with `compose`",
                kind=UnsupportedError,
            )

    def _adapted(self) -> dict[str, Located]:
        """The weights of modules with LoRA or another kind, and their biases if those change too. Reports those that
        are not stored, or in another shape. PEFT compares the shapes of other kinds itself."""
        changes: dict[str, Located] = {}
        missing: list[str] = []
        ours: dict[str, str] = {}
        theirs: dict[str, str] = {}
        for part in self.adapter.adapted.values():
            if part.parameter:  # see `_parameter`
                continue
            key, lora = self.key(part.name), part.lora
            if key is None:
                missing.append(part.name)
                continue
            transposed = self.model.is_transposed(key) or (lora is not None and lora.embedding)
            change = change_of(part, self.adapter.file.path, transposed=transposed)

            # Factors fit the weight, up to the number of rows of a resized vocabulary.
            if lora is not None:
                shape = self.parameters[key].tensor.shape
                expected = (lora.out_features, lora.in_features)
                if transposed:
                    expected = (lora.in_features, lora.out_features)
                is_resized = ModuleName(part.name).is_vocabulary(part.layer) and shape[1:] == expected[1:]
                grows = is_resized and shape[0] < expected[0]
                shrinks = is_resized and shape[0] > expected[0]
                if shrinks or (grows and (part.on_bias or not self.resized)):
                    self._report_resized(change.method, lora, shape[0])
                    continue
                if not grows:
                    ours[part.name] = "×".join(map(str, expected))
                    theirs[part.name] = "×".join(map(str, shape))
                    if shape != expected:
                        continue

            located = Located(part.name, change)
            changes[key] = located
            bias = self.key(part.name, "bias") if part.on_bias else None
            if bias is not None:
                changes[bias] = located

        if missing:
            self._report_missing(missing)
        compare_shapes(
            ours,
            theirs,
            one=self.expert,
            other=f"{self.where} as stored",
            remedy=_REMEDY,
            problems=self.problems,
            parameter="base_model",
            kind=BaseModelError,
        )
        return changes

    def _rows(self, saved: FullModule) -> dict[str, Located]:
        """The weight whose rows the adapter trained."""
        key = self.key(saved.name)
        stored = "no such weight"
        if key is not None:
            shape = self.parameters[key].tensor.shape
            if shape[1:] == saved.width:
                change = Whole(self.adapter.file.path, {"weight": saved.first}, saved.rows)
                return {key: Located(saved.name, change)}
            stored = f"it as {list(shape)}"
        self._report(
            f"{self.expert} holds rows of {saved.name} with {saved.width[0]} numbers, and {self.where} stores {stored}"
        )
        return {}

    def _in_full(self, saved: FullModule) -> dict[str, Located]:
        """The tensors of a module that was trained in full."""
        changes: dict[str, Located] = {}
        holder, of_bias = saved.name, ModuleKeys(saved.name).is_bias
        if of_bias:
            holder = saved.name.removesuffix(".bias")

        # Of a vocabulary that may be resized, the number of rows is not compared.
        first = 0
        if self.resized and not of_bias and ModuleName(saved.name).is_vocabulary(saved.layer):
            first = 1

        for parameter, tensor in saved.tensors.items():
            key = self.key(holder, parameter)
            if key is None and self._source_of(holder, parameter):
                self._report_missing([holder], parameter)
            elif key is None or self.parameters[key].tensor.shape[first:] != tensor.shape[first:]:
                stored = "stores no such tensor"
                if key is not None:
                    stored = f"stores it as {list(self.parameters[key].tensor.shape)}"
                self._report(
                    f"{self.expert} holds {holder}.{parameter} in full, {list(tensor.shape)}, but {self.where} {stored}"
                )
            else:
                changes[key] = Located(saved.name, Whole.of(self.adapter.file.path, tensor))
        return changes

    def _parameter(self, module: LoraModule) -> dict[str, Located]:
        """The stored tensors of a parameter: a matrix such as a router's weight, or one matrix per expert of a mixture,
        stored together or one by one.
        """
        path, parameters, where = self.adapter.file.path, self.parameters, self.where
        matrix = (module.out_features, module.in_features)

        # A matrix of its own
        if module.experts == 1:
            holder, _, last = module.name.rpartition(".")
            alone = self.key(holder, last)
            if alone is not None and parameters[alone].tensor.shape == matrix:
                return {alone: Located(module.name, LowRank(module, path))}

        # A parameter of transformers that is fused from one matrix per expert
        fused = self.model.fused(module.name, self.adapter.container)
        if fused is None or (module.experts == 1 and fused.transposed):  # PEFT does not transpose the only expert's ΔW
            raise UnsupportedError(
                f"{self.expert} has LoRA on the parameter {module.name} of {module.shape}, but {where} stores no such "
                "parameter",
                _MERGE_WITH_PEFT,
            )
        shape = (module.experts, *matrix)
        if fused.transposed:
            shape = (module.experts, *matrix[::-1])
        if fused.shape != shape:
            raise BaseModelError(
                f"{module.name} is {'×'.join(map(str, shape))} in {self.expert}, and "
                f"{'×'.join(map(str, fused.shape))} in {where}",
                _REMEDY,
                parameter="base_model",
            )

        # Stored as one tensor, or as several that hold rows of one expert each
        if fused.key is not None and parameters[fused.key].tensor.shape == fused.shape:
            return {fused.key: Located(module.name, LowRank(module, path, fused.transposed))}
        if not fused.parts or fused.transposed:
            raise UnsupportedError(
                f"{self.expert} has LoRA on the parameter {module.name}, but {where} stores its rows in tensors in an "
                "unknown order",
                _MERGE_WITH_PEFT,
            )
        changes = {}
        for key, rows in fused.parts.items():
            changes[key] = Located(module.name, LowRank(module, path, within=rows))
        return changes

    def _report(self, message: str) -> None:
        self.problems.add(message, _REMEDY, parameter="base_model", kind=BaseModelError)

    def _report_missing(self, modules: Sequence[str], parameter: str = "weight") -> None:
        """Report modules whose parameter the model does not store, or only as a part of other tensors."""
        sources = {name: self._source_of(name, parameter) for name in modules}
        computed = [name for name, source in sources.items() if source]
        if computed:
            self.problems.add(
                f"{self.expert} adapts {and_more(computed)}, which transformers computes from other tensors of "
                f"{self.where}, such as {sources[computed[0]]}",
                "Load the base with transformers, save it by save_pretrained(PATH, save_original_format=False), and "
                "pass that folder as `base_model`",
                parameter="base_model",
                kind=UnsupportedError,
            )

        absent = [name for name, source in sources.items() if not source]
        if absent:
            self._report(f"{self.expert} adapts {and_more(absent)}, but {self.where} stores no such weight")

    def _report_resized(self, method: str, lora: LoraModule, rows: int) -> None:
        """Report factors for an embedding or head with more rows than the model stores."""
        size = lora.height
        self.problems.add(
            f"{self.expert} has {method} on {lora.name} of a resized vocabulary, {size} rows, and {self.where} stores "
            f"{rows}",
            f"Merge it with PEFT: call model.resize_token_embeddings({size}), load the adapter, and save what "
            "merge_and_unload returns",
            kind=UnsupportedError,
        )

    def _source_of(self, module: str, parameter: str) -> str | None:
        """See `Checkpoint.source_of`; None for a model that transformers does not know."""
        with suppress(BaseModelError):
            return self.model.source_of(f"{module}.{parameter}", self.adapter.container)
        return None


def base_tensor(
    base_model: str, adapter: Adapter, name: str, like: Tensor, *, rows: int | None = None
) -> tuple[Path, Tensor]:
    """The file and the place of the base's own tensor `name`, or of what it stores in its place: the same under another
    name or, for a tied head, the embedding's weight. Headers decide if they can.

    Args:
        base_model: the base's folder or Hub id.
        adapter: the adapter that has this name for it.
        name: the tensor's name.
        like: the expert's tensor, whose shape it must have.
        rows: the least number of rows, if the expert's vocabulary was resized.
    """
    base = open_checkpoint(base_model)
    stored = base.parameters.get(name) or _tied_embedding(base, name)
    if stored is None:
        with suppress(AdapterswapError):  # transformers does not know the model
            parameters = with_head(base.parameters, find_tied_head(base, {"": adapter}))
            module, _, parameter = name.rpartition(".")
            stored = parameters.get(_finder(adapter, parameters, base)(module, parameter) or "")
    if stored is None:
        raise BaseModelError(
            f"The base {base_model} has no tensor {name}",
            "Pass the base that the experts adapt",
            parameter="base_model",
        )

    tensor, shape = stored.tensor, like.shape
    if rows is not None:
        shape = (max(rows, tensor.shape[0]), *like.shape[1:])
    if tensor.dtype not in Dtype.FLOATS or tensor.shape != shape:
        raise BaseModelError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} in the base {base_model}, but {like.dtype} "
            f"{list(like.shape)} in an expert",
            "Pass the base that the experts adapt, in floating point numbers",
            parameter="base_model",
        )
    return stored.path, tensor


def _tied_embedding(base: Checkpoint, name: str) -> StoredTensor | None:
    """The only embedding's weight, if the config ties a head of this name to it and no head is stored, whatever it is
    called; None if this is not sure."""
    is_head = ModuleName(name.removesuffix(".weight")).is_head
    if not is_head or base.config.get("tie_word_embeddings") is not True:
        return None

    embeddings: list[StoredTensor] = []
    for stored in base.parameters.values():
        if not stored.name.endswith(".weight"):
            continue
        module = ModuleName(stored.module)
        if module.is_head:
            return None
        if module.is_embedding:
            embeddings.append(stored)
    if len(embeddings) != 1:
        return None
    return embeddings[0]


def _stored_names(adapter: Adapter, parameters: Mapping[str, StoredTensor]) -> Callable[[str, str], str | None]:
    """A function from the names of a module and a parameter to the stored tensor's name, or None."""
    # What modules in layers are called, without those that are parameters
    layered = []
    for part in adapter.adapted.values():
        if part.layer is not None and not part.parameter:
            layered.append(part.name)

    # The outermost prefix may be absent from the file, or from the adapter.
    prefixes = set()
    for name, stored in parameters.items():
        if stored.layer is not None:
            prefixes.add(name.partition(".")[0])
    renamings: list[Callable[[str], str]] = [lambda name: name, lambda name: name.partition(".")[2]]
    for prefix in sorted(prefixes):
        renamings.append(partial("{}.{}".format, prefix))
    renamed = renamings[0]
    for renaming in renamings:
        if all(f"{renaming(name)}.weight" in parameters for name in layered):
            renamed = renaming
            break

    def stored_name(module: str, parameter: str) -> str | None:
        for name in (f"{renamed(module)}.{parameter}", f"{module}.{parameter}"):
            if name in parameters:
                return name
        return None

    return stored_name
