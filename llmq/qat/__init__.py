"""Quantization-aware training: everything of it that is not one framework's."""
