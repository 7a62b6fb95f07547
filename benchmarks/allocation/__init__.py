"""Compares methods that allocate channels to experts, on one model at equal bytes.

Run it with ``python -m benchmarks.allocation``.
"""

import os

# hundreds of runs with ten progress bars each would hide the printed rows; tqdm reads this when it is imported
os.environ.setdefault("TQDM_DISABLE", "1")
