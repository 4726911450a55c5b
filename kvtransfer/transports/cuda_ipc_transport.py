"""The cuda_ipc transport: two processes of one host, on one GPU, or on two if it is forced.

A writer lets others open its blocks. The receiver maps them for its own GPU, where one kernel
copies them into its blocks and computes the checksums. A writer has no path to a receiver's blocks.
The writer keeps what is read unchanged until the batch has arrived; the checksums detect a change.

It has not run on a GPU yet.
"""

from __future__ import annotations

import base64
import json
import os
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from weakref import WeakSet

from baton.errors import ConfigError, HandoffError
from kvtransfer.memory.memory import BlockMemory, check_part
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.in_place import ReadReceiveLink, ReadSendLink, host_of, read_offer
from kvtransfer.transports.transport import AnnouncedBatch, Peer

_HANDLE_BYTES = 64
_ADDRESSES = 1 << 57
"""Upper bound for sizes that a peer reports, in bytes: as much as a GPU can address."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A writer's offer: its host, and how the receiver can open its blocks."""

    boot_id: str
    pid_namespace: str
    pid: int
    device: str
    """UUID of the GPU that holds the writer's blocks."""
    handle: str
    """CUDA's handle of the writer's allocation, in base64."""
    offset: int
    blocks: int
    block_bytes: int


class CudaIpcTransport:
    """Implements ``kvtransfer.transports.transport.Transport``."""

    name = "cuda_ipc"
    part_bytes = 64 << 20
    batch_bytes = 64 << 20
    copies_out = False
    reads_in_place = True
    encrypts = False
    staging_bytes = 0

    def __init__(self, executor: Executor, *, between_gpus: bool = False) -> None:
        """``executor`` runs the copies; each of its threads copies one batch at a time.

        ``between_gpus``: true if a receiver may open blocks on a GPU other than its own.
        """
        self._executor = executor
        self._between_gpus = between_gpus
        self._memory: BlockMemory | None = None
        self._device = 0
        self._uuid = ""
        self._offer = b""
        self._links: WeakSet[ReadSendLink | CudaIpcReceiveLink] = WeakSet()

    def register(self, memory: BlockMemory) -> None:
        """Prepare the worker's blocks for this transport. See ``Transport``."""
        kind, _, number = memory.device.partition(":")
        if kind != "cuda":
            raise ConfigError(f"transport cuda_ipc needs KV blocks on a GPU: they are on {kind}")
        exported = cuda_ipc.export(memory.address, int(number))
        self._uuid = cuda_ipc.device_uuid(int(number))
        boot_id, pid_namespace = host_of(self.name)
        offer = _Offer(
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            pid=os.getpid(),
            device=self._uuid,
            handle=base64.b64encode(exported.handle).decode(),
            offset=exported.offset,
            blocks=memory.blocks,
            block_bytes=memory.block_bytes,
        )
        self._offer = json.dumps(asdict(offer)).encode()
        self._memory, self._device = memory, int(number)

    def offer(self) -> bytes:
        """Return the data with which a peer decides whether it can use this transport. It names the
        GPU and the handle of this worker's blocks. See ``Transport``."""
        return self._offer

    def accept(self, peer: Peer, offer: bytes) -> tuple[CudaIpcReceiveLink, bytes]:
        """Start to receive from a writer. To open the writer's blocks takes some milliseconds. See
        ``Transport``."""
        assert self._memory is not None, "not registered"
        theirs = _parse(offer)
        boot_id, pid_namespace = host_of(self.name)
        if theirs.boot_id != boot_id:
            raise HandoffError(f"{peer.incarnation} is on another host")
        if theirs.pid_namespace != pid_namespace:
            raise HandoffError(
                f"{peer.incarnation} is in another container: CUDA shares memory within one "
                "process namespace"
            )
        if theirs.pid == os.getpid():
            raise HandoffError(
                f"{peer.incarnation} is this process itself, which CUDA does not support"
            )
        if theirs.device != self._uuid and not self._between_gpus:
            raise HandoffError(
                f"{peer.incarnation} has its blocks on GPU {theirs.device}, and this worker on "
                f"{self._uuid}: cuda_ipc has not run between two GPUs yet; transport = "
                '"cuda_ipc" forces it'
            )
        try:
            copier = _Copier(self._memory, self._device, theirs)
        except ConfigError as error:
            raise HandoffError(error.message) from error
        link = CudaIpcReceiveLink(copier, self._executor)
        self._links.add(link)
        return link, b""

    def connect(self, peer: Peer, answer: bytes) -> ReadSendLink:
        """Make the writer's end of the link. The writer sends no blocks, because the receiver reads
        them. See ``Transport``."""
        assert self._memory is not None, "not registered"
        link = ReadSendLink(self._memory)
        self._links.add(link)
        return link

    def close(self) -> None:
        """Close all links of this transport; idempotent. The blocks' memory is not released,
        because it belongs to the worker. See ``Transport``."""
        for link in list(self._links):
            link.close()


