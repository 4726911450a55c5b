"""The cuda_ipc transport with the kernel of GPUs, interpreted by a process of its own."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.interpreted import run_interpreted


@pytest.mark.timeout(120)
def test_the_kernel_reads_a_writers_blocks_by_their_address() -> None:
    run_interpreted(
        "tests/unit/kvtransfer/transports/test_cuda_ipc_transport.py", "not long", 100.0
    )
