"""Which workers may exchange blocks: fingerprint first, then geometry, then the incarnation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc.aio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import FingerprintMismatch, GeometryMismatch, HandoffError
from baton.request import Geometry
from baton.rpc import convert
from baton.rpc.grpc_channel import make_server, open_channel
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.memory import shared_pool
from kvtransfer.memory.memory import HostMemory
from kvtransfer.pairs.negotiation import Fit
from kvtransfer.pairs.outbound import Outbound
from kvtransfer.pairs.pair import (
    Identity,
    PairLimits,
    check_peer,
    seal_checksums,
    unseal_checksums,
)
from kvtransfer.transports.shm_transport import ShmTransport
from kvtransfer.transports.transport import Peer

GEOMETRY = Geometry(16, 2, 2, 8, "bfloat16")
OWN = Identity("decode-0:1", "model", GEOMETRY)
PEER = Identity("prefill-0:1", "model", GEOMETRY)
DEADLINE_S = 20.0
LIMITS = PairLimits()


def peer_with(**changes: object) -> Identity:
    return replace(PEER, geometry=replace(GEOMETRY, **changes))  # type: ignore[arg-type]


def test_equal_ones() -> None:
    assert check_peer(OWN, PEER, "decode-0:1") is Fit.EQUAL


@pytest.mark.parametrize("change", [{"block_size": 32}, {"kv_dtype": "int8"}])
def test_geometries_that_are_converted(change: dict[str, object]) -> None:
    assert check_peer(OWN, peer_with(**change), "decode-0:1") is Fit.CONVERTIBLE


def test_ranks_that_share_heads_otherwise() -> None:
    assert check_peer(OWN, peer_with(tensor_parallel=2), "decode-0:1") is Fit.SHARED


@pytest.mark.parametrize(
    "change", [{"layers": 3}, {"kv_heads": 4}, {"head_dim": 16}, {"kv_dtype": "int3"}]
)
def test_geometries_that_are_not_name_both_sides(change: dict[str, object]) -> None:
    peer = peer_with(**change)
    with pytest.raises(GeometryMismatch) as refusal:
        check_peer(OWN, peer, "decode-0:1")
    assert f"prefill-0:1 has {peer.geometry}" in refusal.value.message
    assert f"decode-0:1 has {GEOMETRY}" in refusal.value.message


def test_the_fingerprint_comes_first_and_the_life_last() -> None:
    other = replace(peer_with(layers=3), fingerprint="another")
    with pytest.raises(FingerprintMismatch, match=r"serves another.*serves model"):
        check_peer(OWN, other, "decode-0:0")
    with pytest.raises(GeometryMismatch):
        check_peer(OWN, peer_with(layers=3), "decode-0:0")
    with pytest.raises(HandoffError, match="decode-0:0 is gone; this worker is decode-0:1"):
        check_peer(OWN, PEER, "decode-0:0")


class Receiver(transfer_pb2_grpc.TransferServiceServicer):
    """Accepts every pair by shm, and reports the given geometry."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = convert.geometry_to_proto(geometry)

    async def Transfer(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[transfer_pb2.TransferRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[transfer_pb2.TransferResponse]:
        opened = transfer_pb2.PairOpened(
            transport="shm", window_bytes=1 << 20, geometry=self._geometry
        )
        yield transfer_pb2.TransferResponse(opened=opened)
        await asyncio.sleep(DEADLINE_S)

    async def Pull(  # noqa: N802
        self,
        request: transfer_pb2.PullRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> transfer_pb2.PullResponse:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"block_size": 32}, HandoffError, r"chose shm.*block_size=32.*block_size=16"),
        ({"head_dim": 16}, GeometryMismatch, r"head_dim=8.*head_dim=16"),
    ],
)
async def test_a_writer_does_not_believe_a_receiver_that_takes_what_does_not_fit(
    change: dict[str, object], error: type[HandoffError], says: str
) -> None:
    server = make_server()
    receiver = Receiver(replace(GEOMETRY, **change))  # type: ignore[arg-type]
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(receiver, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = open_channel(address)
    pool = shared_pool.allocate(4 * 64)
    try:
        with ThreadPoolExecutor(1) as threads:
            transport = ShmTransport(threads)
            transport.register(HostMemory(np.reshape(pool.data, (4, 64)), pool.file))
            pair = Outbound(PEER, Peer(OWN.incarnation, address), [transport], LIMITS, threads)
            with pytest.raises(error, match=says):
                await pair.open(channel, DEADLINE_S)
            assert isinstance(pair.broken.result(), error)
            await pair.close()
    finally:
        await channel.close()
        await server.stop(grace=None)
        pool.close()


# Checksums


def test_workers_of_all_versions_bind_checksums_alike() -> None:
    """These values are on the wire: they must never change."""
    assert seal_checksums([0x2EE92E3650575404], "ticket-1", [2], 4096) == (0x4B33EDE89E2A2CC2,)
    assert seal_checksums([0], "t", [0], 0) == (0x32207BD84DE66BBD,)


_PLACES = st.tuples(
    st.sampled_from([f"ticket-{number}" for number in range(20)]),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 32),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, (1 << 64) - 1), _PLACES, _PLACES)
def test_a_checksum_of_one_place_does_not_pass_at_another(
    digest: int, place: tuple[str, int, int], other: tuple[str, int, int]
) -> None:
    ticket_id, block, offset = place
    sealed = seal_checksums([digest, digest], ticket_id, [block, block + 1], offset)
    assert unseal_checksums(sealed, ticket_id, [block, block + 1], offset) == (digest, digest)
    ticket_id, block, offset = other
    (found,) = unseal_checksums(sealed[:1], ticket_id, [block], offset)
    assert (found == digest) == (place == other)


def test_the_ticket_the_block_and_the_offset_each_count() -> None:
    sealed = seal_checksums([7], "t", [3], 64)
    for ticket_id, block, offset in (("u", 3, 64), ("t", 2, 64), ("t", 3, 0)):
        assert unseal_checksums(sealed, ticket_id, [block], offset) != (7,)
