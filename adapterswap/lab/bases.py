"""The lab's base models as folders: shipped as safetensors in bfloat16, or pretrained afresh.

Knows where the shipped files are; knows nothing of experts or compositions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from adapterswap.lab.scenes import Scene

__all__ = ["pretrained_seeds", "ship", "shipped_file", "write_base"]

_TIED = "lm_head.weight"  # the same tensor as the embeddings, so it is left out of a file


def shipped_file(scene: Scene, seed: int) -> Path:
    """The path of the shipped weights of a scene and seed, whether they exist or not."""
    return Path(__file__).parent / "bases" / f"{scene.name}-{seed}.safetensors"


def pretrained_seeds(scene: Scene, seeds: Iterable[int], *, rebuild_base: bool) -> tuple[int, ...]:
    """The seeds whose base must be pretrained, because it is not shipped or is rebuilt."""
    return tuple(seed for seed in seeds if rebuild_base or not shipped_file(scene, seed).exists())


def write_base(
    scene: Scene,
    seed: int,
    folder: Path,
    *,
    rebuild: bool = False,
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> None:
    """Write the base of a scene and seed as a folder for transformers: config, float32 weights, tokenizer.

    A rebuilt base is rounded to bfloat16 like a shipped one. It equals the shipped one only on the machine that made
    that, because floating point differs elsewhere.

    Args:
        rebuild: pretrain it even if it is shipped. A base that is not shipped is always pretrained.
        progress: called with the number of finished steps and the total while pretraining.
    """
    import torch
    from safetensors.torch import load_file

    from adapterswap.lab.pretraining import new_model, pretrain
    from adapterswap.lab.tokenizer import build_tokenizer

    shipped = shipped_file(scene, seed)
    if rebuild or not shipped.exists():
        model = pretrain(scene, seed, progress=progress).to(torch.bfloat16)
    else:
        model = new_model(seed)
        state = load_file(shipped)
        model.load_state_dict({**state, _TIED: state["model.embed_tokens.weight"]})
    model.to(torch.float32).save_pretrained(folder)
    mode = (folder / "config.json").stat().st_mode
    (folder / "model.safetensors").chmod(mode)  # save_pretrained makes it readable by its owner only
    build_tokenizer().save_pretrained(folder)


def ship(scene: Scene, seed: int, folder: Path) -> Path:
    """Write the base in `folder` to the path of the shipped one, in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    target = shipped_file(scene, seed)
    target.parent.mkdir(exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in state.items() if name != _TIED}, target)
    target.chmod(0o644)  # save_file makes it readable by its owner only
    return target
