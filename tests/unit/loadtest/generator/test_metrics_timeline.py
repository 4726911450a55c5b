"""Reading a server's metrics while it is driven."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.generator import metrics_timeline
from loadtest.generator.metrics_timeline import MetricsReader, read_page
from loadtest.generator.targets.target import RunClock
from tests.support.loadtest.fake_server import Asked, fake_server

PAGE = """# HELP baton_sequences Sequences by state.
# TYPE baton_sequences gauge
baton_sequences{worker="p-0",role="prefill",state="running"} 2.0
baton_sequences{worker="p-1",role="prefill",state="running"} 3.0
baton_sequences{worker="d-0",role="decode",state="waiting"} 1.0
# TYPE baton_sequences_else gauge
baton_sequences_else 9.0
# TYPE baton_waiting_requests gauge
baton_waiting_requests{tenant="a"} 4.0
baton_waiting_requests{tenant="b"} 5.0
"""
READ = {
    "baton_sequences prefill running": 5.0,
    "baton_sequences decode waiting": 1.0,
    "baton_waiting_requests": 9.0,
}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_timeline, "EVERY_S", 0.01)


def test_a_page() -> None:
    assert read_page(PAGE) == READ
    assert read_page(
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{e="0"} 7\n'
    ) == {"vllm:num_requests_running": 7.0}


async def read(
    paths: dict[str, str], pages: int, path: str = ""
) -> tuple[MetricsReader, list[str]]:
    """Until this number of pages was requested."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        page = paths.get(asked.line.split()[1])
        status, text = ("404 no", b"") if page is None else ("200 OK", page.encode())
        writer.write(
            b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(text), text)
        )

    async with fake_server(answer) as server:
        reader = MetricsReader(server.url + path, RunClock())
        reading = asyncio.create_task(reader.run())
        async with asyncio.timeout(20):
            while len(server.asked) < pages and not reading.done():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return reader, [asked.line.split()[1] for asked in server.asked]


async def test_of_a_whole_cluster() -> None:
    reader, asked = await read({"/metrics/cluster": PAGE}, 3)
    assert set(asked) == {"/metrics/cluster"}
    found = reader.timeline()
    assert {name: values[0] for name, values in found.series.items()} == READ
    assert len(found.times_s) >= 3
    assert all(len(values) == len(found.times_s) for values in found.series.values())
    assert sorted(found.times_s) == list(found.times_s)


async def test_of_any_server() -> None:
    reader, asked = await read({"/metrics": PAGE}, 4)
    assert asked[:2] == ["/metrics/cluster", "/metrics"]
    assert set(asked[1:]) == {"/metrics"}
    assert reader.timeline().series.keys() == READ.keys()


async def test_of_a_page_that_is_named() -> None:
    _, asked = await read({"/else/metrics": PAGE}, 2, "/else/metrics")
    assert set(asked) == {"/else/metrics"}


async def test_of_a_server_without_any() -> None:
    reader, asked = await read({}, 5)
    assert asked == ["/metrics/cluster", "/metrics"]
    assert reader.timeline().times_s == ()
