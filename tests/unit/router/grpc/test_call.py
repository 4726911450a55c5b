"""Messages of millions of fields are refused before they are parsed."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from baton.v1 import inference_pb2
from router.grpc.call import MAX_FIELDS, check_fields

Request = inference_pb2.GenerateRequest


def of_messages(count: int) -> inference_pb2.GenerateRequest:
    request = Request(model="tiny")
    for _ in range(count):
        request.messages.messages.add(role="user", content="Hi")
    return request


def test_a_long_conversation_passes() -> None:
    check_fields(of_messages(2048).SerializeToString(), Request.DESCRIPTOR)


def test_ids_are_one_field() -> None:
    request = Request()
    request.token_ids.ids.extend([1000] * 1_000_000)
    check_fields(request.SerializeToString(), Request.DESCRIPTOR)


def test_too_many_fields() -> None:
    raw = of_messages(MAX_FIELDS // 3 + 1).SerializeToString()
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        check_fields(raw, Request.DESCRIPTOR)


@pytest.mark.parametrize("raw", [b"\xff" * 20, b"\x0b", b"\x80"])
def test_no_message(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        check_fields(raw, Request.DESCRIPTOR)