class _Copier:
    """Implements ``Copier``: opens the writer's blocks for this worker's GPU."""

    def __init__(self, memory: BlockMemory, device: int, theirs: _Offer) -> None:
        """Open the blocks of the writer's offer (``theirs``). Raises HandoffError if GPU ``device``
        cannot read them.

        Raises ConfigError if CUDA provides no context for that GPU.
        """
        # Imported here: it is slow to import, and CPUs do not need it.
        import torch  # noqa: PLC0415

        from kvtransfer.memory import checksum_triton  # noqa: PLC0415

        self.blocks = theirs.blocks
        self.part_end = theirs.block_bytes
        self._memory = memory
        self._device = torch.device("cuda", device)
        self._kernels = checksum_triton
        # A stream of its own: on the default stream a copy would wait for the engine's steps.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._on_stream = torch.cuda.stream
        exported = cuda_ipc.ExportedMemory(base64.b64decode(theirs.handle), theirs.offset)
        self._theirs = cuda_ipc.OpenedMemory(exported, theirs.blocks * theirs.block_bytes, device)

    def copy(self, batch: AnnouncedBatch) -> tuple[int, ...]:
        """Copy a batch into this worker's blocks. Raises WorkerFailed if the copier is closed. See
        ``Copier``."""
        offset, length = batch.target.offset, batch.target.length
        return tuple(
            self._copy_part(source, target, offset, length)
            for source, target in zip(batch.source.blocks, batch.target.blocks, strict=True)
        )

    def _copy_part(self, source: int, target: int, offset: int, length: int) -> int:
        check_part(self._memory, target, offset, length)
        to = self._memory.address + target * self._memory.block_bytes + offset
        with self._theirs.reading() as first:
            words = first + source * self.part_end + offset
            if self._kernels.can_copy_words(to, words, length):
                with self._on_stream(self._stream):
                    return self._kernels.copy_words(to, words, length, self._device)
            stream = self._stream.cuda_stream
            cuda_ipc.copy_bytes(to, words, length, self._device.index, stream)
            self._stream.synchronize()
        return self._memory.checksum(target, offset, length)

    def close(self) -> None:
        """Unmap the writer's blocks, after the last copy that reads them; idempotent."""
        self._theirs.close()


class CudaIpcReceiveLink(ReadReceiveLink[_Copier]):
    """A link that unmaps the writer's blocks after their last copy."""

    def _let_go(self, copier: _Copier) -> None:
        # On a thread of the executor, because CUDA may wait for the GPU.
        try:
            self._executor.submit(copier.close)
        except RuntimeError:
            # The executor has ended, and with it every copy.
            copier.close()


def _parse(offer: bytes) -> _Offer:
    """Parse a writer's offer. Raises HandoffError if it is invalid."""
    theirs = read_offer(_Offer, offer, "cuda_ipc")
    try:
        handle = base64.b64decode(theirs.handle, validate=True)
        size = theirs.blocks * theirs.block_bytes
        sound = len(handle) == _HANDLE_BYTES and 0 < size <= _ADDRESSES - theirs.offset
    except (ValueError, TypeError, RecursionError) as error:
        raise HandoffError("the offer of transport cuda_ipc cannot be read") from error
    if not sound:
        raise HandoffError("the offer of transport cuda_ipc has invalid values")
    return theirs
