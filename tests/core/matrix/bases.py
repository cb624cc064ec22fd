"""Forms in which a base lies on disk: one model, written as transformers, other tools and accidents leave it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from core.matrix.architectures import ARCHITECTURES, build

__all__ = ["FORMS", "write_base"]

State = dict[str, torch.Tensor]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _save(folder: Path, state: State, name: str = FILE) -> None:
    save_file({key: tensor.clone() for key, tensor in state.items()}, folder / name, {"format": "pt"})


def _shards(folder: Path, state: State) -> None:
    """Three shards; the head and the embedding are in different ones."""
    names = sorted(state)
    weight_map = {}
    for i in range(3):
        shard = f"model-{i + 1:05d}-of-00003.safetensors"
        _save(folder, {name: state[name] for name in names[i::3]}, shard)
        weight_map |= dict.fromkeys(names[i::3], shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _both(folder: Path, state: State) -> None:
    """A single file, beside the shards of other weights that were saved before."""
    _shards(folder, {name: tensor + 0.05 * torch.ones_like(tensor) for name, tensor in state.items()})
    _save(folder, state)


def _stale_index(folder: Path, state: State) -> None:
    _shards(folder, state)
    for shard in folder.glob("model-*"):
        shard.unlink()
    _save(folder, state)


def _stray_files(folder: Path, state: State) -> None:
    """Weights of other engines, of a variant and of no shard."""
    _shards(folder, state)
    other = {name: tensor + 1 for name, tensor in state.items()}
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "model-extra.safetensors"):
        _save(folder, other, name)


def _linked(folder: Path, state: State) -> None:
    """As in the Hub's cache: links to files that have a hash for a name."""
    blobs = folder.parent / f"blobs-{folder.name}"
    blobs.mkdir()
    _shards(folder, state)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../{blobs.name}/{number}")


def _tied(write: Callable[[Path, State], None], head: Callable[[State], State]) -> Callable[[Path, State], None]:
    """A config that ties the head to the embedding; `head` makes what is stored."""

    def written(folder: Path, state: State) -> None:
        write(folder, head(state))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    return written


def _without(*names: str) -> Callable[[State], State]:
    return lambda state: {name: tensor for name, tensor in state.items() if name not in names}


FORMS: dict[str, Callable[[Path, State], None]] = {
    "single": _save,
    "sharded": _shards,
    "single beside shards": _both,
    "stale index": _stale_index,
    "stray files": _stray_files,
    "links": _linked,
    "scalars": lambda folder, state: _save(
        folder, {**state, **dict.fromkeys(["model.layers.0.scale", "lm_head.scale"], torch.tensor(2.0))}
    ),
    "mixed dtypes": lambda folder, state: _shards(
        folder, {name: tensor.to(torch.bfloat16) if ".1." in name else tensor for name, tensor in state.items()}
    ),
    "empty tensor": lambda folder, state: _save(folder, {**state, "model.layers.0.empty": torch.zeros(0, 4)}),
    "no head": _tied(_save, _without(HEAD)),
    "own head": _tied(_save, dict),
    "own head, sharded": _tied(_shards, dict),
    "own head in bfloat16": _tied(_save, lambda state: {**state, HEAD: state[HEAD].to(torch.bfloat16)}),
    "equal head": _tied(_shards, lambda state: {**state, HEAD: state[EMBEDDING]}),
    "equal head in bfloat16": _tied(
        _save,
        lambda state: {**state, HEAD: state[EMBEDDING].bfloat16(), EMBEDDING: state[EMBEDDING].bfloat16().float()},
    ),
    "no embedding": _tied(_save, _without(EMBEDDING)),
    "without the class's prefix": _tied(
        _save, lambda state: {name.removeprefix("model."): tensor for name, tensor in _without(HEAD)(state).items()}
    ),
    "own head without the prefix": _tied(
        _save, lambda state: {name.removeprefix("model."): tensor for name, tensor in state.items()}
    ),
}


def write_base(form: str, folder: Path, *, seed: int = 0) -> Path:
    """The folder of a base in this form, or of a full fine-tune of it."""
    model, generator = build(ARCHITECTURES["llama"]), torch.Generator().manual_seed(seed)
    state = {
        name: tensor + 0.05 * bool(seed) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
    }
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    FORMS[form](folder, state)
    return folder
