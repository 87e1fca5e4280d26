"""What a model is, apart from its weights: configuration, names, tokenizer."""
