"""A mixture of experts against its definition, token by token."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.model_config import ExpertsConfig
from engine.model.layers import Experts, GatedMlp, Linear, gated_mlp, mix_experts, route

HIDDEN, INNER = 12, 10


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_experts(count: int) -> Experts:
    torch.manual_seed(count)

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(torch.randn(outputs, inputs) / inputs**0.5)

    mlps = [
        GatedMlp(linear(INNER, HIDDEN), linear(INNER, HIDDEN), linear(HIDDEN, INNER))
        for _ in range(count)
    ]
    return Experts(linear(count, HIDDEN), tuple(mlps))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_each_token_gets_the_weighted_sum_of_its_experts(
    tokens: int, count: int, per_token: int, normalized: bool
) -> None:
    per_token = min(per_token, count)
    config = ExpertsConfig(count, per_token, INNER, normalized, frozenset({0}))
    experts = make_experts(count)
    x = torch.randn(tokens, HIDDEN)
    found = mix_experts(experts, x, config, "silu")
    for token in range(tokens):
        row = x[token : token + 1]
        shares = experts.router.to_float(row)[0].softmax(dim=-1)
        best = shares.argsort(descending=True)[:per_token].tolist()
        total = float(shares[best].sum()) if normalized else 1.0
        expected = sum(
            shares[n] / total * gated_mlp(experts.experts[n], row, "silu")[0] for n in best
        )
        torch.testing.assert_close(found[token], expected, atol=1e-5, rtol=1e-5)


def test_all_tokens_may_choose_the_same_experts() -> None:
    config = ExpertsConfig(6, 2, INNER, True, frozenset({0}))
    experts = make_experts(6)
    x = torch.randn(1, HIDDEN).expand(7, HIDDEN)
    _, chosen = route(experts.router, x, config)
    assert len(set(chosen.flatten().tolist())) == 2
    found = mix_experts(experts, x, config, "silu")
    torch.testing.assert_close(found, found[:1].expand(7, HIDDEN))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gated_mlp(activation: Literal["silu", "gelu_tanh"]) -> None:
    mlp, x = make_experts(1).experts[0], torch.randn(3, HIDDEN)
    gate = mlp.gate(x)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(gated_mlp(mlp, x, activation), mlp.down(act * mlp.up(x)))
