"""The files beside the weights: config, tokenizer, chat templates, generation settings, processor, pooling."""
