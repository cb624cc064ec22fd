"""adapterswap: compose LoRA adapters by layer."""

__version__ = "0.1.0"
