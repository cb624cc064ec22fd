"""The folders that pages use, on a pico model: `org/base`, `experts/math`, `full/math` and others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import LLAMA_PROJECTIONS
from experiments.evaluation.conftest import byte_tokenizer, pico_model
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapterswap.core.model.sources import base_fingerprints

from .blocks import ROOT

EXPERTS = ("math", "swahili", "telugu", "code", "culture", "japanese", "bengali")
OTHER_NAMES = ("BASE", "base", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B")


def make_world(folder: Path, layers: int) -> Path:
    """A base that reads bytes, under each name that pages use, and one rsLoRA for each of `EXPERTS`."""
    base = pico_model(layers=layers, spread=0.1)
    base.save_pretrained(folder / "org" / "base")
    byte_tokenizer().save_pretrained(folder / "org" / "base")
    for name in OTHER_NAMES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "org" / "base")
    base.name_or_path = "org/base"
    save_expert(base, folder / "experts" / "math", seed=0)
    trained_on = {"base": {"fingerprints": base_fingerprints(folder / "org" / "base")}}  # as `train` records it
    (folder / "experts" / "math" / "training.json").write_text(json.dumps(trained_on))
    tensors = load_file(folder / "experts" / "math" / "adapter_model.safetensors")
    for seed, name in enumerate(EXPERTS[1:], start=1):
        place = folder / "experts" / name
        shutil.copytree(folder / "experts" / "math", place)
        generator = torch.Generator().manual_seed(seed)
        drawn = {key: torch.randn(tensor.shape, generator=generator) * 0.1 for key, tensor in tensors.items()}
        save_file(drawn, place / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def save_expert(base: Any, folder: Path, *, seed: int, **options: Any) -> None:
    """A random LoRA of rank 8 on `base`, written by PEFT."""
    settings = {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": LLAMA_PROJECTIONS}
    model = get_peft_model(base, LoraConfig(**{**settings, "task_type": "CAUSAL_LM", **options}))
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(folder, save_embedding_layers=False)


def open_base() -> Any:
    model = AutoModelForCausalLM.from_pretrained("org/base", dtype=torch.float32).eval()
    model.name_or_path = "org/base"
    return model


def full_checkpoint(folder: Path, *, seed: int) -> None:
    """The base with every linear weight moved a little."""
    model, generator = open_base(), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def encoder_decoder_experts() -> None:
    """Two adapters of a pico NLLB, of twelve layers on either side."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(0)
    sides = {"encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    model = M2M100ForConditionalGeneration(M2M100Config(vocab_size=64, d_model=16, **sides, **heads))
    model.save_pretrained("org/nllb")
    for seed, name in enumerate(("nllb-medical", "nllb-swahili")):
        base = M2M100ForConditionalGeneration.from_pretrained("org/nllb")
        save_expert(base, Path(name), seed=seed, target_modules=["q_proj", "v_proj"], task_type="SEQ_2_SEQ_LM")


def adapters_page() -> None:
    """A DoRA, an expert with a head that was trained in full, and two adapters of an encoder-decoder."""
    encoder_decoder_experts()
    save_expert(open_base(), Path("experts/dora"), seed=1, use_dora=True, target_modules=["q_proj"])
    shutil.rmtree("experts/swahili")
    save_expert(open_base(), Path("experts/swahili"), seed=2, modules_to_save=["lm_head"])


def merge_page() -> None:
    """Results of other pages: a composition and a recipe; also two full checkpoints and a mergekit file for them."""
    from adapterswap import layer_swap

    layer_swap("experts/math", "experts/swahili", bottom=5, top=2).write("math-swahili")
    rules = (
        "experts: {math: experts/math, swahili: experts/swahili}\nrules: [swahili: 0-4, math]\nbase_model: org/base\n"
    )
    Path("recipe.yaml").write_text(rules)
    for seed, name in enumerate(("math", "swahili")):
        full_checkpoint(Path("full") / name, seed=seed)
    sources = [{"model": f"full/{name}", "parameters": {"weight": 0.5}} for name in ("math", "swahili")]
    Path("mergekit-config.yml").write_text(json.dumps({"merge_method": "linear", "models": sources}))


def hub_page() -> None:
    """The base, and a repository with every expert, in the Hub's cache."""
    from core.experts.test_sources import COMMIT, files_of, repository

    cache = Path(constants.HF_HUB_CACHE)
    repository(cache, "org/base", files_of(Path("org/base")))
    shutil.rmtree("org")  # a local path would take precedence
    files = {
        f"{name}/{file}": content for name in EXPERTS for file, content in files_of(Path("experts") / name).items()
    }
    repository(cache, "org/experts", files, **{"v1.0": COMMIT})


def texts_page() -> None:
    """A few texts for each expert."""
    for name in ("gsm8k", "swahili"):
        rows = [json.dumps({"text": f"{name} {number} is a text of some length."}) for number in range(3)]
        Path(f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def papers_experts() -> None:
    """The experts that the shipped recipes name, in the folders where training writes them."""
    for model in ("llama-3.1-8b-instruct", "llama-3.1-8b"):
        for name in ("math", "swahili", "mixing-swahili", "simultaneous-swahili"):
            shutil.copytree(Path("experts") / name.rpartition("-")[2], Path("experts") / model / name)


def adapter_from(expert: str, place: str, **config: Any) -> Path:
    """A copy of an expert as another tool leaves it: other keys in its config, and no record of its base."""
    folder = Path(shutil.copytree(Path("experts") / expert, place))
    (folder / "training.json").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def adapters_of_other_tools() -> None:
    """Adapters as Unsloth, LLaMA-Factory and MLX save them, from the page's experts, and some that are refused."""
    adapter_from("math", "unsloth-math", base_model_name_or_path="unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit")
    adapter_from("swahili", "factory-swahili", base_model_name_or_path="/train/models/Meta-Llama-3.1-8B-Instruct")
    for name in ("math", "swahili"):
        adapter_from(name, f"offline/{name}", base_model_name_or_path="nobody/base-8b")
    adapter_from("math", "pissa", init_lora_weights="pissa")
    adapter_from("math", "trainer-output/checkpoint-500")
    pickled = adapter_from("math", "pickled")
    factors = load_file(pickled / "adapter_model.safetensors")
    (pickled / "adapter_model.safetensors").unlink()
    torch.save(factors, pickled / "adapter_model.bin")
    tinker = Path("tinker-math")
    save_expert(open_base(), tinker, seed=4, target_modules=["q_proj", "lm_head"])
    edit = json.loads((tinker / "adapter_config.json").read_text())
    (tinker / "adapter_config.json").write_text(json.dumps({**edit, "target_modules": "all-linear"}))
    ended = load_file(tinker / "adapter_model.safetensors")
    ended = {key.replace("model.lm_head", "model.model.unembed_tokens"): tensor for key, tensor in ended.items()}
    save_file(ended, tinker / "adapter_model.safetensors")
    mlx = Path("mlx-math")
    mlx.mkdir()
    prefix, last = "base_model.model.", ".weight"
    renamed = {key.removeprefix(prefix).removesuffix(last).lower(): factors[key].T.contiguous() for key in factors}
    save_file(renamed, mlx / "adapters.safetensors")
    settings = {"rank": 8, "dropout": 0.0, "scale": 16 / 8**0.5}
    (mlx / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": settings})
    )


def gguf_page() -> None:
    """A recipe of a composition, and an expert with a head that was trained in full."""
    rules = "experts: {math: experts/math, swahili: experts/swahili}\nrules: [swahili: 0-4, math]\n"
    Path("recipe.yaml").write_text(rules)
    save_expert(open_base(), Path("experts/head"), seed=2, modules_to_save=["lm_head"])


def troubleshooting_page() -> None:
    """Experts, bases and folders with one fault each."""
    from adapterswap import layer_swap, slice_layers

    adapters_of_other_tools()
    gguf_page()
    save_expert(open_base(), Path("experts/dora"), seed=1, use_dora=True, target_modules=["q_proj"])
    shutil.copytree("experts/head", "with-head/head")
    truncated = adapter_from("math", "truncated") / "adapter_model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:5000])
    other = open_base()
    other.model.embed_tokens.weight.data += 0.1
    other.save_pretrained("other/base")
    adapter_from("swahili", "experts/elsewhere")
    record = {"base": {"fingerprints": base_fingerprints(Path("other/base"))}}
    Path("experts/elsewhere/training.json").write_text(json.dumps(record))
    Path("taken").mkdir()
    Path("taken/file").touch()
    slice_layers("experts/swahili", "0-1").write("shell")
    layer_swap("experts/math", "experts/swahili", bottom=5, top=2).write("composed")
    config = json.loads(Path(shutil.copytree("org/base", "quantized"), "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    Path("quantized/config.json").write_text(json.dumps(config))
    misnamed = adapter_from("math", "misnamed") / "adapter_model.safetensors"
    save_file({f"base_model.model.{key}": tensor for key, tensor in load_file(misnamed).items()}, misnamed)
    open_base().bfloat16().save_pretrained("other/half")
    adapter_from("math", "experts/rounded", base_model_name_or_path=str(Path("org/base").resolve()))
    record = {"base": {"fingerprints": base_fingerprints(Path("org/base"))}}
    Path("experts/rounded/training.json").write_text(json.dumps(record))


def train_page() -> None:
    """A recipe over a few rows."""
    sums = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(16)]
    words = [{"question": f"Kini {letter}?", "answer": "Ọ̀rọ̀ ni."} for letter in "abcdefgh"]
    for name, rows in {"rows": sums, "problems": sums, "yoruba": words}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "base_model": "org/base",
        "adapter": {"r": 4, "alpha": 8},
        "datasets": [{"path": "rows.jsonl", "prompt": "{question}", "completion": " {answer}"}],
        "training": {"batch_size": 8, "gradient_accumulation": 1, "max_length": 64, "save_every_samples": None},
    }
    Path("recipe.yaml").write_text(json.dumps(content))


def evaluate_page() -> None:
    """The composition that the page evaluates from disk, and responses with a judge's labels."""
    labelled_responses()
    from adapterswap import layer_swap

    layer_swap("experts/math", "experts/swahili", bottom=5, top=2).write("math-swahili")


def labelled_responses() -> None:
    """Responses with a judge's labels."""
    rows = [{"task": "multijail_sw", "doc_id": number, "output": "Samahani."} for number in range(3)]
    labelled = [row | {"label": label} for row, label in zip(rows, ("safe", "safe", "invalid"), strict=True)]
    Path("responses").mkdir()
    for path, content in (("responses/samples.jsonl", rows), ("labeled.jsonl", labelled)):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in content))


