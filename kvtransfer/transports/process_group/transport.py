"""The transports ``gloo`` and ``nccl``: batches as messages of torch.distributed.

    new ─register→ ready ─close→ closed

Each pair and direction has a process group of two, which its first batch forms. It is never formed
again: after a failure or with a new incarnation of either worker, there is a new link. ``gloo``
uses host memory and TCP, ``nccl`` copies from GPU to GPU. They differ in the place of staging
buffers and in the group's options and abort (``kvtransfer.transports.process_group.process_pair``).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch

from baton.errors import ConfigError, HandoffError
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.encryption import UNENCRYPTED, new_key, read_key, wire_bytes
from kvtransfer.transports.process_group.link import (
    BUFFERS,
    GroupReceiveLink,
    GroupSendLink,
    LinkPlan,
)
from kvtransfer.transports.process_group.process_pair import (
    RECEIVER,
    WRITER,
    DeviceBuffer,
    GlooPair,
    HostBuffer,
    NcclPair,
    ProcessPair,
    StagingBuffer,
    check_gloo,
    check_nccl,
)
from kvtransfer.transports.process_group.rendezvous import (
    FORM_S,
    Acceptor,
    Connector,
    Opener,
    PairStore,
)
from kvtransfer.transports.transport import Peer

Backend = Literal["gloo", "nccl"]
STAGING_BYTES = 64 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOOPBACK = ("127.", "::1", "localhost")
Message = TypeVar("Message", "_Offer", "_Answer")


@dataclass(frozen=True, slots=True)
class _Offer:
    """How a writer identifies itself in its offer to a receiver."""

    host: str
    machine: str
    device: str
    """UUID of the writer's GPU; empty with gloo."""
    encrypted_bytes: int
    """Maximum bytes of a message, encrypted. Workers of versions that do not encrypt have
    ``message_bytes`` instead, and refuse this field."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A receiver's answer to an offer: the port on which the receiver listens, a token and a key.
    All are for one link."""

    host: str
    port: int
    token: str = field(repr=False)
    encrypted_bytes: int
    key: str = field(repr=False)
    """The key of the link in hexadecimal digits; see ``kvtransfer.transports.encryption``."""


