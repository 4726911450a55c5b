"""Runs the receiving process of `baton bench transfer`. Run as a module; see ``json_worker``.

The process reserves blocks and receives them by one transport, as a worker does. It also receives
the data of the transport's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from baton.config.tls import TlsConfig
from baton.rpc.grpc_channel import listen
from baton.rpc.worker_plane import WorkerPlane
from baton.v1 import transfer_pb2_grpc
from loadtest.common.child_processes import LOOPBACK
from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.handoff.transfer_end import bench_pool, identity_of, transfer_end
from loadtest.handoff.transfer_limits import grpc_sink, socket_sink
from worker.exchange.exchange import Exchange
from worker.services import TransferServicer

RECEIVER = "receiver"
"""Incarnation of the receiving process, by which the sender addresses it."""


async def _work(asker: Asker, start: Fields) -> None:
    identity = identity_of(RECEIVER, start["block_bytes"])
    with contextlib.ExitStack() as held:
        grpc_address = held.enter_context(grpc_sink())
        socket_address = held.enter_context(socket_sink())
        pool = held.enter_context(bench_pool(start["blocks"], start["block_bytes"]))
        certs = start.get("certs", "")
        async with transfer_end(identity, pool.memory, start["transport"], certs=certs) as exchange:
            # No secret is set: the sending end and the worker of `decode_host` have none either.
            plane = WorkerPlane.of(TlsConfig(folder=certs).of("worker"), "")
            server = plane.server()
            transfer_pb2_grpc.add_TransferServiceServicer_to_server(
                TransferServicer(exchange), server
            )
            port = listen(server, f"{LOOPBACK}:0", plane.tls)
            await server.start()
            try:
                asker.say(
                    {
                        "address": f"{LOOPBACK}:{port}",
                        "grpc": grpc_address,
                        "socket": socket_address,
                    }
                )
                await asker.serve(_Tickets(exchange).answer)
            finally:
                await server.stop(grace=1.0)


class _Tickets:
    """Answers the sender's requests: reserves blocks for a ticket, and commits a ticket's
    transfer."""

    def __init__(self, exchange: Exchange) -> None:
        self._receiver = exchange.receiver
        self._count = 0

    async def answer(self, question: Fields) -> Fields:
        """Answer a request. ``{"promise": blocks, "writer": …}`` reserves a number of blocks, and
        ``{"commit": ticket, "writer": …}`` commits their transfer.
        """
        now = time.monotonic()
        if "promise" in question:
            self._count += 1
            attempt = (f"bench-{self._count}", 0)
            missing, writer = question["promise"], question["writer"]
            ticket = self._receiver.promise(attempt, writer, missing=missing, pinned=[], now=now)
            return {"ticket": ticket.ticket_id}
        ticket = self._receiver.commit(question["commit"], question["writer"], now)
        self._receiver.pool.release(ticket.missing)
        return {}


if __name__ == "__main__":
    asyncio.run(run_helper(_work))
