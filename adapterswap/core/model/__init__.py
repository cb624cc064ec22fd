"""A base model: where it comes from, its files, its layers, its names, its tokenizer."""
