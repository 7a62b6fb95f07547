"""Measures speed and memory of ragged and stock checkpoints in vLLM: ``python -m benchmarks.serving``."""
