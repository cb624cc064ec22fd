"""LoRA in GGUF, for llama.cpp and engines built on it: write it, and read it back."""
