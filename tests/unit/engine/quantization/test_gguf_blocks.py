"""GGUF blocks against the gguf package's own dequantization."""

from __future__ import annotations

import pytest
import torch

from engine.quantization.gguf_blocks import BLOCK_FORMATS, read_blocks
from engine.quantization.weight import dequantize

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ROWS, BLOCKS = 9, 3
FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's fp16 numbers lie; elsewhere in front alone."""


def random_blocks(name: str) -> torch.Tensor:
    """A uint8 tensor [ROWS, BLOCKS * size]: random bits, except for the scales, which are small."""
    layout = BLOCK_FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (ROWS, BLOCKS, layout.size), generator=generator)
    raw = raw.to(torch.uint8)
    for start in FLOATS.get(name, (0,)):
        scales = torch.randn(ROWS, BLOCKS, 1, generator=generator).mul(0.01).half()
        raw[:, :, start : start + 2] = scales.view(torch.uint8)
    return raw.view(ROWS, -1)


def by_gguf(raw: torch.Tensor, name: str) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(quants.dequantize(raw.numpy(), kind).copy())


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_as_gguf_dequantizes(name: str) -> None:
    raw = random_blocks(name)
    layout = BLOCK_FORMATS[name]
    weight = read_blocks(raw, name)
    assert weight.shape == (ROWS, BLOCKS * layout.values)
    assert (weight.kind, weight.group) == (layout.kind, layout.group)
    assert weight.scales.dtype == torch.float16
    found, expected = dequantize(weight), by_gguf(raw, name)
    if name in EXACT:
        assert torch.equal(found, expected)
        return
    # Each of scale and minimum is rounded to 11 bits.
    reach = weight.scales.float().abs() * 32
    if weight.mins is not None:
        reach += weight.mins.float().abs()
    bound = reach.repeat_interleave(weight.group, dim=1) * 2.0**-11 + 1e-7
    assert ((found - expected).abs() <= bound).all()


@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS.keys() - set(EXACT)))
def test_codes_are_the_files_own(name: str) -> None:
    """With scales of powers of two nothing is rounded at all."""
    raw = random_blocks(name).view(ROWS, BLOCKS, -1)
    two = torch.tensor([2.0**-6], dtype=torch.float16).view(torch.uint8)
    for start in FLOATS[name]:
        raw[:, :, start : start + 2] = two
    raw = raw.view(ROWS, -1)
    assert torch.equal(dequantize(read_blocks(raw, name)), by_gguf(raw, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_scales_beyond_fp16_stay_exact(name: str) -> None:
    raw = random_blocks(name).view(ROWS, BLOCKS, -1)
    large = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    for start in FLOATS.get(name, (0,)):
        raw[:, :, start : start + 2] = large
    raw = raw.view(ROWS, -1)
    assert torch.equal(dequantize(read_blocks(raw, name)), by_gguf(raw, name))


def test_rows_are_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_K")
    whole = dequantize(read_blocks(raw, "Q4_K"))
    monkeypatch.setattr("engine.quantization.gguf_blocks._PIECE_VALUES", 2 * 768)
    assert torch.equal(dequantize(read_blocks(raw, "Q4_K")), whole)


def test_rows_that_are_no_blocks() -> None:
    with pytest.raises(ValueError, match="not whole blocks of 34"):
        read_blocks(torch.zeros(2, 35, dtype=torch.uint8), "Q8_0")
    with pytest.raises(KeyError):
        read_blocks(torch.zeros(2, 36, dtype=torch.uint8), "Q9_0")
