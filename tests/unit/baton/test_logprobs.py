"""Packed log probabilities are what they would be as tuples."""

from __future__ import annotations

import pytest

from baton.errors import HandoffError
from baton.logprobs import PackedTop, TokenLogprobs
from baton.rpc.convert import PromptScores, logprobs_to_proto
from baton.v1 import worker_pb2

TOP = ((7, -0.5), (1 << 31, -1.25), (0, -1e30))


def test_packed_pairs_are_a_sequence_of_them() -> None:
    packed = PackedTop.of(TOP)
    assert len(packed) == 3
    assert tuple(packed)[:2] == TOP[:2]
    assert packed[2][1] == pytest.approx(-1e30)
    assert packed[1] == TOP[1]
    assert packed[:2] == TOP[:2]
    assert PackedTop.of(TOP[:2]) == TOP[:2]
    assert PackedTop.of(()) == ()
    assert len(packed.packed) == 3 * 8


def test_scores_of_a_prompt_are_read_when_they_are_looked_at() -> None:
    scores = [TokenLogprobs(-0.25, TOP[:2]), TokenLogprobs(-0.5)]
    message = worker_pb2.TokenOutput(prompt_logprobs=map(logprobs_to_proto, scores))
    found = PromptScores(message.prompt_logprobs)
    assert len(found) == 2
    assert list(found) == scores
    assert found[1] == scores[1]
    assert found[:1] == tuple(scores[:1])


def test_scores_without_their_tokens_are_refused() -> None:
    message = worker_pb2.TokenOutput()
    message.prompt_logprobs.add(logprob=-1.0, top_ids=[1])
    scores = PromptScores(message.prompt_logprobs)
    with pytest.raises(HandoffError, match="without their tokens"):
        list(scores)
