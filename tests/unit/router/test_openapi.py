"""The API's description says what its endpoints answer."""

from __future__ import annotations

import httpx

from router.scopes import OPEN
from tests.unit.router.front_fakes import make_front


async def test_refusals_and_keys_are_described() -> None:
    transport = httpx.ASGITransport(make_front().app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        schema = (await client.get("/openapi.json")).json()
        pages = [(await client.get(path)).headers["content-type"] for path in ("/metrics",)]
    assert schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert {"4XX", "5XX"} <= operation["responses"].keys(), path
            assert "422" not in operation["responses"], path
            assert (operation.get("security") == [{"key": []}]) is (path not in OPEN), path
    described = schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert all(page.split(";")[0] in described for page in pages)
