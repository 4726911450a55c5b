"""Decode steps captured as CUDA graphs: one replay instead of some hundred launches.

A step is padded to the next size of its batch and of its longest sequence. Padding rows have no
slot and no length, so they write to no block and read none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Runs some work once, and returns a function that runs it again."""

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_BATCH_STEP = 32
"""Difference between batch sizes from 64 on."""
_SHORTEST = 1024
"""Smallest length in tokens. Longer ones are powers of two: the grid of attention is at most twice
what it needs."""
_WARM_LENGTH = 4096
"""Maximum length, in tokens, up to which graphs are captured in advance."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a captured step: its rows, and the tokens that the longest may attend to."""

    rows: int
    longest: int


def batch_sizes(most: int) -> tuple[int, ...]:
    """The batch sizes, up to the first that holds ``most`` rows."""
    sizes = list(_BATCHES)
    while sizes[-1] < most:
        sizes.append(sizes[-1] + _BATCH_STEP)
    return tuple(sizes[: bisect_left(sizes, most) + 1])


def length_sizes(context: int) -> tuple[int, ...]:
    """The sequence lengths; the last one is the context."""
    sizes = []
    size = _SHORTEST
    while size < context:
        sizes.append(size)
        size *= 2
    return (*sizes, context)


class DecodeGraphs:
    """Captured steps by their size; each is captured when it is first needed."""

    def __init__(
        self, compute: Callable[[Bucket], None], capture: Capture, max_rows: int, context: int
    ) -> None:
        """``compute`` runs a step of a size on persistent tensors."""
        self._compute = compute
        self._capture = capture
        self._batches = batch_sizes(max_rows)
        self._lengths = length_sizes(context)
        self._replays: dict[Bucket, Work] = {}

    @property
    def largest(self) -> Bucket:
        return Bucket(self._batches[-1], self._lengths[-1])

    def bucket(self, rows: int, longest: int) -> Bucket | None:
        """The size for a step; None if it is too large."""
        batch = bisect_left(self._batches, rows)
        length = bisect_left(self._lengths, longest)
        if batch == len(self._batches) or length == len(self._lengths):
            return None
        return Bucket(self._batches[batch], self._lengths[length])

    def run(self, bucket: Bucket) -> None:
        """Compute a step of this size."""
        replay = self._replays.get(bucket)
        if replay is None:
            replay = self._replays[bucket] = self._capture(lambda: self._compute(bucket))
        replay()

    def warm_sizes(self) -> Iterator[Bucket]:
        """The sizes that are captured in advance.

        The largest of all comes first. The others share its memory, so captures while requests are
        served take no more memory.
        """
        lengths = [size for size in self._lengths if size <= _WARM_LENGTH] or self._lengths[:1]
        if self.largest.longest not in lengths:
            yield self.largest
        for length in reversed(lengths):
            for batch in reversed(self._batches):
                yield Bucket(batch, length)


class CudaCapture:
    """Captures work on a GPU; all captures share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: memory freed on a stream is only reused on that stream.
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                # Runs once for compilers and libraries, whose first use cannot be captured.
                work()
            current.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as transfers, may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay
