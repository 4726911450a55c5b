"""Whole steps with the GPU's kernels, interpreted on the CPU by a process of its own."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.interpreted import run_interpreted

STEPS = "tests/kernels/gpu/steps"


@pytest.mark.timeout(320)
def test_steps_compute_what_torch_does() -> None:
    run_interpreted(STEPS, "not long", 300.0)


@pytest.mark.long
@pytest.mark.timeout(1900)
def test_steps_of_every_family_and_kind_of_weight() -> None:
    run_interpreted(STEPS, "long", 1800.0)
