"""Speed and memory of ragged checkpoints in vLLM beside stock ones: ``python -m benchmarks.serving``."""
