"""Experts' layers against plain torch, and against each token computed by itself."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.kernels.linear.grouped import (
    Routing,
    add_choices,
    grouped_linear,
    grouped_linear_reference,
    route,
    route_held,
)
from tests.kernels.gpu.device import DEVICE


def on_device(routing: Routing) -> Routing:
    return Routing(routing.order.to(DEVICE), routing.offsets.to(DEVICE), routing.choices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("experts", "choices", "tokens", "hidden", "inner"),
    [(4, 2, 7, 48, 70), (8, 2, 1, 64, 64), (3, 3, 50, 32, 16), (7, 1, 120, 32, 70)],
)
def test_equals_plain_torch(
    experts: int, choices: int, tokens: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)])
    routing = route(ids, experts)
    x = torch.randn(tokens, hidden).to(dtype)
    first = torch.randn(experts, inner, hidden).to(dtype)
    second = torch.randn(experts, hidden, inner).to(dtype)
    there = on_device(routing)
    found = grouped_linear(
        x.to(DEVICE), first.to(DEVICE), there, gathers=True, dtype=torch.float32
    ).cpu()
    expected = grouped_linear_reference(x, first, routing, gathers=True)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    between = expected.to(dtype)
    found = grouped_linear(
        between.to(DEVICE), second.to(DEVICE), there, gathers=False, dtype=torch.float32
    ).cpu()
    expected = grouped_linear_reference(between, second, routing, gathers=False)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-3)
    factors = torch.rand(tokens, choices)
    total = add_choices(expected, routing, factors)
    for token in (0, tokens - 1):
        alone = sum(
            factors[token, other]
            * (
                (x[token].float() @ first[ids[token, other]].float().t()).to(dtype).float()
                @ second[ids[token, other]].float().t()
            )
            for other in range(choices)
        )
        assert isinstance(alone, torch.Tensor)
        # In 16 bits what lies between may round the other way.
        atol = 1e-3 if dtype is torch.float32 else 0.3
        torch.testing.assert_close(total[token], alone, atol=atol, rtol=1e-3)


def test_one_expert_may_have_everything() -> None:
    ids = torch.full((70, 1), 2)
    routing = route(ids, 5)
    assert routing.offsets.tolist() == [0, 0, 0, 70, 70, 70]
    x, weights = torch.randn(70, 64), torch.randn(5, 32, 64)
    found = grouped_linear(x.to(DEVICE), weights.to(DEVICE), on_device(routing), gathers=True)
    torch.testing.assert_close(found.cpu(), x @ weights[2].t(), atol=1e-3, rtol=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    routing = on_device(route(torch.tensor([[0, 1], [1, 2]]), 3))
    x, weights = torch.zeros(2, 32, device=DEVICE), torch.zeros(3, 16, 32, device=DEVICE)
    for rows, experts, gathers in (
        (x, weights, False),
        (x[:1], weights, True),
        (x, weights[1:], True),
        (x, weights.half(), True),
        (x[:, ::2], weights[:, :, ::2], True),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            grouped_linear(rows, experts, routing, gathers=gathers)


def test_ranks_that_hold_some_experts_each_make_up_all_of_them() -> None:
    tokens, experts, hidden, inner = 23, 7, 32, 48
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(tokens)])
    x = torch.randn(tokens, hidden)
    first, second = torch.randn(experts, inner, hidden), torch.randn(experts, hidden, inner)
    factors = torch.rand(tokens, 3)

    def mixed(routing: Routing, held: range) -> torch.Tensor:
        there = on_device(routing)
        own_first = first[held.start : held.stop].to(DEVICE)
        own_second = second[held.start : held.stop].to(DEVICE)
        between = grouped_linear(x.to(DEVICE), own_first, there, gathers=True)
        rows = grouped_linear(between, own_second, there, gathers=False)
        # What the kernels have not written may be anything.
        rows[int(there.offsets[-1]) :] = torch.nan
        return add_choices(rows, there, factors.to(DEVICE)).cpu()

    whole = mixed(route(ids, experts), range(experts))
    parts = [mixed(route_held(ids, held), held) for held in (range(3), range(3, 4), range(4, 7))]
    torch.testing.assert_close(sum(parts), whole, atol=1e-3, rtol=1e-3)
