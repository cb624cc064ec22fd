"""Where a composition runs: a live PeftModel, llama.cpp, vLLM."""
