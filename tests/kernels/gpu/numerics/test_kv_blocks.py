"""fp8 made and read bit by bit against torch's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from engine.gpu.kernels.kv_blocks import KvBlocks, fp8_bits, fp8_value, round_half_even
from tests.kernels.gpu.device import DEVICE


@triton.jit  # type: ignore[untyped-decorator]
def fp8_kernel(numbers, bits, back, rounded, count: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, count)
    number = tl.load(numbers + at)
    made = fp8_bits(number)
    tl.store(bits + at, made)
    tl.store(back + at, fp8_value(made))
    tl.store(rounded + at, round_half_even(number))


def test_bits_are_those_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]
    middle = (every[1:] + every[:-1]) / 2
    near = torch.cat([every, middle, middle.nextafter(every[1:]), middle.nextafter(every[:-1])])
    numbers = torch.cat(
        [near, -near, torch.randn(1 << 16) * 2.0 ** torch.randint(-12, 8, (1 << 16,))]
    )
    numbers = numbers[numbers.abs() <= 448]
    count = 1 << 16
    numbers = numbers[:count].contiguous().to(DEVICE)
    bits = torch.empty(count, dtype=torch.uint8, device=DEVICE)
    back, rounded = torch.empty_like(numbers), torch.empty_like(numbers)
    fp8_kernel[(1,)](numbers, bits, back, rounded, count=count)
    expected = numbers.cpu().to(torch.float8_e4m3fn)
    assert torch.equal(bits.cpu(), expected.view(torch.uint8))
    assert torch.equal(back.cpu(), expected.float())
    assert torch.equal(rounded.cpu(), numbers.cpu().round())


def test_blocks_that_do_not_fit_are_refused() -> None:
    data = torch.zeros(2, 1, 2, 3, 4, 8)
    scales = torch.ones(2, 1, 2, 3, 4)
    assert KvBlocks(data.to(torch.int8), scales).quantized
    for wrong in (
        (data, scales),
        (data.to(torch.int8), None),
        (data.to(torch.int8), scales[1:]),
        (data.to(torch.int8), scales.double()),
        (data[0], None),
        (data.double(), None),
        (data.transpose(4, 5), None),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            KvBlocks(*wrong)
