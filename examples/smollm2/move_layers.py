"""The control in which the French layers stand in other places: 4 to 7 in 0 to 3, and 0 to 3 in 4 to 7.

python examples/smollm2/move_layers.py experts/french french-moved
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"
LAYER = re.compile(r"(?<=\.layers\.)\d+")


def moved(name: str) -> str:
    """A tensor's name with its layer's new number."""
    return LAYER.sub(lambda found: str((int(found[0]) + 4) % 8) if int(found[0]) < 8 else found[0], name)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    tensors = load_file(source / WEIGHTS)
    target.mkdir(parents=True)
    shutil.copyfile(source / "adapter_config.json", target / "adapter_config.json")
    save_file({moved(name): tensor for name, tensor in tensors.items()}, target / WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    main()
