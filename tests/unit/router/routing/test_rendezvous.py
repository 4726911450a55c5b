"""Rendezvous hashing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.rendezvous import hash_of, scores


def chosen(workers: list[str], session: str) -> str:
    hashes = np.array([hash_of(name) for name in workers], dtype=np.uint64)
    return workers[int(scores(hashes, hash_of(session)).argmax())]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=2, max_size=12, unique=True),
    st.text(max_size=10),
    st.data(),
)
def test_who_leaves_moves_only_its_own(
    workers: list[str], session: str, data: st.DataObject
) -> None:
    before = chosen(workers, session)
    assert chosen(workers[::-1], session) == before
    gone = data.draw(st.sampled_from(workers))
    after = chosen([name for name in workers if name != gone], session)
    assert before in {after, gone}


def test_sessions_are_spread() -> None:
    workers = [f"prefill-{n}" for n in range(8)]
    counts = dict.fromkeys(workers, 0)
    for session in range(4000):
        counts[chosen(workers, f"session {session}")] += 1
    assert max(counts.values()) < 1.25 * 500
    assert min(counts.values()) > 0.75 * 500
