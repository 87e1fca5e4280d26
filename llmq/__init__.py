"""llmq: from a bfloat16 checkpoint to a quantized model that answers requests."""
