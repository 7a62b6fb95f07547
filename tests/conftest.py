import os

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _one_thread():
    # the tensors are tiny, and sums must not depend on how many threads share them
    torch.set_num_threads(1)
