"""The tree of errors, and its way over a real gRPC connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from baton import errors
from baton.errors import BatonError
from baton.rpc.grpc_channel import make_server, open_channel
from baton.rpc.grpc_errors import error_from_rpc, grpc_boundary, guarded
from baton.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2_grpc

DEADLINE_S = 20.0


def tree(root: type[BatonError] = BatonError) -> list[type[BatonError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in tree(child))]


Context = grpc.aio.ServicerContext[object, object]


class Service(inference_pb2_grpc.InferenceServiceServicer):
    """Raises the given error, by a unary and by a streaming method."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @guarded
    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        if self.error is not None:
            raise self.error
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="m")])

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with grpc_boundary(context):
            yield inference_pb2.GenerateResponse()
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Service, inference_pb2_grpc.InferenceServiceAsyncStub]]:
    service, server = Service(), make_server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield service, inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await server.stop(None)


def test_codes_are_unique_and_statuses_are_errors() -> None:
    codes = [cls.code for cls in tree()]
    assert len(set(codes)) == len(codes)
    for cls in tree():
        assert 400 <= cls.http_status < 600
        assert grpc.StatusCode[cls.grpc_status] is not grpc.StatusCode.OK
        assert cls.error_type
        client_errors = cls.error_type == "invalid_request_error"
        assert client_errors is (cls.http_status in (400, 401, 403, 404, 409, 413, 415, 431))


def test_an_error_keeps_what_it_was_given() -> None:
    error = errors.InvalidRequest("wrong", param="top_p", retry_after=1.5)
    assert (str(error), error.message, error.param, error.retry_after) == (
        "wrong",
        "wrong",
        "top_p",
        1.5,
    )


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
async def test_every_error_crosses_the_wire(cls: type[BatonError]) -> None:
    message = f"{cls.__name__}: naïve – 100 % \n two lines"
    async with serving() as (service, stub):
        for retry_after in (None, 0.0, 1.25):
            service.error = cls(message, retry_after=retry_after)
            with pytest.raises(grpc.aio.AioRpcError) as unary:
                await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError) as streaming:
                async for _ in stub.Generate(inference_pb2.GenerateRequest(), timeout=DEADLINE_S):
                    pass
            for caught in (unary.value, streaming.value):
                assert caught.code() is grpc.StatusCode[cls.grpc_status]
                found = error_from_rpc(caught, "peer")
                assert type(found) is cls
                assert found.message == message
                assert found.retry_after == retry_after


async def test_an_unexpected_error_tells_its_kind_and_no_more() -> None:
    async with serving() as (service, stub):
        service.error = ValueError("a secret prompt")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=DEADLINE_S)
    found = error_from_rpc(caught.value, "peer")
    assert type(found) is BatonError
    assert "ValueError" in found.message
    assert "secret" not in found.message


async def test_a_call_that_goes_well_returns_its_answer() -> None:
    async with serving() as (_, stub):
        response = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=DEADLINE_S)
    assert [model.id for model in response.models] == ["m"]


async def test_a_deadline_of_ones_own() -> None:
    async with serving() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(), timeout=0.05):
                pass
    found = error_from_rpc(caught.value, "decode-0")
    assert type(found) is errors.DeadlineExceeded
    assert found.message.startswith("decode-0: ")


async def test_a_peer_that_is_gone_is_named() -> None:
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.stop(None)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=DEADLINE_S)
    found = error_from_rpc(caught.value, "decode-0")
    assert type(found) is errors.WorkerFailed
    assert found.message.startswith("decode-0: ")


async def test_a_method_that_is_not_served() -> None:
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Prefills(timeout=DEADLINE_S).read()
    await server.stop(None)
    assert type(error_from_rpc(caught.value, "peer")) is errors.WorkerFailed
