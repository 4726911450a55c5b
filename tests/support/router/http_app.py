"""Shared by the tests of http app and by other tests."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import strategies as st

from tests.support.router.front_fakes import (
    SCHEMAS,
    Front,
    check_schema,
)

CHAT = "/v1/chat/completions"


PLAIN = "/v1/completions"


HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


PROMPT = {"model": "tiny", "prompt": "Hello"}


async def call(front: Front, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(front.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        return await client.request(method, path, **options)


async def post(front: Front, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return await call(front, "POST", path, json=body, **options)


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    if param is not None:
        assert error["param"] == param
    if SCHEMAS.is_dir():
        check_schema(body, "ErrorResponse")
    return error


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
