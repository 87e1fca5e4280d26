"""What quantization cost: tasks, perplexity, divergence, and a report that says what is noise."""
