"""Sizes of captured steps, and when they are captured."""

from __future__ import annotations

import pytest

from engine.gpu.graphs import Bucket, DecodeGraphs, Work, batch_sizes, length_sizes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 4)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)),
    ],
)
def test_sizes_of_batches(most: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(most) == sizes


@pytest.mark.parametrize(
    ("context", "sizes"),
    [(256, (256,)), (1024, (1024,)), (5000, (1024, 2048, 4096, 5000))],
)
def test_sizes_of_sequences(context: int, sizes: tuple[int, ...]) -> None:
    assert length_sizes(context) == sizes


class Computed:
    """Notes what was captured and replayed, in order."""

    def __init__(self) -> None:
        self.computed: list[Bucket] = []
        self.captures = 0
        self.graphs = DecodeGraphs(self.computed.append, self._capture, 20, 5000)

    def _capture(self, work: Work) -> Work:
        self.captures += 1
        return work


def test_a_step_takes_the_next_size_of_both() -> None:
    graphs = Computed().graphs
    assert graphs.bucket(1, 1) == Bucket(1, 1024)
    assert graphs.bucket(3, 1024) == Bucket(4, 1024)
    assert graphs.bucket(17, 1025) == Bucket(24, 2048)
    assert graphs.bucket(24, 5000) == graphs.largest == Bucket(24, 5000)
    assert graphs.bucket(25, 1) is None
    assert graphs.bucket(1, 5001) is None


def test_each_size_is_captured_once() -> None:
    computed = Computed()
    for bucket in (Bucket(1, 1024), Bucket(4, 1024), Bucket(1, 1024)):
        computed.graphs.run(bucket)
    assert computed.captures == 2
    assert computed.computed == [Bucket(1, 1024), Bucket(4, 1024), Bucket(1, 1024)]


def test_what_is_captured_in_advance() -> None:
    """The largest first: others share its memory."""
    sizes = list(Computed().graphs.warm_sizes())
    assert sizes[:2] == [Bucket(24, 5000), Bucket(24, 4096)]
    assert sizes[-1] == Bucket(1, 1024)
    assert len(sizes) == len(set(sizes)) == 1 + 6 * 3
    for context, lengths in ((9000, (9000, 4096, 2048, 1024)), (3000, (3000, 2048, 1024))):
        graphs = DecodeGraphs(lambda _: None, lambda work: work, 1, context)
        assert list(graphs.warm_sizes()) == [Bucket(1, n) for n in lengths]
