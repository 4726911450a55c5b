"""Memory in which a process group's messages wait, between the blocks and the wire."""

from __future__ import annotations

from typing import Protocol

import torch


class StagingBuffer(Protocol):
    """Bytes that the host writes or reads, and a process group sends or receives."""

    @property
    def view(self) -> memoryview:
        """Of the host's bytes."""

    def tensor(self, length: int) -> torch.Tensor:
        """The first ``length`` bytes as the process group takes them, uint8 [length]."""

    def upload(self, length: int) -> None:
        """Bring what the host has written to where ``tensor`` is."""

    def download(self, length: int) -> None:
        """Bring what was received to where the host reads it."""


class HostBuffer:
    """In the host's memory. The kernel gives pages only to what was used."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` in bytes."""
        self._bytes = torch.empty(capacity, dtype=torch.uint8)
        self.view = self._bytes.numpy().data

    def tensor(self, length: int) -> torch.Tensor:
        """See ``StagingBuffer``."""
        return self._bytes[:length]

    def upload(self, length: int) -> None:
        """See ``StagingBuffer``: it is there."""

    def download(self, length: int) -> None:
        """See ``StagingBuffer``: it is there."""


class DeviceBuffer:
    """On a GPU, with a pinned twin in the host's memory."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """``capacity`` in bytes, of each of the two."""
        self._host = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(capacity, dtype=torch.uint8, device=device)
        # Of its own: the default stream would wait for the engine's kernels.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.view = self._host.numpy().data

    def tensor(self, length: int) -> torch.Tensor:
        """See ``StagingBuffer``."""
        return self._device[:length]

    def upload(self, length: int) -> None:
        """See ``StagingBuffer``."""
        self._copy(self._device[:length], self._host[:length])

    def download(self, length: int) -> None:
        """See ``StagingBuffer``."""
        self._copy(self._host[:length], self._device[:length])

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()
