"""Runs rank 0 of the receiving worker of ``rank_bench``; see ``json_worker``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from baton.request import Geometry
from baton.rpc.worker_plane import WorkerPlane
from baton.v1 import transfer_pb2_grpc
from kvtransfer.layout.layout import KvLayout
from kvtransfer.pairs.pair import Identity
from kvtransfer.tickets import Ticket
from loadtest.common.child_processes import LOOPBACK
from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.handoff.transfer_end import bench_pool, transfer_end
from worker.exchange.block_receiver import BlockReceiver
from worker.services import TransferServicer

RECEIVER = "receiver"
"""Incarnation of the receiving worker, by which the sender addresses it."""
_DEADLINE_S = 60.0


async def _work(asker: Asker, start: Fields) -> None:
    geometry = Geometry(**start["geometry"])
    identity = Identity(RECEIVER, "bench", geometry)
    layout = KvLayout.of(geometry).of_rank(0)
    with contextlib.ExitStack() as held:
        pool = held.enter_context(bench_pool(start["blocks"], layout.block_bytes))
        # No secret is set: the sending end has none either.
        server = WorkerPlane.of(None, "").server()
        address = f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
        end = transfer_end(
            identity, pool.memory, start["transport"], start["ranks"], address=address
        )
        async with end as exchange:
            transfer_pb2_grpc.add_TransferServiceServicer_to_server(
                TransferServicer(exchange), server
            )
            await server.start()
            try:
                asker.say({"address": address})
                tickets = _Tickets(exchange.receiver, Geometry(**start["writer"]))
                await asker.serve(tickets.answer)
            finally:
                await server.stop(grace=1.0)


class _Tickets:
    """Answers the sender's requests: reserves blocks for tickets, and commits the tickets."""

    def __init__(self, receiver: BlockReceiver, writer: Geometry) -> None:
        self._receiver = receiver
        self._writer = writer
        self._count = 0

    async def answer(self, question: Fields) -> Fields:
        """Answer a request. ``{"promise": [blocks, …], "writer": …}`` reserves a number of blocks
        for each ticket, and ``{"commit": [ticket, …], …}`` commits tickets.
        """
        if "promise" in question:
            tickets = [self._promise(each, question["writer"]) for each in question["promise"]]
            for ticket in tickets:
                opened = self._receiver.opened(ticket.ticket_id)
                if opened is not None:
                    await asyncio.wait_for(opened, _DEADLINE_S)
            return {"tickets": [ticket.ticket_id for ticket in tickets]}
        await asyncio.wait_for(self._complete(question["commit"]), _DEADLINE_S)
        moved = 0
        for ticket_id in question["commit"]:
            now = time.monotonic()
            ticket = self._receiver.commit(ticket_id, question["writer"], now)
            moved += ticket.expected_bytes
            self._receiver.pool.release(ticket.missing)
        return {"bytes": moved}

    def _promise(self, missing: int, writer: str) -> Ticket:
        self._count += 1
        return self._receiver.promise(
            (f"bench-{self._count}", 0),
            writer,
            missing=missing,
            pinned=[],
            now=time.monotonic(),
            geometry=self._writer,
        )

    async def _complete(self, ticket_ids: Sequence[str]) -> None:
        """Wait until all blocks of the tickets have arrived. Raises BatonError if a ticket has
        ended.
        """
        for each in ticket_ids:
            whole = self._receiver.whole(each)
            if whole is not None:
                await asyncio.shield(whole)


if __name__ == "__main__":
    asyncio.run(run_helper(_work))
