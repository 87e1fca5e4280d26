"""Reading checkpoints of any format, writing and loading artifacts."""
