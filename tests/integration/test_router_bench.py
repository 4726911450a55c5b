"""`loadtest.router.router_bench` in small: every process of it is real."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from loadtest.common.child_processes import cores
from loadtest.router.router_bench import RouterBenchSettings, measure_peer, measure_router

PEER = """
import asyncio, sys
async def pipe(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
async def meet(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", int(sys.argv[1].rpartition(":")[2]))
    await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer))
async def main():
    async with await asyncio.start_server(meet, "127.0.0.1", int(sys.argv[2])) as server:
        await server.serve_forever()
asyncio.run(main())
"""
"""Passes bytes on: the least that a router can be."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(len(cores()) < 2, reason="one core for the router, one for the load"),
]
SMALL = RouterBenchSettings(
    Path(),
    rate=100.0,
    requests=20,
    warm_up_requests=5,
    prompt_words=20,
    answer_tokens=4,
    step_s=0.002,
    streams=4,
    tokens_per_s=(200,),
    rate_s=0.2,
    first_token_id=40,
)


async def test_all_of_it_runs(tiny_model: Path, tmp_path: Path) -> None:
    """That every answer comes whole is checked by the client; here that there are figures."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny_model / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    said: list[str] = []
    settings = dataclasses.replace(SMALL, model=tmp_path)
    figures = await measure_router(settings, said.append)
    assert figures.through.first_ms_p99 >= figures.through.first_ms_p50 > 0
    assert figures.direct.end_ms_p50 > figures.direct.first_ms_p50 > 0
    (rate,) = figures.rates
    assert rate.passed > 0
    assert rate.events_per_token > 0.5, "one event for each token, or nearly"
    assert said


async def test_another_router(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} {{backend}} {{port}}"
    figures = await measure_peer(dataclasses.replace(SMALL, peer=command), lambda _: None)
    assert figures.through.end_ms_p50 > figures.through.first_ms_p50 > 0
    (rate,) = figures.rates
    assert rate.passed > 0
