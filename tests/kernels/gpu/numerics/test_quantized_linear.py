"""Quantized linear layers against the definition of their weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.gpu.kernels.linear.quantized import (
    GpuWeight,
    Kind,
    dequantized,
    gpu_weight,
    quantized_linear,
    quantized_linear_launches,
    quantized_linear_reference,
)
from tests.kernels.gpu.device import DEVICE, INTERPRETED

KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")


def random_weight(
    kind: Kind, outputs: int, inputs: int, group: int, mins: bool
) -> tuple[GpuWeight, torch.Tensor]:
    """A weight, and what it means, made from the canonical form."""
    codes = torch.randint(0, 256, (outputs, inputs // 2 if kind == "int4" else inputs))
    codes = codes.to(torch.uint8)
    if kind == "fp8":
        codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(outputs, inputs // group) * 0.01
    lows = torch.randn(outputs, inputs // group) * 0.1 if mins else None
    if kind == "int4":
        numbers = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).float()
    else:
        numbers = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()
    values = numbers * scales.repeat_interleave(group, dim=1)
    if lows is not None:
        values += lows.repeat_interleave(group, dim=1)
    return gpu_weight(kind, codes, scales, lows), values


def on_device(weight: GpuWeight) -> GpuWeight:
    mins = None if weight.mins is None else weight.mins.to(DEVICE)
    return GpuWeight(
        weight.kind,
        weight.codes.to(DEVICE),
        weight.scales.to(DEVICE),
        mins,
        weight.inputs,
        weight.group,
        weight.unit,
    )


GROUPS = ((16, True), (32, False), (32, True), (64, False), (96, True), (128, False), (640, True))
"""Sizes of groups, and whether they have minima."""


@pytest.mark.parametrize(
    ("kind", "group", "mins"),
    [
        # Each group with one kind, the one of every size of batch with all.
        pytest.param(
            kind,
            *group,
            marks=() if 64 in group or n % len(KINDS) == k else pytest.mark.long,
        )
        for k, kind in enumerate(KINDS)
        for n, group in enumerate(GROUPS)
    ],
)
def test_equals_the_definition(kind: Kind, group: int, mins: bool) -> None:
    inputs = 576 if group == 96 else 640
    weight, values = random_weight(kind, 70, inputs, group, mins)
    torch.testing.assert_close(dequantized(weight), values, atol=1e-6, rtol=1e-6)
    some = [(1, torch.bfloat16), (17, torch.float16), (33, torch.float32)]
    # The interpreter takes its time: every size for one group, one for the others.
    for rows, dtype in some if group == 64 else some[group % 3 :][:1]:
        x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(70)
        found = quantized_linear(
            x.to(DEVICE), on_device(weight), bias.to(DEVICE), torch.float32
        ).cpu()
        expected = x.float() @ values.t() + bias
        torch.testing.assert_close(
            found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5
        )
        torch.testing.assert_close(quantized_linear_reference(x, weight, bias), expected)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    weight, _ = random_weight("int4", 70, 256, 64, True)
    weight = on_device(weight)
    x = torch.randn(64, 256).half().to(DEVICE)
    whole = quantized_linear(x, weight, tile_rows=64)
    for first, end in itertools.combinations((0, 1, 17, 64), 2):
        part = quantized_linear(x[first:end], weight, tile_rows=64)
        assert torch.equal(part, whole[first:end])


def test_splits_depend_on_the_weight_alone() -> None:
    weight, _ = random_weight("int8", 64, 2048, 32, False)
    grids = set()
    for rows in (1, 16, 17, 64):
        x = torch.zeros(rows, 2048)
        out = torch.empty(rows, 64)
        first, second = quantized_linear_launches(out, x, weight, None, None, 90)
        grids.add((first.grid[1], first.constants["split_units"], second.constants["splits"]))
    assert len(grids) == 1
    assert grids.pop()[0] > 1


def test_fp8_that_the_gpu_converts() -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not")
    weight, _ = random_weight("fp8", 64, 256, 128, False)
    weight = on_device(weight)
    x = torch.randn(3, 256).to(DEVICE)
    outs = []
    for capability in (80, 90):
        out = torch.empty(3, 64, device=DEVICE)
        for launch in quantized_linear_launches(out, x, weight, None, None, capability):
            launch.run()
        outs.append(out)
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    weight, _ = random_weight("int8", 64, 256, 32, False)
    weight = on_device(weight)
    x = torch.zeros(65, 256, device=DEVICE)
    bias = torch.zeros(64, device=DEVICE)
    for rows, added, tile in (
        (x, None, None),
        (x[:17], None, 16),
        (x[:1, 1:], None, None),
        (x[:1], bias[1:], None),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            quantized_linear(rows, weight, added, tile_rows=tile)
    codes = torch.zeros(4, 96, dtype=torch.uint8)
    for wrong, scales in (
        (codes, torch.ones(4, 2)[:, :0]),
        (codes, torch.ones(4, 4)),
        (codes, torch.ones(3, 1)),
        (codes.int(), torch.ones(4, 1)),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            gpu_weight("int8", wrong, scales, None)
