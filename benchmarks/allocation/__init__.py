"""Compares ways to allocate an expert budget, on one model and at equal bytes: ``python -m benchmarks.allocation``."""

import os

# hundreds of runs of the toolkit with ten progress bars each would bury the rows; read when tqdm is imported
os.environ.setdefault("TQDM_DISABLE", "1")
