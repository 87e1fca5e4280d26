"""From token ids and logits to text: no framework, no HTTP."""
