"""Random damage to adapters, configs, records, bases and recipes, and what must hold afterwards.

The caller supplies the random numbers, so that hypothesis can shrink failures and fuzz/campaign.py can run without it.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml
from click.testing import CliRunner, Result
from crafting import BASE_CONFIG, BYTES, CONFIG, PREFIX, WEIGHTS, adapter, config, file_bytes, parts, tensors
from safetensors import SafetensorError, safe_open

__all__ = ["KINDS", "Subject", "mutate_bytes", "mutate_json"]

_DEEP: Any = "x"
for _ in range(60):
    _DEEP = [_DEEP]

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308,
    5e-324, float("nan"), float("inf"), "", "x" * 600, "\x1b[31m", "\ud800", "\u202e", "\n", "[/red]", "..", "/", "~",
    "/etc/passwd", "a\0b", "(a+)+$", "(.*)*x", ".*.*.*.*x", "(", "a{99999999999}", r"\1", "base", "math", "swahili",
    "LORA", "pissa", "gaussian", "F32", "F16", "BF16", "F8_E4M3", "I64", "C64", "lm_head", "org/base", "none", "0-3",
    "0-9999", [], {}, [[]], [None], [0, 0], ["a"], {"a": 1}, {"": {}}, _DEEP,
]  # fmt: skip

TOKENS = [
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-1", b"1e999", b"NaN", b"null", b"\\ud800", b"\\u001b", b"\xff",
    b"\xc3\x28", b"\xef\xbb\xbf", b"\x00", b"99999999999999999999", b'"a":1,"a":1', b"&a", b"*a", b"<<: *a", b"!!set ",
    b"!!python/name:os.system ", b"? ", b"\n- ", b"\n  ", b"%YAML 9\n---\n",
]  # fmt: skip


def mutate_bytes(random: Random, raw: bytes) -> bytes:
    """Change a text or a binary file in one small place."""
    at = random.randrange(len(raw) + 1)
    match random.randrange(7):
        case 0 if raw:
            at = random.randrange(len(raw))
            return raw[:at] + bytes([raw[at] ^ (1 << random.randrange(8))]) + raw[at + 1 :]
        case 1:
            return raw[:at] + random.choice(TOKENS) + raw[at:]
        case 2:
            return raw[:at] + raw[at + random.randrange(1, 20) :]
        case 3:
            return raw[:at] + raw[max(0, at - random.randrange(1, 60)) :]
        case 4:
            return raw[:at]
        case 5:
            other = random.randrange(len(raw) + 1)
            return raw[:at] + raw[min(at, other) : max(at, other)] + raw[at:]
    return raw[:at] + random.choice(TOKENS) * random.randrange(1, 80) + raw[at:]


def mutate_json(random: Random, content: Any) -> Any:
    """`content` with one value, key or branch of it changed."""
    content = copy.deepcopy(content)
    places = _places(content)
    if not places:
        return random.choice(ODD)
    holder, key = random.choice(places)
    value = holder[key]
    match random.randrange(7):
        case 0 | 1:
            holder[key] = random.choice(ODD)
        case 2:
            del holder[key]
        case 3:
            holder[key] = [value] if random.random() < 0.5 else {"a": value}
        case 4:
            other, name = random.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = copy.deepcopy(other[name])
        case 5:
            if isinstance(holder, dict):
                new = random.choice(ODD)
                holder[new if isinstance(new, str) else str(key) + "x"] = holder.pop(key)
            else:
                holder.insert(key, random.choice(ODD))
        case 6:
            if isinstance(value, int | float):
                holder[key] = value + random.choice([-1, 1, -8, 8, 2**32])
            elif isinstance(value, str):
                holder[key] = value + random.choice(["x", ".", "\x07", "é", "0"])
            else:
                holder[key] = random.choice(ODD)
    return content


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) in a tree of dicts and lists."""
    found, stack = [], [content]
    while stack:
        value = stack.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
        found += [(value, key) for key in keys]
        stack += [value[key] for key in keys]
    return found


def _several(random: Random, content: Any) -> Any:
    for _ in range(random.choice([1, 1, 1, 1, 2, 4])):
        content = mutate_json(random, content)
    return content


