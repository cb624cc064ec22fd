"""The dtypes of tensors: their names in safetensors files, their usual names, and their sizes.

Imports nothing, so a command's help can list them.
"""

from __future__ import annotations

__all__ = ["DTYPE_BYTES", "FLOATS", "FLOAT_NAMES"]

# Bytes per element of every dtype that a safetensors file may hold and that is a whole number of bytes.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

FLOATS = ("F32", "F16", "BF16")  # the dtypes used in arithmetic, most precise first

FLOAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # the same, by their names in torch and numpy
