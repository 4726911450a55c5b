"""What a live cluster is started with, and how it is asked."""

from __future__ import annotations

import json
import tomllib

import httpx
import pytest

from baton.config.cluster import Config
from baton.errors import Unavailable
from loadtest.research.shifting import scenario
from loadtest.research.shifting.live import LiveCluster, toml_of


@pytest.mark.parametrize("autoscaled", [False, True])
def test_its_configuration_is_written_as_it_is(*, autoscaled: bool) -> None:
    fields = scenario.fields(autoscaled=autoscaled)
    written = tomllib.loads(toml_of(fields))
    assert written == fields
    assert Config(**written).autoscaler.enabled == autoscaled


class FakeRouter:
    """Knows workers, and changes their roles."""

    def __init__(self, prefill: int, decode: int) -> None:
        slots = [f"prefill-{n}" for n in range(prefill)] + [f"decode-{n}" for n in range(decode)]
        self.roles = {slot: slot.partition("-")[0] for slot in slots}
        self.refuses = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.refuses:
            return httpx.Response(503, text="no")
        if request.method == "POST":
            self.roles[request.url.path.split("/")[3]] = json.loads(request.content)["role"]
            return httpx.Response(200, json={})
        workers = [{"slot": slot, "role": role} for slot, role in self.roles.items()]
        return httpx.Response(200, json={"workers": workers})


async def test_roles_are_changed_by_hand_to_a_ratio() -> None:
    router = FakeRouter(3, 3)
    async with httpx.AsyncClient(transport=httpx.MockTransport(router)) as client:
        cluster = LiveCluster("router:1", client)
        for prefill in (1, 5, 3):
            await cluster.take_ratio(prefill)
            assert list(router.roles.values()).count("prefill") == prefill
        with pytest.raises(Unavailable, match="instead of"):
            await cluster.until({"prefill": 6}, 0.0)
        router.refuses = True
        with pytest.raises(Unavailable, match="roles"):
            await cluster.roles()
        with pytest.raises(Unavailable, match="cannot change"):
            await cluster._change("decode-0", "prefill")
