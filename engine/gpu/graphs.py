"""Decode steps captured as CUDA graphs: one replay instead of hundreds of launches.

A step is padded to the next captured batch size and the next captured sequence length. Padding rows
have no slot and no length, so they write to no block and read none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Captures work as a CUDA graph: runs the work once, and returns a function that runs it again."""

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_BATCH_STEP = 32
"""Difference between one captured batch size and the next, for sizes of 64 and more."""
_SHORTEST = 1024
"""Smallest captured sequence length, in tokens. Longer captured lengths are powers of two, so that
the attention kernel's grid is at most twice the needed size."""
_WARM_LENGTH = 4096
"""Maximum sequence length, in tokens, of the graphs that are captured before requests arrive."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Size of a captured step: its number of rows, and the maximum number of tokens to which a row
    attends."""

    rows: int
    longest: int


def batch_sizes(most: int) -> tuple[int, ...]:
    """List the batch sizes to capture, up to the first that holds ``most`` rows."""
    sizes = list(_BATCHES)
    while sizes[-1] < most:
        sizes.append(sizes[-1] + _BATCH_STEP)
    return tuple(sizes[: bisect_left(sizes, most) + 1])


def length_sizes(context: int) -> tuple[int, ...]:
    """List the sequence lengths to capture, in tokens; the last one is the full context."""
    sizes = []
    size = _SHORTEST
    while size < context:
        sizes.append(size)
        size *= 2
    return (*sizes, context)


class DecodeGraphs:
    """Captured decode steps by size; each size is captured when it is first needed."""

    def __init__(
        self, compute: Callable[[Bucket], None], capture: Capture, max_rows: int, context: int
    ) -> None:
        """``compute`` runs a step of a given size on persistent tensors. Each captured graph
        contains one call of it."""
        self._compute = compute
        self._capture = capture
        self._batches = batch_sizes(max_rows)
        self._lengths = length_sizes(context)
        self._replays: dict[Bucket, Work] = {}

    @property
    def largest(self) -> Bucket:
        return Bucket(self._batches[-1], self._lengths[-1])

    def bucket(self, rows: int, longest: int) -> Bucket | None:
        """Choose the smallest captured size that holds a step; None if the step is too large."""
        batch = bisect_left(self._batches, rows)
        length = bisect_left(self._lengths, longest)
        if batch == len(self._batches) or length == len(self._lengths):
            return None
        return Bucket(self._batches[batch], self._lengths[length])

    def run(self, bucket: Bucket) -> None:
        """Run the captured step of this size; capture it first if needed."""
        replay = self._replays.get(bucket)
        if replay is None:
            replay = self._replays[bucket] = self._capture(lambda: self._compute(bucket))
        replay()

    def warm_sizes(self) -> Iterator[Bucket]:
        """Iterate over the sizes that are captured before requests arrive.

        The largest of all sizes comes first. All other captures reuse the memory of the largest
        one, so they need no additional memory.
        """
        lengths = [size for size in self._lengths if size <= _WARM_LENGTH] or self._lengths[:1]
        if self.largest.longest not in lengths:
            yield self.largest
        for length in reversed(lengths):
            for batch in reversed(self._batches):
                yield Bucket(batch, length)


class CudaCapture:
    """Captures work as CUDA graphs. All of them share one pool of memory."""

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
