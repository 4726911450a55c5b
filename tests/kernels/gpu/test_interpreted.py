"""The numerics of the GPU kernels, interpreted on the CPU by a process of its own."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.interpreted import run_interpreted

NUMERICS = "tests/kernels/gpu/numerics"


@pytest.mark.timeout(420)
def test_interpreted_kernels_compute_what_their_references_do() -> None:
    run_interpreted(NUMERICS, "not long", 400.0)


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_interpreted_kernels_in_many_more_shapes() -> None:
    run_interpreted(NUMERICS, "long", 1200.0)
