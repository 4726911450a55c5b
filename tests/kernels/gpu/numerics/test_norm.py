"""The fused norm and the gated activations against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.gpu.kernels.activation import Gating, gated, gated_reference
from engine.gpu.kernels.norm import add_norm, add_norm_reference
from tests.kernels.gpu.device import BFLOAT16, DEVICE

NEAR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: BFLOAT16}


@pytest.mark.parametrize("hidden", [1, 576, 2049])
@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize(("added", "normed"), [(False, False), (True, False), (True, True)])
def test_norm_equals_plain_torch(
    hidden: int, dtype: torch.dtype, added: bool, normed: bool
) -> None:
    residual = torch.randn(3, hidden) * 10
    more = (torch.randn(3, 2 * hidden).to(dtype) * 3)[:, hidden:] if added else None
    weight, first = torch.randn(hidden), torch.randn(hidden) if normed else None
    total, expected = add_norm_reference(residual, more, weight, 1e-5, dtype, first)
    kept = residual.to(DEVICE, copy=True)
    found = add_norm(
        kept,
        None if more is None else more.to(DEVICE),
        weight.to(DEVICE),
        1e-5,
        dtype,
        None if first is None else first.to(DEVICE),
    )
    assert found.dtype == dtype
    torch.testing.assert_close(kept.cpu(), total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.cpu(), expected, atol=NEAR[dtype], rtol=NEAR[dtype])


def test_the_reference_is_rms_norm() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    _, found = add_norm_reference(x, None, weight, 1e-5, torch.float32)
    torch.testing.assert_close(found, F.rms_norm(x, (64,), weight, 1e-5))


def test_norms_that_do_not_fit_are_refused() -> None:
    x, weight = torch.zeros(2, 64, device=DEVICE), torch.zeros(64, device=DEVICE)
    for residual, added, factor in (
        (x.half(), None, weight),
        (x, x[:, 1:], weight),
        (x, None, weight[1:]),
        (x, None, weight.half()),
        (x[:, ::2], None, weight[:32]),
        (torch.zeros(1, 1 << 17, device=DEVICE), None, weight),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            add_norm(residual, added, factor, 1e-5, torch.float32)


@pytest.mark.parametrize("gating", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("inner", [1, 1024, 1500])
def test_gates_equal_plain_torch(gating: Gating, dtype: torch.dtype, inner: int) -> None:
    both = (torch.randn(3, 2 * inner) * 5).to(dtype)
    both[0, 0], both[1, 0], both[2, 0] = 300.0, -300.0, 0.0
    gate, up = both.to(DEVICE).chunk(2, dim=1)
    found = gated(gate, up, gating).cpu()
    assert found.dtype == dtype
    expected = gated_reference(both[:, :inner], both[:, inner:], gating)
    torch.testing.assert_close(found, expected, atol=NEAR[dtype], rtol=NEAR[dtype])


def test_gates_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 8, device=DEVICE)
    for gate, up in ((x, x[:, 1:]), (x, x.half()), (x[:, ::2], x[:, ::2]), (x[0], x[0])):
        with pytest.raises(ValueError, match=r"\w"):
            gated(gate, up, "silu")
