from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from baton.errors import InvalidRequest
from baton.rpc.grpc_errors import grpc_boundary, guarded


class GoneContext:
    """Of a call whose connection has gone."""

    async def abort(self, *given: object) -> None:
        raise grpc.aio.InternalError("the status was not sent")


CONTEXT: Any = GoneContext()


async def test_a_call_without_a_reachable_caller_is_cancelled() -> None:
    with pytest.raises(asyncio.CancelledError):
        async with grpc_boundary(CONTEXT):
            raise InvalidRequest("no")


async def test_a_method_without_a_reachable_caller_is_cancelled() -> None:
    @guarded
    async def refuse(servicer: None, request: None, context: Any) -> None:
        raise InvalidRequest("no")

    with pytest.raises(asyncio.CancelledError):
        await refuse(None, None, CONTEXT)
