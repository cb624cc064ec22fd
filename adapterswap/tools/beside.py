"""The config, tokenizer and other companions of somebody's merge, against those of its sources.

The config must compute what the base's does. The rest should be that of the expert whose companions a result of
adapterswap would take; if it is another source's, that is a note, and if it is nobody's, a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterswap.core.companions.companions import CompanionPlan, Companions
from adapterswap.core.companions.config import ConfigDifferences
from adapterswap.core.companions.files import MODEL_CONFIG
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import ModelConfig, ModuleName

_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Beside:
    """What was found beside the weights.

    Attributes:
        answers: sentences about what differs from all sources.
        differing: the names of what differs: `config.json`, or a kind of companions.
        notes: what is another source's than expected, or could not be compared.
    """

    answers: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Beside) -> Beside:
        return Beside(self.answers + other.answers, self.differing + other.differing, self.notes + other.notes)


def beside_model(folder: Checkpoint, base: Checkpoint, experts: Mapping[str, Path]) -> Beside:
    """Compare the companions of full weights with the base's and the experts'; `experts` maps names to folders."""
    rows = min(folder.rows_of_tokens.values(), default=None)
    plan = CompanionPlan.decide(experts, base.source.folder, rows=rows, config="base")

    # A stored head is compared with the weights. A base is dequantized before it is merged with.
    ignoring = ["quantization_config"]
    if _stores_a_head_of_its_own(folder):
        ignoring.append(_TIED)
    found = ConfigDifferences.between(folder.config, base.config, ignoring=ignoring)
    result = Beside()
    if found:
        text = found.text("the folder", "the base")
        result = Beside((f"{MODEL_CONFIG} computes something else: {text}",), (MODEL_CONFIG,))
    if found.not_compared:
        unknown = found.unknown("the base's")
        result += Beside(notes=(f"{MODEL_CONFIG}: {unknown}",))
    return result + _others(folder.source.folder, plan)


def _stores_a_head_of_its_own(folder: Checkpoint) -> bool:
    """Whether a config unties the head and the weights hold it, as they must where an expert changed only one of the
    two."""
    configs = (folder.config, ModelConfig(folder.config).language)
    if not any(config.get(_TIED) is False for config in configs):
        return False
    return any(ModuleName(part.module).is_head for part in folder.parameters.values())


def beside_adapter(folder: Path, experts: Mapping[str, Path]) -> Beside:
    """The same for an adapter, which has no config."""
    return _others(folder, CompanionPlan.decide(experts))


def _others(folder: Path, plan: CompanionPlan) -> Beside:
    """A folder's other companions against those of their expected owners and of the other sources."""
    ours = Companions(folder)
    result = Beside()
    for kind, expected in plan.owners.items():
        stated = expected._replace(differing={})
        if not ours.has(kind):
            result += Beside(notes=(f"{stated}, but the folder has none",))
            continue
        parts = plan.differences(ours, kind)
        if not parts:
            continue

        # Another source's is unexpected, nobody's is wrong.
        owner = None
        for name, other in plan.folders.items():
            if name != expected.owner and other.has(kind) and not ours.differences(other, kind):
                owner = name
                break

        difference = f"{stated} should be here, and differs: {', '.join(parts)}"
        if owner is None:
            result += Beside((difference,), (kind,))
        elif owner == "base":
            result += Beside(notes=(f"{difference}. The folder has the base's",))
        else:
            result += Beside(notes=(f"{difference}. The folder has {owner}'s",))
    return result
