"""All pages of a cluster in one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.metrics import RouterMetrics, SupervisorMetrics
from baton.telemetry.worker_metrics import WorkerMetrics
from router.admin.cluster_metrics import cluster_page, merge_pages
from router.http.metrics_pages import MetricsPages
from tests.support.router.front_fakes import listening_socket, serve

PAGES = MetricsPages(None)


def worker_page(slot: str, handoffs: int) -> bytes:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.sequences.labels(slot, "decode", "running").set(3)
    metrics.handoffs.labels("grpc", "ok").inc(handoffs)
    metrics.queue_seconds.labels("decode").observe(0.2)
    Gauge("process_things", "Of no interest.", registry=registry).set(1)
    return generate_latest(registry)


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def test_series_of_several_workers_stand_together() -> None:
    page = merge_pages([worker_page("d-0", 2).decode(), worker_page("d-1", 5).decode()]).decode()
    found = samples(page)
    for slot in ("d-0", "d-1"):
        key = (("role", "decode"), ("state", "running"), ("worker", slot))
        assert found["baton_sequences", key] == 3
    assert found["baton_handoffs_total", (("outcome", "ok"), ("transport", "grpc"))] == 7
    assert found["baton_queue_seconds_count", (("role", "decode"),)] == 2
    assert found["baton_queue_seconds_bucket", (("le", "+Inf"), ("role", "decode"))] == 2
    assert "process_" not in page
    assert "_created" not in page
    for name in ("baton_sequences", "baton_handoffs_total", "baton_queue_seconds"):
        assert page.count(f"# TYPE {name} ") == 1
        assert page.count(f"# HELP {name} ") == 1


def asgi_page(body: bytes, status: int = 200) -> Callable[..., Awaitable[None]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


async def test_workers_that_do_not_answer_are_left_out() -> None:
    own = RouterMetrics(CollectorRegistry())
    own.active_requests.set(4)
    with listening_socket() as closed:
        nowhere = "{}:{}".format(*closed.getsockname())
        async with (
            serve(asgi_page(worker_page("d-0", 1))) as good,
            serve(asgi_page(b"oh no", 500)) as bad,
            serve(asgi_page(b"{ not a page")) as odd,
        ):
            addresses = [good, bad, odd, nowhere]
            page = (await cluster_page(own.registry, addresses, None, PAGES)).decode()
    assert page.startswith("# 1 of 4 workers answered\n")
    for address in (bad, odd, nowhere):
        assert f"# {address} did not answer: " in page
    found = samples(page)
    assert found["baton_active_requests", ()] == 4
    key = (("role", "decode"), ("state", "running"), ("worker", "d-0"))
    assert found["baton_sequences", key] == 3


async def test_the_supervisor_is_on_the_page_and_no_worker() -> None:
    own = RouterMetrics(CollectorRegistry())
    slots = SupervisorMetrics(CollectorRegistry())
    slots.slots.labels("d-0", "decode", "running").set(1)
    async with serve(asgi_page(generate_latest(slots.registry))) as supervisor:
        page = (await cluster_page(own.registry, [], supervisor, PAGES)).decode()
    assert page.startswith("# 0 of 0 workers answered\n")
    key = (("pool", "decode"), ("state", "running"), ("worker", "d-0"))
    assert samples(page)["baton_worker_slot_state", key] == 1
    page = (await cluster_page(own.registry, [], supervisor, PAGES)).decode()
    assert f"# {supervisor} did not answer: " in page


@pytest.mark.parametrize("pages", [[], [""]])
def test_nothing_to_merge(pages: list[str]) -> None:
    assert merge_pages(pages) == b""
