"""Has a worker play the other role: what `baton role` does, asked of the worker itself."""

from __future__ import annotations

import grpc.aio

from baton.config.choices import Role
from baton.errors import WorkerFailed
from baton.rpc.grpc_channel import open_channel
from baton.rpc.grpc_errors import error_from_rpc
from baton.security.tls import TlsFiles
from baton.store.registry import WorkerRecord
from baton.v1 import control_pb2, control_pb2_grpc

ANSWER_S = 10.0
"""How much later than its deadline the answer may come."""


async def change_role(
    record: WorkerRecord, role: Role, deadline_s: float, tls: TlsFiles | None = None
) -> float:
    """Seconds from taking no more work to serving again.

    What is left of its work after ``deadline_s`` seconds is placed elsewhere. ``tls``: what the
    caller shows the worker. Raises BatonError.
    """
    channel = open_channel(record.address, tls, "worker")
    request = control_pb2.ChangeRoleRequest(role=role, deadline_ms=int(deadline_s * 1e3))
    try:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        answer = await stub.ChangeRole(request, timeout=deadline_s + ANSWER_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, record.incarnation) from error
    except OSError as error:
        raise WorkerFailed(f"{record.slot}: {error}") from error
    finally:
        await channel.close()
    return answer.took_ms / 1e3
