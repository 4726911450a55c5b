"""The kernels' numerics, on a GPU or interpreted: elsewhere nothing here is collected.

Whether triton interprets kernels is decided when it is imported, so that an ordinary run starts
these tests in a process of their own (``tests/kernels/gpu/test_interpreted.py``).
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.device import INTERPRETED

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