class GroupTransport:
    """Implements ``kvtransfer.transports.transport.Transport`` with process groups."""

    copies_out = True
    reads_in_place = False
    encrypts = True

    def __init__(
        self, backend: Backend, host: str = "127.0.0.1", staging_bytes: int = STAGING_BYTES
    ) -> None:
        """``host`` is the address at which other processes reach this one. It listens on no other
        address.

        ``staging_bytes`` is the maximum size of a link's message buffers. With GPUs, a link uses
        the same amount on the host, too.
        """
        self._backend: Backend = backend
        self._host = host
        self._message_bytes = staging_bytes // BUFFERS
        self._memory: BlockMemory | None = None
        self._links: list[GroupSendLink | GroupReceiveLink] = []
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the transport: ``gloo`` or ``nccl``. See ``Transport``."""
        return self._backend

    @property
    def part_bytes(self) -> int:
        """Largest part, in bytes, that suits this transport. See ``Transport``."""
        return self.batch_bytes

    @property
    def batch_bytes(self) -> int:
        """Largest batch, in bytes, that suits this transport. A batch is one message, unless its
        parts are so small that encrypting them adds more than a 16th. See ``Transport``."""
        return self._message_bytes - self._message_bytes // 16

    @property
    def staging_bytes(self) -> int:
        """Number of bytes of this transport's staging memory. With GPUs, a link uses the same
        amount on the host, too. See ``Transport``."""
        with self._lock:
            return sum(link.staging_bytes for link in self._links)

    def register(self, memory: BlockMemory) -> None:
        """Prepare the worker's blocks for this transport. See ``Transport``."""
        if self._backend == "nccl":
            check_nccl(memory.device)
        else:
            check_gloo()
        if wire_bytes(memory.block_bytes) > self._message_bytes:
            raise ConfigError(
                f"transport {self.name}: staging needs {BUFFERS} times a block of "
                f"{memory.block_bytes} bytes"
            )
        self._memory = memory

    def offer(self) -> bytes:
        """Return the data with which a peer decides whether it can use this transport. See
        ``Transport``."""
        return _encode(_Offer(self._host, _machine(), self._device(), self._message_bytes))

    def accept(self, peer: Peer, offer: bytes) -> tuple[GroupReceiveLink, bytes]:
        """Start to receive from a writer. See ``Transport``."""
        offered = _decode(_Offer, offer, peer)
        self._check_reach(peer, offered)
        memory = self._registered()
        acceptor = Acceptor(self._host)
        answer = _Answer(
            host=self._host,
            port=acceptor.port,
            token=acceptor.token,
            encrypted_bytes=min(self._message_bytes, offered.encrypted_bytes),
            key=new_key().hex(),
        )
        plan = self._plan(peer, acceptor, RECEIVER, answer)
        link = GroupReceiveLink(plan, memory)
        self._keep(link)
        return link, _encode(answer)

    def connect(self, peer: Peer, answer: bytes) -> GroupSendLink:
        """Connect to a receiver that has accepted. See ``Transport``."""
        told = _decode(_Answer, answer, peer)
        if told.encrypted_bytes > self._message_bytes:
            raise HandoffError(f"{peer.incarnation} wants larger messages than were offered")
        connector = Connector(told.host, told.port, told.token)
        plan = self._plan(peer, connector, WRITER, told)
        link = GroupSendLink(plan, self._registered())
        self._keep(link)
        return link

    def close(self) -> None:
        """Close all links of this transport; idempotent. See ``Transport``."""
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.close()
        for link in links:
            link.join()
        self._memory = None

    def _keep(self, link: GroupSendLink | GroupReceiveLink) -> None:
        with self._lock:
            self._links = [kept for kept in self._links if not kept.is_over]
            self._links.append(link)

    def _registered(self) -> BlockMemory:
        if self._memory is None:
            raise HandoffError(f"transport {self.name} is closed")
        return self._memory

    def _device(self) -> str:
        if self._backend == "gloo":
            return ""
        device = torch.device(self._registered().device)
        return str(torch.cuda.get_device_properties(device).uuid)

    def _check_reach(self, peer: Peer, offered: _Offer) -> None:
        loopback = [host for host in (self._host, offered.host) if host.startswith(_LOOPBACK)]
        if loopback and offered.machine != _machine():
            raise HandoffError(
                f"transport {self.name}: {peer.incarnation} is another host than this one, "
                f"and {loopback[0]} is reachable only on its own host"
            )
        if offered.device and offered.device == self._device():
            raise HandoffError(
                f"transport {self.name}: {peer.incarnation} and this worker share one GPU, "
                "which NCCL does not support"
            )
        if offered.encrypted_bytes <= 0:
            raise HandoffError(f"transport {self.name}: {peer.incarnation} offers no staging")

    def _plan(self, peer: Peer, opener: Opener, rank: int, answer: _Answer) -> LinkPlan:
        message_bytes = answer.encrypted_bytes
        form: Callable[[PairStore], ProcessPair]
        new_buffer: Callable[[], StagingBuffer]
        if self._backend == "nccl":
            device = torch.device(self._registered().device)
            form = partial(NcclPair, rank=rank, device=device)
            new_buffer = partial(DeviceBuffer, message_bytes, device)
        else:
            form = partial(GlooPair, rank=rank, host=self._host, timeout_s=FORM_S)
            new_buffer = partial(HostBuffer, message_bytes)
        return LinkPlan(
            self.name,
            peer.incarnation,
            opener,
            form,
            new_buffer,
            message_bytes,
            read_key(answer.key),
        )


def _machine() -> str:
    """Return an ID of this host. It stays the same until the host restarts."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _encode(message: _Offer | _Answer) -> bytes:
    return json.dumps(asdict(message)).encode()


def _decode(kind: type[Message], data: bytes, peer: Peer) -> Message:
    """Parse a message of ``peer`` into ``kind``, without the fields that a newer peer may add.
    Raises HandoffError if it is invalid."""
    try:
        told = json.loads(data)
        if isinstance(told, dict) and "message_bytes" in told:
            raise HandoffError(f"{peer.incarnation} {UNENCRYPTED}")
        found = {name: told[name] for name in kind.__annotations__ if name in told}
        message = kind(**found)
    except (ValueError, TypeError, RecursionError) as error:
        raise HandoffError(f"{peer.incarnation} uses another protocol: {error}") from error
    wanted = {name: {"str": str, "int": int}[kind.__annotations__[name]] for name in found}
    if any(type(value) is not wanted[name] for name, value in found.items()):
        raise HandoffError(f"{peer.incarnation} uses another protocol: fields have other types")
    return message
