"""The matrices of an expert under one name in all experts, and their ΔW, one at a time.

Without a base the experts' own names are reconciled as for a composition. With a base, matrices get the names under
which the base stores them, which full checkpoints use too. Only headers are read until a matrix is requested, and
memory holds one module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adapterswap.core import Adapter, Checkpoint, StoredTensor, Target, aligned
from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.kinds import Whole
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.checkpoints import OTHER_NAMES
from adapterswap.core.model.layers import ModuleName
from adapterswap.kit.errors import ArgumentError, BaseModelError, ExpertError, Problems
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import open_files

Expert = Adapter | Checkpoint
Delta = Factors | npt.NDArray[np.float32]  # ΔW as factors or dense; out×in


def under_stored_names(experts: Mapping[str, Expert], base: Checkpoint | None) -> dict[str, Expert]:
    """The experts with one name for each module."""
    problems = Problems(ExpertError)
    adapters = {name: expert for name, expert in experts.items() if isinstance(expert, Adapter)}
    for name, adapter in adapters.items():
        with problems.collect():
            Target.ANALYZE.check_expert(adapter, name)
    problems.raise_if_any()
    return {**experts, **aligned(adapters, base)}


# The order of the projections in a block, so that the columns of tables follow the data through the layer.
_ORDER = ("q", "query", "k", "key", "v", "value", "qkv", "attn", "query_key_value", "o", "out", "dense", "gate", "w1",
          "up", "w3", "fc1", "fc", "dense_h_to_4h", "proj", "down", "w2", "fc2", "dense_4h_to_h")  # fmt: skip


@dataclass(frozen=True)
class Matrix:
    """One adapted matrix.

    Attributes:
        name: the module's full name.
        layer: its layer; None outside the layers.
        part: its name within the layer, without numbers: `self_attn.q_proj`, `mlp.experts.w1`; outside the layers, its
            full name.
        key: sorts parts in the order in which the data passes through them.
        source: its place in the expert's files.
    """

    name: str
    layer: int | None
    part: str
    key: tuple[int, int, str]
    source: LoraModule | StoredTensor


Reader = Callable[[Matrix], Delta]


def matrices(expert: Adapter | Checkpoint, base: Checkpoint | None) -> dict[str, Matrix]:
    """An expert's matrices by module name: every LoRA module, or every attention and MLP weight of a checkpoint."""
    sources: dict[str, LoraModule | StoredTensor] = {}
    if isinstance(expert, Adapter):
        Target.ANALYZE.check_expert(expert, expert.name)
        for name, module in expert.modules.items():
            if not module.embedding:
                sources[name] = module
    else:
        if base is None:
            raise ArgumentError(
                f"{expert.name} is a full checkpoint, so its changes can only be measured against its base",
                "Pass `base_model`",
                parameter="base_model",
            )
        for parameter in expert.parameters.values():
            if parameter.kind == "other" or parameter.layer is None or len(parameter.tensor.shape) != 2:
                continue
            own = base.parameters.get(parameter.name)
            if own is None or own.tensor.shape != parameter.tensor.shape:
                difference = "lacks it"
                if own is not None:
                    difference = f"has it as {'×'.join(map(str, own.tensor.shape))}"
                raise BaseModelError(
                    f"{parameter.name} is {'×'.join(map(str, parameter.tensor.shape))} in {expert.name}, but the base "
                    f"{difference}",
                    f"Pass the base that the expert was trained from{OTHER_NAMES}",
                    parameter="base_model",
                )
            if {own.tensor.dtype, parameter.tensor.dtype} <= set(Dtype.FLOATS):
                sources[parameter.module] = parameter

    found: list[Matrix] = []
    for name, source in sources.items():
        name_in_layer = name
        if source.layer is not None:
            name_in_layer = ModuleName(name).within(source.layer)
        part = re.sub(r"\.\d+(?=\.|$)", "", name_in_layer)
        projection = part.rpartition(".")[2].removesuffix("_proj").removeprefix("c_")
        place = len(_ORDER)
        if projection in _ORDER:
            place = _ORDER.index(projection)
        found.append(Matrix(name, source.layer, part, (source.kind != "attention", place, name), source))

    def layer_and_key(matrix: Matrix) -> tuple[int, tuple[int, int, str]]:
        """What is outside the layers comes first."""
        if matrix.layer is None:
            return -1, matrix.key
        return matrix.layer, matrix.key

    return {matrix.name: matrix for matrix in sorted(found, key=layer_and_key)}


@contextmanager
def delta_reader(expert: Adapter | Checkpoint, base: Checkpoint | None) -> Iterator[Reader]:
    """A function that reads the ΔW of a matrix (out×in, float32). The files stay open until the block ends."""
    with ExitStack() as stack:
        if isinstance(expert, Adapter):
            adapters = stack.enter_context(open_files([expert.file]))

            def read(matrix: Matrix) -> Delta:
                assert isinstance(matrix.source, LoraModule)
                return Factors.read(expert.name, adapters[expert.file.path], matrix.source)

        else:
            assert base is not None
            files = stack.enter_context(open_files([*expert.shards, *base.shards]))

            def read(matrix: Matrix) -> Delta:
                assert isinstance(matrix.source, StoredTensor)
                of_base = base.parameters[matrix.source.name]
                theirs = Whole.of(matrix.source.path, matrix.source.tensor)
                own = Whole.of(of_base.path, of_base.tensor)
                delta = theirs.difference(expert.name, own.read_rows(base.name, files), files)
                if expert.is_transposed(matrix.source.name):
                    return delta.T
                return delta

        yield read
