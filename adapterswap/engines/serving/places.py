"""Where the experts of sweeps and servers are: folders, Hub ids, or chains of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import field


class Chain(Declared):
    """Adapters that were trained one on top of another. They count as one expert, with the sum of their ΔW."""

    chain: tuple[str, ...] = field(min_length=2, description="Folders or Hub ids, the first of an adapter on the base.")


Place = str | Chain
"""Where an expert is: a folder or Hub id, or a chain of them."""


@dataclass(frozen=True)
class Places:
    """Where each expert is, by name."""

    experts: Mapping[str, Place]

    @property
    def chains(self) -> dict[str, tuple[str, ...]]:
        """Each chain among the experts → the names of its adapters: NAME-1, NAME-2, …"""
        chains: dict[str, tuple[str, ...]] = {}
        for name, place in self.experts.items():
            if isinstance(place, Chain):
                chains[name] = tuple(f"{name}-{number}" for number, _ in enumerate(place.chain, 1))
        return chains

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that are opened for the experts, by name."""
        chains = self.chains
        places: dict[str, str] = {}
        for name, place in self.experts.items():
            if isinstance(place, Chain):
                places |= zip(chains[name], place.chain, strict=True)
            else:
                places[name] = place
        return places

    def placed(self, resolve: Callable[[str], str]) -> dict[str, Place]:
        """The experts with `resolve(place)` instead of each place."""
        placed: dict[str, Place] = {}
        for name, place in self.experts.items():
            if isinstance(place, Chain):
                placed[name] = Chain(chain=tuple(map(resolve, place.chain)))
            else:
                placed[name] = resolve(place)
        return placed

    @property
    def shared_name(self) -> str | None:
        """The name of an expert that an adapter of a chain has as well, if there is one."""
        parts: set[str] = set()
        for of_chain in self.chains.values():
            parts.update(of_chain)
        return next((name for name in self.experts if name in parts), None)
