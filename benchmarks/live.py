"""Composing on a loaded model compared with PEFT's own functions: ratios measured in one run, medians.

    python benchmarks/live.py [--json] [--device cuda] [--layers 32] [--repeats 30] [--switching]

* switching a model with 7 adapted modules per layer, against `PeftModel.set_adapter` and against
  `add_weighted_adapter` followed by `set_adapter`; the growth of memory over 1,000 switches;
* loading a language expert whole, and only the layers that a composition takes from it;
* decoding a batch of 8 rows with 8 compositions, against one adapter for all rows and against one row at a time.

On the CPU the model is small (random, float32). With `--device cuda` it has the shape of Llama-3.1-8B in bfloat16, and
tokens per second are given too.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from adapterswap.engines.live import LiveComposer

LANGUAGES = [f"language{i}" for i in range(8)]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CPU_SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
CUDA_SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def make_model(device: str, layers: int) -> Any:
    """A random Llama with nine random experts, `math` active."""
    on_cuda = device != "cpu"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128256 if on_cuda else 1024, num_hidden_layers=layers, **(CUDA_SHAPE if on_cuda else CPU_SHAPE)
    )
    dtype = torch.bfloat16 if on_cuda else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        rank = 64 if on_cuda else 16
        lora = {"r": rank, "lora_alpha": rank, "use_rslora": True, "target_modules": PROJECTIONS}
        model = get_peft_model(
            model, LoraConfig(**lora, task_type="CAUSAL_LM"), "math", autocast_adapter_dtype=not on_cuda
        )
        for name in LANGUAGES:
            model.add_adapter(name, LoraConfig(**lora, task_type="CAUSAL_LM"), autocast_adapter_dtype=not on_cuda)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.to(device).eval()


def alternate(names: Sequence[str], call: Callable[[str], Any]) -> Callable[[], None]:
    """A call that takes the names in turn, so that every call switches."""
    state = {"turn": 0}

    def step() -> None:
        state["turn"] += 1
        call(names[state["turn"] % len(names)])

    return step


def switching(model: Any, composer: LiveComposer, repeats: int, device: str) -> dict[str, float]:
    """Milliseconds of each way to switch, measured in turn, so that a busy machine slows all equally."""

    def use(name: str) -> None:
        with composer.use(name):
            pass

    def weighted(name: str) -> None:
        made = f"made{time.perf_counter_ns()}"
        model.add_weighted_adapter(["math", name], [0.5, 0.5], made, combination_type="linear")
        model.set_adapter(made)

    def forget() -> None:
        model.set_adapter("math", inference_mode=True)
        for made in [name for name in model.peft_config if name.startswith("made")]:
            model.delete_adapter(made)

    def nothing() -> None: ...

    names = [f"math+{name}" for name in LANGUAGES]
    zones = [f"math+{name}@bottom=6,top=3,bottom_transition=2,top_transition=2" for name in LANGUAGES[:2]]
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {  # the switch, and how to leave it
        "use and leave": (alternate(names, use), nothing),
        "set, another language": (alternate(names, composer.set), composer.reset),
        "set, other zones": (alternate([names[0], zones[0]], composer.set), composer.reset),
        "PeftModel.set_adapter": (alternate(["math", *LANGUAGES], model.set_adapter), nothing),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, (switch, leave) in ways.items():
            switch()  # the first one after another way is not counted
            times[way] += [_once(switch, device) for _ in range(3)]
            leave()
    rare = [_once(alternate(LANGUAGES[turn:], weighted), device) for turn in range(5)]
    forget()
    found = {way: statistics.median(taken) for way, taken in times.items()}
    return {**found, "add_weighted_adapter + set_adapter": statistics.median(rare)}


def first_use(model: Any, device: str) -> float:
    """Milliseconds of the first `set` of a name, which makes the plan; see `_once`."""
    composer = LiveComposer(model)
    taken = _once(lambda: composer.set("math+language0"), device)
    composer.reset()
    return taken


def tensor_bytes() -> int:
    """The bytes of all tensors that are alive, each storage once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inspecting every object triggers deprecation warnings
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def memory_growth(composer: LiveComposer, switches: int = 1000) -> int:
    """Growth of the tensors in bytes over that many switches; the composition is still active at the second count."""
    before = tensor_bytes()
    for turn in range(switches):
        composer.set(f"math+{LANGUAGES[turn % 8]}@bottom={1 + turn % 5},top={turn % 3},bottom_transition={turn % 2}")
    grown = tensor_bytes() - before
    composer.reset()
    return grown


