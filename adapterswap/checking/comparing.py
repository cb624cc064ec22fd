"""How far apart two adapters are: relative distance and cosine of ΔW, per module, computed in low rank.

Knows opened adapters; judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adapterswap.arithmetic.lowrank import cosine, inner
from adapterswap.arithmetic.tensors import open_files, read_factors
from adapterswap.errors import AdapterswapError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.layers import Kind

__all__ = ["Difference", "compare", "total"]


@dataclass(frozen=True)
class Difference:
    """Two ΔW of one module, X of the first adapter and Y of the second (zero where one lacks the module).

    Attributes:
        name, layer, kind: the module.
        norms: ‖X‖ and ‖Y‖ (Frobenius).
        distance: ‖X - Y‖ / ‖X‖; infinite for X = 0 ≠ Y.
        cosine: ⟨X, Y⟩ / (‖X‖·‖Y‖); None where one is zero.
    """

    name: str
    layer: int | None
    kind: Kind
    norms: tuple[float, float]
    product: float

    @property
    def distance(self) -> float:
        one, other = self.norms
        apart = math.sqrt(max(0.0, one**2 + other**2 - 2 * self.product))
        return apart / one if one else (math.inf if other else 0.0)

    @property
    def cosine(self) -> float | None:
        return cosine(self.product, self.norms)


def compare(one: Adapter, other: Adapter) -> list[Difference]:
    """The difference of every module that either adapter has, in the order of layers.

    The cosine and distance are exact up to about 1e-8, since they are told from inner products.

    Raises:
        AdapterswapError: a module has another shape in the other adapter; a tensor holds NaN or infinity.
    """
    names = dict.fromkeys([*one.modules, *other.modules])
    found = []
    with open_files([one.file, other.file]) as files:
        for name in names:
            pair = [adapter.modules.get(name) for adapter in (one, other)]
            shapes = {module.shape for module in pair if module is not None}
            if len(shapes) > 1:
                raise AdapterswapError(f"{name} is {' and '.join(sorted(shapes))}", "Compare adapters of one base")
            factors = [
                read_factors(adapter.name, files[adapter.file.path], module)
                for module, adapter in zip(pair, (one, other), strict=True)
                if module is not None
            ]
            present = iter([math.sqrt(max(0.0, inner(each, each))) for each in factors])
            norms = [0.0 if module is None else next(present) for module in pair]
            product = inner(factors[0], factors[1]) if len(factors) == 2 else 0.0
            module = next(each for each in pair if each is not None)
            found.append(Difference(name, module.layer, module.kind, (norms[0], norms[1]), product))
    return sorted(found, key=lambda each: (-1 if each.layer is None else each.layer, each.name))


def total(differences: Sequence[Difference], name: str = "all") -> Difference:
    """Several modules as one: their ΔW side by side."""
    norms = [math.sqrt(math.fsum(each.norms[side] ** 2 for each in differences)) for side in (0, 1)]
    product = math.fsum(each.product for each in differences)
    first = differences[0]
    return Difference(name, first.layer, first.kind, (norms[0], norms[1]), product)
