"""Install a wheel or an sdist into a fresh environment, away from the checkout, and use it.

    python scripts/check_dist.py dist/*                         # with every dependency, from constraints.txt
    python scripts/check_dist.py dist/*.whl --borrow .venv      # with the dependencies that are installed there

First with only what every installation has, without torch: composing, slicing, comparing, verifying, and that a merge
names the extra that it needs. Then with the extra `all`: the version, the package data (recipes, the lab's bases,
types), a composition of two adapters made by PEFT, its verification, and `python -m adapterswap`. On failure it prints
the output of the failed command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent

LIGHT = """
import json, subprocess, sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

heavy = [name for name in ("torch", "transformers", "peft", "accelerate", "datasets") if find_spec(name)]
assert not heavy, heavy
script = Path(sys.executable).parent / "adapterswap"


def run(*arguments, code=0):
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


generator = np.random.default_rng(0)
for name in ("math", "swahili"):
    place = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (4, 16), "B": (16, 4)}
    Path(name).mkdir()
    save_file(
        {
            place.format(layer, side): generator.standard_normal(shape, dtype=np.float32)
            for layer in range(6)
            for side, shape in shapes.items()
        },
        f"{name}/adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"]}
    config |= {"base_model_name_or_path": "org/base", "task_type": "CAUSAL_LM"}
    Path(name, "adapter_config.json").write_text(json.dumps(config))

sides = ["-t", "math", "-l", "swahili", "--num-layers", "6"]
experts = ["--expert", "math=math", "--expert", "swahili=swahili"]
run("compose", *sides, "-o", "swap", "--bottom", "2", "--top", "1", "--bottom-transition", "1")
run("compose", *sides, "-o", "soup", "--method", "soup", "--max-rank", "4")
run("slice", "math", "-o", "core", "--layers", "2-3", "--num-layers", "6")
run("convert", "math", "-o", "half", "--dtype", "float16")
run("inspect", "swap", "--json")
run("diff", "swap", "soup")
run("verify", "swap", *experts)
run("suggest", *sides)
run("methods")
run("recipes", "ls")
ties = ["compose", *sides, "-o", "ties", "--method", "ties", "--density", "0.5", "--max-rank", "4"]
evaluate = ["evaluate", "--base-model", "base", "--tasks", "mgsm_direct_sw"]
for extra, command in {"models": ties, "eval": evaluate}.items():
    assert f"pip install 'adapterswap[{extra}]'" in run(*command, code=3), command
print("light ok")
"""

SMOKE = """
import json, subprocess, sys
from importlib.metadata import files, version
from pathlib import Path

import adapterswap

checkout, script = Path(sys.argv[1]), Path(sys.executable).parent / "adapterswap"
package = Path(adapterswap.__file__).parent
assert checkout not in package.parents, f"the checkout was imported: {package}"
assert adapterswap.__version__ == version("adapterswap"), (adapterswap.__version__, version("adapterswap"))
assert (package / "py.typed").is_file()
assert len(list(package.glob("experiments/lab/shipped/*.safetensors"))) == 5
assert len(list(package.glob("shipped_recipes/**/*.yaml"))) > 50
names = {path.name for path in files("adapterswap")}
assert names >= {"LICENSE", "NOTICE"}, names


def run(*arguments):
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


assert run("--version").split()[-1] == adapterswap.__version__
recipes = {recipe["name"] for recipe in json.loads(run("recipes", "ls", "--json"))}
assert "sweep/llama-3.1-8b/swahili" in recipes
run("recipes", "validate", *sorted(name for name in recipes if name.startswith(("train/", "compose/", "sweep/"))))
run("methods", "--json")

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained("base")
for name in ("math", "swahili"):
    base = AutoModelForCausalLM.from_pretrained("base")
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).save_pretrained(name)
run("compose", "-t", "math", "-l", "swahili", "-o", "out", "--bottom", "1", "--top", "1", "--bottom-transition", "1")
run("verify", "out", "--expert", "math=math", "--expert", "swahili=swahili")
run("merge", "out", "--base-model", "base", "-o", "merged")
inspect = [sys.executable, "-m", "adapterswap", "inspect", "out", "--json"]
shown = subprocess.run(inspect, capture_output=True, check=True)
assert json.loads(shown.stdout)["modules"]
print("ok", adapterswap.__version__, sys.version.split()[0])
"""


def check(artefact: Path, python: str, borrow: Path | None) -> str:
    """Install `artefact` into a fresh environment and run the smoke test there; returns its output.

    Args:
        artefact: a wheel or an sdist.
        python: the interpreter to make the environment with.
        borrow: an environment whose installed packages serve as dependencies; None to install them.
    """
    with tempfile.TemporaryDirectory(prefix="adapterswap-dist-") as folder:
        environment = Path(folder, "venv")
        run([python, "-m", "venv", str(environment)])
        own = str(environment / "bin" / "python")
        pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
        settings = {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": folder}

        def use(script: str, place: Path) -> str:
            place.mkdir()
            return run([own, "-c", script, str(ROOT)], cwd=place, env=settings)

        (packages,) = environment.glob("lib/python*/site-packages")
        if borrow is None:
            constraints = ["-c", str(ROOT / "constraints.txt")]
            run([*pip, str(artefact), *constraints])
        else:
            (others,) = borrow.resolve().glob("lib/python*/site-packages")
            run([*pip, "--no-deps", "--no-build-isolation", "--ignore-installed", str(artefact)])
            lend_required(packages, others)
        use(LIGHT, Path(folder, "light"))
        if borrow is None:
            run([*pip, f"{artefact}[all]", *constraints])
        else:
            (packages / "borrowed.pth").write_text(f"{others}\n")
        return use(SMOKE, Path(folder, "elsewhere"))


def lend_required(packages: Path, others: Path) -> None:
    """Link what adapterswap requires without extras, and what that requires, from `others` into `packages`."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    installed = {canonicalize_name(one.name): one for one in distributions(path=[str(others)])}
    (own,) = distributions(name="adapterswap", path=[str(packages)])
    waiting, seen = list(own.requires or ()), set()
    for line in waiting:  # grows while it is read
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        waiting += installed[name].requires or ()
        for top in {file.parts[0] for file in installed[name].files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(others / top)


def run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """The output of a command; if it fails, the script exits with that output."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} … exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Check every artefact named on the command line."""
    parser = argparse.ArgumentParser(description="Install a wheel or an sdist into a fresh environment and use it.")
    parser.add_argument("artefacts", nargs="+", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter to make the environment with")
    parser.add_argument("--borrow", type=Path, metavar="VENV", help="an environment that has the dependencies")
    options = parser.parse_args()
    for artefact in options.artefacts:
        print(f"{artefact.name}: {check(artefact.resolve(), options.python, options.borrow).strip()}")


if __name__ == "__main__":
    main()