def loading(model: Any, repeats: int) -> dict[str, float]:
    """Megabytes and milliseconds of an expert loaded whole, and as the shell that `math+shell` uses."""
    composer = LiveComposer(model)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place, selected_adapters=[LANGUAGES[0]], save_embedding_layers=False)
        for name, compositions in (("whole", []), ("shell", ["math+shell"])):
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                composer.load_expert(Path(place) / LANGUAGES[0], name, compositions=compositions)
                times.append((time.perf_counter() - start) * 1000)
                tensors = [p for key, p in model.named_parameters() if f".{name}." in key]
                found[f"{name}, MB"] = sum(p.nbytes for p in tensors) / 1e6
                model.delete_adapter(name)
            found[f"{name}, ms"] = statistics.median(times)
    return found


def decoding(model: Any, composer: LiveComposer, repeats: int, device: str) -> dict[str, float]:
    """Milliseconds to generate NEW_TOKENS tokens for each of 8 rows, in each way."""
    tokens = torch.randint(0, 1000, (8, 16), device=device)
    plain = [f"math+{name}" for name in LANGUAGES]
    zones = [f"{name}@bottom=6,top=3,bottom_transition=2,top_transition=2" for name in plain]
    options = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}

    def generate(rows: torch.Tensor) -> None:
        model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), **options)

    def together(names: Sequence[str]) -> None:
        with composer.use_rows(names):
            generate(tokens)

    def one_by_one() -> None:
        for row, name in zip(tokens.split(1), plain, strict=True):
            with composer.use(name):
                generate(row)

    def one_composition() -> None:
        with composer.use(plain[0]):
            generate(tokens)

    ways = {
        "one adapter": lambda: generate(tokens),
        "one composition": one_composition,
        "8 compositions": lambda: together(plain),
        "8 compositions with transitions": lambda: together(zones),
        "one by one": one_by_one,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):  # in turn, so that a busy machine slows all equally; the first is not counted
        for way, call in ways.items():
            taken = _once(call, device)
            times[way] += [taken] if turn else []
    return {way: statistics.median(taken) for way, taken in times.items()}


NEW_TOKENS = 16


def _once(call: Callable[[], Any], device: str) -> float:
    """Milliseconds of a call; on a CPU the processor's, which a busy machine does not change."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return (clock() - start) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--switching", action="store_true", help="measure only that")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        sys.exit("no CUDA device is here; leave --device out")
    device = arguments.device
    with torch.no_grad():
        model = make_model(device, arguments.layers)
        composer = LiveComposer(model)
        first = first_use(model, device)
        switch = switching(model, composer, arguments.repeats, device)
        if arguments.switching:
            print(json.dumps({"layers": arguments.layers, "device": device, "first use of a name": first, **switch}))
            return
        growth = memory_growth(composer)
        load = loading(model, 3)
        decode = decoding(model, composer, max(3, arguments.repeats // 6), device)
    slowest = max(ms for way, ms in switch.items() if way.startswith("set,"))
    ratios = {
        "set / PeftModel.set_adapter (≤ 1)": slowest / switch["PeftModel.set_adapter"],
        "use and leave / PeftModel.set_adapter": switch["use and leave"] / switch["PeftModel.set_adapter"],
        "add_weighted_adapter + set_adapter / set (≥ 30)": switch["add_weighted_adapter + set_adapter"] / slowest,
        "shell / whole, bytes": load["shell, MB"] / load["whole, MB"],
        "8 compositions / one adapter (≤ 1.25)": decode["8 compositions"] / decode["one adapter"],
        "8 with transitions / one adapter": decode["8 compositions with transitions"] / decode["one adapter"],
        "one by one / 8 compositions (≥ 2.5)": decode["one by one"] / decode["8 compositions"],
    }
    result = {
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "threads": torch.get_num_threads(),
        "switching_ms": {"first use of a name": first, **switch},
        "tensor_bytes_grown_by_1000_switches": growth,
        "loading": load,
        "decoding_ms": decode,
        "tokens_per_second": {way: 8 * NEW_TOKENS / ms * 1000 for way, ms in decode.items()},
        "ratios": ratios,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for title, values in result.items():
        if isinstance(values, dict):
            print(f"\n{title}")
            for name, value in values.items():
                print(f"  {name:60} {value:10.2f}")
        else:
            print(f"{title}: {values}")


if __name__ == "__main__":
    main()
