"""Requests of every front that go on elsewhere: their clients see what they would have seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from baton.rpc.grpc_channel import make_server, open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.access.access import Access
from router.core.served_model import ServedModel
from tests.support.http_batches import begin_batch, has_ended, output_of, read_batch
from tests.support.integration.handoff import prompt_of
from tests.support.integration.moves import busiest_decode, moved
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from tests.support.models import make_tiny_model
from tests.support.router.front_fakes import add_grpc, batches_of, create_app

SIZE = 48
MODEL = ServedModel("tiny", 0, 2048, SIZE)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
HELLO = [{"role": "user", "content": "Tell me of the sea."}]
SEEDED = {"model": "tiny", "temperature": 1.0, "seed": 7, "max_tokens": 120, "ignore_eos": True}
PLAIN = SEEDED | {"prompt": prompt_of(30)}
CHAT = SEEDED | {"messages": HELLO}
DIGITS = {"type": "string", "pattern": "^[0-9]{80,90}$"}
NOTE = {
    "type": "object",
    "properties": {"text": DIGITS},
    "required": ["text"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOTE, "strict": True}}
VOLATILE = {"id", "created", "created_at", "completed_at", "item_id", "cached_tokens"}
"""Fields that differ between any two answers; cached tokens are those of the first attempt."""

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", PLAIN | {"temperature": 0.0}),
    "scored": ("/v1/completions", PLAIN | {"logprobs": 2, "echo": True, "n": 2}),
    "stop": ("/v1/completions", PLAIN | {"stop": ["\u00e9\u00e9", "zq"], "max_tokens": 200}),
    "penalties": (
        "/v1/completions",
        PLAIN | {"presence_penalty": 0.7, "frequency_penalty": 0.3, "min_tokens": 100},
    ),
    "chat": ("/v1/chat/completions", CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2}),
    "schema": ("/v1/chat/completions", CHAT | {"response_format": SCHEMA, "ignore_eos": False}),
    "tool": (
        "/v1/chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": "required", "ignore_eos": False},
    ),
    "responses": (
        "/v1/responses",
        {"model": "tiny", "input": "Of the sea", "temperature": 0.0, "max_output_tokens": 120},
    ),
    "messages": (
        "/v1/messages",
        {"model": "tiny", "messages": HELLO, "temperature": 0.0, "max_tokens": 120},
    ),
}


@dataclass(frozen=True, slots=True)
class Fronts:
    """Clients of one router's fronts."""

    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    async def post(self, name: str) -> Any:
        path, body = BODIES[name]
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return steady(response.json())

    async def generate(self) -> Any:
        """Over gRPC, as a stream."""
        request = inference_pb2.GenerateRequest(prompt="Of the sea", n=2)
        sampling = request.sampling
        sampling.temperature, sampling.seed, sampling.max_tokens = 1.0, 9, 120
        sampling.ignore_eos, sampling.logprobs = True, 1
        found: dict[int, tuple[list[int], list[float]]] = {0: ([], []), 1: ([], [])}
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        async for message in stub.Generate(request, timeout=DEADLINE_S):
            tokens, scores = found[message.choice]
            tokens.extend(message.token_ids)
            scores.extend(one.logprob for one in message.logprobs)
        return steady(found)

    async def batch(self) -> Any:
        """A line for each of some prompts; they run in the background."""
        rows = [
            {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": PLAIN | more}
            for n, more in enumerate(({"seed": 1}, {"seed": 2, "n": 2}))
        ]
        content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        batch = await begin_batch(self.http, content, "/v1/completions")
        while not has_ended(batch):
            await asyncio.sleep(0.02)
            batch = await read_batch(self.http, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"]["completed"] == len(rows)
        output = await output_of(self.http, batch)
        return [steady(json.loads(row)["response"]["body"]) for row in output.splitlines()]

    def all(self) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
        asked: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            name: partial(self.post, name) for name in BODIES
        }
        return asked | {"generate": self.generate, "batch": self.batch}


def steady(value: Any) -> Any:
    """A body without what differs between any two answers."""
    if isinstance(value, dict):
        return {key: steady(one) for key, one in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [steady(one) for one in value]
    return value


def about(value: Any) -> Any:
    """The same to compare with, except for the last digits of its numbers."""
    if isinstance(value, dict):
        return {key: about(one) for key, one in value.items()}
    if isinstance(value, list):
        return [about(one) for one in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("chat"), layers=4, context=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@asynccontextmanager
async def fronts_of(cluster: MiniCluster) -> AsyncIterator[Fronts]:
    access = Access(cluster.config, cluster.metrics)
    parts = (cluster.dispatcher, cluster.tokenizer, MODEL, cluster.stats, cluster.config, access)
    batches, server = batches_of(*parts), make_server()
    add_grpc(server, *parts)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await batches.start()
    transport = httpx.ASGITransport(create_app(*parts, more=(batches.api,)))
    try:
        async with (
            httpx.AsyncClient(
                transport=transport, base_url="http://baton", timeout=DEADLINE_S
            ) as http,
            open_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield Fronts(http, channel)
    finally:
        await server.stop(None)
        await batches.stop()
        await batches.close()


def is_in_flight(cluster: MiniCluster) -> bool:
    """Whether each of the requests, those of the batch apart, has some tokens."""
    running = [one for one in cluster.dispatcher._running if not one.request.background]
    wanted = len(BODIES) + 1
    return len(running) == wanted and all(len(one.choices[0].token_ids) > 4 for one in running)


async def test_no_client_of_any_front_can_tell(
    chat_model: Path, redis_url: str, tmp_path: Path
) -> None:
    async with (
        mini_cluster(
            chat_model,
            redis_url,
            prefill=2,
            decode=2,
            kv_pool_mib=8,
            max_sequences=32,
            policy="round_robin",
            tool_parser="hermes",
            data_dir=str(tmp_path / "data"),
        ) as cluster,
        fronts_of(cluster) as fronts,
    ):
        asked = fronts.all()
        # One after the other: other requests must change nothing either.
        expected = {name: await ask() for name, ask in asked.items()}
        tasks = {name: asyncio.create_task(ask()) for name, ask in asked.items()}
        await cluster.until(lambda: is_in_flight(cluster))
        await cluster.workers.pop(busiest_decode(cluster)).stop()
        found = {name: await task for name, task in tasks.items()}
        assert moved(cluster, "decode_failed") >= 4
        await cluster.until_idle()
    for name, answer in expected.items():
        assert found[name] == about(answer), name


async def test_embeddings_are_computed_again_elsewhere(chat_model: Path, redis_url: str) -> None:
    """Their prompts are long, and the prefill worker that has them stops."""
    body = {"model": "tiny", "input": [prompt_of(450, n) for n in range(6)]}
    async with mini_cluster(
        chat_model,
        redis_url,
        prefill=2,
        kv_pool_mib=8,
        chunk_tokens=16,
        max_sequences=8,
        policy="round_robin",
    ) as cluster:
        app = create_app(
            cluster.dispatcher, cluster.tokenizer, MODEL, cluster.stats, cluster.config
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", timeout=DEADLINE_S
        ) as http:
            expected = await http.post("/v1/embeddings", json=body)
            for worker in cluster.workers.values():
                assert worker.context is not None
                worker.context.engine.pool.drop_cache()
            await cluster.until(lambda: len(cluster.dispatcher.workers.up("prefill")) == 2)
            computed = cluster.value("prefill-0", "baton_computed_prompt_tokens_total")
            asking = asyncio.create_task(http.post("/v1/embeddings", json=body))
            await cluster.until(
                lambda: cluster.value("prefill-0", "baton_computed_prompt_tokens_total") > computed
            )
            await cluster.workers.pop("prefill-0").stop()
            found = await asking
        assert found.status_code == expected.status_code == 200
        assert moved(cluster, "prefill_failed") + moved(cluster, "handoff_failed") > 0
        for one, wanted in zip(found.json()["data"], expected.json()["data"], strict=True):
            assert one["embedding"] == pytest.approx(wanted["embedding"], abs=2e-5)
        await cluster.until_idle()
