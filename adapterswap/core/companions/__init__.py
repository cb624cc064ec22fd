"""What stands beside the weights: config, tokenizer, chat templates, generation settings, processor, pooling files."""
