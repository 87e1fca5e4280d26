"""Calibrated quantization: codes chosen for the inputs that weights will see, bits where they matter."""