def report_page() -> None:
    """Finished sweeps of one pair, with made-up scores."""
    from experiments.reporting.crafting import craft, recipe

    pair = {"task_experts": {"math1": "experts/math1"}, "language_experts": {"sw1": "experts/sw1"}}
    craft(Path("runs/swahili"), recipe(**pair))
    swaps, ties = [{"bottom": [4, 5], "top": 1}], [{"method": "ties", "density": 0.5, "max_rank": 8}]
    for name, compositions in (("swaps", swaps), ("ties", ties)):
        craft(Path("runs") / name, recipe(**pair, compositions=compositions))


SETUPS: dict[str, Callable[[], None]] = {
    "docs/adapters.md": adapters_page,
    "docs/choosing.md": texts_page,
    "docs/compose.md": hub_page,
    "docs/evaluate.md": evaluate_page,
    "docs/gguf.md": gguf_page,
    "docs/merge.md": merge_page,
    "docs/own_adapters.md": adapters_of_other_tools,
    "docs/recipes.md": papers_experts,
    "docs/report.md": report_page,
    "docs/sweep.md": papers_experts,
    "docs/train.md": train_page,
    "docs/troubleshooting.md": troubleshooting_page,
}


def names_for(page: str) -> dict[str, Any]:
    """Names that a page's Python code assumes: a loaded model, a tokenizer, prompts."""
    if page == "docs/live.md":
        tokenizer, prompts = byte_tokenizer(), ["one", "two", "three"]
        tokenizer.padding_side = "left"
        inputs = {**tokenizer(prompts[0], return_tensors="pt"), "max_new_tokens": 2}
        return {"tokenizer": tokenizer, "prompts": prompts, "inputs": inputs}
    if page == "docs/evaluate.md":
        return {"base": open_base(), "tokenizer": byte_tokenizer()}
    return {}
