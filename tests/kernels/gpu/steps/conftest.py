"""Whole steps with the GPU's kernels, on a GPU or interpreted: elsewhere nothing is collected.

``tests/kernels/gpu/test_gpu_decoder.py`` starts them in a process of their own.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.device import INTERPRETED

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
