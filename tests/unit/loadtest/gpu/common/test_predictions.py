"""What is predicted: every case has a number, and the numbers follow the work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.gpu.common.cases import DecodeAttention, Product, Step, kernel_cases, step_cases
from loadtest.gpu.common.predictions import A100, GPUS, H100, H200, Gpu, gpu_of, predict, table

ROOT = Path(__file__).resolve().parents[5]
CASES = (*kernel_cases(), *step_cases())


def test_every_case_has_a_name_of_its_own() -> None:
    assert max(Counter(case.name for case in CASES).values()) == 1


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_case_is_expected_below_its_floor(gpu: Gpu) -> None:
    for case in CASES:
        found = predict(case, gpu)
        assert 0.0 < found.floor_s < found.expected_s, case.name


def test_a_slower_device_is_expected_to_be_slower() -> None:
    for case in CASES:
        times = [predict(case, gpu).expected_s for gpu in (H200, H100, A100)]
        # Steps that wait for their host take the same on each.
        assert times == sorted(times), case.name


def test_more_work_takes_longer() -> None:
    attention = DecodeAttention(64, 4096)
    for more in (replace(attention, batch=128), replace(attention, context=8192)):
        assert predict(more, H200).expected_s > predict(attention, H200).expected_s
    linear = Product(64, 4096, 4096)
    assert predict(replace(linear, rows=8192), H200).expected_s > predict(linear, H200).expected_s


def test_one_long_sequence_costs_all_others() -> None:
    """The grid of decode attention follows the longest: the prediction says what that costs."""
    steps = {case.name: case for case in step_cases()}
    mixed, even = steps["decode 63 × 1k and 1 × 128k"], steps["decode 64 × 4k"]
    assert mixed.work().bytes < even.work().bytes
    assert predict(mixed, H200).expected_s > 1.5 * predict(even, H200).expected_s


def test_the_bytes_of_a_decode_step_are_weights_and_kv() -> None:
    step = Step("", "Llama 8B", ((999, 1),))
    work = step.work()
    kv = 1000 * 2 * 32 * 8 * 128 * 2
    assert work.kv_bytes == kv
    layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert work.weight_bytes == 2 * (layers + 128256 * 4096)


def test_devices_are_found_by_the_name_that_cuda_gives() -> None:
    assert gpu_of("NVIDIA H200") is H200
    assert gpu_of("NVIDIA H100 80GB HBM3") is H100
    assert gpu_of("NVIDIA A100-SXM4-80GB") is A100
    assert gpu_of("CPU, interpreted") is None


def test_the_committed_predictions_are_those_of_the_model() -> None:
    """They were written before any run: a change of the model shows as a change of the page."""
    page = (ROOT / "docs/explanation/gpu.md").read_text()
    assert table() in page, (
        "run python -m loadtest.gpu.common.predictions and put its table into the page"
    )
