"""The quantized weight: meaning, quantizing, cutting and joining rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.quantization.weight import (
    KINDS,
    QuantizedWeight,
    QuantKind,
    can_concat,
    concat_rows,
    dequantize,
    fitting_group,
    pack_nibbles,
    quantize,
    unpack_nibbles,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def relative_error(weight: QuantizedWeight, source: torch.Tensor) -> float:
    return float((dequantize(weight) - source.float()).norm() / source.float().norm())


def test_nibbles_go_low_first() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_a_value_is_code_times_scale_plus_min() -> None:
    weight = QuantizedWeight(
        codes=torch.tensor([[0x21, 0x43, 0x65, 0x87]], dtype=torch.uint8),
        kind="int4",
        scales=torch.tensor([[2.0, 10.0]]),
        mins=torch.tensor([[-1.0, 0.5]]),
        group=4,
    )
    assert weight.shape == (1, 8)
    assert dequantize(weight).tolist() == [[1, 3, 5, 7, 50.5, 60.5, 70.5, 80.5]]


def test_int8_codes_are_signed() -> None:
    codes = torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8).view(torch.uint8)
    weight = QuantizedWeight(codes, "int8", torch.tensor([[0.5]]), None, 4)
    assert dequantize(weight).tolist() == [[-64, -0.5, 0, 63.5]]


def test_columns_tell_where_stored_columns_belong() -> None:
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    columns = torch.tensor([2, 0, 3, 1])
    weight = QuantizedWeight(codes, "int8", torch.ones(1, 1), None, 4, columns)
    x = torch.tensor([[5.0, 7.0, 11.0, 13.0]])
    by_kernel = x[:, columns] @ torch.tensor([[1.0, 2, 3, 4]]).T
    assert torch.equal(x @ dequantize(weight).T, by_kernel)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("int4", 0.09), ("fp8", 0.04)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_loses_little(kind: QuantKind, bound: float, dtype: torch.dtype) -> None:
    source = random(40, 256).to(dtype)
    weight = quantize(source, kind)
    assert weight.shape == source.shape
    assert relative_error(weight, source) < bound


def test_int4_is_better_than_the_plain_range() -> None:
    source = random(64, 256)
    groups = source.view(64, -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    plain = ((groups - low) / scale).round() * scale + low
    plain_error = float((plain.view_as(source) - source).norm() / source.norm())
    assert relative_error(quantize(source, "int4"), source) < 0.97 * plain_error


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: QuantKind) -> None:
    source = random(4, 64)
    source[1] = 0
    found = dequantize(quantize(source, kind))
    assert torch.equal(found[1], torch.zeros(64))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_weights_beyond_fp16_are_quantized(kind: QuantKind, size: float) -> None:
    source = random(4, 64) * size
    weight = quantize(source, kind)
    assert weight.scales.dtype == torch.float32
    assert relative_error(weight, source) < 0.1


def test_a_dead_row_costs_the_others_no_fp32() -> None:
    source = random(64, 64)
    source[3] *= 1e-9
    assert quantize(source, "int8").scales.dtype == torch.float16
    assert quantize(source, "int4").scales.dtype == torch.float16


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_quantized_alone(kind: QuantKind) -> None:
    """Whatever pieces the tensor is cut into."""
    source = random(700, 2048)
    whole = quantize(source, kind)
    assert torch.equal(dequantize(quantize(source[600:603], kind)), dequantize(whole)[600:603])


def test_groups() -> None:
    assert [fitting_group(n) for n in (64, 48, 40, 4096)] == [32, 16, 40, 32]
    assert fitting_group(320, 128) == 64
    assert quantize(random(4, 48), "int8").group == 16
    assert quantize(random(4, 40), "int4").group == 40
    assert quantize(random(4, 256), "fp8").group == 256
    for kind, inputs, group in (("int8", 40, 32), ("fp8", 64, 32), ("int4", 5, 5)):
        with pytest.raises(ValueError, match="cannot have groups"):
            quantize(random(4, inputs), kind, group)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_split_and_joined(kind: QuantKind) -> None:
    source = random(12, 64)
    weight = quantize(source, kind)
    parts = [weight.rows(slice(*ends)) for ends in ((0, 6), (6, 8), (8, 12))]
    assert [part.shape for part in parts] == [(6, 64), (2, 64), (4, 64)]
    assert can_concat(parts)
    assert torch.equal(dequantize(concat_rows(parts)), dequantize(weight))


def test_joined_rows_may_differ_in_scales_and_mins() -> None:
    first = quantize(random(2, 64), "int8")
    assert first.mins is None
    other = replace(
        first, scales=first.scales.float() * 1.001, mins=torch.full_like(first.scales.float(), 3)
    )
    both = concat_rows([first, other])
    assert both.scales.dtype == torch.float32
    assert torch.equal(dequantize(both), torch.cat([dequantize(first), dequantize(other)]))


def test_unlike_rows_are_not_joined() -> None:
    first = quantize(random(2, 64), "int8")
    order = replace(first, columns=torch.arange(63, -1, -1))
    for other in (
        quantize(random(2, 64), "int4"),
        quantize(random(2, 64), "int8", 16),
        quantize(random(2, 32), "int8"),
        order,
    ):
        assert not can_concat([first, other])
        with pytest.raises(ValueError, match="different weights"):
            concat_rows([first, other])
    assert concat_rows([order, order]).shape == (4, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asymmetric", [False, True])
def test_rows_with_one_scale_are_cut_anywhere(kind: QuantKind, asymmetric: bool) -> None:
    """A part of a row keeps the row's scale and minimum."""
    weight = quantize(random(6, 40), kind, 40)
    if asymmetric:
        weight = replace(weight, mins=torch.full_like(weight.scales, 0.25))
    parts = [weight.inputs(run) for run in (range(14), range(14, 24), range(24, 40))]
    assert [(part.shape, part.group) for part in parts] == [
        ((6, 14), 14),
        ((6, 10), 10),
        ((6, 16), 16),
    ]
    whole = torch.cat([dequantize(part) for part in parts], dim=1)
    assert torch.equal(whole, dequantize(weight))


def test_groups_and_bytes_are_not_cut() -> None:
    with pytest.raises(ValueError, match="16 to 64 are not whole groups of 32"):
        quantize(random(4, 64), "int8", 32).inputs(range(16, 64))
    assert quantize(random(4, 64), "int8", 32).inputs(range(32, 64)).group == 32
    for group in (6, 3):
        with pytest.raises(ValueError, match="0 to 3 cut a byte of two int4 codes"):
            quantize(random(4, 6), "int4", group).inputs(range(3))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up(kind: QuantKind) -> None:
    weight = quantize(random(20, 64), kind)
    ids = torch.tensor([7, 7, 0])
    assert torch.equal(dequantize(weight.rows(ids)), dequantize(weight)[ids])


def test_parts_that_do_not_fit() -> None:
    good = quantize(random(4, 64), "int8")
    for changes in (
        {"group": 48},
        {"kind": "int3"},
        {"scales": good.scales[:, :1]},
        {"scales": good.scales.double()},
        {"mins": good.scales.float()},
        {"codes": good.codes.view(torch.int8)},
        {"columns": torch.arange(63)},
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - each has its own message
            replace(good, **changes)


def test_its_size_and_place() -> None:
    weight = quantize(random(4, 64), "int4")
    assert weight.nbytes == 4 * 32 + 2 * (4 * 2 * 2)
    assert weight.device == torch.device("cpu")
    assert torch.equal(dequantize(weight.to(torch.device("cpu"))), dequantize(weight))