def _as_bytes(content: Any) -> bytes:
    """JSON in which NaN and lone surrogates are written as they are."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")


class Subject:
    """Two experts, a base, a record and a recipe in a folder, which are damaged and used repeatedly.

    `check` damages one of them, runs the command line on it, and raises AssertionError on a failure that no input may
    cause.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.math = adapter(folder / "math")
        self.swahili = adapter(folder / "swahili", tensors(seed=1))
        self.base = folder / "base"
        self.base.mkdir()
        (self.base / "config.json").write_text(json.dumps(BASE_CONFIG))
        self.outputs = folder / "outputs"
        self.outputs.mkdir()
        self.out = self.outputs / "out"
        self.runner = CliRunner()
        self.slowest = 0.0
        patterns = {"rank_pattern": {r".*\.(0|1)\..*": 2}, "alpha_pattern": {"q_proj": 3, r"layers\.\d+\.mlp.*": 5}}
        self.config = config(base_model_name_or_path=str(self.base), **patterns)
        (self.math / CONFIG).write_text(json.dumps(self.config))
        (self.swahili / CONFIG).write_text(json.dumps(self.config))
        self.header, self.data = parts(tensors())
        names = list(dict.fromkeys(key.split(".lora_")[0].removeprefix(PREFIX) for key in tensors()))
        self.record = {
            "format": 1, "adapterswap_version": "0", "base_model": "base", "num_layers": 4,
            "composition": {"method": "layer_swap", "task": ["math"], "language": ["swahili"], "bottom": 1, "top": 1},
            "experts": {
                name: {"source": name, "revision": None, "sha256": {WEIGHTS: "0", CONFIG: "0"}}
                for name in ("math", "swahili")
            },
            "output": {"layout": "exact"},
            "slice": {"layers": "0-3"},
            "modules": {name: "math" if i % 2 else {"math": 0.5, "swahili": 0.5} for i, name in enumerate(names)},
        }  # fmt: skip
        self.recipe = {
            "experts": {"math": str(self.math), "swahili": str(self.swahili)},
            "num_layers": 4,
            "allocation": [
                {"layers": "0-1", "modules": ["self_attn"], "expert": "swahili"},
                {"layers": [2], "blend": {"math": 1, "swahili": 2.5}, "method": "linear"},
                {"expert": "math"},
            ],
        }
        self.zones = {
            "experts": self.recipe["experts"], "num_layers": 4, "method": "layer_swap", "task": "math",
            "language": ["swahili"], "bottom": 1, "top": 1, "bottom_transition": 1, "task_weight": 0.5,
        }  # fmt: skip

    def check(self, random: Random, kind: str) -> str:
        """Damage one input, use it and restore it; returns the outcome: `refused` or `accepted`."""
        start = time.process_time()
        outcome = getattr(self, f"_check_{kind}")(random)
        self.slowest = max(self.slowest, time.process_time() - start)
        return str(outcome)

    def _check_weights(self, random: Random) -> str:
        whole = file_bytes(self.header, self.data)
        match random.randrange(5):
            case 0:
                raw = mutate_bytes(random, whole)
            case 3:
                data = bytearray(self.data)
                for _ in range(random.randrange(1, 5)):
                    data[random.randrange(len(data))] = random.randrange(256)
                raw = file_bytes(self.header, bytes(data))
            case 1:
                text = _as_bytes(self.header)
                for _ in range(random.randrange(1, 4)):
                    text = mutate_bytes(random, text)
                raw = file_bytes(text, self.data)
            case 2:
                data = mutate_bytes(random, self.data) if random.random() < 0.1 else self.data
                raw = file_bytes(_as_bytes(_several(random, self.header)), data)
            case _:
                raw = file_bytes(*self._reshaped(random))
        return self._with(self.math / WEIGHTS, raw, lambda: self._use_adapter(random))

    def _reshaped(self, random: Random) -> tuple[dict[str, Any], bytes]:
        """A valid file in which one tensor has another shape, dtype, name or numbers, with matching bytes."""
        content = tensors(rank=random.choice([1, 2, 2, 2, 3]))
        for _ in range(random.choice([0, 1, 1, 2])):
            name = random.choice(list(content))
            dtype = random.choice(list(BYTES))
            shape = tuple(random.choice([0, 1, 2, 2, 4, 8]) for _ in range(random.choice([0, 1, 2, 2, 2, 3])))
            size = BYTES[dtype]
            for length in shape:
                size *= length
            content.pop(name) if random.random() < 0.5 else None
            names = [name, f"{name}x", "", f"{PREFIX}lm_head.weight", f"{PREFIX}model.layers.7.mlp.fc1.lora_A.weight"]
            content[random.choice(names)] = (dtype, shape, random.randbytes(size))
        return parts(content)

    def _check_config(self, random: Random) -> str:
        if random.random() < 0.6:
            raw = _as_bytes(_several(random, self.config))
        else:
            raw = mutate_bytes(random, _as_bytes(self.config))
        return self._with(self.math / CONFIG, raw, lambda: self._use_adapter(random))

    def _check_record(self, random: Random) -> str:
        if random.random() < 0.8:
            raw = _as_bytes(_several(random, self.record))
        else:
            raw = mutate_bytes(random, _as_bytes(self.record))

        def use() -> str:
            verified = ["verify", self.math, "--expert", f"math={self.swahili}", "--expert", f"swahili={self.swahili}"]
            result = self._run(*verified)
            self._use_adapter(random)
            return "accepted" if result.stdout else "refused"

        return self._with(self.math / "adapterswap.json", raw, use)

    def _check_base(self, random: Random) -> str:
        mutated = _several(random, {**BASE_CONFIG, "text_config": BASE_CONFIG, "is_encoder_decoder": False})
        raw = _as_bytes(mutated) if random.random() < 0.8 else mutate_bytes(random, _as_bytes(mutated))
        command = ["compose", "-t", self.math, "-l", self.swahili, "-o", self.out, "--bottom", 1, "--top", 1]
        return self._with(self.base / "config.json", raw, lambda: self._compose(*command))

    def _check_recipe(self, random: Random) -> str:
        content = _several(random, random.choice([self.recipe, self.zones]))
        try:
            raw = yaml.safe_dump(content).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, RecursionError):
            raw = _as_bytes(content)
        for _ in range(random.choice([0, 0, 0, 0, 1, 3])):
            raw = mutate_bytes(random, raw)
        path = self.folder / "recipe.yaml"
        return self._with(path, raw, lambda: self._compose("compose", path, "-o", self.out))

    def _with(self, path: Path, raw: bytes, use: Callable[[], str]) -> str:
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(raw)
        try:
            return use()
        finally:
            path.unlink() if before is None else path.write_bytes(before)

    def _use_adapter(self, random: Random) -> str:
        refused = self._run("inspect", self.math, *random.choice([[], ["--json"]])).exit_code
        self._compare_with_safetensors()
        options = random.choice(
            [
                ["--bottom", 1, "--top", 1],
                ["--bottom", 0, "--top", 2, "--bottom-transition", 1],
                ["--method", "soup"],
                ["--method", "soup", "--layout", "portable"],
                ["--method", "soup", "--max-rank", 1],
                ["--method", "task_arithmetic", "--scale", -2, "--allow-negative"],
                ["--partition", "A"],
            ]
        )
        sides = [self.math, self.swahili]
        random.shuffle(sides)
        command = ["compose", "-t", sides[0], "-l", sides[1], "-o", self.out, "--num-layers", 4, *options]
        outcome = self._compose(*command)
        assert not (refused and outcome == "accepted")
        return outcome

    def _compare_with_safetensors(self) -> None:
        """The safetensors library can open what we accept, and sees the same tensors."""
        from adapterswap.kit.errors import AdapterswapError
        from adapterswap.kit.files.tensorfile import TensorFile

        try:
            ours = TensorFile.read(self.math / WEIGHTS)
        except AdapterswapError:
            return
        try:
            with safe_open(self.math / WEIGHTS, "np") as file:
                theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise AssertionError(f"we accept what safetensors refuses: {error}") from error
        assert theirs == {name: tensor.shape for name, tensor in ours.tensors.items()}

    def _compose(self, *command: object) -> str:
        result = self._run(*command)
        if result.exit_code:
            assert not list(self.outputs.iterdir()), "a refusal left something behind"
            return "refused"
        with safe_open(self.out / WEIGHTS, "np") as file:
            assert file.keys()
        assert self._run("inspect", self.out).exit_code == 0, "we refuse our own output"
        assert [path.name for path in self.outputs.iterdir()] == ["out"]
        shutil.rmtree(self.out)
        return "accepted"

    def _run(self, *command: object) -> Result:
        from adapterswap.cli import main

        result = self.runner.invoke(main, [str(argument) for argument in command])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(f"a traceback: {result.exception!r}") from result.exception
        answers = (0, 1) if command[0] == "verify" else (0,)
        assert result.exit_code in (*answers, 2, 3), f"exit {result.exit_code}"
        lines = result.stderr.splitlines()
        if result.exit_code:
            assert command[0] == "verify" or result.stdout == ""
            assert command[0] == "verify" or (lines and all(line.startswith("Error: ") for line in lines)), lines
            assert len(result.stderr) < 60_000
        assert all(line.isprintable() for line in lines + result.stdout.splitlines()), (
            "something unprintable is printed"
        )
        return result


KINDS = [name.removeprefix("_check_") for name in vars(Subject) if name.startswith("_check_")]
